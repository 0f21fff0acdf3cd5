# SPDX-License-Identifier: Apache-2.0
"""Pictures under weights that change while vLLM's encoder keeps what it has made.

vLLM's `reset_prefix_cache`, which follows an update, leaves the encoder's cache as it is: a picture
that is asked about again is then seen as the weights of before saw it. That is vLLM's answer. It
must not be stored as what the new weights say of the picture, for good.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from attnstore_lab.testing.tiny_model import TINY, make_model
from attnstore_vllm.types import Seen
from tests.vllm.scripted import ScriptedEngine
from tests.vllm.scripted_worker import VOCAB, Picture
from tests.vllm.stepped import prompt
from tests.vllm.test_async_scheduling import wait_until_quiet

PICTURE = "a" * 64
"""vLLM's name for it, by its content."""


class Updated:
    """An engine whose weights are changed in place; those of the files are version 0."""

    def __init__(self, model: Path, store: Path) -> None:
        self.version = 0
        self.engine = ScriptedEngine(model, store, num_blocks=60, depth=1, seed=3)
        worker, seen = self.engine.worker, [0]
        worker.base = lambda _: b"%d" % self.version
        worker.towers = lambda _: f" by {self.version}"

        def look() -> tuple[Seen, bytes | None]:
            seen.append(self.version)
            name = b"%d" % self.version if self.version else b""
            return (Seen.CHANGED if seen[-1] != seen[-2] else Seen.SAME), name

        worker.side.look_at_weights = look
        wait_until_quiet(self.engine.ours)  # it has found what is there

    def update(self, version: int) -> None:
        """As a trainer does. The encoder's cache stays."""
        self.version = version
        assert self.engine.scheduler.reset_prefix_cache()

    def look(self) -> None:
        """Nothing has changed: what was saved before has its name for good."""
        assert self.engine.scheduler.reset_prefix_cache()
        self.engine.add("look", [1] * 8, 1)
        self.engine.drain()

    def ask(self) -> int:
        """How many tokens came from the store. The worker looks at all of them: what it computed it
        says is right, from what its encoder has."""
        before = self.engine.worker.loaded_tokens
        tokens = [*prompt("you see:", 40), *[VOCAB - 1] * 40, *prompt("what?", 60)]
        picture = Picture("cat", 40, 40)
        self.engine.add("ask", tokens, 5, pictures=[picture], named=lambda _: PICTURE)
        self.engine.drain()
        wait_until_quiet(self.engine.ours)
        return self.engine.worker.loaded_tokens - before


@pytest.fixture
def start(models: Path, tmp_path: Path) -> Iterator[Any]:
    model = make_model(models / "scripted", TINY, weights=False)
    running: list[Updated] = []

    def start() -> Updated:
        while running:
            running.pop().engine.close()
        running.append(Updated(model, tmp_path / "store"))
        return running[0]

    yield start
    while running:
        running.pop().engine.close()


def test_what_other_weights_saw_is_not_stored(start: Any) -> None:
    """vLLM's encoder forgets it in time; the store would not."""
    updated = start()
    engine = updated.engine
    updated.update(1)
    updated.ask()
    updated.update(0)
    updated.ask()
    engine.scheduler.reset_encoder_cache()
    engine.worker.encoded.clear()
    assert engine.scheduler.reset_prefix_cache()
    assert updated.ask() > 100, "what was computed is right, and stored"


def test_nor_found_by_the_next_start(start: Any) -> None:
    """The weights of the files come back: what they compute has the name that it has for good."""
    updated = start()
    updated.update(1)
    updated.ask()
    updated.look()
    updated.update(0)
    updated.ask()
    updated = start()
    assert updated.ask() > 100


def test_a_picture_that_waits_meanwhile(start: Any) -> None:
    """It came under the old weights, with its name, and is computed by the new ones."""
    updated = start()
    engine = updated.engine
    updated.ask()
    updated.update(1)
    updated.ask()
    updated.look()
    assert engine.scheduler.reset_prefix_cache()
    tokens = [*prompt("you see:", 40), *[VOCAB - 1] * 40, *prompt("what?", 60)]
    picture = Picture("cat", 40, 40)
    engine.add("waits", tokens, 5, pictures=[picture], named=lambda _: PICTURE)
    updated.version = 0
    engine.drain()
    wait_until_quiet(engine.ours)
    updated = start()
    updated.ask()


def test_without_an_update_a_picture_keeps_its_name(start: Any) -> None:
    updated = start()
    updated.ask()
    assert updated.engine.scheduler.reset_prefix_cache()
    assert updated.ask() > 100
    assert list(updated.engine.worker.encoded) == [PICTURE]
