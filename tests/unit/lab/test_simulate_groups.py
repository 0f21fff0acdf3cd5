# SPDX-License-Identifier: Apache-2.0
"""Models of several KV cache groups in the simulator: what is found of them, and their bytes."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from attnstore_lab.sim.hardware import Machine
from attnstore_lab.sim.jobs import step_stop
from attnstore_lab.sim.one_pool import AT_ONCE, distinct_bytes, replay, replay_model
from attnstore_lab.sim.server import Server
from attnstore_lab.sim.trace import Trace, TraceRequest, make_trace
from attnstore_vllm.cli.main import main
from attnstore_vllm.index.sections import Reach
from attnstore_vllm.model_shape import KvShape, LayerKind, read_shape, shape_of
from attnstore_vllm.transfer.geometry import Geometry, Group
from benchmarks.sample import SAMPLE
from benchmarks.simulate_groups import replayed, shape_of_family
from tests.unit.lab.test_simulate_server import SIZE, chats
from tests.unit.test_model_shape import DEEPSEEK_V4_FLASH, DEEPSEEK_V41

MODELS = Path(__file__).resolve().parents[3] / "configs" / "models"
SPINE = LayerKind(Reach.FULL, 0, 100)


def shape(
    reach: Reach | None = None, tokens: int = 0, block_tokens: int = 16, chunk_tokens: int = SIZE
) -> KvShape:
    """One layer that sees all tokens and, if `reach` is given, one that does not."""
    kinds = Counter({SPINE: 1})
    groups = [Group(16, ("full",))]
    if reach is not None:
        kinds[LayerKind(reach, tokens, 100)] = 1
        groups.append(Group(block_tokens, ("beside",), 1, reach.value, tokens))
    return KvShape(kinds, Geometry(1, (1600,), tuple(groups), chunk_tokens))


PLAIN = shape()
WINDOW, LOCAL = shape(Reach.WINDOW, 40), shape(Reach.LOCAL, 128)
STATE = shape(Reach.STATE, 0, 32)


def talk(*lengths: tuple[int, int], num_talks: int = 1) -> Trace:
    """Conversations of turns, each of a prompt's new tokens and an answer's; one a day."""
    requests = []
    for number in range(num_talks):
        known = 0
        for turn, (new, answer) in enumerate(lengths):
            tokens, known = known + new, known + new + answer
            chunks = np.arange(-(-known // SIZE), dtype=np.int64) + 1000 * number
            at = 100_000.0 * number + 60 * turn
            requests.append(TraceRequest(at, chunks, tokens, answer, known, number, 60.0))
    return make_trace("talk", SIZE, requests)


def found(trace: Trace, of: KvShape, policy: str = "infinite", num_bytes: int = 1 << 40) -> int:
    return replay_model(trace, of, policy, num_bytes).hit_tokens


def test_a_plain_model_finds_what_the_one_pool_finds() -> None:
    trace = chats(60, rate=0.2)
    for policy, share in (("infinite", 1.0), ("lru", 0.3), ("attnstore", 0.3)):
        pool = replay(trace, policy, share).hit_tokens
        size = int(distinct_bytes(trace, PLAIN) * share)
        assert found(trace, PLAIN, policy, size) == pytest.approx(pool, rel=0.1), policy


@pytest.mark.parametrize("of", [WINDOW, LOCAL], ids=["window", "local"])
def test_a_chat_finds_as_much_with_windows(of: KvShape) -> None:
    trace = chats(40, rate=0.2)
    assert 0.98 * found(trace, PLAIN) < found(trace, of) <= found(trace, PLAIN)


def test_a_hit_ends_where_a_state_is() -> None:
    """States are kept at the ends of answers, at the last block of prompts, and where steps end."""
    for trace, plain, state in (
        (talk((300, 21), (100, 20)), 320, 320),
        (talk((316, 3), (100, 20)), 304, 288),  # the answer has no end of its own (prefix.py)
        (talk((300, 41), (20, 3), (100, 20)), 340 + 352, 340 + 352),  # the prompt's last block
        (talk((300, 41), (5, 3), (100, 20)), 340 + 336, 2 * 340),  # the end before it
        (talk((300, 41), (5, 3), (8, 1), (100, 20)), 340 + 336 + 352, 2 * 340 + 352),
    ):
        assert found(trace, PLAIN) == plain
        assert found(trace, STATE) == state


def branches(num_shared: int, own_tokens: int = 20 * SIZE, answer: int = 8) -> Trace:
    """Five prompts that begin with the same chunks, so many."""
    shared = np.arange(num_shared, dtype=np.int64)
    num_tokens = num_shared * SIZE + own_tokens
    requests = []
    for n in range(5):
        num_own = -(-(own_tokens + answer) // SIZE)
        chunks = np.append(shared, 100 * (n + 1) + np.arange(num_own, dtype=np.int64))
        known = num_tokens + answer
        requests.append(TraceRequest(1000.0 * n, chunks, num_tokens, answer, known, n, 0.0))
    return make_trace("branches", SIZE, requests)


def found_by_each(trace: Trace, of: KvShape, **fields: int | None) -> list[int]:
    """Tokens found by each request, with room for everything.

    Args:
        fields: of the machine.
    """
    machine = replace(AT_ONCE.with_model(of), **fields)  # type: ignore[arg-type]
    ends = [0]
    for number in range(1, len(trace.requests) + 1):
        few = make_trace("few", SIZE, trace.requests[:number])
        ends.append(Server(few, machine, "infinite").run().hit_tokens)
    return np.diff(ends).tolist()


def test_a_state_is_kept_where_prompts_part() -> None:
    """vLLM ends no step there by itself. Whoever parts there first finds none, and leaves one."""
    shared = 10 * SIZE
    assert found_by_each(branches(10), PLAIN) == [0, *4 * [shared]]
    assert found_by_each(branches(10), STATE) == [0, 0, *3 * [shared]]


def test_a_chunk_has_a_state_where_prompts_part_and_one_at_the_end() -> None:
    """Neither takes the place of the other, as a longer tail does that of a shorter one."""
    of = shape(Reach.STATE, 0, 32, chunk_tokens=4 * SIZE)
    assert found_by_each(branches(10, own_tokens=100, answer=20), of) == [0, 0, *3 * [10 * SIZE]]


@pytest.mark.parametrize(("own", "answer"), [(50, 8), (50, 40), (20, 100), (63, 40)])
@pytest.mark.parametrize("of", [WINDOW, LOCAL, STATE], ids=["window", "local", "state"])
def test_what_a_branch_has_used_is_there_for_the_next_one(
    of: KvShape, own: int, answer: int
) -> None:
    """Also of short questions behind a long prompt. Their whole chunks are the same, so each looks
    like the next turn of the one before."""
    found = found_by_each(branches(10, own, answer), of)
    assert found[2:] == 3 * [10 * SIZE]


@pytest.mark.parametrize(
    ("every", "first", "second"),
    [(None, 0, 20), (16, 20, 20), (SIZE, 20, 20), (7 * SIZE, 14, 20), (8 * SIZE - 5, 16, 20)],
)
def test_a_first_branch_finds_the_nearest_state(every: int | None, first: int, second: int) -> None:
    """Those that the settings ask for: none by default, since one step computes the prompt."""
    found = found_by_each(branches(20), STATE, states_every=every)
    assert found == [0, first * SIZE, *3 * [second * SIZE]]


@pytest.mark.parametrize(
    ("every", "first"), [(None, 18), (SIZE, 20), (12 * SIZE, 12), (13 * SIZE, 13), (0, 0)]
)
def test_states_where_steps_end_are_kept_as_often_as_the_settings_say(
    every: int | None, first: int
) -> None:
    found = found_by_each(branches(20), STATE, states_every=every, max_num_batched_tokens=6 * SIZE)
    assert found[1] == first * SIZE
    assert found[2] == 20 * SIZE, "where prompts part one is kept in any case"


def test_states_in_between_take_no_room_that_others_need() -> None:
    trace = chats(60, rate=0.2)
    room = distinct_bytes(trace, PLAIN) // 3
    machine = replace(AT_ONCE.with_model(STATE), dram=room)
    hits = [
        Server(trace, replace(machine, states_every=every), "attnstore").run().hit_tokens
        for every in (None, 32)
    ]
    assert hits[1] > 0.97 * hits[0]


def state_priorities(requests: list[TraceRequest]) -> dict[int, int]:
    """Of the states that these leave, by where they are."""
    server = Server(make_trace("talk", SIZE, requests), AT_ONCE.with_model(STATE), "infinite")
    server.run()
    assert server.store is not None
    residency = server.store.residency
    return {
        chunk.name.position + chunk.name.num_tokens: residency.run_of(chunk).priority
        for chunk in residency.index
        if chunk.is_alone
    }


def test_of_two_states_the_one_that_is_less_likely_to_be_used_leaves_first() -> None:
    """A chat goes on from the end of its answer. One whose answers come back otherwise, without
    what was thought, goes on from the end of its prompt."""
    first = TraceRequest(0.0, np.arange(6), 330, 41, 371, 0, 0.0)
    assert state_priorities([first]) == {320: -1, 370: 0}
    chat = TraceRequest(60.0, np.arange(8), 420, 60, 480, 0, 0.0)
    assert state_priorities([first, chat]) == {416: -1, 479: 0}, "it has gone on"
    stripped = TraceRequest(60.0, np.array([0, 1, 2, 3, 4, 15, 16, 17]), 420, 60, 480, 0, 0.0)
    assert state_priorities([first, stripped]) == {370: 0, 416: 0, 479: -1}


def test_a_prompt_without_a_state_at_its_answers_end_keeps_its_own() -> None:
    first = TraceRequest(0.0, np.arange(6), 330, 3, 333, 0, 0.0)
    assert state_priorities([first]) == {320: 0}


def test_less_room_finds_less_and_sections_take_some_of_it() -> None:
    trace = talk((500, 20), (100, 20), (100, 20), num_talks=30)
    room = distinct_bytes(trace, PLAIN)
    assert found(trace, STATE, "lru", room // 60) < found(trace, STATE)
    interleaved = chats(60, rate=0.2)
    least = distinct_bytes(interleaved, PLAIN) // 5
    assert found(interleaved, WINDOW, "lru", least) < found(interleaved, PLAIN, "lru", least)


def test_steps_end_with_blocks_of_states() -> None:
    assert step_stop(0, 100, 300, 0) == 100
    assert step_stop(0, 100, 300, 32) == 96
    assert step_stop(96, 300, 300, 32) == 288  # the last whole block, then the rest
    assert step_stop(288, 300, 300, 32) == 300
    assert step_stop(50, 300, 300, 32) == 64
    assert step_stop(0, 300, 300, 32, 150) == 128  # where vLLM was asked to end one
    assert step_stop(128, 300, 300, 32, 150) == 288


@pytest.mark.parametrize("of", [WINDOW, LOCAL, STATE], ids=["window", "local", "state"])
def test_a_server_of_a_model_with_groups(of: KvShape) -> None:
    """All tiers, vLLM's own cache, and figures by group that are those of the store."""
    machine = Machine(
        kv_bytes_per_token=1, hbm=800_000, dram=6 * SIZE * 1000, nvme=10_000_000,
        prefill_tokens_per_s=2000, decode_step_s=0.02, max_num_seqs=4,
        max_num_batched_tokens=256, hbm_bandwidth=1 << 40,
    ).with_model(of)  # fmt: skip
    trace = chats(40, rate=0.3)
    server = Server(trace, machine, "attnstore")
    out = server.run()
    assert server.store is not None
    server.store.check_integrity()
    assert server.store.is_idle()
    assert out.num_requests == len(trace.requests)
    assert 0.3 < out.history_hit_share <= 1
    assert out.hbm_tokens
    assert out.dram_tokens + out.nvme_tokens
    kind = of.needs()[0].reach.value
    assert out.by_group[f"group_saved_bytes:{kind}"] > 0
    assert out.by_group[f"group_loaded_bytes:{kind}"] > 0
    assert out.bytes_written % machine.chunk_bytes == 0
    assert out.as_json()["by_group"]


@pytest.mark.parametrize("chunk_tokens", [256, 4096])
@pytest.mark.parametrize("config", [DEEPSEEK_V4_FLASH, DEEPSEEK_V41], ids=["V4", "V4.1"])
def test_packed_pages_are_found_again(config: dict[str, Any], chunk_tokens: int) -> None:
    """All but what ends between multiples of 256 tokens, in each of 14 turns."""
    of = shape_of(config, "c", chunk_tokens=chunk_tokens)
    machine = Machine(
        kv_bytes_per_token=1, hbm=1 << 50, dram=1 << 40, nvme=1 << 40, prefill_tokens_per_s=1e5,
        decode_step_s=0.001, prefix_cache=False, hbm_bandwidth=1 << 50, nvme_write=1 << 50,
    ).with_model(of)  # fmt: skip
    out = Server(talk(*14 * [(500, 40)]), machine, "attnstore").run()
    assert out.found_history % 256 == 0
    assert out.history_tokens - 14 * 256 < out.found_history <= out.history_tokens


@pytest.mark.parametrize("turn", [(500, 40), (200, 400)], ids=["short answers", "long answers"])
@pytest.mark.parametrize(
    ("name", "most"), [("gemma-3-27b", 0.3), ("gpt-oss-120b", 0.58), ("qwen3-next-80b", 0.45)]
)
def test_bytes_that_a_conversation_leaves(name: str, most: float, turn: tuple[int, int]) -> None:
    """On NVMe, over those of all groups' KV of all tokens: as benchmarks.group_bytes has it. Long
    answers end far behind their prompts, and each end has windows of its own."""
    of = read_shape(MODELS / f"{name}.json")
    trace = talk(*14 * [turn])
    machine = Machine(
        kv_bytes_per_token=1,
        hbm=1 << 50,
        dram=1 << 40,
        nvme=1 << 40,
        prefill_tokens_per_s=1e5,
        decode_step_s=0.001,
        prefix_cache=False,
        hbm_bandwidth=1 << 50,
        nvme_write=1 << 50,
    ).with_model(of)
    server = Server(trace, machine, "attnstore")
    out = server.run()
    assert server.store is not None
    gauges = server.store.gauges()
    held = gauges["held_bytes", "nvme"] / server.store.thread.tiers[0].record_bytes
    everything = -(-(14 * sum(turn)) // of.geometry.chunk_tokens) * len(of.geometry.groups)
    assert out.found_history > 0.98 * out.history_tokens
    assert 1 / len(of.geometry.groups) < held / everything < most


def test_the_command_takes_a_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [
        json.dumps(
            {
                "timestamp": 1000 * n,
                "input_length": 1024,
                "output_length": 20,
                "hash_ids": [n % 5, 100 + n % 10],
            }
        )
        for n in range(40)
    ]
    trace, machine = tmp_path / "t.jsonl", tmp_path / "m.yaml"
    trace.write_text("\n".join(lines))
    machine.write_text(
        "kv_bytes_per_token: 1\nhbm: 80GB\ndram: 40GB\nnvme: 400GB\nprefill_tokens_per_s: 3000\n"
        "decode_step_s: 0.02\n"
    )
    model = ["--model", str(MODELS / "qwen3-next-80b.json"), "--json"]
    assert main(["simulate", str(trace), *model, "--capacity", "20GB,1.0"]) == 0
    runs = json.loads(capsys.readouterr().out)["runs"]
    assert {run["policy"] for run in runs} == {"attnstore", "lru", "fifo", "infinite"}
    assert runs[0]["num_slots"] == 20_000_000_000 // 13_373_440
    assert main(["simulate", str(trace), *model, "--machine", str(machine)]) == 0
    runs = json.loads(capsys.readouterr().out)["runs"]
    assert "belady" not in {run["policy"] for run in runs}
    assert any(name.endswith(":state") for name in runs[0]["by_group"])
    for more in ([], ["--machine", str(machine)]):
        assert main(["simulate", str(trace), *model, *more, "--policy", "belady"]) == 2
        assert "--policy" in capsys.readouterr().err


def test_of_chats_states_find_less_and_windows_as_much() -> None:
    """The conversations of benchmarks.group_replay, with its small models."""
    shares = replayed(SAMPLE)
    assert shares["gemma3"] == shares["gpt_oss"] == shares["llama"] > 0.7
    assert 0.9 * shares["llama"] < shares["qwen3_next"] <= shares["llama"]


def test_a_small_model_has_the_blocks_that_its_engine_has() -> None:
    """In bfloat16 384 tokens hold a state; in float32, as its config.json says, 256 would."""
    geometry = shape_of_family("qwen3_next").geometry
    assert {group.block_tokens for group in geometry.groups} == {384}
