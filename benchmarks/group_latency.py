# SPDX-License-Identifier: Apache-2.0
"""Time to first token of a DRAM hit over that of an HBM hit, of models of several KV cache groups.

    python -m benchmarks.group_latency [--only gemma3 ...] [--rounds 9] [--json FILE]

24 layers, a history of some 4,000 tokens (whole blocks), and 1 or 128 new ones. One real engine a
family, in a process of its own. Each round asks the same prompt with its history in HBM and in
DRAM, one after the other; both must find the same tokens. Bind vLLM's threads before comparing.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

from attnstore_lab.testing.family_models import FAMILIES, Family
from benchmarks.family_parts.alone import measured

NAMES = ("llama", "gemma3", "gpt_oss", "qwen3_next")
LAYERS, HISTORY, NEW = 24, 3_840, (1, 128)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--only", nargs="+", default=NAMES, metavar="NAME")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path, help="where the figures go")
    arguments = parser.parse_args()
    print(table(measured(arguments.only, measure, arguments.rounds, out=arguments.json)))


def table(found: dict[str, dict[int, dict[str, Any]]]) -> str:
    lines = ["family      new tokens   HBM, ms   DRAM, ms   DRAM / HBM (quartiles)"]
    for name, rows in found.items():
        for new, row in rows.items():
            low, high = row["quartiles"]
            lines.append(
                f"{name:11} {new:>10} {row['hbm_ms']:>9.1f} {row['dram_ms']:>10.1f}"
                f"   {row['ratio']:.2f} ({low:.2f} to {high:.2f})"
            )
    return "\n".join(lines)


def deep(family: Family) -> Family:
    """The same with LAYERS layers of the same kinds, in the same order."""
    config = family.config()
    times = LAYERS // config["num_hidden_layers"]
    changes: dict[str, Any] = {"num_hidden_layers": times * config["num_hidden_layers"]}
    if config.get("layer_types"):
        changes["layer_types"] = times * config["layer_types"]
    return replace(
        family, name=f"{family.name}_{LAYERS}", config=lambda: {**family.config(), **changes}
    )


def measure(name: str, rounds: int) -> dict[int, dict[str, Any]]:
    """In a process of its own."""
    from attnstore_lab.testing.tiny_model import TINY  # noqa: PLC0415
    from tests.vllm.engine import Engine, EngineSpec  # noqa: PLC0415

    with tempfile.TemporaryDirectory(dir="/var/tmp") as directory:
        work = Path(directory)
        engine = Engine(
            EngineSpec(
                models=work,
                shape=TINY,
                store=work / "store",
                blocks=256,
                dram="1GiB",
                nvme="2GiB",
                vllm=deep(FAMILIES[name]).arguments(work / "families"),
            )
        )
        return {new: of_new(engine, name, new, rounds) for new in NEW}


def of_new(engine: Any, name: str, new: int, rounds: int) -> dict[str, Any]:
    random = Random(f"{name} {new}")
    history = [random.randrange(16, 1_000) for _ in range(HISTORY)]
    times: dict[str, list[float]] = {"hbm": [], "dram": []}
    for turn in range(rounds + 1):
        # vLLM keeps of windows and states what a prompt needs that is the history and one token.
        first = turn + 5
        engine.llm.reset_prefix_cache()
        engine.ask([*history, first], max_tokens=1)
        engine.settle()
        for where in ("hbm", "dram") if turn % 2 else ("dram", "hbm"):
            if where == "dram":
                engine.llm.reset_prefix_cache()
                # Behind a reset the store looks whether the weights have changed, once.
                engine.ask([turn + 5] * 20, max_tokens=1)
            else:
                engine.ask([*history, first], max_tokens=1)
            rest = [random.randrange(16, 1_000) for _ in range(new)]
            began = time.perf_counter()
            answer = engine.ask([*history, *rest], max_tokens=1)
            ms = 1_000 * (time.perf_counter() - began)
            assert answer.cached_tokens == HISTORY, (where, answer.cached_tokens)
            engine.settle()
            if turn:  # the first is for warming up
                times[where].append(ms)
    ratios = [dram / hbm for dram, hbm in zip(times["dram"], times["hbm"], strict=True)]
    low, ratio, high = statistics.quantiles(ratios, n=4)
    return {
        "hbm_ms": statistics.median(times["hbm"]),
        "dram_ms": statistics.median(times["dram"]),
        "ratio": ratio,
        "quartiles": [low, high],
        "history": HISTORY,
        "rounds": rounds,
    }


if __name__ == "__main__":
    main()
