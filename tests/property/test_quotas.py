# SPDX-License-Identifier: Apache-2.0
"""Random moves of chunks of tenants with and without quotas.

Goal: what is counted is what a recount finds, after any moves; a save never takes a tenant beyond
its quota, nor a write beyond that of NVMe; after a read a tenant is beyond it only where none of
its own clean chunks could go.
"""

from __future__ import annotations

from random import Random

import pytest

from attnstore_vllm.index.chunk import Chunk, ChunkName, State
from attnstore_vllm.index.keys import tenant_hash
from attnstore_vllm.policy.visits import unknown_run
from attnstore_vllm.store.limited_residency import LimitedResidency
from attnstore_vllm.types import NVME, Key
from tests.helpers import CHUNK_TOKENS, lru, name_of, sequence_of, tokens_of

GOLD, TIN, NONE = "gold", "tin", None
MOST = {tenant_hash(GOLD): 5, tenant_hash(TIN): 1}
MOST_NVME = {tenant_hash(GOLD): 7}
SLOTS, STEPS = 8, 400


class Play:
    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.tiers = LimitedResidency(
            SLOTS,
            40,
            lru,
            chunk_tokens=CHUNK_TOKENS,
            pin_shares=(0.5, 0.25),
            dram_quotas=MOST,
            nvme_quotas=MOST_NVME,
            names=dict.fromkeys(MOST, "any"),
        )
        self.tiers.nvme.open(0, 40)
        self.saving: list[Chunk] = []
        self.reading: list[Chunk] = []
        self.held: list[Chunk] = []
        self.told: dict[Key, ChunkName] = {}
        """Names with their tokens, which come up with the bytes."""
        self.num_beyond = self.most_on_nvme = 0

    def count(self, tenant: bytes) -> int:
        """A recount of its own, with no book but who owns the slots."""
        owned = self.tiers.dram.owned.values()
        return sum(chunk.name.tenant == tenant for chunk in owned)

    def count_on_nvme(self, tenant: bytes) -> int:
        """A recount by what the index has."""
        return sum(
            chunk.name.tenant == tenant for chunk in self.tiers.index if NVME in chunk.behind
        )

    def names(self) -> list[ChunkName]:
        salt = self.random.choice([GOLD, TIN, NONE])
        number = {GOLD: 1, TIN: 2, NONE: 3}[salt] * 10 + self.random.randrange(6)
        sequence = sequence_of(tokens_of(number, 3 * CHUNK_TOKENS), salt)
        names = [name_of(sequence, n, salt) for n in range(self.random.randint(1, 3))]
        self.told.update((name.key, name) for name in names)
        return names

    def known(self) -> list[Chunk]:
        found = (self.tiers.index.get(name.key) for name in self.names())
        return [chunk for chunk in found if chunk is not None]

    def save(self) -> None:
        run = unknown_run(self.tiers.now)
        for name in self.names():
            before = self.count(name.tenant)
            is_known = self.tiers.index.get(name.key) is not None
            chunk = self.tiers.begin_save(name, run, yields=self.random.random() < 0.2)
            if not is_known and name.tenant in MOST:
                assert self.count(name.tenant) <= max(before, MOST[name.tenant])
            if chunk is not None:
                self.saving.append(chunk)

    def finish(self) -> None:
        self.tiers.finish_save(*self.saving)
        self.saving.clear()
        for chunk in self.reading:
            self.tiers.finish_fetch(chunk, verified=self.random.random() < 0.9)
        self.reading.clear()

    def write(self) -> None:
        chunk = self.tiers.begin_store(self.tiers.nvme)
        if chunk is not None:
            self.most_on_nvme = max(self.most_on_nvme, self.count_on_nvme(chunk.name.tenant))
            self.tiers.finish_store(self.tiers.nvme, chunk, b"c" * 16)
            assert self.count_on_nvme(chunk.name.tenant) <= MOST_NVME.get(chunk.name.tenant, 40)

    def read(self) -> None:
        for chunk in self.known():
            at_rest = chunk.dram.state is State.ABSENT and chunk.at(NVME).state is State.READY
            if not at_rest or chunk.dropped:
                continue
            tenant = chunk.name.tenant
            could = [c for c in self.tiers.dram.owned.values() if self.could_go(c, tenant)]
            before = self.count(tenant)
            chunk.name = self.told[chunk.name.key]
            if self.tiers.begin_fetch(chunk, self.tiers.nvme):
                self.reading.append(chunk)
                if tenant in MOST and self.count(tenant) > MOST[tenant]:
                    self.num_beyond += 1
                    assert not could or self.count(tenant) <= before

    def could_go(self, chunk: Chunk, tenant: bytes) -> bool:
        copy = chunk.dram
        is_idle = copy.state is State.READY and not copy.uses and chunk.is_behind
        return is_idle and chunk.name.tenant == tenant and copy.slot not in self.tiers.dram.pins

    def hold(self) -> None:
        ready = [chunk for chunk in self.known() if chunk.dram.state is State.READY]
        self.tiers.hold(*ready)
        self.held += ready

    def let_go(self) -> None:
        self.tiers.release(*self.held)
        self.held.clear()

    def use(self) -> None:
        self.tiers.use(self.known(), unknown_run(self.tiers.now))

    def pin(self) -> None:
        for chunk in self.known():
            self.tiers.pinning.pin(chunk, self.tiers.now + 5, self.tiers.now)

    def drop(self) -> None:
        for chunk in self.known()[:1]:
            self.tiers.drop(chunk)

    def step(self) -> None:
        self.tiers.now += 1
        moves = [self.save] * 4 + [self.finish] * 3 + [self.write] * 6 + [self.read] * 4
        moves += [self.hold, self.let_go, self.let_go, self.use, self.use, self.pin, self.drop]
        self.random.choice(moves)()
        self.tiers.check_integrity()
        for tenant in MOST:
            assert self.tiers.quotas.held(tenant) == self.count(tenant)
        for tenant in MOST_NVME:
            assert self.tiers.nvme_quotas.held(tenant) == self.count_on_nvme(tenant)


@pytest.mark.parametrize("seed", range(20))
def test_what_tenants_hold_is_counted_and_stays_within_their_quotas(seed: int) -> None:
    play = Play(seed)
    for _ in range(STEPS):
        play.step()
    assert play.tiers.counts["saved"] > 20
    play.let_go()
    play.finish()
    play.tiers.drop_all()
    assert [play.tiers.quotas.held(tenant) for tenant in MOST] == [0, 0]
    assert [play.tiers.nvme_quotas.held(tenant) for tenant in MOST_NVME] == [0]
    assert play.most_on_nvme >= min(MOST_NVME.values()), "or no quota was ever met"
