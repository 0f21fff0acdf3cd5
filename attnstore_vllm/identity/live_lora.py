# SPDX-License-Identifier: Apache-2.0
"""A worker's LoRA adapters, told by what it has of them in memory.

Neither a name, an id, a path nor the files say what a worker computes with: files are replaced
after they were read, an adapter is loaded again under its id, or leaves the cache and comes back.
A trainer may write into the tensors, or into the slots on the device that vLLM computes with.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any
from weakref import ReferenceType, ref

import torch
from blake3 import blake3

from attnstore_vllm.identity.live_model import digest_of

_NAMES_ONLY = frozenset({"id", "module_name"})
"""Fields in which two copies of one adapter may differ."""


@dataclass(slots=True)
class _LiveAdapter:
    adapter: ReferenceType[Any]
    held: bytes
    """Digest of what vLLM holds of it."""
    slots: bytes | None
    """The same of its slots; None: it has none, or nothing has been asked since it came."""
    is_new: bool = True
    """Digested since the last look."""
    identity: bytes = b""


class LiveAdapters:
    """Digests of the adapters that vLLM has loaded.

    Args:
        managers: vLLM's of the model's LoRA adapters; empty without LoRA.
    """

    def __init__(self, managers: Iterable[Any] = ()) -> None:
        self._managers = list(managers)
        self._known: dict[int, _LiveAdapter] = {}

    @classmethod
    def of(cls, tops: Iterable[torch.nn.Module]) -> LiveAdapters:
        """The adapters of the models whose outermost modules these are
        (identity/live_model.py)."""
        found = [getattr(top, "lora_manager", None) for top in tops]
        return cls(manager for manager in found if manager is not None)

    def look(self) -> None:
        """They may have been written in place: what tell() says next is made of their bytes, and no
        longer of what it said before."""
        for known in self._known.values():
            known.is_new = False

    def tell(self, ids: Iterable[int]) -> dict[int, bytes | None]:
        """Tell what these are, as of when they were loaded or of the last look(); None: not loaded.

        Cost: a look-up each. An adapter that was not seen since is digested, once: all its bytes,
        1.4 GB/s on one core, and its slots, at the memory's speed.
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
        if known is not None and known.adapter() is not adapter:
            known = None
        has_slots = known is not None and known.slots is not None
        if known is not None and known.is_new and (has_slots or not self._is_active(number)):
            return known.identity
        slots = self._digest_slots(number)
        if known is None or not known.is_new:
            hasher = blake3(max_threads=blake3.AUTO)
            _add(hasher, adapter)
            first = slots if known is None or known.slots is None else known.slots
            known = self._known[number] = _LiveAdapter(ref(adapter), hasher.digest(), first)
        known.slots = slots if known.slots is None else known.slots
        # vLLM has made its slots of it. What lies there else was written in place.
        is_same = slots is None or slots == known.slots
        known.identity = known.held if is_same else blake3(known.held + (slots or b"")).digest()
        return known.identity

    def _is_active(self, number: int) -> bool:
        return number in getattr(self._managers[0], "lora_index_to_id", ())

    def _digest_slots(self, number: int) -> bytes | None:
        if not self._is_active(number):
            return None
        of = self._managers[0].lora_index_to_id
        slot, tensors = of.index(number), list[tuple[str, torch.Tensor]]()
        for name, module in self._managers[0].modules.items():
            for key, value in vars(module).items():
                # A mixture of experts has lists of views beside tuples.
                stacks = value if isinstance(value, tuple) else (value,)
                for number_of, stack in enumerate(stacks if key.endswith("_stacked") else ()):
                    if isinstance(stack, torch.Tensor) and len(stack) == len(of):
                        tensors.append((f"{name}.{key}.{number_of}", stack[slot]))
        return digest_of(tensors)


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
