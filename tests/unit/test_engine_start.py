# SPDX-License-Identifier: Apache-2.0
"""Since when a server starts: files that are younger may not be those that it has loaded."""

from __future__ import annotations

import multiprocessing
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from attnstore_vllm import engine_start, plugin
from attnstore_vllm.errors import ConfigError


def test_a_start_lasts_until_the_weights_have_been_looked_at() -> None:
    """However often vLLM makes its configuration, or loads plugins, meanwhile."""
    start = engine_start._Start()
    start.note(holds=True)
    first = start.at
    for _ in range(2):
        start.note(holds=True)
    assert start.at == first
    start.end()
    assert start.at == first, "what is looked at once more is of the same start"
    start.note(holds=True)
    second = start.at
    start.note(holds=True)
    assert first < second == start.at


def test_an_engine_without_the_store_holds_no_start() -> None:
    """A process may train and save a model before it makes the engine that has the store."""
    start = engine_start._Start()
    start.note(holds=False)
    first = start.at
    start.note(holds=True)
    assert first < start.at


@pytest.mark.parametrize("is_making", [True, False])
def test_an_engine_that_is_refused_leaves_no_start(is_making: bool) -> None:
    """A notebook mends its settings, and maybe the model, and tries again. What is refused while
    another engine is being made does not end that one's start."""
    engine_start.end_start()
    if is_making:
        engine_start.note_start(holds=True)
    first = engine_start.configured_at()
    with pytest.raises(ConfigError):
        plugin.check_early({"dran": "1MiB"})
    refused = engine_start.configured_at()
    engine_start.note_start(holds=True)
    again = engine_start.configured_at()
    engine_start.end_start()
    assert first == refused == again if is_making else first < refused < again


@pytest.mark.parametrize("is_making", [True, False])
def test_a_fork_begins_then(is_making: bool) -> None:
    """vLLM forks an engine that it makes, and tells who made it of no end. In another fork the
    configuration is still to come, and so may be the model."""
    engine_start.end_start()
    if is_making:
        engine_start.note_start(holds=True)
    context = multiprocessing.get_context("fork")
    pipe, end = context.Pipe(duplex=False)

    def tell() -> None:
        begun = engine_start.configured_at()
        engine_start.note_start(holds=True)
        end.send((begun, engine_start.configured_at()))

    before = time.time()
    child = context.Process(target=tell)
    child.start()
    begun, later = pipe.recv()
    child.join()
    engine_start.end_start()
    assert before <= begun
    assert (begun == later) == is_making


def _tell_server(pipe: Connection) -> None:
    pipe.send((engine_start.configured_at(), engine_start.server_configured_at()))


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_an_engines_process_knows_when_its_server_was_configured(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server has read how media are made ready before it made the engine's process."""
    monkeypatch.setattr(plugin, "_check", lambda *_, **__: None)
    monkeypatch.setenv("ATTNSTORE_CONFIGURED_AT", "1.0")  # of a process before it
    engine_start.end_start()
    before = time.time()
    plugin.check_early({"dram": "16MiB", "nvme": {"path": str(tmp_path), "capacity": "64MiB"}})
    after = time.time()
    context: Any = multiprocessing.get_context(method)
    pipe, end = context.Pipe(duplex=False)
    child = context.Process(target=_tell_server, args=(end,))
    child.start()
    own, server = pipe.recv()
    child.join()
    engine_start.end_start()
    assert before <= server <= after < own


@pytest.mark.parametrize("told", ["", "x", "nan", "inf", "1e400"])
def test_a_time_that_makes_no_sense_is_the_own(told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTNSTORE_CONFIGURED_AT", told)
    assert engine_start.server_configured_at() == engine_start.configured_at()
