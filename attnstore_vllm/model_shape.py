# SPDX-License-Identifier: Apache-2.0
"""The KV of a model as its config.json tells it: kinds of layers, vLLM's groups of them, bytes.

Follows vLLM 0.32 (v1/core/kv_cache_utils.py): pages of all groups have one size, layers of a kind
are cut into groups as large as the smallest kind, a recurrent layer's state sets the block.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attnstore_vllm.errors import ConfigError
from attnstore_vllm.index.prefix import GRAIN_TOKENS
from attnstore_vllm.index.sections import Need, Reach
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
    "linear_attention": Reach.STATE, "conv": Reach.STATE,
}  # fmt: skip
_NOT_KNOWN = {
    "hybrid_override_pattern": "Mamba layers", "attn_layer_period": "Mamba layers",
    "mamba_d_ssm": "Mamba layers", "block_configs": "layers of several sizes",
    "hybrid_layer_pattern": "windows with heads of their own",
    "index_head_dim": "keys of a sparse indexer", "compress_ratios": "compressed latents",
}  # fmt: skip
_GOT = "expected the config.json of a decoder"


@dataclass(frozen=True, slots=True)
class LayerKind:
    """Layers that keep the same."""

    reach: Reach
    reach_tokens: int
    num_bytes: int
    """Bytes of a token in one layer, or of a whole state."""


@dataclass(frozen=True, slots=True)
class KvShape:
    """The KV of a model, and how vLLM and the store cut it. One rank."""

    kinds: Mapping[LayerKind, int]
    """With how many layers there are of each."""
    geometry: Geometry

    def token_bytes(self, *reaches: Reach) -> int:
        """Bytes of a token in all layers that look so far back; of recurrent ones, the states."""
        return sum(kind.num_bytes * n for kind, n in self.kinds.items() if kind.reach in reaches)

    def held_bytes(self, num_tokens: int) -> int:
        """Bytes of a request in HBM, and of what is copied there for a hit of so many tokens."""
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
) -> KvShape:
    """The shape that a config.json tells.

    Args:
        dtype_bytes: of an element of KV, if not the model's: 1 with fp8.
        block_tokens: vLLM's --block-size.
        chunk_tokens: of the store's settings; rounded up to whole blocks of all groups.
        state_dtype_bytes: of an element of a delta net's state, if neither the model's nor said by
            mamba_ssm_dtype: vLLM's --mamba-ssm-cache-dtype. vLLM takes float32 by itself on CPUs
            with AVX-512 BF16, and there alone (platforms/cpu.py).
    Raises: ConfigError, with what was found, for models that it does not know.
    """
    config = config.get("text_config") or config
    for key, what in _NOT_KNOWN.items():
        if config.get(key):
            raise ConfigError(
                f"{where}: {key} is set: {what}, whose bytes are not known here; a server's log "
                "says what the store keeps a token"
            )
    kinds = _kinds(config, where, dtype_bytes, state_dtype_bytes)
    if not any(kind.reach is Reach.FULL for kind in kinds):
        raise ConfigError(
            f"{where}: no layer attends to all tokens; AttnStore does not serve such a model, "
            "unless with --disable-hybrid-kv-cache-manager, where all layers keep all tokens"
        )
    page_bytes, blocks = _pages(kinds, block_tokens)
    groups = _groups(kinds, blocks)
    rounding = [GRAIN_TOKENS, *(group.block_tokens for group in groups)]
    chunk = chunk_tokens
    for tokens in sorted(rounding):  # powers of two times one number: the largest is the multiple
        chunk = round_chunk_tokens(chunk, tokens)
    regions = max(len(group.layers) for group in groups) * (page_bytes,)
    return KvShape(kinds, Geometry(1, regions, groups, chunk))


def _kinds(
    config: Mapping[str, Any],
    where: str,
    dtype_bytes: int | None,
    state_dtype_bytes: int | None,
) -> Counter[LayerKind]:
    name = config.get("torch_dtype") or config.get("dtype") or "bfloat16"
    if name not in DTYPE_BYTES and dtype_bytes is None:
        raise ConfigError(f"{where}: torch_dtype is {name!r}; say --kv-dtype-bytes")
    of_model = DTYPE_BYTES.get(name, 2)
    element = dtype_bytes or of_model
    of_state = state_dtype_bytes or DTYPE_BYTES.get(config.get("mamba_ssm_dtype") or name, of_model)
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
            else _token_bytes(of_layer, where, reach) * element
        )
        found[LayerKind(reach, tokens, num_bytes)] += 1
    return found


def _reaches(config: Mapping[str, Any], where: str) -> list[Reach]:
    """How far each layer looks back, of those that keep KV of their own."""
    num_layers = count_of(config, where, "num_hidden_layers", "n_layer")
    kind = config.get("model_type")
    types = config.get("layer_types")
    if types:
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
    elif config.get("sliding_window") and config.get("use_sliding_window") is not False:
        raise ConfigError(
            f"{where}: sliding_window is {config['sliding_window']} and layer_types does not say "
            "in which layers; if in all, AttnStore does not serve the model; if in none, set it "
            "to null"
        )
    else:
        reaches = num_layers * [Reach.FULL]
    return reaches[: num_layers - int(config.get("num_kv_shared_layers") or 0)]


def _token_bytes(config: Mapping[str, Any], where: str, reach: Reach) -> int:
    """Elements that a layer keeps of one token."""
    latent = config.get("kv_lora_rank")
    if latent:
        return int(latent) + count_of(config, where, "qk_rope_head_dim")
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
    return 2 * int(kv_heads) * int(head)


def _state_bytes(config: Mapping[str, Any], where: str, element: int, of_state: int) -> int:
    """The state of a recurrent layer: a gated delta net's, or a short convolution's."""
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
        "(linear_num_value_heads) and short convolutions (conv_L_cache) are"
    )


def _pages(kinds: Mapping[LayerKind, int], block_tokens: int) -> tuple[int, dict[LayerKind, int]]:
    """The bytes of every group's page, and the tokens of each kind's block."""
    attention = [kind for kind in kinds if kind.reach is not Reach.STATE]
    largest = max(kind.num_bytes for kind in attention)
    states = [kind.num_bytes for kind in kinds if kind.reach is Reach.STATE]
    if states:
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
