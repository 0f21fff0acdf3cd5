# SPDX-License-Identifier: Apache-2.0
"""A worker's LoRA adapters, told by what it has of them in memory.

Neither a name, an id, a path nor the files say what a worker computes with: files are replaced
after they were read, an adapter is loaded again under its id, or leaves the cache and comes back.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any
from weakref import ReferenceType, ref

import torch
from blake3 import blake3

_NAMES_ONLY = frozenset({"id", "module_name"})
"""Fields in which two copies of one adapter may differ."""


class LiveAdapters:
    """Digests of the adapters that vLLM has loaded.

    Args:
        managers: vLLM's of the model's LoRA adapters; empty without LoRA.
    """

    def __init__(self, managers: Iterable[Any] = ()) -> None:
        self._managers = list(managers)
        self._known: dict[int, tuple[ReferenceType[Any], bytes]] = {}

    @classmethod
    def of(cls, tops: Iterable[torch.nn.Module]) -> LiveAdapters:
        """The adapters of the models whose outermost modules these are
        (identity/live_model.py)."""
        found = [getattr(top, "lora_manager", None) for top in tops]
        return cls(manager for manager in found if manager is not None)

    def tell(self, ids: Iterable[int]) -> dict[int, bytes | None]:
        """Tell what these are now; None: not loaded.

        Cost: a look-up each. An adapter that was not seen before is digested, once: all its bytes,
        1.4 GB/s on one core; vLLM has just read them from its files.
        """
        if not self._managers:
            return {}
        loaded: Mapping[int, Any] = self._managers[0].list_adapters()
        return {number: self._digest(number, loaded.get(number)) for number in ids}

    def _digest(self, number: int, adapter: Any) -> bytes | None:
        if adapter is None:
            self._known.pop(number, None)
            return None
        known = self._known.get(number)
        if known is None or known[0]() is not adapter:
            hasher = blake3(max_threads=blake3.AUTO)
            _add(hasher, adapter)
            known = self._known[number] = (ref(adapter), hasher.digest())
        return known[1]


def _add(hasher: Any, value: Any) -> None:
    """All that `value` holds, each part with its kind and size, so that no two are alike."""
    if isinstance(value, torch.Tensor):
        hasher.update(f"tensor {tuple(value.shape)} {value.dtype}\0".encode())
        plain = value.detach().cpu().contiguous().flatten().view(torch.uint8)
        hasher.update(memoryview(plain.numpy()))
    elif isinstance(value, Mapping):
        hasher.update(f"mapping {len(value)}\0".encode())
        for key in sorted(value, key=str):
            hasher.update(f"{key}\0".encode())
            _add(hasher, value[key])
    elif isinstance(value, list | tuple):
        hasher.update(f"list {len(value)}\0".encode())
        for item in value:
            _add(hasher, item)
    elif value is None or isinstance(value, bool | int | float | str):
        text = repr(value)
        hasher.update(f"{type(value).__name__} {len(text)} {text}\0".encode())
    else:
        held = {k: v for k, v in vars(value).items() if k not in _NAMES_ONLY}
        hasher.update(f"{type(value).__name__}\0".encode())
        _add(hasher, held)
