# SPDX-License-Identifier: Apache-2.0
"""Which files are the weights: at least all that vLLM's own loader takes, wherever they are.

It is long since each way to load has a case.
"""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import shutil
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from attnstore_lab.testing.tiny_model import TINY, make_model
from attnstore_vllm import engine_start, plugin
from attnstore_vllm.identity.moved_files import FILE_CLOCK_S
from attnstore_vllm.identity.weight_files import Digest
from attnstore_vllm.identity.weights import (
    Weights,
    _directory,
    _parts,
    identify,
    weight_files,
)
from tests.vllm.draft_models import make_eagle_head

SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
SETS = {
    "sharded": SHARDS,
    "consolidated": ("consolidated.safetensors",),
    "bin": ("pytorch_model.bin", "training_args.bin"),
    "pt": ("model.pt",),
    "index": ("model.safetensors.index.json",),
}
FORMATS = ("auto", "hf", "safetensors", "fastsafetensors", "mistral", "pt")


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


def begin() -> None:
    """Another engine begins to start in this process."""
    engine_start.end_start()
    engine_start.note_start(holds=True)


def config(model: Path, **options: Any) -> Any:
    from vllm.engine.arg_utils import EngineArgs

    made = EngineArgs(model=str(model), max_model_len=256, **options).create_engine_config()
    time.sleep(2 * FILE_CLOCK_S)  # a model made just now is not one that changes while we start
    begin()
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


def with_head(model: Path, head: Path, **options: Any) -> Any:
    drafts = {"method": "eagle", "model": str(head), "num_speculative_tokens": 2}
    return config(model, speculative_config=drafts, **options)


def test_weights_of_the_drafts(tmp_path: Path) -> None:
    """KV of the drafts' layers is theirs. They may be dummies where the model is not."""
    model, store = make_model(tmp_path / "model", TINY), tmp_path / "store"
    head = make_eagle_head(tmp_path / "head")
    copied = shutil.copytree(head, tmp_path / "copied", copy_function=shutil.copy)
    other = make_eagle_head(tmp_path / "other", noise=0.1)
    found = [name(with_head(model, place), store) for place in (head, copied, other)]
    assert found[0] == found[1]
    assert found[2][1] != found[0][1]
    assert name(config(model), store)[1] not in {digest for _, digest in found}
    dummies = with_head(model, head, load_format="dummy")
    assert name(dummies, store) == ("dummy", b"dummy")
    from vllm.config.load import LoadConfig

    dummies.speculative_config.draft_load_config = LoadConfig(load_format="auto")
    names = [name(dummies, store) for _ in range(2)]
    assert names[0] != names[1], "nobody can tell dummies beside files: another one each time"


def test_drafts_that_load_other_files_of_the_models_directory(tmp_path: Path) -> None:
    """As MTP layers with a load format of their own."""
    from types import SimpleNamespace

    from vllm.config.load import LoadConfig

    model, store = make_model(tmp_path / "model", TINY), tmp_path / "store"
    (model / "pytorch_model.bin").write_bytes(b"one")
    made = config(model, load_format="safetensors")
    drafts = SimpleNamespace(
        method="mtp", draft_model_config=made.model_config, draft_load_config=None
    )
    alone = name(made, store)
    made.speculative_config = drafts
    assert name(made, store) == alone, "the drafts' layers are in the model's files"
    names = []
    for content in (b"one", b"two", b"one"):
        (model / "pytorch_model.bin").write_bytes(content)
        time.sleep(2 * FILE_CLOCK_S)
        begin()
        drafts.draft_load_config = LoadConfig(load_format="pt")
        names.append(name(made, store)[1])
    assert names[0] == names[2] != names[1]


def test_weights_that_no_file_tells(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Random names, and the warning says what that means."""
    model = make_model(tmp_path / "one", TINY)
    store = tmp_path / "store"
    plain = config(model)
    assert name(plain, store) == name(plain, store)
    assert "AttnStore" not in caplog.text
    for made, reason in (
        (config(model, load_format="tensorizer"), None),
        (config(model, load_format="npcache"), None),
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


def test_a_configuration_that_is_made_anew_is_no_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM makes its own anew for a draft model and a warm-up: the model has been loaded then."""
    model = make_model(tmp_path / "one", TINY)
    monkeypatch.setattr(multiprocessing, "parent_process", object)  # nothing is checked
    made, extra = config(model), {"dram": "16MiB", "nvme": {"path": "/x", "capacity": "64MiB"}}
    before = name(made, tmp_path / "store")
    plugin.check_early(extra)  # the second engine of this process
    time.sleep(0.05)  # a tick of the file system's clock
    os.utime(model / "model.safetensors")
    time.sleep(0.05)
    plugin.check_early(extra)
    assert name(made, tmp_path / "store") != before
    assert "has changed while the server was starting" in caplog.text
    plugin.check_early(extra)  # the third: it loads the file as it is now
    assert name(made, tmp_path / "store") == before


def test_a_blob_of_the_hub_may_be_young(tmp_path: Path) -> None:
    """This start has downloaded it."""
    from attnstore_vllm.identity.weights import _check_times

    begin()
    snapshot = make_hub(tmp_path)
    os.utime(snapshot.parent.parent / "blobs" / "0")
    _check_times(weight_files(snapshot, "auto"))


def test_dummy_weights_have_no_path(tmp_path: Path) -> None:
    models = [make_model(tmp_path / name, TINY) for name in ("one", "two")]
    names = [name(config(model, load_format="dummy"), tmp_path / "store") for model in models]
    assert names[0] == names[1]


# ---- which files, and in which order ------------------------------------------------------


def loaded(model: Path) -> list[bytes]:
    """The content of the files that vLLM loads, in its order: what comes later wins."""
    from vllm.config.load import LoadConfig
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

    loader = DefaultModelLoader(LoadConfig())
    _, files, _, _ = loader._prepare_weights(str(model), None, None, True, None)
    return [Path(file).read_bytes() for file in sorted(files)]  # as its iterator sorts them


def two_checkpoints(directory: Path) -> Path:
    """`before` and `tuned`, both whole."""
    model = make_model(directory / "model", TINY)
    (model / "model.safetensors").rename(model / "before.safetensors")
    content = bytearray((model / "before.safetensors").read_bytes())
    for at in range(len(content) // 2, len(content), 4099):
        content[at] ^= 0x40
    (model / "tuned.safetensors").write_bytes(content)
    return model


def say(model: Path, which: str) -> None:
    from safetensors import safe_open

    with safe_open(model / which, "pt") as found:
        weight_map = dict.fromkeys(found.keys(), which)
    index = {"metadata": {}, "weight_map": weight_map}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))


def test_the_index_says_which_files_are_loaded(tmp_path: Path) -> None:
    model, names, contents = two_checkpoints(tmp_path), [], []
    for which in ("before.safetensors", "tuned.safetensors"):
        say(model, which)
        contents.append(loaded(model))
        names.append(name(config(model), tmp_path / "store"))
    assert contents[0] != contents[1]
    assert names[0] != names[1], "other weights of one name"


def test_names_say_the_order_in_which_files_are_loaded(tmp_path: Path) -> None:
    """`tuned` overrides `before` or is overridden: the last file that has a weight wins."""
    model, names, contents = two_checkpoints(tmp_path), [], []
    contents.append(loaded(model))
    names.append(name(config(model), tmp_path / "store"))
    (model / "before.safetensors").rename(model / "z.safetensors")
    contents.append(loaded(model))
    names.append(name(config(model), tmp_path / "store"))
    if sorted(contents[0]) != sorted(contents[1]) or contents[0] == contents[1]:
        pytest.skip("this file system lists files in another order")
    assert names[0] != names[1], "other weights of one name"


def test_two_checkpoints_that_change_names(tmp_path: Path) -> None:
    """vLLM loads what the index names, and a tuned layer may lie where no sample does."""
    model, store = make_model(tmp_path / "model", TINY), tmp_path / "store"
    one, two = model / "model.safetensors", model / "tuned.safetensors"
    content = bytearray(one.read_bytes())
    content[len(content) * 7 // 10] ^= 0x40
    two.write_bytes(content)
    say(model, one.name)
    names, contents = [name(config(model), store)], [loaded(model)]
    one.rename(model / "between")
    two.rename(one)
    (model / "between").rename(two)
    names, contents = [*names, name(config(model), store)], [*contents, loaded(model)]
    assert contents[0] != contents[1]
    assert names[0][1] != names[1][1], "other weights of one name"


def test_a_model_and_its_drafts_change_places(tmp_path: Path) -> None:
    one, store = make_model(tmp_path / "one", TINY), tmp_path / "store"
    two = shutil.copytree(one, tmp_path / "two", copy_function=shutil.copy)
    content = bytearray((two / "model.safetensors").read_bytes())
    content[len(content) * 7 // 10] ^= 0x40
    (two / "model.safetensors").write_bytes(content)
    made, names = config(one), []
    for model, draft in ((one, two), (two, one)):
        made.model_config.model = str(model)
        drafts = SimpleNamespace(model=str(draft), revision=None, quantization=None)
        made.speculative_config = SimpleNamespace(
            method="draft_model", draft_model_config=drafts, draft_load_config=None
        )
        names.append(name(made, store))
    assert names[0] != names[1], "other weights of one name"


def test_a_directory_that_was_replaced_while_vllm_started(tmp_path: Path) -> None:
    """`current -> v1` becomes `current -> v2` after vLLM has loaded v1: KV of v1 would be kept
    under the name of v2. No file has changed, so no time of a file tells."""
    v1 = make_model(tmp_path / "v1", TINY)
    v2 = shutil.copytree(v1, tmp_path / "v2")
    content = bytearray((v2 / "model.safetensors").read_bytes())
    content[len(content) * 7 // 10] ^= 1
    (v2 / "model.safetensors").write_bytes(content)
    current = tmp_path / "current"
    current.symlink_to(v1)
    made = config(current)  # vLLM loads v1 now ...
    os.symlink(v2, tmp_path / "new")
    os.replace(tmp_path / "new", current)
    ours = name(made, tmp_path / "store")  # ... and the store looks at v2
    assert ours != name(config(v2), tmp_path / "store"), "KV of v1 has the name of v2's weights"


def test_a_branch_of_the_hub_that_moved_while_vllm_started(tmp_path: Path) -> None:
    """Another server has downloaded a newer `main` into the cache that both use."""
    load = SimpleNamespace(
        load_format="auto", download_dir=str(tmp_path / "hub"), model_loader_extra_config={}
    )
    model = SimpleNamespace(model="org/model", revision=None, model_weights=None)
    made = SimpleNamespace(model_config=model, load_config=load, speculative_config=None)
    snapshot = make_hub(tmp_path / "hub")
    old = name(made, tmp_path / "store")
    begin()  # a start; vLLM loads commit c...
    newer = make_hub(tmp_path / "hub2", "d" * 40)
    for file in newer.iterdir():
        target = tmp_path / "hub/models--org--model/blobs" / f"n{file.name}"
        target.write_text("newer " + file.name)
    into = snapshot.parent / ("d" * 40)
    into.mkdir()
    for file in newer.iterdir():
        (into / file.name).symlink_to(Path("../../blobs") / f"n{file.name}")
    (snapshot.parent.parent / "refs" / "main").write_text("d" * 40)
    ours = name(made, tmp_path / "store")  # what this server keeps is KV of commit c...
    model.revision = "d" * 40
    newer_name = name(made, tmp_path / "store")
    assert old != newer_name
    assert ours != newer_name, "KV of the old commit has the name of the new one's weights"
