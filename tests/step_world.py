# SPDX-License-Identifier: Apache-2.0
"""The real scheduler side over a store in memory, driven as vLLM drives it, without vLLM: what it
does in a step is counted in operations.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
from blake3 import blake3

from attnstore_lab.testing.small_store import open_scheduler
from attnstore_vllm import _native
from attnstore_vllm.config.settings import TruncationConfig
from attnstore_vllm.index import keys
from attnstore_vllm.index.sections import Need, Reach
from attnstore_vllm.policy.eviction.by_return import ByReturn
from attnstore_vllm.scheduler import hidden_blocks
from attnstore_vllm.scheduler.messages import StepReport
from attnstore_vllm.store.store import Store
from attnstore_vllm.transfer.geometry import Geometry, Group
from attnstore_vllm.types import Seen
from tests.helpers import NAMESPACE, memory_rig
from tests.vllm_objects import output

CHUNK, BLOCK = 16, 4


class Names:
    """See scheduler.Names."""

    namespace = NAMESPACE

    def be_live(self, live: Mapping[int, bytes | None]) -> None:
        """No test of these changes weights."""
        raise AssertionError(live)

    def close(self) -> None:
        """Nothing is held."""


class Request:
    """As much of vLLM's as is read."""

    def __init__(
        self, name: str, tokens: Sequence[int], counts: Counter[str], **given: Any
    ) -> None:
        self.request_id = name
        self.all_token_ids = self.prompt_token_ids = list(tokens)
        self.num_prompt_tokens = len(tokens)
        self.prompt_embeds = self.lora_request = self.kv_transfer_params = None
        self.cache_salt: str | None = None
        self.sampling_params = SimpleNamespace(
            prompt_logprobs=None, skip_reading_prefix_cache=False, extra_args=None
        )
        self.skip_reading_prefix_cache = self.resumable = False
        self.mm_features: Sequence[Any] = []
        self.num_computed_tokens = self.num_in_flight_tokens = self.priority = 0
        self.num_preemptions = 0
        self.arrival_time = 0.0
        self.__dict__ |= given
        self._counts = counts
        self.block_hashes: list[bytes] = []
        self._block_hasher: Callable[[Any], list[bytes]] = self._name_new
        self.update_block_hashes()

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)

    def update_block_hashes(self) -> None:
        self.block_hashes.extend(self._block_hasher(self))

    def _name_new(self, request: Any) -> list[bytes]:
        """As vLLM's: a block is named by its tokens and the name of the one before."""
        names = list(request.block_hashes)
        known = len(names)
        while (len(names) + 1) * BLOCK <= self.num_tokens:
            block = self.all_token_ids[len(names) * BLOCK : (len(names) + 1) * BLOCK]
            before = names[-1] if names else b""
            names.append(blake3(before + repr(block).encode()).digest())
        self._counts["names by vLLM"] += len(names) - known
        return names[known:]


class StepWorld:
    """See the module. `counts` has what was done since it was cleared.

    Args:
        windows: beside the spine there is a group whose layers see the last tokens alone.
        states: beside it there is a recurrent group.
        layers: of the spine.
        store: options of the store.
        options: of open_scheduler().
    """

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        *,
        records: int = 256,
        slots: int = 256,
        truncates: bool = False,
        windows: bool = False,
        states: bool = False,
        layers: int = 1,
        store: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        self.counts = Counter[str]()
        needs = (Need(1, Reach.WINDOW, CHUNK, BLOCK),) if windows else ()
        needs = (Need(1, Reach.STATE, 0, BLOCK),) if states else needs
        self.rig = memory_rig(records, slots, needs=needs, **(store or {}))
        self.store = self.rig.store
        self.free_blocks = 0
        self.tables: dict[str, list[int]] = {}
        if truncates:
            options["truncation"] = TruncationConfig(enabled=True, shared_by="everyone")
        reach, length = (Reach.STATE, 0) if states else (Reach.WINDOW, CHUNK)
        spine = tuple(f"l{number}" for number in range(layers))
        groups = (Group(BLOCK, spine), Group(BLOCK, ("w",), 1, reach.value, length))
        self.num_groups = 1 + len(needs)
        geometry = Geometry(1, (64,) * layers, groups[: self.num_groups], CHUNK)
        options.setdefault("load_deadline_ms", 200)
        self.side = open_scheduler(self.store, geometry, Names(), **options)
        pool = SimpleNamespace(
            cached_block_hash_to_block=OrderedDict(),
            hash_block_size=BLOCK,
            get_num_free_blocks=lambda: self.free_blocks,
        )
        self.manager = manager = SimpleNamespace(
            block_pool=pool, get_block_ids=lambda name: (self.tables[name],) * self.num_groups
        )
        self.side.bind_kv_cache_manager(cast("Any", manager))
        self._count(monkeypatch)
        self.serve(self.request("first", range(BLOCK)))  # waits for a look at the weights
        self.side.take_stats()
        self.counts.clear()

    def _count(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Count calls of the seams, and go on to what they are."""

        def counted(owner: Any, name: str, what: str) -> None:
            real = getattr(owner, name)

            def call(*args: Any, **kwargs: Any) -> Any:
                self.counts[what] += 1
                return real(*args, **kwargs)

            monkeypatch.setattr(owner, name, call)

        native = _native.hash_chunks

        def hash_chunks(ids: list[int], size: int, first: int, stop: int, *more: Any) -> Any:
            self.counts["chunks hashed"] += stop - first
            return native(ids, size, first, stop, *more)

        monkeypatch.setattr(keys, "hash_chunks", hash_chunks)
        counted(keys, "chunk_key", "chunks hashed")
        counted(keys.SequenceKeys, "__init__", "sequences")
        counted(hidden_blocks, "blake3", "names hidden")
        counted(Store, "arrive", "look-ups")
        counted(Store, "find", "looks")
        counted(Store, "_begun", "saves")
        counted(ByReturn, "worth", "worths looked at")
        counted(ByReturn, "_set_end", "worths looked at")

    def request(self, name: str, tokens: Sequence[int], **given: Any) -> Any:
        return Request(name, tokens, self.counts, **given)

    def come(self, *requests: Any) -> None:
        for request in requests:
            self.side.on_new_request(request)

    def ask(self, request: Any, local: int = 0) -> int | None:
        return self.side.get_num_new_matched_tokens(request, local)[0]

    def start(self, request: Any, found: int) -> None:
        """vLLM gives it blocks, and schedules it in the step that is being planned."""
        blocks = list(range(1, 2 - -request.num_tokens // BLOCK))
        self.tables[request.request_id] = blocks
        self.side.update_state_after_alloc(request, (blocks,) * self.num_groups, found)
        request.num_computed_tokens = found

    def end_step(self, *requests: Any) -> None:
        """A step in which these compute what is left of them."""
        told = {
            r.request_id: (r.num_computed_tokens, r.num_tokens - r.num_computed_tokens)
            for r in requests
        }
        self.report(self.side.build_step(output(told, {})))
        for request in requests:
            request.num_computed_tokens = request.num_tokens

    def preempt(self, request: Any) -> None:
        """It loses its blocks, in a step that computes nothing."""
        self.lose(request)
        told = output({}, {})
        told.preempted_req_ids = {request.request_id}
        self.report(self.side.build_step(told))

    def lose(self, request: Any) -> None:
        """It loses its blocks, and no step has told of it."""
        request.num_computed_tokens = 0
        request.num_preemptions += 1

    def report(self, plan: Any) -> None:
        done = [p.plan_id for p in (*plan.loads, *plan.saves, *plan.saves_before)]
        weights = Seen.SAME if plan.looks_at_weights else Seen.NOTHING
        freed = Counter(plan.finished_saving)
        self.side.on_report(StepReport(plan.number, Counter(done), freed=freed, weights=weights))

    def finish(self, *requests: Any) -> None:
        for request in requests:
            self.end(request)

    def end(self, request: Any) -> dict[str, Any] | None:
        """What the response says of it."""
        blocks = self.tables.pop(request.request_id, [])
        return self.side.request_finished(request, (blocks,) * self.num_groups)[1]

    def answer(self, request: Any, local: int = 0) -> int:
        """How many tokens it is offered, once that is known."""
        found = self.ask(request, local)
        while found is None:
            self.end_step()
            found = self.ask(request, local)
        return found

    def serve(self, request: Any) -> int:
        """From its coming to its end. Returns how many tokens of it the store had."""
        self.come(request)
        found = self.answer(request)
        self.start(request, found)
        self.end_step(request)
        self.finish(request)
        self.end_step()
        return found

    def put_off(self, what: str) -> int:
        """Since it was asked last, and counted by the metric."""
        counters = self.side.take_stats().data["counters"]
        return int(counters.get(f"put_off:{what}", 0))

    def close(self) -> None:
        self.rig.close()
