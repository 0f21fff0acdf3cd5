# SPDX-License-Identifier: Apache-2.0
"""What layers of Kimi K3, MiniMax M3 and Nemotron-H say that they keep: a few of each model.

vLLM's own classes say it, and vLLM's platform the length of blocks and the padding of pages.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from vllm.model_executor.layers.attention.attention import Attention
from vllm.model_executor.layers.attention.mla_attention import MLAAttention
from vllm.model_executor.layers.mamba import mamba_mixer2
from vllm.model_executor.models import ModelRegistry
from vllm.model_executor.models.deepseek_v2 import DeepseekV32IndexerCache
from vllm.platforms.cpu import CpuPlatform
from vllm.utils.torch_utils import STR_DTYPE_TO_TORCH_DTYPE
from vllm.v1.attention.backend import AttentionBackend, AttentionType, MultipleOf
from vllm.v1.kv_cache_interface import KVCacheSpec, MambaSpec, UniformTypeKVCacheSpecs

from attnstore_vllm.model_shape import BLOCK_TOKENS
from tests.unit.test_model_shape import KIMI_LINEAR, NEMOTRON_H_56B
from tests.vllm.planning import get_kv_cache_groups

NEMOTRON_H_8B = NEMOTRON_H_56B | {
    "num_attention_heads": 32, "hidden_size": 4096, "mamba_num_heads": 128, "ssm_state_size": 128,
}  # fmt: skip
Specs = dict[str, Any]


class Kernels(AttentionBackend):
    """Attention kernels that take blocks of any multiple of 16 tokens, as most do."""

    @staticmethod
    def get_name() -> str:
        return "ANY"

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        return [MultipleOf(16)]

    get_impl_cls = get_builder_cls = staticmethod(lambda: None)


class Vllm:
    """vLLM's configuration for a model, as far as these functions read it."""

    def __init__(self, config: dict[str, Any], kv_type: str, states: str = "auto") -> None:
        self.hf = SimpleNamespace(**config)
        dtype = STR_DTYPE_TO_TORCH_DTYPE[config.get("torch_dtype", "bfloat16")]
        heads = config.get("num_key_value_heads", config["num_attention_heads"])
        self.uses_mla = "kv_lora_rank" in config
        self.head = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        self.heads = 1 if self.uses_mla else heads
        if self.uses_mla:
            self.head = config["kv_lora_rank"] + config["qk_rope_head_dim"]
        self.kv_type = kv_type
        self.config: Any = SimpleNamespace(
            cache_config=SimpleNamespace(
                block_size=BLOCK_TOKENS, cache_dtype=kv_type, skip_page_size_padded=None,
                kv_cache_dtype_skip_layers=[], mamba_block_size=None, mamba_page_size_padded=None,
                mamba_cache_dtype="auto", mamba_ssm_cache_dtype=states, mamba_cache_mode="align",
                use_replayssm=False, use_kda_recoverssm=False,
                get_resolved_kv_cache_layout=lambda: SimpleNamespace(is_block_outermost=False),
            ),
            model_config=SimpleNamespace(
                hf_config=self.hf, hf_text_config=self.hf, dtype=dtype, architecture="any",
                use_mla=self.uses_mla, get_num_kv_heads=lambda _: self.heads,
                get_head_size=lambda: self.head,
            ),
            parallel_config=SimpleNamespace(
                tensor_parallel_size=1, decode_context_parallel_size=1
            ),
            scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=False),
            speculative_config=None, num_speculative_tokens=0,
            compilation_config=SimpleNamespace(static_forward_context={}),
        )  # fmt: skip

    @property
    def kv_dtype(self) -> torch.dtype:
        if self.kv_type == "auto":
            return self.config.model_config.dtype
        return STR_DTYPE_TO_TORCH_DTYPE[self.kv_type]

    def attention(self, window: int | None = None) -> KVCacheSpec:
        """What a layer of attention keeps."""
        layer: Any = SimpleNamespace(
            kv_cache_dtype=self.kv_type, sliding_window=window, head_size=self.head,
            indexer=None, non_causal_multi_token_decode=False, attn_type=AttentionType.DECODER,
            attn_backend=Kernels, num_kv_heads=self.heads, head_size_v=self.head,
            kv_cache_torch_dtype=self.kv_dtype,
        )  # fmt: skip
        kind = MLAAttention if self.uses_mla else Attention
        spec = kind.get_kv_cache_spec(layer, self.config)
        assert spec is not None
        return spec

    def indexer(self) -> KVCacheSpec:
        head = self.hf.index_head_dim
        layer: Any = SimpleNamespace(
            cache_config=self.config.cache_config, head_dim=head + head // 128 * 4,
            dtype=torch.uint8,
        )  # fmt: skip
        return DeepseekV32IndexerCache.get_kv_cache_spec(layer, self.config)

    def states(self, model: Any) -> MambaSpec:
        """What a recurrent layer keeps, by the model's class; and blocks become as long as they
        have to be."""

        class Platform(CpuPlatform):
            @classmethod
            def _find_non_ssm_backends(cls, _: Any) -> Any:
                return [Kernels]

        with mock.patch.object(ModelRegistry, "resolve_model_cls", return_value=(model, "")):
            Platform._align_hybrid_block_size(self.config, Kernels)
        cache = self.config.cache_config
        return MambaSpec(
            shapes=model.get_mamba_state_shape_from_config(self.config),
            dtypes=model.get_mamba_state_dtype_from_config(self.config),
            block_size=cache.mamba_block_size,
            page_size_padded=cache.mamba_page_size_padded,
            mamba_cache_mode="align",
        )

    def groups(self, specs: dict[str, KVCacheSpec]) -> list[tuple[int, list[int]]]:
        """Of each group its block's tokens, and the bytes of its layers' pages."""
        found = []
        for group in get_kv_cache_groups(self.config, specs):
            spec: Any = group.kv_cache_spec
            layers = [spec] * len(group.layer_names)
            if isinstance(spec, UniformTypeKVCacheSpecs):
                layers = [spec.kv_cache_specs[name] for name in group.layer_names]
            found.append((spec.block_size, sorted(layer.page_size_bytes for layer in layers)))
        return sorted(found)


def said_by(kind: Any, config: Any, **fields: Any) -> Any:
    """The spec that a layer of this class says.

    It is made without its constructor, which looks for a GPU's kernels.

    Args:
        fields: what the constructor takes from config.json, under its names.
    """
    layer = object.__new__(kind)
    vars(layer).update(fields)
    return kind.get_kv_cache_spec(layer, config)


def _hybrid(full: Any, state: Any) -> Specs:
    """Three recurrent layers to one of attention."""
    assert state.page_size_bytes == full.page_size_bytes, "vLLM's platform pads the smaller"
    return {f"model.layers.{i}": state if (i + 1) % 4 else full for i in range(8)}


def kimi_k3() -> Specs:
    """Kimi delta attention beside latents, of Kimi-Linear's sizes: those of K3 are not known."""
    from vllm.models.kimi_k3 import KimiLinearForCausalLM
    from vllm.models.kimi_k3.nvidia.kda import KimiK3DeltaAttention
    from vllm.models.kimi_k3.nvidia.mla import MultiHeadLatentAttention

    vllm = Vllm(KIMI_LINEAR, "auto")
    by_class = vllm.states(KimiLinearForCausalLM)
    linear: Any = KIMI_LINEAR["linear_attn_config"]
    state = said_by(
        KimiK3DeltaAttention, vllm.config, model_config=vllm.config.model_config,
        cache_config=vllm.config.cache_config, tp_size=1, num_heads=linear["num_heads"],
        head_dim=linear["head_dim"], conv_size=linear["short_conv_kernel_size"], num_spec=0,
        kda_prefill_backend="flashkda",
    )  # fmt: skip
    assert (state.shapes, state.dtypes) == (by_class.shapes, by_class.dtypes)
    full = said_by(
        MultiHeadLatentAttention, vllm.config, kv_cache_dtype="auto", head_size=vllm.head,
        non_causal_multi_token_decode=False,
    )  # fmt: skip
    return _hybrid(full, state)


def nemotron_h() -> Specs:
    """Mamba 2 beside attention."""
    from vllm.model_executor.models.nemotron_h import NemotronHForCausalLM

    vllm, hf = Vllm(NEMOTRON_H_8B, "auto", "float32"), NEMOTRON_H_8B
    by_class = vllm.states(NemotronHForCausalLM)
    heads, size = (int(str(hf[name])) for name in ("mamba_num_heads", "mamba_head_dim"))
    with mock.patch.object(mamba_mixer2, "get_tensor_model_parallel_world_size", return_value=1):
        state = said_by(
            mamba_mixer2.MambaMixer2, vllm.config, model_config=vllm.config.model_config,
            cache_config=vllm.config.cache_config, intermediate_size=heads * size,
            n_groups=hf["n_groups"], num_heads=heads, head_dim=size, num_spec=0,
            ssm_state_size=hf["ssm_state_size"], conv_kernel_size=hf["conv_kernel"],
            use_replayssm=False,
        )  # fmt: skip
    assert (state.shapes, state.dtypes) == (by_class.shapes, by_class.dtypes)
    return _hybrid(vllm.attention(), state)


def minimax_m3(layers: Sequence[int] = (2, 3, 4, 5)) -> Specs:
    """A dense layer, and some with an indexer."""
    from vllm.models.minimax_m3.common.indexer import MiniMaxM3IndexerCache
    from vllm.models.minimax_m3.nvidia.model import MiniMaxM3SparseAttention
    from vllm.transformers_utils.configs.minimax_m3 import MiniMaxM3TextConfig

    hf = MiniMaxM3TextConfig()
    sparse = hf.sparse_attention_config
    vllm = Vllm({**hf.to_dict(), "torch_dtype": "bfloat16"}, "auto")
    vllm.config.cache_config.block_size = sparse["sparse_block_size"]
    made: Specs = {}
    for i in layers:
        at = f"model.layers.{i}.self_attn.attn"
        if not sparse["sparse_attention_freq"][i]:
            made[at] = vllm.attention()
            continue
        made[at] = said_by(
            MiniMaxM3SparseAttention, vllm.config, num_kv_heads=vllm.heads, head_dim=vllm.head,
            kv_cache_dtype="auto", kv_cache_torch_dtype=vllm.kv_dtype,
        )  # fmt: skip
        made[f"{at}.indexer"] = said_by(
            MiniMaxM3IndexerCache, vllm.config, head_dim=sparse["sparse_index_dim"],
            dtype=torch.bfloat16,
        )  # fmt: skip
    return made
