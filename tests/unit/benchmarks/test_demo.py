# SPDX-License-Identifier: Apache-2.0
"""The demo's parts: its conversations, a server's metrics, and comparing answers."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from attnstore_lab.bench.conversations import read_conversations
from attnstore_lab.bench.records import Step, TurnRecord
from attnstore_lab.bench.traffic import Traffic, traffic
from attnstore_lab.testing.tiny_model import SMALL
from attnstore_lab.testing.tiny_tokenizer import build_tokenizer
from attnstore_vllm.prometheus import parse_metrics, total
from benchmarks.agreement import compare, gap_changes, rounding_bound
from benchmarks.demo import MAX_TOKENS, ROOT, arguments
from benchmarks.demo_report import Side, in_one_sentence, report_table
from benchmarks.sample import SAMPLE
from tests.fake_openai import send, served_aside, stream


def test_sample_has_long_and_varied_conversations() -> None:
    conversations = read_conversations(SAMPLE)
    assert len(conversations) >= 16
    assert len({c.id for c in conversations}) == len(conversations)
    for conversation in conversations:
        assert 4 <= len(conversation.questions) <= 7
        for question in conversation.questions:
            assert isinstance(question, str)
            assert 40 <= len(question.split()) <= 250, conversation.id


def test_metrics_are_parsed_and_summed() -> None:
    text = """# HELP x:y_total help
# TYPE x:y_total counter
x:y_total{engine="0",tier="dram"} 5.0
x:y_total{engine="0",tier="nvme"} 7.0
plain 1e3
"""
    metrics = parse_metrics(text)
    assert total(metrics, "x:y_total") == 12
    assert total(metrics, "x:y_total", tier="nvme") == 7
    assert total(metrics, "plain") == 1000
    assert total(metrics, "absent") == 0


def test_traffic_tells_the_sources_apart() -> None:
    prompt = "vllm:prompt_tokens_by_source_total"
    lines = [
        f'{prompt}{{engine="0",source="local_compute"}} 100',
        f'{prompt}{{engine="0",source="local_cache_hit"}} 20',
        f'{prompt}{{engine="0",source="external_kv_transfer"}} 30',
    ]
    alone = traffic({}, parse_metrics("\n".join(lines)))
    assert alone.prompt_tokens == {"computed": 100, "HBM": 20, "other": 30}
    assert not alone.has_store
    lines += [
        'vllm:attnstore_loaded_tokens_total{engine="0",tier="dram"} 10',
        'vllm:attnstore_loaded_tokens_total{engine="0",tier="nvme"} 20',
        'vllm:attnstore_bytes_total{engine="0",direction="dram_to_hbm"} 640',
    ]
    stored = traffic({}, parse_metrics("\n".join(lines)))
    assert stored.prompt_tokens == {"computed": 100, "HBM": 20, "DRAM": 10, "NVMe": 20}
    none = [f'vllm:attnstore_loaded_tokens_total{{tier="{t}"}} 0' for t in ("peers", "shared")]
    assert traffic({}, parse_metrics("\n".join(lines + none))) == stored
    others = [text.replace(" 0", " 15") for text in none]
    lines[2] = lines[2].replace(" 30", " 60")
    found = traffic({}, parse_metrics("\n".join(lines + others)))
    assert found.prompt_tokens == stored.prompt_tokens | {"siblings": 15, "shared": 15}
    assert stored.moved_bytes == {"dram_to_hbm": 640}
    assert stored.has_store


# ---- agreement ---------------------------------------------------------------------------------


def answer(*tops: dict[str, float], turn: int = 1, error: str | None = None) -> TurnRecord:
    """An answer that takes the best candidate at each place."""
    steps = [Step(token := max(top, key=lambda t: top[t]), top[token], top) for top in tops]
    return TurnRecord(conversation_id="c", turn=turn, steps=steps, error=error)


SURE = {"a": -0.1, "b": -3.1}
CLOSE_A = {"a": -0.70, "b": -0.72}
CLOSE_B = {"a": -0.71, "b": -0.69}


def test_identical_answers_agree() -> None:
    result = compare([answer(SURE), answer(SURE, turn=2)], [answer(SURE), answer(SURE, turn=2)])
    assert (result.compared, result.identical, result.not_compared) == (2, 2, 0)


def test_difference_shows_both_gaps_and_ends_the_comparison() -> None:
    a = [answer(SURE, CLOSE_A, SURE), answer(SURE, turn=2)]
    b = [answer(SURE, CLOSE_B, SURE), answer(SURE, turn=2)]
    result = compare(a, b)
    assert (result.compared, result.identical, result.not_compared) == (1, 0, 1)
    [difference] = result.differences
    assert (difference.turn, difference.position) == (1, 1)
    assert (difference.token_a, difference.token_b) == ("a", "b")
    assert difference.gap_a == pytest.approx(0.02)
    assert difference.gap_b == pytest.approx(0.02)
    assert difference.is_within(0.05)
    assert not difference.is_within(0.03)


def test_token_that_the_other_side_never_considered_is_not_rounding() -> None:
    [difference] = compare(
        [answer({"a": -0.1, "b": -3})], [answer({"x": -0.1, "b": -3})]
    ).differences
    assert difference.change is None
    assert not difference.is_within(1e9)


def test_shorter_answer_is_a_difference() -> None:
    [difference] = compare([answer(SURE, SURE)], [answer(SURE)]).differences
    assert difference.position == 1
    assert not difference.is_within(1e9)


def test_failed_answers_are_not_compared() -> None:
    a = [answer(SURE, error="lost"), answer(SURE, turn=2)]
    b = [answer(SURE), answer(SURE, turn=2)]
    result = compare(a, b)
    assert (result.compared, result.not_compared) == (0, 2)


def test_gap_changes_cover_the_common_text_and_the_first_difference() -> None:
    moved = {"a": -0.1, "b": -3.3}
    changes = gap_changes([answer(SURE, CLOSE_A, SURE)], [answer(moved, CLOSE_B, SURE)])
    assert changes == pytest.approx([0.2, 0.04])
    assert rounding_bound(changes) == pytest.approx(0.4)
    assert rounding_bound([]) == 0


def test_a_demo_of_a_user_leaves_the_quoted_results_alone() -> None:
    written = arguments([]).json
    assert not written.is_relative_to(ROOT / "results"), "tests/test_readme.py would fail next"
    assert written.is_relative_to(ROOT / ".cache"), "git would show it"


def test_times_are_over_those_of_the_first_side_as_in_the_readme() -> None:
    sides = [
        Side(name, [TurnRecord(conversation_id="c", turn=2, ttft_ms=ms)], traffic({}, {}), 1.0)
        for name, ms in (("vLLM alone", 320.0), ("with AttnStore", 96.0))
    ]
    head, *rows = report_table(sides).splitlines()
    (row,) = (row for row in rows if row.startswith("TTFT of turn 2 and later, median"))
    assert head.endswith("over vLLM alone")
    assert row.split()[-3:] == ["320.0", "96.0", "0.30"]


def test_rows_that_are_nought_on_both_sides_are_left_out() -> None:
    shown = Traffic(
        prompt_tokens={"computed": 10, "DRAM": 0}, moved_bytes={"dram_to_hbm": 0},
        chunks={"dropped": 0, "merged": 0}, recomputations={"slower": 0}, loads=0, load_seconds=0.0,
    )  # fmt: skip
    rows = report_table([Side("ours", [], shown, 1.0)], counters=True)
    assert "from DRAM" in rows and "chunks dropped" in rows
    for word in ("DRAM to HBM", "merged", "slower"):
        assert word not in rows


def sides(*, first: float, second: float, corrupt: int = 0) -> list[Side]:
    """Two sides with these TTFT of a later turn, of which the second computes 19 % of tokens."""
    made = []
    for name, ms, computed in (("vLLM alone", first, 99), ("with AttnStore", second, 19)):
        moved = Traffic(
            prompt_tokens={"computed": computed, "HBM": 1, "DRAM": 99 - computed},
            moved_bytes={"dram_to_hbm": 1 << 20}, chunks={"merged": 3, "corrupt": corrupt},
            recomputations={"slower": 2}, loads=0, load_seconds=0.0,
        )  # fmt: skip
        made.append(Side(name, [TurnRecord(conversation_id="c", turn=2, ttft_ms=ms)], moved, 1.0))
    return made


def test_one_sentence_says_what_the_run_has_shown() -> None:
    run = sides(first=323.0, second=95.0)
    rest = "81% of prompt tokens were not computed"
    alone = "(vLLM alone: 1%)"
    assert in_one_sentence(run) == (
        f"First tokens of later turns came 3.4 times sooner; {rest} {alone}."
    )
    assert "2.0 times LATER" in in_one_sentence(sides(first=50.0, second=100.0))
    assert in_one_sentence(run[1:]) == f"{rest}."


def test_counters_are_shown_when_they_are_asked_for_and_errors_always() -> None:
    run = sides(first=323.0, second=95.0)
    words = ("DRAM to HBM, MiB", "chunks merged", "chunks corrupt", "recomputations, slower")
    assert not any(word in report_table(run) for word in words)
    assert all(word in report_table(run, counters=True) for word in words)
    assert "chunks corrupt" in report_table(sides(first=1.0, second=1.0, corrupt=1))
    assert not arguments([]).verbose and arguments(["-v"]).verbose


def test_the_guides_script_holds_a_chat_that_has_left_hbm_before_its_second_turn() -> None:
    page = (ROOT / "docs" / "getting-started-cpu.md").read_text(encoding="utf-8")
    script = page.partition("python - <<'END'\n")[2].partition("\nEND\n")[0]
    asked: list[dict[str, Any]] = []

    async def answer(request: web.Request) -> web.StreamResponse:
        asked.append(await request.json())
        choices = [{"message": {"role": "assistant", "content": "Well."}}]
        report = {"attnstore": {"dram_tokens": len(asked)}}
        return web.json_response({"choices": choices, "kv_transfer_params": report})

    with served_aside(answer) as url:
        command = [sys.executable, "-c", script.replace("http://localhost:8000", url)]
        said = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert said.stdout.splitlines()[-1] == str({"attnstore": {"dram_tokens": len(asked)}})
    assert all(body["kv_transfer_params"]["attnstore"]["report"] is True for body in asked)
    tokenizer = build_tokenizer(SMALL.vocab)
    texts = ["".join(message["content"] for message in body["messages"]) for body in asked]
    tokens = [tokenizer.encode(text).ids for text in texts]
    ((blocks, block_tokens),) = re.findall(r"override (\d+) --block-size (\d+) --kv", page)
    between = sum(len(ids) // int(block_tokens) for ids in tokens[1:-1])
    assert between >= int(blocks), "the first turn may still be in HBM"
    assert all(600 < len(ids) < SMALL.max_position - 100 for ids in tokens)
    assert asked[-1]["messages"][:1] == asked[0]["messages"] and len(asked[-1]["messages"]) == 3
    assert len({tuple(ids[:15]) for ids in tokens[:-1]}) == len(tokens) - 1, "one finds another"


def test_an_end_from_outside_leaves_no_task_behind(tmp_path: Path) -> None:
    """At any moment of the event loop: it waits for answers, or works on one."""
    asked = threading.Event()

    async def answer(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        response = await stream(request)
        if body["max_tokens"] == MAX_TOKENS:  # not of the warm-up
            asked.set()
            token = {"choices": [{"delta": {"content": "well"}}]}
            while True:  # so that most signals come while a client works on an answer
                await send(response, token)
        await send(response, {"choices": [{"delta": {"content": "well"}}]})
        await send(response, "[DONE]")
        return response

    with served_aside(answer, context_tokens=1_000) as url:
        command = [sys.executable, "-m", "benchmarks.demo", "--base-url", url, "--model", "m"]
        files = ["--dataset", str(letters(tmp_path)), "--json", str(tmp_path / "demo.json")]
        demo = subprocess.Popen(
            [*command, *files], cwd=ROOT, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL,
            text=True,
        )  # fmt: skip
        try:
            assert asked.wait(60)
            demo.send_signal(signal.SIGTERM)
            _, said = demo.communicate(timeout=60)
        finally:
            demo.kill()
    assert demo.returncode == 128 + signal.SIGTERM
    assert "Traceback" not in said and "destroyed" not in said, said


def letters(folder: Path) -> Path:
    """Conversations that fit the context of the small server."""
    turns = [{"from": who, "value": "a"} for who in ("human", "gpt") * 2]
    path = folder / "letters.json"
    path.write_text(json.dumps([{"id": f"c{n}", "conversations": turns} for n in range(4)]))
    return path
