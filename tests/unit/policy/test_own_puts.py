# SPDX-License-Identifier: Apache-2.0
"""What a server has put into a shared tier, by tenants with a quota."""

from __future__ import annotations

from random import Random

import pytest

from attnstore_vllm.policy.own_puts import OwnPuts
from attnstore_vllm.policy.visits import Run, unknown_run
from attnstore_vllm.types import Key
from tests.helpers import lru

GOLD, TIN, NONE = b"gold".ljust(32), b"tin".ljust(32), bytes(32)


def key(number: int) -> Key:
    return Key(number.to_bytes(32, "big"))


def name(number: int, generation: int = 0) -> bytes:
    return bytes([generation]) + number.to_bytes(31, "big")


class Puts(OwnPuts):
    """With a clock that goes on."""

    def __init__(self, most: dict[bytes, int]) -> None:
        super().__init__(most, lru)
        self.now = 0.0

    def start(
        self, number: int, tenant: bytes = GOLD, run: Run | None = None, generation: int = 0
    ) -> bytes | None:
        self.now += 1
        put = (key(number), name(number, generation))
        return self.begin(tenant, put, run or unknown_run(self.now), self.now)

    def put(self, number: int, tenant: bytes = GOLD, run: Run | None = None) -> bytes | None:
        goes = self.start(number, tenant, run)
        if goes:
            self.deleted(tenant, name(number))
        self.end(tenant, name(number), is_there=goes is not None)
        return goes


def test_at_its_quota_the_oldest_goes() -> None:
    puts = Puts({GOLD: 2, TIN: 1})
    assert [puts.put(n) for n in (1, 2)] == [b"", b""]
    assert puts.put(7, TIN) == b""
    assert puts.put(3) == name(1)
    puts.now += 1
    puts.use(GOLD, [key(2), key(99)], unknown_run(puts.now))
    assert puts.put(4) == name(3), "2 was used"
    assert puts.held() == {GOLD: (2, 2), TIN: (1, 1)}


def test_who_has_no_quota_is_not_counted() -> None:
    puts = Puts({GOLD: 1})
    assert [puts.put(n, NONE) for n in range(9)] == [b""] * 9
    puts.use(NONE, [key(1)], unknown_run(puts.now))
    puts.gone(NONE, name(1), key(1))
    assert puts.held() == {GOLD: (0, 1)}


def test_a_prompt_does_not_push_out_its_own_beginning() -> None:
    puts, run = Puts({GOLD: 2}), unknown_run(0.0)
    assert [puts.put(n, run=run) for n in (1, 2, 3)] == [b"", b"", None]
    turn = unknown_run(puts.now)
    puts.use(GOLD, [key(1), key(2)], turn)  # the next turn of the conversation
    assert puts.put(3, run=turn) is None


def test_what_is_being_put_does_not_go() -> None:
    puts = Puts({GOLD: 1})
    assert puts.start(1) == b""
    assert puts.start(2) is None, "1 is on its way"
    puts.end(GOLD, name(2), is_there=False)
    puts.end(GOLD, name(1), is_there=True)
    assert puts.put(2) == name(1)


def test_what_could_not_be_deleted_counts_again() -> None:
    puts = Puts({GOLD: 2})
    puts.put(1)
    puts.put(2)
    assert puts.start(3) == name(1)
    puts.end(GOLD, name(3), is_there=False)
    assert puts.held()[GOLD] == (2, 2)
    assert puts.put(3) == name(2), "another is tried"
    assert puts.put(4) == name(1)


def test_a_put_that_failed_is_not_counted() -> None:
    puts = Puts({GOLD: 2})
    puts.put(1)
    assert puts.start(2) == b""
    puts.end(GOLD, name(2), is_there=False)
    assert puts.held()[GOLD] == (1, 2)
    assert puts.start(2) == b""
    puts.end(GOLD, name(2), is_there=True)
    assert puts.start(3) == name(1)
    puts.deleted(GOLD, name(3))
    puts.end(GOLD, name(3), is_there=False)
    assert puts.held()[GOLD] == (1, 2), "the old one is gone, the new one did not come"


def test_what_was_evicted_there_is_put_again_and_counts_once() -> None:
    puts = Puts({GOLD: 2})
    puts.put(1)
    assert puts.put(1) == b""
    assert puts.held()[GOLD] == (1, 2)
    puts.gone(GOLD, name(1), key(1))
    assert puts.held()[GOLD] == (0, 2)
    puts.gone(GOLD, name(1), key(1))


def test_what_is_put_again_does_not_go_meanwhile_and_counts_though_that_fails() -> None:
    puts = Puts({GOLD: 1})
    puts.put(1)
    assert puts.start(1) == b"", "it is damaged, or was evicted"
    assert puts.start(2) is None, "1 is on its way"
    puts.gone(GOLD, name(1), key(1))
    puts.end(GOLD, name(1), is_there=False)
    assert puts.held()[GOLD] == (1, 1), "a damaged one is still there"
    assert puts.put(2) == name(1)


def test_a_name_that_is_being_put_is_not_put_by_another() -> None:
    puts = Puts({GOLD: 2})
    assert puts.start(1) == b""
    assert puts.start(1) is None, "it was dropped, and computed again"
    puts.end(GOLD, name(1), is_there=True)
    puts.put(2)
    assert puts.start(3) == name(1)
    assert puts.start(3) is None
    puts.deleted(GOLD, name(3))
    puts.end(GOLD, name(3), is_there=True)
    puts.deleted(GOLD, name(3))  # it is over, and stays
    assert puts.held()[GOLD] == (2, 2)


def test_after_a_reset_the_old_ones_still_count_and_go_first() -> None:
    puts = Puts({GOLD: 2})
    puts.put(1)
    assert puts.start(1, generation=1) == b""
    puts.end(GOLD, name(1, 1), is_there=True)
    assert puts.held()[GOLD] == (2, 2), "both are there"
    puts.gone(GOLD, name(1), key(1))
    assert puts.held()[GOLD] == (2, 2), "that name is another one's"
    assert puts.put(2) == name(1, 0)
    puts.now += 1
    puts.use(GOLD, [key(1)], unknown_run(puts.now))
    assert puts.put(3) == name(2), "the newer one is found by its key"


@pytest.mark.parametrize("seed", range(10))
def test_what_counts_is_what_is_there(seed: int) -> None:
    """A store that loses nothing by itself: by a recount it never has more than it may."""
    random, puts, there = Random(seed), Puts({GOLD: 4, TIN: 2}), dict[bytes, bytes]()
    open_puts: list[tuple[bytes, int, bytes]] = []
    left_out = 0
    for _ in range(500):
        tenant = random.choice([GOLD, TIN])
        number = random.randrange(10) + 10 * (tenant == TIN)
        is_open = any(n == number for _, n, _ in open_puts)
        if random.random() < 0.5 and not is_open and name(number) not in there:
            goes = puts.start(number, tenant)
            left_out += goes is None
            if goes is not None:
                open_puts.append((tenant, number, goes))
        elif open_puts:
            tenant, number, goes = open_puts.pop(random.randrange(len(open_puts)))
            may_delete, comes = random.random() < 0.8, random.random() < 0.8
            if goes and may_delete:
                there.pop(goes, None)
                puts.deleted(tenant, name(number))
            comes = comes and not (goes and not may_delete)
            if comes:
                there[name(number)] = tenant
            puts.end(tenant, name(number), is_there=comes)
        else:
            puts.now += 1
            puts.use(tenant, [key(number)], unknown_run(puts.now))
        for tenant, (held, most) in puts.held().items():
            num_there = sum(owner == tenant for owner in there.values())
            assert num_there <= held <= most
    assert left_out and len(there) > 2
