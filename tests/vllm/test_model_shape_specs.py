# SPDX-License-Identifier: Apache-2.0
"""The KV that a config.json tells (model_shape.py), against vLLM's own specs of the same fields.

No model is made: vLLM's own functions are given the sizes of published models. What a layer keeps
its class says (get_kv_cache_spec, get_mamba_state_shape_from_config); how layers are grouped and
blocks are sized, vLLM's code for all says. Small models on the real engine: test_families.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import pytest
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.models.falcon_h1 import FalconH1ForCausalLM
from vllm.model_executor.models.granitemoehybrid import GraniteMoeHybridForCausalLM
from vllm.model_executor.models.nemotron_h import NemotronHForCausalLM
from vllm.model_executor.models.qwen3_next import Qwen3NextForCausalLM
from vllm.utils.torch_utils import nvfp4_kv_cache_full_dim
from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheSpec,
    get_kv_quant_mode,
)

from attnstore_lab.testing.tiny_model import TINY, make_model
from attnstore_vllm.connector.specs import is_scratch
from attnstore_vllm.model_shape import KV_TYPES, KvShape, shape_of
from attnstore_vllm.transfer.geometry import Group
from tests.unit.test_model_shape import (
    DEEPSEEK_V3,
    DEEPSEEK_V4_FLASH,
    DEEPSEEK_V4_PRO,
    DEEPSEEK_V32,
    DEEPSEEK_V41,
    FALCON_H1_34B,
    GEMMA3_27B,
    GLM_5,
    GPT_OSS_120B,
    GRANITE4_SMALL,
    KIMI_LINEAR,
    LLAMA_65B,
    NEMOTRON_H_56B,
    QWEN3_NEXT,
)
from tests.vllm.spec_layers import Vllm
from tests.vllm.spec_models import PACKED, configurations, deepseek_v4, deepseek_v41, geometry
from tests.vllm.stand_ins import stand_in_for_torchvision

Specs = dict[str, KVCacheSpec]


def groups_told(shape: KvShape) -> list[tuple[int, list[int]]]:
    """The same of a shape."""
    regions = shape.geometry.regions
    return sorted(
        (group.block_tokens, sorted(regions[: len(group.layers)]))
        for group in shape.geometry.groups
    )


def named(kinds: Iterable[KVCacheSpec]) -> Specs:
    return {f"layers.{i}": spec for i, spec in enumerate(kinds)}


LATENT_TYPES = ("auto", "fp8", "fp8_ds_mla")


@pytest.mark.parametrize("kv_type", [*LATENT_TYPES, "nvfp4_ds_mla"])
def test_latents(kv_type: str) -> None:
    """DeepSeek V3, Kimi K2."""
    vllm = Vllm(DEEPSEEK_V3, kv_type)
    specs = named(vllm.attention() for _ in range(61))
    assert groups_told(shape_of(DEEPSEEK_V3, "c", kv_type=kv_type)) == vllm.groups(specs)


@pytest.mark.parametrize("kv_type", ["auto", "fp8_ds_mla"])
@pytest.mark.parametrize("config", [DEEPSEEK_V32, GLM_5], ids=["DeepSeek V3.2", "GLM-5"])
def test_latents_with_an_indexer(config: dict[str, Any], kv_type: str) -> None:
    """One group, whose pages have two sizes."""
    vllm, layers = Vllm(config, kv_type), config["num_hidden_layers"]
    kinds = [*(vllm.attention() for _ in range(layers)), *(vllm.indexer() for _ in range(layers))]
    shape = shape_of(config, "c", kv_type=kv_type)
    assert groups_told(shape) == vllm.groups(named(kinds))
    assert len(set(shape.geometry.regions)) == 2


@pytest.mark.parametrize("kv_type", ["auto", "fp8"])
@pytest.mark.parametrize(
    ("config", "full"),
    [(GPT_OSS_120B, lambda i: i % 2), (GEMMA3_27B, lambda i: (i + 1) % 6 == 0)],
    ids=["gpt-oss", "Gemma 3"],
)
def test_windows(config: dict[str, Any], full: Any, kv_type: str) -> None:
    vllm = Vllm(config, kv_type)
    window = config["sliding_window"]
    kinds = [
        vllm.attention(None if full(i) else window) for i in range(config["num_hidden_layers"])
    ]
    shape = shape_of(config, "c", kv_type=kv_type)
    assert groups_told(shape) == vllm.groups(named(kinds))


def kimi_linear() -> Any:
    from vllm.models.kimi_k3 import KimiLinearForCausalLM

    return KimiLinearForCausalLM


HYBRIDS: dict[str, tuple[dict[str, Any], Any, int, int, str]] = {
    "Nemotron-H": (NEMOTRON_H_56B, lambda: NemotronHForCausalLM, 10, 54, "float32"),
    "Granite 4": (GRANITE4_SMALL, lambda: GraniteMoeHybridForCausalLM, 4, 36, "auto"),
    "Falcon-H1": (FALCON_H1_34B, lambda: FalconH1ForCausalLM, 72, 72, "auto"),
    "Qwen3-Next": (QWEN3_NEXT, lambda: Qwen3NextForCausalLM, 12, 36, "auto"),
    "Kimi-Linear": (KIMI_LINEAR, kimi_linear, 7, 20, "auto"),
}
"""With layers of attention, recurrent layers, and vLLM's type of the states."""


@pytest.mark.usefixtures("engine")  # Kimi's class imports what is for pictures
@pytest.mark.parametrize("model", HYBRIDS)
def test_states(model: str) -> None:
    config, its_class, num_attention, num_states, states = HYBRIDS[model]
    vllm = Vllm(config, "auto", states)
    state = vllm.states(its_class())
    attention = vllm.attention()
    kinds = [*num_attention * [attention], *num_states * [state]]
    shape = shape_of(config, "c")
    assert groups_told(shape) == vllm.groups(named(kinds))
    told = {kind.reach.value: kind.num_bytes for kind in shape.kinds}
    plain = replace(state, page_size_padded=None)
    assert told["state"] == plain.page_size_bytes


@pytest.mark.parametrize("kv_type", [kind for kind in KV_TYPES if "mla" not in kind])
def test_types_of_kv(kv_type: str) -> None:
    """Scales are part of a page, where the kernels that take the type put them."""
    vllm = Vllm(LLAMA_65B, kv_type)
    mode, spec = get_kv_quant_mode(kv_type), vllm.attention()
    assert isinstance(spec, FullAttentionSpec)
    if mode.is_nvfp4:  # as FlashInfer's kernels, which cannot be imported here: K and V apart
        head_bytes = nvfp4_kv_cache_full_dim(vllm.head)
        spec = replace(spec, num_head_slots=2 * vllm.heads, state_content_bytes=head_bytes)
    elif mode.is_per_token_head:
        spec = TritonAttentionBackend.customize_spec(spec)
    (kind,) = shape_of(LLAMA_65B, "c", kv_type=kv_type).kinds
    assert kind.num_bytes * spec.block_size == spec.page_size_bytes


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A configuration of vLLM's, of a small model."""
    stand_in_for_torchvision(tmp_path_factory.mktemp("packages"))
    model = make_model(tmp_path_factory.mktemp("models") / "tiny", TINY)
    return EngineArgs(
        model=str(model), dtype="bfloat16", max_model_len=128, max_num_batched_tokens=64
    ).create_engine_config()


V41: dict[str, Any] = DEEPSEEK_V41["text_config"]  # type: ignore[assignment]


def _v41(nvfp4: bool) -> Specs:
    return deepseek_v41(V41["compress_ratios"][:40], V41["kv_source_layer_ids"], nvfp4)


PACKED_MODELS: dict[str, tuple[dict[str, Any], str, Callable[[], Specs]]] = {
    "V4 Flash": (
        DEEPSEEK_V4_FLASH, "auto", lambda: deepseek_v4([0, 0, *20 * [4, 128], 4])
    ),
    "V4 Pro": (
        DEEPSEEK_V4_PRO, "fp8_ds_mla", lambda: deepseek_v4([128, 128, *29 * [4, 128], 4])
    ),
    "V4, as many of each": (
        DEEPSEEK_V4_FLASH | {"num_hidden_layers": 8, "compress_ratios": 4 * [4, 128]},
        "fp8", lambda: deepseek_v4(4 * [4, 128]),
    ),
    "V4, windows of two sizes are as good": (
        DEEPSEEK_V4_FLASH | {"num_hidden_layers": 4, "compress_ratios": [0, 4, 4, 4]},
        "fp8", lambda: deepseek_v4([0, 4, 4, 4]),
    ),
    "V4, of 4 alone": (
        DEEPSEEK_V4_FLASH | {"num_hidden_layers": 9, "compress_ratios": [0, 0, *7 * [4]]},
        "fp8", lambda: deepseek_v4([0, 0, *7 * [4]]),
    ),
    "V4, of 128 alone": (
        DEEPSEEK_V4_FLASH | {"num_hidden_layers": 9, "compress_ratios": [0, *8 * [128]]},
        "fp8", lambda: deepseek_v4([0, *8 * [128]]),
    ),
    "V4.1": (DEEPSEEK_V41, "auto", lambda: _v41(nvfp4=False)),
    "V4.1, NVFP4": (DEEPSEEK_V41, "nvfp4_ds_mla", lambda: _v41(nvfp4=True)),
    "V4.1, NVFP4, more windows": (
        V41 | {"num_hidden_layers": 45, "compress_ratios": [*V41["compress_ratios"], 0, 0]},
        "nvfp4_ds_mla",
        lambda: deepseek_v41([*V41["compress_ratios"], 0, 0], V41["kv_source_layer_ids"], True),
    ),
}  # fmt: skip


@pytest.mark.parametrize("chunk_tokens", [256, 4096])
@pytest.mark.parametrize("model", PACKED_MODELS)
def test_packed_pages(model: str, chunk_tokens: int, engine: Any) -> None:
    """DeepSeek V4 and V4.1: what a server makes of vLLM's own specs, groups and strides."""
    config, kv_type, specs = PACKED_MODELS[model]
    worker, _ = configurations(engine, specs(), PACKED)
    served = geometry(engine, worker, chunk_tokens)
    shape = shape_of(config, "c", chunk_tokens=chunk_tokens, kv_type=kv_type)
    told = shape.geometry
    for name in ("regions", "chunk_tokens", "hit_tokens", "is_packed", "slot_bytes"):
        assert getattr(told, name) == getattr(served, name), name

    def facts(group: Group) -> Any:
        return replace(group, layers=(), number=0, facts=""), len(group.layers)

    assert [*map(facts, told.groups)] == [*map(facts, served.groups)]
    assert shape.packed is not None
    all_groups = [*told.groups, *shape.packed.scratch]
    assert sorted((g.block_tokens, len(g.layers)) for g in all_groups) == sorted(
        (g.kv_cache_spec.block_size, len(g.layer_names)) for g in worker.kv_cache_groups
    )
    pages = Counter(
        (spec.page_size_bytes, spec.block_size) for spec in specs().values() if not is_scratch(spec)
    )
    found = Counter[Any]()
    for kind, number in shape.kinds.items():
        found[kind.num_bytes, kind.of_tokens] += number
    assert found == pages
