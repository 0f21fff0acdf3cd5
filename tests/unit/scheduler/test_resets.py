# SPDX-License-Identifier: Apache-2.0
"""vLLM asks again for a request that a reset has preempted before a step has told of it: what it
gets then is not cleared by that step, and what it had before is gone."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from attnstore_vllm.config.audit import AuditConfig
from attnstore_vllm.scheduler.messages import StepPlan, StepReport
from attnstore_vllm.types import Seen
from tests.helpers import tokens_of
from tests.step_world import BLOCK, CHUNK, StepWorld
from tests.unit.store.test_auditor import BITS
from tests.vllm_objects import output

LORA = SimpleNamespace(lora_int_id=1, lora_name="poet", lora_path="/x")
LENGTH = 4 * CHUNK + 1


class Adapters(StepWorld):
    """The workers have the adapter."""

    digest = b"digest"

    def report(self, plan: StepPlan) -> None:
        done = [p.plan_id for p in (*plan.loads, *plan.saves, *plan.saves_before)]
        self.side.on_report(
            StepReport(
                plan.number,
                Counter(done),
                freed=Counter(plan.finished_saving),
                weights=Seen.SAME if plan.looks_at_weights else Seen.NOTHING,
                adapters={number: {0: self.digest} for number in plan.adapters},
            )
        )


def runs(world: StepWorld, **given: Any) -> Any:
    """A request that was offered what is stored, and has computed a step."""
    tokens = tokens_of(1, LENGTH)
    world.serve(world.request("before", tokens, **given))
    world.rig.until_idle()
    request = world.request("one", [*tokens, 1, 2], **given)
    world.come(request)
    world.start(request, world.answer(request))
    return request


def resumes(world: StepWorld, request: Any, found: int) -> StepPlan:
    """The step that tells of its preemption, and goes on with it."""
    world.start(request, found)
    told = output({"one": (found, request.num_tokens - found)}, {})
    told.preempted_req_ids = {"one"}
    return world.side.build_step(told)


def ends(world: StepWorld, request: Any, plan: StepPlan) -> None:
    world.report(plan)
    request.num_computed_tokens = request.num_tokens
    world.finish(request)
    world.end_step()
    world.rig.until_idle()
    world.close()


def test_the_adapter_is_checked_behind_the_new_load(monkeypatch: pytest.MonkeyPatch) -> None:
    world = Adapters(monkeypatch, serves_adapters=True, compute_if_sooner=False)
    request = runs(world, lora_request=LORA)
    plan = world.side.build_step(output({"one": (LENGTH, 2)}, {}))
    assert [check.lora_id for check in plan.checks] == [1], "as behind any load"
    world.report(plan)
    world.lose(request)
    found = world.answer(request)
    assert found >= 4 * CHUNK
    plan = resumes(world, request, found)
    (check,) = plan.checks
    assert (check.lora_id, len(check.block_ids)) == (1, -(-found // BLOCK))
    ends(world, request, plan)


def test_the_workers_are_asked_anew_what_the_adapter_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was replaced since the request came, and no step has run that would have told."""
    world = Adapters(monkeypatch, serves_adapters=True, compute_if_sooner=False)
    request = runs(world, lora_request=LORA)
    world.report(world.side.build_step(output({"one": (LENGTH, 2)}, {})))
    world.digest = b"another"
    world.lose(request)
    assert world.ask(request) is None, "until the workers have said"
    told = output({}, {})
    told.preempted_req_ids = {"one"}
    world.report(world.side.build_step(told))
    assert world.ask(request) == 0, "what is stored is of the former one"
    ends(world, request, resumes(world, request, 0))


def test_a_hit_that_was_drawn_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is drawn once. What was to be compared went with its blocks."""
    audit = AuditConfig(rate=1.0, tokens_per_s=1e9)
    store = {"audit": audit, "comparisons": (BITS,)}
    world = StepWorld(monkeypatch, store=store, audit=audit, compute_if_sooner=False)
    request = runs(world)
    assert request.num_computed_tokens == 0 and world.side.requests["one"].audited
    world.report(world.side.build_step(output({"one": (0, BLOCK)}, {})))
    world.lose(request)
    found = world.answer(request)
    assert found >= 4 * CHUNK
    ends(world, request, resumes(world, request, found))
