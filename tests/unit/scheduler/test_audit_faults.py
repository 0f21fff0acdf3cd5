# SPDX-License-Identifier: Apache-2.0
"""Planted faults in what is stored, which an audit of one hit in a hundred finds: the real
scheduler side and store, with workers of two ranks that compute KV as a small model does.

It is long since a model that computes KV is built here, and each way to go wrong is told by it.

Each fault is one that was served somewhere once: it is in all that is stored, as such faults are.
Where bits are compared the model gives the same ones each time; else each computation rounds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache, partial
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import numpy.typing as npt
import pytest

from attnstore_vllm.config.audit import AuditConfig
from attnstore_vllm.policy.audit_draw import Draw
from attnstore_vllm.policy.kv_compare import KEY, STATE_BOUND, VALUE, Comparison, Side, Unit
from attnstore_vllm.store.lookup import Lookup
from attnstore_vllm.types import Event
from tests.helpers import PAYLOAD_BYTES, sequence_of, tokens_of
from tests.step_world import BLOCK, CHUNK, StepWorld
from tests.unit.scheduler.test_audits import opened
from tests.vllm_objects import output

RANKS, LAYERS, HEADS, DIM = 2, 2, 2, 16
BLOCKS = CHUNK // BLOCK
PAGE = 2 * HEADS * BLOCK * DIM * 2
"""Bytes: K of all heads, then V, in bfloat16."""
assert RANKS * LAYERS * BLOCKS * PAGE == PAYLOAD_BYTES
LENGTH = 4 * CHUNK + 1
RATE, HITS = 0.01, 1000
SEED = b"a seed of these tests"
ROUNDING = 0.01
TABLE = 1000
"""Blocks of each group have numbers of their own."""
Page = npt.NDArray[np.float32]
"""[RANKS, LAYERS, 2, HEADS, BLOCK, DIM], of one block."""

UNITS = [
    Unit(rank, layer, (rank * LAYERS + layer) * BLOCKS * PAGE, PAGE)
    for rank in range(RANKS)
    for layer in range(LAYERS)
]
PLACES = np.arange(PAGE // 2).reshape(2, HEADS, BLOCK, DIM).transpose(0, 2, 1, 3)
BITS = Comparison(UNITS, None)
DISTANCE = Comparison(
    UNITS, [Side(KEY, "bfloat16", PLACES[0]), Side(VALUE, "bfloat16", PLACES[1])], PAGE
)
STATES = Comparison(
    UNITS, [Side("state 0", "bfloat16", np.arange(PAGE // 2).reshape(1, 2, -1))], PAGE, STATE_BOUND
)


@cache
def of_token(token: int, adapter: int, group: int) -> Page:
    """[RANKS, LAYERS, 2, HEADS, DIM]: before K is turned."""
    chance = np.random.default_rng((token, adapter, group))
    found = chance.standard_normal((RANKS, LAYERS, 2, HEADS, DIM))
    return found.astype(np.float32)


def turned(key: Page, position: int, base: float) -> Page:
    """K by its position: halves of the dims belong together."""
    angles = position / base ** (np.arange(DIM // 2) / (DIM // 2))
    cos, sin = np.cos(angles), np.sin(angles)
    first, second = key[..., : DIM // 2], key[..., DIM // 2 :]
    return np.concatenate([first * cos - second * sin, first * sin + second * cos], axis=-1)


def block_kv(
    tokens: Sequence[int], block: int, *, group: int = 0, adapter: int = 0, base: float = 10_000.0
) -> Page:
    found = np.zeros((RANKS, LAYERS, 2, HEADS, BLOCK, DIM), np.float32)
    for index, token in enumerate(tokens[block * BLOCK : (block + 1) * BLOCK]):
        one = of_token(token, adapter, group).copy()
        one[:, :, 0] = turned(one[:, :, 0], block * BLOCK + index, base)
        found[:, :, :, :, index] = one
    return found


def state_after(tokens: Sequence[int]) -> Page:
    chance = np.random.default_rng(crc32(repr(list(tokens)).encode()))
    shape = (RANKS, LAYERS, 2, HEADS, BLOCK, DIM)
    return chance.standard_normal(shape).astype(np.float32)


def raw(page: Page) -> npt.NDArray[np.uint8]:
    """[RANKS, LAYERS, PAGE]: in bfloat16, as it is in memory."""
    wide = np.ascontiguousarray(page, np.float32).view(np.uint32)
    return (wide >> 16).astype(np.uint16).reshape(RANKS, LAYERS, -1).view(np.uint8)


Fault = Callable[[Sequence[int], int, int], Page]
"""What is written in place of a block: by the request's tokens, the block and the group."""


def swapped(tokens: Sequence[int], block: int, group: int) -> Page:
    return block_kv(tokens, block, group=group)[:, :, ::-1]


def block_off_by_one(tokens: Sequence[int], block: int, group: int) -> Page:
    return block_kv(tokens, block + 1 if block % BLOCKS < BLOCKS - 1 else block - 1, group=group)


def other_ranks_heads(tokens: Sequence[int], block: int, group: int) -> Page:
    return block_kv(tokens, block, group=group)[::-1]


def other_adapter(tokens: Sequence[int], block: int, group: int) -> Page:
    return block_kv(tokens, block, group=group, adapter=1)


def rotary_table_off(tokens: Sequence[int], block: int, group: int) -> Page:
    return block_kv(tokens, block, group=group, base=500.0)


def other_tenants(tokens: Sequence[int], block: int, group: int) -> Page:
    return block_kv([token + 5_000 for token in tokens], block, group=group)


def slightly_other_adapter(tokens: Sequence[int], block: int, group: int) -> Page:
    right = block_kv(tokens, block, group=group)
    return right + 0.02 * other_adapter(tokens, block, group)


def one_bit(tokens: Sequence[int], block: int, group: int) -> Page:
    """The last bit of one number's mantissa, in one block of a chunk."""
    found = raw(block_kv(tokens, block, group=group)).view(np.uint16).astype(np.uint32)
    found[0, 0, 5] ^= 1 if block % BLOCKS == 1 else 0
    wide = (found << 16).view(np.float32)
    return wide.reshape(RANKS, LAYERS, 2, HEADS, BLOCK, DIM)


FAULTS: list[Fault] = [
    swapped, block_off_by_one, other_ranks_heads, other_adapter, rotary_table_off, other_tenants,
]  # fmt: skip
BY_BITS_ALONE: list[Fault] = [slightly_other_adapter, one_bit]


class FaultWorld(StepWorld):
    """Requests that are computed and saved, as often as one is asked for.

    Args:
        bits: bits are compared, and each computation gives the same ones.
        rate: of hits that are drawn.
    """

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        path: Path,
        *,
        bits: bool = False,
        rate: float = RATE,
        windows: bool = False,
        states: bool = False,
    ) -> None:
        self.tokens: dict[str, list[int]] = {}
        self.began: dict[str, int] = {}
        self.computed: dict[str, int] = {}
        self.fault: Fault | None = None
        """What is in place of what a request computes now."""
        self.states_are: Callable[[Page], Page] | None = None
        """What is done to a state while there is a fault; None: it is of another length."""
        self.step_tokens = LENGTH + 10 * CHUNK
        self.bits, self.has_states, self.has_windows = bits, states, windows
        self.chance = np.random.default_rng(1)
        audit = AuditConfig(rate=rate, tokens_per_s=1e9, stop_after=1000)
        one = BITS if bits else DISTANCE
        more = ((STATES if states else one),) if windows or states else ()
        store = {"audit": audit, "comparisons": (one, *more), "path": path}
        super().__init__(
            monkeypatch, store=store, audit=audit, windows=windows, states=states, slots=512,
            records=512,
        )  # fmt: skip
        self.side.audits.draw = Draw(rate, 1e9, SEED)
        self.manager.get_block_ids = self.tables_of

    def tables_of(self, name: str) -> tuple[list[int], ...]:
        """Of a group with a window the blocks that it has left are gone."""
        spine = self.tables.get(name, [])
        other = [TABLE + block for block in spine]
        if self.has_windows:
            first = max(0, self.began.get(name, 0) - CHUNK + 1) // BLOCK
            other[:first] = first * [0]
        return (spine, other)[: self.num_groups]

    def start(self, request: Any, found: int) -> None:
        name = request.request_id
        self.tables[name] = list(range(1, 2 - -request.num_tokens // BLOCK))
        self.began[name] = found
        self.side.update_state_after_alloc(request, self.tables_of(name), found)
        request.num_computed_tokens = found

    def end(self, request: Any) -> dict[str, Any] | None:
        tables = self.tables_of(request.request_id)
        self.tables.pop(request.request_id, None)
        return self.side.request_finished(request, tables)[1]

    def report(self, plan: Any) -> None:
        for save in (*plan.saves_before, *plan.saves):
            for slot, first, block_ids in save.copies:
                for place, block_id in enumerate(block_ids, start=first):
                    group, block = divmod(block_id, TABLE)
                    self._copy(slot, place, self._page(save.request_id, group, block - 1))
        super().report(plan)

    def _page(self, name: str, group: int, block: int) -> Page:
        tokens = self.tokens[name]
        if group and self.has_states:
            is_wrong, done = self.fault is not None, self.states_are
            behind = 4 if is_wrong and done is None else 0
            found = state_after(tokens[: self.computed[name] - behind])
            found = done(found) if is_wrong and done is not None else found
        elif self.fault is not None:
            found = self.fault(tokens, block, group)
        else:
            found = block_kv(tokens, block, group=group)
        if self.bits:
            return found
        return found + ROUNDING * self.chance.standard_normal(found.shape).astype(np.float32)

    def _copy(self, slot: int, place: int, page: Page) -> None:
        found = raw(page)
        for unit in UNITS:
            at = unit.at + place * PAGE
            self.rig.pool.slot(slot)[at : at + PAGE] = found[unit.rank, unit.layer].tobytes()

    @contextmanager
    def comparing_late(self) -> Iterator[None]:
        """Nothing is compared before all is copied."""
        audit: Any = self.store.audit
        audit.tick = lambda: False
        yield
        del audit.tick

    def runs(
        self, name: str, tokens: list[int], fault: Fault | None = None, *, late: bool = False
    ) -> int:
        """A request from its coming to the end of all that it leaves; as vLLM does, a step ends
        where it is asked to, and at the prompt's last whole block. Returns what it was offered."""
        self.fault, self.tokens[name] = fault, tokens
        request = self.request(name, tokens)
        self.come(request)
        found = self.answer(request)
        self.start(request, found)
        with self.comparing_late() if late else nullcontext():
            self._computes(request, tokens, found)
        self.finish(request)
        self.end_step()
        self.rig.until_idle()
        return found

    def _computes(self, request: Any, tokens: list[int], found: int) -> None:
        name = request.request_id
        while request.num_computed_tokens < len(tokens):
            at = request.num_computed_tokens
            ends = (getattr(request, "shared_prefix_boundary", 0), (len(tokens) - 1) // 4 * 4)
            stops = [end for end in ends if at < end and self.has_states]
            stop = min([*stops, at + self.step_tokens, len(tokens)])
            self.began[name], self.computed[name] = at, stop
            told = {name: (at, stop - at)}
            is_new = at == found
            plan = self.side.build_step(output(told if is_new else {}, {} if is_new else told))
            self.report(plan)
            request.num_computed_tokens = stop

    def outcomes(self) -> dict[str, int]:
        counts = self.store.figures().counts
        names = (Event.AGREED, Event.DIFFERED, Event.NOT_COMPARED)
        return {name.value: counts[name] for name in names if counts.get(name)}

    def hits_until_seen(self, fault: Fault) -> int:
        """Hits on prompts that were all stored wrong, until one is seen; HITS at most."""
        prompts = [tokens_of(number, LENGTH) for number in range(1, 6)]
        for number, tokens in enumerate(prompts):
            assert self.runs(f"planted {number}", tokens, fault) == 0
        for hit in range(1, HITS + 1):
            found = self.runs(f"hit {hit}", prompts[hit % len(prompts)])
            if self.outcomes().get("differed"):
                assert found == 0
                return hit
            assert found == LENGTH - 1, "a hit that is not drawn is served"
        return HITS + 1


Start = Callable[..., FaultWorld]


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Start]:
    yield from opened(partial(FaultWorld, monkeypatch, tmp_path))


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_fault_is_found_beside_rounding(start: Start, fault: Fault) -> None:
    world = start()
    assert world.hits_until_seen(fault) <= HITS
    assert "agreed" not in world.outcomes(), "all chunks are wrong"


@pytest.mark.parametrize("fault", [*FAULTS, *BY_BITS_ALONE], ids=lambda fault: fault.__name__)
def test_a_fault_is_found_where_bits_are_compared(start: Start, fault: Fault) -> None:
    world = start(bits=True)
    assert world.hits_until_seen(fault) <= HITS
    assert "agreed" not in world.outcomes()


@pytest.mark.parametrize("fault", BY_BITS_ALONE, ids=lambda fault: fault.__name__)
def test_by_distance_these_are_not_found(start: Start, fault: Fault) -> None:
    """As docs/audit.md says."""
    world = start(rate=1.0)
    tokens = tokens_of(1, LENGTH)
    world.runs("planted", tokens, fault)
    assert world.runs("hit", tokens) == 0
    assert world.outcomes() == {"agreed": 4}


@pytest.mark.parametrize("bits", [False, True])
def test_a_fault_in_a_window_is_found(start: Start, bits: bool) -> None:
    world = start(bits=bits, windows=True)

    def in_the_window(tokens: Sequence[int], block: int, group: int) -> Page:
        return (other_adapter if group else block_kv)(tokens, block, group=group)

    assert world.hits_until_seen(in_the_window) <= HITS
    assert world.outcomes() == {"agreed": 4, "differed": 1}


@pytest.mark.parametrize(
    "states_are",
    [None, lambda one: 0 * one, lambda one: 10 * one, lambda one: one / 10],
    ids=["of another length", "zeros", "ten times", "a tenth"],
)
def test_a_wrong_state_is_found(start: Start, states_are: Callable[[Page], Page] | None) -> None:
    world = start(states=True)
    world.states_are = states_are

    def of_the_spine(tokens: Sequence[int], block: int, group: int) -> Page:
        return block_kv(tokens, block, group=group)

    assert world.hits_until_seen(of_the_spine) <= HITS
    assert world.outcomes() == {"agreed": 4, "differed": 1}


@pytest.mark.parametrize("kind", ["spine", "windows", "states"])
@pytest.mark.parametrize("bits", [False, True])
def test_no_false_alarm(start: Start, kind: str, bits: bool) -> None:
    """Prompts that go on, and others that part: the hit ends within what is computed."""
    world = start(
        bits=bits and kind != "states", rate=1.0, **{kind: True} if kind != "spine" else {}
    )
    for number in range(1, 13):
        tokens = tokens_of(number, 2 * CHUNK + 1 + 3 * number)
        world.runs(f"first {number}", tokens)
        more = [*tokens, *tokens_of(number + 500, 1 + 5 * number)]
        world.runs(f"second {number}", more)
    found = world.outcomes()
    assert "differed" not in found and found["agreed"] > 12, found


def test_a_state_within_what_is_stored_is_compared(start: Start) -> None:
    """The hit ends there since a farther one is gone: no step would end there by itself."""
    world = start(states=True, rate=1.0)
    tokens = tokens_of(1, LENGTH)
    longer = [*tokens, *tokens_of(2, 2 * CHUNK)]
    world.side.audits.draw = Draw(1e-9, 1.0, SEED)
    world.runs("planted", tokens, lambda tokens, block, group: block_kv(tokens, block))
    world.runs("longer", longer)
    pieces = world.store.find(Lookup(sequence_of(longer)), 0, len(longer) - 1)
    assert pieces[-1].group == 1 and pieces[-1].stop > LENGTH
    world.store.drop([pieces[-1].chunk])
    world.side.audits.draw = Draw(1.0, 1e9, SEED)
    assert world.runs("hit", longer) == 0
    assert world.outcomes() == {"agreed": 4, "differed": 1}


@pytest.mark.parametrize("step_chunks", [100, 10])
def test_the_end_of_a_long_hit_is_compared_sometimes(start: Start, step_chunks: int) -> None:
    """It has more chunks than there are places for copies, which come faster than they are
    compared; the last five are wrong."""
    world = start(rate=1.0)
    tokens = tokens_of(1, 100 * CHUNK + 1)

    def far(tokens: Sequence[int], block: int, group: int) -> Page:
        return (other_tenants if block >= 95 * BLOCKS else block_kv)(tokens, block, group=group)

    world.runs("planted", tokens, far)
    world.step_tokens = step_chunks * CHUNK
    for hit in range(20):
        assert world.runs(f"hit {hit}", tokens, late=True) == 0
        if world.outcomes().get("differed"):
            break
    assert 0 < world.outcomes()["differed"] <= 5
    assert world.outcomes()["not_compared"] >= 36, "there are 64 places"


def test_a_window_is_compared_though_its_beginning_is_others_by_then(start: Start) -> None:
    """A prompt that is computed in many steps: what is needed at its end is there."""
    world = start(windows=True, rate=1.0)
    tokens = tokens_of(1, LENGTH)
    world.runs("first", tokens)
    world.step_tokens = 5
    assert world.runs("second", tokens) == 0
    assert world.outcomes() == {"agreed": 5}
