# SPDX-License-Identifier: Apache-2.0
"""Where the elements of K and V lie within a page, found out by writing as the kernels write.

Kernels have orders of their own. In all that we know a token and a dim are split once at most:

    token = t1 * token_group + t0         dim = d1 * dim_group + d0
    offset = base + head * head_step + t1 * token_outer + t0 * token_inner
                                     + d1 * dim_outer   + d0 * dim_inner

Offsets are in elements, from the page's beginning in its slot, where the runs of the page stand one
after the other (transfer/layout.py). csrc/rotate/page_content.h computes by the same formula.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import astuple, dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from attnstore_vllm.errors import UnsupportedError
from attnstore_vllm.transfer.layout import describe

if TYPE_CHECKING:
    import torch

Write = Callable[["torch.Tensor", "torch.Tensor", "torch.Tensor"], None]
"""write(key, value, cache): puts K and V ([tokens, heads, dim] both) at the start of `cache`."""
Places = npt.NDArray[np.int64]

DIGIT_BITS = 7
"""Bits of a number that are written at once: all types of KV hold 1 to 128 exactly, fp8 apart."""


@dataclass(frozen=True, slots=True)
class ContentSide:
    """K's or V's part of a page. All in elements."""

    base: int
    head_step: int
    token_group: int
    token_outer: int
    token_inner: int
    dim_group: int
    dim_outer: int
    dim_inner: int

    def numbers(self) -> tuple[int, ...]:
        """As the native code takes them."""
        return astuple(self)

    def places(self, num_tokens: int, num_heads: int, head_dim: int) -> Places:
        """[tokens, heads, dim], int64: the offset of each element."""
        token, dim = np.arange(num_tokens), np.arange(head_dim)
        t1, t0 = np.divmod(token, self.token_group)
        d1, d0 = np.divmod(dim, self.dim_group)
        heads = np.arange(num_heads)[:, None] * self.head_step
        tokens = (t1 * self.token_outer + t0 * self.token_inner)[:, None, None]
        return self.base + tokens + heads + (d1 * self.dim_outer + d0 * self.dim_inner)


@dataclass(frozen=True, slots=True)
class ContentMap:
    """Where K and V of one block are within its page."""

    key: ContentSide
    value: ContentSide


def probe(
    write: Write,
    cache: torch.Tensor,
    num_blocks: int,
    *,
    block_tokens: int,
    num_heads: int,
    head_dim: int,
) -> ContentMap:
    """The map of a layout, learned by writing numbers into a scratch tensor of that layout.

    Args:
        write: writes `block_tokens` tokens at once. Called a few times, with other values each.
        cache: of a layer's shape, dtype and strides, but few blocks; overwritten. See describe().
        num_blocks: as the scheduler counts them.
        block_tokens: of one block of the scheduler's.
    Raises: UnsupportedError if K and V do not fill the page exactly, or their places are not of the
        form above. Every element is looked at.
    """
    import torch  # noqa: PLC0415

    if cache.element_size() < 2 or not cache.is_floating_point():
        raise UnsupportedError(f"KV of type {cache.dtype} cannot be rotated")
    layout = describe("of the probe", cache, num_blocks)
    count = block_tokens * num_heads * head_dim
    shape = (2, block_tokens, num_heads, head_dim)
    numbers = torch.arange(2 * count).reshape(shape)
    if layout.page_bytes != 2 * count * cache.element_size():
        raise UnsupportedError(
            f"a page has {layout.page_bytes} bytes, but K and V of its {block_tokens} tokens, "
            f"{num_heads} heads and {head_dim} dims have {2 * count * cache.element_size()}"
        )
    read = torch.zeros(2 * count, dtype=torch.int64)  # which number is at each place of the page
    for shift in range(0, max(1, (2 * count - 1).bit_length()), DIGIT_BITS):
        # 0 is what was never written.
        digits = (numbers >> shift) % (1 << DIGIT_BITS) + 1
        cache.zero_()
        key, value = digits.to(device=cache.device, dtype=cache.dtype)
        write(key, value, cache)
        found = _first_page(cache, layout.run_offsets, layout.run_bytes)
        whole = (found >= 1) & (found <= 1 << DIGIT_BITS) & (found == found.round())
        if not bool(whole.all()):
            raise UnsupportedError("K and V do not fill a page with what was written to it")
        read += (found.to(torch.int64) - 1) << shift
    if not torch.equal(read.sort().values, numbers.flatten()):
        raise UnsupportedError("some of K and V is twice in a page, or not at all")
    places = np.argsort(read.numpy()).reshape(shape)
    return ContentMap(_solve("K", places[0]), _solve("V", places[1]))


def _first_page(cache: torch.Tensor, run_offsets: tuple[int, ...], run_bytes: int) -> torch.Tensor:
    """[page elements], float64, on the CPU: block 0, its runs one after the other."""
    import torch  # noqa: PLC0415

    item, first = cache.element_size(), cache.storage_offset()
    length = run_bytes // item
    runs = [cache.as_strided((length,), (1,), first + at // item) for at in run_offsets]
    return torch.cat(runs).to(device="cpu", dtype=torch.float64)


def _solve(name: str, places: Places) -> ContentSide:
    """The numbers that describe `places` ([tokens, heads, dim]).

    Raises: UnsupportedError if there are none.
    """
    base = int(places[0, 0, 0])
    group, outer, inner = _split(places[:, 0, 0] - base)
    dim_group, dim_outer, dim_inner = _split(places[0, 0] - base)
    heads = places.shape[1]
    head_step = int(places[0, 1, 0]) - base if heads > 1 else 0
    side = ContentSide(base, head_step, group, outer, inner, dim_group, dim_outer, dim_inner)
    wanted = side.places(*places.shape)
    wrong = np.argwhere(wanted != places)
    if len(wrong):
        token, head, dim = (int(at) for at in wrong[0])
        raise UnsupportedError(
            f"{name} of token {token}, head {head}, dim {dim} is element "
            f"{places[token, head, dim]} of its page, not {wanted[token, head, dim]} as {side} "
            "says; this order of the elements is not known"
        )
    return side


def _split(places: npt.NDArray[np.int64]) -> tuple[int, int, int]:
    """(group, outer, inner) for places that begin with 0: `group` of them are `inner` apart, and so
    far the groups are `outer`. Says nothing of the second group's insides."""
    if len(places) == 1:
        return 1, 0, 0
    inner = int(places[1])
    off = np.flatnonzero(places != np.arange(len(places)) * inner)
    if not len(off):
        return len(places), 0, inner
    return int(off[0]), int(places[off[0]]), inner
