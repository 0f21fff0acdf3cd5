# SPDX-License-Identifier: Apache-2.0
"""A page of the site links a term where it first uses it, and nowhere in code or in links."""

from __future__ import annotations

from pathlib import Path

from tools import link_terms

TERMS = (Path(__file__).resolve().parents[3] / "docs" / "terms.md").read_text(encoding="utf-8")


def test_terms_are_those_of_their_page() -> None:
    known = link_terms.terms(TERMS)
    assert {"chunk", "namespace", "shared tier", "look-ahead", "write-back"} <= set(known)
    assert known == sorted(known, key=lambda term: (-len(term), term))
    assert all(f"**{term}**" in TERMS for term in (*known, *link_terms.EVERYDAY))


def test_each_term_has_an_anchor() -> None:
    page = link_terms.with_anchors(TERMS)
    for term in link_terms.terms(TERMS):
        assert page.count(f'<a id="{link_terms.anchor(term)}"></a>') == 1


def test_the_first_use_alone_is_linked() -> None:
    page = "# A chunk\n`chunk` [a chunk](x.md)\n```\nchunk\n```\nChunks, a chunk, chunked.\n"
    said = link_terms.linked(page, ["shared tier", "chunk"], "terms.md")
    assert said == page.replace("Chunks,", "[Chunks](terms.md#chunk),")


def test_the_longer_term_is_taken() -> None:
    said = link_terms.linked("A shared tier.", ["shared tier", "tier"], "../terms.md")
    assert said == "A [shared tier](../terms.md#shared-tier)."
