# SPDX-License-Identifier: Apache-2.0
"""KV cache specs beyond the plain ones under vLLM's real scheduler and managers.

Goal: no forward pass sees KV that is not that of its tokens, where states are of several tokens,
rings are left out, windows are computed again, or blocks of generated tokens are taken back; and a
hit from the store is at least as long as vLLM's own of the same tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from attnstore_lab.testing.tiny_model import TINY, make_model
from attnstore_vllm.connector import build
from tests.vllm import grouped
from tests.vllm.grouped import GroupedEngine, Kind
from tests.vllm.scripted import Limits
from tests.vllm.scripted_worker import BLOCK
from tests.vllm.stepped import prompt
from tests.vllm.test_async_scheduling import drive, wait_until_quiet


@dataclass(frozen=True)
class Case:
    name: str
    kinds: tuple[Kind, ...]
    depth: int = 2
    num_blocks: int = 500
    chunk: int = 128


SLOTS = 300
"""Of 4 KiB, at each size of chunks."""
RING = Kind("ring", block=8)
LATENT = Kind("compressed", block=64, ratio=4)
INSIDE = (Kind("state", block=64, leaves_inside=True), Kind("full", block=64))
"""Mamba 2, Kimi K3, GLM 5.3: their kernels leave the state at the last block's end."""
CASES = [
    Case("states of four tokens", (LATENT,)),
    Case("a ring and states", (RING, LATENT)),
    Case("a ring and states, synchronous", (RING, LATENT), depth=1),
    Case("a ring and states, preemption", (RING, LATENT), num_blocks=30),
    Case("a ring, states and a window", (LATENT, RING, Kind("latent window", 40)), chunk=64),
    Case(
        "a window that is computed again",
        (Kind("replayed", 40, 32), Kind("compressed", block=64, ratio=2), RING),
    ),
    Case(
        "short windows, small blocks",
        (Kind("compressed", block=128, ratio=8), Kind("window", 24)),
        chunk=256,
    ),
    Case("states", (Kind("state", block=64), Kind("full", block=64)), chunk=64),
    Case("states that steps leave inside", INSIDE, chunk=64),
    Case("states that steps leave inside, preemption", INSIDE, num_blocks=40, chunk=64),
    Case("generated tokens go", (Kind("prompt", 8),), chunk=64),
    Case("generated tokens go, preemption", (Kind("prompt", 8),), num_blocks=60, chunk=64),
]


@pytest.fixture(scope="module")
def model(models: Path) -> Path:
    return make_model(models / "scripted", TINY, weights=False)


def make(case: Case, model: Path, tmp_path: Path) -> GroupedEngine:
    return GroupedEngine(
        model, tmp_path / "store", kinds=case.kinds, num_blocks=case.num_blocks, depth=case.depth,
        seed=0, limits=Limits(chunk_tokens=case.chunk, dram_slots=SLOTS, nvme="16MiB"),
        dram=(1 << 20) + SLOTS * 4096,
    )  # fmt: skip


@pytest.fixture
def engine(case: Case, model: Path, tmp_path: Path) -> Iterator[GroupedEngine]:
    made = make(case, model, tmp_path)
    yield made
    made.close()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_only_right_kv_is_used(case: Case, engine: GroupedEngine) -> None:
    drive(engine, 0)
    wait_until_quiet(engine.ours)
    assert engine.worker.loaded_tokens > BLOCK, "the store was hardly used"


def ask(engine: GroupedEngine, name: str, tokens: list[int]) -> tuple[int, int]:
    """Tokens of a prompt that vLLM's own cache has found, and that the store has."""
    engine.add(name, tokens, 12)
    stats = engine.scheduler.requests[name].prefill_stats
    assert stats is not None
    engine.drain()
    wait_until_quiet(engine.ours)
    return stats.num_local_cached_tokens, stats.num_external_cached_tokens


@pytest.mark.parametrize(
    "case", [case for case in CASES if "preemption" not in case.name], ids=lambda case: case.name
)
def test_hits_are_as_long_as_vllms_own(case: Case, engine: GroupedEngine) -> None:
    """The same prompt again, its next turn, and one that parts from it in a block."""
    first = prompt(case.name, 333)
    asked = {
        "again": first,
        "turn": [*first, *prompt("more", 50)],
        "branch": first[:210] + [1] * 60,
    }
    found: dict[str, list[int]] = {}
    assert ask(engine, "first", first) == (0, 0)
    for name, tokens in asked.items():
        own, loaded = ask(engine, f"{name}, in HBM", tokens)
        assert not loaded or own + loaded <= len(tokens)
        found[name] = [own]
    for name, tokens in asked.items():
        assert engine.scheduler.reset_prefix_cache()
        local, loaded = ask(engine, f"{name}, from the store", tokens)
        assert local == 0
        found[name].append(loaded)
    assert all(loaded >= own for own, loaded in found.values()), found
    hit_tokens = engine.ours.geometry.hit_tokens
    if hit_tokens:
        assert all(loaded % hit_tokens == 0 for _, loaded in found.values()), found
    assert found["again"][1] > 200, found


@pytest.mark.parametrize(
    ("case", "name", "wrong", "seen"),
    [
        (CASES[1], "hit_tokens_of", 0, "not in the ring"),
        (CASES[-2], "prompts_only", False, "wrong KV of token"),
    ],
    ids=["hits end inside of a state", "generated tokens are stored"],
)
def test_a_wrong_rule_is_seen(
    case: Case,
    name: str,
    wrong: object,
    seen: str,
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The checks of this file see what they are for."""
    for module in (build, grouped):
        monkeypatch.setattr(module, name, lambda _: wrong)
    made = make(case, model, tmp_path)
    try:
        with pytest.raises(AssertionError, match=seen):
            drive(made, 1, num_requests=150)
    finally:
        made.close()
