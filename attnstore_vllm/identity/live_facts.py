# SPDX-License-Identifier: Apache-2.0
"""Facts that a rank's KV depends on and no setting says: asked of the model and its kernels in
memory.

- *tables*: the numbers of rotary and other tables of positions. A model may choose them by settings
  (LongRoPE by --max-model-len), so names and settings do not tell them.
- *attention*: the plain numbers of the attention layers and of what is around them: scales,
  windows, caps, and what a model chooses by settings while it is made.
- *code*: the files of classes that are neither vLLM's nor PyTorch's, and what they import
  (identity/own_code.py).
- *written*: where the kernels put K and V. Numbers are written by vLLM's own operator into a block
  of the real tensor, and read back as a page is copied.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from blake3 import blake3

from attnstore_vllm.errors import UnsupportedError
from attnstore_vllm.identity.live_model import outermost
from attnstore_vllm.identity.own_code import TOLD_BY_VERSION, digest_of_code
from attnstore_vllm.transfer.layout import LayerLayout

_OF_POSITIONS = re.compile(r"rot|rope|freq|position|alibi", re.IGNORECASE)
_DIGIT_BITS = 4
"""Bits of a number that are written at once: all types of KV hold 0 to 15 exactly."""
_OF_A_KERNEL = (
    AssertionError,
    AttributeError,
    IndexError,
    KeyError,
    NotImplementedError,
    RuntimeError,
    TypeError,
    ValueError,
)


def live_facts(
    layers: Mapping[str, Any],
    kinds: Sequence[tuple[int, torch.Tensor, LayerLayout]],
    num_blocks: int,
) -> dict[str, str]:
    """Digests of the above, for the namespace.

    Args:
        layers: the attention layers by name, in the order of the slots.
        kinds: of the first layer of each kind, its number, its KV tensor and the layout of that;
            the tensor's block 0 is written to and restored.
    Cost: some tenths of a second, once, at start.
    """
    of_all = list(layers.values())
    written = [_digest_written(of_all[i], kv, layout, num_blocks) for i, kv, layout in kinds]
    return {
        "tables": _digest_tables(layers),
        "attention": _digest_attention(layers),
        "written": ", ".join(written),
        "code": _digest_code(layers),
    }


def _digest_tables(layers: Mapping[str, Any]) -> str:
    """Digest of every module about positions: its tables, and the plain values that choose among
    them."""
    hasher = blake3()
    done: dict[int, str] = {}
    for top in outermost(layers.values()):
        for name, module in top.named_modules():
            if _OF_POSITIONS.search(name.rpartition(".")[2] + type(module).__name__) is None:
                continue
            if id(module) not in done:  # most models share one among their layers
                done[id(module)] = _digest_module(module)
            hasher.update(f"{name}\0{done[id(module)]}\0".encode())
    return hasher.hexdigest()


def _digest_module(module: torch.nn.Module) -> str:
    hasher = blake3(f"{_module_of(type(module))}.{type(module).__qualname__}".encode())
    for name, value in _plain_values(module):
        hasher.update(f"\0{name}={value}".encode())
    tensors = {k: v for k, v in vars(module).items() if isinstance(v, torch.Tensor)}
    tensors |= {name: b for name, b in module._buffers.items() if b is not None}
    for name, tensor in sorted(tensors.items()):
        hasher.update(f"\0{name}{tuple(tensor.shape)}{tensor.dtype}".encode())
        hasher.update(_bytes_of(tensor))
    return hasher.hexdigest()


def _digest_attention(layers: Mapping[str, Any]) -> str:
    hasher = blake3()
    around = _holders(layers)
    for name, layer in layers.items():
        hasher.update(f"{name}\0".encode())
        impl = getattr(layer, "impl", layer)  # an indexer's cache has none
        for holder in (layer, impl, *around.get(id(layer), ())):
            for key, value in _plain_values(holder):
                hasher.update(f"{key}={value}\0".encode())
        for key in ("_k_scale", "_v_scale", "_q_scale", "sinks", "alibi_slopes"):
            found = getattr(layer, key, None)
            found = getattr(impl, key, None) if found is None else found
            if isinstance(found, torch.Tensor):
                hasher.update(key.encode() + _bytes_of(found))
    return hasher.hexdigest()


def _holders(layers: Mapping[str, Any]) -> dict[int, list[torch.nn.Module]]:
    """By layer: the modules around it up to its decoder layer, which hand it Q, K and V."""
    found: dict[int, list[torch.nn.Module]] = {}
    wanted = {id(layer) for layer in layers.values()}
    for top in outermost(layers.values()):
        by_name = dict(top.named_modules())
        for name, module in by_name.items():
            if id(module) in wanted:
                parents = name.split(".")[:-1]
                paths = [".".join(parents[:n]) for n in range(len(parents), 0, -1)]
                found[id(module)] = [by_name[path] for path in paths[:2] if path in by_name]
    return found


def check_replicas(layers: Mapping[str, Any], replicas: int) -> None:
    """Raise UnsupportedError unless each layer's K and V are made of the same weights on so many
    ranks: the projection beside the layer says it."""
    around = _holders(layers)
    for name, layer in layers.items():
        beside = [child for holder in around.get(id(layer), ())[:1] for child in holder.children()]
        found = {getattr(child, "num_kv_head_replicas", None) for child in beside} - {None}
        if found != {replicas}:
            raise UnsupportedError(
                f"{name} does not say that {replicas} ranks hold the same KV, as they should where "
                "there are more ranks than KV heads"
            )


def _digest_code(layers: Mapping[str, Any]) -> str:
    """Digest of the code of the model's classes, but for those of vLLM, PyTorch and Transformers,
    whose versions are in. Not of what modules have as attributes: what torch.compile() puts there
    differs from start to start (docs/faults.md).

    Where a file lies does not count: a model's own code has its directory or commit in the names
    of its modules.
    """
    every = [module for top in outermost(layers.values()) for module in top.modules()]
    kinds = {kind for module in every for kind in type(module).__mro__}
    return digest_of_code({kind.__module__ for kind in kinds})


def _is_told_by_version(module: str) -> bool:
    return module.partition(".")[0] in TOLD_BY_VERSION


def _module_of(kind: type) -> str:
    """Module name of a class whose file is digested: the last part, which no directory is in."""
    name = kind.__module__
    return name if _is_told_by_version(name) else name.rpartition(".")[2]


def _plain_values(holder: object) -> Iterator[tuple[str, str]]:
    """Attributes whose value is plain data, however nested; in the order of their names."""
    for name, value in sorted(vars(holder).items()):
        try:
            text = json.dumps(value, sort_keys=True)
        except (TypeError, ValueError, RecursionError):  # no plain data
            continue
        yield name, text


def _bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()


def _digest_written(layer: Any, kv: torch.Tensor, layout: LayerLayout, num_blocks: int) -> str:
    """Digest of block 0's bytes, as a page holds them, after each of several writes of known
    numbers."""
    if not hasattr(layer, "attn_backend"):
        return "not told: it is no attention"
    if layer.attn_backend.forward_includes_kv_cache_update:
        return "not told: attention writes K and V itself"
    kernel_blocks = len(kv) // num_blocks
    block = kv[:kernel_blocks]
    before = block.clone()
    hasher = blake3()
    try:
        tokens = kernel_blocks * _tokens_of_a_kernel_block(layer, kv)
        shape = (2, tokens, layer.num_kv_heads, layer.head_size)
        numbers = torch.arange(2 * tokens * layer.num_kv_heads * layer.head_size).reshape(shape)
        slots = torch.arange(tokens, dtype=torch.int64, device=kv.device)
        dtype = layer.dtype if isinstance(getattr(layer, "dtype", None), torch.dtype) else kv.dtype
        for shift in range(0, int(numbers.numel() - 1).bit_length(), _DIGIT_BITS):
            digits = ((numbers >> shift) % (1 << _DIGIT_BITS)).to(kv.device, dtype)
            layer.impl.do_kv_cache_update(layer, digits[0], digits[1], kv, slots)
            hasher.update(_first_page(kv, layout))
    except _OF_A_KERNEL as error:  # strides, the layout's name and the kernel's name remain
        return f"not told: {type(error).__name__}"
    finally:
        block.copy_(before)
    return hasher.hexdigest()


def _tokens_of_a_kernel_block(layer: Any, kv: torch.Tensor) -> int:
    """vLLM's logical shape of a KV tensor is [blocks, heads, tokens, content]."""
    if kv.dim() != 4 or kv.shape[1] != layer.num_kv_heads:
        raise ValueError(f"a KV tensor of shape {tuple(kv.shape)} is not known")
    return int(kv.shape[2])


def _first_page(kv: torch.Tensor, layout: LayerLayout) -> bytes:
    """Block 0's runs one after the other, as a slot of the pool holds them."""
    item, first = kv.element_size(), kv.storage_offset()
    length = layout.run_bytes // item
    runs = [kv.as_strided((length,), (1,), first + at // item) for at in layout.run_offsets]
    return _bytes_of(torch.cat(runs))
