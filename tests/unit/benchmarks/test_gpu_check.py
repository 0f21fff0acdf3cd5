# SPDX-License-Identifier: Apache-2.0
"""benchmarks.gpu_check where there is no GPU: it says so, and what can be run is run on a fake."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from attnstore_vllm.transfer import cuda_engine
from attnstore_vllm.transfer.cuda_methods import RULES, Copy, Method, Rule, find_rules
from benchmarks import gpu_check
from benchmarks.gpu import (
    bandwidth,
    beside,
    correctness,
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
    for module in (bandwidth, beside, correctness, first_logits, moved_numbers, rig, rules):
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
    rows += first_logits.measure(TINY, history=256, new=32, rounds=1)
    rows += moved_numbers.measure(CPU, rounds=1)
    rows += moves.measure(shape, 512, rounds=1)
    assert not any(row.is_wrong for row in rows)
    assert {row.goal for row in rows} == {None, 1.0, 0.95, 1.10, 1.02}
    assert len({(row.what, row.how) for row in rows}) == len(rows)
    json.dumps([row.to_json() for row in rows], allow_nan=False)
    kept = find_rules("a fake", 13000, tmp_path / "copy_rules.json")
    assert kept.keys() == RULES.keys() and kept is not RULES
    assert correctness.LAYOUTS.keys() and all(
        len(row.cells()) == len(gpu_check.HEAD) for row in rows
    )


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
    times = {length: [dma[i], *kernel[length]] for i, length in enumerate(kernel)}
    found = rules.rules_from(times)
    assert found[Copy.LOAD] == loads
    assert {copy: some for copy, some in found.items() if copy is not Copy.LOAD} == {
        copy: some for copy, some in RULES.items() if copy is not Copy.LOAD
    }


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
def test_products_beside_loads_that_do_not_outlast_them_are_not_counted() -> None:
    rows = beside.measure(KvShape("tiny", layers=2, kv_heads=1, head_dim=8), 256, 1, 32)
    assert {row.value for row in rows} == {None}, "copies are over when they are begun here"
