# SPDX-License-Identifier: Apache-2.0
"""A router in small, behind vLLM's own publisher: what it makes of the events against the store.

It lives beside the engine (tests/vllm/engine.py), so that it can look at the store at any step.
Block hashes are worked out again from tokens and salts, and must be those that vLLM gives.
"""

from __future__ import annotations

import itertools
import time
from typing import Any

import msgspec
import zmq

from attnstore_vllm.index.chunk import ChunkName
from attnstore_vllm.index.keys import chunk_key, encode_tokens, root_key
from attnstore_vllm.tiers.announced import Name
from attnstore_vllm.types import DRAM, NVME, TOKEN_BYTES, Key
from tests.event_helpers import Subscriber, content_of
from tests.vllm.engine import BLOCK, Engine

DEADLINE_S = 30.0
TIERS = {"CPU": DRAM, "STORAGE": NVME}
_SOCKETS = itertools.count()


def events_config(**fields: Any) -> dict[str, Any]:
    """vLLM's settings, with a publisher in the engine's own process."""
    from vllm.config import KVEventsConfig

    endpoint = f"inproc://events-{next(_SOCKETS)}"
    config = KVEventsConfig(
        enable_kv_cache_events=True, publisher="zmq", endpoint=endpoint, topic="kv", **fields
    )
    return {"kv_events_config": config}


class Router(Subscriber):
    """Reads what the engine publishes, from its next event on.

    Args:
        salts: that requests may have.
    """

    def __init__(self, engine: Engine, salts: tuple[str | None, ...] = (None,)) -> None:
        super().__init__()
        self._engine = engine
        self._socket: Any = zmq.Context.instance().socket(zmq.SUB)
        self._socket.connect(self._publisher._endpoint)
        self._socket.subscribe("kv")
        self._next: int | None = None
        self.num_cleared = 0
        self.num_checks = 0
        self.in_hbm: set[Name] = set()
        namespace = engine.side.names.namespace
        assert namespace is not None
        self._roots = {root_key(namespace, salt, b""): salt for salt in salts}
        self._hashes: dict[Key, tuple[tuple[Name, ...], bytes]] = {}
        self._note_chunks()

    @property
    def _publisher(self) -> Any:
        return self._engine.scheduler.kv_event_publisher

    # ---- what is published -------------------------------------------------------------

    def listen(self) -> None:
        """All that was published."""
        while self._socket.poll(0):
            topic, number, payload = self._socket.recv_multipart()
            seq = int.from_bytes(number, "big")
            assert topic == b"kv"
            assert self._next in (None, seq), f"batch {self._next} is missing"
            self._next = seq + 1
            _, events, _ = msgspec.msgpack.decode(payload)
            for event in events:
                self._hear(event)

    def _hear(self, event: dict[str, Any]) -> None:
        kind, medium = event["type"], event.get("medium")
        if kind == "AllBlocksCleared":
            self.num_cleared += 1
            self.all_cleared()
            self.in_hbm.clear()
        elif medium not in TIERS:
            hashes = event["block_hashes"]
            (self.in_hbm.update if kind == "BlockStored" else self.in_hbm.difference_update)(hashes)
            if kind == "BlockStored":  # the same block, wherever it is
                self._same(event)
        else:
            self.num_heard += 1
            assert event["locality"] == "LOCAL"
            assert event["group_idx"] == 0
            if kind == "BlockRemoved":
                self.removed(TIERS[medium], event["block_hashes"])
            else:
                tokens = _blocks(event)
                self.stored(
                    TIERS[medium], event["block_hashes"], event.get("parent_block_hash"), tokens
                )

    def _same(self, event: dict[str, Any]) -> None:
        parent = event.get("parent_block_hash")
        for name, tokens in zip(event["block_hashes"], _blocks(event), strict=True):
            assert self.parents.setdefault(name, parent) == parent
            assert self.tokens.setdefault(name, tokens) == tokens
            parent = name

    # ---- what there is -----------------------------------------------------------------

    def _note_chunks(self) -> None:
        """Work out the blocks of each chunk that is saved from now on."""
        residency = self._engine.store.residency
        begin_save = residency.begin_save

        def noted(name: ChunkName, *args: Any, **kwargs: Any) -> Any:
            self.note(name)
            return begin_save(name, *args, **kwargs)

        residency.begin_save = noted  # type: ignore[method-assign]

    def note(self, name: ChunkName) -> None:
        """The chunk has the blocks that vLLM would make of its tokens."""
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_utils import NONE_HASH, maybe_convert_block_hash

        assert chunk_key(name.parent, name.extra, name.tokens) == name.key
        is_first = name.parent in self._roots
        if not is_first and name.parent not in self._hashes:
            return  # behind moved KV
        salt = self._roots.get(name.parent)
        last = NONE_HASH if is_first else self._hashes[name.parent][1]
        names: list[Name] = []
        for start in range(0, len(name.tokens) - BLOCK * TOKEN_BYTES + 1, BLOCK * TOKEN_BYTES):
            block = name.tokens[start : start + BLOCK * TOKEN_BYTES]
            ids = tuple(int.from_bytes(block[i : i + 4], "big") for i in range(0, len(block), 4))
            extra = (("cache_salt", salt),) if salt and is_first and not names else None
            last = sha256((last, ids, extra))
            names.append(maybe_convert_block_hash(last))
        self._hashes[name.key] = tuple(names), last

    def publish(self) -> None:
        """What vLLM's next step would publish, without a step."""
        from vllm.distributed.kv_events import KVEventBatch

        scheduler = self._engine.scheduler
        events = [*scheduler.kv_cache_manager.take_events(), *scheduler.connector.take_events()]
        if events:
            self._publisher.publish(KVEventBatch(ts=time.time(), events=events))

    def check(self) -> None:
        """What the router has made of the events is what the store has, now that nothing steps."""
        announcer = self._engine.store.announcer
        assert announcer is not None
        store, deadline = self._engine.store, time.monotonic() + DEADLINE_S
        while True:
            store.thread.wake()
            self.publish()
            self.listen()
            names = {key: blocks for key, (blocks, _) in self._hashes.items()}
            there = content_of(store, names)
            if announcer.is_quiet() and self.content == there:
                break
            if time.monotonic() > deadline:
                wrong = {tier: there[tier] ^ self.content[tier] for tier in there}
                counts = {tier: (len(there[tier]), len(wrong[tier])) for tier in there}
                raise AssertionError(f"the router is wrong: (blocks, wrong) are {counts}")
            time.sleep(0.002)
        self.num_checks += 1


def _blocks(event: dict[str, Any]) -> list[bytes]:
    size, tokens = event["block_size"], event["token_ids"]
    assert size == BLOCK
    assert len(tokens) == size * len(event["block_hashes"])
    return [encode_tokens(tokens[i : i + size]) for i in range(0, len(tokens), size)]
