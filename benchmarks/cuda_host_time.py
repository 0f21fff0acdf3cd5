# SPDX-License-Identifier: Apache-2.0
"""What the copies of a step cost the thread that launches the model, where CUDA's calls are free.

    python -m benchmarks.cuda_host_time [--rounds 30] [--json] [--out results/cuda_host_time.json]

CudaEngine and what drives it in a worker (transfer/worker_copies.py) over a driver that returns at
once (csrc/tests/free_driver.cpp) and streams and events that do nothing. What is left is ours:
tables, addresses, lists, and the calls themselves, which are counted. On a GPU each call costs
microseconds more. Needs a C++ compiler and no GPU.

A step loads the KV of a prompt layer by layer, the model waits for each layer; or it saves it layer
by layer through the write buffer. 80 layers, blocks of 16 tokens at random places, chunks of 256.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch

from attnstore_lab.bench.environment import machine
from attnstore_lab.bench.summary import table
from attnstore_vllm.transfer import (
    cuda_cells,
    cuda_engine,
    cuda_events,
    cuda_read_buffer,
    cuda_tables,
)
from attnstore_vllm.transfer.cuda_engine import CudaEngine
from attnstore_vllm.transfer.geometry import Geometry
from attnstore_vllm.transfer.layout import LayerLayout
from attnstore_vllm.transfer.plan import ChunkCopy, LoadPlan, TransferPlan
from attnstore_vllm.transfer.worker_copies import Loads, Saves

ROOT = Path(__file__).resolve().parent.parent
LAYERS, BLOCK_TOKENS, CHUNK_TOKENS = 80, 16, 256
TOKENS = (8192, 32768)
PAGES = {"16 KiB": 1 << 14, "64 KiB": 1 << 16}
"""Of Llama 70B on four ranks, by the kernel where the rules are the built-in ones, and on one, by
DMA."""
CALLS = ("launches", "copies", "batches", "descriptors")
_SLOTS_AT, _HBM_AT = 1 << 40, 1 << 41
"""Addresses: nothing is there."""


class Calls:
    """PyTorch's streams and events, which do nothing but count."""

    def __init__(self) -> None:
        self.count = 0
        self.is_over = True

    def stream(self, number: int) -> Any:
        calls = self

        class Stream:
            cuda_stream = number

            def record_event(self) -> Any:
                calls.count += 1
                return Event()

            def wait_event(self, event: Any) -> None:
                calls.count += 1

            def wait_stream(self, stream: Any) -> None:
                calls.count += 2

            def synchronize(self) -> None:
                calls.count += 1

        class Event:
            def __init__(self, enable_timing: bool = False) -> None:
                pass

            def record(self, stream: Any) -> None:
                calls.count += 1

            def query(self) -> bool:
                calls.count += 1
                return calls.is_over

            def synchronize(self) -> None:
                calls.count += 1

            def elapsed_time(self, end: Any) -> float:
                calls.count += 1
                return 1.0

        self.event = Event
        return Stream()

    def torch(self) -> SimpleNamespace:
        model = self.stream(1)
        numbers = iter(range(2, 100))
        cuda = SimpleNamespace(
            is_available=lambda: True, current_device=lambda: 0,
            get_device_name=lambda device: "none",
            current_stream=lambda device=None: model, synchronize=lambda device=None: None,
            Stream=lambda device=None, priority=0: self.stream(next(numbers)),
            Event=self.event,
        )  # fmt: skip
        return SimpleNamespace(
            cuda=cuda, device=torch.device, uint8=torch.uint8, int64=torch.int64,
            empty=lambda shape, dtype=None, device=None, pin_memory=False: _memory(shape, dtype),
            tensor=lambda values, dtype=None, device=None: torch.tensor(values, dtype=dtype),
        )  # fmt: skip


def _memory(shape: int, dtype: torch.dtype) -> Any:
    """The write buffer is large, and nobody looks at it."""
    if dtype is torch.uint8:
        return SimpleNamespace(data_ptr=lambda: _HBM_AT + (1 << 40))
    return torch.empty(shape, dtype=dtype)


@contextmanager
def free_driver() -> Iterator[ctypes.CDLL]:
    """The native module has this one from here on; so before it has opened another."""
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "libfree.so"
        source = ROOT / "csrc" / "tests" / "free_driver.cpp"
        compiler = os.environ.get("CXX", "c++")
        subprocess.run(
            [compiler, "-std=c++17", "-O2", "-fPIC", "-shared", str(source), "-o", str(library)],
            check=True,
        )
        with mock.patch.dict(os.environ, {"ATTNSTORE_CUDA_DRIVER": str(library)}):
            yield ctypes.CDLL(str(library))


class Step:
    """The copies of one worker.

    Args:
        tokens: of the prompt that a step loads or saves.
    """

    def __init__(self, calls: Calls, tokens: int, page_bytes: int) -> None:
        self._calls = calls
        self._geometry = Geometry.uniform(1, LAYERS, BLOCK_TOKENS, page_bytes, CHUNK_TOKENS)
        blocks, chunks = tokens // BLOCK_TOKENS, tokens // CHUNK_TOKENS
        layouts = [
            LayerLayout(_HBM_AT + i * (1 << 32), 2 * blocks, page_bytes, (0,), page_bytes)
            for i in range(LAYERS)
        ]
        self._engine = CudaEngine(
            _SLOTS_AT, chunks, 0, self._geometry, layouts, torch.device("cuda", 0), blocks
        )
        self._loads = Loads(self._engine, LAYERS)
        self._saves = Saves(self._engine, LAYERS, blocks)
        ids = np.random.default_rng(1).permutation(2 * blocks)[:blocks].tolist()
        per_chunk = CHUNK_TOKENS // BLOCK_TOKENS
        self._copies = tuple(
            ChunkCopy(i, 0, tuple(ids[i * per_chunk : (i + 1) * per_chunk])) for i in range(chunks)
        )

    def load(self) -> None:
        self._loads.begin_step((), whole=False)
        self._loads.begin([LoadPlan(1, "request", self._copies)], whole=False)
        for layer in range(LAYERS):
            self._loads.wait_layer(layer)

    def save(self) -> None:
        plan = TransferPlan(1, "request", self._copies)
        self._saves.begin_step((), [plan], (), by_layer=True)
        for layer in range(LAYERS):
            self._saves.layer_computed(layer)

    def end(self) -> None:
        """Of the step, and all copies are over."""
        self._calls.is_over = True
        self._loads.end_step()
        self._saves.end_step(())
        self._loads.take_times()
        assert self._loads.take_finished() or self._saves.take_finished()[0]
        self._copies = self._copies[::-1]  # so that the next step needs a table of its own


def measure(rounds: int) -> list[dict[str, Any]]:
    """Milliseconds and calls of each step: the median of so many."""
    rows: list[dict[str, Any]] = []
    calls = Calls()
    with ExitStack() as undo:
        library = undo.enter_context(free_driver())
        counts = (ctypes.c_uint64 * len(CALLS))()
        for module in (cuda_cells, cuda_engine, cuda_events, cuda_read_buffer, cuda_tables):
            undo.enter_context(mock.patch.object(module, "torch", calls.torch()))
        for check in ("check_engine", "check_moves"):
            undo.enter_context(mock.patch.object(cuda_engine, check, return_value=None))
        for name, page_bytes in PAGES.items():
            for tokens in TOKENS:
                step = Step(calls, tokens, page_bytes)
                for what, work in (("loads", step.load), ("saves", step.save)):
                    times = [_timed(work, step, calls) for _ in range(rounds + 2)][2:]
                    library.free_driver_counts(counts)
                    calls.count = 0
                    _timed(work, step, calls)
                    library.free_driver_counts(counts)
                    rows.append(
                        {
                            "what": what, "pages": name, "tokens": tokens,
                            "ms": statistics.median(times), "fastest_ms": min(times),
                            **dict(zip(CALLS, counts, strict=True)),
                            "stream_calls": calls.count,
                        }
                    )  # fmt: skip
    return rows


def _timed(work: Callable[[], None], step: Step, calls: Calls) -> float:
    """Milliseconds, with the step's end, which finds all copies over."""
    calls.is_over = False
    began = time.perf_counter()
    work()
    step.end()
    return 1000 * (time.perf_counter() - began)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "cuda_host_time.json")
    parser.add_argument("--json", action="store_true", help="print JSON in place of a table")
    args = parser.parse_args()
    rows = measure(args.rounds)
    report = {"machine": machine(), "layers": LAYERS, "rows": rows}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(report, indent=1) + "\n")
    if args.json:
        print(json.dumps(report))
        return
    head = ["a step's", "pages", "tokens", "ms", *CALLS, "streams and events"]
    cells = [
        [row["what"], row["pages"], str(row["tokens"]), f"{row['ms']:.2f}",
         *(str(row[name]) for name in CALLS), str(row["stream_calls"])]
        for row in rows
    ]  # fmt: skip
    print(table([head, *cells]))


if __name__ == "__main__":
    main()
