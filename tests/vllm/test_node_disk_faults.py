# SPDX-License-Identifier: Apache-2.0
"""Two pipeline stages on two nodes, and the second's disk fails: no read works, or it is full.

Goal: answers are those of one stage without the store, to the last bit; a chunk is found in a tier
only where both stages have it there; nothing stops, and the disk is used again once it is well.
Method: test_nodes.py's, the second node's disk as in faulty_disk.py. It takes
two to four minutes, for which it is long.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from attnstore_vllm.types import Event
from tests.vllm.engine import Engine
from tests.vllm.faulty_disk import FAULTS_FILE
from tests.vllm.host import EngineHost, HostError
from tests.vllm.prompts import random_tokens
from tests.vllm.test_nodes import (
    TwoNodes,
    count,
    expected,  # noqa: F401
    pytestmark,  # noqa: F401
)
from tests.vllm.test_pipeline import LENGTHS, STORED, Answers, ask_again, ask_twice

N = len(LENGTHS)


class SickNodes(TwoNodes):
    """See the module."""

    def __init__(self, models: Path, directory: Path) -> None:
        super().__init__(models, directory)
        self._faults = directory / "faults.json"
        self.be_well()

    def fail(self, **fault: Any) -> None:
        """Every request of such an operation, until the disk is well again."""
        new = self._faults.with_suffix(".new")
        new.write_text(json.dumps({"every": 1, **fault} if fault else {}))
        new.replace(self._faults)

    def be_well(self) -> None:
        self.fail()

    def _around(self) -> dict[str, str]:
        return {**super()._around(), FAULTS_FILE: str(self._faults)}

    def kv_transfer(self, store: Path, spec: Any) -> dict[str, Any]:
        module = "tests.vllm.faulty_disk"
        faulty = {"kv_connector": "OnFaultyDisk", "kv_connector_module_path": module}
        return super().kv_transfer(store, spec) | faulty


@pytest.fixture(scope="module")
def nodes(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SickNodes]:
    found = SickNodes(models, tmp_path_factory.mktemp("sick nodes"))
    yield found
    found.stop()


@pytest.fixture(scope="module")
def engine(nodes: SickNodes) -> EngineHost:
    return nodes.start()


def until_used(engine: Engine) -> None:
    """Others ask, until the disk is read and written again."""
    numbers = iter(range(10_000))

    def ask() -> None:
        engine.ask(random_tokens(("well", next(numbers)), 40), max_tokens=1)

    def is_used() -> bool:
        return all(engine.metric("nvme_in_use", way) == 1 for way in ("reads", "writes"))

    engine.wait_for(is_used, ask)
    engine.settle()


def forget_all(engine: Engine) -> None:
    engine.settle()
    assert engine.llm.reset_prefix_cache(reset_connector=True)


def check_found_again(engine: EngineHost, new: Answers, again: Answers) -> None:
    """The disk is well: what is stored once more is found on NVMe, by both stages."""
    engine.call(until_used)
    engine.call(forget_all)
    answers, _ = engine.call(ask_again, "anew")
    assert answers == new
    answers, loaded = engine.call(ask_again, "nvme")
    assert answers == again
    assert loaded == {"dram": 0, "nvme": STORED}


@pytest.mark.long
def test_a_stage_whose_disk_cannot_be_read(
    nodes: SickNodes,
    engine: EngineHost,
    expected: Answers,  # noqa: F811
) -> None:
    engine.call(forget_all)
    answers, loaded = engine.call(ask_twice, "dram")
    assert (answers, loaded) == (expected, {"dram": STORED, "nvme": 0})
    nodes.fail(effect="EIO", ops=["read"])
    answers, loaded = engine.call(ask_again, "nvme")
    assert answers == expected[:N], "computed, as if they were new"
    assert loaded == {"dram": 0, "nvme": 0}
    assert engine.call(count, Event.READ_FAILED) > 0
    answers, loaded = engine.call(ask_again, "dram")
    assert answers == expected[N:]
    assert loaded == {"dram": STORED, "nvme": 0}, "DRAM is used as ever"
    nodes.be_well()
    check_found_again(engine, expected[:N], expected[N:])


@pytest.mark.long
def test_a_stage_whose_disk_is_full(
    nodes: SickNodes,
    engine: EngineHost,
    expected: Answers,  # noqa: F811
) -> None:
    nodes.fail(effect="ENOSPC", ops=["write"])
    engine.call(forget_all)
    answers, loaded = engine.call(ask_again, "anew")
    assert (answers, loaded) == (expected[:N], {"dram": 0, "nvme": 0})
    answers, loaded = engine.call(ask_again, "dram")
    assert answers == expected[N:]
    assert loaded == {"dram": STORED, "nvme": 0}, "DRAM is used as ever"
    assert engine.call(count, Event.DEVICE_FULL) > 0
    answers, loaded = engine.call(ask_again, "nvme")
    assert answers == expected[:N], "what one stage alone has written is not found"
    assert loaded == {"dram": 0, "nvme": 0}
    nodes.be_well()
    check_found_again(engine, expected[:N], expected[N:])


class WithFault:
    """An EngineHost in whose calls a fault is planted (faults.py)."""

    def __init__(self, host: EngineHost, fault: str) -> None:
        self._host, self._fault = host, fault

    def call(self, *what: Any) -> Any:
        return self._host.call_with_fault(self._fault, *what)


@pytest.mark.long
@pytest.mark.parametrize(("fault", "check"), [
    ("failed parts taken", test_a_stage_whose_disk_cannot_be_read),
    ("failed parts taken", test_a_stage_whose_disk_is_full),
    ("disk given up", test_a_stage_whose_disk_cannot_be_read),
    ("disk given up", test_a_stage_whose_disk_is_full),
])  # fmt: skip
def test_a_planted_fault_is_seen(
    nodes: SickNodes,
    engine: EngineHost,
    expected: Answers,  # noqa: F811
    fault: str,
    check: Callable[..., None],
) -> None:
    """By the checks above. Then the disk is well, and the store begins anew."""
    with pytest.raises((AssertionError, HostError)) as seen:
        check(nodes, WithFault(engine, fault), expected)
    if fault == "disk given up":
        assert "not ready within 20" in str(seen.value)
    else:
        assert seen.type is AssertionError
    nodes.be_well()
    engine.call(until_used)
    engine.call(forget_all)


@pytest.mark.long
def test_nothing_has_died(nodes: SickNodes, engine: EngineHost) -> None:
    engine.call(Engine.check_quiet)
    assert nodes.second.exit_code is None
