# SPDX-License-Identifier: Apache-2.0
"""KV is found by the weights that computed it: copied, changed, updated under a running server."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from attnstore_lab.testing.tiny_model import TINY, make_model
from attnstore_vllm.identity.weight_files import Digest, Memo, WeightFile
from attnstore_vllm.identity.weights import Weights
from tests.vllm.conftest import StartEngine
from tests.vllm.engine import CHUNK, Answer, Engine
from tests.vllm.prompts import random_tokens

LENGTH = 2 * CHUNK + 1
ALL = LENGTH - 1
Story = Mapping[str, Any]


def ask(engine: Engine, seed: str, **options: Any) -> tuple[int, Answer]:
    """(tokens loaded, answer)"""
    engine.forget_hbm()
    engine.loaded()
    answer = engine.ask(random_tokens(seed, LENGTH), max_tokens=5, **options)
    return sum(engine.loaded().values()), answer


def first(engine: Engine) -> tuple[int, Answer]:
    found = ask(engine, "first")
    engine.settle()
    return found


def scale(worker: Any, factor: float) -> None:
    """What a trainer does that knows vLLM's workers: no hook tells of it."""
    weight = worker.model_runner.model.model.embed_tokens.weight
    rows = torch.arange(0, len(weight), 2)  # all rows alike would be undone by the norms
    weight.data[rows] *= factor


def reload_from(worker: Any, directory: str) -> None:
    worker.model_runner.reload_weights(weights_path=directory)


def unknown_for_a_while(engine: Engine, model: Path) -> list[tuple[int, int]]:
    """A start that has no time to read the weights: (loaded, saved) before and after it knows."""
    weights, seen = engine.side.names, []
    assert isinstance(weights, Weights)
    assert isinstance(weights._digest, Digest)
    engine.side.namespace, known = None, weights._digest
    file = WeightFile(model / "model.safetensors", "model.safetensors")
    slow = weights._digest = Digest([file], Memo(Path("/nowhere")), budget_s=0, bytes_per_s=1 << 10)
    for _ in range(2):
        saved = engine.store.figures().counts.get("saved", 0)
        loaded, _answer = ask(engine, "first")
        ask(engine, "new")
        engine.settle()
        seen.append((loaded, engine.store.figures().counts.get("saved", 0) - saved))
        weights._digest = known
    slow.close()
    return seen


def second(engine: Engine, model: Path, other: Path) -> Story:
    seen: dict[str, Any] = {"copied": ask(engine, "first")}
    seen["unknown"] = unknown_for_a_while(engine, model)
    seen["plain reset"] = ask(engine, "first")
    engine.settle()
    engine.llm.collective_rpc(scale, args=(2.0,))
    seen["updated"] = ask(engine, "first")
    seen["updated, computed"] = ask(engine, "first", salt="alone")
    seen["updated, again"] = ask(engine, "first")
    ask(engine, "after the update")
    engine.settle()
    engine.llm.collective_rpc(reload_from, args=(str(other),))
    seen["reloaded"] = ask(engine, "first")
    engine.settle()
    return seen


def third(engine: Engine) -> Story:
    seen = {name: ask(engine, name) for name in ("first", "after the update")}
    seen["again"] = ask(engine, "first")
    engine.settle()
    return seen


def flipped(model: Path, at: float) -> Path:
    """One bit of one weight, with the file's size and time as before; at a part of the file."""
    file = model / "model.safetensors"
    before = file.stat()
    with file.open("r+b") as stream:
        stream.seek(int(before.st_size * at))
        byte = stream.read(1)
        stream.seek(-1, os.SEEK_CUR)
        stream.write(bytes([byte[0] ^ 0x40]))
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    return file


@pytest.fixture(scope="module")
def story(start_engine: StartEngine, tmp_path_factory: pytest.TempPathFactory) -> Story:
    """Four servers on one store."""
    directory = tmp_path_factory.mktemp("weights")
    one = make_model(directory / "one", TINY)
    copy = shutil.copytree(one, directory / "copy", copy_function=shutil.copy)
    other = shutil.copytree(one, directory / "other")
    flipped(other, 0.5)
    seen: dict[str, Any] = {"paths": (one, copy, other)}

    def run(model: Path, function: Callable[..., Any], *arguments: Any) -> Any:
        host = start_engine(store=directory / "store", vllm={"model": str(model)})
        return host.call(function, *arguments)

    seen["first"] = run(one, first)
    seen["second"] = run(copy, second, copy, other)
    seen["third"] = run(one, third)
    flipped(one, 0.7)
    seen["fourth"] = run(one, first)
    return seen


def test_a_copy_with_other_times_is_warm(story: Story) -> None:
    loaded, answer = story["second"]["copied"]
    assert story["first"][0] == 0
    assert loaded == ALL
    assert answer.content == story["first"][1].content


def test_nothing_is_used_or_left_before_the_weights_are_known(story: Story) -> None:
    before, after = story["second"]["unknown"]
    assert before == (0, 0)
    assert after[0] == ALL and after[1] > 0


def test_a_plain_reset_keeps_the_store(story: Story) -> None:
    assert story["second"]["plain reset"][0] == ALL


def test_an_update_is_seen_at_the_reset(story: Story) -> None:
    seen = story["second"]
    assert seen["updated"][0] == 0
    assert seen["updated"][1].content == seen["updated, computed"][1].content
    assert seen["updated"][1].content != seen["copied"][1].content, "it is to change the answer"
    assert seen["updated, again"][0] == ALL, "what the new weights computed is used"
    assert seen["reloaded"][0] == 0


def test_an_update_leaves_nothing_for_the_next_start(story: Story) -> None:
    assert [story["third"][name][0] for name in ("first", "after the update")] == [0, 0]
    assert story["third"]["first"][1].content == story["first"][1].content
    assert story["third"]["again"][0] == ALL


def test_one_bit_of_one_weight_is_another_model(story: Story) -> None:
    """With the same name, size and time; the third server's KV is under its path."""
    assert story["fourth"][0] == 0
