# SPDX-License-Identifier: Apache-2.0
"""Code that no version tells counts by content: of a model's classes, and what they import."""

from __future__ import annotations

import importlib
import json
import logging
import os
import sys
import types
from collections.abc import Iterator
from importlib.metadata import Distribution
from pathlib import Path

import pytest
from blake3 import blake3

from attnstore_vllm.identity import own_code
from attnstore_vllm.identity.own_code import (
    digest_of_code,
    digest_of_directory,
    digest_of_package,
    files_below,
    is_told,
)

NONE = blake3(b"[]").hexdigest()


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder that modules are imported from; what was imported is forgotten at the end."""
    place, before = tmp_path / "code", set(sys.modules)
    place.mkdir()
    monkeypatch.syspath_prepend(place)
    yield place
    for name in set(sys.modules) - before:
        file = getattr(sys.modules[name], "__file__", None) or ""
        if file.startswith(str(tmp_path)):
            del sys.modules[name]


def write(place: Path, **texts: str) -> None:
    """Files by their names, with __ for a folder's end and mine____init__ for mine/__init__.py."""
    for name, text in texts.items():
        folder, is_package, _ = name.partition("____init__")
        path = folder.replace("__", "/") + ("/__init__" if is_package else "")
        file = place / f"{path}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    importlib.invalidate_caches()


def told(name: str) -> str:
    importlib.import_module(name)
    return digest_of_code([name])


# ---- what counts ----------------------------------------------------------------------------


def test_code_that_a_version_tells_is_the_same_always() -> None:
    """Of a model of vLLM's own this is what was in its namespace before, too."""
    assert digest_of_code(["torch.nn.modules.linear", "builtins", "typing", "abc"]) == NONE


def test_a_module_that_imports_nothing_keeps_its_name(place: Path) -> None:
    """What was stored of such a model is still found."""
    write(place, my_model="import torch\nfactor = 2\n")
    digest = blake3((place / "my_model.py").read_bytes()).hexdigest()
    expected = blake3(json.dumps([["my_model", digest]]).encode()).hexdigest()
    assert told("my_model") == expected


@pytest.mark.parametrize(
    "line",
    ["import torch, my_ops as ops", "from my_ops import rope", "def f():\n    import my_ops",
     "import os; import my_ops", "from my_ops \\\n    import rope", "if 1: from my_ops import rope",
     "import importlib\nops = importlib.import_module('my_ops')", "import my_middle"],
)  # fmt: skip
def test_a_module_that_the_model_imports(place: Path, line: str) -> None:
    write(place, my_model=line, my_ops="def rope(x): return x * 2", my_middle="import my_ops")
    before = told("my_model")
    assert digest_of_code(["my_model"]) == before
    write(place, my_ops="def rope(x): return x * 3")
    assert digest_of_code(["my_model"]) != before


@pytest.mark.parametrize("changed", ["ops", "deep__ops", "kernels"])
def test_a_package_counts_as_a_whole(place: Path, changed: str) -> None:
    """Also what is imported late, or compiled."""
    write(place, mine____init__="", mine__model="", mine__ops="", mine__deep__ops="")
    (place / "mine" / "kernels.so").write_bytes(b"1")
    before = told("mine.model")
    suffix = ".so" if changed == "kernels" else ".py"
    (place / "mine" / f"{changed.replace('__', '/')}{suffix}").write_bytes(b"2")
    assert digest_of_code(["mine.model"]) != before


def test_a_folder_that_is_linked_into_a_package(place: Path, tmp_path: Path) -> None:
    write(tmp_path, elsewhere__ops="a = 1")
    write(place, mine____init__="", mine__model="")
    (place / "mine" / "linked").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere" / "loop").symlink_to(place / "mine")
    before = told("mine.model")
    write(tmp_path, elsewhere__ops="a = 2")
    assert digest_of_code(["mine.model"]) != before


def test_where_it_lies_and_what_else_lies_there_does_not_count(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(place, my_model="import my_ops", my_ops="a = 1")
    before = told("my_model")
    write(place, other="a = 1")
    del sys.modules["my_model"], sys.modules["my_ops"]
    moved = place.rename(tmp_path / "moved")
    monkeypatch.syspath_prepend(moved)
    assert told("my_model") == before


def test_a_class_that_no_file_tells_is_another_one_each_time() -> None:
    assert digest_of_code(["made_at_run_time"]) != digest_of_code(["made_at_run_time"])


def test_an_import_that_no_file_tells(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module of an archive, or made at run time; a name in a comment is none."""
    write(place, my_model='"""\nimport something else\n"""\nimport my_ops', my_ops="")
    assert told("my_model") == digest_of_code(["my_model"])
    monkeypatch.setitem(sys.modules, "my_ops", types.ModuleType("my_ops"))
    assert digest_of_code(["my_model"]) != digest_of_code(["my_model"])


def test_files_beside_a_copied_one_count_where_it_imports_them(place: Path) -> None:
    """Transformers adds files to such a folder as they are asked for."""
    write(
        place,
        transformers_modules____init__="",
        transformers_modules__one____init__="",
        transformers_modules__one__modeling="from .config import (\n    A,\n)\nfrom . import ops",
        transformers_modules__one__config="class A: pass",
        transformers_modules__one__ops="a = 1",
        transformers_modules__two__modeling="a = 1",
    )
    sys.modules.pop("transformers_modules", None)
    before = told("transformers_modules.one.modeling")
    write(place, transformers_modules__one__tokenizer="", transformers_modules__two__modeling="")
    assert digest_of_code(["transformers_modules.one.modeling"]) == before
    for name in ("config", "ops"):
        file = place / "transformers_modules" / "one" / f"{name}.py"
        file.write_text(file.read_text() + "\n# changed")
        after = digest_of_code(["transformers_modules.one.modeling"])
        assert after != before
        before = after


def test_the_environment_that_own_code_reads(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """But for what says where a process is, or is secret."""
    write(place, my_model="import os\na = os.environ.get('MY_FACTOR', '1')\nimport my_others\n"
                          "b = os.environ['HOME']; c = os.getenv('MY_TOKEN')",
          my_others="from os import getenv\nb = getenv('MY_OTHER')")  # fmt: skip
    before = told("my_model")
    for name in ("MY_FACTOR", "MY_OTHER"):
        monkeypatch.setenv(name, "2")
        assert told("my_model") != before
        monkeypatch.delenv(name)
    for name in ("HOME", "MY_TOKEN", "ANOTHER"):
        monkeypatch.setenv(name, "2")
        assert told("my_model") == before, name


def test_what_is_not_imported_yet_is_found(place: Path) -> None:
    """A worker's class, as the scheduler's process names it."""
    write(place, mine____init__="", mine__deep__worker="a = 1")
    before = digest_of_code(["mine.deep.worker"])
    assert before == digest_of_code(["mine.deep.worker"])
    write(place, mine__deep__worker="a = 2")
    assert digest_of_code(["mine.deep.worker"]) != before


def test_all_files_below_a_directory(tmp_path: Path) -> None:
    """Wherever it lies; but for those that are told otherwise."""
    model, seen = tmp_path / "model", set()
    (model / "steers").mkdir(parents=True)
    (model / "model.safetensors").write_bytes(b"0")
    for name in ("steer.pt", "steers/of.npy"):
        (model / name).write_bytes(b"1")
        seen.add(digest_of_directory(model, [model / "model.safetensors"]))
    (model / "model.safetensors").write_bytes(b"2")
    moved = model.rename(tmp_path / "moved")
    seen.add(digest_of_directory(moved, [moved / "model.safetensors"]))
    assert len(seen) == 2 and len(files_below(moved)) == 3


# ---- versions ---------------------------------------------------------------------------------


def install(place: Path, name: str, version: str, **files: str) -> Distribution:
    """As pip leaves a package there. Args: files: of its metadata, `_` for the dot."""
    for old in place.glob(f"{name}-*.dist-info"):
        for file in old.iterdir():
            file.unlink()
        old.rmdir()
    info = place / f"{name}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (info / "top_level.txt").write_text(name)
    for key, text in files.items():
        (info / key.replace("_json", ".json").replace("url", "_url")).write_text(text)
    own_code._installed.cache_clear()
    own_code._tops.cache_clear()
    importlib.invalidate_caches()
    return Distribution.at(info)


EDITABLE = json.dumps({"dir_info": {"editable": True}, "url": "file:///x"})


def test_an_installed_package_that_is_imported_counts_by_its_version(place: Path) -> None:
    write(place, my_model="import lib", lib____init__="a = 1")
    install(place, "lib", "1.0", RECORD="")
    before = told("my_model")
    write(place, lib____init__="a = 2")
    assert digest_of_code(["my_model"]) == before, "it is read though its version tells it"
    install(place, "lib", "1.1", RECORD="")
    assert digest_of_code(["my_model"]) != before


def test_what_an_installed_package_requires(place: Path) -> None:
    write(place, my_model="import lib", lib____init__="", mine____init__="a = 1")
    install(place, "lib", "1.0", RECORD="")
    (place / "lib-1.0.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: lib\nVersion: 1.0\n"
        "Requires-Dist: Mine>=1; python_version>'3'\n"
    )
    install(place, "mine", "1.0", RECORD="", directurl_json=EDITABLE)
    before = told("my_model")
    write(place, mine____init__="a = 2")
    assert digest_of_code(["my_model"]) != before


def test_what_the_module_of_an_installed_package_imports(place: Path) -> None:
    """No metadata has it."""
    write(place, lib____init__="", lib__model="import my_ops", my_ops="a = 1")
    install(place, "lib", "1.0", RECORD="")
    before = told("lib.model")
    write(place, my_ops="a = 2")
    assert digest_of_code(["lib.model"]) != before


def test_a_class_of_an_installed_package_counts_by_file_and_version(place: Path) -> None:
    write(place, lib____init__="", lib__model="a = 1")
    install(place, "lib", "1.0", RECORD="")
    seen = {told("lib.model")}
    install(place, "lib", "1.1", RECORD="")
    seen.add(digest_of_code(["lib.model"]))
    write(place, lib__model="a = 2")
    seen.add(digest_of_code(["lib.model"]))
    assert len(seen) == 3


@pytest.mark.parametrize(
    "how",
    [*({"RECORD": "", "directurl_json": url} for url in (EDITABLE, "no JSON", "[]")), {}],
)
def test_an_editable_install_counts_by_content(place: Path, how: dict[str, str]) -> None:
    """One version, other code. Without a record it is `setup.py develop`, or a package by hand."""
    write(place, my_model="import lib", lib____init__="", lib__ops="a = 1")
    assert not is_told(install(place, "lib", "1.0", **how))
    before, alone = told("my_model"), digest_of_package("lib", with_imports=True)
    write(place, lib__ops="a = 2")
    assert digest_of_code(["my_model"]) != before
    assert digest_of_package("lib", with_imports=True) != alone


def test_a_package_alone_is_told_without_what_it_imports(place: Path) -> None:
    write(place, lib____init__="import my_ops", my_ops="a = 1")
    with_all, alone = (digest_of_package("lib", with_imports=it) for it in (True, False))
    write(place, my_ops="a = 2")
    assert digest_of_package("lib", with_imports=True) != with_all
    assert digest_of_package("lib", with_imports=False) == alone


# ---- bounds -----------------------------------------------------------------------------------


def test_beyond_the_bytes_size_and_times_count(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(place, mine____init__="")
    large = place / "mine" / "kernels.so"
    large.write_bytes(bytes(1000))
    monkeypatch.setattr(own_code, "CONTENT_BYTES", 999)
    before = told("mine")
    assert digest_of_code(["mine"]) == before
    large.write_bytes(b"1" * 1000)
    os.utime(large, ns=(1, 1))
    assert digest_of_code(["mine"]) != before


def test_beyond_the_number_of_files_nothing_is_known(
    place: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write(place, mine____init__="", mine__ops="")
    monkeypatch.setattr(own_code, "ENTRIES_MAX", 1)
    with caplog.at_level(logging.WARNING):
        assert told("mine") != digest_of_code(["mine"])
    assert "does not know the code of mine" in caplog.text
