# SPDX-License-Identifier: Apache-2.0
"""How one chunk lies in a slot of the pool.

    slot = [rank][region of its stage][block of the chunk][page bytes of the region], then zero
    bytes to a whole page

The ranks of a pipeline stage have its layers alone, and ranks count stage by stage. So a slot, and
a record of it, has the parts of all stages: it is there as a whole, or it is no hit. Parts have one
size, that of the stage with most; behind a smaller one are zero bytes.

Where slots keep pages encoded (`is_encoded`), each has a *cell* of fixed size in place of its
bytes: so where it is does not depend on what it holds. A page that does not fit is not stored.

vLLM's KV cache groups draw *physical blocks* of one size from one pool, and lie over each other: a
physical block is one page in each *region*, and layer i of every group is in region i. So copies
know regions and block ids, and no groups. A *page* is what vLLM calls so: the bytes of one block in
one layer on one rank, as vLLM wrote them. Where groups have pages of several sizes, vLLM packs
those of a block side by side: then the whole block is the one region, of all layers.

A group says how many tokens a block of it has. The *spine* is the group that has all tokens: its
chunks are named by them. Where none has, it is the group with the longest window: that has a
chunk's tokens at least, so what is kept of a chunk is whole. What other groups keep of a chunk are
*sections* (index/sections.py), each in a slot of its own, so that a slot is the same for any group
it is: the blocks of the group with most blocks a chunk. A group whose window is short and whose
blocks are small would need many of which a hit reads few: then only the last ones of a section are
kept (`room`), and block i of a chunk lies in place i modulo the slot's places.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

SLOT_ALIGNMENT_BYTES = 4096
ENCODING = "lossless/1"
"""The encoding of pages in cells, with its version: csrc/codec/page_codec.h."""
_CELL_PERCENT = 74
"""A cell has so much of a page. Numbers around zero take 71; each hundredth without a code, 0.5."""
_CELL_ALIGNMENT_BYTES = 64


@dataclass(frozen=True, slots=True)
class Group:
    """Layers that share one block table."""

    block_tokens: int
    layers: tuple[str, ...] = ()
    """Their names, in the order of the regions."""
    number: int = 0
    """Among vLLM's groups."""
    reach: str = "full"
    """How far back it looks (index/sections.py: Reach)."""
    reach_tokens: int = 0
    facts: str = ""
    """All that vLLM says of the group: it is in the namespace where there are several."""


@dataclass(frozen=True, slots=True)
class Geometry:
    """Shapes that the scheduler side and every worker agree on."""

    num_ranks: int
    """Those of all pipeline stages."""
    regions: tuple[int, ...]
    """The bytes of a page in each region: of this rank's pipeline stage, on the scheduler side of
    the first."""
    groups: tuple[Group, ...]
    """The spine first. Each with the layers of that stage."""
    chunk_tokens: int
    replicas: int = 1
    """Consecutive ranks that hold the same KV."""
    stages: tuple[tuple[int, ...], ...] = ()
    """The regions of each pipeline stage; () where there is one stage."""
    is_packed: bool = False
    """Pages of a block lie side by side: the one region is the block, of all layers."""
    hit_tokens: int = 0
    """Hits end at multiples of so many tokens and nowhere else, as in vLLM's own cache: part of
    what a layer keeps is not stored, or one state is of several tokens. 0: as prefix.py says."""
    prompts_only: bool = False
    """vLLM takes blocks of generated tokens from the spine while a request runs."""
    is_encoded: bool = False
    """Slots keep pages encoded."""

    spine: Group = field(init=False)
    has_window_alone: bool = field(init=False)
    """Whether no group has all tokens."""
    num_layers: int = field(init=False)
    """Regions: a layer of each group lies in each."""
    block_tokens: int = field(init=False)
    """Tokens a block of the spine."""
    blocks_per_chunk: int = field(init=False)
    """That a slot has room for."""
    block_bytes: int = field(init=False)
    """Size of a physical block: its pages in all regions, on one rank."""
    cells: tuple[int, ...] = field(init=False)
    """The bytes that a page of each region has in a slot."""
    rank_bytes: int = field(init=False)
    """Size of one rank's part of a slot, the same for all."""
    slot_bytes: int = field(init=False)
    most_layers: int = field(init=False)
    """Regions of the stage that has most."""

    def __post_init__(self) -> None:
        assert self.regions
        spine = self.groups[0]
        tokens = spine.block_tokens
        stages = self.stages or (self.regions,)
        assert self.regions in stages
        assert min(self.num_ranks, self.replicas, tokens, *map(min, stages)) > 0
        assert self.num_ranks % self.replicas == 0
        assert all(self.chunk_tokens % group.block_tokens == 0 for group in self.groups)
        assert not self.is_packed or len(self.regions) == 1
        assert not self.hit_tokens or self.chunk_tokens % self.hit_tokens == 0
        assert spine.reach == "full" or (
            spine.reach == "window" and spine.reach_tokens >= self.chunk_tokens
        ), "the spine's chunks are whole"
        blocks = _places(self.groups, self.chunk_tokens)
        block_bytes = sum(self.regions)
        cells = [tuple(map(self._cell, stage)) for stage in (self.regions, *stages)]
        rank_bytes = blocks * max(map(sum, cells))
        if self.is_encoded:  # parts of ranks may lie apart (transfer/pool_files.py)
            rank_bytes = _rounded(rank_bytes, SLOT_ALIGNMENT_BYTES)
        used = self.num_ranks // self.replicas * rank_bytes
        for name, value in (
            ("spine", spine),
            ("has_window_alone", spine.reach != "full"),
            ("num_layers", len(self.regions)),
            ("block_tokens", tokens),
            ("blocks_per_chunk", blocks),
            ("block_bytes", block_bytes),
            ("cells", cells[0]),
            ("rank_bytes", rank_bytes),
            ("slot_bytes", _rounded(used, SLOT_ALIGNMENT_BYTES)),
            ("most_layers", max(map(len, stages))),
        ):
            object.__setattr__(self, name, value)

    @classmethod
    def uniform(
        cls, num_ranks: int, num_layers: int, block_tokens: int, page_bytes: int, chunk_tokens: int
    ) -> Geometry:
        """One group whose layers have pages of one size. Their names are made up."""
        groups = (Group(block_tokens, tuple(f"l{i}" for i in range(num_layers))),)
        return cls(num_ranks, num_layers * (page_bytes,), groups, chunk_tokens)

    def layers_of(self, group: int) -> range:
        """The regions that have a layer of this group: the first ones."""
        return range(len(self.groups[group].layers))

    def room(self, group: int) -> int:
        """How many blocks of a chunk a section of this group has, at most; 0: all that there
        are."""
        blocks = self.chunk_tokens // self.groups[group].block_tokens
        return self.blocks_per_chunk if blocks > self.blocks_per_chunk else 0

    @property
    def order(self) -> list[int] | None:
        """Numbers that vLLM gives our groups, in our order; None if that is its own."""
        numbers = [group.number for group in self.groups]
        is_own = numbers == sorted(numbers) and numbers[-1] < len(numbers)
        return None if is_own else numbers

    @property
    def layer_names(self) -> dict[str, int]:
        """The region of each layer, of all groups."""
        if self.is_packed:
            return {name: 0 for group in self.groups for name in group.layers}
        return {name: i for group in self.groups for i, name in enumerate(group.layers)}

    @property
    def page_bytes(self) -> int:
        """Bytes of every region's pages, where all are equal."""
        assert len(set(self.regions)) == 1, "pages have several sizes"
        return self.regions[0]

    @property
    def decoded(self) -> Geometry:
        """The shapes of one rank's part alone, of pages that are not encoded."""
        return replace(self.of_a_part(), is_encoded=False)

    def of_a_part(self) -> Geometry:
        """The shapes to a rank whose part of the slots lies apart: it is the only one there."""
        return replace(self, num_ranks=1, replicas=1)

    def of_a_node(self, num_ranks: int) -> Geometry:
        """The shapes on a node that has so many of the ranks: slots have their parts alone."""
        return self if num_ranks == self.num_ranks else replace(self, num_ranks=num_ranks)

    def part_at(self, rank: int) -> int:
        """Where a rank's part begins in a slot."""
        return rank // self.replicas * self.rank_bytes

    def saves(self, rank: int) -> bool:
        """Whether this rank writes its part: one of the replicas does."""
        return rank % self.replicas == 0

    def region_at(self, region: int) -> int:
        """Where a region begins in a rank's part."""
        return self.blocks_per_chunk * sum(self.cells[:region])

    def _cell(self, page_bytes: int) -> int:
        if not self.is_encoded:
            return page_bytes
        return _rounded(-(-page_bytes * _CELL_PERCENT // 100), _CELL_ALIGNMENT_BYTES)

    @property
    def all_block_bytes(self) -> int:
        """Size of a physical block on all ranks. What several of them hold counts once."""
        stages = self.stages or (self.regions,)
        of_a_stage = self.num_ranks // len(stages) // self.replicas
        return of_a_stage * sum(map(sum, stages))

    def token_bytes(self) -> float:
        """KV bytes of one token, all layers and ranks, as it is stored: with the zero bytes behind
        parts of smaller stages."""
        return self.num_ranks // self.replicas * self.rank_bytes / self.chunk_tokens

    def facts(self) -> dict[str, Any]:
        """The part that decides bytes, for the namespace: with one group and equal pages as it
        always was, so that stores of before are found."""
        is_uniform = len(set(self.regions)) == 1
        found: dict[str, Any] = {
            "num_ranks": self.num_ranks,
            "num_layers": self.num_layers,
            "block_tokens": self.block_tokens,
            "page_bytes": self.regions[0] if is_uniform else list(self.regions),
            "chunk_tokens": self.chunk_tokens,
        }
        if self.replicas > 1:
            found["replicas"] = self.replicas
        if self.stages:
            found["stages"] = [list(stage) for stage in self.stages]
        if len(self.groups) > 1 or self.has_window_alone or self.is_packed or self.hit_tokens:
            found["groups"] = [asdict(group) for group in self.groups]
        if any(self.room(group) for group in range(len(self.groups))):
            found["places"] = self.blocks_per_chunk
        if self.is_encoded:
            found["encoding"] = [ENCODING, *self.cells]
        return found


def _places(groups: Sequence[Group], chunk_tokens: int) -> int:
    """How many blocks a slot has room for: those of the group with the smallest blocks, or a third
    of them and less where the other groups, and the windows, do with that."""
    blocks = [chunk_tokens // group.block_tokens for group in groups]
    needed = blocks[:1]
    for group, most in zip(groups[1:], blocks[1:], strict=True):
        if group.reach == "window":  # an end may be anywhere in a block
            needed.append(min(most, math.ceil((group.reach_tokens - 1) / group.block_tokens) + 1))
        elif group.reach == "state":
            needed.append(1)
        else:
            needed.append(most)
    return max(needed) if 3 * max(needed) <= max(blocks) else max(blocks)


def groups_text(groups: Sequence[Group]) -> str:
    """The groups for people, spine first, as in "groups: full/16 window:1024/16 state/1056"."""
    if len(groups) == 1:
        return ""
    reaches = (g.reach + (f":{g.reach_tokens}" if g.reach_tokens else "") for g in groups)
    told = (f"{reach}/{g.block_tokens}" for reach, g in zip(reaches, groups, strict=True))
    return "groups: " + " ".join(told)


def groups_in(text: str) -> tuple[Group, ...]:
    """The groups that a text ends with, as groups_text() says them; () if it tells of none."""
    found = re.search(r"groups: ((?:[a-z]+(?::\d+)?/\d+ ?)+)$", text)
    groups = []
    for number, told in enumerate(found[1].split() if found else ()):
        reach, _, block_tokens = told.partition("/")
        kind, _, reach_tokens = reach.partition(":")
        if not int(block_tokens):
            return ()
        groups.append(Group(int(block_tokens), (), number, kind, int(reach_tokens or 0)))
    return tuple(groups)


def round_chunk_tokens(wanted: int, block_tokens: int) -> int:
    """`wanted` rounded up to whole blocks."""
    return _rounded(wanted, block_tokens)


def _rounded(number: int, multiple: int) -> int:
    """Rounded up."""
    return -(-number // multiple) * multiple
