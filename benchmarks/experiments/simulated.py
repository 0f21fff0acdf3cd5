# SPDX-License-Identifier: Apache-2.0
"""Experiments in virtual time: `attnstore simulate`'s server, over points and policies.

A run is kept in .cache/ by all that it depends on, so that experiments which ask for the same
one share it.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields, replace
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

from tqdm import tqdm

from attnstore_lab.cli import simulate_server
from attnstore_lab.sim.formats import Arrivals, read_trace
from attnstore_lab.sim.hardware import Machine
from attnstore_lab.sim.outcome import Outcome
from attnstore_lab.sim.server import POLICIES, Server
from attnstore_lab.sim.trace import Trace
from benchmarks.data import facts as data_facts
from benchmarks.experiments.spec import Experiment, SpecError
from benchmarks.placement import pooled

ROOT: Final = Path(__file__).parent.parent.parent
MACHINES: Final = ROOT / "configs" / "machines"
CACHE: Final = ROOT / ".cache" / "experiments"
SOURCES: Final = ("sim", "scheduler", "policy", "index", "store", "io", "transfer")
RECOMPUTE: Final = "recompute"
DEFAULTS: Final = {"rate": 1.0, "sessions": 9000, "think_s": 60.0, "warmup": 10 / 52, "seed": 1}
"""The paper's set-up: 10K of 52K turns warm up; how long its users think it does not say."""
DRAM_SHARE: Final = 0.1
"""Of a capacity that is given for both tiers."""
GB: Final = 1e9
_NO_DISK: Final = {"nvme": 1, "nvme_read": 1, "nvme_write": 1}


@dataclass(frozen=True, slots=True)
class Point:
    """One run. Sizes in bytes."""

    machine: Machine
    policy: str
    rate: float
    sessions: int
    think_s: float
    warmup: float
    seed: int
    gpus: int
    """That the machine stands for, where the experiment says."""
    capacity_of_hour: float | None = None
    """DRAM and NVMe together, over the KV of the sessions that begin in an hour."""


Value = Callable[[Outcome, Outcome, Point, Mapping[str, Any]], float | None]
"""Of a run, the run of the experiment's `over` at the same point (by default the one that computes
everything; empty if there is none), the point, the experiment."""


def mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None


def over(part: float | None, whole: float | None) -> float | None:
    return None if part is None or not whole else part / whole


def throughput(out: Outcome) -> float | None:
    return over(out.prompt_tokens, out.prefill_s)


def cost(out: Outcome, re: Outcome, point: Point, body: Mapping[str, Any]) -> float | None:
    """Money of a run over that of computing everything.

    Accelerators are paid while they are busy, DRAM and NVMe as long as the run lasts.
    """
    prices = body["prices"]

    def of(run: Outcome, *, stores: bool) -> float:
        hours, busy = run.duration_s / 3600, run.busy_s / 3600
        tiers = point.machine.dram / GB * prices["dram_gb_hour"]
        tiers += point.machine.nvme / GB * prices["nvme_gb_hour"]
        return busy * point.gpus * float(prices["gpu_hour"]) + (hours * tiers if stores else 0)

    return over(of(out, stores=out.policy != RECOMPUTE), of(re, stores=False))


VALUES: Final[Mapping[str, Value]] = {
    "found": lambda out, re, point, body: out.stored_history_share,
    "loaded": lambda out, re, point, body: out.history_hit_share,
    "loaded_over_re": lambda out, re, point, body: over(
        out.history_hit_share, re.history_hit_share
    ),
    "hits": lambda out, re, point, body: out.hit_tokens_share,
    "wanted_in_dram": lambda out, re, point, body: out.ready_share,
    "ttft_over_re": lambda out, re, point, body: over(mean(out.ttft_s), mean(re.ttft_s)),
    "ttft_p50_over_re": lambda out, re, point, body: over(out.ttft(50), re.ttft(50)),
    "later_ttft_p50_over_re": lambda out, re, point, body: over(
        _median(out.later_ttft_s), _median(re.later_ttft_s)
    ),
    "ttft_s": lambda out, re, point, body: mean(out.ttft_s),
    "throughput_over_re": lambda out, re, point, body: over(throughput(out), throughput(re)),
    "busy_over_re": lambda out, re, point, body: over(out.busy_s, re.busy_s),
    "prefill_over_re": lambda out, re, point, body: over(out.prefill_s, re.prefill_s),
    "cost_over_re": cost,
}  # fmt: skip
HITS_ALONE: Final = ("found", "loaded", "hits")
"""What `belady`, which takes no time, says."""


def run(experiment: Experiment, data: Path, *, cache: Path = CACHE) -> dict[str, Any]:
    """{metric: {point: {policy: value}}}, and what it was made of. Raises: SpecError."""
    body = experiment.body
    unknown = [m.name for m in experiment.metrics if m.name not in VALUES]
    if unknown:
        raise SpecError(f"{experiment.name}: no such metric: {unknown}; there are {list(VALUES)}")
    points = {label: list(_points(experiment, given)) for label, given in body["points"].items()}
    values: dict[str, dict[str, dict[str, float | None]]] = {m.name: {} for m in experiment.metrics}
    total = sum(len(some) for some in points.values())
    with tqdm(total=total, desc=experiment.name, unit="run", disable=None) as bar:
        for label, some in points.items():
            found: dict[str, Outcome] = {}
            for point in some:
                bar.set_postfix_str(f"{label}, {point.policy}")
                draws = [replace(point, seed=point.seed + n) for n in range(body.get("draws", 1))]
                found[point.policy] = pooled([outcome(draw, data, cache) for draw in draws])
                bar.update()
            over_what = body.get("over", RECOMPUTE)
            re = found.get(over_what, Outcome(over_what))
            by_policy = {point.policy: point for point in some}
            for metric, by_label in values.items():
                by_label[label] = {
                    policy: VALUES[metric](out, re, by_policy[policy], body)
                    for policy, out in found.items()
                    if says(policy, metric)
                }
    return {**data_facts(data), "values": values}


def says(policy: str, metric: str) -> bool:
    """Whether a policy's value says something: the bound takes no time, nothing is over itself,
    and who stores nothing finds nothing."""
    if policy == simulate_server.BOUND:
        return metric in HITS_ALONE
    is_known = metric in ("found", "wanted_in_dram") or metric.endswith("_over_re")
    return not (policy == RECOMPUTE and is_known)


def _points(experiment: Experiment, given: Mapping[str, Any]) -> Iterator[Point]:
    body = experiment.body
    values = DEFAULTS | {k: body[k] for k in DEFAULTS if k in body} | dict(given)
    # A point's own rate stays, so that a quick run has the points of a whole one.
    name = values.pop("machine", body.get("machine"))
    path = MACHINES / f"{name}.yaml"
    if not path.is_file():
        raise SpecError(f"{experiment.name}: machine {name!r}: {path} cannot be read")
    machine = Machine.read(path)
    own = {key: value for key, value in values.items() if key not in DEFAULTS}
    policies = own.pop("policies", body.get("policies", []))
    capacity = own.pop("capacity_of_hour", None)
    share = values["sessions"] / body.get("sessions_of_sizes", values["sessions"])
    settings = {f.name for f in fields(Machine)}
    if unknown := set(own) - settings:
        raise SpecError(f"{experiment.name}: {sorted(unknown)} is no setting of a machine")
    if own:
        machine = Machine.parse(_as_given(machine) | own, f"{experiment.name}: {name}")
    machine = machine.with_sizes(
        dram=max(1, int(machine.dram * share)), nvme=max(1, int(machine.nvme * share))
    )
    for policy in policies:
        if policy not in (*POLICIES, simulate_server.BOUND):
            raise SpecError(f"{experiment.name}: policy {policy!r} is unknown")
        kept = machine if policy != "dram" else machine.with_sizes(**_NO_DISK)  # one run for all
        yield Point(
            kept, policy, values["rate"], values["sessions"], values["think_s"],
            values["warmup"], values["seed"], body.get("gpus", {}).get(name, 1),
            capacity,
        )  # fmt: skip


def _as_given(machine: Machine) -> dict[str, Any]:
    """As a YAML would say it: without the defaults, some of which no YAML may say."""
    defaults = {f.name: f.default for f in fields(Machine)}
    return {k: v for k, v in asdict(machine).items() if v != defaults[k]}


def outcome(point: Point, data: Path, cache: Path = CACHE) -> Outcome:
    """Of the cache, or simulated now."""
    key = json.dumps([str(data), asdict(point) | {"gpus": 0}, _code()], sort_keys=True, default=str)
    file = cache / f"{sha256(key.encode()).hexdigest()[:32]}.json"
    if file.exists():
        kept = json.loads(file.read_text())
        return Outcome(**kept | {"by_group": Counter(kept["by_group"])})
    found = _simulate(point, data)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(asdict(found)))
    return found


def _simulate(point: Point, data: Path) -> Outcome:
    arrivals = Arrivals(
        sessions_s=point.rate, num_sessions=point.sessions, think_s=point.think_s, seed=point.seed
    )
    trace: Trace = read_trace(data, arrivals)
    machine = replace(point.machine, chunk_tokens=trace.chunk_tokens)
    if point.capacity_of_hour is not None:
        in_an_hour = point.rate * 3600 / point.sessions * trace.num_chunks * machine.chunk_bytes
        total = point.capacity_of_hour * in_an_hour
        dram = max(machine.chunk_bytes, int(DRAM_SHARE * total))
        machine = machine.with_sizes(dram=dram, nvme=max(machine.chunk_bytes, int(total) - dram))
    if point.policy == simulate_server.BOUND:
        return _bound(trace, machine)
    warmup = int(point.warmup * len(trace.requests))
    with tqdm(total=len(trace.requests), unit="request", leave=False, disable=None) as bar:
        return Server(trace, machine, point.policy, warmup=warmup, step=bar.update).run()


def _bound(trace: Trace, machine: Machine) -> Outcome:
    """Its hits are of all prompt tokens; here they are of histories, as the others' are."""
    bound = simulate_server.bound(trace, machine)
    said: dict[int, int] = {}
    for request in trace.requests:
        bound.history_tokens += min(said.get(request.session, 0), request.num_tokens)
        said[request.session] = request.known_tokens
    bound.found_history = bound.stored_history = min(bound.hit_tokens, bound.history_tokens)
    return bound


def _code() -> str:
    """Of all that a simulation runs: another version of it is another result."""
    digest = sha256()
    package = ROOT / "attnstore_vllm"
    files = [file for folder in SOURCES for file in sorted((package / folder).rglob("*.py"))]
    for file in [*files, *sorted(package.glob("_native*.so"))]:
        digest.update(file.read_bytes())
    return digest.hexdigest()


def _median(values: list[float]) -> float | None:
    return sorted(values)[len(values) // 2] if values else None
