# SPDX-License-Identifier: Apache-2.0
"""A line of a log that a page quotes, or that a benchmark looks for, is one that a source prints.

A span of prose in backticks is taken for such a line, if it is no command, no setting and no name.
`...` and values in it stand for anything; what is left has to be in one text of a source. Lines of
others are in ELSEWHERE with their file, which is read where it is installed.
"""

from __future__ import annotations

import ast
import importlib.util
import re
import sysconfig
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from benchmarks.e2e.serving import FACTS
from benchmarks.families import IDLE

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
SOURCES = [
    *sorted((ROOT / "attnstore_vllm").rglob("*.py")),
    *sorted((ROOT / "attnstore_lab").rglob("*.py")),
    *sorted((ROOT / "csrc").rglob("*.*")),
]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
VALUE = "\0"
ELSEWHERE = {
    "Application startup complete": "uvicorn/lifespan/on.py",
    "Found endpoint plugin(s) ... but VLLM_PLUGINS is not set": "vllm/plugins/__init__.py",
    "AsyncLLM output_handler failed": "vllm/v1/engine/async_llm.py",
    "There appear to be ... leaked ... objects": "multiprocessing/resource_tracker.py",
    "Using ... KV cache layout": "vllm/v1/attention/backends/utils.py",
    "Using V2 Model Runner": "vllm/v1/worker/cpu_worker.py",
    "Using ... attention backend": "vllm/platforms/cuda.py",
    "Using ... backend": "vllm/platforms/cuda.py",
    "... KV cache size: ... tokens": "vllm/v1/core/kv_cache_utils.py",
    # Of the operating system and of a compiled library: no source is here.
    "No space left on device": "",
    "Too many open files": "",
    "nanobind: leaked ...": "",
}
"""Lines that pages quote and other programs print: the file of each, of Python or a package."""
NO_LINES = {
    "2 x layers x KV heads x head size x bytes",
    "s * records_per_segment + i",
    "[rank][layer][block of the chunk][bytes of the page]",
    "tls-auth-clients yes",
    "capabilities: {add: [IPC_LOCK]}",
    "ttft_ms turn 1",
    "a fifth of share",
    "chmod go-w DIR",
    "chown -R USER DIR",
    "chmod go-w FILE",
}
"""Spans that read like a line, and are none."""
COMMANDS = (
    r"(python|make|pip|attnstore|vllm|apt|curl|git|docker|ulimit|mount|numactl|sed|sysctl|pytest"
    r"|source|\. |ACL|POST|GET|libibverbs1|ATTNSTORE_\w+=|VLLM_\w+=|ARGS=|GPU_PYTHON=|-{1,2}\w"
    r"|tests?\.|tests/|tools/|benchmarks\.)"
)
NO_PROSE = (
    re.compile(rf"^{COMMANDS}"),
    re.compile(r"^\.\.\. --"),  # the rest of a command
    re.compile(r"^[\w.]+: \{|^\{|^'\{|^\"\w+\": "),  # settings, JSON
    re.compile(r"^[\w.]+: [\w, ]+$"),  # a setting and its value; or a file and its function
    re.compile(r"^[\w/.]+\.(py|h): "),
    re.compile(r" (==?|<=?|>=?|//) |^BLAKE3\(|^groups: "),  # formulas, formats
)


def texts_of(path: Path) -> Iterator[str]:
    """The texts of a source, VALUE for what is put in."""
    source = path.read_text(encoding="utf-8")
    if path.suffix != ".py":
        # Pieces of C++ that `+` or nothing joins are one text.
        piece = r'"((?:[^"\\]|\\.)*)"'
        for found in re.findall(rf"{piece}(?:[\s\w.:()?+]*{piece})*", source):
            yield VALUE.join(filter(None, found))
        for statement in source.split(";"):
            yield VALUE.join(re.findall(piece, statement))
        return
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield re.sub(r"%[-.\d]*[sdrfgx]|\{[^{}]*\}", VALUE, node.value)
        elif isinstance(node, ast.JoinedStr):
            parts = (p.value if isinstance(p, ast.Constant) else VALUE for p in node.values)
            yield "".join(map(str, parts))
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            yield VALUE.join(n.value for n in ast.walk(node) if is_text(n))  # type: ignore[attr-defined]


def is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


@cache
def ours() -> tuple[str, ...]:
    return tuple(text for path in SOURCES if path.is_file() for text in texts_of(path))


def pattern(line: str) -> re.Pattern[str]:
    """Values, as `64 GiB`, `sm_90.cubin` and `['x']`, are anything; so is `...`.

    What is put into a text is VALUE there, so a line's own words have to be the text's.
    """
    parts = re.split(
        r"\.{3}|\[[^\]]*\]|\(/[\w/]+\)|'\w'|\b[\d.,]+(?: [KMGT]?i?B)?\b|\b\w+\.cubin\b", line
    )
    literal = [re.escape(part.strip()) for part in parts if re.search(r"\w", part)]
    return re.compile(".*".join(literal), re.DOTALL)


def is_printed(line: str, texts: tuple[str, ...]) -> bool:
    """In one text; or, of a text that takes another at its end, the two halves in two."""
    wanted = pattern(line)
    if any(wanted.search(text) for text in texts):
        return True
    head, colon, tail = line.partition(": ")
    halves = [half for half in (head, tail) if len(re.findall(r"[A-Za-z]{2,}", half)) >= 3]
    return bool(colon and halves) and all(
        any(pattern(half).search(text) for text in texts) for half in halves
    )


def elsewhere(line: str) -> str | None:
    """The file of ELSEWHERE that has it; "" if it is of no source; None if it is not there."""
    for known, where in ELSEWHERE.items():
        if pattern(known).search(line) or known == line:
            return where
    return None


def installed(name: str) -> Path:
    package = name.partition("/")[0]
    if package == "multiprocessing":
        return Path(sysconfig.get_paths()["stdlib"]) / name
    found = importlib.util.find_spec(package)
    assert found is not None and found.submodule_search_locations, f"{package} is not installed"
    return Path(found.submodule_search_locations[0]).parent / name


def quoted(page: str) -> list[str]:
    """Lines that a page quotes."""
    spans = re.findall(r"`([^`\n]+)`", FENCE.sub("", page))
    for kind, block in FENCE.findall(page):
        spans += re.findall(
            r"^(?:INFO|WARNING|ERROR|AttnStore) .+$", block if not kind else "", re.M
        )
    return [span for span in spans if is_prose(span)]


def is_prose(span: str) -> bool:
    if span in NO_LINES or any(no.search(span) for no in NO_PROSE):
        return False
    return " " in span and len(re.findall(r"[A-Za-z]{2,}", span)) >= 3


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_lines_that_a_page_quotes_are_printed(path: Path) -> None:
    lines = quoted(path.read_text(encoding="utf-8"))
    missing = [x for x in lines if elsewhere(x) is None and not is_printed(x, ours())]
    assert not missing, f"{path.name} quotes what no source prints: {missing}"


def test_lines_of_others_are_theirs() -> None:
    """As they are installed here: vLLM's change from release to release."""
    for line, where in ELSEWHERE.items():
        if where:
            path = installed(where)
            assert is_printed(line, tuple(texts_of(path))), f"{where} does not print {line!r}"


@pytest.mark.parametrize("fact", [*FACTS, IDLE.pattern])
def test_lines_that_a_benchmark_looks_for_are_printed(fact: str) -> None:
    line = re.sub(
        r"\(?(\\[wSd]|\[\\d,\]|\.)[+*]\??\)?|AttentionBackendEnum\\\.|(CPU|GPU) (?=KV)", "...", fact
    )
    line = re.sub(r"(\.\.\.)+", "...", line)
    if elsewhere(line) is None:
        assert is_printed(line, ours()), f"a benchmark looks for {fact!r}"


def test_it_is_seen_that_a_line_is_gone() -> None:
    gone = (
        "AttnStore keeps ... tokens in DRAM and up to ... on NVMe",
        "... were page-locked for the GPU, and the driver refused more",
    )
    assert quoted("Then `" + "` and `".join(gone) + "` come.") == list(gone)
    assert not any(is_printed(line, ours()) or elsewhere(line) is not None for line in gone)
    assert is_printed("allocated 64 GiB of shared memory: ...", ours())
    assert quoted("`make test`, `truncation: {share: everyone}`, `policy/returns.py: Terms`") == []
