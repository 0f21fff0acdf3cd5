# SPDX-License-Identifier: Apache-2.0
"""The disk of a node that is not the first: what it gives back is what the order's stamp names."""

from __future__ import annotations

import ctypes
import mmap
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from attnstore_vllm.errors import MachineError
from attnstore_vllm.identity.weights import DigestOfNodes, Weights
from attnstore_vllm.io.device import Op
from attnstore_vllm.tiers.nvme.node_disk import (
    FILE_NAME,
    LOOK,
    NodeDisk,
    NodeFailure,
    NodeOrder,
    NodeResult,
)

SLOT = 8192
RECORD = 4096 + SLOT
A, B = b"a" * 32, b"b" * 32


class Memory:
    """Four slots."""

    num_slots, slot_bytes = 4, SLOT

    def __init__(self) -> None:
        self._bytes = mmap.mmap(-1, self.num_slots * SLOT)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._bytes))
        self.view = memoryview(self._bytes)

    def slot(self, slot: int) -> memoryview:
        return self.view[slot * SLOT : (slot + 1) * SLOT]

    def close(self) -> None:
        pass


class Rig:
    def __init__(
        self, directory: Path, capacity_bytes: int = 4096 + 10 * RECORD, node: int = 1
    ) -> None:
        self.memory, self.digest, self.node = Memory(), list[bytes](), node
        self.disk = NodeDisk(
            self.memory, directory, capacity_bytes, "auto", 5.0, node, self._weights
        )
        self.path = directory / FILE_NAME
        self._number = 0

    def _weights(self) -> bytes | None:
        return self.digest[0] if self.digest else None

    def do(self, op: Op, record: int, slot: int, stamp: bytes) -> NodeResult:
        self._number += 1
        self.disk.begin([NodeOrder(self._number, op, record, slot, stamp)])
        deadline = time.monotonic() + 10
        while not (results := self.disk.take_results()):
            assert time.monotonic() < deadline
            time.sleep(0.001)
        (result,) = results
        assert (result.node, result.number) == (self.node, self._number)
        return result

    def write(self, record: int, content: bytes, stamp: bytes) -> None:
        self.memory.slot(0)[:] = content * SLOT
        assert self.do(Op.WRITE, record, 0, stamp).failed is NodeFailure.NO

    def change(self, at: int) -> None:
        with self.path.open("r+b") as file:
            file.seek(at)
            byte = file.read(1)[0]
            file.seek(at)
            file.write(bytes([byte ^ 1]))


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    found = Rig(tmp_path)
    yield found
    found.disk.close()


def test_a_record_comes_back_to_any_slot(rig: Rig) -> None:
    rig.write(3, b"x", A)
    rig.write(4, b"y", B)
    assert rig.do(Op.READ, 3, 2, A).failed is NodeFailure.NO
    assert bytes(rig.memory.slot(2)) == b"x" * SLOT


def test_another_stamp_is_another_record(rig: Rig) -> None:
    rig.write(3, b"x", A)
    assert rig.do(Op.READ, 3, 1, B).failed is NodeFailure.GONE
    assert rig.do(Op.READ, 5, 1, A).failed is NodeFailure.GONE, "nothing was written there"
    rig.write(3, b"y", B)
    assert rig.do(Op.READ, 3, 1, A).failed is NodeFailure.GONE, "it was written over"


def test_machines_that_change_places(tmp_path: Path) -> None:
    """The first node sends one order to all: the same stamp. Their parts are not the same."""
    one, two = tmp_path / "one", tmp_path / "two"
    for directory, node in ((one, 1), (two, 2)):
        directory.mkdir()
        found = Rig(directory, node=node)
        found.write(3, bytes([node]), A)
        found.disk.close()
    for directory, node, failed in ((one, 2, NodeFailure.GONE), (one, 1, NodeFailure.NO)):
        found = Rig(directory, node=node)
        assert found.do(Op.READ, 3, 1, A).failed is failed
        found.disk.close()


def test_a_record_beyond_its_file_is_a_miss(rig: Rig) -> None:
    """The first node's file may be longer. The disk is well."""
    assert rig.disk.num_records == 10
    for op in Op.READ, Op.WRITE:
        assert rig.do(op, 10, 0, A).failed is NodeFailure.GONE


@pytest.mark.parametrize("at", [8 + 32, 4096, RECORD - 1])
def test_a_damaged_record(rig: Rig, at: int) -> None:
    rig.write(3, b"x", A)
    rig.change(3 * RECORD + at)
    result = rig.do(Op.READ, 3, 1, A)
    assert result.failed is NodeFailure.CORRUPT
    assert f"node 1: {rig.path}, record 3" in str(result.error())


def test_a_damaged_stamp(rig: Rig) -> None:
    rig.write(3, b"x", A)
    rig.change(3 * RECORD + 8)
    assert rig.do(Op.READ, 3, 1, A).failed is NodeFailure.GONE


def test_looks_touch_no_record(rig: Rig) -> None:
    for record in range(10):
        rig.write(record, b"x", A)
    before = rig.path.read_bytes()
    for op in (Op.READ, Op.WRITE, Op.READ):
        assert rig.do(op, 0, LOOK, bytes(32)).failed is NodeFailure.NO
    assert rig.path.read_bytes()[: 10 * RECORD] == before[: 10 * RECORD]
    assert len(before) <= 4096 + 10 * RECORD


def test_it_is_there_after_a_restart(tmp_path: Path) -> None:
    first = Rig(tmp_path)
    first.write(7, b"x", A)
    first.disk.close()
    second = Rig(tmp_path)
    assert second.do(Op.READ, 7, 3, A).failed is NodeFailure.NO
    assert bytes(second.memory.slot(3)) == b"x" * SLOT
    second.disk.close()


def test_a_file_of_others_is_refused(tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).symlink_to("elsewhere")
    with pytest.raises(MachineError, match="is a link"):
        Rig(tmp_path)


def test_a_digest_is_told_once_when_it_is_known(rig: Rig) -> None:
    assert rig.disk.take_results() == []
    rig.digest.append(b"weights")
    assert rig.disk.take_results() == [NodeResult(1, 0, digest=b"weights")]
    assert rig.disk.take_results() == []


def test_names_have_the_weights_of_all_nodes() -> None:
    others: dict[int, bytes] = {}
    names = Weights(b"base", DigestOfNodes(b"own", others, 2))
    assert names.namespace is None
    others[2] = b"two"
    assert names.namespace is None, "one has not told"
    others[1] = b"one"
    found = names.namespace
    assert found is not None
    others[1] = b"else"
    assert names.namespace != found
    names.close()


def test_a_process_that_ends_without_close_ends_as_any_other(tmp_path: Path) -> None:
    """A worker that vLLM ends closes nothing. Its interpreter may take a while to end."""
    program = f"""
import time
from pathlib import Path
from {__name__} import Rig
class Slow:
    def __del__(self):
        time.sleep(0.6)
slow = Slow()
Rig(Path({str(tmp_path)!r})).write(3, b"x", bytes(32))
"""
    root = Path(__file__).parents[4]
    ended = subprocess.run([sys.executable, "-c", program], cwd=root, timeout=60, check=False)
    assert ended.returncode == 0
