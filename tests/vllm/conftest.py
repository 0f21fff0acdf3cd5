# SPDX-License-Identifier: Apache-2.0
"""Engines for the tests of a module: each in a process of its own, ended with the module."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.engine import EngineSpec
from tests.vllm.host import EngineHost

pytest.importorskip("vllm", reason="these tests run the real vLLM")

StartEngine = Callable[..., EngineHost]


def some_long(names: Iterable[str], *long: str) -> list[Any]:
    """Parameters, of which these wait for `-m long`."""
    return [pytest.param(n, marks=[pytest.mark.long] if n in long else []) for n in names]


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where models are made, once for all tests."""
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def start_engine(tmp_path_factory: pytest.TempPathFactory, models: Path) -> Iterator[StartEngine]:
    """start_engine(**fields of EngineSpec): an engine with a store of its own, until the end of
    the module or the next start, whichever comes first: two engines at a time are slow."""
    running: list[EngineHost] = []

    def start(**fields: Any) -> EngineHost:
        while running:
            running.pop().close()
        directory = tmp_path_factory.mktemp("engine")
        spec = EngineSpec(**{"store": directory / "store", "models": models, **fields})
        running.append(EngineHost(spec, directory / "log"))
        return running[0]

    yield start
    while running:
        running.pop().close()
