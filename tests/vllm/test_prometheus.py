# SPDX-License-Identifier: Apache-2.0
"""A real Prometheus scrapes a real server: each expression of dashboard and alerts runs."""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from attnstore_lab.testing.tiny_model import TINY, make_model
from attnstore_vllm.cli.main import EXIT_OK, main
from benchmarks.server import VllmServer
from tests.vllm import serve_helpers as serving
from tools import dashboard

pytestmark = pytest.mark.long
ROOT = Path(__file__).parents[2]
ALERTS = ROOT / "monitoring" / "alerts.yml"
MAY_BE_EMPTY = {"Forecasts", "Waits for NVMe", "Copies into HBM", "Shared tier in use"}
"""Panels of what need not happen in a minute, or is not there without a shared tier."""


class Prometheus:
    """A Prometheus that scrapes one server each second. Its data goes with `directory`."""

    def __init__(self, program: str, directory: Path, target: str) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.url = f"http://127.0.0.1:{free.getsockname()[1]}"
        jobs = [{"job_name": "vllm", "static_configs": [{"targets": [target]}]}]
        settings = {
            "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
            "scrape_configs": jobs,
            "rule_files": [str(ALERTS)],
        }
        (directory / "prometheus.yml").write_text(yaml.safe_dump(settings))
        self._log = (directory / "prometheus.log").open("wb")
        self._process = subprocess.Popen(
            [program, f"--config.file={directory}/prometheus.yml",
             f"--storage.tsdb.path={directory}/data",
             f"--web.listen-address={self.url.removeprefix('http://')}"],
            stdout=self._log, stderr=subprocess.STDOUT,
        )  # fmt: skip

    def get(self, path: str, **query: str) -> Any:
        url = f"{self.url}/api/v1/{path}?{urllib.parse.urlencode(query)}"
        with urllib.request.urlopen(url, timeout=20) as answer:
            found = json.load(answer)
        assert found["status"] == "success", found
        return found["data"]

    def is_up(self) -> bool:
        try:
            return bool(self.values("up == 1"))
        except OSError:
            return False

    def values(self, expression: str) -> list[float]:
        return [float(row["value"][1]) for row in self.get("query", query=expression)["result"]]

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(30)
        self._log.close()


@pytest.fixture(scope="module")
def server(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmServer]:
    home = tmp_path_factory.mktemp("prometheus")
    extra = serving.settings(home / "store", dram="4MiB")
    flag = serving.in_yaml(home / "attnstore.yaml", extra)
    with serving.server(
        make_model(models / "serve", TINY), home / "log", serving.FLAG, flag
    ) as found:
        yield found


@pytest.fixture(scope="module")
def prometheus(
    server: VllmServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Prometheus]:
    program = shutil.which("prometheus")
    if program is None:
        pytest.skip("prometheus is not installed (apt-get install prometheus)")
    target = server.base_url.removeprefix("http://")
    made = Prometheus(program, tmp_path_factory.mktemp("tsdb"), target)
    try:
        serving.wait_until(made.is_up, "Prometheus scrapes the server")
        for _ in range(3):  # turns from HBM, DRAM and NVMe, under the eyes of Prometheus
            for number in range(8):
                serving.ask(server, serving.story(number, 700))
            serving.empty_hbm(server)
        serving.wait_until(
            lambda: made.values('sum(vllm:attnstore_loaded_tokens_total{tier="nvme"})')[0] > 0,
            "Prometheus has seen a load from NVMe",
        )
        yield made
    finally:
        made.close()


def filled_in(expression: str) -> str:
    return expression.replace("$__rate_interval", "1m").replace("$instance", ".*")


def test_every_panel_shows_something(prometheus: Prometheus) -> None:
    empty = []
    for panel in dashboard.dashboard()["panels"]:
        for target in panel.get("targets", ()):
            found = prometheus.values(filled_in(target["expr"]))
            if not found and panel["title"] not in MAY_BE_EMPTY:
                empty.append(f"{panel['title']}: {target['expr']}")
    assert not empty, "\n".join(empty)


def test_shares_are_shares(prometheus: Prometheus) -> None:
    panels = {panel["title"]: panel for panel in dashboard.dashboard()["panels"]}
    shares = [
        value
        for target in panels["Not computed"]["targets"]
        for value in prometheus.values(filled_in(target["expr"]))
    ]
    assert 0 < sum(shares) < 1
    (saved,) = prometheus.values("sum(vllm:attnstore_prefill_seconds_saved_total)")
    assert saved > 0


def test_every_alert_is_evaluated_and_none_fires(prometheus: Prometheus) -> None:
    def healths() -> dict[str, str]:
        (group,) = prometheus.get("rules")["groups"]
        return {rule["name"]: rule["health"] for rule in group["rules"]}

    serving.wait_until(lambda: set(healths().values()) == {"ok"}, "all rules are evaluated")
    assert len(healths()) == len(re.findall("- alert:", ALERTS.read_text(encoding="utf-8")))
    firing = [alert for alert in prometheus.get("alerts")["alerts"] if alert["state"] == "firing"]
    assert not firing
    assert prometheus.values("process_start_time_seconds"), "AttnStoreWrongKv looks at it"


def test_names_are_as_prometheus_wants_them(server: VllmServer) -> None:
    program = shutil.which("promtool")
    if program is None:
        pytest.skip("promtool is not installed (apt-get install prometheus)")
    with urllib.request.urlopen(f"{server.base_url}/metrics", timeout=20) as answer:
        text = answer.read()
    done = subprocess.run(
        [program, "check", "metrics"], input=text, capture_output=True, check=False
    )
    said = (done.stdout + done.stderr).decode().splitlines()
    # vLLM's own custom: a colon in its names.
    problems = [s for s in said if "vllm:attnstore" in s and "should not contain ':'" not in s]
    assert not problems, "\n".join(problems)


def test_top_shows_the_server(
    server: VllmServer, prometheus: Prometheus, capsys: pytest.CaptureFixture[str]
) -> None:
    """Args: prometheus: there were requests."""
    assert main(["top", server.base_url, "--once", "--json"]) == EXIT_OK
    (found,) = json.loads(capsys.readouterr().out)
    tokens = found["prompt_tokens"]
    assert tokens["dram"] + tokens["nvme"] > 0 and tokens["computed"] > 0
    assert found["prefill_seconds_saved"] > 0 and found["nvme_in_use"]
    assert not any(found["errors"].values())
