# SPDX-License-Identifier: Apache-2.0
"""benchmarks.gpu_e2e without servers: what it says is wrong, what it leaves out, what it ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from benchmarks import gpu_e2e
from benchmarks.e2e import answers, speeds
from benchmarks.e2e.answers import (
    FARTHEST,
    Answers,
    NotHere,
    Prompted,
    Reference,
    Tried,
    Wrong,
    first_differences,
)
from benchmarks.e2e.cases import CASES, ON_CPU
from benchmarks.e2e.figures import show
from benchmarks.e2e.serving import NO_NUMBERS, Answer, Deadline, Late, why_it_ended
from benchmarks.server import Process, unbroken
from tests.scripted_servers import FAR, FakeSetup, Hurried, answer_to

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def setup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSetup:
    monkeypatch.setattr(answers, "time", Hurried())
    return FakeSetup(tmp_path)


def tried_by(setup: FakeSetup, name: str = "default") -> Tried:
    tried = Tried()
    with Deadline(60) as deadline:
        Answers(setup, Prompted.of(ON_CPU)).try_case(name, deadline, tried)
    return tried


def test_a_case_that_is_right_starts_three_servers(setup: FakeSetup) -> None:
    tried = tried_by(setup)
    assert setup.state.started == ["eager-reference", "default", "default-again"]
    assert tried.phases.keys() == {"computed", "dram", "crowd", "crowd again", "nvme"}
    assert sum(phase["wrong"] for phase in tried.phases.values()) == 0
    assert tried.phases["crowd"]["left"] > 0
    assert tried.facts == ["Using X attention backend"]


@pytest.mark.parametrize(("name", "said"), [("eager", "dram: 6 of 6"), ("eager-again", "nvme: 6")])
def test_wrong_answers_fail_it(setup: FakeSetup, name: str, said: str) -> None:
    setup.state.off[name] = FAR
    with pytest.raises(Wrong, match=said):
        tried_by(setup, "eager")


def test_where_answers_part_is_told_with_what_the_reference_made_of_it() -> None:
    left = ((7, -0.5), (8, -0.75))
    want = Answer((7, 7, 7), (left, left, left))
    assert first_differences([(want, want)]) == []
    got = [Answer((7, 8, 9), (left,) * 3), Answer((7, 7, 9), (left,) * 3)]
    assert first_differences([(want, one) for one in got]) == [[1, 0.25], [2, 0.25]]
    assert first_differences([(NO_NUMBERS, want)]) == [[0, FARTHEST]]
    tried = Tried(got=[("crowd", "crowd", got)])
    tried.judge(Reference([], [want, want], [0.0]))
    assert tried.phases["crowd"]["parted"] == [[1, 0.25], [2, 0.25]]


def test_the_crowd_of_a_reference_is_computed_twice(setup: FakeSetup) -> None:
    tried_by(setup)
    salts = [salt for name, _, salt in setup.state.asked if name == "eager-reference"]
    assert salts.count("noise") == ON_CPU.crowd[0]
    assert salts.count(None) == 2 * ON_CPU.asked[0] + 2 * ON_CPU.crowd[0]


def test_an_answer_without_numbers_is_wrong() -> None:
    right = answer_to([1, 2], 3)
    tried = Tried(got=[("dram", "asked", [NO_NUMBERS])])
    (wrong,) = tried.judge(Reference([right], [], [0.0]))
    assert wrong.startswith("dram: 1 of 1 answers are off by up to inf nats")
    json.dumps(tried.phases, allow_nan=False)


def test_a_backend_that_rounds_in_another_way_is_judged_by_its_own_answers(
    setup: FakeSetup,
) -> None:
    setup.state.off |= dict.fromkeys(("default", "default-again", "default-reference"), FAR)
    assert sum(phase["wrong"] for phase in tried_by(setup).phases.values()) == 0
    assert setup.state.started.count("default") == 1
    del setup.state.off["default-reference"]
    with pytest.raises(Wrong, match=r"computed: 6 of 6 answers are off by up to 3 nats"):
        tried_by(setup)


def test_no_hits_and_no_preemptions_fail_it(setup: FakeSetup) -> None:
    setup.state.tiers.discard("nvme")
    with pytest.raises(Wrong, match="nvme: loaded_tokens is 0; at least"):
        tried_by(setup)
    setup.state.tiers.add("nvme")
    setup.state.preempted = 0
    with pytest.raises(Wrong, match="crowd, number 4: preempted is 0; at least 1 was expected"):
        tried_by(setup)


def test_another_crowd_comes_until_one_is_preempted_and_all_answers_count(setup: FakeSetup) -> None:
    setup.state.calm = 2  # before "dram", and the first crowd
    phases = tried_by(setup).phases
    assert [name for name in phases if name.startswith("crowd")] == [
        "crowd", "crowd, number 2", "crowd again",
    ]  # fmt: skip
    assert "preempted" not in phases["crowd"]
    assert phases["crowd, number 2"]["preempted"] == phases["crowd again"]["preempted"] == 1
    assert phases["crowd"]["answers"] == phases["crowd, number 2"]["answers"] > 0


def test_what_vllm_does_not_run_is_skipped_and_what_only_the_store_ends_fails(
    setup: FakeSetup,
) -> None:
    setup.state.dead["default"] = "x\nValueError: with the store\n--- the end ---"
    with pytest.raises(Wrong, match="the server with the store ended: ValueError: with the store"):
        tried_by(setup)
    setup.state.dead["default-reference"] = "RuntimeError: no such backend"
    with pytest.raises(NotHere, match="does not run so either: RuntimeError: no such backend"):
        tried_by(setup)


def test_hits_over_another_layout_fail_the_switch(setup: FakeSetup) -> None:
    with Deadline(60) as deadline, pytest.raises(Wrong, match=r"HND: \d+ tokens of the other were"):
        Answers(setup, Prompted.of(ON_CPU)).try_switch("nhd-then-hnd", deadline, Tried())


def test_a_program_that_hangs_is_ended_with_what_it_started(tmp_path: Path) -> None:
    """It ignores SIGTERM, and so does its child."""
    script = (
        "import os, signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); os.fork(); "
        "print('here', flush=True); time.sleep(60)"
    )
    with unbroken():
        process = Process([sys.executable, "-c", script], tmp_path / "log")
    began = time.monotonic()
    while (tmp_path / "log").read_text().count("here\n") < 2 and time.monotonic() < began + 20:
        time.sleep(0.02)
    deadline = Deadline(0.2)

    def hang() -> None:
        with deadline, deadline.watches(process):
            while process.exit_code is None:
                time.sleep(0.01)
            raise ConnectionError("as of a server that is gone")

    try:
        with pytest.raises(Late, match="not over within 0 s"):
            hang()
    finally:
        process.stop()
    assert process.exit_code == -signal.SIGKILL
    assert time.monotonic() < began + 20
    with pytest.raises(ProcessLookupError):  # nobody of its group is left
        os.killpg(process.pid, 0)
    with pytest.raises(Late), deadline.watches(process):
        pytest.fail("nothing starts after the deadline")


def test_a_case_never_ends_the_run(setup: FakeSetup, monkeypatch: pytest.MonkeyPatch) -> None:
    run = gpu_e2e.Run(setup, small=False, deadline_s=60)
    monkeypatch.setattr(Answers, "try_case", lambda *_: 1 // 0)
    row = run.try_one("eager")
    assert (row.outcome, row.why) == (
        "failed",
        "ZeroDivisionError: integer division or modulo by zero",
    )
    assert run.try_one("full").to_json()["why"] == "the CPU build has no CUDA graphs"
    assert run.try_one("copies").outcome == "skipped"
    rows = [run.try_one(name).to_json() for name in ("eager", "full")]
    assert "eager: ZeroDivisionError" in show(rows)
    json.dumps(rows, allow_nan=False)


def test_rows_of_another_machine_or_version_are_not_kept(tmp_path: Path) -> None:
    path = tmp_path / "gpu.json"
    path.write_text(json.dumps({"machine": {"gpu": "A"}, "cases": [{"name": "eager"}]}))
    assert gpu_e2e.kept(path, {"gpu": "A"}) == {"eager": {"name": "eager"}}
    assert gpu_e2e.kept(path, {"gpu": "B"}) == {}
    path.write_text("{")
    assert gpu_e2e.kept(path, {"gpu": "A"}) == {}


def test_of_gpu_check_the_rows_with_a_goal_are_taken() -> None:
    row = {"how": "rules", "detail": "", "goal": 0.95, "goal_is": "at least", "value": 0.91}
    found = speeds.of_copies(
        [
            {**row, "what": "H2D Llama-8B, 64 KiB pages"},
            {**row, "what": "H2D Llama-8B, 64 KiB pages", "goal": None},
            {**row, "what": "slowdown of matrix products, % (Llama-8B)", "value": 3.5},
            {**row, "what": "something else"},
        ]
    )
    kinds = [(figure.kind, figure.to_json()["is_met"]) for figure in found]
    assert kinds == [("bandwidth", True), ("slowdown_percent", False)]


def test_every_case_names_a_reference_that_the_cpu_build_has_too() -> None:
    assert not any(CASES[case.reference].why_not_cpu for case in CASES.values())


@pytest.mark.parametrize(
    ("log", "said"),
    [
        (
            "a\nValueError: no backend\nRuntimeError: Engine core initialization failed",
            "no backend",
        ),
        ("(EngineCore pid=1) ERROR 11-25 [core.py] vllm.x.OddError: bad\n", "vllm.x.OddError: bad"),
        ("only a line\n", "only a line"),
        ("", "without a word"),
    ],
)
def test_the_reason_of_an_end_is_found_in_the_log(log: str, said: str) -> None:
    assert said in why_it_ended(log)


def test_without_a_gpu_it_refuses_in_one_line(tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    out = tmp_path / "found.json"
    told = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu_e2e", "--out", str(out)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (told.returncode, told.stdout) == (gpu_e2e.MISSING, "")
    assert told.stderr.startswith("gpu-e2e: PyTorch ") and told.stderr.count("\n") == 1
    assert not out.exists()
