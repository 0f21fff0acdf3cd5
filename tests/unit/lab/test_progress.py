# SPDX-License-Identifier: Apache-2.0
"""How far a long command is: lines where there is no terminal, and a bar where there is one."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from attnstore_lab.bench.replay import forecast
from attnstore_lab.bench.schedule import Plan
from attnstore_lab.cli.bench import THINK
from attnstore_lab.progress import LINE_S, progress
from tests.vllm_objects import Clock

LAB = Path(__file__).parents[3] / "attnstore_lab"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_without_a_terminal_a_line_comes_every_so_often() -> None:
    out, clock = io.StringIO(), Clock()
    with progress("plan", 2_048, out=out, clock=clock) as shown:
        for _ in range(2_048):
            clock.now += LINE_S / 512  # a number that floats have
            shown.step()
    assert out.getvalue().splitlines() == [
        f"plan: {done:,} of 2,048 requests after {seconds} s"
        for done, seconds in ((512, 10), (1_024, 20), (1_536, 30), (2_048, 40))
    ]


def test_what_is_over_soon_says_nothing_and_so_does_what_must_not() -> None:
    out, clock = io.StringIO(), Clock()
    with progress("plan", 10, out=out, clock=clock) as shown:
        shown.step(10)
    with progress("plan", 10, out=out, clock=clock, is_shown=False) as shown:
        clock.now += 10 * LINE_S
        shown.step()
    assert not out.getvalue()


def test_a_terminal_has_a_bar_with_what_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    out, clock = Terminal(), Clock()
    with progress("plan", 40, out=out, clock=clock) as shown:
        shown.what = "DRAM 1 GiB"
        clock.now += 1
        shown.step(7)
    assert "DRAM 1 GiB" in out.getvalue() and "7/40" in out.getvalue()


@pytest.mark.parametrize("name", ["size_plan", "simulate", "simulate_server", "simulate_hosts"])
def test_every_simulation_tells_how_far_it_is(name: str) -> None:
    text = (LAB / "cli" / f"{name}.py").read_text(encoding="utf-8")
    assert "with progress(" in text and "tqdm" not in text


def test_a_replay_says_before_it_starts_how_long_it_will_take() -> None:
    plan = Plan(16, 80, 0, (0.0, 0, 0), last_due_s=725.0)
    said = forecast(plan, after_answer=False)
    assert said.startswith("80 requests of 16 sessions; the last is due after 12 min.")
    assert "--sessions" in said and "--think" in said and "Ctrl-C" in said
    assert "at the earliest after 12 min" in forecast(plan, after_answer=True)


def test_who_tries_it_first_does_not_think_for_long() -> None:
    median_s, _ = THINK.partition(":")[2].split(",")
    assert float(median_s) <= 10
