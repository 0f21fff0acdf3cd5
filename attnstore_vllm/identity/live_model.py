# SPDX-License-Identifier: Apache-2.0
"""The model in a worker and the one of its drafts: where they are, and whether their weights are
what they were."""

from __future__ import annotations

import gc
import logging
import operator
import re
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from types import FunctionType
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as torch_modules
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from xxhash import xxh3_128

from attnstore_vllm.errors import UnsupportedError
from attnstore_vllm.types import Seen

logger = logging.getLogger(__name__)

PIECE_BYTES = 8 << 20
_LATENT_WEIGHTS = ("_w_uk_packed", "_w_uv_packed", "_w_scale")
"""Where vLLM's kernel for latents (MLA) on processors with AMX has what it took of `kv_b_proj`."""
_OF_STEPS = re.compile(r"^kv_cache$|buf|workspace|scratch", re.IGNORECASE)
"""Names of plain tensors that steps write to: their content is no model's."""
_OF_COMPILERS = frozenset({"training", "compiled", "first_compile",
                           "was_aot_compile_fn_loaded_from_disk"})  # fmt: skip
"""Plain values that say how far torch.compile() is, and PyTorch's own that vLLM does not read."""
_OF_ADAPTERS = "vllm.lora."
"""Where the modules are from that adapters are put into: identity/live_lora.py tells those."""
_NUMBERS = frozenset({bool, int, float})
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
_FAULTS = (AttributeError, LookupError, NotImplementedError, RuntimeError, TypeError, ValueError)
"""Errors that a tensor of an unusual kind may raise when it is looked at."""


def outermost(layers: Iterable[object]) -> list[nn.Module]:
    """The outermost modules that hold these layers: one, unless a layer has several holders.

    Other models of the process are left out: nothing but the layers themselves leads here.
    Cost: one look at all objects of the process, some tenths of a second. Not after vLLM has taken
    them out of the garbage collector's sight, which it does when it has started.
    """
    holders: dict[int, list[nn.Module]] = {}
    for holder in [o for o in gc.get_objects() if issubclass(type(o), nn.Module)]:
        for member in holder._modules.values():
            holders.setdefault(id(member), []).append(holder)
    todo = [layer for layer in layers if isinstance(layer, nn.Module)]
    seen = {id(module) for module in todo}
    tops: list[nn.Module] = []
    while todo:
        module = todo.pop()
        above = holders.get(id(module), [])
        if not above:
            tops.append(module)
        for holder in above:
            if id(holder) not in seen:
                seen.add(id(holder))
                todo.append(holder)
    return tops


def models_of(layers: Mapping[str, nn.Module], at_most: int = 1) -> list[nn.Module]:
    """The models that have these layers: one, and another that makes drafts if `at_most` is 2.
    Raises UnsupportedError. Cost: see outermost()."""
    found = outermost(layers.values())
    if not 1 <= len(found) <= at_most:
        raise UnsupportedError(f"{len(found)} models have these layers, where {at_most} may")
    return found


@dataclass(frozen=True, slots=True)
class _Look:
    digest: bytes
    """Digest of every byte of the tensors, and of the plain numbers."""
    packed: tuple[weakref.ref[Callable[..., object]], ...]
    """Objects of kernels that hold packed weights."""
    code: tuple[object, ...]
    """Functions `forward`, and hooks: a forward pass runs them."""

    def is_same(self, other: _Look) -> bool:
        return (
            self.digest == other.digest
            and self.runs_same(other)
            and len(self.packed) == len(other.packed)
            and all(a() is b() is not None for a, b in zip(self.packed, other.packed, strict=True))
        )

    def runs_same(self, other: _Look) -> bool:
        return len(self.code) == len(other.code) and all(map(operator.is_, self.code, other.code))


class LiveWeights:
    """Sees whether the weights of models have changed, and names what they are now. Keeps no copy.

    What modules hold beside weights counts as they do: tables, plain tensors and numbers. So do
    hooks and `forward`, each by the object that it is. *Not seen*: what a hook or a kernel's object
    holds, and code that is put into vLLM's functions from elsewhere.

    Cost: reads them once at start and once for each question: at the memory's speed on a GPU, at
    about 10 GB/s on the CPU, where most are packed and told by the object that has them. The rest
    takes 50 us for each module: 25 ms of a model with 48 layers.
    """

    def __init__(
        self, find: Callable[[], Sequence[nn.Module]], own_files: Callable[[nn.Module], str | None]
    ) -> None:
        self.own_files: str | None = "its model was not found in a worker"
        self.name: bytes | None = None
        """Names the weights of the last look. Empty: those of the start; else it is made of their
        content. None: no content tells them from others."""
        self._models: Sequence[nn.Module] = ()
        try:
            self._models = find()
            self.own_files = next(filter(None, map(own_files, self._models)), None)
        except UnsupportedError as error:
            self._say(str(error))
        self._seen = self._first = self._look()
        self._note()

    def look(self) -> Seen:
        """Whether they have changed since the last look, or since the start."""
        before, self._seen = self._seen, self._look()
        self._note()
        if before is None or self._seen is None:
            return Seen.UNKNOWN
        return Seen.SAME if self._seen.is_same(before) else Seen.CHANGED

    def tell(self) -> tuple[Seen, bytes | None]:
        """look(), and the name."""
        return self.look(), self.name

    def _note(self) -> None:
        now, first = self._seen, self._first
        if now is None or first is None:
            self.name = None
        elif now.is_same(first):
            self.name = b""
        else:  # an object says that it is another one, and not which
            self.name = now.digest if now.runs_same(first) and not now.packed else None

    def _look(self) -> _Look | None:
        if not self._models:
            return None
        try:
            with torch.no_grad():
                return _Look(
                    b"".join(map(digest, self._models)),
                    tuple(chain.from_iterable(map(_packed, self._models))),
                    tuple(chain(_hooks_of_all(), *map(_code, self._models))),
                )
        except _FAULTS as error:
            self._models = ()
            self._say(f"{type(error).__name__}: {error}")
            return None

    def _say(self, why: str) -> None:
        logger.warning(
            "AttnStore cannot see whether weights change (%s), so it drops every tier whenever "
            "vLLM's prefix cache is reset",
            why,
        )


def digest(model: nn.Module) -> bytes:
    """Digest of all parameters, buffers and plain tensors, byte by byte, and of plain numbers."""
    return digest_of(_tensors(model), repr(list(_numbers(model))).encode())


def digest_of(tensors: Iterable[tuple[str, torch.Tensor]], beside: bytes = b"") -> bytes:
    """Digest of named tensors, wherever they are. Against no attacker: see checksum()."""
    hasher = xxh3_128(beside)  # ten times as fast as BLAKE3, and a request waits for it
    sums: list[torch.Tensor] = []
    table: dict[torch.device, torch.Tensor] = {}
    for name, tensor in tensors:
        hasher.update(f"{name}\0{tensor.dtype}\0{tuple(tensor.shape)}\0".encode())
        hasher.update(f"{tensor.stride()}\0".encode())  # its bytes come in the memory's order
        for piece in _pieces(tensor):
            if piece.device.type == "cpu":
                hasher.update(memoryview(piece.numpy()))
            else:
                sums.append(checksum(piece, table))
    for total in torch.stack(sums).tolist() if sums else ():  # the one wait for the device
        hasher.update(total.to_bytes(8, "little", signed=True))
    return hasher.digest()


def checksum(piece: torch.Tensor, tables: dict[torch.device, torch.Tensor]) -> torch.Tensor:
    """A sum of the bytes, each 4 of them times an odd number of their place, modulo 2^64.

    A difference in one place always shows; in several, but for one time in about 2^64. Not
    against an attacker who looks for collisions: one who can write to weights needs none.

    Args:
        piece: uint8, contiguous, PIECE_BYTES at most.
    """
    table = tables.get(piece.device)
    if table is None:
        numbers = torch.Generator().manual_seed(1)
        table = torch.randint(-(2**62), 2**62, (PIECE_BYTES // 4,), generator=numbers) * 2 + 1
        table = tables[piece.device] = table.to(piece.device)
    padding = -piece.numel() % 4
    words = nn.functional.pad(piece, (0, padding)) if padding else piece
    if words.data_ptr() % 4:
        words = words.clone()
    words = words.view(torch.int32).to(torch.int64)
    return (words * table[: words.numel()]).sum()


def _tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    seen: set[int] = set()
    for name, module in model.named_modules():
        beside = _beside(module).items()
        plain = [(k, v) for k, v in beside if isinstance(v, torch.Tensor) and _lasts(k)]
        unsaved = module._non_persistent_buffers_set
        buffers = [(k, v) for k, v in module._buffers.items() if k not in unsaved or _lasts(k)]
        for own, tensor in (*module._parameters.items(), *buffers, *plain):
            if tensor is None or id(tensor) in seen:
                continue
            seen.add(id(tensor))
            yield from _inner(f"{name}.{own}", tensor.detach())
    for name, _, held in _latent_kernels(model):
        for own, tensor in held.items():
            yield from _inner(f"{name}.impl.{own}", tensor.detach())


def _beside(module: nn.Module) -> dict[str, Any]:
    """Attributes of a module beside parameters, buffers and modules."""
    return {} if type(module).__module__.startswith(_OF_ADAPTERS) else vars(module)


def _numbers(model: nn.Module) -> Iterator[tuple[str, list[tuple[str, Any]]]]:
    for name, module in model.named_modules():
        held = _beside(module)
        yield name, sorted(it for it in held.items() if _is_number(it[1]) and _lasts(it[0]))


def _is_number(value: Any) -> bool:
    kind = type(value)
    if kind is list or kind is tuple:
        return all(type(item) in _NUMBERS for item in value)
    return kind in _NUMBERS


def _lasts(name: str) -> bool:
    return name not in _OF_COMPILERS and _OF_STEPS.search(name) is None


def _code(model: nn.Module) -> Iterator[object]:
    """Each module's `forward`, its class's and one of its own, and the hooks. None: no own."""
    for module in model.modules():
        yield type(module).forward
        yield vars(module).get("forward")
        for kind in _HOOKS:
            yield from vars(module)[kind].values()


def _hooks_of_all() -> Iterator[object]:
    """Those that PyTorch calls for every module."""
    for kind in _HOOKS:
        yield from getattr(torch_modules, f"_global{kind}").values()


def _latent_kernels(model: nn.Module) -> Iterator[tuple[str, nn.Module, dict[str, torch.Tensor]]]:
    """Attention kernels that have a layer's weights in tensors of their own: name, layer, tensors.

    A kernel is no module, so neither parameters nor buffers lead to it.
    """
    for name, module in model.named_modules():
        kernel = vars(module).get("impl")
        found = {n: getattr(kernel, n, None) for n in _LATENT_WEIGHTS}
        if found["_w_uk_packed"] is not None and found["_w_uv_packed"] is not None:
            held = {own: tensor for own, tensor in found.items() if tensor is not None}
            yield name, kernel.kv_b_proj, held


def _inner(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    if is_traceable_wrapper_subclass(tensor):  # its bytes are in others
        for part in tensor.__tensor_flatten__()[0]:
            yield from _inner(f"{name}.{part}", getattr(tensor, part))
    elif not tensor.is_meta:
        yield name, tensor


def _pieces(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The bytes, in the order in which they lie, PIECE_BYTES at a time: copies are small."""
    if not tensor.numel():
        return
    if tensor.dim() == 0:
        tensor = tensor.reshape(1)
    order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    tensor = tensor.permute(order)
    if tensor.is_contiguous():
        yield from tensor.reshape(-1).view(torch.uint8).split(PIECE_BYTES)
        return
    row_bytes = tensor[0].numel() * tensor.element_size()
    for rows in tensor.split(max(1, PIECE_BYTES // row_bytes)):
        yield from rows.contiguous().reshape(-1).view(torch.uint8).split(PIECE_BYTES)


def _packed(model: nn.Module) -> Iterator[weakref.ref[Callable[..., object]]]:
    """For layers whose weight is an empty tensor: the functions that have it now.

    vLLM's CPU build leaves such. A weight that is packed anew is a new function. Raises
    NotImplementedError for a layer that has none.
    """
    seen = {id(layer) for _, layer, _ in _latent_kernels(model)}
    for name, module in model.named_modules():
        if id(module) in seen:  # its weights are tensors of the kernel
            continue
        own = [p for p in module._parameters.values() if p is not None]
        if all(p.numel() for p in own) or any(p.dim() > 1 and p.numel() for p in own):
            continue  # what is empty beside a weight is no weight
        found = [v for v in vars(module).values() if isinstance(v, FunctionType) and v.__closure__]
        if not found:
            raise NotImplementedError(f"{name} has its weights where they cannot be seen")
        yield from map(weakref.ref, found)
