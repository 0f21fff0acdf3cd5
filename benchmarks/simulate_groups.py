# SPDX-License-Identifier: Apache-2.0
"""Models with windows and states beside a plain one, simulated: tokens found, by bytes of DRAM.

    python -m benchmarks.simulate_groups TRACE [--requests N] [--dram 256GB] [--json FILE]
    python -m benchmarks.simulate_groups CONVERSATIONS --replay [--json FILE]

A trace runs once with so much DRAM and no NVMe, and once with room for everything. --replay is
benchmarks.group_replay with room for everything, simulated: compare its share of prompt tokens.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np

from attnstore_lab.bench.conversations import read_conversations
from attnstore_lab.sim.formats import Arrivals, read_trace
from attnstore_lab.sim.one_pool import replay_model
from attnstore_lab.sim.trace import Trace, TraceRequest, make_trace
from attnstore_lab.testing.family_models import FAMILIES
from attnstore_vllm.config.values import parse_size
from attnstore_vllm.model_shape import KvShape, read_shape, shape_of
from benchmarks.group_replay import ANSWER_TOKENS, CONTEXT_TOKENS, NAMES, tokens_of

MODELS = Path(__file__).resolve().parents[1] / "configs" / "models"
CHUNK_TOKENS = 256
CPU_BLOCK_TOKENS = 128


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--requests", type=int, help="the first so many (all)")
    parser.add_argument("--replay", action="store_true")
    parser.add_argument("--dram", default="256GB")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    outcome = replayed(args.trace) if args.replay else compared(args)
    print(json.dumps(outcome))
    if args.json is not None:
        args.json.write_text(json.dumps(outcome, indent=1) + "\n")


def compared(args: argparse.Namespace) -> dict[str, Any]:
    """Tokens found by model, with so much DRAM and with room for everything."""
    arrivals = Arrivals(sessions_s=0.2, num_sessions=None, think_s=60.0, seed=1)
    trace = read_trace(args.trace, arrivals, None, CHUNK_TOKENS)
    trace = make_trace(trace.name, trace.chunk_tokens, trace.requests[: args.requests])
    num_bytes = parse_size("--dram", args.dram)
    models: dict[str, Any] = {}
    for path in sorted(MODELS.glob("*.json")):
        shape = read_shape(path, chunk_tokens=CHUNK_TOKENS)
        runs = [replay_model(trace, shape, p, num_bytes) for p in ("attnstore", "infinite")]
        models[path.stem] = {run.policy: run.hit_tokens for run in runs}
        models[path.stem]["record_bytes"] = shape.geometry.slot_bytes
        print(path.stem, models[path.stem], flush=True)
    return {
        "trace": trace.name,
        "requests": len(trace.requests),
        "prompt_tokens": trace.num_tokens,
        "dram": args.dram,
        "models": models,
    }


def replayed(path: Path) -> dict[str, float]:
    """The share of prompt tokens found, by the family of a small model."""
    trace = conversations(path)
    shares = {}
    for name in NAMES:
        run = replay_model(trace, shape_of_family(name), "infinite", 1 << 40)
        shares[name] = run.hit_tokens_share
    return shares


def shape_of_family(name: str) -> KvShape:
    """As the engine runs it, which may be in another type than its config.json says: how many
    tokens a block of states has follows from the bytes of a token."""
    family = FAMILIES[name]
    config = {**family.config(), "dtype": family.dtype}
    of_state = 4 if family.options.get("mamba_ssm_cache_dtype") == "float32" else None
    return shape_of(config, name, block_tokens=CPU_BLOCK_TOKENS, state_dtype_bytes=of_state)


def conversations(path: Path) -> Trace:
    """Those of group_replay, turn by turn. Nobody shares anything across them."""
    talks = [talk for talk in read_conversations(path) if len(talk.questions) > 1][:12]
    histories = [len(tokens_of(talk.system or "")) for talk in talks]
    requests: list[TraceRequest] = []
    for turn in range(max(len(talk.questions) for talk in talks)):
        for number, talk in enumerate(talks):
            if turn >= len(talk.questions):
                continue
            tokens = histories[number] = histories[number] + len(tokens_of(talk.questions[turn]))
            answer = talk.answer(turn)
            wanted = 64 if answer is None else len(tokens_of(answer))
            length = max(1, min(ANSWER_TOKENS, wanted))
            if not tokens or tokens + length >= CONTEXT_TOKENS:
                continue
            known = histories[number] = tokens + length
            chunks = np.arange(-(-known // CHUNK_TOKENS), dtype=np.int64) + 1000 * number
            at = 1000.0 * len(requests)
            requests.append(TraceRequest(at, chunks, tokens, length, known, -1, 0.0))
    return make_trace(path.name, CHUNK_TOKENS, requests)


if __name__ == "__main__":
    main()
