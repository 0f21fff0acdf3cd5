# SPDX-License-Identifier: Apache-2.0
"""A plugin that is installed by `pip install -e` changes under one version: its code counts."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest

pytest.importorskip("vllm")
from attnstore_vllm.identity import vllm_settings
from attnstore_vllm.identity.vllm_settings import plugins


def install(place: Path, *, is_editable: bool) -> None:
    info = place / "my_plugin-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my-plugin\nVersion: 1.0\n")
    (info / "RECORD").write_text("")
    (info / "direct_url.json").write_text(json.dumps({"dir_info": {"editable": is_editable}}))
    (info / "entry_points.txt").write_text("[vllm.general_plugins]\nmine = my_plugin.new:add\n")
    (place / "my_plugin").mkdir()
    for name in ("__init__", "new", "ops"):
        (place / "my_plugin" / f"{name}.py").write_text("a = 1\n")


@pytest.mark.parametrize("is_editable", [True, False])
def test_a_plugin_counts_by_content_if_no_version_tells_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_editable: bool
) -> None:
    before = plugins()
    install(tmp_path, is_editable=is_editable)
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    first = plugins()
    assert first == plugins()
    (added,) = set(first) - set(before)
    known = "vllm.general_plugins mine my_plugin.new:add my-plugin 1.0"
    assert added.startswith(known) and (added == known) is not is_editable
    (tmp_path / "my_plugin" / "ops.py").write_text("a = 2\n")
    assert (plugins() != first) is is_editable


def test_vllm_itself_counts_where_no_version_tells_it(monkeypatch: pytest.MonkeyPatch) -> None:
    before = plugins()
    assert not [name for name in before if name.startswith("vllm ")]
    monkeypatch.setattr(vllm_settings, "is_told", lambda package: package.name not in ("vllm",))
    (told,) = set(plugins()) - set(before)
    assert told.startswith("vllm ") and told in plugins()
