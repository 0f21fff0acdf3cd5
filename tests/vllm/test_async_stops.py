# SPDX-License-Identifier: Apache-2.0
"""Steps in flight when a request ends by itself, and when all KV becomes invalid.

- A stop token is seen one step late: the next step runs already, and is counted as computed.
- A reset (new weights) comes while steps are in flight: what they save is KV of the old
  weights, and so is what a request that is running has in HBM. None of it may come back.

On the scripted worker of test_async_scheduling.py, where the KV of a token tells its tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest
from blake3 import blake3
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.request import Request

from attnstore_lab.testing.tiny_model import TINY, make_model
from attnstore_vllm.scheduler.reset_watch import ResetWatch
from attnstore_vllm.types import Seen
from tests.vllm import scripted_worker
from tests.vllm.scripted import ScriptedEngine
from tests.vllm.scripted_worker import TOKEN_KV, VOCAB
from tests.vllm.stepped import SteppedEngine, leave_to_chance
from tests.vllm.test_async_scheduling import check_stored, wait_until_quiet

STOP = 7
"""One token in VOCAB: a request ends after some fifty of them."""


@pytest.fixture(scope="module")
def model(models: Path) -> Path:
    return make_model(models / "scripted", TINY, weights=False)


@pytest.fixture(params=[2, 3, "beside"])
def engine(
    request: pytest.FixtureRequest, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[ScriptedEngine]:
    """With steps in flight, and KV that depends on the weights; copies beside the model or not."""
    monkeypatch.setattr(scripted_worker, "extend_kv", _extend_kv)
    monkeypatch.setattr("tests.vllm.test_async_scheduling.extend_kv", _extend_kv)
    monkeypatch.setattr(_Weights, "version", 0)
    engine: ScriptedEngine
    if request.param == "beside":
        engine = SteppedEngine(
            model,
            tmp_path / "store",
            num_blocks=60,
            depth=2,
            seed=3,
            rows=6,
            compute_if_sooner=True,
            looks_at_weights=True,
        )
        leave_to_chance(engine, seed=3)
    else:
        engine = ScriptedEngine(
            model, tmp_path / "store", num_blocks=60, depth=request.param, seed=3
        )
    yield engine
    engine.close()


class _Weights:
    version = 0


def _extend_kv(kv: list[bytes], tokens: list[int], *_: object) -> None:
    for token in tokens[len(kv) :]:
        before = kv[-1] if kv else _Weights.version.to_bytes(4, "little")
        kv.append(blake3(before + token.to_bytes(4, "little")).digest(length=TOKEN_KV))


def add(engine: ScriptedEngine, name: str, prompt: list[int], max_tokens: int = 100) -> Request:
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0, stop_token_ids=[STOP])
    request = Request(
        request_id=name,
        prompt_token_ids=prompt,
        sampling_params=sampling,
        pooling_params=None,
        block_hasher=engine._hasher,
    )
    engine.scheduler.add_request(request)
    return request


def plain(random: Random, count: int) -> list[int]:
    return [random.choice([t for t in range(VOCAB) if t != STOP]) for _ in range(count)]


def test_a_stop_token(engine: ScriptedEngine) -> None:
    """What is stored ends with the stop, whose KV the step has computed that was in flight."""
    random, stopped = Random(1), 0
    for i in range(25):
        prompt = plain(random, random.randrange(20, 150))
        request = add(engine, str(i), prompt)
        if i % 3:
            engine.drain()
            tokens = list(request.all_token_ids)
            stopped += tokens[-1] == STOP and len(tokens) < len(prompt) + 100
            wait_until_quiet(engine.ours)
            assert engine.scheduler.reset_prefix_cache()
            add(engine, f"{i}, next turn", [*tokens, *plain(random, 20)], 5)
        else:
            engine.step()
    engine.drain()
    wait_until_quiet(engine.ours)
    assert stopped > 5
    assert check_stored(engine) > 20
    assert engine.worker.loaded_tokens > 1000


def new_weights(engine: ScriptedEngine, *, is_told: bool) -> None:
    """From the next step on the model is another one. Requests that run begin anew.

    Args:
        is_told: whether vLLM resets connectors too, or its own prefix cache alone.

    vLLM refuses while a step is in flight, or a copy holds the blocks of a request that does not
    run, and then nothing is reset: whoever brings new weights pauses, and tries again.
    """
    engine.scheduler.set_pause_state(PauseState.PAUSED_NEW)
    for _ in range(200):
        while engine.in_flight:
            engine.finish_oldest()
        try:
            engine.scheduler.reset_prefix_cache(True, reset_connector=is_told)
            break
        except RuntimeError as error:
            if "Failed to reset KV cache" not in str(error):
                raise
            engine.step()
    else:
        raise AssertionError("no reset succeeded")
    resume(engine, _Weights.version + 1)


def resume(engine: ScriptedEngine, version: int) -> None:
    """The pause is over, and the weights are these."""
    engine.scheduler.set_pause_state(PauseState.UNPAUSED)
    _Weights.version = version
    for row in engine.worker._rows.values():
        row.kv.clear()


@pytest.mark.parametrize("is_told", [True, False])
@pytest.mark.parametrize("seed", range(3))
def test_new_weights(engine: ScriptedEngine, seed: int, is_told: bool) -> None:
    play_with_resets(engine, seed, is_told=is_told)
    assert check_stored(engine) > 5, "what was stored since the last reset is of its weights"
    assert engine.worker.loaded_tokens > 500


def test_a_reset_without_effect_is_seen(
    engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine.scheduler.connector, "reset_cache", lambda: True)
    monkeypatch.setattr(ResetWatch, "must_wait", lambda _: False)  # it would see it too
    with pytest.raises(AssertionError, match="wrong KV"):
        play_with_resets(engine, 0)


def test_weights_that_nobody_looks_at_are_seen(
    engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ResetWatch, "must_wait", lambda _: False)
    with pytest.raises(AssertionError, match="wrong KV"):
        play_with_resets(engine, 0, is_told=False)


def play_with_resets(engine: ScriptedEngine, seed: int, *, is_told: bool = True) -> None:
    """Requests that share their beginnings; new weights, and an empty HBM, now and then."""
    random = Random(seed)
    seen = [_Weights.version]

    def look() -> tuple[Seen, bytes | None]:
        seen.append(_Weights.version)
        return (Seen.CHANGED if seen[-1] != seen[-2] else Seen.SAME), None

    engine.worker.side.look_at_weights = look
    beginnings = [plain(random, 120) for _ in range(2)]
    for i in range(60):
        prompt = [*random.choice(beginnings)[: random.randrange(60, 120)], *plain(random, 10)]
        add(engine, str(i), prompt, random.randrange(1, 40))
        for _ in range(random.randrange(6)):
            engine.step()
        if i % 8 == 7:
            new_weights(engine, is_told=is_told)
        elif i % 8 == 3:
            engine.drain()
            assert engine.scheduler.reset_prefix_cache()
    engine.drain()
    wait_until_quiet(engine.ours)


def chunks_after_a_reset(engine: ScriptedEngine) -> int:
    """Reset the connector alone while it saves; the requests go on."""
    random = Random(2)
    for i in range(6):
        add(engine, str(i), plain(random, 150), 80)
    steps = 0
    while steps < 5 or not engine.ours.plans.any_open():
        engine.step()
        steps += 1
        assert steps < 100, "nothing was saved"
    assert engine.scheduler.reset_connector_cache()
    engine.drain()
    wait_until_quiet(engine.ours)
    return len(engine.ours.store.residency.index)


def test_a_reset_while_saves_are_in_flight(engine: ScriptedEngine) -> None:
    """What requests had computed by then is not stored, and what is new is."""
    assert chunks_after_a_reset(engine) == 0
    add(engine, "new", plain(Random(4), 150), 10)
    engine.drain()
    wait_until_quiet(engine.ours)
    assert check_stored(engine) >= 4


def test_blocks_that_no_step_has_computed_with_are_not_saved(engine: ScriptedEngine) -> None:
    """Another connector of a MultiConnector still loads them, though vLLM counts them."""
    add(engine, "a", plain(Random(1), 150), 4)
    request = engine.scheduler.requests["a"]
    request.num_computed_tokens = 100
    assert engine.ours.request_finished(request, (list(range(1, 11)),)) == (False, None)
    assert not engine.ours.plans.any_open()
    request.num_computed_tokens = 0
    engine.abort("a")
    engine.drain()


def test_a_save_that_survives_a_reset_is_seen(
    engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    residency = engine.ours.store.residency

    def drop_what_is_ready() -> None:
        for chunk in list(residency.index):
            if not chunk.dram.uses:
                residency.drop(chunk)

    monkeypatch.setattr(residency, "drop_all", drop_what_is_ready)
    assert chunks_after_a_reset(engine) > 0
