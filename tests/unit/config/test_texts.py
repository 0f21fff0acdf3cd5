# SPDX-License-Identifier: Apache-2.0
"""The settings in words are those of config/settings.py, with its defaults.

The pages are made of them.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from attnstore_vllm.config.deadlines import DEADLINES, format_ms
from attnstore_vllm.config.settings import StoreConfig
from attnstore_vllm.config.texts import SETTINGS, Setting, as_yaml, first_sentence
from attnstore_vllm.errors import ConfigError
from tools import settings_page

BARE: dict[str, Any] = {"dram": "1GiB", "nvme": {"path": "/mnt/x", "capacity": "2GiB"}}
SECTIONS: dict[str, dict[str, Any]] = {
    "dram": {"size": "1GiB"},
    "nvme": BARE["nvme"], "pinning": {}, "truncation": {}, "trace": {"path": "/x"},
    "shared": {"redis": "redis://h"}, "audit": {}, "holding": {},
}  # fmt: skip


SENTENCES_MAX, WORDS_MAX = 3, 25


def known_to_config(section: str) -> set[str]:
    """The keys that config/settings.py names when it is given one that no setting is like."""
    wrong = {"0000": 1}
    given = {**BARE, **wrong} if not section else {**BARE, section: {**SECTIONS[section], **wrong}}
    with pytest.raises(ConfigError, match="known are") as refused:
        StoreConfig.parse(given)
    names = str(refused.value).partition("known are ")[2].split(", ")
    return {f"{section}.{name}" if section else name for name in names}


def test_every_setting_is_there_and_no_other() -> None:
    known = known_to_config("").union(*(known_to_config(section) for section in SECTIONS))
    assert {s.key for s in SETTINGS} == known - {"nvme", "truncation"}


def test_a_file_of_all_settings_says_what_one_of_two_does() -> None:
    text = as_yaml({"dram": "1GiB", "nvme.path": "/mnt/x", "nvme.capacity": "2GiB"})
    assert StoreConfig.parse(yaml.safe_load(text)) == StoreConfig.parse(BARE)
    assert all(len(line) <= 100 for line in text.splitlines())


def test_a_file_of_what_people_change_has_ten_settings_and_says_the_same() -> None:
    text = as_yaml({"dram": "1GiB", "nvme.path": "/mnt/x", "nvme.capacity": "2GiB"}, every=False)
    written = yaml.safe_load(text)
    keys = {key for key in written if key != "nvme"} | {f"nvme.{key}" for key in written["nvme"]}
    assert keys == {s.key for s in SETTINGS if s.is_common} and len(keys) == 10
    assert StoreConfig.parse(written) == StoreConfig.parse(BARE)
    assert "--all" in text and "\n\n\n" not in text


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.key)
def test_each_has_two_short_sentences(setting: Setting) -> None:
    """What it does, and when to change it; the page goes on from there."""
    for text in (setting.what, setting.change):
        sentence = first_sentence(text)
        assert sentence.endswith(".") and len(sentence.split()) <= 20, sentence
        assert sentence.count("(") == sentence.count(")") and sentence.count("`") % 2 == 0


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.key)
def test_each_is_told_in_a_few_short_sentences(setting: Setting) -> None:
    """What it does in three at most, then when to change it: what to do, and what that changes."""
    for text in (setting.what, setting.change):
        sentences = re.split(r"(?<=[.])\s", re.sub(r"`[^`]+`", "code", text))
        assert len(sentences) <= SENTENCES_MAX, sentences
        long = [each for each in sentences if len(each.split()) > WORDS_MAX]
        assert not long, long
    verb = setting.change.split()[0]
    assert verb in {"Set", "Raise", "Lower", "Put"}, setting.change


def test_every_time_has_a_unit() -> None:
    """Also the next one: no setting has its unit in its name, nor is a number of one alone."""
    for setting in SETTINGS:
        assert not re.search(r"_(ms|s|us|seconds|minutes|hours|days)$", setting.key), setting.key
        assert not re.match(r"(ms|s|seconds|minutes)\b", setting.unit), setting.key


def test_deadlines_are_told_as_they_are_parsed() -> None:
    told = {s.key: (s.default, s.unit) for s in SETTINGS}
    defaults = StoreConfig.parse({**BARE, "shared": SECTIONS["shared"]})
    assert defaults.shared is not None
    found = {
        "load_deadline": defaults.load_deadline_ms,
        "nvme.io_deadline": defaults.nvme.io_deadline_ms,
        "shared.deadline": defaults.shared.deadline_ms,
    }
    for each in DEADLINES:
        bounds = f"time, {format_ms(each.low_ms)} to {format_ms(each.high_ms)}"
        assert told[each.key] == (format_ms(found.pop(each.key)), bounds)
    assert not found


def test_the_defaults_of_pinning_are_those_of_the_parser() -> None:
    said = {s.key.partition(".")[2]: s.default for s in SETTINGS if s.key.startswith("pinning.")}
    said["tenant_share"] = "0.02"  # a fifth of the share
    given = {name: yaml.safe_load(value or "") for name, value in said.items()}
    assert StoreConfig.parse({**BARE, "pinning": given}).pinning == (
        StoreConfig.parse({**BARE, "pinning": {}}).pinning
    )


def test_limits_are_those_of_the_parser() -> None:
    """`unit` names the least and the most that config/settings.py takes."""
    checked = 0
    for setting in SETTINGS:
        limits = re.search(r"(\d+) to (\d+)$", setting.unit)
        if limits is None:
            continue
        section, _, name = setting.key.rpartition(".")
        low, high = int(limits[1]), int(limits[2])
        for value, fits in ((low, True), (high, True), (low - 1, False), (high + 1, False)):
            own = {**SECTIONS.get(section, {}), name: value}
            given = {**BARE, section: own} if section else {**BARE, name: value}
            if fits:
                StoreConfig.parse(given)
            else:
                with pytest.raises(ConfigError, match=re.escape(setting.key)):
                    StoreConfig.parse(given)
        checked += 1
    assert checked == 9


@pytest.mark.parametrize("path", settings_page.pages(), ids=lambda path: path.name)
def test_the_pages_are_up_to_date(path: Path) -> None:
    text = settings_page.pages()[path]
    assert path.read_text(encoding="utf-8") == text, "run: python3 tools/settings_page.py"


@pytest.mark.parametrize("key", [setting.key for setting in SETTINGS])
def test_no_setting_takes_an_empty_value_for_its_default(key: str) -> None:
    """YAML reads `secret_file:` as None.

    tests/unit/config/test_shared.py has each kind of store.
    """
    section, _, name = key.rpartition(".")
    given = {**BARE, section: {**SECTIONS[section], name: None}} if section else {**BARE, key: None}
    with pytest.raises(ConfigError, match=f"{key} is None|^{section} must be"):
        StoreConfig.parse(given)
