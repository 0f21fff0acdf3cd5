# SPDX-License-Identifier: Apache-2.0
"""Which of its ways CUDA copies pages by, chosen by data: a table of rules.

KERNEL  threads of the device read and write page-locked memory in place (csrc/cuda/copy_words.h).
        Any layout at the same speed, but it takes multiprocessors from the model, and waits for
        free ones behind a model that has them all.
DMA     the copy engines, one call of the driver for many runs. Takes nothing from the model; each
        run costs time of its own, so short runs are slow. How early the driver may read the sources
        of a load is part of the rule: told that it may at any time, it may read short runs with a
        processor, during the call.
BUFFER  loads alone: by DMA into the read buffer in HBM, in runs as long as a chunk's layer, and by
        the kernel from there (transfer/cuda_read_buffer.py). No built-in table has it: whether it
        is faster than the others is not measured.

What decides is how long the contiguous runs are, neighbours on both sides counted as one. What goes
to DRAM goes by DMA: it is not waited for, and the multiprocessors are the model's.

`make gpu-check` measures the table of a device and keeps it in rules_path(). Engines on a device of
that name have it from then on; others have what is built in, which is not measured there.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from attnstore_vllm.own_files import read_given
from attnstore_vllm.types import Word

logger = logging.getLogger(__name__)

KIB = 1024


class Copy(Word):
    """The four copies. The native module names them alike (csrc/cuda/cuda_copier.h)."""

    LOAD = "slots to blocks"
    SAVE = "blocks to slots"
    GATHER = "blocks to rows"
    DRAIN = "rows to slots"


class Method(Enum):
    KERNEL = "kernel"
    DMA = "dma"
    BUFFER = "buffer"


class ReadOrder(Enum):
    """When the sources of a load by DMA may be read. A save's are read in the stream's order: the
    model writes them."""

    ANY = "any"
    """From the call on: the slots are full by then."""
    STREAM = "stream"
    """When the stream comes to it."""


@dataclass(frozen=True, slots=True)
class Rule:
    """Holds for copies whose runs are at least so long, on average."""

    from_run_bytes: int
    method: Method
    thread_blocks: int = 24
    """CTAs of 128 threads each; up to sixteen of them go on one multiprocessor."""
    order: ReadOrder = ReadOrder.ANY

    def __post_init__(self) -> None:
        assert self.from_run_bytes >= 0
        assert self.thread_blocks > 0


Rules = Mapping[Copy, Sequence[Rule]]
"""The longest `from_run_bytes` first; the last is 0."""

# Not measured: of a device of which no table is known. `make gpu-check` finds a better one.
# - 28 KiB: where vLLM's own copies (swap_blocks) change from a kernel to DMA on an H100.
# - 24 blocks: 24 * 128 threads * 64 bytes on their way at once are 192 KiB; 55 GB/s times
#   2 us of latency are 110 KiB.
# - A gather moves within HBM, where the copy engines are slow, and the model's stream waits for it.
_DMA = (Rule(0, Method.DMA),)
RULES: Rules = {
    Copy.LOAD: (Rule(28 * KIB, Method.DMA), Rule(0, Method.KERNEL)),
    Copy.SAVE: _DMA,
    Copy.GATHER: (Rule(0, Method.KERNEL, thread_blocks=1024),),
    Copy.DRAIN: _DMA,
}

# Measured on an H200, 27 November 2026 (results/gpu/): loads of runs of 64 KiB have 0.97 of one
# large copy by DMA in calls of 1,024 runs, and 0.92 by the kernel; of 16 KiB 0.23 and 0.92. With
# 16, 24 and 48 blocks the kernel is as fast, and 16 leave most to the model.
_HOPPER: Rules = {
    **RULES,
    Copy.LOAD: (Rule(64 * KIB, Method.DMA), Rule(0, Method.KERNEL, thread_blocks=16)),
}
MEASURED: Mapping[str, Rules] = {"H100": _HOPPER, "H200": _HOPPER}
"""By a word of the device's name. An H100 has the same copy engines and PCIe."""

# A driver that knows no batches takes a call for each run. At 55 GB/s a run of 64 KiB takes 1.2 us,
# about what a call costs.
_ONE_BY_ONE = (Rule(64 * KIB, Method.DMA), Rule(0, Method.KERNEL))
RULES_WITHOUT_BATCHES: Rules = {**dict.fromkeys(Copy, _ONE_BY_ONE), Copy.GATHER: RULES[Copy.GATHER]}
BATCHES_SINCE = 12080
"""The CUDA version of the first driver that copies many runs in one call."""


def choose(rules: Rules, copy: Copy, run_bytes: float) -> Rule:
    """The rule for a copy whose runs are `run_bytes` long on average."""
    return next(rule for rule in rules[copy] if run_bytes >= rule.from_run_bytes)


def only(method: Method, thread_blocks: int = 24, order: ReadOrder = ReadOrder.ANY) -> Rules:
    """Rules that move everything by `method`, except gathers, which stay as they are; what is saved
    goes by DMA where loads go through the read buffer."""
    across = (Rule(0, method, thread_blocks, order),)
    if method is Method.BUFFER:
        return {**RULES, Copy.LOAD: across}
    return {**dict.fromkeys(Copy, across), Copy.GATHER: RULES[Copy.GATHER]}


# ---- measured tables -------------------------------------------------------------------


def rules_path() -> Path:
    """The file of this user's measured tables: {name of the device: {name of the copy: [[from run
    bytes, method, thread blocks, order], ...]}}. An order that is not there is "any"."""
    return Path.home() / ".config" / "attnstore" / "copy_rules.json"


def find_rules(device: str, driver_version: int, path: Path | None = None) -> Rules:
    """The table of a device: the measured one if there is one, else what is built in.

    Args:
        device: its name, as CUDA says it.
        driver_version: the CUDA version that the driver is of: 12040 is 12.4.
    """
    path = rules_path() if path is None else path
    try:
        found = json.loads(read_given(path)).get(device)
        if found is not None:
            rules = rules_of(found)
            logger.info("copies on %s go by the rules measured there, from %s", device, path)
            return rules
    except FileNotFoundError:
        pass
    except (OSError, ValueError, AttributeError) as error:
        logger.warning(
            "%s has no rules that can be read (%s); the built-in ones hold. make gpu-check writes "
            "it anew",
            path,
            error,
        )
    if driver_version < BATCHES_SINCE:
        logger.info("copies on %s go by rules for drivers before CUDA 12.8", device)
        return RULES_WITHOUT_BATCHES
    known = next((name for name in MEASURED if name in device.split()), None)
    if known is not None:
        logger.info("copies on %s go by the rules that an H200 was measured for", device)
        return MEASURED[known]
    logger.info(
        "copies on %s go by built-in rules, which were not measured; make gpu-check measures them",
        device,
    )
    return RULES


def keep_rules(device: str, rules: Rules, path: Path | None = None) -> Path:
    """Write a device's measured table into the file, beside those of others; the file's path."""
    path = rules_path() if path is None else path
    try:
        every = json.loads(read_given(path))
        assert isinstance(every, dict)
    except (OSError, ValueError, AssertionError):
        every = {}
    every[device] = {
        copy.name: [
            [rule.from_run_bytes, rule.method.value, rule.thread_blocks, rule.order.value]
            for rule in some
        ]
        for copy, some in rules.items()
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(f".{os.getpid()}")
    partial.write_text(json.dumps(every, indent=1) + "\n")
    partial.replace(path)
    return path


def rules_of(found: Any) -> Rules:
    """A table as the file has it. Raises: ValueError that says what is wrong."""
    if not isinstance(found, dict) or found.keys() != Copy.__members__.keys():
        raise ValueError(f"rules are expected for {', '.join(Copy.__members__)}")
    rules = {}
    for name, some in found.items():
        try:
            rules[Copy[name]] = tuple(
                Rule(int(length), Method(method), int(blocks), *map(ReadOrder, rest))
                for length, method, blocks, *rest in some
            )
        except (TypeError, ValueError, AssertionError) as error:
            raise ValueError(f"{name}: {some} are no rules") from error
        lengths = [rule.from_run_bytes for rule in rules[Copy[name]]]
        if lengths != sorted(set(lengths), reverse=True) or lengths[-1:] != [0]:
            raise ValueError(f"{name}: the lengths {lengths} do not fall to 0")
    return rules
