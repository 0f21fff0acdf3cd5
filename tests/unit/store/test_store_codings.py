# SPDX-License-Identifier: Apache-2.0
"""The store with a codec of two codings: it changes to the one that brings hits earlier, and reads
records of both."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from attnstore_vllm.index.chunk import ChunkName
from attnstore_vllm.io.codec import CODECS, Coders, Lossless
from attnstore_vllm.policy import codec_cost
from attnstore_vllm.tiers.nvme.codec_watch import CodecWatch
from attnstore_vllm.tiers.nvme.format import PAGE_BYTES, Encoding
from attnstore_vllm.tiers.nvme.nvme_io import NvmeIo
from tests.encoded_helpers import Conversations
from tests.helpers import PAYLOAD_BYTES, SHAPE, Rig, Start, starting

LOSSLESS = CODECS["lossless"]
ENCODED = replace(SHAPE, encoding=Encoding("lossless", LOSSLESS.version, 2 * PAGE_BYTES))
NUM_RECORDS, DRAM_SLOTS = 24, 6
WRITES, LATER = "from now on", "brings hits later than the disk alone would"


def numbers(name: ChunkName) -> bytes:
    """bf16 around zero, NaNs with a payload among them."""
    seed = int.from_bytes(name.key[:8], "little")
    normal = np.random.default_rng(seed).standard_normal(PAYLOAD_BYTES // 2, np.float32)
    words = (normal.view(np.uint32) >> 16).astype("<u2")
    words[::500] = 0x7FC1 + seed % 60
    return words.tobytes()


CONVERSATIONS = Conversations(numbers)
put_all, check_read = CONVERSATIONS.put_all, CONVERSATIONS.check_read


def watch_of(rig: Rig) -> CodecWatch:
    nvme = rig.store.thread.tiers[0]
    assert isinstance(nvme, NvmeIo)
    assert nvme.codec_watch is not None
    return nvme.codec_watch


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    with starting(tmp_path / "slab", ENCODED, NUM_RECORDS, DRAM_SLOTS) as start:
        yield start


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """The codings of records that were decoded since."""
    seen: list[bool] = []
    decode = Lossless.decode

    def noting(codec: Lossless, encoded: memoryview, out: memoryview) -> bool:
        if len(out) == PAYLOAD_BYTES:  # else the trial at the start
            seen.append(codec.is_fast(encoded))
        return decode(codec, encoded, out)

    monkeypatch.setattr(Lossless, "decode", noting)
    return seen


def test_records_of_both_codings_come_back(start: Start, decoded: list[bool]) -> None:
    rig = start()
    for number in range(1, 7):
        watch_of(rig).cost.is_fast = number > 3
        put_all(rig, number)
    assert rig.store.figures().counts["written"] == 18
    for again in (rig, None):
        rig = again or start()
        decoded.clear()
        for number in (1, 4, 2, 5, 3, 6):
            assert check_read(rig, number) == 3
        assert len(decoded) >= 12  # the last ones written were in DRAM
        assert set(decoded) == {False, True}
        assert not rig.store.figures().counts.get("corrupt")
    assert decoded == ([False] * 3 + [True] * 3) * 3


def slow(
    monkeypatch: pytest.MonkeyPatch, small: float, fast: float, trials: tuple[float, float]
) -> None:
    """Let decoding a record take so many seconds, by its coding, and a trial so many more."""
    decode = Lossless.decode

    def sleeping(codec: Lossless, encoded: memoryview, out: memoryview) -> bool:
        is_fast = codec.is_fast(encoded)
        serving = fast if is_fast else small
        time.sleep(serving if len(out) == PAYLOAD_BYTES else trials[is_fast])
        return decode(codec, encoded, out)

    monkeypatch.setattr(Lossless, "decode", sleeping)
    monkeypatch.setattr(codec_cost, "SEEN_MIN", 3)


def test_it_changes_to_the_fast_coding_and_says_so_once(
    start: Start,
    decoded: list[bool],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    slow(monkeypatch, small=0.02, fast=0.0, trials=(0.0, 0.0))
    caplog.set_level("INFO")
    rig = start()
    assert watch_of(rig).is_fast, "until the disk proves slow"
    watch_of(rig).cost.is_fast = False
    for number in (1, 2, 3):
        put_all(rig, number)
    for number in (1, 2, 3, 1, 2, 3):
        assert check_read(rig, number) == 3
    assert set(decoded) == {False}
    assert watch_of(rig).is_fast
    for number in (4, 5, 6):
        put_all(rig, number)
    for number in (4, 1, 5, 2, 6, 3):
        assert check_read(rig, number) == 3
    assert set(decoded) == {False, True}
    said = [r.getMessage() for r in caplog.records if WRITES in r.getMessage()]
    assert len(said) == 1
    assert said[0].startswith("nvme.codec: lossless writes its fast coding from now on")


def test_it_is_said_once_where_even_the_fast_coding_is_later(
    start: Start, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    slow(monkeypatch, small=0.02, fast=0.02, trials=(0.0, 0.0))
    rig = start()
    for number in (1, 2, 3):
        put_all(rig, number)
    for number in (1, 2, 3, 1, 2, 3):
        assert check_read(rig, number) == 3
    for number in (4, 5, 6):
        put_all(rig, number)
    for number in (4, 5, 6, 4, 5, 6):
        assert check_read(rig, number) == 3
    said = [r.getMessage() for r in caplog.records if LATER in r.getMessage()]
    assert len(said) == 1


def test_the_trial_decodes_both_codings() -> None:
    coders = Coders(LOSSLESS, 1)
    small, fast = coders.try_codings(time.monotonic)
    assert (small.is_fast, fast.is_fast) == (False, True)
    assert small.encoded_bytes < fast.encoded_bytes < 0.76 * fast.num_bytes
    assert min(small.seconds, fast.seconds) > 0
    assert coders.close(10)
