# SPDX-License-Identifier: Apache-2.0
"""A real server under load whose disk fails, hangs and is full: nobody but the metrics notices.

The faults come from tests/vllm/faulty_disk.py, one after the other; between them the disk is
well, and has to be used again.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from attnstore_lab.testing.tiny_model import TINY, make_model
from attnstore_vllm.prometheus import total
from benchmarks.server import VllmServer
from tests.vllm import kill_loop, soak
from tests.vllm import serve_helpers as serving
from tests.vllm.faulty_disk import FAULTS_FILE
from tests.vllm.load import Load
from tests.vllm.serve_helpers import FLAG, count, loaded, nudge

ROOT = Path(__file__).resolve().parents[2]
LOAD_DEADLINE_S = 0.5
IO_DEADLINE_S = 2.0
"""A healthy disk of a busy machine may take long too, and is out of use when it is late: reads
that fail then are looks whether it is well again, which no counter has."""
TRIES = 3
BUSY_S = 2.5
JOBS_MIN = 6
SLACK_S = 8.0
"""What a request may take longer than in a healthy server, beside the deadline: it computes what
it would have loaded, on two cores that others may use too. A request that waits for a hanging disk
takes nearly HANG_S."""
HANG_S = 25.0
HANG_BUSY_S = 8.0
"""Somebody has to want what hangs: with 2.5 s nobody did in one of two runs."""
LONG_HANG_S = 30.0


@dataclass
class Sick:
    """A server, and its disk's faults."""

    server: VllmServer
    file: Path
    author: soak.Author
    jobs: list[soak.Job] = field(default_factory=list)
    healthy_s: float = 0.0

    def under(self, until: Callable[[], bool], busy_s: float = BUSY_S, **fault: Any) -> Load:
        """Clients ask while the disk has this fault, for `busy_s` and until that has come."""
        self._write(fault)
        load = Load(self.server, self.author)
        try:
            time.sleep(busy_s)
            what = f"what {fault or 'a disk that is well'} leads to"
            serving.wait_until(
                lambda: load.failures or (len(load.jobs) >= JOBS_MIN and until()), what
            )
        finally:
            load.end()
            self._write({})
        self.jobs += load.jobs
        assert load.failures == []
        assert serving.is_healthy(self.server)
        return load

    def _write(self, fault: dict[str, Any]) -> None:
        """In one piece: the server may read at any moment."""
        new = self.file.with_suffix(".new")
        new.write_text(json.dumps(fault))
        new.replace(self.file)

    def in_use(self) -> bool:
        nudge(self.server)
        metrics = self.server.metrics()
        name = "vllm:attnstore_nvme_in_use"
        return all(total(metrics, name, direction=d) == 1 for d in ("reads", "writes"))


@pytest.fixture(scope="module")
def sick(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sick]:
    home = tmp_path_factory.mktemp("sick")
    file = home / "faults.json"
    file.write_text("{}")
    settings = serving.settings(home / "store", dram="4MiB", io_deadline=f"{IO_DEADLINE_S}s")
    settings["load_deadline"] = f"{LOAD_DEADLINE_S}s"
    transfer = json.loads(serving.in_json(settings)) | {
        "kv_connector": "OnFaultyDisk",
        "kv_connector_module_path": "tests.vllm.faulty_disk",
    }
    with serving.server(
        make_model(models / "serve", TINY),
        home / "log",
        FLAG,
        json.dumps(transfer),
        environment={FAULTS_FILE: str(file), "PYTHONPATH": str(ROOT)},
    ) as server:
        found = Sick(server, file, soak.Author(5))
        found.healthy_s = found.under(lambda: loaded(server)["nvme"] > 0).slowest_s
        yield found


@pytest.mark.parametrize(
    ("effect", "every", "hang_s"),
    [
        ("EIO", 1, 0.0), ("EIO", 3, 0.0), ("ENOSPC", 1, 0.0), ("ENOSPC", 3, 0.0),
        ("hang", 3, HANG_S), pytest.param("hang", 1, LONG_HANG_S, marks=pytest.mark.long),
    ],
)  # fmt: skip
def test_no_request_fails_or_waits(sick: Sick, effect: str, every: int, hang_s: float) -> None:
    ops = {"EIO": ["read"], "ENOSPC": ["write"], "hang": ["read", "write"]}[effect]
    event = {"EIO": "read_failed", "ENOSPC": "device_full", "hang": "device_late"}[effect]
    goes_out = every == 1 or effect == "hang"
    told = lates = 0.0
    before = count(sick.server, "errors", kind=event)

    def is_well() -> bool:
        nonlocal lates
        lates = count(sick.server, "errors", kind="device_late")
        return sick.in_use()

    def has_come() -> bool:
        nonlocal told
        if goes_out and sick.in_use():
            return False
        told = count(sick.server, "errors", kind=event) - before
        return told > 0 or count(sick.server, "errors", kind="device_late") > lates

    for _ in range(TRIES):
        serving.wait_until(is_well, "the disk is used again")
        load = sick.under(
            has_come, HANG_BUSY_S if hang_s else BUSY_S,
            effect=effect, every=every, hang_s=hang_s, ops=ops,
        )  # fmt: skip
        assert load.slowest_s < sick.healthy_s + LOAD_DEADLINE_S + SLACK_S
        if told:
            break
    assert told, f"no fault of the disk's was told in {TRIES} tries"

    serving.wait_until(sick.in_use, "the disk is used again")
    read = loaded(sick.server)["nvme"]
    again = sick.under(lambda: loaded(sick.server)["nvme"] > read)
    assert again.slowest_s < sick.healthy_s + LOAD_DEADLINE_S + SLACK_S


def test_every_answer_was_right(sick: Sick, models: Path, tmp_path: Path) -> None:
    verdict = kill_loop.judge(tmp_path, models, sick.jobs)
    assert verdict.wrong == [], verdict
