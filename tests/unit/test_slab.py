# SPDX-License-Identifier: Apache-2.0
"""The slab file: its size, and when an earlier one is used again."""

from __future__ import annotations

import errno
import stat
from pathlib import Path

import pytest

from attnstore_vllm.errors import ConfigError
from attnstore_vllm.store.format import PAGE_BYTES, Superblock, header_bytes
from attnstore_vllm.store.slab import Slab, open_slab
from tests.helpers import CHUNK_TOKENS, NAMESPACE, PAYLOAD_BYTES, RECORD_BYTES, slab_bytes


def opened(
    path: Path,
    capacity_bytes: int = slab_bytes(4),
    *,
    chunk_tokens: int = CHUNK_TOKENS,
    payload_bytes: int = PAYLOAD_BYTES,
    namespace: bytes = NAMESPACE,
) -> Slab:
    return open_slab(path / "slab", capacity_bytes, chunk_tokens, payload_bytes, namespace)


def test_a_new_slab(tmp_path: Path) -> None:
    slab = opened(tmp_path)
    assert slab.fresh
    assert slab.num_records == 4
    assert slab.record_bytes == RECORD_BYTES == header_bytes(CHUNK_TOKENS) + PAYLOAD_BYTES
    found = (tmp_path / "slab").stat()
    assert found.st_size == slab_bytes(4)
    assert found.st_blocks * 512 >= slab_bytes(4)  # reserved, not only promised
    assert stat.S_IMODE(found.st_mode) == 0o600
    raw = (tmp_path / "slab").read_bytes()[:PAGE_BYTES]
    assert Superblock.decode(raw, "slab") == slab.superblock


@pytest.mark.parametrize("extra_bytes", [0, 1, RECORD_BYTES - 1])
def test_the_file_never_exceeds_the_capacity(tmp_path: Path, extra_bytes: int) -> None:
    slab = opened(tmp_path, slab_bytes(4) + extra_bytes)
    assert slab.num_records == 4
    assert (tmp_path / "slab").stat().st_size <= slab_bytes(4) + extra_bytes


def test_records_lie_one_after_the_other() -> None:
    superblock = Superblock(CHUNK_TOKENS, PAYLOAD_BYTES, NAMESPACE, bytes(16))
    slab = Slab(Path("here"), superblock, 3, fresh=True)
    assert [slab.offset(i) for i in range(3)] == [4096 + i * RECORD_BYTES for i in range(3)]
    assert slab.payload_offset(1) == slab.offset(1) + PAGE_BYTES
    assert slab.where(2) == "here, record 2"
    for record in (-1, 3):
        with pytest.raises(AssertionError):
            slab.offset(record)


def test_a_slab_of_the_same_shape_is_used_again(tmp_path: Path) -> None:
    first = opened(tmp_path)
    with (tmp_path / "slab").open("r+b") as file:
        file.seek(first.offset(2))
        file.write(b"a record")
    again = opened(tmp_path)
    assert not again.fresh
    assert again.superblock == first.superblock
    assert (tmp_path / "slab").read_bytes()[first.offset(2) :][:8] == b"a record"


@pytest.mark.parametrize(
    "change",
    [
        {"namespace": bytes(32)},
        {"chunk_tokens": 32},
        {"payload_bytes": PAYLOAD_BYTES + PAGE_BYTES},
    ],
)
def test_another_shape_or_namespace_starts_anew(tmp_path: Path, change: dict[str, object]) -> None:
    first = opened(tmp_path)
    other = opened(tmp_path, slab_bytes(8), **change)  # type: ignore[arg-type]
    assert other.fresh
    assert other.superblock.generation != first.superblock.generation
    back = opened(tmp_path)
    assert back.fresh
    assert back.superblock.generation != first.superblock.generation


def test_a_damaged_superblock_starts_anew(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first = opened(tmp_path)
    with (tmp_path / "slab").open("r+b") as file:
        file.seek(33)
        file.write(b"\xff")
    again = opened(tmp_path)
    assert again.fresh
    assert again.superblock.generation != first.superblock.generation
    assert "starts with an empty NVMe tier" in caplog.text


@pytest.mark.parametrize("content", [b"", b"short", bytes(PAGE_BYTES), b"x" * 3 * PAGE_BYTES])
def test_a_file_that_is_no_slab_becomes_one(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "slab").write_bytes(content)
    assert opened(tmp_path).fresh
    assert not opened(tmp_path).fresh


@pytest.mark.parametrize("num_records", [2, 9])
def test_another_capacity_keeps_the_records_that_fit(tmp_path: Path, num_records: int) -> None:
    first = opened(tmp_path)
    again = opened(tmp_path, slab_bytes(num_records))
    assert not again.fresh
    assert again.superblock == first.superblock
    assert again.num_records == num_records
    assert (tmp_path / "slab").stat().st_size == slab_bytes(num_records)


def test_a_capacity_below_one_record_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nvme\.capacity is .*lower chunk_tokens"):
        opened(tmp_path, slab_bytes(1) - 1)
    assert opened(tmp_path, slab_bytes(1)).num_records == 1


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "slab").symlink_to(tmp_path / "victim")
    with pytest.raises(ConfigError, match=r"nvme\.path.*cannot be opened"):
        opened(tmp_path)
    assert not (tmp_path / "victim").exists()


class NoFallocate:
    """A C library whose fallocate() fails. Really filling the disk would hurt others on it."""

    @staticmethod
    def fallocate(*_: object) -> int:
        return -1


def fail_fallocate(monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    monkeypatch.setattr("ctypes.CDLL", lambda *_, **__: NoFallocate)
    monkeypatch.setattr("ctypes.get_errno", lambda: code)


def test_a_file_system_that_cannot_reserve_space_is_used_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fail_fallocate(monkeypatch, errno.EOPNOTSUPP)
    slab = opened(tmp_path)
    assert (tmp_path / "slab").stat().st_size == slab_bytes(slab.num_records)
    assert "cannot reserve space" in caplog.text


@pytest.mark.parametrize("num_records", [0, 4])
def test_a_disk_that_is_too_small_is_a_config_error_and_stays_as_full_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_records: int
) -> None:
    """fallocate() takes what there is before it fails: that has to be given back."""
    if num_records:
        opened(tmp_path, slab_bytes(num_records))
    before = slab_bytes(num_records) if num_records else 0
    fail_fallocate(monkeypatch, errno.ENOSPC)
    with pytest.raises(ConfigError, match=r"nvme\.capacity .*No space left.*ask for less"):
        opened(tmp_path, slab_bytes(16))
    assert (tmp_path / "slab").stat().st_size == before
