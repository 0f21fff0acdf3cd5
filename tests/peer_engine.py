# SPDX-License-Identifier: Apache-2.0
"""An engine's store with siblings, without vLLM: in this process, or as one of its own.

python -m tests.peer_engine    one JSON list a line: a method, arguments
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from attnstore_lab.testing.devices import MemoryDevice
from attnstore_lab.testing.small_store import open_store
from attnstore_vllm.config.settings import StoreConfig
from attnstore_vllm.index.chunk import State
from attnstore_vllm.index.prefix import Piece
from attnstore_vllm.policy.visits import Terms
from attnstore_vllm.store.lookup import Lookup
from attnstore_vllm.tiers.peers.make_peers import peers_of
from attnstore_vllm.tiers.peers.peers_io import PeersIo
from attnstore_vllm.tiers.peers.wire import MessageKind, Wire
from attnstore_vllm.tiers.remote_io import awaits_remote
from attnstore_vllm.types import PEERS
from tests.helpers import (
    CHUNK_TOKENS,
    GRAIN,
    NAMESPACE,
    conversation,
    format_device,
    lookup_of,
    names_of,
    new_slab,
    num_dirty,
    open_pool,
    payload_of,
    sequence_of,
    slab_bytes,
)

DEADLINE_S = 10.0
RECORDS, SLOTS = 64, 16
_SEND = Wire.send


class PeerEngine:
    """One engine of a group. Conversations are told by their numbers.

    Args:
        group: the first path of its settings.
        more: the others.
        options: of open_store().
    """

    def __init__(
        self,
        group: Path,
        rank: int,
        ranks: int = 2,
        slots: int = SLOTS,
        more: Sequence[Path] = (),
        **options: Any,
    ) -> None:
        nvme = {"path": list(map(str, [group, *more])), "capacity": "1GiB"}
        given = {"dram": "1GiB", "nvme": nvme, "data_parallel_size": ranks}
        config = StoreConfig.parse(given).share(rank)
        own = self.directory = config.nvme.path
        own.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.pool = open_pool(slots)
        self.device = MemoryDevice(slab_bytes(RECORDS))
        slab = new_slab(RECORDS)
        format_device(self.device, slab)
        group = config.nvme.group_path
        make = peers_of(own, group, config.siblings(), NAMESPACE, CHUNK_TOKENS, self.pool)
        self.store = open_store(
            self.pool, slab, self.device, io_depth=4, grain=GRAIN, more_tiers=make, **options
        )
        io = self.store.thread.tiers[1]
        assert isinstance(io, PeersIo)
        self.io = io
        io.answer_deadline_s, io.piece_deadline_s = 1.0, 1.0  # other tests may keep it waiting

    def wait(self, condition: Callable[[], bool], deadline_s: float = DEADLINE_S) -> None:
        ends_at = time.monotonic() + deadline_s
        while not condition():
            assert time.monotonic() < ends_at, "it did not get there"
            time.sleep(0.001)

    def put_for_a_time(self, number: int, num_tokens: int, ttl_s: float) -> int:
        """The same as put(), by a request that has a ttl."""
        sequence = sequence_of(conversation(number, num_tokens))
        _, visit = self.store.arrive(
            "request", Lookup(sequence), num_tokens, terms=Terms(ttl_s=ttl_s)
        )
        for name in names_of(sequence):
            chunk = self.store.begin_save(name, visit.own)
            assert chunk is not None
            self.pool.slot(chunk.dram.slot)[:] = payload_of(name)
            self.store.finish_saves([chunk])
        return num_tokens

    def wait_ready(self) -> None:
        """Until all siblings have sent their pools."""
        self.wait(lambda: all(sibling.is_ready for sibling in self.io.siblings))

    def put(self, number: int, num_tokens: int, salt: str | None = None) -> int:
        """Save a conversation, its tail included."""
        for name in names_of(sequence_of(conversation(number, num_tokens), salt)):
            chunk = self.store.begin_save(name)
            if chunk is not None:
                self.pool.slot(chunk.dram.slot)[:] = payload_of(name)
                self.store.finish_saves([chunk])
        return num_tokens

    def put_movable(
        self, number: int, num_tokens: int, salt: str | None = None, native_from: int = 0
    ) -> int:
        """The same, by a request whose KV may be moved.

        Args:
            native_from: tokens of the conversation before it had moved KV.
        """
        self.put(number, num_tokens, salt)
        sequence = sequence_of(conversation(number, num_tokens), salt)
        for name in names_of(sequence):
            first = max(0, native_from - name.position)
            if first < name.num_tokens:
                self.store.may_be_moved(name, sequence.root, first, is_exact=not native_from)
        return num_tokens

    def put_movable_and_drop(self, number: int, of: int, first: int, num_tokens: int) -> bool:
        """Another conversation that ends with tokens of one, whose chunks leave soon after."""
        tokens = conversation(number, CHUNK_TOKENS) + conversation(of, num_tokens)[first:]
        sequence = sequence_of(tokens)
        chunks = []
        for name in names_of(sequence):
            chunk = self.store.begin_save(name)
            assert chunk is not None
            self.pool.slot(chunk.dram.slot)[:] = payload_of(name)
            self.store.finish_saves([chunk])
            self.store.may_be_moved(name, sequence.root)
            chunks.append(chunk)
        self.wait(self.is_idle)
        self.store.drop(chunks)
        return True

    def read(self, number: int, num_tokens: int, salt: str | None = None) -> dict[str, Any]:
        """What a request for the conversation finds: tokens that it was right to load, by tier."""
        lookup = lookup_of(conversation(number, num_tokens), salt, may_ask=True)
        began = time.monotonic()
        self.store.find(lookup, 0, num_tokens)
        self.wait(lambda: not awaits_remote(lookup))
        asked_s = time.monotonic() - began

        def find() -> list[Piece]:
            return self.store.find(lookup, 0, num_tokens)

        self.wait(lambda: all(piece.chunk.dram.state is State.READY for piece in find()))
        held = self.store.hold_ready(find(), lookup.keys, num_tokens)
        for piece in held:
            found = bytes(self.pool.slot(piece.chunk.dram.slot))
            assert found == payload_of(piece.chunk.name), "wrong bytes"
        tiers = dict(self.store.tiers(held, 0))
        self.store.loaded(piece.chunk for piece in held)
        return {"tiers": tiers, "asked_s": asked_s, "all_s": time.monotonic() - began}

    def tokens(self, number: int, num_tokens: int, salt: str | None = None) -> int:
        """Tokens that siblings had."""
        tiers = self.read(number, num_tokens, salt)["tiers"]
        return int(tiers.get(PEERS, 0))

    def reset(self) -> bool:
        return self.store.reset()

    def push_out(self, first: int, count: int) -> int:
        """Fill DRAM with conversations that nobody asks for."""
        for number in range(first, first + count):
            self.put(number, CHUNK_TOKENS)
            self.wait(lambda: num_dirty(self.store.residency) == 0)
        return count

    def damage(self, number: int, num_tokens: int, first: int = 0) -> bool:
        """Change a byte of each chunk from the first one on, in DRAM and once the checksum has been
        taken, as a broken memory would."""
        for name in names_of(sequence_of(conversation(number, num_tokens)))[first:]:
            chunk = self.store.residency.index.get(name.key)
            assert chunk is not None
            self.pool.slot(chunk.dram.slot)[5] ^= 1
        return True

    def put_again(self, number: int, num_tokens: int) -> bool:
        """Save it again with another last bit, as another batch may have computed it."""
        for name in names_of(sequence_of(conversation(number, num_tokens))):
            chunk = self.store.begin_save(name, again=True)
            assert chunk is not None
            payload = bytearray(payload_of(name))
            payload[-1] ^= 1
            self.pool.slot(chunk.dram.slot)[:] = payload
            self.store.finish_saves([chunk])
        return True

    def tell_twice(self) -> bool:
        """From now on say of each chunk twice where it is."""

        def send(
            wire: Wire, kind: MessageKind, number: int, fields: Any = (), fds: Any = ()
        ) -> None:
            _SEND(wire, kind, number, [*fields] * (1 + (kind is MessageKind.PIECES)), fds)

        Wire.send = send  # type: ignore[assignment,method-assign]
        return True

    def is_idle(self) -> bool:
        return self.store.is_idle()

    def num_written(self) -> int:
        return self.store.residency.counts["written"]

    def leave(self) -> bool:
        assert self.store.remote is not None
        self.store.remote.leave()
        return True

    def close(self) -> None:
        Wire.send = _SEND  # type: ignore[method-assign]
        self.store.close()


class PeerProcess:
    """A process that has a PeerEngine, one after the other. call("put", 1, 40) calls its method."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.peer_engine"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def open(self, group: Path, rank: int, *more: Path, slots: int = SLOTS) -> None:
        """Another engine in place of the one before."""
        self.call("open", str(group), rank, slots, *map(str, more))

    def send(self, *call: object) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(call) + "\n")
        self.process.stdin.flush()

    def answer(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "the other engine has ended"
        return json.loads(line)

    def call(self, *call: object) -> Any:
        self.send(*call)
        return self.answer()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        if self.process.poll() is None:
            assert self.process.stdin is not None
            self.process.stdin.close()
            try:
                self.process.wait(10)
            except subprocess.TimeoutExpired:
                self.kill()


def main() -> None:
    engine: PeerEngine | None = None
    for line in sys.stdin:
        method, *arguments = json.loads(line)
        if method in ("open", "shut") and engine is not None:
            engine.close()
            engine = None
        if method == "open":
            group, rank, slots, *more = arguments
            engine = PeerEngine(Path(group), rank, slots=slots, more=list(map(Path, more)))
        done = method in ("open", "shut") or getattr(engine, method)(*arguments)
        print(json.dumps(done), flush=True)


if __name__ == "__main__":
    main()
