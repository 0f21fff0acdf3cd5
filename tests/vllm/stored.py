# SPDX-License-Identifier: Apache-2.0
"""What the store holds, compared with the sequences that there were."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from attnstore_vllm.index.chunk import Chunk
from attnstore_vllm.index.keys import SequenceKeys, chunk_key, encode_tokens, root_key
from tests.vllm.engine import Engine, Tokens

Sequences = Sequence[tuple[str | None, Tokens]]
"""(cache_salt, all tokens) of requests."""


def chunks(engine: Engine) -> list[Chunk]:
    with engine.store._lock:
        return list(engine.store.residency.index)


def stored_tokens(engine: Engine, salt: str | None, tokens: Tokens) -> int:
    """How many of the sequence's leading tokens have their KV in the store."""
    keys = _keys(engine, salt, tokens)
    with engine.store._lock:
        pieces = engine.store.residency.index.match(keys, 0, len(tokens))
    return pieces[-1].stop if pieces else 0


def foreign_chunks(engine: Engine, sequences: Sequences) -> list[tuple[int, int]]:
    """(position, tokens) of chunks that continue none of these sequences, key for key.

    A chunk of tokens that a draft guessed and the model rejected would be one, and so would
    one that is filed under another prefix or salt than its own.
    """
    known = [(_keys(engine, salt, tokens), list(tokens)) for salt, tokens in sequences]
    return [
        (chunk.name.position, chunk.name.num_tokens)
        for chunk in chunks(engine)
        if not any(_continues(engine, chunk, keys, tokens) for keys, tokens in known)
    ]


def _continues(engine: Engine, chunk: Chunk, keys: SequenceKeys, tokens: list[int]) -> bool:
    """Whether it is the sequence's, in one of the model's KV cache groups."""
    name, geometry = chunk.name, engine.side.geometry
    stop = name.position + name.num_tokens
    if stop > len(tokens) or name.position % geometry.chunk_tokens:
        return False
    number = name.position // geometry.chunk_tokens
    parents = {keys.parent(number)}
    for place, group in enumerate(geometry.groups[1:], start=1):
        holes = range(geometry.chunk_tokens // group.block_tokens)
        parents |= {keys.section(place, hole).parent(number) for hole in holes}
    # By key: the tokens of a chunk that is on NVMe only are on NVMe too.
    run = encode_tokens(tokens[name.position : stop])
    return name.parent in parents and chunk_key(name.parent, name.extra, run) == name.key


def _keys(engine: Engine, salt: str | None, tokens: Tokens) -> SequenceKeys:
    namespace = engine.side.names.namespace
    assert namespace is not None
    root = root_key(namespace, salt, b"")
    return SequenceKeys(root, list(tokens), engine.side.geometry.chunk_tokens)


def events(engine: Engine, *names: str) -> dict[str, int]:
    """The store's counters of these events."""
    counts = engine.store.figures().counts
    return {name: counts.get(name, 0) for name in names}


def positions(found: Iterable[Chunk]) -> list[int]:
    return sorted(chunk.name.position for chunk in found)
