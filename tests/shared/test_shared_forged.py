# SPDX-License-Identifier: Apache-2.0
"""A stranger who reads and writes the store, knows the model and all prompts, and no secret."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from attnstore_lab.testing.network_stores import NetworkStore
from attnstore_vllm.index.keys import tenant_hash
from attnstore_vllm.io.checksum import checksum
from attnstore_vllm.tiers.shared.backend import open_backend
from attnstore_vllm.tiers.shared.record import HEADER_BYTES, RecordNames
from attnstore_vllm.tiers.shared.secret import SharedKeys
from attnstore_vllm.tiers.shared.shared_generation import GenerationId, decode, encode, name_of
from tests.helpers import Rig, conversation, payload_of
from tests.shared.rigs import (
    NO_KEYS,
    NUM_TOKENS,
    counts,
    fetch,
    io_of,
    see_weights,
    stored_names,
    whole_chunks,
    write,
)
from tests.shared.stranger import Stranger

OpenShared = Callable[..., Rig]
WHOLE = NUM_TOKENS // 16
SECRET = b"a secret of more than 32 bytes, as openssl makes them"
KEYS, OTHERS = SharedKeys.of(SECRET), SharedKeys.of(SECRET[::-1])


def forge(
    rig: Rig, stranger: Stranger, tokens: list[int], salt: str | None, keys: SharedKeys | None
) -> None:
    """Change the first record's payload, and take anew all that can be taken with these keys."""
    io, chunk = io_of(rig), whole_chunks(tokens, salt)[0]
    assert io.generation.usable is not None
    place = stored_names(rig, tokens, salt)[0]
    payload = bytearray(stranger.get(place)[HEADER_BYTES:])
    payload[5] ^= 1
    if keys is None:
        header = stranger.get(place)[:HEADER_BYTES]
        return stranger.put(place, header + bytes(payload))
    digest = keys.digest(memoryview(payload))
    names = RecordNames(io.namespace, io.generation.usable, keys)
    stranger.put(place, names.header(place, chunk, len(payload), digest) + bytes(payload))


@pytest.mark.parametrize(
    "keys", [NO_KEYS, OTHERS, None], ids=["no secret", "another secret", "the right header"]
)
@pytest.mark.parametrize("salt", [None, "alice"])
def test_a_payload_that_a_stranger_has_changed_is_a_miss(
    server: NetworkStore,
    open_shared: OpenShared,
    stranger: Stranger,
    caplog: pytest.LogCaptureFixture,
    keys: SharedKeys | None,
    salt: str | None,
) -> None:
    one, two = (open_shared(server, keys=KEYS) for _ in range(2))
    tokens = conversation(1, NUM_TOKENS)
    place = write(one, tokens, salt)[0]
    right = stranger.get(place)
    forge(two, stranger, tokens, salt, keys)
    forged = stranger.get(place)
    assert forged != right
    assert fetch(two, tokens, salt) == 0
    assert counts(two)["shared_corrupt"] == 1
    assert "forged or another secret's" in caplog.text
    # What the seal should be would help who reads the log to forge.
    chunk, names = (
        whole_chunks(tokens, salt)[0],
        RecordNames(io_of(two).namespace, io_of(two).generation.usable or b"", KEYS),
    )
    digest = KEYS.digest(memoryview(forged[HEADER_BYTES:]))
    header = names.header(place, chunk, len(forged) - HEADER_BYTES, digest)
    assert header[-32:].hex() not in caplog.text and str(header[-32:]) not in caplog.text
    two.put(chunk)  # computed again
    two.until(lambda: stranger.get(place) == right)


def test_without_a_secret_a_stranger_is_believed(
    server: NetworkStore, open_shared: OpenShared, stranger: Stranger
) -> None:
    """As one warning and the documents say."""
    one, two = open_shared(server), open_shared(server)
    tokens = conversation(1, NUM_TOKENS)
    write(one, tokens, "alice")
    forge(two, stranger, tokens, "alice", NO_KEYS)
    with pytest.raises(AssertionError, match="wrong bytes"):
        fetch(two, tokens, "alice")


def test_records_under_other_names_are_misses(
    server: NetworkStore, open_shared: OpenShared, stranger: Stranger
) -> None:
    """Right records, each of another chunk, another tenant or another generation."""
    one, two = (open_shared(server, keys=KEYS) for _ in range(2))
    first, second = conversation(1, NUM_TOKENS), conversation(2, NUM_TOKENS)
    names = write(one, first)
    of_alice = write(one, first, "alice")
    of_second = write(one, second)
    old = stranger.get(of_second[0])
    stranger.put(names[0], stranger.get(names[1]))
    stranger.put(of_alice[0], stranger.get(names[2]))
    for engine in (one, two):
        engine.store.reset()
        see_weights(engine, same=True)
    one.until(lambda: io_of(one).generation.usable is not None)
    two.until(lambda: io_of(two).generation.usable is not None)
    assert stored_names(two, second)[0] not in of_second
    stranger.put(stored_names(two, second)[0], old)
    assert fetch(two, second) == 0
    assert counts(two)["shared_corrupt"] == 1, "of before the reset"
    three = open_shared(server, keys=KEYS)
    written = write(three, first), write(three, first, "alice")
    stranger.put(written[0][0], stranger.get(written[0][1]))
    stranger.put(written[1][0], stranger.get(written[0][2]))
    assert fetch(two, first) == fetch(two, first, "alice") == 0
    assert counts(two)["shared_corrupt"] == 3


def test_a_digest_with_a_key_is_not_taken_for_a_checksum(
    server: NetworkStore, open_shared: OpenShared
) -> None:
    """Siblings compare the checksum of what is in DRAM with that of their copy."""
    one, two = (open_shared(server, keys=KEYS) for _ in range(2))
    tokens = conversation(1, NUM_TOKENS)
    write(one, tokens)
    assert fetch(two, tokens) == WHOLE
    for rig in (one, two):
        for name in whole_chunks(tokens, None):
            assert rig.chunk(name).dram.checksum in (b"", checksum(payload_of(name)))


def test_servers_with_and_without_the_secret_do_not_meet(
    server: NetworkStore, open_shared: OpenShared, stranger: Stranger
) -> None:
    rigs = [open_shared(server, keys=keys) for keys in (KEYS, OTHERS, NO_KEYS)]
    tokens = conversation(1, NUM_TOKENS)
    names = [write(rig, tokens) for rig in rigs]
    assert len({name for some in names for name in some}) == 3 * WHOLE
    assert len({some[0][:8] for some in names}) == 3, "nor does a tenant's tag say who it is"
    reader = open_shared(server, keys=KEYS)
    assert fetch(reader, tokens) == WHOLE
    assert not counts(reader).get("shared_corrupt")
    # A name tells nothing to who guesses the prompt, and nor does what is before the payload.
    chunk, io = whole_chunks(tokens, None)[0], io_of(reader)
    header = stranger.get(names[0][0])[:HEADER_BYTES]
    for said in (chunk.key, io.namespace, tenant_hash(None)[:16]):
        assert said not in header
    guessed = RecordNames(io.namespace, io.generation.usable or b"", NO_KEYS)
    assert stranger.has([guessed.of(chunk.key, chunk.tenant)]) == [0]


class Small:
    """As Stranger does with records: one small value, of any size."""

    def __init__(self, server: NetworkStore, name: bytes) -> None:
        self._backend = open_backend(server.settings, None, {})
        self._name = server.settings["prefix"] + name.hex()

    def put(self, value: bytes) -> None:
        self._backend.write(self._name, value, overwrite=True)

    def get(self) -> bytes:
        return self._backend.read(self._name, 256) or b""


@pytest.mark.parametrize("value", ["forged", "put back", "too large"])
def test_a_generation_that_a_stranger_writes_makes_nobody_leave(
    redis: Callable[..., NetworkStore],
    open_shared: OpenShared,
    namespace: bytes,
    caplog: pytest.LogCaptureFixture,
    value: str,
) -> None:
    server = redis()
    one = open_shared(server, keys=KEYS)
    io = io_of(one)
    name, before = name_of(namespace, KEYS), io.generation.mine
    assert before is not None
    one.store.reset()
    see_weights(one, same=True)
    one.until(lambda: io.generation.usable is not None)
    mine = io.generation.mine
    assert mine is not None and mine != before
    forged = GenerationId(mine.anchor, mine.number + 1)
    small = Small(server, name)
    values = {
        "forged": encode(forged, name, OTHERS),
        "put back": encode(before, name, KEYS),
        "too large": bytes(1000),
    }
    small.put(values[value])
    io.weights_seen(True)  # look now
    one.until(lambda: decode(small.get(), name, KEYS) == mine)
    assert io.generation.usable == mine.raw
    assert ("forged or another secret's" in caplog.text) == (value == "forged")
    assert counts(one).get("shared_corrupt", 0) == (value == "forged")
    two = open_shared(server, keys=KEYS)
    tokens = conversation(1, NUM_TOKENS)
    write(one, tokens)
    assert fetch(two, tokens) == WHOLE


def test_the_secret_is_nowhere_but_in_the_engine(
    server: NetworkStore, open_shared: OpenShared
) -> None:
    rig = open_shared(server, keys=KEYS)
    io = io_of(rig)
    child = Path(f"/proc/{io.helper.pid}")
    secrets = {SECRET, SECRET.hex().encode(), KEYS.name(b""), KEYS.seal(b"")}
    shown = (child / "cmdline").read_bytes() + (child / "environ").read_bytes()
    shown += f"{io.keys!r} {io.__dict__!r} {server.settings!r}".encode()
    assert not any(secret in shown for secret in secrets)
    assert repr(KEYS) == "SharedKeys(is_secret=True)"
