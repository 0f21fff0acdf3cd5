# SPDX-License-Identifier: Apache-2.0
"""Engines whose layers are spread over pipeline stages: answers, bytes, and what is found.

Goal: with the store such an engine answers to the last bit as one without stages and without the
store does, and finds as many tokens in the store as that finds in HBM; also over a restart, after
aborts, and where a record was damaged in one stage's part.
Method: vLLM's CPU build, a process for each stage; a model of three layers, so that stages differ
in size. The scheduler's side of it, with more stages, is in test_pipeline_scheduled.py.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from attnstore_lab.testing.tiny_model import ModelShape
from attnstore_vllm.cli.slab_file import opened
from attnstore_vllm.preflight import SLAB_NAME
from attnstore_vllm.tiers.nvme.format import SegmentHeader, header_bytes
from tests.vllm.conftest import StartEngine
from tests.vllm.engine import BLOCK, CHUNK, Answer, Engine
from tests.vllm.host import EngineHost
from tests.vllm.prompts import random_tokens
from tests.vllm.splits import BLOCKS, different, whole_blocks

THREE = ModelShape(
    layers=3, hidden=192, intermediate=256, heads=6, kv_heads=2, head_dim=32, vocab=1_024
)
LENGTHS = tuple(count * BLOCK + 1 for count in (2, 3, 7))
"""All but the last token are whole blocks: found in HBM as in the store, so steps are the same."""
STORED = sum(LENGTHS) - len(LENGTHS)
ANSWER = 12
TWO_STAGES: dict[str, Any] = {"shape": THREE, "pipeline_parallel": 2, "dram": "16MiB"}

Answers = list[Answer]


def ask_twice(engine: Engine, tier: str = "hbm") -> tuple[Answers, dict[str, int]]:
    """Answers to prompts that are new, and again when their KV is in this tier alone; and the
    tokens that were loaded."""
    prompts = [random_tokens(("pipeline", length), length) for length in LENGTHS]
    answers = [engine.ask(prompt, max_tokens=ANSWER) for prompt in prompts]
    again, loaded = ask_again(engine, tier)
    return answers + again, loaded


def ask_again(engine: Engine, tier: str) -> tuple[Answers, dict[str, int]]:
    if tier == "nvme":
        engine.evict_dram()
    answers: Answers = []
    engine.loaded()
    for length in LENGTHS:
        if tier != "hbm":
            engine.forget_hbm()
        answers.append(engine.ask(random_tokens(("pipeline", length), length), max_tokens=ANSWER))
    return answers, engine.loaded()


@pytest.fixture(scope="module")
def expected(start_engine: StartEngine) -> Answers:
    """Those of one stage, without the store."""
    answers, _ = start_engine(shape=THREE, store=None).call(ask_twice)
    assert [answer.cached_tokens for answer in answers[len(LENGTHS) :]] == [n - 1 for n in LENGTHS]
    return answers


@pytest.fixture(scope="module")
def engine(expected: Answers, start_engine: StartEngine) -> EngineHost:
    return start_engine(**TWO_STAGES)


def test_answers_and_tokens_found_are_those_of_one_stage(
    engine: EngineHost, expected: Answers
) -> None:
    answers, loaded = engine.call(ask_twice, "dram")
    assert answers == expected
    assert loaded == {"dram": STORED, "nvme": 0}
    answers, loaded = engine.call(ask_again, "nvme")
    assert answers == expected[len(LENGTHS) :]
    assert loaded == {"dram": 0, "nvme": STORED}


def test_wrong_kv_of_a_stage_is_seen(engine: EngineHost) -> None:
    """Each worker leaves out its last layer: the comparison notices it at every length."""
    pairs, loaded = engine.call(whole_blocks, "dram", "exact")
    assert loaded == {"dram": sum(BLOCKS) * BLOCK, "nvme": 0}
    assert different(pairs) == []
    pairs, _ = engine.call_with_fault("skipped layer", whole_blocks, "dram", "skipped")
    assert different(pairs) == [length for length, *_ in pairs]


def abort_some(engine: Engine) -> None:
    """Requests end while they wait, compute and load, with steps in flight in both stages."""
    prompts = [random_tokens(("abort", n), 5 * BLOCK + 9) for n in range(4)]
    for steps in range(8):
        engine.forget_hbm()
        numbers = [engine.submit(prompt, max_tokens=30) for prompt in prompts]
        for number in numbers:
            for _ in range(steps):
                engine.step()
            if number not in engine.done:
                engine.abort(number)
        engine.settle()


def test_aborts(engine: EngineHost, expected: Answers) -> None:
    engine.call(abort_some)
    answers, loaded = engine.call(ask_again, "dram")
    assert answers == expected[len(LENGTHS) :]
    assert sum(loaded.values()) == STORED
    engine.call(Engine.check_quiet)


@pytest.mark.long
def test_aborts_with_two_ranks_a_stage(start_engine: StartEngine) -> None:
    """Of four ranks; the answers afterwards are those of hits in HBM."""
    engine = start_engine(**TWO_STAGES, tensor_parallel=2)
    first, loaded = engine.call(ask_twice, "dram")
    assert loaded == {"dram": STORED, "nvme": 0}
    engine.call(abort_some)
    answers, loaded = engine.call(ask_again, "dram")
    assert sum(loaded.values()) == STORED
    engine.call(Engine.check_quiet)
    assert answers == first[len(LENGTHS) :] == hits_in_hbm(start_engine, 2)  # ends this engine


def damage_last_part(engine: Engine) -> int:
    """The records of all second chunks are wrong in the last stage's part. Returns how many."""
    engine.evict_dram()
    geometry = engine.side.geometry
    at = geometry.part_at(geometry.num_ranks - 1)
    assert engine.spec.store is not None
    with opened(engine.spec.store / SLAB_NAME, writable=True) as slab:
        found = [
            record.offset + header_bytes(segment.chunk_tokens) + at
            for _, segment in slab.segments()
            if isinstance(segment, SegmentHeader)
            for record in slab.records(segment, payloads=True)
            if record.header is not None and record.header.name.position == CHUNK
        ]
        for offset in found:
            (byte,) = os.pread(slab.fd, 1, offset)
            os.pwrite(slab.fd, bytes([byte ^ 0x40]), offset)
        os.fsync(slab.fd)
    return len(found)


def test_a_record_damaged_in_the_last_stages_part_is_computed_by_all(
    engine: EngineHost, expected: Answers
) -> None:
    engine.call(ask_again, "hbm")
    assert engine.call(damage_last_part) >= 2
    answers, loaded = engine.call(ask_again, "nvme")
    assert [answer.tokens for answer in answers] == [
        answer.tokens for answer in expected[len(LENGTHS) :]
    ]
    assert loaded["dram"] + loaded["nvme"] == len(LENGTHS) * CHUNK
    answers, loaded = engine.call(ask_again, "nvme")
    assert sum(loaded.values()) == STORED, "it is stored again"


def test_nothing_is_held_afterwards(engine: EngineHost) -> None:
    engine.call(Engine.check_quiet)


@pytest.mark.long
@pytest.mark.parametrize("tensor_parallel", [1, 2])
def test_a_restart(
    tensor_parallel: int, expected: Answers, start_engine: StartEngine, tmp_path: Path
) -> None:
    """With two ranks a stage their sums are split otherwise, so its own answers are compared."""
    how = {**TWO_STAGES, "tensor_parallel": tensor_parallel, "store": tmp_path / "store"}
    first, _ = start_engine(**how).call(ask_twice, "dram")
    assert tensor_parallel > 1 or first == expected
    assert first[len(LENGTHS) :] == hits_in_hbm(start_engine, tensor_parallel)
    again, loaded = start_engine(**how).call(ask_again, "stored")
    assert again == first[len(LENGTHS) :]
    assert loaded == {"dram": 0, "nvme": STORED}


def hits_in_hbm(start_engine: StartEngine, tensor_parallel: int) -> Answers:
    """Of such an engine without the store."""
    how = {**TWO_STAGES, "tensor_parallel": tensor_parallel, "store": None}
    return start_engine(**how).call(ask_twice)[0][len(LENGTHS) :]


@pytest.mark.long
def test_another_split_finds_nothing(
    expected: Answers, start_engine: StartEngine, tmp_path: Path
) -> None:
    """Of layers over stages, or of heads over ranks: none is loaded, and answers are right."""
    how = {**TWO_STAGES, "store": tmp_path / "store"}
    start_engine(**how).call(ask_twice, "dram")
    for other in ({"pipeline_parallel": 1}, {"pipeline_parallel": 1, "tensor_parallel": 2}):
        answers, loaded = start_engine(**{**how, **other}).call(ask_again, "stored")
        assert loaded == {"dram": 0, "nvme": 0}, other
        assert [a.tokens for a in answers] == [a.tokens for a in expected[: len(LENGTHS)]]
    _, loaded = start_engine(**how).call(ask_again, "stored")
    assert loaded == {"dram": 0, "nvme": STORED}, "its own is still there"


@pytest.mark.long
def test_few_blocks(expected: Answers, start_engine: StartEngine) -> None:
    """HBM holds few requests, and DRAM few chunks: answers go on after preemptions."""
    few = {"blocks": 14, "dram": "3MiB", "vllm": {"max_model_len": 10 * BLOCK}}
    engine = start_engine(**{**TWO_STAGES, **few})
    tokens = engine.call(all_at_once)
    assert tokens == [answer.tokens for answer in expected[: len(LENGTHS)]]
    engine.call(Engine.check_quiet)


def all_at_once(engine: Engine) -> list[tuple[int, ...]]:
    prompts = [random_tokens(("pipeline", length), length) for length in LENGTHS]
    others = [random_tokens(("other", n), 3 * BLOCK) for n in range(4)]
    for _ in range(3):
        numbers = [engine.submit(prompt, max_tokens=ANSWER) for prompt in (*prompts, *others)]
        found = engine.finish(*numbers)[: len(prompts)]
    return [answer.tokens for answer in found]
