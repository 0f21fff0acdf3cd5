# SPDX-License-Identifier: Apache-2.0
"""Names for chunks: a BLAKE3 chain over everything that makes KV differ.

It is long since the names of roots, of chunks and of lineages are made in one place.

    root   = H("root", namespace, cache_salt, lora)
    key[i] = H("chunk", parent = key[i-1] or root, extra, token ids of chunk i)

`namespace` is the fingerprint of the model and its layout, `cache_salt` the tenant, `lora` the
content of the adapter, `extra` the multimodal inputs that lie in the chunk. Sections of other KV
cache groups (sections.py) are chunks behind a parent of their own. The hash is cryptographic, so
that no user can craft a prompt whose key is another's, and starts from no random seed, so that a
key on disk means the same after a restart.
"""

from __future__ import annotations

import struct
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from blake3 import blake3

from attnstore_vllm._native import encode_chunks, hash_chunks
from attnstore_vllm._native import encode_tokens as native_encode_tokens
from attnstore_vllm.index.chunk import ChunkName
from attnstore_vllm.types import TOKEN_BYTES, Key

CONTENT_BYTES = 32
_LENGTH = struct.Struct("<Q")
_MARK = struct.Struct(">Q24x")


def _hash(kind: bytes, *parts: bytes) -> bytes:
    """BLAKE3 of the parts, each with its length before it, so that no two lists collide."""
    framed = [kind]
    for part in parts:
        framed += _LENGTH.pack(len(part)), part
    return blake3(b"".join(framed)).digest()


def _encode(text: str) -> bytes:
    """UTF-8; a request may hold halves of surrogate pairs, which plain UTF-8 refuses."""
    return text.encode("utf-8", "surrogatepass")


LONG_SALT = 1 << 12
"""Characters from which on what was made of a salt is kept ..."""
MADE_MAX = 8
"""... for the last of them: a tenant and a root each. The salts are kept, too."""
_made_last: deque[tuple[tuple[bytes, ...], str, bytes]] = deque(maxlen=MADE_MAX)


def _made_of(salt: str, name: tuple[bytes, ...], make: Callable[[bytes], bytes]) -> bytes:
    """make() of a salt's bytes, which `name` tells from all else that is made of salts.

    A client may send a salt of megabytes, and ask for many answers, each a request with a copy of
    it. To compare two is some twenty times sooner than to hash one. A table would hash each, too.
    """
    if len(salt) < LONG_SALT:
        return make(_encode(salt))
    for of, known, made in tuple(_made_last):
        if of == name and known == salt:
            return made
    made = make(_encode(salt))
    _made_last.append((name, salt, made))
    return made


def root_key(namespace: bytes, cache_salt: str | None, lora: bytes) -> Key:
    """The parent of a sequence's first chunk. An absent salt differs from an empty one."""

    def make(salt: bytes) -> bytes:
        return _hash(b"root", namespace, salt, lora)

    if cache_salt is None:
        return Key(make(b""))
    name = (b"root", namespace, lora)
    return Key(_made_of(cache_salt, name, lambda salt: make(b"salt" + salt)))


def moved_root(root: Key, stop: int) -> Key:
    """The parent of what was computed behind moved KV: exact requests never match its lineage.

    Args:
        stop: of the moved tokens. Chunks of one key have the same tokens that were moved: which
            may be moved again is a property of the key, not of the tier or the request.
    """
    return Key(_hash(b"moved", root, stop.to_bytes(8, "big")))


def documents_root(root: Key, moved: Sequence[range], rule: str) -> Key:
    """The parent of what was computed behind documents that were moved, with gaps between them.

    Args:
        moved: the tokens whose KV was moved; what lies between was computed anew.
        rule: names which of the moved tokens were computed anew, too.
    """
    ranges = b"".join(n.to_bytes(8, "big") for some in moved for n in (some.start, some.stop))
    return Key(_hash(b"documents", root, ranges, rule.encode()))


def approximate_root(root: Key, codec: str) -> Key:
    """The parent of KV that a codec may have changed, and of all that was computed behind such:
    exact requests never match its lineage.

    Args:
        codec: its name and version (Codec.label).
    """
    return Key(_hash(b"approximate", root, codec.encode()))


def marks_of(keys: Sequence[Key]) -> list[int]:
    """64 bits of each key. Cost: 20 ns a key."""
    return [mark for (mark,) in _MARK.iter_unpack(b"".join(keys))]


def tenant_hash(cache_salt: str | None) -> bytes:
    """The tenant as records have it: a hash of the salt, never the salt. Zero without one."""
    if cache_salt is None:
        return bytes(32)
    return _made_of(cache_salt, (b"tenant",), lambda salt: _hash(b"tenant", salt))


def section_parent(parent: Key, group: int, hole: int) -> Key:
    """The parent of what another KV cache group keeps of the chunks that continue `parent`.

    Args:
        hole: leading blocks of the chunk that are not there.
    """
    return Key(_hash(b"section", parent, struct.pack("<II", group, hole)))


def chunk_key(parent: Key, extra: bytes, tokens: bytes) -> Key:
    return Key(_hash(b"chunk", parent, extra, tokens))


def encode_tokens(token_ids: Sequence[int]) -> bytes:
    """Token ids as big-endian uint32: comparing the bytes compares the tokens.

    An id that is no token (negative, say) does not raise: it counts modulo 2^32.

    Cost: about 5 ns a token, most of it reading the list.
    """
    ids = token_ids if isinstance(token_ids, list) else list(token_ids)
    return native_encode_tokens(ids)


@dataclass(frozen=True, slots=True)
class MultimodalSpan:
    """One image, audio or video input: what it is, and where its tokens lie."""

    content: bytes
    """CONTENT_BYTES of media_content()."""
    offset: int
    num_tokens: int


def media_name(identifier: str) -> bytes:
    """Stands for the name of an input: of a fixed size, where a client's may be of megabytes."""
    return _hash(b"media name", _encode(identifier))


def media_content(name: bytes, digest: bytes, modality: str, num_tokens: int, mask: bytes) -> bytes:
    """Names all that an input is. Two of one content have the same KV at the same place.

    Args:
        name: by media_name(). It alone says nothing: a client may have chosen it.
        digest: of all that the processor has made of the input.
        mask: which of its tokens stand for it, as a digest; empty: all.
    """
    return _hash(b"media", name, digest, modality.encode(), struct.pack("<q", num_tokens), mask)


def chunk_extra(spans: Sequence[MultimodalSpan], start: int, stop: int) -> bytes:
    """Distinguishes chunks with equal placeholder tokens: the inputs in [start, stop)."""
    inside = [s for s in spans if s.offset < stop and s.offset + s.num_tokens > start]
    if not inside:
        return b""
    return _hash(b"contents", *(s.content + struct.pack("<q", s.offset - start) for s in inside))


LOCKED_TOKENS = 1 << 18
"""So many are hashed before another thread may have its turn: some 3 ms."""
RECENT_PROMPTS = 8
"""Prompts whose keys are kept. Each takes 4 bytes a token, and 0.2 for its keys."""


class RecentPrompts:
    """The keys of the last prompts: who asks for n answers sends one prompt n times.

    A prompt is found by all of its tokens, never by a hash that its client could have chosen.
    """

    def __init__(self) -> None:
        self._keys: OrderedDict[
            tuple[Key, Sequence[bytes], int, bytes], tuple[list[bytes], list[Key]]
        ] = OrderedDict()
        """By root, extras, number of chunks and the last of them: all of them, and their keys."""

    def __len__(self) -> int:
        return len(self._keys)

    def keys_of(
        self,
        root: Key,
        extras: tuple[bytes, ...],
        num_chunks: int,
        encode: Callable[[int, int], list[bytes]],
    ) -> tuple[list[bytes], list[Key]] | None:
        """Equal chunks that are kept already, and their keys.

        Args:
            encode: gives chunks of the prompt: the last, and all where that one is known.
        Cost: a comparison of the bytes.
        """
        (last,) = encode(num_chunks - 1, num_chunks)
        name = (root, extras, num_chunks, last)
        found = self._keys.get(name)
        if found is None or found[0] != encode(0, num_chunks):
            return None
        self._keys.move_to_end(name)
        return found

    def note(
        self, root: Key, extras: tuple[bytes, ...], chunks: list[bytes], keys: list[Key]
    ) -> None:
        """Args: chunks, keys: of all whole chunks from the first on."""
        self._keys[root, extras, len(chunks), chunks[-1]] = chunks, keys
        while len(self._keys) > RECENT_PROMPTS:
            self._keys.popitem(last=False)


class SequenceKeys:
    """The keys of one growing token sequence; chunk i is hashed once, when first asked for.

    `token_ids` and `spans` are read, never copied: they may grow, and tokens from the last whole
    chunk asked for onwards may still change. Where earlier ones did, or a span came that lies in
    such a chunk (a streaming session), follow() says it.

    Args:
        recent: the prompts of other requests, of which this may be one.
    """

    def __init__(
        self,
        root: Key,
        token_ids: Sequence[int],
        chunk_tokens: int,
        spans: Sequence[MultimodalSpan] = (),
        *,
        recent: RecentPrompts | None = None,
    ) -> None:
        self.token_ids = token_ids
        self.chunk_tokens = chunk_tokens
        self.root = root
        self._spans = spans
        self._recent = recent
        self._num_placed = 0
        self._in_chunk: dict[int, list[MultimodalSpan]] = {}
        """The first `_num_placed` spans, by the chunks that they lie in."""
        self._keys: list[Key] = []
        self._chunks: list[bytes] = []
        self._extras: list[bytes] = []
        self._sections: dict[tuple[int, int], SectionKeys] = {}

    def parent(self, chunk: int) -> Key:
        """The key that chunk number `chunk` continues."""
        return self.key(chunk - 1) if chunk else self.root

    def key(self, chunk: int) -> Key:
        """The key of a whole chunk. All its tokens must be there, and final."""
        if len(self._keys) <= chunk:
            self._hash_to(chunk + 1)
        return self._keys[chunk]

    def _hash_to(self, stop: int) -> None:
        """Cost: 10 ns a token; 5 for a recent prompt."""
        first = len(self._keys)
        extras = tuple(map(self._extra_now, range(first, stop))) if self._spans else ()
        recent = self._recent if first == 0 else None
        found = None if recent is None else recent.keys_of(self.root, extras, stop, self._encode)
        if found is None:
            found = self._hash(first, stop, extras)
            if recent is not None:
                recent.note(self.root, extras, *found)
        chunks, keys = found
        self._chunks += chunks
        self._extras += extras or [b""] * len(chunks)
        self._keys += keys

    def _hash(
        self, first: int, stop: int, extras: tuple[bytes, ...]
    ) -> tuple[list[bytes], list[Key]]:
        """The encoded tokens of whole chunks, and their keys."""
        step = max(1, LOCKED_TOKENS // self.chunk_tokens)
        chunks: list[bytes] = []
        keys: list[Key] = []
        for start in range(first, stop, step):
            end = min(start + step, stop)
            parent = keys[-1] if keys else self.parent(first)
            of_these = extras[start - first : end - first]
            more = hash_chunks(*self._ids(start, end), parent, of_these)
            chunks += more[0]
            keys += more[1]
        return chunks, keys

    def _encode(self, first: int, stop: int) -> list[bytes]:
        """The encoded tokens of whole chunks."""
        return encode_chunks(*self._ids(first, stop))

    def _ids(self, first: int, stop: int) -> tuple[list[int], int, int, int]:
        """A list with the tokens of whole chunks, their size, and which they are in that list."""
        size, ids = self.chunk_tokens, self.token_ids
        if not isinstance(ids, list):
            ids, first, stop = list(ids[first * size : stop * size]), 0, stop - first
        assert len(ids) >= stop * size, "tokens are asked for that are not there"
        return ids, size, first, stop

    def follow(self) -> int | None:
        """Its tokens may be others than they were, or more of it media: forget the keys of the
        first chunk that is another one now, and of all behind it. Returns where that one begins;
        None: all that was hashed is as it was. Cost: 5 ns a token."""
        kept = 0
        now = self._encode(0, min(len(self._keys), len(self.token_ids) // self.chunk_tokens))
        for chunk, was, extra in zip(now, self._chunks, self._extras, strict=False):
            if chunk != was or self._extra_now(kept) != extra:
                break
            kept += 1
        if kept == len(self._keys):
            return None
        del self._keys[kept:], self._chunks[kept:], self._extras[kept:]
        return kept * self.chunk_tokens

    def name(self, chunk: int, tenant: bytes) -> ChunkName:
        """All that names a whole chunk."""
        key = self.key(chunk)
        position = chunk * self.chunk_tokens
        parent, extra, tokens = self.parent(chunk), self.extra(chunk), self.chunk_bytes(chunk)
        return ChunkName(key, parent, extra, tenant, position, self.chunk_tokens, tokens)

    def names(self, first: int, stop: int, tenant: bytes) -> list[ChunkName]:
        """name() of whole chunks first to stop - 1, of a spine."""
        size, keys = self.chunk_tokens, self.keys(first, stop)
        parents = [self.parent(first), *keys[:-1]] if keys else []
        extras, chunks = self._extras[first:stop], self._chunks[first:stop]
        places = range(first * size, stop * size, size)
        return [
            ChunkName(key, parent, extra, tenant, position, size, tokens)
            for key, parent, extra, position, tokens in zip(
                keys, parents, extras, places, chunks, strict=True
            )
        ]

    def part(self, chunk: int, stop: int) -> tuple[Key, bytes, bytes]:
        """The parent, the extra and the tokens of a chunk up to token `stop`, or of all of it."""
        first = chunk * self.chunk_tokens
        tokens = self.tokens(first, min(first + self.chunk_tokens, stop))
        return self.parent(chunk), self.extra(chunk), tokens

    def name_up_to(self, chunk: int, tenant: bytes, stop: int) -> ChunkName:
        """The name of a chunk, or of its leading tokens up to `stop`."""
        start = chunk * self.chunk_tokens
        if stop == start + self.chunk_tokens:
            return self.name(chunk, tenant)
        parent, extra, tokens = self.part(chunk, stop)
        key = chunk_key(parent, extra, tokens)
        return ChunkName(key, parent, extra, tenant, start, stop - start, tokens)

    def chunk_bytes(self, chunk: int) -> bytes:
        """The encoded tokens of a whole chunk whose key was asked for."""
        return self._chunks[chunk]

    def keys(self, first: int, last: int) -> list[Key]:
        """The keys of whole chunks first to last - 1."""
        if last > first:
            self.key(last - 1)
        return self._keys[first:last]

    def tokens(self, start: int, stop: int) -> bytes:
        encoded = encode_tokens(self.token_ids[start:stop])
        assert len(encoded) == (stop - start) * TOKEN_BYTES
        return encoded

    def extra(self, chunk: int) -> bytes:
        """That of a chunk whose key was asked for is the one that the key was made with."""
        return self._extras[chunk] if chunk < len(self._extras) else self._extra_now(chunk)

    def _extra_now(self, chunk: int) -> bytes:
        if not self._spans:
            return b""
        size = self.chunk_tokens
        for span in self._spans[self._num_placed :]:
            for i in range(span.offset // size, (span.offset + span.num_tokens - 1) // size + 1):
                self._in_chunk.setdefault(i, []).append(span)
            self._num_placed += 1
        return chunk_extra(self._in_chunk.get(chunk, ()), chunk * size, (chunk + 1) * size)

    def section(self, group: int, hole: int) -> SequenceKeys:
        """The keys of what a KV cache group keeps of these chunks: of the spine (0) these."""
        if group == 0:
            assert hole == 0, "the spine's chunks are whole"
            return self
        found = self._sections.get((group, hole))
        if found is None:
            found = self._sections[group, hole] = SectionKeys(self, group, hole)
        return found


class SectionKeys(SequenceKeys):
    """The same tokens, named for one group beside the spine (sections.py). A key is hashed when it
    is asked for, since few of a sequence are."""

    def __init__(self, spine: SequenceKeys, group: int, hole: int) -> None:
        super().__init__(spine.root, spine.token_ids, spine.chunk_tokens)
        self._spine = spine
        self._group = group
        self._hole = hole
        self._known: dict[int, tuple[Key, Key]] = {}
        """By the number of the chunk: the spine's key, and ours."""

    def parent(self, chunk: int) -> Key:
        return section_parent(self._spine.parent(chunk), self._group, self._hole)

    def key(self, chunk: int) -> Key:
        of_spine = self._spine.key(chunk)
        known = self._known.get(chunk)
        if known is None or known[0] != of_spine:
            tokens = self._spine.chunk_bytes(chunk)
            own = chunk_key(self.parent(chunk), self.extra(chunk), tokens)
            known = self._known[chunk] = of_spine, own
        return known[1]

    def keys(self, first: int, last: int) -> list[Key]:
        return [self.key(chunk) for chunk in range(first, last)]

    def chunk_bytes(self, chunk: int) -> bytes:
        return self._spine.chunk_bytes(chunk)

    def extra(self, chunk: int) -> bytes:
        return self._spine.extra(chunk)
