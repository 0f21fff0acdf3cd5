# SPDX-License-Identifier: Apache-2.0
"""What can only be measured on a GPU: that copies are right, how fast they are, what they cost.

    make gpu-check ARGS="[--small] [--json] [--out FILE] [--only NAME ...]"

With the Python that has PyTorch for CUDA (GPU_PYTHON, else python3), and the package that is
installed there: the folder here has no extensions of its own unless they were built in it.

Needs PyTorch, a GPU with its driver, and this package; no vLLM. Without them it says so in one line
and ends with 2; with 1 if a byte was wrong. A goal that is missed is a line of the table.
"""

from __future__ import annotations

import argparse
import json
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attnstore_vllm
from attnstore_lab.bench.summary import table

if TYPE_CHECKING:
    from benchmarks.gpu.rig import Row

ROOT = Path(__file__).resolve().parent.parent
HEAD = ["what", "how", "value", "goal", "met", "detail"]
PARTS = ["bytes", "rules", "speed", "encoded", "beside", "moves", "logits"]


@dataclass(frozen=True, slots=True)
class Size:
    """What full and small runs differ in."""

    tokens: int
    product: int
    history: int
    new: int
    is_8b: bool
    rounds: int


FULL = Size(tokens=16384, product=8192, history=8192, new=256, is_8b=True, rounds=9)
SMALL = Size(tokens=2048, product=2048, history=1024, new=64, is_8b=False, rounds=5)


def why_not() -> str | None:
    """What is missing to measure anything, None if nothing is."""
    try:
        import torch  # noqa: PLC0415
    except ImportError:
        return f"{sys.executable} has no PyTorch"
    if not torch.cuda.is_available():
        return f"PyTorch {torch.__version__} sees no GPU"
    try:
        from attnstore_vllm import _native_cuda  # noqa: PLC0415
    except ImportError as error:
        return (
            f"attnstore_vllm in {Path(attnstore_vllm.__file__).parent} is not built ({error}); "
            f"{sys.executable} -m pip install -v . builds and installs it"
        )
    return _native_cuda.why_no_driver() or None


def parts(size: Size) -> dict[str, Callable[[], Iterable[Row]]]:
    """What each part measures, row by row."""
    import torch  # noqa: PLC0415

    from benchmarks.gpu import (  # noqa: PLC0415
        bandwidth,
        beside,
        correctness,
        encoded,
        first_logits,
        moved_numbers,
        moves,
        rules,
        transformer,
    )
    from benchmarks.gpu.rig import LLAMA_8B, LLAMA_70B_TP4  # noqa: PLC0415

    device = torch.device("cuda", torch.cuda.current_device())
    model = transformer.SHAPE_8B if size.is_8b else transformer.SHAPE_SMALL
    shapes = (LLAMA_8B, LLAMA_70B_TP4)
    return {
        "bytes": lambda: correctness.measure(device, size.rounds),
        "rules": lambda: rules.measure(size.tokens, size.rounds),
        "speed": lambda: (
            row for shape in shapes for row in bandwidth.measure(shape, size.tokens, size.rounds)
        ),
        "encoded": lambda: (
            row for shape in shapes for row in encoded.measure(shape, size.tokens, size.rounds)
        ),
        "beside": lambda: (
            row
            for shape in shapes
            for row in beside.measure(shape, size.tokens, size.rounds, size.product)
        ),
        "moves": lambda: chain(
            moved_numbers.measure(device, size.rounds),
            (row for shape in shapes for row in moves.measure(shape, size.tokens, size.rounds)),
        ),
        "logits": lambda: first_logits.measure(model, size.history, size.new, size.rounds),
    }


def machine() -> dict[str, Any]:
    import torch  # noqa: PLC0415

    import attnstore_vllm._native_cuda as native  # noqa: PLC0415

    found = torch.cuda.get_device_properties(torch.cuda.current_device())
    return {
        "gpu": found.name,
        "hbm_gib": round(found.total_memory / 2**30, 1),
        "multiprocessors": found.multi_processor_count,
        "link": _link(),
        "torch": torch.__version__,
        "cuda_driver": native.driver_version(),
        "processor": platform.processor() or platform.machine(),
    }


def _link() -> str:
    """Driver, PCIe generation and width, as nvidia-smi says them; "" without it."""
    if shutil.which("nvidia-smi") is None:
        return ""
    query = "driver_version,pcie.link.gen.max,pcie.link.width.max"
    told = subprocess.run(
        ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader", "--id=0"],
        check=False,
        capture_output=True,
        text=True,
    )
    return told.stdout.strip()


def write(path: Path, head: dict[str, Any], rows: Sequence[Row]) -> dict[str, Any]:
    """The result so far; it replaces the file, whole. A run that is ended leaves its rows, and
    "parts" says what it was to measure."""
    result = {**head, "rows": [row.to_json() for row in rows]}
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(result, indent=1) + "\n")
    partial.replace(path)
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description="Copies between HBM and DRAM, on a GPU.")
    parser.add_argument("--small", action="store_true", help="for GPUs with little memory")
    parser.add_argument("--only", nargs="+", choices=PARTS)
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "gpu_check.json")
    parser.add_argument("--json", action="store_true", help="print JSON in place of a table")
    args = parser.parse_args()
    missing = why_not()
    if missing is not None:
        print(f"gpu-check: {missing}; nothing was measured", file=sys.stderr)
        return 2
    rows: list[Row] = []
    asked = [name for name in PARTS if args.only is None or name in args.only]
    head = {"machine": machine(), "is_small": args.small, "parts": asked}
    for name, measure in parts(SMALL if args.small else FULL).items():
        if name in asked:
            print(f"gpu-check: {name} ...", file=sys.stderr, flush=True)
            for row in measure():
                rows.append(row)
                write(args.out, head, rows)
                print(f"gpu-check: {' | '.join(filter(None, row.cells()))}", file=sys.stderr)
    result = write(args.out, head, rows)
    if args.json:
        print(json.dumps(result))
    else:
        print(f"{result['machine']}\n")
        print(table([HEAD, *(row.cells() for row in rows)]))
    return 1 if any(row.is_wrong for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
