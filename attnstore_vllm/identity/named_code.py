# SPDX-License-Identifier: Apache-2.0
"""Code that vLLM's settings name: workers, backends, passes, classes of configurations.

A setting's name alone does not tell code that changes under it.
"""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import PretrainedConfig

from attnstore_vllm.identity.drafts import drafts_of
from attnstore_vllm.identity.own_code import TOLD_BY_VERSION, digest_of_code

if TYPE_CHECKING:
    from vllm.config import VllmConfig

FIELDS = {
    "parallel_config": ("worker_cls", "worker_extension_cls", "distributed_executor_backend"),
    "compilation_config": ("backend", "inductor_passes", "inductor_compile_config"),
}
"""Settings that name code which computes, or sets up what does. A model's own class is found in the
worker. Not `scheduler_cls`: it decides what runs together in a step, as any scheduler does, and
computes nothing."""
_KNOWN = TOLD_BY_VERSION | sys.stdlib_module_names | {
    "attnstore_vllm", "triton", "compressed_tensors", "flashinfer",
}  # fmt: skip
"""PyTorch's version and vLLM's pin those of the last three."""
_WITHOUT_FILES = re.compile(r"pybind11_|nanobind|_cython_")
"""Modules that tools for bindings make up for their own types."""
_NAME = re.compile(r"\w+(?:\.\w+)*[.:]\w+")
_DEPTH = 2
_ITEMS_MAX = 1024
"""Items of a list, or another container, that are looked at."""


def named_code(vllm_config: VllmConfig) -> dict[str, Any]:
    """Names and a digest of the code that is neither vLLM's, PyTorch's nor Transformers'; empty:
    there is none. Cost, Raises: see digest_of_code()."""
    found: set[str] = set()
    names = []
    for section, fields in FIELDS.items():
        for field in fields:
            value = getattr(getattr(vllm_config, section), field, None)
            modules = foreign(_named(value))
            if modules:
                names.append(f"{field} {_text(value)}")
            found |= modules
    drafts = getattr(drafts_of(vllm_config), "draft_model_config", None)
    for model in (vllm_config.model_config, drafts):
        if model is not None:
            config = getattr(model, "hf_config", None)
            found |= foreign(_of_configuration(config, set()))
    return {"code": {"names": names, "digest": digest_of_code(found)}} if found else {}


def foreign(modules: Iterable[str | None]) -> set[str]:
    """Those of the modules whose code no version tells that is in the namespace."""
    found = {module for module in modules if module}
    return {
        module
        for module in found
        if module.partition(".")[0] not in _KNOWN and not _WITHOUT_FILES.match(module)
    }


def modules_of(value: Any, seen: set[tuple[int, int]], depth: int = _DEPTH) -> Iterator[str | None]:
    """Modules of the code that a value is made of, and of what it has as attributes.

    Args:
        seen: what was looked at already, by id and depth.
        depth: of attributes of attributes.
    """
    if isinstance(value, str | int | float | None) or (id(value), depth) in seen:
        return
    seen.add((id(value), depth))
    if isinstance(value, type):
        yield from (kind.__module__ for kind in value.__mro__)
    elif isinstance(value, MethodType):
        yield value.__func__.__module__
        yield from modules_of(value.__self__, seen, depth)
    elif isinstance(value, FunctionType | BuiltinFunctionType):
        yield value.__module__
    elif isinstance(value, functools.partial):
        yield from modules_of(value.func, seen, depth)
    elif isinstance(value, Mapping | list | tuple | set | frozenset):
        items = value.values() if isinstance(value, Mapping) else value
        for item in islice(items, _ITEMS_MAX):
            yield from modules_of(item, seen, depth)
    elif not isinstance(value, nn.Module | torch.Tensor):
        yield from (kind.__module__ for kind in type(value).__mro__)
        if depth:
            yield from modules_of_attributes(value, seen, depth - 1)


def modules_of_attributes(
    holder: object, seen: set[tuple[int, int]], depth: int = _DEPTH
) -> Iterator[str | None]:
    """See modules_of()."""
    for value in list(getattr(holder, "__dict__", {}).values()):
        yield from modules_of(value, seen, depth)


def _named(value: Any) -> Iterator[str | None]:
    if isinstance(value, Mapping):
        for item in value.values():
            yield from _named(item)
    elif isinstance(value, str):
        if _NAME.fullmatch(value):
            yield value.partition(":")[0] if ":" in value else value.rpartition(".")[0]
    else:
        yield from modules_of(value, set())


def _text(value: Any) -> str:
    if isinstance(value, type):
        return f"{value.__module__}.{value.__qualname__}"
    return value if isinstance(value, str) else ""


def _of_configuration(config: object, seen: set[int]) -> Iterator[str]:
    """Modules of the classes of a model's configuration, and of those that are parts of it: what
    a class computes is not in its values."""
    if isinstance(config, PretrainedConfig) and id(config) not in seen:
        seen.add(id(config))
        yield from (kind.__module__ for kind in type(config).__mro__)
        for part in vars(config).values():
            yield from _of_configuration(part, seen)
