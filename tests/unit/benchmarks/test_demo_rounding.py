# SPDX-License-Identifier: Apache-2.0
"""How the demo asks vLLM alone what rounding does: a short demo has to learn of it as well."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from aiohttp import web

from attnstore_lab.bench.client import RequestSettings
from attnstore_lab.bench.closed_loop import take_turns
from attnstore_lab.bench.conversations import Conversation
from attnstore_lab.bench.records import TurnRecord
from benchmarks.agreement import gap_changes, rounding_bound
from benchmarks.demo import ASKED_AGAIN, TOGETHER, ask_again
from tests.fake_openai import send, serving, stream

SETTINGS = RequestSettings(model="m", max_tokens=1, top_logprobs=2)
GAPS = {"replay": 1.0, "whole": 1.25, "cached": 1.75}
"""Nats between the two best candidates, by how the prompt is split."""


class Rounds:
    """A server with a prefix cache as large as a short demo: what it is asked again without a
    salt is split as it was, and answered to the bit."""

    def __init__(self, fails: str = "") -> None:
        self.bodies: list[dict[str, Any]] = []
        self.at_once: list[int] = []
        self._now = 0
        self._seen: set[str] = set()
        self._fails = fails

    async def __call__(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if self._fails and self._fails in body["messages"][-1]["content"]:
            return web.Response(status=500)
        self.bodies.append(body)
        self._now += 1
        self.at_once.append(self._now)
        await asyncio.sleep(0.01)
        self._now -= 1
        salt = body.get("cache_salt")
        split = "replay" if salt is None else "cached" if salt in self._seen else "whole"
        self._seen |= {salt} if salt is not None else set()
        top = [{"token": "a", "logprob": -0.5}, {"token": "b", "logprob": -0.5 - GAPS[split]}]
        choice = {
            "delta": {"content": "a"},
            "logprobs": {"content": [top[0] | {"top_logprobs": top}]},
        }
        response = await stream(request)
        await send(response, {"choices": [choice]})
        await send(response, "[DONE]")
        return response


def conversations(count: int, turns: int) -> list[Conversation]:
    return [
        Conversation(f"c{n}", tuple(f"question {n}.{t}" for t in range(turns)))
        for n in range(count)
    ]


def asked(
    server: Rounds, held: Sequence[Conversation]
) -> tuple[list[tuple[TurnRecord, TurnRecord]], list[dict[str, Any]]]:
    """The pairs, and what was asked for them."""

    async def run() -> tuple[list[tuple[TurnRecord, TurnRecord]], int]:
        async with serving(server) as url:
            records = await take_turns(url, held, SETTINGS, progress=False)
            before = len(server.bodies)
            return await ask_again(url, held, SETTINGS, records), before

    pairs, before = asyncio.run(run())
    return pairs, server.bodies[before:]


def by_salt(bodies: Sequence[dict[str, Any]]) -> list[list[list[dict[str, str]]]]:
    """The prompts of each salt, in the order of their salts' numbers."""
    salts: dict[str, list[list[dict[str, str]]]] = {}
    for body in bodies:
        salts.setdefault(body["cache_salt"], []).append(body["messages"])
    return [salts[salt] for salt in sorted(salts, key=lambda salt: int(salt.split("-")[-1]))]


@pytest.mark.parametrize(("count", "turns"), [(1, 1), (4, 3), (20, 2)])
def test_rounding_is_seen_by_a_demo_of_any_size(count: int, turns: int) -> None:
    pairs, bodies = asked(Rounds(), conversations(count, turns))
    prompts = by_salt(bodies)
    assert len(prompts) == max(ASKED_AGAIN, count)
    assert all(len(twice) == 2 and twice[0] == twice[1] for twice in prompts)
    changes = [change for x, y in pairs for change in gap_changes([x], [y])]
    # From the replay's split to none, and from none to that of vLLM's cache.
    assert set(changes) == {0.25, 0.5}
    assert len(changes) == max(ASKED_AGAIN, count) + min(count * turns, max(ASKED_AGAIN, count))
    assert rounding_bound(changes) == 1.0


def test_last_questions_come_first_and_then_the_same_with_another_beginning() -> None:
    _, bodies = asked(Rounds(), conversations(2, 3))
    said = [[m["content"] for m in twice[0]] for twice in by_salt(bodies)]
    assert [texts[-1][-3:] for texts in said[:6]] == ["0.2", "1.2", "0.1", "1.1", "0.0", "1.0"]
    assert said[0] == ["question 0.0", "a", "question 0.1", "a", "question 0.2"]
    assert said[6] == ["(1) question 0.0", *said[0][1:]]
    assert len({tuple(texts) for texts in said}) == len(said), "none is asked under two salts"


def test_they_come_one_by_one_and_then_together() -> None:
    server = Rounds()
    _, bodies = asked(server, conversations(4, 3))
    assert len(bodies) == 2 * ASKED_AGAIN
    assert server.at_once[-len(bodies) : -ASKED_AGAIN] == [1] * ASKED_AGAIN
    assert max(server.at_once[-ASKED_AGAIN:]) == TOGETHER > 2


def test_conversations_that_failed_are_not_asked_again() -> None:
    pairs, bodies = asked(Rounds(fails="0.1"), conversations(2, 2))
    assert {x.conversation_id for x, _ in pairs} == {"c1"}
    assert len(bodies) == 2 * ASKED_AGAIN
    assert asked(Rounds(fails="question"), conversations(2, 2)) == ([], [])
