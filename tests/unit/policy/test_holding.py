# SPDX-License-Identifier: Apache-2.0
"""Holding HBM for sessions that are away: when it pays, who is let go, who waits at the door."""

from __future__ import annotations

import pytest

from attnstore_vllm.policy.gaps import ENDS_S, RETURNS_MIN, Gaps
from attnstore_vllm.policy.holding import SESSIONS_MAX, SHORT_S, Holding

ROOM = 100_000
TOKENS = 10_000
COMPUTING_S = 1.0


class Hbm(Holding):
    """Sessions share no blocks here, and what ends has its blocks still."""

    def __init__(self, **options: float) -> None:
        super().__init__(ROOM, **options)
        self._tokens: dict[int, int] = {}

    @property
    def held_tokens(self) -> int:
        return sum(self._tokens[session] for session in self._held)

    @property
    def in_use(self) -> int:
        return sum(self._tokens[session] for session in self._growing)

    def end(self, session: int, num_tokens: int, computing_s: float, now: float) -> bool:
        self._tokens[session] = num_tokens
        in_use = self.in_use + num_tokens * (session not in self._growing)
        held = self.held_tokens + num_tokens
        return self.ended(session, num_tokens, computing_s, now, in_use=in_use, held=held)

    def lets_in(self, session: int, waited_s: float, now: float) -> bool:
        return self.is_admitted(session, TOKENS, self.in_use, waited_s, now)


def learned(gap_s: float = 1.0, **options: float) -> Hbm:
    """Sessions 1000 and on have come back after so long, as often as is needed to know it."""
    holding = Hbm(**options)
    for number in range(RETURNS_MIN):
        session, now = 1000 + number, 100.0 * number
        holding.started(session, TOKENS)
        holding.end(session, TOKENS, COMPUTING_S, now)
        holding.came(session, now + gap_s)
        holding.gone(session)
    return holding


def turn(holding: Hbm, session: int, now: float, computing_s: float = COMPUTING_S) -> bool:
    """A request of the session runs and ends. Returns whether it is held."""
    holding.started(session, TOKENS)
    return holding.end(session, TOKENS, computing_s, now)


def test_nothing_is_held_before_gaps_are_known() -> None:
    assert not turn(Hbm(), 1, 0.0)


def test_a_short_gap_is_held_until_it_is_over_and_no_longer() -> None:
    holding = learned(gap_s=1.0)
    assert turn(holding, 1, 1000.0)
    assert holding.held_tokens == TOKENS
    assert holding.over(1000.9) == []
    assert holding.over(1003.0) == [1]
    assert holding.held_tokens == 0


def test_a_gap_that_costs_more_than_computing_is_not_held() -> None:
    """A tenth of HBM for 60 s is 6 s of it, and computing takes one."""
    assert not turn(learned(gap_s=60.0, longest_s=600.0), 1, 1000.0)


def test_a_gap_longer_than_the_longest_hold_is_not_held() -> None:
    assert not turn(learned(gap_s=2.0, longest_s=1.0), 1, 1000.0)


def test_the_door_is_open_where_a_tier_makes_returns_cheap() -> None:
    """A hold still pays: a return costs a third of computing, and computing takes 1 s."""
    holding = learned(share=0.5)
    for session in range(600):
        holding.started(100 + session, TOKENS, COMPUTING_S, COMPUTING_S / 3)
        holding.gone(100 + session)
    crowded(holding)
    assert holding.lets_in(9, waited_s=1.0, now=1001.0)


def test_what_a_tier_has_is_held_as_long_as_a_load_is_worth() -> None:
    holding = learned(gap_s=1.0)
    for session in range(200):  # lost, and back in a hundredth of the time that computing takes
        holding.started(session, TOKENS, COMPUTING_S, COMPUTING_S / 100)
        holding.gone(session)
    assert not turn(holding, 1, 1000.0)


def test_the_held_share_is_bounded() -> None:
    """Also of sessions that were held before, and have grown."""
    holding = learned(share=0.25, defer_s=0.0)
    assert [turn(holding, session, 1000.0) for session in range(4)] == [True, True, False, False]
    holding.came(0, 1001.0)
    holding.started(0, 2 * TOKENS)
    assert not holding.end(0, 2 * TOKENS, COMPUTING_S, 1002.0)
    assert holding.held_tokens <= 0.25 * ROOM


def test_who_is_longest_overdue_is_let_go_first_and_who_is_back_last() -> None:
    holding = learned(gap_s=1.0)
    for number, session in enumerate((1, 2, 3)):
        assert turn(holding, session, 1000.0 + 0.4 * number)
    holding.came(2, 1000.9)
    # 1 is nearer to its return than 3, and 2 is there.
    assert [holding.let_go(1000.9, wanted_by=2) for _ in range(2)] == [[3], [1]]
    assert [holding.let_go(1000.9, 8, wanted_by=2) for _ in range(2)] == [[2], []]


def test_those_that_are_back_are_let_go_last_and_that_of_the_request_after_them() -> None:
    """Though they would gain least a second."""
    holding = learned(gap_s=1.0)
    for session in (1, 2, 3, 4):
        assert turn(holding, session, 1000.0, computing_s=COMPUTING_S * session)
    holding.came(1, 1000.5)
    holding.came(2, 1000.5)
    assert [holding.let_go(1000.6, wanted_by=1) for _ in range(4)] == [[3], [4], [2], [1]]


def test_many_are_let_go_in_the_order_of_what_they_gain() -> None:
    holding = learned(gap_s=1.0)
    for number, session in enumerate((1, 2, 3)):
        assert turn(holding, session, 1000.0 + 0.4 * number)
    assert holding.let_go(1000.9, 2) == [3, 2]
    assert holding.let_go(1000.9, 2) == [1]
    assert holding.held_tokens == 0


def test_one_that_is_back_is_held_until_it_has_room_or_the_longest_hold_is_over() -> None:
    holding = learned(longest_s=20.0)
    assert turn(holding, 1, 1000.0)
    holding.came(1, 1001.0)
    assert holding.over(1015.0) == []
    assert holding.over(1020.0) == [1]


def crowded(holding: Hbm) -> None:
    """Session 9 was let go for the room of others, has come back, and five are in play."""
    assert turn(holding, 9, 999.0)
    assert holding.let_go(1000.0) == [9]
    for session in range(5):
        assert turn(holding, session, 1000.0)
    holding.came(9, 1000.5)


def test_a_session_that_lost_its_blocks_waits_while_those_in_play_fill_the_room() -> None:
    holding = learned(share=0.5)
    crowded(holding)
    assert not holding.lets_in(9, waited_s=1.0, now=1001.0)
    assert holding.lets_in(9, waited_s=60.0, now=1001.0), "its deadline is over"
    assert holding.lets_in(0, waited_s=0.0, now=1001.0), "it is held"
    assert holding.lets_in(77, waited_s=0.0, now=1001.0), "it is its first request"
    assert not turn(holding, 77, 1000.6), "and there is no room for one more in play"
    holding.gone(3)
    assert holding.lets_in(9, waited_s=1.0, now=1001.0)


def test_the_door_is_open_again_when_none_was_let_go_lately() -> None:
    holding = learned(share=0.5)
    crowded(holding)
    assert holding.lets_in(9, waited_s=1.0, now=1000.0 + SHORT_S)


def test_the_door_is_open_where_no_hold_pays() -> None:
    holding = learned(share=0.5)
    crowded(holding)
    assert not turn(holding, 100, 1000.6, computing_s=0.01)
    assert holding.lets_in(9, waited_s=1.0, now=1001.0)


def test_sessions_that_never_come_back_shorten_the_hold() -> None:
    """Half of them end there. To wait the longest for all costs more than it saves."""
    holding = learned(gap_s=1.0)
    turn(holding, 1, 999.0)
    before = holding.seconds(TOKENS, 0.2)
    for number in range(64):
        session, now = 2000 + number, 1000.0 + 200.0 * number
        turn(holding, session, now)
        if number % 2:
            holding.came(session, now + 1.0)
        holding.gone(session)
    assert before == pytest.approx(float(ENDS_S[ENDS_S > 1.0][0]))
    assert holding.seconds(TOKENS, 0.2) == 0.0 < before


def test_long_sessions_do_not_close_the_door_to_short_ones() -> None:
    """Each in play may grow to twice what it has, however long requests are by and large."""
    holding = learned()
    for session in range(200):
        holding.started(5000 + session, 50 * TOKENS)
        holding.end(5000 + session, 50 * TOKENS, COMPUTING_S, 1000.0)
        holding.gone(5000 + session)
    assert turn(holding, 9, 1000.0)
    assert holding.let_go(1000.0) == [9]
    for session in range(3):
        assert turn(holding, session, 1000.0)
    holding.came(9, 1000.5)
    assert holding.lets_in(9, waited_s=1.0, now=1001.0)
    assert turn(holding, 3, 1000.5)
    assert not holding.lets_in(9, waited_s=1.0, now=1001.0)


def test_copies_that_never_come_back_do_not_end_holding() -> None:
    """One of them may come back, as the best of many answers. The others are no sessions."""
    holding = learned(gap_s=1.0)
    now = 1000.0
    for asked in range(40):
        for child in range(64):
            session = 10_000 + 64 * asked + child
            holding.started(session, TOKENS)
            holding.ended(session, TOKENS, COMPUTING_S, now, in_use=0, held=ROOM, is_copy=child > 0)
        now += 1.0
        best = 10_000 + 64 * asked + 7
        holding.came(best, now)
        holding.gone(best)
        now += 60.0
    assert holding.seconds(TOKENS, COMPUTING_S) > 0


def test_copies_that_are_followed_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    gaps: list[float] = []
    holding = learned(gap_s=1.0)
    for session in range(SESSIONS_MAX + 1):
        holding.ended(session, TOKENS, COMPUTING_S, 1000.0, in_use=0, held=ROOM, is_copy=True)
    monkeypatch.setattr(Gaps, "observe", lambda _, gap_s: gaps.append(gap_s))
    holding.came(0, 1001.0)
    assert not gaps
    holding.came(1, 1002.0)
    assert gaps == [2.0]


def test_the_length_of_a_prompt_counts_once() -> None:
    """Copies of a long one leave what is usual as it is."""
    with_copies, without = learned(), learned()
    for session in range(64):
        for holding in (with_copies, without) if not session else (with_copies,):
            holding.started(session, TOKENS)
            holding.ended(
                session, 3 * TOKENS, COMPUTING_S, 1000.0, in_use=0, held=0, is_copy=session > 0
            )
    assert with_copies.usual_tokens == without.usual_tokens > TOKENS
