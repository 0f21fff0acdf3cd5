# SPDX-License-Identifier: Apache-2.0
"""Approximate KV on real engines where it is kept: over a restart, by two ranks, with LoRA
adapters, and brought up for those that wait. Exact requests get exact KV everywhere."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from attnstore_lab.testing.tiny_model import TINY
from attnstore_vllm.index.chunk import State
from attnstore_vllm.scheduler.report import report_of
from tests.vllm.adapters import make_adapter
from tests.vllm.conftest import StartEngine
from tests.vllm.engine import CHUNK, Engine
from tests.vllm.host import EngineHost
from tests.vllm.prompts import random_tokens
from tests.vllm.test_approximate import APPROXIMATE, EXACT, LENGTH, WHOLE, asks
from tests.vllm.test_lora import LORA, adapter
from tests.vllm.test_truncation import plain_kv

pytestmark = pytest.mark.long
MOVES = asks(approximate=True, truncation=True)
LINEAGE, BLOCKS = "lineage left out", "blocks not hidden"


@dataclass(frozen=True, slots=True)
class Served:
    """KV of the first whole chunks in HBM, by rank, layer and K or V; and the report."""

    kv: list[list[tuple[bytes, bytes]]]
    report: dict[str, Any]


def when_it_speaks(engine: Engine, number: str) -> Served:
    engine.wait_for(lambda: engine.request(number).num_output_tokens > 0, engine.step)
    state = engine.side.requests[engine.request(number).request_id]
    kv = engine.llm.collective_rpc(plain_kv, args=(engine.block_ids(number), WHOLE))
    report = dict(report_of(state))
    engine.finish(number)
    return Served(kv, report)


def ask(
    engine: Engine, prompt: list[int], how: dict[str, Any], lora: Any = None, salt: str = "one"
) -> Served:
    number = engine.submit(prompt, salt=salt, max_tokens=3, extra_args=how, lora=lora)
    found = when_it_speaks(engine, number)
    engine.settle()
    return found


def empty(engine: Engine) -> None:
    """Nothing is left but what is on the disk."""
    engine.forget_hbm()
    engine.evict_dram()


def check_exact(found: Served, exact: Served) -> None:
    assert found.report["approximate"] is None
    assert found.report["computed_tokens"] == found.report["prompt_tokens"], "it finds nothing"
    assert found.kv == exact.kv, "bit by bit"


def check_decoded(found: Served, exact: Served, label: str) -> None:
    assert found.report["approximate"] == label
    assert found.report["nvme_tokens"] >= WHOLE
    assert found.kv != exact.kv


# ---- two ranks, and adapters ----------------------------------------------------------------

CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "two ranks": {"codec": "fp8", "tensor_parallel": 2},
    "adapter": {"codec": "int8", "vllm": LORA},
}


@pytest.fixture(scope="module", params=CONFIGURATIONS)
def engine(request: pytest.FixtureRequest, start_engine: StartEngine) -> EngineHost:
    return start_engine(shape=TINY, **CONFIGURATIONS[request.param])


def from_the_disk(engine: Engine, seed: str, directory: Path) -> dict[str, Served]:
    """One prompt, exact and approximate by turns; with adapters where the engine has them."""
    prompt = random_tokens(seed, LENGTH)
    loras = [None]
    if engine.spec.vllm:
        loras = [adapter(n, make_adapter(directory / f"{n}", TINY, n), name=f"{n}") for n in (1, 2)]
        loras.append(None)
    found = {"computed": ask(engine, prompt, EXACT, loras[0])}
    empty(engine)
    ask(engine, prompt, APPROXIMATE, loras[0])
    empty(engine)
    found["exact, before"] = ask(engine, prompt, EXACT, loras[0])
    empty(engine)
    found["decoded"] = ask(engine, prompt, APPROXIMATE, loras[0])
    found["exact, beside it"] = ask(engine, prompt, {}, loras[0])
    for number, other in enumerate(loras[1:]):
        empty(engine)
        found[f"another's {number}"] = ask(engine, prompt, APPROXIMATE, other)
    engine.check_quiet()
    return found


def check_from_the_disk(found: dict[str, Served], label: str) -> None:
    exact = found["computed"]
    check_exact(found["exact, before"], exact)
    check_exact(found["exact, beside it"], exact)
    check_decoded(found["decoded"], exact, label)
    ranks = zip(found["decoded"].kv, exact.kv, strict=True)
    assert all(near != was for near, was in ranks), "each rank's part is decoded"
    for name, other in found.items():
        if name.startswith("another"):
            assert other.report["computed_tokens"] == LENGTH, "it has another adapter"
            assert other.report["approximate"] is None


def test_who_gets_what(engine: EngineHost, tmp_path: Path) -> None:
    label = f"{engine.spec.codec}/1"
    check_from_the_disk(engine.call(from_the_disk, "plain", tmp_path), label)


@pytest.mark.parametrize("fault", [LINEAGE, BLOCKS])
def test_a_name_that_exact_kv_has_is_seen(engine: EngineHost, fault: str, tmp_path: Path) -> None:
    found = engine.call_with_fault(fault, from_the_disk, fault, tmp_path)
    with pytest.raises(AssertionError, match="it finds nothing"):
        check_from_the_disk(found, f"{engine.spec.codec}/1")


# ---- a restart ------------------------------------------------------------------------------


def leave(engine: Engine, seed: str) -> Served:
    """KV of a prompt on the disk, of an approximate request. Returns what is exact."""
    prompt = random_tokens(seed, LENGTH + CHUNK)
    exact = ask(engine, prompt, EXACT)
    empty(engine)
    ask(engine, prompt, MOVES)
    empty(engine)
    return exact


def find(engine: Engine, seed: str) -> dict[str, Served]:
    """In another engine on the same directory."""
    prompt = random_tokens(seed, LENGTH + CHUNK)
    found = {"exact, before": ask(engine, prompt, EXACT)}
    empty(engine)
    found["decoded"] = ask(engine, prompt, MOVES)
    found["exact, beside it"] = ask(engine, prompt, {})
    empty(engine)
    cut = prompt[CHUNK:] + random_tokens((seed, "more"), 50)
    found["exact, cut"] = ask(engine, cut, asks(truncation=True))
    empty(engine)
    found["moved"] = ask(engine, cut, MOVES)
    found["exact, cut, beside it"] = ask(engine, cut, asks(truncation=True))
    engine.check_quiet()
    return found


def exact_alone(engine: Engine, seed: str) -> Served:
    return ask(engine, random_tokens(seed, LENGTH + CHUNK), {})


def test_after_a_restart(start_engine: StartEngine, tmp_path: Path) -> None:
    """Also with truncation, whose source is decoded then; and with another codec, which finds
    nothing. What an engine without the lineage would have left, the next one takes for exact."""
    store = tmp_path / "store"
    first = start_engine(codec="int8", store=store)
    exact, faulty = first.call(leave, "kept"), first.call_with_fault(LINEAGE, leave, "faulty")
    second = start_engine(codec="int8", store=store)
    found, seen = second.call(find, "kept"), second.call(exact_alone, "faulty")
    third = start_engine(codec="fp8", store=store)
    other = third.call(exact_alone, "kept")

    check_exact(found["exact, before"], exact)
    check_exact(found["exact, beside it"], exact)
    check_decoded(found["decoded"], exact, "int8/1")
    check_exact(found["exact, cut, beside it"], found["exact, cut"])
    assert found["exact, cut"].report["computed_tokens"] == LENGTH + 50
    check_decoded(found["moved"], found["exact, cut"], "int8/1")
    assert found["moved"].report["moved_tokens"] >= WHOLE - 16
    check_exact(other, exact)
    assert seen.kv != faulty.kv, "the fault is seen"
    assert seen.report["nvme_tokens"] >= WHOLE


# ---- those that wait ------------------------------------------------------------------------


def brought_up(engine: Engine, seed: str) -> tuple[Served, Served, Served, int]:
    """(computed, exact, approximate, chunks in DRAM before the approximate one had a place).

    One request runs at a time: the others wait, an exact one in front of an approximate one.
    """
    prompt = random_tokens(seed, LENGTH)
    computed = ask(engine, prompt, EXACT)
    empty(engine)
    ask(engine, prompt, APPROXIMATE)
    empty(engine)
    busy = engine.submit(random_tokens((seed, "busy"), 50), max_tokens=300)
    engine.wait_for(lambda: engine.request(busy).num_output_tokens > 0, engine.step)
    exact, near = (
        engine.submit(prompt, salt="one", max_tokens=3, extra_args=how)
        for how in (EXACT, APPROXIMATE)
    )
    names = [engine.request(number).request_id for number in (exact, near)]
    keys = [engine.side.requests[names[1]].sequence.key(n) for n in range(2)]
    count = 0
    while busy not in engine.done and count < len(keys):
        engine.step()
        chunks = map(engine.store.residency.index.get, keys)
        count = sum(c is not None and c.dram.state is State.READY for c in chunks)
    assert busy not in engine.done
    assert all(engine.side.requests[name].waiting.deadline is None for name in names)
    engine.finish(busy)
    found = when_it_speaks(engine, exact), when_it_speaks(engine, near)
    engine.check_quiet()
    return computed, *found, count


def test_brought_up_for_one_that_waits(start_engine: StartEngine) -> None:
    host = start_engine(codec="int8", shape=TINY, vllm={"max_num_seqs": 1})
    computed, exact, near, count = host.call(brought_up, "waits")
    assert count == 2
    check_exact(exact, computed)
    check_decoded(near, computed, "int8/1")
    computed, exact, _, count = host.call_with_fault(LINEAGE, brought_up, LINEAGE)
    with pytest.raises(AssertionError, match="it finds nothing"):
        check_exact(exact, computed)
