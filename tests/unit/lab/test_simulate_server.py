# SPDX-License-Identifier: Apache-2.0
"""`attnstore simulate --machine` and `attnstore plan`: the store in a server in virtual time.

It is long since all cases share the traces and machines above them.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from attnstore_lab.cli.size_plan import (
    Option,
    conversation_of,
    most_bytes,
    rounded_up,
    show_model,
    shrunk,
)
from attnstore_lab.sim.formats import Arrivals, read_trace
from attnstore_lab.sim.hardware import Machine
from attnstore_lab.sim.outcome import Outcome
from attnstore_lab.sim.server import Server
from attnstore_lab.sim.trace import Trace, TraceRequest, at_speed, make_trace
from attnstore_lab.sim.trace_tokens import TraceTokens
from attnstore_vllm.cli.main import main
from attnstore_vllm.errors import ConfigError
from attnstore_vllm.index.keys import SequenceKeys, root_key
from attnstore_vllm.model_shape import read_shape, shape_of
from attnstore_vllm.policy.returns import answered, kind_of
from tests.unit.test_model_shape import DEEPSEEK_V4_FLASH, DEEPSEEK_V41, GEMMA4_31B

SIZE = 64
KV = 1000
MACHINE = Machine(
    kv_bytes_per_token=KV, hbm=KV * 8000, dram=KV * SIZE * 60, nvme=KV * SIZE * 4000,
    prefill_tokens_per_s=2000, prefill_context=4000, decode_step_s=0.02, max_num_seqs=4,
    max_num_batched_tokens=1024, prefix_cache=False, hbm_bandwidth=KV * 100_000,
    nvme_read=KV * 20_000, nvme_write=KV * 20_000, chunk_tokens=SIZE, load_deadline_s=5.0,
)  # fmt: skip
CONFIGS = Path(__file__).resolve().parents[3] / "configs" / "machines"


def chats(num_sessions: int, rate: float, seed: int = 1, think_s: float = 20.0) -> Trace:
    """Conversations of one to six turns that grow."""
    rng, requests, now = Random(seed), [], 0.0
    for session in range(num_sessions):
        tokens, think, at = 0, 0.0, now
        for _ in range(rng.randint(1, 6)):
            tokens += rng.randint(50, 400)
            answer = rng.randint(10, 60)
            known = tokens + answer
            chunks = np.arange(-(-known // SIZE), dtype=np.int64) + session * 1000
            requests.append(TraceRequest(at, chunks, tokens, answer, known, session, think))
            tokens, think = known, rng.expovariate(1 / think_s)
            at += think + 1
        now += rng.expovariate(rate)
    return make_trace("chats", SIZE, requests)


def run(trace: Trace, policy: str, machine: Machine = MACHINE, warmup: int = 0) -> Outcome:
    server = Server(trace, machine, policy, warmup=warmup)
    outcome = server.run()
    if server.store is not None:
        server.store.check_integrity()
        assert server.store.is_idle()
        assert not server.store.residency.look_ahead
    return outcome


def test_a_request_that_ends_tells_how_long_its_answer_was() -> None:
    chunks = np.arange(5, dtype=np.int64)
    server = Server(
        make_trace("one", SIZE, [TraceRequest(0.0, chunks, 200, 100, 300)]), MACHINE, "attnstore"
    )
    server.run()
    assert server.store is not None
    kinds = {server.store.residency.run_of(chunk).kind for chunk in server.store.residency.index}
    assert kinds == {answered(kind_of(1, None, 200, is_fresh=True, is_shared=False), 100)}


def test_tokens_of_a_trace_are_the_numbers_of_its_chunks() -> None:
    num_known = 2 * SIZE + 20
    given = TraceTokens(np.array([7, 3, 9]), num_known, SIZE, unknown=11)
    plain = [*[number for number in (7, 3, 9) for _ in range(SIZE)][:num_known], 11]
    assert list(given) == plain
    assert len(given) == len(plain)
    for start, stop in ((0, SIZE), (30, num_known), (30, num_known + 9), (num_known, num_known)):
        assert list(given[start:stop]) == plain[start:stop]
    root = root_key(b"", None, b"")
    ours, keys = (SequenceKeys(root, tokens, SIZE) for tokens in (given, plain))
    assert ours.keys(0, 2) == keys.keys(0, 2)
    assert ours.name(1, b"") == keys.name(1, b"")


def test_a_request_by_hand() -> None:
    """Two turns: 992 tokens computed and answered with 11, then 1,003 found but the last."""
    chunks = np.arange(16, dtype=np.int64)
    trace = make_trace(
        "t",
        SIZE,
        [
            TraceRequest(0.0, chunks, 992, 11, 1003, 1, 0.0),
            TraceRequest(0.0, chunks, 1023, 1, 1024, 1, 9.0),
        ],
    )
    machine = replace(MACHINE, prefill_context=float("inf"))
    out = run(trace, "attnstore", machine)
    # 0.496 s for the first prompt, ten more tokens; then 9 s of thought, and 21 tokens computed.
    assert out.ttft_s == pytest.approx([0.496, (1023 - 1002) / 2000])
    assert out.later_ttft_s == out.ttft_s[1:]
    assert out.duration_s == pytest.approx(0.496 + 10 * 0.02 + 9.0 + 21 / 2000)
    assert (out.hit_tokens, out.history_tokens, out.found_history) == (1002, 1003, 1002)
    assert (out.dram_tokens, out.nvme_tokens, out.ready_share) == (1002, 0, 1.0)
    assert out.prefill_s == pytest.approx(0.496 + 21 / 2000)
    assert out.busy_s == pytest.approx(out.prefill_s + 0.2)
    # 15 whole chunks and a tail of 42 tokens; then one of 48, which supersedes it.
    assert out.bytes_written == 17 * SIZE * KV
    assert run(trace, "recompute", machine).hit_tokens == 0
    assert run(trace, "recompute", replace(machine, prefix_cache=True)).hbm_tokens == 15 * SIZE


def test_loading_takes_time_and_hides_behind_computing() -> None:
    chunks = np.arange(16, dtype=np.int64)
    trace = make_trace(
        "t",
        SIZE,
        [
            TraceRequest(0.0, chunks, 992, 11, 1003, 1, 0.0),
            TraceRequest(0.0, chunks, 1023, 1, 1024, 1, 9.0),
        ],
    )
    seconds = {}
    for overlap in (True, False):
        for bandwidth in (KV * 1_000, KV * 1_000_000_000):  # 1,002 tokens take a second, or none
            machine = replace(
                MACHINE, prefill_context=float("inf"), hbm_bandwidth=bandwidth, overlap=overlap
            )
            seconds[overlap, bandwidth] = run(trace, "attnstore", machine).later_ttft_s[0]
    computing = seconds[False, KV * 1_000_000_000]
    assert seconds[True, KV * 1_000_000_000] == pytest.approx(computing, abs=1e-4)
    assert seconds[False, KV * 1_000] == pytest.approx(computing + 1.002, abs=1e-3)
    assert seconds[True, KV * 1_000] == pytest.approx(1.002, abs=1e-3)


def test_saving_takes_time_where_the_engine_waits_for_it() -> None:
    chunks = np.arange(16, dtype=np.int64)
    trace = make_trace("t", SIZE, [TraceRequest(0.0, chunks, 992, 13, 1005, 1, 0.0)])
    outs = {}
    for asynchronous in (True, False):
        machine = replace(MACHINE, hbm_bandwidth=KV * 1_000, asynchronous_saving=asynchronous)
        outs[asynchronous] = run(trace, "attnstore", machine)
    # 15 whole chunks after the prompt and 44 tokens at the end; a thousand take a second.
    assert outs[False].busy_s == pytest.approx(outs[True].busy_s + 1.004, abs=1e-6)
    assert outs[False].duration_s == pytest.approx(outs[True].duration_s + 1.004, abs=1e-6)
    assert outs[False].prefill_s == outs[True].prefill_s
    assert outs[False].ttft_s == outs[True].ttft_s, "nobody came after it"


def test_the_same_trace_gives_the_same() -> None:
    trace = chats(60, rate=1.0)
    assert run(trace, "attnstore").as_json() == run(trace, "attnstore").as_json()


def test_bounds_hold() -> None:
    trace = chats(120, rate=0.5)
    machine = replace(MACHINE, nvme=KV * SIZE * 150)
    found = {p: run(trace, p, machine) for p in ("attnstore", "lru", "fifo", "infinite")}
    assert len({out.num_requests for out in found.values()}) == 1
    for policy in ("attnstore", "lru", "fifo"):
        assert found[policy].hit_tokens <= found["infinite"].hit_tokens
        assert 0 < found[policy].history_hit_share < 1
    # All but each history's last token, whose KV is made when it is an input, and short tails.
    turns = sum(request.think_s > 0 for request in trace.requests)
    missing = found["infinite"].history_tokens - found["infinite"].found_history
    assert turns <= missing <= 16 * turns


def test_with_a_backlog_what_is_wanted_is_in_dram_when_it_is_its_turn() -> None:
    trace = chats(250, rate=4.0, think_s=2.0)
    machine = replace(MACHINE, dram=KV * SIZE * 150)
    ours, lru = (run(trace, policy, machine, warmup=100) for policy in ("attnstore", "lru"))
    assert ours.ready_share > 0.99
    assert lru.ready_share < 0.5
    assert ours.waited_s < 0.1 * lru.waited_s
    assert ours.ttft(50) <= lru.ttft(50)


def test_a_disk_slower_than_computing_is_not_waited_for() -> None:
    trace = chats(150, rate=0.05)
    slow = replace(MACHINE, nvme_read=KV * 600, nvme_write=KV * 600, dram=KV * SIZE * 12)
    ours, without = run(trace, "attnstore", slow, 50), run(trace, "recompute", slow, 50)
    for percent in (50, 90):
        assert ours.ttft(percent) <= 1.02 * without.ttft(percent)
    fast = run(trace, "attnstore", replace(slow, nvme_read=KV * 60_000), 50)
    assert fast.nvme_tokens > 0.3 * fast.prompt_tokens
    assert fast.ttft(50) < 0.7 * without.ttft(50)


def test_speed_brings_requests_nearer() -> None:
    trace = chats(3, rate=1.0)
    faster = at_speed(trace, 4.0)
    assert [r.arrival_s for r in faster.requests] == [r.arrival_s / 4 for r in trace.requests]
    assert [r.think_s for r in faster.requests] == [r.think_s for r in trace.requests]


def test_smaller_records_on_nvme_are_more_room_and_a_faster_disk() -> None:
    trace = chats(60, rate=1.0)
    machine = replace(MACHINE, dram=4 * MACHINE.chunk_bytes, nvme=150 * MACHINE.chunk_bytes)
    plain = run(trace, "attnstore", machine)
    encoded = run(trace, "attnstore", replace(machine, nvme_record_size=0.75))
    same = replace(
        machine,
        nvme=200 * MACHINE.chunk_bytes,
        nvme_read=round(MACHINE.nvme_read / 0.75),
        nvme_write=round(MACHINE.nvme_write / 0.75),
    )
    as_much = run(trace, "attnstore", same)
    assert encoded.hit_tokens > plain.hit_tokens
    assert encoded.hit_tokens == as_much.hit_tokens
    assert encoded.bytes_written == pytest.approx(0.75 * as_much.bytes_written)


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_shipped_machines_can_be_read(path: Path) -> None:
    machine = Machine.read(path)
    assert machine.dram < machine.nvme
    assert machine.prefill_s(0, 4000) > 2 * machine.prefill_s(0, 2000)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"dram": "big"}, "dram is 'big', which is no size"),
        ({"drm": "1GB"}, "did you mean dram?"),
        ({"hbm": None}, "hbm is missing"),
        ({"decode_step_s": 0}, "decode_step_s is 0; it must be a number above 0"),
        ({"max_num_seqs": 1.5}, "it must be an integer"),
        ({"overlap": "yes"}, "it must be true or false"),
    ],
)
def test_a_machine_that_cannot_be(change: dict[str, object], said: str) -> None:
    good = {
        "kv_bytes_per_token": 1000,
        "hbm": "1GB",
        "dram": "1GB",
        "nvme": "1GB",
        "prefill_tokens_per_s": 100,
        "decode_step_s": 0.01,
    }
    Machine.parse(good, "here")
    given = {key: value for key, value in (good | change).items() if value is not None}
    with pytest.raises(ConfigError, match="here") as error:
        Machine.parse(given, "here")
    assert said in str(error.value)


# ---- the commands -------------------------------------------------------------------------------


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    """A trace in Mooncake's format, and a machine."""
    rng, lines = Random(2), []
    for second in range(80):
        family = rng.randrange(8)
        count = rng.randint(1, 5)
        hashes = [100 * family + n for n in range(count)]
        lines.append(
            json.dumps(
                {
                    "timestamp": 1000 * second,
                    "input_length": 512 * count,
                    "output_length": 20,
                    "hash_ids": hashes,
                }
            )
        )
    trace, machine = tmp_path / "trace.jsonl", tmp_path / "small.yaml"
    trace.write_text("\n".join(lines))
    machine.write_text(
        "kv_bytes_per_token: 1000\nhbm: 8MB\ndram: 4MB\nnvme: 40MB\nprefill_tokens_per_s: 3000\n"
        "decode_step_s: 0.02\nprefix_cache: false\n"
    )
    return trace, machine


def test_the_command_says_what_came_of_each_policy(
    files: tuple[Path, Path], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    trace, machine = map(str, files)
    assert main(["simulate", trace, "--machine", machine, "--json", "--warmup", "5"]) == 0
    runs = {run["policy"]: run for run in json.loads(capsys.readouterr().out)["runs"]}
    assert set(runs) == {"attnstore", "lru", "fifo", "belady", "infinite", "recompute"}
    assert runs["recompute"]["hit_tokens_share"] == 0
    assert 0 < runs["attnstore"]["hit_tokens_share"] <= runs["infinite"]["hit_tokens_share"]
    assert runs["lru"]["requests"] == 75
    plot = tmp_path / "p.png"
    args = ["simulate", trace, "--machine", machine, "--policy", "lru", "--plot", str(plot)]
    assert main(args) == 0
    assert "lru" in capsys.readouterr().out
    assert plot.stat().st_size > 1000


def test_the_command_says_what_is_wrong(
    files: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    trace, machine = map(str, files)
    for args, said in (
        (["--policy", "best"], "with --machine there are attnstore, lru"),
        (["--warmup", "80"], "the trace has 80 requests"),
        (["--speed", "0"], "--speed is 0.0; expected more than 0"),
    ):
        assert main(["simulate", trace, "--machine", machine, *args]) == 2
        assert said in capsys.readouterr().err


def test_a_load_that_cannot_be_served_is_no_result_and_stops_early(
    files: tuple[Path, Path], model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace, machine = map(str, files)
    args = [trace, "--machine", machine, "--speed", "100", "--patience", "2"]
    assert main(["simulate", *args, "--policy", "recompute", "--json"]) == 0
    (run,) = json.loads(capsys.readouterr().out)["runs"]
    assert run["ttft_s"] == run["ttft_s_of_later_turns"] == {}
    assert run["cannot_serve_after_s"] == pytest.approx(2, abs=1)
    assert run["requests"] < 80, "it went on"
    assert main(["simulate", *args, "--policy", "recompute"]) == 0
    said = capsys.readouterr().out
    assert "recompute   cannot serve this load: after " in said and "--speed 0.5" in said
    assert main(["plan", str(model), *args, "--budget", "0.0001"]) == 2
    assert "cannot serve" in capsys.readouterr().err
    args[-1] = "inf"
    assert main(["simulate", *args, "--policy", "recompute", "--json"]) == 0
    (run,) = json.loads(capsys.readouterr().out)["runs"]
    assert run["requests"] == 80 and run["ttft_s"]["p99"] > 2


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """The config.json of a model with 2,048 bytes of KV a token, in one group."""
    path = tmp_path / "config.json"
    path.write_text(
        json.dumps(
            {
                "num_hidden_layers": 4,
                "num_attention_heads": 8,
                "num_key_value_heads": 2,
                "hidden_size": 512,
            }
        )
    )
    return path


def test_plan_spends_the_budget(
    files: tuple[Path, Path], model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace, machine = map(str, files)
    args = ["plan", str(model), trace, "--machine", machine, "--budget", "0.0001"]
    assert main([*args, "--json"]) == 0
    options = json.loads(capsys.readouterr().out)
    smallest, *options = options
    assert len(options) == 5
    for option in options:
        price = (option["dram"] * 0.0088 + option["nvme"] * 0.000082) / 1e9
        assert price == pytest.approx(0.0001, rel=1e-3)
    assert options[0]["prefill_s"] == min(option["prefill_s"] for option in options)
    assert smallest["prefill_s"] <= 1.02 * options[0]["prefill_s"]
    assert smallest["price"] <= options[0]["price"]
    assert main(args) == 0
    out = capsys.readouterr().out
    assert "nvme: {path: /mnt/nvme/attnstore, capacity: " in out
    assert "groups: " not in out


def test_plan_recommends_no_more_than_the_trace_has(
    files: tuple[Path, Path], model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """However much the money can buy: so many halvings alone leave twice as much."""
    trace, machine = map(str, files)
    args = ["plan", str(model), trace, "--machine", machine, "--budget", "2", "--json"]
    assert main(args) == 0
    smallest, best, *_ = json.loads(capsys.readouterr().out)
    read = read_trace(files[0], Arrivals())
    distinct = read.num_chunks * read.chunk_tokens * 2048
    assert best["dram"] > 500 * distinct
    assert smallest["dram"] <= rounded_up(distinct)
    assert smallest["nvme"] <= rounded_up(distinct)
    assert smallest["prefill_s"] <= 1.02 * best["prefill_s"]


@pytest.mark.parametrize(("given", "rounded"), [(1, 1), (28, 28), (100, 104), (1023, 1024)])
def test_a_size_is_rounded_up_by_an_eighth_at_most(given: int, rounded: int) -> None:
    assert rounded_up(given << 20) == rounded << 20
    assert rounded_up((given << 20) - 1) == rounded << 20


def test_of_groups_each_has_a_record_of_each_chunk(model: Path) -> None:
    trace = chats(400, rate=1.0)
    one = most_bytes(trace, MACHINE)
    shape = shape_of(
        {
            **json.loads(model.read_text()),
            "model_type": "gemma3_text",
            "sliding_window": 64,
            "num_hidden_layers": 12,
        },
        "here",
        chunk_tokens=trace.chunk_tokens,
    )
    machine = MACHINE.with_model(shape)
    several = most_bytes(trace, machine)
    chunk_bytes = machine.chunk_bytes * trace.num_chunks
    assert several[0] >= len(machine.geometry.groups) * chunk_bytes > chunk_bytes
    assert one[0] >= trace.num_chunks * MACHINE.chunk_bytes
    half = replace(MACHINE, nvme_record_size=0.5)
    assert most_bytes(trace, half) == pytest.approx((one[0], one[0] / 2), rel=0.125)


def test_plan_recommends_no_more_than_is_of_use() -> None:
    """Beyond 100 bytes of DRAM, or 1,000 of NVMe, more is of no use."""
    tried = []
    LOTS = (10**9, 10**9)

    def simulated(dram: int, nvme: int) -> Option:
        tried.append((dram, nvme))
        outcome: Any = SimpleNamespace(
            prefill_s=10.0 + (dram < 100) + (nvme < 1000),
            ttft=lambda _: 1.0 + 0.001 * (dram < 200),
            is_served=True,
        )
        return Option(dram, nvme, 1.0, outcome)

    best = simulated(1600, 16_000)
    assert shrunk(best, simulated, 0.02, 1, LOTS).dram == 100
    assert shrunk(best, simulated, 0.0, 1, LOTS).dram == 200, "TTFT counts too"
    assert shrunk(best, simulated, 0.02, 1, LOTS).nvme == 1000
    assert shrunk(best, simulated, 0.2, 1, LOTS).dram == 1600 // 2**8, "so many halvings at most"
    assert shrunk(best, simulated, 0.2, 300, LOTS).dram == 400
    assert min(min(sizes) for sizes in tried) >= 1
    found = shrunk(best, simulated, 0.02, 1, (700, 5000))
    assert (found.dram, found.nvme) == (175, 1250), "halved from what can be filled"
    best = simulated(1600, 16_000)
    found = shrunk(best, simulated, 0.02, 1, (50, 10**9))
    assert (found.dram, found.nvme) == (100, 1000), "more can be filled than was said"


def test_plan_says_what_several_groups_keep(
    files: tuple[Path, Path], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    model = tmp_path / "config.json"
    model.write_text(
        json.dumps(
            {
                "num_hidden_layers": 12,
                "num_attention_heads": 8,
                "num_key_value_heads": 2,
                "hidden_size": 512,
                "model_type": "gemma3_text",
                "sliding_window": 64,
            }
        )
    )
    trace = read_trace(files[0], Arrivals())
    found = conversation_of(read_shape(model), trace)
    show_model(found)
    out = capsys.readouterr().out
    assert "groups: full/16 window:64/16 " in out
    assert "full: 1KiB a token" in out
    # More than full attention keeps, and less than all layers would.
    token_bytes = found.shape.conversation_bytes(found.num_tokens) / found.num_tokens
    assert 1024 < token_bytes < 6 * 1024


def test_plan_says_what_packed_pages_keep(
    files: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    show_model(conversation_of(shape_of(DEEPSEEK_V41, "here"), read_trace(files[0], Arrivals())))
    out = capsys.readouterr().out
    assert "full: 1.756KiB a token" in out and "window" not in out
    assert "one group; records of 456KiB, for 256 tokens" in out


@pytest.mark.parametrize(
    ("config", "chunk_tokens", "warning"),
    [
        (DEEPSEEK_V4_FLASH, 256, "256 tokens fills 1 of the 17 blocks of its record"),
        (DEEPSEEK_V4_FLASH, 2048, "2048 tokens fills 8 of the 17 blocks of its record"),
        (DEEPSEEK_V4_FLASH, 4096, ""),
        (GEMMA4_31B, 256, ""),  # whose windows have twice the blocks, of a chunk of any size
    ],
)
def test_plan_warns_of_chunks_that_leave_records_empty(
    config: dict[str, Any],
    chunk_tokens: int,
    warning: str,
    files: tuple[Path, Path],
    capsys: pytest.CaptureFixture[str],
) -> None:
    shape = shape_of(config, "here", chunk_tokens=chunk_tokens)
    show_model(conversation_of(shape, read_trace(files[0], Arrivals())))
    out = capsys.readouterr().out
    assert "warning" not in out if not warning else f"{warning}; set chunk_tokens: 4096\n" in out


def test_a_slow_nvme_is_better_than_none() -> None:
    """With a tenth of the speed at which the server makes KV."""
    trace = chats(120, rate=0.9)
    slow = replace(MACHINE, nvme_read=KV * 200, nvme_write=KV * 200)
    found = {policy: run(trace, policy, slow) for policy in ("attnstore", "dram")}
    assert found["dram"].bytes_written == 0
    assert found["attnstore"].history_hit_share >= found["dram"].history_hit_share
