# SPDX-License-Identifier: Apache-2.0
"""`attnstore plan`: how much DRAM and NVMe a load wants, for the money there is.

Splits the budget between the two in several ways and simulates each; nothing is guessed that a
simulation can say.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tqdm import tqdm

from attnstore_vllm.config import format_size
from attnstore_vllm.errors import ConfigError
from attnstore_vllm.sim.hardware import Machine
from attnstore_vllm.sim.outcome import Outcome
from attnstore_vllm.sim.server import Server
from attnstore_vllm.sim.trace import Trace

SPLITS = (0.1, 0.3, 0.5, 0.7, 0.9)
"""Shares of the budget that are spent on DRAM."""
_DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "half": 2, "float32": 4, "float": 4}
GB = 1_000_000_000


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
        "--kv-dtype-bytes", type=int, help="of an element of KV, if not the model's"
    )


@dataclass(frozen=True, slots=True)
class Option:
    """One way to spend the budget, and what came of it. Sizes in bytes."""

    dram: int
    nvme: int
    price: float
    outcome: Outcome

    def as_json(self) -> dict[str, Any]:
        return {"dram": self.dram, "nvme": self.nvme, "price": self.price,
                **self.outcome.as_json()}  # fmt: skip


def kv_bytes_per_token(config: Mapping[str, Any], where: str, dtype_bytes: int | None) -> int:
    """KV bytes of a decoder with plain attention, as its config.json says.

    Raises: ConfigError for others (latent attention, no attention), or if something is missing.
    """
    config = config.get("text_config") or config
    if config.get("kv_lora_rank"):
        raise ConfigError(
            f"{where}: kv_lora_rank is set: latent attention, which AttnStore does not serve yet"
        )
    layers = _count(config, where, "num_hidden_layers", "n_layer")
    heads = _count(config, where, "num_attention_heads", "n_head")
    kv_heads = heads
    for key in ("num_key_value_heads", "num_kv_heads"):
        kv_heads = config.get(key) or kv_heads
    if config.get("multi_query") and not config.get("new_decoder_architecture"):
        kv_heads = 1
    head = config.get("head_dim") or _count(config, where, "hidden_size", "n_embd") // heads
    if dtype_bytes is None:
        name = config.get("torch_dtype") or config.get("dtype") or "bfloat16"
        if name not in _DTYPE_BYTES:
            raise ConfigError(f"{where}: torch_dtype is {name!r}; say --kv-dtype-bytes")
        dtype_bytes = _DTYPE_BYTES[name]
    return 2 * layers * int(kv_heads) * int(head) * dtype_bytes


def _count(config: Mapping[str, Any], where: str, *names: str) -> int:
    for name in names:
        value = config.get(name)
        if isinstance(value, int) and value > 0:
            return value
    raise ConfigError(f"{where}: {names[0]} is missing; expected the config.json of a decoder")


def plan(args: argparse.Namespace, trace: Trace) -> list[Option]:
    """All options, the best first. Raises: ConfigError."""
    for name in ("budget", "dram_price", "nvme_price"):
        if not getattr(args, name) > 0:
            raise ConfigError(
                f"--{name.replace('_', '-')} is {getattr(args, name)}; expected more than 0"
            )
    try:
        config = json.loads(args.model.read_text())
    except ValueError as error:
        raise ConfigError(f"{args.model}: not JSON: {error}") from error
    kv_bytes = kv_bytes_per_token(config, str(args.model), args.kv_dtype_bytes)
    machine = replace(
        Machine.read(args.machine), chunk_tokens=trace.chunk_tokens, kv_bytes_per_token=kv_bytes
    )
    options = []
    with tqdm(total=len(SPLITS) * len(trace.requests), unit="request", disable=None) as bar:
        for share in SPLITS:
            dram = int(args.budget * share / args.dram_price * GB)
            nvme = int(args.budget * (1 - share) / args.nvme_price * GB)
            sized = machine.with_sizes(dram=dram, nvme=nvme)
            outcome = Server(trace, sized, "attnstore", step=bar.update).run()
            options.append(Option(dram, nvme, args.budget, outcome))
    return sorted(options, key=lambda o: (round(o.outcome.prefill_s, 1), o.outcome.ttft(50)))


def show(trace: Trace, options: Sequence[Option]) -> None:
    print(f"{trace.name}: {len(trace.requests):,} requests")
    print(
        f"{'DRAM':>10}{'NVMe':>10}{'found':>8}{'in DRAM':>9}{'TTFT p50':>10}{'p99':>9}"
        f"{'prefill':>10}"
    )
    for option in options:
        out = option.outcome
        print(
            f"{format_size(option.dram):>10}{format_size(option.nvme):>10}"
            f"{out.hit_tokens_share:>8.1%}{out.ready_share:>9.1%}{out.ttft(50):>9.3f}s"
            f"{out.ttft(99):>8.2f}s{out.prefill_s:>9.0f}s"
        )
    best = options[0]
    print(
        f"\ndram: {format_size(best.dram)}\n"
        f"nvme: {{path: /mnt/nvme/attnstore, capacity: {format_size(best.nvme)}}}"
    )
