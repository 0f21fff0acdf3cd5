# SPDX-License-Identifier: Apache-2.0
"""Keys: stable for ever, and different whenever the KV may be."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
from random import Random
from typing import Any

import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from attnstore_vllm import _native
from attnstore_vllm.index import keys as keys_module
from attnstore_vllm.index.keys import (
    RECENT_PROMPTS,
    MultimodalSpan,
    RecentPrompts,
    SequenceKeys,
    chunk_extra,
    chunk_key,
    encode_tokens,
    root_key,
    tenant_hash,
)
from attnstore_vllm.types import KEY_BYTES, Key

NAMESPACE = bytes(range(32))
TOKENS = list(range(100, 140))
GOLDEN = """
import sys
from attnstore_vllm.index.keys import MultimodalSpan, SequenceKeys, root_key
spans = [MultimodalSpan(b"image-7", 20, 4)]
keys = SequenceKeys(root_key(bytes(range(32)), "tenant", b"L" * 32), range(100, 140), 16, spans)
sys.stdout.write(keys.key(0).hex() + " " + keys.key(1).hex())
"""
FIRST = "f5b8bc1e0e9111ba5756c5abf254960976cfcf060e4868ec76d5419ffa4dd369"
SECOND = "99e2be200d03278b2a17a255613167ad71d273e52a9c6686e716f9b636c5051a"

token_lists = st.lists(st.integers(0, 2**32 - 1), max_size=40)


def golden_keys() -> list[str]:
    root = root_key(NAMESPACE, "tenant", b"L" * 32)
    keys = SequenceKeys(root, TOKENS, 16, [MultimodalSpan(b"image-7", 20, 4)])
    return [keys.key(0).hex(), keys.key(1).hex()]


def test_keys_on_disk_keep_their_meaning() -> None:
    """If this fails, raise format.VERSION: the keys in existing slabs mean nothing any more."""
    assert golden_keys() == [FIRST, SECOND]


@pytest.mark.parametrize("seed", ["1", "2"])
def test_keys_do_not_depend_on_the_process(seed: str) -> None:
    environment = os.environ | {"PYTHONHASHSEED": seed}
    found = subprocess.run(
        [sys.executable, "-c", GOLDEN], env=environment, capture_output=True, text=True, check=True
    )
    assert found.stdout.split() == golden_keys()


def test_whatever_makes_kv_differ_makes_the_root_differ() -> None:
    roots = [
        root_key(NAMESPACE, None, b""),
        root_key(NAMESPACE[::-1], None, b""),
        root_key(NAMESPACE, "", b""),
        root_key(NAMESPACE, "a", b""),
        root_key(NAMESPACE, "b", b""),
        root_key(NAMESPACE, None, b"a"),
        root_key(NAMESPACE, "a", b"a"),
        root_key(NAMESPACE + b"a", None, b""),
        root_key(NAMESPACE, "asalt", b""),
    ]
    assert len(set(roots)) == len(roots)
    assert {len(root) for root in roots} == {KEY_BYTES}


def test_no_parts_can_be_moved_from_one_field_to_the_next() -> None:
    parent = root_key(NAMESPACE, None, b"")
    assert chunk_key(parent, b"ab", b"cdef") != chunk_key(parent, b"abcd", b"ef")
    assert chunk_key(parent, b"", b"abcd") != chunk_key(parent, b"abcd", b"")
    # A chunk whose fields look like a root's is no root.
    assert chunk_key(parent, b"", b"") != root_key(parent, None, b"")


def test_a_key_names_the_whole_prefix() -> None:
    root = root_key(NAMESPACE, None, b"")
    one = SequenceKeys(root, [1, *TOKENS[1:]], 16)
    two = SequenceKeys(root, [2, *TOKENS[1:]], 16)
    assert one.tokens(16, 32) == two.tokens(16, 32)
    assert one.key(1) != two.key(1)
    assert one.parent(1) == one.key(0)
    assert one.parent(0) == root


def test_tenants_are_hashes_of_their_salt() -> None:
    assert tenant_hash(None) == bytes(32)
    assert tenant_hash("a") != tenant_hash("b")
    assert tenant_hash("") != tenant_hash(None)
    assert b"secret" not in tenant_hash("secret")


@pytest.mark.parametrize("text", ["s", "é", "字"])
def test_a_long_salt_is_hashed_once_for_all_answers_to_a_prompt(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is a request with a copy of it."""
    hashed = list[bytes]()

    def hash_of(kind: bytes, *parts: bytes) -> bytes:
        framed = b"".join(struct.pack("<Q", len(part)) + part for part in parts)
        return bytes(blake3(kind + framed).digest())

    def counted(data: bytes) -> Any:
        hashed.append(data[:4])
        return blake3(data)

    monkeypatch.setattr(keys_module, "blake3", counted)
    salt, lora = text * keys_module.LONG_SALT, b"L" * 32
    tenant = hash_of(b"tenant", salt.encode())
    roots = {of: hash_of(b"root", NAMESPACE, b"salt" + salt.encode(), of) for of in (b"", lora)}
    for _ in range(99):
        copy = f"{salt}."[:-1]
        assert tenant_hash(copy) == tenant
        assert root_key(NAMESPACE, copy, b"") == roots[b""]
        assert root_key(NAMESPACE, copy, lora) == roots[lora]
    assert sorted(hashed) == [b"root", b"root", b"tena"], "once each"
    for number in range(3 * keys_module.MADE_MAX):
        other = salt[: -len(str(number))] + str(number)
        assert tenant_hash(other) == hash_of(b"tenant", other.encode()) != tenant
        assert root_key(NAMESPACE[::-1], other, b"") not in roots.values()
    assert len(keys_module._made_last) == keys_module.MADE_MAX
    assert tenant_hash(salt) == tenant


def test_images_under_equal_placeholders_are_told_apart() -> None:
    root = root_key(NAMESPACE, None, b"")

    def keys(*spans: MultimodalSpan) -> SequenceKeys:
        return SequenceKeys(root, [7] * 48, 16, spans)

    plain, cat = keys(), keys(MultimodalSpan(b"cat", 20, 8))
    dog, later = keys(MultimodalSpan(b"dog", 20, 8)), keys(MultimodalSpan(b"cat", 21, 8))
    assert plain.key(0) == cat.key(0) == dog.key(0)  # before the image
    assert len({k.key(1) for k in (plain, cat, dog, later)}) == 4
    assert len({k.key(2) for k in (plain, cat, dog, later)}) == 4  # by the chain
    across = keys(MultimodalSpan(b"cat", 12, 8))
    assert across.key(0) != plain.key(0)
    assert across.extra(1) != across.extra(0)
    assert across.extra(2) == b""


def test_spans_touch_a_chunk_only_with_a_token_in_it() -> None:
    span = [MultimodalSpan(b"cat", 16, 16)]
    assert chunk_extra(span, 0, 16) == b""
    assert chunk_extra(span, 32, 48) == b""
    assert chunk_extra(span, 0, 17) != b""
    assert chunk_extra(span, 31, 48) != b""


@given(token_lists, token_lists)
def test_the_order_of_bytes_is_the_order_of_tokens(a: list[int], b: list[int]) -> None:
    assert (encode_tokens(a) < encode_tokens(b)) == (a < b)
    assert len(encode_tokens(a)) == 4 * len(a)


def test_keys_of_a_growing_sequence_stay() -> None:
    tokens = list(TOKENS[:20])
    keys = SequenceKeys(root_key(NAMESPACE, None, b""), tokens, 16)
    first = keys.key(0)
    keys.keys(0, 1)
    tokens += TOKENS[20:]
    whole = SequenceKeys(root_key(NAMESPACE, None, b""), TOKENS, 16)
    assert keys.key(0) == first == whole.key(0)
    assert keys.key(1) == whole.key(1)


def test_tokens_that_are_not_there_are_our_bug() -> None:
    keys = SequenceKeys(root_key(NAMESPACE, None, b""), TOKENS[:20], 16)
    with pytest.raises(AssertionError):
        keys.key(1)


# ---- the native half --------------------------------------------------------------------------


def random_ids(random: Random, number: int) -> list[int]:
    """Also those at the bounds of what an int of Python's has in one place, and of a token."""
    bounds = [0, 1, 2**30 - 1, 2**30, 2**31 - 1, 2**32 - 1, 2**32, 2**64 + 3, -1, -(2**31)]
    return [random.choice((random.randrange(50_000), random.choice(bounds))) for _ in range(number)]


@pytest.mark.parametrize("size", [1, 2, 15, 16, 17, 128, 240, 241, 256, 1000, 4096])
def test_native_keys_are_those_of_the_package(size: int) -> None:
    """Over the borders of BLAKE3's blocks (64 bytes) and chunks (1,024) and of its tree."""
    random = Random(size)
    ids = random_ids(random, 6 * size + size // 2)
    encoded = struct.pack(f">{len(ids)}I", *(number % 2**32 for number in ids))
    for extras in ((), tuple(random.randbytes(number) for number in (0, 32, 0, 5, 64))):
        parent = Key(random.randbytes(32))
        chunks, keys = _native.hash_chunks(ids, size, 1, 6, parent, extras)
        assert b"".join(chunks) == encoded[4 * size : 24 * size]
        for chunk, extra, key in zip(chunks, extras or 5 * (b"",), keys, strict=True):
            assert key == chunk_key(parent, extra, chunk)
            parent = key
        assert _native.encode_chunks(ids, size, 1, 6) == chunks
    assert _native.hash_chunks(ids, size, 3, 3, parent, ()) == ([], [])


def test_a_prompt_hashed_in_parts_has_the_keys_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """As long ones are, and sessions that grow; with media or without."""
    ids = random_ids(Random(3), 40 * 16 + 5)
    root = root_key(NAMESPACE, "salt", b"")
    for spans in ((), (MultimodalSpan(b"cat", 100, 300),)):
        whole = SequenceKeys(root, ids, 16, spans)
        keys = whole.keys(0, 40)
        monkeypatch.setattr(keys_module, "LOCKED_TOKENS", 7 * 16 + 3)
        in_parts, as_tuple = SequenceKeys(root, ids, 16, spans), SequenceKeys(root, tuple(ids), 16)
        assert in_parts.keys(0, 40) == keys
        assert list(map(in_parts.chunk_bytes, range(40))) == list(map(whole.chunk_bytes, range(40)))
        assert spans or as_tuple.keys(0, 40) == keys
        grown = SequenceKeys(root, ids, 16, spans)
        assert [grown.key(number) for number in (0, 3, 24, 39)] == [keys[i] for i in (0, 3, 24, 39)]
        monkeypatch.undo()


def test_what_is_no_list_of_whole_chunks_raises() -> None:
    ids = [1, -1, 2**40 + 5, 2**30 + 7, 0]
    chunks = _native.encode_chunks(ids, 2, 0, 2)
    assert chunks == [
        b"\x00\x00\x00\x01\xff\xff\xff\xff",
        b"\x00\x00\x00\x05\x40\x00\x00\x07",
    ]
    assert _native.encode_chunks(ids, 2, 1, 2) == chunks[1:]
    assert _native.encode_tokens(ids) == b"".join(chunks) + bytes(4)
    for size, first, stop in ((2, 0, 3), (2, 1, 0), (2, -1, 1), (0, 0, 0), (6, 0, 1)):
        with pytest.raises(ValueError, match="whole chunks"):
            _native.encode_chunks(ids, size, first, stop)
    with pytest.raises(TypeError, match="no int"):
        _native.encode_tokens([1, "2"])  # type: ignore[list-item]
    root = Key(bytes(32))
    for place in range(9):  # also while the chunk before it is hashed
        wrong: list[Any] = [*range(place), "2", *range(8 - place)]
        with pytest.raises(TypeError, match="no int"):
            _native.hash_chunks(wrong, 3, 0, 3, root, ())
    with pytest.raises(ValueError, match="one extra"):
        _native.hash_chunks(ids, 2, 0, 2, root, (b"a",))
    with pytest.raises(ValueError, match="whole chunks"):
        _native.hash_chunks(ids, 2, 0, 3, root, ())


# ---- one prompt many times --------------------------------------------------------------------


def count_hashed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many chunks each call has hashed, from now on."""
    hashed: list[int] = []

    def hash_chunks(ids: list[int], size: int, first: int, stop: int, *more: Any) -> Any:
        hashed.append(stop - first)
        return real(ids, size, first, stop, *more)

    real = _native.hash_chunks
    monkeypatch.setattr(keys_module, "hash_chunks", hash_chunks)
    return hashed


def test_a_prompt_that_comes_n_times_is_hashed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    hashed, recent = count_hashed(monkeypatch), RecentPrompts()
    root = root_key(NAMESPACE, None, b"")
    prompt = list(range(100, 260))
    plain = SequenceKeys(root, list(prompt), 16).keys(0, 10)
    for _ in range(50):
        child = SequenceKeys(root, list(prompt), 16, recent=recent)
        assert child.keys(0, 10) == plain
        assert b"".join(map(child.chunk_bytes, range(10))) == encode_tokens(prompt)
    assert hashed == [10, 10]
    grown = SequenceKeys(root, [*prompt, *range(16)], 16, recent=recent)
    assert grown.keys(0, 10) == plain
    assert grown.key(10) == chunk_key(plain[-1], b"", encode_tokens(range(16)))
    assert child.keys(0, 10) == plain, "what one appends is another's"


def test_no_other_prompt_is_taken_for_a_recent_one() -> None:
    """Another root, other media, other tokens anywhere, fewer of them."""
    recent, root = RecentPrompts(), root_key(NAMESPACE, None, b"")
    prompt = list(range(100, 260))
    SequenceKeys(root, prompt, 16, recent=recent).key(9)
    others = [
        (root_key(NAMESPACE, "salt", b""), prompt, ()),
        (root, prompt, (MultimodalSpan(b"cat", 20, 8),)),
        (root, [1, *prompt[1:]], ()),
        (root, [*prompt[:80], 1, *prompt[81:]], ()),
        (root, prompt[:-16], ()),
    ]
    for of, tokens, spans in others:
        last = len(tokens) // 16 - 1
        plain = SequenceKeys(of, tokens, 16, spans).key(last)
        assert SequenceKeys(of, tokens, 16, spans, recent=recent).key(last) == plain


def test_recent_prompts_are_few() -> None:
    recent, root = RecentPrompts(), root_key(NAMESPACE, None, b"")
    for number in range(3 * RECENT_PROMPTS):
        SequenceKeys(root, [number] * 16, 16, recent=recent).key(0)
    assert len(recent) == RECENT_PROMPTS
