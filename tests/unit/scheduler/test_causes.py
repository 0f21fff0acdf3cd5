# SPDX-License-Identifier: Apache-2.0
"""Why was this prompt not loaded, or not stored? Each cause is driven through a real scheduler
side: the request's report says it, and the metric counts it once.

It is long since each cause has its story here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from attnstore_lab.testing.devices import MemoryDevice
from attnstore_lab.testing.remote_dict import MakeRemoteDict, Others
from attnstore_vllm.config.audit import AuditConfig
from attnstore_vllm.hints import PrefetchOrder
from attnstore_vllm.policy.kv_compare import Comparison, Unit
from attnstore_vllm.scheduler.media import MediaNames
from attnstore_vllm.tiers.remote_io import RemoteTiers
from attnstore_vllm.types import RECOMPUTED, Cause
from tests.helpers import names_of, payload_of, push_out_of_dram, sequence_of, tokens_of
from tests.step_world import BLOCK, CHUNK, Names, StepWorld
from tests.vllm_objects import Clock, output

LENGTH = 4 * CHUNK + 1
ROOT = Path(__file__).resolve().parents[3]
AT_ONCE = {"do_remote_prefill": True}
"""Another connector brings its KV: our "not yet" would hold that up."""

EVERY_HIT = AuditConfig(rate=1.0, stop_after=1000, keep_bytes=None)
AUDITED: dict[str, Any] = {
    "audit": EVERY_HIT,
    "store": {"audit": EVERY_HIT, "comparisons": (Comparison([Unit(0, 0, 0, 512)], None),)},
}
"""Every hit is computed, and compared."""

Start = Callable[..., StepWorld]
STORIES: dict[Cause, Callable[[Start], None]] = {}


def story(cause: Cause) -> Callable[[Callable[[Start], None]], Callable[[Start], None]]:
    def add(play: Callable[[Start], None]) -> Callable[[Start], None]:
        STORIES[cause] = play
        return play

    return add


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    worlds: list[StepWorld] = []

    def begin(**options: Any) -> StepWorld:
        worlds.append(StepWorld(monkeypatch, **options))
        return worlds[-1]

    yield begin
    for world in worlds:
        world.close()


@pytest.mark.parametrize("cause", Cause, ids=str)
def test_each_cause_is_told_and_counted(start: Start, cause: Cause) -> None:
    STORIES[cause](start)


@pytest.mark.parametrize("cause", Cause, ids=str)
def test_each_cause_is_in_the_docs(cause: Cause) -> None:
    runbook = (ROOT / "docs" / "runbook.md").read_text(encoding="utf-8")
    rows = runbook.partition("### Causes")[2].partition("\n##")[0]
    assert f"| `{cause}` |" in rows


def test_what_is_loaded_has_no_cause(start: Start) -> None:
    world = start()
    world.rig.put_all(sequence_of(tokens_of(1, LENGTH)))
    said, counted = told(world, served(world, asking(world, tokens_of(1, LENGTH))))
    assert (said["why_computed"], said["why_not_stored"]) == (None, None)
    assert said["computed_tokens"] == 1 and not counted


def test_a_request_that_ends_before_its_answer_has_no_cause(start: Start) -> None:
    world = start()
    request = asking(world, tokens_of(1, LENGTH))
    world.come(request)
    said, counted = told(world, request)
    assert said["why_computed"] is None and not counted


@pytest.mark.parametrize("at_once", [False, True])
def test_an_answer_that_comes_at_once_is_loaded(
    monkeypatch: pytest.MonkeyPatch, at_once: bool
) -> None:
    """Between the question of the first look and the answer to vLLM, too."""
    others, look = Others(), RemoteTiers.look
    store = {"more_tiers": (MakeRemoteDict(others),), "threaded": False}
    world = StepWorld(monkeypatch, store=store, look_ahead=False)
    request = asking(world, tokens_of(1, 8 * CHUNK + 5))
    world.come(request)
    state = world.side.requests["one"]
    for number in range(8):
        name = state.sequence.name(number, state.tenant)
        others.put(name, payload_of(name))

    def look_and_tick(*args: Any) -> None:
        look(*args)
        for _ in range(3 if at_once else 0):
            world.store.tick()

    monkeypatch.setattr(RemoteTiers, "look", look_and_tick)
    found = world.ask(request)
    for _ in range(9):
        if found is None:
            world.store.tick()
            found = world.ask(request)
    assert found == 8 * CHUNK


def asking(world: StepWorld, tokens: Sequence[int], name: str = "one", **given: Any) -> Any:
    """A request that asks for its report."""
    params = {"attnstore": {"report": True, **given.pop("hints", {})}, **given.pop("params", {})}
    return world.request(name, tokens, kv_transfer_params=params, **given)


def served(world: StepWorld, request: Any) -> Any:
    """All of it is computed, or loaded; it has not ended."""
    world.come(request)
    run(world, request)
    return request


def run(world: StepWorld, request: Any, local: int = 0) -> None:
    world.start(request, world.answer(request, local))
    request.num_computed_tokens += local
    world.end_step(request)


def told(world: StepWorld, request: Any) -> tuple[dict[str, Any], dict[str, int]]:
    """The request ends: its report, and the causes that are counted."""
    said = world.end(request)
    assert said is not None
    counters = world.side.take_stats().data["counters"]
    report: dict[str, Any] = said["attnstore"]
    if report["why_computed"] in set(RECOMPUTED):
        assert counters[f"recomputations:{report['why_computed']}"] == 1
    for why in (report["why_computed"], report["why_not_stored"]):
        assert type(why) in (str, type(None)), "it crosses processes"
    found = {key.partition(":")[2]: n for key, n in counters.items() if "skipped:" in key}
    return report, found


def check(
    world: StepWorld, request: Any, cause: Cause, field: str = "why_computed", **others: int
) -> None:
    report, counted = told(world, request)
    assert report[field] == cause.value
    assert counted == {cause.value: 1, **others}


# ---- left alone ----------------------------------------------------------------------------


@story(Cause.BYPASS)
def _bypass(start: Start) -> None:
    world = start()
    request = asking(world, tokens_of(1, LENGTH), skip_reading_prefix_cache=True)
    check(world, served(world, request), Cause.BYPASS)


@story(Cause.NO_SALT)
def _no_salt(start: Start) -> None:
    world = start(shared_by="salted")
    request = asking(world, tokens_of(1, LENGTH))
    world.come(request)
    run(world, request, local=CHUNK)
    report, counted = told(world, request)
    assert (report["why_computed"], report["why_not_stored"]) == ("no_salt", "no_salt")
    assert (report["hbm_tokens"], report["computed_tokens"]) == (CHUNK, LENGTH - CHUNK)
    assert counted == {"no_salt": 1}
    order = PrefetchOrder(tokens_of(1, LENGTH), None)
    world.come(world.request("brings", [1], kv_transfer_params=order.as_params()))
    assert world.side.take_stats().data["counters"] == {"skipped:no_salt": 1}


@story(Cause.WEIGHTS_UNKNOWN)
def _weights_unknown(start: Start) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Names, "namespace", None)
        world = start()
        request = served(world, asking(world, tokens_of(1, LENGTH)))
        order = PrefetchOrder(tokens_of(1, LENGTH), None)
        world.come(world.request("brings", [1], kv_transfer_params=order.as_params()))
    report, counted = told(world, request)
    assert report["why_computed"] == "weights_unknown"
    assert counted == {"weights_unknown": 2}, "the request and the prefetch"


@story(Cause.ADAPTER_NOT_SERVED)
def _adapter_not_served(start: Start) -> None:
    world = start(serves_adapters=False)
    request = asking(world, tokens_of(1, LENGTH), lora_request=SimpleNamespace(lora_int_id=1))
    check(world, served(world, request), Cause.ADAPTER_NOT_SERVED)


@story(Cause.DISTRUSTED)
def _distrusted(start: Start) -> None:
    world = start(**AUDITED)
    world.rig.put_all(sequence_of(tokens_of(1, LENGTH)))
    assert world.store.audit is not None
    world.store.audit.is_stopped = True  # tests/unit/store/test_auditor.py says when it is
    check(world, served(world, asking(world, tokens_of(1, LENGTH))), Cause.DISTRUSTED)
    order = PrefetchOrder(tokens_of(1, LENGTH), None)
    world.come(world.request("brings", [1], kv_transfer_params=order.as_params()))
    assert world.side.take_stats().data["counters"] == {"skipped:distrusted": 1}


# ---- not looked up -------------------------------------------------------------------------


@story(Cause.ADAPTER_UNKNOWN)
def _adapter_unknown(start: Start) -> None:
    world = start()
    lora = SimpleNamespace(lora_int_id=1, lora_name="poet")
    request = asking(world, tokens_of(1, LENGTH), lora_request=lora, params=AT_ONCE)
    check(world, served(world, request), Cause.ADAPTER_UNKNOWN)


@story(Cause.RESET_UNCHECKED)
def _reset_unchecked(start: Start) -> None:
    world = start()
    world.side.reset()
    request = asking(world, tokens_of(1, LENGTH), params=AT_ONCE)
    check(world, served(world, request), Cause.RESET_UNCHECKED)


@story(Cause.STEP_BUDGET)
def _step_budget(start: Start) -> None:
    world = start(step_budget=1, step_tokens=CHUNK)
    world.come(world.request("before", tokens_of(2, LENGTH)))  # takes the step's look-up
    request = asking(world, tokens_of(1, LENGTH), params=AT_ONCE)
    world.come(request)
    run(world, request)
    check(world, request, Cause.STEP_BUDGET)
    # The same of what is saved: those that end in one step.
    requests = [asking(world, tokens_of(n, LENGTH), str(n)) for n in range(3, 9)]
    for request in requests:
        served(world, request)
    said = [world.end(request) or {} for request in requests]
    assert [told["attnstore"]["why_not_stored"] for told in said][-1] == "step_budget"
    assert world.side.take_stats().data["counters"]["skipped:step_budget"] >= 1


@story(Cause.MEDIA_UNKNOWN)
def _media_unknown(start: Start) -> None:
    world = start(media=MediaNames(why_not="they cannot be read"))
    place = SimpleNamespace(offset=BLOCK, length=CHUNK, is_embed=None)
    picture = SimpleNamespace(
        identifier="cat", mm_hash="cat", data=None, modality="image", mm_position=place
    )
    request = asking(world, tokens_of(1, LENGTH), mm_features=[picture])
    report, counted = told(world, served(world, request))
    assert report["why_computed"] == report["why_not_stored"] == "media_unknown"
    assert counted == {"media_unknown": 1}


@story(Cause.SESSION_CHANGED)
def _session_changed(start: Start) -> None:
    world = start()
    request = asking(world, tokens_of(1, LENGTH), resumable=True, cache_salt="a")
    world.come(request)
    request.cache_salt = "b"
    run(world, request)
    report, counted = told(world, request)
    assert report["why_computed"] == report["why_not_stored"] == "session_changed"
    assert counted == {"session_changed": 1}


# ---- not stored, or of no use now ----------------------------------------------------------


@story(Cause.NOT_STORED)
def _not_stored(start: Start) -> None:
    world = start()
    check(world, served(world, asking(world, tokens_of(1, LENGTH))), Cause.NOT_STORED)
    world.end_step()
    longer = [*tokens_of(1, LENGTH), *tokens_of(2, LENGTH)]  # the beginning is, the rest is not
    report, counted = told(world, served(world, asking(world, longer)))
    assert report["dram_tokens"] >= 4 * CHUNK and counted == {"not_stored": 1}


@story(Cause.RECOVERING)
def _recovering(start: Start) -> None:
    world = start()
    nvme: Any = world.store.thread.tiers[0]
    nvme.recovery.is_over = False
    request = served(world, asking(world, tokens_of(1, LENGTH)))
    nvme.recovery.is_over = True
    check(world, request, Cause.RECOVERING)


@story(Cause.NOT_ANSWERED)
def _not_answered(start: Start) -> None:
    world = start(store={"more_tiers": (MakeRemoteDict(Others(is_silent=True)),)})
    check(world, served(world, asking(world, tokens_of(1, 1000))), Cause.NOT_ANSWERED)


@story(Cause.EXPIRED)
def _expired(start: Start) -> None:
    clock = Clock()
    world = start(store={"clock": clock, "ttl_s": 60.0}, ttl_s=60.0)
    hints = {"ttl": 60}
    first = asking(world, tokens_of(1, LENGTH), "before", hints=hints)
    world.serve(first)
    world.side.take_stats()
    clock.now += 61
    check(world, served(world, asking(world, tokens_of(1, LENGTH))), Cause.EXPIRED)


@story(Cause.TOO_SHORT)
def _too_short(start: Start) -> None:
    world = start()
    world.rig.put(names_of(sequence_of(tokens_of(1, LENGTH)))[0])
    request = asking(world, tokens_of(1, LENGTH))
    world.come(request)
    run(world, request, local=BLOCK)  # CHUNK - BLOCK tokens behind it are stored
    check(world, request, Cause.TOO_SHORT)


@story(Cause.OUT_OF_USE)
def _out_of_use(start: Start) -> None:
    world = on_nvme(start(slots=8))
    world.store.thread.tiers[0].health.reads.in_use = False
    check(world, served(world, asking(world, tokens_of(1, LENGTH))), Cause.OUT_OF_USE)


@story(Cause.DRAM_TOO_SMALL)
def _dram_too_small(start: Start) -> None:
    world = start(slots=3, loads_in_parts=False)
    for name in names_of(sequence_of(tokens_of(1, LENGTH))):
        world.rig.until(lambda name=name: world.rig.put(name) is not None)  # type: ignore[misc]
        world.rig.until_idle()
    report, counted = told(world, served(world, asking(world, tokens_of(1, LENGTH))))
    assert report["why_computed"] == "dram_too_small"
    assert counted["dram_too_small"] == 1


@story(Cause.GROUP_LACKS)
def _group_lacks(start: Start) -> None:
    world = start(windows=True)
    world.rig.put_all(sequence_of(tokens_of(1, LENGTH)))  # the spine alone
    check(world, served(world, asking(world, tokens_of(1, LENGTH))), Cause.GROUP_LACKS)


# ---- stored, and computed all the same -----------------------------------------------------


@story(Cause.DEADLINE)
def _deadline(start: Start) -> None:
    clock = Clock()
    world = on_nvme(start(slots=8, clock=clock))
    device(world).is_holding = True
    request = asking(world, tokens_of(1, LENGTH))
    world.come(request)
    assert world.ask(request) is None
    clock.now += 1.0
    run(world, request)
    check(world, request, Cause.DEADLINE)
    device(world).release()


@story(Cause.DRAM_FULL)
def _dram_full(start: Start) -> None:
    clock = Clock()
    world = on_nvme(start(slots=8, clock=clock))
    in_use = list(world.store.residency.dram.owned.values())
    with world.store.queue():
        for chunk in in_use:
            chunk.dram.uses += 1
    request = asking(world, tokens_of(1, LENGTH))
    world.come(request)
    assert world.ask(request) is None
    clock.now += 1.0
    run(world, request)
    with world.store.queue():
        for chunk in in_use:
            world.store.residency.release(chunk)
    check(world, request, Cause.DRAM_FULL)


@story(Cause.SLOWER)
def _slower(start: Start) -> None:
    world = on_nvme(start(slots=8))
    device(world).is_holding = True
    request = asking(world, tokens_of(1, LENGTH), params=AT_ONCE)
    check(world, served(world, request), Cause.SLOWER)
    device(world).release()


@story(Cause.LOST)
def _lost(start: Start) -> None:
    world = start()
    world.rig.put_all(sequence_of(tokens_of(1, LENGTH)))
    request = asking(world, tokens_of(1, LENGTH))
    world.come(request)
    names = names_of(sequence_of(tokens_of(1, LENGTH)))
    world.store.drop([world.rig.chunk(name) for name in names])
    run(world, request)
    check(world, request, Cause.LOST)


@story(Cause.COPY_FAILED)
def _copy_failed(start: Start) -> None:
    world = start()
    world.rig.put_all(sequence_of(tokens_of(1, LENGTH)))
    request = asking(world, tokens_of(1, LENGTH))
    world.come(request)
    found = world.ask(request)
    assert found is not None
    world.start(request, found)
    plan = world.side.build_step(output({"one": (found, LENGTH - found)}, {}))
    world.side.on_failed_requests([request.request_id])
    world.report(plan)
    request.num_computed_tokens = 0
    run(world, request)
    check(world, request, Cause.COPY_FAILED)


@story(Cause.AUDIT)
def _audit(start: Start) -> None:
    world = start(**AUDITED)
    world.rig.put_all(sequence_of(tokens_of(1, LENGTH)))
    check(world, served(world, asking(world, tokens_of(1, LENGTH))), Cause.AUDIT)


# ---- not saved -----------------------------------------------------------------------------


@story(Cause.STORE_FALSE)
def _store_false(start: Start) -> None:
    world = start()
    request = asking(world, tokens_of(1, LENGTH), hints={"store": False})
    check(world, served(world, request), Cause.STORE_FALSE, "why_not_stored", not_stored=1)


@story(Cause.SESSION_DRAFTS)
def _session_drafts(start: Start) -> None:
    world = start(overcounts_drafts=True)
    request = asking(world, tokens_of(1, LENGTH), resumable=True)
    check(world, served(world, request), Cause.SESSION_DRAFTS, "why_not_stored", not_stored=1)


@story(Cause.NO_ROOM)
def _no_room(start: Start) -> None:
    world = start(slots=2)
    device(world).is_holding = True  # nothing is written back: what is in DRAM stays
    request = asking(world, tokens_of(1, LENGTH))
    check(world, served(world, request), Cause.NO_ROOM, "why_not_stored", not_stored=1)
    device(world).release()


@story(Cause.OUTDATED)
def _outdated(start: Start) -> None:
    world = start()
    request = served(world, asking(world, tokens_of(1, LENGTH)))
    world.side.reset()
    check(world, request, Cause.OUTDATED, "why_not_stored", not_stored=1)


def device(world: StepWorld) -> MemoryDevice:
    assert isinstance(world.rig.device, MemoryDevice)
    return world.rig.device


def on_nvme(world: StepWorld) -> StepWorld:
    """A prompt of LENGTH tokens is on NVMe, and not in DRAM."""
    world.rig.put_all(sequence_of(tokens_of(1, LENGTH)))
    world.rig.until_idle()
    push_out_of_dram(world.rig, device(world), world.rig.dram_slots)
    return world


def test_a_request_that_is_left_alone_gets_its_report_by_any_standard(start: Start) -> None:
    action = {"action_type": "attnstore.hints", "action_version": "1", "payload": {"report": True}}
    for params in ({"kv_hint": {"actions": [action]}}, {"attnstore": {"report": True}}):
        world = start()
        alone = world.request("one", tokens_of(1, LENGTH), skip_reading_prefix_cache=True)
        alone.kv_transfer_params = params
        world.come(alone)
        world.start(alone, 0)
        world.end_step(alone)
        said = world.end(alone)
        assert said is not None and said["attnstore"]["why_computed"] == "bypass"
