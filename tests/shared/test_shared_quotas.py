# SPDX-License-Identifier: Apache-2.0
"""Quotas of the shared tier: a tenant's own oldest goes, or it puts no more."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from attnstore_lab.testing.network_stores import NetworkStore
from attnstore_vllm.config.shared import SharedConfig
from attnstore_vllm.config.tenants import Quota
from attnstore_vllm.index.keys import tenant_hash
from attnstore_vllm.policy.visits import unknown_run
from attnstore_vllm.tiers.residency import Residency
from attnstore_vllm.tiers.shared.lanes import LaneOp
from attnstore_vllm.tiers.shared.shared_tier import SharedTier
from attnstore_vllm.tiers.shared.start import make_shared
from attnstore_vllm.types import SHARED
from tests.helpers import CHUNK_TOKENS, NAMESPACE, PAYLOAD_BYTES, Rig, conversation, lru
from tests.shared.rigs import counts, fetch, io_of, stored_names, whole_chunks, write
from tests.shared.stranger import Stranger

OpenShared = Callable[..., Rig]
GOLD = tenant_hash("gold")
NUM_TOKENS = CHUNK_TOKENS + 1


def quota(records: int) -> dict[str, Any]:
    return {"put_quotas": {GOLD: records}, "tenants": {GOLD: "best"}}


def tokens(number: int) -> list[int]:
    return conversation(number, NUM_TOKENS)


def try_to_write(rig: Rig, number: int, salt: str | None = "gold") -> None:
    """Until it is there, or is refused."""
    (name,) = whole_chunks(tokens(number), salt)
    rig.put(name)
    chunk = rig.chunk(name)
    rig.until(lambda: SHARED in chunk.refused_by or SHARED in chunk.behind)
    rig.until(lambda: io_of(rig).num_storing == 0)


def there(rig: Rig, stranger: Stranger, *numbers: int, salt: str | None = "gold") -> list[int]:
    names = [name for n in numbers for name in stored_names(rig, tokens(n), salt)]
    return stranger.has(names)


def held(rig: Rig) -> float:
    return rig.store.gauges()["tenant_held_bytes", f"best|{SHARED}"] / io_of(rig).record_bytes


def test_at_its_quota_its_own_oldest_is_deleted(
    server: NetworkStore, open_shared: OpenShared, stranger: Stranger
) -> None:
    rig, other = open_shared(server, **quota(2)), open_shared(server, dram_slots=16)
    write(other, tokens(8), "gold")  # what another server has put is none of ours
    write(rig, tokens(9), None)
    for number in (1, 2, 3):
        try_to_write(rig, number)
    assert there(rig, stranger, 1, 2, 3, 8) == [0, 1, 1, 1]
    assert there(rig, stranger, 9, salt=None) == [1]
    assert held(rig) == 2
    gauges, size = rig.store.gauges(), io_of(rig).record_bytes
    assert gauges["tenant_quota_bytes", f"best|{SHARED}"] == 2 * size
    assert "over_quota" not in counts(rig)


def test_what_was_used_stays(
    server: NetworkStore, open_shared: OpenShared, stranger: Stranger
) -> None:
    rig = open_shared(server, **quota(2))
    for number in (1, 2):
        try_to_write(rig, number)
    (first,) = (rig.chunk(name) for name in whole_chunks(tokens(1), "gold"))
    residency = rig.store.residency
    with rig.store.queue():  # its lock
        residency.now += 60.0
        residency.use([first], unknown_run(residency.now))
    try_to_write(rig, 3)
    assert there(rig, stranger, 1, 2, 3) == [1, 0, 1]


def test_what_the_store_has_evicted_is_not_counted_once_that_is_seen(
    server: NetworkStore, open_shared: OpenShared
) -> None:
    rig, long = open_shared(server, **quota(5)), conversation(4, 3 * CHUNK_TOKENS + 1)
    names = write(rig, long, "gold")
    rig.store.drop([rig.chunk(name) for name in whole_chunks(long, "gold")])
    helper, ask = io_of(rig).helper, io_of(rig).helper.numbers

    def vanishing(lane: int, op: LaneOp, wanted: list[bytes], deadline_s: float) -> list[int]:
        if op is LaneOp.GET:  # as if the store had evicted the second
            wanted = [name[::-1] if name == names[1] else name for name in wanted]
        return ask(lane, op, wanted, deadline_s)

    helper.numbers = vanishing  # type: ignore[method-assign, assignment]
    assert fetch(rig, long, "gold") == 1
    assert counts(rig)["gone"] == 1
    assert held(rig) == 2


def test_what_another_has_put_is_not_counted(
    server: NetworkStore, open_shared: OpenShared, stranger: Stranger
) -> None:
    rig, other = open_shared(server, **quota(1)), open_shared(server)
    write(other, tokens(1), "gold")
    try_to_write(rig, 1)
    assert counts(rig)["is_there"] == 1
    assert held(rig) == 0
    try_to_write(rig, 2)
    assert there(rig, stranger, 1, 2) == [1, 1]


def test_without_the_right_to_delete_no_more_is_put(
    redis: Callable[..., NetworkStore], open_shared: OpenShared
) -> None:
    server = redis(
        "--user", "kv", "on", ">secret", "~as1/*", "resetchannels", "+get", "+set", "+exists",
        "--user", "all", "on", ">all", "allkeys", "allcommands",
        url="redis://kv:secret@127.0.0.1",
    )  # fmt: skip
    rig = open_shared(server, **quota(2))
    for number in (1, 2, 3):
        try_to_write(rig, number)
    stranger = Stranger(server)
    assert there(rig, stranger, 1, 2, 3) == [1, 1, 0]
    assert counts(rig)["over_quota"] == 1
    assert held(rig) == 2
    assert io_of(rig).health.writes.in_use, "that is no failure of the store"
    assert "shared_write_failed" not in counts(rig)
    url = server.settings["redis"]["url"].replace("kv:secret", "all:all")
    server.settings = {"prefix": "as1/", "redis": {"url": url, "timeout_s": 3.0}}
    admin = Stranger(server)
    admin.delete(stored_names(rig, tokens(1), "gold"))
    for number in (4, 5, 6):  # each asks for another one
        try_to_write(rig, number)
    assert there(rig, stranger, 1, 2) == [0, 1]
    assert sum(there(rig, stranger, 4, 5, 6)) == 1, "the store has evicted one: there is room"
    assert held(rig) == 2
    for one in (stranger, admin):
        one.close()


def test_a_store_that_fails_meanwhile_leaves_the_count_right(
    server: NetworkStore,
    open_shared: OpenShared,
    stranger: Stranger,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rig = open_shared(server, **quota(1))
    try_to_write(rig, 1)
    helper, numbers = io_of(rig).helper, io_of(rig).helper.numbers

    def refuses(lane: int, op: LaneOp, names: list[bytes], deadline_s: float) -> list[int]:
        if op is LaneOp.PUT:
            return [-3 for _ in names]
        return numbers(lane, op, names, deadline_s)

    monkeypatch.setattr(helper, "numbers", refuses)
    try_to_write(rig, 2)
    assert there(rig, stranger, 1, 2) == [0, 0]
    assert held(rig) == 0
    monkeypatch.undo()


def test_the_settings_say_how_many_records(tmp_path: Path) -> None:
    shared = SharedConfig.parse({"redis": "redis://nowhere:1"})
    quotas = {
        GOLD: Quota(name="best", salt_file=None, shared=5 * (PAYLOAD_BYTES + 64) + 1),
        bytes(32): Quota(name="plain", salt_file=None, dram=0.5),
    }
    made = make_shared(
        shared, CHUNK_TOKENS, NAMESPACE, tmp_path, slot_bytes=PAYLOAD_BYTES, quotas=quotas
    )
    tiers = Residency(4, 4, lru, chunk_tokens=CHUNK_TOKENS, more=(made,))
    (_, tier) = tiers.behind
    assert isinstance(tier, SharedTier)
    assert tier.puts.held() == {GOLD: (0, 5)}
