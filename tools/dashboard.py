# SPDX-License-Identifier: Apache-2.0
"""The Grafana dashboard, monitoring/dashboard.json: made of PANELS, and never edited by hand.

    python3 tools/dashboard.py        (tests/unit/repository/test_monitoring.py compares)

Standard library only.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
FILE = ROOT / "monitoring" / "dashboard.json"
SOURCE = {"type": "prometheus", "uid": "${datasource}"}
WIDTH, HEIGHT, COLUMNS = 8, 7, 3
RATE = "[$__rate_interval]"
OF = '{instance=~"$instance"}'
_P = "vllm:attnstore_"


@dataclass(frozen=True, slots=True)
class Panel:
    """One picture.

    Args:
        unit: Grafana's name of it.
        lines: legend to PromQL.
        kind: timeseries or stat.
        is_stacked: the lines are parts of a whole.
        most: of the axis, or None.
    """

    title: str
    text: str
    unit: str
    lines: dict[str, str]
    kind: str = "timeseries"
    is_stacked: bool = False
    most: float | None = None


def of(name: str, **labels: str) -> str:
    """A selector of one of our series, of the chosen servers."""
    more = "".join(f', {label}=~"{value}"' for label, value in labels.items())
    return f'{_P}{name}{{instance=~"$instance"{more}}}'


def rate(selector: str, by: str = "") -> str:
    return f"sum{f' by ({by})' if by else ''} (rate({selector}{RATE}))"


def share(part: str, whole: str) -> str:
    return f"{rate(part)} / {rate(whole)}"


def quantile(name: str, q: float, by: str = "") -> str:
    labels = f"le, {by}" if by else "le"
    return f"histogram_quantile({q}, {rate(of(f'{name}_bucket'), labels)})"


PROMPTS = of("prompt_tokens_total")
PANELS: dict[str, list[Panel]] = {
    "Is it worth it?": [
        Panel("Prompt tokens by source", "Where the KV of prompt tokens comes from.", "short",
              {"{{source}}": rate(PROMPTS, "source")}, is_stacked=True),
        Panel("Not computed", "Share of prompt tokens whose KV was there.", "percentunit", {
            "HBM": share(of("prompt_tokens_total", source="hbm"), PROMPTS),
            "DRAM": share(of("prompt_tokens_total", source="dram"), PROMPTS),
            "NVMe": share(of("prompt_tokens_total", source="nvme"), PROMPTS),
            "siblings": share(of("prompt_tokens_total", source="peers"), PROMPTS),
            "shared": share(of("prompt_tokens_total", source="shared"), PROMPTS),
        }, is_stacked=True, most=1),
        Panel("Prefill saved", "Seconds of prefill that each second saves.", "s",
              {"{{tier}}": rate(of("prefill_seconds_saved_total"), "tier")}, is_stacked=True),
        Panel("Prefill saved, in all", "Since the servers started.", "s",
              {"saved": f"sum ({of('prefill_seconds_saved_total')})"}, kind="stat"),
        Panel("What serves", "Versions, disk I/O and order of eviction.", "short", {
            "{{instance}}: {{version}}, vLLM {{vllm}}, {{io}}, {{eviction}}": of("info"),
        }, kind="stat"),
        Panel("vLLM's own count", "Prompt tokens by source, as vLLM counts them.", "short", {
            "{{source}}": rate(f"vllm:prompt_tokens_by_source_total{OF}", "source"),
        }, is_stacked=True),
    ],
    "Why was a request slow?": [
        Panel("Queue", "Requests of vLLM.", "short", {
            "running": f"sum (vllm:num_requests_running{OF})",
            "waiting": f"sum (vllm:num_requests_waiting{OF})",
        }),
        Panel("First token, median", "TTFT by the furthest tier that a prompt's KV came from.", "s",
              {"{{source}}": quantile("ttft_seconds", 0.5, "source")}),
        Panel("First token, 95 %", "The slowest one in twenty.", "s",
              {"{{source}}": quantile("ttft_seconds", 0.95, "source")}),
        Panel("Waits for NVMe", "Time that requests waited for their KV to come up.", "s", {
            "median": quantile("wait_seconds", 0.5), "95 %": quantile("wait_seconds", 0.95),
        }),
        Panel("Computed though stored", "Requests a second, by cause.", "reqps",
              {"{{cause}}": rate(of("recomputations_total"), "cause")}),
        Panel("Look-ahead", "Share of wanted tokens that were in DRAM in time.", "percentunit", {
            "in DRAM": share(of("wanted_tokens_total", tier="dram"), of("wanted_tokens_total")),
        }, most=1),
        Panel("Put off", "Work beyond a step's budget, by kind.", "ops",
              {"{{work}}": rate(of("put_off_total"), "work")}),
        Panel("Copies into HBM", "A load, and what a forward pass waited for.", "s", {
            "load, 95 %": quantile("load_seconds", 0.95),
            "wait, 95 %": quantile("load_wait_seconds", 0.95),
        }),
        Panel("Forecasts", "What came over what was expected, median.", "short", {
            "wait": quantile("wait_forecast_ratio", 0.5),
            "step": quantile("step_forecast_ratio", 0.5),
        }),
    ],
    "Is my disk dying?": [
        Panel("Errors", "What failed, in an hour.", "short",
              {"{{kind}}": f"sum by (kind) (increase({of('errors_total')}[1h]))"}),
        Panel("Reads", "Time of one read of a record.", "s", {
            "median": quantile("nvme_read_seconds", 0.5),
            "99 %": quantile("nvme_read_seconds", 0.99),
        }),
        Panel("Writes", "Time of one write of a record.", "s", {
            "median": quantile("nvme_write_seconds", 0.5),
            "99 %": quantile("nvme_write_seconds", 0.99),
        }),
        Panel("In use", "0: the disk is left alone after failures.", "short",
              {"{{instance}} {{direction}}": of("nvme_in_use")}, most=1),
        Panel("Bytes moved", "Between the tiers.", "Bps",
              {"{{direction}}": rate(of("bytes_total"), "direction")}),
        Panel("Write amplification", "Bytes written for each byte of KV first stored.", "short", {
            "written": share(of("bytes_total", direction="dram_to_nvme"),
                             of("first_written_bytes_total")),
        }),
        Panel("Audited chunks", "Computed though stored. differed: wrong KV.", "short", {
            "{{outcome}}": f"sum by (outcome) (increase({of('audits_total')}[1h]))",
        }),
    ],
    "What do other engines bring?": [
        Panel("Found there", "Prompt tokens from siblings of this host, and from the shared tier.",
              "short", {
                  "{{source}}": rate(of("prompt_tokens_total", source="peers|shared"), "source"),
              }, is_stacked=True),
        Panel("Bytes from and to others", "Over the network, and from siblings.", "Bps", {
            "{{direction}}": rate(
                of("bytes_total", direction="peers_to_dram|dram_to_shared|shared_to_dram"),
                "direction",
            ),
        }),
        Panel("Answers", "Chunks that others had, had no more, or did not speak of in time.",
              "short", {
                  "{{event}}": rate(
                      of("chunks_total", event="found|gone|answers_late|is_there"), "event"
                  ),
              }),
        Panel("Shared tier in use", "0: it is left alone, or not joined. Empty: there is none.",
              "short", {"{{instance}} {{engine}} {{direction}}": of("shared_in_use")}, most=1),
        Panel("Errors of the shared tier", "What failed, in an hour.", "short", {
            "{{kind}}": f"sum by (kind) (increase({of('errors_total', kind='shared_.*')}[1h]))",
        }),
        Panel("Siblings missing", "Engines of this host that are asked for KV and do not answer.",
              "short", {
                  "{{instance}} {{engine}}":
                      f"sum by (instance, engine) ({of('siblings', state='all')})"
                      f" - sum by (instance, engine) ({of('siblings', state='ready')})",
              }),
    ],
    "How big should the tiers be?": [
        Panel("Full", "Share of slots in use.", "percentunit", {
            "{{instance}} {{tier}}": f"{of('held_bytes')} / {of('capacity_bytes')}",
        }, most=1),
        Panel("DRAM of other sizes", "Share of prompt tokens that DRAM of so many times its size "
              "would have had.", "percentunit",
              {"{{times}} x": f"avg by (times) ({of('dram_curve_ratio')})"}, most=1),
        Panel("Leaves", "Chunks that gave their place to another, or found none.", "short", {
            "{{event}}": rate(
                of("chunks_total", event="evicted_dram|evicted_nvme|given_up|lost|dropped|refused"),
                "event",
            ),
        }),
        Panel("Not yet on NVMe", "What a power cut would lose.", "bytes",
              {"{{instance}}": of("dirty_bytes")}),
    ],
}  # fmt: skip


def target(number: int, legend: str, expression: str) -> dict[str, Any]:
    return {
        "refId": chr(ord("A") + number),
        "datasource": SOURCE,
        "expr": expression,
        "legendFormat": legend,
        "range": True,
    }


def panel(made: Panel, number: int, x: int, y: int) -> dict[str, Any]:
    defaults: dict[str, Any] = {"unit": made.unit, "min": 0}
    options: dict[str, Any]
    if made.most is not None:
        defaults["max"] = made.most
    if made.kind == "timeseries":
        stacking = {"mode": "normal" if made.is_stacked else "none", "group": "A"}
        defaults["custom"] = {"stacking": stacking, "fillOpacity": 30 if made.is_stacked else 0}
        options = {"legend": {"displayMode": "list", "placement": "bottom", "showLegend": True}}
    else:
        options = {"reduceOptions": {"calcs": ["lastNotNull"]}, "textMode": "value_and_name"}
    return {
        "id": number, "type": made.kind, "title": made.title, "description": made.text,
        "datasource": SOURCE, "gridPos": {"x": x, "y": y, "w": WIDTH, "h": HEIGHT},
        "targets": [target(i, *line) for i, line in enumerate(made.lines.items())],
        "fieldConfig": {"defaults": defaults, "overrides": []}, "options": options,
    }  # fmt: skip


def dashboard() -> dict[str, Any]:
    panels: list[dict[str, Any]] = []
    y = 0
    for title, row in PANELS.items():
        panels.append(
            {
                "id": len(panels) + 1,
                "type": "row",
                "title": title,
                "collapsed": False,
                "panels": [],
                "gridPos": {"x": 0, "y": y, "w": WIDTH * COLUMNS, "h": 1},
            }
        )
        y += 1
        for place, made in enumerate(row):
            x = WIDTH * (place % COLUMNS)
            panels.append(panel(made, len(panels) + 1, x, y + HEIGHT * (place // COLUMNS)))
        y += HEIGHT * -(-len(row) // COLUMNS)
    return {
        "uid": "attnstore", "title": "AttnStore", "tags": ["vllm", "attnstore"], "editable": False,
        "schemaVersion": 39, "refresh": "10s", "timezone": "browser",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": [
            {"name": "datasource", "label": "Prometheus", "type": "datasource",
             "query": "prometheus"},
            {"name": "instance", "label": "Server", "type": "query", "datasource": SOURCE,
             "query": "label_values(vllm:attnstore_chunks_total, instance)", "refresh": 2,
             "multi": True, "includeAll": True, "allValue": ".*",
             "current": {"text": "All", "value": "$__all"}},
        ]},
        "panels": panels,
    }  # fmt: skip


def text() -> str:
    return json.dumps(dashboard(), indent=1) + "\n"


def main() -> None:
    FILE.write_text(text(), encoding="utf-8")
    print(f"{FILE.relative_to(ROOT)}: {sum(map(len, PANELS.values()))} panels")


if __name__ == "__main__":
    main()
