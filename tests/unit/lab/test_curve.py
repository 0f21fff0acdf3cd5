# SPDX-License-Identifier: Apache-2.0
"""`attnstore curve`: of a trace and of a server."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from attnstore_lab.cli.curve import Point, of_server, smallest
from attnstore_vllm.cli.main import EXIT_ERROR, EXIT_OK, main
from attnstore_vllm.cli.top import TopError
from attnstore_vllm.policy.hit_curve import CURVE_TIMES

SHARES = (0.1, 0.3, 0.5, 0.69, 0.7, 0.7)
TEXT = "".join(
    f'vllm:attnstore_dram_curve_ratio{{engine="{engine}",times="{times:g}"}} {share + shift}\n'
    for engine, shift in ((0, 0.1), (1, -0.1))
    for times, share in zip(CURVE_TIMES, SHARES, strict=True)
) + "".join(
    f'vllm:attnstore_capacity_bytes{{engine="{engine}",tier="dram"}} 1073741824\n'
    for engine in (0, 1)
)


class _Answers(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(TEXT.encode())

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Answers) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"127.0.0.1:{server.server_address[1]}"
        server.shutdown()


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Ten conversations of four chunks, each asked for again at once, and all once more."""
    names = [[10 * talk + n for n in range(4)] for talk in range(10)]
    order = [names[talk] for talk in range(10) for _ in range(2)] + names
    lines = [
        {"timestamp": at, "input_length": 2048, "output_length": 1, "hash_ids": ids}
        for at, ids in enumerate(order)
    ]
    path = tmp_path / "t.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


def test_a_server_says_it_for_all_its_engines(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["curve", url, "--json"]) == EXIT_OK
    found = json.loads(capsys.readouterr().out)
    assert [point["hit_tokens_share"] for point in found["points"]] == pytest.approx(SHARES)
    assert [point["bytes"] >> 20 for point in found["points"]] == [
        512, 1024, 2048, 4096, 8192, 16384
    ]  # fmt: skip
    assert found["smallest"]["bytes"] == 4 << 30


def test_a_trace_says_it_by_shares_and_with_a_model_in_bytes(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["curve", str(trace), "--capacity", "0.05,0.1,1", "--json"]) == EXIT_OK
    points = json.loads(capsys.readouterr().out)["points"]
    shares = [point["hit_tokens_share"] for point in points]
    assert shares == pytest.approx([1 / 6, 1 / 3, 2 / 3], abs=1e-3)
    assert {point["bytes"] for point in points} == {None}
    config = {
        "num_hidden_layers": 2, "num_key_value_heads": 2, "num_attention_heads": 4, "head_dim": 64,
        "hidden_size": 256, "torch_dtype": "bfloat16", "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = ["--model", str(tmp_path / "config.json")]
    assert main(["curve", str(trace), "--capacity", "1", "--json", *model]) == EXIT_OK
    (point,) = json.loads(capsys.readouterr().out)["points"]
    assert point["bytes"] == 40 * 512 * 2 * 2 * 2 * 64 * 2
    assert main(["curve", str(trace)]) == EXIT_OK
    assert "smallest within 2.0% of the best: 1 of the distinct KV" in capsys.readouterr().out


def test_the_smallest_is_no_larger_than_need_be() -> None:
    points = [Point(n, None, share) for n, share in enumerate(SHARES)]
    assert smallest(points, 0.0).scale == 4
    assert smallest(points, 0.011).scale == 3
    assert smallest(points, 0.5).scale == 1


@pytest.mark.parametrize("wrong", [["--tolerance", "2"], ["--capacity", "7"]])
def test_what_makes_no_sense_is_a_sentence(
    trace: Path, wrong: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["curve", str(trace), *wrong]) == EXIT_ERROR
    assert wrong[0] in capsys.readouterr().err


def test_a_server_without_a_curve_is_a_sentence() -> None:
    with pytest.raises(TopError, match="no curve"):
        of_server({})
