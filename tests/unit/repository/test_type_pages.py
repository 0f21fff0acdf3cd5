# SPDX-License-Identifier: Apache-2.0
"""A bare image types what README and the guide say: each block of them is known, and CI does it."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from tools import type_pages

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize("page", type_pages.PAGES)
def test_each_block_of_the_pages_is_typed_or_said_to_be_tried_elsewhere(page: str) -> None:
    typed = type_pages.blocks(page)
    assert any(how.kind == "serve" for _, how in typed)
    assert all(how.why for _, how in typed if how.kind == "elsewhere")
    for block, how in typed:
        assert how.quick[0] in block


def test_a_new_block_and_one_that_is_gone_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    monkeypatch.setattr(type_pages, "ROOT", tmp_path)
    (tmp_path / "README.md").write_text(f"{text}\n```\nmake more\n```\n", encoding="utf-8")
    with pytest.raises(type_pages.WrongError, match="does not know\nmake more"):
        type_pages.blocks("README.md")
    (tmp_path / "README.md").write_text(text.replace("```\npip", "```\nnpm"), encoding="utf-8")
    with pytest.raises(type_pages.WrongError, match="npm install"):
        type_pages.blocks("README.md")
    (tmp_path / "README.md").write_text("```\nmake demo\n```\n", encoding="utf-8")
    with pytest.raises(type_pages.WrongError, match="not there"):
        type_pages.blocks("README.md")


def test_what_does_not_do_what_a_page_says_is_told(capfd: pytest.CaptureFixture[str]) -> None:
    type_pages.run("echo one", expects="on.")
    with pytest.raises(type_pages.WrongError, match="this ended with 3: exit 3"):
        type_pages.run("exit 3")
    with pytest.raises(type_pages.WrongError, match="'two' is expected of: echo one"):
        type_pages.run("echo one", expects="two")
    assert "$ echo one\n  one\n" in capfd.readouterr().out


def test_ci_does_it() -> None:
    workflow = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text(encoding="utf-8"))
    bare = workflow["jobs"]["bare"]
    assert bare["container"]["image"].startswith("python:")
    assert "lib" not in bare["steps"][0]["run"]
    assert bare["steps"][-1]["run"] == "python3 tools/type_pages.py"


@pytest.mark.parametrize("name", type_pages.QUICK_TESTS.split())
def test_the_quick_tests_are_there(name: str) -> None:
    assert (ROOT / f"tests/unit/{name}.py").is_file()
