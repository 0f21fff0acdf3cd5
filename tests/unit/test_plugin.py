# SPDX-License-Identifier: Apache-2.0
"""expand(): the command line that the user writes, and the one that vLLM reads."""

from __future__ import annotations

import json
import multiprocessing
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from attnstore_vllm import plugin
from attnstore_vllm.errors import AttnStoreError, ConfigError
from attnstore_vllm.plugin import CONNECTOR, advice, check_early, expand

FLAG = "--kv-transfer-config"


def text(path: Path, extra: str = "") -> str:
    return f"dram: 1MiB\nnvme: {{path: {path / 'kv'}, capacity: 1MiB}}\n{extra}"


def settings(path: Path) -> dict[str, Any]:
    return {"dram": "1MiB", "nvme": {"path": str(path / "kv"), "capacity": "1MiB"}}


def yaml_file(path: Path, content: str) -> str:
    file = path / "attnstore.yaml"
    file.write_text(content)
    return str(file)


def complete(extra: dict[str, Any]) -> dict[str, Any]:
    return {
        "kv_connector": CONNECTOR,
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": extra,
    }


@pytest.mark.parametrize("suffix", [".yaml", ".yml"])
def test_a_path_becomes_a_whole_configuration(tmp_path: Path, suffix: str) -> None:
    file = tmp_path / f"attnstore{suffix}"
    file.write_text(text(tmp_path))
    argv = ["vllm", "serve", "MODEL", FLAG, str(file), "--port", "80"]
    before = list(argv)
    expanded = expand(argv)
    assert argv == before
    assert expanded[:4] == argv[:4]
    assert expanded[5:] == argv[5:]
    assert json.loads(expanded[4]) == complete(settings(tmp_path))


@pytest.mark.parametrize("flag", [FLAG, "--kv_transfer_config"])
def test_the_form_with_an_equals_sign(tmp_path: Path, flag: str) -> None:
    (word,) = expand([f"{flag}={yaml_file(tmp_path, text(tmp_path))}"])
    name, _, value = word.partition("=")
    assert name == flag
    assert json.loads(value) == complete(settings(tmp_path))


def test_the_form_with_underscores(tmp_path: Path) -> None:
    file = yaml_file(tmp_path, text(tmp_path))
    _, value = expand(["--kv_transfer_config", file])
    assert json.loads(value) == complete(settings(tmp_path))


def test_a_yaml_that_is_a_whole_configuration(tmp_path: Path) -> None:
    whole = {
        "kv_connector": CONNECTOR,
        "kv_role": "kv_consumer",
        "engine_id": "seven",
        "kv_connector_extra_config": settings(tmp_path),
    }
    _, value = expand([FLAG, yaml_file(tmp_path, json.dumps(whole))])
    expected = complete(settings(tmp_path)) | {"kv_role": "kv_consumer", "engine_id": "seven"}
    assert json.loads(value) == expected


def test_json_is_completed(tmp_path: Path) -> None:
    given = {"kv_connector": CONNECTOR, "kv_connector_extra_config": settings(tmp_path)}
    _, value = expand([FLAG, json.dumps(given)])
    assert json.loads(value) == complete(settings(tmp_path))


def test_a_users_own_failure_policy_is_kept(tmp_path: Path) -> None:
    given = complete(settings(tmp_path)) | {"kv_load_failure_policy": "fail"}
    _, value = expand([FLAG, json.dumps(given)])
    assert json.loads(value) == given  # refused later, where vLLM is known


def test_inside_multi_connector(tmp_path: Path) -> None:
    ours = {"kv_connector": CONNECTOR, "kv_connector_extra_config": settings(tmp_path)}
    other = {"kv_connector": "NixlConnector", "kv_role": "kv_both"}
    given = {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"connectors": [other, ours]},
    }
    _, value = expand([FLAG, json.dumps(given)])
    found = json.loads(value)
    assert found["kv_load_failure_policy"] == "recompute"
    first, second = found["kv_connector_extra_config"]["connectors"]
    assert first == other
    assert second == ours | {"kv_role": "kv_both"}


@pytest.mark.parametrize(
    "value",
    [
        '{"kv_connector": "NixlConnector", "kv_role": "kv_both"}',
        '{"kv_connector": "MultiConnector"}',
        '{"kv_connector": "MultiConnector", "kv_connector_extra_config": {"connectors": [3]}}',
        '{"kv_connector": "MultiConnector", "kv_connector_extra_config": {"connectors": 3}}',
        "[1, 2]",
        "{not json",
        "null",
    ],
)
def test_what_is_not_ours_is_left_alone(value: str) -> None:
    for argv in ([FLAG, value], [f"{FLAG}={value}"]):
        assert expand(argv) == argv


@pytest.mark.parametrize(
    "argv", [[], ["vllm", "serve"], [FLAG], ["--kv-transfer-config.kv_connector", "x.yaml"]]
)
def test_a_command_line_without_a_configuration(argv: list[str]) -> None:
    assert expand(argv) == argv


def test_another_connectors_yaml_is_left_to_vllm(tmp_path: Path) -> None:
    argv = [FLAG, yaml_file(tmp_path, "kv_connector: NixlConnector\n")]
    assert expand(argv) == argv


def refused(argv: list[str]) -> str:
    with pytest.raises(ConfigError) as caught:
        expand(argv)
    return str(caught.value)


@pytest.mark.parametrize("content", ["dram: [1", "dram: 1MiB\n\tnvme: 3", "\0"])
def test_malformed_yaml(tmp_path: Path, content: str) -> None:
    file = yaml_file(tmp_path, content)
    message = refused([FLAG, file])
    assert f"{FLAG} is {file!r}" in message
    assert "no YAML" in message


def test_a_file_that_is_not_there_or_not_text(tmp_path: Path) -> None:
    absent = str(tmp_path / "absent.yaml")
    assert f"{absent!r}, which cannot be read" in refused([FLAG, absent])
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\xff")
    assert "cannot be read" in refused([FLAG, str(tmp_path / "binary.yaml")])


def advised(argv: list[str]) -> tuple[str, str]:
    """The message of a start that is refused, and the line behind it."""
    with pytest.raises(AttnStoreError) as caught:
        expand(argv)
    return str(caught.value), advice(caught.value, argv)


def test_the_command_that_says_more_is_the_one_that_looks_there(tmp_path: Path) -> None:
    (tmp_path / "a file").touch()
    wrong, fits = text(tmp_path, "ttl: soon\n"), text(tmp_path)
    too_large = fits.replace("1MiB", "100TiB", 1)
    impossible = (text(tmp_path / "absent"), text(tmp_path / "a file"), too_large)
    for content, command in ((wrong, "check"), *((one, "doctor") for one in impossible)):
        file = yaml_file(tmp_path, content)
        for argv in ([FLAG, file], [f"{FLAG}={file}"]):
            assert f"`attnstore {command} {file}` says all that " in advised(argv)[1]
    whole = complete(settings(tmp_path) | {"dram": "much"})
    assert "`attnstore check FILE`" in advised([FLAG, json.dumps(whole)])[1]


def test_a_file_that_is_not_there_is_made_by_init(tmp_path: Path) -> None:
    said, more = advised([FLAG, f"{tmp_path}/my settings.yaml"])
    assert said.endswith(f"; `attnstore init > '{tmp_path}/my settings.yaml'` makes one")
    assert more == "", "check would say no more"


@pytest.mark.parametrize("content", ["", "- 1\n- 2\n", "just text\n"])
def test_a_yaml_without_settings_shows_what_they_look_like(tmp_path: Path, content: str) -> None:
    assert "dram: 64GiB" in refused([FLAG, yaml_file(tmp_path, content)])


def test_errors_name_the_key_the_value_and_the_remedy(tmp_path: Path) -> None:
    message = refused([FLAG, yaml_file(tmp_path, text(tmp_path, "chunk_token: 64\n"))])
    assert "chunk_token is not a setting" in message
    assert "did you mean chunk_tokens?" in message
    message = refused([FLAG, yaml_file(tmp_path, text(tmp_path).replace("1MiB", "a lot", 1))])
    assert "dram is 'a lot'" in message
    assert "as in 64GiB" in message
    message = refused([FLAG, yaml_file(tmp_path, text(tmp_path / "absent"))])
    assert "nvme.path is" in message
    assert "create it" in message
    given = {"kv_connector": CONNECTOR}
    assert "dram is missing" in refused([FLAG, json.dumps(given)])


@pytest.mark.parametrize(
    "words",
    [
        ["--data-parallel-size", "2"],
        ["--data-parallel-size=2"],
        ["--data_parallel_size", "2"],
        ["-dp", "2"],
        ["-dp=2"],
    ],
)
def test_the_number_of_engines_is_filled_in(tmp_path: Path, words: list[str]) -> None:
    for argv in ([FLAG, yaml_file(tmp_path, text(tmp_path)), *words],):
        extra = json.loads(expand(argv)[1])["kv_connector_extra_config"]
        assert extra["data_parallel_size"] == 2
    argv = [*words, FLAG, yaml_file(tmp_path, text(tmp_path))]
    extra = json.loads(expand(argv)[-1])["kv_connector_extra_config"]
    assert extra["data_parallel_size"] == 2


def test_a_single_engine_is_told_nothing(tmp_path: Path) -> None:
    argv = [FLAG, yaml_file(tmp_path, text(tmp_path)), "-dp", "1"]
    extra = json.loads(expand(argv)[1])["kv_connector_extra_config"]
    assert "data_parallel_size" not in extra


# ---- the machine, before the model loads ------------------------------------------------------


def test_a_pool_larger_than_shared_memory(tmp_path: Path) -> None:
    whole = complete(settings(tmp_path) | {"dram": "100TiB"})
    file = yaml_file(tmp_path, text(tmp_path).replace("1MiB", "100TiB", 1))
    for value in (file, json.dumps(whole), yaml_file(tmp_path, json.dumps(whole))):
        message = refused([FLAG, value])
        assert "dram is 100TiB, but shared memory (/dev/shm) has" in message
        assert "mount -o remount,size=1024" in message


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], [0, 1, 2, 3]),
        (["--data-parallel-rank", "2"], [2]),
        (["-dpn=0"], [0]),
        (["--data-parallel-size-local", "2"], [0, 1]),
        (["-dpl", "2", "-dpr", "2"], [2, 3]),
        (["-dpl", "0"], []),
        (["-dpl", "3", "--data_parallel_start_rank=3"], [3]),
        (["-dpn", "9"], []),  # vLLM refuses it
        (["--nnodes", "2"], [0, 1]),  # vLLM counts by the node
        (["-n", "2", "--node-rank", "1"], [2, 3]),
        (["--nnodes=4", "-r", "3"], [3]),
        (["--nnodes", "2", "-dpl", "1", "-dpr", "3"], [3]),
    ],
)
def test_only_the_engines_that_start_here_ask_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], expected: list[int]
) -> None:
    asked: list[tuple[list[int], bool]] = []
    monkeypatch.setattr(
        plugin,
        "check_machine",
        lambda config, ranks, pins_memory: asked.append((list(ranks), pins_memory)),
    )
    argv = [FLAG, yaml_file(tmp_path, text(tmp_path)), "-dp", "4", *words]
    expand(argv, pins_memory=True)
    assert asked == [(expected, True)]


@pytest.mark.parametrize("words", [["--nnodes", "2"], ["-n=3", "-dp", "2"]])
def test_an_engine_on_several_machines_has_no_codec(tmp_path: Path, words: list[str]) -> None:
    expand([FLAG, yaml_file(tmp_path, text(tmp_path)), *words])
    coded = text(tmp_path).replace("nvme: {", "nvme: {codec: lossless, ")
    assert "codec" in coded
    message, _ = advised([FLAG, yaml_file(tmp_path, coded), *words])
    assert "--nnodes spreads one engine over several machines" in message
    assert "where nvme.codec cannot be used" in message


def test_an_engine_on_several_machines_has_no_audit_that_is_asked_for(tmp_path: Path) -> None:
    """What is on by default refuses no start: see the test above."""
    for off in ("off", "0"):
        expand([FLAG, yaml_file(tmp_path, text(tmp_path, f"audit: {off}\n")), "--nnodes", "2"])
    asked = yaml_file(tmp_path, text(tmp_path, "audit: 1/10000\n"))
    message, _ = advised([FLAG, asked, "--nnodes", "2"])
    assert "where audit cannot be used" in message


def test_an_engine_on_each_machine_starts(tmp_path: Path) -> None:
    expand([FLAG, yaml_file(tmp_path, text(tmp_path)), "--nnodes", "2", "-dp", "2"])


@pytest.mark.parametrize("flag", ["-dcp", "--decode-context-parallel-size", "-pcp"])
def test_context_parallelism_starts(tmp_path: Path, flag: str) -> None:
    expand([FLAG, yaml_file(tmp_path, text(tmp_path)), "-tp", "2", flag, "2"])


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugin, "_checked", set())
    monkeypatch.setattr(plugin, "_is_cuda", lambda: False)


@pytest.mark.usefixtures("fresh")
def test_settings_without_a_command_line_are_checked_when_vllm_asks(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--shm-size"):
        check_early(settings(tmp_path) | {"dram": "100TiB"})
    with pytest.raises(ConfigError, match="did you mean dram"):
        check_early({"dran": "1MiB"})
    with pytest.raises(ConfigError, match=r"dram is 64: 64 bytes.*did you mean 64GiB\?"):
        check_early(settings(tmp_path) | {"dram": 64})
    check_early(settings(tmp_path))


@pytest.mark.usefixtures("fresh")
def test_what_was_found_to_fit_is_not_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pool is allocated then, and the directory is locked."""
    _, value = expand([FLAG, yaml_file(tmp_path, text(tmp_path)), "-dp", "4"])[:2]

    def refuse(config: object, ranks: object, pins_memory: bool) -> None:
        raise ConfigError("asked again")

    monkeypatch.setattr(plugin, "check_machine", refuse)
    check_early(json.loads(value)["kv_connector_extra_config"])
    with pytest.raises(ConfigError, match="asked again"):
        check_early(settings(tmp_path))


@pytest.mark.usefixtures("fresh")
def test_only_the_process_that_the_user_started_asks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(multiprocessing, "parent_process", object)
    check_early(settings(tmp_path) | {"dram": "100TiB"})


def test_the_tiles_of_amx_are_asked_for() -> None:
    """vLLM's attention on the CPU uses them without asking."""
    found = subprocess.run(
        [sys.executable, "-c", _TILES], capture_output=True, text=True, check=True
    ).stdout.split()[-2:]
    if found[0] == "False":
        pytest.skip("no AMX")
    assert found[1] == "True"


_TILES = """
import ctypes, torch
from attnstore_vllm.plugin import register
register()
allowed = ctypes.c_ulong()
GET_XCOMP_PERM, TILE_DATA = 0x1022, 18
ctypes.CDLL(None).syscall(158, GET_XCOMP_PERM, ctypes.byref(allowed))  # arch_prctl
print(torch.cpu._is_amx_tile_supported(), bool(allowed.value >> TILE_DATA & 1))
"""
