# SPDX-License-Identifier: Apache-2.0
"""The native page copier against numpy: any size, any alignment, any team."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from tests.native_shapes import copier

Bytes = npt.NDArray[np.uint8]
SLOTS, BLOCKS, LAYERS, PAGES = 5, 9, 2, 3


class Memory:
    """HBM and slots in numpy. A page is one run, or two with a gap between them.

    Args:
        shift: bytes by which everything misses its alignment.
    """

    def __init__(self, page_bytes: int, *, shift: int = 0, num_runs: int = 1) -> None:
        self.page_bytes, self.num_runs = page_bytes, num_runs
        self.gap = 5 if num_runs > 1 else 0
        rng = np.random.default_rng(page_bytes * 64 + shift)
        self.stride = page_bytes + 2 * self.gap + 3
        self.run_bytes = page_bytes // num_runs
        size = LAYERS * BLOCKS * self.stride + shift
        self.hbm: Bytes = rng.integers(0, 256, size, dtype=np.uint8)
        self.slot_bytes = LAYERS * PAGES * page_bytes + 7
        self.slots: Bytes = rng.integers(0, 256, SLOTS * self.slot_bytes + shift, dtype=np.uint8)
        self.shift = shift
        base = self.hbm.ctypes.data + shift
        self.native = copier(
            {
                "slots_base": self.slots.ctypes.data + shift,
                "num_slots": SLOTS,
                "slot_bytes": self.slot_bytes,
                "layer_bytes": PAGES * page_bytes,
                "page_bytes": page_bytes,
                "layer_bases": [base + layer * BLOCKS * self.stride for layer in range(LAYERS)],
                "num_blocks": BLOCKS,
                "block_stride": self.stride,
                "run_offsets": self.run_offsets,
                "run_bytes": self.run_bytes,
            }
        )

    @property
    def run_offsets(self) -> list[int]:
        return [run * (self.run_bytes + self.gap) for run in range(self.num_runs)]

    def move(self, copies: npt.NDArray[np.int64], hbm: Bytes, slots: Bytes, *, load: bool) -> None:
        """What the native copier should do, in numpy."""
        for layer in range(LAYERS):
            for slot, page, block in copies.tolist():
                at = self.shift + slot * self.slot_bytes + (layer * PAGES + page) * self.page_bytes
                for offset in self.run_offsets:
                    in_hbm = self.shift + (layer * BLOCKS + block) * self.stride + offset
                    s, h = slice(at, at + self.run_bytes), slice(in_hbm, in_hbm + self.run_bytes)
                    if load:
                        hbm[h] = slots[s]
                    else:
                        slots[s] = hbm[h]
                    at += self.run_bytes

    def check(self, copies: npt.NDArray[np.int64], *, load: bool) -> None:
        """Move natively and in numpy; everything must be equal, also what is not to be moved."""
        hbm, slots = self.hbm.copy(), self.slots.copy()
        self.move(copies, hbm, slots, load=load)
        (self.native.load if load else self.native.save)(copies, 0, LAYERS)
        assert np.array_equal(self.hbm, hbm)
        assert np.array_equal(self.slots, slots)


def some_copies(rng: np.random.Generator, count: int) -> npt.NDArray[np.int64]:
    """Distinct places in slots and distinct blocks, as a plan has."""
    places = rng.permutation(SLOTS * PAGES)[:count]
    blocks = rng.permutation(BLOCKS)[:count]
    return np.stack([places // PAGES, places % PAGES, blocks], axis=1).astype(np.int64)


# Around the 64 bytes of a cache line, and sizes of real pages.
@pytest.mark.parametrize("page_bytes", [2, 62, 64, 66, 126, 128, 130, 192, 1000, 4096, 65536])
@pytest.mark.parametrize("shift", [0, 1, 32, 63])
@pytest.mark.parametrize("num_runs", [1, 2])
def test_random_copies(page_bytes: int, shift: int, num_runs: int) -> None:
    memory = Memory(page_bytes, shift=shift, num_runs=num_runs)
    rng = np.random.default_rng(page_bytes + shift)
    for count in (1, 2, 8):
        memory.check(some_copies(rng, count), load=False)
        memory.check(some_copies(rng, count), load=True)


def test_nothing_to_copy() -> None:
    memory = Memory(64)
    none = np.empty((0, 3), dtype=np.int64)
    memory.check(none, load=True)
    memory.check(none, load=False)


PROGRAM = """
import sys
import numpy as np
{first}
from tests.unit.transfer.test_native import Memory, some_copies
from attnstore_vllm._native import omp_team_size
assert omp_team_size() == {size}, omp_team_size()
memory, rng = Memory(1000), np.random.default_rng(5)
for _ in range(100):
    memory.check(some_copies(rng, 6), load=bool(rng.integers(2)))
"""


@pytest.mark.parametrize(
    ("first", "size"),
    [
        ("", 1),
        ("import torch; torch.set_num_threads(1)", 1),
        ("import torch; torch.set_num_threads(5)", 5),
    ],
)
def test_with_any_team_and_with_none(first: str, size: int) -> None:
    """In a process of its own: without PyTorch there is no OpenMP runtime."""
    program = PROGRAM.format(first=first, size=size)
    root = Path(__file__).resolve().parents[3]
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=root, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_copiers_of_many_threads_at_once() -> None:
    """As several workers in one process have; each copier belongs to one thread."""
    failures: list[BaseException] = []

    def work(number: int) -> None:
        try:
            memory = Memory(640 + number, num_runs=1)
            rng = np.random.default_rng(number)
            for _ in range(150):
                memory.check(some_copies(rng, 5), load=bool(rng.integers(2)))
        except BaseException as error:
            failures.append(error)

    workers = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not failures


def test_what_makes_no_sense_is_refused() -> None:
    memory = Memory(64)
    with pytest.raises(ValueError, match=r"must be \[n, 3\]"):
        memory.native.save(np.zeros((2, 2), dtype=np.int64), 0, LAYERS)
    with pytest.raises(ValueError, match=r"must be \[n, 3\]"):
        memory.native.save(np.zeros(3, dtype=np.int64), 0, LAYERS)
    with pytest.raises(IndexError, match="does not exist"):
        memory.native.save(np.array([[0, 0, 0], [0, PAGES, 0]], dtype=np.int64), 0, LAYERS)
    shape = {
        "slots_base": 0, "num_slots": 1, "slot_bytes": 64, "layer_bytes": 64, "page_bytes": 64,
        "layer_bases": [0], "num_blocks": 1, "block_stride": 64, "run_offsets": [0],
        "run_bytes": 64,
    }  # fmt: skip
    copier(shape)
    for change in ({"run_bytes": 32}, {"layer_bytes": 96}, {"slot_bytes": 63}):
        with pytest.raises(ValueError, match=r"do not|is not"):
            copier(shape | change)
