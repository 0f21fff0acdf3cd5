# SPDX-License-Identifier: Apache-2.0
"""Settings and facts reach the store and the scheduler side in two objects; each is described once,
where its field is."""

from __future__ import annotations

import ast
import inspect
from dataclasses import fields
from pathlib import Path

import pytest

from attnstore_vllm.config import settings, shared
from attnstore_vllm.config.settings import NvmeConfig, StoreConfig, TraceConfig, TruncationConfig
from attnstore_vllm.config.texts import SETTINGS
from attnstore_vllm.engine_facts import EngineFacts
from attnstore_vllm.scheduler.scheduler import Scheduler
from attnstore_vllm.store.store import Store

PACKAGE = Path(__file__).parents[2] / "attnstore_vllm"
PARAMETERS_MAX = 9
TEXT_WORDS_MAX = 13
"""A field says what its type adds, as that None is auto; the rest is in config/texts.py."""


@pytest.mark.parametrize("side", [Scheduler, Store])
def test_it_takes_two_objects(side: type) -> None:
    taken = inspect.signature(side).parameters
    assert len(taken) <= PARAMETERS_MAX
    assert {"config", "engine"} <= taken.keys()
    described = {f.name for kind in (StoreConfig, EngineFacts) for f in fields(kind)}
    assert not described & taken.keys()


def test_no_fact_is_described_twice() -> None:
    kinds = (StoreConfig, NvmeConfig, TruncationConfig, TraceConfig)
    names = [f.name for f in fields(EngineFacts)]
    assert not set(names) & {f.name for kind in kinds for f in fields(kind)}


@pytest.mark.parametrize("module", [settings, shared])
def test_a_setting_has_one_text(module: object) -> None:
    path = Path(inspect.getfile(module))  # type: ignore[arg-type]
    named = {setting.key.rpartition(".")[2] for setting in SETTINGS}
    for kind in ast.parse(path.read_text(encoding="utf-8")).body:
        if not isinstance(kind, ast.ClassDef):
            continue
        for field, text in zip(kind.body, kind.body[1:], strict=False):
            match field, text:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(ast.Constant(str(words))):
                    if name in named:
                        assert len(words.split()) <= TEXT_WORDS_MAX, f"{path.name}:{text.lineno}"


def test_no_fact_is_forgotten() -> None:
    """One that is left out would be that of a plain engine."""
    tree = ast.parse((PACKAGE / "connector" / "facts.py").read_text(encoding="utf-8"))
    (call,) = (
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "EngineFacts"
    )
    assert {keyword.arg for keyword in call.keywords} == {f.name for f in fields(EngineFacts)}
