# SPDX-License-Identifier: Apache-2.0
"""CudaEngine over tests/fake_gpu.py: what it gives to which stream, and what fails."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
import torch

from attnstore_vllm.errors import ConfigError, CopyError, UnsupportedError
from attnstore_vllm.transfer import cuda_events, cuda_tables
from attnstore_vllm.transfer.cuda_methods import RULES, Method, ReadOrder, only
from attnstore_vllm.transfer.plan import ChunkCopy, LoadPlan, TransferPlan
from attnstore_vllm.transfer.worker_copies import LAYERS_A_SAVE, Loads, Saves
from tests.cuda_helpers import METHODS, CudaRig
from tests.cuda_world import KvKind, Shape, installed, make_ranks
from tests.engine_helpers import ALL, ORDERS, PAGE_BYTES, ROWS, table
from tests.fake_driver import native_module
from tests.fake_gpu import BATCH, KERNEL, FakeGpu

all_methods = pytest.mark.parametrize("method", METHODS)


def test_the_layers_of_a_load_have_one_table(fake: FakeGpu) -> None:
    rig = CudaRig(fake, rules=METHODS["kernel"])
    before = fake.uploads
    pages = table((0, 0, 1), (1, 0, 2))
    for layer in ALL:
        rig.engine.load(pages, range(layer, layer + 1))
    assert fake.uploads == before + 1
    rig.engine.load(table((0, 0, 1)), ALL)
    assert fake.uploads == before + 2


def test_a_full_ring_waits_for_the_oldest_copy_only(
    fake: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_tables.TableRing.__init__, "__defaults__", (4,))
    rig = CudaRig(fake, rules=METHODS["kernel"])
    for begin in (rig.engine.load, rig.engine.save):
        events = []
        for i in range(9):
            events.append(begin(table((i % 2, 0, i)), ALL))
            over = [event.done() for event in events]
            assert over == [k < i - 1 for k in range(i + 1)], "the ring has room for two"
    for i in range(9):
        rig.engine.gather(table((2, 0, i)), np.array([i % ROWS]), ALL)
    assert fake.model.pending
    for i in range(9):
        rig.engine.drain(table((2, 0, i)), np.array([i % ROWS]), ALL)
    assert fake.count("cuCtxSynchronize") == 0


@pytest.mark.parametrize("seed", range(8))
def test_a_full_ring_waits_for_all_where_a_copy_was_refused(
    fake: FakeGpu, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Its kernel may still read a table, and would go where the next one says."""
    monkeypatch.setattr(cuda_tables.TableRing.__init__, "__defaults__", (8,))
    rig = CudaRig(fake)
    before = rig.hbm()
    fake.set(seed=seed)
    rig.engine.gather(table((0, 0, 1)), np.array([2]), ALL)
    event = rig.engine.drain(table((0, 0, 1)), np.array([2]), ALL)
    fake.fail("cuEventRecord")
    rig.engine.gather(table((1, 0, 4)), np.array([3]), ALL)
    pages = table((3, 0, 5), (4, 0, 6), (5, 2, 7), (6, 2, 2))
    rig.engine.gather(pages, np.array([0, 1, 3, 4]), ALL)
    rig.engine.wait(event)
    assert np.array_equal(rig.pages[0, :, 0], before[:, 1])


def test_rules_are_asked_for_what_is_contiguous(fake: FakeGpu) -> None:
    """Neighbours in the slot, in HBM or in the write buffer are one run, on both sides."""
    rig = CudaRig(fake, ORDERS[0])
    mover, copy = rig.cuda._copiers[0], native_module().Copy
    rows = np.arange(3)
    apart, close = table((0, 0, 5), (0, 1, 7), (0, 2, 9)), table((0, 0, 5), (0, 1, 6), (0, 2, 7))
    assert mover.prepare(copy.LOAD, apart, rows).num_runs == 3
    assert mover.prepare(copy.LOAD, close, rows).num_runs == 1
    assert mover.prepare(copy.DRAIN, apart, rows).num_runs == 1
    assert mover.prepare(copy.DRAIN, apart, rows[::-1]).num_runs == 3


def test_the_model_waits_once_for_a_stretch_of_loads(fake: FakeGpu) -> None:
    rig = CudaRig(fake)
    rig.engine.waited_s()
    first = rig.engine.load(table((0, 0, 1)), ALL)
    second = rig.engine.load(table((0, 0, 2)), ALL)
    work = fake.model.pending
    rig.engine.model_waits(second)
    assert fake.model.pending == work + 2, "a mark and the wait"
    rig.engine.model_waits(first)
    rig.engine.model_waits(second)
    assert fake.model.pending == work + 2
    assert rig.engine.waited_s() == 0.0, "not known yet"
    fake.synchronize()
    assert rig.engine.waited_s() > 0.0
    assert rig.engine.waited_s() == 0.0, "each wait counts once"
    third = rig.engine.load(table((0, 0, 2)), ALL)
    rig.engine.wait(third)
    work = fake.model.pending
    rig.engine.model_waits(third)
    assert fake.model.pending == work, "it was over"


def test_loads_are_measured_without_the_wait_before_them(fake: FakeGpu) -> None:
    rig = CudaRig(fake, rules=METHODS["dma"])
    rig.engine.measured()
    for _ in range(500):
        rig.compute(lambda: None)
    event = rig.engine.load(table((0, 0, 1), (0, 1, 2)), range(2))
    assert rig.engine.measured() == []
    rig.engine.wait(event)
    ((num_bytes, seconds),) = rig.engine.measured()
    assert num_bytes == 4 * PAGE_BYTES
    assert 0 < seconds < 0.1  # in pieces of work that are a millisecond each
    assert rig.engine.measured() == []


def _launch(rig: CudaRig) -> None:
    """A forward pass that takes much longer than a load."""
    for _ in range(2000):
        rig.compute(lambda: None)


def test_a_load_comes_after_its_mark_and_not_after_the_model(fake: FakeGpu) -> None:
    rig = CudaRig(fake)
    before: list[str] = []
    rig.compute(lambda: before.append("before"))
    mark = rig.engine.mark()
    _launch(rig)
    pages = table((0, 0, 2))
    for layer in ALL:
        waits = fake.count("cuStreamWaitEvent")
        event = rig.engine.load(pages, range(layer, layer + 1), mark)
        assert fake.count("cuStreamWaitEvent") == waits + (layer == 0), "one wait for all layers"
    rig.engine.wait(event)
    assert before and fake.model.pending
    rig.engine.wait(rig.engine.load(pages, ALL))
    assert not fake.model.pending, "without a mark it comes after all"


@pytest.mark.parametrize("is_marked", [True, False])
def test_a_load_ahead_does_not_wait_for_the_forward_pass_of_its_step(
    fake: FakeGpu, is_marked: bool
) -> None:
    rig = CudaRig(fake)
    loads = Loads(rig.engine, len(ALL))
    for number, (ahead, waits) in enumerate([(1, not is_marked), (0, True), (1, not is_marked)]):
        loads.begin_step((), whole=False)
        if is_marked:
            loads.mark()
        _launch(rig)
        plan = LoadPlan(number, "request", (ChunkCopy(0, 0, (2,)),), layers_before=ahead)
        loads.begin([plan], whole=False)
        loads.close()
        assert bool(fake.model.pending) is not waits
        fake.synchronize()


def test_layers_of_a_load_are_measured_one_by_one(fake: FakeGpu) -> None:
    rig = CudaRig(fake)
    rig.engine.measured()
    pages, mark = table((0, 0, 2)), rig.engine.mark()
    events = [rig.engine.load(pages, range(i, i + 1), mark) for i in ALL]
    rig.engine.wait(events[-1])
    assert [num_bytes for num_bytes, _ in rig.engine.measured()] == [PAGE_BYTES] * len(ALL)


def test_a_mark_that_cuda_refuses_is_all_of_the_models_order(fake: FakeGpu) -> None:
    rig = CudaRig(fake)
    fake.fail("cuEventRecord")
    mark = rig.engine.mark()
    fake.forgive()
    _launch(rig)
    rig.engine.wait(rig.engine.load(table((0, 0, 2)), ALL, mark))
    assert not fake.model.pending


def test_unread_measurements_are_bounded(fake: FakeGpu) -> None:
    watch = cuda_events.StopWatch(pairs_max=3)
    for i in range(5):
        watch.stop(watch.start(fake.model), fake.model, i)
    assert watch.take() == []
    fake.synchronize()
    assert [tag for tag, _ in watch.take()] == [0, 1, 2]
    assert watch.take() == []


# ---- what fails ------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["load", "save"])
@all_methods
def test_a_copy_that_cuda_refuses_is_an_event_that_failed(
    fake: FakeGpu, name: str, method: str
) -> None:
    """Nothing that was begun for it is in flight any more; the next one is not touched."""
    rig = CudaRig(fake, rules=METHODS[method])
    before = rig.hbm()
    pages = table((0, 0, 1), (0, 1, 2))
    rig.save(pages)
    for call in (KERNEL, BATCH):
        fake.fail(call)
    event = getattr(rig.engine, name)(pages, ALL)
    assert not rig.cuda._loads.pending and not rig.cuda._saves.pending
    for ask in (event.done, lambda: rig.engine.wait(event), lambda: rig.engine.model_waits(event)):
        with pytest.raises(CopyError, match="CUDA_ERROR_UNKNOWN"):
            ask()
    fake.forgive()
    for block in (1, 2):
        rig.overwrite(block)
    rig.load(pages)
    assert np.array_equal(rig.hbm(), before)


def test_a_gather_that_fails_fails_its_drain(fake: FakeGpu) -> None:
    rig = CudaRig(fake)
    before = rig.hbm()
    first, second = table((0, 0, 1), (1, 0, 2)), table((2, 0, 3))
    fake.fail(KERNEL)
    rig.engine.gather(first, np.array([0, 1]), range(1, 2))
    rig.engine.gather(first, np.array([0, 1]), range(2, 3))
    rig.engine.gather(second, np.array([2]), ALL)
    with pytest.raises(CopyError, match="gathered"):
        rig.engine.drain(first, np.array([0, 1]), ALL).done()
    with pytest.raises(CopyError, match="gathered"):
        rig.engine.drain(table((1, 0, 2)), np.array([1]), range(1, 2)).done()
    rig.engine.wait(rig.engine.drain(second, np.array([2]), ALL))
    rig.engine.wait(rig.engine.drain(first, np.array([0, 1]), range(2, 3)))
    assert np.array_equal(rig.pages[2, :, 0], before[:, 3])
    assert np.array_equal(rig.pages[1, 2, 0], before[2, 2])
    rig.engine.gather(first, np.array([0, 1]), ALL)
    rig.engine.wait(rig.engine.drain(first, np.array([0, 1]), ALL))
    assert np.array_equal(rig.pages[1, :, 0], before[:, 2])


def test_a_device_that_fails_later_is_told_by_the_event(fake: FakeGpu) -> None:
    rig = CudaRig(fake)
    event = rig.engine.load(table((0, 0, 1)), ALL)
    fake.fail("cuEventQuery")
    with pytest.raises(CopyError, match="cuEventQuery"):
        event.done()
    fake.fail("cuEventQuery")
    assert rig.engine.measured() == []
    fake.fail("cuEventSynchronize")
    with pytest.raises(CopyError, match="cuEventSynchronize"):
        rig.engine.wait(event)


@pytest.mark.parametrize("name", ["copy_pages", BATCH])
def test_wrong_bytes_are_found_when_it_is_made(fake: FakeGpu, name: str) -> None:
    fake.damage(name)
    with pytest.raises(UnsupportedError, match="came back with other bytes"):
        CudaRig(fake)
    assert not fake.registered, "the pool is page-locked by nobody who would unlock it"


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        ("cuMemHostRegister", UnsupportedError, r"0B of dram's .* page-locked.*refuses more"),
        ("cuMemAlloc_v2", ConfigError, r"write_buffer: 1\.\d+KiB of HBM are not free"),
        (KERNEL, UnsupportedError, "gpu-check"),
        (BATCH, UnsupportedError, "cannot copy"),
    ],
)
def test_what_the_machine_lacks_is_said_when_it_is_made(
    fake: FakeGpu, call: str, error: type[Exception], says: str
) -> None:
    fake.fail(call)
    with pytest.raises(error, match=says):
        CudaRig(fake)
    assert not fake.registered


def test_a_device_that_fails_when_it_is_tried_is_why_there_is_no_engine(fake: FakeGpu) -> None:
    """The kernel reads a table of wrong addresses; after that the driver refuses everything."""
    fake.damage("cuMemcpyAsync")
    with pytest.raises(UnsupportedError, match=r"cannot copy .*CUDA_ERROR_ILLEGAL_ADDRESS"):
        CudaRig(fake)


def test_it_closes_though_the_device_has_failed(fake: FakeGpu) -> None:
    rig = CudaRig(fake)
    fake.fail("cuMemHostUnregister")
    rig.engine.close()
    assert fake.registered


# ---- how often the driver is called ----------------------------------------------------


@pytest.mark.parametrize(("by_layer", "layers_a_save", "calls"), [
    (True, 1, 32), (True, LAYERS_A_SAVE, 4), (False, LAYERS_A_SAVE, 4), (False, 32, 1),
])  # fmt: skip
def test_saves_leave_in_few_calls(
    fake: FakeGpu, by_layer: bool, layers_a_save: int, calls: int
) -> None:
    """32 layers of 64 blocks, a chunk of four in each slot: a gather and a drain for each group."""
    kv = KvKind("LBNHC", torch.int16, layers=32, heads=2, content=8, kernel_tokens=4)
    shape = Shape((kv,), 1, blocks=70, within=4, slots=16, rows=64, ranks=1, moves=False,
                  ring_words=None)  # fmt: skip
    _, (rank,) = make_ranks(fake, shape, Random(1))
    rank.engine.rules = RULES
    saves = Saves(rank.engine, shape.layers, shape.rows, layers_a_save)
    chunks = tuple(ChunkCopy(i, 0, tuple(range(4 * i, 4 * i + 4))) for i in range(16))
    plan = TransferPlan(1, "request", chunks)
    before = {call: fake.count(call) for call in (KERNEL, BATCH)}
    now, later = ([], [plan]) if by_layer else ([plan], [])
    saves.begin_step(now, later, [], by_layer=True)
    for layer in range(shape.layers):
        saves.layer_computed(layer)
    saves.end_step([])
    assert {call: fake.count(call) - before[call] for call in before} == {
        KERNEL: calls, BATCH: calls,
    }  # fmt: skip
    fake.synchronize()
    for layer, pages in enumerate(rank.pages):
        assert np.array_equal(pages.reshape(64, -1), rank.hbm[layer][:64])
    rank.engine.close()


@pytest.mark.parametrize("order", ReadOrder)
def test_the_rule_says_when_the_slots_of_a_load_may_be_read(order: ReadOrder) -> None:
    """In the stream's order none is read before its time; else some are."""
    early = 0
    for seed in range(12):
        gpu = FakeGpu(seed)
        with installed(gpu):
            rig = CudaRig(gpu, rules=only(Method.DMA, order=order))
            pages = table((0, 0, 1), (1, 1, 2))
            for _ in range(50):
                rig.compute(lambda: None)
            event = rig.engine.load(pages, ALL)
            rig.pages[:] = 7  # which no caller may do
            rig.engine.wait(event)
            early += not bool((rig.hbm()[:, [1, 2]] == 7).all())
            rig.engine.close()
    assert early == 0 if order is ReadOrder.STREAM else early > 0
