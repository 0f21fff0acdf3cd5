# SPDX-License-Identifier: Apache-2.0
"""What another user, or a link, a pipe or a forged page, has put in the place of a file of ours."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
import zlib
from contextlib import suppress
from pathlib import Path
from secrets import token_hex

import pytest

from attnstore_vllm.errors import ConfigError, DeviceError, MachineError
from attnstore_vllm.identity.weight_files import Memo, Stamp
from attnstore_vllm.io.choose import open_device
from attnstore_vllm.preflight import LOCK_NAME, SHM_DIR, check_machine, lock_directory
from attnstore_vllm.tiers.nvme.slab import open_slab
from attnstore_vllm.tiers.peers.generation import OLD_FILE_NAME as PEERS_OLD_NAME
from attnstore_vllm.tiers.peers.generation import Generation
from attnstore_vllm.tiers.peers.generation import file_name as peers_name
from attnstore_vllm.tiers.shared import shared_generation as generations
from attnstore_vllm.tiers.shared.helper import Helper
from attnstore_vllm.tiers.shared.lanes import Lanes
from attnstore_vllm.transfer.board import BOARD_BYTES, Board, BoardReader, board_path
from attnstore_vllm.transfer.pool import SharedPool
from tests.helpers import SHAPE, capacity_for, give_away
from tests.unit.test_preflight import settings

Fixture = pytest.MonkeyPatch
NAMESPACE = bytes(32)
GENERATION, SHARED_NAME = peers_name(NAMESPACE), generations.file_name(NAMESPACE)
OLD_NAMES = [PEERS_OLD_NAME, generations.OLD_FILE_NAME]


def pool_of(name: str, member: int) -> SharedPool:
    return SharedPool(name, 3, 8192, num_ranks=1, member=member)


def test_a_pool_of_another_user_is_not_joined(monkeypatch: Fixture) -> None:
    """Its maker would read all KV, and write what is served."""
    name = f"attnstore-test-{token_hex(8)}"
    theirs = pool_of(name, 0)
    try:
        user = give_away(SHM_DIR / name, monkeypatch)
        with pytest.raises(ConfigError, match=f"{name} belongs to user {user}.*engine_id"):
            pool_of(name, 1)
        with pytest.raises(ConfigError, match=f"{name} belongs to user {user}"):
            pool_of(name, 0)
        assert (SHM_DIR / name).exists()
    finally:
        theirs.close()
        (SHM_DIR / name).unlink(missing_ok=True)


@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o702])
def test_a_directory_that_others_may_write_to_is_refused_with_its_mode(
    tmp_path: Path, mode: int
) -> None:
    directory = tmp_path / "kv"
    directory.mkdir()
    directory.chmod(mode)
    said = rf"nvme.path is .*kv.* has mode {mode:04o}.*run: chmod go-w"
    with pytest.raises(MachineError, match=said):
        check_machine(settings(directory))
    with pytest.raises(MachineError, match=said):
        os.close(lock_directory(directory))
    with pytest.raises(MachineError, match=said.replace("nvme", "trace")):
        check_machine(settings(tmp_path / "other", trace={"path": str(directory)}))
    directory.chmod(0o700)
    check_machine(settings(directory))


def test_a_directory_of_another_user_is_refused(tmp_path: Path, monkeypatch: Fixture) -> None:
    directory = tmp_path / "kv"
    directory.mkdir()
    user = give_away(directory, monkeypatch)
    with pytest.raises(MachineError, match=f"belongs to user {user}"):
        check_machine(settings(directory))
    with pytest.raises(MachineError, match=f"belongs to user {user}"):
        os.close(lock_directory(directory))


def test_engines_directories_are_made_for_their_user_alone(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        os.close(lock_directory(tmp_path / "kv" / "dp0"))
    finally:
        os.umask(before)
    for made in (tmp_path / "kv", tmp_path / "kv" / "dp0"):
        assert made.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("what", ["another user's", "writable", "link", "pipe"])
@pytest.mark.parametrize("name", ["slab", "lock"])
def test_a_slab_or_a_lock_that_is_not_ours(
    tmp_path: Path, monkeypatch: Fixture, name: str, what: str
) -> None:
    place = tmp_path / name
    if what == "link":
        place.symlink_to(tmp_path / "victim")
    elif what == "pipe":
        os.mkfifo(place)
    else:
        place.write_bytes(b"" if name == "lock" else bytes(1 << 16))
        if what == "writable":
            place.chmod(0o666)
        else:
            give_away(place, monkeypatch)
    with pytest.raises(MachineError, match=str(place)):
        lock_directory(tmp_path) if name == "lock" else open_slab(place, capacity_for(8), SHAPE)
    assert not (tmp_path / "victim").exists()
    if name == "slab":
        with pytest.raises(DeviceError, match=str(place)):
            open_device(place, 1, "aiofiles")
    else:
        with pytest.raises(MachineError, match=str(tmp_path)):
            check_machine(settings(tmp_path))


def test_generations_are_written_through_no_link(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    for name in (GENERATION, SHARED_NAME, f"{SHARED_NAME}.new"):
        (tmp_path / name).symlink_to(victim)
    Generation(tmp_path, tmp_path, NAMESPACE).advance()
    assert generations.load(tmp_path, NAMESPACE).must_renew, "what a link shows was taken for ours"
    generations.save(tmp_path, NAMESPACE, "{}")
    assert victim.read_text() == "precious"
    assert (tmp_path / SHARED_NAME).read_text() == "{}"


PIPES = """
import sys
from pathlib import Path
from attnstore_vllm.tiers.peers.generation import Generation
from attnstore_vllm.tiers.shared import shared_generation
where = Path(sys.argv[1])
Generation(where, where, bytes(32))
assert shared_generation.load(where, bytes(32)).must_renew
"""


@pytest.mark.parametrize("name", [GENERATION, SHARED_NAME, *OLD_NAMES])
def test_a_pipe_in_the_place_of_a_generation_hangs_no_start(tmp_path: Path, name: str) -> None:
    if name != generations.OLD_FILE_NAME:
        (tmp_path / SHARED_NAME).write_text("not ours")
    (tmp_path / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / name)
    command = [sys.executable, "-c", PIPES, str(tmp_path)]
    subprocess.run(command, check=True, timeout=30)


def test_generations_of_another_user(tmp_path: Path, monkeypatch: Fixture) -> None:
    own = Generation(tmp_path, tmp_path, NAMESPACE).value
    assert Generation(tmp_path, tmp_path, NAMESPACE).value == own
    mine = generations.GenerationId(bytes(16), 7)
    generations.save(tmp_path, NAMESPACE, generations.SharedGeneration(mine=mine).to_json())
    assert generations.load(tmp_path, NAMESPACE).mine == mine
    for name in (GENERATION, SHARED_NAME):
        give_away(tmp_path / name, monkeypatch)
    assert Generation(tmp_path, tmp_path, NAMESPACE).value != own, "it shares with who wrote that"
    found = generations.load(tmp_path, NAMESPACE)
    assert found.mine is None and found.must_renew


def test_digests_of_weights_that_another_user_wrote(tmp_path: Path, monkeypatch: Fixture) -> None:
    """Who says which weights the files have says whose KV is served."""
    stamp = Stamp(1, 2, 3, 4, 5)
    Memo(tmp_path).keep({stamp: bytes(32)})
    assert Memo(tmp_path).get(stamp) == bytes(32)
    give_away(tmp_path / "weights.json", monkeypatch)
    assert Memo(tmp_path).get(stamp) is None


def test_the_shared_child_imports_nothing_from_the_working_directory(
    tmp_path: Path, monkeypatch: Fixture
) -> None:
    marker = tmp_path / "ran"
    for name in ("json.py", "ctypes.py", "redis.py", "sitecustomize.py"):
        (tmp_path / name).write_text(f"open({str(marker)!r}, 'a').close()\nraise SystemExit\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend("")  # as in an engine that was started with python -c
    redis = {"url": "redis://127.0.0.1:1", "timeout_s": 0.2, "password": "secret"}
    helper = Helper({"prefix": "as1/", "redis": redis}, Lanes(4096, 2, 1))
    try:
        said = ""
        try:
            helper.start()
        except DeviceError as error:
            said = str(error)
    finally:
        helper.close()
    assert not marker.exists()
    assert "has ended" not in said, said


FORGED = {
    "no list": b"{}",
    "too few": b"[{}]",
    "text for a number": b'[{"chunks:written": "x"}, {}, {}]',
    "text for a gauge": b'[{}, {"held_bytes:dram": "x"}, {}]',
    "one for a pair": b'[{}, {"held_bytes:dram": [1]}, {}]',
    "no values": b'[{}, {}, {"nvme_read_seconds": 7}]',
    "text for a value": b'[{}, {}, {"nvme_read_seconds": [1, ["x"]]}]',
    "no JSON": b"\xff\xfe",
    "nested": b"[" * 60_000,
}


@pytest.mark.parametrize("text", FORGED.values(), ids=FORGED)
def test_a_forged_board_ends_no_reader(text: bytes) -> None:
    name = f"test-{token_hex(8)}"
    board, reader = Board(name), BoardReader((name,))
    with board_path(name).open("r+b") as file:
        file.write(struct.pack("<II", len(text), zlib.crc32(text)) + text)
    assert reader.take() is None
    assert reader.take() is None
    reader.close()
    with suppress(FileNotFoundError):
        board.close()


def test_a_board_of_another_user_is_not_read(
    monkeypatch: Fixture, caplog: pytest.LogCaptureFixture
) -> None:
    name = f"test-{token_hex(8)}"
    path, text = board_path(name), json.dumps([{"chunks:written": 7}, {}, {}]).encode()
    page = struct.pack("<II", len(text), zlib.crc32(text)) + text
    path.write_bytes(page.ljust(BOARD_BYTES, b"\0"))
    try:
        user = give_away(path, monkeypatch)
        reader = BoardReader((name,))
        assert reader.take() is None
        assert reader.take() is None
        assert caplog.text.count(f"belongs to user {user}") == 1
        with pytest.raises(OSError, match=f"belongs to user {user}"):
            Board(name)
        assert path.exists()
    finally:
        path.unlink(missing_ok=True)


def test_a_lock_says_its_owner_in_printable_text(tmp_path: Path) -> None:
    held = lock_directory(tmp_path)
    os.ftruncate(held, 0)
    os.pwrite(held, b"7 0 a\x1b[2Jb\n", 0)
    with pytest.raises(MachineError, match="process 7 on") as refused:
        lock_directory(tmp_path)
    assert "\x1b" not in str(refused.value)
    assert (tmp_path / LOCK_NAME).exists()
    os.close(held)
