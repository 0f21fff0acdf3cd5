# SPDX-License-Identifier: Apache-2.0
"""Weights are told by the content of their files, and by every byte of it before they are used."""

from __future__ import annotations

import json
import logging
import os
import shutil
import stat
import threading
import time
from pathlib import Path

import pytest

from attnstore_vllm import own_files
from attnstore_vllm.identity import file_times, weight_files
from attnstore_vllm.identity.file_times import file_system, keeps_changes
from attnstore_vllm.identity.weight_files import (
    ENTRIES_MAX,
    MEMO_NAME,
    Digest,
    Memo,
    Stamp,
    WeightFile,
    sampled,
)

SIZE = 3 << 20


def make(directory: Path, *, seed: int = 0, parts: int = 2) -> list[Path]:
    """Files of a model; not safetensors, whose header is looked at in a test of its own."""
    directory.mkdir(parents=True, exist_ok=True)
    files = [directory / f"model-{i}.safetensors" for i in range(parts)]
    for i, file in enumerate(files):
        block = bytes((j * (7 + i + seed)) % 251 for j in range(4096))
        file.write_bytes((64).to_bytes(8, "little") + block * (SIZE // 4096))
        os.utime(file, ns=(1, 1))
    return files


def settle(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of a test are young: as if they were not."""
    monkeypatch.setattr(weight_files, "SETTLED_S", -60.0)


def of(files: list[Path], model: str = "model") -> list[WeightFile]:
    return [WeightFile(file, file.name, model) for file in files]


def known(files: list[Path], directory: Path, **options: float) -> bytes:
    digest = Digest(of(files), Memo(directory), **options)  # type: ignore[arg-type]
    assert digest.wait(30) and digest.value is not None
    digest.close()
    return digest.value


def flip(file: Path, at: int) -> None:
    """Change one byte: size, inode and time of change in the name of the user stay."""
    before = file.stat()
    with file.open("r+b") as stream:
        stream.seek(at)
        byte = stream.read(1)
        stream.seek(at)
        stream.write(bytes([byte[0] ^ 1]))
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))


# ---- the look -------------------------------------------------------------------------------


def test_a_copy_is_the_same_model(tmp_path: Path) -> None:
    """At another path, with other times."""
    files = make(tmp_path / "one")
    (tmp_path / "two").mkdir()
    copies = [Path(shutil.copy(file, tmp_path / "two")) for file in reversed(files)]
    assert sampled(of(copies)) == sampled(of(files))
    assert known(copies, tmp_path) == known(files, tmp_path)


@pytest.mark.parametrize("seen", [True, False], ids=["samples differ", "samples agree"])
def test_names_that_are_changed_round_are_another_model(tmp_path: Path, seen: bool) -> None:
    """The index names one, and the file that is loaded last wins where a weight is in two."""
    one, two = files = make(tmp_path / "one")
    if not seen:
        shutil.copy(one, two)
        flip(two, SIZE // 3 + 5000)
    look, digest = sampled(of(files)), known(files, tmp_path)
    one.rename(tmp_path / "between")
    two.rename(one)
    (tmp_path / "between").rename(two)
    assert (sampled(of(files)) != look) == seen
    assert known(files, tmp_path) != digest


def test_a_model_and_its_drafts_that_change_places(tmp_path: Path) -> None:
    """Two of one configuration: each file has its name and its bytes, and is another model's."""
    one, two = (make(tmp_path / name, parts=1, seed=seed) for seed, name in enumerate("ab"))
    both = [of(one) + of(two, "drafts"), of(two) + of(one, "drafts")]
    assert sampled(both[0]) != sampled(both[1])
    digests = [Digest(files, Memo(tmp_path)) for files in both]
    assert all(digest.wait(30) for digest in digests)
    assert digests[0].value != digests[1].value


def test_a_file_of_two_models_and_a_link_have_the_names_that_vllm_sees(tmp_path: Path) -> None:
    """A link's name is its own: the hub's blobs are called by their digests, and by other names
    where they were copied."""
    (plain,) = make(tmp_path / "plain", parts=1)
    (tmp_path / "snapshot").mkdir()
    link = tmp_path / "snapshot" / plain.name
    (tmp_path / "blob").write_bytes(plain.read_bytes())
    link.symlink_to(Path("..") / "blob")
    found = []
    for file in (plain, link):
        digest = Digest(of([file]) + of([file], "drafts"), Memo(tmp_path))
        assert digest.wait(30) and digest.value is not None
        found.append((sampled(of([file])), digest.value))
    assert found[0] == found[1]


@pytest.mark.parametrize("name", ["a\udcff", 'a", "b', "a\n1"])
def test_a_name_is_never_taken_for_more(tmp_path: Path, name: str) -> None:
    """Names may hold any byte; none makes one file's facts another's."""
    (file,) = make(tmp_path / "model", parts=1)
    names = (name, name.encode("utf-8", "replace").decode())
    looks = {sampled([WeightFile(file, name), WeightFile(file, other)]) for other in names}
    assert len(looks) == len(set(names))


def test_the_look_reads_the_whole_header(tmp_path: Path) -> None:
    header = json.dumps({"a" * 300_000: 1}).encode()
    file = tmp_path / "model.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header + bytes(1 << 20))
    before = sampled(of([file]))
    flip(file, 200_001)
    assert sampled(of([file])) != before


def test_the_look_reads_little(tmp_path: Path) -> None:
    """Of a file of 40 GB, 128 KiB: else a start would wait for the disk."""
    file = tmp_path / "model.bin"
    with file.open("wb") as stream:
        stream.truncate(40 << 30)
    begun = time.monotonic()
    sampled(of([file]))
    assert time.monotonic() - begun < 1.0


def test_a_file_cut_short_and_a_header_that_lies(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    for content in (b"", b"\x01", (1 << 62).to_bytes(8, "little") + bytes(200_000)):
        file.write_bytes(content)
        assert len(sampled(of([file]))) == 64


# ---- the digest -----------------------------------------------------------------------------


@pytest.mark.parametrize("is_remembered", [False, True])
def test_one_byte_that_the_look_misses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_remembered: bool
) -> None:
    settle(monkeypatch)
    files = make(tmp_path / "model")
    look, digest = sampled(of(files)), known(files, tmp_path)
    if not is_remembered:
        (tmp_path / MEMO_NAME).unlink()
    flip(files[0], SIZE // 3 + 5000)
    assert sampled(of(files)) == look, "the planted fault is to be one that samples do not see"
    assert known(files, tmp_path) != digest


def test_what_is_remembered_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settle(monkeypatch)
    files = make(tmp_path / "model")
    digest = known(files, tmp_path)
    monkeypatch.setattr(Digest, "_digest", None)  # a call would raise
    again = Digest(of(files), Memo(tmp_path), budget_s=0)
    assert again.value == digest
    assert stat.S_IMODE((tmp_path / MEMO_NAME).stat().st_mode) == 0o600


def with_fixed_times(monkeypatch: pytest.MonkeyPatch, kind: int, flags: int = 0) -> None:
    """As a file system has them that was made on another machine: all files of one name and size
    look the same."""

    def fixed(found: os.stat_result) -> os.stat_result:
        return os.stat_result(
            (*found[:1], 42, 7, *found[3:7], 9, 9, 9),
            {"st_atime_ns": 9, "st_mtime_ns": 9, "st_ctime_ns": 9},
        )

    by_path, by_descriptor = Path.stat, os.fstat
    monkeypatch.setattr(Path, "stat", lambda self, **kw: fixed(by_path(self, **kw)))
    monkeypatch.setattr(os, "fstat", lambda fd: fixed(by_descriptor(fd)))
    monkeypatch.setattr(file_times, "file_system", lambda file: kind)
    real = os.statvfs

    def flagged(file: Path) -> os.statvfs_result:
        found = real(file)
        return os.statvfs_result((*found[:8], flags, *found[9:]))

    monkeypatch.setattr(os, "statvfs", flagged)


@pytest.mark.parametrize(
    ("kind", "flags"),
    [(0x73717368, os.ST_RDONLY), (0xE0F5E1E2, os.ST_RDONLY), (0x65735546, 0), (0x794C7630, 0),
     (0x6969, 0), (0xEF53, os.ST_RDONLY)],
    ids=["squashfs", "erofs", "FUSE", "overlayfs", "NFS", "an image of ext4"],
)  # fmt: skip
def test_two_models_of_one_stamp(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    kind: int,
    flags: int,
) -> None:
    """An image that was mounted in the place of another: times are what its maker chose."""
    settle(monkeypatch)
    (file,) = files = make(tmp_path / "model", parts=1)
    with_fixed_times(monkeypatch, kind, flags)
    look, digest = sampled(of(files)), known(files, tmp_path)
    with file.open("r+b") as stream:
        stream.seek(SIZE // 3 + 5000)
        stream.write(b"another")
    assert sampled(of(files)) == look, "the planted fault is to be one that samples do not see"
    assert known(files, tmp_path) != digest
    assert "reads the weights at each start" in caplog.text


@pytest.mark.parametrize(("kind", "flags"), [(0xEF53, 0), (0x58465342, 0), (0x01021994, 0)])
def test_a_local_disk_keeps_its_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: int, flags: int
) -> None:
    """Also where the time of change is that of the last write, as after a plain copy."""
    settle(monkeypatch)
    files = make(tmp_path / "model", parts=1)
    with_fixed_times(monkeypatch, kind, flags)
    known(files, tmp_path)
    assert Memo(tmp_path).get(Stamp.of(files[0].stat())) is not None


@pytest.mark.parametrize("kind", [0x794C7630, 0x6969, 0xEF53])
def test_a_time_that_no_user_sets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: int
) -> None:
    """Files that were renamed or whose mode was set, as downloads are: also where they cannot be
    written to."""
    monkeypatch.setattr(file_times, "file_system", lambda file: kind)
    (file,) = make(tmp_path / "model", parts=1)
    assert keeps_changes(file, file.stat())


def test_the_kind_of_a_file_system(tmp_path: Path) -> None:
    assert file_system(Path("/proc/self/status")) == 0x9FA0
    with pytest.raises(FileNotFoundError):
        file_system(tmp_path / "absent")


def test_a_young_file_is_not_remembered(tmp_path: Path) -> None:
    """It may change again within the same tick of the file system's clock."""
    known(make(tmp_path / "model"), tmp_path)
    assert not (tmp_path / MEMO_NAME).exists()


def test_in_the_background_at_a_bounded_rate(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    files = make(tmp_path / "model", parts=3)
    expected = known(files, tmp_path)
    begun = time.monotonic()
    with caplog.at_level(logging.INFO):
        digest = Digest(of(files), Memo(tmp_path), budget_s=0, bytes_per_s=20 << 20)
        assert digest.value is None and time.monotonic() - begun < 0.3
        assert digest.wait(30) and digest.value == expected
    assert time.monotonic() - begun > 0.3
    assert "idle until it has read the weights" in caplog.text
    assert "in use from now on" in caplog.text


@pytest.mark.parametrize("parts", [1, 5])
def test_it_is_known_before_the_disk_has_what_is_remembered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, parts: int
) -> None:
    """A busy disk takes seconds for a sync, and the store would be idle meanwhile."""
    settle(monkeypatch)
    files, may_end = make(tmp_path / "model", parts=parts), threading.Event()
    replace = own_files.replace_own

    def slow(path: Path, data: bytes, *, durable: bool) -> None:
        assert may_end.wait(30)
        replace(path, data, durable=durable)

    monkeypatch.setattr(weight_files, "replace_own", slow)
    digest = Digest(of(files), Memo(tmp_path), budget_s=5)
    is_known = digest.value is not None
    may_end.set()
    digest.close()
    assert is_known
    assert all(Memo(tmp_path).get(Stamp.of(file.stat())) for file in files)


def test_closing_ends_the_threads(tmp_path: Path) -> None:
    digest = Digest(of(make(tmp_path / "model")), Memo(tmp_path), budget_s=0, bytes_per_s=1024)
    digest.close()
    assert digest.value is None and digest.wait(1)
    assert not [t for t in threading.enumerate() if t.name.startswith("attnstore_weights")]


@pytest.mark.parametrize("what", ["changed", "replaced", "gone"])
def test_files_that_do_not_stay(
    tmp_path: Path, what: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody can say what vLLM has read: nothing is known, and one line says so."""
    files = make(tmp_path / "model")
    time.sleep(0.05)  # a tick of the file system's clock
    pace, is_first = Digest._pace, threading.Lock()

    def in_between(digest: Digest, count: int) -> None:
        if is_first.acquire(blocking=False):
            if what == "changed":
                flip(files[0], 5)
            elif what == "gone":
                files[0].unlink()
            else:
                shutil.copy(files[0], tmp_path / "other")
                (tmp_path / "other").replace(files[0])
        pace(digest, count)

    monkeypatch.setattr(Digest, "_pace", in_between)
    digest = Digest(of(files), Memo(tmp_path))
    assert digest.wait(30) and digest.value is None
    assert caplog.text.count("the weights cannot be told") == 1
    digest.close()


def test_files_that_are_not_there(tmp_path: Path) -> None:
    digest = Digest(of([tmp_path / "nothing"]), Memo(tmp_path))
    assert digest.wait(0) and digest.value is None


# ---- what is remembered ---------------------------------------------------------------------


@pytest.mark.parametrize(
    "damage",
    [b"", b"\0" * 100, b"cut", b"{}", b"[" * 100_000, b"flip", b"link", b"pipe"],
    ids=["empty", "zeros", "cut", "no checksum", "deep", "flip", "link", "pipe"],
)
def test_a_damaged_memo_is_an_empty_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: bytes
) -> None:
    settle(monkeypatch)
    files = make(tmp_path / "model")
    digest = known(files, tmp_path)
    memo = tmp_path / MEMO_NAME
    good = memo.read_bytes()
    if damage == b"cut":
        memo.write_bytes(good[:-40])
    elif damage == b"flip":
        flip(memo, len(good) - 10)
    elif damage == b"link":
        memo.rename(tmp_path / "elsewhere")
        memo.symlink_to(tmp_path / "elsewhere")
    elif damage == b"pipe":
        memo.unlink()
        os.mkfifo(memo)
    else:
        memo.write_bytes(damage)
    assert Memo(tmp_path).get(Stamp.of(files[0].stat())) is None
    assert known(files, tmp_path) == digest
    assert Memo(tmp_path).get(Stamp.of(files[0].stat())) is not None, "written anew"


def test_a_directory_that_refuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    settle(monkeypatch)
    files = make(tmp_path / "model")
    assert known(files, tmp_path / "not there")
    assert "cannot remember" in caplog.text


def test_the_memo_is_bounded(tmp_path: Path) -> None:
    memo = Memo(tmp_path)
    for begin in range(0, 2 * ENTRIES_MAX, 256):
        memo.keep({Stamp(1, begin + i, 1, 1, 1): bytes(32) for i in range(256)})
    again = Memo(tmp_path)
    assert again.get(Stamp(1, 2 * ENTRIES_MAX - 1, 1, 1, 1)) == bytes(32)
    assert again.get(Stamp(1, 0, 1, 1, 1)) is None
    assert len(again._digests) == ENTRIES_MAX
    assert (tmp_path / MEMO_NAME).stat().st_size < 200_000
