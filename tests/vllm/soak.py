# SPDX-License-Identifier: Apache-2.0
"""Many mixed requests, and every answer compared with an engine that has no store.

It is long since the requests, their reference and the verdict are one run.

    python -m tests.vllm.soak --requests 2000 --seed 7
    python -m tests.vllm.soak --requests 600 --family gemma3
    python -m tests.vllm.soak --requests 3000 --documents

Conversations that share beginnings, go on, branch off and are asked again; salts, priorities,
several answers, greedy and drawn; aborts at any moment; HBM so small that requests preempt each
other, DRAM so small that most KV is on NVMe, and an NVMe tier that overflows too.

The reference reads each prompt with its answer and says how likely it finds every token of it:
so all tokens of all answers are compared, drawn ones too. They may differ by what rounding can
do, and that is measured in the same run: the reference reads again with prompts split at other
tokens, and it answers the prompts itself, token by token and many at a time. With AMX a token that
is computed alone differs most from one that is read with others, so an answer that is beyond that
is read once more as it was said, token by token. Wrong KV moves log-probabilities by nats; faults
are planted to show that this is seen.

With `--documents` some requests have documents of other prompts in an order of their own, and ask
for approximate KV. What they answer is not compared; others go on from it, and ask for exact KV.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any

from attnstore_lab.testing.family_models import FAMILIES as MODELS
from attnstore_lab.testing.tiny_model import TINY
from benchmarks.rounding import CANDIDATES, bound, drift
from tests.vllm.engine import BLOCK, Answer, Engine, EngineSpec, candidates
from tests.vllm.host import EngineHost
from tests.vllm.prompts import FIRST_TOKEN, LAST_TOKEN
from tests.vllm.stored import foreign_chunks

MODEL_LEN = 1280
PLAYING: dict[str, Any] = {
    "blocks": 13, "dram": "4MiB", "nvme": "16MiB", "scrub": "8MiB",
    "vllm": {
        "max_model_len": MODEL_LEN, "max_num_batched_tokens": 512, "max_num_seqs": 8,
        "scheduling_policy": "priority",
    },
}  # fmt: skip
DEEP = replace(TINY, layers=4)
"""A model whose tokens of documents can be chosen by two layers of it."""
DOCUMENTS: dict[str, Any] = {
    "shape": DEEP, "dram": "8MiB", "nvme": "32MiB",
    "settings": {
        "truncation": {"share": "everyone", "documents": True, "recompute_by": "deviation"}
    },
}  # fmt: skip
DRAFTS = {
    "method": "ngram",
    "num_speculative_tokens": 3,
    "prompt_lookup_min": 1,
    "prompt_lookup_max": 3,
}
REFERENCE: dict[str, Any] = {
    "store": None, "blocks": 160,
    "vllm": {
        "max_model_len": MODEL_LEN, "max_num_batched_tokens": MODEL_LEN, "max_num_seqs": 8,
        "enable_prefix_caching": False,
    },
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "gemma3": {"blocks": 66, "dram": "16MiB", "nvme": "48MiB"},
    "gpt_oss": {"blocks": 26, "dram": "32MiB", "nvme": "96MiB"},
    "qwen3_next": {"blocks": 36, "dram": "8MiB", "nvme": "24MiB"},
}
"""Sizes with which each of these models is preempted and loses what it has stored."""
SALTS = (None, None, "alice", "bob")
SHARED = (200, 300, 512)
"""Lengths of beginnings that many conversations have in common."""
ASKS = {"extra_args": {"kv_transfer_params": {"attnstore": {"truncation": True}}}}
CROWD = 6
"""Requests of two blocks that fill the HBM of PLAYING."""

Text = tuple[Sequence[int], Sequence[int]]
"""A prompt and its answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One request, and what it answered: as many answers as it asked for, if it was not aborted.

    An aborted one has those parts of its answers that had come.
    """

    tokens: list[int]
    salt: str | None
    sampling: dict[str, Any]
    priority: int = 0
    abort_after: int | None = None
    """Steps after which it is aborted."""
    asks: bool = False
    """For approximate KV. Its answers are not compared."""
    found: list[Answer] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Play:
    """What came of one run with the store."""

    jobs: list[Job]
    counts: dict[str, int]
    loaded: dict[str, int]
    preemptions: int
    moved: int
    """Tokens whose KV was moved."""
    foreign: list[tuple[int, int]]


class Author:
    """Writes requests, from a seed and from what was answered before."""

    def __init__(self, seed: int, *, documents: bool = False) -> None:
        self._random = Random(seed)
        self._has_documents = documents
        self._shared = [self._words(length) for length in SHARED]
        self._conversations: list[tuple[str | None, list[int]]] = []

    def write(self) -> Job:
        rng = self._random
        salt, tokens = rng.choice(SALTS), list(rng.choice(self._shared))
        if self._has_documents and rng.random() < 0.4:
            return self._with_documents(salt)
        kind = rng.random()
        if self._conversations and kind < 0.7:
            salt, tokens = rng.choice(self._conversations[-12:])
            if kind < 0.15:  # branches off anywhere
                tokens = tokens[: rng.randint(1, len(tokens))]
        if kind > 0.05 or len(tokens) > MODEL_LEN - 100:
            room = MODEL_LEN - 100 - len(tokens)
            tokens = [
                *tokens[: MODEL_LEN - 200],
                *self._words(rng.randint(1, max(2, min(room, 200)))),
            ]
        sampling: dict[str, Any] = {"max_tokens": rng.randint(1, 24)}
        if rng.random() < 0.4:
            # Without a seed: with one, vLLM's CPU build dies of a prompt computed in parts.
            sampling["temperature"] = rng.choice((0.7, 1.5))
            if rng.random() < 0.2:
                sampling["n"] = 2
        if rng.random() < 0.03:
            sampling["prompt_logprobs"] = 1
        return Job(
            tokens=tokens,
            salt=salt,
            sampling=sampling,
            priority=rng.randrange(3),
            abort_after=rng.randrange(20) if rng.random() < 0.12 else None,
        )

    def _with_documents(self, salt: str | None) -> Job:
        """Some of what others begin with, in any order, with gaps."""
        tokens: list[int] = []
        for shared in self._random.sample(self._shared, self._random.randint(1, len(SHARED))):
            first = self._random.randrange(100)
            tokens += [*self._words(self._random.randint(1, 40)), *shared[first:]]
        tokens += self._words(self._random.randint(1, 60))
        job = Job(tokens=tokens[: MODEL_LEN - 100], salt=salt, sampling={"max_tokens": 8})
        aborts = self._random.randrange(12) if self._random.random() < 0.15 else None
        return replace(job, asks=self._random.random() < 0.8, abort_after=aborts)

    def heard(self, job: Job) -> None:
        """The conversation goes on from this answer."""
        self._conversations.append((job.salt, [*job.tokens, *job.found[0].tokens]))

    def arrives(self) -> bool:
        return self._random.random() < 0.5

    def last_words(self) -> list[Job]:
        """Some conversations once more, a token longer: what the store has of them is used."""
        return [
            Job(tokens=[*tokens, FIRST_TOKEN], salt=salt, sampling={"max_tokens": 4})
            for salt, tokens in self._conversations[::-3]
            if len(tokens) < MODEL_LEN - 10
        ]

    def crowd(self) -> list[Job]:
        """Requests whose prompts fill HBM together, so that one is preempted when another grows."""
        return [
            Job(
                tokens=self._words(2 * BLOCK - 6),
                salt=None,
                sampling={"max_tokens": 24, "ignore_eos": True},
                priority=number % 3,
            )
            for number in range(CROWD)
        ]

    def _words(self, count: int) -> list[int]:
        return [self._random.randint(FIRST_TOKEN, LAST_TOKEN) for _ in range(count)]


# ---- in the engine's process ----------------------------------------------------------------


def play(engine: Engine, seed: int, requests: int, *, documents: bool = False) -> Play:
    """Run that many requests with the store, then go on with some conversations once more."""
    author = Author(seed, documents=documents)
    moved = engine.metric("moved_tokens", "dram")
    before, preempted = dict(engine.store.figures().counts), _preemptions(engine)
    engine.loaded()
    running: dict[str, tuple[Job, int]] = {}
    jobs: list[Job] = []
    written = steps = 0
    while running or written < requests:
        if written < requests and len(running) < 12 and (author.arrives() or not running):
            job = author.write()
            running[_submit(engine, job)] = job, steps
            written += 1
        for number in engine.step():
            if number in engine.done:
                job, _ = running.pop(number)
                jobs.append(_end(engine, number, job))
                author.heard(jobs[-1])
        steps += 1
        for number, (job, since) in list(running.items()):
            if job.abort_after is not None and steps - since > job.abort_after:
                engine.abort(number)
                jobs.append(_end(engine, number, job))
                del running[number]
    jobs += _ask_together(engine, author.crowd())
    engine.forget_hbm()  # from here on HBM holds garbage, or what was loaded
    for job in author.last_words():
        jobs.append(replace(job, found=[engine.ask(job.tokens, salt=job.salt, **job.sampling)]))
    engine.check_quiet()
    counts = engine.store.figures().counts
    sequences = [
        (j.salt, [*j.tokens, *tokens])
        for j in jobs
        for tokens in ([a.tokens for a in j.found] or [()])
    ]
    return Play(
        jobs=jobs,
        counts={name: counts[name] - before.get(name, 0) for name in counts},
        loaded=engine.loaded(),
        preemptions=_preemptions(engine) - preempted,
        moved=int(engine.metric("moved_tokens", "dram") - moved),
        # Behind moved KV names are of a lineage of their own.
        foreign=[] if documents else foreign_chunks(engine, sequences),
    )


def _ask_together(engine: Engine, jobs: list[Job]) -> list[Job]:
    running = {_submit(engine, job): job for job in jobs}
    engine.wait_for(lambda: running.keys() <= engine.done, engine.step)
    return [_end(engine, number, job) for number, job in running.items()]


def _end(engine: Engine, number: str, job: Job) -> Job:
    job = replace(job, found=engine.answers(number))
    engine.forget(number)
    return job


def forget(engine: Engine) -> None:
    """Drop every tier."""
    engine.drain()
    assert engine.llm.reset_prefix_cache(reset_connector=True)


def read(engine: Engine, texts: Sequence[Text], budget: int) -> list[Answer]:
    """What the model says of each answer, when it reads it after its prompt."""
    engine.scheduler.max_num_scheduled_tokens = budget
    return [_read(engine, prompt, said) for prompt, said in texts]


def read_as_said(engine: Engine, texts: Sequence[Text]) -> list[Answer]:
    """The same, but that it reads the prompt in one step and then a token in each."""
    found = []
    for prompt, said in texts:
        engine.scheduler.max_num_scheduled_tokens = len(prompt)
        number = _begin_to_read(engine, prompt, said)
        engine.step()
        engine.scheduler.max_num_scheduled_tokens = 1
        found.append(_end_reading(engine, number, prompt, said))
    return found


def _read(engine: Engine, prompt: Sequence[int], said: Sequence[int]) -> Answer:
    return _end_reading(engine, _begin_to_read(engine, prompt, said), prompt, said)


def _begin_to_read(engine: Engine, prompt: Sequence[int], said: Sequence[int]) -> str:
    return engine.submit(
        [*prompt, *said], prompt_logprobs=CANDIDATES, logprobs=None, detokenize=False
    )


def _end_reading(engine: Engine, number: str, prompt: Sequence[int], said: Sequence[int]) -> Answer:
    engine.wait_for(lambda: number in engine.done, engine.step)
    positions = engine.prompt_logprobs(number)[len(prompt) :]
    engine.forget(number)
    return Answer(tuple(said), tuple(map(candidates, positions)), 0)


def write(engine: Engine, prompts: Sequence[list[int]], length: int) -> list[Answer]:
    """Greedy answers, many at a time."""
    engine.scheduler.max_num_scheduled_tokens = 300
    numbers = [engine.submit(prompt, max_tokens=length) for prompt in prompts]
    return engine.finish(*numbers)


def _submit(engine: Engine, job: Job) -> str:
    how = {**job.sampling, **(ASKS if job.asks else {})}
    return engine.submit(job.tokens, salt=job.salt, priority=job.priority, **how)


def _preemptions(engine: Engine) -> int:
    return sum(int(m.value) for m in engine.llm.get_metrics() if m.name == "vllm:num_preemptions")


# ---- the verdict ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Verdict:
    answers: int
    tokens: int
    """Compared, each with its candidates."""
    rounding: float
    """The largest difference between two ways to compute without the store, in nats."""
    largest: float
    """The largest difference between an answer and what the reference says of it."""
    wrong: list[int]
    """Answers whose difference rounding cannot explain."""


def judge(reference: EngineHost, jobs: Sequence[Job], rounding: float | None = None) -> Verdict:
    """Compare all answers with what an engine without the store says of them.

    Args:
        rounding: as it was measured before; None to measure it with these answers.
    """
    compared = [job for job in jobs if not job.asks]
    said = [(job, answer) for job in compared for answer in job.found if answer.tokens]
    texts = [(job.tokens, answer.tokens) for job, answer in said]
    expected = reference.call(read, texts, MODEL_LEN)
    if rounding is None:
        rounding = measure_rounding(reference, texts, expected)
    drifts = [drift(a, e) for (_, a), e in zip(said, expected, strict=True)]
    limit = bound([rounding])
    wrong = [i for i, value in enumerate(drifts) if not value <= limit]
    again = reference.call(read_as_said, [texts[i] for i in wrong])
    for i, answer in zip(wrong, again, strict=True):
        drifts[i] = min(drifts[i], drift(said[i][1], answer))
    return Verdict(
        answers=len(said),
        tokens=sum(len(answer.tokens) for _, answer in said),
        rounding=rounding,
        largest=max(drifts),
        wrong=[i for i in wrong if not drifts[i] <= limit],
    )


def measure_rounding(
    reference: EngineHost, texts: Sequence[Text], expected: Sequence[Answer]
) -> float:
    """Read some again, split elsewhere; answer some, and read the answers."""
    some = range(0, len(texts), 5)
    split = reference.call(read, [texts[i] for i in some], 300)
    drifts = [drift(expected[i], again) for i, again in zip(some, split, strict=True)]
    prompts = [list(texts[i][0]) for i in some]
    written = reference.call(write, prompts, 20)
    spoken = reference.call(
        read, [(p, a.tokens) for p, a in zip(prompts, written, strict=True)], MODEL_LEN
    )
    return max(*drifts, *(drift(a, b) for a, b in zip(written, spoken, strict=True)))


def main() -> None:
    parser = argparse.ArgumentParser(description="Soak the store; see the module.")
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--family", choices=FAMILIES, help="a model of several KV cache groups")
    parser.add_argument("--drafts", action="store_true", help="with n-gram speculative decoding")
    parser.add_argument("--documents", action="store_true", help="see the module")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="attnstore-soak-") as name:
        directory = Path(name)
        verdict, played = soak(directory, directory, options)
    print(verdict)
    print(
        played.counts, played.loaded, f"{played.preemptions} preemptions,", f"{played.moved} moved"
    )
    if verdict.wrong or played.foreign:
        raise SystemExit(f"WRONG: jobs {verdict.wrong}, foreign chunks {played.foreign}")


def soak(directory: Path, models: Path, options: argparse.Namespace) -> tuple[Verdict, Play]:
    playing, reading = dict(PLAYING), dict(REFERENCE)
    if options.family is not None:
        family = MODELS[options.family].arguments(models)
        playing |= {**FAMILIES[options.family], "vllm": {**family, **PLAYING["vllm"]}}
        reading["vllm"] = {**family, **REFERENCE["vllm"]}
    if options.drafts:
        # vLLM drafts for greedy and drawn requests alike.
        playing["vllm"] = {**playing["vllm"], "speculative_config": DRAFTS}
    if options.documents:
        playing |= DOCUMENTS
        reading["shape"] = DEEP
    deadline_s = 60.0 + 20.0 * options.requests
    spec = EngineSpec(store=directory / "store", models=models, **playing)
    with EngineHost(spec, directory / "log", call_deadline_s=deadline_s) as host:
        played = host.call(play, options.seed, options.requests, documents=options.documents)
    spec = EngineSpec(models=models, **reading)
    with EngineHost(spec, directory / "reference.log", call_deadline_s=deadline_s) as host:
        return judge(host, played.jobs), played


if __name__ == "__main__":
    main()
