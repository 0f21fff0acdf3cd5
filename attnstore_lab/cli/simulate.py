# SPDX-License-Identifier: Apache-2.0
"""`attnstore simulate`: what a trace's requests would find, by policy and capacity."""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from attnstore_lab import palette
from attnstore_lab.progress import progress
from attnstore_lab.sim.baselines import BASELINES
from attnstore_lab.sim.formats import Arrivals, read_trace
from attnstore_lab.sim.one_pool import Replayed, distinct_bytes, replay, replay_model
from attnstore_lab.sim.pools import POLICIES
from attnstore_lab.sim.trace import Trace, at_speed
from attnstore_vllm.config.values import parse_size
from attnstore_vllm.errors import ConfigError
from attnstore_vllm.model_shape import KvShape, read_shape

DEFAULT_POLICIES = "attnstore,lru,fifo,belady,infinite"
MODEL_POLICIES = "attnstore,lru,fifo,infinite"
PATIENCE_S = 600.0
"""What a client waits for at most: OpenAI's library gives up after so long."""
DEFAULT_CAPACITIES = "0.005,0.01,0.02,0.05,0.1,0.2"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "trace", type=Path, metavar="TRACE", help="docs/simulate.md has the formats"
    )
    parser.add_argument(
        "--policy",
        metavar="P,...",
        help=f"of {','.join(POLICIES)} (belady: the bound for whole chunks; "
        f"{','.join(BASELINES)}: to compare with); with --machine also recompute",
    )
    parser.add_argument(
        "--capacity",
        default=DEFAULT_CAPACITIES,
        metavar="SHARE,...",
        help="of the trace's distinct KV, for one pool; with --model also sizes, as 64GB",
    )
    parser.add_argument(
        "--model", type=Path, metavar="CONFIG", help="the config.json whose KV is stored"
    )
    add_dtype_arguments(parser)
    parser.add_argument(
        "--machine", type=Path, metavar="YAML", help="simulate the server too, with its tiers"
    )
    parser.add_argument(
        "--warmup", type=int, default=0, metavar="N", help="with --machine: requests not counted"
    )
    add_patience_argument(parser)
    parser.add_argument("--plot", type=Path, metavar="FILE", help="write a picture (matplotlib)")
    add_trace_arguments(parser)


def add_patience_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--patience",
        type=float,
        default=PATIENCE_S,
        metavar="S",
        help="of clients: a simulated server whose requests wait for longer cannot serve the load, "
        "and stops (%(default)g); inf: never",
    )


def add_dtype_arguments(parser: argparse.ArgumentParser) -> None:
    """Sizes that a config.json does not tell, since vLLM's settings choose them."""
    parser.add_argument(
        "--kv-dtype-bytes", type=int, metavar="N", help="of an element of KV, if not the model's"
    )
    parser.add_argument(
        "--kv-cache-dtype", metavar="TYPE", help="vLLM's, which may bring scales: nvfp4, fp8_ds_mla"
    )
    parser.add_argument(
        "--state-dtype-bytes",
        type=int,
        metavar="N",
        help="of an element of a recurrent state, if not the model's (--mamba-ssm-cache-dtype)",
    )


def read_model_shape(args: argparse.Namespace, chunk_tokens: int) -> KvShape:
    """The shape that --model names. Raises: ConfigError, OSError."""
    return read_shape(
        args.model, args.kv_dtype_bytes, chunk_tokens, args.state_dtype_bytes, args.kv_cache_dtype
    )


def add_trace_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--speed", type=float, default=1.0, metavar="X", help="let requests come X times as fast"
    )
    parser.add_argument("--block-tokens", type=int, metavar="N", help="a hash stands for (512)")
    parser.add_argument("--chunk-tokens", type=int, default=256, metavar="N", help="(256)")
    given = parser.add_argument_group("for files without times of arrival")
    given.add_argument("--rate", type=float, default=0.2, help="sessions that begin in a second")
    given.add_argument("--sessions", type=int, help="drawn from the file (each once)")
    given.add_argument("--think", type=float, default=60.0, help="median s before a next question")
    given.add_argument("--seed", type=int, default=1)


def read(args: argparse.Namespace) -> Trace:
    """The trace. Raises: ConfigError, TraceError."""
    for name in ("chunk_tokens", "block_tokens", "rate", "sessions", "think", "speed", "patience"):
        value = getattr(args, name, None)
        if value is not None and not value > 0:
            raise ConfigError(f"--{name.replace('_', '-')} is {value}; expected more than 0")
    arrivals = Arrivals(
        sessions_s=args.rate, num_sessions=args.sessions, think_s=args.think, seed=args.seed
    )
    trace = read_trace(args.trace, arrivals, args.block_tokens, args.chunk_tokens)
    return at_speed(trace, args.speed)


def simulate(args: argparse.Namespace, trace: Trace) -> list[Replayed]:
    """One pool. Raises: ConfigError."""
    if args.model is not None:
        return _simulate_model(args, trace)
    policies = list(_policies(args.policy or DEFAULT_POLICIES))
    shares = list(capacities(args.capacity))
    total = len(policies) * len(shares) * len(trace.requests)
    with progress("simulate", total) as shown:
        runs = [
            replay(trace, policy, capacity, shown.step)
            for capacity in shares
            for policy in policies
        ]
    return runs


def _simulate_model(args: argparse.Namespace, trace: Trace) -> list[Replayed]:
    shape = read_model_shape(args, args.chunk_tokens)
    policies = (args.policy or MODEL_POLICIES).split(",")
    for name in policies:
        if name not in MODEL_POLICIES.split(","):
            raise ConfigError(f"--policy: {name!r}; with --model there are {MODEL_POLICIES}")
    sizes = [_pool_bytes(text, trace, shape) for text in args.capacity.split(",")]
    total = len(policies) * len(sizes) * len(trace.requests)
    with progress("simulate", total) as shown:
        return [
            replay_model(trace, shape, policy, size, shown.step)
            for size in sizes
            for policy in policies
        ]


def _pool_bytes(text: str, trace: Trace, shape: KvShape) -> int:
    """Bytes that `text` gives the pool: a size, or a share of the trace's distinct KV."""
    if text[-1:].isalpha():
        return parse_size("--capacity", text)
    (share,) = capacities(text)
    return int(distinct_bytes(trace, shape) * share)


def _policies(text: str) -> Iterator[str]:
    for name in text.split(","):
        if name not in POLICIES:
            raise ConfigError(f"--policy: {name!r} is unknown; there are {', '.join(POLICIES)}")
        yield name


def capacities(text: str) -> Iterator[float]:
    """The shares that --capacity names. Raises: ConfigError."""
    for share in text.split(","):
        try:
            value = float(share)
        except ValueError:
            value = -1.0
        if not 0 < value <= 1:
            raise ConfigError(f"--capacity: {share!r} was found; expected a share, as 0.01")
        yield value


def as_json(trace: Trace, runs: Sequence[Replayed]) -> dict[str, Any]:
    return {
        "trace": trace.name,
        "requests": len(trace.requests),
        "prompt_tokens": trace.num_tokens,
        "chunk_tokens": trace.chunk_tokens,
        "distinct_chunks": trace.num_chunks,
        "duration_s": round(trace.duration_s, 3),
        "runs": [
            {
                "policy": run.policy,
                "capacity": run.capacity,
                "num_slots": run.num_slots,
                "hit_tokens": run.hit_tokens,
                "hit_tokens_share": run.hit_tokens_share,
            }
            for run in runs
        ],
    }


def show(trace: Trace, runs: Sequence[Replayed]) -> None:
    print(
        f"{trace.name}: {len(trace.requests):,} requests in {trace.duration_s / 3600:.2f} h, "
        f"{trace.num_tokens:,} prompt tokens, {trace.num_chunks:,} distinct chunks of "
        f"{trace.chunk_tokens} tokens"
    )
    policies = list(dict.fromkeys(run.policy for run in runs))
    shares = {(run.capacity, run.policy): run.hit_tokens_share for run in runs}
    print("prompt tokens found, by capacity (share of the distinct KV):")
    print(f"{'capacity':>10}" + "".join(f"{name:>12}" for name in policies))
    for capacity in dict.fromkeys(run.capacity for run in runs):
        cells = "".join(f"{shares[capacity, name]:>12.1%}" for name in policies)
        print(f"{capacity:>10.2%}{cells}")


def check_plot(path: Path) -> None:
    """Raise ConfigError if no picture can be written there: before the run, not after it."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("--plot: matplotlib is not installed; pip install 'attnstore-vllm[plot]'")
    known = palette.formats()
    if path.suffix.removeprefix(".").lower() not in known:
        raise ConfigError(f"--plot is {str(path)!r}; its end must be one of {', '.join(known)}")
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"--plot is {str(path)!r}, but {str(path.parent)!r} is not a directory")


def plot(trace: Trace, runs: Sequence[Replayed], path: Path) -> None:
    """Write the picture; check_plot() has said that it can be."""
    figure, ((axes,),) = palette.figure((8, 4.5), f"Prompt tokens found, of {trace.name}")
    colors = palette.colors(run.policy for run in runs)
    for n, policy in enumerate(dict.fromkeys(run.policy for run in runs)):
        points = sorted((r.capacity, r.hit_tokens_share) for r in runs if r.policy == policy)
        axes.plot(
            [100 * x for x, _ in points],
            [100 * y for _, y in points],
            marker=palette.MARKS[n % len(palette.MARKS)],
            color=colors[policy],
            label=palette.name(policy),
        )
    axes.set(xscale="log", xlabel="capacity, % of the distinct KV", ylabel="found, %")
    axes.set_ylim(bottom=0)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=4)
    palette.save(figure, path)
    print(f"plot: {path}", file=sys.stderr)
