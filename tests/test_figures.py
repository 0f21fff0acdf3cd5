# SPDX-License-Identifier: Apache-2.0
"""Each figure of README, FAQ and docs is its file's, or is named with its date and machine.

What reads like a measurement is a ratio with two decimals, a time in ms or less, a rate, or, in a
sentence that tells of a run, seconds, percents and times. It is in a page that a tool writes, in
words that tools/page_figures.py or tools/readme_results.py has of a file, or in a section that
says a month and names a processor or an accelerator, or says that it was simulated. "Two cores"
and "one machine" are no names: who reads them cannot tell which. A section is what is below one
heading.
Limits and defaults are none of that: where one reads like it, it is in CONSTANTS.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks import report
from benchmarks.experiments.spec import read_all
from tools import page_figures, readme_results

ROOT = Path(__file__).parent.parent
MADE = {"experiments.md", "models.md", "configuration.md"}
"""By benchmarks.report, benchmarks.families and tools/settings_page.py."""
PAGES = [
    p for p in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))] if p.name not in MADE
]
FENCE = re.compile(r"^```\w*\n.*?^```", re.MULTILINE | re.DOTALL)
START = r"(?<![\w.,`/=-])\d[\d,]*(?:\.\d+)?\**"
SURE = re.compile(
    rf"{START} ?(?:ms|µs|us|ns|[KMG]i?B/s|tokens/s|x)(?!\w)|(?<![\w.`/=-])\d\.\d{{2,}}(?![\d.\w])"
)
OF_A_RUN = re.compile(rf"{START} ?(?:s|min|minutes|seconds|%|times)(?!\w)")
RUN = re.compile(r"\b(took|measured|fell|gave|seen|costs?|was|were)\b")
DATED = re.compile(r"\b(?:January|February|March|April|May|June|July|August|September|October"
                   r"|November|December) 20\d\d\b|\b20\d\d-\d\d-\d\d\b")  # fmt: skip
VERSION = re.compile(
    r"\b(?:vLLM|Python|Linux|torch)(?:'s)? (?:\| )?\d[\d.]*(?:(?:,| to| and) \d[\d.]*)*"
)
MACHINE = re.compile(
    r"\b(?:EPYC|Xeon|Ryzen|Core i\d|Zen \d|Sapphire Rapids|Graviton\d?|[AHL]\d{2,3}|B200|GB200"
    r"|RTX \w+)\b"
)
"""The name of a processor or an accelerator."""
SIMULATED = re.compile(r"\bsimulated\b", re.IGNORECASE)
"""No machine has run: the section says so, and its date."""
CONSTANTS: dict[str, tuple[str, ...]] = {
    "README.md": ("0.31, 0.30 (their core)",),
    "docs/agents.md": (
        "`OffloadingConnector 1x`, `SimpleCPUOffload 1x`",
        "below 0.85 of Offloading",
    ),
    "docs/bench.md": ("NVMe has 1.25 times",),
    "docs/compatibility.md": ("0.30 and 0.31 do not say", "0.32's settings"),
    "docs/concepts.md": ("1 GiB/s, and uses the store",),
    "docs/deploying.md": (
        "for 3.10 to 3.13",
        "--only 3.11",
        "takes 1.25 of its size",
        "of up to 5 s in Dynamo's",
        "of Kubernetes 1.30 and 1.37",
    ),
    "docs/faults.md": ("the load deadline is 30 s", "(0.30, 0.31)"),
    "docs/getting-started-cpu.md": ("(3.11 is tested)",),
    "docs/hints.md": ("tenant_share: 0.02",),
    "docs/simulate.md": ("may be seen 0.25 s late",),
    "docs/runbook.md": ("did not say in 20 ms",),
}
"""By page: words with a number that is a limit, a default or a version, and reads like a figure."""


def uncovered(page: str, text: str) -> list[str]:
    """Figures of a page that have neither a file nor a date and a machine."""
    text = FENCE.sub("", text)
    for figure in page_figures.of(page):
        text = figure.pattern().sub("", text)
    if page == "README.md":
        for row in readme_results.rows():
            text = text.replace(row, "")
    text = VERSION.sub("", text)
    for constant in CONSTANTS.get(page, ()):
        text = text.replace(constant, "")
    found = []
    for section in re.split(r"^(?=#+ )", text, flags=re.MULTILINE):
        if DATED.search(section) and (MACHINE.search(section) or SIMULATED.search(section)):
            continue
        heading = section.partition("\n")[0]
        for sentence in re.split(r"(?<=[.?!;])\s+|\n", section):
            figures = SURE.findall(sentence)
            figures += OF_A_RUN.findall(sentence) if RUN.search(sentence) else []
            found += [f"{heading}: {figure} in: {sentence.strip()}" for figure in figures]
    return found


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_each_figure_has_a_file_or_a_date_and_a_machine(path: Path) -> None:
    page = path.relative_to(ROOT).as_posix()
    found = uncovered(page, path.read_text(encoding="utf-8"))
    assert not found, "neither a file nor a date and a machine:\n" + "\n".join(found)


@pytest.mark.parametrize("page", sorted({figure.page for figure in page_figures.FIGURES}))
def test_figures_are_those_of_their_files(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    differing = list(page_figures.differing(page_figures.of(page), text))
    assert not differing, "\n".join([*differing, "python3 tools/page_figures.py --write"])


def test_the_report_is_that_of_its_files() -> None:
    made = report.render(read_all(), ROOT / "results/experiments", "../results/experiments")
    written = (ROOT / "docs/experiments.md").read_text(encoding="utf-8")
    assert made == written, "python -m benchmarks.report"


def test_constants_are_there() -> None:
    for page, words in CONSTANTS.items():
        text = (ROOT / page).read_text(encoding="utf-8")
        assert all(word in text for word in words), page


def test_what_has_neither_is_found() -> None:
    bare = (
        "## A\nA hit takes 21.4 ms.\nIt was 36 times.\nThe ratio is **0.97**; it waits for 30 s.\n"
    )
    assert len(uncovered("x.md", bare)) == 3
    dated = bare + "Measured in November 2026 on two cores of an AMD EPYC.\n"
    assert uncovered("x.md", dated) == []
    assert len(uncovered("x.md", dated + "## B\nAnother takes 5 ms.\n")) == 1
    for said in (
        "Measured on one machine.\n",
        "Measured on an AMD EPYC.\n",
        "Measured in November 2026 on one machine.\n",
        "Measured in November 2026 on two cores, two processors, no GPU.\n",
        "Simulated.\n",
        "2026-11-30: done by no machine, as EPYCs are.\n",
    ):
        assert len(uncovered("x.md", bare + said)) == 3, said
    assert uncovered("x.md", bare + "2026-11-30, simulated.\n") == []
    assert uncovered("x.md", bare + "On 30 November 2026, on an H200.\n") == []
    assert (
        uncovered("x.md", "## C\n`timeout: 5s` and vLLM 0.32.0; at most 64 GiB, 90 % of it.\n")
        == []
    )
    figure = page_figures.FIGURES[0]
    said = figure.said()
    assert list(page_figures.differing((figure,), said)) == []
    wrong = re.sub(r"\d+ ms", "1 ms", said, count=1)
    assert "says" in next(page_figures.differing((figure,), wrong))
