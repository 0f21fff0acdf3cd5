# SPDX-License-Identifier: Apache-2.0
"""The scheduler side: translates vLLM's hooks into questions to the store, and its answers
into plans for the workers.

It is long since each of vLLM's hooks has its method here.

The tokens of one request, as a step is planned:

    [0, local)        in HBM already (vLLM's own prefix cache)
    [local, offered)  held chunks in DRAM; loaded in this step's forward pass
    [offered, ...)    computed; whole chunks of it are saved after the forward pass
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Collection, Iterable
from typing import Any

from attnstore_vllm.config.settings import StoreConfig
from attnstore_vllm.engine_facts import EngineFacts
from attnstore_vllm.hint_sources import read as read_hints
from attnstore_vllm.hints import SECTION, HintReader, PrefetchOrder, prefetch_order
from attnstore_vllm.index.keys import RecentPrompts
from attnstore_vllm.index.prefix import Piece, whole_blocks
from attnstore_vllm.scheduler.adapters import NO_ADAPTER, Adapters
from attnstore_vllm.scheduler.approximate import Approximate
from attnstore_vllm.scheduler.audits import Audits
from attnstore_vllm.scheduler.costs import Costs
from attnstore_vllm.scheduler.documents import Documents
from attnstore_vllm.scheduler.ended_sessions import Sessions
from attnstore_vllm.scheduler.figures import IdleFigures, StepStats, StoreFigures
from attnstore_vllm.scheduler.first_tokens import FirstTokens
from attnstore_vllm.scheduler.hidden_blocks import drop_in_flight, hide_session
from attnstore_vllm.scheduler.holds import holds_of, note_found
from attnstore_vllm.scheduler.lookups import Lookups
from attnstore_vllm.scheduler.media import ALL_TOKENS, MediaNames, RequestMedia
from attnstore_vllm.scheduler.messages import LoadCheck, StepPlan, StepReport
from attnstore_vllm.scheduler.offer import Offers
from attnstore_vllm.scheduler.open_plans import OpenPlans
from attnstore_vllm.scheduler.prefetching import prefetch
from attnstore_vllm.scheduler.report import LeftAlone, report_of, why_computed, why_not_stored
from attnstore_vllm.scheduler.request import (
    MIN_LOAD_TOKENS,
    RequestState,
    brings_kv,
    bypasses,
    make_state,
)
from attnstore_vllm.scheduler.reset_watch import LookResult, ResetWatch
from attnstore_vllm.scheduler.rests import Rests
from attnstore_vllm.scheduler.saving import Saving
from attnstore_vllm.scheduler.sides import Events, Names
from attnstore_vllm.scheduler.stages import stages_of
from attnstore_vllm.scheduler.truncation import Truncation
from attnstore_vllm.scheduler.vllm_queue import VllmQueue
from attnstore_vllm.scheduler.vllm_types import KVCacheManager, Request, SchedulerOutput, Tables
from attnstore_vllm.scheduler.waits import EMPTY_STEP_WAIT_S, LOCKSTEP_WAIT_S, Waits
from attnstore_vllm.store.store import Store
from attnstore_vllm.transfer.board import Board
from attnstore_vllm.transfer.geometry import Geometry
from attnstore_vllm.types import OWN_PASS, Cause, Clock, Event, Seen

logger = logging.getLogger(__name__)


class Scheduler:
    """The engine's side of the connector. All methods run on the scheduler's thread.

    Args:
        names: whose KV it is.
        lock: the descriptor that owns the store's directory; closed with this object.
        media: tells pictures and sounds by their content.
        board: shows figures that change while no step is planned.
        clock: monotonic seconds.
    """

    namespace: bytes | None = None
    """That of `names`, once it is known."""
    events: Events | None = None
    """Tell routers what the tiers have. Set before the manager is bound; None: it is not asked
    for."""

    def __init__(
        self,
        store: Store,
        geometry: Geometry,
        names: Names,
        config: StoreConfig,
        engine: EngineFacts,
        *,
        lock: int = -1,
        media: MediaNames | None = None,
        board: Board | None = None,
        clock: Clock = time.monotonic,
    ) -> None:
        self.store, self._lock, self.names = store, lock, names
        self._engine = engine
        self.geometry, self._order = geometry, geometry.order
        self._num_groups = 1 + max(group.number for group in geometry.groups)
        self.adapters = Adapters(geometry.num_ranks, clock)
        self._watch = ResetWatch(self.adapters.hbm_is_empty)
        self._has_adapters = False  # no request has had one
        self._alive: set[str] = set()  # also those that the store does not serve
        self.requests: dict[str, RequestState] = {}
        self._left_alone: dict[str, LeftAlone] = {}
        self._recent = RecentPrompts()
        rows, gives = engine.rows, engine.gives_blocks_away
        plans = self.plans = OpenPlans(
            store, geometry.num_ranks, rows, gives_blocks_away=gives, clock=clock
        )
        why_not = engine.why_not_moved, engine.why_no_passes
        moved = self._truncation = Truncation(store, config.truncation, *why_not)
        nvme = config.nvme
        self._approximate = Approximate(nvme.changed_by, by_default=nvme.is_for_all)
        self._media = media or MediaNames()
        self._media_of: dict[str, RequestMedia] = {}
        """By request: all that have some or may get some, also those that are not served."""
        self._stats, self.first_tokens = StepStats(), FirstTokens(clock)
        self._figures = StoreFigures(store, geometry.token_bytes(), engine.info)
        self._idle = IdleFigures(self._figures, board) if board is not None else None
        self._kv_cache_manager: KVCacheManager | None = None
        lookups = self._lookups = Lookups(config.step_budget)
        self._queue = None
        if config.look_ahead:
            self._queue = VllmQueue(store, lookups, by_priority=engine.by_priority)
        layers = geometry.most_layers if rows is not None else 0
        sizes = {"ahead_layers": layers, "step_tokens": engine.step_tokens, "leaves": engine.leaves}
        sizes["step_rows"] = engine.pass_rows or 1
        deadline_s = config.load_deadline_ms / 1000
        costs = self.costs = Costs(
            store, deadline_s, config.compute_if_sooner, **sizes, clock=clock
        )
        every, budget = config.states_every, config.step_budget
        saving = self._saving = Saving(
            store, geometry, plans, moved, costs, every, engine.step_tokens, budget
        )
        self.rests = Rests(geometry, plans, saving, clock)
        wait_s = LOCKSTEP_WAIT_S if engine.in_lockstep else EMPTY_STEP_WAIT_S
        self._empty_step_wait_s = wait_s
        store.weigh_reads(costs.computing_s)
        waits = Waits(store, costs, clock, self._queue, wait_s)
        self.stages = stages_of(store, geometry, plans, costs, engine.loads_in_parts, clock)
        self.documents = Documents(plans, engine, config.truncation, geometry.most_layers, clock)
        self.audits = audits = Audits(store, geometry, plans, config.audit, clock)
        given = (store, geometry, costs, waits, plans, moved, saving.counts, audits, self.stages)
        self._offers = Offers(*given, self.documents, cuts_hits=engine.cuts_hits)
        self._hints, self._sessions = HintReader.from_settings(config), Sessions()
        self.holds = holds_of(config.holding, engine, geometry, costs, self._hints)

    def bind_kv_cache_manager(self, manager: KVCacheManager) -> None:
        self._kv_cache_manager = manager
        self._offers.untaken.kv_cache_manager = manager
        self.rests.manager = manager
        self._watch.bind(manager)
        if self.holds is not None:
            self.holds.bind(manager)
        if self.events is not None:
            self.events.bind(manager)
            self._saving.note_save = self.events.name

    # ---- a request comes ---------------------------------------------------------------

    def on_new_request(self, request: Request) -> None:
        if self.namespace is None:
            self.namespace = self.names.namespace
        namespace, params = self.namespace, request.kv_transfer_params
        order = prefetch_order(params) if params else None
        if order is not None:  # no request: vLLM ends it before the next step
            self._prefetch(order, namespace)
            return
        if self._queue is not None:
            self._queue.on_new_request(request)
        if not self._alive and not self._engine.has_prefix_cache:
            self._watch.doubt(is_empty=True)
        self._alive.add(request.request_id)
        if self.holds is not None:
            self.holds.came(request)
        media = RequestMedia(self._media, request)
        if request.mm_features or request.resumable:
            self._media_of[request.request_id] = media
        state = self._begin(request, namespace, media)
        if isinstance(state, Cause):
            hints = read_hints(self._hints, request)
            self._left_alone[request.request_id] = LeftAlone(state, hints.report)
            if request.mm_features:
                media.leave_alone(at_once=request.skip_reading_prefix_cache)
        elif self._queue is not None and state.adapter is not None and not media.is_pending:
            if self._lookups.comes(request):
                self._look_up(state)

    def _begin(
        self, request: Request, namespace: bytes | None, media: RequestMedia
    ) -> RequestState | Cause:
        """The state of a request that has come, or why the store leaves it alone."""
        if self._is_left_alone(request):
            return Cause.ADAPTER_NOT_SERVED
        if request.lora_request is not None:
            self._has_adapters = True
            self.adapters.enter(request)
        is_doubtful = request.resumable and self._engine.overcounts_drafts
        if is_doubtful and self._kv_cache_manager is not None:
            hide_session(request, self._kv_cache_manager.block_pool.hash_block_size)
        if bypasses(request):
            return Cause.BYPASS
        if self.store.is_distrusted:
            return Cause.DISTRUSTED
        if self._hints.salted_only and not request.cache_salt:
            return Cause.NO_SALT
        if namespace is None:
            return Cause.WEIGHTS_UNKNOWN
        params, lora = request.kv_transfer_params, request.lora_request
        if request.mm_features:
            media.begin(at_once=brings_kv(params))
        adapter = NO_ADAPTER if lora is None else self.adapters.identity(lora)
        state = make_state(request, namespace, adapter, self.geometry.chunk_tokens, media)
        state.recent = self._recent
        of_prompt = whole_blocks(request.num_prompt_tokens)
        state.most_tokens = of_prompt if self.geometry.prompts_only else ALL_TOKENS
        self.requests[request.request_id] = state
        self.first_tokens.came(request.request_id)
        state.hints = hints = read_hints(self._hints, request)
        state.stores = hints.store and not is_doubtful
        if is_doubtful:
            state.counted.why_not_stored = Cause.SESSION_DRAFTS
        if self._approximate.codec is not None:
            self._approximate.begin(state, hints.approximate)
        if self._truncation.by_default if hints.truncation is None else hints.truncation:
            self._truncation.note(state)
        if hints.applied or hints.ignored:
            self._stats.add("hints", Event.APPLIED, hints.applied)
            self._stats.add("hints", Event.IGNORED, hints.ignored)
        return state

    def _prefetch(self, order: PrefetchOrder, namespace: bytes | None) -> None:
        if namespace is None:
            self._stats.add("skipped", Cause.WEIGHTS_UNKNOWN, 1)
        elif self.store.is_distrusted:
            self._stats.add("skipped", Cause.DISTRUSTED, 1)
        elif self._hints.salted_only and not order.cache_salt:
            self._stats.add("skipped", Cause.NO_SALT, 1)
        elif self._lookups.orders(order):
            self._bring_up(order, namespace)

    def _bring_up(self, order: PrefetchOrder, namespace: bytes | None) -> None:
        size, codec = self.geometry.chunk_tokens, self._approximate.codec
        prefetch(self.store, self._stats, order, namespace, size, codec)

    def _is_left_alone(self, request: Request) -> bool:
        """Whether it has an adapter that is not served. A session's next input may bring one."""
        return request.lora_request is not None and not self._engine.serves_adapters

    def _look_up(self, state: RequestState) -> None:
        request, terms = state.request, self._sessions.terms(state)
        num_tokens = max(1, min(request.num_tokens, state.usable_tokens()))
        num_expired = self.store.residency.num_expired
        pieces, state.visit = self.store.arrive(
            request.request_id, state.lookup, num_tokens, MIN_LOAD_TOKENS, terms
        )
        self._lookups.budget.spend(state.lookup.searched)
        state.note_expired(self.store.residency.num_expired - num_expired, pieces, 0)
        state.expect(pieces)
        state.waiting.coming = pieces
        if self.holds is not None:
            note_found(self.holds, self.store, state)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        if self.holds is not None and self.holds.waits(request):
            return None, False
        state = self.requests.get(request.request_id)
        media = self._media_of.get(request.request_id)
        if media is not None and media.waits():
            return None, False
        if state is None:
            if request.request_id in self._left_alone:
                self._left_alone[request.request_id].in_hbm = num_computed_tokens
            return 0, False
        state.begin_anew()
        if state.offered is None and self._truncation.has_found_moved(state, num_computed_tokens):
            return None, False
        is_new = state.visit is None
        why_not = self._why_not_look(state, request, num_computed_tokens)
        if why_not is not None:
            cause, may_wait = why_not
            return state.is_not_looked_up(cause, num_computed_tokens, may_wait=may_wait), False
        pieces: list[Piece] | None = None
        if is_new and state.usable_tokens() >= request.num_tokens:  # it was looked up as it is now
            pieces = [*state.waiting.coming]
        found, is_ahead = self._offers.ask(state, num_computed_tokens, self._stats, pieces)
        if found is not None and self.store.needs:
            self._saving.begin(state, num_computed_tokens + found)
        return found, is_ahead

    def _why_not_look(
        self, state: RequestState, request: Request, local: int
    ) -> tuple[Cause, bool] | None:
        """Why a request that vLLM asks for is not looked up now, and whether it may be later.

        Args:
            local: tokens that are in HBM already.
        """
        self._heed_audit()
        must_wait = self._watch.must_wait()
        state.computing.is_outdated |= local > 0 and self._watch.hbm_is_mixed
        if must_wait:
            return Cause.RESET_UNCHECKED, True
        if self.store.is_distrusted:
            return Cause.DISTRUSTED, False
        if state.offered is not None:
            self._offers.withdraw(state)
        if state.load_failed is not None:
            return state.load_failed, False
        if self._is_left_alone(request):
            return Cause.ADAPTER_NOT_SERVED, False
        if request.lora_request is not None:
            state.asked = state.asked or self.adapters.ask()
            adapter, waits = self.adapters.answer(request.lora_request, state.asked)
            state.be_of(adapter)
            if self.adapters.may_be_mixed(request, local):
                state.computing.is_outdated = True
            if adapter is None:
                return Cause.ADAPTER_UNKNOWN, waits
        if state.visit is None:
            if not self._lookups.is_asked(request):
                return Cause.STEP_BUDGET, not state.is_at_once and self._lookups.may_wait()
            self._look_up(state)
        return None

    def update_state_after_alloc(
        self, request: Request, block_ids: Tables, num_external_tokens: int
    ) -> None:
        state = self.requests.get(request.request_id)
        if state is None or num_external_tokens == 0:
            return
        tables = self._tables(block_ids)
        runs_ahead = self._offers.take(state, tables, num_external_tokens, self._stats)
        if runs_ahead and self._queue is not None:
            self._queue.on_placed(request.request_id)

    def sources(self, request: Request, num_tokens: int) -> dict[str, int]:
        """The tokens that vLLM has taken last, by the tier they were in (OWN_PASS: in none)."""
        state = self.requests.get(request.request_id)
        if state is None:
            return {}
        sources = dict(state.counted.sources)
        if state.documents:
            sources[OWN_PASS] = num_tokens - sum(sources.values())
        return sources

    # ---- a step ------------------------------------------------------------------------

    def build_step(self, output: SchedulerOutput) -> StepPlan:
        self._offers.end_schedule(self._stats, is_empty=not output.num_scheduled_tokens)
        self._heed_audit()
        if self._queue is not None:
            self._queue.on_step(output, self.requests)
        if output.preempted_req_ids:
            self._on_preempted(output.preempted_req_ids)
        self._on_inputs(output)
        for request_id, num_scheduled in output.num_scheduled_tokens.items():
            state = self.requests.get(request_id)
            if state is None:
                continue
            request = state.request
            if request.num_computed_tokens + num_scheduled >= request.num_prompt_tokens:
                self.first_tokens.computes_all(request_id, state.counted)
            if not state.stores or state.computing.is_outdated:
                continue
            state.computing.scheduled_stop = request.num_computed_tokens + num_scheduled
            # Tokens whose ids are known and whose KV is in HBM when this step ends. A draft
            # token is beyond num_tokens until it is accepted, and so is never saved.
            computed = min(request.num_computed_tokens + num_scheduled, request.num_tokens)
            if state.audited and state.may_save:
                self.audits.copy(state, computed, self._tables_of(request_id))
            has_more = computed // self.geometry.chunk_tokens > state.computing.chunks_seen
            if has_more and state.may_save:
                self._saving.save_chunks(state, computed, self._tables_of(request_id))
            if self.store.needs and state.may_save:
                self._saving.save_step_end(state, num_scheduled, self._tables_of(request_id))
        self._saving.end_step()
        self._sessions.end_step(self.store)
        if self.holds is not None:
            self.holds.end_step(is_empty=not output.num_scheduled_tokens)
        if self.rests:
            self._save_rests(is_empty=not output.num_scheduled_tokens)
        self._look_up_late(is_empty=not output.num_scheduled_tokens)
        passes = self.documents.plan(output.total_num_scheduled_tokens, self._stats)
        plan = self.plans.take_plan(self.costs.times.planned(output, passes))
        plan.passes = passes
        plan.may_replay = self._engine.replays(output.num_scheduled_tokens.values())
        self.first_tokens.planned(plan.number)
        self._watch.add_to(plan, output.total_num_scheduled_tokens, self.store.num_named)
        if self._has_adapters:
            plan.adapters = self.adapters.plan(plan.number, output.num_scheduled_tokens)
            plan.checks = self._checks(plan.number, output.num_scheduled_tokens)
        return plan

    def _look_up_late(self, *, is_empty: bool) -> None:
        """Look up those that were put off, as far as this step has time for it."""
        for late in self._lookups.end_step(self.requests, is_empty=is_empty):
            if isinstance(late, PrefetchOrder):
                self._bring_up(late, self.namespace)
            else:
                self._look_up(late)

    def _on_inputs(self, output: SchedulerOutput) -> None:
        """Hear what inputs of sessions say, and use media from now on under the names that they
        have."""
        self._media.end_step()
        if not self._media_of:
            return
        for new in output.scheduled_new_reqs:
            media = self._media_of.get(new.req_id)
            mixed = media.scheduled() if media is not None else None
            for state in self.requests.values() if mixed else ():
                if state.media.has(mixed or ()):
                    state.computing.is_outdated = True
        for request_id in self._media_of.keys() & output.num_scheduled_tokens.keys():
            found = self.requests.get(request_id)
            if found is not None and found.request.resumable:
                found.hear()

    def _save_rests(self, *, is_empty: bool) -> None:
        openings = self.store.num_openings
        self.rests.go_on()
        if is_empty and self.rests and not (self._alive or self.plans.any_open()):
            self.store.wait_for_room(openings, self._empty_step_wait_s)  # else it would spin

    def any_open(self) -> bool:
        """Whether the engine must go on stepping though no request is there."""
        is_open = self.stages.is_open or self.documents.is_open
        return self.plans.any_open() or bool(self.rests) or is_open

    def _on_preempted(self, request_ids: Collection[str]) -> None:
        # Also of those that have ended since a reset took their blocks.
        self.plans.preempted(request_ids)
        for request_id in self.requests.keys() & request_ids:
            if self.requests[request_id].begin_anew():  # else vLLM has asked for it since
                self._truncation.take_back(self.requests[request_id])

    def _checks(self, number: int, scheduled: Iterable[str]) -> list[LoadCheck]:
        """Checks for requests that compute for the first time behind stored KV of an adapter."""
        checks = []
        for request_id in scheduled:
            state = self.requests.get(request_id)
            if state is None or not state.computing.unchecked:
                continue
            lora, computing = state.request.lora_request, state.computing
            assert lora is not None
            digests = self.adapters.digests(lora)
            if self.adapters.identity(lora) != state.adapter:
                digests = ()  # it was replaced since: no rank can have what was offered
            checks.append(LoadCheck(lora.lora_int_id, digests, computing.unchecked))
            computing.unchecked, computing.checked_in = (), number
        return checks

    def _tables_of(self, request_id: str) -> Tables:
        assert self._kv_cache_manager is not None
        return self._tables(self._kv_cache_manager.get_block_ids(request_id))

    def _tables(self, block_ids: Tables) -> Tables:
        """Blocks by group, as vLLM gives them, with the spine's first."""
        assert len(block_ids) >= self._num_groups, "not as many groups as at the start"
        order = self._order
        return block_ids if order is None else [block_ids[number] for number in order]

    def on_report(self, report: StepReport) -> None:
        """Ranks have completed plans; a plan is complete when all of them have."""
        self.costs.step_ended(report, self._stats)
        self.first_tokens.ended(report.number, self._stats)
        if report.adapters:
            self._on_adapters(report)
        num_given_up = self.plans.on_report(report)
        if num_given_up:
            self._stats.add("chunks", Event.UNSAVED, num_given_up)
        is_late = self._watch.is_late(report)
        found = self._watch.on_report(report, self.store.num_named)
        if found is not LookResult.NOTHING_NEW:
            self._on_new_weights(report, found)
        is_seen = report.weights is not Seen.NOTHING and not is_late
        if is_seen and self.store.remote is not None:
            is_known = report.weights is not Seen.UNKNOWN
            self.store.remote.weights_seen(report.weights is Seen.SAME if is_known else None)

    def _on_new_weights(self, report: StepReport, found: LookResult) -> None:
        """From now on all that is found and saved has other names. Requests that wait go on: none
        has blocks of before."""
        if self.store.remote is not None:
            self.store.remote.leave()
        if found is LookResult.OTHERS:
            logger.info("the weights in memory are not those of before: what there is stays theirs")
            self.store.renamed()
        else:
            logger.warning(
                "AttnStore drops every tier: the weights in memory are not those of before, and "
                "which of them have computed what was saved last cannot be told"
            )
            self.store.reset(keeps_aside=True)  # no operator has asked for it
        self.names.be_live(report.live)
        self._media.weights_changed()
        for media in self._media_of.values():
            media.name_anew()
        if self.namespace is not None:
            self.namespace = self.names.namespace
            assert self.namespace is not None
            for state in self.requests.values():
                state.be_of_weights(self.namespace)
                state.computing.is_outdated |= self._watch.hbm_is_mixed
        self._save_anew()
        if self.holds is not None:
            self.holds.clear()

    def _heed_audit(self) -> None:
        """Nothing is saved that may have been computed behind what an audit has removed: requests
        have loaded that before, and vLLM gives their blocks to others."""
        audit = self.store.audit
        if audit is None:
            return
        if audit.take_reset():
            self._watch.doubt()
        if audit.take_removed():
            self._watch.hbm_is_mixed = True
            self.rests.clear()
            if self.holds is not None:
                self.holds.clear()
            for state in self.requests.values():
                computing = state.computing
                computing.is_outdated |= computing.first > 0 or state.offered is not None
                computing.no_room_at = None  # no save has begun since it was removed

    def _on_adapters(self, report: StepReport) -> None:
        """Ranks have said what the adapters were in that step.

        What is being saved under another identity is dropped, and nothing more of such requests is
        saved: they may have KV of both.
        """
        mixed = self.adapters.on_report(report.number, report.adapters)
        if mixed and self.holds is not None:
            self.holds.clear()
        wrong = self.plans.saving_of_others(report.adapters, mixed, self.adapters)
        if wrong:
            self.store.drop(wrong)
            logger.warning("LoRA adapters were replaced; what was computed meanwhile is not kept")
        for state in self.adapters.of(self.requests):
            lora, computing = state.request.lora_request, state.computing
            if lora is None or not computing.scheduled_stop:
                continue
            adapter = self.adapters.identity(lora)
            if lora.lora_name in mixed:
                computing.is_outdated = True
            if lora.lora_int_id not in report.adapters:
                continue
            if state.adapter is None and adapter is not None:
                state.be_of(adapter)
            elif state.adapter != adapter:
                computing.is_outdated = True
                if computing.checked_in == report.number:  # vLLM computes it (LoadCheck)
                    drop_in_flight(state.request)

    def on_failed_requests(self, request_ids: Collection[str]) -> None:
        """Loads ahead of the step have failed on some rank; vLLM computes the requests."""
        for request_id in request_ids:
            was_ours = self.plans.load_is_void(request_id)  # else another connector's
            state = self.requests.get(request_id)
            if state is not None and was_ours and state.load_failed is None:
                state.load_has_failed(Cause.COPY_FAILED)
                self._stats.add("recomputations", Cause.COPY_FAILED, 1)

    def on_failed_load(self) -> None:
        """Another connector has loaded wrong KV. Called before the report of that step.

        What is being saved may have been computed from it. What was is not said, so all of it
        is dropped, from all tiers; what is computed anew is saved again.
        """
        self.store.drop(self.plans.saving())
        self._save_anew()

    def _save_anew(self) -> None:
        self.rests.clear()
        for state in self.requests.values():
            state.computing.go_on_from(0)

    # ---- a request goes ----------------------------------------------------------------

    def request_finished(
        self, request: Request, block_ids: Tables
    ) -> tuple[bool, dict[str, Any] | None]:
        """Plan the saves of what is left, the tail included. Returns whether vLLM is to keep the
        blocks until they are read, and what the response says."""
        self._heed_audit()
        self._leave(request, block_ids)
        media = self._media_of.pop(request.request_id, None)
        if media is not None:
            media.end()
        left = self._left_alone.pop(request.request_id, None)
        if left is not None:
            if request.num_computed_tokens:
                self._stats.add("skipped", left.cause, 1)
            return False, {SECTION: left.report(request)} if left.wants_report else None
        state = self.requests.pop(request.request_id, None)
        if state is None:
            return False, None
        self.first_tokens.left(request.request_id)
        if state.offered is not None:
            self._offers.withdraw(state)
        self._sessions.finished(self.store, state)
        tables = self._tables(block_ids)
        stop = self._saving.save_rest(state, tables)
        if stop:
            self.rests.note(state, stop, tables)
        if state.finds_moved:
            self._truncation.finished(state)
        self.stages.ended(request.request_id)
        self.documents.ended(request.request_id)
        keeps = self.plans.finished(request.request_id)
        for cause in {why_computed(state), why_not_stored(state)}:
            if cause is not None:
                self._stats.add("skipped", cause, 1)
        said = {SECTION: report_of(state)} if state.hints.report else None
        return keeps, said

    def _leave(self, request: Request, block_ids: Tables) -> None:
        if self._queue is not None:
            self._queue.on_finished(request.request_id)
        if request.lora_request is not None:
            self.adapters.leave(request.request_id)
        self._alive.discard(request.request_id)
        if self.holds is not None:
            state = self.requests.get(request.request_id)
            is_wrong = self._watch.hbm_is_mixed or self.store.is_distrusted  # it may be
            is_wrong |= state is not None and state.computing.is_outdated
            is_wrong |= self.adapters.may_be_mixed(request, request.num_computed_tokens)
            self.holds.ended(request, block_ids[0] if block_ids and not is_wrong else ())

    # ---- the rest ----------------------------------------------------------------------

    def reset(self) -> bool:
        """Drop every tier. Chunks that the workers copy now are dropped when they are done."""
        for state in self.requests.values():
            if state.offered is not None:
                self._offers.withdraw(state)
            # Computed with what is being replaced: must not come back under the same name.
            state.computing.is_outdated = True
        self.rests.clear()
        self._watch.doubt()
        return self.store.reset()

    def pause(self) -> bool:
        """vLLM pauses or sleeps, and has emptied its own cache: no request has blocks. Every tier
        stays: before the next request workers look whether the weights are those it is named by.
        What is not copied yet is lost: HBM has other content when vLLM wakes up."""
        self.store.drop(self.plans.saving())
        self._watch.doubt(was_reset=True)
        return True

    def take_stats(self) -> StepStats:
        """Counts since the last call."""
        stats, self._stats = self._stats, StepStats()
        self._figures.add_to(stats)
        if self.holds is not None:
            self.holds.add_to(stats)
        for put_off in (self._lookups.put_off, self._saving.put_off, self._sessions.put_off):
            for work, number in put_off.items():
                stats.add("put_off", work, number)
            put_off.clear()
        if self.store.needs:
            self._saving.counts.move_to(stats)
        return stats

    def close(self) -> None:
        self.names.close()
        self._media.close()
        if self._idle is not None:
            self._idle.close()
        self.store.close()
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def flush(self, grace_s: float) -> None:
        """Write back what is dirty, for so long at most, and take the board's name away: the
        process is about to end. From any thread; the engine may be in a step."""
        if self._lock >= 0:
            self.store.thread.stop(grace_s)
            if self._idle is not None:
                self._idle.close()

    def check_quiet(self) -> None:
        """Assert that nothing is held or in flight. For tests, after the last request."""
        assert not self.plans.any_open()
        assert not (self.stages.is_open or self.documents.is_open)
        assert not any(state.offered for state in self.requests.values())
        self.store.check_integrity()
        assert self.store.residency.num_held() == 0
