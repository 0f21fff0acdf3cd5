# SPDX-License-Identifier: Apache-2.0
"""Small stores with a shared tier, as two servers of one model would have them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from attnstore_vllm.index.chunk import ChunkName
from attnstore_vllm.tiers.remote_io import awaits_remote
from attnstore_vllm.tiers.shared.record import RecordNames
from attnstore_vllm.tiers.shared.secret import SharedKeys
from attnstore_vllm.tiers.shared.shared_io import SharedIo
from attnstore_vllm.tiers.shared.start import MakeShared
from tests.helpers import CHUNK_TOKENS, Rig, lookup_of, memory_rig, name_of, payload_of, sequence_of

NO_KEYS = SharedKeys.of(None)
"""Servers without a secret."""
DEADLINE_S = 3.0
"""Other things may be going on on this machine. Tests of deadlines have their own."""
NUM_TOKENS = 49
"""Three whole chunks, and one token to compute."""


def make(settings: dict[str, Any], namespace: bytes, **options: Any) -> MakeShared:
    given: dict[str, Any] = {"deadline_s": DEADLINE_S, "directory": None, "pause_s": 0.05}
    given["keys"] = NO_KEYS
    return MakeShared(
        settings,
        namespace=namespace,
        where="a test's store",
        chunk_tokens=CHUNK_TOKENS,
        **(given | options),
    )


def shared_rig(
    settings: dict[str, Any],
    namespace: bytes,
    *,
    directory: Path | None = None,
    joins: bool = True,
    dram_slots: int = 8,
    **options: Any,
) -> Rig:
    """Args: joins: wait until the tier is in use."""
    tier = make(settings, namespace, directory=directory, **options)
    rig = memory_rig(dram_slots=dram_slots, more_tiers=(tier,))
    see_weights(rig, same=True)
    if joins:
        rig.until(lambda: io_of(rig).generation.usable is not None)
    return rig


def see_weights(rig: Rig, *, same: bool) -> None:
    """As after a look of the workers."""
    assert rig.store.remote is not None
    rig.store.remote.weights_seen(same)


def io_of(rig: Rig) -> SharedIo:
    found = rig.store.thread.tiers[1]
    assert isinstance(found, SharedIo)
    return found


def whole_chunks(tokens: list[int], salt: str | None) -> list[ChunkName]:
    sequence = sequence_of(tokens, salt)
    return [name_of(sequence, number, salt) for number in range(len(tokens) // CHUNK_TOKENS)]


def write(rig: Rig, tokens: list[int], salt: str | None = None) -> list[bytes]:
    """Save a conversation, wait until its whole chunks are in the tier; their names there."""
    names = whole_chunks(tokens, salt)
    for name in names:
        rig.put(name)
    io = io_of(rig)
    rig.until(lambda: all(io.tier.name in rig.chunk(name).behind for name in names))
    rig.until(lambda: io.num_storing == 0)
    return stored_names(rig, tokens, salt)


def stored_names(rig: Rig, tokens: list[int], salt: str | None = None) -> list[bytes]:
    io = io_of(rig)
    assert io.generation.usable is not None
    names = RecordNames(io.namespace, io.generation.usable, io.keys)
    return [names.of(name.key, name.tenant) for name in whole_chunks(tokens, salt)]


def fetch(rig: Rig, tokens: list[int], salt: str | None = None) -> int:
    """Chunks that a request finds, as it asks and waits. Asserts that their bytes are right."""
    lookup = lookup_of(tokens, salt, may_ask=True)
    rig.store.find(lookup, 0, len(tokens))
    rig.until(lambda: not awaits_remote(lookup))
    io = io_of(rig)
    rig.store.find(lookup, 0, len(tokens))
    rig.until(lambda: io.num_loading == 0)
    found = rig.read(lookup.keys)
    for name, payload in found:
        assert payload == payload_of(name), "wrong bytes"
    return len(found)


def counts(rig: Rig) -> dict[str, int]:
    return rig.store.figures().counts
