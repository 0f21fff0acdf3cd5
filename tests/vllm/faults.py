# SPDX-License-Identifier: Apache-2.0
"""Faults that are planted on purpose, to show that the tests would see them.

Each is one mistake that a connector could make. It stands at vLLM's own hooks, in the engine's
process or in each worker, while one call lasts.

It is long since each fault is one function of its own.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

from attnstore_vllm.index.prefix import GRAIN_TOKENS
from attnstore_vllm.transfer.plan import ChunkCopy, pages
from attnstore_vllm.transfer.pool import SLOTS_AT

Undo = Callable[[], object]

# ---- on the scheduler side: what is decided -------------------------------------------------


def _edit_loads(engine: Any, edit: Callable[[list[Any]], list[Any]]) -> Undo:
    """Change the [slot, block of the chunk, block id] of each load on their way to the workers."""
    connector = engine.scheduler.connector
    build = connector.build_connector_meta

    def faulty(output: Any) -> Any:
        plan = build(output)
        for i, load in enumerate(plan.plan.loads):
            table = edit(pages(load.copies).tolist()) if load.copies else ()
            copies = tuple(ChunkCopy(slot, block, (block_id,)) for slot, block, block_id in table)
            plan.plan.loads[i] = replace(load, copies=copies)
        return plan

    return _replace(connector, "build_connector_meta", faulty)


def swapped_blocks(engine: Any) -> Undo:
    """The first two blocks of a load go to each other's place."""

    def edit(copies: list[Any]) -> list[Any]:
        if len(copies) > 1:
            copies[0][2], copies[1][2] = copies[1][2], copies[0][2]
        return copies

    return _edit_loads(engine, edit)


def wrong_slot(engine: Any) -> Undo:
    """The last block comes from the slot of another chunk, and from another place of it.

    The slot alone would not do: the other chunk may be the same text of another tenant.
    """

    def edit(copies: list[Any]) -> list[Any]:
        slot, block, _ = copies[-1]
        copies[-1][:2] = slot - 1 if slot else slot + 1, block - 1 if block else block + 1
        return copies

    return _edit_loads(engine, edit)


def one_token_more(engine: Any) -> Undo:
    """A chunk that differs at one token is taken to agree there, and so in its block."""
    from attnstore_vllm.index import prefix

    common_tokens = prefix.common_tokens

    def faulty(a: bytes, b: bytes) -> int:
        return min(common_tokens(a, b) + GRAIN_TOKENS, min(len(a), len(b)) // 4)

    return _replace(prefix, "common_tokens", faulty)


def tail_too_long(engine: Any) -> Undo:
    """The token that was sampled last is saved too: its KV was not computed."""
    finished = engine.side.request_finished

    def faulty(request: Any, block_ids: Any) -> bool:
        state = engine.side.requests.get(request.request_id)
        if state is not None:
            state.computing.scheduled_stop += 1
        kept: bool = finished(request, block_ids)
        return kept

    undo = [
        _with_request(engine, "request_finished_all_groups", _one_more_computed),
        _replace(engine.side, "request_finished", faulty),
    ]
    return lambda: [take_out() for take_out in undo]


def salt_left_out(engine: Any) -> Undo:
    return _with_request(engine, "on_new_request", lambda request: ("cache_salt", None))


def adapter_left_out(engine: Any) -> Undo:
    adapters = engine.side.adapters
    adapters.identity = lambda _: b""
    adapters.answer = lambda *_: (b"", False)

    def undo() -> None:
        del adapters.identity, adapters.answer

    return undo


def lineage_left_out(engine: Any) -> Undo:
    """Approximate KV has the names of exact KV, in DRAM and on NVMe."""
    from attnstore_vllm.scheduler import request

    return _replace(request, "approximate_root", lambda root, codec: root)


def blocks_not_hidden(engine: Any) -> Undo:
    """Approximate KV has the names of exact KV in vLLM's own prefix cache."""
    from attnstore_vllm.scheduler import approximate

    return _replace(approximate, "hide_blocks", lambda *_: None)


def documents_lineage_left_out(engine: Any) -> Undo:
    """KV behind documents that were moved has the names of exact KV, in DRAM and on NVMe."""
    from attnstore_vllm.scheduler import request

    return _replace(request, "documents_root", lambda root, moved, rule: root)


def moved_blocks_not_hidden(engine: Any) -> Undo:
    """Moved KV has the names of exact KV in vLLM's own prefix cache."""
    from attnstore_vllm.scheduler import truncation

    return _replace(truncation, "hide_blocks", lambda *_: None)


def _one_more_computed(request: Any) -> tuple[str, Any]:
    return "num_computed_tokens", request.num_computed_tokens + 1


def _with_request(engine: Any, hook: str, change: Callable[[Any], tuple[str, Any]]) -> Undo:
    """One attribute of the request is another one while the hook runs."""
    connector = engine.scheduler.connector
    original = getattr(connector, hook)

    def faulty(request: Any, *args: Any) -> Any:
        with mock.patch.object(request, *change(request)):
            return original(request, *args)

    return _replace(connector, hook, faulty)


def nobody_bypasses(engine: Any) -> Undo:
    from attnstore_vllm.scheduler import scheduler

    return _replace(scheduler, "bypasses", lambda request: False)


def offers_kept(engine: Any) -> Undo:
    """What is offered and not taken is held for ever."""
    return _replace(engine.side._offers, "withdraw", lambda state: None)


def last_token_offered(engine: Any) -> Undo:
    """A hit ends with the last token that matches, whatever its KV depends on."""
    looks = engine.store.strategy
    needs = _replace(looks, "needs", tuple(replace(need, ahead=0) for need in looks.needs))
    ahead = _replace(looks, "ahead", 0)
    return lambda: (needs(), ahead())


GROUPS = 8
"""Groups of KV cache that a model here has at most."""


def _without_group(number: int) -> Callable[[Any], Undo]:
    def group_left_out(engine: Any) -> Undo:
        """What belongs into the blocks of one of vLLM's groups is loaded into the null block."""
        scheduler = engine.scheduler

        def edit(copies: list[Any]) -> list[Any]:
            tables = map(scheduler.kv_cache_manager.get_block_ids, list(scheduler.requests))
            left_out = {block for table in tables for block in table[number]}
            return [[*copy[:2], 0 if copy[2] in left_out else copy[2]] for copy in copies]

        return _edit_loads(engine, edit)

    return group_left_out


WITHOUT_GROUPS = {f"without group {n}": _without_group(n) for n in range(GROUPS)}


def reset_without_effect(engine: Any) -> Undo:
    return _replace(engine.scheduler.connector, "reset_cache", lambda: True)


def failed_parts_taken(engine: Any) -> Undo:
    """What another node's disk failed to read or to write is taken for done."""
    from attnstore_vllm.tiers.nvme.node_disk import NodeResult

    return _replace(NodeResult, "error", lambda _: None)


def disk_given_up(engine: Any) -> Undo:
    """A disk that is out of use stays so, even if it is well again. A wait for it ends sooner."""
    from attnstore_vllm.errors import DeviceError
    from attnstore_vllm.tiers.nvme.nvme_io import NvmeIo
    from tests.vllm import engine as waits

    note = vars(NvmeIo)["_probed"]
    failure = DeviceError("it is given up")
    looks = _replace(NvmeIo, "_probed", lambda disk, op, _: note(disk, op, failure))
    deadline = _replace(waits, "DEADLINE_S", 20.0)
    return lambda: (looks(), deadline())


# ---- in the workers: what is copied ---------------------------------------------------------


class _Hbm:
    """The KV tensors of one worker, by layer, and what the step's plan does with them."""

    def __init__(self, worker: Any) -> None:
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        self.connector: Any = get_kv_transfer_group()
        self.layers = worker.model_runner.kv_caches
        self.names = list(self.connector.worker._regions)

    def blocks(self, kind: str, last_only: bool = False) -> list[int]:
        return _blocks(getattr(self.connector._get_connector_metadata().plan, kind), last_only)

    def load_all(self, start_load_kv: Any, context: Any) -> None:
        start_load_kv(context)
        for name in self.names:
            self.connector.worker.wait_for_layer(name)


def _blocks(plans: list[Any], last_only: bool = False) -> list[int]:
    blocks = [pages(plan.copies)[-1 if last_only else 0 :, 2].tolist() for plan in plans]
    return [block_id for some in blocks for block_id in some]


def skipped_layer(worker: Any) -> Undo:
    """The last layer is not loaded."""
    hbm = _Hbm(worker)
    start = hbm.connector.start_load_kv

    def faulty(context: Any) -> None:
        blocks = hbm.blocks("loads")
        before = hbm.layers[-1][blocks].clone()
        hbm.load_all(start, context)
        hbm.layers[-1][blocks] = before

    return _replace(hbm.connector, "start_load_kv", faulty)


def unsaved_layer(worker: Any) -> Undo:
    """Of the last layer zeros are saved."""
    hbm = _Hbm(worker)
    begin, save = hbm.connector.handle_preemptions, hbm.connector.wait_for_save

    def with_zeros(blocks: list[int], copy: Callable[[], object]) -> None:
        before = hbm.layers[-1][blocks].clone()
        hbm.layers[-1][blocks] = 0
        copy()
        hbm.layers[-1][blocks] = before

    def before_the_step(plan: Any) -> None:
        with_zeros(_blocks(plan.plan.saves_before), lambda: begin(plan))

    undo = [
        _replace(hbm.connector, "handle_preemptions", before_the_step),
        _replace(hbm.connector, "wait_for_save", lambda: with_zeros(hbm.blocks("saves"), save)),
    ]
    return lambda: [take_out() for take_out in undo]


def late_load(worker: Any) -> Undo:
    """Nobody waits for a load: the layers are complete when the forward pass is over."""
    hbm = _Hbm(worker)
    start, save = hbm.connector.start_load_kv, hbm.connector.wait_for_save

    def late() -> None:
        hbm.load_all(start, None)
        save()

    undo = [
        _replace(hbm.connector, "start_load_kv", lambda context: None),
        _replace(hbm.connector, "wait_for_layer_load", lambda name: None),
        _replace(hbm.connector, "wait_for_save", late),
    ]
    return lambda: [take_out() for take_out in undo]


def last_block_by_layer(worker: Any) -> Undo:
    """The block that receives new tokens is loaded with its layer, after they were written."""
    hbm = _Hbm(worker)
    start = hbm.connector.start_load_kv
    loaded: dict[str, tuple[int, list[int], Any]] = {}

    def faulty(context: Any) -> None:
        blocks = hbm.blocks("loads", last_only=True)
        before = [kv[blocks].clone() for kv in hbm.layers]
        hbm.load_all(start, context)
        for layer, name in enumerate(hbm.names):
            loaded[name] = layer, blocks, hbm.layers[layer][blocks].clone()
            hbm.layers[layer][blocks] = before[layer]

    def wait(name: str) -> None:
        if name in loaded:
            layer, blocks, content = loaded.pop(name)
            hbm.layers[layer][blocks] = content

    undo = [
        _replace(hbm.connector, "start_load_kv", faulty),
        _replace(hbm.connector, "wait_for_layer_load", wait),
    ]
    return lambda: [take_out() for take_out in undo]


def rank_0_only(worker: Any) -> Undo:
    """Every rank loads the part of a slot that is rank 0's, as if heads were not divided."""
    import torch

    hbm = _Hbm(worker)
    start, ours = hbm.connector.start_load_kv, hbm.connector.worker
    geometry = ours.geometry
    names = {fd.name: os.path.realpath(fd) for fd in Path("/proc/self/fd").iterdir()}
    is_first = re.compile(r"/dev/shm/attnstore-[0-9a-f]{24}( \(deleted\))?").fullmatch
    parts_of_rank_0 = next(int(fd) for fd, name in names.items() if is_first(name))

    def faulty(context: Any) -> None:
        hbm.load_all(start, context)
        for plan in hbm.connector._get_connector_metadata().plan.loads:
            for slot, block_in_chunk, block_id in pages(plan.copies).tolist():
                for layer, kv in enumerate(hbm.layers):
                    number = layer * geometry.blocks_per_chunk + block_in_chunk
                    at = number * geometry.page_bytes
                    at += SLOTS_AT + slot * geometry.rank_bytes
                    page = os.pread(parts_of_rank_0, geometry.page_bytes, at)
                    values = torch.frombuffer(bytearray(page), dtype=kv.dtype)
                    kv[block_id] = values.view(kv[block_id].shape)

    return _replace(hbm.connector, "start_load_kv", faulty)


def last_rank_does_not_look(worker: Any) -> Undo:
    """The last rank says that its weights are what they were."""
    from attnstore_vllm.types import Seen

    if worker.rank < worker.parallel_config.world_size - 1:
        return lambda: None
    ours = _Hbm(worker).connector.worker
    _, name = ours.look_at_weights()
    return _replace(ours, "look_at_weights", lambda: (Seen.SAME, name))


ON_THE_SCHEDULER_SIDE = (
    swapped_blocks, wrong_slot, one_token_more, tail_too_long, salt_left_out, adapter_left_out,
    lineage_left_out, blocks_not_hidden, documents_lineage_left_out, moved_blocks_not_hidden,
    nobody_bypasses, offers_kept, last_token_offered,
    reset_without_effect, failed_parts_taken, disk_given_up,
    *WITHOUT_GROUPS.values(),
)  # fmt: skip
IN_THE_WORKERS = (
    skipped_layer, unsaved_layer, late_load, last_block_by_layer, rank_0_only,
    last_rank_does_not_look,
)  # fmt: skip
FAULTS = {f.__name__.replace("_", " "): f for f in (*ON_THE_SCHEDULER_SIDE, *IN_THE_WORKERS)}
FAULTS |= WITHOUT_GROUPS

_undo: list[Undo] = []


def _plant(worker: Any, name: str) -> None:
    _undo.append(FAULTS[name](worker))


def _take_out(worker: Any) -> None:
    _undo.pop()()


@contextmanager
def planted(engine: Any, name: str) -> Iterator[None]:
    """The fault, while the context lasts."""
    with ExitStack() as stack:
        if FAULTS[name] in ON_THE_SCHEDULER_SIDE:
            stack.callback(FAULTS[name](engine))
        else:
            engine.llm.collective_rpc(_plant, args=(name,))
            stack.callback(engine.llm.collective_rpc, _take_out)
        yield


def _replace(owner: Any, attribute: str, by: Any) -> Undo:
    patch = mock.patch.object(owner, attribute, by)
    patch.start()
    return patch.stop
