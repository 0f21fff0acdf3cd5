# SPDX-License-Identifier: Apache-2.0
"""`attnstore curve SERVER|TRACE`: what DRAM of other sizes would hold; the smallest that will do.

Of a server it is read from /metrics, of a trace worked out: the same code either way
(policy/hit_curve.py), which follows a sample of chunks.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blake3 import blake3

from attnstore_lab.cli import simulate
from attnstore_lab.sim.trace import Trace, TraceRequest
from attnstore_vllm.cli import top
from attnstore_vllm.cli.top import TopError
from attnstore_vllm.config.values import format_size
from attnstore_vllm.errors import ConfigError
from attnstore_vllm.index.prefix import kept_end
from attnstore_vllm.policy.hit_curve import SAMPLED_MAX, HitCurve, LookedUp, NewChunk, mark_of
from attnstore_vllm.prometheus import Metrics, total
from attnstore_vllm.scheduler.saving import MIN_TAIL_TOKENS
from attnstore_vllm.types import TOKEN_BYTES

CAPACITIES = "0.005,0.01,0.02,0.05,0.1,0.2,0.5,1"
_RATIO = "vllm:attnstore_dram_curve_ratio"
_CAPACITY = "vllm:attnstore_capacity_bytes"


@dataclass(frozen=True, slots=True)
class Point:
    """DRAM of one size."""

    scale: float
    """As times a server's DRAM, or as a share of a trace's distinct KV."""
    num_bytes: int | None
    """None: it is not known what a token takes."""
    share: float
    """The part of all prompt tokens that it would have had."""

    def as_json(self) -> dict[str, Any]:
        return {"scale": self.scale, "bytes": self.num_bytes, "hit_tokens_share": self.share}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "source", metavar="SERVER|TRACE", help="as localhost:8000, or a file (docs/simulate.md)"
    )
    parser.add_argument(
        "--capacity", default=CAPACITIES, metavar="SHARE,...", help="of a trace's distinct KV"
    )
    parser.add_argument(
        "--model", type=Path, metavar="CONFIG", help="the config.json whose KV a trace means"
    )
    simulate.add_dtype_arguments(parser)
    parser.add_argument(
        "--tolerance",
        type=float,
        default=0.02,
        metavar="SHARE",
        help="of all prompt tokens, that the smallest size may find less (%(default)s)",
    )


def run(args: argparse.Namespace) -> int:
    """Raises: ConfigError, TopError, TraceError."""
    if not 0 <= args.tolerance < 1:
        raise ConfigError(f"--tolerance is {args.tolerance}; expected a share, as 0.02")
    points = _of_file(args) if Path(args.source).is_file() else of_server(top.read(args.source))
    best = smallest(points, args.tolerance)
    if args.json:
        told = [point.as_json() for point in points]
        print(json.dumps({"points": told, "smallest": best.as_json()}))
    else:
        show(points, best, args.tolerance)
    return 0


def _of_file(args: argparse.Namespace) -> list[Point]:
    args.trace = Path(args.source)
    trace = simulate.read(args)
    capacities = sorted(simulate.capacities(args.capacity))
    chunk_bytes = None
    if args.model is not None:
        shape = simulate.read_model_shape(args, trace.chunk_tokens)
        chunk_bytes = shape.geometry.slot_bytes / shape.geometry.chunk_tokens * trace.chunk_tokens
    shares = shares_of(trace, capacities)
    return [
        Point(c, None if chunk_bytes is None else int(c * trace.num_chunks * chunk_bytes), share)
        for c, share in zip(capacities, shares, strict=True)
    ]


def shares_of(
    trace: Trace, capacities: Sequence[float], sampled_max: int = SAMPLED_MAX
) -> list[float]:
    """The share of prompt tokens that DRAM of so much of the distinct KV would have had."""
    sizes = [max(1, int(trace.num_chunks * capacity)) for capacity in capacities]
    curve = HitCurve(sizes, trace.chunk_tokens, tokens_kept=1 << 62, sampled_max=sampled_max)
    marks = [mark_of(blake3(b"%d" % number).digest()) for number in range(trace.num_chunks)]
    for request in trace.requests:
        curve.use(_used(request, trace.chunk_tokens, marks))
        for new in _stored(request, trace.chunk_tokens, marks):
            curve.store(new)
    return curve.shares()


def _used(request: TraceRequest, size: int, marks: Sequence[int]) -> LookedUp:
    """The look-up of a request of a trace."""
    chunks = request.chunks

    def part(number: int) -> tuple[bytes, bytes]:
        known = chunks[number : number + 1].tolist()
        stop = min(size, request.num_tokens - number * size)
        return b"", b"".join(map(_token, known)) * stop

    whole = chunks[: request.num_tokens // size].tolist()
    return LookedUp(0, [marks[chunk] for chunk in whole], request.num_tokens, part)


def _stored(request: TraceRequest, size: int, marks: Sequence[int]) -> Iterator[NewChunk]:
    """The chunks and the tail that a server stores behind the whole chunks of the prompt."""
    num_whole = request.num_tokens // size
    known = request.known_tokens
    end = max(known // size * size, kept_end(known, request.num_tokens))
    parent = int(request.chunks[num_whole - 1]) if 0 < num_whole <= len(request.chunks) else None
    for number, chunk in enumerate(request.chunks[num_whole:].tolist(), num_whole):
        num_tokens = min(size, end - number * size)
        before = marks[parent].to_bytes(8, "big") if parent is not None else bytes(8)
        if num_tokens == size:
            key = marks[chunk].to_bytes(8, "big")
        else:
            key = blake3(b"%d %d" % (chunk, num_tokens)).digest()
        if num_tokens >= MIN_TAIL_TOKENS:
            yield NewChunk(key, before, b"", _token(chunk) * num_tokens)
        parent = chunk


def _token(chunk: int) -> bytes:
    """All tokens of a chunk of a trace, which has none, are its number."""
    return chunk.to_bytes(TOKEN_BYTES, "big")


def of_server(metrics: Metrics) -> list[Point]:
    """The points that a server shows, of all its engines: the mean of their shares. Raises:
    TopError."""
    times = {
        label
        for name, labels in metrics
        if name == _RATIO
        for key, label in labels
        if key == "times"
    }
    num_bytes = total(metrics, _CAPACITY, tier="dram")
    if not times or not num_bytes:
        raise TopError("the server shows no curve yet; ask again when it has had requests")
    engines = sum(name == _CAPACITY and ("tier", "dram") in labels for name, labels in metrics)
    return [
        Point(float(t), int(float(t) * num_bytes), total(metrics, _RATIO, times=t) / engines)
        for t in sorted(times, key=float)
    ]


def smallest(points: Sequence[Point], tolerance: float) -> Point:
    """The smallest size that finds no more than so much less than the best."""
    enough = max(point.share for point in points) - tolerance
    return next(point for point in points if point.share >= enough)


def show(points: Sequence[Point], best: Point, tolerance: float) -> None:
    has_bytes = points[0].num_bytes is not None
    print("prompt tokens that DRAM would have had, by its size, if the least recently used left:")
    for point in points:
        size = format_size(point.num_bytes) if point.num_bytes is not None else ""
        print(f"{point.scale:>8g}{size:>12}{point.share:>9.1%}")
    name = format_size(best.num_bytes or 0) if has_bytes else f"{best.scale:g} of the distinct KV"
    print(f"\nsmallest within {tolerance:.1%} of the best: {name}")
