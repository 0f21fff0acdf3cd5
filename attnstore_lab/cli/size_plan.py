# SPDX-License-Identifier: Apache-2.0
"""`attnstore plan`: how much DRAM and NVMe a load wants, for the money there is.

Splits the budget between the two in several ways and simulates each; nothing is guessed that a
simulation can say. Of the best split each tier is then cut to what the trace can fill, and halved
as long as that costs next to nothing: what is left is recommended, and not all that the money can
buy.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from attnstore_lab.cli import simulate
from attnstore_lab.cli.simulate_server import LESS_LOAD
from attnstore_lab.progress import progress
from attnstore_lab.sim.hardware import Machine
from attnstore_lab.sim.outcome import Outcome
from attnstore_lab.sim.server import Server
from attnstore_lab.sim.trace import Trace
from attnstore_vllm.config.values import SIZE_MIN, format_size
from attnstore_vllm.errors import ConfigError
from attnstore_vllm.index.sections import Reach
from attnstore_vllm.model_shape import KvShape
from attnstore_vllm.transfer.geometry import Geometry, groups_text

SPLITS = (0.1, 0.3, 0.5, 0.7, 0.9)
"""Shares of the budget that are spent on DRAM."""
GB = 1_000_000_000
HALVINGS_MAX = 8
"""The most of one tier: each costs a simulation."""
CHUNKS_MIN = 16
"""The fewest that a tier is tried with."""
EMPTY, FULL = 0.5, 0.9
"""Shares of a slot that a chunk has: with less it is worth a warning, more is as good as all."""
CHUNK_GROWTH_MAX = 64
"""Times the chunk: no larger one is recommended."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", type=Path, metavar="CONFIG", help="the model's config.json")
    parser.add_argument("trace", type=Path, metavar="TRACE", help="the load: docs/simulate.md")
    parser.add_argument("--machine", type=Path, required=True, metavar="YAML", help="its speeds")
    parser.add_argument(
        "--budget", type=float, required=True, metavar="MONEY", help="an hour, for DRAM and NVMe"
    )
    parser.add_argument("--dram-price", type=float, default=0.0088, help="a GB and hour (0.0088)")
    parser.add_argument("--nvme-price", type=float, default=0.000082, help="(0.000082)")
    parser.add_argument(
        "--tolerance",
        type=float,
        default=0.02,
        metavar="SHARE",
        help="that smaller sizes may cost in time for prompts and in TTFT (%(default)s)",
    )
    simulate.add_dtype_arguments(parser)
    simulate.add_patience_argument(parser)


@dataclass(frozen=True, slots=True)
class Option:
    """One way to spend the budget, and what came of it. Sizes in bytes."""

    dram: int
    nvme: int
    price: float
    outcome: Outcome

    def as_json(self) -> dict[str, Any]:
        return {"dram": self.dram, "nvme": self.nvme, "price": self.price, **self.outcome.as_json()}


@dataclass(frozen=True, slots=True)
class Conversation:
    """A model's KV, and what a conversation as long as the trace's mean prompt takes of a store."""

    shape: KvShape
    num_tokens: int

    def fuller_chunk_tokens(self) -> int | None:
        """The least multiple of the chunk by a power of two that fills its slot, where this one
        leaves most of it empty; None where no chunk is better."""
        geometry = self.shape.geometry
        if _filled(geometry) >= EMPTY:
            return None
        tokens = geometry.chunk_tokens
        while tokens < CHUNK_GROWTH_MAX * geometry.chunk_tokens:
            tokens *= 2
            if _filled(replace(geometry, chunk_tokens=tokens)) >= FULL:
                return tokens
        return None

    def as_json(self) -> dict[str, Any]:
        shape, geometry = self.shape, self.shape.geometry
        return {
            "kv_bytes_per_token": {
                reach.value: shape.token_bytes(reach) for reach in Reach if reach is not Reach.STATE
            },
            "state_bytes": shape.token_bytes(Reach.STATE),
            "groups": groups_text(geometry.groups),
            "chunk_tokens": geometry.chunk_tokens,
            "record_bytes": shape.record_bytes,
            "conversation_tokens": self.num_tokens,
            "conversation_records": shape.records(self.num_tokens),
            "conversation_bytes": shape.conversation_bytes(self.num_tokens),
        }


def _filled(geometry: Geometry) -> float:
    """The share of a slot that a chunk of the spine has."""
    return geometry.chunk_tokens // geometry.block_tokens / geometry.blocks_per_chunk


def conversation_of(shape: KvShape, trace: Trace) -> Conversation:
    tokens = [request.num_tokens for request in trace.requests]
    return Conversation(shape, max(1, sum(tokens) // max(1, len(tokens))))


def plan(args: argparse.Namespace, trace: Trace) -> tuple[Conversation, list[Option]]:
    """The model, and the options: the recommended one, then all splits of the budget, the best
    first. Raises: ConfigError."""
    for name in ("budget", "dram_price", "nvme_price"):
        if not getattr(args, name) > 0:
            raise ConfigError(
                f"--{name.replace('_', '-')} is {getattr(args, name)}; expected more than 0"
            )
    if not 0 <= args.tolerance < 1:
        raise ConfigError(f"--tolerance is {args.tolerance}; expected a share, as 0.02")
    model = conversation_of(simulate.read_model_shape(args, trace.chunk_tokens), trace)
    machine = Machine.read(args.machine).with_model(model.shape)
    with progress("plan", len(SPLITS) * len(trace.requests)) as shown:
        num_runs = 0

        def simulated(dram: int, nvme: int) -> Option:
            nonlocal num_runs
            shown.what = f"DRAM {format_size(dram)}, NVMe {format_size(nvme)}"
            shown.done, num_runs = num_runs * len(trace.requests), num_runs + 1
            shown.total = max(len(SPLITS), num_runs) * len(trace.requests)
            sized = machine.with_sizes(dram=dram, nvme=nvme)
            price = (dram * args.dram_price + nvme * args.nvme_price) / GB
            server = Server(trace, sized, "attnstore", patience_s=args.patience, step=shown.step)
            return Option(dram, nvme, price, server.run())

        options = [
            simulated(
                int(args.budget * share / args.dram_price * GB),
                int(args.budget * (1 - share) / args.nvme_price * GB),
            )
            for share in SPLITS
        ]

        def order(option: Option) -> tuple[bool, float, float]:
            out = option.outcome
            return not out.is_served, round(out.prefill_s, 1), out.ttft(50)

        options.sort(key=order)
        if not options[0].outcome.is_served:
            raise ConfigError(
                f"{args.machine.stem} cannot serve {trace.name} with any split of the budget: a "
                f"request waits for more than {args.patience:,.0f} s. {LESS_LOAD}"
            )
        least = CHUNKS_MIN * machine.chunk_bytes
        smallest = shrunk(options[0], simulated, args.tolerance, least, most_bytes(trace, machine))
    return model, [smallest, *options]


def rounded_up(num_bytes: int) -> int:
    """A size that a person would write: by an eighth more at most, or up to a whole MiB."""
    step = max(SIZE_MIN, 1 << max(0, num_bytes.bit_length() - 4))
    return -(-num_bytes // step) * step


def most_bytes(trace: Trace, machine: Machine) -> tuple[int, int]:
    """Bytes of DRAM and of NVMe that the trace can fill, rounded up: of each group of the model a
    record for each distinct chunk."""
    chunks = trace.num_chunks * -(-trace.chunk_tokens // machine.chunk_tokens)
    records = max(CHUNKS_MIN, chunks * len(machine.geometry.groups))
    return rounded_up(records * machine.chunk_bytes), rounded_up(records * machine.nvme_chunk_bytes)


def shrunk(
    best: Option,
    simulated: Callable[[int, int], Option],
    tolerance: float,
    least: int,
    most: tuple[int, int],
) -> Option:
    """The last option in which no tier can be halved again without costing more than `tolerance`.

    Args:
        least: bytes that a tier has at least.
        most: bytes of DRAM and of NVMe that can be filled. More is of no use, but for a model
            whose sections and states have records of their own within a chunk.
    """
    out = best.outcome
    prefill_s, ttft_s = (value * (1 + tolerance) for value in (out.prefill_s, out.ttft(50)))

    def is_as_good(option: Option) -> bool:
        if not option.outcome.is_served:
            return False
        return option.outcome.prefill_s <= prefill_s and option.outcome.ttft(50) <= ttft_s

    found, filled = best, (min(best.dram, most[0]), min(best.nvme, most[1]))
    if filled != (best.dram, best.nvme):
        cut = simulated(*filled)
        found = cut if is_as_good(cut) else best
    for halves in ((2, 1), (1, 2)):  # DRAM is the dearer one
        for _ in range(HALVINGS_MAX):
            dram, nvme = found.dram // halves[0], found.nvme // halves[1]
            if min(dram, nvme) < least:
                break
            option = simulated(dram, nvme)
            if not is_as_good(option):
                break
            found = option
    return found


def show_model(model: Conversation) -> None:
    """Print what a model keeps that has several groups, or packed pages: of others it goes without
    saying."""
    told = model.as_json()
    for reach, num_bytes in told["kv_bytes_per_token"].items():
        if num_bytes:
            print(f"{reach}: {format_size(num_bytes)} a token")
    if told["state_bytes"]:
        print(f"states: {format_size(told['state_bytes'])} in all layers")
    records = ", ".join(f"{n} {kind}" for kind, n in told["conversation_records"].items())
    print(
        f"{told['groups'] or 'one group'}; records of {format_size(told['record_bytes'])}, for "
        f"{told['chunk_tokens']} tokens or a state\n"
        f"a conversation of {told['conversation_tokens']:,} tokens: "
        f"{format_size(told['conversation_bytes'])} ({records}), at most twice the sections and "
        "states\n"
    )
    fuller = model.fuller_chunk_tokens()
    if fuller is not None:
        geometry = model.shape.geometry
        blocks = geometry.chunk_tokens // geometry.block_tokens
        print(
            f"warning: a chunk of {geometry.chunk_tokens} tokens fills {blocks} of the "
            f"{geometry.blocks_per_chunk} blocks of its record; set chunk_tokens: {fuller}\n"
        )


def show(trace: Trace, options: Sequence[Option]) -> None:
    print(f"{trace.name}: {len(trace.requests):,} requests")
    print(
        f"{'DRAM':>10}{'NVMe':>10}{'found':>8}{'in DRAM':>9}{'TTFT p50':>10}{'p99':>9}"
        f"{'prefill':>10}"
    )
    for option in (*options[1:], options[0]):
        out = option.outcome
        sizes = f"{format_size(option.dram):>10}{format_size(option.nvme):>10}"
        if not out.is_served:
            print(f"{sizes}  cannot serve this load")
            continue
        print(
            f"{sizes}{out.hit_tokens_share:>8.1%}{out.ready_share:>9.1%}{out.ttft(50):>9.3f}s"
            f"{out.ttft(99):>8.2f}s{out.prefill_s:>9.0f}s"
        )
    best = options[0]
    print(
        f"\nsmallest that is about as good, for {best.price:.4g} an hour in place of "
        f"{options[1].price:.4g}:"
        f"\ndram: {format_size(best.dram)}\n"
        f"nvme: {{path: /mnt/nvme/attnstore, capacity: {format_size(best.nvme)}}}"
    )
