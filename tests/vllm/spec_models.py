# SPDX-License-Identifier: Apache-2.0
"""KV cache specs of models that no CPU runs: a few layers of each, with the real models' sizes.

vLLM's own layers say their specs (those of hybrids in spec_layers.py), and its own functions make
groups, tensors and views of them.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from vllm.v1.core.kv_cache_utils import (
    generate_scheduler_kv_cache_config,
)
from vllm.v1.kv_cache_interface import (
    CircularBufferSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVQuantMode,
    MambaSpec,
    MLAAttentionSpec,
    RSWASpec,
    SinkFullAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
)
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.worker.utils import allocate_kv_cache

from attnstore_vllm.config.settings import StoreConfig
from attnstore_vllm.connector.build import geometry_of
from attnstore_vllm.connector.worker import Worker
from attnstore_vllm.transfer.geometry import Geometry
from tests.vllm.planning import get_kv_cache_configs
from tests.vllm.spec_layers import kimi_k3, minimax_m3, nemotron_h

PACKED = "BLHNC"
"""Blocks outermost: what vLLM takes where pages have several sizes."""
FLAT = "LBNHC"
Specs = dict[str, Any]


def _of(cls: Any, block_tokens: int, kv_type: str, **fields: Any) -> Any:
    """The spec that a layer of this class says, whose fields are these."""
    cache = SimpleNamespace(cache_dtype=kv_type, block_size=block_tokens)
    config = SimpleNamespace(cache_config=cache, num_speculative_tokens=0)
    layer = SimpleNamespace(cache_config=cache, kv_cache_dtype=kv_type, **fields)
    return cls.get_kv_cache_spec(layer, config)


def deepseek_v4(ratios: Sequence[int] = (0, 4, 128, 4, 128, 4)) -> Specs:
    """Layers with a window alone, and with latents of 4 and of 128 tokens beside it."""
    from vllm.models.deepseek_v4.attention import DeepseekV4Attention, DeepseekV4IndexerCache
    from vllm.models.deepseek_v4.compressor import CompressorStateCache
    from vllm.v1.attention.backends.mla.sparse_swa import DeepseekV4SWACache

    kind, uint8 = "fp8_ds_mla", torch.uint8
    made: Specs = {}
    for i, ratio in enumerate(ratios):
        at = f"model.layers.{i}.attn"
        made[f"{at}.swa_cache"] = _of(
            DeepseekV4SWACache, 256, kind, bounded_replay=False, block_size=64, head_dim=512,
            dtype=uint8, window_size=128, packed_bytes_per_token=584, packed_page_alignment=576,
            packed_block_stride_alignment=None,
        )  # fmt: skip
        if not ratio:
            continue
        made[at] = _of(DeepseekV4Attention, 256, kind, compress_ratio=ratio, head_dim=512)
        twice = 2 if ratio == 4 else 1
        state = {"block_size": 4 if ratio == 4 else 8, "sliding_window": twice * ratio}
        made[f"{at}.compressor.state_cache"] = _of(
            CompressorStateCache, 256, kind, dtype=torch.float32, state_dim=2 * twice * 512, **state
        )
        if ratio == 4:
            made[f"{at}.indexer.k_cache"] = _of(
                DeepseekV4IndexerCache, 256, kind, head_dim=132, dtype=uint8, compress_ratio=4
            )
            made[f"{at}.indexer.state_cache"] = _of(
                CompressorStateCache, 256, kind, dtype=torch.float32, state_dim=512, **state
            )
    return made


def deepseek_v41(
    ratios: Sequence[int] = (1, 2, 2, 1), sources: Sequence[int] = range(4), nvfp4: bool = False
) -> Specs:
    """Windows that are computed again behind a hit, and rings of the tokens to be compressed.

    Args:
        sources: the layers that have latents.
        nvfp4: the type of KV is nvfp4_ds_mla, with the records of SM100.
    """
    from vllm.models.deepseek_v41.attention import DeepseekV4Attention
    from vllm.models.deepseek_v41.compressor import CompressorStateCache
    from vllm.v1.attention.backends.mla.sparse_swa import DeepseekV4SWACache

    kind = "nvfp4_ds_mla" if nvfp4 else "fp8_ds_mla"
    of_window, of_latent, alignment = (528, 288, 512) if nvfp4 else (584, 584, 576)
    sizes: dict[str, Any] = {
        "block_size": 256, "num_kv_heads": 1, "dtype": torch.uint8, "cache_dtype_str": kind,
    }  # fmt: skip
    made: Specs = {}
    for i, ratio in enumerate(ratios):
        at = f"model.layers.{i}.attn"
        made[f"{at}.swa_cache"] = _of(
            DeepseekV4SWACache, 256, kind, bounded_replay=True, block_size=32, head_dim=512,
            dtype=torch.uint8, window_size=128, packed_bytes_per_token=of_window,
            packed_page_alignment=alignment,
            packed_block_stride_alignment=math.lcm(of_window, of_latent) if nvfp4 else None,
        )  # fmt: skip
        if i not in sources:
            continue
        made[at] = _of(
            DeepseekV4Attention, 256, kind, is_kv_source=True, compress_ratio=ratio, head_dim=512,
            kv_page_alignment=alignment, compressed_bytes_per_token=of_latent,
        )  # fmt: skip
        made[f"{at}.indexer.k_cache"] = MLAAttentionSpec(
            **sizes, head_size=132, tokens_per_state=ratio, alignment=alignment
        )
        if ratio > 1:
            made[f"{at}.state_cache"] = _of(
                CompressorStateCache, 256, kind, block_size=8, state_dim=1024, dtype=torch.float32
            )
    return made


def deepseek_v32() -> Specs:
    """Latents and an indexer's keys: GLM-5, too."""
    from vllm.model_executor.models.deepseek_v2 import DeepseekV32IndexerCache

    latent = MLAAttentionSpec(
        block_size=64, num_kv_heads=1, head_size=576, dtype=torch.uint8, max_tp_shards=1,
        cache_dtype_str="fp8_ds_mla", state_content_bytes=656,
    )  # fmt: skip
    made: Specs = {}
    for i in range(3):
        made[f"model.layers.{i}.attn"] = latent
        made[f"model.layers.{i}.indexer.k_cache"] = _of(
            DeepseekV32IndexerCache, 64, "fp8_ds_mla", head_dim=132, dtype=torch.uint8
        )
    return made


def glm_53() -> Specs:
    """As deepseek_v32(), with keys of pools of tokens, and a ring of the open pool."""
    pool, made = 4, {}
    for name, spec in deepseek_v32().items():
        is_indexer = name.endswith("k_cache")
        made[name] = copy.copy(spec)
        object.__setattr__(made[name], "block_size", 256)
        if is_indexer:
            object.__setattr__(made[name], "tokens_per_state", pool)
            made[name.replace("k_cache", "tail_cache")] = CircularBufferSpec(
                block_size=pool, num_kv_heads=2, head_size=128, head_size_v=0,
                dtype=torch.bfloat16, dcp_sharded=False,
            )  # fmt: skip
    return made


def _hybrid(full: Any, state: MambaSpec) -> Specs:
    """Three recurrent layers to one of attention, pages padded as vLLM's platform does."""
    page = max(full.page_size_bytes, state.page_size_bytes)
    object.__setattr__(state, "page_size_padded", page)
    object.__setattr__(full, "page_size_padded", page)
    return {f"model.layers.{i}": state if (i + 1) % 4 else full for i in range(8)}


LLAMA: dict[str, Any] = {"block_size": 16, "num_kv_heads": 8, "head_size": 128}


def _llama(cls: Any, dtype: torch.dtype, **fields: Any) -> Callable[[], Specs]:
    return lambda: {f"model.layers.{i}": cls(**LLAMA, dtype=dtype, **fields) for i in range(3)}


def nvfp4_llama() -> Specs:
    """FP4 numbers, and a scale of FP8 for each 16 of them."""
    content = 2 * (128 // 2 + 128 // 16)
    made = _llama(
        FullAttentionSpec, torch.uint8, kv_quant_mode=KVQuantMode.NVFP4, state_content_bytes=content
    )
    return made()


def turboquant_llama() -> Specs:
    """The first and last layers have KV of another type."""
    plain = FullAttentionSpec(**LLAMA, dtype=torch.bfloat16)
    packed = FullAttentionSpec(
        **LLAMA, dtype=torch.uint8, kv_quant_mode=KVQuantMode.TURBOQUANT_K8V4,
        state_content_bytes=196,
    )  # fmt: skip
    return {f"model.layers.{i}": plain if i in (0, 3) else packed for i in range(4)}


def of_backend(mode: KVQuantMode, dtype: torch.dtype) -> Callable[[], Specs]:
    """As vLLM's Triton backend makes a spec: scales stand behind each head's numbers."""

    def make() -> Specs:
        from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend

        spec = FullAttentionSpec(**LLAMA, dtype=dtype, kv_quant_mode=mode)
        made = TritonAttentionBackend.customize_spec(spec)
        assert made.state_content_bytes, "with scales"
        return {f"model.layers.{i}": made for i in range(3)}

    return make


def sliding_mla() -> Specs:
    latent: dict[str, Any] = {
        "block_size": 64, "num_kv_heads": 1, "head_size": 576, "dtype": torch.bfloat16,
    }  # fmt: skip
    window = SlidingWindowMLASpec(**latent, sliding_window=512)
    return {f"model.layers.{i}": window if i % 2 else MLAAttentionSpec(**latent) for i in range(4)}


MODELS: dict[str, tuple[Callable[[], Specs], str]] = {
    "deepseek v4": (deepseek_v4, PACKED),
    "deepseek v4.1": (deepseek_v41, PACKED),
    "deepseek v3.2, glm 5": (deepseek_v32, PACKED),
    "deepseek v3.2, flat": (deepseek_v32, FLAT),
    "glm 5.3": (glm_53, PACKED),
    "minimax m3": (minimax_m3, PACKED),
    "kimi k3": (kimi_k3, FLAT),
    "nemotron-h": (nemotron_h, FLAT),
    "nemotron-h, packed": (nemotron_h, PACKED),
    "llama, nvfp4": (nvfp4_llama, FLAT),
    "llama, turboquant": (turboquant_llama, PACKED),
    "llama, int8 per head": (
        of_backend(KVQuantMode.INT8_PER_TOKEN_HEAD, torch.int8), "LHBNC"
    ),
    "llama, fp8 per head": (
        of_backend(KVQuantMode.FP8_PER_TOKEN_HEAD, torch.uint8), FLAT
    ),
    "llama, int4 per head": (
        of_backend(KVQuantMode.INT4_PER_TOKEN_HEAD, torch.uint8), "BHLNC"
    ),
    "r-swa": (_llama(RSWASpec, torch.bfloat16, rswa_window=64), FLAT),
    "sinks": (_llama(SinkFullAttentionSpec, torch.bfloat16, sink_len=16), FLAT),
    "sliding mla": (sliding_mla, FLAT),
    "compressed latents": (
        lambda: {
            f"l{i}": MLAAttentionSpec(
                block_size=256, num_kv_heads=1, head_size=512, dtype=torch.bfloat16,
                tokens_per_state=4,
            )
            for i in range(3)
        },
        FLAT,
    ),
}  # fmt: skip
SERVED_BEFORE: dict[str, tuple[Callable[[], Specs], str]] = {
    "llama": (_llama(FullAttentionSpec, torch.bfloat16), FLAT),
    "gemma 3": (
        lambda: {
            f"model.layers.{i}": FullAttentionSpec(**LLAMA, dtype=torch.bfloat16)
            if i % 6 == 5
            else SlidingWindowSpec(**LLAMA, dtype=torch.bfloat16, sliding_window=1024)
            for i in range(12)
        },
        FLAT,
    ),
    "gpt-oss": (
        lambda: {
            f"model.layers.{i}": FullAttentionSpec(**LLAMA, dtype=torch.bfloat16)
            if i % 2
            else SlidingWindowSpec(**LLAMA, dtype=torch.bfloat16, sliding_window=128)
            for i in range(6)
        },
        PACKED,
    ),
    "qwen3-next": (
        lambda: _hybrid(
            FullAttentionSpec(block_size=1056, num_kv_heads=2, head_size=256, dtype=torch.bfloat16),
            MambaSpec(
                block_size=1056, shapes=((3, 8192), (32, 128, 128)),
                dtypes=(torch.bfloat16, torch.float32), mamba_cache_mode="align",
            ),
        ),
        FLAT,
    ),
    "deepseek v3": (
        lambda: {
            f"l{i}": MLAAttentionSpec(
                block_size=64, num_kv_heads=1, head_size=576, dtype=torch.bfloat16, max_tp_shards=1
            )
            for i in range(3)
        },
        FLAT,
    ),
}  # fmt: skip


def configurations(config: Any, specs: Specs, layout: str) -> tuple[KVCacheConfig, KVCacheConfig]:
    """A worker's and the scheduler's, as vLLM makes them.

    Args:
        config: of a small model; its limits are those of the pool.
    """
    config = copy.copy(config)
    config.cache_config = copy.copy(config.cache_config)
    config.cache_config.kv_cache_layout = layout
    config.cache_config.num_gpu_blocks_override = 16 if _are_large(specs) else 200
    if any(isinstance(spec, MambaSpec) for spec in specs.values()):
        config.cache_config.mamba_cache_mode = "align"
    (made,) = get_kv_cache_configs(config, [dict(specs)], [1 << 40])
    return made, generate_scheduler_kv_cache_config([made])


def _are_large(specs: Specs) -> bool:
    return any(spec.page_size_bytes > 1 << 20 for spec in specs.values())


def geometry(config: Any, kv: KVCacheConfig, chunk_tokens: int = 256) -> Geometry:
    settings = {
        "dram": "1GiB",
        "nvme": {"path": "/nowhere", "capacity": "1GiB"},
        "chunk_tokens": chunk_tokens,
    }
    return geometry_of(config, kv, StoreConfig.parse(settings))


def tensors(kv: KVCacheConfig, layout: str) -> dict[str, torch.Tensor]:
    return allocate_kv_cache(kv, torch.device("cpu"), KVCacheLayout[layout])


class Slots:
    """A pool that nothing else has, and what a worker says of itself."""

    num_parts = 1
    buffer = memoryview(b"")

    def __init__(self, geometry: Geometry, num_slots: int) -> None:
        self.num_slots = num_slots
        self.memory = torch.zeros(num_slots * geometry.slot_bytes, dtype=torch.uint8)
        self.address = self.memory.data_ptr()
        self.told: dict[str, Any] = {}

    def publish(self, rank: int, description: dict[str, Any]) -> None:
        self.told = description

    def close(self) -> None:
        """The memory goes with this object."""


def worker_of(
    shape: Geometry, config: KVCacheConfig, kv: dict[str, torch.Tensor], num_slots: int
) -> Worker:
    pool: Any = Slots(shape, num_slots)
    made = Worker(pool, 0, shape, config.num_blocks, write_buffer_bytes=lambda _: 0)
    made.register_kv_caches(kv, "a kernel")
    return made
