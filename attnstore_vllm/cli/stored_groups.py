# SPDX-License-Identifier: Apache-2.0
"""Which KV cache group each record of a namespace is of, told by its parent's name.

A section's parent is a hash of the spine's parent, the group and the hole (index/keys.py). So it is
found by trying: all groups and holes that the label tells, behind every key that some record names.
Whose chunk of the spine is not stored, neither itself nor one beside it, cannot be told.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from attnstore_vllm.index.keys import section_parent
from attnstore_vllm.transfer.geometry import Group
from attnstore_vllm.types import Key

UNKNOWN = "unknown"
TRIES_MAX = 1 << 15
"""Groups and holes that are tried behind a key, at most. A label that tells of more is none that a
server has written: no group is told then."""


class StoredName(NamedTuple):
    """As much of a record's name as is looked at here."""

    key: Key
    parent: Key
    num_tokens: int
    stop: int


@dataclass(slots=True)
class GroupFigures:
    """The records of one group."""

    kind: str
    """How far the group looks back; UNKNOWN: of those whose group cannot be told."""
    reach_tokens: int = 0
    block_tokens: int = 0
    records: int = 0
    tokens: int = 0
    with_holes: int = 0
    """Sections that lack leading blocks."""


def by_group(
    records: Sequence[StoredName], groups: Sequence[Group], chunk_tokens: int
) -> tuple[list[GroupFigures], list[StoredName]]:
    """The figures of each group, spine first, then of those that cannot be told if there are any;
    and the records of the spine.

    Cost: a hash for each key, group and hole: about 1 us.
    """
    parents = {record.parent for record in records}
    sections = _parents({record.key for record in records} | parents, groups, chunk_tokens)
    # Keys of the spine: what a section stands behind, and what another record continues.
    inner = {base for base, _, _ in sections.values()}
    inner |= parents & {record.key for record in records}
    inner |= {record.parent for record in records if record.key in inner}  # with it, the roots
    found = [GroupFigures(g.reach, g.reach_tokens, g.block_tokens) for g in groups]
    unknown, spine = GroupFigures(UNKNOWN), []
    for record in records:
        _, group, hole = sections.get(record.parent, (b"", 0, 0))
        is_of_spine = group == 0 and (record.parent in inner or record.key in inner)
        figures = found[group] if group or is_of_spine else unknown
        figures.records += 1
        figures.tokens += record.num_tokens
        figures.with_holes += hole > 0
        if is_of_spine:
            spine.append(record)
    return [*found, unknown] if unknown.records else found, spine


def _parents(
    keys: Iterable[Key], groups: Sequence[Group], chunk_tokens: int
) -> dict[Key, tuple[Key, int, int]]:
    """By the parent that a section would have: the spine's, the group and the hole. Only those
    that are one of `keys`."""
    known, found = set(keys), {}
    holes = [
        chunk_tokens // group.block_tokens if group.reach in ("window", "local") else 1
        for group in groups
    ]
    if sum(holes) > TRIES_MAX:
        return {}
    for key in known:
        for place in range(1, len(groups)):
            for hole in range(holes[place]):
                parent = section_parent(key, place, hole)
                if parent in known:
                    found[parent] = (key, place, hole)
    return found
