# SPDX-License-Identifier: Apache-2.0
"""The process that owns a store's client: which of its lanes may do what at the same time."""

from __future__ import annotations

import socket
import threading
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from attnstore_vllm.config.shared import KINDS, SharedConfig, SharedKind
from attnstore_vllm.errors import ConfigError
from attnstore_vllm.tiers.shared.backend import Backend, backend_of, open_backend
from attnstore_vllm.tiers.shared.child import Lane, locks
from attnstore_vllm.tiers.shared.lanes import LaneOp, Lanes, Turns
from attnstore_vllm.tiers.shared.start import check_client

NAMES = [bytes(32)]
NUM_LANES = 5


class Watched(Backend):
    """It takes its time, and counts who does what meanwhile."""

    def __init__(self, *_: object) -> None:
        self.now: Counter[str] = Counter()
        self.most: Counter[str] = Counter()
        self._lock = threading.Lock()

    def _take_time(self, *kinds: str) -> None:
        with self._lock:
            self.now.update(kinds)
            self.most |= self.now
        time.sleep(0.05)
        with self._lock:
            self.now.subtract(kinds)

    def exist(self, names: Sequence[str]) -> list[bool]:
        self._take_time("exist")
        return [True for _ in names]

    def get(self, names: Sequence[str], places: Sequence[memoryview]) -> list[int]:
        self._take_time("get", "transfer")
        return [0 for _ in places]

    def put(
        self, names: Sequence[str], values: Sequence[memoryview], *, overwrite: bool
    ) -> list[int]:
        self._take_time("put", "transfer")
        return [0 for _ in values]

    def delete(self, names: Sequence[str]) -> list[int]:
        return [0 for _ in names]

    def read(self, name: str, at_most: int) -> bytes | None: ...
    def write(self, name: str, value: bytes, *, overwrite: bool) -> None: ...
    def count(self, prefix: str) -> tuple[int, int] | None: ...
    def remove(self, prefix: str) -> int:
        return 0


def test_one_transfer_each_way_at_a_time() -> None:
    lanes, backend = Lanes(4096, NUM_LANES, 1), Watched()
    shared: dict[str, Any] = locks()
    buffer = memoryview(bytearray(lanes.buffer_bytes))
    ends = [socket.socketpair() for _ in range(NUM_LANES)]
    made = [
        Lane(number, ours, lanes, buffer, {"prefix": "as1/"}, shared)
        for number, (ours, _) in enumerate(ends)
    ]
    asked = [(made[1], LaneOp.GET), (made[2], LaneOp.GET), (made[0], LaneOp.EXIST)]
    asked += [(made[3], LaneOp.PUT), (made[4], LaneOp.OVERWRITE)]
    with ThreadPoolExecutor(len(asked)) as threads:
        list(threads.map(lambda one: one[0].do(backend, one[1], NAMES, b""), asked * 3))
    assert backend.most["get"] == backend.most["put"] == 1
    assert backend.most["transfer"] == 2, "a get waits for no put"
    assert not any(backend.now.values())
    for pair in ends:
        for end in pair:
            end.close()


def test_who_waits_for_a_turn_has_the_deadline_from_then_on() -> None:
    turns = Turns()
    assert turns.left(LaneOp.GET, 10.0, 0.5, 10.5) == 0, "nobody was before it: the store hangs"
    turns.end(LaneOp.GET, 9.9)
    assert turns.left(LaneOp.GET, 10.0, 0.5, 10.5) == 0, "nor while it waited"
    turns.end(LaneOp.GET, 10.25)
    assert turns.left(LaneOp.GET, 10.0, 0.5, 10.5) == 0.25
    assert turns.left(LaneOp.PUT, 10.0, 0.5, 10.5) == 0, "a put waits for no get"
    assert turns.left(LaneOp.EXIST, 10.0, 0.5, 10.5) == 0, "nor does a question"
    turns.end(LaneOp.OVERWRITE, 10.25)
    assert turns.left(LaneOp.PUT, 10.0, 0.5, 11.0) == 0, "it has had its time"


def test_another_kind_is_an_entry_and_a_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    """Settings, the log, the child and a missing client: all of them go by the table."""
    kind = SharedKind(
        title="A watched store",
        example="{at: place}",
        backend=f"{__name__}:Watched",
        options=lambda shared: {"at": str(shared["watched"]["at"])},
        where=lambda options: f"a watched store at {options['at']}",
        keys=frozenset({"glasses"}),
        client="glasses_that_are_not_installed",
    )
    monkeypatch.setitem(KINDS, "watched", kind)
    shared = SharedConfig.parse({"watched": {"at": "home"}, "glasses": "on", "prefix": "w/"})
    assert (shared.kind, shared.where) == ("watched", "a watched store at home")
    settings = shared.for_client()
    assert settings == {"prefix": "w/", "watched": {"at": "home", "timeout_s": 0.5}}
    assert isinstance(open_backend(settings, None, {}), Watched)
    with pytest.raises(ConfigError, match=r"watched store's client.*attnstore-vllm\[watched\]"):
        check_client(shared)
    with pytest.raises(ConfigError, match=r"or \{watched: \{at: place\}\}"):
        SharedConfig.parse({"watched": {"at": "home"}, "redis": "redis://h"})
    with pytest.raises(ConfigError, match=r"shared\.glasses makes no sense: Redis"):
        SharedConfig.parse({"redis": "redis://h", "glasses": "on"})


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_has_a_backend(kind: str) -> None:
    backend, options = backend_of({"prefix": "", kind: {}})
    assert issubclass(backend, Backend) and options == {}
