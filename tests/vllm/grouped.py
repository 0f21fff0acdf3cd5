# SPDX-License-Identifier: Apache-2.0
"""The scripted engine (scripted.py) with several KV cache groups: vLLM's real scheduler gives each
its blocks, and a scripted model that knows which tokens each group may see looks at all of them.

A group's KV of a token is that of the plain worker, told apart by its layer. A state is a digest of
all tokens up to it, and stands in the block of the last of them, as vLLM's runner keeps it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from blake3 import blake3
from vllm.config import VllmConfig
from vllm.v1 import kv_cache_interface
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    CircularBufferSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    MambaSpec,
    MLAAttentionSpec,
    RSWASpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
)

from attnstore_vllm.connector.groups import groups_of, hit_tokens_of, prompts_only
from attnstore_vllm.transfer.geometry import Geometry, Group
from tests.vllm.scripted import Limits, ScriptedEngine
from tests.vllm.scripted_worker import BLOCK, TOKEN_KV, Kv, Row, ScriptedWorker, _Run, in_layer

PAGE_BYTES = BLOCK * TOKEN_KV
SCRATCH = ("ring", "replayed")
INSIDE = {"num_prefill_checkpoint_blocks": 1, "prefill_checkpoint_alignment": 1}
"""Of states: kernels leave the one at the last block's end from inside of a step."""


@dataclass(frozen=True)
class Kind:
    """A KV cache group: what it is called, how many tokens it sees, and those of a block."""

    reach: str
    tokens: int = 0
    block: int = BLOCK
    ahead: int = 0
    """Its KV of a token is that of drafts: made of so many tokens behind it too."""
    ratio: int = 1
    """Tokens of one state."""
    leaves_inside: bool = False
    """A step may go past the last block's end, and leave the state of there too."""


def _spec(kind: Kind) -> Any:
    sizes: dict[str, Any] = {
        "block_size": kind.block,
        "num_kv_heads": 1,
        "head_size": PAGE_BYTES // kind.block // 2,
        "dtype": torch.uint8,
    }
    latent = sizes | {"head_size": kind.ratio * PAGE_BYTES // kind.block}
    if kind.reach == "compressed":
        return MLAAttentionSpec(**latent, tokens_per_state=kind.ratio)
    if kind.reach == "ring":
        return CircularBufferSpec(**latent, head_size_v=0)
    if kind.reach in ("latent window", "replayed"):
        replayed = kind.reach == "replayed"
        return SlidingWindowMLASpec(**latent, sliding_window=kind.tokens, bounded_replay=replayed)
    if kind.reach == "prompt":
        return RSWASpec(**sizes, rswa_window=kind.tokens)
    if kind.reach == "full":
        return FullAttentionSpec(**sizes)
    if kind.reach == "window":
        return SlidingWindowSpec(**sizes, sliding_window=kind.tokens)
    if kind.reach == "local":
        return ChunkedLocalAttentionSpec(**sizes, attention_chunk_size=kind.tokens)
    return MambaSpec(
        block_size=kind.block,
        shapes=((PAGE_BYTES,),),
        dtypes=(torch.uint8,),
        mamba_cache_mode="align",
        **(INSIDE if kind.leaves_inside else {}),
    )


def state_of(kv: Sequence[bytes], num_tokens: int, layer: int) -> Kv:
    """A page: the state of one layer after so many tokens."""
    state = blake3(b"state" + kv[num_tokens - 1]).digest(length=PAGE_BYTES)
    return np.frombuffer(state, np.uint8) ^ np.uint8(85 * layer % 256)


def layer_of(group: int, region: int) -> int:
    return 16 * group + region


class GroupedWorker(ScriptedWorker):
    """Its tables are in vLLM's order of the groups. No drafts are accepted here: `Kind.ahead` says
    that a group keeps their KV."""

    kinds: tuple[Kind, ...] = ()

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.side_groups = sorted(self.side.geometry.groups, key=lambda group: group.number)
        self._made_up_to: dict[tuple[int, int], tuple[Row, int]] = {}
        """By the row's id and the layer: up to where drafts' KV was made in its last step."""
        self._made: dict[bytes, set[bytes]] = {}
        """By KV of a token: all that drafts have made of it and of known tokens behind it."""
        self._began_at: dict[int, int] = {}
        """By the row's id: the first token that it has computed since it has its blocks."""
        self._state_at: dict[tuple[int, int], tuple[Row, int]] = {}
        """By the row's id and the group: the block in which a request's state was at last."""

    def _prepare(self, output: SchedulerOutput, starts: dict[str, int]) -> None:
        zeroed = np.array(output.new_block_ids_to_zero or [], dtype=np.int64)
        for hbm in self.hbm:
            hbm[zeroed] = 0
        for copy in output.kv_cache_block_copies or ():
            for hbm in self.hbm:
                hbm[copy.dst_block_id] = hbm[copy.src_block_id]
        for request_id, num_scheduled in output.num_scheduled_tokens.items():
            row, start = self._rows[request_id], starts[request_id]
            if not row.kv:
                self._began_at[id(row)] = start
            for group, kind in enumerate(self.kinds):
                if kind.reach == "state":
                    self._move_state(row, group, start, start + num_scheduled)

    def _move_state(self, row: Row, group: int, start: int, stop: int) -> None:
        block = self.kinds[group].block
        known = self._state_at.get((id(row), group))
        is_new = known is None or known[0] is not row or not row.kv
        before = (start - 1) // block if is_new else known[1]  # type: ignore[index]
        after = (stop - 1) // block
        self._state_at[id(row), group] = row, after
        if before not in (-1, after):
            table = row.tables[group]
            assert table[before], "the state that goes on has no block"
            for hbm in self.hbm:
                hbm[table[after]] = hbm[table[before]]

    def _compute(self, layer: int, runs: list[_Run], *, replays: bool) -> None:
        """The layers of one group after those of another, in the order of the names."""
        name = self.names[layer]
        side = next(group for group in self.side_groups if name in group.layers)
        group, region = side.number, side.layers.index(name)
        kind, hbm = self.kinds[group], self.hbm[region]
        self.between()
        if not replays and kind.reach != "state":
            self.side.wait_for_layer(name)
        for run in runs:
            named = self.first_layer + layer_of(group, region)
            look = self._looks.get(kind.reach, self._see_tokens)
            look = self._see_drafts if kind.ahead else look
            for number, scratch in enumerate(self.kinds):
                if scratch.reach in SCRATCH and group == self.side_groups[0].number:
                    look_at = self._looks[scratch.reach]
                    look_at(run, scratch, run.row.tables[number], hbm, named)
            look(run, kind, run.row.tables[group], hbm, named)
        self.between()
        if not replays and kind.reach != "state":
            self.side.layer_computed(name)

    def _see_tokens(self, run: _Run, kind: Kind, table: list[int], hbm: Kv, layer: int) -> None:
        """Write the new tokens' KV and look at all that the first of them sees."""
        width = PAGE_BYTES // kind.block
        pages = hbm.reshape(len(hbm), kind.block, width)
        known = [kv[:width] for kv in run.kv + run.written]
        wanted = in_layer([kv.ljust(TOKEN_KV) for kv in known], layer)[:, :width]
        start, stop = run.start, len(known)
        for at in range(start, stop):
            assert table[at // kind.block], "vLLM has no block for a token that is computed"
            pages[table[at // kind.block], at % kind.block] = wanted[at]
        first = first_seen(kind, start)
        ids = np.array(table[first // kind.block : -(-stop // kind.block)])
        assert ids.all(), f"no block for a token from {first} on, that {kind} sees"
        found = pages[ids].reshape(-1, width)[first % kind.block :][: stop - first]
        wrong = (found != wanted[first:stop]).any(axis=1)
        assert not wrong.any(), (
            f"wrong KV at position {first + int(wrong.argmax())} of {start} computed tokens, "
            f"{kind}, layer {layer}"
        )

    @property
    def _looks(self) -> dict[str, Any]:
        return {
            "state": self._see_state,
            "compressed": self._see_compressed,
            "ring": self._see_ring,
            "replayed": self._see_replayed,
            "prompt": self._see_prompt,
        }

    def _see_compressed(self, run: _Run, kind: Kind, table: list[int], hbm: Kv, layer: int) -> None:
        """Write the states of the groups of tokens that are complete now, and look at all."""
        ratio, block = kind.ratio, kind.block
        width = ratio * PAGE_BYTES // block
        assert width <= TOKEN_KV
        states = hbm.reshape(len(hbm), block // ratio, width)
        known = run.kv + run.written
        stop = len(known) // ratio
        if not stop:
            return
        wanted = in_layer([known[(s + 1) * ratio - 1] for s in range(stop)], layer)[:, :width]
        for s in range(run.start // ratio, stop):
            states[table[s * ratio // block], s % (block // ratio)] = wanted[s]
        ids = np.array(table[: -(-stop * ratio // block)])
        assert ids.all()
        found = states[ids].reshape(-1, width)[:stop]
        wrong = (found != wanted).any(axis=1)
        assert not wrong.any(), f"wrong state of tokens from {ratio * int(wrong.argmax())} on"

    def _see_ring(self, run: _Run, kind: Kind, table: list[int], hbm: Kv, layer: int) -> None:
        """The tokens that are not in a state yet, of this request alone."""
        (block_id,) = table
        ratio = next(kind.ratio for kind in self.kinds if kind.reach == "compressed")
        known = in_layer(run.kv + run.written, layer)
        ring = hbm.reshape(len(hbm), kind.block, -1)[block_id, :, :TOKEN_KV]
        for at in range(run.start // ratio * ratio, run.start):
            assert (ring[at % kind.block] == known[at]).all(), f"token {at} is not in the ring"
        for at in range(max(run.start, len(known) - kind.block), len(known)):
            ring[at % kind.block] = known[at]

    def _see_replayed(self, run: _Run, kind: Kind, table: list[int], hbm: Kv, layer: int) -> None:
        """As a window of tokens that the request has computed itself."""
        width = PAGE_BYTES // kind.block
        pages = hbm.reshape(len(hbm), kind.block, width)
        known = in_layer(run.kv + run.written, layer)[:, :width]
        for at in range(run.start, len(known)):
            pages[table[at // kind.block], at % kind.block] = known[at]
        first = max(first_seen(kind, run.start), self._began_at[id(run.row)])
        for at in range(first, run.start):
            found = pages[table[at // kind.block], at % kind.block]
            assert (found == known[at]).all(), f"wrong KV of token {at} in a window"

    def _see_prompt(self, run: _Run, kind: Kind, table: list[int], hbm: Kv, layer: int) -> None:
        """The prompt, and a window of what was generated."""
        new = self._news[run.row.name]
        assert new.prompt_token_ids is not None
        prompt_end, width = len(new.prompt_token_ids), PAGE_BYTES // kind.block
        pages = hbm.reshape(len(hbm), kind.block, width)
        known = in_layer(run.kv + run.written, layer)[:, :width]
        for at in range(run.start, len(known)):
            pages[table[at // kind.block], at % kind.block] = known[at]
        window = max(prompt_end, first_seen(kind, run.start))
        seen = np.r_[: min(prompt_end, run.start), window : max(window, run.start)]
        ids = np.array(table)[seen // kind.block]
        assert ids.all(), "no block for a token that is seen"
        wrong = (pages[ids, seen % kind.block] != known[seen]).any(axis=1)
        assert not wrong.any(), f"wrong KV of token {seen[wrong.argmax()]}"

    def _see_drafts(self, run: _Run, kind: Kind, table: list[int], hbm: Kv, layer: int) -> None:
        """Several layers one after the other: the last tokens before this step were made of
        guesses, and are made anew. Then look at all before them."""
        width, kv = PAGE_BYTES // kind.block, run.row.kv
        pages = hbm.reshape(len(hbm), kind.block, width)
        start, stop = run.start, run.start + len(run.written)
        known = self._made_up_to.get((id(run.row), layer))
        goes_on = known is not None and known[0] is run.row and known[1] == start
        first = start - (kind.ahead - 1) if goes_on else start
        self._made_up_to[id(run.row), layer] = run.row, stop
        for at in range(max(0, first), stop):
            made = np.full(width, 255, np.uint8)
            if at + kind.ahead < len(kv):
                made = in_layer([kv[at + kind.ahead]], layer)[0, :width]
                self._made.setdefault(kv[at], set()).add(made.tobytes())
            pages[table[at // kind.block], at % kind.block] = made
        chunk = self.side.geometry.chunk_tokens
        for at in range(first_seen(kind, start), max(0, first)):
            found = pages[table[at // kind.block], at % kind.block]
            wanted = in_layer([kv[at + kind.ahead]], layer)[0, :width]
            # The last ones of a whole chunk may be those of another that goes on behind it.
            is_last = at % chunk >= chunk - kind.ahead
            is_others = is_last and found.tobytes() in self._made.get(kv[at], ())
            assert is_others or (found == wanted).all(), (
                f"wrong KV of drafts at position {at} of {start} computed tokens"
            )

    def _see_state(self, run: _Run, kind: Kind, table: list[int], hbm: Kv, layer: int) -> None:
        """Look at the state that the tokens before have left, and leave the next one."""
        known = run.kv + run.written
        start, stop = run.start, len(known)
        page = hbm.reshape(len(hbm), PAGE_BYTES)[table[(stop - 1) // kind.block]]
        if start:
            wanted = state_of(known, start, layer)
            assert (page == wanted).all(), f"wrong state after {start} tokens, layer {layer}"
        page[:] = state_of(known, stop, layer)
        if not kind.leaves_inside:
            return
        at = kv_cache_interface.get_mamba_prefill_checkpoint_position(stop, kind.block, False)
        sizes = kind.block, kind.block, 1
        if kv_cache_interface.is_mamba_prefill_checkpoint_valid(start, stop, at, *sizes):
            left = table[-(-stop // kind.block) - 2]
            if left:
                hbm.reshape(len(hbm), PAGE_BYTES)[left] = state_of(known, at, layer)


def first_seen(kind: Kind, position: int) -> int:
    """The first token that the one at `position` sees."""
    if kind.reach in ("window", "latent window", "replayed", "prompt"):
        return max(0, position - kind.tokens + 1)
    if kind.reach == "local":
        return position // kind.tokens * kind.tokens
    return 0


class GroupedEngine(ScriptedEngine):
    """See the module.

    Args:
        kinds: of the groups, in vLLM's order.
        options: of ScriptedEngine.
    """

    def __init__(self, *arguments: Any, kinds: tuple[Kind, ...], **options: Any) -> None:
        self.kinds = kinds

        class OfTheseKinds(self.base):  # type: ignore[name-defined]
            pass

        OfTheseKinds.kinds = kinds
        self.worker_type = OfTheseKinds
        super().__init__(*arguments, **options)

    base: type[GroupedWorker] = GroupedWorker

    def _shapes(
        self, num_blocks: int, limits: Limits, num_ranks: int
    ) -> tuple[KVCacheConfig, Geometry]:
        layers = range(limits.layers)
        names = [
            [f"{kind.reach} {group} {i}" for i in layers] for group, kind in enumerate(self.kinds)
        ]
        groups = [KVCacheGroupSpec(n, _spec(k)) for n, k in zip(names, self.kinds, strict=True)]
        tensors = [
            KVCacheTensor(num_blocks * PAGE_BYTES, [n[i] for n in names], 0, PAGE_BYTES)
            for i in layers
        ]
        cache = KVCacheConfig(num_blocks, tensors, groups)
        regions = limits.layers * (PAGE_BYTES,)
        shape = Geometry(
            num_ranks,
            regions,
            self._our_groups(cache),
            limits.chunk_tokens,
            hit_tokens=hit_tokens_of(cache),
            prompts_only=prompts_only(cache),
        )
        return cache, shape

    def _our_groups(self, cache: KVCacheConfig) -> tuple[Group, ...]:
        return groups_of(cache)

    def _set(self, config: VllmConfig) -> None:
        if any(kind.reach == "state" for kind in self.kinds):
            config.cache_config.mamba_cache_mode = "align"
            config.cache_config.block_size = math.lcm(*(kind.block for kind in self.kinds))
