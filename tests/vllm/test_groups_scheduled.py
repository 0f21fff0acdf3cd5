# SPDX-License-Identifier: Apache-2.0
"""Several KV cache groups under vLLM's real schedulers, the asynchronous one too.

Goal: as test_async_scheduling.py, in every group: no forward pass sees KV or a state that is not
that of its tokens, and what is stored of each group is exactly what its name says.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random

import numpy as np
import pytest
from vllm.sampling_params import SamplingParams
from vllm.v1.request import Request

from attnstore_lab.testing.tiny_model import TINY, make_model
from attnstore_vllm.index.chunk import State
from attnstore_vllm.index.keys import SequenceKeys, encode_tokens, root_key
from attnstore_vllm.index.prefix import GRAIN_TOKENS, kept_end
from attnstore_vllm.policy.priority import Priority
from attnstore_vllm.scheduler.offer import Offers
from attnstore_vllm.types import Key
from tests.vllm.grouped import PAGE_BYTES, GroupedEngine, GroupedWorker, Kind, layer_of, state_of
from tests.vllm.scripted import Limits
from tests.vllm.scripted_worker import BLOCK, VOCAB, extend_kv, in_layer
from tests.vllm.stepped import SteppedEngine, leave_to_chance, prompt
from tests.vllm.test_async_scheduling import drive, wait_until_quiet

CHUNK = 64
STOP = 7
"""One token in VOCAB."""
FULL = Kind("full")
STATE = Kind("state", block=64)


@dataclass(frozen=True)
class Case:
    name: str
    kinds: tuple[Kind, ...]
    depth: int = 2
    num_blocks: int = 400
    dram_slots: int = 200


WINDOW = (Kind("window", 40), FULL)
LOCAL = (Kind("local", 64), FULL)
HYBRID = (STATE, Kind("full", block=64))
CASES = [
    Case("window", WINDOW),
    Case("window, synchronous", WINDOW, depth=1),
    Case("window, three steps in flight", WINDOW, depth=3),
    Case("window, preemption", WINDOW, num_blocks=70),
    Case("two windows and blocks of two sizes", (FULL, Kind("window", 21), Kind("window", 90, 32))),
    Case("windows alone", (Kind("window", 90), Kind("window", 70, 32))),
    Case("local", LOCAL),
    Case("states", HYBRID),
    Case("states, synchronous", HYBRID, depth=1),
    Case("states, three steps in flight", HYBRID, depth=3),
    Case("states, preemption", HYBRID, num_blocks=40),
    Case("three groups", (STATE, Kind("window", 40, 64), Kind("full", block=64))),
    Case("little DRAM", WINDOW, dram_slots=16),
    Case("two groups of states, few blocks", (STATE, *HYBRID), depth=1, num_blocks=18),
]


@pytest.fixture(scope="module")
def model(models: Path) -> Path:
    return make_model(models / "scripted", TINY, weights=False)


@pytest.fixture
def engine(case: Case, seed: int, model: Path, tmp_path: Path) -> Iterator[GroupedEngine]:
    engine = make(case, seed, model, tmp_path)
    yield engine
    engine.close()


def make(case: Case, seed: int, model: Path, tmp_path: Path, **settings: object) -> GroupedEngine:
    return GroupedEngine(
        model, tmp_path / "store", kinds=case.kinds, num_blocks=case.num_blocks,
        depth=case.depth, seed=seed,
        limits=Limits(chunk_tokens=CHUNK, dram_slots=case.dram_slots, nvme="8MiB"), **settings,
    )  # fmt: skip


def check_stored(engine: GroupedEngine) -> Counter[str]:
    """Every chunk in DRAM has exactly what its group has of its tokens. Returns how many of each
    kind of group there are."""
    geometry, namespace = engine.ours.geometry, engine.ours.names.namespace
    root = root_key(namespace, None, b"")
    parents: dict[Key, tuple[int, int, list[int]]] = {}
    known: dict[bytes, list[int]] = {}
    for tokens in engine.worker.sequences:
        for stop in range(1, len(tokens) + 1):
            known[encode_tokens(tokens[:stop])] = tokens[:stop]
        keys = SequenceKeys(root, tokens, CHUNK)
        for number in range(len(tokens) // CHUNK + 1):
            before = tokens[: number * CHUNK]
            parents[keys.parent(number)] = 0, 0, before
            for place, group in enumerate(geometry.groups[1:], start=1):
                for hole in range(CHUNK // group.block_tokens):
                    parents[keys.section(place, hole).parent(number)] = place, hole, before
    checked: Counter[str] = Counter()
    for chunk in engine.ours.store.residency.index:
        name = chunk.name
        assert name.parent in parents, "KV after tokens that no request had is stored"
        place, hole, before = parents[name.parent]
        if not name.tokens or chunk.dram.state is not State.READY:
            continue
        own = known.get(encode_tokens(before) + name.tokens)
        assert own is not None, "KV of tokens that no request had is stored"
        check_slot(engine, chunk.dram.slot, place, hole, own, name.position)
        checked[geometry.groups[place].reach] += 1
    return checked


def check_slot(
    engine: GroupedEngine, slot: int, place: int, hole: int, tokens: list[int], position: int
) -> None:
    geometry = engine.ours.geometry
    group = geometry.groups[place]
    kv: list[bytes] = []
    extend_kv(kv, tokens)
    data = np.frombuffer(engine.pool.slot(slot), dtype=np.uint8)
    for region in range(geometry.num_layers):
        layer = layer_of(group.number, region)
        part = data[geometry.region_at(region) :]
        if group.reach == "state":
            wanted = state_of(kv, len(tokens), layer)
            assert (part[:PAGE_BYTES] == wanted).all(), f"a wrong state of {len(tokens)} tokens"
            continue
        width = PAGE_BYTES // group.block_tokens
        first = position + hole * group.block_tokens
        wanted = in_layer(kv[first:], layer)[:, :width]
        found = part[hole * PAGE_BYTES :][: wanted.size].reshape(-1, width)
        assert (found == wanted).all(), f"wrong KV of {group.reach} from {first} is stored"


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_only_right_kv_is_used_and_stored(case: Case, seed: int, engine: GroupedEngine) -> None:
    drive(engine, seed)
    wait_until_quiet(engine.ours)
    checked = check_stored(engine)
    assert checked[engine.ours.geometry.spine.reach] > 3
    assert engine.worker.loaded_tokens > BLOCK, "the store was hardly used"
    if case.dram_slots > 100:
        assert all(checked[kind.reach] for kind in case.kinds), checked


def converse(engine: GroupedEngine, seed: int, *, stops: bool) -> list[tuple[int, int, bool]]:
    """A conversation of turns; HBM is emptied before each. Returns of each turn the tokens of its
    history, those that were found, and whether the store keeps such an end (index/prefix.py)."""
    random = Random(seed)
    tokens: list[int] = []
    found: list[tuple[int, int, bool]] = []
    is_kept = False
    others = [token for token in range(VOCAB) if token != STOP]
    for turn in range(6):
        prompt = [*tokens, *(random.choice(others) for _ in range(random.randrange(20, 50)))]
        sampling = SamplingParams(
            max_tokens=30, temperature=0, ignore_eos=True, stop_token_ids=[STOP] if stops else None
        )
        request = Request(
            request_id=f"{seed} {turn}",
            prompt_token_ids=prompt,
            sampling_params=sampling,
            pooling_params=None,
            block_hasher=engine._hasher,
        )
        engine.scheduler.add_request(request)
        stats = request.prefill_stats
        assert stats is not None
        engine.drain()
        wait_until_quiet(engine.ours)
        assert engine.scheduler.reset_prefix_cache()
        found.append((len(tokens), stats.num_external_cached_tokens, is_kept))
        tokens = list(request.all_token_ids)
        end = len(tokens) - 1
        is_kept = end % CHUNK > GRAIN_TOKENS and kept_end(end, len(prompt)) == end
    return found


@pytest.mark.parametrize("stops", [False, True])
@pytest.mark.parametrize("seed", [0])
@pytest.mark.parametrize(
    "case",
    [
        case
        for case in CASES
        if not any(word in case.name for word in ("preemption", "DRAM", "few"))
    ],
    ids=lambda case: case.name,
)
def test_a_turn_finds_what_the_last_one_left(
    case: Case, seed: int, engine: GroupedEngine, *, stops: bool
) -> None:
    """Also where the answer ends by itself, which is seen when the next step is in flight.

    With three steps in flight a state has seen tokens that nobody knows: then it is not kept.
    """
    turns = [turn for number in range(4) for turn in converse(engine, number, stops=stops)]
    has_states = any(kind.reach == "state" for kind in case.kinds)
    is_known = not (stops and has_states and case.depth > 2)
    kept = [(history, found) for history, found, is_kept in turns if is_kept]
    assert len(kept) > 5
    assert all(found >= history - 1 for history, found in kept) or not is_known, kept
    wanted, found = sum(turn[0] for turn in turns), sum(turn[1] for turn in turns)
    assert found > (0.65 if has_states else 0.95) * wanted, turns
    check_stored(engine)


def tell_one(engine: GroupedEngine, name: str, tokens: list[int], *, resumable: bool) -> None:
    """A request, or a session with one input, from its beginning to its end; HBM is empty then."""
    engine.add(name, tokens, 4, resumable=resumable)
    if resumable:
        for _ in range(30):
            engine.step()
        engine.add(name, [1], 1)  # the end of it
    engine.drain()
    wait_until_quiet(engine.ours)
    assert engine.scheduler.reset_prefix_cache()


@pytest.mark.parametrize("resumable", [False, True], ids=["request", "session"])
@pytest.mark.parametrize("depth", [1, 2])
def test_the_second_that_parts_leaves_a_state_there(
    model: Path, tmp_path: Path, depth: int, *, resumable: bool
) -> None:
    """A session as well as a request: its look-up has found where its prompt parts."""
    case = Case("states", HYBRID, depth)
    engine = make(case, 0, model, tmp_path, states_every="off")
    common = prompt("common", 3 * CHUNK)
    found = []
    for number in range(3):
        before = engine.worker.loaded_tokens
        own = prompt(f"own {number}", 2 * CHUNK + 9)
        tell_one(engine, f"{number}", [*common, *own], resumable=resumable)
        found.append(engine.worker.loaded_tokens - before)
    num_blocks = len(common) // STATE.block + 1  # and the state
    assert found == [0, 0, num_blocks * BLOCK]
    check_stored(engine)
    engine.close()


@pytest.mark.parametrize("resumable", [False, True], ids=["request", "session"])
@pytest.mark.parametrize("depth", [1, 2])
def test_the_second_that_parts_keeps_the_section_there(
    model: Path, tmp_path: Path, depth: int, *, resumable: bool
) -> None:
    """Others branch from there: of the first prompt the section is worth little, of the second it
    is not, and it stays when the conversation ends."""
    engine = make(Case("parting", WINDOW, depth), 0, model, tmp_path)
    residency = engine.ours.store.residency
    common = prompt("common", 3 * CHUNK + 20)
    root = root_key(engine.ours.names.namespace, None, b"")
    priorities = []
    for number in range(3):
        tokens = [*common, *prompt(f"own {number}", 4 * CHUNK + 9)]
        tell_one(engine, f"{number}", tokens, resumable=resumable)
        keys = SequenceKeys(root, tokens, CHUNK).section(1, 0)
        chunk = residency.index.get(keys.key(len(common) // CHUNK))
        priorities.append(None if chunk is None else residency.run_of(chunk).priority)
    assert priorities == [Priority.LOW_VALUE, Priority.NORMAL, Priority.NORMAL]
    check_stored(engine)
    engine.close()


def test_where_the_spine_is_a_window_a_chunk_of_own_text_stays_own(
    model: Path, tmp_path: Path
) -> None:
    """It begins as another's, and the rest of it is this conversation's, whose hints are to reach
    it."""
    engine = make(next(c for c in CASES if c.name == "windows alone"), 0, model, tmp_path)
    residency = engine.ours.store.residency
    common = prompt("common", 3 * CHUNK + 20)
    root = root_key(engine.ours.names.namespace, None, b"")
    for number in range(2):
        tokens = [*common, *prompt(f"own {number}", 4 * CHUNK + 9)]
        tell_one(engine, f"{number}", tokens, resumable=False)
    for group in range(2):
        keys = SequenceKeys(root, tokens, CHUNK).section(group, 0)
        chunk = residency.index.get(keys.key(len(common) // CHUNK))
        assert chunk is None or not residency.run_of(chunk).is_shared, group
    check_stored(engine)
    engine.close()


@pytest.mark.parametrize("seed", [0])
@pytest.mark.parametrize("case", [CASES[0], CASES[7]], ids=lambda case: case.name)
def test_a_slot_that_is_wrong_is_noticed(case: Case, seed: int, engine: GroupedEngine) -> None:
    """The checks of this file see what they are for: a section's slot holds other bytes."""
    prompt = list(range(40)) * 3
    engine.add("a", prompt, 12)
    engine.drain()
    wait_until_quiet(engine.ours)
    check_stored(engine)
    tokens = engine.worker.sequences[0]
    root = root_key(engine.ours.names.namespace, None, b"")
    keys = SequenceKeys(root, tokens, CHUNK)
    sections = [
        chunk
        for chunk in engine.ours.store.residency.index
        if chunk.name.parent not in {keys.parent(number) for number in range(3)}
    ]
    assert sections
    for chunk in sections:
        slot = engine.pool.slot(chunk.dram.slot)
        for at in range(0, len(slot), BLOCK):
            slot[at] ^= 1
    with pytest.raises(AssertionError, match="wrong"):
        check_stored(engine)
    engine.scheduler.reset_prefix_cache()
    engine.add("b", [*tokens, 1, 2, 3], 8)
    with pytest.raises(AssertionError, match=r"wrong (KV at position|state after)"):
        engine.drain()


def test_loads_of_states_in_the_first_step_would_stop_vllm(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Why they are loaded ahead: else vLLM counts too few blocks for them. If it no longer does,
    that reason is gone."""
    monkeypatch.setattr(Offers, "_layers_before", lambda *_: 0)
    monkeypatch.setattr(GroupedWorker, "_see_state", lambda *_: None)  # they come late as well
    engine = make(CASES[-1], 0, model, tmp_path)
    with pytest.raises(ValueError, match="Cannot get 1 free blocks"):
        drive(engine, 0)
    engine.close()


class GroupedSteppedEngine(GroupedEngine, SteppedEngine):
    """Its copies run beside the model, as a GPU's do."""


BESIDE = [case for case in CASES if case.depth == 2 and case.num_blocks >= 70]


@pytest.mark.parametrize("runner", ["V1", "V2"])
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("case", BESIDE, ids=lambda case: case.name)
def test_copies_beside_the_model(
    case: Case, seed: int, runner: str, model: Path, tmp_path: Path
) -> None:
    """Loads ahead of the step, in several pieces, with aborts and resets in between."""
    engine = GroupedSteppedEngine(
        model, tmp_path / "store", kinds=case.kinds, num_blocks=case.num_blocks,
        depth=case.depth, seed=seed, rows=12, compute_if_sooner=True,
        limits=Limits(chunk_tokens=CHUNK, dram_slots=case.dram_slots, nvme="8MiB"),
    )  # fmt: skip
    try:
        leave_to_chance(engine, seed)
        engine.worker.prepares_first = runner == "V2"
        drive(engine, seed)
        for stream in engine.streams:
            stream.go_on()
        wait_until_quiet(engine.ours)
        check_stored(engine)
        assert engine.worker.loaded_tokens > BLOCK, "the store was hardly used"
    finally:
        engine.close()
