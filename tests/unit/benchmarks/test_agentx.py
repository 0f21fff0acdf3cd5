# SPDX-License-Identifier: Apache-2.0
"""benchmarks.agentx: traces are cut to size, and what prompts share they still share."""

from __future__ import annotations

import json
from itertools import takewhile
from pathlib import Path

import pytest

from attnstore_vllm.errors import ConfigError
from benchmarks import agentx

RUNS = [[[1, 100]], [[1, 140]], [[1, 90], [500, 80]]]


def line(runs: list[list[list[int]]] = RUNS) -> str:
    requests = [
        {"t": float(n), "type": "n", "model": "m", "in": 64 * sum(r[1] for r in rle) + 7,
         "out": 100, "hash_rle": rle}
        for n, rle in enumerate(runs)
    ]  # fmt: skip
    requests.append({"type": "subagent", "t": 9.0})
    head = {"id": "s1", "models": ["m"], "block_size": 64, "hash_id_scope": "local"}
    return json.dumps({**head, "tool_tokens": 640, "requests": requests})


def shared(one: list[int], other: list[int]) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def test_runs_of_hashes_are_read_and_subagents_left_out(tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text(line() + "\n")
    (session,) = agentx.read_sessions(tmp_path / "t.jsonl")
    assert [len(r["hash_ids"]) for r in session["requests"]] == [100, 140, 170]
    assert "hash_rle" not in session["requests"][0]


def test_a_cut_session_fits_and_shares_what_it_shared(tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text(line() + "\n")
    (session,) = agentx.read_sessions(tmp_path / "t.jsonl")
    small = agentx.cut(session, 4096, None)
    first, second, third = (r["hash_ids"] for r in small["requests"])
    assert max(r["in"] + r["out"] for r in small["requests"]) <= 4096 - agentx.SPARE_TOKENS
    assert shared(first, second) == len(first) < 100
    assert shared(second, third) == 30  # of 90, every third
    for request in small["requests"]:
        assert len(request["hash_ids"]) == request["in"] // 64
    assert agentx.cut(session, 1 << 20, 2)["requests"] == session["requests"][:2]


def test_folders_hold_a_file_a_session(tmp_path: Path) -> None:
    count = agentx.write_traces(tmp_path, None, count=3, context_tokens=4096, requests=None)
    files = sorted(tmp_path.iterdir())
    assert count == len(files) == 3
    requests = json.loads(files[0].read_text())["requests"]
    assert requests[1]["hash_ids"][: len(requests[0]["hash_ids"])] == requests[0]["hash_ids"]


def test_a_file_that_has_no_sessions_is_refused(tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text('{"id": "x"}\n')
    with pytest.raises(ConfigError, match="line 1"):
        agentx.write_traces(
            tmp_path / "o", tmp_path / "t.jsonl", count=1, context_tokens=4096, requests=None
        )


@pytest.mark.parametrize(("seconds", "is_short"), [("60", True), ("900", False)])
def test_only_a_short_run_overrides_the_scenario(seconds: str, is_short: bool) -> None:
    args = agentx.parser().parse_args(["--seconds", seconds])
    found = agentx.command(Path("agentx"), "http://u", "m", Path("t"), Path("o"), args)
    assert ("--unsafe-override" in found) is is_short
