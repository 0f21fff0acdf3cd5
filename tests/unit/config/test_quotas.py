# SPDX-License-Identifier: Apache-2.0
"""`quotas`: what may be given, and that no error shows a salt."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from attnstore_vllm.config.settings import StoreConfig
from attnstore_vllm.config.tenants import TENANTS_MAX, Quota, parse_quotas, slots_of
from attnstore_vllm.errors import ConfigError

SALT = "s3cret-salt"


def test_shares_and_sizes() -> None:
    gold, plain = parse_quotas(
        {"gold": {"salt_file": "/run/gold", "dram": 0.25}, "plain": {"dram": "1GiB"}}
    )
    assert gold == Quota(name="gold", salt_file=Path("/run/gold"), dram=0.25)
    assert (plain.dram, plain.nvme, plain.shared) == (1 << 30, None, None), "as it was before"
    assert slots_of(0.25, 100, 1 << 20) == 25
    assert slots_of(1 << 30, 10_000, 1 << 20) == 1024
    assert slots_of(1 << 30, 10_000, 1 << 31) == 1, "less than a slot"
    assert parse_quotas("off") == parse_quotas(False) == ()
    assert parse_quotas({"a": {"dram": 1}})[0].dram == 1.0, "the share that is all"


def test_each_tier_has_its_own() -> None:
    (quota,) = parse_quotas({"a": {"nvme": 0.5, "shared": "1TiB"}})
    assert (quota.dram, quota.nvme, quota.shared) == (None, 0.5, 1 << 40)
    assert parse_quotas({"a": {"nvme": "2GiB"}})[0].nvme == 2 << 30
    with pytest.raises(ConfigError, match=r"quotas\.a\.shared is given, and there is no shared"):
        StoreConfig.parse(
            {
                "dram": "8GiB",
                "nvme": {"path": "/mnt/x", "capacity": "20GiB"},
                "quotas": {"a": {"shared": "1GiB"}},
            }
        )


def test_each_engine_has_a_part() -> None:
    config = StoreConfig.parse(
        {
            "dram": "8GiB",
            "nvme": {"path": "/mnt/x", "capacity": "20GiB"},
            "data_parallel_size": 2,
            "shared": {"redis": "redis://h"},
            "quotas": {
                "a": {"dram": "1GiB", "nvme": "4GiB", "shared": "8GiB"},
                "b": {"salt_file": "/b", "dram": 0.5, "nvme": 0.25},
            },
        }
    )
    a, b = config.share(0).quotas
    assert (a.dram, a.nvme, a.shared) == (1 << 29, 2 << 30, 4 << 30)
    assert (b.dram, b.nvme, b.shared) == (0.5, 0.25, None)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ([], "mapping of 1 to 64"),
        ({}, "mapping of 1 to 64"),
        ({f"t{n}": {"salt_file": f"/{n}", "dram": 0.1} for n in range(TENANTS_MAX + 1)}, "1 to 64"),
        ({SALT + "|": {"dram": 0.1}}, "name of tenant 1"),
        ({"a": 0.1}, "quotas.a must be a mapping"),
        ({"a": {}}, "quotas.a has no quota; write dram, nvme or shared"),
        ({"a": {"salt_file": "/a"}}, "quotas.a has no quota"),
        ({"a": {"nvme": 1.5}}, "quotas.a.nvme is 1.5"),
        ({"a": {"nvme": "64"}}, "quotas.a.nvme is 64"),
        ({"a": {"nvme": None}}, "quotas.a.nvme is None"),
        ({"a": {"shared": 0.5}}, "quotas.a.shared is 0.5, and a share of what no server knows"),
        ({"a": {"shared": 1}}, "quotas.a.shared is 1, and a share"),
        ({"a": {"dram": 1.5}}, "quotas.a.dram is 1.5"),
        ({"a": {"dram": 0.1, "salt": SALT}}, "quotas.a.salt"),
        ({"a": {"dram": 0.1, "salt_file": SALT}}, "absolute path"),
        ({"a": {"dram": 0.1}, "b": {"dram": 0.1}}, "two without one"),
    ],
)
def test_what_is_wrong_is_said_without_a_salt(given: Any, words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse_quotas(given)
    assert words in str(refused.value)
    assert SALT not in str(refused.value)


def test_a_salt_is_read_from_its_file_alone(tmp_path: Path) -> None:
    file = tmp_path / "salt"
    quota = Quota(name="a", salt_file=file, dram=0.5)
    with pytest.raises(ConfigError, match="cannot be read"):
        quota.salt()
    file.write_text(f"{SALT}\n")
    file.chmod(0o400)
    assert quota.salt() == SALT
    assert replace(quota, salt_file=None).salt() is None
    file.chmod(0o644)
    with pytest.raises(ConfigError, match="chmod 400") as refused:
        quota.salt()
    assert SALT not in str(refused.value)
    for content in (b"", b" \n", b"\xff", b"x" * 5000):
        file.chmod(0o600)
        file.write_bytes(content)
        with pytest.raises(ConfigError, match="write the salt"):
            quota.salt()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_a_salt_that_another_user_can_change_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "salt"
    file.write_text(SALT)
    file.chmod(0o400)
    os.chown(file, 12345, -1)
    with pytest.raises(ConfigError, match="belongs to user 12345") as refused:
        Quota(name="a", salt_file=file, dram=0.5).salt()
    assert SALT not in str(refused.value)
