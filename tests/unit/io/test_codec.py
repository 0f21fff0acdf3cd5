# SPDX-License-Identifier: Apache-2.0
"""The lossless codec: numbers come back with the same bits, in fewer bytes where it can be."""

from __future__ import annotations

import mmap

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attnstore_vllm._native import lossless_bound, lossless_decode, lossless_encode
from attnstore_vllm.io.codec import Lossless

Bytes = npt.NDArray[np.uint8]
BLOCK = 64 << 10


CODINGS = pytest.mark.parametrize("fast", [False, True])


def encoded(raw: bytes, fast: bool) -> bytes:
    out = bytearray(lossless_bound(len(raw)))
    return bytes(out[: lossless_encode(raw, out, fast)])


def decoded(data: bytes, num_bytes: int) -> bytes:
    out = bytearray(num_bytes)
    assert lossless_decode(data, out)
    return bytes(out)


def normal(dtype: str, count: int = 4 * BLOCK) -> bytes:
    numbers = np.random.default_rng(5).standard_normal(count).astype(np.float32)
    if dtype == "bfloat16":
        return (numbers.view(np.uint32) >> 16).astype("<u2").tobytes()
    return numbers.astype(dtype).tobytes()


@CODINGS
@pytest.mark.parametrize("repeats", [1, 3])
def test_all_patterns_of_16_bits_come_back(repeats: int, fast: bool) -> None:
    """In bfloat16 and float16: NaNs with their payloads, infinities, denormals, minus zero."""
    patterns = np.arange(65536, dtype="<u2").repeat(repeats)
    np.random.default_rng(repeats).shuffle(patterns)
    raw = patterns.tobytes()
    assert decoded(encoded(raw, fast), len(raw)) == raw


@pytest.mark.parametrize("step", [16, 7])
def test_all_patterns_come_back_packed(step: int) -> None:
    """Each among numbers around zero, so that blocks are packed: with its exponent in the window
    and as an escape."""
    words = np.frombuffer(normal("bfloat16", 16 * 65536), "<u2").copy()
    patterns = np.arange(65536, dtype="<u2")
    np.random.default_rng(step).shuffle(patterns)
    words[: step * 65536 : step] = patterns
    raw = words.tobytes()
    data = encoded(raw, fast=True)
    assert data[:2] == b"\1\3"
    assert 0.75 * len(raw) < len(data) < len(raw)
    assert decoded(data, len(raw)) == raw


@CODINGS
@pytest.mark.parametrize("special", [0x7FC1, 0xFFFF, 0x7F80, 0xFF80, 0x0001, 0x8000, 0x8001])
def test_rare_patterns_among_many_numbers_come_back(special: int, fast: bool) -> None:
    words = np.frombuffer(normal("bfloat16"), "<u2").copy()
    words[:: len(words) // 7] = special
    raw = words.tobytes()
    data = encoded(raw, fast)
    assert len(data) < (0.76 if fast else 0.7) * len(raw)
    assert decoded(data, len(raw)) == raw


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 2**32), st.integers(0, 3000), st.integers(1, 256)), max_size=6
    ),
    st.binary(max_size=40),
)
def test_whatever_there_is_comes_back(parts: list[tuple[int, int, int]], end: bytes) -> None:
    """Args: parts: seed, bytes and how many bytes may differ, of random bytes."""
    made = [np.random.default_rng(s).integers(0, high, n, np.uint8) for s, n, high in parts]
    raw = b"".join(part.tobytes() for part in made) + end
    for fast in (False, True):
        assert decoded(encoded(raw, fast), len(raw)) == raw


@CODINGS
@pytest.mark.parametrize(
    ("dtype", "most"), [("bfloat16", 0.68), ("float16", 0.86), ("float32", 0.84)]
)
def test_numbers_take_fewer_bytes(dtype: str, most: float, fast: bool) -> None:
    raw = normal(dtype)
    data = encoded(raw, fast)
    if fast and dtype == "bfloat16":
        most = 0.753
    assert len(data) <= most * len(raw)
    assert decoded(data, len(raw)) == raw


@CODINGS
def test_what_does_not_get_smaller_costs_one_byte_a_block(fast: bool) -> None:
    raw = np.random.default_rng(1).bytes(16 * BLOCK)
    assert len(encoded(raw, fast)) == len(raw) + 17
    assert lossless_bound(len(raw)) == len(raw) + 17


@CODINGS
def test_a_part_without_content_takes_no_room(fast: bool) -> None:
    assert len(encoded(bytes(16 * BLOCK), fast)) == 33


@CODINGS
def test_where_the_room_is_too_small_it_says_so(fast: bool) -> None:
    raw = normal("bfloat16")
    size = len(encoded(raw, fast=False))
    assert lossless_encode(raw, bytearray(size - 1), fast) == 0
    assert lossless_encode(raw, bytearray(size), fast) == size


def test_channels_of_many_scales_fit_a_place_packed() -> None:
    """Scales from 2^-4 to 2^4: more exponents than the window has."""
    numbers = np.random.default_rng(6).standard_normal((8192, 128), np.float32)
    numbers *= np.exp2(np.arange(128) * 7 % 9 - 4).astype(np.float32)
    raw = memoryview((numbers.view(np.uint32) >> 16).astype("<u2").tobytes())
    codec = Lossless()
    out = memoryview(bytearray(codec.room(len(raw), "bfloat16")))
    for fast in (False, True):
        size = codec.encode(raw, out, 0, fast)
        assert size
        assert codec.is_fast(out[:size]) is fast
        back = bytearray(len(raw))
        assert codec.decode(out[:size], memoryview(back))
        assert back == raw


def test_where_the_fast_coding_has_no_room_the_small_one_is_used() -> None:
    raw = normal("bfloat16")
    out = bytearray(len(encoded(raw, fast=True)) - 1)
    size = lossless_encode(raw, out, fast=True)
    assert out[:size] == encoded(raw, fast=False)


@CODINGS
def test_an_encoding_of_another_size_is_refused(fast: bool) -> None:
    data = encoded(normal("bfloat16", BLOCK), fast)
    for num_bytes in (0, 2 * BLOCK - 2, 2 * BLOCK + 2, BLOCK):
        assert not lossless_decode(data, bytearray(num_bytes))
    for damaged in (data[:-1], data + b"\0", b"\2" + data[1:], data[:1] + b"\5" + data[2:], b""):
        assert not lossless_decode(damaged, bytearray(2 * BLOCK))


@CODINGS
def test_nothing_is_written_outside_of_the_target(fast: bool) -> None:
    raw = normal("bfloat16", BLOCK + 500)
    data = encoded(raw, fast)
    memory = np.full(len(raw) + 128, 0xA5, np.uint8)
    assert lossless_decode(data, memory.data[64:-64])
    assert memory[64:-64].tobytes() == raw
    assert (memory[:64] == 0xA5).all()
    assert (memory[-64:] == 0xA5).all()


def test_a_target_that_cannot_be_written_is_an_error() -> None:
    memory = mmap.mmap(-1, 4096, prot=mmap.PROT_READ)
    with pytest.raises(BufferError):
        lossless_encode(bytes(10), memory, fast=False)
