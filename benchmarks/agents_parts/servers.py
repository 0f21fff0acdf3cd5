# SPDX-License-Identifier: Apache-2.0
"""The small matrix, played on real servers: one after the other, the same jobs to each."""

from __future__ import annotations

import asyncio
import os
import re
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Final

from attnstore_lab.bench.client import RequestSettings, open_http
from attnstore_lab.bench.conversations import Conversation
from attnstore_lab.bench.records import TurnRecord
from attnstore_lab.bench.summary import percentile
from attnstore_lab.bench.talk import Talk
from attnstore_lab.bench.traffic import traffic
from attnstore_lab.testing.tiny_model import make_model
from attnstore_vllm.prometheus import Metrics, total
from benchmarks.agents_parts.arms import Arm, Plan, arguments, begins, conversations, environment
from benchmarks.server import ServerError, VllmServer

WARM_UP_USE: Final = 1 << 20
"""A conversation that warms up begins as none of the load does."""


class LoadError(ServerError):
    """A request failed, or a server was not what its arm says."""


def processor_s(session: int) -> float:
    """Seconds of processor time of the processes of a session that live."""
    ticks = 0
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
        if int(fields[3]) == session:
            ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


async def play(
    url: str, jobs: Sequence[Conversation], at_s: Sequence[float], plan: Plan
) -> tuple[list[float], list[TurnRecord]]:
    """Returns each job's seconds from its arrival to its last answer, tools with them.

    Raises: LoadError if a request fails, or jobs are not done in time.
    """
    settings = RequestSettings(
        model="bench", api="completions", max_tokens=plan.load.answer_tokens,
        ignore_eos=True, timeout_s=plan.arm_deadline_s,
    )  # fmt: skip
    records: list[TurnRecord] = []
    async with open_http(settings) as http:
        await _turns(http, url, Talk(jobs[0], settings, WARM_UP_USE), 2, 0.0, [])
        began = time.monotonic()

        async def job(number: int) -> float:
            await asyncio.sleep(max(0.0, began + at_s[number] - time.monotonic()))
            talk, turns = Talk(jobs[number], settings), len(plan.load.prompts)
            await _turns(http, url, talk, turns, plan.load.tool_s, records)
            return time.monotonic() - began - at_s[number]

        tasks = [asyncio.ensure_future(job(number)) for number in range(len(jobs))]
        try:
            async with asyncio.timeout(plan.arm_deadline_s):
                return list(await asyncio.gather(*tasks)), records
        except TimeoutError:
            done = sum(task.done() and not task.cancelled() for task in tasks)
            raise LoadError(
                f"{done} of {len(jobs)} jobs done in {plan.arm_deadline_s:g} s"
            ) from None
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def _turns(
    http: Any, url: str, talk: Talk, turns: int, tool_s: float, records: list[TurnRecord]
) -> None:
    for turn in range(turns):
        if turn:
            await asyncio.sleep(tool_s)
        record = TurnRecord(conversation_id="", turn=turn + 1)
        await talk.ask(http, url, turn, record)
        if record.error is not None:
            raise LoadError(f"turn {turn + 1}: {record.error}")
        records.append(record)


def figures(
    arm: Arm, job_s: Sequence[float], records: Sequence[TurnRecord], before: Metrics, after: Metrics
) -> dict[str, Any]:
    """Raises: LoadError if an arm without NVMe used one."""
    moved = traffic(before, after)
    touched = sum(n for way, n in moved.moved_bytes.items() if "nvme" in way)
    if arm.is_ours and not arm.has_nvme and (touched or moved.prompt_tokens.get("NVMe")):
        raise LoadError(f"{arm.name} has no NVMe, and it moved {touched} bytes there")
    ttft = [record.ttft_ms / 1e3 for record in records if record.ttft_ms is not None]
    return {
        **asdict(arm),
        "is_ours": arm.is_ours,
        "job_s": round(sum(job_s) / len(job_s), 3),
        "jobs_s": [round(seconds, 3) for seconds in job_s],
        "ttft_p50_s": round(percentile(ttft, 50), 3),
        "ttft_p99_s": round(percentile(ttft, 99), 3),
        "found": {name: round(moved.share(name), 4) for name in moved.prompt_tokens},
        "preemptions": int(_grown(before, after, "vllm:num_preemptions_total")),
        "traffic": moved.to_json(),
    }


def _grown(before: Metrics, after: Metrics, name: str) -> float:
    return total(after, name) - total(before, name)


def log_of(logs: Path, arm: Arm) -> Path:
    return logs / f"{arm.name.replace(' ', '-')}.log"


def one(plan: Plan, arm: Arm, model: str, work: Path, logs: Path, seed: int) -> dict[str, Any]:
    """Start an arm's server, play the load, end it. Raises: ServerError."""
    directory = Path(tempfile.mkdtemp(dir=work))
    log = log_of(logs, arm)
    flags = arguments(plan, arm, directory)
    with VllmServer(model, flags, log, environment=environment(arm)) as server:
        return asked(server, plan, arm, seed)


def asked(server: VllmServer, plan: Plan, arm: Arm, seed: int) -> dict[str, Any]:
    """Play the load on a server that is up. Raises: ServerError."""
    at_s = begins(plan.load, plan.jobs_per_s, seed)
    before, cpu_s = server.metrics(), processor_s(server.pid)
    job_s, records = asyncio.run(play(server.base_url, conversations(plan.load, seed), at_s, plan))
    found = figures(arm, job_s, records, before, server.metrics())
    return found | {"cpu_s": round(processor_s(server.pid) - cpu_s, 2)}


def run(
    plan: Plan, seed: int, tell: Callable[[str], None], logs: Path | None = None
) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Returns a run for each arm that ran, and by name why others did not.

    Raises: ServerError if the first, plain one, does not run.
    """
    runs: list[dict[str, Any]] = []
    not_run: dict[str, str] = {}
    with tempfile.TemporaryDirectory(prefix="attnstore-agents-", dir="/var/tmp") as scratch:
        work = Path(scratch)
        model = str(make_model(work / "model", plan.shape))
        for number, arm in enumerate(plan.arms, 1):
            began = time.monotonic()
            try:
                runs.append(one(plan, arm, model, work, logs or work, seed))
            except ServerError as error:
                if not runs:
                    raise
                not_run[arm.name] = why(str(error), log_of(logs or work, arm))
            said = not_run.get(arm.name) or f"mean job {runs[-1]['job_s']:.2f} s"
            took = time.monotonic() - began
            tell(f"{number}/{len(plan.arms)}  {arm.name}: {said} (with its start {took:.0f} s)")
    return runs, not_run


def why(error: str, log: Path) -> str:
    """The first reason in a server's log, rather than that it ended."""
    text = log.read_text(errors="replace") if log.exists() else ""
    lines = [line for line in text.splitlines() if " WARNING " not in line]
    reasons = [line for line in lines if re.search(r"\b\w*(Error|Exception): ", line)]
    return reasons[0].rpartition("] ")[2].strip() if reasons else error.partition("\n")[0]


def cut(plan: Plan, num_jobs: int) -> Plan:
    """The same with fewer jobs."""
    return replace(plan, load=replace(plan.load, num_jobs=num_jobs))
