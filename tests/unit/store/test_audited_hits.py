# SPDX-License-Identifier: Apache-2.0
"""Which hits an audit remembers: one that differed is not driven out by those that agree."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from attnstore_vllm.store.audited_hits import HITS_MAX, AuditedHits


def chunk(position: int) -> Any:
    return SimpleNamespace(name=SimpleNamespace(position=position), dropped=False)


def test_hits_that_agree_do_not_hide_one_that_differed() -> None:
    hits = AuditedHits()
    behind = chunk(8192)
    hits.note(1, chunk(0), differs=True)
    for other in range(10 * HITS_MAX):
        hits.note(100 + other, chunk(0), differs=False)
    assert hits.doubted(1, behind, differs=False) == [behind]
    first = chunk(0)
    assert hits.doubted(100, first, differs=True) == [first], "the memory has an end"


def test_hits_that_differed_do_not_hide_what_agrees() -> None:
    """Chunks of a hit may be compared in any order."""
    hits = AuditedHits()
    behind = chunk(8192)
    hits.note(1, behind, differs=False)
    for other in range(10 * HITS_MAX):
        hits.note(100 + other, chunk(0), differs=True)
    first = chunk(0)
    assert hits.doubted(1, first, differs=True) == [behind, first]


def test_the_hit_that_was_compared_last_stays_longest() -> None:
    hits = AuditedHits()
    hits.note(0, chunk(0), differs=True)
    for other in range(1, 3 * HITS_MAX):
        hits.note(other, chunk(0), differs=True)
        hits.note(0, chunk(64), differs=True)
    behind = chunk(32)
    assert hits.doubted(0, behind, differs=False) == [behind]
    assert hits.doubted(1, behind, differs=False) == [], "the memory has an end"
