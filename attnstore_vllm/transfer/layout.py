# SPDX-License-Identifier: Apache-2.0
"""Where the bytes of one block lie in a layer's KV tensor: described by strides, not by name.

vLLM hands out one tensor a layer, logically [num_blocks, heads, tokens, content]; the strides
say what is contiguous. A block is one or several contiguous *runs*; all runs of a layer have
one length. In a slot they stand one after the other. Layers may differ in all of this.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from attnstore_vllm.errors import UnsupportedError

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class LayerLayout:
    """Addresses are of the process that owns the tensor; sizes and strides are in bytes."""

    base: int
    num_blocks: int
    block_stride: int
    run_offsets: tuple[int, ...]
    run_bytes: int

    @property
    def page_bytes(self) -> int:
        return self.run_bytes * len(self.run_offsets)


def describe(layer: str, kv: torch.Tensor, num_blocks: int) -> LayerLayout:
    """The layout of one layer's KV tensor.

    Args:
        kv: [num_blocks * k, ...], any dtype and strides; k > 1 where the kernels see a block
            of the scheduler as k blocks of their own.
        num_blocks: blocks as the scheduler counts them.
    Raises: UnsupportedError if the tensor cannot be cut into that many blocks.
    """
    if kv.dim() < 2 or kv.shape[0] % num_blocks:
        raise UnsupportedError(
            f"layer {layer}: its KV tensor has shape {tuple(kv.shape)}, which cannot be cut into "
            f"{num_blocks} blocks; AttnStore does not know this layout"
        )
    kv = kv.unflatten(0, (num_blocks, kv.shape[0] // num_blocks))
    item = kv.element_size()
    inner = sorted(zip(kv.stride()[1:], kv.shape[1:], strict=True))
    run = 1  # elements of the contiguous run that the innermost dimensions make
    while inner and (inner[0][0] == run or inner[0][1] == 1):
        run *= inner.pop(0)[1]
    steps = [range(0, stride * size, stride) for stride, size in reversed(inner)]
    offsets = tuple(sum(at) * item for at in itertools.product(*steps))
    return LayerLayout(kv.data_ptr(), num_blocks, kv.stride(0) * item, offsets, run * item)


def page_of(layer: str, layout: LayerLayout, page_bytes: int) -> LayerLayout:
    """The layout of a layer's whole pages, which may be padded: of `page_bytes` each.

    A padded page is one run, and what is behind its content is copied with it. So it is the same
    run with any bytes in the page. Raises: UnsupportedError if pages are not so.
    """
    if layout.page_bytes == page_bytes:
        return layout
    end = layout.run_offsets[-1] + layout.run_bytes
    is_inside = layout.run_offsets[0] == 0 and end <= page_bytes <= layout.block_stride
    if layout.page_bytes > page_bytes or not is_inside:
        raise UnsupportedError(
            f"layer {layer}: its pages have {layout.page_bytes} bytes, {layout.block_stride} "
            f"apart, but vLLM's cache configuration says {page_bytes}; this layout is not known"
        )
    return replace(layout, run_offsets=(0,), run_bytes=page_bytes)


def block_of(layer: str, kv: torch.Tensor, num_blocks: int, block_bytes: int) -> LayerLayout:
    """The layout of whole physical blocks in which a layer's pages lie beside others': of
    `block_bytes` each, from the first byte of the layer's storage on.

    Raises: UnsupportedError unless the layer's page of each block is within it.
    """
    item, storage = kv.element_size(), kv.untyped_storage()
    start = kv.data_ptr() - storage.data_ptr()
    inside = zip(kv.shape[1:], kv.stride()[1:], strict=True)
    end = start + item * (1 + sum((size - 1) * stride for size, stride in inside))
    if (
        kv.shape[0] != num_blocks
        or kv.stride(0) * item != block_bytes
        or end > block_bytes
        or storage.nbytes() < num_blocks * block_bytes
    ):
        raise UnsupportedError(
            f"layer {layer}: its KV tensor has shape {tuple(kv.shape)}, strides {kv.stride()} and "
            f"begins at byte {start}, where vLLM's cache configuration says {num_blocks} blocks of "
            f"{block_bytes} bytes; this layout is not known"
        )
    return LayerLayout(storage.data_ptr(), num_blocks, block_bytes, (0,), block_bytes)


@dataclass(frozen=True, slots=True)
class Kind:
    """Regions that follow each other and whose pages are cut alike."""

    first: int
    layouts: tuple[LayerLayout, ...]

    @property
    def stop(self) -> int:
        return self.first + len(self.layouts)

    @property
    def page_bytes(self) -> int:
        return self.layouts[0].page_bytes

    def within(self, layers: range) -> range:
        """Those of the layers that are of this kind, counted from its first one; may be empty."""
        start = min(max(layers.start, self.first), self.stop)
        return range(start - self.first, max(start, min(layers.stop, self.stop)) - self.first)


def kinds_of(layouts: Sequence[LayerLayout]) -> list[Kind]:
    """The kinds, in the order of the regions: as few as there can be."""
    kinds: list[Kind] = []
    for _, found in itertools.groupby(
        layouts, lambda x: (x.block_stride, x.run_offsets, x.run_bytes)
    ):
        kinds.append(Kind(kinds[-1].stop if kinds else 0, tuple(found)))
    return kinds


def order_of_axes(kv: torch.Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The axes of a layer's KV tensor from the outermost in memory to the innermost, and their
    strides in elements.

    A page's bytes stand in this order of the axes; shapes and lengths of runs do not tell it. The
    stride of an axis outside of the blocks' (axis 0) is given for one block, so nothing of it
    depends on the number of blocks. Axes of size 1 are left out: their strides mean nothing.
    """
    shape, strides = tuple(kv.shape), kv.stride()
    axes = [axis for axis in range(kv.dim()) if shape[axis] != 1 or axis == 0]
    axes.sort(key=lambda axis: (-strides[axis], axis))
    outside = axes[: axes.index(0)]
    return tuple(axes), tuple(
        strides[axis] // shape[0] if axis in outside else strides[axis] for axis in axes
    )
