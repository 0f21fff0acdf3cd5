# SPDX-License-Identifier: Apache-2.0
"""Looks at the weights that were planned before a reset, and reported after it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from attnstore_lab.testing.remote_dict import MakeRemoteDict, Others
from attnstore_lab.testing.small_store import open_scheduler
from attnstore_vllm.scheduler.media import MediaNames, RequestMedia
from attnstore_vllm.scheduler.messages import StepReport
from attnstore_vllm.scheduler.request import RequestState
from attnstore_vllm.transfer.geometry import Geometry, Group
from attnstore_vllm.types import Cause, Seen
from tests.helpers import NAMESPACE, Rig, memory_rig
from tests.vllm_objects import output, request


class _Names:
    namespace = NAMESPACE

    def be_live(self, live: Mapping[int, bytes | None]) -> None:
        """The keys stay."""

    def close(self) -> None:
        """Nothing is held."""


class _Engine:
    """A scheduler, and what its tiers are told of the weights."""

    def __init__(self, rig: Rig) -> None:
        self.seen: list[bool | None] = []
        assert rig.store.remote is not None
        rig.store.remote.weights_seen = self.seen.append  # type: ignore[assignment, method-assign]
        geometry = Geometry(1, (64,), (Group(4, ("l",)),), 16)
        self.scheduler = open_scheduler(rig.store, geometry, _Names(), load_deadline_ms=200)
        self.pool = SimpleNamespace(cached_block_hash_to_block=object())
        one = request("one")
        media = RequestMedia(MediaNames(), one)
        state = RequestState(one, b"", b"", 16, media, load_failed=Cause.COPY_FAILED)
        self.scheduler.requests["one"] = state
        self.scheduler.bind_kv_cache_manager(SimpleNamespace(block_pool=self.pool))

    @property
    def is_waiting(self) -> bool:
        """Whether requests wait for a look. Asked as vLLM does, before a step."""
        return self.scheduler.get_num_new_matched_tokens(request("one"), 0)[0] is None

    def plan(self) -> Any:
        return self.scheduler.build_step(output({}, {}))

    def report(self, plan: Any, weights: Seen = Seen.SAME) -> None:
        assert plan.looks_at_weights
        self.scheduler.on_report(StepReport(plan.number, weights=weights))


@pytest.fixture
def engine() -> Iterator[_Engine]:
    rig = memory_rig(more_tiers=(MakeRemoteDict(Others()),))
    yield _Engine(rig)
    rig.close()


def _reset(engine: _Engine, *, with_blocks: bool) -> None:
    if with_blocks:
        engine.pool.cached_block_hash_to_block = object()
    assert engine.scheduler.reset()


@pytest.mark.parametrize("with_blocks", [True, False])
def test_a_look_of_before_a_reset_confirms_nothing(engine: _Engine, with_blocks: bool) -> None:
    assert engine.is_waiting
    early = engine.plan()
    _reset(engine, with_blocks=with_blocks)
    engine.report(early)
    assert engine.seen == []
    assert engine.is_waiting
    engine.report(engine.plan())
    assert engine.seen == [True]
    assert not engine.is_waiting


def test_a_look_of_before_a_reset_that_finds_other_weights_counts(engine: _Engine) -> None:
    assert engine.is_waiting
    early = engine.plan()
    _reset(engine, with_blocks=True)
    engine.report(early, Seen.CHANGED)
    assert engine.seen == [False]
