# SPDX-License-Identifier: Apache-2.0
"""Hints come from anybody: what makes sense is taken, and nothing else does any harm."""

from __future__ import annotations

import copy
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnstore_vllm.config.values import DURATION_MAX_S, seconds_of
from attnstore_vllm.hints import HintReader, Hints, PrefetchOrder, prefetch_order
from attnstore_vllm.policy.priority import Priority
from attnstore_vllm.policy.visits import Terms

READER = HintReader(ttl_s=None, longest_pin_s=3600.0)


def read(hints: object, reader: HintReader = READER) -> Hints:
    return reader.read({"attnstore": hints})


@pytest.mark.parametrize(
    ("hints", "expected"),
    [
        ({"store": False}, Hints(store=False, applied=1)),
        ({"store": True}, Hints(applied=1)),
        ({"priority": "low"}, Hints(terms=Terms(Priority.LOW), applied=1)),
        ({"priority": "normal"}, Hints(applied=1)),
        ({"priority": "high", "ttl": 90}, Hints(terms=Terms(Priority.HIGH, 90.0), applied=2)),
        ({"ttl": "10m"}, Hints(terms=Terms(ttl_s=600.0), applied=1)),
        ({"pin": True}, Hints(terms=Terms(pin_s=3600.0), applied=1)),
        ({"pin": True, "ttl": 60}, Hints(terms=Terms(ttl_s=60.0, pin_s=60.0), applied=2)),
        ({"pin": True, "ttl": "7d"}, Hints(terms=Terms(ttl_s=604_800.0, pin_s=3600.0), applied=2)),
        ({"pin": False}, Hints(applied=1)),
        ({"ended": True}, Hints(terms=Terms(Priority.ENDED), applied=1)),
        ({"ended": False}, Hints(applied=1)),
        (
            {"ended": True, "priority": "high", "ttl": 60, "pin": True},
            Hints(terms=Terms(Priority.ENDED, 60.0), applied=4),
        ),
        ({}, Hints()),
    ],
)
def test_what_makes_sense_is_taken(hints: dict[str, object], expected: Hints) -> None:
    assert read(hints) == expected


@pytest.mark.parametrize(
    "hints",
    [
        {"store": "false"}, {"store": 0}, {"store": None}, {"store": []},
        {"priority": 1}, {"priority": "urgent"}, {"priority": ["low"]}, {"priority": None},
        {"ttl": 0}, {"ttl": -5}, {"ttl": True}, {"ttl": float("nan")}, {"ttl": float("inf")},
        {"ttl": 10**400}, {"ttl": "soon"}, {"ttl": "10 years"}, {"ttl": "1e9s"}, {"ttl": [60]},
        {"ttl": "9" * 100_000 + "s"}, {"ttl": "999999999d"}, {"ttl": "\u0661\u0660m"},
        {"pin": "yes"}, {"pin": 1}, {"pin": {}}, {"ended": "yes"}, {"ended": 1},
        {"Priority": "low"}, {"": 1},
    ],
)  # fmt: skip
def test_what_makes_none_is_ignored_and_the_rest_is_not(hints: dict[str, object]) -> None:
    assert read(hints) == Hints(ignored=1)
    key = next(iter({"store", "priority", "ttl", "pin"} - hints.keys()))
    value = {"store": True, "priority": "normal", "ttl": 60, "pin": False}[key]
    both = read({**hints, key: value})
    assert (both.applied, both.ignored) == (1, 1)


@pytest.mark.parametrize("section", [None, True, 3, "store", [], ["store"], [[[]]] * 1000])
def test_a_section_that_is_none(section: object) -> None:
    assert READER.read({"attnstore": section}) == Hints(ignored=1)


@pytest.mark.parametrize("params", [None, {}, [], "attnstore", 5, {"do_remote_prefill": True}])
def test_what_is_for_others_is_no_hint(params: object) -> None:
    assert READER.read(params) == Hints()
    assert prefetch_order(params) is None


def test_deep_and_large_ones_cost_nothing() -> None:
    deep: object = []
    for _ in range(100_000):
        deep = [deep]
    large = {f"key {n}": n for n in range(100_000)}
    assert read(dict.fromkeys(("store", "priority", "ttl", "pin"), deep)) == Hints(ignored=4)
    assert read(large).ignored == 100_000


def test_pins_are_for_servers_that_allow_them_and_end_with_the_servers_time() -> None:
    assert read({"pin": True}, HintReader()) == Hints(ignored=1)
    assert read({"pin": True}, HintReader(60.0, 3600.0)).terms.pin_s == 60.0


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=10,
)
KEYS = st.sampled_from(["store", "priority", "ttl", "pin", "prefetch", "x"])


@given(JSON | st.fixed_dictionaries({"attnstore": JSON | st.dictionaries(KEYS, JSON)}))
def test_whatever_comes(params: object) -> None:
    """Nothing is raised, nothing is changed, every key is counted once, all times are sane."""
    before = copy.deepcopy(params)
    found = READER.read(params)
    assert repr(params) == repr(before)
    section = params.get("attnstore", {}) if isinstance(params, dict) else {}
    keys = len(section) if isinstance(section, dict) else 1
    assert found.applied + found.ignored == keys
    assert found.terms.ttl_s is None or 1 <= found.terms.ttl_s <= DURATION_MAX_S
    assert found.terms.pin_s is None or found.terms.pin_s <= 3600.0
    assert prefetch_order(params) is None


@pytest.mark.parametrize(
    ("value", "seconds"),
    [(1, 1), ("1s", 1), (1.5, 1.5), ("2.5 m", 150), ("1h", 3600), ("2d", 172_800), ("1w", None),
     ("0.5s", None), ("", None), ("m", None), ("-1m", None), (DURATION_MAX_S + 1, None)],
)  # fmt: skip
def test_durations(value: object, seconds: float | None) -> None:
    assert seconds_of(value) == seconds


# ---- the prefetch's order --------------------------------------------------------------------


@given(st.lists(st.integers(0, 2**32 - 1)), st.none() | st.text())
def test_an_order_arrives_as_it_was_given(token_ids: list[int], salt: str | None) -> None:
    assert prefetch_order(PrefetchOrder(token_ids, salt).as_params()) == PrefetchOrder(
        token_ids, salt
    )


def test_no_request_body_can_be_an_order() -> None:
    params = PrefetchOrder([1, 2], None).as_params()
    with pytest.raises(TypeError):
        json.dumps(params)
    for forged in ("\u0000\u0000\u0000\u0001", [0, 0, 0, 1], {"0": 1}):
        assert prefetch_order({"attnstore": {"prefetch": forged}}) is None
        assert read({"prefetch": forged}) == Hints(ignored=1)


@pytest.mark.parametrize("value", ["", "x" * 65, 1, True, ["bash"], {"name": "bash"}, None, b"a"])
@pytest.mark.parametrize("key", ["tool", "agent"])
def test_a_name_that_makes_no_sense_is_ignored_and_counted(key: str, value: object) -> None:
    found = read({key: value})
    assert found == Hints(ignored=1)
    assert found.terms_of(b"tenant") == Terms()


def test_names_are_of_their_tenant() -> None:
    found = read({"tool": "bash", "agent": "x" * 64})
    assert found == Hints(tool="bash", agent="x" * 64, applied=2)
    assert found.terms_of(b"a") != found.terms_of(b"b")
    assert found.terms_of(b"a").told == (b"a", "x" * 64, "bash")
    assert read({"ttl": 60}).terms_of(b"a").told is None
