# SPDX-License-Identifier: Apache-2.0
"""init, check and doctor as users run them: real processes, their answers and exit codes.

It is long since each thing that these commands say has its case.
"""

from __future__ import annotations

import errno
import fcntl
import importlib.metadata
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from ctypes.util import find_library
from pathlib import Path

import pytest
import yaml

from attnstore_lab.sim.hardware import Machine
from attnstore_vllm import preflight
from attnstore_vllm.cli import doctor
from attnstore_vllm.cli.doctor import examine
from attnstore_vllm.cli.main import main
from attnstore_vllm.cli.speeds import DiskSpeed
from attnstore_vllm.config.settings import StoreConfig
from attnstore_vllm.config.values import format_size
from attnstore_vllm.errors import ConfigError
from attnstore_vllm.preflight import SLAB_NAME
from attnstore_vllm.tiers.nvme.slab import NO_RESERVE
from attnstore_vllm.transfer.region import PREFIX
from benchmarks.sample import SAMPLE
from tests.unit.test_model_shape import DEEPSEEK_V41

ROOT = Path(__file__).resolve().parents[3]
COMMAND = [sys.executable, "-m", "attnstore_vllm.cli.main"]
BAD = """\
dram: 64
nvme:
  path: kv
  capacity: 1GiB
  io: fast
eviction: lru
ttl: 7d
lookahead: true
pinning: {share: 0.4, tenant_share: 0.3}
"""


@pytest.fixture(autouse=True)
def _unmeasured(monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process; the doctor's own process measures."""
    monkeypatch.setattr(doctor, "memory_speed", lambda: 1e9)
    monkeypatch.setattr(doctor, "disk_speed", lambda *_: DiskSpeed("threads", 1e9, 1e9))


def attnstore(*arguments: object, **more: object) -> subprocess.CompletedProcess[str]:
    command = [*COMMAND, *map(str, arguments)]
    return subprocess.run(  # type: ignore[call-overload]
        command, capture_output=True, text=True, check=False, timeout=120, **more
    )


@pytest.fixture
def settings(tmp_path: Path) -> Path:
    file = tmp_path / "attnstore.yaml"
    file.write_text(f"dram: 1MiB\nnvme: {{path: {tmp_path}/kv, capacity: 1MiB}}\n")
    return file


def test_init_writes_what_check_takes(tmp_path: Path) -> None:
    made = attnstore("init", "--dir", tmp_path / "kv")
    assert made.returncode == 0
    config = StoreConfig.parse(yaml.safe_load(made.stdout))
    assert config.nvme.path == tmp_path / "kv" and config.dram_bytes > 1 << 20
    file = tmp_path / "a.yaml"
    file.write_text(made.stdout)
    assert attnstore("check", file).returncode == 0
    sizes = ("--dram", "3Gi", "--nvme", "5GiB")
    sized = attnstore("init", "--dir", tmp_path / "kv", *sizes)
    assert StoreConfig.parse(yaml.safe_load(sized.stdout)).dram_bytes == 3 << 30
    assert "truncation" not in made.stdout and "--all" in made.stdout
    every = attnstore("init", "--dir", tmp_path / "kv", *sizes, "--all")
    assert len(yaml.safe_load(every.stdout)) > len(yaml.safe_load(sized.stdout)) == 7
    assert StoreConfig.parse(yaml.safe_load(every.stdout)) == StoreConfig.parse(
        yaml.safe_load(sized.stdout)
    )


def test_init_refuses_a_disk_that_is_not_there() -> None:
    said = attnstore("init", "--dir", "/no/such/disk")
    assert said.returncode == 2
    assert "'/no/such' is not a directory" in said.stderr


def test_check_says_all_at_once_and_where(tmp_path: Path) -> None:
    file = tmp_path / "bad.yaml"
    file.write_text(BAD)
    said = attnstore("check", file, "--json")
    assert said.returncode == 1
    found = {each["line"]: each["problem"] for each in json.loads(said.stdout)}
    assert sorted(found) == [1, 3, 5, 7, 8]
    assert "did you mean 64GiB" in found[1] and "did you mean look_ahead" in found[8]
    assert "line 5: nvme.io is 'fast'" in attnstore("check", file).stdout


def test_check_reads_vllms_form_too(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    extra = {"dram": "1GiB", "nvme": {"path": "/x", "capacity": "1Gb"}}
    ours = {"kv_connector": "AttnStoreConnector", "kv_connector_extra_config": extra}
    file.write_text(json.dumps(ours))
    assert attnstore("check", file).returncode == 0
    extra["dram"] = "much"
    several = {
        "kv_connector": "MultiConnector",
        "kv_connector_extra_config": {"connectors": [ours]},
    }
    file.write_text(json.dumps(several))
    assert "dram is 'much'" in attnstore("check", file).stdout


@pytest.mark.parametrize(
    ("text", "said"),
    [("a: [", "no YAML"), ("{kv_connector: Other}", "AttnStoreConnector 0 times"), (None, "read")],
)
def test_check_of_what_is_no_file_of_settings(tmp_path: Path, text: str | None, said: str) -> None:
    file = tmp_path / "a.yaml"
    if text is not None:
        file.write_text(text)
    answer = attnstore("check", file)
    assert answer.returncode == 2
    assert said in answer.stderr and "Traceback" not in answer.stderr


@pytest.mark.parametrize("command", ["check", "doctor"])
def test_a_file_that_is_not_there_yet(tmp_path: Path, command: str) -> None:
    answer = attnstore(command, tmp_path / "my settings.yaml")
    assert answer.returncode == 2
    assert f"`attnstore init > '{tmp_path}/my settings.yaml'` makes one" in answer.stderr


def test_check_says_who_looks_at_the_machine(tmp_path: Path) -> None:
    """The file is right in itself; no start could make such a directory."""
    file = tmp_path / "a.yaml"
    file.write_text("dram: 1MiB\nnvme: {path: /no/such/kv, capacity: 1MiB}\n")
    said = attnstore("check", file)
    told = f"the settings fit together; `attnstore doctor {file}` looks at this machine"
    assert (said.returncode, said.stdout) == (0, f"{file}: {told}\n")
    assert attnstore("doctor", file).returncode == 1


@pytest.mark.parametrize("nvme", ["5", "[]", "off", "", "/mnt/kv"])
def test_check_goes_on_behind_a_section_that_is_none(tmp_path: Path, nvme: str) -> None:
    file = tmp_path / "a.yaml"
    file.write_text(f"dram: 64\nnvme: {nvme}\nttl: soon\nlookahead: true\n")
    said = json.loads(attnstore("check", file, "--json").stdout)
    found = {each["line"]: each["problem"] for each in said}
    assert sorted(found) == [1, 2, 3, 4]
    wanted = "it must be {path: ..., capacity: ...}" if nvme else "it stands there without a value"
    assert found[2].startswith("nvme is ") and wanted in found[2]


def test_doctor_measures_and_leaves_nothing(settings: Path) -> None:
    said = attnstore("doctor", settings, "--json")
    report = json.loads(said.stdout)
    states = {check["check"]: check for check in report["checks"]}
    assert (said.returncode, report["refused"]) == (0, False), report
    assert "reads" in states["disk speed"]["found"]
    assert list(settings.parent.iterdir()) == [settings], "its trial file is still there"


def test_doctor_says_what_killed_engines_left_and_leaves_it(
    settings: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = tmp_path / "shm" / f"{PREFIX}dead"
    left.parent.mkdir()
    left.write_bytes(b"x" * (1 << 20))
    monkeypatch.setattr(preflight, "SHM_DIR", left.parent)
    size = format_size(left.stat().st_blocks * 512)
    for file in (settings, None):
        (told,) = (check for check in examine(file, None) if check.name == "left behind")
        assert told.state == "note"
        assert told.found.endswith(f": 1, {size}; the next start removes them")
        assert left.exists()


def test_doctor_without_vllm_says_that_no_server_can_start(
    settings: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = importlib.metadata.version

    def version(name: str) -> str:
        if name == "vllm":
            raise importlib.metadata.PackageNotFoundError(name)
        return real(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    assert main(["doctor", str(settings)]) == 1
    said = capsys.readouterr().out
    assert re.search(r"^bad +vLLM +not installed .*: no server can start .*simulate", said, re.M)
    assert "\nA start would be refused: " in said and "not be refused" not in said


def test_doctor_says_that_space_cannot_be_reserved(
    settings: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of ext2: a start warns of it too (test_slab.py)."""
    before = [check for check in examine(settings, None) if check.found.endswith(NO_RESERVE)]
    monkeypatch.setattr(doctor, "fallocate", lambda *_: False)
    (told,) = (check for check in examine(settings, None) if check.found.endswith(NO_RESERVE))
    assert not before and told.state == "warn"


def test_doctor_on_a_disk_without_space(settings: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> bool:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(doctor, "fallocate", refuse)
    said = [check for check in examine(settings, None) if "gets no space" in check.found]
    assert [check.state for check in said] == ["warn"]


def test_doctor_on_a_disk_where_no_file_can_be_made(tmp_path: Path) -> None:
    settings = tmp_path / "settings"
    settings.write_text("dram: 1MiB\nnvme: {path: /proc/attnstore, capacity: 1MiB}\n")
    checks = list(examine(settings, None))
    said = [check for check in checks if "no file can be made" in check.found]
    assert [check.state for check in said] == ["bad"]
    machine = [check for check in checks if check.name == "machine"]
    assert {check.state for check in machine} == {"bad"}
    assert any("does not say its size" in check.found for check in machine)


def test_doctor_with_wrong_settings_looks_at_what_needs_none(settings: Path) -> None:
    settings.write_text("dram: 64\n")
    states = {check.name: check.state for check in examine(settings, None)}
    assert (states["settings"], states["memory"], states["disk"]) == ("bad", "note", "note")


def test_doctor_warns_of_an_nvme_smaller_than_dram_and_of_memory_in_a_disks_place(
    settings: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = {"sizes", "disk kind"}
    assert "sizes" not in {check.name for check in examine(settings, None)}
    settings.write_text(settings.read_text().replace("dram: 1MiB", "dram: 2MiB"))
    monkeypatch.setattr(doctor, "_file_system", lambda _: "tmpfs")
    said = {check.name: check for check in examine(settings, None) if check.name in names}
    assert said.keys() == names and {check.state for check in said.values()} == {"warn"}
    assert "nvme.capacity is 1MiB" in said["sizes"].found and "tmpfs" in said["disk kind"].found
    settings.write_text(settings.read_text().replace("1MiB}", "1MiB, codec: lossless}"))
    assert "sizes" not in {check.name for check in examine(settings, None)}, "it may hold more"


def test_doctor_knows_that_packed_latents_are_not_encoded(settings: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(DEEPSEEK_V41 | {"dtype": "bfloat16"}))
    said = []
    for dram in ("64MiB", "{size: 64MiB, codec: lossless}"):
        settings.write_text(re.sub("(?m)^dram: .*$", f"dram: {dram}", settings.read_text()))
        said += [check.found for check in examine(settings, model) if check.name == "model"]
    assert said[0] == said[1] and said[0].startswith("256 tokens take 452KiB")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_doctor_where_the_directory_is_somebody_elses() -> None:
    """All the rest is told as well, and what a start would be refused for names the setting."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        store, settings = Path(name) / "store", Path(name) / "settings"
        store.mkdir(mode=0o700)
        (store / SLAB_NAME).touch()
        settings.write_text(f"dram: 1MiB\nnvme: {{path: {store}, capacity: 1MiB}}\n")
        list(examine(settings, None))  # all that it imports
        os.setresuid(65534, 65534, 0)
        try:
            said = list(examine(settings, None))
        finally:
            os.setresuid(0, 0, 0)
    refused = [check.found for check in said if check.state == "bad" and check.name == "machine"]
    assert len(refused) == 1 and f"nvme.path is '{store}', but" in refused[0]
    (content,) = (check for check in said if check.name == "content")
    assert content.state == "warn" and "cannot be read" in content.found


def test_a_name_that_is_a_list_is_an_answer_and_no_traceback(settings: Path) -> None:
    settings.write_text(f"{settings.read_text()}? [dram, nvme]\n: 2MiB\n")
    said = attnstore("check", settings)
    assert said.returncode != 0
    assert "Traceback" not in said.stderr and "unhashable key" in said.stderr


def test_a_key_that_is_given_twice_is_refused(settings: Path) -> None:
    settings.write_text(f"{settings.read_text()}dram: 2MiB\n")
    said = attnstore("check", settings)
    assert said.returncode != 0
    assert "dram is given twice" in said.stderr and "line 3" in said.stderr


def test_an_empty_file_is_answered_with_what_a_start_needs(settings: Path) -> None:
    settings.write_text("# dram: 1MiB\n")
    said = attnstore("check", settings)
    assert said.returncode != 0
    assert (
        "are empty" in said.stdout + said.stderr and "capacity: 2TiB" in said.stdout + said.stderr
    )


def test_a_machine_file_that_is_not_there_yet(settings: Path) -> None:
    with pytest.raises(ConfigError, match=r"machine.yaml once it has measured"):
        Machine.read(settings.parent / "machine.yaml")


def test_doctor_says_all_that_a_start_would_refuse(settings: Path) -> None:
    directory = settings.parent / "kv"
    directory.mkdir()
    settings.write_text(f"dram: 900TiB\nnvme: {{path: {directory}, capacity: 900TiB}}\n")
    with (directory / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        said = attnstore("doctor", settings, "--json")
    assert said.returncode == 1
    bad = [each["found"] for each in json.loads(said.stdout)["checks"] if each["state"] == "bad"]
    assert [text.partition(" is ")[0] for text in bad] == ["dram", "nvme.capacity", "nvme.path"]


@pytest.mark.skipif(find_library("cuda") is not None, reason="a driver is there")
def test_doctor_says_what_the_cuda_half_lacks(tmp_path: Path) -> None:
    """A GPU is there, as nvidia-smi says, and no driver answers."""
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\necho A GPU, 80 GiB, 580.1, 9.0\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    here = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    said = attnstore("doctor", "--json", env=here)
    (found,) = (c for c in json.loads(said.stdout)["checks"] if c["check"] == "CUDA copies")
    assert (said.returncode, found["state"]) == (1, "bad")
    assert "libcuda.so.1" in found["found"]


def two_paths(settings: Path, engines: str = "") -> list[Path]:
    paths = [settings.parent / "a", settings.parent / "b"]
    settings.write_text(
        f"dram: 2MiB\nnvme:\n  path: [{paths[0]}, {paths[1]}]\n  capacity: 2MiB\n{engines}"
    )
    return paths


def test_check_of_several_paths(settings: Path) -> None:
    paths = two_paths(settings)
    assert attnstore("check", settings).returncode == 0
    two_paths(settings, "data_parallel_size: 1\n")
    (problem,) = json.loads(attnstore("check", settings, "--json").stdout)
    assert problem["line"] == 5 and "RAID 0" in problem["problem"]
    settings.write_text(settings.read_text().replace(str(paths[1]), str(paths[0] / "b")))
    (problem,) = json.loads(attnstore("check", settings, "--json").stdout)
    assert problem["line"] == 3 and "inside it" in problem["problem"]


def test_doctor_looks_at_each_path(settings: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = two_paths(settings)
    first.mkdir()
    (second / "dp0").mkdir(parents=True)
    (second / "dp0" / "slab").touch()  # of another list: it stays until somebody deletes it
    monkeypatch.setattr(doctor, "disk_numa_node", {first: 1, second: None}.get)
    checks = list(examine(settings, None))
    assert [check.found for check in checks if check.state == "bad"] == []
    disks, speeds, content = (
        [check.found for check in checks if check.name == name]
        for name in ("disk", "disk speed", "content")
    )
    assert [text.partition(" is ")[0] for text in disks] == [str(first), str(second)]
    assert disks[0].endswith(" free, on NUMA node 1") and disks[1].endswith(" free")
    assert [text.partition(": ")[0] for text in speeds] == [str(first), str(second)]
    assert content[0].startswith(f"{first} holds no")
    assert content[1].startswith(f"{second}/dp0/slab ")
    assert any("names 2 directories: start 2 engines" in check.found for check in checks)


def test_doctor_counts_tokens_of_a_model(settings: Path, tmp_path: Path) -> None:
    shape = {
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "hidden_size": 64,
        "head_dim": 16,
        "torch_dtype": "bfloat16",
    }
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **shape}))
    said = attnstore("doctor", settings, "--model", tmp_path)
    assert "256 tokens take 64KiB: dram holds 4,096 tokens, nvme 4,096" in said.stdout
    gone = attnstore("doctor", settings, "--model", tmp_path / "gone")
    assert gone.returncode == 0 and "cannot be told" in gone.stdout


def test_version_and_no_colours(settings: Path) -> None:
    assert attnstore("--version").stdout.startswith("attnstore ")
    for environment in ({"NO_COLOR": "1"}, {"TERM": "xterm-256color"}):
        said = attnstore("check", settings, env=os.environ | environment)
        assert "\x1b" not in said.stdout


def test_a_reader_that_closes_early(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    command = [*COMMAND, "init", "--dir", str(tmp_path / "kv")]
    said = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writing)
    assert (said.returncode, said.stderr) == (141, "")


@pytest.mark.parametrize("words", [["--help"], ["plan", "--help"], ["--version"]])
def test_a_reader_that_closes_before_there_is_anything(words: list[str]) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONUNBUFFERED"}
    said = subprocess.run(
        [*COMMAND, *words], stdout=writing, stderr=subprocess.PIPE, env=environment, check=False
    )
    os.close(writing)
    assert (said.returncode, said.stderr) == (141, b"")


@pytest.mark.parametrize(
    "start", [COMMAND[1:], ["-c", "from attnstore_vllm.cli.main import main; exit(main())"]]
)
@pytest.mark.parametrize("is_ignored", [False, True])
def test_ctrl_c_while_modules_are_imported(
    tmp_path: Path, start: list[str], is_ignored: bool
) -> None:
    """One of them is slow here, so that it is certain when the interrupt comes."""
    (tmp_path / "tqdm.py").write_text(
        "import time\nprint('imports', flush=True)\n"
        f"time.sleep({0.2 if is_ignored else 60})\ntqdm = None\n"
    )
    shell = ["sh", "-c", "trap '' INT; exec \"$@\"", "sh"] if is_ignored else []
    running = subprocess.Popen(
        [*shell, sys.executable, *start, "--version"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": f"{tmp_path}:{ROOT}"},
    )
    assert running.stdout is not None
    assert running.stdout.readline() == "imports\n"
    running.send_signal(signal.SIGINT)
    shown, said = running.communicate(timeout=60)
    if is_ignored:  # as for a command that a script starts in the background
        assert (running.returncode, said) == (0, "") and shown.startswith("attnstore ")
    else:
        assert (running.returncode, shown, said) == (130, "", "attnstore: interrupted\n")


def test_ctrl_c_is_a_sentence(settings: Path) -> None:
    command = [*COMMAND, "doctor", str(settings)]
    running = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    until = time.monotonic() + 60
    while not list(settings.parent.glob(".attnstore-doctor-*")):
        assert running.poll() is None and time.monotonic() < until
        time.sleep(0.005)
    running.send_signal(signal.SIGINT)
    _, said = running.communicate(timeout=60)
    assert (running.returncode, said) == (130, "attnstore doctor: interrupted\n")
    assert not list(settings.parent.glob(".attnstore-doctor-*"))


@pytest.mark.parametrize("command", ["doctor", "bench"])
def test_ctrl_c_while_an_event_loop_is_made(tmp_path: Path, command: str) -> None:
    """A part of it is slow here, so that it is certain when the interrupt comes."""
    program = tmp_path / "program.py"
    program.write_text(
        "import socket, sys, time\n"
        "from attnstore_vllm.cli.main import main\n"
        "real = socket.socketpair\n"
        "def slow(*given, **named):\n"
        "    print('makes', flush=True)\n"
        "    time.sleep(0.5)\n"
        "    return real(*given, **named)\n"
        "socket.socketpair = slow\n"
        "sys.exit(main())\n"
    )
    if command == "doctor":
        nvme = f"{{path: {tmp_path}/kv, capacity: 1MiB, io: aiofiles}}"
        (tmp_path / "attnstore.yaml").write_text(f"dram: 1MiB\nnvme: {nvme}\n")
        words = ["doctor", str(tmp_path / "attnstore.yaml")]
    else:
        nowhere = "http://127.0.0.1:9"
        words = ["bench", "replay", "--model", "m", "--data", str(SAMPLE), "--base-url", nowhere]
    running = subprocess.Popen(
        [sys.executable, str(program), *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert running.stdout is not None
    assert running.stdout.readline() == "makes\n"
    running.send_signal(signal.SIGINT)
    _, said = running.communicate(timeout=60)
    assert (running.returncode, said) == (130, f"attnstore {command}: interrupted\n")
    assert not list(tmp_path.glob(".attnstore-doctor-*"))


def test_a_locale_without_the_letters(tmp_path: Path) -> None:
    file = tmp_path / "größe.yaml"
    file.write_text("dram: 1GiB\nnvme: {path: /x, capacity: 1GiB}\n")
    ascii_only = {**os.environ, "LC_ALL": "C", "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}
    said = attnstore("check", file, env=ascii_only)
    assert (said.returncode, said.stderr) == (0, "")


def test_a_picture_that_cannot_be_written_is_refused_before_the_run(tmp_path: Path) -> None:
    trace = tmp_path / "no-trace"
    said = attnstore("simulate", trace, "--plot", tmp_path / "a.xyz")
    assert said.returncode == 2 and "its end must be one of" in said.stderr
    said = attnstore("simulate", trace, "--plot", "/no/such/a.png")
    assert said.returncode == 2 and "is not a directory" in said.stderr
