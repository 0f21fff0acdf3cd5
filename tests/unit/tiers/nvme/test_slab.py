# SPDX-License-Identifier: Apache-2.0
"""The slab file: its size, when an earlier one is used again, and who has which segment."""

from __future__ import annotations

import errno
import os
import stat
from dataclasses import replace
from pathlib import Path

import pytest

from attnstore_vllm.errors import ConfigError
from attnstore_vllm.tiers.nvme.format import PAGE_BYTES, Root, SegmentHeader, header_bytes
from attnstore_vllm.tiers.nvme.slab import Slab, num_segments_for, open_slab, overhead_bytes
from tests.helpers import CHUNK_TOKENS, PAYLOAD_BYTES, RECORD_BYTES, SHAPE, capacity_for

CAPACITY = 1 << 20
OTHER = replace(SHAPE, namespace=b"o" * 32, last_used=SHAPE.last_used + 100, label="other")
THIRD = replace(SHAPE, namespace=b"3" * 32, last_used=SHAPE.last_used + 200, label="third")


def opened(path: Path, shape: SegmentHeader = SHAPE, capacity_bytes: int = CAPACITY) -> Slab:
    return open_slab(path / "slab", capacity_bytes, shape)


def fill(path: Path, slab: Slab, count: int) -> None:
    """Claim more segments, and write their headers as the writer does."""
    with (path / "slab").open("r+b") as file:
        for _ in range(count):
            header = slab.claim()
            assert header is not None
            file.seek(slab.segment_offset(header.number))
            file.write(header.encode())


def disk_usage(path: Path) -> int:
    return (path / "slab").stat().st_blocks * 512


def test_a_new_slab(tmp_path: Path) -> None:
    slab = opened(tmp_path)
    assert list(slab.own) == slab.fresh == [0]
    assert slab.free == list(range(1, slab.num_segments))
    assert slab.record_bytes == RECORD_BYTES == header_bytes(CHUNK_TOKENS) + PAYLOAD_BYTES
    found = (tmp_path / "slab").stat()
    assert stat.S_IMODE(found.st_mode) == 0o600
    assert found.st_size == PAGE_BYTES + slab.num_segments * slab.segment_bytes
    assert disk_usage(tmp_path) >= found.st_size  # reserved, not only promised
    raw = (tmp_path / "slab").read_bytes()
    assert Root.decode(raw[:PAGE_BYTES], "slab") == Root(slab.segment_bytes)
    header = SegmentHeader.decode(raw[PAGE_BYTES : 2 * PAGE_BYTES], 0, "slab")
    assert header == slab.own[0]


@pytest.mark.parametrize("capacity_bytes", [capacity_for(1), 1 << 17, 10**6, 1 << 24])
def test_the_file_never_exceeds_the_capacity(tmp_path: Path, capacity_bytes: int) -> None:
    slab = opened(tmp_path, capacity_bytes=capacity_bytes)
    fill(tmp_path, slab, len(slab.free))
    assert disk_usage(tmp_path) + overhead_bytes(capacity_bytes) <= capacity_bytes
    wasted = capacity_bytes - slab.num_segments * slab.records_per_segment * RECORD_BYTES
    assert wasted < capacity_bytes // 3 or capacity_bytes <= 1 << 17


def test_records_lie_one_after_the_other() -> None:
    slab = Slab(Path("here"), PAGE_BYTES + 3 * RECORD_BYTES + 4096, SHAPE)
    assert slab.records_per_segment == 3
    first = PAGE_BYTES + PAGE_BYTES
    assert [slab.offset(i) for i in range(3)] == [first + i * RECORD_BYTES for i in range(3)]
    assert slab.offset(3) == first + slab.segment_bytes
    assert list(slab.records_of(1)) == [3, 4, 5]
    assert slab.where(2) == f"here, record 2 at byte {slab.offset(2)}"


def test_a_slab_of_the_same_shape_is_used_again(tmp_path: Path) -> None:
    first = opened(tmp_path)
    fill(tmp_path, first, 2)
    with (tmp_path / "slab").open("r+b") as file:
        file.seek(first.offset(2))
        file.write(b"a record")
    again = opened(tmp_path, replace(SHAPE, last_used=SHAPE.last_used + 9, label="new words"))
    assert again.fresh == []
    assert {n: h.generation for n, h in again.own.items()} == {
        n: h.generation for n, h in first.own.items()
    }
    assert again.own[0].last_used == SHAPE.last_used + 9
    assert again.own[0].label == "new words"
    assert (tmp_path / "slab").read_bytes()[first.offset(2) :][:8] == b"a record"


@pytest.mark.parametrize(
    "change",
    [{"chunk_tokens": 32}, {"payload_bytes": PAYLOAD_BYTES + PAGE_BYTES}],
)
def test_another_shape_of_one_namespace_is_not_ours(tmp_path: Path, change: dict[str, int]) -> None:
    first = opened(tmp_path, capacity_bytes=1 << 24)
    other = opened(tmp_path, replace(SHAPE, **change), 1 << 24)  # type: ignore[arg-type]
    assert other.fresh == list(other.own)
    assert first.own[0].generation not in {h.generation for h in other.own.values()}


def test_namespaces_live_side_by_side(tmp_path: Path) -> None:
    first = opened(tmp_path)
    fill(tmp_path, first, 3)
    other = opened(tmp_path, OTHER)
    assert len(other.own) == 1
    assert {h.number for h in other.foreign} == set(first.own)
    back = opened(tmp_path)
    assert sorted(back.own) == sorted(first.own)
    assert [h.label for h in back.foreign] == ["other"]


def test_free_segments_go_first_then_those_of_the_namespace_unused_for_longest(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    fill(tmp_path, opened(tmp_path), 2)
    fill(tmp_path, opened(tmp_path, OTHER), 2)
    third = opened(tmp_path, THIRD)
    free = len(third.free)
    fill(tmp_path, third, free)
    assert [h.label for h in third.foreign] == ["a test"] * 3 + ["other"] * 3
    fill(tmp_path, third, 3)
    assert [h.label for h in third.foreign] == ["other"] * 3
    assert "from a test, last used" in caplog.text
    again = opened(tmp_path, OTHER)
    assert len(again.own) == 3
    assert {h.label for h in again.foreign} == {"third"}
    fill(tmp_path, again, len(again.foreign))
    assert again.claim() is None


def test_a_smaller_capacity_is_enforced_and_the_oldest_namespace_gives_way(tmp_path: Path) -> None:
    small, large = 1 << 20, 1 << 22
    first = opened(tmp_path, capacity_bytes=large)
    fill(tmp_path, first, 20)
    other = opened(tmp_path, OTHER, large)
    fill(tmp_path, other, 9)
    again = opened(tmp_path, OTHER, small)
    assert disk_usage(tmp_path) <= small
    assert again.num_segments * again.segment_bytes <= small
    assert set(other.own) >= set(again.own)
    assert len(again.own) == min(10, again.num_segments)
    assert len(again.foreign) == again.num_segments - len(again.own)
    grown = opened(tmp_path, OTHER, large)
    assert set(grown.own) == set(again.own)
    assert disk_usage(tmp_path) <= large
    assert len(grown.free) > 20


def test_a_segment_that_was_given_up_is_free_when_the_capacity_grows_again(tmp_path: Path) -> None:
    first = opened(tmp_path, capacity_bytes=1 << 22)
    fill(tmp_path, first, 30)
    with (tmp_path / "slab").open("r+b") as file:
        for record in range(0, 30 * first.records_per_segment):
            file.seek(first.offset(record))
            file.write(b"old")
    opened(tmp_path, capacity_bytes=1 << 20)
    grown = opened(tmp_path, capacity_bytes=1 << 22)
    raw = (tmp_path / "slab").read_bytes()
    for number in grown.free:
        offset = grown.segment_offset(number)
        assert not raw[offset : offset + grown.segment_bytes].strip(b"\0")


def test_a_damaged_root_starts_anew(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    fill(tmp_path, opened(tmp_path), 2)
    with (tmp_path / "slab").open("r+b") as file:
        file.seek(33)
        file.write(b"\xff")
    again = opened(tmp_path)
    assert again.fresh == list(again.own) == [0]
    assert "starts with an empty NVMe tier" in caplog.text


def test_a_damaged_segment_header_costs_that_segment(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = opened(tmp_path)
    fill(tmp_path, first, 2)
    with (tmp_path / "slab").open("r+b") as file:
        file.seek(first.segment_offset(1) + 70)
        file.write(b"\xff")
    again = opened(tmp_path)
    assert sorted(again.own) == [0, 2]
    assert 1 in again.free
    assert "takes a segment for free" in caplog.text


@pytest.mark.parametrize("content", [b"", b"short", bytes(PAGE_BYTES), b"x" * 3 * PAGE_BYTES])
def test_a_file_that_is_no_slab_becomes_one(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "slab").write_bytes(content)
    assert opened(tmp_path).fresh
    assert not opened(tmp_path).fresh


def test_a_truncated_file_keeps_what_is_left(tmp_path: Path) -> None:
    first = opened(tmp_path)
    fill(tmp_path, first, 3)
    os.truncate(tmp_path / "slab", first.segment_offset(2) + 100)
    again = opened(tmp_path)
    assert sorted(again.own) == [0, 1]
    assert again.num_segments == first.num_segments


def test_segments_too_small_for_the_records_start_anew(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    opened(tmp_path, capacity_bytes=1 << 22)
    large = replace(OTHER, payload_bytes=1 << 18)
    other = opened(tmp_path, large, 1 << 22)
    assert other.fresh
    assert other.foreign == []
    assert "does not go with records" in caplog.text


def test_a_capacity_of_one_segment_keeps_it_and_less_begins_anew(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As the runbook says: about 1/64 of what the file was made with."""
    large = 1 << 24
    first = opened(tmp_path, capacity_bytes=large)
    sizes = range(first.segment_bytes, large, PAGE_BYTES)
    least = next(size for size in sizes if num_segments_for(size, first.segment_bytes))
    assert large // 80 < least < large // 50
    assert list(opened(tmp_path, capacity_bytes=least).own) == [0]
    assert "starts with an empty NVMe tier" not in caplog.text
    assert opened(tmp_path, capacity_bytes=least - PAGE_BYTES).fresh
    assert "does not go with records" in caplog.text


def test_a_capacity_below_one_record_is_refused(tmp_path: Path) -> None:
    least = capacity_for(1)
    with pytest.raises(ConfigError, match=r"nvme\.capacity is .*lower chunk_tokens"):
        opened(tmp_path, capacity_bytes=least - 2 * PAGE_BYTES)
    assert opened(tmp_path, capacity_bytes=least).num_segments == 1


def test_a_reset_changes_every_generation_and_keeps_what_follows_from_the_next_start(
    tmp_path: Path,
) -> None:
    slab = opened(tmp_path)
    fill(tmp_path, slab, 2)
    before = {h.generation for h in slab.own.values()}
    headers = slab.renew()
    claimed = slab.claim()
    assert claimed is not None
    on_disk = {h.generation for h in (*headers, claimed)}
    in_memory = {h.generation for h in slab.own.values()}
    assert len(before | on_disk | in_memory) == 3 + 4 + 4


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "slab").symlink_to(tmp_path / "victim")
    with pytest.raises(ConfigError, match=r"nvme\.path: .*slab is a link"):
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
    size = (tmp_path / "slab").stat().st_size
    assert size == PAGE_BYTES + slab.num_segments * slab.segment_bytes
    assert "cannot reserve space" in caplog.text


@pytest.mark.parametrize("is_new", [True, False])
def test_a_disk_that_is_too_small_is_a_config_error_and_stays_as_full_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_new: bool
) -> None:
    """fallocate() takes what there is before it fails: that has to be given back."""
    if not is_new:
        opened(tmp_path)
    before = PAGE_BYTES if is_new else (tmp_path / "slab").stat().st_size
    fail_fallocate(monkeypatch, errno.ENOSPC)
    with pytest.raises(ConfigError, match=r"nvme\.capacity .*No space left.*ask for less"):
        opened(tmp_path, capacity_bytes=1 << 24)
    assert (tmp_path / "slab").stat().st_size <= before
