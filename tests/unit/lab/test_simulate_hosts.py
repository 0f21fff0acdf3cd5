# SPDX-License-Identifier: Apache-2.0
"""`attnstore simulate --hosts`: many servers in one virtual time, and the tier that they share."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from attnstore_lab import palette
from attnstore_lab.cli import simulate_hosts
from attnstore_lab.sim.hosts import Hosts, HostsOutcome, conversations, one_large, together
from attnstore_lab.sim.outcome import Outcome
from attnstore_lab.sim.server import Server
from attnstore_lab.sim.shared_tier import Network, SharedStore
from attnstore_lab.sim.simulated_store import NAMESPACE
from attnstore_lab.sim.trace import Trace, TraceRequest, make_trace
from attnstore_lab.sim.trace_tokens import TraceTokens
from attnstore_vllm.cli.main import main
from attnstore_vllm.index.keys import SequenceKeys, root_key
from attnstore_vllm.io.device import Op
from tests.unit.lab.test_simulate_server import CONFIGS, KV, MACHINE, SIZE, chats

NONE = Network(capacity=0, link=KV * 1e6)
WIDE = Network(capacity=KV * SIZE * 100_000, link=KV * 1e6)


def run(
    trace: Trace, num_hosts: int, router: str, network: Network = NONE, **more: object
) -> tuple[Hosts, HostsOutcome]:
    machine = more.pop("machine", MACHINE)
    hosts = Hosts(trace, machine, num_hosts, router, network, **more)  # type: ignore[arg-type]
    out = hosts.run()
    for host in hosts.hosts:
        assert host.store is not None
        host.store.check_integrity()
        assert not host.store.residency.look_ahead
        assert host.store.is_idle()
    assert sum(out.requests) == out.total.num_requests == len(trace.requests)
    return hosts, out


def alone(trace: Trace) -> Outcome:
    return Server(trace, MACHINE, "attnstore").run()


def mine(trace: Trace, keep: set[int]) -> Trace:
    return replace(trace, requests=[r for r in trace.requests if r.session in keep])


@pytest.mark.parametrize("router", ["round-robin", "conversation", "events-half"])
@pytest.mark.parametrize("rate", [0.05, 0.4])
def test_one_host_is_the_plain_server(router: str, rate: float) -> None:
    trace = chats(40, rate)
    assert run(trace, 1, router)[1].total == alone(trace)


@pytest.mark.parametrize("seed", range(2))
def test_a_router_by_conversation_makes_servers_that_know_nothing_of_each_other(seed: int) -> None:
    trace = chats(40, 0.3, seed)
    hosts, _ = run(trace, 4, "conversation")
    first = {r.session: n % 4 for r, n in zip(trace.requests, conversations(trace), strict=True)}
    for number, host in enumerate(hosts.hosts):
        own = mine(trace, {s for s, at in first.items() if at == number})
        plain, ours = alone(own), host.end()  # nothing is left to end
        assert ours.num_requests == plain.num_requests
        assert ours.history_hit_share == pytest.approx(plain.history_hit_share, abs=0.02)
        assert np.percentile(ours.ttft_s, 50) == pytest.approx(
            np.percentile(plain.ttft_s, 50), rel=0.1
        )


@pytest.mark.parametrize("seed", range(2))
def test_round_robin_finds_with_a_shared_tier_what_one_large_server_does(seed: int) -> None:
    trace = chats(60, 0.5, seed)
    large = Server(trace, one_large(MACHINE, 4), "attnstore").run()
    without = run(trace, 4, "round-robin")[1].total
    shared = run(trace, 4, "round-robin", WIDE)[1].total
    assert without.history_hit_share < 0.6
    assert shared.history_hit_share > 0.95 * large.history_hit_share


@pytest.mark.parametrize("nothing", [{"link": 0.0}, {"bandwidth": 0.0}, {"capacity": 0}])
def test_a_shared_tier_that_moves_or_holds_nothing_is_none(nothing: dict[str, float]) -> None:
    trace = chats(30, 0.3)
    network = replace(WIDE, **nothing)  # type: ignore[arg-type]
    assert run(trace, 3, "round-robin", network)[1].total == run(trace, 3, "round-robin")[1].total


def test_a_network_slower_than_computing_costs_next_to_nothing() -> None:
    """The servers' own code sees that it does not pay."""
    trace = chats(60, 0.3)
    slow = replace(WIDE, link=KV * 1000.0)  # half as fast as computing
    without = run(trace, 3, "round-robin")[1].total
    shared = run(trace, 3, "round-robin", slow)[1].total
    assert shared.ttft(50) < 1.05 * without.ttft(50)
    assert sum(shared.ttft_s) < 1.05 * sum(without.ttft_s)


def test_events_keep_a_conversation_where_it_is() -> None:
    trace = chats(40, 0.3)
    plain, events = (run(trace, 4, r)[1].total for r in ("round-robin", "events"))
    assert events.history_hit_share > 0.95 > plain.history_hit_share


def test_what_a_host_could_read_from_the_shared_tier_it_does_not_hold() -> None:
    chunks = np.arange(16, dtype=np.int64)
    trace = make_trace("one", SIZE, [TraceRequest(0.0, chunks, 16 * SIZE, 1, 16 * SIZE)])
    hosts, _ = run(trace, 2, "round-robin", WIDE)
    tokens = TraceTokens(chunks, 16 * SIZE, SIZE, -1)
    keys = SequenceKeys(root_key(NAMESPACE, None, b""), tokens, SIZE)
    for host in hosts.hosts:
        assert host.store is not None
        host.store.before_arrival(keys, 16 * SIZE)
        assert len(host.store.residency.index) == 16
    held = [host.held_tokens(trace.requests[0], keys.keys(0, 16)) for host in hosts.hosts]
    assert held == [16 * SIZE, 0]


def test_a_system_prompt_sends_all_to_one_host_unless_half_of_a_prompt_is_asked_for() -> None:
    prompts = [np.array([0, *range(1 + 9 * n, 10 + 9 * n)]) for n in range(8)]
    requests = [
        TraceRequest(100.0 * n, chunks, 10 * SIZE, 1, 10 * SIZE) for n, chunks in enumerate(prompts)
    ]
    trace = make_trace("system prompt", SIZE, requests)
    assert sorted(run(trace, 4, "events")[1].requests) == [0, 0, 0, 8]
    assert run(trace, 4, "events-half")[1].requests == [2, 2, 2, 2]


def test_what_is_shared_is_written_once_and_read_by_others() -> None:
    """Eight times the same prompt, far from each other: one host computes it, three read it."""
    chunks = np.arange(16, dtype=np.int64)
    requests = [TraceRequest(100.0 * i, chunks, 16 * SIZE, 1, 16 * SIZE) for i in range(8)]
    _, out = run(make_trace("same", SIZE, requests), 4, "round-robin", WIDE)
    size = SIZE * KV
    assert out.network_written == 16 * size
    assert out.network_read == 3 * 15 * size  # of the last chunk a token is computed anyway
    assert out.total.prompt_tokens - out.total.hit_tokens < 2 * 16 * SIZE
    assert conversations(make_trace("same", SIZE, requests)) == [0] * 8


@pytest.mark.parametrize("slots", [1, 100])
def test_a_small_shared_tier_keeps_its_size_and_tells_who_knew(slots: int) -> None:
    trace = chats(40, 0.4)
    small = replace(WIDE, capacity=slots * SIZE * KV)
    hosts, out = run(trace, 4, "round-robin", small)
    assert hosts.shared is not None
    assert len(hosts.shared) == slots
    assert out.network_written < 4 * trace.num_chunks * SIZE * KV  # not for ever
    wide = run(trace, 4, "round-robin", WIDE)[1]
    assert out.total.history_hit_share < wide.total.history_hit_share


def test_the_network_is_one_transfer_after_the_other() -> None:
    shared = SharedStore(Network(capacity=100, link=1.0, bandwidth=5.0), 10, SIZE)

    assert [shared.pass_through(Op.READ, at) for at in (0.0, 0.0, 10.0)] == [2.0, 4.0, 12.0]
    assert shared.pass_through(Op.WRITE, 1.0) == 3.0


def test_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    talk = [{"from": who, "value": "word " * 300} for who in ("human", "gpt") * 3]
    trace = tmp_path / "talks.json"
    trace.write_text(json.dumps([{"id": str(i), "conversations": talk} for i in range(6)]))
    machine = str(next(iter(sorted(CONFIGS.glob("*.yaml")))))
    args = ["simulate", str(trace), "--machine", machine, "--chunk-tokens", "64"]
    more = ["--hosts", "1,3", "--shared", "0,1TB", "--per-host"]
    routers = ["--router", "round-robin,conversation,events,one-large"]
    plot = tmp_path / "hosts.png"
    assert main([*args, *more, *routers, "--json", "--plot", str(plot)]) == 0
    said = json.loads(capsys.readouterr().out)
    assert plot.stat().st_size > 1000
    runs = {(r["hosts"], r["router"], r["shared"]): r for r in said["runs"]}
    assert len(runs) == 2 * (3 * 2 + 1)
    assert runs[3, "round-robin", 10**12]["network_read"] > 0
    shared, plain = (runs[3, "round-robin", size]["history_hit_share"] for size in (10**12, 0))
    assert shared > 2 * plain
    assert runs[3, "conversation", 0]["history_hit_share"] > shared
    assert main([*args, "--hosts", "1", "--router", "round-robin"]) == 0
    assert "round-robin" in capsys.readouterr().out


def test_a_load_that_cannot_be_served_is_no_result_and_stops_early(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """All come at once, and each wants some seconds of prefill."""
    trace, num_requests = tmp_path / "t.jsonl", 60
    lines = (
        {
            "timestamp": 0,
            "input_length": 16_384,
            "output_length": 1,
            "hash_ids": [32 * n + block for block in range(32)],
        }
        for n in range(num_requests)
    )
    trace.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    machine = str(next(iter(sorted(CONFIGS.glob("*.yaml")))))
    args = ["simulate", str(trace), "--machine", machine, "--hosts", "2", "--shared", "0,1TB"]
    args += ["--router", "round-robin,one-large"]
    plot = tmp_path / "hosts.svg"
    assert main([*args, "--patience", "5", "--json", "--plot", str(plot)]) == 0
    runs = json.loads(capsys.readouterr().out)["runs"]
    assert len(runs) == 3 and plot.stat().st_size > 1000
    for run in runs:
        assert 5 < run["cannot_serve_after_s"] < 10
        assert run["ttft_s"] == {} and run["requests"] < num_requests, "it went on"
    assert main([*args, "--patience", "5"]) == 0
    said = capsys.readouterr().out
    assert said.count("cannot serve this load: after ") == 3 and "More servers: --hosts" in said
    assert main([*args, "--patience", "inf", "--json"]) == 0
    for run in json.loads(capsys.readouterr().out)["runs"]:
        assert run["requests"] == num_requests and run["ttft_s"]["p99"] > 5


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (["--hosts", "0"], "--hosts: '0'"),
        (["--hosts", "2", "--router", "x"], "--router: 'x'"),
        (["--hosts", "2", "--policy", "belady"], "--policy: 'belady'"),
        (["--hosts", "2", "--network-latency", "-1"], "--network-latency is -1"),
        (["--hosts", "2", "--shared", "ten"], "--shared"),
    ],
)
def test_a_wrong_option_is_named(
    given: list[str], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "t.jsonl"
    trace.write_text(
        '{"timestamp": 0, "input_length": 9, "output_length": 1, "hash_ids": [0]}\n' * 2
    )
    machine = str(next(iter(sorted(CONFIGS.glob("*.yaml")))))
    assert main(["simulate", str(trace), "--machine", machine, *given]) == 2
    assert says in capsys.readouterr().err


def test_a_conversation_is_told_by_the_last_whole_chunk_where_the_trace_does_not_say() -> None:
    prompts = [[0, 1, 2], [0, 3], [0, 1, 2, 4, 5], [0], [0, 3, 6], [0, 1, 7]]
    requests = [
        TraceRequest(float(at), np.array(chunks), len(chunks) * SIZE, 1, len(chunks) * SIZE)
        for at, chunks in enumerate(prompts)
    ]
    assert conversations(make_trace("same prompt", SIZE, requests)) == [0, 1, 0, 2, 1, 3]


def test_a_picture_says_what_a_shared_tier_is_worth_where_it_is_worth_most(tmp_path: Path) -> None:
    shares = {
        ("round-robin", 4, 0): 0.4,
        ("round-robin", 4, 10**12): 0.8,
        ("round-robin", 100, 0): 0.02,
        ("round-robin", 100, 10**12): 0.57,
        ("conversation", 100, 0): 0.9,
        ("conversation", 100, 10**12): 0.91,
        ("one-large", 100, 0): 0.95,
    }
    runs = [
        {"router": router, "hosts": hosts, "shared": shared, "hit_tokens_share": share}
        for (router, hosts, shared), share in shares.items()
    ]
    plot = tmp_path / "hosts.svg"
    simulate_hosts.plot({"trace": "t.jsonl", "runs": runs}, plot)
    said = plot.read_text(encoding="utf-8")
    assert "At 100 hosts round-robin finds 2 % of prompt tokens" in said
    assert "57 % with the shared tier" in said and "t.jsonl" in said
    assert palette.color(palette.OURS) not in said, "a router in AttnStore's colour"
    alone = [run for run in runs if not run["shared"]]
    simulate_hosts.plot({"trace": "t.jsonl", "runs": alone}, plot)
    assert "Prompt tokens found by number of hosts" in plot.read_text(encoding="utf-8")


def test_a_session_over_two_hosts_is_one() -> None:
    one, other = Outcome("dram"), Outcome("dram")
    one.sessions = {1: (5.0, 9.0), 2: (0.0, 1.0)}
    other.sessions = {1: (3.0, 8.0)}
    total = together([one, other])
    assert total.sessions == {1: (3.0, 9.0), 2: (0.0, 1.0)}
    assert total.session_s == 3.5
