# SPDX-License-Identifier: Apache-2.0
"""KV whose pages have several sizes and lie side by side in a block: DeepSeek V4's and V4.1's.

Follows vLLM 0.32: its layers' specs (models/deepseek_v4, models/deepseek_v41) and
_get_packed_kv_cache_groups (v1/core/kv_cache_utils.py). One rank; without layers of drafts.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from attnstore_vllm.index.prefix import GRAIN_TOKENS
from attnstore_vllm.index.sections import Reach
from attnstore_vllm.transfer.geometry import Geometry, Group, round_chunk_tokens

BLOCK_TOKENS = 256
"""Tokens of a block of latents, as the kernels want."""
LATENT = 512
"""Numbers of a latent, whose bytes are known: 64 of them are rotated."""
COMPRESSORS = {4: (4, 8, 2), 128: (8, 128, 1)}
"""V4's, by the tokens of a latent: block, window, and how often a number is there."""
_FLOAT_BYTES = 4
"""Compressors keep float32."""


class _Packed(NamedTuple):
    """Bytes of a token in a window, of a latent, and what pages are rounded up to."""

    window: int
    latent: int
    alignment: int


_V4 = _Packed(584, 584, 576)
_V41_NVFP4 = _Packed(528, 288, 512)
"""nvfp4_ds_mla."""


class Page(NamedTuple):
    """A layer's part of a block of its group."""

    reach: Reach
    reach_tokens: int
    block_tokens: int
    num_bytes: int
    is_scratch: bool = False
    """vLLM's own hits need nothing of it, so it is not stored."""
    is_ring: bool = False


class _Bucket(NamedTuple):
    """Layers that may share a group: how many there are with pages of each size."""

    sizes: Counter[int]

    @property
    def most(self) -> int:
        return max(self.sizes.values())

    @property
    def is_balanced(self) -> bool:
        return len(set(self.sizes.values())) == 1

    def group(self, number: int, of: int) -> Counter[int]:
        """The layers of one of so many groups."""
        if of == 1:
            return self.sizes
        return Counter({size: len(range(number, n, of)) for size, n in self.sizes.items()})


def deepseek_v4(ratios: Sequence[int], window: int, index_head: int) -> Iterator[Page]:
    """A window in each layer. In most there are latents too, with what their compressor has not
    written yet; and of those of 4 tokens an indexer's keys, which have a compressor as well.

    Args:
        ratios: by layer, the tokens of a latent: of COMPRESSORS, or 0 and 1 where there is none.
        window: tokens.
        index_head: numbers of an indexer's key.
    """

    def page(reach: Reach, reach_tokens: int, block: int, num_bytes: int) -> Page:
        return Page(reach, reach_tokens, block, _rounded(num_bytes, _V4.alignment))

    for ratio in ratios:
        yield page(Reach.WINDOW, window, 64, 64 * _V4.window)
        if ratio <= 1:
            continue
        block, reach, times = COMPRESSORS[ratio]
        row = 2 * times * _FLOAT_BYTES  # a number and its score
        yield page(Reach.FULL, 0, BLOCK_TOKENS, BLOCK_TOKENS // ratio * _V4.latent)
        yield page(Reach.WINDOW, reach, block, block * row * LATENT)
        if ratio == 4:
            yield page(Reach.FULL, 0, BLOCK_TOKENS, BLOCK_TOKENS // ratio * _key(index_head))
            yield page(Reach.WINDOW, reach, block, block * row * index_head)


def deepseek_v41(
    ratios: Sequence[int],
    sources: Collection[int],
    window: int,
    index_head: int,
    *,
    is_nvfp4: bool = False,
) -> Iterator[Page]:
    """A window in each layer, which vLLM computes again behind a hit. A few have latents and keys
    of an indexer, which others read; and a ring of what is not a latent yet.

    Args:
        ratios: by layer, the tokens of a latent.
        sources: layers that have latents.
    """
    packed = _V41_NVFP4 if is_nvfp4 else _V4
    for layer, ratio in enumerate(ratios):
        of_window = _rounded(32 * packed.window, packed.alignment)
        yield Page(Reach.WINDOW, window, 32, of_window, is_scratch=True)
        if layer not in sources:
            continue
        for num_bytes in (packed.latent, _key(index_head)):
            of_block = _rounded(BLOCK_TOKENS // ratio * num_bytes, packed.alignment)
            yield Page(Reach.FULL, 0, BLOCK_TOKENS, of_block)
        if ratio > 1:
            ring = 8 * 2 * LATENT * _FLOAT_BYTES
            yield Page(Reach.WINDOW, 1, 8, ring, is_scratch=True, is_ring=True)


def _key(head: int) -> int:
    """Bytes of an indexer's key: one a number, and a scale for 128."""
    return head + head // 128 * 4


@dataclass(frozen=True, slots=True)
class PackedShape:
    geometry: Geometry
    scratch: tuple[Group, ...]
    """Groups that are not stored."""

    @classmethod
    def of(cls, pages: Sequence[Page], chunk_tokens: int) -> PackedShape:
        """As vLLM makes groups of these pages, layer by layer. Groups are numbered in our order."""
        buckets: dict[Page, _Bucket] = {}
        for page in pages:
            bucket = buckets.setdefault(page._replace(num_bytes=0), _Bucket(Counter()))
            bucket.sizes[page.num_bytes] += 1
        found = [
            (kind, bucket.group(i, number))
            for (kind, bucket), number in zip(buckets.items(), _split(buckets), strict=True)
            for i in range(number)
        ]
        found.sort(key=lambda group: (group[0].is_scratch, group[0].reach is not Reach.FULL))
        groups = [_group(i, kind, sizes.total()) for i, (kind, sizes) in enumerate(found)]
        num_stored = sum(not kind.is_scratch for kind, _ in found)
        hit_tokens = math.lcm(GRAIN_TOKENS, *(group.block_tokens for group in groups))
        geometry = Geometry(
            num_ranks=1,
            regions=(max(sum(size * n for size, n in sizes.items()) for _, sizes in found),),
            groups=tuple(groups[:num_stored]),
            chunk_tokens=round_chunk_tokens(chunk_tokens, hit_tokens),
            is_packed=True,
            hit_tokens=hit_tokens,
        )
        return cls(geometry, tuple(groups[num_stored:]))

    def held_bytes(self, num_tokens: int) -> int:
        """Bytes of a request in HBM: whole blocks of all groups."""
        groups = (*self.geometry.groups, *self.scratch)
        return self.geometry.block_bytes * sum(_blocks(group, num_tokens) for group in groups)


def _group(number: int, kind: Page, layers: int) -> Group:
    names = tuple(f"{kind.reach.value} {number}.{i}" for i in range(layers))
    return Group(kind.block_tokens, names, number, kind.reach.value, kind.reach_tokens)


def _blocks(group: Group, num_tokens: int) -> int:
    """That a request has of a group."""
    blocks = -(-num_tokens // group.block_tokens)
    if group.reach == Reach.FULL.value:
        return blocks
    return min(blocks, -(-(group.reach_tokens - 1) // group.block_tokens) + 1)


def _split(buckets: Mapping[Page, _Bucket]) -> list[int]:
    """Into how many groups each bucket is split.

    One that mixes sizes in equal numbers stays whole, and others of equal numbers are cut to about
    as many layers. Where there is none, windows are cut to what a block has room for. Rings always
    are.
    """
    balanced = [bucket for bucket in buckets.values() if bucket.is_balanced]
    floor = max((bucket.most for bucket in balanced if len(bucket.sizes) > 1), default=0)
    most = _nearest([bucket.most for bucket in balanced], floor) if floor else 0

    def number(bucket: _Bucket) -> int:
        return -(-bucket.most // most) if most and bucket.is_balanced else 1

    def fits(kind: Page) -> bool:
        return kind.is_ring or (not most and kind.reach is Reach.WINDOW)

    room = max(
        sum(-(-n // groups) * size for size, n in bucket.sizes.items())
        for kind, bucket in buckets.items()
        for groups in [bucket.sizes.total() if fits(kind) else number(bucket)]
    )
    found = []
    for kind, bucket in buckets.items():
        groups = number(bucket)
        if fits(kind):
            a_block = max(1, room // next(iter(bucket.sizes)))
            groups = max(groups, -(-bucket.sizes.total() // a_block))
        found.append(groups)
    return found


def _nearest(numbers: Sequence[int], least: int) -> int:
    """The size from `least` on whose multiples are the least above these; the largest such."""
    sizes = range(least, max(numbers) + 1)
    return max(sizes, key=lambda size: (-sum(-number % size for number in numbers), size))


def _rounded(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
