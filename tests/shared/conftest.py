# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest

from attnstore_lab.testing.network_stores import KINDS, NetworkStore, missing
from tests.helpers import Rig
from tests.shared import rigs
from tests.shared.stranger import Stranger

_missing = cache(missing)
BOTH = [kind if kind == "redis" else pytest.param(kind, marks=pytest.mark.long) for kind in KINDS]
"""Of Mooncake, which takes longer, test_mooncake.py has what is always run."""


def _start(kind: str, *arguments: str, **options: Any) -> NetworkStore:
    reason = _missing(kind)
    if reason is not None:
        pytest.skip(reason)
    return NetworkStore(kind, *arguments, **options)


@pytest.fixture(scope="session", params=BOTH)
def server(request: pytest.FixtureRequest) -> Iterator[NetworkStore]:
    """A store for tests that do it no harm."""
    made = _start(request.param)
    yield made
    made.kill()


@pytest.fixture(params=BOTH)
def own_server(request: pytest.FixtureRequest) -> Iterator[NetworkStore]:
    """A store to be killed."""
    made = _start(request.param)
    yield made
    made.kill()


@pytest.fixture
def mooncake() -> Iterator[NetworkStore]:
    made = _start("mooncake")
    yield made
    made.kill()


@pytest.fixture
def redis() -> Iterator[Callable[..., NetworkStore]]:
    """Redis with other arguments."""
    made: list[NetworkStore] = []

    def start(*arguments: str, **options: Any) -> NetworkStore:
        made.append(_start("redis", *arguments, **options))
        return made[-1]

    yield start
    for one in made:
        one.kill()


@pytest.fixture
def namespace() -> bytes:
    """Tests share a store, and nothing in it."""
    return secrets.token_bytes(32)


@pytest.fixture
def open_shared(namespace: bytes) -> Iterator[Callable[..., Rig]]:
    made: list[Rig] = []

    def open_it(server: NetworkStore, **options: Any) -> Rig:
        made.append(rigs.shared_rig(server.settings, namespace, **options))
        return made[-1]

    yield open_it
    for rig in made:
        rig.close()
        rig.store.check_integrity()


@pytest.fixture
def stranger(server: NetworkStore) -> Iterator[Stranger]:
    made = Stranger(server)
    yield made
    made.close()
