# SPDX-License-Identifier: Apache-2.0
"""The audit of a real server whose settings say nothing of it: `attnstore audit` asks it, and a
start computes what it finds before it serves any of it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from attnstore_lab.testing.tiny_model import TINY, make_model
from attnstore_vllm.cli.main import EXIT_OK, main
from attnstore_vllm.index.prefix import whole_blocks
from benchmarks.server import VllmServer
from tests.vllm import serve_helpers as serving
from tests.vllm.serve_helpers import ask_and_count, ask_and_store, story

pytestmark = pytest.mark.long

ON = "AttnStore audits one hit in 10000, up to 1000 tokens a second"
WORDS = 700
"""Of a prompt of more than 1,024 tokens: so many are tried at a start."""


def started(models: Path, home: Path) -> VllmServer:
    """To be entered; each on the same store."""
    extra = serving.settings(home / "store", dram="64MiB")
    del extra["audit"]  # other tests turn it off
    flag = serving.in_yaml(home / "attnstore.yaml", extra)
    model = make_model(models / "serve", TINY)
    return serving.server(model, home / "log", serving.FLAG, flag)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("audit")


@pytest.fixture(scope="module")
def server(models: Path, home: Path) -> Iterator[VllmServer]:
    with started(models, home) as found:
        yield found


def test_the_prompt_is_stored_and_then_all_of_it_is_compared(
    server: VllmServer, capsys: pytest.CaptureFixture[str], home: Path
) -> None:
    def audit() -> Any:
        assert main(["audit", server.base_url, "--json"]) == EXIT_OK
        return json.loads(capsys.readouterr().out)

    assert ON in (home / "log").read_text()
    assert "It is now: ask again" in audit()["said"]
    serving.empty_hbm(server)
    found = audit()
    outcomes = found["outcomes"]
    assert outcomes["agreed"] > 1 and outcomes["differed"] == outcomes["not_compared"] == 0
    assert found["said"] == f"{outcomes['agreed']} chunks are what the model computes"


def test_a_start_computes_the_first_prompt_that_it_finds_and_serves_the_next(
    server: VllmServer, models: Path, home: Path
) -> None:
    """Within one process hits are served, but for one in 10,000."""
    answers = [ask_and_store(server, story(name, WORDS)) for name in ("first", "second")]
    stored = whole_blocks(answers[0].prompt_tokens - 1)
    assert stored > 1024
    assert ask_and_count(server, story("first", WORDS)) == (
        answers[0],
        {"dram": stored, "nvme": 0},
    )
    server.stop()
    with started(models, home) as again:
        tried = ask_and_count(again, story("first", WORDS))
        assert tried == (answers[0], {"dram": 0, "nvme": 0})

        def has_agreed() -> bool:
            serving.nudge(again)
            return serving.count(again, "audits", outcome="agreed") >= stored // serving.CHUNK

        serving.wait_until(has_agreed, "what was found is compared")
        stored = whole_blocks(answers[1].prompt_tokens - 1)
        served = ask_and_count(again, story("second", WORDS))
        assert served == (answers[1], {"dram": 0, "nvme": stored})
        assert serving.count(again, "audits", outcome="differed") == 0
