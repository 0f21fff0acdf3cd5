# SPDX-License-Identifier: Apache-2.0
"""Reads media as vLLM's processor has made them ready, for a digest (scheduler/media.py)."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import torch
from blake3 import blake3
from vllm.config import VllmConfig
from vllm.multimodal.inputs import MultiModalFieldElem, MultiModalKwargsItem

from attnstore_vllm.scheduler.media import Content

DEPTH_MAX = 16
"""Lists in lists. A client may send what a processor would have made."""


_Leaf = Any  # a torch.Tensor or an ndarray of numbers


class _Unreadable(Exception):
    """Its text goes into the warning."""


def read_media(data: Any) -> Content | str:
    """All of an input's data, or of the mask of its tokens. Or why they cannot be read.

    Cost: some microseconds a field; the digest reads the bytes.
    """
    if data is None:
        return "vLLM gave the scheduler no data of it"
    if isinstance(data, MultiModalKwargsItem) and "address" in data:
        return "its data are in shared memory"
    form, leaves = bytearray(), list[_Leaf]()
    try:
        _describe(data, form, leaves, DEPTH_MAX)
    except _Unreadable as error:
        return str(error)

    def digest() -> bytes:
        hasher = blake3(struct.pack("<Q", len(form)) + form)
        for leaf in leaves:
            hasher.update(_bytes_of(leaf))
        return hasher.digest()

    return Content(len(form) + sum(int(leaf.nbytes) for leaf in leaves), digest)


def _bytes_of(leaf: _Leaf) -> memoryview:
    if isinstance(leaf, torch.Tensor):  # of any dtype: NumPy knows no bfloat16
        leaf = leaf.resolve_neg().contiguous().reshape(-1).view(torch.uint8).numpy()
    return np.ascontiguousarray(leaf).reshape(-1).view(np.uint8).data


def _describe(value: Any, form: bytearray, leaves: list[_Leaf], depth: int) -> None:
    """Append to `form` all of a value but the numbers of its tensors, which go to `leaves`. No two
    values look alike: every part has its kind and its length before it."""
    if depth == 0:
        raise _Unreadable("its data are lists in lists, too deep")
    kind: Any = type(value)
    if isinstance(value, MultiModalKwargsItem):
        form += b"item" + struct.pack("<Q", len(value))
        for key in sorted(value):
            _add(form, b"key", key.encode())
            _describe(value[key], form, leaves, depth - 1)
    elif isinstance(value, MultiModalFieldElem):
        _add(form, b"elem", type(value.field).__qualname__.encode())
        _describe(value.data, form, leaves, depth - 1)
    elif kind is torch.Tensor or kind is np.ndarray:
        _describe_tensor(value, form, leaves)
    elif kind in (list, tuple):
        form += b"list" + struct.pack("<Q", len(value))
        for part in value:
            _describe(part, form, leaves, depth - 1)
    elif kind in (bool, int, float, str):
        _add(form, kind.__name__.encode(), repr(value).encode("utf-8", "surrogatepass"))
    elif kind is bytes:
        _add(form, b"bytes", value)
    else:
        raise _Unreadable(f"its data have a {kind.__module__}.{kind.__qualname__}")


def _describe_tensor(value: Any, form: bytearray, leaves: list[_Leaf]) -> None:
    is_array = isinstance(value, np.ndarray)
    if is_array and not (value.dtype.kind in "biuf" and value.dtype.isnative):
        raise _Unreadable(f"its data have an array of {value.dtype}")
    if not is_array and (value.device.type != "cpu" or value.layout is not torch.strided):
        raise _Unreadable(f"its data have a tensor on {value.device}, {value.layout}")
    if not is_array and (value.is_complex() or value.is_quantized):
        raise _Unreadable(f"its data have a tensor of {value.dtype}")
    shape = struct.pack(f"<{value.ndim}q", *value.shape)
    _add(form, b"array" if is_array else b"tensor", str(value.dtype).encode())
    _add(form, b"shape", shape)
    leaves.append(value if is_array else value.detach())


def _add(form: bytearray, kind: bytes, part: bytes) -> None:
    form += struct.pack("<QQ", len(kind), len(part)) + kind + part


def why_no_media(vllm_config: VllmConfig) -> str | None:
    """Why no media can be told by their content with these settings; None: they can."""
    media = vllm_config.model_config.multimodal_config
    if media is not None and media.mm_processor_cache_gb > 0:
        if media.mm_processor_cache_type == "shm":
            return (
                "vLLM keeps what it has made of it in shared memory, which the scheduler cannot "
                "read safely. Set --mm-processor-cache-type lru"
            )
    if getattr(media, "video_pruning_rate", None):
        return (
            "positions behind a pruned video are known to who has encoded it, and a hit encodes "
            "nothing (--video-pruning-rate). Set it to 0 to have media stored"
        )
    if vllm_config.ec_transfer_config is not None:
        return (
            "its encoder's output comes from another server by its name (--ec-transfer-config), "
            "of any content. Encode media in this server to use the store for them"
        )
    manager = getattr(vllm_config, "ec_manager_config", None)
    if getattr(manager, "encoder_cache_manager_cls", None) is not None:
        return (
            "its encoder's output is kept by its name in a class of your own "
            "(--ec-manager-config), and may be of any content. Use vLLM's own cache to have media "
            "stored"
        )
    return None


def counts_media(vllm_config: VllmConfig) -> bool:
    """Whether vLLM names inputs by a counter. Their users' own uuids look the same to us."""
    media = vllm_config.model_config.multimodal_config
    return (
        media is not None
        and media.mm_processor_cache_gb == 0
        and not vllm_config.cache_config.enable_prefix_caching
    )


def encodes_by_adapter(vllm_config: VllmConfig) -> bool:
    """Whether adapters have weights in the encoder, so that its output is the adapter's too."""
    lora = vllm_config.lora_config
    return bool(getattr(lora, "enable_tower_connector_lora", False))
