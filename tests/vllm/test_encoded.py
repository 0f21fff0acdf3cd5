# SPDX-License-Identifier: Apache-2.0
"""DRAM with a codec on a real engine: the same KV as without, after a restart, and moved.

tests/vllm/test_bytes.py compares every byte of it, from DRAM and from NVMe.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace as Obj
from typing import Any, NamedTuple

import pytest

from attnstore_lab.testing.tiny_model import TINY
from attnstore_vllm.config.settings import StoreConfig
from attnstore_vllm.connector.build import _encodes
from attnstore_vllm.connector.groups import is_bfloat16
from attnstore_vllm.errors import ConfigError
from tests.vllm.conftest import StartEngine
from tests.vllm.engine import Engine
from tests.vllm.prompts import random_tokens
from tests.vllm.test_truncation import ASKS, plain_kv

LENGTH = 1000
ENCODED: dict[str, Any] = {"dram": {"size": "24MiB", "codec": "lossless"}}
RAW: dict[str, Any] = {"dram": "24MiB"}


class Found(NamedTuple):
    tokens: tuple[int, ...]
    kv: list[tuple[bytes, bytes]]
    loaded: dict[str, int]
    moved: int
    slots: int
    slot_bytes: int


def ask(engine: Engine, prompt: list[int], **how: Any) -> Found:
    """The answer, and K and V of all tokens of the prompt when the first of it was said."""
    engine.loaded()
    before = engine.metric("moved_tokens", "dram")
    number = engine.submit(prompt, max_tokens=8, salt="one", **how)
    engine.wait_for(lambda: engine.request(number).num_output_tokens > 0, engine.step)
    blocks = engine.block_ids(number)
    (kv,) = engine.llm.collective_rpc(plain_kv, args=(blocks, len(prompt)))
    (answer,) = engine.finish(number)
    engine.settle()
    moved = int(engine.metric("moved_tokens", "dram") - before)
    num_slots = engine.store.residency.dram.num_slots
    slot_bytes = int(engine.store.gauges()["capacity_bytes", "dram"]) // num_slots
    return Found(answer.tokens, kv, engine.loaded(), moved, num_slots, slot_bytes)


def computed_and_cut(engine: Engine, seed: str) -> tuple[Found, Found]:
    """A prompt, and what is left of it when its beginning and a middle are cut."""
    prompt = random_tokens(seed, LENGTH)
    first = ask(engine, prompt, extra_args=ASKS)
    engine.forget_hbm()
    cut = prompt[130:400] + prompt[550:] + random_tokens((seed, "more"), 40)
    second = ask(engine, cut, extra_args=ASKS)
    engine.check_quiet()
    return first, second


def found_again(engine: Engine, seed: str) -> Found:
    found = ask(engine, random_tokens(seed, LENGTH))
    engine.check_quiet()
    return found


def test_the_same_kv_as_without_a_codec(start_engine: StartEngine, tmp_path: Path) -> None:
    """Moved, whose source is decoded first; and after a restart, by the same settings alone."""
    store = tmp_path / "store"
    first, cut = start_engine(settings=ENCODED, store=store, shape=TINY).call(
        computed_and_cut, "one"
    )
    again = start_engine(settings=ENCODED, store=store, shape=TINY).call(found_again, "one")
    plain = start_engine(settings=RAW, store=store, shape=TINY)
    plain_first, plain_cut = plain.call(computed_and_cut, "one")

    assert first.slot_bytes <= 0.76 * plain_first.slot_bytes
    assert first.slots >= 1.3 * plain_first.slots
    assert (first.tokens, first.kv) == (plain_first.tokens, plain_first.kv)
    assert first.loaded == {"dram": 0, "nvme": 0}
    assert cut.moved == plain_cut.moved > 500
    assert (cut.tokens, cut.kv) == (plain_cut.tokens, plain_cut.kv)
    assert again.loaded["nvme"] >= LENGTH - 16
    assert (again.tokens, again.kv) == (first.tokens, first.kv)
    assert plain_first.loaded == {"dram": 0, "nvme": 0}, "another namespace"


def kv_of(*dtypes: str) -> Any:
    import torch

    specs = [Obj(kv_cache_spec=Obj(dtype=getattr(torch, name))) for name in dtypes]
    return Obj(kv_cache_groups=specs)


def test_only_bfloat16_is_encoded_and_not_on_every_device() -> None:
    assert is_bfloat16(kv_of("bfloat16")) and is_bfloat16(kv_of("bfloat16", "bfloat16"))
    for dtypes in (("float8_e4m3fn",), ("uint8",), ("float16",), ("bfloat16", "float32")):
        assert not is_bfloat16(kv_of(*dtypes))
    nvme = {"path": "/mnt/kv", "capacity": "2TiB"}
    config = StoreConfig.parse({**ENCODED, "nvme": nvme})
    cpu, cuda, xpu = (Obj(device_config=Obj(device_type=name)) for name in ("cpu", "cuda", "xpu"))
    assert _encodes(cpu, kv_of("bfloat16"), config) and _encodes(cuda, kv_of("bfloat16"), config)
    assert not _encodes(cpu, kv_of("uint8"), config)
    assert not _encodes(cuda, kv_of("bfloat16"), StoreConfig.parse({**RAW, "nvme": nvme}))
    with pytest.raises(ConfigError, match=r"KV is on a device of type xpu.*Set codec: none"):
        _encodes(xpu, kv_of("bfloat16"), config)
