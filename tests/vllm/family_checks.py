# SPDX-License-Identifier: Apache-2.0
"""Answers of one family's engine: with KV from the store, and computed from nothing.

A reference is the same prompt under a salt of its own, which finds nothing anywhere. It is
prefilled in chunks of which the first is as long as what the store gave, so that both compute the
same tokens in the same split. What is left is rounding; measure_noise() says how much there is.
Before each load all KV in HBM is overwritten with garbage, so that what was not loaded shows.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from attnstore_vllm.index.keys import encode_tokens
from benchmarks.rounding import drift
from tests.vllm.engine import Answer, Engine
from tests.vllm.prompts import random_tokens

PROMPT, BRANCH, ANSWER, NEW = 1_808, 1_500, 40, 45
SHORT_ANSWER, CONTINUATION = 4, 37
MARGIN = 4.0
"""What is judged has more positions than what was measured."""
FLOORS = {"torch.float32": 2e-5, "torch.bfloat16": 0.03}
"""Nats that no measurement goes below: some steps of a logit of this type."""
GARBAGE = 0x71
"""A byte whose repetition ruins any computation: 1e30 in float32 and bfloat16, among the largest
numbers in float16 and fp8. Finite, since the CPU kernels multiply what is masked out by zero: with
NaN no answer is right, loaded or not."""

_salts = itertools.count()


@dataclass(frozen=True, slots=True)
class Check:
    """One prompt: what was found of it, and both answers."""

    name: str
    length: int
    reference: Answer
    got: Answer

    @property
    def found(self) -> int:
        return self.got.cached_tokens

    @property
    def drift(self) -> float:
        return drift(self.reference, self.got)

    @property
    def num_same(self) -> int:
        """Tokens of the answer that are the reference's."""
        pairs = zip(self.reference.tokens, self.got.tokens, strict=False)
        return sum(here == there for here, there in pairs)

    def is_seen(self, limit: float) -> bool:
        """Whether it is another answer for certain. Where rounding is large, the text says it."""
        return not self.drift <= limit or self.num_same < len(self.reference.tokens) / 4

    def __str__(self) -> str:
        return (
            f"{self.name}: {self.found} of {self.length} found, {self.num_same} of "
            f"{len(self.reference.tokens)} tokens, drift {self.drift:.2e}"
        )


# ---- asking -----------------------------------------------------------------------------------


def fill_kv(worker: Any, byte: int) -> None:
    """Overwrite all KV, of every group, with one byte."""
    storages = {}
    todo = list(worker.model_runner.kv_caches)
    while todo:
        kv = todo.pop()
        if isinstance(kv, torch.Tensor):
            storages[kv.untyped_storage().data_ptr()] = kv.untyped_storage()
        else:  # a recurrent layer's states
            todo.extend(kv)
    for storage in storages.values():
        torch.tensor([], dtype=torch.uint8).set_(storage).fill_(byte)


def forget(engine: Engine) -> None:
    """Empty vLLM's own cache; what it held is garbage."""
    engine.drain()
    assert engine.llm.reset_prefix_cache()
    engine.llm.collective_rpc(fill_kv, args=(GARBAGE,))


def compute(engine: Engine, prompt: Sequence[int], split: int, answer: int = ANSWER) -> Answer:
    """Computed from nothing, the first chunk of the prefill being `split` tokens long."""
    usual = engine.scheduler.max_num_scheduled_tokens
    if 0 < split < usual:
        engine.scheduler.max_num_scheduled_tokens = split
    try:
        found = engine.ask(prompt, max_tokens=answer, salt=f"computed {next(_salts)}")
    finally:
        engine.scheduler.max_num_scheduled_tokens = usual
    assert found.cached_tokens == 0, "a reference is to be computed"
    return found


def load(
    engine: Engine,
    name: str,
    prompt: Sequence[int],
    answer: int = ANSWER,
    splits: Sequence[int] = (),
    steps: Sequence[int] = (),
) -> Check:
    """Asked with nothing in HBM, then computed with the same split.

    Args:
        splits: others in which the KV may have been computed; the nearest answer counts.
        steps: where the steps ended that computed the KV, if that is known of all of it.
    """
    forget(engine)
    with steps_of(engine) as own:
        got = engine.ask(prompt, max_tokens=answer)
    if steps:
        same = [end for end in steps if end <= got.cached_tokens]
        with steps_of(engine, given=[*same, *own]):
            return Check(name, len(prompt), compute(engine, prompt, 0, answer), got)
    checks = [
        Check(name, len(prompt), compute(engine, prompt, split, answer), got)
        for split in (got.cached_tokens, *splits)
    ]
    return min(checks, key=lambda check: check.drift)


def measure_noise(engine: Engine) -> float:
    """The largest drift between runs that found nothing: by splits, and by who computed a token's
    KV, a prefill or the step that sampled it."""
    prompt = random_tokens("noise", PROMPT)
    runs = [compute(engine, prompt, split) for split in (PROMPT, BRANCH, 512, 384)]
    largest = max(drift(runs[0], other) for other in runs[1:])
    for at in (ANSWER // 2, ANSWER - 1):
        longer = compute(engine, [*prompt, *runs[0].tokens[:at]], 0, 1)
        tail = replace(runs[0], tokens=runs[0].tokens[at:][:1], logprobs=runs[0].logprobs[at:][:1])
        largest = max(largest, drift(tail, longer))
    return largest


def limit(engine: Engine) -> float:
    """Drift up to here is rounding."""
    dtype = str(engine.core.vllm_config.model_config.dtype)
    return MARGIN * max(FLOORS[dtype], measure_noise(engine))


def without_store(engine: Engine) -> list[Check]:
    """That the checks can tell: garbage in blocks that nobody was given changes no answer, garbage
    where vLLM's own cache has found something does."""
    prompt = random_tokens("without", PROMPT)
    reference = compute(engine, prompt, 512)
    forget(engine)
    computed = compute(engine, prompt, 512)
    engine.ask(prompt, max_tokens=1)
    engine.llm.collective_rpc(fill_kv, args=(GARBAGE,))
    ruined = engine.ask(prompt, max_tokens=ANSWER)
    return [
        Check("garbage elsewhere", PROMPT, reference, computed),
        Check("garbage in what was found", PROMPT, reference, ruined),
    ]


# ---- checks -----------------------------------------------------------------------------------


def conversation(engine: Engine, tier: str = "dram") -> list[Check]:
    """The same again, one that branches off, the next turn: after a prompt and its answer."""
    prompt = random_tokens(("conversation", tier), PROMPT)
    with steps_of(engine) as ends:
        first = engine.ask(prompt, max_tokens=ANSWER)
    assert first.cached_tokens == 0
    turn = [*prompt, *first.tokens, *random_tokens(("turn", tier), NEW)]
    branch = [*prompt[:BRANCH], *random_tokens(("branch", tier), PROMPT - BRANCH)]
    found = []
    for name, asked in (("again", prompt), ("branch", branch), ("turn", turn)):
        if tier == "nvme":
            engine.evict_dram()
        engine.loaded()
        found.append(load(engine, name, asked, steps=ends))
        loaded = engine.loaded()
        assert loaded == {"dram": 0, "nvme": 0, tier: found[-1].found}, (name, loaded)
    return found


def conversation_with_room(engine: Engine) -> list[Check]:
    """The same from NVMe, of which all is free: what a first branch needs is written too."""
    engine.drain()
    assert engine.llm.reset_prefix_cache(reset_connector=True)
    return conversation(engine, "nvme")


def branches(engine: Engine, shared: int) -> list[Check]:
    """Three prompts, one after the other, that have so many tokens in common."""
    return [load(engine, f"branch {n}", branch_of(n, shared, PROMPT)) for n in range(3)]


def branch_of(number: int, shared: int, length: int) -> list[int]:
    """One of the prompts of `length` tokens that have the first `shared` in common."""
    common = random_tokens(("shared", shared), shared)
    return [*common, *random_tokens(("own", shared, number), length - shared)]


def around(edges: Sequence[int]) -> list[int]:
    return sorted({edge + by for edge in edges for by in (-1, 0, 1)})


def lengths(engine: Engine, edges: Sequence[int], splits: Sequence[int] = ()) -> list[Check]:
    """KV of prompts that end around each edge, continued."""
    ends = around(edges)
    prompts = [random_tokens(("length", end), end + min(end, CONTINUATION)) for end in ends]
    for end, prompt in zip(ends, prompts, strict=True):
        engine.ask(prompt[:end], max_tokens=1)
    return [
        load(engine, f"left {end}", prompt, SHORT_ANSWER, splits)
        for end, prompt in zip(ends, prompts, strict=True)
    ]


def chunked(engine: Engine) -> list[Check]:
    """A prefill in chunks leaves KV, and another one goes on from it."""
    prompt = random_tokens("chunked", PROMPT)
    longer = [*prompt, *random_tokens("chunked on", 900)]
    with steps_of(engine, 512) as ends:
        engine.ask(prompt, max_tokens=1)
        forget(engine)
        got = engine.ask(longer, max_tokens=ANSWER)
    with steps_of(engine, 512, ends):
        reference = compute(engine, longer, 0)
    return [Check("chunked", len(longer), reference, got)]


@contextmanager
def steps_of(engine: Engine, tokens: int = 0, given: Sequence[int] = ()) -> Iterator[list[int]]:
    """Steps of at most so many tokens, if that is given.

    Recurrent models round by where their steps end. So where those end is told, and a reference
    can be given the same ends: vLLM alone would put them at multiples of a block from the start,
    and not where a hit ended. Other models are not asked: nothing is told.
    """
    scheduler = engine.scheduler
    usual, align = scheduler.max_num_scheduled_tokens, scheduler._mamba_block_aligned_split
    ends: list[int] = []

    def split(request: Any, num_new: int, *computed: int) -> int:
        start = request.num_computed_tokens + sum(computed)
        later = [end for end in given if end > start]
        num_new = min([num_new, *(end - start for end in later)])
        if not given:
            num_new = align(request, num_new, *computed)
        ends.append(start + num_new)
        return num_new

    scheduler.max_num_scheduled_tokens = tokens or usual
    scheduler._mamba_block_aligned_split = split
    try:
        yield ends
    finally:
        scheduler.max_num_scheduled_tokens, scheduler._mamba_block_aligned_split = usual, align


def turns(engine: Engine, *, from_hbm: bool) -> tuple[list[Check], list[int], int]:
    """A conversation that goes on. Also where the chunks of it begin that are on NVMe then, and
    where its last prompt ends."""
    tokens: list[int] = random_tokens(("turns", from_hbm), PROMPT)
    for turn in range(3):
        if not from_hbm:
            forget(engine)
        prompt = tokens
        got = engine.ask(prompt, max_tokens=ANSWER)
        tokens = [*prompt, *got.tokens, *random_tokens(("turns", turn), 400)]
    engine.settle()
    begins = []
    for chunk in engine.store.residency.index:
        first, last = chunk.name.position, chunk.name.position + chunk.name.num_tokens
        if chunk.is_behind and chunk.name.tokens == encode_tokens(tokens[first:last]):
            begins.append(first)
    return [load(engine, "another turn", tokens)], sorted(begins), len(prompt)


def on_top_of_hbm(engine: Engine) -> list[Check]:
    """vLLM's own cache has the beginning, or what is behind the window, and the store has more."""
    found = []
    for in_hbm in (200, 1_700):
        prompt = random_tokens(("on top", in_hbm), PROMPT)
        engine.ask(prompt, max_tokens=1)
        forget(engine)
        engine.ask(prompt[:in_hbm], max_tokens=1)
        engine.loaded()
        got = engine.ask(prompt, max_tokens=ANSWER)
        loaded = sum(engine.loaded().values())
        assert 0 < loaded < got.cached_tokens, (loaded, got.cached_tokens)
        reference = compute(engine, prompt, got.cached_tokens)
        found.append(Check(f"on top of {in_hbm}", PROMPT, reference, got))
    return found


def preempted(engine: Engine) -> list[Check]:
    """What runs loses its blocks in mid-answer, and garbage is in them; it has to begin again."""
    prompt = random_tokens("preempted", PROMPT)
    engine.ask(prompt, max_tokens=1)
    forget(engine)
    number = engine.submit(prompt, max_tokens=ANSWER)
    engine.wait_for(lambda: len(_tokens(engine, number)) >= ANSWER // 2, engine.step)
    assert engine.scheduler.reset_prefix_cache(reset_running_requests=True)
    engine.llm.collective_rpc(fill_kv, args=(GARBAGE,))
    (got,) = engine.finish(number)
    engine.drain()
    return [Check("preempted", PROMPT, compute(engine, prompt, PROMPT - 1), got)]


def aborted(engine: Engine) -> list[Check]:
    """Given up amid the prompt, and amid the answer; then what that has left is used."""
    prompt = random_tokens("aborted prompt", PROMPT)
    with steps_of(engine, 512) as ends:
        number = engine.submit(prompt, max_tokens=ANSWER)
        engine.wait_for(lambda: engine.request(number).num_computed_tokens >= 1_024, engine.step)
        engine.abort(number)
    found = [load(engine, "prompt given up", prompt, steps=ends)]
    prompt = random_tokens("aborted answer", PROMPT)
    with steps_of(engine) as ends:
        number = engine.submit(prompt, max_tokens=ANSWER)
        engine.wait_for(lambda: len(_tokens(engine, number)) >= ANSWER // 2, engine.step)
    said = list(engine.request(number).all_token_ids)
    engine.abort(number)
    turn = [*said, *random_tokens("behind what was given up", NEW)]
    return [*found, load(engine, "answer given up", turn, steps=ends)]


def _tokens(engine: Engine, number: str) -> tuple[int, ...]:
    found = engine.answers(number)
    return found[0].tokens if found else ()


def together(engine: Engine) -> list[Check]:
    """Several that share their beginning, at once: more than HBM holds, where it is small."""
    shared = random_tokens("together", 1_000)
    prompts = [[*shared, *random_tokens(("together", n), 500)] for n in range(4)]
    engine.ask(prompts[0], max_tokens=1)
    forget(engine)
    answers = engine.finish(*[engine.submit(p, max_tokens=ANSWER) for p in prompts])
    return [
        Check(f"together {n}", len(prompt), compute(engine, prompt, 1_000), got)
        for n, (prompt, got) in enumerate(zip(prompts, answers, strict=True))
    ]


def preemptions(engine: Engine) -> int:
    """How often vLLM has taken blocks from what ran."""
    return int(sum(m.value for m in engine.llm.get_metrics() if m.name == "vllm:num_preemptions"))


def leave(engine: Engine) -> Answer:
    """A prompt and its answer, kept; returns what the same again computes."""
    prompt = random_tokens("restart", PROMPT)
    engine.ask(prompt, max_tokens=ANSWER)
    engine.settle()
    return compute(engine, prompt, PROMPT - 1)


def leave_branches(engine: Engine, shared: int, length: int, found: int) -> Answer:
    """Three prompts that part after `shared` tokens, kept; returns what a fourth one computes that
    goes on from `found`."""
    for n in range(3):
        forget(engine)
        engine.ask(branch_of(n, shared, length), max_tokens=1)
    engine.settle()
    return compute(engine, branch_of(3, shared, length), found)


def find(engine: Engine, reference: Answer, prompt: list[int] | None = None) -> list[Check]:
    """leave()'s prompt, or another one, after a restart: what there is of it is on NVMe only."""
    prompt = prompt or random_tokens("restart", PROMPT)
    engine.llm.collective_rpc(fill_kv, args=(GARBAGE,))
    engine.loaded()
    got = engine.ask(prompt, max_tokens=ANSWER)
    assert engine.loaded() == {"dram": 0, "nvme": got.cached_tokens}
    return [Check("restart", len(prompt), reference, got)]


def num_groups(engine: Engine) -> int:
    return len(engine.scheduler.kv_cache_config.kv_cache_groups)
