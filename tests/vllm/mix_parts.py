# SPDX-License-Identifier: Apache-2.0
"""Of the mix (mix.py): what a run is like, what KV depends on, and what may be stored of it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from random import Random

import numpy as np
from vllm.lora.request import LoRARequest

from attnstore_vllm.connector.media_data import read_media
from attnstore_vllm.index.chunk import ChunkName, State
from attnstore_vllm.index.keys import (
    MultimodalSpan,
    SequenceKeys,
    media_content,
    media_name,
    root_key,
    tenant_hash,
)
from attnstore_vllm.scheduler.media import Content
from attnstore_vllm.types import Key
from tests.vllm.scripted import CHUNK, ScriptedEngine, seen
from tests.vllm.scripted_worker import LAYERS, TOKEN_KV, VOCAB, Picture, Row, in_layer

PICTURES = {"cat": 40, "dog": 40, "bird": 7, "fish": 20}
"""Tokens that each takes."""
PLACEHOLDER = VOCAB - 1
LENGTH_MAX = 340
SECRET = 24
"""Tokens; of which one half at least is in one chunk."""
FILES = b"the weights of the files"
Input = tuple[list[int], list[Picture]]


@dataclass(frozen=True)
class Shape:
    """Of one run, drawn by its seed."""

    depth: int
    drafts: int
    policy: str
    num_blocks: int
    dram_slots: int
    beside: bool
    """Copies go on beside the model, by chance."""
    counted: bool
    """vLLM names pictures by a counter."""

    @classmethod
    def draw(cls, random: Random) -> Shape:
        depth, beside = random.choice((1, 1, 2, 3)), random.random() < 0.25
        drafts = random.choice((0, 3)) if not beside else 0
        return cls(
            depth,
            drafts,
            random.choice(("fcfs", "priority")),
            random.choice((32, 44, 200)),
            random.choice((8, 64)),
            beside,
            random.random() < 0.2,
        )

    @property
    def deludes_sessions(self) -> bool:
        """vLLM counts drafts beyond a stop as computed, unless it schedules ahead."""
        return self.drafts > 0 and self.depth == 1

    @property
    def may_reset(self) -> bool:
        """A worker that makes its drafts itself does not know which ones a reset drops."""
        return self.drafts == 0 or self.depth == 1


@dataclass
class World:
    """What a request's KV depends on beside its tokens and pictures."""

    salt: str | None = None
    adapter: int = 0
    is_secret: bool = False
    """It has asked that nothing of it is stored."""


class _Adapter:
    """One that the workers have loaded."""

    def __init__(self, content: str) -> None:
        self.content = content


class Adapters:
    """What adapters are made of. Any may be loaded anew under its id, with no word to us.

    Stands for vLLM's manager of the adapters in a worker.
    """

    def __init__(self) -> None:
        self._versions = {1: 0, 2: 0, 3: 0}
        self._loaded: dict[int, _Adapter] = {}

    def list_adapters(self) -> dict[int, _Adapter]:
        for number in self._versions:
            self._loaded.setdefault(number, _Adapter(self.content(number).decode()))
        return self._loaded

    def content(self, number: int) -> bytes:
        """What workers compute with now; b"" without an adapter."""
        return f"adapter {number} {self._versions[number]}".encode() if number else b""

    def replace(self, number: int) -> None:
        """Other weights under an id. Nothing runs, and HBM is empty."""
        self._versions[number] = (self._versions[number] + 1) % 3
        self._loaded.pop(number, None)

    def root(self, namespace: bytes, world: World) -> Key | None:
        """The parent of this world's first chunks, where it can be said from here."""
        return None if world.adapter else root_key(namespace, world.salt, b"")

    def request(self, number: int) -> LoRARequest | None:
        return LoRARequest(f"adapter {number}", number, "nowhere") if number else None


def cut(asked: Input, stop: int) -> Input:
    """The first tokens. A picture is whole, or is not there."""
    tokens, pictures = asked
    for picture in pictures:
        if picture.offset < stop < picture.offset + picture.length:
            stop = picture.offset
    return tokens[:stop], [p for p in pictures if p.offset < stop]


def check_stored(
    engine: ScriptedEngine,
    asked: list[tuple[World, Row]],
    adapters: Adapters,
    secrets: list[bytes],
    *,
    counted: bool,
) -> Counter[str]:
    """Each chunk in DRAM has the KV that some request had, in all layers, and says so."""
    ours = engine.ours
    counts: Counter[str] = Counter()
    had: dict[tuple[int, bytes], list[tuple[World, Row]]] = {}
    for world, row in asked:
        row.extend()
        for at in range(0, len(row.tokens) if not row.is_deluded else 0, CHUNK):
            had.setdefault((at, row.kv[at]), []).append((world, row))
    for chunk in ours.store.residency.index:
        name = chunk.name
        assert not any(secret in name.tokens for secret in secrets), "said store: false"
        if chunk.dram.state is not State.READY:
            continue
        slot = np.frombuffer(engine.pool.slot(chunk.dram.slot), np.uint8)
        kv = [slot[i : i + TOKEN_KV].tobytes() for i in range(0, CHUNK * TOKEN_KV, TOKEN_KV)]
        kv = kv[: name.num_tokens]
        stop = name.position + name.num_tokens
        found = [
            (world, row)
            for world, row in had.get((name.position, kv[0]), ())
            if row.kv[name.position : stop] == kv
        ]
        assert found, "KV that no request had is stored"
        roots = [adapters.root(ours.names.namespace or b"", world) for world, _ in found]
        assert any(
            _is_named(name, root, world, row, counted=counted)
            for root, (world, row) in zip(roots, found, strict=True)
        ), "KV is stored as another's"
        for layer in range(LAYERS):
            at = layer * CHUNK * TOKEN_KV
            in_slot = slot[at : at + len(kv) * TOKEN_KV].tobytes()
            assert in_slot == in_layer(kv, layer).tobytes()
        counts["chunks checked"] += 1
        counts["with pictures"] += any(p.offset < stop for p in found[0][1].pictures)
    return counts


def span_of(picture: Picture, name: str) -> MultimodalSpan:
    """As it stands in keys."""
    made = read_media(seen(picture.content))
    assert isinstance(made, Content)
    content = media_content(media_name(name), made.digest(), "image", picture.length, b"")
    return MultimodalSpan(content, picture.offset, picture.length)


def _is_named(name: ChunkName, root: Key | None, world: World, row: Row, *, counted: bool) -> bool:
    """Whether this is the name of the row's KV, by all that it depends on."""
    stop = name.position + name.num_tokens
    if counted and any(p.offset < stop for p in row.pictures):
        return False
    if root is None:
        return True
    spans = [span_of(picture, picture.content) for picture in row.pictures]
    keys = SequenceKeys(root, row.tokens, CHUNK, spans)
    number = name.position // CHUNK
    return (
        (name.parent, name.extra) == (keys.parent(number), keys.extra(number))
        and (not name.tokens or name.tokens == keys.tokens(name.position, stop))
        and name.tenant == tenant_hash(world.salt)
    )
