# SPDX-License-Identifier: Apache-2.0
"""The README is one screen; what the docs say of links, commands, metrics, warnings is so."""

from __future__ import annotations

import ast
import importlib.util
import json
import re
from pathlib import Path

import pytest

from attnstore_vllm.cli.commands import command_names
from attnstore_vllm.types import Event
from tools import readme_results, setup_env, wrap_pages

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
DOCS = sorted((ROOT / "docs").rglob("*.md"))
PAGES = [README, ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md", *DOCS]
FIRST_SCREEN = 27
"""Lines of the README that a browser shows before a reader moves."""
FIRST = ("README.md", "index.md", "getting-started-cpu.md", "gpu.md")
"""What a stranger reads first: here sentences are shorter still."""
LINES_MAX, LINE_MAX, NUMBERS_MAX, WORDS_MAX = 120, 120, 40, 120
REASON_MAX = 120
"""Letters of a line on the page, where links show their words alone."""
SENTENCE_MAX, SENTENCE_MAX_FIRST, PARAGRAPH_MAX = 30, 25, 80
DESIGN_LINES_MAX = 250
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"!?\[([^\]]*)\]\(([^)\s]+)\)")


def visible(text: str) -> str:
    """The text that a reader sees: link targets, definitions of links and pictures left out."""
    text = re.sub(r"^\[\w+\]: .*$", "", text, flags=re.MULTILINE)
    text = re.sub(r"!\[[^\]]*\]\([^)]*\)", "", text)
    return re.sub(r"\[([^\]]*)\](\([^)]*\)|\[\w+\])?", r"\1", text)


def short(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def test_the_readme_is_one_screen() -> None:
    text = README.read_text(encoding="utf-8")
    lines = text.splitlines()
    assert len(lines) <= LINES_MAX
    long = [
        f"{number}: {len(line)}" for number, line in enumerate(lines, 1) if len(line) > LINE_MAX
    ]
    assert not long, f"lines of more than {LINE_MAX} characters: {long}"
    numbers = re.findall(r"\d+(?:[.,]\d+)*", visible(text))
    assert len(numbers) <= NUMBERS_MAX, f"{len(numbers)} numbers: {numbers}"
    before = visible(text.partition("```")[0]).split()
    assert len(before) <= WORDS_MAX, f"{len(before)} words before the first command"


def test_the_first_screen_has_what_a_stranger_asks() -> None:
    """What it is, how it looks, how it is started, why, whether it ran, and where more is."""
    lines = README.read_text(encoding="utf-8").splitlines()[:FIRST_SCREEN]
    assert sum(line.startswith("![") for line in lines) == 1
    fences = [number for number, line in enumerate(lines) if line.startswith("```")]
    assert len(fences) == 2 and fences[1] - fences[0] == 4, "three commands"
    items = re.split(r"\n(?=- |\n)", "\n".join(lines))
    reasons = [visible(item) for item in items if item.startswith("- **")]
    assert len(reasons) == 4 and all(len(sentences(reason)) == 1 for reason in reasons)
    assert max(len(reason) for reason in reasons) <= REASON_MAX, "a line each"
    assert sum(line.count("](") for line in lines if not line.startswith("![")) >= 4


@pytest.mark.parametrize("path", PAGES, ids=short)
def test_no_line_is_long(path: Path) -> None:
    """But of tables, code, and a code span that is a line by itself. Made pages too."""
    long = wrap_pages.long_lines(path.read_text(encoding="utf-8"))
    assert not long, "\n".join(["python3 tools/wrap_pages.py wraps:", *long])


def test_the_design_holds_decisions_only() -> None:
    """What was measured and tried is in docs/notes."""
    lines = (ROOT / "docs" / "design.md").read_text(encoding="utf-8").splitlines()
    assert len(lines) <= DESIGN_LINES_MAX
    assert max(map(len, lines)) <= wrap_pages.LINE_MAX


NO_SUBJECT = re.compile(r"\b(nobody|somebody|whoever|whatever)\b", re.IGNORECASE)


@pytest.mark.parametrize("path", PAGES, ids=short)
def test_sentences_say_who(path: Path) -> None:
    found = [
        line for line in path.read_text(encoding="utf-8").splitlines() if NO_SUBJECT.search(line)
    ]
    assert not found, "name the subject:\n" + "\n".join(found)


def test_a_page_is_wrapped_where_a_line_is_long() -> None:
    words = "word " * 40
    code = "`a command " + "x " * 60 + "y`"
    kept = f"| {words * 4} |\n```\n{words * 4}\n```\nshort\nlines\n"
    text = f"# Head\n- {words}{code} - 2. {words}\n  more\n{kept}"
    assert len(wrap_pages.long_lines(text)) == 1
    new = wrap_pages.wrapped(text)
    assert wrap_pages.long_lines(new) == [] and wrap_pages.wrapped(new) == new
    assert code in new and new.split() == text.split()
    assert all(not line.lstrip().startswith(("- 2", "2. ")) for line in new.splitlines()[2:])
    assert new.endswith(kept)


def sentences(text: str) -> list[str]:
    """Sentences of paragraphs and items, and of cells, where a semicolon ends an item of a list;
    code spans count as one word."""
    text = re.sub(r"`[^`\n]+`", "code", visible(FENCE.sub("\n\n", text)))
    found = []
    for part in re.split(r"\n\s*\n|\n(?=- |\d+\. |#)|\n(?=\|)", f"\n{text}"):
        cells = [c for row in part.splitlines() for c in row.split("|")] if part[:1] == "|" else []
        ends = r"(?<=[.?!;])\s+" if cells else r"(?<=[.?!])\s+"
        found += [s for each in cells or [part] for s in re.split(ends, each.strip()) if s]
    return found


@pytest.mark.parametrize("path", PAGES, ids=short)
def test_no_sentence_is_long(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    most = SENTENCE_MAX_FIRST if path.name in FIRST else SENTENCE_MAX
    long = [s for s in sentences(text) if len(s.split()) > most]
    assert not long, "\n".join(long)


def test_where_a_sentence_ends() -> None:
    text = """# A head
One [link of words](x.md#y) `and code of words`.
Two; and
more! Three
- an item
  of two lines
1. another

```
not. this.
```
| a cell; its second item | two. sentences |
|---|---|
"""
    assert sentences(text) == [
        "# A head\nOne link of words code.",
        "Two; and\nmore!",
        "Three",
        "- an item\n  of two lines",
        "1.",
        "another",
        "a cell;",
        "its second item",
        "two.",
        "sentences",
        "---",
        "---",
    ]


@pytest.mark.parametrize("path", PAGES, ids=short)
def test_no_paragraph_is_long(path: Path) -> None:
    """But of tables. A block of code or an item of a list ends one."""
    text = visible(FENCE.sub("\n\n", path.read_text(encoding="utf-8")))
    parts = re.split(r"\n\s*\n|\n(?=- |\d+\. |#|\|)", text)
    long = [p for p in parts if not p.startswith("|") and len(p.split()) > PARAGRAPH_MAX]
    assert not long, "\n\n".join(long)


def test_the_comparison_of_readme_is_that_of_its_page() -> None:
    texts = [p.read_text(encoding="utf-8") for p in (README, ROOT / "docs" / "compared.md")]
    tables = [re.findall(r"^\| \| reads disk ahead .*?\n\n", t, re.M | re.S) for t in texts]
    assert len(tables[0]) == 1 and tables[0] == tables[1]


def anchors(path: Path) -> set[str]:
    """Anchors of its headings, as MkDocs and GitHub make them of plain words."""
    heads = re.findall(r"^#+ (.+)$", FENCE.sub("", path.read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r"[\s]+", "-", re.sub(r"[^\w\s-]", "", head).strip().lower()) for head in heads}


@pytest.mark.parametrize("path", PAGES, ids=short)
def test_links_lead_somewhere(path: Path) -> None:
    text = FENCE.sub("", path.read_text(encoding="utf-8"))
    for _, target in LINK.findall(text):
        if target.startswith("https://"):
            continue
        name, _, anchor = target.partition("#")
        to = (path.parent / name).resolve() if name else path
        assert to.exists(), f"{short(path)}: {target} is not there"
        assert not anchor or anchor in anchors(to), f"{short(path)}: {target} has no such heading"


def test_every_name_of_a_link_is_defined() -> None:
    text = README.read_text(encoding="utf-8")
    defined = set(re.findall(r"^\[(\w+)\]: https://", text, re.MULTILINE))
    assert set(re.findall(r"\]\[(\w+)\]", text)) == defined


def test_the_rows_of_results_are_those_of_results() -> None:
    text = README.read_text(encoding="utf-8")
    for row in [readme_results.gpu_tested(), *readme_results.rows(), *readme_results.gpu_rows()]:
        assert row in text, f"python3 tools/readme_results.py says {row}"
    assert readme_results.gpu_tested() in text.splitlines()[:FIRST_SCREEN]
    assert ("On one " in text) == bool(readme_results.gpu_rows()), "a GPU's table that none has run"


def test_what_a_gpu_has_run_is_told_from_its_file(tmp_path: Path) -> None:
    path, first = tmp_path / "gpu.json", tmp_path / "first.json"
    assert "no GPU has run it yet" in readme_results.gpu_tested(path, first)
    assert readme_results.gpu_rows(path, first) == []
    times = {"computed": 100.0, "DRAM": 20.0, "HBM": 10.0}
    hits_of_first = [
        {"tokens": 8_192, "decoders": decoders, "ttft_ms": times} for decoders in (0, 8)
    ]
    first.write_text(
        json.dumps(
            {"machine": {"gpu": "First GPU"}, "hits attnstore": hits_of_first,
             "hits offloading": hits_of_first,
             "throughput": {"store": [1, 2, 9], "plain": [4, 4, 4]}}
        )
    )  # fmt: skip
    assert readme_results.gpu_tested(path, first).startswith("| First GPU | [one run, by hand]")
    of_first = readme_results.gpu_rows(path, first)
    assert of_first[0] == "| On one First GPU | |"
    assert [row.split(" | ")[1] for row in of_first[2:]] == ["0.20 |", "1.00 |", "2.00 |", "0.50 |"]
    hits = [
        {"kind": "dram_over_hbm", "value": value, "goal_is": "at most", "is_met": value <= 1.1,
         "detail": {"tokens": tokens, "decoders": decoders}}
        for value, tokens, decoders in ((1.04, 2_048, 0), (1.08, 8_192, 0), (1.21, 8_192, 8))
    ]  # fmt: skip
    copies = [
        {"kind": "bandwidth", "value": value, "goal_is": "at least", "is_met": True, "detail": {}}
        for value in (0.97, 0.93)
    ]
    cases = [
        {"outcome": "ok", "figures": hits},
        {"outcome": "failed", "figures": copies},
        {"outcome": "skipped", "figures": []},
    ]
    path.write_text(json.dumps({"machine": {"gpu": "Some GPU"}, "cases": cases}))
    assert readme_results.gpu_tested(path, first) == "| Some GPU | 1 of 2 cases of `make gpu-e2e` |"
    assert readme_results.gpu_rows(path, first) == [
        "| On one Some GPU | |",
        "|---|---|",
        "| First token of a DRAM hit of 8,192 tokens, over an HBM hit | 1.08 |",
        "| The same, beside requests that generate (goal missed) | 1.21 |",
        "| The slowest copy, over one large copy | 0.93 |",
    ]


def test_the_readme_says_how_to_get_the_cpu_build_and_whether_a_gpu_may_be_used() -> None:
    install = README.read_text(encoding="utf-8").partition("## Install")[2].partition("\n## ")[0]
    assert setup_env.VLLM.partition("==")[0] in install and "`make setup`" in install
    assert "NVIDIA GPU" in install and "(docs/gpu.md)" in install


COMMAND = re.compile(r"(attnstore|make|python3?)((?: [^ \n`|>#;]+)*)")


def problem(command: str, arguments: list[str]) -> str | None:
    """Why there is no such command, or None."""
    first = arguments[0] if arguments else ""
    if command == "attnstore":
        is_known = first in command_names() or first.startswith("-")
    elif command == "make":
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE)
        is_known = first in targets
    elif first == "-m":
        is_known = importlib.util.find_spec(arguments[1]) is not None
    else:
        is_known = first.startswith("-") or (ROOT / first).is_file()
    return None if is_known else f"{command} {' '.join(arguments)}"


@pytest.mark.parametrize("path", PAGES, ids=short)
def test_commands_are_there(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    code = [line.strip() for _, block in FENCE.findall(text) for line in block.splitlines()]
    code += re.findall(r"`([^`\n]+)`", FENCE.sub("", text))
    found = [match for line in code if (match := COMMAND.match(line)) and "..." not in match[2]]
    problems = [problem(match[1], match[2].split()) for match in found if match[2].strip()]
    assert not any(problems), f"{short(path)}: not there: {[p for p in problems if p]}"
    assert found or path != README


RUNBOOK = (ROOT / "docs" / "runbook.md").read_text(encoding="utf-8")
SOURCES = sorted((ROOT / "attnstore_vllm").rglob("*.py"))
LOUD = {"warning", "error", "exception", "critical"}


def constant(tree: ast.Module, node: ast.expr) -> str:
    """The text of a message: written there, or a constant of the module."""
    if isinstance(node, ast.Name):
        for statement in tree.body:
            if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == node.id:
                return str(ast.literal_eval(statement.value))
    return str(ast.literal_eval(node))


def warnings_of(path: Path) -> list[str]:
    """Warnings and errors that a module logs, `...` for values."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    calls = [n for n in ast.walk(tree) if isinstance(n, ast.Call)]
    found = []
    for call in calls:
        name = ast.unparse(call.func)
        if name.startswith("logger.") and name.removeprefix("logger.") in LOUD:
            found.append(constant(tree, call.args[0]))
        elif (
            name == "self._note" and len(call.args) == 4
        ):  # tiers/health.py: what a failed request costs
            found.append(constant(tree, call.args[3]))
    return [re.sub(r"%[sdr]", "...", text) for text in found]


# Two values in a row are one to a reader; a message may go on behind what the page quotes.
SAID = re.sub(r"\.\.\.[ :]+(?=\.\.\.)", "", RUNBOOK)


def test_every_warning_is_in_the_runbook() -> None:
    found = [(path, text) for path in SOURCES for text in warnings_of(path)]
    assert len(found) > 30
    for path, text in found:
        said = re.sub(r"\.\.\.[ :]+(?=\.\.\.)", "", text)
        start = said.partition(". Let ")[0]
        assert start in SAID, f"{short(path)}: docs/runbook.md lacks `{text}`"


def metric_names() -> set[str]:
    """The series that connector/metrics.py has, read without importing vLLM."""
    tree = ast.parse((ROOT / "attnstore_vllm/connector/metrics.py").read_text(encoding="utf-8"))
    series = set()
    for node in tree.body:
        target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
        name = ast.unparse(target) if target is not None else ""
        value = getattr(node, "value", None)
        if name in ("COUNTERS", "GAUGES", "HISTOGRAMS") and isinstance(value, ast.Dict):
            suffix = "_total" if name == "COUNTERS" else ""
            series |= {
                f"{key.value!s}{suffix}" for key in value.keys if isinstance(key, ast.Constant)
            }
    return series


def test_every_metric_is_in_the_runbook() -> None:
    series = metric_names()
    assert len(series) > 20
    for name in series:
        assert re.search(rf"`vllm:attnstore_{name}[`{{]", RUNBOOK), f"docs/runbook.md lacks {name}"
    for event in Event:
        assert f"`{event}`" in RUNBOOK, f"docs/runbook.md lacks the event {event}"
    named = set(re.findall(r"`vllm:attnstore_(\w+)", RUNBOOK))
    assert named <= series, f"no such series: {named - series}"


def test_the_file_that_the_guides_have_written_leaves_a_clone_clean() -> None:
    asking = [path.name for path in PAGES if "> attnstore.yaml" in path.read_text(encoding="utf-8")]
    assert "README.md" in asking
    assert "/attnstore.yaml" in (ROOT / ".gitignore").read_text(encoding="utf-8").splitlines()


OUR_FILE = re.compile(
    r"(?:tests|tools|benchmarks|csrc|attnstore_vllm|attnstore_lab)/[\w/.]+\.(?:py|cpp|cu|h|sh)\b"
)


@pytest.mark.parametrize("page", PAGES, ids=short)
def test_the_files_that_it_names_are_there(page: Path) -> None:
    named = set(OUR_FILE.findall(page.read_text(encoding="utf-8")))
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []
