# SPDX-License-Identifier: Apache-2.0
"""One look-up a request, and how the needs of a model's groups choose the way of all of them."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from attnstore_lab.testing.remote_dict import MakeRemoteDict, Others, RemoteDictIo
from attnstore_vllm.config.settings import StoreConfig
from attnstore_vllm.connector.groups import needs_of
from attnstore_vllm.index.chunk import Chunk
from attnstore_vllm.index.keys import SequenceKeys
from attnstore_vllm.index.prefix import PrefixIndex
from attnstore_vllm.index.sections import Need, Reach
from attnstore_vllm.scheduler.start_log import start_lines
from attnstore_vllm.store.lookup import (
    AllTokens,
    Lookup,
    Sections,
    Strategy,
    WindowsAlone,
    strategy_for,
)
from attnstore_vllm.tiers.nvme.slab import Slab
from attnstore_vllm.tiers.remote_io import awaits_remote
from attnstore_vllm.transfer.geometry import Geometry, Group
from attnstore_vllm.types import Key
from tests.helpers import CHUNK_TOKENS, SHAPE, conversation, lookup_of, memory_rig, sequence_of

LONG = 4 * CHUNK_TOKENS
SPINE = Group(4, ("a",))
WINDOW = Group(4, ("b",), reach="window", reach_tokens=CHUNK_TOKENS)
STATE = Group(CHUNK_TOKENS, ("c",), reach="state")
SHAPES = [
    pytest.param((SPINE,), AllTokens, id="all tokens"),
    pytest.param((SPINE, WINDOW), Sections, id="windows beside them"),
    pytest.param((SPINE, STATE), Sections, id="states beside them"),
    pytest.param((WINDOW,), WindowsAlone, id="windows alone"),
    pytest.param((WINDOW, WINDOW), WindowsAlone, id="two kinds of windows"),
]


def geometry_of(*groups: Group) -> Geometry:
    return Geometry(1, tuple(64 for _ in groups), groups, CHUNK_TOKENS)


@pytest.mark.parametrize(("groups", "wanted"), SHAPES)
def test_the_needs_choose_the_strategy(groups: tuple[Group, ...], wanted: type[Strategy]) -> None:
    assert strategy_for(needs_of(geometry_of(*groups))) is wanted


@pytest.mark.parametrize(("groups", "wanted"), SHAPES)
def test_the_start_says_who_is_asked(
    groups: tuple[Group, ...], wanted: type[Strategy], tmp_path: Path
) -> None:
    """As the store does it: of windows alone the line once said that siblings are asked."""
    nvme = {"path": str(tmp_path), "capacity": "1GiB"}
    config = replace(
        StoreConfig.parse({"dram": "256MiB", "nvme": nvme}), data_parallel_size=2
    ).share(0)
    assert config.siblings(), "there is one that could be asked"
    slab = Slab(tmp_path / "slab", 32 << 20, SHAPE)
    asks = strategy_for(needs_of(geometry_of(*groups))).asks_remote
    geometry = geometry_of(*groups)
    said = "\n".join(start_lines("0.1.0", config, geometry, 9, slab, "uring", asks_remote=asks))
    assert ("may be asked" in said) == (wanted is AllTokens)
    assert ("cannot be asked" in said) == (wanted is not AllTokens)


@pytest.mark.parametrize("needs", [
    (), (Need(1, Reach.WINDOW, 24, 4),), (Need(1, Reach.STATE, 0, 16),),
    (Need(0, Reach.WINDOW, 24, 4),),
])  # fmt: skip
def test_no_remote_tier_is_asked_for_several_groups(needs: tuple[Need, ...]) -> None:
    rig = memory_rig(more_tiers=(MakeRemoteDict(Others()),), needs=needs)
    lookup = lookup_of(conversation(1, LONG), may_ask=True)
    rig.store.find(lookup, 0, LONG)
    assert (rig.store.remote is not None) == (not needs)
    assert bool(lookup.asked) == (not needs)
    io = rig.store.thread.tiers[1]
    assert isinstance(io, RemoteDictIo)
    rig.until(lambda: not awaits_remote(lookup))
    assert io.num_asked == (not needs)
    rig.close()


def test_requests_of_one_prompt_have_look_ups_of_their_own() -> None:
    """Children of `n` have the same keys; each asks, waits and finds for itself."""
    rig = memory_rig(more_tiers=(MakeRemoteDict(Others()),))
    keys = sequence_of(conversation(1, LONG))
    first, second = (Lookup(keys, may_ask=may) for may in (True, False))
    rig.store.find(first, 0, LONG)
    rig.store.find(second, 0, LONG)
    assert first.asked
    assert not second.asked
    rig.close()


def test_keys_are_names_alone() -> None:
    """No request writes on them: what is noted there is of all requests that have the prompt."""
    rig = memory_rig(needs=(Need(1, Reach.WINDOW, 24, 4),))
    keys = sequence_of(conversation(1, LONG))
    rig.put_all(keys)
    keys.keys(0, LONG // CHUNK_TOKENS)
    before = {name for name in vars(keys) if not name.startswith("_")}
    lookup = Lookup(keys)
    rig.store.find(lookup, 0, LONG)
    assert lookup.spine_stop == LONG
    assert lookup.short_of == {1}
    assert {name for name in vars(keys) if not name.startswith("_")} == before
    assert before == {"token_ids", "chunk_tokens", "root"}
    rig.close()


def test_the_next_look_goes_on_from_what_the_last_one_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A request that waits is looked up step after step: only its last chunk is searched for."""
    rig = memory_rig(dram_slots=32, num_records=32)
    keys = sequence_of(conversation(1, 16 * CHUNK_TOKENS))
    rig.put_all(keys)
    lookup = Lookup(keys)
    found = rig.store.find(lookup, 0, 16 * CHUNK_TOKENS)
    assert len(found) == 16
    made = Counter[str]()
    chunk = PrefixIndex.chunk

    def counted(index: PrefixIndex, entry: int) -> Chunk:
        made["chunks"] += 1
        return chunk(index, entry)

    monkeypatch.setattr(PrefixIndex, "chunk", counted)
    assert rig.store.find(lookup, 0, 16 * CHUNK_TOKENS) == found
    assert made["chunks"] <= 2
    rig.close()


def test_what_was_found_of_tokens_that_change_is_forgotten() -> None:
    """The next input of a session replaces tokens. What is before them stands."""
    rig = memory_rig()
    tokens = conversation(1, LONG)
    lookup = Lookup(SequenceKeys(Key(bytes(32)), tokens, CHUNK_TOKENS))
    rig.put_all(lookup.keys)
    assert rig.store.find(lookup, 0, LONG)[-1].stop == LONG
    lookup.spine_stop = LONG
    lookup.follow()
    assert lookup.spine_stop == LONG, "nothing has changed"
    tokens[2 * CHUNK_TOKENS + 5] = 99
    lookup.follow()
    assert lookup.spine_stop == 2 * CHUNK_TOKENS
    found = rig.store.find(lookup, 0, LONG)
    assert found[-1].stop == 2 * CHUNK_TOKENS + 4, "whole blocks of what is the same"
    rig.close()
