# SPDX-License-Identifier: Apache-2.0
"""Truncated prompts on a real engine: what is moved is right, and no other request gets it.

It is long since all cases share the engine and what they know of it.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.request import Request

from attnstore_lab.testing.tiny_model import TINY
from attnstore_vllm.config.settings import TruncationConfig
from attnstore_vllm.index.prefix import GRAIN_TOKENS, Piece, whole_blocks
from attnstore_vllm.scheduler.request import make_state
from attnstore_vllm.scheduler.truncation import Truncation
from benchmarks.rounding import beyond, bound
from tests.vllm.conftest import StartEngine
from tests.vllm.engine import BLOCK, Answer, Engine
from tests.vllm.host import EngineHost
from tests.vllm.prompts import random_tokens

ASKS = {"kv_transfer_params": {"attnstore": {"truncation": True, "report": True}}}
LENGTH = 1000
PART = LENGTH % GRAIN_TOKENS
"""Of a block, at the end of a prompt: no hit ends there."""
CUTS = {
    "all before it": lambda p: p[300:],
    "a middle, with the beginning kept": lambda p: p[:170] + p[431:],
    "two": lambda p: p[:140] + p[300:520] + p[777:],
    "a block": lambda p: p[BLOCK:],
}


@pytest.fixture(scope="module")
def engine(start_engine: StartEngine) -> EngineHost:
    return start_engine(dram="32MiB", shape=TINY)


def _store(engine: Engine, prompt: list[int], salt: str) -> None:
    engine.ask(prompt, salt=salt, max_tokens=2, extra_args=ASKS)
    engine.forget_hbm()
    engine.loaded()


def _moved(engine: Engine) -> int:
    return int(engine.metric("moved_tokens", "dram"))


def kv_of(
    engine: Engine, prompt: list[int], salt: str, *, layers: int = TINY.layers, **how: Any
) -> tuple[list[Any], int]:
    """KV in HBM when the first token was said, and the tokens that were moved."""
    before = _moved(engine)
    number = engine.submit(prompt, salt=salt, max_tokens=3, **how)
    engine.wait_for(lambda: engine.request(number).num_output_tokens > 0, engine.step)
    blocks = engine.block_ids(number)
    plain: list[Any] = engine.llm.collective_rpc(plain_kv, args=(blocks, len(prompt), layers))
    engine.finish(number)
    engine.drain()
    return plain[0], _moved(engine) - before


def plain_kv(
    worker: Any, blocks: list[int], tokens: int, num_layers: int = TINY.layers
) -> list[tuple[bytes, bytes]]:
    """K and V of each layer, [tokens, heads, dim] float32, read through the probed layout."""
    from tests.vllm.plain_kv import read_plain

    found = [read_plain(worker, layer, blocks, tokens) for layer in range(num_layers)]
    return [(k.numpy().tobytes(), v.numpy().tobytes()) for k, v in found]


def compare(engine: Engine, cut: str) -> tuple[int, float, bool, float]:
    """Moved tokens; the largest difference of K in layer 0, in units in the last place of the
    pair's norm; whether V in layer 0 is the same; the largest of K in layer 1, for contrast."""
    prompt = random_tokens(cut, LENGTH)
    _store(engine, prompt, cut)
    kept = CUTS[cut](prompt) + random_tokens((cut, "new"), 40)
    served, moved = kv_of(engine, kept, cut, extra_args=ASKS)
    engine.forget_hbm()
    computed, none = kv_of(engine, kept, "another " + cut)
    assert none == 0
    shape = (len(kept), TINY.kv_heads, TINY.head_dim)

    def array(raw: bytes) -> torch.Tensor:
        return torch.frombuffer(bytearray(raw), dtype=torch.float32).reshape(shape)

    def apart(layer: int) -> float:
        a, b = array(served[layer][0]), array(computed[layer][0])
        half = TINY.head_dim // 2
        norm = torch.hypot(b[..., :half], b[..., half:])
        step = torch.exp2(torch.floor(torch.log2(norm)) - 7)  # of bfloat16
        difference = torch.maximum((a - b)[..., :half].abs(), (a - b)[..., half:].abs())
        return float((difference / step).max())

    return moved, apart(0), served[0][1] == computed[0][1], apart(1)


@pytest.mark.parametrize("cut", CUTS)
def test_layer_0_is_what_vllm_computes(engine: EngineHost, cut: str) -> None:
    """There only rounding differs: K and V depend on the token and its position alone."""
    moved, keys, same_values, deeper = engine.call(compare, cut)
    kept = len(CUTS[cut](list(range(LENGTH))))
    first = {"all before it": 0, "a block": 0}.get(cut, 170 if "middle" in cut else 140)
    assert moved == kept - first - PART
    assert keys <= 2.0, "units in the last place"
    assert same_values
    assert deeper > 8.0, "the deeper layers have seen what was cut"


STORED = 900  # of the tokens that others ask for; the rest is computed again


def others(engine: Engine, seed: str) -> dict[str, Any]:
    """After a truncated request: KV of the very same tokens as everybody else gets it, and tokens
    that came from the store."""
    prompt = random_tokens(seed, LENGTH)
    kept = prompt[300:] + random_tokens((seed, "new"), 300)
    num_bytes = STORED * TINY.kv_heads * TINY.head_dim * 4

    def kv(salt: str, **how: Any) -> tuple[list[tuple[bytes, bytes]], int, int]:
        engine.loaded()
        layers, moved = kv_of(engine, kept, salt, **how)
        return [(k[:num_bytes], v[:num_bytes]) for k, v in layers], moved, engine.loaded()["dram"]

    found: dict[str, Any] = {"expected": kv("reference")}
    engine.forget_hbm()
    _store(engine, prompt, seed)
    found["served"] = kv(seed, extra_args=ASKS)
    found["hbm"] = kv(seed)
    engine.forget_hbm()
    found["again"] = kv(seed)
    return found


def test_others_get_exact_kv(engine: EngineHost) -> None:
    """Bit by bit, in all layers, and both while the moved KV is in HBM and when it is stored."""
    found = engine.call(others, "others")
    expected, _, _ = found["expected"]
    served, moved, _ = found["served"]
    assert moved == LENGTH - 300 - PART
    assert served != expected, "it is approximate"
    assert found["hbm"] == (expected, 0, 0), "nothing of it is found"
    again, moved, loaded = found["again"]
    assert (moved, loaded > STORED) == (0, True), "from the store, exact"
    assert again == expected


def at_once(engine: Engine, seed: str) -> tuple[Answer, Answer, int]:
    """The same tokens, exact, asked for in the step in which the others are moved, and after."""
    prompt = random_tokens(seed, LENGTH)
    kept = prompt[300:] + random_tokens((seed, "new"), 40)
    expected = engine.ask(kept, salt="reference", max_tokens=4)
    engine.forget_hbm()
    _store(engine, prompt, seed)
    first = engine.submit(kept, salt=seed, max_tokens=200, extra_args=ASKS)
    second = engine.submit(kept, salt=seed, max_tokens=4)
    (answer,) = engine.finish(second)
    said = [*kept, *engine.answers(first)[0].tokens]
    third = engine.submit(said, salt=seed, max_tokens=4)
    (later,) = engine.finish(third)
    engine.finish(first)
    engine.drain()
    return expected, answer, later.cached_tokens


def test_within_one_step(engine: EngineHost) -> None:
    expected, answer, cached = engine.call(at_once, "at once")
    assert answer.cached_tokens == 0
    assert answer.tokens == expected.tokens
    assert cached <= LENGTH - 300 + 40, "what the exact one has computed, and no more"


def chain(engine: Engine, turns: int) -> list[tuple[int, int]]:
    """A conversation that is cut before each turn: tokens moved, and kept."""
    text = random_tokens("chain", LENGTH)
    _store(engine, text, "chain")
    found = []
    for turn in range(turns):
        text = text[250:] + random_tokens(("chain", turn), 250)
        before = _moved(engine)
        engine.ask(text, salt="chain", max_tokens=1, extra_args=ASKS)
        engine.forget_hbm()
        found.append((_moved(engine) - before, len(text) - 250))
    return found


def test_a_conversation_that_is_cut_again_and_again(engine: EngineHost) -> None:
    """Each turn's own tokens are found too, where they were computed first."""
    found = engine.call(chain, 6)
    assert all(kept - moved <= 16 for moved, kept in found), found


def two_ways(engine: Engine) -> tuple[list[int], list[bool]]:
    """The end of a text, moved by two cuts and by one: tokens moved, and by layer whether K and V
    are the same. Before the second cut most of the text's last chunk is moved KV."""
    text = random_tokens("one rotation", LENGTH)
    added = [random_tokens(("one rotation", turn), 100) for turn in range(2)]
    kept = text[780:]
    served, moved = [], []
    for salt, cuts in (("twice", (250, 530)), ("at once", (780,))):
        _store(engine, text, salt)
        said = text
        for cut, new in zip(cuts, added, strict=False):
            said = said[cut:] + new
            kv, tokens = kv_of(engine, said, salt, extra_args=ASKS)
            engine.forget_hbm()
            moved.append(tokens)
        served.append(kv)
    num_bytes = (len(kept) - PART) * TINY.kv_heads * TINY.head_dim * 4
    same = [
        all(a[:num_bytes] == b[:num_bytes] for a, b in zip(*sides, strict=True))
        for sides in zip(*served, strict=True)
    ]
    return moved, same


def test_cut_twice_is_one_rotation(engine: EngineHost) -> None:
    """The chunk that the first cut leaves has the tokens too, but moved: it is never the source."""
    moved, same = engine.call(two_ways)
    # The second goes on with what the first has computed: up to the last whole block.
    assert moved == [750 - PART, whole_blocks(530 + 220 + 100) - 530, 220 - PART]
    assert all(same), same


def unasked(engine: Engine) -> tuple[int, int, int]:
    prompt = random_tokens("unasked", LENGTH)
    _store(engine, prompt, "unasked")
    before = _moved(engine)
    engine.ask(prompt[300:], salt="unasked", max_tokens=1)
    engine.ask(prompt[301:], salt="another", max_tokens=1, extra_args=ASKS)
    nothing = _moved(engine) - before
    engine.ask(prompt[302:], salt="unasked", max_tokens=1, extra_args=ASKS)
    return nothing, _moved(engine) - before, len(prompt) - 302


def test_only_who_asks_and_within_a_tenant(engine: EngineHost) -> None:
    nothing, moved, kept = engine.call(unasked)
    assert nothing == 0
    assert moved == kept - PART


def within_a_chunk(engine: Engine) -> tuple[int, dict[str, int]]:
    """Tokens moved to the beginning of a chunk, and what an exact request then finds of it."""
    prompt = random_tokens("short", 400)
    _store(engine, prompt, "short")
    before = _moved(engine)
    kept = prompt[300:] + random_tokens("short, new", 200)
    _store(engine, kept, "short")
    engine.ask(kept, salt="short", max_tokens=1)
    return _moved(engine) - before, engine.loaded()


def test_what_follows_in_the_same_chunk_is_not_found(engine: EngineHost) -> None:
    moved, found = engine.call(within_a_chunk)
    # What is stored ends one token behind the prompt: no other end is within a block of it.
    assert moved == 100 - GRAIN_TOKENS
    assert found == {"dram": 0, "nvme": 0}


def used_in_place(engine: Engine) -> tuple[int, int]:
    """Tokens moved behind a prompt's beginning, and then of nearly all of that prompt."""
    prompt = random_tokens("in place", LENGTH)
    _store(engine, prompt, "in place")
    before = _moved(engine)
    short = prompt[:170] + prompt[431:500] + random_tokens("in place, new", 40)
    _store(engine, short, "in place")
    between = _moved(engine)
    engine.ask(prompt[100:], salt="in place", max_tokens=1, extra_args=ASKS)
    engine.forget_hbm()
    return between - before, _moved(engine) - between


def test_a_chunk_that_is_used_in_its_place_stays_exact(engine: EngineHost) -> None:
    assert engine.call(used_in_place) == (whole_blocks(500) - 431, LENGTH - 100 - PART)


def test_nothing_is_held_afterwards(engine: EngineHost) -> None:
    engine.call(Engine.check_quiet)


def crowd(engine: Engine) -> tuple[list[Answer], list[Answer], int, int]:
    """Cut requests that preempt each other, some aborted, and exact ones of the same tokens."""
    prompts = [random_tokens(("crowd", n), 700) for n in range(8)]
    kept = [p[150 + n :] + random_tokens(("crowd", n, "new"), 60) for n, p in enumerate(prompts)]
    expected = [engine.ask(k, salt="reference", max_tokens=4) for k in kept]
    for prompt in prompts:
        engine.ask(prompt, salt="crowd", max_tokens=2, extra_args=ASKS)
    engine.forget_hbm()
    moved, preempted = _moved(engine), _preemptions(engine)
    cut = [engine.submit(k, salt="crowd", max_tokens=200, extra_args=ASKS) for k in kept]
    for _ in range(5):
        engine.step()
    engine.abort(cut[0])
    exact = [engine.submit(k, salt="crowd", max_tokens=4) for k in kept]
    engine.abort(cut[1])
    answers = engine.finish(*exact)
    engine.finish(*cut[2:])
    engine.check_quiet()
    return expected, answers, _moved(engine) - moved, _preemptions(engine) - preempted


def _preemptions(engine: Engine) -> int:
    return sum(int(m.value) for m in engine.llm.get_metrics() if m.name == "vllm:num_preemptions")


def test_preempted_and_aborted(start_engine: StartEngine) -> None:
    host = start_engine(dram="32MiB", shape=TINY, blocks=34)
    expected, answers, moved, preemptions = host.call(crowd)
    assert preemptions > 0
    assert moved > 2000
    limit = bound([])
    assert beyond(list(zip(expected, answers, strict=True)), limit) == []


def settings(engine: Engine) -> list[int]:
    """Tokens moved, by what the request says of truncation."""
    prompt = random_tokens("settings", LENGTH)
    engine.ask(prompt, max_tokens=1)
    found = []
    for cut, says in ((300, None), (301, False), (302, True)):
        engine.forget_hbm()
        before = _moved(engine)
        params = {} if says is None else {"truncation": says}
        extra = {"kv_transfer_params": {"attnstore": params}}
        engine.ask(prompt[cut:], max_tokens=1, extra_args=extra)
        engine.forget_hbm()
        engine.ask(prompt[:20] + prompt[cut:], max_tokens=1, extra_args=extra)
        found.append(_moved(engine) - before)
    return found


def test_enabled_for_all_with_sinks(start_engine: StartEngine) -> None:
    host = start_engine(
        dram="32MiB",
        shape=TINY,
        settings={"truncation": {"enabled": True, "sinks": 16, "share": "everyone"}},
    )
    found = host.call(settings)
    assert found == [LENGTH - 300 - PART, 0, LENGTH - 302 - PART], "only behind 16 tokens in place"


@pytest.mark.parametrize("first", [2, 5])
def test_names_of_blocks(first: int) -> None:
    """Hidden from the first moved token on, also where no block is full yet; each time others, and
    given back with the offer."""
    init_none_hash(sha256)
    length = 5 * BLOCK + 3
    request = Request(
        "request",
        list(range(length)),
        SamplingParams(max_tokens=1),
        None,
        block_hasher=get_request_block_hasher(BLOCK, sha256),
    )
    state = make_state(request, bytes(32), b"", 2 * BLOCK)
    truncation = Truncation(None, TruncationConfig(), None)  # type: ignore[arg-type]
    manager: Any = SimpleNamespace(block_pool=SimpleNamespace(hash_block_size=BLOCK))
    chunk: Any = None
    pieces = [Piece(chunk, 0, first * BLOCK), Piece(chunk, first * BLOCK, length, first=3)]
    exact = list(request.block_hashes)
    hidden: list[Any] = []
    for number in (6, 7):
        truncation.offer(state, pieces, manager)
        request.append_output_token_ids(list(range(BLOCK)))
        assert request.block_hashes[:first] == exact[:first]
        hidden += request.block_hashes[first:]
        truncation.take_back(state)
        assert state.moved is None
        assert request.block_hashes[: len(exact)] == exact
        exact = list(request.block_hashes)
        assert len(exact) == number
    assert len(set(hidden)) == len(hidden) == 6 + 7 - 2 * first
    assert not set(hidden) & set(exact)


def test_a_chunk_is_known_by_the_tokens_that_were_moved_before_it() -> None:
    """Served again with fewer of them, a prompt leaves other chunks: what was noted of the first,
    which of their tokens may be moved, stays right."""
    sampling = SamplingParams(max_tokens=1)
    state = make_state(Request("request", list(range(900)), sampling, None), bytes(32), b"", 256)
    names = []
    for moved in (None, range(800), range(600), range(100, 600)):
        state.begin_lineage(moved)
        names.append(state.sequence.name(2, bytes(32)).key)
    exact, more, less, also = names
    assert len({exact, more, less}) == 3
    assert less == also, "where they begin is in the chunks before"


def test_off() -> None:
    everyone = TruncationConfig(shared_by="everyone")
    for config, reason, salt, found in (
        (None, None, "salt", False),
        (everyone, "no RoPE", "salt", False),
        (everyone, None, None, True),
        (TruncationConfig(), None, "salt", True),
        (TruncationConfig(), None, None, False),  # others could read it token by token
    ):
        state = SimpleNamespace(finds_moved=False, request=SimpleNamespace(cache_salt=salt))
        truncation = Truncation(None, config, reason)  # type: ignore[arg-type]
        truncation.note(state)  # type: ignore[arg-type]
        assert state.finds_moved == found
