# SPDX-License-Identifier: Apache-2.0
"""What vLLM's specs say decides who is served; and what is served comes back byte for byte.

Real sizes of models that no CPU runs (spec_models.py). vLLM's functions say where each layer's
bytes are, our scheduler side plans what is copied, and our worker copies it.

It is long since who is served, bytes and names are looked at with the same models.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from blake3 import blake3

pytest.importorskip("vllm")
import vllm
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.core.single_type_kv_cache_manager import (
    FullAttentionManager,
    SlidingWindowManager,
)
from vllm.v1.kv_cache_interface import (
    CircularBufferSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    HiSparseHotSpec,
    HiSparseResidentSpec,
    KVCacheConfig,
    KVCacheGroupRole,
    KVCacheGroupSpec,
    KVQuantMode,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)
from vllm.v1.kv_cache_spec_registry import (
    _REGISTRY_KVCACHESPEC_LIST,
    KVCacheSpecRegistry,
    register_kv_cache_spec,
)

from attnstore_lab.testing.tiny_model import TINY, make_model
from attnstore_vllm.connector import context_parallel, facts, specs, support
from attnstore_vllm.connector.context_parallel import over_ranks
from attnstore_vllm.connector.groups import groups_of
from attnstore_vllm.connector.specs import check_group, fill_scales, is_scratch, reach_of, told
from attnstore_vllm.connector.support import reason_of_layers, reason_to_idle
from attnstore_vllm.errors import UnsupportedError
from attnstore_vllm.index.sections import Reach
from attnstore_vllm.scheduler.messages import StepPlan
from attnstore_vllm.transfer.geometry import Geometry
from attnstore_vllm.transfer.plan import ChunkCopy, LoadPlan, TransferPlan, plan_load, plan_save
from benchmarks.family_parts.table import BYTES_ROWS
from tests.vllm.spec_models import (
    LLAMA,
    MODELS,
    SERVED_BEFORE,
    configurations,
    geometry,
    tensors,
    worker_of,
)
from tests.vllm.stand_ins import stand_in_for_torchvision

FULL = FullAttentionSpec(**LLAMA, dtype=torch.bfloat16)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Any:
    stand_in_for_torchvision(tmp_path_factory.mktemp("packages"))  # MiniMax M3 imports it
    model = make_model(tmp_path_factory.mktemp("models") / "tiny", TINY)
    return EngineArgs(
        model=str(model), dtype="bfloat16", max_model_len=512, max_num_batched_tokens=64,
        max_num_seqs=8,
    ).create_engine_config()  # fmt: skip


# ---- who is served ---------------------------------------------------------------------


@pytest.mark.parametrize("model", MODELS)
def test_both_sides_serve_it(config: Any, model: str) -> None:
    make, layout = MODELS[model]
    sides = configurations(config, make(), layout)
    assert [reason_to_idle(config, side) for side in sides] == [None, None]
    shapes = [geometry(config, side) for side in sides]
    assert shapes[0] == shapes[1], "both sides come to the same"
    assert reason_of_layers(sides[0], shapes[0].hit_tokens) is None
    stored = {name for group in shapes[0].groups for name in group.layers}
    kept = {name for name, spec in make().items() if not is_scratch(spec)}
    assert stored == kept, "scratch is left out, and nothing else"


def test_what_each_group_needs(config: Any) -> None:
    found = {}
    for model in ("deepseek v4", "deepseek v4.1", "glm 5.3", "kimi k3", "r-swa", "sinks"):
        make, layout = MODELS[model]
        shape = geometry(config, configurations(config, make(), layout)[1])
        needs = {(g.reach, g.reach_tokens, g.block_tokens) for g in shape.groups}
        found[model] = shape.is_packed, shape.hit_tokens, shape.prompts_only, needs
    assert found == {
        "deepseek v4": (
            True, 256, False,
            {("full", 0, 256), ("window", 128, 64), ("window", 8, 4), ("window", 128, 8)},
        ),
        "deepseek v4.1": (True, 256, False, {("full", 0, 256)}),
        "glm 5.3": (True, 256, False, {("full", 0, 256)}),
        "kimi k3": (False, 0, False, {("full", 0, 1920), ("state", 0, 1920)}),
        "r-swa": (False, 0, True, {("full", 0, 16)}),
        "sinks": (False, 0, False, {("full", 0, 16)}),
    }  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class LaterSpec(FullAttentionSpec):
    """A later vLLM's, with a property more."""

    lattice_width: int = 0


class OwnHits(FullAttentionManager):
    @classmethod
    def find_longest_cache_hit(cls, *_: Any, **__: Any) -> Any:
        raise NotImplementedError


class TakesBlocksBack(SlidingWindowManager):
    def remove_skipped_blocks(self, *_: Any, **__: Any) -> None:
        """Not as a window's."""


@pytest.fixture
def registered() -> Any:
    """A way to register specs of a test."""
    KVCacheSpecRegistry._ensure_registered()
    before = dict(_REGISTRY_KVCACHESPEC_LIST)
    yield lambda spec, manager: register_kv_cache_spec(manager_class=manager)(spec)
    _REGISTRY_KVCACHESPEC_LIST.clear()
    _REGISTRY_KVCACHESPEC_LIST.update(before)


def test_a_property_that_is_not_known(registered: Any) -> None:
    """It has its default: as without it. Else it is named."""
    assert reach_of(LaterSpec(**LLAMA, dtype=torch.uint8)) == (Reach.FULL, 0)
    later = LaterSpec(**LLAMA, dtype=torch.uint8, lattice_width=8)
    with pytest.raises(UnsupportedError, match="LaterSpec, whose lattice_width is 8"):
        reach_of(later)


def test_a_property_of_a_group_that_is_not_known() -> None:
    @dataclass
    class LaterGroup(KVCacheGroupSpec):
        lattice: int = 0

    check_group(LaterGroup(["l"], FULL))
    with pytest.raises(UnsupportedError, match="has the lattice 8: this property is not known"):
        check_group(LaterGroup(["l"], FULL, lattice=8))


def test_a_manager_that_is_not_known(registered: Any) -> None:
    @dataclass(frozen=True, kw_only=True)
    class Finds(FullAttentionSpec):
        pass

    @dataclass(frozen=True, kw_only=True)
    class Takes(SlidingWindowMLASpec):
        pass

    registered(Finds, OwnHits)
    registered(Takes, TakesBlocksBack)
    with pytest.raises(UnsupportedError, match=r"OwnHits finds hits in a way .*not known"):
        reach_of(Finds(**LLAMA, dtype=torch.uint8))
    with pytest.raises(UnsupportedError, match="TakesBlocksBack has a remove_skipped_blocks"):
        reach_of(Takes(**LLAMA, dtype=torch.uint8, sliding_window=64))


def test_cross_attention_is_no_prefix() -> None:
    with pytest.raises(UnsupportedError, match="CrossAttentionManager finds hits in a way"):
        reach_of(CrossAttentionSpec(**LLAMA, dtype=torch.bfloat16))


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"mamba_cache_mode": "all"}, "in the mode 'all'"),
        ({"mamba_cache_mode": "none"}, "in the mode 'none'"),
        ({"mamba_cache_mode": "align", "num_speculative_blocks": 2}, "2 blocks for drafts"),
        ({"mamba_cache_mode": "align"}, None),
        ({"mamba_cache_mode": "align", "tp_replicated": True}, None),
    ],
)
def test_states(fields: dict[str, Any], reason: str | None) -> None:
    spec = MambaSpec(block_size=64, shapes=((4, 8),), dtypes=(torch.float32,), **fields)
    if reason is None:
        assert reach_of(spec) == (Reach.STATE, 0)
    else:
        with pytest.raises(UnsupportedError, match=reason):
            reach_of(spec)


def test_hisparse_is_idle_by_its_properties(config: Any) -> None:
    source = KVCacheGroupSpec(["l"], FULL, host_resident=True)
    with pytest.raises(UnsupportedError, match="lies in the host's memory"):
        check_group(source)
    with pytest.raises(UnsupportedError, match="role"):
        check_group(KVCacheGroupSpec(["l"], FULL, role=KVCacheGroupRole.HISPARSE_INDEXER))
    for spec in (
        HiSparseHotSpec(block_size=16, page_size=4096, blocks_per_request=2),
        HiSparseResidentSpec(block_size=16, page_size=4096),
    ):
        with pytest.raises(UnsupportedError, match="has_layer_views"):
            check_group(KVCacheGroupSpec(["l"], spec))
    sides = configurations(config, SERVED_BEFORE["llama"][0](), "LBNHC")
    for side in sides:
        side.kv_cache_groups[0].host_resident = True
        assert "host's memory" in str(reason_to_idle(config, side))


def test_hisparse_is_idle_by_its_configuration(config: Any) -> None:
    """Of vLLM 0.33, whose pool of host memory is named beside the groups."""
    for side in configurations(config, SERVED_BEFORE["llama"][0](), "LBNHC"):
        vars(side)["hisparse_host_num_blocks"] = None
        assert reason_to_idle(config, side) is None
        vars(side)["hisparse_host_num_blocks"] = 64
        assert "hisparse_host_num_blocks is set" in str(reason_to_idle(config, side))


@pytest.mark.parametrize(("where", "name", "check"), [
    (specs, "host_resident", test_hisparse_is_idle_by_its_properties),
    (specs, "role", test_hisparse_is_idle_by_its_properties),
    (specs, "has_layer_views", test_hisparse_is_idle_by_its_properties),
    (support, "hisparse_host_num_blocks", test_hisparse_is_idle_by_its_configuration),
])  # fmt: skip
def test_a_property_of_hisparse_that_is_not_looked_at_is_noticed(
    config: Any, monkeypatch: pytest.MonkeyPatch, where: Any, name: str, check: Callable[..., None]
) -> None:
    """Planted faults: the two tests above see them."""

    def blind(owner: Any, asked: str, *default: Any) -> Any:
        return default[0] if asked == name else getattr(owner, asked, *default)

    monkeypatch.setattr(where, "getattr", blind, raising=False)
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        check(config)


@pytest.mark.parametrize(
    ("version", "cuts"),
    [("0.30.0", False), ("0.33.1", False), ("0.34.0", True), ("dev", True), ("1.0", True)],
)
def test_of_an_unknown_version_hits_may_be_cut(
    config: Any, monkeypatch: pytest.MonkeyPatch, version: str, *, cuts: bool
) -> None:
    """Then groups are loaded ahead of the step, where a part that is not backed can fail."""
    _, scheduler = configurations(config, SERVED_BEFORE["llama"][0](), "LBNHC")
    monkeypatch.setattr("vllm.__version__", version)
    assert facts.may_cut_hits(scheduler) is cuts


@pytest.mark.parametrize(
    ("known", "version", "cuts"),
    [(tuple(f"0.{n}" for n in range(99)), "0.34.0", True), ((), "0.33.1", False)],
)
def test_versions_that_are_not_told_apart_are_noticed(
    config: Any, monkeypatch: pytest.MonkeyPatch, known: Any, version: str, *, cuts: bool
) -> None:
    """Planted faults: all versions are taken for known ones, or none. The test above sees both."""
    monkeypatch.setattr(facts, "READ_VLLM", known)
    with pytest.raises(AssertionError):
        test_of_an_unknown_version_hits_may_be_cut(config, monkeypatch, version, cuts=cuts)


OVER_RANKS = {
    "deepseek v4": "hits end where its blocks do",
    "deepseek v4.1": "hits end where its blocks do",
    "glm 5.3": "hits end where its blocks do",
    "compressed latents": "hits end where its blocks do",
    "sliding mla": r"SlidingWindowMLASpec lie on 2 ranks \(dcp_sharded\)",
    "gemma 3": r"SlidingWindowSpec lie on 2 ranks \(dcp_sharded\)",
    "gpt-oss": r"SlidingWindowSpec lie on 2 ranks \(dcp_sharded\)",
}


@pytest.mark.parametrize("model", [*MODELS, *SERVED_BEFORE])
def test_what_is_idle_under_decode_context_parallelism(config: Any, model: str) -> None:
    """docs/compatibility.md, "Parallelism". All others are served."""
    make, layout = (MODELS | SERVED_BEFORE)[model]
    parallel: Any = SimpleNamespace(decode_context_parallel_size=2, tensor_parallel_size=2)
    ranks: Any = SimpleNamespace(parallel_config=parallel)
    for side in configurations(config, make(), layout):
        groups = groups_of(side)
        if model not in OVER_RANKS:
            assert len(over_ranks(groups, side, ranks)) == len(groups)
            continue
        with pytest.raises(UnsupportedError, match=OVER_RANKS[model]):
            over_ranks(groups, side, ranks)


@pytest.mark.parametrize("model", [name for name in OVER_RANKS if "Window" not in OVER_RANKS[name]])
def test_latents_that_would_be_served_over_ranks_are_noticed(
    config: Any, monkeypatch: pytest.MonkeyPatch, model: str
) -> None:
    """A planted fault: it is not asked where hits end."""
    monkeypatch.setattr(context_parallel, "hit_tokens_of", lambda _: 0)
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        test_what_is_idle_under_decode_context_parallelism(config, model)


def test_the_reason_is_told_where_a_group_has_pages_of_several_sizes(config: Any) -> None:
    wide = replace(FULL, head_size=2 * FULL.head_size)
    layers = UniformTypeKVCacheSpecs(block_size=16, kv_cache_specs={"a": FULL, "b": wide})
    groups = [KVCacheGroupSpec(["a", "b"], layers), KVCacheGroupSpec(["c"], FULL)]
    reason = reason_to_idle(config, KVCacheConfig(8, [], groups))
    assert "pages of its groups have" in str(reason)


@pytest.mark.usefixtures("config")
def test_the_page_of_models_has_all_of_these_and_no_others() -> None:
    """docs/models.md, "By bytes": each row by the models it stands for, and by their groups."""
    assert sorted(name for names in BYTES_ROWS for name in names) == sorted(MODELS)
    kinds: dict[str, Callable[[Any], bool]] = {
        "latents": lambda spec: type(spec) is MLAAttentionSpec,
        "windows": lambda spec: isinstance(spec, SlidingWindowSpec),
        "rings": lambda spec: isinstance(spec, CircularBufferSpec),
        "states of all|states of delta": lambda spec: isinstance(spec, MambaSpec),
        "full": lambda spec: (
            isinstance(spec, FullAttentionSpec)
            and not isinstance(spec, (MLAAttentionSpec, CircularBufferSpec))
        ),
    }
    for names, (family, groups, _) in BYTES_ROWS.items():
        for name in names:
            specs = MODELS[name][0]().values()
            for words, is_one in kinds.items():
                told = re.search(words, groups) is not None
                assert told == any(map(is_one, specs)), (family, name, words)


def test_scratch_alone_is_nothing() -> None:
    ring = CircularBufferSpec(block_size=8, num_kv_heads=1, head_size=64, dtype=torch.uint8)
    kv, _ = configurations_of_one(ring)
    with pytest.raises(UnsupportedError, match="prefix_cacheable"):
        groups_of(kv)


def configurations_of_one(spec: Any) -> Any:
    kv = KVCacheConfig(8, [], [KVCacheGroupSpec(["l"], spec)])
    return kv, kv


def test_a_layer_that_the_scheduler_is_not_shown(config: Any) -> None:
    """A state for several tokens, behind a first layer that has one for each."""
    make, layout = MODELS["deepseek v3.2, glm 5"]
    specs = make()
    name = next(name for name in specs if name.endswith("k_cache"))
    specs[name] = replace(specs[name], tokens_per_state=4)
    worker, scheduler = configurations(config, specs, layout)
    shape = geometry(config, scheduler)
    assert reason_to_idle(config, scheduler) is None
    assert "tokens_per_state" in str(reason_of_layers(worker, shape.hit_tokens))


KV_TYPES = ("nvfp4", "turboquant_k8v4", "int8_per_token_head", "fp8_ds_mla", "ultraquant_4bit")


@pytest.mark.parametrize("kind", KV_TYPES)
def test_types_of_kv_are_the_cpu_builds_matter(
    config: Any, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = SimpleNamespace(
        **{name: getattr(config, name) for name in ("model_config", "speculative_config")},
        cache_config=SimpleNamespace(cache_dtype=kind, enable_prefix_caching=True),
    )
    kv = configurations(config, SERVED_BEFORE["llama"][0](), "LBNHC")[1]
    assert "vLLM's CPU build does not know KV of type" in str(reason_to_idle(other, kv))
    monkeypatch.setattr(support, "_is_cpu", lambda: False)
    assert reason_to_idle(other, kv) is None


# ---- bytes -----------------------------------------------------------------------------


def blocks_for(shape: Geometry, most: int) -> list[list[int]]:
    """Of each group the blocks of a chunk, no two groups' the same. Of a window that is short
    beside its chunk only the last ones."""
    found, start = [], 1
    for group, of_group in enumerate(shape.groups):
        blocks = shape.chunk_tokens // of_group.block_tokens
        kept = 1 if of_group.reach == "state" else shape.room(group) or blocks
        ids = list(range(start, start + kept))
        start += kept
        found.append([0] * (blocks - kept) + ids[::-1])
    assert start <= most
    return found


def plans(
    shape: Geometry, tables: list[list[int]], others: list[list[int]]
) -> tuple[list[TransferPlan], list[LoadPlan]]:
    """Of each group one save of its chunk, and a load of it into its other blocks."""
    saves, loads = [], []
    for group, (ids, back) in enumerate(zip(tables, others, strict=True)):
        of_group = shape.groups[group]
        size, hole = of_group.block_tokens, ids.count(0)
        saved: tuple[ChunkCopy, ...]
        loaded: tuple[ChunkCopy, ...]
        if of_group.reach == "state":
            saved, loaded = (ChunkCopy(group, 0, (ids[-1],)),), (ChunkCopy(group, 0, (back[-1],)),)
        else:
            saved = plan_save(
                group, ids, 0, shape.chunk_tokens, block_tokens=size, hole=hole,
                places=shape.room(group),
            )  # fmt: skip
            loaded = plan_load(
                [(group, hole * size, shape.chunk_tokens)], back, hole * size, shape.chunk_tokens,
                block_tokens=size, chunk_tokens=shape.chunk_tokens, places=shape.room(group),
            )  # fmt: skip
        saves.append(TransferPlan(1 + 2 * group, "r", saved))
        loads.append(LoadPlan(2 + 2 * group, "r", loaded))
    return saves, loads


def bytes_of(kv: torch.Tensor, block: int) -> torch.Tensor:
    """What the layer has in this block, as vLLM sees it."""
    return kv[block].contiguous().view(torch.uint8).clone()


@pytest.mark.parametrize("chunk_tokens", [256, 4096])
@pytest.mark.parametrize("model", [*MODELS, *SERVED_BEFORE])
def test_bytes_of_every_layer_come_back(config: Any, model: str, chunk_tokens: int) -> None:
    make, layout = (MODELS | SERVED_BEFORE)[model]
    specs = make()
    block = max(spec.block_size for spec in specs.values())
    if chunk_tokens > 256 and (block > 1024 or "deepseek v4" not in model):
        pytest.skip("one size of chunks will do")
    kv_config, scheduler = configurations(config, specs, layout)
    shape = geometry(config, scheduler, chunk_tokens)
    kv = tensors(kv_config, layout)
    memory = torch.tensor([], dtype=torch.uint8).set_(next(iter(kv.values())).untyped_storage())
    memory.random_(generator=torch.Generator().manual_seed(1))
    worker = worker_of(shape, kv_config, kv, len(shape.groups))
    shift = kv_config.num_blocks // 2
    tables = blocks_for(shape, shift)
    others = [[block + shift if block else 0 for block in ids] for ids in tables]
    saves, loads = plans(shape, tables, others)
    worker.begin_step(StepPlan(saves=saves))
    worker.end_step()
    targets = {block for ids in others for block in ids if block}
    before = memory.clone()
    wanted = {
        (name, new): bytes_of(kv[name], old)
        for group, olds, news in zip(shape.groups, tables, others, strict=True)
        for name in group.layers
        for old, new in zip(olds, news, strict=True)
        if old and (group.reach != "state" or old == olds[-1])
    }
    for name, _ in wanted:
        for new in targets:
            kv[name][new].view(torch.uint8).fill_(255)
    worker.begin_step(StepPlan(loads=loads))
    worker.start_load()
    worker.end_step()
    assert worker.take_finished()[2] == set()
    for (name, new), content in wanted.items():
        assert torch.equal(bytes_of(kv[name], new), content), (name, new)
    check_untouched(kv, before, memory, targets)
    assert len(wanted) >= len(specs) - sum(map(is_scratch, specs.values()))
    worker.close()


def check_untouched(
    kv: dict[str, torch.Tensor], before: torch.Tensor, memory: torch.Tensor, targets: set[int]
) -> None:
    """No block that was not loaded to has changed, in any layer, scratch included."""
    after = memory.clone()
    memory.copy_(before)
    old = {name: layer.clone() for name, layer in kv.items()}
    memory.copy_(after)
    num_blocks = len(next(iter(kv.values())))
    left = [block for block in range(num_blocks) if block not in targets]
    for name, layer in kv.items():
        now, was = layer[left].contiguous(), old[name][left].contiguous()
        assert torch.equal(now.view(torch.uint8), was.view(torch.uint8)), name


def test_slots_hold_what_a_hit_reads(config: Any) -> None:
    """Of DeepSeek V4's short windows in blocks of 4 tokens a slot has not 64 blocks a chunk."""
    make, layout = MODELS["deepseek v4"]
    scheduler = configurations(config, make(), layout)[1]
    small, large = (geometry(config, scheduler, tokens) for tokens in (256, 4096))
    assert small.blocks_per_chunk == 17, "127 tokens in blocks of 8, wherever they begin"
    assert large.blocks_per_chunk == 17, "16 blocks of 256 tokens would do for the spine"
    rooms = {(g.block_tokens, large.room(i)) for i, g in enumerate(large.groups)}
    assert rooms == {(256, 0), (64, 17), (4, 17), (8, 17)}
    for model in SERVED_BEFORE:
        make, layout = SERVED_BEFORE[model]
        shape = geometry(config, configurations(config, make(), layout)[1])
        assert not any(shape.room(group) for group in range(len(shape.groups))), model


# ---- names -----------------------------------------------------------------------------


PLAIN = (
    "deepseek v3.2, flat",
    "deepseek v3.2, glm 5",
    "kimi k3",
    "minimax m3",
    "nemotron-h",
    "nemotron-h, packed",
)
"""Models of specs whose KV had a name before."""


def test_specs_are_in_the_name(config: Any) -> None:
    """Of each model that was not served before; of no other, so that stores are found again."""
    names = []
    for model, (make, layout) in MODELS.items():
        kv = configurations(config, make(), layout)[0]
        names.append(told(kv))
        plain = model in PLAIN
        assert bool(names[-1]) is not plain, model
    found = [name for name in names if name]
    assert len(found) == len(set(found))
    for make, layout in SERVED_BEFORE.values():
        assert told(configurations(config, make(), layout)[0]) == ""


NAMES = {
    "llama": "13ad24e421cc2fdf",
    "gemma 3": "fb88a2502a2aabd0",
    "gpt-oss": "f9f8d2b0f7c7bdce",
    "qwen3-next": "218b66b80de9e6a2",
    "deepseek v3": "d00f7452a957f2cc",
}
"""Digests of what was in the names of KV before groups were admitted by property."""


@pytest.mark.skipif(not vllm.__version__.startswith("0.32.0"), reason="specs are in the names")
@pytest.mark.parametrize("model", SERVED_BEFORE)
def test_names_of_what_was_served_are_as_before(config: Any, model: str) -> None:
    make, layout = SERVED_BEFORE[model]
    worker, scheduler = configurations(config, make(), layout)
    shape = geometry(config, scheduler)
    made = worker_of(shape, worker, tensors(worker, layout), 1)
    pool: Any = made.pool
    kv = {name: fact for name, fact in pool.told["kv"].items() if name not in ("layers", "part")}
    assert not pool.told["kv"]["layers"] + pool.told["kv"]["part"], "they are named where there are"
    facts = {"geometry": shape.facts(), "kv": kv}
    made.close()
    told_facts = json.dumps(facts, sort_keys=True).encode()
    assert blake3(told_facts).hexdigest(length=8) == NAMES[model]


def test_where_a_layer_lies_in_a_block_is_told(config: Any) -> None:
    """Two layers that change places have other facts, though shapes and strides are the same."""
    make, layout = MODELS["glm 5.3"]
    specs, found = make(), []
    for names in (list(specs), [*reversed(specs)]):
        worker, scheduler = configurations(config, {name: specs[name] for name in names}, layout)
        shape = geometry(config, scheduler)
        made = worker_of(shape, worker, tensors(worker, layout), 1)
        pool: Any = made.pool
        found.append(pool.told["kv"]["others"])
        made.close()
    assert found[0] and found[0] != found[1]


# ---- scales ----------------------------------------------------------------------------


def test_first_scales_come_before_the_first_load(config: Any) -> None:
    """vLLM's Triton kernels fill all scales when they are first used: over what was loaded."""
    from vllm.v1.attention.backends.triton_attn import TritonAttentionImpl

    make, layout = MODELS["llama, int8 per head"]
    kv = tensors(configurations(config, make(), layout)[0], layout)
    layers = {}
    for name in kv:
        impl = object.__new__(TritonAttentionImpl)
        impl._kv_quant_mode = KVQuantMode.INT8_PER_TOKEN_HEAD
        layers[name] = type("Layer", (), {"impl": impl})()
    fill_scales(layers, kv)
    for name, layer in layers.items():
        kv[name].fill_(7)
        layer.impl._ensure_scale_caches(kv[name])
        assert (kv[name] == 7).all(), "what was loaded is overwritten"
