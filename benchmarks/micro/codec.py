# SPDX-License-Identifier: Apache-2.0
"""The codecs: how small KV becomes, and how fast.

    python -m benchmarks.micro.codec [--model DIR] [--rounds 15] [--no-models] [--json]

Sizes: KV of random models of 8 and 24 layers, and with --model of one that benchmarks.quality
has trained. transformers computes it for 4,000 tokens, of a text where there is one. It stands as
in a slot of the store: by layer and block of 128 tokens, K before V, in bf16.

Speeds: raw bytes by processor time of one thread, the median of the rounds, on 32 MiB of KV and
of numbers around zero. `channels`: 128 of them, with scales from 2^-4 to 2^4. `fast`: by the fast
coding. int8 and fp8: the same as pages of 8 heads of 128 dims. `in cells`, `as they are`: pages of
64 KiB by the copiers of a worker, with dram.codec and without; `largest` is the largest page over
its bytes. A round reads and writes other memory first, so that caches are cold.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import AutoModelForCausalLM

from attnstore_lab.bench.summary import table
from attnstore_lab.testing.tiny_model import MEDIUM, SMALL, make_model
from attnstore_vllm._native import (
    EncodedCopier,
    PageCopier,
    PageShape,
    lossless_bound,
    lossless_decode,
    lossless_encode,
)
from attnstore_vllm.io.codec import CODECS, PayloadShape, Quantized
from attnstore_vllm.transfer.geometry import Geometry
from benchmarks.quality import data
from benchmarks.report import machine

TOKENS, BLOCK_TOKENS = 4_000, 128
SPEED_BYTES = 32 << 20
COLD_BYTES = 96 << 20
PAGE_BYTES = 64 << 10
GROUP, WINDOW = 256, 7


def kv_of(directory: Path, tokens: list[int]) -> bytes:
    """KV of the tokens' whole blocks."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16)
    with torch.inference_mode():
        cache = model(torch.tensor([tokens]), use_cache=True).past_key_values
    pages = []
    for layer in cache.layers:
        for start in range(0, len(tokens) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
            for kv in (layer.keys, layer.values):
                block = kv[0, :, start : start + BLOCK_TOKENS].contiguous()
                pages.append(block.view(torch.int16).numpy().tobytes())
    return b"".join(pages)


def all_kv(trained: Path | None) -> dict[str, bytes]:
    random = np.random.default_rng(3)
    found = {}
    with TemporaryDirectory() as work:
        for shape in (SMALL, MEDIUM):
            directory = make_model(Path(work) / f"{shape.layers}", shape)
            tokens = random.integers(20, shape.vocab, TOKENS).tolist()
            found[f"random model, {shape.layers} layers"] = kv_of(directory, tokens)
    if trained is not None:
        text = next(iter(data.load_held_out(trained).values()))[:TOKENS].tolist()
        window = json.loads((trained / "config.json").read_text())["max_position_embeddings"]
        parts = [text[at : at + window] for at in range(0, len(text) - window + 1, window)]
        found["trained model"] = b"".join(kv_of(trained, part) for part in parts)
    return found


def encoded(raw: bytes, fast: bool) -> bytes:
    out = bytearray(lossless_bound(len(raw)))
    size = lossless_encode(raw, out, fast)
    back = bytearray(len(raw))
    assert lossless_decode(memoryview(out)[:size], back)
    assert back == raw
    return bytes(out[:size])


def gigabytes_per_second(work: Callable[[], object], num_bytes: int, rounds: int) -> float:
    cold = np.zeros(COLD_BYTES, np.uint8)
    seconds = []
    for _ in range(rounds):
        cold += 1
        started = time.thread_time()
        work()
        seconds.append(time.thread_time() - started)
    return num_bytes / statistics.median(seconds) / 1e9


def speeds(raw: bytes, rounds: int, fast: bool) -> dict[str, float]:
    """Of encoding and decoding; memory is written to once before."""
    room, back = bytearray(lossless_bound(len(raw))), bytearray(len(raw))
    made = encoded(raw, fast)
    return {
        "size": len(made) / len(raw),
        "encode": gigabytes_per_second(lambda: lossless_encode(raw, room, fast), len(raw), rounds),
        "decode": gigabytes_per_second(lambda: lossless_decode(made, back), len(raw), rounds),
    }


def samples() -> dict[str, bytes]:
    """Numbers around zero in each type, and noise."""
    normal = np.random.default_rng(1).standard_normal(SPEED_BYTES // 2, np.float32)
    types = {
        "bf16": torch.bfloat16,
        "fp16": torch.float16,
        "fp8 e4m3": torch.float8_e4m3fn,
        "fp8 e5m2": torch.float8_e5m2,
        "fp32": torch.float32,
    }
    found = {
        f"normal, {name}": torch.from_numpy(normal[: SPEED_BYTES // dtype.itemsize])
        .to(dtype)
        .view(torch.uint8)
        .numpy()
        .tobytes()
        for name, dtype in types.items()
    }
    scales = np.exp2(np.arange(128) * 7 % 9 - 4).astype(np.float32)
    channels = torch.from_numpy((normal.reshape(-1, 128) * scales).reshape(-1)).to(torch.bfloat16)
    found["channels, bf16"] = channels.view(torch.uint8).numpy().tobytes()
    return found | {"noise": np.random.default_rng(2).bytes(SPEED_BYTES)}


def approximate(raw: bytes, rounds: int) -> dict[str, dict[str, float]]:
    """int8 and fp8, of bf16 numbers; without checksums, as speeds()."""
    heads, dim, tokens, block = 8, 128, 256, 16
    sides = [(at, 2 * dim * block, block, 0, 2 * dim, dim, 0, 1) for at in (0, dim)]
    units = len(raw) // (4 * heads * dim * tokens)
    shape = PayloadShape("bfloat16", units, tokens // block, block, heads, dim, sides[0], sides[1])
    room, back = memoryview(bytearray(len(raw))), memoryview(bytearray(len(raw)))
    payload, rows = memoryview(raw), {}
    for name in ("int8", "fp8"):
        plain = CODECS[name]
        assert isinstance(plain, Quantized)
        codec = plain.of(shape)
        size = codec.pack(payload, room, tokens)
        made = memoryview(bytes(room[:size]))
        rows[f"{name}, normal, bf16"] = {
            "size": size / len(raw),
            "encode": gigabytes_per_second(
                partial(codec.pack, payload, room, tokens), len(raw), rounds
            ),
            "decode": gigabytes_per_second(partial(codec.unpack, made, back), len(raw), rounds),
        }
    return rows


def page_sizes(raw: bytes) -> npt.NDArray[np.float64]:
    """Bytes of each encoded page over its own, by csrc/codec/page_codec.h."""
    numbers = np.frombuffer(raw, np.uint16)[: len(raw) // PAGE_BYTES * PAGE_BYTES // 2]
    exponents = (numbers >> 7 & 255).reshape(-1, GROUP).astype(np.int64)
    counts = np.zeros((len(exponents), 256), np.int64)
    np.add.at(counts, (np.arange(len(exponents))[:, None], exponents), 1)
    ends = np.pad(np.cumsum(counts, axis=1), ((0, 0), (1, 0)))
    escapes = GROUP - (ends[:, WINDOW:] - ends[:, :-WINDOW]).max(axis=1)
    fixed = GROUP + GROUP * 3 // 8 + 2
    pages = (fixed + escapes).reshape(-1, PAGE_BYTES // 2 // GROUP).sum(axis=1)
    return np.asarray(pages / PAGE_BYTES)


def in_cells(raw: bytes, rounds: int) -> dict[str, dict[str, float]]:
    """A worker's copies of pages to slots and back, on one thread."""
    count = len(raw) // PAGE_BYTES
    hbm = np.frombuffer(raw, np.uint8)[: count * PAGE_BYTES].copy()
    before = hbm.copy()
    copies = np.stack([np.zeros(count), np.arange(count), np.arange(count)], axis=1).astype(int)
    rows = {}
    for name, is_encoded in (("in cells", True), ("as they are", False)):
        one = Geometry.uniform(1, 1, 1, PAGE_BYTES, 1)
        (cell,) = replace(one, is_encoded=is_encoded).cells
        slots = np.zeros(count * cell, np.uint8)
        shape = PageShape(
            slots_base=slots.ctypes.data,
            num_slots=1,
            slot_bytes=slots.nbytes,
            layer_bytes=hbm.nbytes,
            page_bytes=PAGE_BYTES,
            layer_bases=[hbm.ctypes.data],
            num_blocks=count,
            block_stride=PAGE_BYTES,
            run_offsets=[0],
            run_bytes=PAGE_BYTES,
        )
        copier = EncodedCopier(shape, cell) if is_encoded else PageCopier(shape)
        if copier.save(copies, 0, 1):
            continue  # some do not fit
        hbm[:] = 0
        copier.load(copies, 0, 1)
        assert np.array_equal(hbm, before)
        sizes = page_sizes(raw) if is_encoded else np.ones(1)
        rows[name] = {
            "size": float(sizes.mean()),
            "largest": float(sizes.max()),
            "encode": gigabytes_per_second(partial(copier.save, copies, 0, 1), hbm.nbytes, rounds),
            "decode": gigabytes_per_second(partial(copier.load, copies, 0, 1), hbm.nbytes, rounds),
        }
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path)
    parser.add_argument("--no-models", action="store_true", help="numbers around zero alone")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows: dict[str, dict[str, Any]] = {}
    numbers = samples()
    for name, raw in (numbers if args.no_models else all_kv(args.model) | numbers).items():
        for fast in (False, True):
            size = len(encoded(raw, fast)) / len(raw)
            row = speeds(raw[:SPEED_BYTES], args.rounds, fast) | {"size": size}
            rows[f"{name}, fast" if fast else name] = row
        of_pages = in_cells(raw[:SPEED_BYTES], args.rounds)
        rows |= {f"{name}, {how}": row for how, row in of_pages.items()}
    rows |= approximate(numbers["normal, bf16"], args.rounds)
    if args.json:
        print(json.dumps({"machine": machine(), "rows": rows}, indent=2))
        return
    print(machine())
    columns = ["", "size over raw", "largest", "encode GB/s", "decode GB/s"]
    kinds = ("size", "largest", "encode", "decode")
    told = [[n, *(f"{r[k]:.3f}" if k in r else "" for k in kinds)] for n, r in rows.items()]
    print(table([columns, *told]))


if __name__ == "__main__":
    main()
