# SPDX-License-Identifier: Apache-2.0
"""Truncated prompts of models with several KV cache groups, on a real engine: each group's K is
turned as that group turns it, windows have what they need, and the answers are the reference's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from attnstore_lab.testing.family_models import COMMON, FAMILIES, WINDOW
from attnstore_vllm.index.prefix import GRAIN_TOKENS
from benchmarks.rounding import drift
from tests.vllm.conftest import StartEngine
from tests.vllm.engine import Answer, Engine
from tests.vllm.family_checks import compute, forget
from tests.vllm.host import EngineHost
from tests.vllm.moved_groups import (
    ANSWER,
    ASKS,
    LENGTH,
    NEW,
    Kept,
    Served,
    array,
    reference_drifts,
    serve,
    source_positions,
)
from tests.vllm.prompts import random_tokens
from tests.vllm.test_families import options

CUTS: dict[str, Kept] = {
    "all before it": ((300, LENGTH),),
    "a middle, with the beginning kept": ((0, 170), (431, LENGTH)),
    "two": ((0, 140), (300, 700), (977, LENGTH)),
}
PART = LENGTH % GRAIN_TOKENS
UNITS = 4.0
"""Of float32, at the pair's norm: K was rounded when it was stored, is turned and rounded again,
by sines that were rounded."""
MARGIN, FLOOR = 4.0, 2e-5
"""Over what a computed prompt's answer differs from transformers' by, in nats of float32: what is
judged has another order of sums."""


@pytest.fixture(scope="module")
def engine(start_engine: StartEngine, models: Path) -> EngineHost:
    return start_engine(**options("gemma3", models))


def check_reference(name: str, models: Path, served: Served, kept: Kept) -> None:
    directory = Path(FAMILIES[name].arguments(models / "families")["model"])
    # vLLM's Cohere 2 looks one token farther back than the file says.
    config = {"sliding_window": WINDOW + 1} if name == "cohere2" else {}
    moved, plain = reference_drifts(directory, served, kept, **config)
    print(f"drift {moved:.2e}, of the computed prompt {plain:.2e}")
    assert moved <= MARGIN * max(FLOOR, plain)


def is_full(layer: int) -> bool:
    return (layer + 1) % 6 == 0


def theta_of(layer: int) -> torch.Tensor:
    """Gemma 3's two bases: its local layers', and that of each sixth layer."""
    dim = COMMON["head_dim"]
    base = 1_000_000.0 if is_full(layer) else 10_000.0
    return (1.0 / base ** (torch.arange(0, dim, 2).float() / dim)).double()


def units_off(served: Served, kept: Kept) -> dict[str, tuple[int, float, bool]]:
    """Of each layer: moved tokens whose K and V are in HBM on both sides; how far K is from the
    stored K, turned in float64; whether V is the stored one."""
    heads, dim = COMMON["num_key_value_heads"], COMMON["head_dim"]
    half, found = dim // 2, {}
    places = source_positions(kept)[: served.found]
    shift = (torch.arange(len(places)) - places).double()
    for name, (key, value) in served.kv.items():
        theta = theta_of(number := int(name.split(".")[2]))
        before_k, before_v = (array(x, heads, dim)[places] for x in served.stored[name])
        k, v = (array(x, heads, dim)[: len(places)] for x in (key, value))
        both = ~(before_k.isnan() | k.isnan()).any(-1).any(-1) & (shift != 0)
        if not is_full(number):  # what the block of a window's first token has before it is garbage
            both[: max(0, served.found - WINDOW + 1)] = False
        angle = (shift[:, None] * theta)[:, None]
        one, two = before_k[..., :half], before_k[..., half:]
        wanted = torch.cat(
            [one * angle.cos() - two * angle.sin(), two * angle.cos() + one * angle.sin()], -1
        )
        norm = torch.hypot(one, two).repeat(1, 1, 2)
        off = ((k - wanted).abs() / (norm * 2.0**-23))[both]
        same = torch.equal(v[both], before_v[both])
        found[name] = int(both.sum()), float(off.max()), same
    return found


@pytest.mark.parametrize(
    "cut", [x if "middle" in x else pytest.param(x, marks=pytest.mark.long) for x in CUTS]
)
def test_gemma3(engine: EngineHost, models: Path, cut: str) -> None:
    kept = CUTS[cut]
    served = engine.call(serve, cut, kept)
    total = sum(stop - start for start, stop in kept)
    placed = kept[0][1] if kept[0][0] == 0 else 0
    assert (served.found, served.moved) == (total - PART, total - PART - placed), engine.log_text()
    for name, (count, off, same) in units_off(served, kept).items():
        # A window layer has the last of them alone; of the source some are gone by then.
        in_window = min(served.moved, WINDOW - 1)
        least = served.moved if is_full(int(name.split(".")[2])) else in_window
        print(name, count, off)
        assert count >= least, name
        assert off <= UNITS, name
        assert same, name
    check_reference("gemma3", models, served, kept)


@pytest.mark.long
def test_from_nvme(engine: EngineHost, models: Path) -> None:
    """Neither the source's tokens nor its sections' are in DRAM."""
    kept = CUTS["all before it"]
    served = engine.call(serve, "nvme", kept, "nvme")
    assert served.moved == LENGTH - 300 - PART, engine.log_text()
    check_reference("gemma3", models, served, kept)


def chain(engine: Engine, turns: int) -> list[tuple[int, int]]:
    """A conversation that is cut before each turn: tokens moved, and kept."""
    text = random_tokens("chain", LENGTH)
    engine.ask(text, salt="chain", max_tokens=2, extra_args=ASKS)
    found = []
    for turn in range(turns):
        forget(engine)
        text = text[250:] + random_tokens(("chain", turn), 250)
        before = int(engine.metric("moved_tokens", "dram"))
        engine.ask(text, salt="chain", max_tokens=1, extra_args=ASKS)
        found.append((int(engine.metric("moved_tokens", "dram")) - before, len(text) - 250))
    return found


def test_a_conversation_that_is_cut_again_and_again(engine: EngineHost) -> None:
    """Windows reach from a turn's own tokens back into those of several before it."""
    found = engine.call(chain, 4)
    assert all(kept - moved <= GRAIN_TOKENS for moved, kept in found), found


def others(engine: Engine) -> tuple[Answer, list[Answer]]:
    """The same tokens as a truncated request's, as everybody else gets them: computed, and then
    asked for while the moved KV is in HBM, and after."""
    source = random_tokens("others", LENGTH)
    kept = source[300:] + random_tokens("others, new", NEW)
    expected = compute(engine, kept, 0)
    engine.ask(source, salt="others", max_tokens=2, extra_args=ASKS)
    forget(engine)
    engine.ask(kept, salt="others", max_tokens=ANSWER, extra_args=ASKS)
    first = engine.ask(kept, salt="others", max_tokens=len(expected.tokens))
    forget(engine)
    return expected, [first, engine.ask(kept, salt="others", max_tokens=len(expected.tokens))]


def test_others_get_exact_answers(engine: EngineHost) -> None:
    before = int(engine.call(Engine.metric, "moved_tokens", "dram"))
    expected, (while_there, after) = engine.call(others)
    moved = int(engine.call(Engine.metric, "moved_tokens", "dram")) - before
    assert moved == LENGTH - 300 - PART
    assert while_there.cached_tokens == 0
    assert after.cached_tokens > 0, "what was computed for everybody"
    for answer in (while_there, after):
        assert drift(expected, answer) <= MARGIN * FLOOR
    engine.call(Engine.check_quiet)


MOVED = ("gemma2", "gpt_oss", "cohere2", "llama4")
"""Other rotations: YaRN, pairs of neighbours, none at all in layers with all tokens."""


@pytest.mark.long
@pytest.mark.parametrize("name", MOVED)
def test_other_families(start_engine: StartEngine, models: Path, name: str) -> None:
    host = start_engine(**options(name, models))
    kept = CUTS["two"]
    served = host.call(serve, "two", kept)
    total = sum(stop - start for start, stop in kept)
    print(served.found, served.moved, total)
    said = [x for x in host.log_text().splitlines() if "truncated prompts are computed: " in x]
    assert said == []
    assert served.moved == total - PART - 140, "no token after a cut is the one that was cut"
    check_reference(name, models, served, kept)
    assert served.found == total - PART


def cut(engine: Engine) -> int:
    """Tokens moved for a prompt whose beginning was cut."""
    source = random_tokens("refused", LENGTH)
    engine.ask(source, salt="refused", max_tokens=2, extra_args=ASKS)
    forget(engine)
    engine.ask(source[300:], salt="refused", max_tokens=2, extra_args=ASKS)
    return int(engine.metric("moved_tokens", "dram"))


REFUSED = {
    "qwen3_next": "it has recurrent states",
    "gemma4": "its rotary embedding is Gemma4RotaryEmbedding, which is not known",
    "olmo3": "has 0 rotary embeddings beside it",  # transformers' code has one for all
}


@pytest.mark.long
@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_name(start_engine: StartEngine, models: Path, name: str) -> None:
    host = start_engine(**options(name, models))
    assert host.call(cut) == 0
    said = [x for x in host.log_text().splitlines() if "truncated prompts are computed: " in x]
    assert len(said) == 1 and REFUSED[name] in said[0], said
