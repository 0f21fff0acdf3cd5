# SPDX-License-Identifier: Apache-2.0
"""Wraps what is too long in pages: each paragraph and item with a line over LINE_MAX.

    python3 tools/wrap_pages.py [PAGE ...]      (all of docs/ where none is named)

Tables, code and headings stay as they are; so does a paragraph whose lines are all short enough.
tests/test_readme.py asks `long_lines` of each page. Standard library only.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LINE_MAX, WRAPPED_AT = 160, 120
_HEAD = re.compile(r" *(?:- |\d+\. )?")
_ALONE = re.compile(r"#|\||!\[|\[\w+\]: |$")
"""Lines that are no part of a paragraph: headings, rows, pictures, definitions of links, none."""
_WORD = re.compile(r"(?:`[^`]*`|[^\s`])+")
"""A code span is one word: it may hold a command, which is looked for within a line."""
_NO_START = re.compile(r"[-+*|>#=]|\d+[.)]$|```")
"""A line that began with such a word would be an item, a heading, a row or a quotation."""


def blocks(text: str) -> Iterator[tuple[list[str], bool]]:
    """(lines, whether they are prose, which may be wrapped)."""
    block: list[str] = []
    fenced = False
    for line in text.split("\n"):
        bare = line.strip()
        is_fence = bare.startswith("```")
        is_alone = fenced or is_fence or _ALONE.match(bare) is not None
        fenced ^= is_fence
        if block and (is_alone or re.match(r"- |\d+\. ", bare)):
            yield block, True
            block = []
        if is_alone:
            yield [line], False
        else:
            block.append(line)
    if block:
        yield block, True


def filled(block: list[str]) -> Iterator[str]:
    """Its words in lines of at most WRAPPED_AT, where the words allow that."""
    found = _HEAD.match(block[0])
    assert found is not None, "the pattern matches no character too"
    head, indent = found[0], " " * len(found[0])
    words = _WORD.findall(" ".join([block[0].removeprefix(head), *block[1:]]))
    line = head + words[0]
    for word in words[1:]:
        if len(line) + 1 + len(word) > WRAPPED_AT and not _NO_START.match(word):
            yield line
            line = indent + word
        else:
            line += f" {word}"
    yield line


def wrapped(text: str) -> str:
    lines: list[str] = []
    for block, is_prose in blocks(text):
        is_long = any(len(line) > LINE_MAX for line in block)
        lines += filled(block) if is_prose and is_long else block
    return "\n".join(lines)


def long_lines(text: str) -> list[str]:
    """Lines of prose that are longer than LINE_MAX and could be broken."""
    lines = [line for block, is_prose in blocks(text) if is_prose for line in block]
    return [line for line in lines if len(line) > LINE_MAX and len(_WORD.findall(line)) > 1]


def main(names: list[str]) -> int:
    for page in [Path(name) for name in names] or sorted((ROOT / "docs").rglob("*.md")):
        page.write_text(wrapped(page.read_text(encoding="utf-8")), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
