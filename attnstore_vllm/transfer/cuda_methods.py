# SPDX-License-Identifier: Apache-2.0
"""Which of its two ways CUDA copies pages by, chosen by data: RULES.

KERNEL  threads of the device read and write page-locked memory in place (csrc/cuda/copy_words.h).
        Any layout at the same speed, but it takes multiprocessors from the model, and waits for
        free ones behind a model that has them all.
DMA     the copy engines, one call of the driver for many runs. Takes nothing from the model; each
        run costs time of its own, so short runs are slow.

What decides is how long the contiguous runs are, neighbours on both sides counted as one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

KIB = 1024


class Copy(Enum):
    """The four copies. The native module names them alike (csrc/cuda/cuda_copier.h)."""

    LOAD = "slots to blocks"
    SAVE = "blocks to slots"
    GATHER = "blocks to rows"
    DRAIN = "rows to slots"


class Method(Enum):
    KERNEL = "kernel"
    DMA = "dma"


@dataclass(frozen=True, slots=True)
class Rule:
    """Holds for copies whose runs are at least so long, on average."""

    from_run_bytes: int
    method: Method
    thread_blocks: int = 16
    """CTAs of 256 threads each; up to eight of them go on one multiprocessor."""

    def __post_init__(self) -> None:
        assert self.from_run_bytes >= 0
        assert self.thread_blocks > 0


Rules = Mapping[Copy, Sequence[Rule]]
"""The longest `from_run_bytes` first; the last is 0."""

_ACROSS = (Rule(64 * KIB, Method.DMA), Rule(0, Method.KERNEL))

# NEVER MEASURED: no GPU has run this. The numbers are guesses, and to be replaced by what
# `make gpu-check` finds, with the table that it prints kept in results/.
# - 64 KiB: at 55 GB/s a run of 64 KiB takes 1.2 us, about what a run costs the driver.
# - 16 blocks: 16 * 256 threads * 64 bytes on their way at once are 256 KiB; 55 GB/s times
#   2 us of latency are 110 KiB.
# - A gather moves within HBM, where the copy engines are slow, and the model's stream waits for it.
RULES: Rules = {
    Copy.LOAD: _ACROSS,
    Copy.SAVE: _ACROSS,
    Copy.GATHER: (Rule(0, Method.KERNEL, thread_blocks=512),),
    Copy.DRAIN: _ACROSS,
}


def choose(rules: Rules, copy: Copy, run_bytes: float) -> Rule:
    """The rule for a copy whose runs are `run_bytes` long on average."""
    return next(rule for rule in rules[copy] if run_bytes >= rule.from_run_bytes)


def only(method: Method, thread_blocks: int = 16) -> Rules:
    """Rules that move everything by `method`, except gathers, which stay as they are."""
    across = (Rule(0, method, thread_blocks),)
    return {**dict.fromkeys(Copy, across), Copy.GATHER: RULES[Copy.GATHER]}
