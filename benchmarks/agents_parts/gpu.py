# SPDX-License-Identifier: Apache-2.0
"""The public matrix, cut for one lent GPU: four servers start side by side, then take turns.

Not run on a GPU so far. The published load of 8 turns, three jobs a second; HBM has room for 96,000
tokens, 0.21 of the H100's there, and 30 jobs come in place of 127. Weights are dummies: shapes
suffice.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from attnstore_lab.sim.agents import EIGHT
from attnstore_lab.testing.tiny_model import make_model
from benchmarks.agents_parts.arms import PLAIN, Arm, Plan, arguments, environment
from benchmarks.agents_parts.servers import asked, log_of, why
from benchmarks.e2e.cases import LLAMA_8B
from benchmarks.server import ServerError, VllmServer

BUDGET_S: Final = 380.0
START_S: Final = 110.0
"""Of all servers, side by side; an H200 took 80 to 150 s for seven."""
HBM_TOKENS, BLOCK_TOKENS, NUM_JOBS = 96_000, 16, 30
HBM_BYTES: Final = HBM_TOKENS * LLAMA_8B.kv_bytes_per_token
GB: Final = 1_000_000_000


@dataclass(frozen=True, slots=True)
class Turn:
    """An arm, and the seconds that it may take: 1.5 times what the simulator says."""

    arm: Arm
    limit_s: float


def _dram(size: int) -> float:
    return size * GB / HBM_BYTES


TURNS: Final = (
    Turn(Arm(PLAIN), 92.0),
    Turn(Arm("SimpleCPUOffload 28 GB", "SimpleCPUOffloadConnector", _dram(28)), 62.0),
    Turn(Arm("attnstore 28 GB", "AttnStoreConnector", _dram(28)), 41.0),
    Turn(Arm("attnstore 4 GB + NVMe", "AttnStoreConnector", _dram(4), has_nvme=True), 51.0),
)
PLAN: Final = Plan(
    replace(EIGHT, num_jobs=NUM_JOBS),
    3.0,
    tuple(turn.arm for turn in TURNS),
    shape=replace(LLAMA_8B, max_position=16_384),
    hbm_tokens=HBM_TOKENS,
    block_tokens=BLOCK_TOKENS,
    max_num_seqs=256,
    nvme_bytes=40 * GB,
    serve=(
        "--load-format", "dummy", "--max-num-batched-tokens", "2048",
        "--kv-cache-memory-bytes", str(HBM_BYTES + HBM_BYTES // 50),
    ),
)  # fmt: skip


def planned_s() -> float:
    return START_S + sum(turn.limit_s for turn in TURNS)


def commands(work: Path) -> list[list[str]]:
    """What a dry run shows."""
    return [arguments(PLAN, turn.arm, work / str(n)) for n, turn in enumerate(TURNS)]


def run(
    seed: int, tell: Callable[[str], None], logs: Path
) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """As servers.run(). An arm has the time that is left of BUDGET_S, at most its own limit."""
    ends = time.monotonic() + BUDGET_S
    runs: list[dict[str, Any]] = []
    not_run: dict[str, str] = {}
    with ExitStack() as undo:
        scratch = tempfile.TemporaryDirectory(prefix="attnstore-agents-", dir="/var/tmp")
        work = Path(undo.enter_context(scratch))
        model = str(make_model(work / "model", PLAN.shape, weights=False))
        # A server ends with the thread that started it, so the pool stays until all have stopped.
        pool = undo.enter_context(ThreadPoolExecutor(len(TURNS)))

        def start(turn: Turn, flags: list[str]) -> VllmServer:
            server = VllmServer(
                model, flags, log_of(logs, turn.arm),
                environment={"VLLM_USE_FLASHINFER_SAMPLER": "0", **environment(turn.arm)},
                start_deadline_s=1.5 * START_S,
            )  # fmt: skip
            undo.callback(server.stop)
            return server.__enter__()

        starts = [
            pool.submit(start, turn, flags)
            for turn, flags in zip(TURNS, commands(work), strict=True)
        ]
        for turn, started in zip(TURNS, starts, strict=True):
            name = turn.arm.name
            try:
                server = started.result()
                left = min(turn.limit_s, ends - time.monotonic())
                if left <= 0:
                    raise ServerError(f"the {BUDGET_S:.0f} s were over")
                runs.append(asked(server, replace(PLAN, arm_deadline_s=left), turn.arm, seed))
                server.stop()
            except ServerError as error:
                not_run[name] = why(str(error), log_of(logs, turn.arm))
            tell(f"{name}: {not_run.get(name) or runs[-1]['job_s']}")
    return runs, not_run
