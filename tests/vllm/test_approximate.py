# SPDX-License-Identifier: Apache-2.0
"""An approximate codec on a real engine: what comes from the disk is near, and goes to those who
have asked for it alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from attnstore_lab.testing.tiny_model import TINY
from attnstore_vllm.config.settings import StoreConfig
from attnstore_vllm.connector.build import _codec
from attnstore_vllm.errors import ConfigError
from attnstore_vllm.identity.rank import KvFacts, KvPage, RankDescription
from attnstore_vllm.scheduler.report import report_of
from attnstore_vllm.transfer.geometry import Geometry
from tests.vllm.conftest import StartEngine
from tests.vllm.engine import CHUNK, Engine
from tests.vllm.host import EngineHost
from tests.vllm.prompts import random_tokens
from tests.vllm.test_truncation import plain_kv

LENGTH = 2 * CHUNK + 100
WHOLE = 2 * CHUNK
Kv = list[tuple[bytes, bytes]]


def asks(**hints: bool) -> dict[str, Any]:
    return {"kv_transfer_params": {"attnstore": {"report": True, **hints}}}


APPROXIMATE, EXACT = asks(approximate=True), asks(approximate=False)


@pytest.fixture(scope="module")
def engine(start_engine: StartEngine) -> EngineHost:
    return start_engine(codec="int8", shape=TINY)


def kv_of(engine: Engine, prompt: list[int], how: dict[str, Any]) -> tuple[Kv, dict[str, Any]]:
    """KV of the first whole chunks in HBM, and the report."""
    number = engine.submit(prompt, salt="one", max_tokens=3, extra_args=how)
    engine.wait_for(lambda: engine.request(number).num_output_tokens > 0, engine.step)
    state = engine.side.requests[engine.request(number).request_id]
    plain: list[Any] = engine.llm.collective_rpc(plain_kv, args=(engine.block_ids(number), WHOLE))
    report = dict(report_of(state))
    engine.finish(number)
    engine.settle()
    return plain[0], report


def numbers(raw: bytes) -> torch.Tensor:
    found = torch.frombuffer(bytearray(raw), dtype=torch.float32)
    return found.reshape(WHOLE, TINY.kv_heads, TINY.head_dim)


def from_disk(engine: Engine) -> dict[str, Any]:
    """The same prompt by each kind of request, from each place where it might be found."""
    prompt = random_tokens("approximate", LENGTH)
    found: dict[str, Any] = {"computed": kv_of(engine, prompt, APPROXIMATE)}
    found["exact beside it in HBM"] = kv_of(engine, prompt, EXACT)
    engine.forget_hbm()
    engine.evict_dram()
    found["exact, on the disk alone"] = kv_of(engine, prompt, {})
    engine.forget_hbm()
    engine.evict_dram()
    found["decoded"] = kv_of(engine, prompt, APPROXIMATE)
    found["exact beside what is decoded, in HBM"] = kv_of(engine, prompt, {})
    found["decoded, in HBM"] = kv_of(engine, prompt, APPROXIMATE)
    engine.forget_hbm()
    found["decoded, in DRAM"] = kv_of(engine, prompt, APPROXIMATE)
    engine.forget_hbm()
    found["exact, in DRAM"] = kv_of(engine, prompt, EXACT)
    engine.check_quiet()
    return found


def test_who_gets_what(engine: EngineHost) -> None:
    """Exact requests get exact KV, bit by bit, in all layers, wherever the other kind is."""
    found = engine.call(from_disk)
    exact, report = found["computed"]
    assert (report["computed_tokens"], report["approximate"]) == (LENGTH, None)
    for name in (" beside it in HBM", ", on the disk alone", " beside what is decoded, in HBM"):
        kv, report = found[f"exact{name}"]
        assert kv == exact, name
        assert report["approximate"] is None
        assert report["computed_tokens"] == LENGTH, "the disk has nothing for it, and vLLM neither"
    kv, report = found["exact, in DRAM"]
    assert kv == exact
    assert (report["dram_tokens"], report["approximate"]) == (WHOLE + 96, None)
    decoded, report = found["decoded"]
    assert report["nvme_tokens"] >= WHOLE
    assert report["approximate"] == "int8/1"
    for name, tier in ((", in HBM", "hbm_tokens"), (", in DRAM", "dram_tokens")):
        kv, report = found[f"decoded{name}"]
        assert kv == decoded
        assert report[tier] >= WHOLE
        assert report["approximate"] == "int8/1"


def test_what_is_decoded_is_near(engine: EngineHost) -> None:
    """In units of the largest number of a channel of K in its chunk, of a token and head of V."""
    found = engine.call(from_disk_once)
    for layer in range(TINY.layers):
        (k, v), (near_k, near_v) = ([*map(numbers, found[kind][layer])] for kind in (0, 1))
        assert not torch.equal(k, near_k)
        assert not torch.equal(v, near_v)
        k, near_k = (x.view(-1, CHUNK, TINY.kv_heads, TINY.head_dim) for x in (k, near_k))
        for was, now, axis in ((k, near_k, 1), (v, near_v, 2)):
            most = was.abs().amax(axis, keepdim=True)
            assert bool(((was - now).abs() <= most * 0.5 / 127 * 1.01 + was.abs() / 256).all())


def from_disk_once(engine: Engine) -> tuple[Kv, Kv]:
    prompt = random_tokens("near", LENGTH)
    exact, _ = kv_of(engine, prompt, APPROXIMATE)
    engine.forget_hbm()
    engine.evict_dram()
    return exact, kv_of(engine, prompt, APPROXIMATE)[0]


def moved(engine: Engine) -> tuple[Kv, Kv, dict[str, Any], int]:
    """A prompt without its first chunk: its KV decoded and then moved, and computed."""
    how = asks(approximate=True, truncation=True)
    prompt = random_tokens("moved", LENGTH + CHUNK)
    kv_of(engine, prompt, how)
    engine.forget_hbm()
    engine.evict_dram()
    cut = prompt[CHUNK:] + random_tokens("more", 50)
    served, report = kv_of(engine, cut, how)
    engine.forget_hbm()
    exact, again = kv_of(engine, cut, asks(truncation=True))
    return served, exact, report, int(again["computed_tokens"]) - len(cut)


def test_quantized_k_turns_after_decoding(engine: EngineHost) -> None:
    """In layer 0, which depends on token and position alone. And an exact request that takes moved
    KV finds none of it."""
    served, exact, report, found = engine.call(moved)
    assert report["moved_tokens"] >= WHOLE - 16
    assert report["nvme_tokens"] > 0
    assert report["approximate"] == "int8/1"
    assert found == 0
    most = report["moved_tokens"] // CHUNK * CHUNK
    for was, now in zip(exact[0], served[0], strict=True):
        size = numbers(was).abs().max()
        difference = (numbers(was) - numbers(now))[:most].abs().max()
        assert 0 < float(difference) < float(size) * 0.02


PAGE = KvPage(
    "bfloat16", 16, 2, 32, (0, 1024, 16, 0, 64, 32, 0, 1), (32, 1024, 16, 0, 64, 32, 0, 1)
)
FACTS = KvFacts("cpu", "bfloat16", (2, 16, 64), 4096, (0, 1, 2, 3), (1, 1, 1, 1), "", "", ())
RANK = RankDescription(FACTS, None, 4, True, None, None, PAGE)
SHAPE = Geometry.uniform(1, 2, 16, 4096, 256)


def settings(tmp_path: Path, codec: str, **nvme: str) -> StoreConfig:
    nvme |= {"path": str(tmp_path), "capacity": "1GiB", "codec": codec}
    return StoreConfig.parse({"dram": "1GiB", "nvme": nvme})


@pytest.mark.parametrize(
    ("rank", "geometry", "why"),
    [
        (replace(RANK, page=None, why_no_page="it keeps latents"), SHAPE, "it keeps latents"),
        (replace(RANK, page=None), SHAPE, "where K and V are"),
        (replace(RANK, page=replace(PAGE, num_heads=3)), SHAPE, "no pages of"),
        (RANK, Geometry.uniform(1, 2, 16, 8192, 256), "no pages of"),
    ],
)
def test_what_it_cannot_keep_is_refused_at_the_start(
    tmp_path: Path, rank: RankDescription, geometry: Geometry, why: str
) -> None:
    for codec in ("int8", "fp8"):
        with pytest.raises(ConfigError, match=f"nvme.codec is {codec}.*{why}.*lossless or none"):
            _codec(settings(tmp_path, codec), geometry, [rank])
    assert _codec(settings(tmp_path, "none"), geometry, [rank]) is None
    lossless = _codec(settings(tmp_path, "lossless"), geometry, [rank])
    assert lossless is not None and lossless.is_exact


def test_ranks_that_differ_are_refused(tmp_path: Path) -> None:
    other = replace(RANK, page=replace(PAGE, dtype="float16"))
    two = Geometry.uniform(2, 2, 16, 4096, 256)
    with pytest.raises(ConfigError, match="ranks differ"):
        _codec(settings(tmp_path, "int8"), two, [RANK, other])
    codec = _codec(settings(tmp_path, "int8"), two, [RANK, RANK])
    assert codec is not None and codec.room(two.slot_bytes, "bfloat16") < 0.6 * two.slot_bytes


def test_a_description_comes_through_the_pool_as_it_was() -> None:
    assert RankDescription.of_json(RANK.to_json()) == RANK


def test_for_all_needs_a_codec_that_changes_kv(tmp_path: Path) -> None:
    assert settings(tmp_path, "fp8", approximate="all").nvme.is_for_all
    for codec, who in (("lossless", "all"), ("none", "all"), ("int8", "nobody")):
        with pytest.raises(ConfigError, match=r"nvme\.approximate"):
            settings(tmp_path, codec, approximate=who)
