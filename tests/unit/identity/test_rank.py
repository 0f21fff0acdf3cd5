# SPDX-License-Identifier: Apache-2.0
"""What a rank says of itself comes to the scheduler side as it was said."""

from __future__ import annotations

import json

from attnstore_vllm.identity.rank import KvFacts, KvPage, RankDescription

PAGE = KvPage("bfloat16", 16, 8, 128, (0, 1), (2, 3))


def facts(layers: str = "", others: str = "") -> KvFacts:
    live = (("attention", "a" * 64), ("written", "b" * 64))
    return KvFacts("cpu", "t", (2, 16), 4096, (0, 1), (2, 1), "x", "k", live, others, layers)


def described(stages: tuple[tuple[int, ...], ...]) -> RankDescription:
    return RankDescription(facts("c"), 7, 40, True, "own", None, PAGE, None, stages, 2)


def test_a_description_comes_back() -> None:
    for stages in ((), ((4096, 4096, 1024, 4096), (1024,), (4096,) * 3)):
        told = described(stages)
        assert RankDescription.of_json(json.loads(json.dumps(told.to_json()))) == told


def test_many_layers_take_little_room() -> None:
    """A rank has a page, and a description that does not fit ends in an idle store."""
    few = len(json.dumps(described(()).to_json()))
    many = len(json.dumps(described(8 * ((1 << 20,) * 16,)).to_json()))
    assert many - few < 200


def test_with_one_stage_the_facts_are_as_they_were() -> None:
    assert {"layers", "others"}.isdisjoint(facts().facts())
    assert facts("c").facts()["layers"] == "c"
    assert facts("c").facts().keys() - facts().facts().keys() == {"layers"}
