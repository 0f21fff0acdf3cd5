# SPDX-License-Identifier: Apache-2.0
"""Layouts against torch's own indexing, for tensors whose bytes stand in several orders."""

from __future__ import annotations

import ctypes
import itertools

import pytest
import torch

from attnstore_vllm.errors import UnsupportedError
from attnstore_vllm.transfer.layout import LayerLayout, describe

SHAPE = (6, 2, 4, 8)  # blocks, heads, tokens, content
ORDERS = list(itertools.permutations(range(4)))


def tensor(order: tuple[int, ...], dtype: torch.dtype = torch.int16) -> torch.Tensor:
    """[blocks, heads, tokens, content], each element its own number, laid out in `order`."""
    stored = torch.arange(6 * 2 * 4 * 8).to(dtype).reshape([SHAPE[axis] for axis in order])
    return stored.permute([order.index(axis) for axis in range(4)])


def page_of(layout: LayerLayout, block: int) -> bytes:
    """The bytes of a block as the layout says, run after run."""
    start = layout.base + block * layout.block_stride
    return b"".join(
        ctypes.string_at(start + offset, layout.run_bytes) for offset in layout.run_offsets
    )


def elements(raw: bytes, dtype: torch.dtype) -> list[float]:
    found = torch.frombuffer(bytearray(raw), dtype=dtype)
    return sorted(found.to(torch.float64).tolist())


@pytest.mark.parametrize("order", ORDERS, ids=str)
@pytest.mark.parametrize("dtype", [torch.int16, torch.float32])
def test_a_page_is_the_block(order: tuple[int, ...], dtype: torch.dtype) -> None:
    kv = tensor(order, dtype)
    layout = describe("layer", kv, 6)
    assert layout.num_blocks == 6
    assert layout.page_bytes == 2 * 4 * 8 * kv.element_size()
    for block in range(6):
        wanted = sorted(kv[block].to(torch.float64).flatten().tolist())
        assert elements(page_of(layout, block), dtype) == wanted


@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_all_blocks_have_one_order_of_bytes(order: tuple[int, ...]) -> None:
    """A page is saved from one block and loaded into another: element by element the same."""
    kv = tensor(order)
    layout = describe("layer", kv, 6)
    permutation = torch.frombuffer(bytearray(page_of(layout, 0)), dtype=kv.dtype).argsort()
    for block in range(6):
        page = torch.frombuffer(bytearray(page_of(layout, block)), dtype=kv.dtype)
        in_order = kv[block].flatten().sort().values
        assert torch.equal(page[permutation], in_order)


@pytest.mark.parametrize(
    ("order", "num_runs"),
    [
        ((0, 1, 2, 3), 1),  # blocks outermost, in any inner order: one run
        ((0, 3, 1, 2), 1),
        ((1, 0, 2, 3), 2),  # heads outermost: a run a head
        ((2, 0, 1, 3), 4),
        ((2, 1, 0, 3), 8),
        ((1, 2, 3, 0), 64),  # blocks innermost: a run an element
    ],
)
def test_runs_are_as_long_as_they_can_be(order: tuple[int, ...], num_runs: int) -> None:
    layout = describe("layer", tensor(order), 6)
    assert len(layout.run_offsets) == num_runs
    assert layout.run_bytes * num_runs == 128


def test_keys_and_values_outside_the_blocks() -> None:
    """[2, blocks, ...], seen as vLLM registers it: transposed to blocks first."""
    stored = torch.arange(2 * 6 * 32, dtype=torch.int16).reshape(2, 6, 32)
    layout = describe("layer", stored.transpose(0, 1), 6)
    assert len(layout.run_offsets) == 2
    for block in range(6):
        wanted = stored[0, block].numpy().tobytes() + stored[1, block].numpy().tobytes()
        assert page_of(layout, block) == wanted


@pytest.mark.parametrize("kernel_blocks", [1, 2, 3])
def test_kernel_blocks_are_joined(kernel_blocks: int) -> None:
    kv = tensor((0, 1, 2, 3))
    layout = describe("layer", kv, 6 // kernel_blocks)
    for block in range(6 // kernel_blocks):
        whole = kv[block * kernel_blocks : (block + 1) * kernel_blocks]
        assert page_of(layout, block) == whole.contiguous().numpy().tobytes()


def test_kernel_blocks_of_a_tensor_with_heads_outermost() -> None:
    kv = tensor((1, 0, 2, 3))
    layout = describe("layer", kv, 3)
    assert len(layout.run_offsets) == 2  # two blocks of a head are contiguous
    for block in range(3):
        wanted = sorted(kv[2 * block : 2 * block + 2].flatten().tolist())
        assert elements(page_of(layout, block), kv.dtype) == wanted


def test_dimensions_of_one_element_do_not_break_a_run() -> None:
    kv = torch.arange(6 * 8, dtype=torch.int16).reshape(6, 1, 8, 1)
    assert len(describe("layer", kv, 6).run_offsets) == 1
    odd = kv.as_strided((6, 1, 8, 1), (8, 999, 1, 777))
    assert len(describe("layer", odd, 6).run_offsets) == 1


def test_a_slice_of_a_larger_tensor() -> None:
    """Layers that share one allocation: base and stride are the slice's."""
    whole = torch.arange(6 * 3 * 8, dtype=torch.int16).reshape(6, 3, 8)
    layout = describe("layer", whole[:, 1], 6)
    assert layout.block_stride == 3 * 8 * 2
    for block in range(6):
        assert page_of(layout, block) == whole[block, 1].numpy().tobytes()


@pytest.mark.parametrize(("shape", "num_blocks"), [((6,), 6), ((6, 4), 4), ((6, 4), 12)])
def test_a_tensor_that_cannot_be_cut_is_refused(shape: tuple[int, ...], num_blocks: int) -> None:
    with pytest.raises(UnsupportedError, match=r"layer model\.3"):
        describe("model.3", torch.zeros(shape), num_blocks)
