# SPDX-License-Identifier: Apache-2.0
"""The time of the audit's trial: what a start with KV of an earlier process takes longer to serve.

    python -m benchmarks.trial [--model tiny|medium] [--rounds N] [--json]

A server stores prompts of 1,025 tokens on NVMe. In each round it is started on them twice, with
`audit` and without, each first in every other round. Two tokens are asked for first: the first
request of any start waits for the look at the weights. Then the prompts come one after another.
With the audit the first is computed, for the trial; without, it is loaded.

    first_ms   the answer to the first prompt: with audit less without is what the trial adds
    served_ms  from the first prompt's sending to the first answer that old KV was loaded for
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
import urllib.request
from pathlib import Path
from random import Random
from typing import Any

from tqdm import tqdm

from attnstore_lab.bench.environment import machine
from attnstore_lab.testing.tiny_model import MEDIUM, TINY, make_model
from attnstore_vllm.prometheus import total
from benchmarks.server import VllmServer

ROOT = Path(__file__).resolve().parent.parent
SHAPES = {"tiny": TINY, "medium": MEDIUM}
PROMPTS, PROMPT_TOKENS = 8, 1025
ARGUMENTS = [
    "--max-model-len", "2048", "--num-gpu-blocks-override", "128", "--enable-prompt-tokens-details",
]  # fmt: skip
SETTINGS = "dram: 1GiB\nnvme: {{path: {path}, capacity: 2GiB}}\naudit: {audit}\n"
AUDITS = {"audit": "{}", "off": "off"}
COMPARED_S = 20.0


def answer(server: VllmServer, prompt: list[int]) -> tuple[float, int]:
    """Milliseconds to the one token of the answer, and the tokens that were not computed."""
    body = {"model": server.model, "prompt": prompt, "max_tokens": 1, "temperature": 0}
    request = urllib.request.Request(
        f"{server.base_url}/v1/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    started = time.perf_counter()
    with urllib.request.urlopen(request, timeout=300) as got:
        said = json.load(got)
    ms = (time.perf_counter() - started) * 1000
    return ms, (said["usage"].get("prompt_tokens_details") or {}).get("cached_tokens") or 0


def agreed(server: VllmServer) -> int:
    """Chunks that the trial has compared. Figures of a server that rests come late."""
    deadline, found = time.monotonic() + COMPARED_S, 0
    while not found and time.monotonic() < deadline:
        time.sleep(0.5)
        found = int(total(server.metrics(), "vllm:attnstore_audits_total", outcome="agreed"))
    return found


def one_start(server: VllmServer, prompts: list[list[int]]) -> tuple[float, float, int]:
    """first_ms, served_ms, and the prompts that were computed before one was served."""
    answer(server, [20, 21])
    started, times = time.perf_counter(), []
    for prompt in prompts:
        ms, cached = answer(server, prompt)
        times.append(ms)
        if cached:
            return times[0], (time.perf_counter() - started) * 1000, len(times) - 1
    raise AssertionError("no old KV was served")


def measure(name: str, rounds: int) -> dict[str, Any]:
    chance = Random(1)
    prompts = [[chance.randrange(300, 1000) for _ in range(PROMPT_TOKENS)] for _ in range(PROMPTS)]
    first: dict[str, list[float]] = {side: [] for side in AUDITS}
    served: dict[str, list[float]] = {side: [] for side in AUDITS}
    computed: list[int] = []
    with tempfile.TemporaryDirectory(prefix="attnstore-bench-", dir="/var/tmp") as directory:
        work = Path(directory)
        model = str(make_model(work / name, SHAPES[name]))
        arguments = {}
        for side, audit in AUDITS.items():
            config = work / f"{side}.yaml"
            config.write_text(SETTINGS.format(path=work / "store", audit=audit))
            arguments[side] = [*ARGUMENTS, "--kv-transfer-config", str(config)]
        with VllmServer(model, arguments["off"], work / "log") as server:
            for prompt in prompts:
                answer(server, prompt)
        sides = list(AUDITS)
        for _ in tqdm(range(rounds), desc=name, unit="round"):
            for side in sides:
                with VllmServer(model, arguments[side], work / "log") as server:
                    first_ms, served_ms, num_computed = one_start(server, prompts)
                    is_tried = bool(num_computed)
                    assert is_tried == (side == "audit"), f"{side}: {num_computed} computed"
                    assert not is_tried or agreed(server), "the trial compared nothing"
                computed += [num_computed] if is_tried else []
                first[side].append(first_ms)
                served[side].append(served_ms)
            sides.reverse()
    added = [a - b for a, b in zip(first["audit"], first["off"], strict=True)]
    return {
        "model": name,
        "rounds": rounds,
        "prompt_tokens": PROMPT_TOKENS,
        "added_ms": round(statistics.median(added), 1),
        "computed_prompts": computed,
        "first_ms": {side: [round(ms, 1) for ms in found] for side, found in first.items()},
        "served_ms": {side: [round(ms, 1) for ms in found] for side, found in served.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--model", choices=[*SHAPES, "both"], default="both")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "trial.json")
    parser.add_argument("--json", action="store_true", help="print JSON in place of lines")
    args = parser.parse_args()
    names = list(SHAPES) if args.model == "both" else [args.model]
    results = [measure(name, args.rounds) for name in names]
    report = {"machine": machine(), "results": results}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(report, indent=1) + "\n")
    if args.json:
        print(json.dumps(report))
        return
    for found in results:
        served = statistics.median(found["served_ms"]["audit"])
        print(
            f"{found['model']}: the trial adds {found['added_ms']} ms to the first prompt; old KV "
            f"is served {served:.0f} ms after it was sent"
        )


if __name__ == "__main__":
    main()
