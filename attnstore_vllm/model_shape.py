# SPDX-License-Identifier: Apache-2.0
"""The KV of a model as its config.json tells it: kinds of layers, vLLM's groups of them, bytes.

Follows vLLM 0.32 (v1/core/kv_cache_utils.py): pages of all groups have one size, layers of a kind
are cut into groups as large as the smallest kind, a recurrent layer's state sets the block. Where
all layers keep all tokens there is one group, and each layer has pages of its own size. Pages that
vLLM packs side by side are in packed_shape.py.

It is long since each family of models has its rule here, as vLLM's own specs have it.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

from attnstore_vllm.errors import ConfigError
from attnstore_vllm.index.prefix import GRAIN_TOKENS
from attnstore_vllm.index.sections import Need, Reach
from attnstore_vllm.packed_shape import (
    COMPRESSORS,
    LATENT,
    PackedShape,
    deepseek_v4,
    deepseek_v41,
)
from attnstore_vllm.tiers.nvme.format import header_bytes, pages
from attnstore_vllm.transfer.geometry import Geometry, Group, round_chunk_tokens

BLOCK_TOKENS = 16
"""vLLM's on GPUs."""
DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "half": 2, "float32": 4, "float": 4}
_PATTERNS = {"gemma2": 2, "gemma3_text": 6, "gemma3": 6, "cohere2": 4}
"""The last of so many layers is full, where config.json does not say which are."""
_TYPES = {
    "full_attention": Reach.FULL, "attention": Reach.FULL, "global_attention": Reach.FULL,
    "sliding_attention": Reach.WINDOW, "chunked_attention": Reach.LOCAL,
    "linear_attention": Reach.STATE, "conv": Reach.STATE, "mamba": Reach.STATE,
}  # fmt: skip
_LETTERS = {"M": Reach.STATE, "*": Reach.FULL, "-": None, "E": None}
"""Letters of hybrid_override_pattern. Layers of experts keep nothing."""
_NOT_KNOWN = {
    "attn_layer_period": "Mamba 1 layers", "hybrid_layer_ids": "Mamba layers that share attention",
    "block_configs": "layers of several sizes",
    "hybrid_layer_pattern": "windows with heads of their own",
    "sparse_attention_config": "keys of a sparse indexer",
    "ple_conv_kernel_size": "states of several kinds",
    "sconv_kernel_size": "states of several kinds",
}  # fmt: skip
_INDEXED = ("deepseek_v32", "glm_moe_dsa")
"""Types of models whose latents have an indexer of a known form beside them."""
_MAMBA2 = (
    ("mamba_num_heads", "mamba_head_dim", "n_groups", "ssm_state_size", "conv_kernel"),
    ("mamba_n_heads", "mamba_d_head", "mamba_n_groups", "mamba_d_state", "mamba_d_conv"),
)
"""Names of heads, tokens of a head, groups, states and kernel: Nemotron-H's, and all others'."""
_PACKED_LATENTS = {"fp8_ds_mla": 656, "nvfp4_ds_mla": 352}
"""Bytes of a token's latent of 512 and its 64 rotated elements, with their scales."""
_ONE_BYTE = ("fp8", "fp8_e4m3", "fp8_e5m2", "fp8_inc", "int8")
_SCALE_BYTES = 4
"""A scale a token and head, of K and of V: *_per_token_head."""
KV_TYPES = (
    *DTYPE_BYTES, *_ONE_BYTE, "int8_per_token_head", "fp8_per_token_head", "int4_per_token_head",
    "nvfp4", "nvfp4_4over6", *_PACKED_LATENTS,
)  # fmt: skip
"""Values of vLLM's --kv-cache-dtype whose bytes are known here."""
_MLA_STATE_BLOCK = 128
"""Beside states vLLM's blocks of latents are multiples of so many tokens."""
_COMPRESSED = ("deepseek_v4", "deepseek_v41", "deepseek_v41_text")
"""Types of models whose latents are of several tokens."""
_GOT = "expected the config.json of a decoder"


@dataclass(frozen=True, slots=True)
class LayerKind:
    """Layers that keep the same."""

    reach: Reach
    reach_tokens: int
    num_bytes: int
    """Bytes of a token in one layer, or of a whole state."""
    of_tokens: int = 1
    """Tokens that these are the bytes of: more than one where they are a page's."""


@dataclass(frozen=True, slots=True)
class KvShape:
    """The KV of a model, and how vLLM and the store cut it. One rank."""

    kinds: Mapping[LayerKind, int]
    """With how many layers there are of each."""
    geometry: Geometry
    packed: PackedShape | None = None
    """Set where pages lie side by side."""

    def token_bytes(self, *reaches: Reach) -> int:
        """Bytes of a token in all layers that look so far back; of recurrent ones, the states."""
        found = sum(
            Fraction(kind.num_bytes * n, kind.of_tokens)
            for kind, n in self.kinds.items()
            if kind.reach in reaches
        )
        return math.ceil(found)

    def held_bytes(self, num_tokens: int) -> int:
        """Bytes of a request in HBM, and of what is copied there for a hit of so many tokens."""
        if self.packed is not None:
            return self.packed.held_bytes(num_tokens)
        return sum(
            number * kind.num_bytes * _held_tokens(kind, num_tokens)
            for kind, number in self.kinds.items()
        )

    def needs(self) -> list[Need]:
        """The needs of the groups beside the spine."""
        return [
            Need(
                place,
                Reach(group.reach),
                group.reach_tokens,
                group.block_tokens,
                room=self.geometry.room(place),
            )
            for place, group in enumerate(self.geometry.groups)
            if place
        ]

    @property
    def record_bytes(self) -> int:
        """A chunk, a section or a state in the store."""
        chunk_tokens = self.geometry.chunk_tokens
        return header_bytes(chunk_tokens) + pages(self.geometry.slot_bytes)

    def records(self, num_tokens: int) -> dict[str, int]:
        """Records of a conversation of so many tokens: by kind of group, what a hit at its end
        needs. Up to as many sections, and as many states, are kept for the end of its prompt."""
        size = self.geometry.chunk_tokens
        end = -(-num_tokens // size)
        found = Counter({Reach.FULL.value: end})
        for need in self.needs():
            first = need.first(num_tokens)
            if first < num_tokens:
                found[need.reach.value] += end - first // size
        return dict(found)

    def conversation_bytes(self, num_tokens: int) -> int:
        return sum(self.records(num_tokens).values()) * self.record_bytes


def read_shape(
    path: Path,
    dtype_bytes: int | None = None,
    chunk_tokens: int = 256,
    state_dtype_bytes: int | None = None,
    kv_type: str | None = None,
) -> KvShape:
    """The shape that a file tells; see shape_of(). Raises: ConfigError, OSError."""
    try:
        config = json.loads(path.read_text())
    except ValueError as error:
        raise ConfigError(f"{path}: not JSON: {error}") from error
    if not isinstance(config, Mapping):
        raise ConfigError(f"{path}: {type(config).__name__} was found; expected a config.json")
    return shape_of(
        config,
        str(path),
        dtype_bytes,
        chunk_tokens=chunk_tokens,
        state_dtype_bytes=state_dtype_bytes,
        kv_type=kv_type,
    )


def _held_tokens(kind: LayerKind, num_tokens: int) -> int:
    """Tokens of a request that such a layer keeps; of a state, one."""
    if kind.reach is Reach.FULL:
        return num_tokens
    return min(num_tokens, 1 if kind.reach is Reach.STATE else kind.reach_tokens)


def shape_of(
    config: Mapping[str, Any],
    where: str,
    dtype_bytes: int | None = None,
    *,
    block_tokens: int = BLOCK_TOKENS,
    chunk_tokens: int = 256,
    state_dtype_bytes: int | None = None,
    kv_type: str | None = None,
) -> KvShape:
    """The shape that a config.json tells.

    Args:
        dtype_bytes: of an element of KV, if not the model's: 1 with fp8.
        block_tokens: vLLM's --block-size.
        chunk_tokens: of the store's settings; rounded up to whole blocks of all groups.
        state_dtype_bytes: of an element of a recurrent state, if neither the model's nor said by
            its config.json: vLLM's --mamba-ssm-cache-dtype. vLLM takes float32 by itself for
            Nemotron-H and Kimi-Linear, and on CPUs with AVX-512 BF16 (platforms/cpu.py).
        kv_type: vLLM's --kv-cache-dtype, if not the model's; one of KV_TYPES.
    Raises: ConfigError, with what was found, for models that it does not know.
    """
    config = config.get("text_config") or config
    for key, what in _NOT_KNOWN.items():
        if config.get(key):
            raise ConfigError(
                f"{where}: {key} is set: {what}, whose bytes are not known here; a server's log "
                "says what the store keeps a token"
            )
    if kv_type not in (None, "auto", *KV_TYPES):
        raise ConfigError(
            f"{where}: --kv-cache-dtype is {kv_type!r}, whose bytes are not known here; known are "
            f"{', '.join(KV_TYPES)}"
        )
    if config.get("compress_ratios"):
        return _compressed(config, where, kv_type, chunk_tokens)
    kinds = _kinds(config, where, dtype_bytes, state_dtype_bytes, kv_type)
    if not any(kind.reach is Reach.FULL for kind in kinds):
        raise ConfigError(
            f"{where}: no layer attends to all tokens; AttnStore does not serve such a model, "
            "unless with --disable-hybrid-kv-cache-manager, where all layers keep all tokens"
        )
    if len(kinds) > 1 and all(kind.reach is Reach.FULL for kind in kinds):
        groups, regions = _one_group(kinds, block_tokens)
    else:
        page_bytes, blocks = _pages(kinds, block_tokens, _state_block(config))
        groups = _groups(kinds, blocks)
        regions = max(len(group.layers) for group in groups) * (page_bytes,)
    rounding = [GRAIN_TOKENS, *(group.block_tokens for group in groups)]
    chunk = chunk_tokens
    for tokens in sorted(rounding):  # powers of two times one number: the largest is the multiple
        chunk = round_chunk_tokens(chunk, tokens)
    return KvShape(kinds, Geometry(1, regions, groups, chunk))


def _compressed(
    config: Mapping[str, Any], where: str, kv_type: str | None, chunk_tokens: int
) -> KvShape:
    """DeepSeek V4 and V4.1, with FlashMLA's types of KV."""
    kind = config.get("model_type")
    sizes = [config.get(name) for name in ("head_dim", "qk_rope_head_dim")]
    if kind not in _COMPRESSED or sizes != [LATENT, 64]:
        raise ConfigError(
            f"{where}: compress_ratios is set, model_type is {kind!r} and heads have {sizes}: "
            f"compressed latents, whose bytes are known of deepseek_v4 and deepseek_v41 with "
            f"{[LATENT, 64]} alone; a server's log says what the store keeps a token"
        )
    ratios = list(config["compress_ratios"])[: count_of(config, where, "num_hidden_layers")]
    sources = config.get("kv_source_layer_ids") or ()
    types = ["auto", "fp8", "fp8_ds_mla", *(["nvfp4_ds_mla"] if sources else [])]
    known = {0, 1, *([2] if sources else COMPRESSORS)}
    if (kv_type or "auto") not in types or not set(ratios) <= known:
        raise ConfigError(
            f"{where}: compress_ratios has {sorted(set(ratios))}, and --kv-cache-dtype is "
            f"{kv_type or 'auto'}; known here are {sorted(known)}, and {', '.join(types)}; a "
            "server's log says what the store keeps a token"
        )
    window, head = (
        count_of(config, where, "sliding_window"), count_of(config, where, "index_head_dim")
    )  # fmt: skip
    if sources:
        is_nvfp4 = kv_type == "nvfp4_ds_mla"
        pages = list(deepseek_v41(ratios, sources, window, head, is_nvfp4=is_nvfp4))
    else:
        pages = list(deepseek_v4(ratios, window, head))
    kinds = Counter(
        LayerKind(page.reach, page.reach_tokens, page.num_bytes, page.block_tokens)
        for page in pages
        if not page.is_scratch
    )
    packed = PackedShape.of(pages, chunk_tokens)
    return KvShape(kinds, packed.geometry, packed)


def _kinds(
    config: Mapping[str, Any],
    where: str,
    dtype_bytes: int | None,
    state_dtype_bytes: int | None,
    kv_type: str | None,
) -> Counter[LayerKind]:
    name = config.get("torch_dtype") or config.get("dtype") or "bfloat16"
    is_given = dtype_bytes is not None or kv_type in KV_TYPES
    if name not in DTYPE_BYTES and not is_given:
        raise ConfigError(f"{where}: torch_dtype is {name!r}; say --kv-dtype-bytes")
    of_model = DTYPE_BYTES.get(name, 2)
    of_state = state_dtype_bytes or _state_dtype_bytes(config, name, of_model)
    found = Counter[LayerKind]()
    own = {int(i): of_layer for i, of_layer in (config.get("per_layer_config") or {}).items()}
    for i, reach in enumerate(_reaches(config, where)):
        of_layer = {**config, **own.get(i, {})}
        tokens = 0
        if reach is Reach.WINDOW:
            tokens = count_of(of_layer, where, "sliding_window")
            tokens += config.get("model_type") == "cohere2"  # whose window is one wider in vLLM
        elif reach is Reach.LOCAL:
            tokens = count_of(config, where, "attention_chunk_size")
        num_bytes = (
            _state_bytes(of_layer, where, of_model, of_state)
            if reach is Reach.STATE
            else _token_bytes(of_layer, where, reach, dtype_bytes or of_model, kv_type)
        )
        found[LayerKind(reach, tokens, num_bytes)] += 1
    for num_bytes in _indexers(config, where):
        found[LayerKind(Reach.FULL, 0, num_bytes)] += 1
    return found


def _state_dtype_bytes(config: Mapping[str, Any], name: str, of_model: int) -> int:
    """Bytes of an element of a recurrent state, as vLLM chooses it where no setting does."""
    said = config.get("mamba_ssm_dtype") or config.get("mamba_ssm_cache_dtype")
    if not said and (config.get("hybrid_override_pattern") or config.get("linear_attn_config")):
        said = "float32"  # Nemotron-H, Kimi-Linear
    return DTYPE_BYTES.get(said or name, of_model)


def _indexers(config: Mapping[str, Any], where: str) -> list[int]:
    """The bytes of a token in each layer's indexer: keys of one byte, and a scale for 128."""
    if not config.get("index_head_dim"):
        return []
    kind = config.get("model_type")
    if kind not in _INDEXED:
        raise ConfigError(
            f"{where}: index_head_dim is set, and model_type is {kind!r}: keys of a sparse indexer "
            f"whose bytes are known of {', '.join(_INDEXED)} alone; a server's log says what the "
            "store keeps a token"
        )
    head = count_of(config, where, "index_head_dim")
    pattern, every = config.get("index_topk_pattern"), int(config.get("index_topk_freq") or 1)
    offset = int(config.get("index_skip_topk_offset", 2))
    layers = range(count_of(config, where, "num_hidden_layers"))
    if pattern is not None:
        number = sum(i >= len(pattern) or pattern[i] != "S" for i in layers)
    else:
        number = sum(max(i - offset + 1, 0) % every == 0 for i in layers)
    return number * [head + head // 128 * 4]


def _reaches(config: Mapping[str, Any], where: str) -> list[Reach]:
    """How far each layer looks back, of those that keep KV of their own."""
    num_layers = count_of(config, where, "num_hidden_layers", "n_layer")
    kind = config.get("model_type")
    types = config.get("layer_types")
    pattern = config.get("hybrid_override_pattern")
    linear = config.get("linear_attn_config") or {}
    if pattern:
        unknown = sorted(set(pattern) - set(_LETTERS))
        if unknown:
            raise ConfigError(
                f"{where}: hybrid_override_pattern has {unknown}; known are {sorted(_LETTERS)}"
            )
        reaches = [reach for reach in map(_LETTERS.__getitem__, pattern) if reach is not None]
    elif linear.get("kda_layers"):
        are_linear = set(linear["kda_layers"])  # counted from 1
        reaches = [Reach.STATE if i + 1 in are_linear else Reach.FULL for i in range(num_layers)]
    elif "mamba_d_ssm" in config:  # both in each layer
        reaches = [*num_layers * [Reach.FULL], *num_layers * [Reach.STATE]]
    elif types:
        unknown = sorted(set(types) - set(_TYPES))
        if unknown or len(types) != num_layers:
            raise ConfigError(
                f"{where}: layer_types has {len(types)} layers, of {num_layers}, and {unknown} "
                f"among them; known are {sorted(_TYPES)}"
            )
        reaches = [_TYPES[name] for name in types]
    elif kind in _PATTERNS:
        pattern = int(config.get("sliding_window_pattern") or _PATTERNS[kind])
        reaches = [
            Reach.FULL if (i + 1) % pattern == 0 else Reach.WINDOW for i in range(num_layers)
        ]
    elif kind in ("llama4_text", "llama4"):
        rope = config.get("no_rope_layers") or [(i + 1) % 4 for i in range(num_layers)]
        reaches = [Reach.LOCAL if has_rope else Reach.FULL for has_rope in rope]
    elif config.get("full_attention_interval"):
        every = int(config["full_attention_interval"])
        reaches = [Reach.STATE if (i + 1) % every else Reach.FULL for i in range(num_layers)]
    elif config.get("mamba_d_state") or config.get("ssm_state_size"):
        raise ConfigError(
            f"{where}: it has Mamba layers, and neither layer_types nor hybrid_override_pattern "
            "says which; a server's log says what the store keeps a token"
        )
    elif config.get("sliding_window") and config.get("use_sliding_window") is not False:
        raise ConfigError(
            f"{where}: sliding_window is {config['sliding_window']} and layer_types does not say "
            "in which layers; if in all, AttnStore does not serve the model; if in none, set it "
            "to null"
        )
    else:
        reaches = num_layers * [Reach.FULL]
    return reaches[: len(reaches) - int(config.get("num_kv_shared_layers") or 0)]


def _token_bytes(
    config: Mapping[str, Any], where: str, reach: Reach, element: int, kv_type: str | None
) -> int:
    """Bytes that a layer keeps of one token.

    Args:
        element: bytes of an element, unless `kv_type` says another thing.
    """
    if config.get("kv_lora_rank"):
        return _latent_bytes(config, where, element, kv_type)
    heads = count_of(config, where, "num_attention_heads", "n_head")
    kv_heads = heads
    for key in ("num_key_value_heads", "num_kv_heads"):
        kv_heads = config.get(key) or kv_heads
    if config.get("multi_query") and not config.get("new_decoder_architecture"):
        kv_heads = 1
    head = config.get("head_dim") or count_of(config, where, "hidden_size", "n_embd") // heads
    if reach is Reach.FULL:  # Gemma 4's are larger
        head = config.get("global_head_dim") or head
        if config.get("attention_k_eq_v"):
            kv_heads = config.get("num_global_key_value_heads") or kv_heads
    return 2 * int(kv_heads) * _head_bytes(int(head), where, element, kv_type)


def _head_bytes(head: int, where: str, element: int, kv_type: str | None) -> int:
    """K, or V, of a token and a head, with its scales."""
    kind = kv_type or ""
    if kind in _PACKED_LATENTS:
        raise ConfigError(f"{where}: --kv-cache-dtype {kind} is of latents, and it keeps none")
    if kind.startswith("nvfp4"):
        return head // 2 + head // 16
    if kind.endswith("_per_token_head"):
        return (head // 2 if kind.startswith("int4") else head) + _SCALE_BYTES
    return head * (1 if kind in _ONE_BYTE else DTYPE_BYTES.get(kind, element))


def _latent_bytes(config: Mapping[str, Any], where: str, element: int, kv_type: str | None) -> int:
    """A token's latent, and what is rotated of its K."""
    rank, rotated = (
        count_of(config, where, "kv_lora_rank"), count_of(config, where, "qk_rope_head_dim")
    )  # fmt: skip
    packed = _PACKED_LATENTS.get(kv_type or "")
    if packed and (rank, rotated) == (512, 64):
        return packed
    if packed or (kv_type and kv_type.startswith(("nvfp4", "int"))) or _has_scales(kv_type):
        raise ConfigError(
            f"{where}: --kv-cache-dtype {kv_type} of a latent of {rank} and {rotated}: its bytes "
            "are not known here; a server's log says what the store keeps a token"
        )
    if kv_type in _ONE_BYTE and config.get("index_head_dim"):
        raise ConfigError(
            f"{where}: --kv-cache-dtype {kv_type} is fp8_ds_mla with some of vLLM's kernels for "
            "sparse latents, and one byte an element with others; say fp8_ds_mla, or "
            "--kv-dtype-bytes 1"
        )
    return (rank + rotated) * (
        1 if kv_type in _ONE_BYTE else DTYPE_BYTES.get(kv_type or "", element)
    )


def _has_scales(kv_type: str | None) -> bool:
    return bool(kv_type and kv_type.endswith("_per_token_head"))


def _state_bytes(config: Mapping[str, Any], where: str, element: int, of_state: int) -> int:
    """The state of a recurrent layer: a gated delta net's, Kimi's, Mamba 2's, or a short
    convolution's."""
    if config.get("linear_attn_config"):
        return _kimi_bytes(config["linear_attn_config"], where, element, of_state)
    for names in _MAMBA2:
        if all(isinstance(config.get(name), int) for name in names):
            heads, head, groups, states, kernel = (int(config[name]) for name in names)
            inner = heads * head
            if names is _MAMBA2[1]:
                inner = config.get("mamba_d_ssm") or int(
                    config.get("mamba_expand", 2) * count_of(config, where, "hidden_size")
                )
            convolution = (inner + 2 * groups * states) * (kernel - 1) * element
            return int(convolution + heads * head * states * of_state)
    if config.get("linear_num_value_heads"):
        key = count_of(config, where, "linear_num_key_heads") * count_of(
            config, where, "linear_key_head_dim"
        )
        value_heads = count_of(config, where, "linear_num_value_heads")
        value = count_of(config, where, "linear_value_head_dim")
        kernel = int(config.get("linear_conv_kernel_dim") or 4)
        convolution = (2 * key + value_heads * value) * (kernel - 1) * element
        return convolution + value_heads * value * config["linear_key_head_dim"] * of_state
    if config.get("conv_L_cache"):
        width = config.get("conv_dim") or count_of(config, where, "hidden_size")
        return int(width) * (count_of(config, where, "conv_L_cache") - 1) * element
    raise ConfigError(
        f"{where}: it has recurrent layers of a kind that is not known here; gated delta nets "
        "(linear_num_value_heads), Kimi's (linear_attn_config), Mamba 2 (mamba_num_heads, "
        "mamba_n_heads) and short convolutions (conv_L_cache) are"
    )


def _kimi_bytes(config: Mapping[str, Any], where: str, element: int, of_state: int) -> int:
    heads, head = count_of(config, where, "num_heads"), count_of(config, where, "head_dim")
    kernel = count_of(config, where, "short_conv_kernel_size")
    return 3 * heads * head * (kernel - 1) * element + heads * head * head * of_state


def _state_block(config: Mapping[str, Any]) -> int:
    """Beside states a block has a multiple of so many tokens, at least."""
    return _MLA_STATE_BLOCK if config.get("kv_lora_rank") else 1


def _one_group(
    kinds: Mapping[LayerKind, int], block_tokens: int
) -> tuple[tuple[Group, ...], tuple[int, ...]]:
    """Layers of several sizes that all keep all tokens: their group, and each one's page."""
    sizes = [kind.num_bytes * block_tokens for kind, number in kinds.items() for _ in range(number)]
    names = tuple(f"{Reach.FULL.value} {i}" for i in range(len(sizes)))
    return (Group(block_tokens, names),), tuple(sizes)


def _pages(
    kinds: Mapping[LayerKind, int], block_tokens: int, state_block: int = 1
) -> tuple[int, dict[LayerKind, int]]:
    """The bytes of every group's page, and the tokens of each kind's block."""
    attention = [kind for kind in kinds if kind.reach is not Reach.STATE]
    largest = max(kind.num_bytes for kind in attention)
    states = [kind.num_bytes for kind in kinds if kind.reach is Reach.STATE]
    if states:
        block_tokens = max(block_tokens, state_block)
        step = largest * block_tokens
        block_tokens *= max(1, -(-max(states) // step))
    page_bytes = largest * block_tokens
    blocks = {}
    for kind in kinds:
        times, rest = divmod(page_bytes, kind.num_bytes * block_tokens)
        is_wider = kind.reach is not Reach.STATE and not rest  # else the page is padded
        blocks[kind] = block_tokens * times if is_wider else block_tokens
    return page_bytes, blocks


def _groups(kinds: Mapping[LayerKind, int], blocks: Mapping[LayerKind, int]) -> tuple[Group, ...]:
    """Full attention first."""
    fewest, most = min(kinds.values()), max(kinds.values())
    size = most if most < 1.5 * fewest else fewest
    groups: list[Group] = []
    for kind in sorted(kinds, key=lambda kind: kind.reach is not Reach.FULL):
        names = [f"{kind.reach.value} {i}" for i in range(kinds[kind])]
        number = -(-len(names) // size)
        groups += [
            Group(
                blocks[kind],
                tuple(names[i::number]),
                len(groups) + i,
                kind.reach.value,
                kind.reach_tokens,
            )
            for i in range(number)
        ]
    return tuple(groups)


def count_of(config: Mapping[str, Any], where: str, *names: str) -> int:
    """The first of these that the config.json has. Raises: ConfigError if it has none."""
    for name in names:
        value = config.get(name)
        if isinstance(value, int) and value > 0:
            return value
    raise ConfigError(f"{where}: {names[0]} is missing; {_GOT}")
