# SPDX-License-Identifier: Apache-2.0
"""SIGKILL a real `vllm serve` under load, again and again on one directory.

    python -m tests.vllm.kill_loop --kills 20

Each life of the server first answers what the one before left clean on NVMe: all of it has to
come from there. Then it stores a few prompts and waits until they are clean; then clients ask
without pause, until at a random moment the engine core, the API server or all processes are
killed. `attnstore verify` has to find every record good, and nothing may be left in /dev/shm.
At the end every answer of every life is compared with an engine that has no store.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random

from attnstore_lab.testing.tiny_model import TINY, make_model
from attnstore_vllm.cli.verify import verify
from attnstore_vllm.index.prefix import whole_blocks
from benchmarks.server import VllmServer
from tests.vllm import serve_helpers as serving
from tests.vllm import soak
from tests.vllm.engine import EngineSpec
from tests.vllm.host import EngineHost
from tests.vllm.load import Load, complete
from tests.vllm.prompts import random_tokens
from tests.vllm.serve_helpers import FLAG, count, loaded, nudge

VICTIMS = ("all", "engine core", "API server")
CLEAN_PROMPTS = 3
LOAD_S = (0.3, 6.0)
JUDGED_MAX = 100
ALONE_S = 0.5
"""How long the engine core outlives a killed API server before the rest is killed too."""


@dataclass(frozen=True, slots=True)
class Life:
    """One start of the server, and its end."""

    victim: str
    load_s: float
    answered: int
    clean_tokens: int
    """Of the prompts that the life before left clean: what had to come from NVMe, and came."""
    good_records: int
    """On the disk after the kill; none is bad."""


def live(directory: Path, models: Path, kills: int, seed: int) -> tuple[list[Life], list[soak.Job]]:
    """Returns all lives but the last, which is not killed, and all that was answered."""
    rng, author = Random(seed), soak.Author(seed)
    model, store = make_model(models / "serve", TINY), directory / "store"
    settings = serving.in_json(serving.settings(store, dram="8MiB", capacity="256MiB"))
    clean: list[soak.Job] = []
    jobs: list[soak.Job] = []
    lives: list[Life] = []
    for number in range(kills + 1):
        with serving.server(model, directory / f"log{number}", FLAG, settings) as server:
            found = answer_from_nvme(server, clean)
            jobs += found
            if number == kills:
                break
            clean = [ask_until_clean(server, (seed, number, i)) for i in range(CLEAN_PROMPTS)]
            jobs += clean
            load, seconds = Load(server, author), rng.uniform(*LOAD_S)
            time.sleep(seconds)
            load.stop_asking()
            victim = rng.choice(VICTIMS)
            kill(server, victim)
            load.end()
            assert not load.failures, load.failures
            jobs += load.jobs
        serving.assert_no_region()
        verdict = verify(store, quiet=True)
        assert not verdict.bad, (number, victim, verdict.bad, verdict.examples)
        lives.append(
            Life(
                victim, round(seconds, 2), len(load.jobs),
                sum(whole_blocks(len(job.tokens) - 1) for job in found), verdict.good,
            )
        )  # fmt: skip
        print(lives[-1], flush=True)
    return lives, jobs


def answer_from_nvme(server: VllmServer, clean: list[soak.Job]) -> list[soak.Job]:
    """Ask again what the last life left clean: all of it has to come from NVMe."""
    found = []
    for job in clean:
        before = loaded(server)
        found.append(complete(server, job))
        nudge(server)
        after = loaded(server)
        moved = {tier: after[tier] - before[tier] for tier in after}
        assert moved == {"dram": 0, "nvme": whole_blocks(len(job.tokens) - 1)}, moved
    return found


def ask_until_clean(server: VllmServer, seed: object) -> soak.Job:
    """Ask something new, and wait until its KV is on NVMe."""
    before = count_settled(server)
    tokens = random_tokens(seed, Random(repr(seed)).randint(560, 700))
    job = complete(server, soak.Job(tokens=tokens, salt=None, sampling={"max_tokens": 8}))

    def is_clean() -> bool:
        nudge(server)
        return count(server, "chunks", event="written") >= before + 3

    serving.wait_until(is_clean, "two chunks and a tail are on NVMe")
    return job


def count_settled(server: VllmServer) -> float:
    """Chunks written so far, once all that was saved is: counters come steps later."""
    seen: list[tuple[float, ...]] = []

    def is_settled() -> bool:
        nudge(server)
        saved, superseded, written = (
            count(server, "chunks", event=event) for event in ("saved", "superseded", "written")
        )
        seen.append((saved, superseded, written))
        return seen[-2:-1] == seen[-1:] and written >= saved - superseded

    serving.wait_until(is_settled, "all that was saved is on NVMe")
    return seen[-1][-1]


def kill(server: VllmServer, victim: str) -> None:
    if victim == "engine core":
        serving.engine_core(server).kill()
    else:
        if victim == "API server":
            os.kill(server.pid, signal.SIGKILL)
            time.sleep(ALONE_S)
        os.killpg(server.pid, signal.SIGKILL)
    session = server.pid
    serving.exit_code(server)
    serving.wait_until(lambda: not serving.members(session), "all processes have ended")


def judge(
    directory: Path, models: Path, jobs: list[soak.Job], at_most: int = JUDGED_MAX
) -> soak.Verdict:
    """Compare answers with an engine without the store; of many, evenly chosen ones."""
    jobs = jobs[:: -(-len(jobs) // at_most)]
    spec = EngineSpec(models=models, **soak.REFERENCE)
    deadline_s = 60.0 + 2.0 * len(jobs)
    with EngineHost(spec, directory / "reference", call_deadline_s=deadline_s) as host:
        return soak.judge(host, jobs)


def main() -> None:
    parser = argparse.ArgumentParser(description="Kill a server, again and again; see the module.")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("results/kill_loop.json"))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="attnstore-kill-", dir="/var/tmp") as name:
        directory = Path(name)
        lives, jobs = live(directory, directory, options.kills, options.seed)
        verdict = judge(directory, directory, jobs, at_most=len(jobs))
    print(verdict)
    report = {"lives": [asdict(life) for life in lives], "verdict": asdict(verdict)}
    options.out.write_text(json.dumps(report, indent=1) + "\n")
    if verdict.wrong:
        raise SystemExit(f"WRONG: answers {verdict.wrong}")


if __name__ == "__main__":
    main()
