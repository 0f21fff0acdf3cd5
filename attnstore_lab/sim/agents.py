# SPDX-License-Identifier: Apache-2.0
"""Agents' sessions as a public comparison on one H100 ran them: a load and a machine.

    turn 1 -> answer -> tool -> turn 2 -> answer -> tool -> ...        each with all that was before

All jobs of a load have the same lengths and share nothing but what `shared_tokens` says.

Source: hungchun0201/agentic-ai-survey, papers/continuum/matrix-100job.html (18 turns) and
ai-infra-basics/lmcache/bottleneck-analysis.html (8 turns). Of 18 turns the pages say the mean
number, the median prompt and answer, and of one job that its second prompt has 2,155 tokens, 604 of
them of the system prompt. Prompts grow evenly here, to that median. The 8 prompts are published.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from attnstore_lab.sim.hardware import Machine
from attnstore_lab.sim.trace import Trace, TraceRequest, make_trace

CHUNK_TOKENS = 256
TOKEN_BYTES = 131_072
"""Llama-3.1-8B in bfloat16: 32 layers with 8 KV heads of 128."""
HBM_TOKENS = 458_000
_STRIDE = 1 << 20


@dataclass(frozen=True, slots=True)
class Load:
    """Jobs of one kind. Tokens and seconds."""

    name: str
    prompts: tuple[int, ...]
    """By turn, each with the prompts and answers before it."""
    answer_tokens: int
    tool_s: float
    num_jobs: int
    shared_tokens: int = 0
    """The beginning of all prompts."""
    is_drawn: bool = False
    """Each job has a number of turns, new tokens and tool times of its own; `prompts` and `tool_s`
    are about their medians."""


EIGHTEEN = Load(
    name="18 turns",
    prompts=tuple(2105 + round(turn * (6945 - 2105) / 8.5) for turn in range(18)),
    answer_tokens=30,
    tool_s=1.0,
    num_jobs=100,
    shared_tokens=604,
)
EIGHT = Load(
    name="8 turns",
    prompts=(92, 1840, 3449, 6025, 7454, 10299, 12333, 13193),
    answer_tokens=20,
    tool_s=0.5,
    num_jobs=127,
)

H100 = Machine(
    kv_bytes_per_token=TOKEN_BYTES,
    hbm=HBM_TOKENS * TOKEN_BYTES,
    dram=16_000_000_000,
    nvme=1,
    prefill_tokens_per_s=1 / 25.8e-6,  # the page's fit: 23.7 ms a step and 25.8 us a token
    decode_step_s=0.0237,
    decode_sequence_s=25.8e-6,
    max_num_seqs=256,
    max_num_batched_tokens=2048,
    hbm_bandwidth=50_000_000_000,
    chunk_tokens=CHUNK_TOKENS,
)


def agents(load: Load, jobs_per_s: float, seed: int, num_jobs: int | None = None) -> Trace:
    """Jobs that come as a Poisson process, given that the last one comes after num_jobs / rate.

    Args:
        num_jobs: those of the load.
    """
    rng = np.random.default_rng(seed)
    count = load.num_jobs if num_jobs is None else num_jobs
    gaps = rng.exponential(size=count)
    begins = np.cumsum(gaps) * (count / jobs_per_s / gaps.sum())
    requests = []
    for job, begin in enumerate(begins.tolist()):
        for turn, (prompt, gap_s) in enumerate(_turns(load, rng)):
            known = prompt + load.answer_tokens
            chunks = np.arange(-(-known // CHUNK_TOKENS), dtype=np.int64)
            chunks[load.shared_tokens // CHUNK_TOKENS :] += (job + 1) * _STRIDE
            at, think_s = begin + turn * 1e-6, gap_s if turn else 0.0
            requests.append(
                TraceRequest(at, chunks, prompt, load.answer_tokens, known, job, think_s)
            )
    return make_trace(load.name, CHUNK_TOKENS, requests)


def drawn(tool_s: float) -> Load:
    """Jobs of some 18 turns, each of its own, whose tools take about so long."""
    name = f"drawn, tools {tool_s:g} s"
    return replace(EIGHTEEN, name=name, tool_s=tool_s, num_jobs=150, is_drawn=True)


def _turns(load: Load, rng: np.random.Generator) -> Iterator[tuple[int, float]]:
    """(tokens of the prompt, seconds before it) of one job."""
    if not load.is_drawn:
        yield from ((prompt, load.tool_s) for prompt in load.prompts)
        return
    usual = len(load.prompts)
    growth = (load.prompts[-1] - load.prompts[0]) / (usual - 1) - load.answer_tokens
    prompt = load.shared_tokens + round(
        (load.prompts[0] - load.shared_tokens) * rng.lognormal(0, 0.5)
    )
    for _ in range(max(1, round(rng.normal(usual, usual / 3)))):
        yield prompt, load.tool_s * float(rng.lognormal(0, 1))
        prompt += load.answer_tokens + round(growth * rng.lognormal(-0.5, 1))
