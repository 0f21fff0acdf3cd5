# SPDX-License-Identifier: Apache-2.0
"""Who asks when: the schedule alone, without a server or a clock."""

from __future__ import annotations

import gzip
import json
import math
import statistics
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest

from attnstore_lab.bench.conversations import Conversation, DatasetError
from attnstore_lab.bench.gaps import read_gaps
from attnstore_lab.bench.schedule import Load, Session, Think, make_plan, parse_think, sessions
from attnstore_vllm.errors import ConfigError

THREE = [Conversation(name, tuple("abc"[:n])) for name, n in (("x", 3), ("y", 1), ("z", 2))]
MANY = [Conversation(str(n), ("a", "b", "c")) for n in range(2000)]


def schedule(load: Load, conversations: list[Conversation] = THREE) -> list[Session]:
    return list(sessions(conversations, load))


def test_same_seed_gives_the_same_times_and_another_seed_others() -> None:
    load = Load(think=Think(kind="lognormal", first=5, sigma=1))
    assert schedule(load, MANY) == schedule(load, MANY)
    other = Load(think=load.think, seed=2)
    assert schedule(load, MANY) != schedule(other, MANY)


def test_more_sessions_leave_the_first_ones_as_they_were() -> None:
    think = Think(kind="exponential", first=5)
    few = schedule(Load(think=think, sessions=10), MANY)
    more = schedule(Load(think=think, sessions=20), MANY)
    assert more[:10] == few


def test_what_is_said_in_a_session_moves_no_other() -> None:
    """So that runs with other times to think, or fewer turns, have the same arrivals."""
    plain = [(s.start_s, s.conversation) for s in schedule(Load(), MANY)]
    think = Think(kind="exponential", first=5)
    thought, cut = schedule(Load(think=think), MANY), schedule(Load(think=think, turns=2), MANY)
    assert [(s.start_s, s.conversation) for s in thought] == plain
    assert [(s.start_s, s.conversation) for s in cut] == plain
    assert [s.thinks_s[:1] for s in thought] == [s.thinks_s for s in cut]


def test_each_conversation_is_held_once_in_an_order_of_its_own() -> None:
    found = schedule(Load(), MANY)
    order = [session.conversation for session in found]
    assert sorted(order) == list(range(len(MANY)))
    assert order != sorted(order)
    assert {session.use for session in found} == {0}


def test_more_sessions_than_conversations_use_all_of_them_equally_often() -> None:
    found = schedule(Load(sessions=8))
    uses = Counter(session.conversation for session in found)
    assert sorted(uses.values()) == [2, 3, 3]
    assert sorted((s.conversation, s.use) for s in found[:6]) == [
        (c, use) for c in range(3) for use in range(2)
    ]


def test_arrivals_are_a_poisson_process_of_the_rate() -> None:
    starts = [session.start_s for session in schedule(Load(rate=4), MANY)]
    assert starts[0] == 0
    gaps = [b - a for a, b in pairwise(starts)]
    assert statistics.mean(gaps) == pytest.approx(0.25, rel=0.1)
    assert statistics.stdev(gaps) == pytest.approx(0.25, rel=0.1)  # as long as the mean


def test_nothing_begins_after_the_duration() -> None:
    found = schedule(Load(rate=10, duration_s=30))
    assert 200 < len(found) < 400  # more than there are conversations
    assert found[-1].start_s <= 30


def test_infinite_rate_begins_all_at_once() -> None:
    assert {session.start_s for session in schedule(Load(rate=math.inf))} == {0.0}


@pytest.mark.parametrize(
    ("think", "median", "mean"),
    [
        (Think(kind="constant", first=3), 3, 3),
        (Think(kind="exponential", first=3), 3 * math.log(2), 3),
        (Think(kind="lognormal", first=3, sigma=0.5), 3, 3 * math.exp(0.125)),
        (Think(kind="exponential", first=3, scale=10), 30 * math.log(2), 30),
        (Think(kind="exponential", first=0), 0, 0),
    ],
)
def test_times_to_think_have_their_distribution(think: Think, median: float, mean: float) -> None:
    thinks = [t for session in schedule(Load(think=think), MANY) for t in session.thinks_s]
    assert len(thinks) == 2 * len(MANY)
    assert statistics.median(thinks) == pytest.approx(median, rel=0.06)
    assert statistics.mean(thinks) == pytest.approx(mean, rel=0.06)


def test_due_times_add_up() -> None:
    think = Think(kind="exponential", first=2)
    for session in schedule(Load(think=think)):
        assert len(session.due_s) == len(THREE[session.conversation].questions)
        assert session.due_s[0] == session.start_s
        gaps = [b - a for a, b in pairwise(session.due_s)]
        assert gaps == pytest.approx(list(session.thinks_s))


def test_a_traces_gaps_come_in_their_order_and_again_from_the_first() -> None:
    think = Think(kind="trace", gaps=((1.0,), (5.0, 7.0)), scale=2)
    long = [Conversation(str(n), tuple("abcd")) for n in range(20)]
    found = {session.thinks_s for session in schedule(Load(think=think), long)}
    assert found == {(2.0, 2.0, 2.0), (10.0, 14.0, 10.0)}


def test_the_datas_own_times_are_used_or_missed() -> None:
    timed = [Conversation("t", ("a", "b", "c"), times_s=(100, 103, 110))]
    load = Load(think=Think(kind="data"))
    [session] = schedule(load, timed)
    assert session.thinks_s == (3, 7)
    with pytest.raises(ConfigError, match="'x' has no \"timestamp\""):
        schedule(load, timed + THREE)


def test_turns_are_limited() -> None:
    assert make_plan(THREE, Load(turns=2)).num_requests == 5
    assert make_plan(THREE, Load()).num_requests == 6


@pytest.mark.parametrize("rate", [1.0, math.inf])
@pytest.mark.parametrize("share", [0.0, 0.25, 0.99])
def test_warmup_is_the_share_of_the_requests_that_are_due_first(rate: float, share: float) -> None:
    """Also where many are due at the same time."""
    load = Load(rate=rate, warmup=share, think=Think(kind="constant", first=3))
    plan = make_plan(MANY, load)
    keys = [
        (due_s, session.number, turn)
        for session in schedule(load, MANY)
        for turn, due_s in enumerate(session.due_s)
    ]
    warm = {key for key in keys if plan.warms_up(*key)}
    assert len(warm) == plan.num_warmup == int(share * len(keys))
    assert warm == set(sorted(keys)[: len(warm)])
    assert plan.num_requests == len(keys)
    assert plan.num_sessions == len(MANY)
    assert plan.last_due_s == max(keys)[0]


@pytest.mark.parametrize(
    ("text", "parsed"),
    [
        ("constant:2.5", ("constant", ["2.5"])),
        ("lognormal:60,1", ("lognormal", ["60", "1"])),
        ("data", ("data", [])),
        ("trace:a,b.jsonl", ("trace", ["a,b.jsonl"])),
    ],
)
def test_think_is_parsed(text: str, parsed: object) -> None:
    assert parse_think(text) == parsed


@pytest.mark.parametrize("text", ["", "soon", "constant", "lognormal:1", "trace:", "data:1"])
def test_unknown_think_says_what_is_known(text: str) -> None:
    with pytest.raises(ConfigError, match="expected constant:S, exponential:MEAN"):
        parse_think(text)


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"rate": 0}, "rate"),
        ({"rate": math.nan}, "rate"),
        ({"sessions": 0}, "sessions"),
        ({"turns": 0}, "turns"),
        ({"warmup": 1}, "warmup"),
        ({"think": Think(first=-1)}, "think"),
        ({"think": Think(scale=math.nan)}, "think-scale"),
        ({"rate": math.inf, "duration_s": 5}, "rate"),
    ],
)
def test_wrong_loads_are_refused_by_name(options: dict[str, float], name: str) -> None:
    with pytest.raises(ConfigError, match=f"--{name}"):
        Load(**options)  # type: ignore[arg-type]


# ---- gaps of a trace ----------------------------------------------------------------------------


def write(path: Path, *lines: object, zipped: bool = False) -> Path:
    data = "".join(json.dumps(line) + "\n" for line in lines).encode()
    path.write_bytes(gzip.compress(data) if zipped else data)
    return path


def test_gaps_of_a_trace_of_sessions(tmp_path: Path) -> None:
    first = {"requests": [{"t": 0}, {"t": 19, "think_time": 12}, {"requests": []}, {"t": 36}]}
    path = write(tmp_path / "t.gz", first, {"requests": [{"t": 5}]}, zipped=True)
    assert read_gaps(path, thinks=False) == [(19, 17)]
    assert read_gaps(path, thinks=True) == [(12, 17)]


def test_gaps_of_a_trace_of_requests(tmp_path: Path) -> None:
    asked = [(1, 100), (2, 101), (1, 107), (1, 103)]
    lines = [{"session": s, "turn": 1, "timestamp": t} for s, t in asked]
    assert read_gaps(write(tmp_path / "t", *lines), thinks=True) == [(3, 4)]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"a": 1}, 'line 1: "requests", or "session"'),
        ([1], "line 1: an object is expected"),
        ({"requests": [{"t": -1}]}, "line 1, request 0: 't' is -1; expected seconds"),
        ({"requests": [{"t": 1}]}, "no session of it has a second request"),
        ({"session": 1}, "'timestamp' is None"),
    ],
)
def test_wrong_traces_say_where_and_what(tmp_path: Path, line: object, message: str) -> None:
    with pytest.raises(DatasetError, match=message):
        read_gaps(write(tmp_path / "t", line), thinks=False)
