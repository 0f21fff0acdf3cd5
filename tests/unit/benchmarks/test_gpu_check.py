# SPDX-License-Identifier: Apache-2.0
"""benchmarks.gpu_check where there is no GPU: it says so, and what can be run is run on a fake."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from attnstore_vllm.transfer import cuda_engine
from attnstore_vllm.transfer.cuda_methods import (
    RULES,
    Copy,
    Method,
    ReadOrder,
    Rule,
    find_rules,
    keep_rules,
)
from benchmarks import gpu_check
from benchmarks.gpu import (
    bandwidth,
    beside,
    correctness,
    encoded,
    first_logits,
    moved_numbers,
    moves,
    rig,
    rules,
)
from benchmarks.gpu.rig import KvShape, Row
from benchmarks.gpu.transformer import BLOCK_TOKENS, ModelShape, Transformer
from tests.cuda_helpers import install

ROOT = Path(__file__).resolve().parents[3]
CPU = torch.device("cpu")
TINY = ModelShape(layers=3, hidden=32, heads=4, kv_heads=2, head_dim=8, mlp=48, vocabulary=50)


def test_without_a_gpu_it_refuses_in_one_line(tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    out = tmp_path / "found.json"
    told = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu_check", "--out", str(out)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert told.returncode == 2
    assert told.stdout == ""
    assert told.stderr.startswith("gpu-check: ")
    assert told.stderr.count("\n") == 1
    assert not out.exists()


def test_a_goal_is_met_on_its_own_side() -> None:
    assert Row("", "", 0.96, 0.95).is_met
    assert not Row("", "", 0.94, 0.95).is_met
    assert Row("", "", 2.9, 3.0, at_most=True).is_met
    assert not Row("", "", 3.1, 3.0, at_most=True).is_met
    assert Row("", "", None, 0.95).is_met is False
    assert Row("", "", 0.5).is_met is None
    assert Row("x", "y", 0.961, 0.95).cells() == ["x", "y", "0.961", ">= 0.95", "yes", ""]


def test_the_transformer_reads_its_history_from_pages() -> None:
    """The last token's logits do not depend on where the prefix was computed, but on its KV."""
    model = Transformer(TINY, torch.float32, CPU)
    tokens = torch.arange(7, 7 + 3 * BLOCK_TOKENS) % TINY.vocabulary
    blocks = torch.tensor([4, 1, 5])
    shape = (6, 2, BLOCK_TOKENS, TINY.kv_heads, TINY.head_dim)
    kv = [torch.zeros(shape) for _ in range(TINY.layers)]
    everything = model.logits(
        tokens, kv, blocks, model.causal_mask(0, len(tokens), CPU), lambda _: None
    )
    new = tokens[2 * BLOCK_TOKENS :]
    mask = model.causal_mask(2 * BLOCK_TOKENS, len(new), CPU)
    seen: list[int] = []
    again = model.logits(new, kv, blocks, mask, seen.append)
    assert torch.allclose(again, everything, atol=1e-5)
    assert seen == list(range(TINY.layers))

    def spoil(layer: int) -> None:
        kv[layer][4, :, 3] += 1.0

    assert not torch.allclose(model.logits(new, kv, blocks, mask, spoil), everything, atol=1e-2)


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """All modules of the benchmark see a GPU whose memory is the host's."""
    gpu = install(monkeypatch)
    gpu.set(eager=1, lenient=1)
    cuda = gpu.torch().cuda
    cuda.empty_cache = lambda: None
    cuda._sleep = lambda cycles: None

    class Eager:
        """torch, but for the device: tensors are on the CPU and over when they are begun."""

        def __getattr__(self, name: str) -> Any:
            return getattr(torch, name)

        def device(self, kind: Any, index: int = 0) -> torch.device:
            return CPU

    fake: Any = Eager()
    event = cuda.Event
    cuda.Event = lambda enable_timing=False: _OnModel(event(enable_timing), gpu.model)
    fake.cuda = cuda
    for module in (
        bandwidth, beside, correctness, encoded, first_logits, moved_numbers, rig, rules,
    ):  # fmt: skip
        monkeypatch.setattr(module, "torch", fake)
    monkeypatch.setattr(cuda_engine, "_refuse_without_gpu", lambda device: None)
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda tensor: True)


class _OnModel(SimpleNamespace):
    """torch.cuda.Event as the benchmark uses it: recorded on the current stream."""

    def __init__(self, event: Any, stream: Any) -> None:
        super().__init__(event=event, stream=stream)

    def record(self) -> None:
        self.event.record(self.stream)

    def synchronize(self) -> None:
        self.event.synchronize()

    def elapsed_time(self, end: _OnModel) -> float:
        return float(self.event.elapsed_time(end.event))


@pytest.mark.usefixtures("eager")
def test_every_part_runs(tmp_path: Path) -> None:
    """Of the values nothing is meant; that bytes are right is."""
    shape = KvShape("tiny", layers=2, kv_heads=1, head_dim=8)
    rows = correctness.measure(CPU, rounds=1)
    rows += rules.measure(512, 1, tmp_path / "copy_rules.json", [shape])
    rows += bandwidth.measure(shape, 512, rounds=1)
    rows += encoded.measure(shape, 512, rounds=1)
    rows += first_logits.measure(TINY, history=256, new=32, rounds=1)
    rows += moved_numbers.measure(CPU, rounds=1)
    rows += moves.measure(shape, 512, rounds=1)
    assert not any(row.is_wrong for row in rows)
    assert {row.goal for row in rows} == {None, 1.0, 0.95, 1.10, 1.02, 1.25}
    assert len({(row.what, row.how) for row in rows}) == len(rows)
    json.dumps([row.to_json() for row in rows], allow_nan=False)
    kept = find_rules("a fake", 13000, tmp_path / "copy_rules.json")
    assert kept.keys() == RULES.keys() and kept is not RULES
    assert correctness.LAYOUTS.keys() and all(
        len(row.cells()) == len(gpu_check.HEAD) for row in rows
    )


def others(dma: float, buffer: float = 99.0) -> dict[Rule, float]:
    """Seconds by DMA, in either order of reads, and through the read buffer."""
    return {**dict.fromkeys(rules.DMA, dma), **dict.fromkeys(rules.BUFFER, buffer)}


@pytest.mark.parametrize(
    ("buffer", "loads"),
    [
        ([9, 9, 9], (Rule(200, Method.DMA), Rule(0, Method.KERNEL, 8))),
        ([1, 1, 1], (Rule(0, Method.BUFFER, 16),)),
        ([1.95, 1.95, 1.95], (Rule(200, Method.DMA), Rule(0, Method.KERNEL, 8))),
        ([1.9, 1.9, 2.5], (Rule(300, Method.DMA), Rule(0, Method.BUFFER, 16))),
        ([9, 1, 9], (Rule(300, Method.DMA), Rule(200, Method.BUFFER, 16),
                     Rule(0, Method.KERNEL, 8))),
    ],
)  # fmt: skip
def test_the_read_buffer_is_used_where_it_is_clearly_faster(
    buffer: list[float], loads: tuple[Rule, ...]
) -> None:
    """All take two seconds without it: the kernel the shortest runs, DMA the others."""
    slow, fast = (dict.fromkeys(rules.KERNEL, seconds) for seconds in (3.0, 2.0))
    found = rules.rules_from(
        {
            100: {**fast, **others(9, buffer[0])},
            200: {**slow, **others(2, buffer[1])},
            300: {**slow, **others(2, buffer[2])},
        }
    )
    assert found[Copy.LOAD] == loads


@pytest.mark.parametrize(
    ("dma", "loads"),
    [
        ([9, 9, 9], (Rule(0, Method.KERNEL, 16),)),
        ([1, 1, 1], (Rule(0, Method.DMA),)),
        ([9, 1, 1], (Rule(200, Method.DMA), Rule(0, Method.KERNEL, 8))),
        ([1, 9, 1], (Rule(300, Method.DMA), Rule(0, Method.KERNEL, 16))),
    ],
)
def test_the_measured_table_goes_by_what_is_never_slower(
    dma: list[float], loads: tuple[Rule, ...]
) -> None:
    """The kernel takes 3 s, but 4 s on the fewest thread blocks where runs have 200 bytes."""
    kernel: dict[int, list[float]] = {
        100: [3.1, 3, 3, 3, 3],
        200: [4, 3, 3, 3, 3],
        300: [3, 3, 3, 3, 3],
    }
    times = {
        length: {**dict(zip(rules.KERNEL, kernel[length], strict=True)), **others(dma[i])}
        for i, length in enumerate(kernel)
    }
    found = rules.rules_from(times)
    assert found[Copy.LOAD] == loads
    assert {copy: some for copy, some in found.items() if copy is not Copy.LOAD} == {
        copy: some for copy, some in RULES.items() if copy is not Copy.LOAD
    }


@pytest.mark.parametrize(
    ("in_order", "order"), [(1.0, ReadOrder.ANY), (0.9, ReadOrder.STREAM), (1.1, ReadOrder.ANY)]
)
def test_the_order_that_is_faster_is_in_the_table(
    tmp_path: Path, in_order: float, order: ReadOrder
) -> None:
    slow, fast = (dict.fromkeys(rules.KERNEL, seconds) for seconds in (9.0, 0.1))
    by_dma = {**others(1.0), **dict(zip(rules.DMA, (1.0, in_order), strict=True))}
    found = rules.rules_from({100: {**fast, **by_dma}, 200: {**slow, **by_dma}})
    assert found[Copy.LOAD] == (Rule(200, Method.DMA, order=order), Rule(0, Method.KERNEL, 8))
    keep_rules("a fake", found, tmp_path / "rules.json")
    assert find_rules("a fake", 13000, tmp_path / "rules.json") == found


@pytest.mark.usefixtures("eager")
def test_wrong_numbers_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moved_numbers.Pages, "_look", _one_number_off)
    (row,) = moved_numbers.measure(CPU, rounds=1)
    assert row.is_wrong
    assert row.value == 0.0


def _one_number_off(pages: Any) -> Any:
    found = _look(pages)
    if hasattr(pages, "wanted"):  # it is not the first look
        found[0, 0, 0] ^= 1 << 6
    return found


_look = moved_numbers.Pages._look


@pytest.mark.usefixtures("eager")
def test_encoded_numbers_that_do_not_come_back_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def save_badly(found: rig.KvRig) -> None:
        save(found)
        found.slots[7] ^= 1

    save = encoded.save
    monkeypatch.setattr(encoded, "save", save_badly)
    row = next(encoded.measure(KvShape("tiny", layers=2, kv_heads=1, head_dim=8), 256, 1))
    assert row.is_wrong and row.value is not None and 0.99 < row.value < 1


@pytest.mark.usefixtures("eager")
def test_products_beside_loads_that_do_not_outlast_them_are_not_counted() -> None:
    rows = list(beside.measure(KvShape("tiny", layers=2, kv_heads=1, head_dim=8), 256, 1, 32))
    assert {row.value for row in rows} == {None}, "copies are over when they are begun here"
    assert {row.how for row in rows if "never outlasted" in row.detail} == {
        "rules",
        *(name for name in bandwidth.WAYS if name.startswith(("kernel", "read"))),
    }


@pytest.mark.usefixtures("eager")
def test_short_runs_are_not_loaded_by_dma_beside_products_and_a_row_says_so() -> None:
    short = KvShape("short", layers=2, kv_heads=1, head_dim=8)
    found = {row.how: row.detail for row in beside.measure(short, 256, 1, 32)}
    assert found["DMA"] == "left out: by DMA only from runs of 32 KiB on"
    long = KvShape("long", layers=1, kv_heads=8, head_dim=64)
    assert long.page_bytes == beside.DMA_FROM_BYTES
    found = {row.how: row.detail for row in beside.measure(long, 256, 1, 32)}
    assert found["DMA"] == "the loads never outlasted the products"


def test_a_run_that_is_ended_leaves_its_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, first = tmp_path / "found.json", Row("what", "how", 0.5)

    def ended() -> Iterator[Row]:
        yield first
        assert json.loads(out.read_text())["rows"] == [first.to_json()]
        raise KeyboardInterrupt

    monkeypatch.setattr(gpu_check, "why_not", lambda: None)
    monkeypatch.setattr(gpu_check, "machine", lambda: {"gpu": "a fake"})
    monkeypatch.setattr(gpu_check, "parts", lambda size: {"bytes": ended, "rules": ended})
    monkeypatch.setattr(sys, "argv", ["gpu_check", "--out", str(out), "--only", "bytes", "rules"])
    with pytest.raises(KeyboardInterrupt):
        gpu_check.main()
    found = json.loads(out.read_text())
    assert found["rows"] == [first.to_json()]
    assert found["parts"] == ["bytes", "rules"], "what is missing can be seen"
