# SPDX-License-Identifier: Apache-2.0
"""What of the CUDA half needs no GPU: addresses, tables, rules, and that it builds."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch

from attnstore_vllm._native import PageCopier, PageShape
from attnstore_vllm.transfer.cuda_batches import PAGES_AT_ONCE, make_batch
from attnstore_vllm.transfer.cuda_methods import (
    MEASURED,
    RULES,
    RULES_WITHOUT_BATCHES,
    Copy,
    Method,
    Rule,
    choose,
    find_rules,
    keep_rules,
    only,
    rules_path,
)
from attnstore_vllm.transfer.cuda_tables import Spans
from attnstore_vllm.transfer.layout import LayerLayout, describe
from tests.engine_helpers import table

KIB = 1024


@pytest.fixture
def native() -> Any:
    return importlib.import_module("attnstore_vllm._native_cuda")


# ---- addresses -------------------------------------------------------------------------

LAYERS, BLOCKS, WITHIN, SLOTS = 4, 6, 2, 3
LAYOUTS: dict[str, tuple[tuple[int, ...], Callable[[torch.Tensor], torch.Tensor]]] = {
    "one run": ((LAYERS, BLOCKS, 2, 8, 4), lambda kv: kv),
    "keys apart from values": ((LAYERS, 2, BLOCKS, 8, 4), lambda kv: kv.transpose(1, 2)),
    "a run a head": ((LAYERS, 3, BLOCKS, 8, 2), lambda kv: kv.transpose(1, 2)),
    "a gap after each block": ((LAYERS, BLOCKS, 9, 4), lambda kv: kv[:, :, :8]),
    "gaps within": ((LAYERS, BLOCKS, 3, 9, 5), lambda kv: kv[..., :8, :3]),
    "all layers of a block together": ((BLOCKS, LAYERS, 16), lambda kv: kv.transpose(0, 1)),
}
"""Of a tensor of this shape, [layers, blocks, ...]."""


def _kv(name: str, dtype: torch.dtype) -> list[torch.Tensor]:
    shape, view = LAYOUTS[name]
    return list(view(torch.zeros(shape, dtype=dtype)).unbind())


@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8], ids=str)
@pytest.mark.parametrize("layers", [range(LAYERS), range(1, 3), range(3, 4), range(2, 2)], ids=str)
@pytest.mark.parametrize("name", LAYOUTS)
def test_where_each_byte_is(name: str, layers: range, dtype: torch.dtype) -> None:
    """csrc/copy/page_map.h, which the kernel is compiled from as well, against plain sums."""
    kv = _kv(name, dtype)
    layouts = [describe(f"layer {i}", one, BLOCKS) for i, one in enumerate(kv)]
    page = layouts[0].page_bytes
    slot_bytes = LAYERS * WITHIN * page + 5
    slots = np.zeros((SLOTS, slot_bytes), np.uint8)
    random = np.random.default_rng(1)
    for one in kv:
        one.copy_(torch.from_numpy(random.integers(0, 256, one.shape)))
    copier = _copier(slots, layouts)
    pages = table((2, 0, 5), (0, 1, 0), (2, 1, 3))
    wanted = slots.copy()
    for slot, within, block in pages:
        for layer in layers:
            at = (layer * WITHIN + within) * page
            wanted[slot, at : at + page] = _page(kv[layer], block)
    copier.save(pages, layers.start, layers.stop)
    assert np.array_equal(slots, wanted)
    before = [[_page(one, block) for block in range(BLOCKS)] for one in kv]
    slots[:] = random.integers(0, 255, slots.shape)
    copier.load(pages, layers.start, layers.stop)
    for layer in range(LAYERS):
        for block in range(BLOCKS):
            expected = before[layer][block]
            for slot, within, target in pages:
                if target == block and layer in layers:
                    at = (layer * WITHIN + within) * page
                    expected = slots[slot, at : at + page]
            assert np.array_equal(_page(kv[layer], block), expected)


def _copier(slots: np.ndarray[Any, Any], layouts: list[LayerLayout]) -> PageCopier:
    shape = layouts[0]
    return PageCopier(
        PageShape(
            slots_base=slots.ctypes.data,
            num_slots=SLOTS,
            slot_bytes=slots.shape[1],
            layer_bytes=WITHIN * shape.page_bytes,
            page_bytes=shape.page_bytes,
            layer_bases=[layout.base for layout in layouts],
            num_blocks=BLOCKS,
            block_stride=shape.block_stride,
            run_offsets=list(shape.run_offsets),
            run_bytes=shape.run_bytes,
        )
    )


def _page(kv: torch.Tensor, block: int) -> np.ndarray[Any, Any]:
    """A block's bytes in the order of their addresses."""
    one = kv[block]
    by_stride = sorted(range(one.dim()), key=one.stride, reverse=True)
    return one.permute(by_stride).contiguous().view(torch.uint8).numpy().ravel()


@pytest.mark.parametrize("layers", [(-1, 1), (0, LAYERS + 1), (2, 1), (LAYERS + 1, LAYERS + 1)])
def test_layers_that_do_not_exist(layers: tuple[int, int]) -> None:
    layouts = [describe("layer", one, BLOCKS) for one in _kv("one run", torch.float32)]
    copier = _copier(np.zeros((SLOTS, 4096), np.uint8), layouts)
    for copy in (copier.save, copier.load):
        with pytest.raises(IndexError, match="does not exist"):
            copy(table((0, 0, 0)), *layers)


# ---- the native mover, as far as it goes without a GPU ---------------------------------


def _mover(native: Any, num_rows: int = 5) -> Any:
    """64-byte pages of one run, neighbours in HBM; nothing is behind these addresses."""
    pages = native.PageShape(
        slots_base=1 << 20, num_slots=4, slot_bytes=4096, layer_bytes=256, page_bytes=64,
        layer_bases=[1 << 30, 2 << 30], num_blocks=8, block_stride=64, run_offsets=[0],
        run_bytes=64, rows_base=1 << 40, num_rows=num_rows,
    )  # fmt: skip
    return native.PageCopier(pages, kernels=None, arrays=0)


@pytest.mark.parametrize(
    ("page", "row", "layers"),
    [
        ((4, 0, 0), 0, (0, 2)), ((-1, 0, 0), 0, (0, 2)), ((0, 4, 0), 0, (0, 2)),
        ((0, -1, 0), 0, (0, 2)), ((0, 0, 8), 0, (0, 2)), ((0, 0, -1), 0, (0, 2)),
        ((0, 0, 0), 5, (0, 2)), ((0, 0, 0), -1, (0, 2)),
        ((0, 0, 0), 0, (0, 3)), ((0, 0, 0), 0, (-1, 1)), ((0, 0, 0), 0, (2, 1)),
    ],
)  # fmt: skip
def test_what_does_not_exist_is_refused_before_cuda_is_asked(
    native: Any, page: tuple[int, int, int], row: int, layers: tuple[int, int]
) -> None:
    mover = _mover(native)
    pages, rows, none = table((0, 0, 0), page), np.array([1, row]), np.empty(0, np.int64)
    for move in (native.Copy.GATHER, native.Copy.DRAIN):
        with pytest.raises(IndexError, match="does not exist"):
            mover.by_dma(mover.prepare(move, pages, rows), *layers, True, 0)
        with pytest.raises(IndexError, match="does not exist"):
            mover.by_kernel(mover.prepare(move, pages, rows), *layers, 0, 0, 1, 0)
    if 0 <= row < 5:
        for move in (native.Copy.LOAD, native.Copy.SAVE):
            with pytest.raises(IndexError, match="does not exist"):
                mover.by_dma(mover.prepare(move, pages, none), *layers, True, 0)


def test_pages_and_rows_go_together(native: Any) -> None:
    mover = _mover(native)
    with pytest.raises(IndexError, match="2 pages, but 1 rows"):
        mover.prepare(native.Copy.DRAIN, table((0, 0, 0), (0, 1, 1)), np.array([0]))
    with pytest.raises(IndexError, match="row 0 of 0"):
        _mover(native, 0).prepare(native.Copy.GATHER, table((0, 0, 0)), np.array([0]))
    with pytest.raises(ValueError, match="slot, block in the chunk, block id"):
        mover.prepare(native.Copy.LOAD, np.zeros((2, 4), np.int64), np.array([0, 1]))


def test_neighbours_are_one_run(native: Any) -> None:
    mover, move = _mover(native), native.Copy
    apart, close = table((0, 0, 5), (0, 1, 7), (0, 2, 2)), table((0, 0, 5), (0, 1, 6), (0, 2, 7))
    up, down = np.arange(3), np.arange(3)[::-1].copy()
    assert mover.prepare(move.LOAD, apart, up).num_runs == 3
    assert mover.prepare(move.SAVE, close, up).num_runs == 1
    assert mover.prepare(move.DRAIN, apart, up).num_runs == 1
    assert mover.prepare(move.DRAIN, apart, down).num_runs == 3
    assert mover.prepare(move.GATHER, close, up).num_runs == 1
    assert mover.prepare(move.GATHER, close, np.array([0, 1, 3])).num_runs == 2
    assert mover.prepare(move.LOAD, table(), np.empty(0, np.int64)).num_runs == 0


def test_the_moves_have_the_same_names(native: Any) -> None:
    through_the_read_buffer = {"FILL", "SCATTER"}
    assert {move.name for move in Copy} | through_the_read_buffer == set(native.Copy.__members__)


def test_without_a_gpu_copies_fail_and_say_why(native: Any) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    mover = _mover(native)
    batch = mover.prepare(native.Copy.LOAD, table((0, 0, 0)), np.empty(0, np.int64))
    with pytest.raises(RuntimeError, match="driver"):
        mover.by_dma(batch, 0, 1, True, 0)
    with pytest.raises(RuntimeError, match="driver"):
        native.register_host(1 << 20, 4096, 0)


# ---- tables and rules ------------------------------------------------------------------


def test_a_table_is_where_pages_are_on_both_sides(native: Any) -> None:
    pages, rows = table((3, 1, 7), (2, 0, 4)), np.array([4, 3])
    slots, blocks = [(1 << 20) + 3 * 4096 + 64, (1 << 20) + 2 * 4096], [7 * 64, 4 * 64]
    at_blocks, at_rows = [(1 << 30) + at for at in blocks], [(1 << 40) + row * 64 for row in rows]
    for move, sources, targets in (
        (native.Copy.LOAD, slots, at_blocks),
        (native.Copy.SAVE, at_blocks, slots),
        (native.Copy.GATHER, at_blocks, at_rows),
        (native.Copy.DRAIN, at_rows, slots),
    ):
        words = _mover(native).prepare(move, pages, rows).words
        assert words.reshape(-1, 2).tolist() == [[*at] for at in zip(sources, targets, strict=True)]


def test_arrays_that_were_handed_over_cannot_be_changed(native: Any) -> None:
    """They are known by their identity, so that layers cost no look at them."""
    pages, rows = table((3, 1, 7), (2, 0, 4)), np.array([4, 3])
    batch = make_batch(Copy.DRAIN, native.Copy, pages, rows, RULES, [_mover(native)])
    assert batch.is_of(pages, rows, RULES)
    assert not batch.is_of(pages.copy(), rows, RULES)
    assert not batch.is_of(pages, rows.copy(), RULES)
    assert not batch.is_of(pages, rows, only(Method.DMA))
    for array in (pages, rows):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 0


def test_many_pages_have_several_tables(native: Any) -> None:
    pages = np.tile(table((3, 1, 7)), (2 * PAGES_AT_ONCE + 1, 1))
    none = np.empty(0, np.int64)
    batch = make_batch(Copy.LOAD, native.Copy, pages, none, RULES, [_mover(native)])
    ((_, parts),) = batch.kinds
    assert [len(part.words) // 2 for part in parts] == [PAGES_AT_ONCE, PAGES_AT_ONCE, 1]


@pytest.mark.parametrize("seed", range(20))
def test_spans_never_overlap(seed: int) -> None:
    """Against a plain list of words that are taken."""
    random = Random(seed)
    size = random.randint(1, 40)
    spans = Spans(size)
    taken: list[range] = []
    refused = 0
    for _ in range(500):
        num_words = random.randint(1, size)
        start = spans.take(num_words)
        if start is None:
            assert taken, "there was nothing in its way"
            refused += 1
            spans.give_back_oldest()
            taken.pop(0)
            continue
        new = range(start, start + num_words)
        assert new.stop <= size
        assert not any(set(new) & set(old) for old in taken)
        taken.append(new)
        if random.random() < 0.2:
            spans.give_back_oldest()
            taken.pop(0)
    assert refused or size == 1


def test_a_ring_is_filled_to_its_last_word() -> None:
    spans = Spans(10)
    assert [spans.take(5), spans.take(5), spans.take(1)] == [0, 5, None]
    spans.give_back_oldest()
    assert [spans.take(6), spans.take(5), spans.take(1)] == [None, 0, None]
    spans.give_back_oldest()
    assert spans.take(5) == 5


def test_the_rule_for_a_length_of_runs() -> None:
    rules = {
        Copy.LOAD: (Rule(64 * KIB, Method.DMA), Rule(KIB, Method.KERNEL, 8), Rule(0, Method.DMA))
    }
    assert choose(rules, Copy.LOAD, 64 * KIB).method is Method.DMA
    assert choose(rules, Copy.LOAD, 64 * KIB - 1).thread_blocks == 8
    assert choose(rules, Copy.LOAD, KIB).method is Method.KERNEL
    assert choose(rules, Copy.LOAD, 0.5).method is Method.DMA


@pytest.mark.parametrize(
    "rules", [RULES, RULES_WITHOUT_BATCHES, only(Method.DMA), only(Method.KERNEL, 2)]
)
def test_there_is_a_rule_for_every_copy(rules: Any) -> None:
    for move in Copy:
        lengths = [rule.from_run_bytes for rule in rules[move]]
        assert lengths == sorted(lengths, reverse=True)
        assert lengths[-1] == 0
    assert choose(rules, Copy.GATHER, 1 << 20).method is Method.KERNEL


def test_what_goes_to_dram_takes_no_multiprocessor() -> None:
    for move in (Copy.SAVE, Copy.DRAIN):
        assert {rule.method for rule in RULES[move]} == {Method.DMA}
    assert choose(RULES, Copy.LOAD, 28 * KIB - 1).method is Method.KERNEL
    assert choose(RULES, Copy.LOAD, 28 * KIB).method is Method.DMA


def test_a_device_has_the_rules_that_were_measured_on_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert rules_path() == tmp_path / ".config" / "attnstore" / "copy_rules.json"
    assert find_rules("NVIDIA A10", 13000) is RULES
    assert "not measured" in caplog.text
    assert find_rules("H200", 12040) is RULES_WITHOUT_BATCHES
    measured = {**RULES, Copy.LOAD: (Rule(4 * KIB, Method.DMA, 12), Rule(0, Method.KERNEL, 12))}
    keep_rules("H200", only(Method.KERNEL))
    keep_rules("B200", only(Method.DMA))
    assert keep_rules("H200", measured) == rules_path()
    caplog.clear()
    assert find_rules("H200", 12040) == measured
    assert str(rules_path()) in caplog.text
    assert find_rules("B200", 13000) == only(Method.DMA)
    assert find_rules("A100", 13000) is RULES


@pytest.mark.parametrize("device", ["NVIDIA H200", "NVIDIA H100 80GB HBM3"])
def test_a_hopper_loads_long_runs_by_dma_and_short_ones_by_the_kernel(
    tmp_path: Path, device: str
) -> None:
    rules = find_rules(device, 13000, tmp_path / "none.json")
    long, short = (choose(rules, Copy.LOAD, num_bytes) for num_bytes in (64 * KIB, 32 * KIB))
    assert long.method is Method.DMA
    assert (short.method, short.thread_blocks) == (Method.KERNEL, 16)
    assert {rules[copy][0].method for copy in (Copy.SAVE, Copy.DRAIN)} == {Method.DMA}
    assert rules[Copy.GATHER] == RULES[Copy.GATHER]


def _all(rules: list[Any]) -> str:
    return json.dumps({"H200": dict.fromkeys(Copy.__members__, rules)})


@pytest.mark.parametrize(
    "text",
    [
        "", "[]", '{"H200": 1}', '{"H200": {"LOAD": [[0, "dma", 1]]}}',
        _all([[0, "train", 1]]),
        _all([[9, "dma", 1]]),
        _all([[0, "dma", 1], [0, "kernel", 1]]),
        _all([[0, "dma", 0]]),
    ],
)  # fmt: skip
def test_rules_that_cannot_be_read_are_said_and_left(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, text: str
) -> None:
    path = tmp_path / "rules.json"
    path.write_text(text)
    assert find_rules("H200", 13000, path) is MEASURED["H200"]
    assert str(path) in caplog.text
    keep_rules("H200", only(Method.DMA), path)
    assert find_rules("H200", 13000, path) == only(Method.DMA)
