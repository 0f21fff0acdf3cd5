# SPDX-License-Identifier: Apache-2.0
"""Faults planted in a copy of the code, one at a time, and which random story sees each.

    python -m tests.cuda_faults [--stories 300] [--out FILE] [WORD ...]

Each fault is an edit of one file; words choose those whose names have one of them. The exit status
is 1 if one is not seen.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from tests.fake_driver import BUILD_VARIABLE, ROOT

ENGINE = "attnstore_vllm/transfer/cuda_engine.py"
TABLES = "attnstore_vllm/transfer/cuda_tables.py"
BATCHES = "attnstore_vllm/transfer/cuda_batches.py"
READS = "attnstore_vllm/transfer/cuda_read_buffer.py"
_TIMEOUT_S = 600


class Fault(NamedTuple):
    name: str
    file: str
    old: str
    """Stands there once."""
    new: str


FAULTS = (
    # ---- a wait that is missing
    Fault(
        "a load does not wait for the model", ENGINE,
        "self._loads.wait_stream(self._model())\n                start = None",
        "start = None",
    ),
    Fault(
        "a load does not wait for its mark", ENGINE, "self._loads.wait_event(after.event)", "pass",
    ),
    Fault(
        "a load takes an older mark for its own", ENGINE,
        "elif after is not self._loads_after:", "elif self._loads_after is None:",
    ),
    Fault(
        "a move does not wait for the model", ENGINE,
        "self._loads.wait_stream(self._model())\n            start = self._load_times.start("
        "self._loads)\n            ring",
        "start = self._load_times.start(self._loads)\n            ring",
    ),
    Fault(
        "a save does not wait for the model", ENGINE, "self._saves.wait_stream(self._model())",
        "pass",
    ),
    Fault(
        "a drain does not wait for the gather", ENGINE, "self._saves.wait_event(event)", "pass"
    ),
    Fault("the model does not wait for a copy", ENGINE, "model.wait_event(event.event)", "pass"),
    Fault(
        "the model waits for the other stream only", ENGINE,
        "key = (event.lane, model.cuda_stream)", 'key = ("", model.cuda_stream)',
    ),
    Fault(
        "the ring does not wait for its oldest span", TABLES, "event.synchronize()", "pass"
    ),
    Fault("a refused copy is not waited for", ENGINE, "stream.synchronize()", "pass"),
    Fault(
        "the end does not wait for what is in flight", ENGINE,
        "torch.cuda.synchronize(self._device)", "pass",
    ),
    Fault(
        "a span of the read buffer is filled before it was read", READS,
        "self.fills.wait_event(event)", "pass",
    ),
    Fault(
        "a scatter does not wait for its fill", READS,
        "self._loads.wait_event(self.fills.record_event())", "self.fills.record_event()",
    ),
    Fault(
        "a fill waits for the scatter before the last of its span", READS,
        "self._until[span] = self._loads.record_event()",
        "self._until[span] = self._until[span] or self._loads.record_event()",
    ),
    # ---- order, tables, failures
    Fault(
        "a move is on the stream of saves", ENGINE,
        "give(moved, layers, ring, handle, word.address)",
        "give(moved, layers, ring, self._saves.cuda_stream, word.address)",
    ),
    Fault(
        "a gather that was refused is forgotten", ENGINE,
        "self._spoilt |= _places(rows, layers)", "pass",
    ),
    Fault(
        "a table that was not given is taken for there", TABLES,
        "self._staged = _Table(stream, words, start)",
        "self._staged = self._newest = _Table(stream, words, start)",
    ),
    Fault(
        "spans of the ring overlap", TABLES,
        "oldest, start = self._taken[0][0], self._taken[-1][1]",
        "oldest, start = self._taken[0][0], self._taken[-1][1] - 2",
    ),
    Fault(
        "a copy has the table of the one before", BATCHES,
        "return self.pages is pages and self.rows is rows and self.rules is rules",
        "return len(self.pages) == len(pages)",
    ),
    Fault(
        "a copy by layer is of the first layers", ENGINE,
        "of_kind = kind.within(layers)", "of_kind = kind.within(range(len(layers)))",
    ),
    # ---- C++
    Fault(
        "a table of a scatter goes over without its end", "csrc/cuda/cuda_copier.cpp",
        "num_bytes = batch.pages.size() * sizeof(Offsets);",
        "num_bytes = (batch.pages.size() - 1) * sizeof(Offsets);",
    ),
    Fault(
        "a scatter reads the first span", "csrc/cuda/cuda_copier.cpp",
        "of_spans + static_cast<std::size_t>(span) * num_layers,", "of_spans,",
    ),
    Fault(
        "the pages of a scatter are the first ones", "csrc/cuda/cuda_copier.cpp",
        "reinterpret_cast<const Offsets*>(staged.device) + first,",
        "reinterpret_cast<const Offsets*>(staged.device),",
    ),
    Fault(
        "a fill is of the first layer", "csrc/cuda/cuda_copier.cpp",
        "reinterpret_cast<CuAddress>(run.source) + of_layer",
        "reinterpret_cast<CuAddress>(run.source) + 0 * of_layer",
    ),
    Fault(
        "fills go to the first span", "csrc/cuda/cuda_copier.cpp",
        "reinterpret_cast<CuAddress>(run.target) + of_span",
        "reinterpret_cast<CuAddress>(run.target) + 0 * of_span",
    ),
    Fault(
        "sources of a batch are read in any order", "csrc/cuda/cuda_copier.cpp",
        "reads_early && batch->copy == Copy::kLoad", "reads_early",
    ),
    Fault(
        "a table goes over without its end", "csrc/cuda/cuda_copier.cpp",
        "batch.pages.size() * sizeof(Offsets), stream",
        "(batch.pages.size() - 1) * sizeof(Offsets), stream",
    ),
    Fault(
        "lists for DMA are of the layers before", "csrc/cuda/cuda_copier.cpp",
        "const Offsets offset = offsets[static_cast<std::size_t>(layer)];",
        "const Offsets offset = offsets[static_cast<std::size_t>(layer - layers.first)];",
    ),
    Fault(
        "a table of moves goes over without its end", "csrc/cuda/cuda_rotator.cpp",
        "table.words.size() * sizeof(std::int64_t), stream",
        "(table.words.size() - 1) * sizeof(std::int64_t), stream",
    ),
    Fault(
        "runs are merged by their sources alone", "csrc/copy/page_runs.cpp",
        " &&\n        run.target == before.target + before.num_bytes", "",
    ),
    Fault(
        "words of a layer are the next one's", "csrc/cuda/copy_words.h",
        "const std::uint32_t layer = quotient(of_layers, job.num_pages);",
        "const std::uint32_t layer = quotient(of_layers + 1, job.num_pages);",
    ),
    Fault(
        "the last words of a copy are left out", "csrc/cuda/copy_words.h",
        "piece < job.num_pieces; piece += groups", "piece + 1 < job.num_pieces; piece += groups",
    ),
    Fault(
        "cells of a layer are the next one's", "csrc/cuda/code_words.h",
        "const std::uint32_t layer = quotient(of_layers, job.num_pages);",
        "const std::uint32_t layer = quotient(of_layers + 1, job.num_pages);",
    ),
    Fault(
        "the last groups of cells are left out", "csrc/cuda/code_words.h",
        "for (std::uint32_t part = thread / kWarpLanes; part < job.num_parts;",
        "for (std::uint32_t part = thread / kWarpLanes; part + 1 < job.num_parts;",
    ),
    Fault(
        "a row has the bytes of a page", ENGINE,
        "self.num_rows * sum(self._geometry.cells[:first])",
        "self.num_rows * sum(self._geometry.regions[:first])",
    ),
    Fault(
        "tokens are moved out of the chunk before", "attnstore_vllm/transfer/cuda_cells.py",
        "super().give(runs, layers, ring, stream)",
        "super().give(parts[0][1], layers, ring, stream)",
    ),
    Fault(
        "a page is taken for aligned that is not", "csrc/copy/page_runs.cpp",
        "return bits % 4 == 0 ? 4 : 1;", "return 4;",
    ),
)  # fmt: skip


def seen_by(fault: Fault, stories: int) -> str:
    """What the first story that saw it says; "" if none did. Raises RuntimeError if it cannot be
    planted."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        for name in ("attnstore_lab", "attnstore_vllm", "csrc", "tests"):
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / name, copy / name, ignore=ignored)
        path = copy / fault.file
        text = path.read_text()
        if text.count(fault.old) != 1:
            raise RuntimeError(f"{fault.file} has this {text.count(fault.old)} times: {fault.old}")
        path.write_text(text.replace(fault.old, fault.new))
        build = ROOT / "build" / "fake_driver"
        variables = {**os.environ, "PYTHONPATH": str(copy), BUILD_VARIABLE: str(build)}
        command = [sys.executable, "-m", "tests.cuda_stories", "--stories", str(stories)]
        try:
            told = subprocess.run(
                [*command, "--jobs", "1"],
                cwd=copy,
                env=variables,
                capture_output=True,
                text=True,
                timeout=_TIMEOUT_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return "it does not end"
        if told.returncode == 0:
            return ""
        if told.returncode < 0:  # a kernel went where no memory is
            return f"killed by signal {-told.returncode}"
        lines = told.stdout.strip().splitlines()
        if not lines or "cuda-stories: story" not in lines[-1]:  # nothing was told
            raise RuntimeError(f"{fault.name}: {(told.stdout + told.stderr)[-3000:]}")
        return re.sub(r"; Shape.*", "", lines[-1].removeprefix("cuda-stories: "))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("words", nargs="*")
    parser.add_argument("--stories", type=int, default=300)
    parser.add_argument("--out", type=Path, help="a file for what was seen, JSON")
    asked = parser.parse_args(arguments)
    seen = {}
    for fault in FAULTS:
        if asked.words and not any(word in fault.name for word in asked.words):
            continue
        seen[fault.name] = seen_by(fault, asked.stories)
        print(f"{fault.name}: {seen[fault.name] or 'NOT SEEN'}", flush=True)
    if asked.out:
        asked.out.write_text(json.dumps(seen, indent=1) + "\n")
    print(f"{sum(map(bool, seen.values()))} of {len(seen)} are seen")
    return 0 if all(seen.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
