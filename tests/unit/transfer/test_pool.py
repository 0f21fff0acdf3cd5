# SPDX-License-Identifier: Apache-2.0
"""The shared region: all members see the same bytes, and no exit leaves its name behind.

It is long since all members and exits are tried over one kind of region.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from attnstore_vllm.errors import ConfigError
from attnstore_vllm.preflight import SHM_DIR
from attnstore_vllm.transfer import pool as pool_module
from attnstore_vllm.transfer import pool_files
from attnstore_vllm.transfer.pool import (
    RANKS_MAX,
    REFUSAL,
    SLOTS_AT,
    SharedPool,
    peek,
    pool_name,
)
from attnstore_vllm.transfer.region import sweep

NUM_SLOTS, SLOT_BYTES = 3, 8192
OPEN_AND_WAIT = """
import os, sys
from attnstore_vllm.transfer import pool_files
from attnstore_vllm.transfer.pool import SharedPool
pool_files.FILE_MIN_BYTES = int(os.environ["FILE_MIN_BYTES"])
name, num_slots, slot_bytes, num_ranks, member = sys.argv[1], *map(int, sys.argv[2:])
pool = SharedPool(name, num_slots, slot_bytes, num_ranks=num_ranks, member=member)
pool.slot(member)[:] = bytes([65 + member]) * slot_bytes
pool.publish(member, {"rank": member})
print("open", flush=True)
sys.stdin.readline()
print(bytes(pool.slot(2)[:1]).decode(), flush=True)
sys.stdin.read()
"""

Names = Callable[[], str]


@pytest.fixture(autouse=True, params=[1 << 30, SLOT_BYTES], ids=["one file", "several"])
def file_min_bytes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Each test runs with a pool of one file, and with one that has a file a slot."""
    monkeypatch.setattr(pool_files, "FILE_MIN_BYTES", request.param)
    monkeypatch.setenv("FILE_MIN_BYTES", str(request.param))
    return int(request.param)


def left(name: str) -> list[str]:
    """The files of this region that still have their names."""
    return sorted(path.name for path in SHM_DIR.glob(f"{name}*"))


@pytest.fixture
def new_name() -> Iterator[Names]:
    """Gives names that no one else uses, and removes what a failed test left."""
    given: list[str] = []

    def new() -> str:
        given.append(f"attnstore-test-{secrets.token_hex(8)}")
        return given[-1]

    yield new
    for name in given:
        for file in left(name):
            (SHM_DIR / file).unlink(missing_ok=True)


def member(name: str, number: int, num_ranks: int = 1, num_slots: int = NUM_SLOTS) -> SharedPool:
    return SharedPool(name, num_slots, SLOT_BYTES, num_ranks=num_ranks, member=number)


@contextmanager
def member_in_a_process(
    name: str, number: int, num_ranks: int = 1
) -> Iterator[subprocess.Popen[str]]:
    arguments = (name, NUM_SLOTS, SLOT_BYTES, num_ranks, number)
    with subprocess.Popen(
        [sys.executable, "-c", OPEN_AND_WAIT, *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "open\n"
        yield child
        child.kill()


def test_members_in_two_processes_share_the_bytes(new_name: Names) -> None:
    name = new_name()
    with member_in_a_process(name, 0) as child:
        assert (SHM_DIR / name).exists()
        pool = member(name, 1)
        assert not left(name), "the name goes with the last that joins"
        assert bytes(pool.slot(0)) == b"A" * SLOT_BYTES
        assert pool.description(0) == {"rank": 0}
        pool.slot(2)[:1] = b"z"
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdin.write("\n")
        child.stdin.flush()
        assert child.stdout.readline() == "z\n"
        child.kill()
        child.wait()
        assert bytes(pool.slot(0)) == b"A" * SLOT_BYTES, "the bytes outlive the other member"
        pool.close()


def test_the_name_stays_until_every_rank_has_joined(new_name: Names) -> None:
    name = new_name()
    pools = []
    for number in (2, 0, 3):
        pools.append(member(name, number, num_ranks=3))
        assert (SHM_DIR / name).exists()
    pools.append(member(name, 1, num_ranks=3))
    assert not left(name)
    for pool in pools:
        pool.close()


def test_the_region_is_for_its_owner_only_and_allocated_whole(new_name: Names) -> None:
    name = new_name()
    pool = member(name, 0)
    for path in pool.paths:
        found = path.stat()
        assert stat.S_IMODE(found.st_mode) == 0o600
        assert found.st_blocks * 512 >= found.st_size > 0
    assert pool.paths[0].name == name
    assert len(left(name)) == len(pool.paths)
    pool.close()


def test_slots_do_not_overlap(new_name: Names) -> None:
    name = new_name()
    pool, other = member(name, 0), member(name, 1)
    for slot in range(NUM_SLOTS):
        pool.slot(slot)[:] = bytes([slot + 1]) * SLOT_BYTES
    pool.publish(0, {"dtype": "bfloat16"})
    for slot in range(NUM_SLOTS):
        assert bytes(other.slot(slot)) == bytes([slot + 1]) * SLOT_BYTES
    for slot in (-1, NUM_SLOTS):
        with pytest.raises(AssertionError):
            pool.slot(slot)
    pool.close()
    other.close()


def test_a_rank_that_has_not_published(new_name: Names) -> None:
    pool = member(new_name(), 0, num_ranks=2)
    assert pool.description(0) is None
    pool.publish(1, {"shape": [2, 3]})
    assert pool.description(0) is None
    assert pool.description(1) == {"shape": [2, 3]}
    pool.close()


def test_who_is_no_member_yet_reads_what_is_published(new_name: Names) -> None:
    """The scheduler side of a pipeline: how large slots are is in it."""
    name = new_name()
    assert peek(name, 0) is None, "there is no region"
    (SHM_DIR / name).touch(mode=0o600)
    assert peek(name, 0) is None, "its creator has not come to it"
    (SHM_DIR / name).unlink()
    pool = member(name, 0, num_ranks=2)
    assert peek(name, 0) is None
    pool.publish(0, {"stages": [[[4096, 3]]]})
    assert peek(name, 0) == {"stages": [[[4096, 3]]]} == pool.description(0)
    assert peek(name, 1) is None
    pool.refuse(1, "no")
    assert peek(name, 1) == {REFUSAL: "no"}
    others = [member(name, number, num_ranks=2) for number in (1, 2)]
    assert peek(name, 0) is None, "all have come, and its name is gone"
    for one in (pool, *others):
        one.close()


def test_a_description_without_room_is_a_refusal(new_name: Names) -> None:
    pool = member(new_name(), 0, num_ranks=2)
    pool.publish(0, {"much": "x" * 10_000})
    assert list(pool.description(0) or ()) == [REFUSAL]
    pool.refuse(1, "\u00e9" * 10_000)
    assert set((pool.description(1) or {})[REFUSAL]) == {"\u00e9"}
    pool.close()


@pytest.mark.parametrize("num_ranks", [0, RANKS_MAX + 1])
def test_more_ranks_than_there_are_pages_for(num_ranks: int, new_name: Names) -> None:
    with pytest.raises(AssertionError):
        member(new_name(), 0, num_ranks=num_ranks)


def test_more_than_the_machine_has_is_a_config_error_and_leaves_nothing(new_name: Names) -> None:
    name = new_name()
    stat_before = os.statvfs(SHM_DIR)
    with pytest.raises(ConfigError, match=r"dram asks for .* which the machine does not have"):
        member(name, 0, num_slots=1 << 40)
    assert not left(name)
    # Others use shared memory too; a petabyte that was not given back would show all the same.
    freed = os.statvfs(SHM_DIR).f_bfree
    assert freed * stat_before.f_frsize > (stat_before.f_bfree * stat_before.f_frsize) // 2


def test_closing_twice_or_while_viewed_is_harmless(new_name: Names) -> None:
    name = new_name()
    pool, other = member(name, 0), member(name, 1)
    view = pool.slot(0)
    pool.close()
    pool.close()
    view[:1] = b"x"  # still mapped: a transfer that is late finds memory
    assert bytes(other.slot(0)[:1]) == b"x"
    other.close()


def test_members_that_disagree_about_the_size(new_name: Names) -> None:
    name = new_name()
    pool = member(name, 0)
    with pytest.raises(ConfigError, match="this process expects"):
        member(name, 1, num_slots=NUM_SLOTS + 1)
    pool.close()


def test_the_creator_takes_the_name_away_and_nobody_else(new_name: Names) -> None:
    name = new_name()
    pool, other = member(name, 0, num_ranks=2), member(name, 1, num_ranks=2)
    other.close()
    assert (SHM_DIR / name).exists(), "a start that still goes on lost its region"
    pool.close()
    assert not left(name)
    pool = member(name, 0)
    del pool  # as by an exception in what was to hold it
    assert not left(name)


def test_a_start_does_not_join_the_region_of_another(new_name: Names) -> None:
    name = new_name()
    pool = member(name, 0)
    with pytest.raises(ConfigError, match=r"another start has the engine_id .* own"):
        member(name, 0)
    last = member(name, 1)
    pool.slot(0)[:1] = b"x"
    assert bytes(last.slot(0)[:1]) == b"x"
    pool.close()
    last.close()


def test_names_tell_engines_and_directories_apart() -> None:
    names = {
        pool_name("a", Path("/x")),
        pool_name("a", Path("/y")),
        pool_name("b", Path("/x")),
        pool_name("a\0/x", Path("/y")),
    }
    assert len(names) == 4
    assert all(name.startswith("attnstore-") and "/" not in name for name in names)


# ---- after a start that was killed -----------------------------------------------------


def test_the_next_start_removes_what_a_killed_one_left(new_name: Names) -> None:
    killed, started = new_name(), new_name()
    with member_in_a_process(killed, 0) as child:
        assert killed not in sweep(SHM_DIR), "a living one was swept"
        child.kill()
        child.wait()
    pool = member(started, 0)
    assert not left(killed)
    pool.close()


def test_a_start_under_the_name_of_a_killed_one_begins_anew(new_name: Names) -> None:
    """An engine_id that the user has chosen is the same at the next start."""
    name = new_name()
    with member_in_a_process(name, 0, num_ranks=2) as child:
        child.kill()
        child.wait()
    assert (SHM_DIR / name).exists()
    first = member(name, 0, num_ranks=2)
    assert first.description(0) is None, "a region of a dead process was taken for this start's"
    assert bytes(first.slot(0)) == bytes(SLOT_BYTES)
    others = [member(name, number, num_ranks=2) for number in (1, 2)]
    assert not left(name)
    first.slot(1)[:1] = b"x"
    assert all(bytes(other.slot(1)[:1]) == b"x" for other in others)
    for pool in (first, *others):
        pool.close()


def test_a_dead_region_of_another_size_is_no_obstacle(new_name: Names) -> None:
    name = new_name()
    with member_in_a_process(name, 0) as child:
        child.kill()
        child.wait()
    pool = member(name, 0, num_slots=NUM_SLOTS + 1)
    pool.close()


@pytest.mark.parametrize("attempt", range(4))
def test_members_that_meet_at_a_dead_region_agree_on_a_new_one(
    new_name: Names, attempt: int
) -> None:
    name = new_name()
    with member_in_a_process(name, 0, num_ranks=3) as child:
        child.kill()
        child.wait()
    command = [sys.executable, "-c", OPEN_AND_WAIT, name, str(NUM_SLOTS), str(SLOT_BYTES), "3"]
    children = [
        subprocess.Popen(
            [*command, str(number)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for number in range(3)
    ]
    for child in children:
        assert child.stdout is not None
        assert child.stdout.readline() == "open\n"
    last = member(name, 3, num_ranks=3)
    assert [bytes(last.slot(slot)[:1]) for slot in range(3)] == [b"A", b"B", b"C"]
    assert not left(name)
    last.close()
    for child in children:
        child.communicate()


def test_a_start_killed_while_it_allocated_does_not_block_the_next(
    new_name: Names, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_module, "OPEN_DEADLINE_S", 5.0)
    name = new_name()
    (SHM_DIR / name).write_bytes(b"")  # created, and the creator is gone
    pools = [member(name, number) for number in (0, 1)]
    assert not left(name)
    for pool in pools:
        pool.close()


def test_a_creator_that_never_gets_ready_is_not_waited_for_for_ever(
    new_name: Names, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_module, "OPEN_DEADLINE_S", 0.1)
    name = new_name()
    with (SHM_DIR / name).open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_SH)  # a living creator that hangs
        with pytest.raises(ConfigError, match="was not made ready"):
            member(name, 0)


def test_a_larger_pool_may_take_longer(new_name: Names, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "OPEN_DEADLINE_S", 0.0)
    monkeypatch.setattr(pool_module, "OPEN_DEADLINE_S_A_GIB", 1000.0)
    name = new_name()
    with (SHM_DIR / name).open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        with pytest.raises(ConfigError, match="within 1 s"):
            member(name, 0)  # of a thousandth of a GiB


# ---- files ------------------------------------------------------------------------------


@pytest.mark.parametrize("slot_bytes", [4096, 20480, 1 << 20])
@pytest.mark.parametrize("num_slots", [1, 5, 40])
@pytest.mark.parametrize("num_parts", [1, 3])
def test_files_hold_whole_slots_and_huge_pages_fit(
    num_parts: int, num_slots: int, slot_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_files, "FILE_MIN_BYTES", slot_bytes)
    found = pool_files.cut(SLOTS_AT, num_slots, slot_bytes, num_parts)
    assert len(found) == num_parts * min(num_slots, pool_files.FILES_MAX // num_parts)
    for part in range(num_parts):
        control, *pieces = pool_files.stretches_of(found, SLOTS_AT, part)
        assert control == (0, 0, SLOTS_AT), "whose part it is, the control page is the first file's"
        assert sum(piece.num_bytes for piece in pieces) == num_slots * slot_bytes
        at = SLOTS_AT
        for piece in pieces:
            assert found[piece.file].part == part
            assert (at - SLOTS_AT) % slot_bytes == 0
            assert (at - piece.at) % pool_files.HUGE_BYTES == 0
            at += piece.num_bytes


def test_a_pool_below_two_gib_is_one_file(new_name: Names, file_min_bytes: int) -> None:
    if file_min_bytes == SLOT_BYTES:
        pytest.skip("the other size")
    assert len(pool_files.cut(SLOTS_AT, (2 << 30) // SLOT_BYTES - 1, SLOT_BYTES)) == 1
    assert len(pool_files.cut(SLOTS_AT, (2 << 30) // SLOT_BYTES, SLOT_BYTES)) == 2


def test_where_files_begin_is_told_for_who_locks_them(new_name: Names, file_min_bytes: int) -> None:
    pool = member(new_name(), 0)
    assert pool.borders() == ([1, 2] if file_min_bytes == SLOT_BYTES else [])
    pool.close()


def test_what_a_killed_start_left_of_a_region_is_no_obstacle(
    new_name: Names, file_min_bytes: int
) -> None:
    """A kill between two names: the later files are there, the first is not, or the reverse."""
    name = new_name()
    (SHM_DIR / f"{name}.1").write_bytes(b"old")
    first = member(name, 0)
    others = [member(name, 1)]
    first.slot(1)[:1] = b"x"
    assert bytes(others[0].slot(1)[:1]) == b"x"
    for pool in (first, *others):
        pool.close()


def test_a_living_process_that_holds_a_later_file_is_said(
    new_name: Names, file_min_bytes: int
) -> None:
    if file_min_bytes != SLOT_BYTES:
        pytest.skip("one file")
    name = new_name()
    with (SHM_DIR / f"{name}.1").open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        with pytest.raises(ConfigError, match="another start has the engine_id"):
            member(name, 0)
        assert left(name) == [f"{name}.1"]


def test_views_stay_mapped_and_the_last_one_unmaps(new_name: Names) -> None:
    pool = member(new_name(), 0)
    view, address = pool.slot(NUM_SLOTS - 1), pool.address

    def is_mapped() -> bool:
        lines = Path("/proc/self/maps").read_text().splitlines()
        ranges = (line.split()[0].split("-") for line in lines)
        return any(int(a, 16) <= address < int(b, 16) for a, b in ranges)

    pool.close()
    view[:1] = b"x"
    assert is_mapped()
    del view
    assert not is_mapped()
