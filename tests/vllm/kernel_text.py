# SPDX-License-Identifier: Apache-2.0
"""Runs the text of vLLM's own slot-mapping kernels on the CPU, where no Triton compiles them.

The functions are taken from vLLM's files as they stand there, without their decorators; what they
ask of Triton's language is done with numpy. So the tokens of a block lie where vLLM puts them.
"""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Slots = npt.NDArray[np.int64]
PAD = -1
V1 = ("vllm.v1.worker.block_table", "kernel")
V2 = ("vllm.v1.worker.gpu.block_table", "_compute_slot_mappings_kernel")


class _Value(np.ndarray):
    def to(self, dtype: Any) -> Any:
        return self.astype(dtype).view(_Value)


class _Pointer:
    def __init__(self, target: Any, at: Any = 0) -> None:
        self.target, self.at = target, at

    def __add__(self, offset: Any) -> _Pointer:
        return _Pointer(self.target, self.at + np.asarray(offset))


class Language:
    """What the kernels use of `triton.language`, for one program."""

    constexpr = object
    int32, int64 = np.int32, np.int64

    def __init__(self, program: tuple[int, ...], programs: tuple[int, ...]) -> None:
        self._program, self._programs = program, programs

    def program_id(self, axis: int) -> int:
        return self._program[axis]

    def num_programs(self, axis: int) -> int:
        return self._programs[axis]

    def arange(self, start: int, stop: int) -> Slots:
        return np.arange(start, stop)

    def where(self, condition: Any, yes: Any, no: Any) -> Any:
        return np.where(condition, yes, no)

    def load(self, pointer: _Pointer, mask: Any = True, other: int = 0) -> Any:
        at, may = np.broadcast_arrays(pointer.at, mask)
        found = np.full(at.shape, other, pointer.target.dtype)
        found[may] = pointer.target[at[may]]
        return found.view(_Value)

    def store(self, pointer: _Pointer, value: Any, mask: Any = True) -> None:
        at, may, values = np.broadcast_arrays(pointer.at, mask, value)
        pointer.target[at[may]] = values[may]


@cache
def _text(module: str, name: str) -> Any:
    """The compiled text of a function in a module of vLLM's, its decorators left out."""
    spec = importlib.util.find_spec(module)
    assert spec is not None and spec.origin is not None
    tree = ast.parse(Path(spec.origin).read_text(encoding="utf-8"))
    (found,) = (n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name == name)
    found.decorator_list.clear()
    return compile(ast.Module([found], []), spec.origin, "exec")


def _run(which: tuple[str, str], grid: Sequence[int], *arguments: Any, **named: Any) -> None:
    for program in np.ndindex(*grid):
        names: dict[str, Any] = {
            "tl": Language(program, tuple(grid)),
            "_load_ptr": lambda pointer, _: _Pointer(pointer.target[int(pointer.at)]),
        }
        exec(_text(*which), names)
        function: Callable[..., None] = names[which[1]]
        function(*arguments, **named)


def slots_of(
    block_ids: Sequence[int],
    positions: Slots,
    *,
    block: int,
    ranks: int,
    rank: int,
    interleave: int,
    which: tuple[str, str] = V1,
) -> Slots:
    """Where vLLM puts the KV of one request's tokens on a rank: number of the block times `block`
    and the place in it. PAD: the rank has it not.

    Args:
        block: tokens of a block on each rank.
        ranks, rank: of the decode context parallel group, and this one's number in it.
    """
    count = len(positions)
    table = np.array(block_ids, np.int32)
    starts, found = np.array([0, count], np.int32), np.full(count + 3, 7, np.int64)
    if which == V1:
        _run(
            V1, (2,), count, len(found), _Pointer(starts), _Pointer(positions), _Pointer(table),
            len(table), _Pointer(found), block, ranks, rank, interleave, PAD, 1024,
        )  # fmt: skip
    else:
        one = np.ones(1, bool)
        _run(
            V2, (1, 2), len(found), _Pointer(np.zeros(1, np.int32)), _Pointer(starts),
            _Pointer(positions), _Pointer([table]), _Pointer(np.array([len(table)])),
            _Pointer(np.array([block])), _Pointer(one), _Pointer(one), _Pointer(found), len(found),
            rank, CP_SIZE=ranks, CP_INTERLEAVE=interleave, PAD_ID=PAD, TRITON_BLOCK_SIZE=1024,
        )  # fmt: skip
    assert (found[count:] == PAD).all()
    return found[:count]
