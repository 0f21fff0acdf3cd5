# SPDX-License-Identifier: Apache-2.0
"""Two engines of one host, each a process with a store and no vLLM, that read each other.

It is long since all stories of two engines share what starts them.
"""

from __future__ import annotations

import errno
import mmap
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from attnstore_vllm.index.chunk import Chunk, State
from attnstore_vllm.io.checksum import copy_checksums
from attnstore_vllm.store import store
from attnstore_vllm.store.lookup import Lookup
from attnstore_vllm.tiers.peers import owner, peers_io
from attnstore_vllm.tiers.peers.generation import OLD_FILE_NAME, SIZE_BYTES, Generation, file_name
from attnstore_vllm.tiers.peers.owner import PIECE
from attnstore_vllm.tiers.peers.peers_tier import PeersTier
from attnstore_vllm.tiers.peers.wire import (
    SOCKET_NAME,
    MessageKind,
    Wire,
    WireError,
    connect,
    listen,
)
from attnstore_vllm.tiers.remote_io import awaits_remote
from attnstore_vllm.types import DRAM, PEERS
from tests.helpers import (
    NAMESPACE,
    conversation,
    lookup_of,
    mapped_bytes,
    names_of,
    sequence_of,
)
from tests.peer_engine import PeerEngine, PeerProcess

LONG = 4 * 16
WITH_TAIL = 3 * 16 + 12


@pytest.fixture(scope="module")
def processes() -> Iterator[list[PeerProcess]]:
    """Those that no test uses now: a start takes two seconds."""
    idle: list[PeerProcess] = []
    yield idle
    for process in idle:
        process.close()


@pytest.fixture
def sibling(tmp_path: Path, processes: list[PeerProcess]) -> Iterator[PeerProcess]:
    process = processes.pop() if processes else PeerProcess()
    process.open(tmp_path, 1)
    yield process
    if process.process.poll() is None:
        process.process.send_signal(signal.SIGCONT)
        process.call("shut")
        processes.append(process)


@pytest.fixture
def pair(tmp_path: Path, sibling: PeerProcess) -> Iterator[tuple[PeerEngine, PeerProcess]]:
    """This process's engine, and a sibling."""
    here = PeerEngine(tmp_path, 0)
    sibling.call("wait_ready")
    here.wait_ready()
    yield here, sibling
    here.wait(here.is_idle)
    here.store.check_integrity()
    here.close()


Pair = tuple[PeerEngine, PeerProcess]


def test_a_conversation_goes_on_at_another_engine(pair: Pair) -> None:
    here, sibling = pair
    sibling.call("put", 1, WITH_TAIL)
    assert here.tokens(1, WITH_TAIL + 20) == WITH_TAIL  # with its tail
    assert here.tokens(1, WITH_TAIL + 20) == 0  # it is here by now
    assert sibling.call("tokens", 1, WITH_TAIL) == 0
    here.wait(lambda: bool(sibling.call("is_idle")))


def test_what_is_found_comes_before_the_next_look(pair: Pair) -> None:
    here, sibling = pair
    sibling.call("put", 1, WITH_TAIL)
    lookup = wanted(here, 1, WITH_TAIL)
    index = here.store.residency.index
    here.wait(lambda: len(chunks := list(index.all_live())) == 4 and all(map(is_here, chunks)))
    held = here.store.hold_ready(
        here.store.find(lookup, 0, WITH_TAIL, request_id="request"), lookup.keys, WITH_TAIL
    )
    assert here.store.tiers(held, 0) == {PEERS: WITH_TAIL}
    here.store.release(piece.chunk for piece in held)
    here.store.leave_queue(["request"])


def test_what_takes_the_place_of_a_tail_is_wanted_on(pair: Pair) -> None:
    """Our tail goes when the sibling's longer chunk has come; the request wants what follows."""
    here, sibling = pair
    here.put(1, WITH_TAIL)
    here.wait(here.is_idle)
    sibling.call("put", 1, 7 * 16)
    lookup = asking(1, 7 * 16 + 1)
    with here.store.queue() as queue:
        queue.append("request")
    here.store.arrive("request", lookup, 7 * 16 + 1)
    index = here.store.residency.index
    here.wait(lambda: len(chunks := list(index.all_live())) == 7 and all(map(is_here, chunks)))
    held = here.store.hold_ready(
        here.store.find(lookup, 0, 7 * 16, request_id="request"), lookup.keys, 7 * 16
    )
    assert here.store.tiers(held, 0) == {DRAM: 3 * 16, PEERS: 4 * 16}
    here.store.release(piece.chunk for piece in held)
    here.store.leave_queue(["request"])


def wanted(here: PeerEngine, number: int, num_tokens: int) -> Lookup:
    """A request of the queue asks for the conversation."""
    lookup = asking(number, num_tokens + 1)
    with here.store.queue() as queue:
        queue.append("request")
    assert here.store.arrive("request", lookup, num_tokens + 1)[0] == []
    return lookup


def test_what_is_found_is_asked_for_at_once(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """And not in the thread's next turn, behind whoever else has woken by then."""
    here, sibling = pair
    sibling.call("put", 1, LONG)
    sent: list[int] = []
    sent_by_then: list[int] = []
    send, start = Wire.send, here.io.context.reader.start

    def noted(wire: Wire, kind: MessageKind, *rest: Any) -> None:
        sent.append(kind)
        send(wire, kind, *rest)

    def started() -> None:
        start()
        if threading.current_thread().name == "attnstore-peers":
            sent_by_then.extend(sent)

    monkeypatch.setattr(Wire, "send", noted)
    monkeypatch.setattr(here.io.context.reader, "start", started)
    wanted(here, 1, LONG)
    here.wait(lambda: MessageKind.RELEASE in sent)
    assert sent_by_then == [MessageKind.FIND, MessageKind.GET]
    here.store.leave_queue(["request"])


def test_who_waits_is_told_when_something_has_come(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not when it was found: a look at that would take the processor from the copy."""
    here, sibling = pair
    sibling.call("put", 1, LONG)
    progress = here.io.context.progress
    notify_all, index, told = progress.notify_all, here.store.residency.index, list[bool]()

    def noted() -> None:
        told.append(any(map(is_here, index.all_live())))
        notify_all()

    monkeypatch.setattr(progress, "notify_all", noted)
    lookup = wanted(here, 1, LONG)
    here.wait(lambda: len(told) >= LONG // 16)
    assert all(told)
    assert not awaits_remote(lookup)
    here.store.leave_queue(["request"])


def test_who_waits_for_nothing_that_comes_is_told_at_once(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, _ = pair
    told = threading.Event()
    monkeypatch.setattr(here.io.context.progress, "notify_all", told.set)
    lookup = wanted(here, 1, LONG)
    assert told.wait(10.0)
    assert not awaits_remote(lookup)
    here.store.leave_queue(["request"])


def test_pages_of_the_own_pool_are_mapped_ahead(pair: Pair) -> None:
    """Copies from siblings are written there, and other threads may not have mapped them."""
    here, _ = pair
    size = here.pool.num_slots * here.pool.slot_bytes
    here.wait(lambda: mapped_bytes(here.pool.address) >= size)


def is_here(chunk: Chunk) -> bool:
    return chunk.dram.state is State.READY


def test_one_damaged_chunk_is_lost_alone(pair: Pair) -> None:
    here, sibling = pair
    sibling.call("put", 1, LONG)
    assert here.tokens(1, LONG) == LONG  # so the sibling has taken checksums
    here.store.drop(list(here.store.residency.index.all_live()))
    sibling.call("damage", 1, LONG, 3)
    assert here.read(1, LONG)["tiers"] == {"peers": LONG - 16}
    assert here.store.residency.counts["corrupt"] == 1


def test_bytes_that_were_computed_again_have_a_checksum_of_their_own(pair: Pair) -> None:
    """In another batch KV may differ in a bit. What NVMe has stays as it was."""
    here, sibling = pair
    sibling.call("put", 1, LONG)
    sibling.call("push_out", 500, 20)
    sibling.call("put_again", 1, LONG)
    lookup = asking(1, LONG)
    assert here.store.find(lookup, 0, LONG) == []
    here.wait(lambda: not awaits_remote(lookup))
    pieces = here.store.find(lookup, 0, LONG)
    here.wait(lambda: not any(piece.chunk.dram.state is State.READING for piece in pieces))
    held = here.store.hold_ready(pieces, lookup.keys, LONG)
    assert sum(piece.stop - piece.start for piece in held) == LONG
    here.store.release(piece.chunk for piece in held)
    assert here.store.residency.counts["corrupt"] == 0


def test_a_chunk_that_is_told_twice_ends_the_connection(pair: Pair) -> None:
    here, sibling = pair
    sibling.call("put", 1, LONG)
    sibling.call("tell_twice")
    assert here.read(1, LONG)["tiers"] == {}
    here.wait(here.is_idle)
    assert here.io.health.reads.in_use
    here.wait_ready()  # it is connected to again


def test_reads_that_end_together_share_their_time(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the first of them has taken all of it, and the others none."""
    here, sibling = pair
    sibling.call("put", 1, LONG)
    slow_s = 0.2
    batches: list[int] = []
    seconds: list[float] = []

    def slowly(copies: Any) -> Any:
        batches.append(len(copies))
        time.sleep(slow_s * bool(copies))
        return copy_checksums(copies)

    monkeypatch.setattr(peers_io, "copy_checksums", slowly)
    monkeypatch.setattr(here.io.cost, "observe", seconds.append)
    assert here.tokens(1, LONG) == LONG
    assert sum(batches) == len(seconds) == LONG // 16
    assert max(batches) > 1, "some end together"
    for count in filter(None, batches):
        batch, seconds = seconds[:count], seconds[count:]
        assert max(batch) - min(batch) < 0.5 * slow_s
        assert 0.9 * slow_s < sum(batch)


def asking(number: int, num_tokens: int) -> Lookup:
    return lookup_of(conversation(number, num_tokens), may_ask=True)


def test_a_copy_is_written_once_it_is_used_again(pair: Pair) -> None:
    here, sibling = pair
    sibling.call("put", 1, LONG)
    assert here.tokens(1, LONG) == LONG
    here.wait(here.store.is_idle)
    # All of this was one request's. Another one's use is another run.
    assert here.num_written() in (0, LONG // 16)
    here.read(1, LONG)
    here.wait(lambda: here.num_written() == LONG // 16)


def test_what_is_on_a_siblings_nvme_comes_up_there(pair: Pair) -> None:
    here, sibling = pair
    sibling.call("put", 1, LONG)
    sibling.call("push_out", 500, 20)
    assert here.tokens(1, LONG) == LONG


def test_tenants_stay_apart(pair: Pair) -> None:
    here, sibling = pair
    sibling.call("put", 1, LONG, "a tenant")
    assert here.tokens(1, LONG) == 0
    assert here.tokens(1, LONG, "another") == 0
    assert here.tokens(1, LONG, "a tenant") == LONG


def test_a_killed_sibling_costs_a_miss(pair: Pair) -> None:
    here, sibling = pair
    sibling.call("put", 1, LONG)
    sibling.call("put", 2, LONG)
    assert here.tokens(1, LONG) == LONG
    sibling.kill()
    assert here.tokens(2, LONG) == 0
    assert here.tokens(1, LONG) == 0
    assert here.read(1, LONG)["tiers"] == {"dram": LONG}  # the copy is ours
    here.wait(lambda: not here.io.siblings[0].is_ready)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_killed_while_it_serves(pair: Pair, how: signal.Signals) -> None:
    here, sibling = pair
    for number in range(3):
        sibling.call("put", number, LONG)
    sibling.send("read", 99, LONG)  # it is busy with us, too
    os.kill(sibling.process.pid, how)
    for number in range(3):
        assert here.tokens(number, LONG) in (0, 16, 32, 48, LONG)
    sibling.kill()


def test_a_stopped_sibling_costs_its_deadline_and_then_nothing(pair: Pair) -> None:
    here, sibling = pair
    sibling.call("put", 1, LONG)
    here.io.answer_deadline_s = peers_io.ANSWER_DEADLINE_S
    sibling.process.send_signal(signal.SIGSTOP)

    def is_out() -> bool:
        found = here.read(10, LONG)
        assert found["tiers"] == {}
        assert found["asked_s"] < 10 * peers_io.ANSWER_DEADLINE_S  # this machine is busy, too
        return not here.io.siblings[0].breaker.in_use

    here.wait(is_out)
    assert here.io.health.reads.in_use
    sibling.process.send_signal(signal.SIGCONT)

    def works_again() -> bool:
        here.read(20, LONG)
        return here.io.siblings[0].breaker.in_use

    here.wait(works_again)
    here.io.answer_deadline_s = 1.0
    assert here.tokens(1, LONG) == LONG


def test_stopped_between_its_answer_and_the_load(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, sibling = pair
    sibling.call("put", 1, LONG)
    found = here.io.on_found

    def then_stop(*arguments: object) -> None:
        sibling.process.send_signal(signal.SIGSTOP)
        os.waitpid(sibling.process.pid, os.WUNTRACED)  # it has stopped
        found(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(here.io, "on_found", then_stop)
    assert here.read(1, LONG)["tiers"] == {}
    assert here.store.residency.counts["gone"] > 0


def test_damaged_bytes_are_a_miss(pair: Pair) -> None:
    here, sibling = pair
    sibling.call("put", 1, LONG)
    assert here.tokens(1, LONG) == LONG  # so the sibling has taken checksums
    here.store.drop(list(here.store.residency.index.all_live()))
    sibling.call("damage", 1, LONG)
    assert here.read(1, LONG)["tiers"] == {}
    assert here.store.residency.counts["corrupt"] > 0


def test_after_a_reset_nothing_of_before_comes(pair: Pair) -> None:
    here, sibling = pair
    sibling.call("put", 1, LONG)
    assert here.reset()
    assert here.tokens(1, LONG) == 0  # the sibling has not been reset yet
    here.put(2, LONG)
    assert sibling.call("tokens", 2, LONG) == 0
    assert sibling.call("reset")
    assert here.tokens(1, LONG) == 0  # it has gone there, too
    sibling.call("put", 3, LONG)
    assert here.tokens(3, LONG) == LONG  # both are of one generation again


def test_a_reset_waits_for_its_files_without_the_lock_and_shares_nothing_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = PeerEngine(tmp_path, 0)
    peers, progress = here.io, here.io.context.progress
    advance, seen = Generation.advance, []

    def is_free() -> bool:
        found = progress.acquire(timeout=1.0)
        if found:
            progress.release()
        return found

    def watched(self: Generation) -> None:
        with ThreadPoolExecutor(1) as other:  # the lock lets its own thread in again
            seen.append((other.submit(is_free).result(), peers.generation()))
        advance(self)

    monkeypatch.setattr(Generation, "advance", watched)
    before = peers.generation()
    with progress:
        peers.reset()
        peers.reset()
        assert peers.generation() is None, "it is not on the disk yet"
    assert here.reset()
    here.wait(lambda: peers.generation() is not None)
    assert seen == [(True, None)] * 3, "one generation for each reset"
    assert peers.generation() != before
    here.close()


def test_a_disk_that_hangs_holds_no_reset_beyond_its_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = PeerEngine(tmp_path, 0)
    goes_on = threading.Event()
    monkeypatch.setattr(Generation, "advance", lambda _: goes_on.wait(10.0))
    monkeypatch.setattr(store, "RESET_DEADLINE_S", 0.2)
    assert not here.reset(), "it says that KV of before may come back"
    assert not goes_on.is_set() and here.io.generation() is None
    goes_on.set()
    here.wait(lambda: here.io.generation() is not None)
    here.close()


def test_new_weights_end_it(pair: Pair) -> None:
    here, sibling = pair
    sibling.call("put", 1, LONG)
    assert sibling.call("leave")
    assert here.tokens(1, LONG) == 0
    here.put(2, LONG)
    assert sibling.call("tokens", 2, LONG) == 0


def test_a_generation_outlives_its_process(tmp_path: Path) -> None:
    dirs = [tmp_path / "dp0", tmp_path / "dp1"]
    for directory in dirs:
        directory.mkdir()
    first, second = (Generation(directory, tmp_path, NAMESPACE) for directory in dirs)
    assert first.value == second.value
    first.advance()
    assert first.value != second.value
    assert Generation(dirs[1], tmp_path, NAMESPACE).value == second.value, (
        "what it has on NVMe is of before"
    )
    second.advance()
    assert first.value == second.value == Generation(dirs[0], tmp_path, NAMESPACE).value
    second.advance()
    first.advance()
    assert first.value == second.value


def engines_of(group: Path, namespace: bytes) -> list[Generation]:
    """Of dp0 and dp1, as they start."""
    dirs = [group / "dp0", group / "dp1"]
    for directory in dirs:
        directory.mkdir(exist_ok=True)
    return [Generation(directory, group, namespace) for directory in dirs]


def test_a_reset_of_another_model_makes_none_equal(tmp_path: Path) -> None:
    """What dp1 has of the first model was never reset."""
    first, second = engines_of(tmp_path, NAMESPACE)
    first.advance()
    for engine in engines_of(tmp_path, bytes(32)):
        engine.advance()
    first, second = engines_of(tmp_path, NAMESPACE)
    assert first.value != second.value
    second.advance()
    assert first.value == second.value


def test_the_first_namespace_takes_the_generations_of_all(tmp_path: Path) -> None:
    engines_of(tmp_path, NAMESPACE)
    values = [bytes(SIZE_BYTES), bytes([1] * SIZE_BYTES)]
    for number, value in enumerate(values):
        directory = tmp_path / f"dp{number}"
        (directory / file_name(NAMESPACE)).unlink()
        (directory / OLD_FILE_NAME).write_bytes(value)
    assert [engine.value for engine in engines_of(tmp_path, NAMESPACE)] == values
    assert [engine.value for engine in engines_of(tmp_path, NAMESPACE)] == values


def test_a_generation_that_is_not_on_the_disk_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its next start would take the group's, whether or not others were reset meanwhile."""
    first, second = engines_of(tmp_path, NAMESPACE)
    monkeypatch.setattr("attnstore_vllm.tiers.peers.generation.replace_own", full_disk)
    first.advance()
    second.advance()
    assert first.value != second.value
    (tmp_path / "dp1" / file_name(NAMESPACE)).unlink(missing_ok=True)
    starts = [engines_of(tmp_path, NAMESPACE)[1].value for _ in range(2)]
    assert starts[0] != starts[1]


def full_disk(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_the_generation_of_a_path_where_no_engine_has_begun(tmp_path: Path) -> None:
    """The second disk's engines may start first."""
    (tmp_path / "b" / "dp1").mkdir(parents=True)
    second = Generation(tmp_path / "b" / "dp1", tmp_path / "a", NAMESPACE)
    (tmp_path / "a" / "dp0").mkdir()
    first = Generation(tmp_path / "a" / "dp0", tmp_path / "a", NAMESPACE)
    assert first.value == second.value
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o700
    second.advance()
    first.advance()
    assert first.value == second.value
    assert not (tmp_path / "b" / file_name(NAMESPACE)).exists()


def test_engines_on_two_paths_read_each_other(tmp_path: Path, sibling: PeerProcess) -> None:
    """And know each other's resets, by the one file of the group."""
    paths = tmp_path / "a", tmp_path / "b"
    sibling.open(paths[0], 1, paths[1])
    here = PeerEngine(paths[0], 0, more=paths[1:])
    assert here.directory == paths[0] / "dp0"
    assert (paths[1] / "dp1" / SOCKET_NAME).is_socket()
    here.wait_ready()
    sibling.call("wait_ready")
    sibling.call("put", 1, WITH_TAIL)
    assert here.tokens(1, WITH_TAIL) == WITH_TAIL
    here.put(2, LONG)
    assert sibling.call("tokens", 2, LONG) == LONG
    assert [(path / file_name(NAMESPACE)).exists() for path in paths] == [True, False]
    assert here.reset()
    sibling.call("put", 3, LONG)
    assert here.tokens(3, LONG) == 0  # the sibling has not been reset yet
    assert sibling.call("reset")
    sibling.call("put", 4, LONG)
    assert here.tokens(4, LONG) == LONG
    here.wait(here.is_idle)
    here.close()


def test_the_pool_can_be_mapped_for_reading_alone(tmp_path: Path) -> None:
    here = PeerEngine(tmp_path, 0)
    fds = here.pool.read_only_fds()
    try:
        assert len(mmap.mmap(fds[0], 0, mmap.MAP_SHARED, mmap.PROT_READ)) > 0
        with pytest.raises(PermissionError):
            mmap.mmap(fds[0], 0, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
    finally:
        for fd in fds:
            os.close(fd)
        here.close()


def test_the_socket_is_the_owners(tmp_path: Path) -> None:
    listening = listen(tmp_path)
    assert (tmp_path / SOCKET_NAME).stat().st_mode & 0o777 == 0o600
    listening.close()
    listen(tmp_path).close()  # what a killed run left is no hindrance


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
def test_another_user_is_refused(tmp_path: Path) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX)
    Wire(ours)
    theirs.close()
    tmp_path.chmod(0o755)
    listening = listen(tmp_path)
    (tmp_path / SOCKET_NAME).chmod(0o666)  # as if modes did not keep them out
    directory = os.open(tmp_path, os.O_PATH)
    child = os.fork()
    if child == 0:
        os.setuid(65534)
        stranger = socket.socket(socket.AF_UNIX)
        try:
            stranger.connect(f"/proc/self/fd/{directory}/{SOCKET_NAME}")
            time.sleep(2)
        finally:
            os._exit(0)
    try:
        listening.setblocking(True)
        connection, _ = listening.accept()
        with pytest.raises(WireError, match="65534"):
            Wire(connection)
    finally:
        os.close(directory)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        listening.close()


def test_another_models_engine_is_no_sibling(tmp_path: Path) -> None:
    here = PeerEngine(tmp_path, 0)
    wire = connect(tmp_path / "dp0")
    assert wire is not None
    wire.send(1, 0, [b"another model"])  # type: ignore[arg-type]
    wire.socket.setblocking(True)
    wire.socket.settimeout(5)
    assert wire.socket.recv(1) == b""
    wire.close()
    here.close()


def test_books_are_checked(pair: Pair) -> None:
    here, sibling = pair
    sibling.call("put", 1, LONG)
    assert here.tokens(1, LONG) == LONG
    assert isinstance(here.io.tier, PeersTier)
    here.wait(here.is_idle)  # its own NVMe is written meanwhile
    here.store.check_integrity()


class Stranger:
    """An asker that does as the test says: a bare connection to an engine's owner."""

    def __init__(self, engine: PeerEngine, directory: Path) -> None:
        self.engine = engine
        wire = connect(directory)
        assert wire is not None
        self.wire = wire

    def hold(self, number: int, num_tokens: int) -> list[int]:
        """GET the whole chunks of a conversation. Slots, or what is said in place of them."""
        keys = [name.key for name in names_of(sequence_of(conversation(number, num_tokens)))]
        generation = Generation(
            self.engine.directory, self.engine.directory.parent, NAMESPACE
        ).value
        self.wire.send(MessageKind.GET, 1, [generation, b"".join(keys)])
        slots: dict[int, int] = {}

        def all_came() -> bool:
            for message in self.wire.receive():
                slots.update(map(PIECE.unpack, message.fields[::2]))
            return len(slots) == len(keys)

        self.engine.wait(all_came)
        return [slots[place] for place in range(len(keys))]


def test_holds_end_with_their_connection(tmp_path: Path) -> None:
    here = PeerEngine(tmp_path, 0)
    here.put(1, LONG)
    stranger = Stranger(here, tmp_path / "dp0")
    assert min(stranger.hold(1, LONG)) >= 0
    assert here.store.residency.num_held() == LONG // 16
    stranger.wire.close()
    here.wait(lambda: here.store.residency.num_held() == 0, owner.HOLD_MAX_S / 2)
    here.close()


def test_holds_of_a_silent_asker_end(tmp_path: Path) -> None:
    here = PeerEngine(tmp_path, 0)
    here.put(1, LONG)
    stranger = Stranger(here, tmp_path / "dp0")
    assert min(stranger.hold(1, LONG)) >= 0
    here.wait(lambda: here.store.residency.num_held() == 0)
    here.close()


def test_holds_leave_an_engine_most_of_its_slots(tmp_path: Path) -> None:
    here = PeerEngine(tmp_path, 0, slots=16)
    here.put(1, 10 * 16)
    stranger = Stranger(here, tmp_path / "dp0")
    slots = stranger.hold(1, 10 * 16)
    assert sum(slot >= 0 for slot in slots) == 16 // owner.HELD_PART
    assert slots.count(owner.NOT_HERE) == 10 - 16 // owner.HELD_PART
    stranger.wire.close()
    here.close()
