# SPDX-License-Identifier: Apache-2.0
"""What KV depends on and no name has: each of these fails, and was first seen to serve wrong KV in
a real engine."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from attnstore_lab.testing.tiny_model import TINY, make_model
from attnstore_vllm.identity import vllm_settings
from attnstore_vllm.identity.live_lora import LiveAdapters
from attnstore_vllm.identity.live_model import LiveWeights
from attnstore_vllm.identity.namespace import facts_of
from attnstore_vllm.identity.own_code import digest_of_package
from attnstore_vllm.types import Seen
from tests.vllm.test_namespace import GEOMETRY

pytest.importorskip("vllm")


class Rotary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3), requires_grad=False)
        self.register_buffer("cos_sin_cache", torch.zeros(3), persistent=False)
        self.variance_epsilon = 1e-6


def turn(model: Any) -> None:
    model.cos_sin_cache.fill_(1.0)


def hook(model: Any) -> None:
    model.register_forward_hook(lambda _, __, output: output + 1)


def number(model: Any) -> None:
    model.variance_epsilon = 1.0


@pytest.mark.parametrize("change", [turn, hook, number])
def test_an_update_of_what_is_no_weight(change: Any) -> None:
    """By apply_model() or collective_rpc(), with the reset that concepts.md asks for."""
    model = Rotary()
    live = LiveWeights(lambda: [model], lambda _: None)
    change(model)
    assert live.look() is not Seen.SAME


def test_an_adapter_that_is_written_in_place() -> None:
    """Also with the reset that concepts.md asks for, behind which the workers look."""
    adapter = SimpleNamespace(rank=8, loras={"q": SimpleNamespace(lora_b=torch.zeros(8))})
    held = Held(adapter)
    adapters = LiveAdapters([SimpleNamespace(list_adapters=lambda: {1: held})])
    before = adapters.tell([1])
    adapter.loras["q"].lora_b.fill_(1.0)
    adapters.look()
    assert adapters.tell([1]) != before


def test_the_slots_of_an_adapter_that_are_written_in_place() -> None:
    """They are of an adapter as long as it is active: what another leaves there is not its own."""
    held = Held(SimpleNamespace(rank=8))
    stack = (torch.zeros(2, 1, 4, 8), torch.zeros(2, 1, 4, 8))
    module = SimpleNamespace(lora_b_stacked=stack)
    slots: list[int | None] = [None, None]
    manager = SimpleNamespace(
        list_adapters=lambda: {1: held}, lora_index_to_id=slots, modules={"q": module}
    )
    adapters = LiveAdapters([manager])
    (loaded,) = adapters.tell([1]).values()

    def tell() -> bytes | None:
        adapters.look()
        return adapters.tell([1])[1]

    slots[1] = 1
    stack[1][1].fill_(1.0)
    assert adapters.tell([1])[1] == loaded == tell(), "vLLM has activated it"
    stack[1][0].fill_(3.0)
    assert tell() == loaded, "another's slot"
    stack[1][1, 0, 3, 7] = 2.0
    assert adapters.tell([1])[1] == loaded, "no step digests adapters without a look"
    written = tell()
    assert written != loaded and written == tell()
    slots[1] = None
    assert tell() == loaded, "what is written is gone"
    slots[0], stack[1][0, ...] = 1, 1.0
    assert tell() == loaded


class Held:
    """Of which there are weak references."""

    def __init__(self, adapter: Any) -> None:
        self.adapter = adapter


def test_numbers_beside_own_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "steers"
    package.mkdir()
    (package / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    found = set()
    for text in (b"one", b"two"):
        (package / "steer.pt").write_bytes(text)
        found.add(digest_of_package("steers", with_imports=True))
    assert len(found) == 2


def told(**settings: Any) -> str:
    from vllm.engine.arg_utils import EngineArgs

    config = EngineArgs(**settings).create_engine_config()
    return json.dumps(facts_of(config, GEOMETRY, [], "x"), sort_keys=True)


def test_the_code_of_a_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """--worker-cls is in by its name alone."""
    model = make_model(tmp_path / "model", TINY)
    monkeypatch.syspath_prepend(str(tmp_path))
    found = set()
    for factor in (1, 2):
        (tmp_path / "atk_worker.py").write_text(
            "from vllm.v1.worker.cpu_worker import CPUWorker\n"
            f"class W(CPUWorker):\n    f = {factor}"
        )
        importlib.invalidate_caches()
        sys.modules.pop("atk_worker", None)
        importlib.import_module("atk_worker")
        found.add(told(model=str(model), worker_cls="atk_worker.W"))
    assert len(found) == 2


def test_the_code_of_a_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a class computes is not in to_dict(); `auto_map` may name another directory's."""
    model, code = make_model(tmp_path / "model", TINY), tmp_path / "code"
    code.mkdir()
    settings = json.loads((model / "config.json").read_text())
    settings |= {"model_type": "atk", "auto_map": {"AutoConfig": f"{code}--configuration_atk.Atk"}}
    (model / "config.json").write_text(json.dumps(settings))
    found = set()
    for eps in ("1e-5", "20.0"):
        (code / "configuration_atk.py").write_text(
            "from transformers import LlamaConfig\nclass Atk(LlamaConfig):\n"
            "    model_type = 'atk'\n    def __getattribute__(self, name):\n"
            f"        own = super().__getattribute__(name)\n"
            f"        return {eps} if name == 'rms_norm_eps' else own\n"
        )
        found.add(told(model=str(model), trust_remote_code=True))
    assert len(found) == 2


def test_what_an_installed_plugin_imports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its version does not tell the code of an editable package that it imports."""
    site = tmp_path / "site"
    info = site / "atkplug-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: atkplug\nVersion: 1.0\n")
    (info / "RECORD").write_text("atkplug.py,,\n")
    (info / "entry_points.txt").write_text("[vllm.general_plugins]\natkplug = atkplug:register\n")
    (site / "atkplug.py").write_text("import atksteer\ndef register(): ...\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.syspath_prepend(str(site))
    found = set()
    for factor in (1, 2):
        (tmp_path / "atksteer.py").write_text(f"FACTOR = {factor}\n")
        found.add(tuple(vllm_settings.plugins()))
    assert any("atkplug" in each for some in found for each in some)
    assert len(found) == 2
