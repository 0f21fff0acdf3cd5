# SPDX-License-Identifier: Apache-2.0
"""`attnstore audit`: what is asked of a server, and what is made of its answer."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from attnstore_vllm.cli import audit_prompt, doctor
from attnstore_vllm.cli.main import EXIT_BAD, EXIT_ERROR, EXIT_OK, main
from attnstore_vllm.cli.speeds import DiskSpeed
from attnstore_vllm.preflight import SLAB_NAME
from attnstore_vllm.tiers.nvme.aside import Aside

AUDITS = "vllm:attnstore_audits_total"
AS_SHIPPED = {name: getattr(audit_prompt, name) for name in ("POLL_S", "COMPARED_S")}


class Server(BaseHTTPRequestHandler):
    """A server that has compared, as often as it is told."""

    report: dict[str, Any] | None
    finds: dict[str, int]
    later: list[tuple[float, str, int]]
    """What it finds besides: after so many seconds, of this outcome, so many chunks."""
    asked: list[Any]
    counts: dict[str, int]
    keys: set[str | None]

    def do_GET(self) -> None:
        self.keys.add(self.headers["Authorization"])
        text = json.dumps({"data": [{"id": "m", "max_model_len": 500}]})
        if self.path == "/metrics":
            text = "vllm:attnstore_errors_total 0\n"
            text += "".join(f'{AUDITS}{{outcome="{n}"}} {v}\n' for n, v in self.counts.items())
        self._answer(text)

    def do_POST(self) -> None:
        self.asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        for name, count in self.finds.items():
            self._find(name, count)
        for after_s, name, count in self.later:
            threading.Timer(after_s, self._find, (name, count)).start()
        params = None if self.report is None else {"attnstore": self.report}
        self._answer(json.dumps({"kv_transfer_params": params}))

    def _find(self, name: str, count: int) -> None:
        self.counts[name] = self.counts.get(name, 0) + count

    def _answer(self, text: str) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Server]]:
    monkeypatch.setattr(audit_prompt, "POLL_S", 0.01)
    monkeypatch.setattr(audit_prompt, "COMPARED_S", 0.1)
    Server.report, Server.finds, Server.asked = {"why_computed": "audit"}, {}, []
    Server.counts, Server.keys, Server.later = {"agreed": 7}, set(), []
    with ThreadingHTTPServer(("127.0.0.1", 0), Server) as made:
        threading.Thread(target=made.serve_forever, daemon=True).start()
        Server.url = f"127.0.0.1:{made.server_port}"  # type: ignore[attr-defined]
        yield Server
        made.shutdown()


def says(server: Any, capsys: pytest.CaptureFixture[str], *more: str) -> tuple[int, str]:
    code = main(["audit", server.url, *more])
    out, err = capsys.readouterr()
    return code, out + err


def test_it_says_what_was_compared(server: Any, capsys: pytest.CaptureFixture[str]) -> None:
    server.finds = {"agreed": 4}
    assert says(server, capsys) == (EXIT_OK, "4 chunks are what the model computes\n")
    server.finds = {"agreed": 3, "differed": 1}
    code, said = says(server, capsys)
    assert code == EXIT_BAD and said.startswith("1 chunks differ")
    server.finds = {"not_compared": 2}
    assert says(server, capsys)[0] == EXIT_OK
    code, said = says(server, capsys, "--json")
    assert json.loads(said)["outcomes"] == {"agreed": 0, "differed": 0, "not_compared": 2}


def test_it_waits_for_chunks_that_are_compared_later(
    server: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are compared one after the other, and figures of an idle server come once a second."""
    for name, value in AS_SHIPPED.items():
        monkeypatch.setattr(audit_prompt, name, value)
    server.finds, server.later = {"agreed": 1}, [(1.6, "agreed", 2), (1.6, "differed", 1)]
    code, said = says(server, capsys)
    assert code == EXIT_BAD and said.startswith("1 chunks differ"), said


def test_it_waits_for_as_many_as_the_server_has_drawn(
    server: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audit_prompt, "COMPARED_S", 15.0)
    server.report = {"why_computed": "audit", "audited_chunks": 2}
    server.finds, server.later = {"agreed": 1}, [(1.0, "differed", 1)]
    assert says(server, capsys)[0] == EXIT_BAD


def test_it_says_how_many_were_not_compared(
    server: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    server.report = {"why_computed": "audit", "audited_chunks": 5}
    server.finds = {"agreed": 2, "not_compared": 1}
    code, said = says(server, capsys)
    assert code == EXIT_OK
    assert said == "2 chunks are what the model computes; 3 could not be compared\n"
    server.finds = {"differed": 1, "not_compared": 1}
    code, said = says(server, capsys)
    assert code == EXIT_BAD and "0 agree; 4 could not be compared." in said
    server.finds = {}
    assert "nothing could be compared (5 chunks" in says(server, capsys)[1]


@pytest.mark.parametrize("why_not", [None, "distrusted"])
def test_a_server_that_an_audit_has_stopped_is_bad(
    server: Any, capsys: pytest.CaptureFixture[str], why_not: str | None
) -> None:
    server.report = {"why_computed": "distrusted", "why_not_stored": why_not}
    code, said = says(server, capsys)
    assert code == EXIT_BAD and "AttnStoreWrongKv in docs/runbook.md" in said
    assert "ask again" not in said
    code, said = says(server, capsys, "--json")
    assert code == EXIT_BAD and json.loads(said)["is_stopped"] is True


@pytest.mark.parametrize("name", ["attnstore.yaml", "/etc/attnstore.yml", "./store.json"])
def test_a_file_is_no_server(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", name]) == EXIT_ERROR
    err = capsys.readouterr().err
    assert f"{name} is a file, and an audit asks a running server: give its URL" in err
    assert f"`attnstore doctor {name}`" in err


@pytest.mark.parametrize(
    ("report", "said"),
    [
        ({"why_computed": "not_stored", "why_not_stored": None}, "It is now: ask again"),
        ({"why_computed": "expired", "why_not_stored": "no_room"}, "nor is it now (no_room)"),
        ({"why_computed": "slower"}, "nothing was compared (slower)"),
        ({"why_computed": "weights_unknown"}, "nothing was compared (weights_unknown)"),
        ({"why_computed": "not_stored"}, "nothing was stored of it"),
        ({"why_computed": "audit"}, "nothing could be compared"),
        ({"hbm_tokens": 480}, "vLLM's own cache has it"),
        ({"dram_tokens": 480, "hbm_tokens": 0}, "the server's `audit` is off"),
    ],
)
def test_it_says_why_nothing_was(
    server: Any, capsys: pytest.CaptureFixture[str], report: dict[str, Any], said: str
) -> None:
    server.report = report
    code, found = says(server, capsys)
    assert code == EXIT_OK and said in found


def test_it_asks_for_the_same_prompt_each_time(
    server: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    for _ in range(2):
        says(server, capsys, "--api-key", "secret")
    first, second = server.asked
    assert first == second
    assert len(first["prompt"]) == 499 and first["cache_salt"] == audit_prompt.SALT
    assert first["kv_transfer_params"]["attnstore"] == {"audit": True, "report": True}
    assert "Bearer secret" in server.keys


def test_a_server_that_cannot_be_audited_gets_a_sentence(
    server: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    server.report = None
    code, said = says(server, capsys)
    assert code == EXIT_ERROR and "is AttnStore idle there?" in said
    code = main(["audit", "127.0.0.1:1"])
    assert code == EXIT_ERROR and "does not answer" in capsys.readouterr().err


def doctor_says(file: Path) -> list[tuple[str, str]]:
    return [(c.state, c.found) for c in doctor.examine(file, None) if c.name == "audit"]


def test_doctor_knows_the_audit_and_what_it_has_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "memory_speed", lambda: 1e9)
    monkeypatch.setattr(doctor, "disk_speed", lambda *_: DiskSpeed("threads", 1e9, 1e9))
    path, file = tmp_path / "kv", tmp_path / "attnstore.yaml"
    plain = f"dram: 1MiB\nnvme: {{path: {path}, capacity: 1MiB}}\n"
    file.write_text(plain)
    assert doctor_says(file) == [("ok", "one hit in 10000, up to 1,000 tokens a second")]
    file.write_text(f"{plain}audit: 0\n")
    assert doctor_says(file) == [("note", "off: no hit is compared with what the model computes")]
    file.write_text(f"{plain}audit: {{rate: 1/200}}\n")
    assert doctor_says(file) == [("ok", "one hit in 200, up to 1,000 tokens a second")]
    engine = path / "dp1"
    engine.mkdir(parents=True)
    (engine / SLAB_NAME).touch()
    aside = Aside(engine, 1 << 20)
    aside.keep({"found": "x"}, bytes(32), [])
    mark = aside.stop(b"\xab" * 32, "3 hits")
    _, stopped, kept = doctor_says(file)
    assert stopped == ("warn", f"{mark}: its namespace is not served; again with `rm {mark}`")
    assert kept[0] == "warn" and kept[1].startswith(f"1 chunk that differed in {engine}/audit;")
