# SPDX-License-Identifier: Apache-2.0
"""Decode and prefill context parallelism, without a device that runs it: vLLM's real scheduler and
managers, its own slot mapping, and our real sides.

Goal: what each rank's worker saves of a block and loads into another is what the rank's own tokens
had, token by token; wherever a hit ends; and no other spread of tokens finds it.
"""

from __future__ import annotations

import dataclasses
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from vllm.config import ParallelConfig
from vllm.distributed import parallel_state
from vllm.v1.attention.backends.utils import get_dcp_local_seq_lens
from vllm.v1.core.kv_cache_utils import resolve_dcp_kv_block_size
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    KVCacheTensor,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)

from attnstore_lab.testing.tiny_model import TINY, make_model
from attnstore_vllm.connector import context_parallel, support
from attnstore_vllm.connector.groups import groups_of
from attnstore_vllm.errors import UnsupportedError
from attnstore_vllm.identity.rank import KvFacts, part_text
from tests.vllm.context_ranks import (
    CHUNK,
    ContextEngine,
    GroupedContextEngine,
    Ranks,
    settle,
)
from tests.vllm.grouped import Kind
from tests.vllm.kernel_text import PAD, V1, V2, slots_of
from tests.vllm.scripted import ScriptedEngine
from tests.vllm.scripted_worker import BLOCK, VOCAB
from tests.vllm.test_async_scheduling import wait_until_quiet

INTERLEAVES = (1, 16)
SPREADS = [
    *(Ranks(max(2, decode), decode, 1, i) for decode in (1, 2, 4) for i in INTERLEAVES),
    *(Ranks(2, decode, 2, i) for decode in (1, 2, 4) for i in INTERLEAVES),
]


def name_of(ranks: Ranks) -> str:
    return f"tp{ranks.tensor} dcp{ranks.decode} pcp{ranks.prefill} by {ranks.interleave}"


@pytest.fixture(scope="module")
def model(models: Path) -> Path:
    return make_model(models / "scripted", TINY, weights=False)


# ---- whole stories -------------------------------------------------------------------------


def tell(engine: ScriptedEngine, seed: int, requests: int = 24) -> list[list[int]]:
    """Requests that begin alike and end anywhere. Now and then HBM forgets all. Returns the
    prompts."""
    random = Random(seed)
    texts = [[random.randrange(VOCAB) for _ in range(420)] for _ in range(3)]
    prompts = []
    for number in range(requests):
        own = [random.randrange(VOCAB) for _ in range(random.randrange(1, 40))]
        prompt = random.choice(texts)[: random.randrange(1, 400)] + own
        engine.add(f"{seed} {number}", prompt, random.randrange(1, 12))
        prompts.append(prompt)
        for _ in range(random.randrange(5)):
            engine.step()
        if random.random() < 0.2:
            engine.abort(f"{seed} {number}")
        if random.random() < 0.3:
            settle(engine)
            assert engine.scheduler.reset_prefix_cache()
    settle(engine)
    wait_until_quiet(engine.ours)
    return prompts


@pytest.mark.parametrize("ranks", SPREADS, ids=name_of)
def test_no_rank_sees_kv_of_other_tokens(ranks: Ranks, model: Path, tmp_path: Path) -> None:
    """ContextWorker looks at each token of each layer in each step. Then a restart finds all of
    it on NVMe."""
    depth = 1 if ranks.interleave == 1 else 2
    engine = ContextEngine(model, tmp_path / "store", ranks, seed=1, depth=depth)
    assert engine.ours.geometry.block_tokens == BLOCK * ranks.decode
    manager = engine.scheduler.kv_cache_manager.coordinator.single_type_managers[0]
    assert engine.ours.geometry.block_tokens == manager.block_size
    prompts = tell(engine, 1)
    assert all(engine.loaded), engine.loaded
    engine.close()
    engine = ContextEngine(model, tmp_path / "store", ranks, seed=2, depth=depth)
    wait_until_quiet(engine.ours)
    for number, prompt in enumerate(prompts):
        engine.add(f"again {number}", prompt, 2)
        settle(engine)
    assert all(engine.loaded), engine.loaded
    engine.close()


@pytest.mark.parametrize("ranks", [Ranks(2, 2), Ranks(2, 2, 1, 16), Ranks(4, 2)], ids=name_of)
def test_states_beside_tokens_that_are_spread(ranks: Ranks, model: Path, tmp_path: Path) -> None:
    """Blocks of 32 tokens on each of two ranks are blocks of 64; those of states stay."""
    kinds = (Kind("state", block=64), Kind("full", block=32))
    engine = GroupedContextEngine(model, tmp_path / "store", ranks, kinds, seed=1)
    assert [group.block_tokens for group in engine.ours.geometry.groups] == [64, 64]
    tell(engine, 1)
    loaded = [worker.loaded_tokens for worker in engine.workers]
    assert all(loaded), loaded
    engine.close()


def ends_of(engine: ContextEngine, lengths: list[int]) -> list[int]:
    """How many tokens each of these beginnings of one stored text finds, with HBM empty."""
    text = [Random(5).randrange(VOCAB) for _ in range(3 * CHUNK)]
    engine.add("all", text, 1)
    settle(engine)
    wait_until_quiet(engine.ours)
    found = []
    for length in lengths:
        assert engine.scheduler.reset_prefix_cache()
        before = engine.workers[0].loaded_tokens
        engine.add(f"{length}", [*text[:length], VOCAB, VOCAB, VOCAB], 1)
        settle(engine)
        found.append(engine.workers[0].loaded_tokens - before)
    return found


@pytest.mark.parametrize("interleave", INTERLEAVES)
def test_hits_end_inside_of_blocks(interleave: int, model: Path, tmp_path: Path) -> None:
    """A block has 64 tokens on 4 ranks; hits end at each 16 of them, where some ranks have a part
    of their page, and some have nothing. All pages of the last block are loaded."""
    ranks = Ranks(4, 4, 1, interleave)
    engine = ContextEngine(model, tmp_path / "store", ranks, seed=1)
    lengths = [48, 64, 80, 96, 112, 128, 200, 305]
    blocks = [-(-(length // 16 * 16) // 64) for length in lengths]
    assert ends_of(engine, lengths) == [count * 64 for count in blocks]
    engine.close()


# ---- faults that are seen ------------------------------------------------------------------


BY_ONE, BY_BLOCK = Ranks(2, 2, 1, 1), Ranks(2, 2, 1, 16)
FAULTS = [
    pytest.param(BY_BLOCK, False, id="another interleave size"),
    pytest.param(BY_ONE, True, id="ranks swapped"),
]


def answer_again(
    model: Path, store: Path, ranks: Ranks, *, swapped: bool, hides: bool
) -> list[int]:
    """An engine leaves KV, and one with the same settings and other places of tokens comes after
    it. Returns what its ranks load for its first request."""
    engine = ContextEngine(model, store, BY_ONE, seed=1)
    prompts = tell(engine, 3, requests=8)
    engine.close()
    engine = ContextEngine(
        model, store, ranks, seed=2, settings=BY_ONE, swapped=swapped, hides=hides
    )
    with closing(engine):
        wait_until_quiet(engine.ours)  # it has read what is there
        engine.add("again", max(prompts, key=len), 2)
        settle(engine)
        return engine.loaded


@pytest.mark.parametrize(("ranks", "swapped"), FAULTS)
def test_tokens_in_other_places_under_one_name_would_be_seen(
    ranks: Ranks, swapped: bool, model: Path, tmp_path: Path
) -> None:
    with pytest.raises(AssertionError, match="wrong KV of token"):
        answer_again(model, tmp_path / "store", ranks, swapped=swapped, hides=True)


@pytest.mark.parametrize(("ranks", "swapped"), FAULTS)
def test_tokens_in_other_places_have_another_name(
    ranks: Ranks, swapped: bool, model: Path, tmp_path: Path
) -> None:
    """Each rank tells its part; the settings are the same."""
    store = tmp_path / "store"
    assert answer_again(model, store, ranks, swapped=swapped, hides=False) == [0, 0]


def test_tokens_in_the_same_places_are_found(model: Path, tmp_path: Path) -> None:
    assert all(answer_again(model, tmp_path / "store", BY_ONE, swapped=False, hides=False))


# ---- names ---------------------------------------------------------------------------------


def facts(part: str) -> KvFacts:
    return KvFacts("cpu", "torch.uint8", (16, 16), 256, (0, 1), (1, 2), "", "", (), part=part)


def test_each_spread_has_a_name() -> None:
    """Sizes, each rank's number, and the interleave size where tokens are spread."""
    told = {name_of(r): [facts(r.part(k)).facts() for k in range(r.count)] for r in SPREADS}
    apart = {name: repr(ranks) for name, ranks in told.items() if "dcp1" not in name}
    assert len(set(apart.values())) == len(apart)
    for ranks in SPREADS:
        parts = {ranks.part(rank) for rank in range(ranks.count)}
        assert len(parts) == max(ranks.decode, ranks.prefill)
    assert part_text((0, 1), (1, 2), 1) == part_text((0, 1), (1, 2), 16)


def test_a_start_with_tensor_ranks_alone_keeps_its_name() -> None:
    assert "part" not in facts("").facts()
    assert facts("x").facts() == facts("").facts() | {"part": "x"}


class Group:
    """A process group."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank_in_group, self.world_size = rank, size


def config_of(ranks: Ranks, interleave: int | None = None) -> Any:
    parallel = ParallelConfig(
        tensor_parallel_size=ranks.tensor,
        decode_context_parallel_size=ranks.decode,
        prefill_context_parallel_size=ranks.prefill,
        cp_kv_cache_interleave_size=interleave or ranks.interleave,
    )
    return type("Config", (), {"parallel_config": parallel, "model_config": None})()


@pytest.mark.parametrize("ranks", SPREADS, ids=name_of)
def test_a_worker_tells_what_vllms_groups_say(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(ranks)
    assert context_parallel.num_ranks_of(config) == ranks.count == config.parallel_config.world_size
    for rank in range(ranks.count):
        decode = Group(ranks.decode_rank(rank), ranks.decode)
        monkeypatch.setattr(parallel_state, "_DCP", decode)
        monkeypatch.setattr(parallel_state, "_PCP", Group(rank // ranks.tensor, ranks.prefill))
        assert context_parallel.rank_of(config, rank % ranks.tensor) == rank
        is_alone = ranks.decode == ranks.prefill == 1
        assert context_parallel.part_of(config) == ("" if is_alone else ranks.part(rank))


def test_an_interleave_size_that_vllm_sets_later_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside NIXL vLLM sets it in each worker, and no setting that is in the names says so."""
    monkeypatch.setattr(parallel_state, "_DCP", Group(0, 2))
    config = config_of(Ranks(2, 2))
    before = context_parallel.part_of(config)
    config.parallel_config.cp_kv_cache_interleave_size = BLOCK
    assert context_parallel.part_of(config) != before


# ---- vLLM's specs ---------------------------------------------------------------------------


HEADS: dict[str, Any] = {"num_kv_heads": 1, "head_size": 8, "dtype": torch.uint8}
FULL = FullAttentionSpec(block_size=16, **HEADS)
MLA = MLAAttentionSpec(block_size=16, **HEADS)
STATE = MambaSpec(block_size=64, shapes=((256,),), dtypes=(torch.uint8,), mamba_cache_mode="align")
REPLICATED = dataclasses.replace(FULL, dcp_sharded=False)
WINDOW = SlidingWindowSpec(block_size=16, sliding_window=40, **HEADS)


def groups(*specs: Any) -> KVCacheConfig:
    return KVCacheConfig(8, [], [KVCacheGroupSpec([f"l{n}"], spec) for n, spec in enumerate(specs)])


@pytest.mark.parametrize("specs", [(FULL,), (MLA,), (FULL, STATE), (FULL, REPLICATED)], ids=repr)
@pytest.mark.parametrize("decode", [1, 2, 4])
def test_blocks_have_as_many_tokens_as_vllm_says(specs: tuple[Any, ...], decode: int) -> None:
    cache = groups(*specs)
    known = groups_of(cache)
    found = context_parallel.over_ranks(known, cache, config_of(Ranks(4, decode)))
    by_number = {group.number: group.block_tokens for group in found}
    assert [by_number[n] for n in range(len(specs))] == [
        resolve_dcp_kv_block_size(spec, decode) for spec in specs
    ]
    assert [g.layers for g in found] == [g.layers for g in known]


def test_compressed_states_whose_tokens_are_spread_are_not_served() -> None:
    """A hit would end where vLLM's own does not, with a part of a state."""
    cache = groups(dataclasses.replace(MLA, tokens_per_state=4))
    with pytest.raises(UnsupportedError, match="hits end where its blocks do"):
        context_parallel.over_ranks(groups_of(cache), cache, config_of(Ranks(2, 2)))
    assert context_parallel.over_ranks(groups_of(cache), cache, config_of(Ranks(2, 1)))


def test_a_window_whose_tokens_are_spread_is_not_served() -> None:
    cache = groups(FULL, WINDOW)
    with pytest.raises(UnsupportedError, match=r"SlidingWindowSpec lie on 2 ranks \(dcp_sharded\)"):
        context_parallel.over_ranks(groups_of(cache), cache, config_of(Ranks(2, 2)))
    apart = groups(FULL, dataclasses.replace(WINDOW, dcp_sharded=False))
    known = groups_of(apart)
    found = context_parallel.over_ranks(known, apart, config_of(Ranks(2, 2)))
    assert [group.block_tokens for group in found] == [32, 16]


def test_ranks_with_the_same_heads_have_other_tokens() -> None:
    """Two KV heads on four ranks: two ranks hold the same, but where they share tokens out."""
    page = FULL.page_size_bytes
    cache = KVCacheConfig(
        8, [KVCacheTensor(8 * page, ["l0"], 0, page)], [KVCacheGroupSpec(["l0"], FULL)]
    )
    for decode, replicas in ((1, 2), (2, 1)):
        config = config_of(Ranks(4, decode))
        config.model_config = TwoHeads()
        assert support.replicas_of(config, cache) == replicas


class TwoHeads:
    """A model's configuration."""

    use_mla = False

    def get_total_num_kv_heads(self) -> int:
        return 2


def test_a_vllm_that_does_not_say_what_it_spreads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(KVCacheSpec, "dcp_sharded")
    context_parallel.check_context(config_of(Ranks(2, 1)))
    for ranks in (Ranks(2, 2), Ranks(1, 1, 2)):
        with pytest.raises(UnsupportedError, match=r"do not say which caches .*dcp_sharded"):
            context_parallel.check_context(config_of(ranks))


def test_what_follows_its_tokens_one_by_one_is_not_moved() -> None:
    assert context_parallel.why_not_turned(config_of(Ranks(2, 1))) is None
    why = context_parallel.why_not_turned(config_of(Ranks(2, 2)))
    assert why == "tokens that follow each other lie on 2 ranks (--decode-context-parallel-size)"


# ---- vLLM's slot mapping --------------------------------------------------------------------


@pytest.mark.parametrize("interleave", INTERLEAVES)
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_both_of_vllms_kernels_spread_alike(ranks: int, interleave: int) -> None:
    """Each token on one rank, as many on each as vLLM's attention reads there."""
    random = Random(ranks)
    for _ in range(20):
        count = random.randrange(1, 300)
        block_ids = random.sample(range(1, 50), -(-count // (BLOCK * ranks)))
        at = np.arange(count)
        sizes: dict[str, Any] = {"block": BLOCK, "ranks": ranks, "interleave": interleave}
        found = [slots_of(block_ids, at, rank=r, which=V1, **sizes) for r in range(ranks)]
        for rank, slots in enumerate(found):
            assert (slots == slots_of(block_ids, at, rank=rank, which=V2, **sizes)).all()
            seen = get_dcp_local_seq_lens(torch.tensor([count]), ranks, rank, interleave)
            assert (slots != PAD).sum() == int(seen)
            order = slots[slots != PAD]  # they stand in a rank's pages as they follow each other
            assert all(a % BLOCK + 1 == b % BLOCK or b % BLOCK == 0 for a, b in pairwise(order))
        assert (np.sum([slots != PAD for slots in found], axis=0) == 1).all()
