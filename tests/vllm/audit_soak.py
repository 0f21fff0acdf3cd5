# SPDX-License-Identifier: Apache-2.0
"""False alarms of the audit: many chunks, computed again in other batches, and compared.

    python -m tests.vllm.audit_soak --chunks 100000 [--out FILE [--go-on]]
    python -m tests.vllm.audit_soak --chunks 1000 --crowds 5 --family gemma3 lfm2

Of each family an engine computes crowds of prompts. Then HBM is emptied, and the same prompts come
again in other crowds, with prefills in chunks of another size, and with preemptions, since HBM
holds few of them. Each hit is audited. Nothing is planted, so each chunk that differs is a false
alarm. The largest distance says how far the bound was from one.

All families have as many crowds, and so as many tokens. Chunks are more where a family has more
KV cache groups, and fewer where its blocks are large.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

from attnstore_lab.bench.environment import machine
from attnstore_lab.testing.family_models import FAMILIES as MODELS
from attnstore_vllm.policy.kv_compare import BOUND, Blocks, Comparison, Difference
from attnstore_vllm.types import Event
from tests.vllm.engine import Engine, EngineSpec
from tests.vllm.host import EngineHost
from tests.vllm.prompts import random_tokens
from tests.vllm.stored import events

EVERY_HIT = {"rate": 1, "tokens": 1_000_000, "stop_after": 1_000}
OUTCOMES = (Event.AGREED.value, Event.DIFFERED.value, Event.NOT_COMPARED.value)
FAMILIES = (
    "llama", "gemma2", "gemma3", "gemma4", "cohere2", "gpt_oss", "llama4", "mimo_v2",
    "mistral_window", "qwen3_next", "qwen3_5", "lfm2",
)  # fmt: skip
STEPS = (160, 300, 512, 1_024)
"""Tokens of a step at most: prefills are cut there."""
SMALL = {"max_model_len": 1_280, "max_num_batched_tokens": 1_024, "dtype": "bfloat16"}
FEW_BLOCKS = {"llama": 26, "gpt_oss": 26, "qwen3_next": 36}
"""Blocks of HBM with which not all of a crowd runs at once."""
COMPILED = {"lfm2"}
"""vLLM's CPU kernel turns K of three dimensions at wrong places (0.32), so that eager LFM2 has
other KV wherever a step ends. The audit is right to differ there: of 4,787 chunks 2,658 did."""
CROWD, LONGEST, AGAIN = 8, 1_200, 4


class Recording(Comparison):
    """Notes each distance that is not 0."""

    def __init__(self, like: Comparison) -> None:
        super().__init__(like.units, like.sides, like.content_bytes, like.most)
        self.seen: list[float] = []

    def look(
        self, stored: memoryview, computed: memoryview, blocks: Blocks, bound: float = BOUND
    ) -> Iterator[Difference | None]:
        for found in super().look(stored, computed, blocks, bound):
            worst = found.distance if found is not None else self.largest
            if worst:
                self.seen.append(worst)
            yield found


def record(engine: Engine) -> None:
    audit: Any = engine.store.audit
    audit.comparisons[:] = [one and Recording(one) for one in audit.comparisons]


def crowds(engine: Engine, seed: int, round_: int) -> dict[str, float]:
    """Prompts, and the same again in other crowds and steps.

    Returns how many chunks came to each outcome, "preemptions", "refused" (preempt_all()), and
    "distance", the largest.
    """
    chance = Random(f"{seed} {round_}")
    scheduler, audit = engine.scheduler, engine.store.audit
    before, preempted, refused = events(engine, *OUTCOMES), preemptions(engine), 0
    prompts = [
        random_tokens((seed, round_, i), chance.randrange(200, LONGEST)) for i in range(CROWD)
    ]
    usual = scheduler.max_num_scheduled_tokens
    for _ in range(AGAIN):
        engine.forget_hbm()
        scheduler.max_num_scheduled_tokens = min(usual, chance.choice(STEPS))
        numbers = [engine.submit(one, max_tokens=chance.choice((1, 1, 12))) for one in prompts]
        if chance.random() < 0.5:
            for _ in range(chance.randrange(1, 6)):
                engine.step()
            refused += not preempt_all(engine)
        engine.finish(*numbers)
        engine.settle()
        chance.shuffle(prompts)
    scheduler.max_num_scheduled_tokens = usual
    recordings: list[Recording] = [one for one in getattr(audit, "comparisons", ()) if one]
    largest = max((max(one.seen, default=0.0) for one in recordings), default=0.0)
    for one in recordings:
        one.seen.clear()
    found = {name: n - before[name] for name, n in events(engine, *OUTCOMES).items()}
    counts = {"preemptions": preemptions(engine) - preempted, "refused": refused}
    return {**found, **counts, "distance": largest}


def preempt_all(engine: Engine) -> bool:
    """What runs loses its blocks. Whether HBM was emptied too: vLLM raises where it was not, since
    a request that waits for a load has blocks, or one that has ended and is still copied. A block
    that is never freed stops forget_hbm()."""
    try:
        return bool(engine.scheduler.reset_prefix_cache(reset_running_requests=True))
    except RuntimeError as error:
        if "requests waiting for remote KV transfer" not in str(error):
            raise
        return False


def preemptions(engine: Engine) -> int:
    return int(sum(m.value for m in engine.llm.get_metrics() if m.name == "vllm:num_preemptions"))


def spec_of(name: str, where: Path, eager: bool) -> EngineSpec:
    family = MODELS[name]
    return EngineSpec(
        store=where / "store", models=where / "models", eager=eager,
        vllm={**family.arguments(where / "families"), **SMALL},
        needs_images=family.needs_images, blocks=FEW_BLOCKS.get(name, 66),
        dram="512MiB", nvme="2GiB", settings={"audit": EVERY_HIT, "chunk_tokens": 128},
    )  # fmt: skip


def audit_family(name: str, rounds: range, seed: int, eager: bool) -> dict[str, Any]:
    """Crowds of one family. Returns their counts (crowds())."""
    total: dict[str, Any] = {"family": name, "graphs": not eager, "distance": 0.0}
    with tempfile.TemporaryDirectory(prefix="attnstore-audit-") as name_:
        where = Path(name_)
        with EngineHost(spec_of(name, where, eager), where / "log") as engine:
            engine.call(record)
            for round_ in rounds:
                found = engine.call(crowds, seed, round_)
                total["distance"] = max(total["distance"], found.pop("distance"))
                for outcome, n in found.items():
                    total[outcome] = total.get(outcome, 0) + n
                say = f"{name}: crowd {round_ + 1}, {total['agreed']:,} chunks agree"
                print(f"\r{say}, {total['differed']} differ ", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return total


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--chunks", type=int, default=100_000, help="of all families, at least")
    parser.add_argument("--crowds", type=int, default=44, help="of each family, and again if need")
    parser.add_argument("--family", nargs="+", default=FAMILIES, choices=sorted(MODELS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="a file for the result, as JSON")
    parser.add_argument("--go-on", action="store_true", help="with the families that --out lacks")
    options = parser.parse_args()
    rows, begun, families = [], time.monotonic(), options.family
    if options.go_on:
        said = json.loads(options.out.read_text())
        rows, begun = said["families"], begun - said["seconds"]
    compared, alarms = (sum(row[name] for row in rows) for name in ("agreed", "differed"))
    compared += alarms
    while compared < options.chunks or len(rows) % len(families):
        passes, number = divmod(len(rows), len(families))
        rounds = range(passes * options.crowds, (passes + 1) * options.crowds)
        name = families[number]
        eager = number % 2 == 1 and name not in COMPILED  # compiled is a server's default
        rows.append(audit_family(name, rounds, options.seed, eager))
        compared = sum(row["agreed"] + row["differed"] for row in rows)
        alarms = sum(row["differed"] for row in rows)
        if options.out:  # after each family: a run takes an hour and more
            result = {"compared": compared, "false_alarms": alarms, "crowds": options.crowds}
            result["seconds"] = round(time.monotonic() - begun)
            text = json.dumps({**result, "families": rows, "machine": machine()}, indent=1)
            options.out.write_text(text + "\n")
    for row in rows:
        print(row)
    print(f"{compared:,} chunks compared, {alarms} false alarms")
    return 1 if alarms else 0


if __name__ == "__main__":
    raise SystemExit(main())
