# SPDX-License-Identifier: Apache-2.0
"""A conversation of several turns with models of several KV cache groups: what is found of each
turn, and how many bytes it leaves on NVMe.

    python -m benchmarks.group_bytes [--only gemma3 gpt_oss] [--tokens 8000] [--json FILE]

One real engine a family, with a tiny random model, in this process's child. Bytes are compared with
those of storing all groups' KV of all tokens, which is what a store that knows no groups does.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from random import Random
from typing import Any

from benchmarks.family_parts.alone import measured

FAMILIES = ("gemma3", "gpt_oss", "llama4", "qwen3_next", "llama")
TURN, ANSWER = 500, 40


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--only", nargs="+", default=FAMILIES, metavar="NAME")
    parser.add_argument("--tokens", type=int, default=8_000, help="of the whole conversation")
    parser.add_argument("--json", type=Path, help="where the figures go")
    arguments = parser.parse_args()
    print(table(measured(arguments.only, measure, arguments.tokens, out=arguments.json)))


def table(found: dict[str, dict[str, Any]]) -> str:
    lines = ["family       found of history   bytes over all"]
    for name, row in found.items():
        lines.append(f"{name:12} {row['found']:>8.3f} {row['bytes_over_all']:>18.3f}")
    return "\n".join(lines)


def measure(name: str, num_tokens: int) -> dict[str, Any]:
    """In a process of its own."""
    from attnstore_lab.testing.family_models import FAMILIES as MODELS  # noqa: PLC0415
    from attnstore_lab.testing.tiny_model import TINY  # noqa: PLC0415
    from tests.vllm.engine import Engine, EngineSpec  # noqa: PLC0415

    random = Random(name)
    with tempfile.TemporaryDirectory(dir="/var/tmp") as directory:
        work = Path(directory)
        engine = Engine(EngineSpec(
            models=work, shape=TINY, store=work / "store", blocks=512, dram="1GiB", nvme="4GiB",
            vllm={
                **MODELS[name].arguments(work / "families"), "max_model_len": num_tokens + 192,
            },
        ))  # fmt: skip
        tokens: list[int] = []
        found, wanted = 0, 0
        while len(tokens) < num_tokens - TURN - ANSWER:
            history = len(tokens)
            tokens += [random.randrange(16, 1_000) for _ in range(TURN)]
            engine.llm.reset_prefix_cache()
            answer = engine.ask(tokens, max_tokens=ANSWER)
            found, wanted = found + answer.cached_tokens, wanted + max(0, history - 1)
            tokens += answer.tokens
            engine.settle()
        store = engine.store
        record_bytes = store.thread.tiers[0].record_bytes
        chunks = -(-len(tokens) // engine.side.geometry.chunk_tokens)
        all_bytes = chunks * len(engine.side.geometry.groups) * record_bytes
        held = store.gauges()["held_bytes", "nvme"]
        return {
            "tokens": len(tokens),
            "found": found / wanted,
            "bytes": held,
            "bytes_over_all": held / all_bytes,
            "groups": len(engine.side.geometry.groups),
        }


if __name__ == "__main__":
    main()
