# SPDX-License-Identifier: Apache-2.0
"""The recorder: what it writes, its limits, and what it says when it ends."""

from __future__ import annotations

import errno
import json
import logging
import os
import queue
import threading
from itertools import pairwise
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from attnstore_lab.sim.formats import Arrivals, read_trace
from attnstore_lab.sim.hardware import Machine
from attnstore_lab.sim.trace import TraceError
from attnstore_vllm._native import hash_chunks
from attnstore_vllm.config.settings import TraceConfig
from attnstore_vllm.errors import ConfigError
from attnstore_vllm.index.keys import SequenceKeys, root_key
from attnstore_vllm.scheduler import observed
from attnstore_vllm.scheduler.media import MediaNames, RequestMedia
from attnstore_vllm.scheduler.observed import Watched, Watchers
from attnstore_vllm.scheduler.recorder import MACHINE, REQUESTS, Ends, Recorder, machine_lines
from attnstore_vllm.scheduler.request import RequestState

CHUNK = 32
ROOT = root_key(b"namespace", None, b"")
SIZES = {
    "kv_bytes_per_token": 1024, "hbm": 1 << 30, "dram": 1 << 31, "nvme": 1 << 34,
    "max_num_seqs": 8, "prefix_cache": True, "load_deadline_s": 0.5,
}  # fmt: skip


def seen(tokens: list[int], answer: int, at_s: float = 0.0) -> Watched:
    """A request that has ended, of which `tokens` are prompt and answer."""
    request: Any = SimpleNamespace(
        request_id="r", resumable=False, all_token_ids=tokens, mm_features=(), cache_salt=None,
        num_prompt_tokens=len(tokens) - answer, kv_transfer_params=None,
    )  # fmt: skip
    media = RequestMedia(MediaNames(), request)
    state = RequestState(request, b"namespace", bytes(32), CHUNK, media, adapter=b"")
    return Watched(state, int(at_s * 1e9), int(at_s * 1e9) + 1)


def recorded(tmp_path: Path, **settings: Any) -> Recorder:
    config = TraceConfig(path=tmp_path / "trace", **settings)
    return Recorder(config, CHUNK, SIZES, Random(1).random)


def lines(tmp_path: Path) -> list[dict[str, Any]]:
    text = (tmp_path / "trace" / REQUESTS).read_text()
    return [json.loads(line) for line in text.splitlines()][1:]


def talk(number: int, turns: int) -> list[list[int]]:
    """The tokens of each of its requests, with the answers."""
    rng, tokens, found = Random(number), [number] * 40, []
    for _ in range(turns):
        tokens = [*tokens, *(rng.randrange(1000) for _ in range(rng.randint(5, 60)))]
        found.append(tokens)
    return found


def test_a_turn_has_the_chunks_of_the_one_before(tmp_path: Path) -> None:
    made = recorded(tmp_path)
    for tokens in talk(1, 6):
        made.ended(seen(tokens, 3))
    made.close()
    names = [line["hash_ids"] for line in lines(tmp_path)]
    assert all(later[: len(before)] == before for before, later in pairwise(names))
    assert len(set(names[-1])) == len(names[-1])


def test_what_only_begins_alike_is_apart(tmp_path: Path) -> None:
    made, common = recorded(tmp_path), [5] * 40
    for number in range(20):
        made.ended(seen([*common, *range(number, number + 9)], 3))
    made.close()
    first, second = zip(*(line["hash_ids"] for line in lines(tmp_path)), strict=True)
    assert len(set(first)) == 1
    assert len(set(second)) == 20


@pytest.mark.parametrize("share", [0.25, 0.5])
def test_a_sample_has_whole_conversations(tmp_path: Path, share: float) -> None:
    made, talks = recorded(tmp_path, sample=share), [talk(n, 5) for n in range(200)]
    for turn in range(5):
        for tokens in (t[turn] for t in talks):
            made.ended(seen(tokens, 3))
    made.close()
    found = lines(tmp_path)
    turns = [len([x for x in found if x["hash_ids"][0] == first])
             for first in {x["hash_ids"][0] for x in found}]  # fmt: skip
    assert len(turns) == pytest.approx(200 * share, abs=30)
    assert sum(n == 5 for n in turns) > 0.9 * len(turns), "an end on a chunk's border is forgotten"


def test_names_are_not_made_on_two_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rest of a request that has ended is still saved, under names that the scheduler's thread
    makes as there is room, when its answer is recorded."""
    made, tokens = recorded(tmp_path), list(range(8 * CHUNK))
    told = seen(tokens, 4 * CHUNK)
    told.state.sequence.keys(0, 4)  # its prompt was looked up
    there, go_on = threading.Event(), threading.Event()

    def slow(*given: Any) -> Any:
        if threading.current_thread() is recording:
            there.set()
            go_on.wait(10)
        return hash_chunks(*given)

    monkeypatch.setattr("attnstore_vllm.index.keys.hash_chunks", slow)
    recording = threading.Thread(target=made.ended, args=(told,))
    recording.start()
    assert there.wait(10)
    told.state.sequence.keys(4, 5)
    go_on.set()
    recording.join(10)
    made.close()
    expected = SequenceKeys(told.state.root, tokens, CHUNK)
    assert told.state.sequence.names(0, 8, b"") == expected.names(0, 8, b"")


def test_ends_are_few(tmp_path: Path) -> None:
    ends = Ends(bytes(32), most=10)
    for number in range(100):
        ends.add(number, ROOT, b"", bytes([number]) * 4, is_recorded=True)
    assert len(ends) == 10
    assert [dict(lengths) for lengths in ends.lengths.values()] == [{4: 10}]
    assert ends.before(ROOT, b"", bytes([5]) * 8) is None
    found = ends.before(ROOT, b"", bytes([95]) * 8)
    assert found is not None and found.name == 95
    for number in range(10):
        ends.add(number, ROOT, b"", bytes([number]) * 6, is_recorded=True)
    assert [dict(lengths) for lengths in ends.lengths.values()] == [{6: 10}], "no empty counts"


def test_a_chunk_continues_the_longest_end() -> None:
    ends = Ends(bytes(32))
    ends.add(1, ROOT, b"", bytes(8), is_recorded=True)
    ends.add(2, ROOT, b"", bytes(4), is_recorded=False)
    ends.add(3, ROOT, b"", bytes(6), is_recorded=False)
    found = ends.before(ROOT, b"", bytes(16))
    assert found is not None and found.name == 1


def test_it_ends_at_its_size(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    made = recorded(tmp_path, size_bytes=2000)
    for number in range(100):
        made.ended(seen([number] * 100, 3))
    made.close()
    assert 1500 < (tmp_path / "trace" / REQUESTS).stat().st_size <= 2000
    assert len([r for r in caplog.records if "ends here" in r.message]) == 1
    read_trace(tmp_path / "trace" / REQUESTS, Arrivals())


@pytest.mark.parametrize("part", [None, 7])
def test_a_full_disk_ends_it_with_one_warning(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    part: int | None,
) -> None:
    made, real = recorded(tmp_path), os.pwrite
    made.ended(seen([1] * 100, 3))

    def full(file: int, line: bytes, at: int) -> int:
        if part is None:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(file, line[:part], at)

    monkeypatch.setattr(os, "pwrite", full)
    for _ in range(3):
        made.ended(seen([2] * 100, 3))
    made.close()
    assert len(lines(tmp_path)) == 1, "no half of a line is left"
    assert [r.levelno for r in caplog.records] == [logging.WARNING]


def test_where_nothing_can_be_written_the_start_says_so(tmp_path: Path) -> None:
    (tmp_path / "trace").write_text("a file")
    with pytest.raises(ConfigError, match=r"trace\.path"):
        recorded(tmp_path)


def test_what_was_measured_is_a_machine(tmp_path: Path) -> None:
    made = recorded(tmp_path)
    costs: Any = SimpleNamespace(
        measured=lambda: {
            "prefill_tokens_per_s": 1e4, "decode_step_s": 1e-9, "decode_sequence_s": 2e-5,
            "rank_bandwidth": 1e9,
        }
    )  # fmt: skip
    scheduler: Any = SimpleNamespace(
        costs=costs,
        store=SimpleNamespace(disk_speeds=lambda: {"read": 2.5e9}),
        geometry=SimpleNamespace(num_ranks=4, replicas=2),
    )
    made.begin(scheduler)
    left = tmp_path / "trace" / f"{MACHINE}.new"
    left.write_text("of a start that was killed, which others may read")
    left.chmod(0o644)
    made.ended(seen([1] * 50, 2, at_s=100.0))
    modes = {path.name: path.stat().st_mode & 0o777 for path in left.parent.iterdir()}
    assert modes == {REQUESTS: 0o600, MACHINE: 0o600}
    machine = Machine.read(tmp_path / "trace" / MACHINE)
    assert (machine.hbm_bandwidth, machine.nvme_read) == (2_000_000_000, 2_500_000_000)
    assert (machine.decode_step_s, machine.decode_sequence_s) == (1e-9, 2e-5)
    assert (machine.prefix_cache, machine.load_deadline_s) == (True, 0.5)


def test_numbers_of_a_machine_are_numbers_to_yaml() -> None:
    given = {"a": 1e-9, "b": 1e9, "c": 1 << 50, "d": False}
    assert yaml.safe_load("".join(machine_lines(given))) == given


@pytest.mark.parametrize(
    ("known", "hashes"), [(40, [1]), (31, [1]), (70, [1, 2])], ids=["few", "short", "many"]
)
def test_a_trace_with_wrong_lengths_is_refused(
    tmp_path: Path, known: int, hashes: list[int]
) -> None:
    line = {"timestamp": 0, "input_length": 32, "output_length": 4, "known_length": known}
    path = tmp_path / "t.jsonl"
    path.write_text(
        '{"attnstore_trace": 1, "block_tokens": 32, "sample": 1}\n'
        + json.dumps({**line, "hash_ids": hashes})
    )
    with pytest.raises(TraceError, match="line 2"):
        read_trace(path, Arrivals())


class Failing:
    def ended(self, seen: Watched) -> None:
        raise ValueError("a fault")

    def begin(self, scheduler: object) -> None: ...
    def close(self) -> None: ...


def test_a_watcher_that_fails_ends_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    made = recorded(tmp_path)
    watchers = Watchers([Failing(), made])
    for _ in range(3):
        watchers.tell(seen([1] * 100, 3))
    watchers.close()
    assert len(lines(tmp_path)) == 3
    assert len([r for r in caplog.records if "Failing stops" in r.message]) == 1


def test_a_slow_watcher_holds_up_nobody(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    held: queue.Queue[None] = queue.Queue()

    class Slow(Failing):
        def ended(self, seen: Watched) -> None:
            held.get()

    monkeypatch.setattr(observed, "CLOSE_DEADLINE_S", 0.1)
    watchers = Watchers([Slow()])
    for _ in range(observed.UNTOLD_MAX + 10):
        watchers.tell(seen([1] * 100, 3))
    watchers.close()
    assert len([r for r in caplog.records if "lack requests" in r.message]) == 1
    for _ in range(observed.UNTOLD_MAX + 1):
        held.put(None)
