# SPDX-License-Identifier: Apache-2.0
"""The secret of servers that share a store: its file, its keys, and what is said without one."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from attnstore_vllm.cli.doctor import examine
from attnstore_vllm.config.settings import StoreConfig
from attnstore_vllm.config.shared import SharedConfig
from attnstore_vllm.errors import ConfigError
from attnstore_vllm.tiers.shared.secret import SECRET_BYTES_MAX, SharedKeys, read_secret
from attnstore_vllm.tiers.shared.shared_generation import GenerationId, decode, encode, name_of
from attnstore_vllm.tiers.shared.start import check_client, make_shared

SECRET = b"0123456789abcdef0123456789abcdef"
NOWHERE = {"redis": "redis://127.0.0.1:1", "deadline": "100ms"}


def secret_file(directory: Path, text: bytes = SECRET + b"\n", mode: int = 0o400) -> Path:
    path = directory / "secret"
    path.write_bytes(text)
    path.chmod(mode)
    return path


def parsed(tmp_path: Path, **shared: Any) -> SharedConfig:
    nvme = {"path": str(tmp_path / "kv"), "capacity": "2GiB"}
    found = StoreConfig.parse({"dram": "1GiB", "nvme": nvme, "shared": NOWHERE | shared}).shared
    assert found is not None
    return found


def test_a_file_of_ours_is_read_without_its_last_line_end(tmp_path: Path) -> None:
    assert read_secret(secret_file(tmp_path)) == SECRET


def test_links_are_followed_as_kubernetes_makes_them(tmp_path: Path) -> None:
    (tmp_path / "..data").mkdir()
    made = secret_file(tmp_path / "..data")
    (tmp_path / "secret").symlink_to(made)
    assert read_secret(tmp_path / "secret") == SECRET


@pytest.mark.parametrize(("mode", "is_read"), [(0o440, True), (0o460, False), (0o444, False)])
def test_a_secret_that_fs_group_gives_to_a_pods_user(
    tmp_path: Path, mode: int, is_read: bool
) -> None:
    """Kubernetes gives a Secret to `fsGroup`: root's, 0440, in a directory with the setgid bit."""
    directory = tmp_path / "..data"
    directory.mkdir()
    directory.chmod(0o2770)
    (tmp_path / "secret").symlink_to(secret_file(directory, mode=mode))
    if is_read:
        assert read_secret(tmp_path / "secret") == SECRET
        return
    with pytest.raises(ConfigError, match=f"mode {mode:04o}"):
        read_secret(tmp_path / "secret")


@pytest.mark.parametrize(
    ("text", "mode", "said"),
    [
        (SECRET, 0o440, "mode 0440"),
        (SECRET, 0o604, "mode 0604"),
        (SECRET, 0o420, "mode 0420"),
        (SECRET[1:], 0o400, "a secret of 31 bytes; it must have 32"),
        (b"\n", 0o400, "a secret of 0 bytes"),
        (bytes(SECRET_BYTES_MAX + 1), 0o400, "4097 bytes"),
    ],
)
def test_a_file_that_keeps_no_secret_is_refused(
    tmp_path: Path, text: bytes, mode: int, said: str
) -> None:
    with pytest.raises(ConfigError, match=said) as refused:
        read_secret(secret_file(tmp_path, text, mode))
    assert SECRET[1:].decode() not in str(refused.value)


def test_what_is_no_file_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe", 0o600)
    for name, said in (("pipe", "no regular file"), (".", "no regular file"), ("not", "No such")):
        with pytest.raises(ConfigError, match=said):
            read_secret(tmp_path / name)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_a_file_of_another_user_is_refused(tmp_path: Path) -> None:
    path = secret_file(tmp_path)
    os.chown(path, 12345, -1)
    with pytest.raises(ConfigError, match="belongs to user 12345"):
        read_secret(path)


def test_groups_of_one_secret_with_other_prefixes_are_told_apart(tmp_path: Path) -> None:
    """A stranger who copies a sealed value from one to the other has forged it."""
    path = secret_file(tmp_path)
    ours, theirs = (SharedKeys.of_file(path, prefix) for prefix in ("fleetA/", "fleetB/"))
    name = name_of(bytes(32), ours)
    value = encode(GenerationId(bytes(16), 1), name, ours)
    assert decode(value, name, ours) == (bytes(16), 1)
    assert decode(value, name, theirs) is None
    assert name_of(bytes(32), theirs) != name
    config = parsed(tmp_path, secret_file=str(path), prefix="fleetA/")
    made = make_shared(config, 16, bytes(32), tmp_path, slot_bytes=1, quotas={})
    assert made.keys == ours, "the setting has no effect"
    config = parsed(tmp_path, secret_file=str(path))
    made = make_shared(config, 16, bytes(32), tmp_path, slot_bytes=1, quotas={})
    assert made.keys == SharedKeys.of(SECRET)


def test_the_setting_is_for_both_kinds_and_read_late(tmp_path: Path) -> None:
    path = secret_file(tmp_path)
    config = parsed(tmp_path, secret_file=str(path))
    assert SharedKeys.of_file(config.secret_file) == SharedKeys.of(SECRET)
    assert SECRET.decode() not in f"{config!r} {config.for_client()!r}"
    with pytest.raises(ConfigError, match=r"shared\.secret_file is"):
        parsed(tmp_path, secret_file="relative")
    path.unlink()
    with pytest.raises(ConfigError, match=r"shared.secret_file is .*secret.*cannot be read"):
        check_client(config)


def test_keys_are_what_they_were() -> None:
    """Else servers of two versions of one format do not find each other's records."""
    keys = SharedKeys.of(SECRET)
    assert (
        keys.name(b"a").hex() == "7a60198bd3bb3d006205f9007f252570c73ad90bddc97c7d2619cdf4fc0b3990"
    )
    assert (
        keys.seal(b"a").hex() == "9170743394f83d2a816c544275abfe46dbae75b1cb6d07c8f25e3a3e9da08928"
    )
    assert (
        keys.digest(memoryview(b"a")).hex()
        == "90dbef8693c38e8027c76576d731299fb1b1dc62f78f7d81eae97a806110f3e9"
    )


def test_each_use_has_a_key_of_its_own_and_each_secret_other_ones() -> None:
    made = [
        one
        for keys in (SharedKeys.of(SECRET), SharedKeys.of(SECRET[::-1]), SharedKeys.of(None))
        for one in (keys.name(b"a"), keys.seal(b"a"), keys.digest(memoryview(b"a")))
    ]
    assert len(set(made)) == len(made)


@pytest.mark.parametrize("is_secret", [False, True])
def test_a_start_without_a_secret_says_once_what_a_stranger_can_do(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, is_secret: bool
) -> None:
    given = {"secret_file": str(secret_file(tmp_path))} if is_secret else {}
    config = parsed(tmp_path, **given)
    make_shared(config, 256, bytes(32), tmp_path, slot_bytes=1, quotas={})
    assert [record.levelname for record in caplog.records] == ([] if is_secret else ["WARNING"])
    for said in ("forged KV served", "any tenant", "reads KV", "guesses of prompts"):
        assert (said in caplog.text) != is_secret


@pytest.mark.parametrize("mode", [None, 0o444])
def test_doctor_says_whether_there_is_one(tmp_path: Path, mode: int | None) -> None:
    nvme = {"path": str(tmp_path / "kv"), "capacity": "1GiB"}
    shared = dict(NOWHERE)
    if mode is not None:
        shared["secret_file"] = str(secret_file(tmp_path, mode=mode))
    file = tmp_path / "attnstore.yaml"
    file.write_text(str({"dram": "1GiB", "nvme": nvme, "shared": shared}))
    found = {check.name: check for check in examine(file, None)}
    if mode is None:
        assert found["shared secret"].state == "warn"
        assert "any tenant" in found["shared secret"].found
    else:
        assert found["shared tier"].state == "bad" and "mode 0444" in found["shared tier"].found
        assert "shared secret" not in found


def test_other_threads_run_while_a_payload_is_digested() -> None:
    """With a switch interval without an end: what runs meanwhile was let run by the digest."""
    keys, payload = SharedKeys.of(SECRET), memoryview(bytearray(16 << 20))
    go_on, came = threading.Lock(), list[int]()
    go_on.acquire()

    def wait() -> None:
        with go_on:
            came.append(1)

    thread = threading.Thread(target=wait)
    before = sys.getswitchinterval()
    thread.start()
    try:
        sys.setswitchinterval(1e5)
        go_on.release()
        for _ in range(200):
            if came:
                break
            keys.digest(payload)
        assert came
    finally:
        sys.setswitchinterval(before)
        thread.join()
