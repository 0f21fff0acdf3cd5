# SPDX-License-Identifier: Apache-2.0
"""Files of weights whose order counts: of a tensor that is in two the last one loaded does."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from attnstore_lab.testing.tiny_model import TINY, make_model
from attnstore_vllm.identity.weights import check_order, places_of
from tests.vllm.test_weight_names import SHARDS, config, name


def in_order(names: list[str], place: Path) -> list[str]:
    return names


def sorted_by(real: Callable[[Path], list[str]], step: int, place: Path) -> list[str]:
    return sorted(real(place))[::step]


def test_pickled_files_count_by_their_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM loads them as the directory gives them. Of a tensor in two the last one counts."""
    files = [tmp_path / name for name in ("a.bin", "b.bin", "c.safetensors")]
    orders = [["b.bin", "c.safetensors", "a.bin"], ["a.bin", "b.bin", "c.safetensors"]]
    found = []
    for order in orders:
        monkeypatch.setattr(os, "listdir", partial(in_order, order))
        found.append(places_of(files))
    assert found == [{files[1]: 0, files[0]: 1}, {files[0]: 0, files[1]: 1}]
    assert places_of(files[1:]) == {}, "one alone has no order"
    monkeypatch.undo()
    model = make_model(tmp_path / "model", TINY)
    for name_ in ("pytorch_model.bin", "pytorch_model_ema.bin"):
        shutil.copy(model / "model.safetensors", model / name_)
        (model / name_).write_bytes((model / name_).read_bytes() + name_.encode())
    (model / "model.safetensors").unlink()
    made, names = config(model), []
    real = os.listdir
    for step in (1, -1):
        monkeypatch.setattr(os, "listdir", partial(sorted_by, real, step))
        names.append(name(made, tmp_path / "store"))
    assert names[0][0] != names[1][0]
    assert names[0][1] != names[1][1]


@pytest.mark.parametrize(
    ("names", "is_refused"),
    [
        (SHARDS, True),
        ((*SHARDS, "model.safetensors.index.json"), False),
        (SHARDS[:1], False),
        (("a.bin", "b.bin", "pytorch_model.bin.index.json"), True),
        (("a.bin",), False),
    ],
)
def test_threads_load_in_any_order(names: tuple[str, ...], is_refused: bool) -> None:
    files = [Path("model") / name for name in names]
    check_order(files, {"num_threads": 8})
    check_order(files, None)
    if not is_refused:
        check_order(files, {"enable_multithread_load": True})
        return
    with pytest.raises(ValueError, match="enable_multithread_load"):
        check_order(files, {"enable_multithread_load": True})
