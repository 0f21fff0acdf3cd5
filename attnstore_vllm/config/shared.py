# SPDX-License-Identifier: Apache-2.0
"""`shared`: settings of the shared tier.

shared: {redis: "rediss://user@cache:6379/0", password_file: /run/secrets/redis,
         secret_file: /run/secrets/attnstore}
shared: {mooncake: {master: "10.0.0.1:50051"}, secret_file: /run/secrets/attnstore}

KINDS has the kinds of stores. No other file knows them by name, but the Backend of each
(tiers/shared/).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from attnstore_vllm.config.deadlines import SHARED_DEADLINE
from attnstore_vllm.config.secret_files import read_secret_file
from attnstore_vllm.config.values import SIZE_MIN, check_keys, parse_off_or_size
from attnstore_vllm.errors import ConfigError

COMMON_KEYS = {"secret_file", "deadline", "bandwidth", "daily_writes", "prefix"}
PREFIX = "as1/"
"""The names begin with it where the settings say none. Other prefixes have other keys (secret.py),
so it never changes."""
MOONCAKE_KEYS = {"master", "host", "metadata", "protocol", "devices"}
_HOST_PORT = re.compile(r"\S+:\d{1,5}")
_PREFIX = re.compile(r"[\x21-\x7e]{0,64}")
PASSWORD_BYTES_MAX = 4096
_SCHEMES = ("redis", "rediss", "unix")


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedConfig:
    """One network store. `options` has no secret but the URL's own."""

    kind: str
    """One of KINDS."""
    options: tuple[tuple[str, str], ...] = field(repr=False)
    """By name: settings are compared, and kept in sets."""
    password_file: Path | None = None
    secret_file: Path | None = None
    deadline_ms: int = 500
    bandwidth_bytes: int | None = None
    daily_writes_bytes: int | None = None
    prefix: str = PREFIX

    @classmethod
    def parse(cls, given: object) -> SharedConfig:
        """Raises ConfigError. No message has a URL: there may be a password in it."""
        if not isinstance(given, Mapping) or len(KINDS.keys() & given.keys()) != 1:
            examples = [f"{{{name}: {kind.example}}}" for name, kind in KINDS.items()]
            known = ", ".join(["off", *examples[:-1]])
            raise ConfigError(f"shared must be {known} or {examples[-1]}")
        (name,) = KINDS.keys() & given.keys()
        of_kinds = {key for kind in KINDS.values() for key in kind.keys}
        all_keys = COMMON_KEYS | KINDS.keys() | of_kinds
        check_keys("shared.", given, all_keys, set(), {SHARED_DEADLINE.old_name})
        for key in sorted((of_kinds - KINDS[name].keys) & given.keys()):
            chosen = KINDS[name]
            raise ConfigError(
                f"shared.{key} makes no sense: {chosen.title} has {chosen.lacks}; take it out"
            )
        bandwidth, writes = given.get("bandwidth", False), given.get("daily_writes", False)
        return cls(
            kind=name,
            options=tuple(sorted(KINDS[name].options(given).items())),
            password_file=_file_of("password_file", given),
            secret_file=_file_of("secret_file", given),
            deadline_ms=SHARED_DEADLINE.parse(given, 500),
            bandwidth_bytes=parse_off_or_size("shared.bandwidth", bandwidth, SIZE_MIN, "MiB"),
            daily_writes_bytes=parse_off_or_size("shared.daily_writes", writes, SIZE_MIN, "GiB"),
            prefix=_prefix_of(given.get("prefix", PREFIX)),
        )

    @property
    def where(self) -> str:
        """For the log: without secrets."""
        return KINDS[self.kind].where(dict(self.options))

    def share(self, ranks: int) -> SharedConfig:
        """One engine's part of what may be written."""

        def part(num_bytes: int | None) -> int | None:
            return None if num_bytes is None else max(1, num_bytes // ranks)

        return replace(
            self,
            bandwidth_bytes=part(self.bandwidth_bytes),
            daily_writes_bytes=part(self.daily_writes_bytes),
        )

    def for_client(self) -> dict[str, Any]:
        """For tiers/shared/backend.py: has the password, never the secret. Raises ConfigError."""
        options: dict[str, Any] = dict(self.options)
        options["timeout_s"] = self.deadline_ms / 1000
        if self.password_file is not None:
            options["password"] = read_password(self.password_file)
        return {"prefix": self.prefix, self.kind: options}


def read_password(path: Path) -> str:
    """The text of a file that its owner alone may read, but white space at its ends. Raises
    ConfigError."""
    what = f"shared.password_file is {str(path)!r}, which"
    password = read_secret_file(path, what, "password", PASSWORD_BYTES_MAX)
    if not 0 < len(password) <= PASSWORD_BYTES_MAX:
        raise ConfigError(
            f"{what} has no password of 1 to {PASSWORD_BYTES_MAX} bytes; write the one that Redis "
            "has"
        )
    try:
        return password.decode()
    except UnicodeDecodeError:
        raise ConfigError(f"{what} is not UTF-8; write the password as Redis has it") from None


def _redis_options(given: Mapping[str, Any]) -> dict[str, str]:
    """Raises ConfigError. No message has the URL: there may be a password in it."""
    raw = given["redis"]
    if not (isinstance(raw, str) and _is_redis_url(raw)):
        raise ConfigError(
            "shared.redis is no URL of Redis; write one as in redis://host:6379/0, rediss:// for "
            "TLS, or unix:///run/redis.sock"
        )
    options = {"url": raw}
    for key in ("ca", "cert", "key"):
        if key in given:
            options[key] = _file(f"shared.{key}", given[key])
            if urlsplit(raw).scheme != "rediss":
                raise ConfigError(
                    f"shared.{key} is of TLS, which shared.redis does not ask for; write its URL "
                    f"as rediss://, or take shared.{key} out"
                )
    return options


def _redis_where(options: Mapping[str, str]) -> str:
    url = urlsplit(options["url"])
    return f"Redis at {url.hostname or url.path}" + (f":{url.port}" if url.port else "")


def _is_redis_url(text: str) -> bool:
    try:
        url = urlsplit(text)
        where = url.path if url.scheme == "unix" else url.hostname
        return url.scheme in _SCHEMES and bool(where) and (url.port or 1) > 0
    except ValueError:
        return False


def _mooncake_options(shared: Mapping[str, Any]) -> dict[str, str]:
    given = shared["mooncake"]
    if not isinstance(given, Mapping) or not set(given) <= MOONCAKE_KEYS or "master" not in given:
        raise ConfigError(
            f"shared.mooncake is {given!r}; it must be {{master: host:port}}, and may have "
            "host, metadata, protocol and devices"
        )
    check_keys("shared.mooncake.", given, MOONCAKE_KEYS, set())
    options = {key: str(value) for key, value in given.items()}
    if not _HOST_PORT.fullmatch(options["master"]):
        raise ConfigError(
            f"shared.mooncake.master is {options['master']!r}; it must be host:port, as in "
            "10.0.0.1:50051"
        )
    if options.get("protocol", "tcp") not in ("tcp", "rdma"):
        raise ConfigError(
            f"shared.mooncake.protocol is {options['protocol']!r}; it must be tcp or rdma"
        )
    return options


def _prefix_of(value: object) -> str:
    if isinstance(value, str) and _PREFIX.fullmatch(value):
        return value
    raise ConfigError(
        f"shared.prefix is {value!r}; it must be at most 64 characters of ASCII, without spaces"
    )


def _file(key: str, value: object) -> str:
    if isinstance(value, str) and Path(value).is_absolute():
        return value
    raise ConfigError(f"{key} is {value!r}; it must be the absolute path of a file")


def _file_of(key: str, given: Mapping[str, Any]) -> Path | None:
    """`password_file` or `secret_file`, None where it is not given. Raises ConfigError."""
    return Path(_file(f"shared.{key}", given[key])) if key in given else None


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedKind:
    """A kind of network store: its settings, and where its client is. Its name is the setting below
    `shared` that chooses it, and the extra of the package that brings its client."""

    title: str
    example: str
    """The value of its setting, for errors."""
    backend: str
    """MODULE:CLASS of its Backend, which is loaded where it is used."""
    options: Callable[[Mapping[str, Any]], dict[str, str]]
    """Options of its Backend, by all that `shared` has. Raises ConfigError."""
    where: Callable[[Mapping[str, str]], str]
    """By the options: the store's address for the log, without secrets."""
    keys: frozenset[str] = frozenset()
    """Settings below `shared` that are for this kind, beside its name."""
    lacks: str = "no use for it"
    """Why other kinds' settings make no sense, for errors."""
    client: str = ""
    """The module of a client that has to be installed; empty: none."""


KINDS = {
    "redis": SharedKind(
        title="Redis",
        example="redis://host:6379/0",
        backend="attnstore_vllm.tiers.shared.redis_backend:RedisBackend",
        options=_redis_options,
        where=_redis_where,
        keys=frozenset({"password_file", "ca", "cert", "key"}),
    ),
    "mooncake": SharedKind(
        title="Mooncake",
        example="{master: host:port}",
        backend="attnstore_vllm.tiers.shared.mooncake_backend:MooncakeBackend",
        options=_mooncake_options,
        where=lambda options: f"Mooncake's master {options['master']}",
        lacks="neither passwords nor TLS",
        client="mooncake",
    ),
}
"""Another kind is an entry here, a Backend, and texts of its settings (config/texts.py)."""
