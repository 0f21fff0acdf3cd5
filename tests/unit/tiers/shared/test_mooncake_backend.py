# SPDX-License-Identifier: Apache-2.0
"""What Mooncake's client says, and what becomes of it; the client is a list of answers."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any

import pytest

from attnstore_vllm.tiers.shared.backend import FAILED, BackendError, NoAnswerError
from attnstore_vllm.tiers.shared.mooncake_backend import GONE, TIMED_OUT, TRIES, MooncakeBackend


class Answers:
    """Of all calls, in their order."""

    def __init__(self, *answers: list[int]) -> None:
        self.left = list(answers)

    def _next(self, *_: Any) -> list[int]:
        return self.left.pop(0)

    batch_is_exist = batch_get_into = batch_put_from = batch_upsert_from = _next

    def remove(self, name: str, force: bool) -> int:
        assert force, "else a lease protects what was just read"
        return self._next(name)[0]


@pytest.fixture
def master() -> Iterator[str]:
    """Somebody listens there."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        yield f"127.0.0.1:{listening.getsockname()[1]}"


def test_a_connection_to_the_master_before_is_none_to_this_one(master: str) -> None:
    place = memoryview(bytearray(8))
    client = Answers([GONE], [1], [GONE], [GONE], [8], [GONE], [0])
    backend = MooncakeBackend({"master": master}, None, {"client": client})
    assert backend.exist(["a"]) == [True]
    assert backend.get(["a"], [place]) == [8]
    assert backend.put(["a"], [place], overwrite=True) == [0]
    assert not client.left


def test_what_is_gone_stays_gone(master: str) -> None:
    client = Answers(*[[GONE]] * TRIES, [TIMED_OUT], [GONE, 0])
    backend = MooncakeBackend({"master": master}, None, {"client": client})
    with pytest.raises(BackendError, match="-900"):
        backend.exist(["a"])
    with pytest.raises(NoAnswerError, match="-901"):
        backend.exist(["a"])
    place = memoryview(bytearray(8))
    assert backend.put(["a", "b"], [place, place], overwrite=False) == [FAILED, 0]
    assert not client.left, "one that hangs is asked once"
    client.left = [[]]
    assert backend.exist([]) == []


def test_deletion_of_names(master: str) -> None:
    client = Answers([0], [-704], [-1], [GONE])
    backend = MooncakeBackend({"master": master}, None, {"client": client})
    assert backend.delete(["a", "b", "c"]) == [0, 0, FAILED], "what is not there is deleted"
    with pytest.raises(BackendError, match="does not delete"):
        backend.delete(["a"])
    assert backend.delete([]) == []


def test_an_address_that_only_its_client_understands() -> None:
    client = Answers([0])
    backend = MooncakeBackend({"master": "etcd://a:1;b:2"}, None, {"client": client})
    assert backend.exist(["a"]) == [False]


@pytest.mark.parametrize("address", ["127.0.0.1:99999", "a..b:1"])
def test_an_address_of_nobody(address: str) -> None:
    with pytest.raises(BackendError, match="is not there"):
        MooncakeBackend({"master": address}, None, {"client": Answers()})
