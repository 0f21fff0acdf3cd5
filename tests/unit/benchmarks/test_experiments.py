# SPDX-License-Identifier: Apache-2.0
"""The experiments' files, their simulated runs on a tiny input, and the report made of them.

It is long since files, runs and report share one tiny input.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import benchmarks.quick
from attnstore_lab.sim.outcome import Outcome
from benchmarks import report
from benchmarks.compare.command import parser
from benchmarks.experiments import __main__ as runner
from benchmarks.experiments import scripted, served, simulated
from benchmarks.experiments.intervals import interval
from benchmarks.experiments.picture import plot, says_something, title
from benchmarks.experiments.spec import Experiment, Goal, SpecError, parse, read_all
from benchmarks.sample import SAMPLE

ROOT = Path(__file__).parents[3]
ALL = read_all()
SIMULATED = [e for e in ALL.values() if e.kind == "simulate"]
SERVED = [e for e in ALL.values() if e.kind == "serve"]
SAME_WITH_OTHER_MODELS = ("slow_disk_13b", "slow_disk_70b")
SPEC: dict[str, Any] = {
    "question": "What?",
    "varied": "size",
    "simulate": {
        "machine": "llama-13b-2xa100",
        "points": {"small": {"nvme": "1TB"}, "large": {"nvme": "10TB"}},
        "policies": ["attnstore", "recompute"],
    },
    "metrics": {"found": {"words": "what was found", "unit": "%", "paper": {"large": 86}}},
}


def changed(path: str, value: Any) -> dict[str, Any]:
    spec: dict[str, Any] = json.loads(json.dumps(SPEC))
    at = spec
    *folders, last = path.split("/")
    for folder in folders:
        at = at[folder]
    at[last] = value
    return spec


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        ("asked", "x", "'asked' is unknown; known are before, message, metrics"),
        ("serve", {}, "one of simulate, serve, script"),
        ("question", "", "question is missing"),
        ("message", "{attnstore}", "message: {says: ..., holds: [...]} is expected"),
        ("message", {"says": "x", "holds": ["attnstore ahead"]}, "'attnstore ahead' was found"),
        ("message", {"says": "x", "holds": ["attnstore < lru.mean"]}, "lru.mean' was found"),
        ("picture", "lost", "picture: 'lost' is none of its metrics"),
        ("simulate/points", [], "simulate.points"),
        ("metrics/found", "x", "metrics.found"),
        ("metrics/found/paper", {"huge": 1}, "'huge' is no point"),
        ("metrics/found/colour", 1, "colour"),
        ("metrics/found/goal", {"system": "attnstore", "at_best": 1}, "at_best"),
    ],
)
def test_wrong_files_are_told(path: str, value: Any, said: str) -> None:
    with pytest.raises(SpecError, match="x: ") as told:
        parse("x", changed(path, value))
    assert said in str(told.value)


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        ("simulate/machine", "abacus", "abacus"),
        ("simulate/policies", ["guess"], "'guess' is unknown"),
        ("simulate/points/small", {"nvmee": "1TB"}, "nvmee"),
        ("metrics/heat", {"words": "x"}, "no such metric"),
    ],
)
def test_what_cannot_be_simulated_is_told_before_it_runs(path: str, value: Any, said: str) -> None:
    with pytest.raises(SpecError, match=said):
        simulated.run(parse("x", changed(path, value)), SAMPLE)


@pytest.mark.parametrize("experiment", SERVED, ids=lambda e: e.name)
def test_options_of_real_servers_are_options(experiment: Experiment) -> None:
    for body in (experiment.body, experiment.quickly().body):
        for given in body["points"].values():
            options = [*body["options"], *given.get("options", ())]
            args = ["--model", "m", "--data", "d", *map(str, options)]
            assert parser().parse_args(args).model == "m"
    assert {m.name for m in experiment.metrics} <= set(served.VALUES)


# ---- simulated runs ----------------------------------------------------------------------


@pytest.fixture
def tiny(tmp_path: Path) -> Callable[[Experiment], dict[str, Any]]:
    """Runs an experiment with a few sessions."""

    def run(experiment: Experiment) -> dict[str, Any]:
        body = dict(experiment.body) | {"sessions": 6}
        return simulated.run(replace(experiment, body=body), SAMPLE, cache=tmp_path / "cache")

    return run


@pytest.mark.parametrize(
    "experiment",
    [
        pytest.param(e, marks=[pytest.mark.long] if e.name in SAME_WITH_OTHER_MODELS else [])
        for e in SIMULATED
    ],
    ids=lambda e: e.name,
)
def test_each_simulated_experiment_runs(
    experiment: Experiment, tiny: Callable[[Experiment], dict[str, Any]]
) -> None:
    found = tiny(experiment)["values"]
    assert set(found) == {m.name for m in experiment.metrics}
    for metric in experiment.metrics:
        assert set(found[metric.name]) == set(experiment.body["points"])
        values = [v for row in found[metric.name].values() for v in row.values()]
        assert any(value is not None for value in values)
        for value in values:
            assert value is None or value >= 0
            assert value is None or metric.unit != "%" or value <= 1


def test_the_same_run_is_simulated_once(
    tiny: Callable[[Experiment], dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    experiment = parse("x", SPEC)
    first = tiny(experiment)
    monkeypatch.setattr(simulated, "_simulate", lambda *_: pytest.fail("simulated again"))
    assert tiny(experiment) == first
    other = replace(experiment, body=dict(experiment.body) | {"rate": 0.5})
    with pytest.raises(pytest.fail.Exception):
        tiny(other)


def point(**values: Any) -> simulated.Point:
    experiment = parse("x", SPEC)
    found = next(simulated._points(experiment, {"nvme": "10TB"}))
    return replace(found, **values)


def test_sizes_shrink_with_the_sessions_they_are_for() -> None:
    experiment = parse("x", changed("simulate/sessions_of_sizes", 9000))
    whole = next(simulated._points(experiment, {}))
    tenth = next(simulated._points(experiment, {"sessions": 900}))
    assert tenth.machine.dram == whole.machine.dram // 10 == 12_800_000_000
    assert tenth.machine.nvme == whole.machine.nvme // 10
    assert tenth.machine.hbm == whole.machine.hbm


def test_cost_is_busy_accelerators_and_the_tiers_all_the_time() -> None:
    prices = {"gpu_hour": 5.0, "dram_gb_hour": 0.01, "nvme_gb_hour": 0.0001}
    ours = Outcome("attnstore", busy_s=1800, duration_s=7200)
    re = Outcome("recompute", busy_s=3600, duration_s=7200)
    body = {"prices": prices}
    money = 0.5 * 2 * 5 + 2 * (128 * 0.01 + 10_000 * 0.0001)
    assert simulated.cost(ours, re, point(gpus=2), body) == pytest.approx(money / (2 * 5))
    assert simulated.cost(re, re, point(gpus=2), body) == 1.0
    assert simulated.cost(ours, Outcome("recompute"), point(gpus=2), body) is None


def test_the_bound_is_of_histories_as_the_others_are() -> None:
    bound = simulated._simulate(point(policy="belady", sessions=6), SAMPLE)
    assert 0 < bound.history_tokens < bound.prompt_tokens
    assert bound.stored_history_share == pytest.approx(1.0, abs=0.01)  # there is room for all
    assert simulated.says("belady", "found")
    assert not simulated.says("belady", "ttft_s")


# ---- real servers, whose comparison is given ---------------------------------------------


def test_values_of_a_comparison() -> None:
    systems = {
        "attnstore": {"figures": {"ttft_later_p50": 30.0}, "ratios": {"prefill_over_re": 0.2}},
        "lmcache": {"figures": {"ttft_later_p50": 60.0}, "ratios": {"prefill_over_re": 0.4}},
    }
    assert served.value_of("prefill_over_re", systems, "lmcache") == 0.4
    assert served.value_of("ttft_later_over_lmcache", systems, "attnstore") == 0.5
    del systems["lmcache"]
    assert served.value_of("ttft_later_over_lmcache", systems, "attnstore") is None


SCRIPTED = [e for e in ALL.values() if e.kind == "script"]


@pytest.mark.parametrize("experiment", SCRIPTED, ids=lambda e: e.name)
def test_what_other_benchmarks_left_is_read(experiment: Experiment) -> None:
    found = scripted.run(experiment, kept=True)
    assert set(found["values"]) == {m.name for m in experiment.metrics}
    assert all(found["values"].values())
    assert found["machine"]["cores"] >= 1


def test_a_benchmark_is_run_and_its_failure_told(tmp_path: Path) -> None:
    script = {
        "module": "tests.unit.no_such",
        "out": "--out",
        "results": "x.json",
        "points": {"a": {}},
    }
    spec = {k: v for k, v in SPEC.items() if k != "simulate"} | {
        "script": script,
        "metrics": {"m": {"words": "w"}},
    }
    with pytest.raises(InterruptedError, match=r"-m tests.unit.no_such ended with 1"):
        scripted.run(parse("x", spec), kept=False)
    (tmp_path / "x.json").write_text('{"machine": {}, "took_s": 1, "m": [1, 2]}')
    script["points"] = {"a": {"m": {"attnstore": "m/1"}}, "b": {}}
    found = scripted.run(parse("x", spec), kept=True, results=tmp_path)
    assert found["values"] == {"m": {"a": {"attnstore": 2.0}}}
    script["points"] = {"a": {"m": {"attnstore": "m/2"}}}
    with pytest.raises(SpecError, match="x: m/2: there is no '2'"):
        scripted.run(parse("x", spec), kept=True, results=tmp_path)


def test_each_point_is_a_comparison(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []

    def compare(arguments: list[str]) -> int:
        asked.append(arguments)
        out = Path(arguments[arguments.index("--out") + 1])
        out.mkdir(parents=True)
        found = {
            "options": {"out": str(out)},
            "not_run": {"lmcache": f"not here\n{out}"},
            "systems": {"re": {"figures": {"failed": len(asked)}, "ratios": {}}},
        }
        (out / "compare.json").write_text(json.dumps(found))
        return 0

    monkeypatch.setattr(served, "compare", compare)
    monkeypatch.setattr(served, "WORK", tmp_path)
    points = {"slow": {"options": ["--rate", 1]}, "fast": {"options": ["--rate", 2]}}
    experiment = parse(
        "x",
        {
            "question": "What?",
            "varied": "rate",
            "metrics": {"failed": {"words": "w"}},
            "serve": {"model": "tiny", "points": points, "options": ["--turns", 3]},
        },
    )
    found = served.run(experiment, SAMPLE, model="m")
    assert [a[-4:] for a in asked] == [["--turns", "3", "--rate", n] for n in ("1", "2")]
    assert found["values"] == {"failed": {"slow": {"re": 1}, "fast": {"re": 2}}}
    assert found["not_run"] == {"lmcache": "not here"}
    assert str(tmp_path) not in json.dumps(found)
    monkeypatch.setattr(served, "compare", lambda _: 130)
    with pytest.raises(InterruptedError, match="x, slow: the comparison ended with 130"):
        served.run(experiment, SAMPLE, model="m")


def record(session: int, turn: int, ttft_ms: float, **more: Any) -> str:
    known = {"session": session, "turn": turn, "ttft_ms": ttft_ms, "warmup": False, "error": None}
    return json.dumps(known | more)


def test_points_together_have_an_interval(tmp_path: Path) -> None:
    """Of the median over all, and of the ratio of two systems that were asked the same."""
    folders = [tmp_path / "0", tmp_path / "1"]
    for number, folder in enumerate(folders):
        folder.mkdir()
        for name, factor in (("vllm", 2.0), ("attnstore", 1.0)):
            lines = [
                record(s, t, factor * (1000 * number + 10 * s)) for s in (1, 2) for t in (2, 3)
            ]
            skipped = [
                record(3, 1, 5e6),
                record(3, 2, 5e6, warmup=True),
                record(3, 3, 5e6, error="x"),
            ]
            (folder / f"{name}.jsonl").write_text("\n".join(lines + skipped))
    (folders[0] / "bound.jsonl").write_text(record(1, 2, 1.0))  # of one point alone
    found = served.together(folders, ["ttft_later_p50", "ttft_later_over_vllm", "hit_share"])
    assert found["ttft_later_p50"]["attnstore"] == [515.0, 10.0, 1020.0]
    assert found["ttft_later_over_vllm"] == {"attnstore": [0.5] * 3, "vllm": [1.0] * 3}
    assert found.keys() == {"ttft_later_p50", "ttft_later_over_vllm"}
    assert "bound" not in found["ttft_later_p50"]
    assert report.cell([515.0, 10.0, 1020.0], "") == "515 (10 to 1,020)"
    with pytest.raises(ValueError, match="no session has a second turn"):
        interval({})


def test_ids_are_as_many_as_were_asked_for(tmp_path: Path) -> None:
    path = served.made_of_ids(tmp_path, 3, 600, 400)
    made = json.loads(path.read_text())
    assert [[len(t["value"]) for t in c["conversations"]] for c in made] == [[600, 400]] * 3
    assert made[0]["conversations"][0]["value"] != made[1]["conversations"][0]["value"]


# ---- the commands ------------------------------------------------------------------------


@pytest.fixture
def quick(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Results of one quick run of an experiment, by its command."""
    small = parse("x", changed("quick", {"sessions": 12}))
    with_goal = changed("metrics/found/goal", {"system": "attnstore", "at_least": 1.5})
    missed = parse("missed", with_goal | {"quick": {"sessions": 12}})
    monkeypatch.setattr(runner, "read_all", lambda: {"x": small, "missed": missed})
    monkeypatch.setattr(simulated.run, "__kwdefaults__", {"cache": tmp_path / "cache"})
    out = tmp_path / "results"
    assert runner.main(["x", "missed", "--quick", "--data", str(SAMPLE), "--out", str(out)]) == 0
    return out


def test_a_run_writes_json_and_a_picture(quick: Path) -> None:
    found = json.loads((quick / "x.json").read_text())
    assert found["kind"] == "simulated"
    assert found["command"] == "python -m benchmarks.experiments x --quick"
    assert found["body"]["sessions"] == 12
    assert found["machine"]["cores"] >= 1
    assert (quick / "x.svg").stat().st_size > 1000


def test_a_run_ends_with_tables_goals_and_a_verdict(
    capsys: pytest.CaptureFixture[str], quick: Path
) -> None:
    said = capsys.readouterr().out
    result = json.loads((quick / "missed.json").read_text())
    assert said.count("| what was found, % ") == 2 and "\ngoal: none is set\n" in said
    assert "\ngoal: what was found, attnstore: at least 150\nverdict: none: a quick run" in said
    spec = changed("metrics/found/goal", {"system": "attnstore", "at_least": 0.9})
    judged = parse("judged", spec)
    result |= {"quick": False, "values": {"found": {}}}
    values = result["values"]["found"]
    values |= {"small": {"attnstore": 0.91}, "large": {"attnstore": 0.95}}
    assert list(report.ending(judged, result))[-1] == "verdict: met at 2 of 2 points"
    values["large"] = {"attnstore": 0.5}
    assert list(report.ending(judged, result))[-1] == "verdict: missed: large has 50.0"
    values["small"] = {"recompute": 0.5}
    assert list(report.ending(judged, result))[-1].endswith("; not measured: small")
    values["large"] = {}
    assert list(report.ending(judged, result))[-1] == "verdict: not measured"


@pytest.mark.parametrize("experiment", ALL.values(), ids=lambda e: e.name)
def test_a_quick_run_leaves_what_is_published(
    experiment: Experiment,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Each with its own points and metrics; one number stands for all that a run finds."""
    found = {
        metric.name: {label: {"attnstore": 0.5} for label in experiment.body["points"]}
        for metric in experiment.metrics
    }
    made = {"values": found, "data": "none", "model": "tiny"}
    for kind in (simulated, served, scripted):
        monkeypatch.setattr(kind, "run", lambda *_, **__: dict(made))
    monkeypatch.setattr(benchmarks.quick, "CACHE", tmp_path)
    published = [ROOT / "results/experiments" / f"{experiment.name}.{e}" for e in ("json", "svg")]
    published = [path for path in published if path.suffix == ".json" or path.exists()]
    before = [path.read_bytes() for path in published]
    assert runner.main([experiment.name, "--quick", "--data", str(SAMPLE)]) == 0
    assert [path.read_bytes() for path in published] == before
    assert (tmp_path / "experiments" / f"{experiment.name}.json").is_file()
    said = capsys.readouterr().out
    for metric in experiment.metrics:
        assert f"| {metric.words}" in said
    assert "\ngoal: " in said and "\nverdict: " in said


def test_a_quick_run_is_not_published_on_demand_either(
    capsys: pytest.CaptureFixture[str],
) -> None:
    before = (ROOT / "results/experiments/slow_disk.json").read_bytes()
    args = ["slow_disk", "--quick", "--out", str(ROOT / "results/experiments")]
    assert runner.main(args) == 2
    assert "--quick writes nothing in results/" in capsys.readouterr().err
    assert (ROOT / "results/experiments/slow_disk.json").read_bytes() == before


def test_every_quick_run_has_its_own_place() -> None:
    """Of all benchmarks: who takes --quick asks benchmarks/quick.py where to write."""
    quick = [
        path
        for path in sorted((ROOT / "benchmarks").rglob("*.py"))
        if 'add_argument("--quick"' in path.read_text(encoding="utf-8")
    ]
    assert len(quick) >= 3
    for path in quick:
        text = path.read_text(encoding="utf-8")
        assert re.search(r"destination\([^)]*is_quick=args\.quick", text), path


def test_names_are_shown_and_checked(capsys: pytest.CaptureFixture[str]) -> None:
    assert runner.main([]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == list(ALL)
    assert runner.main(["hit_ratee"]) == 2
    assert "'hit_ratee' is unknown; there are hit_rate," in capsys.readouterr().err


def test_report_has_paper_and_us_side_by_side(quick: Path) -> None:
    spec = {"x": parse("x", SPEC), "absent": parse("absent", SPEC)}
    text = report.render(spec, quick, "../r")
    assert "| what was found, % | the paper's | AttnStore |" in text
    row = next(line for line in text.splitlines() if line.startswith("| large |"))
    assert row.split("|")[2].strip() == "86"
    assert "**simulated**" in text
    assert "A quick run" in text
    assert "Not run yet: `python -m benchmarks.experiments absent`" in text
    assert "![What?](../r/x.svg)" in text


def test_report_draws_pictures_again(
    quick: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "read_all", lambda: {"x": parse("x", SPEC)})
    (tmp_path / "x.json").write_bytes((quick / "x.json").read_bytes())
    asked = ["--results", str(tmp_path), "--out", str(tmp_path / "results.md")]
    assert report.main(asked) == 0
    assert not (tmp_path / "x.svg").exists()
    assert report.main([*asked, "--pictures"]) == 0
    assert (tmp_path / "x.svg").read_bytes() == (quick / "x.svg").read_bytes()


@pytest.mark.parametrize(
    ("values", "is_drawn"),
    [
        ({"small": {"attnstore": 1.0, "lru": 1.0}, "large": {"attnstore": 2.0, "lru": 2.0}}, False),
        ({"small": {"attnstore": 1.0, "lru": 1.0}, "large": {"attnstore": 2.0, "lru": 1.9}}, True),
        ({"small": {"attnstore": 1.0}, "large": {"attnstore": 1.01}}, False),
        ({"small": {"attnstore": 1.0}, "large": {"attnstore": [1.5, 1.4, 1.6]}}, True),
        ({"small": {"attnstore": None}, "large": {}}, False),
    ],
)
def test_bars_that_look_the_same_are_not_drawn(
    values: dict[str, Any], is_drawn: bool, tmp_path: Path
) -> None:
    """Sixteen bars of length 1 convince no reader: the table says as much."""
    bare = {"words": "what was found", "unit": "%"}
    spec = parse("x", changed("metrics", {"found": bare}))
    result = {"values": {"found": values}, "kind": "simulated", "quick": False, "command": "x"}
    assert says_something(spec, result) is is_drawn
    full = result | {"seconds": 1, "machine": {"commit": None}, "body": spec.body, "data": "none"}
    file = tmp_path / "x.json"
    file.write_text(json.dumps(full))
    assert ("![What?]" in report.render({"x": spec}, tmp_path, "../r")) is is_drawn


def titled(path: Path, message: dict[str, Any], *points: dict[str, Any]) -> str:
    """The title in a picture of these points, called 1, 2, ..."""
    spec = parse("x", SPEC | {"message": message})
    values = {str(n): point for n, point in enumerate(points, 1)}
    result = {"values": {"found": values}, "kind": "simulated", "quick": False}
    plot(spec, result, path)
    said = title(spec, result)
    assert f">{said}<" in path.read_text(encoding="utf-8")
    return said


@pytest.mark.parametrize(
    ("points", "said"),
    [
        ([{"attnstore": 0.904, "lru": [0.005, 0.004, 0.006]}], "90 % with the store, 0.5 without"),
        ([{"attnstore": 0.904}], "What?"),
        ([{"attnstore": 0.904, "lru": None}], "What?"),
    ],
)
def test_a_pictures_title_has_the_figures_or_asks(
    points: list[dict[str, Any]], said: str, tmp_path: Path
) -> None:
    says = {"says": "{attnstore:.0f} % with the store, {lru:.1f} without"}
    assert titled(tmp_path / "x.svg", says, *points) == said


@pytest.mark.parametrize(
    ("holds", "is_true"),
    [
        ("attnstore > lru", True),
        ("attnstore >= lru", True),
        ("lru < attnstore", True),
        ("attnstore < lru", False),
        ("attnstore > belady", False),  # at the second point alone
        ("attnstore <= 60", True),
        ("attnstore > 50", False),
        ("attnstore.most > 50", True),
        ("attnstore.least > lru.most", False),
        ("attnstore falls", False),
        ("attnstore rises", True),
        ("lru rises", False),
        ("fifo < attnstore", False),  # which was not run
        ("fifo falls", False),
    ],
)
def test_a_title_whose_claim_does_not_hold_is_the_question(
    holds: str, is_true: bool, tmp_path: Path
) -> None:
    points = (
        {"attnstore": 0.5, "lru": 0.45, "belady": 0.55},
        {"attnstore": 0.6, "lru": 0.51, "belady": 0.58},
        {"attnstore": None, "lru": 0.5, "belady": 0.58},
    )
    says = "{attnstore.least:.0f} to {attnstore.most:.0f}, {lru[2]:.0f} there, {lru.least_at} last"
    message = {"says": says, "holds": [holds]}
    said = titled(tmp_path / "x.svg", message, *points)
    assert said == ("50 to 60, 51 there, 1 last" if is_true else "What?")


def test_report_marks_goals_that_were_missed(quick: Path) -> None:
    text = report.render(
        {
            "missed": parse(
                "missed", changed("metrics/found/goal", {"system": "attnstore", "at_least": 1.5})
            )
        },
        quick,
        "r",
    )
    assert "(goal for AttnStore: at least 150)" in text
    assert "| **" in text
    assert "Missed: why has not been looked into yet." in text


@pytest.mark.parametrize(
    ("goal", "value", "met"),
    [
        (Goal("a", at_most=0.12), 0.12, True),
        (Goal("a", at_most=0.12), 0.121, False),
        (Goal("a", at_least=8), 8.0, True),
        (Goal("a", at_least=8), 7.9, False),
    ],
)
def test_goals(goal: Goal, value: float, met: bool) -> None:
    assert goal.is_met(value) is met


def test_not_run_systems_are_told(quick: Path) -> None:
    result: Mapping[str, Any] = json.loads((quick / "x.json").read_text()) | {
        "not_run": {"offloading": "needs a GPU\nmore"}
    }
    (quick / "x.json").write_text(json.dumps(result))
    text = report.render({"x": parse("x", SPEC)}, quick, "r")
    assert "Not run: offloading: needs a GPU\n" in text
