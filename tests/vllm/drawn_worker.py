# SPDX-License-Identifier: Apache-2.0
"""A scripted worker (scripted_worker.py) for a drawn model (drawn_models.py): KV is in the tensors
that vLLM's own function cuts for the layers' specs, and each forward pass looks at every byte that
such layers read.

A *cell* is what one layer keeps of one state: of a token in most. Its bytes are made of the digest
of all tokens up to it, and of bytes that are this layer's, this rank's and this type of KV's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from blake3 import blake3
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    CircularBufferSpec,
    KVCacheConfig,
    MambaSpec,
    MLAAttentionSpec,
    RSWASpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
)
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.worker.utils import allocate_kv_cache

from attnstore_vllm.transfer.geometry import Geometry
from tests.fake_gpu import FakeGpu
from tests.vllm.drawn_models import Drawn
from tests.vllm.grouped import GroupedWorker, Kind, first_seen
from tests.vllm.kernel_text import PAD, V1, V2, slots_of
from tests.vllm.scripted_worker import TOKEN_KV, Kv, Row, _Run

Cells = npt.NDArray[np.uint8]


class WrongBytesError(AssertionError):
    """A forward pass reads bytes that are not those of its tokens."""


def kind_of(spec: Any) -> Kind:
    """What such a layer reads, as vLLM's kernels for it do."""
    if isinstance(spec, MambaSpec):
        return Kind("state", block=spec.block_size)
    if isinstance(spec, CircularBufferSpec):
        return Kind("ring", block=spec.block_size)
    if isinstance(spec, SlidingWindowSpec):
        replayed = isinstance(spec, SlidingWindowMLASpec) and spec.bounded_replay
        reach = "replayed" if replayed else "window"
        return Kind(reach, spec.sliding_window, spec.block_size)
    if isinstance(spec, ChunkedLocalAttentionSpec):
        return Kind("local", spec.attention_chunk_size, spec.block_size)
    if isinstance(spec, RSWASpec):
        return Kind("prompt", spec.rswa_window, spec.block_size)
    return Kind("full", block=spec.block_size, ratio=int(spec.tokens_per_state))


def is_shared(spec: Any) -> bool:
    """Whether all tensor-parallel ranks keep the same."""
    if isinstance(spec, MambaSpec):
        return spec.tp_replicated
    return isinstance(spec, (MLAAttentionSpec, SlidingWindowMLASpec, CircularBufferSpec))


@cache
def bytes_of(*whose: object, size: int) -> Cells:
    return np.frombuffer(blake3(repr(whose).encode()).digest(length=size), np.uint8)


@dataclass
class Layer:
    name: str
    group: int
    """Of vLLM's groups."""
    kind: Kind
    cells: Cells
    """[blocks, heads, states, bytes of a state]: the tensor."""
    mask: Cells
    """Bytes of a cell."""
    decode: int
    """Ranks that share the tokens of a block."""
    retained: int
    """Tokens below its window that a drafter may read, where vLLM has their blocks."""

    @property
    def states(self) -> int:
        """Of a block."""
        return int(self.cells.shape[2])

    def wanted(self, digests: Kv, which: npt.NDArray[np.int64]) -> Cells:
        """[cells, heads, bytes]: of the states that end with these tokens."""
        size = len(self.mask)
        found = digests[which][:, np.arange(size) % TOKEN_KV] ^ self.mask
        return found.reshape(len(which), self.cells.shape[1], self.cells.shape[3])


class Blocks:
    """A layer's tensor, as the code of vLLM's runner writes to whole blocks of it: in the model's
    order, which a GPU has apart from ours."""

    def __init__(self, cells: Cells, run: Callable[[Callable[[], None]], None]) -> None:
        self._cells, self._run = cells, run

    def __getitem__(self, at: Any) -> Callable[[], Cells]:
        return lambda: self._cells[at]

    def __setitem__(self, at: Any, value: Any) -> None:
        def write() -> None:
            self._cells[at] = value() if callable(value) else value

        self._run(write)


class DrawnWorker(GroupedWorker):
    """See the module."""

    drawn: Drawn
    caches: list[KVCacheConfig]
    """Of each rank, as vLLM makes them."""
    gpu: FakeGpu | None = None
    """Where the model runs on one."""
    writes_first = False
    """KV of new tokens is written before the hook that waits."""

    def _allocate(self, geometry: Geometry, num_blocks: int) -> dict[str, torch.Tensor]:
        if self.gpu is not None:
            self.gpu.use(self.rank)
        config = self.caches[self.rank]
        assert config.num_blocks == num_blocks
        layout = KVCacheLayout[self.drawn.layout]
        kv = allocate_kv_cache(config, torch.device("cpu"), layout)
        memory = next(iter(kv.values()))
        everything = torch.tensor([], dtype=torch.uint8).set_(memory.untyped_storage())
        everything.random_(generator=torch.Generator().manual_seed(self.rank))
        if self.gpu is not None:
            self.gpu.hold(memory)
        groups = {name: n for n, g in enumerate(config.kv_cache_groups) for name in g.layer_names}
        self.layers = {name: self._layer(name, groups[name], kv[name]) for name in kv}
        self.hbm = [Blocks(layer.cells, self.on_model) for layer in self.layers.values()]
        self._digests: dict[int, Kv] = {}
        self.bytes_checked = self.retained_seen = 0
        self._ring_ratio = max(layer.kind.ratio for layer in self.layers.values())
        self.block = geometry.block_tokens
        return kv

    def _layer(self, name: str, group: int, kv: torch.Tensor) -> Layer:
        spec, drawn = self.drawn.specs[name], self.drawn
        # vLLM may have made blocks larger, so that pages have one size.
        made: Any = self.caches[self.rank].kv_cache_groups[group].kv_cache_spec
        made = getattr(made, "kv_cache_specs", {name: made})[name]
        cells = kv.view(torch.uint8).numpy()
        of_rank = 0 if is_shared(spec) else self.rank % drawn.ranks.tensor
        size = cells.shape[1] * cells.shape[3]
        mask = bytes_of(name, of_rank, drawn.kv_type, size=size)
        decode = drawn.ranks.decode if getattr(made, "dcp_sharded", False) else 1
        retained = getattr(made, "extra_retained_tokens", 0)
        return Layer(name, group, kind_of(made), cells, mask, decode, retained)

    def _part(self, rank: int) -> str:
        ranks = self.drawn.ranks
        return "" if ranks.decode == ranks.prefill == 1 else ranks.part(rank)

    def on_model(self, work: Callable[[], object]) -> None:
        """What the model does to HBM, in its order."""
        if self.gpu is None:
            work()
        else:
            self.gpu.model.run(work)

    def execute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        self._digests.clear()
        if self.gpu is None:
            return super().execute(output)
        self.gpu.use(self.rank)
        for _ in range(self.gpu.random.randrange(30)):
            self.gpu.step()
        result = super().execute(output)
        self.gpu.raise_errors()
        return result

    def close(self) -> None:
        if self.gpu is not None:
            self.gpu.use(self.rank)
            self.gpu.synchronize()
        super().close()

    def _compute(self, layer: int, runs: list[_Run], *, replays: bool) -> None:
        name = self.names[layer]
        found = [self.layers[name]]
        if layer == 0:  # scratch has no hooks
            found += [scratch for n, scratch in self.layers.items() if n not in self.names]
        has_hooks = not replays and found[0].kind.reach != "state"
        self.between()
        if self.writes_first and found[0].kind.reach != "state":
            self._on_runs(self._write, found[:1], runs)
        if has_hooks:
            self.side.wait_for_layer(name)
        self._on_runs(self._look, found, runs)
        self.between()
        if has_hooks:
            self.side.layer_computed(name)

    def _on_runs(self, work: Callable[..., None], layers: list[Layer], runs: list[_Run]) -> None:
        for run in runs:
            digests = self._digests.get(id(run))
            if digests is None:
                kv = b"".join(run.kv + run.written)
                digests = np.frombuffer(kv, np.uint8).reshape(-1, TOKEN_KV)
                self._digests[id(run)] = digests
            for layer in layers:
                table = np.array(run.row.tables[layer.group])
                began = self._began_at[id(run.row)]
                self.on_model(partial(work, layer, run.start, digests, table, run.row, began))

    # ---- what layers read and write ----------------------------------------------------

    def _look(
        self, layer: Layer, start: int, digests: Kv, table: Any, row: Row, began: int
    ) -> None:
        """Write the new states, and compare all that the first of the new tokens reads."""
        reach = layer.kind.reach
        if reach == "state":
            self._look_at_state(layer, start, digests, table)
        elif reach == "ring":
            self._look_at_ring(layer, start, digests, table)
        else:
            self._write(layer, start, digests, table, row, began)
            self._compare(layer, self._read(layer, start, row, began), digests, table, start)
            self._look_below(layer, start, digests, table, began)

    def _write(
        self, layer: Layer, start: int, digests: Kv, table: Any, row: Row, began: int
    ) -> None:
        ratio = layer.kind.ratio
        new = np.arange(start // ratio, len(digests) // ratio)
        blocks, within, new = self._places(layer, new, table)
        assert (blocks != 0).all(), "vLLM has no block for a token that is computed"
        layer.cells[blocks, :, within] = layer.wanted(digests, (new + 1) * ratio - 1)

    def _read(self, layer: Layer, start: int, row: Row, began: int) -> npt.NDArray[np.int64]:
        """The states that the token `start` reads, itself left out."""
        kind = layer.kind
        first = first_seen(kind, start)
        if kind.reach == "replayed":
            first = max(first, began)
        if kind.reach != "prompt":
            return np.arange(first // kind.ratio, start // kind.ratio)
        prompt = self._news[row.name].prompt_token_ids
        assert prompt is not None
        first = max(first, len(prompt))
        return np.r_[: min(len(prompt), start), first : max(first, start)]

    def _look_below(self, layer: Layer, start: int, digests: Kv, table: Any, began: int) -> None:
        """What a drafter of several modules reads again, which is below the window. After a hit in
        HBM vLLM has no blocks for it."""
        first = first_seen(layer.kind, start)
        if not layer.retained or layer.kind.reach == "replayed":
            return
        which = np.arange(max(0, first - layer.retained), first)
        which = which[table[which // layer.kind.block] != 0]
        self.retained_seen += len(which)
        self._compare(layer, which, digests, table, start)

    def _compare(self, layer: Layer, which: Any, digests: Kv, table: Any, start: int) -> None:
        blocks, within, which = self._places(layer, which, table)
        assert (blocks != 0).all(), "no block for a token that is read"
        ratio = layer.kind.ratio
        self._check(
            layer,
            layer.cells[blocks, :, within],
            layer.wanted(digests, (which + 1) * ratio - 1),
            f"state {{}} of {len(digests) // ratio}, read by token {start}",
            which,
        )

    def _places(self, layer: Layer, which: Any, table: Any) -> tuple[Any, Any, Any]:
        """Block and place in it of states; and those that this rank has."""
        kind = layer.kind
        if layer.decode == 1:
            tokens = which * kind.ratio
            return table[tokens // kind.block], which % layer.states, which
        ranks = self.drawn.ranks
        slots = slots_of(
            table, which, block=kind.block, ranks=layer.decode, rank=ranks.decode_rank(self.rank),
            interleave=ranks.interleave, which=V2 if ranks.prefill > 1 else V1,
        )  # fmt: skip
        mine = slots != PAD
        return slots[mine] // kind.block, slots[mine] % kind.block, which[mine]

    def _look_at_state(self, layer: Layer, start: int, digests: Kv, table: Any) -> None:
        stop = len(digests)
        page = layer.cells[table[(stop - 1) // layer.kind.block]]
        if start:
            at = np.array([start - 1])
            told = f"the state after {start} tokens"
            self._check(layer, page.reshape(1, 1, -1), layer.wanted(digests, at), told, at)
        page[0, 0] = layer.wanted(digests, np.array([stop - 1]))[0, 0]

    def _look_at_ring(self, layer: Layer, start: int, digests: Kv, table: Any) -> None:
        """The tokens that are not in a state yet, of this request alone."""
        (block,) = table
        ring, stop = layer.cells[block].swapaxes(0, 1), len(digests)
        which = np.arange(start // self._ring_ratio * self._ring_ratio, start)
        wanted = layer.wanted(digests, which)
        self._check(layer, ring[which % layer.states], wanted, "token {} in the ring", which)
        new = np.arange(max(start, stop - layer.states), stop)
        ring[new % layer.states] = layer.wanted(digests, new)

    def _check(self, layer: Layer, found: Cells, wanted: Cells, told: str, which: Any) -> None:
        self.bytes_checked += found.size
        wrong = (found != wanted).reshape(len(which), -1).any(axis=1) if len(which) else which
        if np.any(wrong):
            at = which[int(np.argmax(wrong))]
            raise WrongBytesError(f"rank {self.rank}, {layer.name}: {told.format(at)}")
