# SPDX-License-Identifier: Apache-2.0
"""`attnstore top`: figures of a server's /metrics, and manners of a command."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from rich.console import Console

from attnstore_vllm.cli.main import EXIT_ERROR, EXIT_INTERRUPTED, EXIT_OK, EXIT_PIPE, main
from attnstore_vllm.cli.top import figures, metrics_url, table
from attnstore_vllm.prometheus import parse_metrics

TEXT = """
# HELP vllm:attnstore_prompt_tokens_total x
vllm:attnstore_prompt_tokens_total{engine="0",model_name="m",source="hbm"} 100.0
vllm:attnstore_prompt_tokens_total{engine="0",model_name="m",source="dram"} 500.0
vllm:attnstore_prompt_tokens_total{engine="1",model_name="m",source="dram"} 100.0
vllm:attnstore_prompt_tokens_total{engine="0",model_name="m",source="nvme"} 200.0
vllm:attnstore_prompt_tokens_total{engine="0",model_name="m",source="computed"} 100.0
vllm:attnstore_prefill_seconds_saved_total{engine="0",tier="dram"} 12.5
vllm:attnstore_bytes_total{direction="dram_to_nvme",engine="0"} 2097152.0
vllm:attnstore_held_bytes{engine="0",tier="dram"} 1048576.0
vllm:attnstore_capacity_bytes{engine="0",tier="dram"} 4194304.0
vllm:attnstore_dirty_bytes{engine="0",tier="nvme"} 1024.0
vllm:attnstore_nvme_in_use{direction="reads",engine="0"} 1.0
vllm:attnstore_nvme_in_use{direction="writes",engine="0"} 1.0
vllm:attnstore_wait_seconds_count{engine="0"} 4.0
vllm:attnstore_wait_seconds_sum{engine="0"} 0.2
vllm:attnstore_ttft_seconds_count{engine="0",source="dram"} 3.0
vllm:attnstore_ttft_seconds_sum{engine="0",source="dram"} 0.15
vllm:attnstore_ttft_seconds_count{engine="1",source="dram"} 1.0
vllm:attnstore_ttft_seconds_sum{engine="1",source="dram"} 0.05
vllm:attnstore_ttft_seconds_count{engine="0",source="computed"} 2.0
vllm:attnstore_ttft_seconds_sum{engine="0",source="computed"} 1.0
vllm:attnstore_ttft_seconds_count{engine="0",source="nvme"} 0.0
vllm:attnstore_ttft_seconds_sum{engine="0",source="nvme"} 0.0
vllm:attnstore_errors_total{engine="0",kind="corrupt"} 0.0
vllm:num_requests_running{engine="0"} 2.0
vllm:num_requests_waiting{engine="0"} 3.0
"""
COMMAND = [sys.executable, "-m", "attnstore_vllm.cli.main", "top"]


class Answers(BaseHTTPRequestHandler):
    text = TEXT

    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/metrics" else 404)
        self.end_headers()
        self.wfile.write(self.text.encode())

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Answers) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.mark.parametrize(
    "given", ["a:1", "http://a:1", "http://a:1/", "http://a:1/metrics", "a:1/metrics"]
)
def test_the_address_may_be_short(given: str) -> None:
    assert metrics_url(given) == "http://a:1/metrics"


def test_figures_are_those_between_two_looks() -> None:
    before = parse_metrics(TEXT)
    more = TEXT.replace('source="nvme"} 200.0', 'source="nvme"} 260.0').replace(
        'source="computed"} 100.0', 'source="computed"} 140.0'
    )
    found = figures("a", before, parse_metrics(more), 2.0)
    assert found.prompt_tokens == {
        "hbm": 0,
        "dram": 0,
        "nvme": 60,
        "peers": 0,
        "shared": 0,
        "computed": 40,
    }
    assert found.share("nvme") == pytest.approx(0.6)
    assert (found.running, found.waiting) == (2, 3), "as they are now"
    restarted = figures("a", before, parse_metrics(""), 2.0)
    assert sum(restarted.prompt_tokens.values()) == 0, "a server that began anew"
    assert restarted.share("nvme") == 0


def test_once_in_json(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", url, "--once", "--json"]) == EXIT_OK
    (found,) = json.loads(capsys.readouterr().out)
    expected = {"hbm": 100, "dram": 600, "nvme": 200, "peers": 0, "shared": 0, "computed": 100}
    assert found["prompt_tokens"] == expected
    assert found["shared_in_use"] is None
    assert found["prefill_seconds_saved"] == 12.5
    assert (found["seconds"], found["nvme_in_use"], found["dirty_bytes"]) == (None, True, 1024)


def test_once_for_people(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", url, "--once"]) == EXIT_OK
    out = capsys.readouterr().out
    rows = {line.strip().partition("  ")[0]: line for line in out.splitlines()}
    assert "60.0%" in rows["DRAM"] and "10.0%" in rows["computed"]
    assert "1MiB of 4MiB" in rows["DRAM in use"] and "4, 50 ms" in rows["waits for NVMe, mean"]
    assert rows["TTFT, DRAM, mean"].rstrip().endswith(" 50 ms")
    assert rows["TTFT, computed, mean"].rstrip().endswith(" 500 ms")
    assert rows["TTFT, NVMe, mean"].rstrip().endswith(" -"), "there was none"
    assert "none" in rows["errors"]
    assert "\x1b" not in out, "no terminal, no colours"


def test_what_came_from_siblings_is_shown_where_there_are_any(
    url: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["top", url, "--once"]) == EXIT_OK
    assert "siblings" not in capsys.readouterr().out
    more = """vllm:attnstore_prompt_tokens_total{engine="0",source="peers"} 1000.0
vllm:attnstore_bytes_total{direction="peers_to_dram",engine="0"} 3145728.0
vllm:attnstore_siblings{engine="0",state="ready"} 1.0
vllm:attnstore_siblings{engine="0",state="all"} 3.0
"""
    monkeypatch.setattr(Answers, "text", TEXT + more)
    assert main(["top", url, "--once"]) == EXIT_OK
    out = capsys.readouterr().out
    rows = {line.strip().partition("  ")[0]: line for line in out.splitlines()}
    assert "50.0%" in rows["siblings"] and "5.0%" in rows["computed"]
    assert "3MiB" in rows["siblings to DRAM"] and "shared" not in out
    assert "2 of 3 links to siblings are down" in rows["errors"]


def test_tenants_with_quotas_are_shown_beside_a_server_without() -> None:
    more = """vllm:attnstore_tenant_held_bytes{engine="0",tenant="gold",tier="dram"} 1048576.0
vllm:attnstore_tenant_held_bytes{engine="1",tenant="gold",tier="dram"} 1048576.0
vllm:attnstore_tenant_quota_bytes{engine="0",tenant="gold",tier="dram"} 3145728.0
vllm:attnstore_tenant_quota_bytes{engine="1",tenant="gold",tier="dram"} 3145728.0
vllm:attnstore_tenant_held_bytes{engine="0",tenant="gold",tier="shared"} 0.0
vllm:attnstore_tenant_quota_bytes{engine="0",tenant="gold",tier="shared"} 2097152.0
vllm:attnstore_tenant_held_bytes{engine="0",tenant="tin",tier="nvme"} 1048576.0
vllm:attnstore_tenant_quota_bytes{engine="0",tenant="tin",tier="nvme"} 4194304.0
"""
    looks = [figures("a", {}, parse_metrics(text), None) for text in (TEXT, TEXT + more)]
    assert looks[0].tenants == {}
    console = Console(width=100)
    with console.capture() as captured:
        console.print(table(looks))
    lines = [" ".join(line.split()) for line in captured.get().splitlines() if "tenant" in line]
    assert lines == [
        "tenant gold, DRAM - 2MiB of 6MiB",
        "tenant gold, shared - 0B of 2MiB",
        "tenant tin, NVMe - 1MiB of 4MiB",
    ]
    shown = looks[1].as_json()["tenants"]
    assert shown == {
        "gold": {"dram": (2 << 20, 6 << 20), "shared": (0, 2 << 20)},
        "tin": {"nvme": (1 << 20, 4 << 20)},
    }


def test_servers_with_and_without_a_shared_tier_stand_beside_each_other() -> None:
    shared = TEXT + 'vllm:attnstore_shared_in_use{direction="reads",engine="0"} 1.0\n'
    texts = (TEXT, shared), (shared, TEXT)
    for pair in texts:
        shown = table([figures("a", {}, parse_metrics(text), None) for text in pair])
        console = Console(width=100)
        with console.capture() as captured:
            console.print(shown)
        assert re.search(r"shared +0.0% +0.0%", captured.get())


def test_what_is_wrong_with_the_disk_is_said(
    url: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    bad = TEXT.replace('kind="corrupt"} 0.0', 'kind="corrupt"} 7.0')
    bad = bad.replace('direction="writes",engine="0"} 1.0', 'direction="writes",engine="0"} 0.0')
    monkeypatch.setattr(Answers, "text", bad)
    assert main(["top", url, "--once"]) == EXIT_OK
    assert "NVMe is out of use, 7 corrupt" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("address", "text", "said"),
    [
        ("127.0.0.1:9", TEXT, "http://127.0.0.1:9/metrics does not answer: "),
        ("http://[::1", TEXT, "does not answer: "),
        ("URL/other", TEXT, "answers 404 Not Found; is it vLLM?"),
        ("URL", "vllm:num_requests_running 1", "has no figures of AttnStore; was the server"),
        ("URL", "\xff\x00{", "has no figures of AttnStore"),
    ],
)
def test_a_server_that_cannot_be_shown_gets_a_sentence(
    address: str,
    text: str,
    said: str,
    url: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Answers, "text", text)
    for options in ([], ["--once"], ["--json"]):
        assert main(["top", address.replace("URL", url), *options]) == EXIT_ERROR
        err = capsys.readouterr().err
        assert err.startswith("attnstore top: ") and said in err
        assert len(err.splitlines()) == 1


def test_one_of_two_servers_is_gone(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", url, "127.0.0.1:9", "--once"]) == EXIT_ERROR
    said = capsys.readouterr()
    assert "60.0%" in said.out and "127.0.0.1:9/metrics does not answer" in said.out


@pytest.mark.parametrize("interval", ["0", "soon", "-1s", "2 fortnights"])
def test_the_interval_is_a_time(
    interval: str, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["top", url, f"--interval={interval}"]) == EXIT_ERROR
    assert "--interval is" in capsys.readouterr().err


def test_a_reader_that_closes_early(url: str) -> None:
    with subprocess.Popen(
        [*COMMAND, url, "--json", "--interval=1s"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as top:
        assert top.stdout is not None and top.stderr is not None
        assert json.loads(top.stdout.readline())
        top.stdout.close()
        assert top.stderr.read() == b""
        assert top.wait(10) == EXIT_PIPE


def test_ctrl_c_ends_the_live_view_without_a_traceback(url: str) -> None:
    controller, terminal = pty.openpty()
    environment = {**os.environ, "NO_COLOR": "1", "TERM": "xterm-256color", "COLUMNS": "90"}
    with subprocess.Popen(
        [*COMMAND, url, "127.0.0.1:9", "--interval=1s"],
        stdin=terminal,
        stdout=terminal,
        stderr=subprocess.PIPE,
        env=environment,
    ) as top:
        os.close(terminal)
        shown = b""
        deadline = time.monotonic() + 20
        while b"AttnStore, now" not in shown and time.monotonic() < deadline:
            shown += os.read(controller, 65536)
        top.send_signal(signal.SIGINT)
        assert top.stderr is not None
        said = top.stderr.read()
        assert top.wait(10) == EXIT_INTERRUPTED
    os.close(controller)
    assert b"AttnStore, now" in shown and b"does not answer" in shown
    assert not re.search(rb"\x1b\[[0-9;]*3[0-7]m", shown), "NO_COLOR"
    assert said.strip() == b"attnstore top: interrupted"
