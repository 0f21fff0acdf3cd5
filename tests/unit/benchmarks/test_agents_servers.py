# SPDX-License-Identifier: Apache-2.0
"""benchmarks.agents --servers and --gpu: the load, the arms, the verdicts and the table."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.agents_parts import arms, gpu, servers
from benchmarks.agents_parts.arms import FULL, PLAIN, PLAIN_AGAIN, QUICK, Arm
from benchmarks.slow_disk import RATE


def run(name: str, job_s: float, *, dram: float = 0, is_ours: bool = False) -> dict[str, Any]:
    return {
        "name": name, "job_s": job_s, "dram": dram, "is_ours": is_ours, "ttft_p50_s": 1.0,
        "ttft_p99_s": 2.0, "cpu_s": 3.0, "found": {"HBM": 0.25, "DRAM": 0.5},
    }  # fmt: skip


def measured(small_s: float, again_s: float = 11.0) -> list[dict[str, Any]]:
    runs = [
        run(PLAIN, 9.0),
        run("OffloadingConnector 1x", 8.0, dram=1),
        run("attnstore 0.25x", small_s, dram=0.25, is_ours=True),
        run("attnstore 1x", 6.0, dram=1, is_ours=True),
        run("attnstore 1x + NVMe", 5.0, dram=1, is_ours=True),
        run(PLAIN_AGAIN, again_s),
    ]
    arms.compare(runs)
    return runs


@pytest.mark.parametrize("plan", [FULL, QUICK, gpu.PLAN])
def test_prompts_have_the_tokens_of_the_load(plan: arms.Plan) -> None:
    load = plan.load
    jobs = arms.conversations(load, 1)
    assert len(jobs) == load.num_jobs
    for job in jobs:
        length = 0
        for turn, question in enumerate(job.questions):
            length += len(question) + (load.answer_tokens if turn else 0)
            assert length == load.prompts[turn]
    assert jobs == arms.conversations(load, 1)
    assert jobs != arms.conversations(load, 2)


def test_jobs_share_what_the_load_says_and_no_more() -> None:
    first, second = (job.questions[0] for job in arms.conversations(FULL.load, 1)[:2])
    shared = FULL.load.shared_tokens
    assert first[:shared] == second[:shared]
    assert first[shared : shared + 16] != second[shared : shared + 16]


@pytest.mark.parametrize("plan", [arms.FULL, arms.QUICK], ids=["full", "quick"])
def test_the_longest_request_that_vllm_takes_fits_in_hbm(plan: arms.Plan) -> None:
    """vLLM does not start else."""
    flags = arms.arguments(plan, plan.arms[0], Path("/nowhere"))
    longest = int(flags[flags.index("--max-model-len") + 1])
    assert plan.load.prompts[-1] + plan.load.answer_tokens <= longest <= plan.hbm_tokens


def test_jobs_come_in_order_and_at_the_rate() -> None:
    at_s = arms.begins(FULL.load, 2.0, 1)
    assert at_s == sorted(at_s)
    assert at_s[-1] == pytest.approx(FULL.load.num_jobs / 2.0)


@pytest.mark.parametrize("plan", [FULL, QUICK])
def test_sessions_do_not_fit_in_hbm(plan: arms.Plan) -> None:
    assert plan.session_tokens > 2 * plan.hbm_tokens
    longest = plan.load.prompts[-1] + plan.load.answer_tokens
    assert longest < min(plan.hbm_tokens, plan.shape.max_position)


def test_plain_is_asked_first_and_last() -> None:
    for plan in (FULL, QUICK):
        assert (plan.arms[0].name, plan.arms[-1].name) == (PLAIN, PLAIN_AGAIN)
    assert {arm.dram for arm in FULL.arms if arm.is_ours} == {0.25, 1, 4}


def test_arms_differ_in_the_connector_alone() -> None:
    plain, *others = (arms.arguments(FULL, arm, Path("/d")) for arm in FULL.arms)
    for flags in others[:-1]:
        assert flags[: len(plain)] == plain
        assert flags[len(plain)] == "--kv-transfer-config"
    assert others[-1] == plain


def test_dram_is_a_share_of_hbm_and_nvme_is_taken_away() -> None:
    for has_nvme in (False, True):
        arm = arms.ours(0.25, has_nvme=has_nvme)
        transfer = json.loads(arms.arguments(FULL, arm, Path("/d"))[-1])
        assert transfer["kv_connector_extra_config"]["dram"] == FULL.hbm_bytes // 4
        assert ("kv_connector_module_path" in transfer) is not has_nvme
        assert (arms.environment(arm).get(RATE) == "0") is not has_nvme


def test_an_arm_without_nvme_that_used_one_is_refused() -> None:
    name = ("vllm:attnstore_bytes_total", frozenset({("direction", "dram_to_nvme")}))
    before, after = {name: 0.0}, {name: 4096.0}
    with pytest.raises(servers.LoadError, match="has no NVMe"):
        servers.figures(arms.ours(1, has_nvme=False), [1.0], [], before, after)


def test_noise_is_the_distance_of_the_two_plain_ones() -> None:
    assert arms.noise(measured(9.0)) == pytest.approx(0.2)
    assert arms.noise(measured(9.0, again_s=9.0)) == arms.LEAST_NOISE


@pytest.mark.parametrize(("small_s", "names"), [(11.9, []), (12.1, ["attnstore 0.25x"])])
def test_worse_than_none_is_beyond_the_noise(small_s: float, names: list[str]) -> None:
    assert [found["name"] for found in arms.worse(measured(small_s))] == names


def test_others_may_be_worse() -> None:
    runs = measured(9.0)
    runs[1]["job_s"] = 99.0
    arms.compare(runs)
    assert not arms.worse(runs)


def test_verdicts_are_of_the_same_dram() -> None:
    said = arms.verdicts(measured(9.0), {})
    assert said["attnstore 1x + NVMe, over plain"] == "0.50, goal below 0.6: met"
    assert said["attnstore 1x, over offloading"] == "0.75, goal below 0.85: met"
    runs = [found for found in measured(9.0) if not found["name"].startswith("Offl")]
    arms.compare(runs)
    said = arms.verdicts(runs, {"OffloadingConnector 1x": "needs a GPU"})
    assert said["attnstore 1x, over offloading"] == "goal below 0.85: not measured (needs a GPU)"


def test_the_table_has_a_line_for_each() -> None:
    lines = arms.table(measured(9.0)).splitlines()
    assert len(lines) == 7
    cells = "attnstore 1x 6.00 0.60 0.75 1.00 2.00 3.0 25.0% 50.0% 0.0%"
    assert lines[4].split() == cells.split()


def test_a_reason_is_the_first_error_of_the_log(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("(EngineCore) ERROR [core.py:1] Exception: only on GPUs\nRuntimeError: later\n")
    assert servers.why("it ended\nmore", log) == "Exception: only on GPUs"
    assert servers.why("it ended\nmore", tmp_path / "none") == "it ended"


def test_the_gpu_s_turns_fit_in_its_time() -> None:
    assert gpu.planned_s() <= gpu.BUDGET_S == 380
    assert gpu.PLAN.load.prompts[-1] < gpu.HBM_TOKENS < gpu.PLAN.session_tokens
    sizes = [json.loads(flags[-1]) for flags in gpu.commands(Path("/d"))[1:]]
    extras = [size["kv_connector_extra_config"] for size in sizes]
    found = [extra.get("dram", extra.get("cpu_bytes_to_use")) for extra in extras]
    assert found == pytest.approx([28 * gpu.GB, 28 * gpu.GB, 4 * gpu.GB], rel=1e-6)


def test_fewer_jobs() -> None:
    assert len(arms.conversations(servers.cut(QUICK, 2).load, 1)) == 2
    assert not Arm("x").is_ours
