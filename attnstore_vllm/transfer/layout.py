# SPDX-License-Identifier: Apache-2.0
"""Where the bytes of one block lie in a layer's KV tensor: described by strides, not by name.

vLLM hands out one tensor a layer, logically [num_blocks, heads, tokens, content]; the strides
say what is contiguous. A block is one or several contiguous *runs*; all runs of a layer have
one length. In a slot they stand one after the other.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
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
