# SPDX-License-Identifier: Apache-2.0
"""The small matrix on real servers: its loads, its arms and their verdict. Nothing is run here."""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, Final

from attnstore_lab.bench.conversations import Conversation
from attnstore_lab.sim.agents import Load
from attnstore_lab.testing.tiny_model import SMALL, ModelShape
from benchmarks.slow_disk import RATE

ROOT: Final = Path(__file__).resolve().parent.parent.parent
OVER_PLAIN, OVER_OFFLOADING = 0.6, 0.85
"""Goals of mean job time, of GOAL_PLAIN and of GOAL_OFFLOADING."""
LEAST_NOISE: Final = 0.02
"""Two servers alike differ by so much at least, even where the two plain ones happened not to."""
LOST_BYTES: Final = 4 << 30
"""Of a disk that the settings want, and that is taken away at the start."""
TOKEN_IDS: Final = range(300, 1000)
"""Of every model here: no special tokens."""

HOLDS: Final = {"share": 0.9, "longest": "30s", "defer": "60s"}
"""As in the simulated arms."""
PLAIN, PLAIN_AGAIN = "plain", "plain, again"
OFFLOADING, SIMPLE = "OffloadingConnector", "SimpleCPUOffload"
GOAL_PLAIN, GOAL_OFFLOADING = "attnstore 1x + NVMe", "attnstore 1x"


@dataclass(frozen=True, slots=True)
class Arm:
    """A server. `dram` is in sizes of HBM."""

    name: str
    connector: str | None = None
    dram: float = 0
    has_nvme: bool = False
    holds: bool = False
    """With holding: HBM is held over a tool call."""

    @property
    def is_ours(self) -> bool:
        return self.connector == "AttnStoreConnector"


@dataclass(frozen=True, slots=True)
class Plan:
    """What is asked of each arm. Bytes, tokens and seconds."""

    load: Load
    jobs_per_s: float
    arms: tuple[Arm, ...]
    shape: ModelShape = SMALL
    hbm_tokens: int = 12_288
    block_tokens: int = 128
    max_num_seqs: int = 4
    nvme_bytes: int = 2 << 30
    serve: tuple[str, ...] = ("--enforce-eager",)  # a start compiles for a minute
    arm_deadline_s: float = 600.0
    """Jobs that are not done then fail the arm."""

    @property
    def hbm_bytes(self) -> int:
        return self.hbm_tokens * self.shape.kv_bytes_per_token

    @property
    def session_tokens(self) -> int:
        """Of all jobs together, at their ends."""
        return self.load.num_jobs * (self.load.prompts[-1] + self.load.answer_tokens)


def ours(dram: float, *, has_nvme: bool, holds: bool = False) -> Arm:
    name = f"{'holding' if holds else 'attnstore'} {dram:g}x{' + NVMe' if has_nvme else ''}"
    return Arm(name, "AttnStoreConnector", dram, has_nvme, holds)


OTHERS: Final = (
    Arm(f"{OFFLOADING} 1x", "OffloadingConnector", 1),
    Arm(f"{SIMPLE} 1x", "SimpleCPUOffloadConnector", 1),
)
OURS: Final = tuple(ours(d, has_nvme=n) for d in (0.25, 1, 4) for n in (False, True))
HOLDING: Final = (ours(0.25, has_nvme=False, holds=True), ours(1, has_nvme=True, holds=True))
SMALL_LOAD: Final = Load(
    name="18 turns, small",
    prompts=tuple(630 + round(turn * (3530 - 630) / 17) for turn in range(18)),
    answer_tokens=16,
    tool_s=0.5,
    num_jobs=12,
    shared_tokens=180,
)
QUICK_LOAD: Final = Load(
    name="5 turns, quick",
    prompts=(300, 600, 900, 1200, 1500),
    answer_tokens=8,
    tool_s=0.3,
    num_jobs=6,
)
FULL: Final = Plan(SMALL_LOAD, 2.0, (Arm(PLAIN), *OTHERS, *OURS, *HOLDING, Arm(PLAIN_AGAIN)))
QUICK: Final = Plan(
    QUICK_LOAD,
    4.0,
    (Arm(PLAIN), OTHERS[0], ours(0.25, has_nvme=False), ours(1, has_nvme=True), Arm(PLAIN_AGAIN)),
    hbm_tokens=3_072,
)


def begins(load: Load, jobs_per_s: float, seed: int) -> list[float]:
    """When each job comes, in seconds: gaps as of a Poisson process, the last after jobs / rate."""
    random = Random(seed)
    gaps = [random.expovariate(1.0) for _ in range(load.num_jobs)]
    scale = load.num_jobs / jobs_per_s / sum(gaps)
    return [scale * sum(gaps[: job + 1]) for job in range(load.num_jobs)]


def conversations(load: Load, seed: int) -> list[Conversation]:
    """Of random ids. A turn's prompt has `load.prompts` tokens with the answers before it."""
    shared = [Random(seed).choice(TOKEN_IDS) for _ in range(load.shared_tokens)]
    found = []
    for job in range(load.num_jobs):
        random = Random(f"{seed} {job}")
        new = list(_new_tokens(load))
        questions = [[random.choice(TOKEN_IDS) for _ in range(count)] for count in new]
        questions[0] = (shared + questions[0])[: new[0]]
        found.append(Conversation(str(job), tuple(map(_ids, questions))))
    return found


def _new_tokens(load: Load) -> Iterator[int]:
    before = 0
    for prompt in load.prompts:
        yield prompt - before
        before = prompt + load.answer_tokens


def _ids(tokens: list[int]) -> array[int]:
    return array("I", tokens)


def arguments(plan: Plan, arm: Arm, directory: Path) -> list[str]:
    """What stands after `vllm serve MODEL`, alike for all but the connector."""
    found = [
        "--served-model-name", "bench",
        "--max-model-len", str(min(plan.shape.max_position, plan.hbm_tokens)),
        "--block-size", str(plan.block_tokens),
        "--num-gpu-blocks-override", str(plan.hbm_tokens // plan.block_tokens + 1),
        "--max-num-seqs", str(plan.max_num_seqs),
        "--enable-prefix-caching", "--enable-prompt-tokens-details",
        *plan.serve,
    ]  # fmt: skip
    if arm.connector is None:
        return found
    dram = int(arm.dram * plan.hbm_bytes)
    transfer: dict[str, Any] = {"kv_connector": arm.connector, "kv_role": "kv_both"}
    if arm.is_ours:
        capacity = plan.nvme_bytes if arm.has_nvme else min(plan.nvme_bytes, LOST_BYTES)
        nvme = {"path": str(directory / "kv"), "capacity": capacity}
        transfer["kv_connector_extra_config"] = {"dram": dram, "nvme": nvme, "audit": "off"}
        if arm.holds:
            transfer["kv_connector_extra_config"]["holding"] = HOLDS
        if not arm.has_nvme:  # the settings want one; throttled.py takes it away
            transfer["kv_connector_module_path"] = "benchmarks.throttled"
    else:
        transfer["kv_connector_extra_config"] = {"cpu_bytes_to_use": dram}
    return [*found, "--kv-transfer-config", json.dumps(transfer)]


def environment(arm: Arm) -> dict[str, str]:
    lacks = arm.is_ours and not arm.has_nvme
    return {RATE: "0", "PYTHONPATH": str(ROOT)} if lacks else {}


def noise(runs: Sequence[dict[str, Any]]) -> float:
    """How far apart the two plain ones are, over their mean."""
    plains = _plains(runs)
    if len(plains) < 2:
        return LEAST_NOISE
    return max(LEAST_NOISE, (max(plains) - min(plains)) / (sum(plains) / len(plains)))


def _plains(runs: Sequence[dict[str, Any]]) -> list[float]:
    return [run["job_s"] for run in runs if run["name"] in (PLAIN, PLAIN_AGAIN)]


def compare(runs: list[dict[str, Any]]) -> None:
    """Add to each run its job time over the mean of the plain ones, and over OffloadingConnector's
    with the same DRAM; None where that did not run."""
    plains = _plains(runs)
    plain = sum(plains) / len(plains) if plains else None
    others = {r["dram"]: r["job_s"] for r in runs if r["name"].startswith(OFFLOADING)}
    for run in runs:
        run["over_plain"] = round(run["job_s"] / plain, 4) if plain else None
        other = others.get(run["dram"]) if run["is_ours"] else None
        run["over_offloading"] = round(run["job_s"] / other, 4) if other else None


def worse(runs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Ours in which jobs take longer than in plain vLLM, beyond the noise."""
    most = 1 + noise(runs)
    return [r for r in runs if r["is_ours"] and r["over_plain"] and r["over_plain"] > most]


def verdicts(runs: Sequence[dict[str, Any]], not_run: dict[str, str]) -> dict[str, str]:
    """By goal: met, missed, or not measured and why."""
    by_name = {run["name"]: run for run in runs}
    found = {}
    for key, arm, goal in (
        ("over_plain", GOAL_PLAIN, OVER_PLAIN),
        ("over_offloading", GOAL_OFFLOADING, OVER_OFFLOADING),
    ):
        value = by_name.get(arm, {}).get(key)
        if value is not None:
            said = f"{value:.2f}, goal below {goal}: {'met' if value < goal else 'missed'}"
        else:
            whys = [why for name, why in not_run.items() if name == arm]
            if key == "over_offloading":
                whys += [why for name, why in not_run.items() if name.startswith(OFFLOADING)]
            said = f"goal below {goal}: not measured" + (f" ({whys[0]})" if whys else "")
        found[f"{arm}, {key.replace('_', ' ')}"] = said
    return found


def table(runs: Sequence[dict[str, Any]]) -> str:
    lines = [
        f"{'':<26}{'job s':>8}{'/plain':>8}{'/offl.':>8}{'TTFT p50':>10}{'p99 s':>8}"
        f"{'CPU s':>8}{'HBM':>7}{'DRAM':>7}{'NVMe':>7}"
    ]
    for run in runs:
        shares = "".join(f"{run['found'].get(k, 0):>7.1%}" for k in ("HBM", "DRAM", "NVMe"))
        lines.append(
            f"{run['name']:<26}{run['job_s']:>8.2f}{_ratio(run['over_plain'])}"
            f"{_ratio(run['over_offloading'])}{run['ttft_p50_s']:>10.2f}{run['ttft_p99_s']:>8.2f}"
            f"{run['cpu_s']:>8.1f}{shares}"
        )
    return "\n".join(lines)


def _ratio(value: float | None) -> str:
    return f"{'-':>8}" if value is None else f"{value:>8.2f}"
