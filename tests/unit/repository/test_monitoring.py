# SPDX-License-Identifier: Apache-2.0
"""monitoring/: the dashboard is what its code makes, and alerts fire when they should.

tests/vllm/test_prometheus.py runs every expression against a real Prometheus and a real server.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard

from attnstore_vllm.scheduler.figures import ERROR_EVENTS
from tests.test_readme import RUNBOOK, anchors, metric_names
from tools import dashboard, docs_site

ROOT = Path(__file__).parents[3]
ALERTS = ROOT / "monitoring" / "alerts.yml"
RULES = yaml.safe_load(ALERTS.read_text(encoding="utf-8"))["groups"][0]["rules"]
VLLMS = {
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:prompt_tokens_by_source_total",
}
NAME = re.compile(r"vllm:\w+")


def expressions() -> Iterator[tuple[str, str]]:
    for panel in dashboard.dashboard()["panels"]:
        for target in panel.get("targets", ()):
            yield f"{panel['title']} {target['refId']}", target["expr"]
    for rule in RULES:
        yield rule["alert"], rule["expr"]


def test_the_dashboard_is_what_its_code_makes() -> None:
    assert dashboard.FILE.read_text(encoding="utf-8") == dashboard.text(), (
        "run python3 tools/dashboard.py"
    )


@pytest.mark.parametrize(("where", "expression"), list(expressions()))
def test_expressions_name_series_that_there_are(where: str, expression: str) -> None:
    series = metric_names()
    ours = {f"vllm:attnstore_{name}" for name in series}
    named = {
        re.sub(r"_seconds_(bucket|count|sum)$", "_seconds", n) for n in NAME.findall(expression)
    }
    named = {re.sub(r"_ratio_bucket$", "_ratio", name) for name in named}
    assert named and named <= ours | VLLMS, f"{where}: no such series: {named - ours - VLLMS}"


OUT_OF_USE = {"device_out": "attnstore_nvme_in_use", "shared_out": "attnstore_shared_in_use"}
"""Kinds whose alert looks at a gauge: it says whether they are over."""


def test_every_kind_of_error_leads_to_the_alert_that_looks_at_it() -> None:
    section = RUNBOOK.partition("### From an error to its alert\n")[2].partition("\n#")[0]
    rows = re.findall(r"^\| (`[^|]+`) \| \[(\w+)\]\(#(\w+)\) \|", section, re.MULTILINE)
    assert all(anchor == alert.lower() for _, alert, anchor in rows)
    leads = {kind: alert for kinds, alert, _ in rows for kind in re.findall(r"\w+", kinds)}
    assert leads.keys() == ERROR_EVENTS
    looks_at = {rule["alert"]: rule["expr"] for rule in RULES}
    for kind, alert in leads.items():
        expression = looks_at[alert]
        kinds = re.findall(r'errors_total\{kind=~?"([^"]+)"', expression)
        is_named = any(re.fullmatch(pattern, kind) for pattern in kinds)
        assert is_named or OUT_OF_USE.get(kind, "nothing") in expression, f"{kind}: {alert}"


def test_panels_lie_side_by_side_and_have_numbers_of_their_own() -> None:
    panels = dashboard.dashboard()["panels"]
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        at = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert at["x"] + at["w"] <= 24 and not cells & taken, panel["title"]
        taken |= cells
    assert len({panel["id"] for panel in panels}) == len(panels)


def lost(given: Any, back: Any, path: str = "") -> Iterator[str]:
    """Paths of what Grafana's own types do not have."""
    if isinstance(given, dict) and isinstance(back, dict):
        for key, value in given.items():
            yield from lost(value, back.get(key), f"{path}/{key}")
    elif isinstance(given, list) and isinstance(back, list) and len(given) == len(back):
        for number, (one, other) in enumerate(zip(given, back, strict=True)):
            yield from lost(one, other, f"{path}/{number}")
    elif given != back:
        yield path


def through_grafana(given: dict[str, Any]) -> Any:
    """The dashboard as Grafana's own types read and write it."""
    register_default_plugins()
    return json.loads(JSONEncoder().encode(Dashboard.from_json(given)))


def test_grafana_knows_every_field() -> None:
    given = dashboard.dashboard()
    assert not list(lost(given, through_grafana(given)))
    given["panels"][1]["gridPos"]["width"] = 3
    given["panels"][1]["targets"][0]["expression"] = "up"
    assert len(list(lost(given, through_grafana(given)))) == 2, "what it does not know is seen"


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: str(rule["alert"]))
def test_every_alert_is_in_the_runbook(rule: dict[str, Any]) -> None:
    anchor = rule["alert"].lower()
    assert anchor in anchors(ROOT / "docs" / "runbook.md")
    assert rule["annotations"]["runbook_url"] == (
        "{{ with $externalLabels.attnstore_docs }}{{ . }}{{ else }}"
        f"http://{docs_site.ADDRESS}{{{{ end }}}}/runbook.html#{anchor}"
    )
    assert rule["labels"]["severity"] in ("critical", "warning")


def promtool(*arguments: str) -> str:
    program = shutil.which("promtool")
    if program is None:
        pytest.skip("promtool is not installed (apt-get install prometheus)")
    done = subprocess.run(
        [program, *arguments], cwd=ALERTS.parent, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_alerts_fire_when_they_should_and_else_not() -> None:
    assert f"{len(RULES)} rules found" in promtool("check", "rules", ALERTS.name)
    assert "SUCCESS" in promtool("test", "rules", "alerts_test.yml")


def test_the_address_of_the_docs_is_a_variable_with_a_default(tmp_path: Path) -> None:
    """The default is what alerts_test.yml expects."""
    default, mine = f"http://{docs_site.ADDRESS}/", "https://docs.example.org/kv/"
    text = (ALERTS.parent / "alerts_test.yml").read_text(encoding="utf-8")
    cases = yaml.safe_load(text.replace(f"runbook_url: {default}", f"runbook_url: {mine}"))
    for case in cases["tests"]:
        case["external_labels"] = {"attnstore_docs": mine.rstrip("/")}
        for check in case["alert_rule_test"]:
            for alert in check["exp_alerts"]:
                assert alert["exp_annotations"]["runbook_url"].startswith(mine)
    shutil.copyfile(ALERTS, tmp_path / ALERTS.name)
    (tmp_path / "mine.yml").write_text(yaml.safe_dump(cases), encoding="utf-8")
    assert "SUCCESS" in promtool("test", "rules", str(tmp_path / "mine.yml"))
    page = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
    assert "external_labels: {attnstore_docs: " in page


def test_every_alert_has_a_test() -> None:
    cases = yaml.safe_load((ALERTS.parent / "alerts_test.yml").read_text(encoding="utf-8"))
    tested = {case["name"] for case in cases["tests"]}
    assert tested == {rule["alert"] for rule in RULES}
    for case in cases["tests"]:
        assert any(not check["exp_alerts"] for check in case["alert_rule_test"]), case["name"]
