# SPDX-License-Identifier: Apache-2.0
"""docs/structure.md is one screen, and true; docs/changing.md names functions that there are."""

from __future__ import annotations

import re
from pathlib import Path

from attnstore_vllm.config.shared import KINDS
from tests.test_tidy import KNOWS, LAB, LOW, OURS

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "attnstore_vllm"
TEXT = (ROOT / "docs" / "structure.md").read_text(encoding="utf-8")
STORY = (ROOT / "docs" / "changing.md").read_text(encoding="utf-8")
SCREEN_LINES = 60


def test_it_is_one_screen() -> None:
    assert len(TEXT.splitlines()) <= SCREEN_LINES


def test_it_has_every_room_and_what_it_may_touch() -> None:
    rows = re.findall(r"^\| `([\w/]+)/` \| (.+) \| (.+) \|$", TEXT, re.MULTILINE)
    told = {room: set() if may == "-" else set(may.split(", ")) for room, _, may in rows}
    assert told == {room: may - LOW for room, may in KNOWS.items()}


def test_it_has_all_that_is_beside_the_rooms() -> None:
    files = {path.name for path in PACKAGE.glob("*.py")} - {"__init__.py"}
    low = {f"{name}.py" for name in LOW}
    assert not {name for name in files - low if f"`{name}`" not in TEXT}
    folders = [f for of in (LAB, ROOT / "csrc") for f in of.iterdir() if f.is_dir()]
    names = {folder.name for folder in folders} - {"__pycache__"}
    assert not {name for name in names if f"{name}/`" not in TEXT}


def test_the_files_in_its_picture_are_there() -> None:
    picture = TEXT.split("```")[1]
    named = re.findall(r"[\w/]+\.py|\b(?:tiers|csrc)/\w+", picture)
    there = {path.relative_to(PACKAGE).as_posix() for path in OURS}
    names = {path.name for path in OURS}
    for name in named:
        is_folder = (PACKAGE / name).is_dir() or (ROOT / name).is_dir()
        assert name in there or name in names or is_folder, name


def test_the_files_and_functions_of_its_story_are_there() -> None:
    source = {path.name: path.read_text(encoding="utf-8") for path in [*OURS, *LAB.rglob("*.py")]}
    named = re.findall(r"`((?:\w+/)*\w+\.(?:py|h))(?:: ([\w., ()]+))?`", STORY)
    assert len(named) > 25
    for path, members in named:
        if path.startswith(("tests/", "tools/", "attnstore_lab/")):
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


def test_other_files_that_it_names_are_there() -> None:
    named = re.findall(r"`((?:[\w.]+/)+[\w.-]+\.(?:txt|toml|md|json|yml))`", STORY)
    assert len(named) > 5
    for path in named:
        assert (ROOT / path).exists(), path


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
    who = users(r'\bPEERS\b|"peers"', "tiers/peers/", "tiers/shared/", "config/")
    assert len(who) > 4
    assert not {name for name in who if f"`{name}" not in named}


def test_who_adds_a_kind_of_group_is_told_of_all_who_tell_kinds_apart() -> None:
    named = row("a KV cache group")
    who = users(r"Reach\.[A-Z]+\b|[a-z]\.reach (==|!=|in) ")
    assert len(who) > 8
    assert not {name for name in who if f"`{name}" not in named}


def test_kinds_of_shared_stores_are_known_in_one_file() -> None:
    """Another one is a class of Backend and an entry there."""
    assert users(rf"[\"']({'|'.join(KINDS)})[\"']") == {"config/shared.py"}
    named = row("another shared store")
    assert (
        "`config/shared.py: SharedKind`" in named and "`tiers/shared/backend.py: Backend`" in named
    )
