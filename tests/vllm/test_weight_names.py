# SPDX-License-Identifier: Apache-2.0
"""Which files are the weights: at least all that vLLM's own loader takes, wherever they are."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from attnstore_vllm import plugin
from attnstore_vllm.connector.weights import (
    Weights,
    _directory,
    _parts,
    identify,
    own_files,
    weight_files,
)
from attnstore_vllm.testing.tiny_model import TINY, make_model
from attnstore_vllm.weight_files import Digest

SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
SETS = {
    "sharded": SHARDS,
    "consolidated": ("consolidated.safetensors",),
    "bin": ("pytorch_model.bin", "training_args.bin"),
    "pt": ("model.pt",),
    "index": ("model.safetensors.index.json",),
}
FORMATS = ("auto", "hf", "safetensors", "fastsafetensors", "mistral", "npcache", "pt")


def fill(directory: Path, names: tuple[str, ...]) -> None:
    for name in names:
        content = b"weights of " + name.encode()
        if name.endswith("index.json"):
            content = json.dumps({"weight_map": {str(i): f for i, f in enumerate(SHARDS)}}).encode()
        (directory / name).write_bytes(content)


@pytest.mark.parametrize("load_format", FORMATS)
def test_all_that_vllm_loads(tmp_path: Path, load_format: str) -> None:
    """In a directory with any of these sets of files, beside each other."""
    from vllm.config.load import LoadConfig
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

    loader = DefaultModelLoader(LoadConfig(load_format=load_format))
    num_loaded = 0
    for count in range(1, len(SETS) + 1):
        for chosen in itertools.combinations(SETS, count):
            directory = tmp_path / "-".join(chosen)
            directory.mkdir()
            (directory / "original").mkdir()
            fill(directory / "original", ("consolidated.00.pth",))
            for name in chosen:
                fill(directory, SETS[name])
            try:
                _, loaded, _, _ = loader._prepare_weights(str(directory), None, None, True, None)
            except (RuntimeError, FileNotFoundError):
                continue  # vLLM does not start
            ours = {str(file) for file in weight_files(directory, load_format)}
            assert set(loaded) <= ours, (load_format, chosen)
            num_loaded += 1
    assert num_loaded >= 8


def test_files_that_are_not_loaded_do_not_count(tmp_path: Path) -> None:
    fill(tmp_path, SHARDS)
    before = weight_files(tmp_path, "auto")
    fill(tmp_path, ("pytorch_model.bin", "model.pt", "README.md"))
    (tmp_path / "original").mkdir()
    fill(tmp_path / "original", ("consolidated.safetensors",))
    assert weight_files(tmp_path, "auto") == before


def test_how_it_is_quantized_counts(tmp_path: Path) -> None:
    fill(tmp_path, (*SHARDS, "quantize_config.json", "hf_quant_config.json", "config.json"))
    names = {file.name for file in weight_files(tmp_path, "auto")}
    assert names == {*SHARDS, "quantize_config.json", "hf_quant_config.json"}


def test_a_gguf_of_several_parts(tmp_path: Path) -> None:
    for name in ("a-00001-of-00002.gguf", "a-00002-of-00002.gguf", "b-00001-of-00002.gguf"):
        (tmp_path / name).touch()
    found = [file.name for file in _parts(tmp_path / "a-00001-of-00002.gguf")]
    assert found == ["a-00001-of-00002.gguf", "a-00002-of-00002.gguf"]
    assert _parts(tmp_path / "one.gguf") == [tmp_path / "one.gguf"]


def make_hub(cache: Path, commit: str = "c" * 40) -> Path:
    """A model as the hub's client leaves it: links into blobs."""
    model = cache / "models--org--model"
    snapshot = model / "snapshots" / commit
    for directory in (snapshot, model / "blobs", model / "refs"):
        directory.mkdir(parents=True, exist_ok=True)
    (model / "refs" / "main").write_text(commit)
    for number, name in enumerate(SHARDS):
        (model / "blobs" / f"{number}").write_text(name)
        (snapshot / name).symlink_to(Path("../../blobs") / f"{number}")
    return snapshot


def test_a_model_of_the_hub(tmp_path: Path) -> None:
    """With --download-dir there may be no config.json beside the weights."""
    snapshot = make_hub(tmp_path)
    assert _directory("org/model", None, str(tmp_path)) == snapshot
    assert _directory("org/model", "c" * 40, str(tmp_path)) == snapshot
    with pytest.raises((OSError, ValueError)):
        _directory("org/other", None, str(tmp_path))
    assert [file.name for file in weight_files(snapshot, "auto")] == list(SHARDS)


# ---- the whole, from vLLM's configuration ---------------------------------------------------


def config(model: Path, **options: Any) -> Any:
    from vllm.engine.arg_utils import EngineArgs

    made = EngineArgs(model=str(model), max_model_len=256, **options).create_engine_config()
    plugin._note_start()
    return made


def name(vllm_config: Any, store: Path, *reasons: str | None) -> tuple[str, bytes]:
    store.mkdir(exist_ok=True)
    look, digest = identify(vllm_config, reasons or (None,), store)
    if isinstance(digest, Digest):
        assert digest.wait(30) and digest.value is not None
        digest.close()
        return look, digest.value
    return look, digest


def test_by_content_whatever_the_path(tmp_path: Path) -> None:
    one = make_model(tmp_path / "one", TINY)
    copy = shutil.copytree(one, tmp_path / "copy", copy_function=shutil.copy)
    (copy / "model.safetensors").rename(copy / "renamed.safetensors")
    names = [name(config(model), tmp_path / "store") for model in (one, copy)]
    assert names[0] == names[1]
    file = one / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[len(content) * 7 // 10] ^= 1
    file.write_bytes(content)
    changed = name(config(one), tmp_path / "store")
    assert changed[1] != names[0][1]
    namespaces = {Weights(look.encode(), digest).namespace for look, digest in (*names, changed)}
    assert len(namespaces) == 2


def test_weights_that_no_file_tells(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Random names, and the warning says what that means."""
    model = make_model(tmp_path / "one", TINY)
    store = tmp_path / "store"
    plain = config(model)
    assert name(plain, store) == name(plain, store)
    assert "AttnStore" not in caplog.text
    for made, reason in (
        (config(model, load_format="tensorizer"), None),
        (config(model, model_loader_extra_config={"pattern": "x"}), None),
        (plain, "TheirModel says itself what it loads"),
    ):
        caplog.clear()
        assert name(made, store, None, reason) != name(made, store, None, reason)
        assert caplog.text.count("is not found again after a restart") == 2


def test_files_that_change_while_vllm_starts(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """vLLM may have read the old ones: nothing of it may be found by the name of the new ones."""
    model = make_model(tmp_path / "one", TINY)
    made = config(model)
    before = name(made, tmp_path / "store")
    time.sleep(0.05)  # a tick of the file system's clock
    os.utime(model / "model.safetensors")
    assert name(made, tmp_path / "store") != before
    assert "has changed while the server was starting" in caplog.text


def test_a_blob_of_the_hub_may_be_young(tmp_path: Path) -> None:
    """This start has downloaded it."""
    from attnstore_vllm.connector.weights import _check_times

    plugin._note_start()
    snapshot = make_hub(tmp_path)
    os.utime(snapshot.parent.parent / "blobs" / "0")
    _check_times(weight_files(snapshot, "auto"))


def test_dummy_weights_have_no_path(tmp_path: Path) -> None:
    models = [make_model(tmp_path / name, TINY) for name in ("one", "two")]
    names = [name(config(model, load_format="dummy"), tmp_path / "store") for model in models]
    assert names[0] == names[1]


def test_models_that_choose_their_files() -> None:
    class Chooses(nn.Module):
        secondary_weights = ("another repository",)

    assert own_files(nn.Linear(1, 1)) is None
    reason = own_files(Chooses())
    assert reason is not None and "Chooses" in reason
