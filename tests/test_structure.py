# SPDX-License-Identifier: Apache-2.0
"""docs/structure.md names every file, no other, and functions that there are."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "attnstore_vllm"
TEXT = (ROOT / "docs" / "structure.md").read_text(encoding="utf-8")
FILES = TEXT.partition("\n## Files\n")[2]
STORY = TEXT.partition("\n## Files\n")[0]


def listed() -> set[str]:
    found, folder = set(), ""
    for line in FILES.splitlines():
        if line.startswith("### "):
            folder = line.removeprefix("### ").strip()
        elif match := re.match(r"\| `([\w./]+)` \| (.+) \|$", line):
            assert match[2].strip(), f"{line}: say what it is"
            found.add(f"{folder}/{match[1]}")
    return found


def test_it_lists_the_files_that_there_are() -> None:
    there = {
        path.relative_to(ROOT).as_posix()
        for path in PACKAGE.rglob("*.py")
        if path.name != "__init__.py"
    }
    there |= {f"csrc/{folder.name}/" for folder in (ROOT / "csrc").iterdir() if folder.is_dir()}
    assert listed() == there


def test_the_files_and_functions_of_its_story_are_there() -> None:
    source = {path.name: path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py")}
    named = re.findall(r"`((?:\w+/)*\w+\.(?:py|h))(?:: ([\w., ()]+))?`", STORY)
    assert len(named) > 25
    for path, members in named:
        if path.startswith(("tests/", "tools/")):
            assert (ROOT / path).exists(), path
            continue
        assert Path(path).name in source, path
        assert "/" not in path or (PACKAGE / path).exists(), path
        for member in filter(None, re.split(r"[ ,]+", members)):
            name = member.rpartition(".")[2].removesuffix("()")
            assert re.search(rf"(def|class) {name}\b", source[Path(path).name]), (path, member)
    for member in re.findall(r"`((?:[A-Z]\w+\.)+\w+)`", STORY):
        owner, _, name = member.rpartition(".")
        owners = [text for text in source.values() if re.search(rf"class {owner}\b", text)]
        there = rf"def {name}\b|self\.{name}\b"
        assert any(re.search(there, text) for text in owners), member


def row(what: str) -> str:
    (found,) = (line for line in STORY.splitlines() if line.startswith(f"| {what} |"))
    return found


def users(pattern: str, *left_out: str) -> set[str]:
    """Files of the package whose code has the pattern, without those below `left_out`."""
    found = set()
    for path in PACKAGE.rglob("*.py"):
        name = path.relative_to(PACKAGE).as_posix()
        code = re.sub(r'(?s)""".*?"""|(?-s:#.*)', "", path.read_text(encoding="utf-8"))
        if not name.startswith(left_out) and re.search(pattern, code):
            found.add(name)
    return found


def test_who_adds_a_tier_is_told_of_all_who_list_tiers() -> None:
    named = row("a tier")
    who = users(r'\bPEERS\b|"peers"', "peers/", "shared/", "config/settings.py", "config/texts.py")
    assert len(who) > 4
    assert not {name for name in who if f"`{name}" not in named}


def test_who_adds_a_kind_of_group_is_told_of_all_who_tell_kinds_apart() -> None:
    named = row("a KV cache group")
    who = users(r"Reach\.[A-Z]+\b|[a-z]\.reach (==|!=|in) ")
    assert len(who) > 8
    assert not {name for name in who if f"`{name}" not in named}
