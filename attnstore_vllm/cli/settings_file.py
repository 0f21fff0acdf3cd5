# SPDX-License-Identifier: Apache-2.0
"""`attnstore check FILE`: everything that is wrong with a file of settings, at once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from attnstore_vllm.config.deadlines import old_names
from attnstore_vllm.config.settings import StoreConfig
from attnstore_vllm.config.texts import SETTINGS
from attnstore_vllm.config.values import load_yaml
from attnstore_vllm.errors import ConfigError
from attnstore_vllm.plugin import ours_in, why_unreadable

_VALID: dict[str, Any] = {"dram": "1GiB", "nvme": {"path": "/", "capacity": "1GiB"}}
_SECTIONS: dict[str, dict[str, Any]] = {
    "dram": {"size": _VALID["dram"]},
    "nvme": _VALID["nvme"],
    "pinning": {},
    "truncation": {},
    "trace": {"path": "/"},
}
"""Those that may hold settings, and the least that is right in each."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong, and the line of the file that says it (0: no line does)."""

    line: int
    text: str

    def __str__(self) -> str:
        return f"line {self.line}: {self.text}" if self.line else self.text

    def as_json(self) -> dict[str, Any]:
        return {"line": self.line or None, "problem": self.text}


@dataclass(frozen=True, slots=True)
class SettingsFile:
    """Our settings in a file, and the line of each key (as in nvme.path)."""

    path: Path
    given: object
    lines: Mapping[str, int]

    def problems(self) -> list[Problem]:
        return [
            Problem(self.lines.get(key, self.lines.get(key.partition(".")[0], 0)), text)
            for key, text in _problems(self.given)
        ]

    def hints(self) -> list[str]:
        """Names that are still read, and what to write in their place. Nothing is wrong."""
        found = ((self.lines.get(key, 0), hint) for key, hint in old_names(self.given))
        return [f"line {line}: {hint}" if line else hint for line, hint in found]

    def config(self) -> StoreConfig:
        """Raises: ConfigError."""
        return StoreConfig.parse(self.given)


def read_settings(path: Path) -> SettingsFile:
    """Read YAML or JSON: our settings alone, or vLLM's --kv-transfer-config with them in it.

    Raises: ConfigError if it cannot be read, or has no settings of ours.
    """
    try:
        text = path.read_text(encoding="utf-8")
        node, given = yaml.compose(text, yaml.SafeLoader), load_yaml(text)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {why_unreadable(str(path), error)}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is no YAML: {error}") from error
    if isinstance(given, dict) and "kv_connector" in given:
        ours = [connector.get("kv_connector_extra_config", {}) for connector in ours_in(given)]
        if len(ours) != 1:
            raise ConfigError(
                f"{path} names {given['kv_connector']!r} as its connector, and AttnStoreConnector "
                f"{len(ours)} times; expected once"
            )
        given, extra = ours[0], _under(node, "kv_connector_extra_config")
        node = extra if given and extra is not None else node
    return SettingsFile(path, given, dict(_lines(node)))


def _under(node: Any, key: str) -> Any:
    pairs = node.value if isinstance(node, yaml.MappingNode) else []
    return next((value for name, value in pairs if name.value == key), None)


def _lines(node: Any, prefix: str = "") -> Iterator[tuple[str, int]]:
    for name, value in node.value if isinstance(node, yaml.MappingNode) else []:
        key = f"{prefix}{name.value}"
        yield key, name.start_mark.line + 1
        if not prefix:
            yield from _lines(value, f"{key}.")


def _problems(given: object) -> Iterator[tuple[str, str]]:
    """(key, what is wrong with it). Values are tried one by one, beside those that were right."""
    if not isinstance(given, Mapping):
        error = _error(given)
        yield "", error or ""
        return
    right: dict[str, Any] = dict(_VALID)
    for section, least in _SECTIONS.items():
        if isinstance(given.get(section), Mapping):
            right[section] = dict(least)
    for key, value in _in_order(given):
        tried = _with(right, key, value)
        error = _error(tried)
        if error is None:
            right = tried
        else:
            yield key, error
    for key in ("dram", "dram.size", "nvme", "nvme.path", "nvme.capacity", "trace.path"):
        section, _, name = key.rpartition(".")
        within = given.get(section) if section else given
        if isinstance(within, Mapping) and name not in within:
            yield key, _error(_without(right, key)) or ""


def _error(given: object) -> str | None:
    try:
        StoreConfig.parse(given)
    except ConfigError as error:
        return str(error)
    return None


def _in_order(given: Mapping[Any, Any]) -> Iterator[tuple[str, Any]]:
    """Every value by its key, in the order of SETTINGS, in which one may depend on those before."""
    flat: dict[str, Any] = {}
    for key, value in given.items():
        if key in _SECTIONS and isinstance(value, Mapping):
            flat.update({f"{key}.{name}": inner for name, inner in value.items()})
        else:
            flat[str(key)] = value
    order = {setting.key: at for at, setting in enumerate(SETTINGS)}
    yield from sorted(flat.items(), key=lambda item: order.get(item[0], -1))


def _with(settings: Mapping[str, Any], key: str, value: object) -> dict[str, Any]:
    section, _, name = key.partition(".")
    if not name or section not in _SECTIONS:
        return {**settings, key: value}
    return {**settings, section: {**settings[section], name: value}}


def _without(settings: Mapping[str, Any], key: str) -> dict[str, Any]:
    section, _, name = key.partition(".")
    if not name:
        return {k: v for k, v in settings.items() if k != key}
    return {**settings, section: {k: v for k, v in settings[section].items() if k != name}}
