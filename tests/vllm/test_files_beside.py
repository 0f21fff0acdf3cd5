# SPDX-License-Identifier: Apache-2.0
"""Files beside the weights that change while a server starts: vLLM may have read the old ones."""

from __future__ import annotations

import ast
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from attnstore_lab.testing.tiny_model import TINY, make_model
from attnstore_vllm import engine_start
from attnstore_vllm.identity.model_files import check_files, files_of
from attnstore_vllm.identity.moved_files import FILE_CLOCK_S
from attnstore_vllm.identity.namespace import facts_of, fingerprint
from attnstore_vllm.identity.own_code import NO_CODE
from attnstore_vllm.identity.rank import KvFacts
from tests.vllm.test_namespace import GEOMETRY

TICK_S = 0.05
"""More than one of the file system's clock."""
FILE = "processor_config.json"


def rewritten(model: Path) -> None:
    file = model / FILE
    was = file.stat()
    file.write_text('{"n_fft": 512}')
    os.utime(file, ns=(was.st_atime_ns, was.st_mtime_ns))


def replaced(model: Path) -> None:
    other = model.parent / "other.json"  # made before, as a deploy does
    other.replace(model / FILE)


def directory_renamed(model: Path) -> None:
    model.rename(model.with_name("old"))
    model.with_name("next").rename(model)


CHANGES: list[Callable[[Path], object]] = [
    rewritten,
    replaced,
    directory_renamed,
    lambda model: (model / FILE).unlink(),
    lambda model: (model / "video_preprocessor_config.json").write_text("{}"),
    lambda model: (model / "modeling_own.py").write_text("# a model may bring its own"),
]
NAMES = ["rewritten", "replaced", "directory renamed", "taken away", "new", "new code"]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    model = make_model(tmp_path / "model", TINY)
    (model / FILE).write_text('{"n_fft": 400}')
    (tmp_path / "other.json").write_text('{"n_fft": 512}')
    shutil.copytree(model, tmp_path / "next")
    time.sleep(TICK_S)
    return model


@pytest.fixture
def started(model: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """vLLM's configuration of an engine that has just been configured."""
    from vllm.engine.arg_utils import EngineArgs

    engine_start.end_start()
    engine_start.note_start(holds=True)
    monkeypatch.delenv("ATTNSTORE_CONFIGURED_AT", raising=False)
    made = EngineArgs(model=str(model), max_model_len=256).create_engine_config()
    time.sleep(TICK_S)
    yield made
    engine_start.end_start()


def name(vllm_config: Any) -> bytes:
    return fingerprint(vllm_config, GEOMETRY, [], "0.32.0", "weights")


def test_what_stays_keeps_its_name(started: Any, caplog: pytest.LogCaptureFixture) -> None:
    assert name(started) == name(started)
    assert "AttnStore" not in caplog.text


@pytest.mark.parametrize("change", CHANGES, ids=NAMES)
def test_what_changes_while_a_server_starts_has_no_name(
    model: Path, started: Any, change: Callable[[Path], object], caplog: pytest.LogCaptureFixture
) -> None:
    change(model)
    assert name(started) != name(started)
    assert caplog.text.count("is not found again after a restart") == 2
    assert str(model) in caplog.text
    engine_start.end_start()
    time.sleep(TICK_S)
    engine_start.note_start(holds=True)  # the next start reads what is there now
    assert name(started) == name(started)


def test_scales_of_an_encoder(started: Any, tmp_path: Path) -> None:
    scales = tmp_path / "scales.json"
    scales.write_text("{}")
    os.utime(scales, (1.0, 1.0))
    started.model_config.multimodal_config = SimpleNamespace(mm_encoder_fp8_scale_path=str(scales))
    with pytest.raises(ValueError, match=r"scales\.json has changed while the server was starting"):
        check_files(started, engine_start.server_configured_at() - FILE_CLOCK_S)


def snapshot(hub: Path, commit: str) -> Path:
    """One of the hub's cache; `main` leads there from now on."""
    repo = hub / "models--a--b"
    place, blob = repo / "snapshots" / commit, repo / "blobs" / commit
    for directory in (place, blob.parent, repo / "refs"):
        directory.mkdir(parents=True, exist_ok=True)
    blob.write_text(commit)
    for file in (FILE, "config.json"):
        (place / file).symlink_to(Path("../../blobs") / commit)
    (repo / "refs" / "main").write_text(commit)
    return place


def test_a_branch_of_the_hub_that_moves(
    started: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What this start has downloaded keeps its name. Another commit that comes has none."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    started.model_config.model = started.model_config.tokenizer = "a/b"
    begun_at = time.time()
    snapshot(tmp_path, "0" * 40)
    check_files(started, begun_at)
    snapshot(tmp_path, "1" * 40)
    with pytest.raises(ValueError, match="has moved to another commit"):
        check_files(started, begun_at)


def named(model: Path, quantization: Path) -> Any:
    from vllm.engine.arg_utils import EngineArgs

    made = EngineArgs(model=str(model), max_model_len=256).create_engine_config()
    made.model_config.hf_overrides = {"quantization_config_file": str(quantization)}
    return made


def test_a_file_of_quantization_that_a_setting_names(model: Path, tmp_path: Path) -> None:
    """By content, wherever it is: --hf-overrides '{"quantization_config_file": ...}'."""
    for name, content in (("int4", "4"), ("copy", "4"), ("int8", "8")):
        (tmp_path / f"{name}.json").write_text(content)
    names = "int4", "copy", "int8"
    of = {name: files_of(named(model, tmp_path / f"{name}.json")) for name in names}
    assert of["int4"] == of["copy"]
    assert of["int4"] != of["int8"]
    begun_at = time.time()
    time.sleep(TICK_S)
    check_files(named(model, tmp_path / "int8.json"), begun_at)
    (tmp_path / "int8.json").write_text("4")
    with pytest.raises(ValueError, match=r"int8\.json has changed while"):
        check_files(named(model, tmp_path / "int8.json"), begun_at)


def test_vocabularies_that_drafts_are_mapped_by(model: Path) -> None:
    """vLLM makes the map of both tokenizers, where the drafts' is another one."""
    from vllm.engine.arg_utils import EngineArgs

    made = EngineArgs(model=str(model), max_model_len=256).create_engine_config()
    draft = SimpleNamespace(model=str(model.with_name("next")), revision=None, hf_overrides=None)
    drafts = SimpleNamespace(method="draft_model", draft_model_config=draft)
    made.speculative_config = drafts
    file = model.with_name("next") / "tokenizer.json"
    of = list[list[dict[str, str]]]()
    for maps in (False, True):
        drafts.use_heterogeneous_vocab = maps
        before = file.read_text()
        found = [files_of(made)]
        file.write_text(before + " ")
        found.append(files_of(made))
        file.write_text(before)
        of.append([*found, files_of(made)])
    (plain, changed, again), (mapped, remapped, back) = of
    assert plain == changed == again
    assert mapped == back != remapped


def test_all_files_of_a_model_with_code_of_its_own(model: Path, tmp_path: Path) -> None:
    """Wherever they lie; but for the weights, which the keys tell."""
    from vllm.engine.arg_utils import EngineArgs

    made = EngineArgs(model=str(model), max_model_len=256).create_engine_config()
    (model / "steers").mkdir()
    plain, own = files_of(made), []
    begun_at = time.time()
    time.sleep(TICK_S)
    for text in ("1", "2"):
        (model / "steers" / "steer.pt").write_text(text)
        own.append(files_of(made, has_own_code=True))
    assert own[0] != own[1] and files_of(made) == plain
    with pytest.raises(ValueError, match=r"steer\.pt has changed while"):
        check_files(made, begun_at, has_own_code=True)
    (weights,) = model.glob("*.safetensors")
    weights.write_bytes(weights.read_bytes() + b" ")
    assert files_of(made, has_own_code=True) == own[1]
    shutil.copytree(model, tmp_path / "moved")
    moved = EngineArgs(model=str(tmp_path / "moved"), max_model_len=256).create_engine_config()
    assert files_of(moved, has_own_code=True) == own[1]


def test_a_models_own_code_is_seen_in_any_rank(started: Any) -> None:
    facts: dict[str, Any] = {
        "device": "",
        "dtype": "",
        "shape": (),
        "run_bytes": 0,
        "axes": (),
        "strides": (),
    }
    ranks = [
        KvFacts(**facts, layout="", kernel="", live=(("code", code),)) for code in (NO_CODE, "own")
    ]
    for number in (1, 2):
        named = facts_of(started, GEOMETRY, ranks[:number], "0.32.0")
        assert ("all" in named["files"]) is (number == 2)


@pytest.mark.parametrize(
    "settings",
    [
        {"architectures": ["Dots3NoteForCausalLM"]},
        {"hf_overrides": {"a": 1}},
        {"hf_config_path": "x"},
    ],
    ids=["reads it", "overridden", "replaced"],
)
def test_a_configuration_that_media_are_made_ready_by(model: Path, settings: Any) -> None:
    """From the model's directory, also where a setting replaces it for the model."""
    one: dict[str, Any] = {"model": str(model), "revision": None, "tokenizer": str(model),
           "tokenizer_revision": None, "is_multimodal_model": True, "architectures": ["A"],
           "hf_overrides": {}, "hf_config_path": None, "multimodal_config": None}  # fmt: skip
    several: tuple[dict[str, Any], ...] = (settings, {})
    read, plain = (
        SimpleNamespace(
            model_config=SimpleNamespace(**one | more),
            speculative_config=None,
            load_config=SimpleNamespace(download_dir=None),
        )
        for more in several
    )
    before = [files_of(it) for it in (read, plain)]
    (model / "config.json").write_text("{}")
    assert files_of(read) != before[0] and files_of(plain) == before[1]


OPENED = {
    "torchao.py: from_config_file": "quantization_config_file: by content",
    "fp8_utils.py: get_w8a8_block_fp8_configs": "kernels' tuning, of vLLM: its version is in",
}
"""Functions of vLLM's quantization and settings that open files, and how these are named."""


def test_each_file_that_vllm_reads_for_numbers_is_known() -> None:
    import vllm

    root, found = Path(vllm.__file__).parent, set[str]()
    for room in ("model_executor/layers/quantization", "config"):
        for path in (root / room).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.FunctionDef) and reads(node):
                    found.add(f"{path.name}: {node.name}")
    assert found == set(OPENED), "is what is read here in the namespace?"


def reads(function: ast.FunctionDef) -> bool:
    calls = [node.func for node in ast.walk(function) if isinstance(node, ast.Call)]
    names = [call.id for call in calls if isinstance(call, ast.Name)]
    names += [call.attr for call in calls if isinstance(call, ast.Attribute)]
    return not {"open", "read_text", "read_bytes"}.isdisjoint(names)
