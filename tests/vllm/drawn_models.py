# SPDX-License-Identifier: Apache-2.0
"""Small models that do not exist, drawn by a seed: layers whose KV cache specs are vLLM's own, of
all kinds that vLLM has, with its types of KV, its layouts, and ranks over which they are spread.

Which groups, pages and tensors come of the specs, vLLM's own functions say.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import torch
from vllm.utils.torch_utils import nvfp4_kv_cache_full_dim
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend
from vllm.v1.attention.backends.turboquant_attn import TurboQuantAttentionBackend
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    CircularBufferSpec,
    FullAttentionSpec,
    HiddenStateCacheSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    RSWASpec,
    SinkFullAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    get_kv_quant_mode,
)

from tests.vllm.context_ranks import Ranks

Specs = dict[str, Any]
"""Of each layer of a stage, by name."""
NUMBERS = {
    "auto": torch.bfloat16, "float16": torch.float16, "bfloat16": torch.bfloat16,
    "int8_per_token_head": torch.int8,
}  # fmt: skip
"""Types of an element. All others are bytes."""
SAME_BYTES = (
    ("bfloat16", "float16"),
    ("fp8_e4m3", "fp8_e5m2"),
    ("int8_per_token_head", "fp8_per_token_head"),
    ("nvfp4", "nvfp4_4over6"),
)
"""Types whose pages have the same size."""
KV_TYPES = (
    *(kind for pair in SAME_BYTES for kind in pair), "auto", "fp8", "fp8_inc",
    "int4_per_token_head", "turboquant_k8v4",
    "turboquant_4bit_nc", "turboquant_k3v4_nc", "turboquant_3bit_nc", "ultraquant_4bit",
)  # fmt: skip
LATENT_TYPES = ("bfloat16", "fp8_e4m3", "fp8_ds_mla", "nvfp4_ds_mla")
LAYOUTS = ("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")
PACKED = ("BLHNC", "BLNHC")
"""Blocks outermost, pages whole: where pages have several sizes."""
WHOLE = ("LBHNC", "LBNHC", *PACKED)
INSIDE: dict[str, Any] = {"num_prefill_checkpoint_blocks": 1, "prefill_checkpoint_alignment": 1}
"""Of states whose kernels leave the one at the last block's end from inside of a step."""
STATES = tuple(kind for kind in MambaAttentionBackendEnum if kind.name != "CUSTOM")


@dataclass(frozen=True)
class Drawn:
    """A model, and how it is started."""

    family: str
    kv_type: str
    layout: str
    stages: tuple[Specs, ...]
    ranks: Ranks
    """Of a stage."""
    chunk_tokens: int
    retained_tokens: int = 0
    """That windows keep below them, for drafters of several modules."""

    @property
    def specs(self) -> Specs:
        return {name: spec for stage in self.stages for name, spec in stage.items()}

    @property
    def block_tokens(self) -> int:
        """As --block-size says it: of the layers that keep most tokens in one."""
        return max(spec.block_size for spec in self.specs.values())

    def __str__(self) -> str:
        how = f"{len(self.stages)} stages of {self.ranks}, {self.retained_tokens} tokens retained"
        return f"{self.family}, {self.kv_type}, {self.layout}, {how}; {self.stages[0]}"

    def of_other_type(self) -> Drawn | None:
        """The same with KV of another type, whose pages have the same size."""
        for one, other in (*SAME_BYTES, *(pair[::-1] for pair in SAME_BYTES)):
            if self.kv_type == one:
                stages = tuple(
                    {name: _of_type(spec, other) for name, spec in stage.items()}
                    for stage in self.stages
                )
                return replace(self, kv_type=other, stages=stages)
        return None


def _of_type(spec: Any, kv_type: str) -> Any:
    if isinstance(spec, MambaSpec):
        return spec
    mode = get_kv_quant_mode(kv_type)
    return replace(spec, dtype=NUMBERS.get(kv_type, torch.uint8), kv_quant_mode=mode)


def attention(random: Random, kind: type[Any], kv_type: str, block: int, **fields: Any) -> Any:
    """A layer with K and V of each head, as the kernels that take the type cut its pages."""
    fields = {"num_kv_heads": 2, "head_size": 0, **fields}
    fields["head_size"] = head = fields["head_size"] or random.choice((16, 32))
    mode, number = get_kv_quant_mode(kv_type), NUMBERS.get(kv_type, torch.uint8)
    spec = kind(block_size=block, dtype=number, kv_quant_mode=mode, **fields)
    if kv_type.startswith("nvfp4"):  # as FlashInfer's: K and V apart
        slots, size = 2 * spec.num_kv_heads, nvfp4_kv_cache_full_dim(head)
        return replace(spec, num_head_slots=slots, state_content_bytes=size)
    if kv_type == "ultraquant_4bit":  # K and V of 4 bits, a scale of a byte for 32 of each
        return replace(spec, state_content_bytes=head + 2 * -(-head // 32))
    return TurboQuantAttentionBackend.customize_spec(TritonAttentionBackend.customize_spec(spec))


def latent(
    random: Random, kv_type: str, block: int, kind: type[Any] = MLAAttentionSpec, **fields: Any
) -> Any:
    """One latent a state; with scales behind it, if its type has them."""
    size = random.choice((24, 32, 48))
    if kv_type.endswith("_ds_mla"):
        fields |= {"state_content_bytes": size + 8, "cache_dtype_str": kv_type}
    return one_head(block, size, NUMBERS.get(kv_type, torch.uint8), kind, **fields)


def one_head(
    block: int, size: int, number: torch.dtype = torch.uint8, kind: type[Any] = MLAAttentionSpec,
    **fields: Any,
) -> Any:  # fmt: skip
    return kind(block_size=block, num_kv_heads=1, head_size=size, dtype=number, **fields)


# ---- families --------------------------------------------------------------------------

Layers = Iterator[tuple[str, KVCacheSpec]]
Family = Callable[[Random, str, int], Layers]
"""Makes the layers of one period of a model's pattern, given the type of KV and a block's tokens;
a stage has some periods. What it draws is the same for all periods: it is given the same seed."""


def full(random: Random, kv_type: str, block: int) -> Layers:
    spec = attention(random, FullAttentionSpec, kv_type, block)
    for i in range(random.randint(1, 2)):
        yield f"attn {i}", spec


def sinks(random: Random, kv_type: str, block: int) -> Layers:
    yield "attn", attention(random, SinkFullAttentionSpec, kv_type, block, sink_len=block)


def prompts(random: Random, kv_type: str, block: int) -> Layers:
    window = random.choice((8, 24, 40))
    yield "attn", attention(random, RSWASpec, kv_type, block, rswa_window=window)


def windows(random: Random, kv_type: str, block: int) -> Layers:
    sizes = {"num_kv_heads": random.choice((1, 2)), "head_size": random.choice((16, 32))}
    sliding = {"sliding_window": random.choice((17, 32, 40, 100)), **sizes}
    for i in range(random.randint(1, 2)):
        yield f"window {i}", attention(random, SlidingWindowSpec, kv_type, block, **sliding)
    yield "attn", attention(random, FullAttentionSpec, kv_type, block, **sizes)


def wide_windows(random: Random, kv_type: str, block: int) -> Layers:
    """Heads of two sizes: vLLM makes the blocks of one kind larger, pads pages or packs them."""
    sliding = {"sliding_window": random.choice((24, 40, 64)), "head_size": 16}
    yield "window", attention(random, SlidingWindowSpec, kv_type, block, **sliding)
    heads, size = random.choice(((2, 32), (4, 16), (1, 16)))
    sizes = {"num_kv_heads": heads, "head_size": size}
    yield "attn", attention(random, FullAttentionSpec, kv_type, block, **sizes)


def two_windows(random: Random, kv_type: str, block: int) -> Layers:
    sizes = {"num_kv_heads": 1, "head_size": 16}
    lengths = random.choice(((24, 64), (32, 100)))
    for name, length in zip(("short", "long"), lengths, strict=True):
        sliding = {"sliding_window": length, **sizes}
        yield name, attention(random, SlidingWindowSpec, kv_type, block, **sliding)
    if random.random() < 0.6:
        yield "attn", attention(random, FullAttentionSpec, kv_type, block, **sizes)


def hidden_states(random: Random, kv_type: str, block: int) -> Layers:
    """A drafter that keeps the model's hidden states, in a group of their own."""
    yield from windows(random, kv_type, block)
    heads, number = random.choice((1, 3)), torch.bfloat16
    yield (
        "hidden",
        HiddenStateCacheSpec(block_size=block, num_kv_heads=heads, head_size=16, dtype=number),
    )


def window_alone(random: Random, kv_type: str, block: int) -> Layers:
    length = random.choice((64, 100, 128))
    yield "window", attention(random, SlidingWindowSpec, kv_type, block, sliding_window=length)


def local(random: Random, kv_type: str, block: int) -> Layers:
    sizes = {"num_kv_heads": random.choice((1, 2)), "head_size": 16}
    length, kind = block * random.choice((2, 4, 6)), ChunkedLocalAttentionSpec
    yield "local", attention(random, kind, kv_type, block, attention_chunk_size=length, **sizes)
    yield "attn", attention(random, FullAttentionSpec, kv_type, block, **sizes)


def several_sizes(random: Random, kv_type: str, block: int) -> Layers:
    """All keep all tokens: one group, pages of several sizes."""
    yield "plain", attention(random, FullAttentionSpec, "bfloat16", block, head_size=32)
    yield "other", attention(random, FullAttentionSpec, kv_type, block, head_size=16)


def latents(random: Random, kv_type: str, block: int) -> Layers:
    shards = random.choice((None, 1))
    yield "attn", latent(random, kv_type, block, max_tp_shards=shards)


def compressed(random: Random, kv_type: str, block: int) -> Layers:
    ratio = random.choice((2, 4, 8))
    yield "attn", latent(random, kv_type, 2 * block, tokens_per_state=ratio)


def indexed(random: Random, kv_type: str, block: int) -> Layers:
    shards = random.choice((None, 1))
    yield "attn", latent(random, kv_type, block, max_tp_shards=shards)
    yield "indexer", one_head(block, 12, max_tp_shards=shards)


def latent_windows(random: Random, kv_type: str, block: int) -> Layers:
    seed, length = random.random(), random.choice((24, 40, 64))
    kind = SlidingWindowMLASpec
    yield "window", latent(Random(seed), kv_type, block, kind, sliding_window=length)
    yield "attn", latent(Random(seed), kv_type, block)


def rings(random: Random, kv_type: str, block: int) -> Layers:
    """GLM 5.3's kind and DeepSeek V4.1's: states of several tokens, a ring of those that are not in
    one, often a window that is computed again behind each hit."""
    ratio, block = random.choice((2, 4)), 2 * block
    yield "attn", latent(random, kv_type, block, tokens_per_state=random.choice((1, ratio)))
    yield "indexer", one_head(block, 12, tokens_per_state=ratio)
    size, scratch = random.choice((ratio, 2 * ratio)), {"head_size_v": 0, "dcp_sharded": False}
    yield "ring", one_head(size, 20, torch.bfloat16, CircularBufferSpec, **scratch)
    if random.random() < 0.6:
        replay = {"sliding_window": random.choice((20, 40)), "bounded_replay": True}
        yield "replayed", one_head(16, 24, kind=SlidingWindowMLASpec, **replay)


def compressors(random: Random, kv_type: str, block: int) -> Layers:
    """DeepSeek V4's kind: a window in each layer, states of several tokens in two sizes, and short
    windows of what is to be compressed, in blocks of few tokens."""
    block, kind, number = 4 * block, SlidingWindowMLASpec, torch.float32
    large, length = random.choice((8, 16)), random.choice((20, 32))
    yield "window", one_head(16, 24, kind=kind, sliding_window=length)
    for ratio, tokens, window in ((4, 4, 8), (large, 8, large)):
        yield f"attn {ratio}", latent(Random(1), kv_type, block, tokens_per_state=ratio)
        yield f"compressor {ratio}", one_head(tokens, 12, number, kind, sliding_window=window)
    yield "indexer", one_head(block, 12, tokens_per_state=4)


def states(random: Random, kv_type: str, block: int) -> Layers:
    """Recurrent layers beside attention, pages padded to one size as vLLM's platform does."""
    block *= random.choice((1, 2, 3))
    if random.random() < 0.6:
        spec = attention(random, FullAttentionSpec, kv_type, block)
    else:
        spec = latent(random, kv_type if kv_type in LATENT_TYPES else "bfloat16", block)
    shapes = random.choice((((3, 10), (2, 4, 6)), ((5, 12),), ((2, 8), (2, 8), (4, 8))))
    state: Any = MambaSpec(
        block_size=block, shapes=shapes,
        dtypes=tuple(torch.float32 if i else torch.bfloat16 for i in range(len(shapes))),
        mamba_type=random.choice(STATES), mamba_cache_mode="align",
        tp_replicated=random.random() < 0.2, **random.choice(({}, INSIDE)),
    )  # fmt: skip
    page = max(spec.page_size_bytes, state.page_size_bytes)
    for i in range(random.randint(1, 3)):
        yield f"state {i}", replace(state, page_size_padded=page)
    yield "attn", replace(spec, page_size_padded=page)


FAMILIES: Mapping[str, tuple[Family, tuple[str, ...], tuple[str, ...]]] = {
    "full": (full, KV_TYPES, LAYOUTS),
    "sinks": (sinks, KV_TYPES, LAYOUTS),
    "prompts": (prompts, KV_TYPES, LAYOUTS),
    "windows": (windows, KV_TYPES, LAYOUTS),
    "wide windows": (wide_windows, ("bfloat16", "float16", "fp8_e4m3", "fp8_e5m2"), WHOLE),
    "two windows": (two_windows, KV_TYPES, LAYOUTS),
    "hidden states": (hidden_states, KV_TYPES, ("LBNHC", *PACKED)),
    "window alone": (window_alone, KV_TYPES, LAYOUTS),
    "local": (local, KV_TYPES, LAYOUTS),
    "several sizes": (several_sizes, KV_TYPES, WHOLE),
    "latents": (latents, LATENT_TYPES, LAYOUTS),
    "compressed": (compressed, LATENT_TYPES, LAYOUTS),
    "indexed": (indexed, LATENT_TYPES, WHOLE),
    "latent windows": (latent_windows, LATENT_TYPES, LAYOUTS),
    "rings": (rings, LATENT_TYPES, PACKED),
    "compressors": (compressors, LATENT_TYPES, PACKED),
    "states": (states, (*KV_TYPES, *LATENT_TYPES), WHOLE),
}  # fmt: skip
"""Each with the types of KV and the layouts that vLLM has for it."""
SHARE_TOKENS = ("full", "sinks", "latents", "several sizes", "states")
"""Families that vLLM lays over ranks of decode context parallelism, and the store serves so."""


def draw(random: Random) -> Drawn:
    family = random.choice(list(FAMILIES))
    make, types, layouts = FAMILIES[family]
    kv_type, block, seed = random.choice(types), random.choice((16, 16, 32)), random.random()
    layout = random.choice(layouts)
    num_stages = random.choice((1, 1, 1, 2, 3))
    if family == "hidden states" or (family == "wide windows" and layout in PACKED):
        num_stages = 1  # of groups that a stage has no layer of vLLM 0.32 makes no tensors
    if family == "rings":  # in three stages vLLM packs pages of some, and the store is idle
        num_stages = min(num_stages, 2)
    tensor = random.choice((1, 1, 2)) if num_stages < 3 else 1
    ranks, more = Ranks(tensor, 1), Random(seed)
    if family in SHARE_TOKENS and random.random() < 0.25:
        tensor = random.choice((2, 2, 4)) if num_stages == 1 else 2
        ranks = Ranks(tensor, 2, interleave=random.choice((1, 2, 4, block)))
        if more.random() < 0.5:  # prefill ranks; the others may lie along them
            decode = more.choice((1, 2, 2, 4) if num_stages == 1 else (1, 2))
            ranks = replace(ranks, tensor=more.choice((1, 2)), decode=decode, prefill=2)
            ranks = replace(ranks, decode=min(decode, ranks.count))
    retained_tokens = more.choice((1, 3, 20)) if more.random() < 0.25 else 0
    stages = tuple(
        {
            f"stage {stage} period {period} {name}": spec
            for period in range(random.randint(1, 2))
            for name, spec in make(Random(seed), kv_type, block)
        }
        for stage in range(num_stages)
    )
    chunk_tokens = random.choice((32, 64, 128))
    if family in ("window alone", "two windows"):  # a chunk is within the longest window
        chunk_tokens = min(chunk_tokens, 64)
    return Drawn(family, kv_type, layout, stages, ranks, chunk_tokens, retained_tokens)
