# SPDX-License-Identifier: Apache-2.0
"""The quick form of benchmarks.gpu_e2e without servers: its steps, and what an end leaves."""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from attnstore_vllm.config.values import parse_size
from benchmarks import gpu_e2e
from benchmarks.e2e import answers, hits
from benchmarks.e2e.answers import NotHere, Tried, Wrong
from benchmarks.e2e.cases import ON_CPU, ON_GPU, Case
from benchmarks.e2e.figures import Figure, Row
from benchmarks.e2e.hits import Room, tiers
from benchmarks.e2e.quick import OF_A_PROCESS, OVER, Quick
from benchmarks.e2e.serving import Deadline
from benchmarks.e2e.sides import Need, Planned, waves
from benchmarks.e2e.speeds import Speeds
from tests.scripted_servers import FAR, FakeSetup, Hurried

PLENTY = Need(1 << 50, 1 << 50)
NEW = [1, 2, 16, 128, 1_024]


@pytest.fixture
def setup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSetup:
    for module in (answers, hits):
        monkeypatch.setattr(module, "time", Hurried())
    return FakeSetup(tmp_path)


class Written:
    """What was handed over, step by step, as a file would have it."""

    def __init__(self) -> None:
        self.seen: list[dict[str, dict[str, Any]]] = []

    def __call__(self, rows: list[Row]) -> None:
        text = json.dumps([row.to_json() for row in rows], allow_nan=False)
        self.seen.append({row["name"]: row for row in json.loads(text)})


def run(
    setup: FakeSetup, budget_s: float = 480.0, room: Need = PLENTY
) -> tuple[dict[str, Row], Written]:
    written = Written()
    rows = Quick(setup, budget_s, room, 0, written).run()
    return {row.name: row for row in rows}, written


def test_all_steps_run_and_what_is_not_tried_says_why(setup: FakeSetup) -> None:
    rows, written = run(setup)
    outcomes = {name: row.outcome for name, row in rows.items()}
    assert {name for name, outcome in outcomes.items() if outcome == "ok"} == {
        "starts", "answers eager", "hits attnstore", "hits offloading", OVER, "throughput",
        "nvme eager",
    }, {name: row.why for name, row in rows.items()}  # fmt: skip
    assert set(outcomes.values()) == {"ok", "skipped"}
    assert all(row.why for row in rows.values() if row.outcome != "ok")
    assert written.seen[-1].keys() == written.seen[0].keys() == rows.keys()
    assert {row["outcome"] for row in written.seen[0].values()} <= {"not run", "skipped"}
    assert setup.state.started[:4] == ["eager", "attnstore", "offloading", "none"]
    assert sorted(setup.state.ended) == sorted(setup.state.started)


def test_hits_have_one_to_1024_new_tokens_and_come_from_dram(setup: FakeSetup) -> None:
    rows, _ = run(setup)
    alone = [f.detail for f in rows["hits attnstore"].figures if not f.detail["decoders"]]
    beside = [f.detail for f in rows["hits attnstore"].figures if f.detail["decoders"]]
    for tokens in ON_CPU.hits:
        assert [of["new"] for of in alone if of["tokens"] == tokens] == NEW
        assert [of["new"] for of in beside if of["tokens"] == tokens] == [1, 1_024]
    for of in alone:
        assert of["found"] == 1.0, "the history alone is found, and all of it"
        assert of["ttft_ms"]["DRAM"] == 1.0 + of["tokens"]
        assert of["ttft_ms"]["HBM"] == of["ttft_ms"]["computed"] == 1.0
    over = rows[OVER].figures
    assert len(over) == len(ON_CPU.hits) * len(NEW)
    assert {figure.value for figure in over} == {0.5}


def test_the_store_that_is_timed_has_an_nvme_of_two_and_a_half_times_its_dram(
    setup: FakeSetup,
) -> None:
    run(setup)
    settings = setup.state.arguments["attnstore"]["settings"]
    assert int(settings["nvme"]["capacity"]) == 2.5 * int(settings["dram"])
    for size in (ON_CPU, ON_GPU):
        assert parse_size("nvme", size.nvme) >= 2.5 * parse_size("dram", size.dram)
    Speeds(setup, small=False).hits(Deadline(60), Tried(), lambda figure: None)
    settings = setup.state.arguments["hits"]["settings"]
    assert int(settings["nvme"]["capacity"]) == 2.5 * int(settings["dram"])


def test_a_disk_that_has_no_room_for_that_skips_what_is_timed(
    setup: FakeSetup, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = type("Usage", (), {"free": 3 << 30})
    monkeypatch.setattr(shutil, "disk_usage", lambda path: full)
    with pytest.raises(NotHere, match=r"2\.5GiB of NVMe, 2.5 times DRAM, are needed"):
        tiers(1 << 30, setup.work)
    assert tiers(1 << 20, setup.work)[0]["nvme"] == {"capacity": str(5 << 19)}


def test_an_interrupted_run_leaves_what_it_has_measured(setup: FakeSetup) -> None:
    first = setup.state
    first.interrupted_at = hits.count(512, Room.of(ON_CPU).hbm) + 2 * 2 * ON_CPU.pairs + 1
    written = Written()
    with pytest.raises(KeyboardInterrupt):
        Quick(setup, 480.0, PLENTY, 0, written).run()
    left = written.seen[-1]
    assert left["answers eager"]["outcome"] == "ok"
    assert left["hits attnstore"]["outcome"] == "not run"
    assert left["hits attnstore"]["why"] == "the run ended in it, after 2 figures"
    assert [figure["detail"]["new"] for figure in left["hits attnstore"]["figures"]] == [1, 2]
    assert left["throughput"]["why"] == "the run ended before it"
    assert sorted(first.ended) == sorted(first.started), "its servers are ended"


def test_what_the_budget_has_no_time_for_is_not_run_and_says_so(setup: FakeSetup) -> None:
    rows, _ = run(setup, budget_s=15.0)
    for name in ("answers eager", "hits attnstore", "throughput"):
        assert rows[name].outcome == "not run"
        assert rows[name].why.endswith("of 15 s were left")
    assert rows["nvme eager"].outcome == "not run"
    found = [row.to_json() for row in rows.values()]
    args = argparse.Namespace(json=True)
    assert gpu_e2e.tell(args, {"machine": {}, "cases": found}, found) == 1


def test_a_run_that_ends_within_its_hits_says_which_it_had_no_time_for(setup: FakeSetup) -> None:
    got: list[Figure] = []
    room, answered = Room.of(ON_CPU), iter([True, True, *[False] * 20])
    with (
        Deadline(60) as deadline,
        setup.serve("hits", Case(), deadline, store=setup.work, hbm=room.hbm) as served,
    ):
        missing = hits.time_hits(served, ON_CPU, room, 0, got.append, lambda: next(answered))
    assert [figure.detail["new"] for figure in got] == [1, 2]
    assert len(missing) == 8
    assert missing[0] == "no time for 512 tokens and 16 new, 0 beside"


def test_vllms_own_offloading_may_not_start_and_the_rest_is_timed(setup: FakeSetup) -> None:
    setup.state.dead["offloading"] = "Exception: CPU Offloading is supported on GPUs alone"
    rows, _ = run(setup)
    assert rows["hits offloading"].outcome == rows[OVER].outcome == "skipped"
    assert "does not start here: Exception: CPU Offloading is" in rows["hits offloading"].why
    assert rows["starts"].outcome == "ok"
    assert "error" in rows["starts"].tried.phases["offloading"]
    assert rows["throughput"].outcome == "ok"
    assert "does not start here" in rows["throughput"].why
    assert [figure.value for figure in rows["throughput"].figures] == [0.98]


def test_a_server_of_ours_that_does_not_start_fails_its_steps(setup: FakeSetup) -> None:
    setup.state.dead |= {"eager": "ValueError: x", "attnstore": "ValueError: y"}
    rows, _ = run(setup)
    failed = {name for name, row in rows.items() if row.outcome == "failed"}
    assert failed == {"starts", "answers eager", "hits attnstore", "throughput"}
    assert rows["starts"].why == "eager did not start; attnstore did not start"
    assert rows["nvme eager"].outcome == "not run"


def test_answers_that_loads_made_wrong_fail_it_and_noise_does_not(setup: FakeSetup) -> None:
    setup.state.loads_off = FAR
    rows, _ = run(setup)
    assert rows["answers eager"].outcome == rows["nvme eager"].outcome == "failed"
    assert rows["answers eager"].why.startswith("dram: 6 of 6 answers are off by up to 3 nats")
    phases = rows["answers eager"].tried.phases
    assert phases["crowd computed again"]["wrong"] == phases["computed again"]["wrong"] == 0
    assert phases["crowd"]["wrong"] == 12
    setup.state.loads_off, setup.state.off = 0.0, {"eager": FAR}
    assert run(setup)[0]["answers eager"].outcome == "ok", "all of them are off alike"


def test_each_crowd_is_computed_again_under_a_salt_of_its_own(setup: FakeSetup) -> None:
    run(setup)
    salts = [salt for name, _, salt in setup.state.asked if name == "eager"]
    asked, crowd = ON_CPU.asked[0], ON_CPU.crowd[0]
    assert salts.count("noise") == asked + crowd
    assert [s for s in salts if s is None][-crowd:] == [None] * crowd


def test_hits_that_are_none_fail_and_the_next_lengths_are_timed(setup: FakeSetup) -> None:
    setup.state.finds = 0
    rows, _ = run(setup)
    assert rows["hits attnstore"].outcome == "failed"
    assert rows["hits attnstore"].why.count("0% of the history was found") == 14
    with pytest.raises(Wrong, match="0% of the history was found"):
        Speeds(setup, small=False).hits(Deadline(60), Tried(), lambda figure: None)


def server(name: str, hbm: int, shm: int = 0) -> Planned:
    return Planned(name, Case(), Need(hbm, shm), {})


@pytest.mark.parametrize(
    ("room", "found", "large"),
    [
        (Need(9, 9), ["abXYZ"], ""),
        (Need(7, 9), ["ab", "XYZ"], ""),
        (Need(9, 3), ["ab", "XY", "Z"], ""),
        (Need(2, 9), ["ab", "X", "Y", "Z"], ""),
        (Need(1, 9), ["a", "b"], "XYZ"),
        (Need(0, 0), [], "abXYZ"),
    ],
)
def test_servers_run_side_by_side_where_memory_allows(
    room: Need, found: list[str], large: str
) -> None:
    groups = [[server("a", 1), server("b", 1)], [server(name, 2, 1) for name in "XYZ"]]
    if room == Need(9, 3):
        groups[1][2] = server("Z", 2, 2)
    got, too_large = waves(groups, room)
    assert ["".join(one.name for one in wave) for wave in got] == found
    assert "".join(one.name for one in too_large) == large


def test_servers_that_never_fit_are_skipped_with_their_sizes(setup: FakeSetup) -> None:
    rows, _ = run(setup, room=Need(1 << 50, 1 << 20))
    assert rows["answers eager"].outcome == rows["hits attnstore"].outcome == "skipped"
    assert "of shared memory, and" in rows["hits attnstore"].why
    assert rows["throughput"].outcome == "skipped"


def test_timed_servers_that_fit_one_by_one_have_hits_and_no_throughput(setup: FakeSetup) -> None:
    one = OF_A_PROCESS + (1 << 30)  # and less than a GiB for its model
    rows, _ = run(setup, room=Need(one, 1 << 50))
    assert rows["hits attnstore"].outcome == rows[OVER].outcome == "ok"
    assert rows["throughput"].outcome == "not run"
    assert rows["throughput"].why == "its servers do not fit beside each other"
    assert "none" not in setup.state.started
