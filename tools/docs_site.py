# SPDX-License-Identifier: Apache-2.0
"""The docs site: builds it from docs/ (--strict), or serves it on 127.0.0.1:8001.

    python3 tools/docs_site.py [--serve]        (or: make docs, make docs-serve)

MkDocs gets an environment of its own, .cache/docs. Without a network it is skipped with a message
the first time (exit 0), so that a build machine without one can go on.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from html import unescape
from itertools import count
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tools import link_terms  # noqa: E402
from tools.own_env import programs  # noqa: E402

SOURCE, SITE = ROOT / ".cache" / "docs-source", ROOT / ".cache" / "site"
PINS = ("mkdocs==1.6.1", "mkdocs-material==9.8.2")
ADDRESS = "127.0.0.1:8001"


def stage() -> None:
    """Copy docs/ and the pictures of results/ to where mkdocs.yml finds them, terms linked."""
    shutil.rmtree(SOURCE, ignore_errors=True)
    shutil.copytree(ROOT / "docs", SOURCE)
    for picture in (ROOT / "results").rglob("*.svg"):
        to = SOURCE / "results" / picture.relative_to(ROOT / "results")
        to.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(picture, to)
    terms = SOURCE / "terms.md"
    known = link_terms.terms(terms.read_text(encoding="utf-8"))
    for page in SOURCE.rglob("*.md"):
        text = page.read_text(encoding="utf-8")
        if page == terms:
            text = link_terms.with_anchors(text)
        else:
            text = link_terms.linked(text, known, os.path.relpath(terms, page.parent))
        text = "\n".join(spaced(text.split("\n")))
        page.write_text(text.replace("](../results/", "](results/"), encoding="utf-8")


_STARTS = re.compile(r"(\||- |\d+\. )")
_CELL = re.compile(r"<t[dh]\b.*?</t[dh]>", re.DOTALL)
_CODE = re.compile(r"<code>(.*?)</code>", re.DOTALL)
_ROW = re.compile(r"<tr>\s*<td>\s*<code>.*?</tr>", re.DOTALL)
_LABELS = re.compile(r"\{[^{}]*\}(?=</code>)")
_ANCHOR = re.compile(r'\bid="([^"]+)"')
_JOINT = re.compile(r"(?<=[_.:/,{(=])(?=\w)|(?<=[a-z])(?=[A-Z][a-z])")


ANCHOR_LETTERS = 60
BOOSTS = {"runbook.md": 4, "configuration.md": 6, "operations.md": 2, "compared.md": 2}
"""Pages that explain each name: a search for one finds them before those that only use it."""
NAMES = ("runbook.md", "hints.md", "gpu.md", "getting-started-cpu.md")
"""Pages whose tables begin rows with what a reader looks for: metrics, causes, lines of the log."""
LINES = 0.01
"""Lines of the log have many common words: their rows are found behind names, before text."""
INTERNALS = 0.25
"""What readers of the code read, as mkdocs.yml has it: found behind what users read."""


def on_page_markdown(_: str, page: Any, **__: object) -> None:
    """MkDocs calls it."""
    is_internal = any(section.title == "Internals" for section in page.ancestors)
    boost = INTERNALS if is_internal else BOOSTS.get(page.file.src_uri, 1)
    page.meta["search"] = {"boost": boost}


def on_page_content(html: str, page: Any = None, **_: object) -> str:
    """Let names in tables break at their joints, where a column is narrow, and rows of NAMES be
    found. MkDocs calls it."""

    def code(found: re.Match[str]) -> str:
        return f"<code>{_JOINT.sub('<wbr>', found[1])}</code>"

    if page is not None and page.file.src_uri in NAMES:
        html, page.meta["rows"] = rows(html, page.url)
    return _CELL.sub(lambda cell: _CODE.sub(code, cell[0]), html)


def on_post_page(_: str, page: Any, config: Any) -> None:
    """Add those rows to the search, behind the page, which they are parts of. MkDocs calls it."""
    index = config.plugins["material/search"].search_index
    boost = page.meta["search"]["boost"]
    for row in page.meta.get("rows", ()):
        is_line = " " in row["title"].replace(", ", ",")
        index.entries.append(row | {"boost": boost * LINES if is_line else boost})


def rows(html: str, url: str) -> tuple[str, list[dict[str, str]]]:
    """Give each row of a table that begins with a name an anchor, and the search an entry of it.

    The search knows sections alone, by their headings: of a row's name it found any long section
    that has one of its words.
    """
    entries, taken = [], set(_ANCHOR.findall(html))

    def row(found: re.Match[str]) -> str:
        name = unescape(re.sub(r"<[^>]+>", "", _CODE.search(found[0])[1]))  # type: ignore[index]
        anchor = re.sub(r"\W+", "-", name).strip("-").lower()[:ANCHOR_LETTERS]
        anchor = next(
            a for n in count(1) if (a := anchor if n == 1 else f"{anchor}-{n}") not in taken
        )
        taken.add(anchor)
        cells = [
            re.sub(r"</?(?:a|strong|em|td)\b[^>]*>", "", cell) for cell in _CELL.findall(found[0])
        ]
        text = "".join(f"<p>{cell.strip()}</p>" for cell in cells[1:] if cell.strip())
        entries.append(
            {
                "location": f"{url}#{anchor}",
                "title": _LABELS.sub("", cells[0]).strip(),
                "text": text,
            }
        )
        return found[0].replace("<tr>", f'<tr id="{anchor}">', 1)

    return _ROW.sub(row, html), entries


def spaced(lines: list[str]) -> Iterator[str]:
    """Give lists and tables the empty line before them that MkDocs wants, and GitHub does not."""
    before, fenced = "", False
    for line in lines:
        fenced ^= line.lstrip().startswith("```")
        starts = _STARTS.match(line)
        is_inside = not before or before.startswith((" ", "#")) or _STARTS.match(before)
        if starts and not fenced and not is_inside:
            yield ""
        yield line
        before = line


def main() -> int:
    bin_folder = programs("docs", PINS)
    if bin_folder is None:
        print("docs: MkDocs cannot be installed (no network?); the site is not built")
        return 0
    stage()
    command = [str(bin_folder / "mkdocs")]
    is_served = sys.argv[1:] == ["--serve"]
    command += ["serve", "-a", ADDRESS] if is_served else ["build", "--strict", "-q"]
    try:
        quiet = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
        code = subprocess.run(command, check=False, cwd=ROOT, env=quiet).returncode
    except KeyboardInterrupt:
        return 130
    if code == 0 and not is_served:
        print(f"docs: the site is {SITE / 'index.html'}; a browser opens it as a file")
        print(f"docs: `make docs-serve` serves it at http://{ADDRESS}")
    return code


if __name__ == "__main__":
    sys.exit(main())
