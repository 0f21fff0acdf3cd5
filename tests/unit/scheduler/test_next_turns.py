# SPDX-License-Identifier: Apache-2.0
"""The next turn of a conversation says what becomes of its KV; who merely begins like it does not.

Goal: `ended`, a shorter `ttl` and `priority: low` of a next turn reach all that its conversation
alone has left, and nothing of one that begins alike.
Method: a conversation leaves chunks in a way that makes it hard to know again. Then its next turn
comes with these terms, or a stranger does; and the runs of its chunks are looked at.
"""

from __future__ import annotations

import pytest

from attnstore_vllm.policy.priority import Priority
from attnstore_vllm.policy.returns import ReturnEstimator
from attnstore_vllm.policy.visits import NO_TERMS, Run, Terms, answer, visit_of
from attnstore_vllm.store.lookup import Lookup
from tests.helpers import CHUNK_TOKENS, memory_rig, name_of, sequence_of, tokens_of
from tests.step_world import BLOCK, CHUNK, StepWorld
from tests.unit.policy.test_visits import Clock
from tests.vllm_objects import output

SYSTEM = tokens_of(1, 2 * CHUNK)
QUESTION = tokens_of(2, 8)
TTL_S = 20
TERMS: dict[str, dict[str, object]] = {
    "ended": {"ended": True},
    "ttl": {"ttl": TTL_S},
    "low": {"priority": "low"},
}


class Chat(StepWorld):
    """Others have asked behind the same system prompt."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(monkeypatch, store={"clock": Clock(), "wall": Clock()})
        for n in (50, 60):
            self.turn(f"other {n}", SYSTEM + tokens_of(n, 20), tokens_of(n + 1, 8))

    def turn(self, name: str, prompt: list[int], answer: list[int], **hints: object) -> list[int]:
        """Returns the prompt and its answer."""
        params = {"attnstore": hints} if hints else None
        request = self.request(name, list(prompt), kv_transfer_params=params)
        self.come(request)
        self.start(request, self.answer(request))
        self.end_step(request)
        before = request.num_tokens
        request.all_token_ids += answer
        self.tables[name] = list(range(1, 2 + request.num_tokens // BLOCK))
        self.report(self.side.build_step(output({}, {name: (before, len(answer))})))
        request.num_computed_tokens = request.num_tokens
        self.finish(request)
        self.end_step()
        return [*prompt, *answer]

    def runs_of(self, text: list[int], first: int = 2) -> list[Run]:
        """Of its whole chunks behind the system prompt, or from another on."""
        keys = sequence_of(text)
        names = [name_of(keys, n) for n in range(first, len(text) // CHUNK)]
        chunks = [self.store.residency.index.get(name.key) for name in names]
        return [self.store.residency.run_of(chunk) for chunk in chunks if chunk is not None]


def has_said(run: Run, what: str) -> bool:
    if what == "ttl":
        return run.lease is not None and run.lease.ttl_s == TTL_S
    return run.priority is (Priority.ENDED if what == "ended" else Priority.LOW)


@pytest.mark.parametrize("what", TERMS)
@pytest.mark.parametrize("length", [8, 20])
def test_a_first_question_shorter_than_a_chunk(
    length: int, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer fills its chunk."""
    chat = Chat(monkeypatch)
    text = chat.turn("one", SYSTEM + tokens_of(2, length), tokens_of(3, 2 * CHUNK - length))
    text = chat.turn("two", text + tokens_of(4, 20), tokens_of(5, 12))
    text = chat.turn("three", text + tokens_of(6, 10), tokens_of(7, 6), **TERMS[what])
    runs = chat.runs_of(text)
    assert len(runs) == 5
    assert all(has_said(run, what) for run in runs)
    chat.close()


@pytest.mark.parametrize("what", TERMS)
@pytest.mark.parametrize("num_alike", [4, 8])
def test_who_begins_like_a_short_question(
    num_alike: int, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stranger has some of its tokens, or has asked the same and goes on otherwise."""
    chat = Chat(monkeypatch)
    text = chat.turn("one", SYSTEM + QUESTION, tokens_of(3, 2 * CHUNK - 8))
    stranger = SYSTEM + QUESTION[:num_alike] + tokens_of(8, 40)
    chat.turn("stranger", stranger, tokens_of(9, 8), **TERMS[what])
    chat.turn("same", SYSTEM + QUESTION, [], **TERMS[what])
    runs = chat.runs_of(text)
    assert len(runs) == 2
    assert not any(has_said(run, what) for run in runs)
    chat.close()


@pytest.mark.parametrize("what", TERMS)
def test_who_begins_like_a_long_question(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """He has whole chunks of the prompt, and not all of it."""
    chat = Chat(monkeypatch)
    prompt = SYSTEM + tokens_of(2, 3 * CHUNK)
    text = chat.turn("one", prompt, tokens_of(3, CHUNK))
    stranger = prompt[:-CHUNK] + tokens_of(8, 40)
    chat.turn("stranger", stranger, tokens_of(9, 8), **TERMS[what])
    runs = chat.runs_of(text)
    assert len(runs) == 4
    assert not any(has_said(run, what) for run in runs)
    chat.close()


@pytest.mark.parametrize("has_ended", [False, True])
@pytest.mark.parametrize("terms", [Terms(ttl_s=TTL_S), Terms(Priority.ENDED)], ids=["ttl", "ended"])
def test_a_turn_that_found_nothing_and_left_nothing(terms: Terms, has_ended: bool) -> None:
    """The mark that its conversation was known by is of that turn now. It is shared if the first
    request runs still: that is no next turn."""
    clock = Clock()
    store = memory_rig(dram_slots=16, clock=clock, wall=clock, threaded=False).store
    prompt = [*range(2 * CHUNK_TOKENS + 4)]
    answered = [*prompt, *range(100, 100 + 2 * CHUNK_TOKENS - 4)]

    def ask(tokens: list[int], terms: Terms = NO_TERMS, min_tokens: int = 1) -> Run:
        clock.now += 1
        lookup = Lookup(sequence_of(tokens))
        own = store.arrive(f"{clock.now}", lookup, len(tokens), min_tokens, terms)[1].own
        clock.now += 1
        return own

    first = ask(prompt)
    names = [name_of(sequence_of(answered), n) for n in range(4)]
    chunks = [store.begin_save(name, first) for name in names]
    store.finish_saves([chunk for chunk in chunks if chunk is not None])
    if has_ended:
        store.answered(first, 0)
    store.answered(ask(answered, min_tokens=1000), 0)
    last = ask([*answered, *range(500, 530)], terms)
    runs = [store.residency.run_of(chunk) for chunk in chunks if chunk is not None]
    assert [run is last for run in runs] == [has_ended] * 4


@pytest.mark.parametrize("has_ended", [False, True])
def test_a_copy_that_was_made_before_its_request_ended(has_ended: bool) -> None:
    """As of a state in between, where the next turn's hit ends."""
    estimator = ReturnEstimator()
    one = visit_of(estimator, [], [1, 2], 40, 0.0).own
    low = one.copy(priority=Priority.LOW_VALUE)
    for_others = one.copy(is_shared=True)
    if has_ended:
        answer(one, 0, estimator, 1.0)
    two = visit_of(estimator, [one, one], [1, 2], 44, 2.0)
    assert (two.joined(2, low, 2.0) is two.own) == has_ended
    assert two.joined(2, for_others, 2.0).is_shared


@pytest.mark.parametrize("num_others", [1, 2, 3])
def test_what_others_share_keeps_a_high_priority(
    num_others: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    chat = Chat(monkeypatch)
    common = SYSTEM + tokens_of(70, CHUNK + 5)
    chat.turn("one", common + tokens_of(71, 2 * CHUNK), tokens_of(72, 8), priority="high")
    for n in range(num_others):
        chat.turn(f"alike {n}", common + tokens_of(80 + n, 20), tokens_of(90 + n, 8))
    assert {run.priority for run in chat.runs_of(common)} == {Priority.HIGH}
    chat.close()


@pytest.mark.parametrize("length", [4, 20])
def test_who_asks_the_same_document_lowers_no_high_priority(
    length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """He sends no hints, and both questions begin in the chunk in which the document ends."""
    chat = Chat(monkeypatch)
    document = SYSTEM + tokens_of(70, 2 * CHUNK + 8)
    chat.turn("one", document + tokens_of(71, 5), tokens_of(72, 6), priority="high")
    chat.turn("other", document + tokens_of(73, length), tokens_of(74, 5))
    assert {run.priority for run in chat.runs_of(document)} == {Priority.HIGH}
    chat.close()


@pytest.mark.parametrize("is_next_turn", [False, True])
def test_a_session_ends_no_document_that_another_asks(
    is_next_turn: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    chat = Chat(monkeypatch)
    document = SYSTEM + tokens_of(70, 2 * CHUNK + 8)
    chat.turn("a", document + tokens_of(71, 5), tokens_of(72, 3), session="a")
    text = chat.turn("b", document + tokens_of(73, 6), tokens_of(74, 3), session="b")
    prompt = text + tokens_of(75, 5) if is_next_turn else tokens_of(76, 20)
    chat.turn("over", prompt, tokens_of(77, 2), session="b", ended=True)
    assert {run.priority for run in chat.runs_of(document)} == {Priority.NORMAL}
    chat.close()


OWN_SYSTEM = tokens_of(40, 2 * CHUNK)


@pytest.mark.parametrize("over", ["its next turn", "a question", "another prompt"])
@pytest.mark.parametrize("num_questions", [1, 2, 5])
@pytest.mark.parametrize("system", [SYSTEM, OWN_SYSTEM], ids=["of others", "of its own"])
def test_a_session_ends_its_own_document(
    system: list[int], num_questions: int, over: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others have used the system prompt before it, and they go on."""
    chat = Chat(monkeypatch)
    document = system + tokens_of(70, 2 * CHUNK + 8)
    for n in range(num_questions):
        question = document + tokens_of(80 + n, 5)
        text = chat.turn(f"question {n}", question, tokens_of(90 + n, 6), session="a")
    more = tokens_of(99, 20)
    prompts = {"its next turn": text + more, "a question": document + more, "another prompt": more}
    chat.turn("over", prompts[over], tokens_of(98, 3), session="a", ended=True)
    assert [run.priority for run in chat.runs_of(document)] == [Priority.ENDED] * 2
    assert [run.priority for run in chat.runs_of(SYSTEM, 0)] == [Priority.NORMAL] * 2
    chat.close()


@pytest.mark.parametrize("ends", ["a", "child"])
def test_a_session_ends_a_document_that_its_child_asks(
    ends: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The child alone ends nothing of its parent's."""
    chat = Chat(monkeypatch)
    document = SYSTEM + tokens_of(70, 2 * CHUNK + 8)
    chat.turn("one", document + tokens_of(71, 5), tokens_of(72, 6), session="a")
    question = document + tokens_of(73, 5)
    chat.turn("two", question, tokens_of(74, 6), session="child", parent="a")
    chat.turn("over", tokens_of(75, 20), tokens_of(76, 2), session=ends, ended=True)
    expected = Priority.ENDED if ends == "a" else Priority.NORMAL
    assert {run.priority for run in chat.runs_of(document)} == {expected}
    chat.close()
