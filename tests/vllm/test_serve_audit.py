# SPDX-License-Identifier: Apache-2.0
"""`attnstore audit` asks a real server, whose figures come as they do when it is idle."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from attnstore_lab.testing.tiny_model import TINY, make_model
from attnstore_vllm.cli.main import EXIT_OK, main
from benchmarks.server import VllmServer
from tests.vllm import serve_helpers as serving

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def server(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmServer]:
    home = tmp_path_factory.mktemp("audit")
    extra = serving.settings(home / "store", dram="64MiB") | {"audit": "1/1000000"}
    flag = serving.in_yaml(home / "attnstore.yaml", extra)
    with serving.server(
        make_model(models / "serve", TINY), home / "log", serving.FLAG, flag
    ) as found:
        yield found


def test_the_prompt_is_stored_and_then_all_of_it_is_compared(
    server: VllmServer, capsys: pytest.CaptureFixture[str]
) -> None:
    def audit() -> Any:
        assert main(["audit", server.base_url, "--json"]) == EXIT_OK
        return json.loads(capsys.readouterr().out)

    assert "It is now: ask again" in audit()["said"]
    serving.empty_hbm(server)
    found = audit()
    outcomes = found["outcomes"]
    assert outcomes["agreed"] > 1 and outcomes["differed"] == outcomes["not_compared"] == 0
    assert found["said"] == f"{outcomes['agreed']} chunks are what the model computes"
