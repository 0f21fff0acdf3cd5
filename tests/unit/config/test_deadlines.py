# SPDX-License-Identifier: Apache-2.0
"""Deadlines have units; what files from before say of them is read as it was, with a hint."""

from __future__ import annotations

import json
import re
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from attnstore_vllm import plugin
from attnstore_vllm.cli.doctor import examine
from attnstore_vllm.cli.main import main
from attnstore_vllm.config.deadlines import (
    DEADLINES,
    IO_DEADLINE,
    LOAD_DEADLINE,
    SHARED_DEADLINE,
    Deadline,
    format_ms,
    old_names,
)
from attnstore_vllm.config.settings import StoreConfig
from attnstore_vllm.errors import ConfigError
from attnstore_vllm.plugin import expand

ROOT = Path(__file__).resolve().parents[3]
EACH = pytest.mark.parametrize("deadline", DEADLINES, ids=lambda deadline: deadline.key)


def settings(**found: object) -> dict[str, Any]:
    """Settings with what is given by its key, `__` for a dot."""
    made: dict[str, Any] = {"dram": "1GiB", "nvme": {"path": "/mnt/x", "capacity": "2GiB"}}
    for key, value in found.items():
        section, _, name = key.rpartition("__")
        if section == "shared":
            made.setdefault("shared", {"redis": "redis://h"})
        (made[section] if section else made)[name] = value
    return made


def with_value(deadline: Deadline, value: object, *, old: bool = False) -> dict[str, Any]:
    key = deadline.old_key if old else deadline.key
    return settings(**{key.replace(".", "__"): value})


def ms_of(deadline: Deadline, config: StoreConfig) -> int:
    shared_ms = None if config.shared is None else config.shared.deadline_ms
    found = {
        LOAD_DEADLINE: config.load_deadline_ms,
        IO_DEADLINE: config.nvme.io_deadline_ms,
        SHARED_DEADLINE: shared_ms,
    }[deadline]
    assert found is not None
    return found


def refusal(given_settings: object) -> str:
    with pytest.raises(ConfigError) as refused:
        StoreConfig.parse(given_settings)
    return str(refused.value)


@EACH
def test_both_names_give_the_same(deadline: Deadline) -> None:
    for ms in (deadline.low_ms, 500, 1500, deadline.high_ms):
        for value, old in ((f"{ms}ms", False), (format_ms(ms), False), (ms, True)):
            config = StoreConfig.parse(with_value(deadline, value, old=old))
            assert ms_of(deadline, config) == ms


@EACH
@pytest.mark.parametrize(
    ("value", "ms"),
    [("1s", 1000), ("1.5s", 1500), ("0.5 s", 500), ("500 ms", 500), ("2.001s", 2001)],
)
def test_units(deadline: Deadline, value: str, ms: int) -> None:
    assert ms_of(deadline, StoreConfig.parse(with_value(deadline, value))) == ms


def test_minutes() -> None:
    assert StoreConfig.parse(settings(load_deadline="1m")).load_deadline_ms == 60_000
    assert StoreConfig.parse(settings(nvme__io_deadline="10m")).nvme.io_deadline_ms == 600_000


@given(st.integers(0, 10**9))
def test_a_printed_time_is_read_back(ms: int) -> None:
    deadline = Deadline("any", 0, 10**9)
    assert deadline.parse({"any": format_ms(ms)}, 1) == ms


@EACH
def test_bounds_are_what_they_were(deadline: Deadline) -> None:
    for beyond in (deadline.low_ms - 1, deadline.high_ms + 1):
        said = refusal(with_value(deadline, beyond, old=True))
        assert said.startswith(f"{deadline.old_key} is {beyond}; it must be an integer from ")
        assert f"Its name is {deadline.key} now" in said
        if beyond >= 0:
            said = refusal(with_value(deadline, f"{beyond}ms"))
            assert f"{deadline.key} is '{beyond}ms'; it must be a time from " in said
            assert f"{format_ms(deadline.low_ms)} to {format_ms(deadline.high_ms)}" in said


@EACH
@pytest.mark.parametrize("value", [0, 1000, 1.5, "1000", "1.5", "-1", -1])
def test_a_number_alone_has_no_unit(deadline: Deadline, value: object) -> None:
    said = refusal(with_value(deadline, value))
    assert f"{deadline.key} is {value!r}, which has no unit" in said and "500ms or 2s" in said


@EACH
@pytest.mark.parametrize("value", [True, "", "soon", "1us", "1.5ms", "1d", "-1s", [1], "1s "])
def test_what_is_no_deadline(deadline: Deadline, value: object) -> None:
    assert f"{deadline.key} is {value!r}; it must be a time" in refusal(with_value(deadline, value))


@EACH
def test_both_names_at_once_are_refused(deadline: Deadline, tmp_path: Path) -> None:
    both = with_value(deadline, "1s")
    (both.get(deadline.section) or both)[deadline.old_name] = 1000
    said = refusal(both)
    assert f"{deadline.key} is '1s' and {deadline.old_key} is 1000" in said
    assert not list(old_names(both))
    file = tmp_path / "a.yaml"
    file.write_text(yaml.safe_dump(both))
    assert main(["check", str(file)]) == 1


def test_no_message_offers_an_old_name() -> None:
    for wrong in (settings(zzz=1), settings(nvme__zzz=1), settings(shared__zzz=1)):
        assert "_ms" not in refusal(wrong)
    assert "did you mean load_deadline?" in refusal(settings(load_deadline_s=1))


@EACH
def test_check_and_doctor_say_the_new_name(
    deadline: Deadline, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "a.yaml"
    old = with_value(deadline, 1500, old=True)
    file.write_text(yaml.safe_dump(old))
    line = next(at for at, text in enumerate(file.read_text().split("\n"), 1) if "_ms" in text)
    hint = f"{deadline.old_key} is called {deadline.key} now: write `{deadline.name}: 1500ms`"
    assert main(["check", str(file)]) == 0
    assert f"{file}: line {line}: {hint}\n" in capsys.readouterr().out
    assert main(["check", str(file), "--json"]) == 0
    said = capsys.readouterr()
    assert json.loads(said.out) == [] and hint in said.err
    before = takewhile(lambda check: check.name != "machine", examine(file, None))
    notes = [check.found for check in before if check.state == "note"]
    assert any(hint in note for note in notes)
    (deadline_given,) = old_names(old)
    assert deadline_given == (deadline.old_key, hint)


def test_the_log_says_it_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plugin, "_checked", set())
    found: dict[str, Any] = {
        "dram": "1MiB",
        "nvme": {"path": str(tmp_path / "kv"), "capacity": "1MiB"},
    }
    transfer = {"kv_connector": "AttnStoreConnector", "kv_connector_extra_config": found}
    argv = ["--kv-transfer-config", json.dumps(transfer)]
    expand(argv)
    assert not [record for record in caplog.records if "old name" in record.message]
    found["load_deadline_ms"] = 2000
    argv = ["--kv-transfer-config", json.dumps(transfer)]
    for _ in range(2):  # vLLM's own processes read it again
        argv = expand(argv)
    said = [record.message for record in caplog.records if "old name" in record.message]
    assert len(said) == 1 and "write `load_deadline: 2s`" in said[0]


def test_settings_that_are_no_mapping_have_no_old_names() -> None:
    wrong: dict[str, Any] = {"nvme": {"io_deadline_ms": "soon"}, "shared": "off"}
    odds: tuple[object, ...] = (None, [], {"nvme": 5}, wrong)
    for odd in odds:
        assert not list(old_names(odd))


def test_no_page_and_no_example_has_an_old_name() -> None:
    """Those that a reader copies. CHANGELOG.md and the runbook say that there were such names."""
    old = re.compile("|".join(rf"\b{each.old_name}\b" for each in DEADLINES))
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    pages = [page for page in pages if page.name != "runbook.md"]
    for folder in ("configs", "deploy", "monitoring", "benchmarks"):
        pages += [path for path in (ROOT / folder).rglob("*.*") if path.suffix != ".pyc"]
    assert len(pages) > 60
    named = [
        page for page in pages if page.is_file() and old.search(page.read_text(errors="replace"))
    ]
    assert not named
