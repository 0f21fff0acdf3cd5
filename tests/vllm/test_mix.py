# SPDX-License-Identifier: Apache-2.0
"""Some seeds of the mix; a long run is python -m tests.vllm.mix. And: it sees what is planted."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from attnstore_lab.testing.tiny_model import TINY, make_model
from attnstore_vllm.index import keys
from attnstore_vllm.scheduler import adapters, media, request, scheduler
from tests.vllm.mix import play

SEEDS_TO_FIND = 40


@pytest.fixture(scope="module")
def model(models: Path) -> Path:
    return make_model(models / "scripted", TINY, weights=False)


def test_seeds(model: Path) -> None:
    counts: Counter[str] = Counter()
    for seed in range(16):
        try:
            counts += play(model, seed)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}") from error
    assert counts["loaded tokens"] > 5000
    for kind in ("chunks checked", "with pictures", "inputs of sessions", "rows"):
        assert counts[kind] > 100, kind
    assert min(counts["restarts"], counts["new weights"]) > 3


# ---- faults ---------------------------------------------------------------------------------

Patch = pytest.MonkeyPatch


def spans_are_taken_once(patch: Patch) -> None:
    """What a session brings later is not looked at, and nothing stops there."""
    patch.setattr(media.RequestMedia, "scheduled", lambda _: set())
    patch.setattr(media.RequestMedia, "known_tokens", lambda _: media.ALL_TOKENS)


def the_salt_is_left_out(patch: Patch) -> None:
    root_key = keys.root_key
    patch.setattr(request, "root_key", lambda space, _, lora: root_key(space, None, lora))


def an_adapter_is_known_for_good(patch: Patch) -> None:
    """Its first identity stays, whatever the workers say later."""
    on_report = adapters.Adapters.on_report

    def only_once(self: Any, number: int, told: Any) -> set[str]:
        new = {k: v for k, v in told.items() if k not in self._known}
        for lora_id in told.keys() & self._known.keys():
            self._known[lora_id].number = number
        return on_report(self, number, new)

    patch.setattr(adapters.Adapters, "on_report", only_once)


def an_old_answer_will_do(patch: Patch) -> None:
    """KV is offered by what was said of the adapter before the request came, and nobody compares
    when it is loaded: either alone keeps the answers right."""
    patch.setattr(scheduler.Scheduler, "_checks", lambda *_: [])
    patch.setattr(adapters.Adapters, "ask", lambda _: adapters.Asked(0, 0.0))


def the_adapter_is_left_out(patch: Patch) -> None:
    root_key = keys.root_key
    patch.setattr(request, "root_key", lambda space, salt, _: root_key(space, salt, b""))


def a_reset_does_nothing(patch: Patch) -> None:
    patch.setattr(scheduler.Scheduler, "reset", lambda _: True)


def counted_names_are_names(patch: Patch) -> None:
    """And their content is not looked at, as before it was."""
    patch.setattr(media, "_COUNTED", re.compile("none is"))
    content = keys.media_content
    patch.setattr(media, "media_content", lambda name, _, *more: content(name, b"", *more))


def drafts_are_not_looked_at(patch: Patch) -> None:
    begin = scheduler.Scheduler.__init__

    def without(self: Any, *args: Any, **options: Any) -> None:
        store, geometry, names, config, engine = args
        exact = replace(engine, overcounts_drafts=False)
        begin(self, store, geometry, names, config, exact, **options)

    patch.setattr(scheduler.Scheduler, "__init__", without)


def pictures_are_all_one(patch: Patch) -> None:
    extra = keys.chunk_extra

    def one(spans: Any, start: int, stop: int) -> bytes:
        return extra([keys.MultimodalSpan(b"", s.offset, s.num_tokens) for s in spans], start, stop)

    patch.setattr(keys, "chunk_extra", one)


def pictures_have_no_place(patch: Patch) -> None:
    extra = keys.chunk_extra

    def anywhere(spans: Any, start: int, stop: int) -> bytes:
        inside = [s for s in spans if extra([s], start, stop)]
        return extra([keys.MultimodalSpan(s.content, start, 1) for s in inside], start, stop)

    patch.setattr(keys, "chunk_extra", anywhere)


def hints_of_later_inputs_are_ignored(patch: Patch) -> None:
    patch.setattr(request, "_says_store", lambda _: True)


@pytest.mark.parametrize(
    "fault",
    [
        the_salt_is_left_out, the_adapter_is_left_out, a_reset_does_nothing,
        *(
            pytest.param(fault, marks=pytest.mark.long)
            for fault in (
                an_adapter_is_known_for_good, an_old_answer_will_do, spans_are_taken_once,
                counted_names_are_names, drafts_are_not_looked_at,
                pictures_are_all_one, pictures_have_no_place, hints_of_later_inputs_are_ignored,
            )
        ),
    ],
)  # fmt: skip
def test_a_planted_fault_is_seen(
    fault: Callable[[Patch], None], model: Path, monkeypatch: Patch
) -> None:
    fault(monkeypatch)
    for seed in range(SEEDS_TO_FIND):
        try:
            play(model, seed)
        except AssertionError:
            return
    raise AssertionError("the mix does not see it")
