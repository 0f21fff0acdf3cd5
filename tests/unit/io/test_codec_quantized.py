# SPDX-License-Identifier: Apache-2.0
"""Approximate codecs: what comes back is near, what has to be exact is, and the rest is refused."""

from __future__ import annotations

import itertools
import threading
import time
from dataclasses import replace

import numpy as np
import pytest
import torch

from attnstore_vllm._native import quantized_bytes
from attnstore_vllm.io.codec import CODECS, PayloadShape, Quantized
from attnstore_vllm.io.device import CHECKSUM_BYTES

HEADS, DIM, BLOCK, BLOCKS, UNITS = 2, 32, 16, 4, 3
TOKENS = BLOCK * BLOCKS
PAGE = 2 * BLOCK * HEADS * DIM
# base, head_step, token_group, token_outer, token_inner, dim_group, dim_outer, dim_inner
HALF = BLOCK * HEADS * DIM
PLAIN = (
    (0, BLOCK * 2 * DIM, BLOCK, 0, 2 * DIM, DIM, 0, 1),
    (DIM, BLOCK * 2 * DIM, BLOCK, 0, 2 * DIM, DIM, 0, 1),
)
# K by dim, then by token in pairs of dims; V by token pairs: as kernels for CPUs have it.
SPLIT = (
    (0, BLOCK * DIM, BLOCK, 0, 2, 2, 2 * BLOCK, 1),
    (HALF, BLOCK * DIM, 2, 2 * DIM, 1, DIM, 0, 2),
)
LAYOUTS = {"plain": PLAIN, "split": SPLIT}
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
KINDS = ("int8", "fp8")
# Half a step, at most, of the largest number: scales have 8 bits.
PART = {"int8": 0.5 / 127 * 1.01, "fp8": 16 / 448 * 1.01}


def shape_of(dtype: str, layout: str = "plain") -> PayloadShape:
    return PayloadShape(dtype, UNITS, BLOCKS, BLOCK, HEADS, DIM, *LAYOUTS[layout])


def places(shape: PayloadShape, side: tuple[int, ...]) -> np.ndarray:
    """[units, tokens, heads, dims]: the element of the payload. Written apart from the codec's."""
    base, head_step, t_group, t_outer, t_inner, d_group, d_outer, d_inner = side
    found = np.empty((UNITS, TOKENS, HEADS, DIM), np.int64)
    for unit, token, head, dim in itertools.product(*map(range, found.shape)):
        block, t = divmod(token, BLOCK)
        found[unit, token, head, dim] = (
            (unit * BLOCKS + block) * PAGE
            + base
            + head * head_step
            + t // t_group * t_outer
            + t % t_group * t_inner
            + dim // d_group * d_outer
            + dim % d_group * d_inner
        )
    return found


def payload_of(shape: PayloadShape, key: torch.Tensor, value: torch.Tensor) -> bytearray:
    """Both [units, tokens, heads, dims]; in a payload with the end of a page behind it."""
    dtype = DTYPES[shape.dtype]
    flat = torch.zeros(UNITS * BLOCKS * PAGE, dtype=dtype)
    for side, numbers in ((shape.key, key), (shape.value, value)):
        flat[torch.from_numpy(places(shape, side)).flatten()] = numbers.to(dtype).flatten()
    raw = flat.view(torch.uint8).numpy().tobytes()
    return bytearray(raw + bytes(-len(raw) % 4096))


def read(shape: PayloadShape, payload: bytearray) -> tuple[torch.Tensor, torch.Tensor]:
    size = UNITS * BLOCKS * PAGE * DTYPES[shape.dtype].itemsize
    flat = torch.frombuffer(payload, dtype=torch.uint8)[:size].view(DTYPES[shape.dtype])
    key, value = (
        flat[torch.from_numpy(places(shape, side)).flatten()].view(UNITS, TOKENS, HEADS, DIM)
        for side in (shape.key, shape.value)
    )
    return key, value


def through(codec: Quantized, payload: bytearray, num_tokens: int = TOKENS) -> bytearray:
    out = bytearray(2 * len(payload) + 4096)
    size = codec.encode(memoryview(payload), memoryview(out), num_tokens)
    assert size
    back = bytearray(b"\xa5" * len(payload))
    assert CODECS[codec.name].decode(memoryview(out)[:size], memoryview(back))
    return back


def made(kind: str, shape: PayloadShape) -> Quantized:
    codec = CODECS[kind]
    assert isinstance(codec, Quantized)
    return codec.of(shape)


def numbers(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """K with channels of very different sizes, V with such tokens: a wrong group would be seen."""
    random = torch.Generator().manual_seed(seed)
    shape = (UNITS, TOKENS, HEADS, DIM)
    key, value = (torch.randn(shape, generator=random) for _ in range(2))
    key *= torch.logspace(-3, 3, HEADS * DIM).view(HEADS, DIM)
    value *= torch.logspace(-3, 3, TOKENS).view(TOKENS, 1, 1)
    return key, value


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_k_is_near_by_channel_and_v_by_token(kind: str, dtype: str, layout: str) -> None:
    shape = shape_of(dtype, layout)
    key, value = numbers(1)
    if dtype == "float16":
        key, value = key / 10, value / 10
    payload = payload_of(shape, key, value)
    was = read(shape, payload)
    now = read(shape, through(made(kind, shape), payload))
    own = {"bfloat16": 2**-8, "float16": 2**-10, "float32": 0.0}[dtype]
    for before, after, axis in zip(was, now, (1, 3), strict=True):
        sizes = before.float().abs()
        error = (after.float() - before.float()).abs()
        most = sizes.amax(axis, keepdim=True)
        assert bool((error <= most * PART[kind] + sizes * own + 1e-7).all())
        assert float(error.max()) > 0, "nothing was approximated"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_outliers_come_back_exactly(kind: str, dtype: str) -> None:
    """Also infinities and NaN with all their bits; and they make no number beside them coarser."""
    shape = shape_of(dtype, "split")
    key, value = numbers(2)
    key, value = key.clamp(-1, 1), value.clamp(-1, 1)
    far = 1e3
    key[0, 5, 1, 7], value[2, 9, 0, 3] = far, -far
    key[1, 1, 0, 0], value[1, 2, 1, 30] = float("inf"), float("-inf")
    payload = payload_of(shape, key, value)
    flat = np.frombuffer(payload, np.uint32 if dtype == "float32" else np.uint16)
    odd = {"bfloat16": 0xFFA5, "float16": 0x7D5A, "float32": 0xFFC12345}[dtype]
    nan = int(places(shape, shape.key)[2, 3, 1, 4])
    flat[nan] = odd
    back = through(made(kind, shape), payload)
    assert np.frombuffer(back, flat.dtype)[nan] == odd
    was, now = read(shape, payload), read(shape, back)
    assert now[0][0, 5, 1, 7] == was[0][0, 5, 1, 7]
    assert now[1][2, 9, 0, 3] == was[1][2, 9, 0, 3]
    assert (now[0][1, 1, 0, 0], now[1][1, 2, 1, 30]) == (float("inf"), float("-inf"))
    beside = (now[0][0, :, 1, 7].float() - was[0][0, :, 1, 7].float()).abs()
    rest = was[0][0, :, 1, 7].float().abs().sort().values[-2]
    assert float(beside.max()) <= float(rest) * PART[kind] * 1.1


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_behind_the_last_are_zeros_and_change_no_scale(kind: str) -> None:
    shape, count = shape_of("bfloat16"), 21
    key, value = numbers(3)
    clean = payload_of(shape, key, value)
    key[:, count:], value[:, count:] = float("nan"), 1e30
    dirty = payload_of(shape, key, value)
    codec = made(kind, shape)
    backs = [through(codec, payload, count) for payload in (clean, dirty)]
    assert backs[0] == backs[1]
    for side in read(shape, backs[1]):
        assert bool((side[:, count:] == 0).all())
        assert bool((side[:, :count] != 0).any())


@pytest.mark.parametrize("kind", KINDS)
def test_the_largest_numbers_of_a_format_stay_finite(kind: str) -> None:
    shape = shape_of("float16")
    full = torch.full((UNITS, TOKENS, HEADS, DIM), 65504.0)
    for side in read(shape, through(made(kind, shape), payload_of(shape, full, -full))):
        assert bool(side.isfinite().all())
        assert float(side.float().abs().min()) > 65000


@pytest.mark.parametrize("kind", KINDS)
def test_what_comes_back_stays_so(kind: str) -> None:
    """A tail is loaded, grows and is stored again: what was approximated once is not far off."""
    shape = shape_of("bfloat16")
    payload = payload_of(shape, *numbers(4))
    codec = made(kind, shape)
    once = through(codec, payload)
    often = once
    for _ in range(10):
        often = through(codec, often)
    for first, last in zip(read(shape, once), read(shape, often), strict=True):
        most = first.float().abs().amax()
        assert float((first.float() - last.float()).abs().max()) <= float(most) * 2 * PART[kind]


@pytest.mark.parametrize("kind", KINDS)
def test_the_room_is_enough_for_gaussian_numbers_and_no_more_than_needed(kind: str) -> None:
    shape = replace(shape_of("bfloat16"))
    payload = payload_of(shape, *numbers(5))
    codec = made(kind, shape)
    room = codec.room(len(payload), "bfloat16")
    assert codec.encode(memoryview(payload), memoryview(bytearray(room)), TOKENS)
    assert room < 0.6 * len(payload)
    outliers = torch.zeros((UNITS, TOKENS, HEADS, DIM))
    outliers[..., ::20] = 1.0  # of 32 numbers two are all there is
    many = payload_of(shape, outliers, outliers)
    assert codec.encode(memoryview(many), memoryview(bytearray(room)), TOKENS) == 0


def test_an_encoding_of_another_codec_or_size_is_refused() -> None:
    shape = shape_of("bfloat16")
    payload = payload_of(shape, *numbers(6))
    out = bytearray(2 * len(payload))
    size = made("int8", shape).encode(memoryview(payload), memoryview(out), TOKENS)
    good = memoryview(out)[:size]
    back = memoryview(bytearray(len(payload)))
    assert CODECS["int8"].decode(good, back)
    assert not CODECS["fp8"].decode(good, back)
    assert not CODECS["lossless"].decode(good, back)
    assert not CODECS["int8"].decode(good, memoryview(bytearray(len(payload) + 4096)))
    assert not CODECS["int8"].decode(good[:-1], back)
    assert not CODECS["int8"].decode(memoryview(bytes(good) + b"\0"), back)


@pytest.mark.parametrize("kind", KINDS)
def test_every_damaged_bit_is_refused_or_was_none(kind: str) -> None:
    """The checksum is that of what is decoded: a bit of a number that is turned is seen."""
    shape = replace(shape_of("bfloat16"), units=1, blocks=1)
    payload = bytearray(2 * PAGE)
    random = np.random.default_rng(7)
    payload[:] = (
        (random.standard_normal(PAGE).astype(np.float32).view(np.uint32) >> 16)
        .astype(np.uint16)
        .tobytes()
    )
    out = bytearray(2 * len(payload))
    size = made(kind, shape).encode(memoryview(payload), memoryview(out), BLOCK)
    good, back = bytearray(out[:size]), bytearray(len(payload))
    assert CODECS[kind].decode(memoryview(good), memoryview(back))
    right = bytes(back)
    for bit in range(0, 8 * size, 5):
        bad = bytearray(good)
        bad[bit // 8] ^= 1 << bit % 8
        if CODECS[kind].decode(memoryview(bad), memoryview(back)):
            assert bytes(back) == right
            assert bit >= 8 * CHECKSUM_BYTES


def test_a_shape_of_another_payload_is_none() -> None:
    shape = shape_of("bfloat16")
    size = UNITS * BLOCKS * PAGE * 2
    assert quantized_bytes(shape.fields(1, TOKENS), size)
    for wrong in (
        replace(shape, units=UNITS + 1),
        replace(shape, num_heads=HEADS - 1),
        replace(shape, head_dim=1 << 24),
        replace(shape, key=(-1, *shape.key[1:])),
        replace(shape, value=(PAGE, *shape.value[1:])),
        replace(shape, key=(0, 1 << 30, *shape.key[2:])),
        replace(shape, key=(*shape.key[:2], 0, *shape.key[3:])),
    ):
        assert quantized_bytes(wrong.fields(1, TOKENS), size) == 0
    for num_tokens in (0, TOKENS + 1):
        assert quantized_bytes(shape.fields(1, num_tokens), size) == 0


def test_encoding_lets_other_threads_run() -> None:
    shape = replace(shape_of("bfloat16"), units=400)
    payload = bytearray(400 * BLOCKS * PAGE * 2)
    out = bytearray(len(payload))
    ticks, stop = [0], threading.Event()

    def tick() -> None:
        while not stop.is_set():
            ticks[0] += 1
            time.sleep(0.0005)

    thread = threading.Thread(target=tick)
    thread.start()
    before = ticks[0]
    made("int8", shape).pack(memoryview(payload), memoryview(out), TOKENS)
    during = ticks[0] - before
    stop.set()
    thread.join()
    assert during >= 2, "the GIL was held"
