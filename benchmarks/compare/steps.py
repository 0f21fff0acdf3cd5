# SPDX-License-Identifier: Apache-2.0
"""The steps in the log of a vLLM server."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

_STEP = re.compile(
    r"Iteration\(\d+\): (\d+) context requests, (\d+) context tokens, "
    r"(\d+) generation requests, (\d+) generation tokens, iteration elapsed time: ([\d.]+) ms"
)


@dataclass(frozen=True, slots=True)
class LoggedStep:
    """One pass of the model: what it computed of prompts, what it generated, and how long it took.

    The time is from when the engine waits for the pass to its tokens: with vLLM's asynchronous
    scheduling less than the pass takes.
    """

    prompt_requests: int
    prompt_tokens: int
    answer_requests: int
    answer_tokens: int
    seconds: float


def parse_steps(lines: Iterable[str]) -> list[LoggedStep]:
    """The steps in a log of a vLLM that was started with --enable-logging-iteration-details."""
    found = (match for line in lines if (match := _STEP.search(line)))
    return [
        LoggedStep(int(m[1]), int(m[2]), int(m[3]), int(m[4]), seconds=float(m[5]) / 1e3)
        for m in found
    ]
