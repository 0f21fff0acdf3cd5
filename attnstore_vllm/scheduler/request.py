# SPDX-License-Identifier: Apache-2.0
"""One request of vLLM: where it is on its way, and what of it names its KV.

It is long since each part of a request's way has its record here, and one owner that writes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import NamedTuple

from attnstore_vllm.hint_sources import read_params
from attnstore_vllm.hints import HintReader, Hints
from attnstore_vllm.index.chunk import Chunk, InTier
from attnstore_vllm.index.keys import (
    RecentPrompts,
    SequenceKeys,
    approximate_root,
    documents_root,
    moved_root,
    root_key,
    tenant_hash,
)
from attnstore_vllm.index.prefix import Piece
from attnstore_vllm.index.sections import Need
from attnstore_vllm.policy.priority import Priority
from attnstore_vllm.policy.visits import Run, Terms, Visit
from attnstore_vllm.scheduler.adapters import Asked
from attnstore_vllm.scheduler.media import ALL_TOKENS, MediaNames, RequestMedia
from attnstore_vllm.scheduler.vllm_types import Request
from attnstore_vllm.store.lookup import Lookup
from attnstore_vllm.store.store import Store
from attnstore_vllm.types import Cause, Key

MIN_LOAD_TOKENS = 16
"""A shorter run of stored KV is not worth a load."""


class Stage(Enum):
    """Where a request is on its way through the store.

    on_new_request
          |
       ARRIVED ------------------ nothing is stored, or it is in HBM --+
          |  vLLM has room: what it wants is on its way from NVMe       |
       WAITING  (Waiting: offer.py)                                     |
          |  it is there, or computing is sooner                        |
       OFFERED  (Offered: offer.py) -- vLLM takes other requests first -> ARRIVED
          |  vLLM has given it blocks; what is held is loaded           |
       COMPUTING  (Computing: saving.py) <------------------------------+
          |                   |
          |                   +-- preempted: its blocks are lost -> ARRIVED
       request_finished: what is left is saved, and the state is dropped
    """

    ARRIVED = "arrived"
    WAITING = "waiting"
    OFFERED = "offered"
    COMPUTING = "computing"


@dataclass(slots=True)
class Waiting:
    """The waiting of a request that vLLM has room for. Written by Costs and Waits (offer.py)."""

    deadline: float | None = None
    """Monotonic seconds; set when vLLM first asks and something is on its way."""
    since: float | None = None
    forecast: tuple[float, float] | None = None
    """When it was first said how many seconds it would wait, and how many."""
    round: int = 0
    """The last round of looks in which it had one."""
    coming: Sequence[Piece] = ()
    """Pieces that it was found to want then; first those found when it came."""
    is_answered: bool = False
    """It was worked out that it waits no longer; vLLM may have had no room for it since."""


@dataclass(slots=True)
class Offered:
    """Held chunks, from vLLM's question to the end of the same schedule(). Written by offer.py."""

    pieces: list[Piece]
    start: int
    layers_before: int
    """How many layers are in HBM before its first step; 0: loaded in it."""
    keys: SequenceKeys
    """Keys of the tokens that they were found by."""
    rest: list[Piece] = field(default_factory=list)
    """Pieces behind the held ones, which are loaded in parts (stages.py)."""

    @property
    def stop(self) -> int:
        return [*self.pieces, *self.rest][-1].stop


class AuditedPiece(NamedTuple):
    """Tokens [start, stop) of a hit that was drawn to be computed, which one stored chunk has."""

    hit: int
    """The number of the hit."""
    chunk: Chunk
    was: InTier
    """Where the hit found it."""
    start: int
    stop: int
    group: int
    """See Piece."""
    is_asked: bool
    """Its client has asked for it."""
    turn: int
    """Its place in the order in which pieces of the hit are compared where not all can be."""


@dataclass(slots=True)
class Answered:
    """The answer that vLLM had no room for. Written by untaken.py."""

    num_tokens: int
    """That the request had."""
    local: int
    """Those of them that were in HBM already."""
    free_blocks: int
    """That vLLM had."""
    pieces: list[Piece]
    """That were offered; none: it was to be computed."""
    rest: list[Piece] = field(default_factory=list)
    """As in Offered."""


@dataclass(slots=True)
class Computing:
    """How far its KV is computed, and offered to the store. Written by saving.py."""

    first: int = 0
    """The first token that vLLM computes: those before it were in HBM, or are loaded."""
    scheduled_stop: int = 0
    """Up to which token a step that was planned computes, since it has its blocks; 0: none yet."""
    chunks_seen: int = 0
    """Whole chunks that the store has taken or had already, from the first on. It gets none behind
    one that it has no room for: without that one the others are no hit."""
    sections_seen: int = 0
    """Whole chunks whose sections were offered to it: later they may not be there."""
    no_room_at: int | None = None
    """The chunk behind `chunks_seen` waits for room: there was none when DRAM had had so many
    openings (Store.num_openings)."""
    has_ended: bool = False
    """The request has: what is left of it takes no room from what would be lost."""
    is_outdated: bool = False
    """Part of its KV is from before a reset, or of another adapter: nothing of it is saved."""
    unchecked: tuple[int, ...] = ()
    """Blocks with stored KV of its adapter, before its first step behind it."""
    checked_in: int = 0
    """The number of that step."""
    state_stop: int = 0
    """The place of the last state that it has left."""
    prompt_states: tuple[Chunk, ...] = ()
    """The states at the end of its prompt's last block."""
    junctions: tuple[int, ...] = ()
    """The places where its prompt parts from what vLLM and the store have, in whole blocks."""
    has_parted: bool = False
    """It parts there behind what it loads."""
    sections: tuple[tuple[Chunk, Need], ...] = ()
    """Sections of groups beside the spine: those that its last load used, and that it left
    since."""

    def go_on_from(self, number: int) -> None:
        """The store has, or had, all whole chunks before this one."""
        self.chunks_seen = self.sections_seen = number
        self.no_room_at = None


@dataclass(slots=True)
class Counted:
    """Things counted of a request, once, though vLLM asks again and again. Written by offer.py."""

    wanted: bool = False
    offered: bool = False
    sources: dict[str, int] = field(default_factory=dict)
    """Tokens of its last load, by the tier they were in."""
    stored_stop: int = 0
    """Up to which token the store had KV at some time since the request came."""
    in_hbm: int = 0
    """Tokens of the prompt that were in HBM when it had its first answer."""
    waited_s: float = 0.0
    """That it waited for KV to come up, all waits together."""
    why_computed: Cause | None = None
    """Why it computed what the store had, or was not looked up."""
    why_short: Cause = Cause.NOT_STORED
    """Why the store had no more of it, when it had its first answer."""
    expired_at: int | None = None
    """The token at which KV began whose ttl was over when a look-up for it met that first."""
    is_unanswered: bool = False
    """A tier that was asked for it has not answered in time."""
    audited: int = 0
    """Chunks of its hit that were drawn to be compared."""
    why_not_stored: Cause | None = None
    """Why its end is not saved, where nothing else says it."""


@dataclass(slots=True)
class RequestState:
    """A request between on_new_request and request_finished. Its own fields are what it is and asks
    for; each part of its way has an owner, which alone writes it."""

    request: Request
    namespace: bytes
    tenant: bytes
    chunk_tokens: int
    media: RequestMedia
    hints: Hints = field(default_factory=Hints)
    came_with: tuple[object, object] = (None, None)
    """The salt and the id of the adapter: a session that changes them is another."""
    is_at_once: bool = False
    """Another connector brings its KV from elsewhere: our "not yet" would hold that up."""
    stores: bool = True
    """Whether what it computes is saved."""
    most_tokens: int = ALL_TOKENS
    """The store may know so many of its tokens, at most: of the prompt that it came with
    (Geometry.prompts_only). To vLLM a session's answers are the next input's prompt."""
    visit: Visit | None = None
    """Its use of the store; set when it has come."""
    unseen: Run | None = None
    """Its run, of what it saves while it has no visit."""
    low_value: tuple[Run, Run] | None = None
    """A run, and that of its chunks that are worth little."""
    ends_sooner: bool = False
    """A later input has shortened its ttl since it has these."""
    adapter: bytes | None = None
    """The adapter that its KV is computed with (adapters.py). None: not known yet."""
    asked: Asked | None = None
    """The question to the workers about its adapter, since it came or lost its blocks."""
    waiting: Waiting = field(default_factory=Waiting)
    offered: Offered | None = None
    withdrawn: Offered | None = None
    """The last offer without what was held, until vLLM asks again: it may still take it."""
    untaken: Answered | None = None
    """Its last answer, as long as vLLM has given it no blocks."""
    load_failed: Cause | None = None
    """Why a load has failed: what is left is computed."""
    computing: Computing = field(default_factory=Computing)
    counted: Counted = field(default_factory=Counted)
    approximate: str | None = None
    """The codec whose KV will do too, which is its lineage then (approximate.py)."""
    dram_only: bool = False
    """Tiers behind DRAM change KV, and this request has asked for none that is changed."""
    finds_moved: bool = False
    """KV of its tokens at other positions will do too (truncation.py)."""
    finds_documents: bool = False
    """Also with gaps between them (documents.py)."""
    audited: tuple[AuditedPiece, ...] = ()
    """Those of its hit that are computed to be compared, and are not copied yet (audits.py)."""
    moved_tokens: int = 0
    """Tokens whose KV was moved when it was loaded, all loads together."""
    moved: range | None = None
    """From the first to the last token of its blocks whose KV was moved, or is offered; None: all
    that it has is exact."""
    documents: tuple[range, ...] = ()
    """The parts of `moved` whose KV was moved, if there are gaps between them."""
    recompute_rule: str = ""
    """Which of their tokens are computed anew; a part of such a lineage's name."""
    own_pass_tokens: int = 0
    """Tokens of its prompt that passes of our own compute (documents.py)."""
    recent: RecentPrompts | None = None
    """The prompts that came before."""
    _heard: object = None
    """The hints of a session's input that were read last."""
    _preemptions: int = 0
    """Those that are heard of."""
    _root: Key | None = None
    _lookup: Lookup | None = None
    _inputs: tuple[float, ...] = ()
    """Those of a session that its keys are of."""
    _other: tuple[tuple[range, ...] | int | None, Lookup | None] = (None, None)
    """That of the lineage that it was of before: an offer comes and goes with each step. First
    where the moved tokens of that one end, or where they are."""

    @property
    def stage(self) -> Stage:
        if self.offered is not None:
            return Stage.OFFERED
        if self.computing.scheduled_stop:
            return Stage.COMPUTING
        return Stage.WAITING if self.waiting.deadline is not None else Stage.ARRIVED

    @property
    def terms(self) -> Terms:
        return self.hints.terms_of(self.tenant)

    def expect(self, pieces: Sequence[Piece]) -> None:
        """Note what a lookup found: an offer that falls short of it is a recomputation."""
        if pieces:
            self.counted.stored_stop = max(self.counted.stored_stop, pieces[-1].stop)

    def is_not_looked_up(self, cause: Cause, local: int, *, may_wait: bool) -> int | None:
        """The answer to vLLM: to ask again; or 0, where there is no waiting: it is computed.

        Args:
            local: tokens that are in HBM already.
        """
        if may_wait and not self.is_at_once:
            return None
        self.counted.why_computed = cause
        if not self.counted.offered:
            self.has_in_hbm(local)
        self.computing.first = local
        return 0

    def note_expired(self, num_expired: int, found: Sequence[Piece], start: int) -> None:
        """A look-up from token `start` on has dropped so many chunks behind what it has found."""
        at = found[-1].stop if found else start
        if num_expired and (self.counted.expired_at is None or at < self.counted.expired_at):
            self.counted.expired_at = at

    def has_in_hbm(self, local: int) -> None:
        """So many tokens are in HBM already when it has its first answer. vLLM's cache knows no
        ttl. What the look-up has just dropped is not saved anew from there, nor what follows it:
        without that it is no hit."""
        self.counted.in_hbm = local
        if self.stores and self.counted.expired_at is not None and local > self.counted.expired_at:
            self.stores, self.counted.why_not_stored = False, Cause.EXPIRED

    def load_has_failed(self, cause: Cause) -> None:
        """Its last load: what is left is computed."""
        self.load_failed, self.counted.sources = cause, {}
        if self.request.num_tokens == self.request.num_prompt_tokens:  # else one before was used
            self.moved_tokens = self.own_pass_tokens = 0

    def begin_anew(self) -> bool:
        """If it was preempted since the last call: it may wait again, and will have other blocks.

        After a reset vLLM asks for it before a step has told of its preemption, and it may have a
        new load by then. So the first of the two is heard, and the other clears nothing of that.

        Returns whether it was.
        """
        if self._preemptions == self.request.num_preemptions:
            return False
        self._preemptions = self.request.num_preemptions
        self.waiting.deadline, self.waiting.is_answered = None, False
        self.computing.scheduled_stop, self.computing.unchecked = 0, ()
        self.asked = self.untaken = None
        self.audited = ()
        return True

    def usable_tokens(self) -> int:
        """How many of its tokens, from the first on, the store may know: whole chunks of them.

        Asked at each look-up and each save, since the next input of a streaming session brings
        media, sampling parameters and hints of its own. One that says `store: false` ends what
        the session leaves: all that follows it tells of it.
        """
        request = self.request
        if request.resumable:
            if self._has_changed():
                return 0
            self.hear()
        known = self.media.known_tokens() if request.mm_features else ALL_TOKENS
        return min(known // self.chunk_tokens * self.chunk_tokens, self.most_tokens)

    def hear(self) -> None:
        """Take what a session's last input says: vLLM keeps the hints of the first. What follows an
        input tells of it: so `store: false` holds for all that comes, and so does a shorter ttl.

        To be asked in each of its steps: the next input takes the place of this one, and no save
        may come in between. An input is read once."""
        sampling, terms = self.request.sampling_params, self.hints.terms
        extra = sampling.extra_args if sampling is not None else None
        params = (extra or {}).get("kv_transfer_params")
        if params is self.request.kv_transfer_params or params is self._heard:
            return  # the first input's, of which all was read when it came; or this one's
        self._heard = params
        said = read_params(_LATER, params)
        self.stores = self.stores and said.store
        ttl_s = said.terms.ttl_s
        if ttl_s is not None and (terms.ttl_s is None or ttl_s < terms.ttl_s):
            pin_s = None if terms.pin_s is None else min(terms.pin_s, ttl_s)
            self.hints = replace(self.hints, terms=replace(terms, ttl_s=ttl_s, pin_s=pin_s))
            self.ends_sooner = True

    def _has_changed(self) -> bool:
        """Whether a session's input has made another one of it."""
        request, lora = self.request, self.request.lora_request
        now = (request.cache_salt, lora.lora_int_id if lora is not None else None)
        return request.resumable and (bypasses(request) or now != self.came_with)

    def why_unusable(self) -> Cause:
        """Why usable_tokens() are not all."""
        return Cause.SESSION_CHANGED if self._has_changed() else Cause.MEDIA_UNKNOWN

    @property
    def may_save(self) -> bool:
        return self.stores and not self.computing.is_outdated and self.adapter is not None

    def run_of(self, store: Store) -> Run:
        """Its own run. One that began without a look-up has its terms all the same."""
        if self.visit is not None:
            return self.visit.own
        if self.unseen is None:
            self.unseen = store.unseen_run(self.hints.terms)
        return self.unseen

    @property
    def is_branch(self) -> bool:
        """See Visit."""
        return self.visit is not None and self.visit.is_branch

    def low_value_run(self, run: Run) -> Run:
        """That of its chunks of this run that are worth little: one for all, which end at once."""
        before, low = self.low_value or (None, run)
        if before is not run:
            low = run.copy(priority=min(run.priority, Priority.LOW_VALUE))
            self.low_value = run, low
        return low

    def be_of(self, adapter: bytes | None) -> None:
        """From now on its KV is computed with this adapter; None: with one that is not known."""
        if adapter != self.adapter:
            self.adapter = adapter
            self._forget_names()

    def be_of_weights(self, namespace: bytes) -> None:
        """From now on its KV is computed with weights that this names."""
        if namespace != self.namespace:
            self.namespace = namespace
            self._forget_names()

    def _forget_names(self) -> None:
        self._root = self._lookup = None
        self._other, self.untaken = (None, None), None
        self.waiting.coming = self.audited = ()  # both are of KV of the old names

    @property
    def root(self) -> Key:
        """The parent of its first chunk."""
        if self._root is None:
            assert self.adapter is not None, "the adapter is not known yet"
            root = root_key(self.namespace, self.request.cache_salt, self.adapter)
            self._root = approximate_root(root, self.approximate) if self.approximate else root
        return self._root

    @property
    def sequence(self) -> SequenceKeys:
        """The keys of the request's tokens."""
        return self.lookup.keys

    @property
    def lookup(self) -> Lookup:
        """Its look-ups: one object, but for what it computes behind moved KV, which has other
        names."""
        request = self.request
        if self._lookup is None:
            root = self.root
            if self.documents:
                root = documents_root(root, self.documents, self.recompute_rule)
            elif self.moved is not None:
                root = moved_root(root, self.moved.stop)
            tokens = list_of(request.all_token_ids)
            self._lookup = Lookup(
                SequenceKeys(root, tokens, self.chunk_tokens, self.media.spans, recent=self.recent),
                tenant=self.tenant,
                may_ask=not (brings_kv(request.kv_transfer_params) or request.resumable),
                finds_moved=self.may_find_moved,
                finds_documents=self.may_find_moved and self.finds_documents,
            )
            self._inputs = self._inputs_now() if request.resumable else ()
        elif request.resumable and (inputs := self._inputs_now()) != self._inputs:
            # The next input of a session replaces tokens that were not computed, and may bring
            # pictures.
            self._lookup.follow()
            self._inputs = inputs
        return self._lookup

    def _inputs_now(self) -> tuple[float, ...]:
        """Facts that an input of a session changes (Scheduler._update_request_as_session)."""
        request = self.request
        return (request.arrival_time, request.num_prompt_tokens, len(self.media.spans))

    @property
    def may_find_moved(self) -> bool:
        return self.finds_moved and not self.request.mm_features and not self.request.resumable

    def begin_lineage(self, moved: range | None, documents: Sequence[range] = ()) -> None:
        """From now on what it computes is behind moved KV, or is not any more (None).

        Args:
            documents: the parts of it that were moved, if there are gaps between them.
        """
        if moved is None and self.moved is not None:
            first_moved = self.moved.start // self.chunk_tokens
            self.computing.go_on_from(min(self.computing.chunks_seen, first_moved))
        before = (self.moved, self.documents), (moved, tuple(documents))
        was, now = (parts or (None if some is None else some.stop) for some, parts in before)
        if was != now:
            (stop, lookup), self._other = self._other, (was, self._lookup)
            self._lookup = lookup if stop == now else None
        self.moved, self.documents = moved, tuple(documents)

    def forget_matches(self) -> None:
        """It is looked up again only when it has lost its blocks."""
        for lookup in (self._lookup, self._other[1]):
            if lookup is not None:
                lookup.matched.forget()


def list_of(token_ids: Sequence[int]) -> Sequence[int]:
    """The list that vLLM's ConstantList shows, which grows as that does: a part of the other would
    be copied to be read."""
    held = getattr(token_ids, "_x", None)
    return held if isinstance(held, list) else token_ids


def brings_kv(params: object) -> bool:
    """Whether another connector brings its KV from elsewhere. It does not wait for ours.

    Args: params: kv_transfer_params, which a client may send of any type (vllm_xargs).
    """
    return isinstance(params, dict) and bool(params.get("do_remote_prefill"))


def bypasses(request: Request) -> bool:
    """Whether a request neither uses nor leaves stored KV.

    prompt_embeds have no token identity; a request for prompt_logprobs or to skip vLLM's
    cache wants every token computed; pooling models may attend in both directions.
    """
    sampling = request.sampling_params
    return (
        request.skip_reading_prefix_cache
        or request.prompt_embeds is not None
        or request.prompt_token_ids is None
        or sampling is None
        or sampling.prompt_logprobs is not None
        or bool(sampling.skip_reading_prefix_cache)  # of a session's next input
    )


_LATER = HintReader()
"""For what counts of a session's later inputs."""


def make_state(
    request: Request,
    namespace: bytes,
    adapter: bytes | None,
    chunk_tokens: int,
    media: RequestMedia | None = None,
) -> RequestState:
    """The state that the store keeps of a request that does not bypass it."""
    lora = request.lora_request
    return RequestState(
        request=request,
        namespace=namespace,
        adapter=adapter,
        tenant=tenant_hash(request.cache_salt),
        chunk_tokens=chunk_tokens,
        media=media or RequestMedia(MediaNames(), request),
        came_with=(request.cache_salt, lora.lora_int_id if lora is not None else None),
        is_at_once=brings_kv(request.kv_transfer_params),
    )
