# SPDX-License-Identifier: Apache-2.0
"""A store of a model whose layers all have windows: a hit needs the last chunks before its end, and
no others.

Chunks have 16 tokens, blocks 4, and the window needs the 23 tokens before the next.
"""

from __future__ import annotations

import pytest

from attnstore_lab.testing.devices import MemoryDevice
from attnstore_vllm.connector.groups import check_chunks
from attnstore_vllm.errors import UnsupportedError
from attnstore_vllm.index.chunk import State
from attnstore_vllm.index.keys import SequenceKeys
from attnstore_vllm.index.prefix import Piece
from attnstore_vllm.index.sections import Need, Reach
from attnstore_vllm.policy.visits import Terms
from attnstore_vllm.scheduler.offer import has_all, still_coming
from attnstore_vllm.store.lookup import Lookup
from attnstore_vllm.transfer.geometry import Geometry, Group
from attnstore_vllm.types import DRAM, NVME
from tests.helpers import (
    CHUNK_TOKENS,
    Rig,
    Rigs,
    conversation,
    lookup_of,
    names_of,
    payload_of,
    push_out_of_dram,
    sequence_of,
)

NEEDS = (Need(0, Reach.WINDOW, 24, 4),)
LENGTH = 88


def keys(length: int = LENGTH) -> SequenceKeys:
    return sequence_of(conversation(1, length))


def left(open_rig: Rigs, *lost: int, **options: object) -> tuple[Rig, MemoryDevice]:
    """A store in which a conversation is, but for these chunks."""
    rig, device = open_rig(needs=NEEDS, **options)
    rig.put_all(keys())
    device.settle()
    names = names_of(keys())
    rig.store.drop([rig.chunk(names[number]) for number in lost])
    return rig, device


def find(rig: Rig, start: int = 0, stop: int = LENGTH) -> list[Piece]:
    return rig.store.find(Lookup(keys()), start, stop)


def hold(rig: Rig, start: int = 0, stop: int = LENGTH) -> list[Piece]:
    held = rig.store.hold_ready(find(rig, start, stop), keys(), stop, start)
    for piece in held:
        name, slot = piece.chunk.name, piece.chunk.dram.slot
        assert bytes(rig.pool.slot(slot)) == payload_of(name)
    rig.store.release(piece.chunk for piece in held)
    return held


def runs(pieces: list[Piece]) -> list[tuple[int, int]]:
    return [(piece.start, piece.stop) for piece in pieces]


def test_what_is_behind_the_window_is_not_needed(open_rig: Rigs) -> None:
    rig, _ = left(open_rig, 0, 1, 2)
    assert runs(find(rig)) == runs(hold(rig)) == [(64, 80), (80, 88)]
    assert rig.store.tiers(find(rig), 0) == {DRAM: LENGTH}


def test_a_hit_ends_before_a_gap_in_its_window(open_rig: Rigs) -> None:
    """The chunks before the gap have a window of their own."""
    rig, _ = left(open_rig, 0, 4)
    assert runs(hold(rig)) == [(40, 48), (48, 64)]


def test_without_a_whole_window_there_is_no_hit(open_rig: Rigs) -> None:
    rig, _ = left(open_rig, 0, 2, 4)
    assert find(rig) == hold(rig) == []


def test_what_is_in_hbm_is_not_needed(open_rig: Rigs) -> None:
    rig, _ = left(open_rig, 0, 1, 2, 3, 4)
    assert runs(hold(rig, 80)) == [(80, 88)]
    assert hold(rig, 76) == []


def test_a_branch_is_served_where_its_window_is(open_rig: Rigs) -> None:
    rig, _ = left(open_rig)
    branch = lookup_of(conversation(1)[:39] + conversation(2))
    assert runs(rig.store.find(branch, 0, 79)) == [(12, 16), (16, 32), (32, 36)]
    rig.store.drop([rig.chunk(names_of(keys())[0])])
    branch = lookup_of(conversation(1)[:39] + conversation(2))
    assert rig.store.find(branch, 0, 79) == []
    assert branch.spine_stop == 36, "where it parts is known, be the window there or not"


def test_nvme_and_a_restart(open_rig: Rigs) -> None:
    rig, device = left(open_rig, 0, 1)
    push_out_of_dram(rig, device, rig.dram_slots)
    pieces = find(rig)
    assert runs(pieces) == [(64, 80), (80, 88)]
    assert rig.store.tiers(pieces, 0) == {NVME: LENGTH}
    device.settle()
    assert runs(hold(rig)) == [(64, 80), (80, 88)]
    rig.close()
    again, device = open_rig(image=bytes(device.image), needs=NEEDS)
    find(again)
    device.settle()
    assert runs(hold(again)) == [(64, 80), (80, 88)]


def test_a_window_that_has_come_in_part_backs_nothing(open_rig: Rigs) -> None:
    """Its last chunk on the disk: a shorter hit needs tokens before the others."""
    rig, device = left(open_rig, 0, 1, 2, 3)
    push_out_of_dram(rig, device, rig.dram_slots)
    device.hold()
    pieces = find(rig)
    device.step()
    device.settle()
    assert [piece.chunk.dram.state for piece in pieces] == [State.READY, State.READING]
    assert rig.store.hold_ready(pieces, keys(), LENGTH, 0) == []
    assert runs(still_coming([], pieces, 0, walks=True)) == [(64, 0), (80, LENGTH)]
    device.release()
    device.settle()
    held = rig.store.hold_ready(pieces, keys(), LENGTH, 0)
    assert has_all(held, pieces)
    rig.store.release(piece.chunk for piece in held)


def test_what_is_ready_is_held_though_a_better_chunk_is_not(open_rig: Rigs) -> None:
    """Else the request waits for its deadline: all that was found has come, and nothing is read.

    On NVMe alone is a chunk that goes farther, of which the second group has nothing.
    """
    needs = (*NEEDS, Need(1, Reach.WINDOW, 6, 4))
    rig, device = open_rig(needs=needs)
    begin = conversation(1, 28)
    backed, farther = (sequence_of([*begin[:n], *conversation(n, 32 - n)]) for n in (20, 28))
    for keys_of in (backed, backed.section(1, 0)):
        rig.put(keys_of.name(0, bytes(32)))
        rig.put(keys_of.name(1, bytes(32)))
    rig.put(farther.name(1, bytes(32)))
    device.settle()
    rig.store.residency.leave_dram(rig.chunk(farther.name(1, bytes(32))))
    wanted = sequence_of([*begin, *conversation(9, 20)])
    pieces = rig.store.find(Lookup(wanted), 0, 41)
    assert runs(pieces) == [(0, 16), (16, 20), (12, 16), (16, 20)]
    assert all(piece.chunk.dram.state is State.READY for piece in pieces)
    held = rig.store.hold_ready(pieces, wanted, 41, 0)
    rig.store.release(piece.chunk for piece in held)
    assert has_all(held, pieces)


def test_another_window_of_as_many_chunks_is_not_all(open_rig: Rigs) -> None:
    rig, _ = left(open_rig)
    pieces, earlier = find(rig), find(rig, stop=40)
    assert len(pieces) == len(earlier) == 2
    assert not has_all(earlier, pieces)


def test_what_was_damaged_is_dropped_and_what_is_before_it_serves(open_rig: Rigs) -> None:
    rig, device = left(open_rig)
    push_out_of_dram(rig, device, rig.dram_slots)
    broken = rig.chunk(names_of(keys())[4])
    at = rig.slab.offset(broken.at(NVME).slot) + rig.slab.record_bytes - 1
    device.image[at] ^= 1
    find(rig)
    device.settle()
    assert broken.dropped
    find(rig)
    device.settle()
    assert runs(hold(rig)) == [(40, 48), (48, 64)]


def test_what_has_expired_is_no_part_of_a_hit(open_rig: Rigs) -> None:
    now = 0.0
    rig, _ = open_rig(needs=NEEDS, clock=lambda: now)
    _, visit = rig.store.arrive("a", Lookup(keys()), LENGTH, terms=Terms(ttl_s=5.0))
    for number, name in enumerate(names_of(keys())):
        chunk = rig.store.begin_save(name, visit.run(number) if number == 4 else None)
        assert chunk is not None
        rig.pool.slot(chunk.dram.slot)[:] = payload_of(name)
        rig.store.finish_saves([chunk])
    assert runs(hold(rig)) == [(64, 80), (80, 88)]
    now = 100.0
    assert runs(hold(rig)) == [(40, 48), (48, 64)]


def lease_one(rig: Rig, of: SequenceKeys, number: int) -> None:
    """All is stored, and one chunk of it under a lease of 5 s."""
    _, visit = rig.store.arrive("a", Lookup(keys()), LENGTH, terms=Terms(ttl_s=5.0))
    for name in [*names_of(keys()), *(of.name(n, bytes(32)) for n in range(5) if of is not keys())]:
        is_leased = name.parent == of.parent(number)
        chunk = rig.store.begin_save(name, visit.run(number) if is_leased else None)
        if chunk is not None:
            rig.pool.slot(chunk.dram.slot)[:] = payload_of(name)
            rig.store.finish_saves([chunk])


def test_an_expired_window_is_not_held_where_a_farther_one_is_read(open_rig: Rigs) -> None:
    now = 0.0
    rig, device = open_rig(needs=NEEDS, clock=lambda: now)
    lease_one(rig, keys(), 3)
    device.settle()
    rig.store.residency.leave_dram(rig.chunk(names_of(keys())[4]))
    device.hold()
    now = 100.0
    assert runs(hold(rig)) == [(24, 32), (32, 48)]


def test_an_expired_section_backs_nothing(open_rig: Rigs) -> None:
    now = 0.0
    needs = (Need(1, Reach.WINDOW, 24, 4),)
    rig, _ = open_rig(needs=needs, dram_slots=16, clock=lambda: now)
    lease_one(rig, keys().section(1, 0), 3)
    assert find(rig, stop=64)[-1].stop == 64
    now = 100.0
    assert find(rig, stop=64)[-1].stop == 48


def test_chunks_that_others_used_are_theirs_too(open_rig: Rigs) -> None:
    """The visit counts chunks from the first on, though the first ones are not there."""
    rig, _ = left(open_rig, 0, 1)
    rig.store.arrive("first", Lookup(keys()), LENGTH)
    branch = lookup_of(conversation(1, LENGTH)[:72] + conversation(2))
    pieces, visit = rig.store.arrive("branch", branch, 100)
    assert runs(pieces) == [(48, 64), (64, 72)]
    assert visit.num_shared == 4, "of the fifth it has the beginning alone, which is no use"
    shared = [rig.store.residency.run_of(piece.chunk).is_shared for piece in pieces]
    assert shared == [True, False]


@pytest.mark.parametrize("end", [conversation(1, 90)[88:], [7, 8]])
def test_a_tail_is_used_by_who_has_its_blocks(open_rig: Rigs, end: list[int]) -> None:
    """Whether or not they have its end, and its window is there (index/prefix.py, 4)."""
    now = 1.0
    rig, device = open_rig(needs=NEEDS, clock=lambda: now)
    whole = keys(90)
    rig.put_all(whole)
    device.settle()
    *_, before, tail = map(rig.chunk, names_of(whole))
    rig.store.drop([before])
    now = 5.0
    asked = lookup_of(conversation(1, 88) + end + conversation(2))
    rig.store.find(asked, 0, 100)
    assert rig.store.residency.run_of(tail).since == now


# ---- shapes -----------------------------------------------------------------------------------


def test_a_window_is_as_long_as_a_chunk() -> None:
    spine = Group(4, ("l",), reach="window", reach_tokens=CHUNK_TOKENS)
    check_chunks(spine, CHUNK_TOKENS)
    with pytest.raises(UnsupportedError, match=r"longest of 16 tokens.*chunk of 32"):
        check_chunks(spine, 2 * CHUNK_TOKENS)


def test_the_namespace_says_that_there_are_windows() -> None:
    """Else a server with KV of all tokens would take a window's for whole."""
    window = Group(4, ("l",), reach="window", reach_tokens=64)
    kinds = [Geometry(1, (64,), (group,), 16).facts() for group in (Group(4, ("l",)), window)]
    assert "groups" not in kinds[0]
    assert kinds[1]["groups"][0]["reach_tokens"] == 64
