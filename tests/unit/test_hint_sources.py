# SPDX-License-Identifier: Apache-2.0
"""Hints of other standards: each becomes ours, ours hold before them, and none does any harm."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnstore_vllm.hint_sources import ACTIONS_MAX, LOOKED_AT_MAX, read
from attnstore_vllm.hints import ID_MAX, KEYS, NAMES, NO_HINTS, HintReader, Hints
from attnstore_vllm.policy.priority import Priority
from attnstore_vllm.policy.visits import Terms

READER = HintReader(ttl_s=None, longest_pin_s=3600.0)


def hints(params: Any = None, session_id: Any = None, kv_hints: Any = None) -> Hints:
    return read(
        READER,
        SimpleNamespace(kv_transfer_params=params, session_id=session_id, kv_hints=kv_hints),
    )


def action(payload: object, **other: object) -> dict[str, object]:
    ours = {"action_id": "1", "action_type": "attnstore.hints", "action_version": "1.0"}
    return {**ours, "payload": payload, **other}


def envelope(*actions: object) -> dict[str, object]:
    return {"protocol_version": "0.1", "message_id": "m", "actions": list(actions)}


def as_struct(of: dict[str, Any]) -> Any:
    actions = [SimpleNamespace(**one) for one in of["actions"]]
    return SimpleNamespace(**{**of, "actions": actions})


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        (None, NO_HINTS),
        ({"do_remote_prefill": True}, NO_HINTS),
        ({"attnstore": {"session": "a"}}, Hints(session="a", applied=1)),
        ({"attnstore": {"session": "a", "parent": "b"}}, Hints(session="a", parent="b", applied=2)),
        ({"prompt_cache_key": "k"}, Hints(session="k", applied=1)),
        ({"prompt_cache_key": "k", "attnstore": {"session": "a"}}, Hints(session="a", applied=1)),
        (
            {"agent_hint": {"session_id": "a", "parent_session_id": "b"}, "prompt_cache_key": "k"},
            Hints(session="a", parent="b", applied=2),
        ),
        (
            {"agent_hint": {"cache_control": {"type": "ephemeral", "ttl": "5m"}}},
            Hints(terms=Terms(ttl_s=300.0), applied=1),
        ),
        (
            {"kv_hint": envelope(action({"session": "a", "priority": "low", "ttl": 60}))},
            Hints(terms=Terms(Priority.LOW, 60.0), session="a", applied=3),
        ),
        (
            {"kv_hint": envelope(action({"pin": True})), "attnstore": {"pin": False}},
            Hints(applied=1),
        ),
        (
            {"kv_hint": envelope(action({"ended": True}), action({"ended": False}))},
            Hints(terms=Terms(Priority.ENDED), applied=1),
        ),
        ({"kv_hint": envelope(action({"x": 1}, action_type="kv.fetch"))}, NO_HINTS),
    ],
)
def test_what_becomes_of_each(params: Any, expected: Hints) -> None:
    assert hints(params) == expected


def test_vllms_own_fields_hold_before_others() -> None:
    assert hints(session_id="s") == Hints(session="s", applied=1)
    assert hints({"prompt_cache_key": "k", "agent_hint": {"session_id": "a"}}, "s").session == "s"
    assert hints({"attnstore": {"session": "own"}}, "s").session == "own"
    told = as_struct(envelope(action({"session": "e", "priority": "high"})))
    assert hints(kv_hints=told) == Hints(terms=Terms(Priority.HIGH), session="e", applied=2)
    assert hints({"kv_hint": envelope(action({"session": "f"}))}, kv_hints=told).session == "e"


DEEP: Any = []
for _ in range(100_000):
    DEEP = [DEEP]
NONSENSE = [
    7, True, 1.5, float("nan"), 10**400, [], {}, ["a"], DEEP, b"\xff\xfe", "x" * (ID_MAX + 1),
]  # fmt: skip


@pytest.mark.parametrize("value", NONSENSE, ids=lambda value: type(value).__name__)
def test_an_id_that_makes_no_sense_is_none(value: Any) -> None:
    """And what comes beside it, or behind it in the order, still holds."""
    for params, session_id in [
        ({"attnstore": {"session": value}}, None),
        ({"prompt_cache_key": value}, None),
        ({"agent_hint": {"session_id": value}}, None),
        ({"agent_hint": {"parent_session_id": value}}, None),
        ({"kv_hint": envelope(action({"session": value}))}, None),
        (None, value),
    ]:
        assert hints(params, session_id) == Hints(ignored=1)
    found = hints({"agent_hint": {"session_id": value}, "prompt_cache_key": "k"})
    assert (found.session, found.ignored) == ("k", 1)


GOOD: dict[str, tuple[Any, Hints]] = {
    "store": (False, Hints(store=False, applied=1)),
    "priority": ("low", Hints(terms=Terms(Priority.LOW), applied=1)),
    "ttl": (60, Hints(terms=Terms(ttl_s=60.0), applied=1)),
    "truncation": (True, Hints(truncation=True, applied=1)),
    "approximate": (False, Hints(approximate=False, applied=1)),
    "report": (True, Hints(report=True, applied=1)),
    "ended": (True, Hints(terms=Terms(Priority.ENDED), applied=1)),
    "audit": (False, Hints(applied=1)),
    "pin": (True, Hints(terms=Terms(pin_s=3600.0), applied=1)),
    "session": ("a", Hints(session="a", applied=1)),
    "parent": ("b", Hints(parent="b", applied=1)),
    "tool": ("bash", Hints(tool="bash", applied=1)),
    "agent": ("explorer", Hints(agent="explorer", applied=1)),
}
"""Of each key a hint, and what it means."""


@pytest.mark.parametrize("bad", [None, "1 hour", 0, [], {}, DEEP], ids=type)
@pytest.mark.parametrize("key", KEYS)
def test_what_makes_no_sense_hides_no_other_sources_hint(key: str, bad: Any) -> None:
    """In our own section, in vLLM's envelope, and in an action before another."""
    if key in NAMES and isinstance(bad, str):
        return
    good, expected = GOOD[key]
    ours, theirs = action({key: bad}), action({key: good})
    told = as_struct(envelope(ours))
    for found in (
        hints({"attnstore": {key: bad}, "kv_hint": envelope(theirs)}),
        hints({"kv_hint": envelope(theirs)}, kv_hints=told),
        hints({"kv_hint": envelope(ours, theirs)}),
    ):
        assert found == expected.with_ignored(1)


@pytest.mark.parametrize("bad", [None, "1 hour", -5])
def test_a_ttl_that_makes_no_sense_leaves_the_agents(bad: Any) -> None:
    agent = {"cache_control": {"ttl": "5m"}}
    for params in (
        {"attnstore": {"ttl": bad}, "agent_hint": agent},
        {"kv_hint": envelope(action({"ttl": bad})), "agent_hint": agent},
    ):
        assert hints(params) == Hints(terms=Terms(ttl_s=300.0), applied=1, ignored=1)


@pytest.mark.parametrize("value", [7, "x", [], [[]], DEEP, float("nan")], ids=type)
def test_what_is_no_envelope(value: Any) -> None:
    for key in ("kv_hint", "agent_hint"):
        assert hints({key: value, "attnstore": {"ttl": 60}}).ignored == 1
        assert hints({key: value, "attnstore": {"ttl": 60}}).terms.ttl_s == 60.0
    assert hints(kv_hints=value) == Hints(ignored=1)
    assert hints({"kv_hint": {"actions": value}}).ignored <= 1
    assert hints({"kv_hint": envelope(value)}) == Hints(ignored=1)
    assert hints({"kv_hint": envelope(action(value))}) == Hints(ignored=1)
    assert hints({"kv_hint": envelope(action({}, action_version=value))}) == Hints(ignored=1)


def test_a_version_that_is_not_known_says_nothing() -> None:
    assert hints({"kv_hint": envelope(action({"ttl": 60}, action_version="2"))}).ignored == 1
    assert hints({"kv_hint": envelope(action({"ttl": 60}, action_version="1.7"))}).applied == 1
    assert hints({"kv_hint": envelope(action({}, action_version="1." + "0" * 99))}).ignored == 1


def test_large_ones_are_cut() -> None:
    many = envelope(*[action({"x": 1}, action_type="kv.fetch")] * 100_000, action({"ttl": 60}))
    assert hints({"kv_hint": many}) == Hints(
        store=False, applied=1, ignored=100_001 - LOOKED_AT_MAX
    )
    wide = {f"key {n}": n for n in range(100_000)}
    assert hints({"kv_hint": envelope(action(wide))}).ignored == 100_000
    assert hints({"attnstore": wide}, "s") == Hints(session="s", applied=1, ignored=100_000)


@pytest.mark.parametrize("between", [{"action_type": "kv.fetch"}, {"action_type": None}, 7])
@pytest.mark.parametrize("number", [15, 16, LOOKED_AT_MAX - 1])
def test_actions_of_others_hide_none_of_ours(number: int, between: Any) -> None:
    ours = action({"store": False, "ttl": 5})
    found = hints({"kv_hint": envelope(*[between] * number, ours)})
    assert (found.store, found.terms.ttl_s, found.applied) == (False, 5.0, 2)


def test_what_may_be_behind_what_is_read_is_not_stored() -> None:
    """The last of ours may say `store: false`, and cannot be seen."""
    others = [action({}, action_type="kv.fetch")] * LOOKED_AT_MAX
    ours = [action({"ttl": 60})] * ACTIONS_MAX
    hidden = action({"store": False})
    for found, ttl_s in (
        (hints({"kv_hint": envelope(*others, hidden)}), None),
        (hints({"kv_hint": envelope(*ours, hidden)}), 60.0),
        (hints(kv_hints=as_struct(envelope(*ours, hidden))), 60.0),
    ):
        assert (found.store, found.terms.ttl_s, found.ignored) == (False, ttl_s, 1)
    assert hints({"kv_hint": envelope(*ours, *others[ACTIONS_MAX:])}).store
    # What the client says itself holds before.
    said = {"attnstore": {"store": True}, "kv_hint": envelope(*others, hidden)}
    assert hints(said).store


def test_text_that_is_no_utf8_is_an_id_like_any_other() -> None:
    assert hints(session_id="\ud800").session == "\ud800"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=8,
)
SECTION = JSON | st.dictionaries(st.sampled_from([*KEYS, "x"]), JSON)
ACTION = JSON | st.builds(action, SECTION)
PARAMS = st.fixed_dictionaries(
    {},
    optional={
        "attnstore": SECTION,
        "kv_hint": JSON | st.builds(envelope, ACTION),
        "agent_hint": st.dictionaries(
            st.sampled_from(["session_id", "parent_session_id", "cache_control"]), JSON
        ),
        "prompt_cache_key": JSON,
    },
)


@given(JSON | PARAMS, JSON, JSON | st.builds(envelope, ACTION))
def test_what_comes_raises_nothing_and_is_not_changed(
    params: Any, session_id: Any, kv_hints: Any
) -> None:
    before = repr(copy.deepcopy((params, session_id, kv_hints)))
    found = hints(params, session_id, kv_hints)
    assert repr((params, session_id, kv_hints)) == before
    for name in (found.session, found.parent):
        assert name is None or (isinstance(name, str) and 0 < len(name) <= ID_MAX)
    assert found.applied >= 0 and found.ignored >= 0
