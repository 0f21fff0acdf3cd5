# SPDX-License-Identifier: Apache-2.0
"""`shared`: what the settings take and refuse, and that no secret is shown."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from attnstore_vllm.config.settings import StoreConfig
from attnstore_vllm.config.shared import (
    COMMON_KEYS,
    KINDS,
    MOONCAKE_KEYS,
    PASSWORD_BYTES_MAX,
    SharedConfig,
)
from attnstore_vllm.errors import ConfigError

BARE: dict[str, Any] = {"dram": "1GiB", "nvme": {"path": "/mnt/x", "capacity": "2GiB"}}


def parsed(shared: object) -> SharedConfig:
    found = StoreConfig.parse({**BARE, "shared": shared}).shared
    assert found is not None
    return found


def test_off_is_none() -> None:
    assert StoreConfig.parse(BARE).shared is None
    assert StoreConfig.parse({**BARE, "shared": "off"}).shared is None


def test_settings_can_be_kept_in_sets() -> None:
    """As plugin.py does, which checks each once."""
    for given in ({"redis": "redis://h"}, {"mooncake": {"master": "h:1"}}):
        assert len({parsed(given), parsed(given)}) == 1


def test_engines_share_what_may_be_written() -> None:
    shared = {"redis": "redis://h", "bandwidth": "64MiB", "daily_writes": "1GiB"}
    config = StoreConfig.parse({**BARE, "shared": shared, "data_parallel_size": 4}).share(1)
    assert config.shared is not None
    assert config.shared.bandwidth_bytes == 16 << 20
    assert config.shared.daily_writes_bytes == 256 << 20


def test_a_password_is_in_no_message_and_in_no_text_of_the_settings() -> None:
    config = parsed({"redis": "rediss://kv:hidden@cache:6380/1"})
    assert "hidden" not in repr(config)
    assert config.where == "Redis at cache:6380"
    for wrong in ({"redis": "http://kv:hidden@cache"}, {"redis": "redis://:hidden@h:99999"}):
        with pytest.raises(ConfigError) as refused:
            parsed(wrong)
        assert "hidden" not in str(refused.value)


def test_a_password_file_is_read_for_the_client_alone(tmp_path: Path) -> None:
    file = tmp_path / "password"
    config = with_password(file, b"secret\n")
    assert config.for_client()["redis"]["password"] == "secret"
    file.unlink()
    with pytest.raises(ConfigError, match="password_file"):
        config.for_client()


def with_password(file: Path, text: bytes, mode: int = 0o400) -> SharedConfig:
    file.write_bytes(text)
    file.chmod(mode)
    return parsed({"redis": "redis://h", "password_file": str(file)})


@pytest.mark.parametrize(
    ("text", "mode", "said"),
    [
        (b"hidden", 0o444, "mode 0444"),
        (b"hidden", 0o666, "mode 0666"),
        (b"hidden\xff", 0o400, "not UTF-8"),
        (b" \n", 0o400, "has no password"),
        (b"hidden" * PASSWORD_BYTES_MAX, 0o400, "has no password"),
    ],
)
def test_a_password_file_that_is_none(tmp_path: Path, text: bytes, mode: int, said: str) -> None:
    config = with_password(tmp_path / "password", text, mode)
    with pytest.raises(ConfigError, match=rf"shared\.password_file is .*{said}") as refused:
        config.for_client()
    assert "hidden" not in str(refused.value)


def test_a_pipe_in_the_place_of_a_password_hangs_no_start(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe", 0o600)
    config = parsed({"redis": "redis://h", "password_file": str(tmp_path / "pipe")})
    with pytest.raises(ConfigError, match="no regular file"):
        config.for_client()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (5, "shared must be off"),
        ({}, "shared must be off"),
        ({"redis": "redis://h", "mooncake": {"master": "h:1"}}, "shared must be off"),
        ({"redis": 5}, "no URL"),
        ({"redis": "redis://h", "ca": "relative.pem"}, "shared.ca"),
        *(
            ({"redis": url, key: "/etc/it.pem"}, rf"shared\.{key} is of TLS.*rediss://")
            for url in ("redis://u:hidden@h", "unix:///run/redis.sock")
            for key in ("ca", "cert", "key")
        ),
        ({"redis": "redis://h", "prefix": "a b"}, "shared.prefix"),
        ({"redis": "redis://h", "bandwith": "1GiB"}, "bandwidth"),
        ({"mooncake": {"master": "h"}}, "host:port"),
        ({"mooncake": {"master": "h:1", "protocol": "udp"}}, "tcp or rdma"),
        ({"mooncake": {"master": "h:1"}, "ca": "/x"}, "Mooncake has neither"),
    ],
)
def test_what_makes_no_sense_is_refused(given: object, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as refused:
        parsed(given)
    assert "hidden" not in str(refused.value)


def test_tls_takes_its_files() -> None:
    files = {"ca": "/etc/ca.pem", "cert": "/etc/cert.pem", "key": "/etc/key.pem"}
    options = dict(parsed({"redis": "REDISS://h", **files}).options)
    assert {key: options[key] for key in files} == files


def empty_settings() -> Iterator[tuple[str, dict[str, Any]]]:
    """Of each setting below `shared`: its name, and settings in which it has no value."""
    for key in sorted(COMMON_KEYS | KINDS["redis"].keys):
        yield key, {"redis": "redis://h", key: None}
    for key in sorted(MOONCAKE_KEYS):
        yield f"mooncake.{key}", {"mooncake": {"master": "h:1"} | {key: None}}
    for kind in KINDS:
        yield kind, {kind: None}


@pytest.mark.parametrize(("key", "given"), list(empty_settings()))
def test_a_key_without_a_value_is_no_default(key: str, given: dict[str, Any]) -> None:
    """An empty `secret_file:` would be a start without the secret that was meant."""
    with pytest.raises(ConfigError, match=rf"shared\.{key} is None"):
        parsed(given)
