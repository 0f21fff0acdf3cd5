# SPDX-License-Identifier: Apache-2.0
"""Links a term of docs/terms.md where a page of the site first uses it (tools/docs_site.py).

The sources stay as they are: so a new page has its links, and a sentence that moves keeps them.
Standard library only.
"""

from __future__ import annotations

import re

EVERYDAY = {
    "block", "group", "section", "piece", "key", "neighbours", "peers", "clean", "dirty",
    "held", "pinned", "hit", "miss", "save", "load", "drop", "expiry", "reset", "request",
    "session", "turn", "offer", "run", "visit", "lane", "priority", "lease", "tick", "step",
    "event", "cause", "tier", "eviction", "low value", "Time to live", "hold", "door",
}  # fmt: skip
"""Terms that a reader knows, or whose words a page also uses with another meaning."""
_ROW = re.compile(r"^\| (\*\*.*?) \|", re.MULTILINE)
_BOLD = re.compile(r"\*\*(.+?)\*\*")
_NO_PROSE = (
    r"^```.*?^```|`[^`]*`|!?\[[^\]]*\](?:\([^)]*\)|\[\w+\])|^#.*?$|^\[\w+\]: .*?$|<[^>]*>|\S+://\S+"
)
"""Code, links, headings, addresses and HTML: no link is put into them."""


def terms(page: str) -> list[str]:
    """What terms.md explains and a reader may not know, the longest first."""
    found = {term for row in _ROW.findall(page) for term in _BOLD.findall(row)}
    return sorted(found - EVERYDAY, key=lambda term: (-len(term), term))


def anchor(term: str) -> str:
    return term.lower().replace(" ", "-")


def with_anchors(page: str) -> str:
    """terms.md with an anchor at each term."""
    known = set(terms(page))

    def row(found: re.Match[str]) -> str:
        marks = [f'<a id="{anchor(t)}"></a>' for t in _BOLD.findall(found[1]) if t in known]
        return f"| {''.join(marks)}{found[1]} |"

    return _ROW.sub(row, page)


def linked(page: str, known: list[str], to: str) -> str:
    """The page with a link at each term's first use.

    Args:
        to: terms.md, as the page reaches it.
    """
    words = "|".join(map(re.escape, known))
    pattern = re.compile(
        rf"(?P<other>{_NO_PROSE})|(?<![\w-])(?P<term>{words})(?P<end>s?)(?![\w-])",
        re.MULTILINE | re.DOTALL | re.IGNORECASE,
    )
    left = {term.lower() for term in known}

    def link(found: re.Match[str]) -> str:
        term = found["term"]
        if term is None or term.lower() not in left:
            return found[0]
        left.remove(term.lower())
        return f"[{found[0]}]({to}#{anchor(term)})"

    return pattern.sub(link, page)
