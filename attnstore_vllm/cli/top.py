# SPDX-License-Identifier: Apache-2.0
"""`attnstore top URL...`: live view of servers by their /metrics.

The first look has figures since the server's start, each later one those since the look before.
"""

from __future__ import annotations

import http.client
import json
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence, Set
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from attnstore_vllm.config.values import format_size
from attnstore_vllm.errors import AttnStoreError
from attnstore_vllm.prometheus import Metrics, parse_metrics, total
from attnstore_vllm.types import ERRORS

TIMEOUT_S = 5.0
ANSWER_MAX = 64 << 20
"""Bytes of one answer: more is no /metrics."""
_STORE = "vllm:attnstore_"
SOURCES = ("hbm", "dram", "nvme", "peers", "shared", "computed")
FLOWS = {
    "hbm_to_dram": "HBM to DRAM",
    "dram_to_hbm": "DRAM to HBM",
    "dram_to_nvme": "DRAM to NVMe",
    "nvme_to_dram": "NVMe to DRAM",
    "peers_to_dram": "siblings to DRAM",
    "dram_to_shared": "DRAM to shared",
    "shared_to_dram": "shared to DRAM",
}
WIDTH = 100
"""Characters of a table where there is no terminal to ask."""


class TopError(AttnStoreError):
    """A server cannot be shown. The message is a sentence."""


QUOTA_TIERS = {"dram": "DRAM", "nvme": "NVMe", "shared": "shared"}
"""Tiers that tenants have quotas of."""


@dataclass(frozen=True, slots=True)
class Look:
    """One server, over some seconds. Counts are of that time, sizes of its end."""

    url: str
    seconds: float | None
    """None: since the server's start, so that nothing is known a second."""
    prompt_tokens: dict[str, int]
    """By source: SOURCES."""
    ttft_seconds: dict[str, float | None]
    """By source, the mean; None: no request came to its first token."""
    moved_bytes: dict[str, int]
    running: int
    waiting: int
    waits: int
    """Requests that waited for NVMe, and are answered."""
    wait_seconds: float
    """All of them together."""
    waits_in_vain: int
    prefill_seconds_saved: float
    held_bytes: dict[str, int]
    capacity_bytes: dict[str, int]
    dirty_bytes: int
    tenants: dict[str, dict[str, tuple[int, int]]]
    """By tenant with a quota, and tier that it is of: bytes that it holds, and may hold."""
    nvme_in_use: bool
    shared_in_use: bool | None
    """None: there is no shared tier."""
    siblings: dict[str, int]
    """Engines of its host that its engines ask, each counted by each: `ready` now, and `all`."""
    errors: dict[str, int]

    def share(self, source: str) -> float:
        """The part of all prompt tokens that came from there, 0 to 1."""
        return self.prompt_tokens[source] / max(1, sum(self.prompt_tokens.values()))

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def metrics_url(url: str) -> str:
    """The address of /metrics that a user's host, base address or own address means."""
    full = url if "://" in url else f"http://{url}"
    return full if full.endswith("/metrics") else f"{full.rstrip('/')}/metrics"


def read(url: str) -> Metrics:
    """The server's figures now. Raises: TopError."""
    address = metrics_url(url)
    try:
        with urllib.request.urlopen(address, timeout=TIMEOUT_S) as answer:
            metrics = parse_metrics(answer.read(ANSWER_MAX).decode(errors="replace"))
    except urllib.error.HTTPError as error:
        raise TopError(f"{address} answers {error.code} {error.reason}; is it vLLM?") from error
    except (OSError, http.client.HTTPException, ValueError) as error:
        reason = getattr(error, "reason", error)
        raise TopError(f"{address} does not answer: {reason}") from error
    if not any(name.startswith(_STORE) for name, _ in metrics):
        raise TopError(
            f"{address} has no figures of AttnStore; was the server started with "
            "--kv-transfer-config attnstore.yaml?"
        )
    return metrics


def figures(url: str, before: Metrics, after: Metrics, seconds: float | None) -> Look:
    """Between two looks; `before` is empty for those since the server's start."""

    def grown(name: str, **labels: str) -> float:
        return max(0.0, total(after, name, **labels) - total(before, name, **labels))

    def by(name: str, label: str, values: Sequence[str]) -> dict[str, int]:
        full = f"{_STORE}{name}_total"
        return {value: int(grown(full, **{label: value})) for value in values}

    def mean(name: str, **labels: str) -> float | None:
        number = grown(f"{_STORE}{name}_count", **labels)
        return grown(f"{_STORE}{name}_sum", **labels) / number if number else None

    def sizes(name: str) -> dict[str, int]:
        return {tier: int(total(after, f"{_STORE}{name}", tier=tier)) for tier in ("dram", "nvme")}

    in_use, shared_in_use = (
        [v for (name, _), v in after.items() if name == f"{_STORE}{tier}_in_use"]
        for tier in ("nvme", "shared")
    )
    return Look(
        url=url,
        seconds=seconds,
        prompt_tokens=by("prompt_tokens", "source", SOURCES),
        ttft_seconds={source: mean("ttft_seconds", source=source) for source in SOURCES},
        moved_bytes=by("bytes", "direction", list(FLOWS)),
        running=int(total(after, "vllm:num_requests_running")),
        waiting=int(total(after, "vllm:num_requests_waiting")),
        waits=int(grown(f"{_STORE}wait_seconds_count")),
        wait_seconds=grown(f"{_STORE}wait_seconds_sum"),
        waits_in_vain=int(grown(f"{_STORE}recomputations_total", cause="deadline")),
        prefill_seconds_saved=grown(f"{_STORE}prefill_seconds_saved_total"),
        held_bytes=sizes("held_bytes"),
        capacity_bytes=sizes("capacity_bytes"),
        dirty_bytes=int(total(after, f"{_STORE}dirty_bytes")),
        tenants=_tenants(after),
        nvme_in_use=all(in_use),
        shared_in_use=all(shared_in_use) if shared_in_use else None,
        siblings={
            state: int(total(after, f"{_STORE}siblings", state=state)) for state in ("ready", "all")
        },
        errors=by("errors", "kind", ERRORS),
    )


def _tenants(metrics: Metrics) -> dict[str, dict[str, tuple[int, int]]]:
    held, most = f"{_STORE}tenant_held_bytes", f"{_STORE}tenant_quota_bytes"
    shown = [dict(labels) for name, labels in metrics if name == most]
    found: dict[str, dict[str, tuple[int, int]]] = {}
    for tenant in sorted({labels.get("tenant", "") for labels in shown}):
        tiers = {labels.get("tier", "") for labels in shown if labels.get("tenant", "") == tenant}
        found[tenant] = {
            tier: (
                int(total(metrics, held, tenant=tenant, tier=tier)),
                int(total(metrics, most, tenant=tenant, tier=tier)),
            )
            for tier in QUOTA_TIERS
            if tier in tiers
        }
    return found


class Servers:
    """The last look at each server, and the next."""

    def __init__(self, urls: Sequence[str]) -> None:
        self._urls = urls
        self._last: dict[str, tuple[float, Metrics]] = {}

    def look(self) -> list[Look | TopError]:
        """One entry a server, in their order; an error for one that cannot be shown."""
        return [self._look(url) for url in self._urls]

    def _look(self, url: str) -> Look | TopError:
        try:
            now = read(url)
        except TopError as error:
            return error
        at, (before_at, before) = time.monotonic(), self._last.get(url, (None, {}))
        self._last[url] = at, now
        return figures(url, before, now, None if before_at is None else at - before_at)


def run(urls: Sequence[str], interval_s: float, *, once: bool, as_json: bool) -> None:
    """Show the servers until the user interrupts, or once.

    Raises: TopError if it is to be once and a server cannot be shown, or none can at the first
        look; KeyboardInterrupt.
    """
    servers = Servers(urls)
    seen = servers.look()
    failed = [found for found in seen if isinstance(found, TopError)]
    if len(failed) == len(urls):
        raise failed[0]
    if once or as_json or not sys.stdout.isatty():
        while True:
            _print(seen, as_json=as_json)
            if once:
                break
            time.sleep(interval_s)
            seen = servers.look()
        if failed:
            raise failed[0]
        return
    console = Console()
    with Live(table(seen), console=console, auto_refresh=False, screen=False) as live:
        while True:
            time.sleep(interval_s)
            live.update(table(servers.look()), refresh=True)


def _print(seen: Sequence[Look | TopError], *, as_json: bool) -> None:
    if as_json:
        print(
            json.dumps(
                [
                    {"error": str(found)} if isinstance(found, TopError) else found.as_json()
                    for found in seen
                ]
            ),
            flush=True,
        )
        return
    is_terminal = sys.stdout.isatty()
    console = Console(width=None if is_terminal else WIDTH, highlight=False)
    with console.capture() as captured:
        console.print(table(seen))
    print(captured.get(), end="", flush=True)


def table(seen: Sequence[Look | TopError]) -> Group:
    """One column a server. Errors stand below."""
    shown = [found for found in seen if isinstance(found, Look)]
    since = "since the start" if any(f.seconds is None for f in shown) else "now"
    grid = Table(title=f"AttnStore, {since}", title_justify="left", box=None)
    grid.add_column("")
    for found in shown:
        grid.add_column(found.url, justify="right")
    absent = set.intersection(*map(_absent, shown)) if shown else set()
    columns = [cells(found, absent) for found in shown]
    for name in dict.fromkeys(name for column in columns for name in column):
        # Only of tenants: each server has its own.
        grid.add_row(name, *(column.get(name, "-") for column in columns))
    problems = [Text(str(found), style="red") for found in seen if isinstance(found, TopError)]
    return Group(grid, *problems) if columns else Group(*problems)


def _absent(found: Look) -> set[str]:
    """Sources that this server has not."""
    has = {"peers": found.siblings["all"] > 0, "shared": found.shared_in_use is not None}
    return {source for source, is_there in has.items() if not is_there}


def cells(found: Look, absent: Set[str]) -> dict[str, str]:
    """The rows of one server, by their names; without those of `absent` sources."""
    rows = {"prompt tokens": f"{sum(found.prompt_tokens.values()):,}"}
    names = {"hbm": "HBM", "dram": "DRAM", "nvme": "NVMe", "peers": "siblings"}
    for source in SOURCES:
        if source in absent:
            continue
        name = names.get(source, source)
        rows[f"  {name}"] = f"{found.share(source):.1%}"
    for source in SOURCES:
        if source in absent:
            continue
        seconds = found.ttft_seconds[source]
        cell = "-" if seconds is None else f"{1e3 * seconds:,.0f} ms"
        rows[f"TTFT, {names.get(source, source)}, mean"] = cell
    rows["prefill saved"] = f"{found.prefill_seconds_saved:,.1f} s"
    rows["requests running, waiting"] = f"{found.running}, {found.waiting}"
    mean_s = found.wait_seconds / found.waits if found.waits else 0.0
    rows["waits for NVMe, mean"] = f"{found.waits}, {1e3 * mean_s:,.0f} ms"
    rows["  in vain"] = f"{found.waits_in_vain}"
    for flow, name in FLOWS.items():
        if any(tier in flow for tier in absent):
            continue
        num_bytes = found.moved_bytes[flow]
        rows[name] = (
            format_size(num_bytes)
            if found.seconds is None
            else f"{format_size(round(num_bytes / found.seconds))}/s"
        )
    for tier, name in (("dram", "DRAM"), ("nvme", "NVMe")):
        held, capacity = found.held_bytes[tier], found.capacity_bytes[tier]
        rows[f"{name} in use"] = f"{format_size(held)} of {format_size(capacity)}"
    for tenant, tiers in found.tenants.items():
        for tier, (held, most) in tiers.items():
            row = f"  tenant {tenant}, {QUOTA_TIERS[tier]}"
            rows[row] = f"{format_size(held)} of {format_size(most)}"
    rows["not yet on NVMe"] = format_size(found.dirty_bytes)
    errors = [f"{n} {kind}" for kind, n in found.errors.items() if n]
    rows["errors"] = ", ".join([*_out_of_use(found), *errors]) or "none"
    return rows


def _out_of_use(found: Look) -> list[str]:
    tiers = (("NVMe", found.nvme_in_use), ("the shared tier", found.shared_in_use))
    out = [f"{name} is out of use" for name, in_use in tiers if in_use is False]
    num_links = found.siblings["all"]
    if num_down := num_links - found.siblings["ready"]:
        out.append(f"{num_down} of {num_links} links to siblings are down")
    return out
