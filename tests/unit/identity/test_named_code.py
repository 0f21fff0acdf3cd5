# SPDX-License-Identifier: Apache-2.0
"""Code that settings name counts by its content, also where the name stays."""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import LlamaConfig

from attnstore_vllm.identity.named_code import modules_of, named_code

CODE = """
from transformers import LlamaConfig


class Thing:
    factor = {n}

    def call(self):
        return {n}


class Configuration(LlamaConfig):
    pass


def thing(graph):
    return {n}
"""
Given = tuple[str, Callable[[Any], Any]]
SETTINGS: dict[str, Given] = {
    "worker": ("worker_cls", lambda _: "atk_named.Thing"),
    "extension": ("worker_extension_cls", lambda _: "atk_named.Thing"),
    "executor": ("distributed_executor_backend", lambda _: "atk_named.Thing"),
    "executor's class": ("distributed_executor_backend", lambda its: its.Thing),
    "backend": ("backend", lambda _: "atk_named.thing"),
    "pass": ("inductor_passes", lambda _: {"a": "atk_named.thing"}),
    "function": ("inductor_passes", lambda its: {"a": functools.partial(its.thing, 1)}),
    "object": ("inductor_compile_config", lambda its: {"a": [its.Thing()]}),
    "wrapped": ("inductor_compile_config", lambda its: {"a": SimpleNamespace(f=its.thing)}),
    "method": ("inductor_compile_config", lambda its: {"a": its.Thing().call}),
    "configuration": ("hf_config", lambda its: its.Configuration()),
    "part": ("hf_config", lambda its: LlamaConfig(text_config=its.Configuration())),
    "drafts": ("drafts", lambda its: its.Configuration()),
}


def config_of(**settings: Any) -> Any:
    hf_config = settings.pop("hf_config", LlamaConfig())
    draft = SimpleNamespace(hf_config=settings.pop("drafts", LlamaConfig()))
    plain = {"worker_cls": "auto", "worker_extension_cls": "", "backend": "inductor",
             "distributed_executor_backend": "uni", "inductor_passes": {},
             "inductor_compile_config": {"combo_kernels": True}}  # fmt: skip
    one = SimpleNamespace(**plain | settings)
    return SimpleNamespace(
        parallel_config=one,
        compilation_config=one,
        model_config=SimpleNamespace(hf_config=hf_config),
        speculative_config=SimpleNamespace(method="eagle", draft_model_config=draft),
    )


@pytest.mark.parametrize("which", SETTINGS)
def test_code_that_a_setting_names(
    which: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    field, give = SETTINGS[which]
    monkeypatch.syspath_prepend(str(tmp_path))
    found = []
    for number in (1, 2):
        (tmp_path / "atk_named.py").write_text(CODE.replace("{n}", str(number)))
        importlib.invalidate_caches()
        its = importlib.import_module("atk_named")
        found.append(named_code(config_of(**{field: give(its)})))
        assert found[-1] == named_code(config_of(**{field: give(its)}))
        del sys.modules["atk_named"]
    assert found[0] != found[1]


def test_two_classes_of_one_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "atk_named.py").write_text("class A: pass\nclass B: pass\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    its = importlib.import_module("atk_named")
    del sys.modules["atk_named"]
    one, other = (
        named_code(config_of(distributed_executor_backend=kind)) for kind in (its.A, its.B)
    )
    assert one != other


def test_a_plain_server_has_the_name_that_it_had() -> None:
    for settings in (
        {},
        {"worker_cls": "vllm.v1.worker.gpu_worker.Worker", "distributed_executor_backend": "mp"},
        {"inductor_passes": {"a": len}, "backend": "eager"},
    ):
        assert named_code(config_of(**settings)) == {}


def test_values_that_hold_themselves_end() -> None:
    ring: list[Any] = []
    ring.append(ring)
    one = SimpleNamespace(ring=ring)
    one.self = one
    assert {"types", "builtins"} == set(modules_of(one, set()))
