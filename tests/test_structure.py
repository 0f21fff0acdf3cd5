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
