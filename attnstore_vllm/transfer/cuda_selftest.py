# SPDX-License-Identifier: Apache-2.0
"""Copies one block, all layers, by every way that CudaEngine has, and looks at the bytes.

A build for another GPU, a driver that does not see the pool, or a layout that is not understood is
found here and not in an answer.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from attnstore_vllm.errors import CopyError, UnsupportedError
from attnstore_vllm.transfer.cuda_methods import Method, only
from attnstore_vllm.transfer.engine import Pages
from attnstore_vllm.transfer.geometry import Geometry

if TYPE_CHECKING:
    from attnstore_vllm.transfer.cuda_engine import CudaEngine

Bytes = npt.NDArray[np.uint8]


def check_engine(
    engine: CudaEngine,
    geometry: Geometry,
    slots_base: int,
    num_slots: int,
    rank: int,
    num_blocks: int,
) -> None:
    """Use the last block of the last slot, and the last block and row. The block is given back as
    it was, the slot is zero after it. Raises UnsupportedError."""
    g = geometry
    pages = np.array([[num_slots - 1, g.blocks_per_chunk - 1, num_blocks - 1]], np.int64)
    at = (num_slots - 1) * g.slot_bytes + rank * g.rank_bytes
    at += (g.blocks_per_chunk - 1) * g.page_bytes
    in_slot = _layers_at(slots_base + at, g)
    before_rules = engine.rules
    try:
        engine.rules = only(Method.DMA)
        engine.wait(engine.save(pages, range(g.num_layers)))
        was = in_slot.copy()
        for method in Method:
            engine.rules = only(method)
            _check_method(engine, pages, in_slot, method)
        in_slot[:] = was
        engine.wait(engine.load(pages, range(g.num_layers)))
        in_slot[:] = 0
    except CopyError as error:
        raise UnsupportedError(
            f"this GPU cannot copy between its memory and the pool: {error}; was the extension "
            "built for it (setup.py: ARCHITECTURES), and is its driver as new as the CUDA toolkit "
            "that built it?"
        ) from error
    finally:
        engine.rules = before_rules


def _check_method(engine: CudaEngine, pages: Pages, in_slot: Bytes, method: Method) -> None:
    layers = range(len(in_slot))
    wanted = np.random.default_rng(len(method.value)).integers(0, 256, in_slot.shape, np.uint8)
    in_slot[:] = wanted
    for layer in layers:  # as the forward pass has it
        engine.wait(engine.load(pages, range(layer, layer + 1)))
    for is_buffered in (False, True) if engine.num_rows else (False,):
        in_slot[:] = ~wanted
        if is_buffered:
            rows = np.array([engine.num_rows - 1], np.int64)
            engine.gather(pages, rows, layers)
            engine.wait(engine.drain(pages, rows, layers))
        else:
            engine.wait(engine.save(pages, layers))
        if not np.array_equal(in_slot, wanted):
            way = "through the write buffer" if is_buffered else "directly"
            wrong = np.flatnonzero((in_slot != wanted).any(axis=1)).tolist()
            raise UnsupportedError(
                f"a block that was loaded and saved {way} by {method.value} came back with other "
                f"bytes in the layers {wrong}; AttnStore cannot be used on this machine"
            )


def _layers_at(address: int, geometry: Geometry) -> Bytes:
    """[layers, page_bytes]: one block of a chunk, in place in its slot."""
    g = geometry
    span = (g.num_layers - 1) * g.layer_bytes + g.page_bytes
    owner = (ctypes.c_uint8 * span).from_address(address)
    flat = np.ctypeslib.as_array(owner)
    return np.lib.stride_tricks.as_strided(flat, (g.num_layers, g.page_bytes), (g.layer_bytes, 1))
