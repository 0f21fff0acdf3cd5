# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks.compare`: servers are started and ended, and asked the same.

It is long since all cases share the doubles of servers.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import pytest
from aiohttp import web

from attnstore_lab.bench.client import RequestError, RequestSettings
from attnstore_lab.bench.conversations import Conversation
from attnstore_lab.bench.schedule import Load
from attnstore_vllm.prometheus import Metrics, parse_metrics
from benchmarks.compare import command as compare_command
from benchmarks.compare.command import main
from benchmarks.compare.run import Asked, Comparer
from benchmarks.compare.systems import SERVED_NAME, System, chosen
from benchmarks.server import ServerError
from tests.fake_openai import Fake, served_aside

OK, FAILED, ERROR, INTERRUPTED = 0, 1, 2, 130
STEP = (
    "Iteration(4): 1 context requests, 9 context tokens, 0 generation requests, 0 generation "
    "tokens, iteration elapsed time: 250.00 ms\n"
)


class FakeServer:
    """Stands for `vllm serve`; its log has a step before the run, and one in it."""

    def __init__(self, url: str, log: Path, dies: bool = False) -> None:
        self.base_url = url
        self.log = log
        self.dies = dies
        self._looks = 0

    def metrics(self) -> Metrics:
        self._looks += 1
        if self._looks == 2 and self.dies:
            raise OSError("it died")
        if self._looks == 2:
            with self.log.open("a") as log:
                log.write(STEP)
        return parse_metrics(
            f'vllm:prompt_tokens_by_source_total{{source="local_compute"}} {100 * self._looks}\n'
        )


class Fakes:
    """Starts fake servers, and knows what became of them.

    Args:
        broken: systems that do not start.
        dying: systems that do not answer after the run.
        tokens, fails: of Fake.
    """

    def __init__(
        self, broken: tuple[str, ...] = (), dying: tuple[str, ...] = (), **fake: Any
    ) -> None:
        self.broken = broken
        self.dying = dying
        self.kind = Fake
        self.fake = fake
        self.began: list[str] = []
        self.ended: list[str] = []
        self.asked: dict[str, Fake] = {}
        self.directories: list[Path] = []
        self.then: Callable[[], None] = lambda: None

    @contextmanager
    def start(self, system: System, directory: Path, log: Path) -> Iterator[FakeServer]:
        self.began.append(system.name)
        assert list(directory.iterdir()) == []
        (directory / "kv").write_text("x")
        self.directories.append(directory)
        log.write_text(STEP)
        try:
            if system.name in self.broken:
                raise ServerError(f"vllm serve ended with exit code 1\n{log}")
            self.asked[system.name] = fake = self.kind(**self.fake)
            with served_aside(fake, model=SERVED_NAME) as url:
                self.then()
                yield FakeServer(url, log, system.name in self.dying)
        finally:
            self.ended.append(system.name)


TALKS = (Conversation("x", ("hello", "and?")), Conversation("y", ("ho",)))


def comparer(fakes: Fakes, out: Path, api: Literal["chat", "completions"] = "chat") -> Comparer:
    asked = Asked(
        conversations=(*TALKS, Conversation("long", ("z" * 99,))),
        load=Load(rate=float("inf")),
        settings=RequestSettings(model=SERVED_NAME, api=api, max_tokens=3),
    )
    return Comparer(asked, fakes.start, out=out, scratch=out, progress=False)


def questions(fake: Fake) -> list[str]:
    """The last one of each request, warm-up left out."""
    return sorted(body["messages"][-1]["content"] for body in fake.bodies[2:])


def test_all_are_asked_the_same_and_ended(tmp_path: Path) -> None:
    fakes = Fakes()
    result = comparer(fakes, tmp_path).run(chosen("re,vllm,attnstore"), {})
    assert fakes.began == fakes.ended == ["re", "vllm", "attnstore"]
    assert {tuple(questions(fake)) for fake in fakes.asked.values()} == {("and?", "hello", "ho")}
    assert result.num_conversations == 2  # the long one does not fit
    assert not any(directory.exists() for directory in fakes.directories)
    found = result.figures["vllm"]
    assert (found.requests, found.failed) == (3, 0)
    assert found.hit_tokens > 0
    assert (found.prefill_s, found.whole_prompt_tokens) == (0.25, 100)  # of the run alone
    assert (tmp_path / "vllm.jsonl").read_text().count("\n") == 3
    assert result.to_json()["systems"]["attnstore"]["ratios"]["prefill_over_re"] == 1.0


def test_conversations_warm_up_with_other_beginnings(tmp_path: Path) -> None:
    fakes = Fakes()
    comparer(fakes, tmp_path).run(chosen("re"), {})
    first, second = (body["messages"][0]["content"] for body in fakes.asked["re"].bodies[:2])
    assert first == second
    assert first not in ("hello", "ho")
    assert first.endswith("hello")


def test_ids_are_the_same_for_all(tmp_path: Path) -> None:
    fakes = Fakes()
    compared = comparer(fakes, tmp_path, api="completions")
    compared.run(chosen("re,vllm"), {})
    sent = [[b["prompt"] for b in fake.bodies[2:]] for fake in fakes.asked.values()]
    assert sorted(sent[0]) == sorted(sent[1])
    assert [ord(letter) for letter in "hello"] == min(sent[0])[1:]


def test_one_that_does_not_start_is_told_and_the_others_run(tmp_path: Path) -> None:
    fakes = Fakes(broken=("vllm",))
    told: list[str] = []
    compared = comparer(fakes, tmp_path)
    compared._tell = told.append
    result = compared.run(chosen("re,vllm,attnstore"), {"bound": "was not wanted"})
    assert list(result.figures) == ["re", "attnstore"]
    assert result.not_run["vllm"].startswith("vllm serve ended with exit code 1")
    assert result.not_run["bound"] == "was not wanted"
    assert fakes.ended == ["re", "vllm", "attnstore"]
    assert any("exit code 1" in line for line in told)


def test_if_the_first_does_not_start_none_is_tried(tmp_path: Path) -> None:
    fakes = Fakes(broken=("re",))
    with pytest.raises(ServerError, match="exit code 1"):
        comparer(fakes, tmp_path).run(chosen("re,vllm"), {})
    assert fakes.ended == ["re"]
    assert not any(directory.exists() for directory in fakes.directories)


def test_a_server_that_dies_in_its_run_is_told_and_the_others_are_kept(tmp_path: Path) -> None:
    fakes = Fakes(dying=("vllm",))
    result = comparer(fakes, tmp_path).run(chosen("re,vllm,attnstore"), {})
    assert list(result.figures) == ["re", "attnstore"]
    assert result.not_run == {"vllm": "it died"}
    with pytest.raises(OSError, match="it died"):
        comparer(Fakes(dying=("re",)), tmp_path).run(chosen("re,vllm"), {})


def test_a_full_disk_is_told_and_the_others_are_kept(tmp_path: Path) -> None:
    (tmp_path / "vllm.jsonl").symlink_to("/dev/full")
    result = comparer(Fakes(), tmp_path).run(chosen("re,vllm,attnstore"), {})
    assert list(result.figures) == ["re", "attnstore"]
    assert "No space left on device" in result.not_run["vllm"]


def test_directories_of_others_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "kv-re").mkdir()
    (tmp_path / "kv-re" / "theirs").touch()
    (tmp_path / "far").mkdir()
    (tmp_path / "far" / "theirs").touch()
    (tmp_path / "kv-vllm").symlink_to(tmp_path / "far")
    fakes = Fakes()
    comparer(fakes, tmp_path).run(chosen("re,vllm"), {})
    assert (tmp_path / "kv-re" / "theirs").exists()
    assert (tmp_path / "kv-vllm" / "theirs").exists()
    assert len(fakes.directories) == 2
    assert not any(directory.exists() for directory in fakes.directories)


def test_requests_that_fail_are_counted(tmp_path: Path) -> None:
    fakes = Fakes(fails=frozenset({2}))
    result = comparer(fakes, tmp_path).run(chosen("re"), {})
    assert result.num_failed >= 1


def test_a_server_that_does_not_answer_is_an_error(tmp_path: Path) -> None:
    fakes = Fakes(fails=frozenset({0}))
    with pytest.raises(RequestError, match="does not answer"):
        comparer(fakes, tmp_path).run(chosen("re"), {})
    assert fakes.ended == ["re"]


def test_ctrl_c_while_a_server_starts_ends_it_and_keeps_the_others(tmp_path: Path) -> None:
    fakes = Fakes()

    def interrupt() -> None:
        if fakes.began == ["re", "vllm"]:
            signal.raise_signal(signal.SIGINT)

    fakes.then = interrupt
    result = comparer(fakes, tmp_path).run(chosen("re,vllm,attnstore"), {})
    assert result.interrupted
    assert list(result.figures) == ["re"]
    assert fakes.ended == ["re", "vllm"]
    assert not any(directory.exists() for directory in fakes.directories)


# ---- the command -------------------------------------------------------------------------


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "model"
    path.mkdir()
    config = {
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "hidden_size": 128,
        "max_position_embeddings": 20,
    }
    (path / "config.json").write_text(json.dumps(config))
    return path


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> Fakes:
    fakes = Fakes()
    monkeypatch.setattr(compare_command, "starter", lambda *_: fakes.start)
    return fakes


def command(tmp_path: Path, model: Path, *options: str) -> int:
    data = tmp_path / "talks.json"
    data.write_text(
        json.dumps(
            [
                {"id": c.id, "conversations": [{"from": "human", "value": q} for q in c.questions]}
                for c in TALKS
            ]
        )
    )
    return main(
        [
            "--model",
            str(model),
            "--data",
            str(data),
            "--rate",
            "inf",
            "--think",
            "constant:0",
            "--max-tokens",
            "3",
            "--out",
            str(tmp_path / "out"),
            *options,
        ]
    )


def test_table_json_and_picture(
    tmp_path: Path, model: Path, fakes: Fakes, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(tmp_path, model, "--systems", "re,attnstore,offloading") == OK
    printed = capsys.readouterr()
    lines = printed.out.splitlines()
    assert lines[0].split()[:3] == ["TTFT", "1", "p50"]
    assert {line.split()[0] for line in lines[2:4]} == {"re", "attnstore"}
    assert "HBM holds the whole working set" in printed.err
    found = json.loads((tmp_path / "out" / "compare.json").read_text())
    assert list(found["systems"]) == ["re", "attnstore"]
    assert found["sizes"]["kv_bytes_per_token"] == 2 * 2 * 2 * 128
    assert found["options"]["systems"] == "re,attnstore,offloading"
    assert (tmp_path / "out" / "compare.svg").stat().st_size > 1000


def test_json_alone_is_printed(
    tmp_path: Path, model: Path, fakes: Fakes, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(tmp_path, model, "--systems", "re", "--json") == OK
    assert json.loads(capsys.readouterr().out)["systems"]["re"]["figures"]["requests"] == 3


def test_a_server_that_did_not_start_is_told_below_the_table(
    tmp_path: Path, model: Path, fakes: Fakes, capsys: pytest.CaptureFixture[str]
) -> None:
    fakes.broken = ("vllm",)
    assert command(tmp_path, model, "--systems", "re,vllm") == OK
    said = "not run: vllm: vllm serve ended with exit code 1 (see vllm.log)"
    assert capsys.readouterr().out.splitlines()[-1] == said


def test_exit_codes(tmp_path: Path, model: Path, fakes: Fakes) -> None:
    fakes.fake = {"fails": frozenset({2})}
    assert command(tmp_path, model, "--systems", "re") == FAILED
    fakes.fake = {}
    fakes.then = lambda: signal.raise_signal(signal.SIGTERM)
    assert command(tmp_path, model, "--systems", "re") == INTERRUPTED
    fakes.broken = ("re",)
    assert command(tmp_path, model, "--systems", "re") == ERROR


@pytest.fixture
def hung_up() -> Iterator[list[int]]:
    """The SIGHUPs that nobody but the test has handled."""
    found: list[int] = []
    before = signal.signal(signal.SIGHUP, lambda number, _: found.append(number))
    yield found
    signal.signal(signal.SIGHUP, before)


def test_a_closed_terminal_is_as_ctrl_c(
    tmp_path: Path, model: Path, fakes: Fakes, hung_up: list[int]
) -> None:
    fakes.then = lambda: signal.raise_signal(signal.SIGHUP)
    assert command(tmp_path, model, "--systems", "re,vllm") == INTERRUPTED
    assert fakes.began == fakes.ended == ["re"]
    signal.raise_signal(signal.SIGHUP)
    assert len(hung_up) == 1  # the handler is theirs again


def test_a_terminal_that_closes_in_a_run_is_as_ctrl_c(
    tmp_path: Path, model: Path, fakes: Fakes, hung_up: list[int]
) -> None:
    class Closing(Fake):
        async def __call__(self, request: web.Request) -> web.StreamResponse:
            if len(self.came_s) == 2:  # those that warm up
                os.kill(os.getpid(), signal.SIGHUP)
                await asyncio.sleep(5)
            return await super().__call__(request)

    fakes.kind = Closing
    assert command(tmp_path, model, "--systems", "re,vllm") == INTERRUPTED
    assert fakes.began == fakes.ended == ["re"]
    assert not hung_up


def test_nohup_stays_nohup(tmp_path: Path, model: Path, fakes: Fakes, hung_up: list[int]) -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    fakes.then = lambda: signal.raise_signal(signal.SIGHUP)
    assert command(tmp_path, model, "--systems", "re,vllm") == OK


def test_what_is_finished_is_written_before_the_next_one_starts(
    tmp_path: Path, model: Path, fakes: Fakes
) -> None:
    path = tmp_path / "out" / "compare.json"
    written: list[list[str]] = []

    def look() -> None:
        if path.exists():
            written.append(list(json.loads(path.read_text())["systems"]))

    fakes.then = look
    assert command(tmp_path, model, "--systems", "re,vllm,attnstore") == OK
    assert written == [["re"], ["re", "vllm"]]


def test_a_table_is_printed_also_if_it_cannot_be_written(
    tmp_path: Path, model: Path, fakes: Fakes, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "compare.json.new").symlink_to("/dev/full")
    assert command(tmp_path, model, "--systems", "re,vllm") == ERROR
    printed = capsys.readouterr()
    assert {line.split()[0] for line in printed.out.splitlines()[2:4]} == {"re", "vllm"}
    assert "compare.json: No space left on device" in printed.err


def test_a_model_whose_kv_is_not_known_says_what_to_do(
    tmp_path: Path, model: Path, fakes: Fakes, capsys: pytest.CaptureFixture[str]
) -> None:
    (model / "config.json").write_text('{"kv_lora_rank": 512, "max_position_embeddings": 20}')
    assert command(tmp_path, model) == ERROR
    assert "or say --kv-bytes-per-token N" in capsys.readouterr().err
    options = ("--kv-bytes-per-token", "1024", "--systems", "re")
    assert command(tmp_path, model, *options) == OK


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--systems", "vlm"], "'vlm' is unknown"),
        (["--store", "[]"], "--store: expected a JSON object"),
        (["--hbm-tokens", "20"], "--hbm-tokens is 20"),
        (["--dram", "much"], "--dram is 'much'"),
        (["--model", "no/such"], "no directory with a config.json"),
        (["--serve", "--dtype 'x"], "--serve: No closing quotation"),
        (["--serve", "--port 1"], "--serve: '--port' is not for it"),
        (["--serve", "--dtype auto --kv_transfer_config.kv_role=x"], "'--kv_transfer_config.kv"),
        (["--serve=--no-enable-prefix"], "'--no-enable-prefix' is not for it"),
    ],
)
def test_wrong_options_are_told_before_anything_starts(
    tmp_path: Path, model: Path, options: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(tmp_path, model, *options) == ERROR
    assert said in capsys.readouterr().err
