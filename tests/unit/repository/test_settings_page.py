# SPDX-License-Identifier: Apache-2.0
"""docs/configuration.md has a heading, a default, a unit and an example that works a setting."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from attnstore_vllm.config.settings import StoreConfig
from attnstore_vllm.config.texts import SETTINGS, Setting
from tools import settings_page

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
NEEDED: dict[str, Any] = {"dram": "1GiB", "nvme": {"path": "/mnt/x", "capacity": "2GiB"}}
BESIDE: dict[str, dict[str, Any]] = {
    "nvme": NEEDED["nvme"],
    "trace": {"path": "/x"},
    "shared": {"redis": "rediss://h"},
}
"""What a section needs for a setting of it to be read."""


def parts() -> dict[str, str]:
    """The page's sections by their headings."""
    found = re.split(r"^## `(.+)`$", PAGE, flags=re.MULTILINE)
    return dict(zip(found[1::2], found[2::2], strict=True))


def test_each_setting_has_a_heading_and_no_other_does() -> None:
    assert list(parts()) == [setting.key for setting in SETTINGS]
    assert re.findall(r"^#+ .+$", PAGE, re.MULTILINE)[1:] == [f"## `{s.key}`" for s in SETTINGS]


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.key)
def test_a_setting_says_its_default_its_unit_and_when_to_change_it(setting: Setting) -> None:
    said = " ".join(parts()[setting.key].split())
    for label, words in (
        ("Default", setting.default),
        ("Unit or values", setting.unit),
        ("When to change it", setting.change),
    ):
        assert f"- **{label}**: " in said
        assert words in (None, "required") or " ".join(str(words).split()) in said


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.key)
def test_the_example_of_a_setting_is_one_that_a_start_takes(setting: Setting) -> None:
    given = yaml.safe_load(settings_page.example(setting))
    section = setting.key.rpartition(".")[0]
    if section:
        beside = {} if setting.key == "shared.mooncake" else BESIDE.get(section, {})
        given = {section: {**beside, **given[section]}}
    StoreConfig.parse({**NEEDED, **given})


def test_no_example_is_left_of_a_setting_that_is_gone() -> None:
    assert settings_page.EXAMPLES.keys() <= {setting.key for setting in SETTINGS}


def test_a_reader_is_not_told_how_the_page_is_made() -> None:
    shown = re.sub(r"<!--.*?-->", "", PAGE, flags=re.DOTALL)
    assert "do not edit" not in shown and "tools/" not in shown
