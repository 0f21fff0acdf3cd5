# SPDX-License-Identifier: Apache-2.0
"""`attnstore gc --shared`: one tenant's records go, and nobody else's."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from attnstore_lab.testing.network_stores import NetworkStore
from attnstore_vllm.cli.main import EXIT_BAD, EXIT_ERROR, EXIT_OK, main
from attnstore_vllm.tiers.shared import deletion
from attnstore_vllm.tiers.shared.record import HEADER_BYTES
from attnstore_vllm.tiers.shared.redis_backend import RedisBackend
from tests.helpers import PAYLOAD_BYTES, Rig, conversation
from tests.shared.rigs import NUM_TOKENS, fetch, write
from tests.shared.stranger import Stranger

WHOLE = NUM_TOKENS // 16
SALTS = (None, "alice", "bob")
OpenShared = Callable[..., Rig]
Gc = Callable[..., tuple[int, str]]


def settings_file(path: Path, server: NetworkStore, **changed: str) -> Path:
    """Settings with which a server would use this store."""
    if server.kind == "redis":
        shared: dict[str, Any] = {"redis": server.settings["redis"]["url"]}
    else:
        shared = {"mooncake": server.settings["mooncake"]}
    nvme = {"path": str(path / "kv"), "capacity": "1GiB"}
    file = path / "attnstore.yaml"
    file.write_text(json.dumps({"dram": "1GiB", "nvme": nvme, "shared": shared | changed}))
    return file


@pytest.fixture
def gc(own_server: NetworkStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Gc:
    """Runs the command on `own_server`, which has nothing of other tests."""
    file = settings_file(tmp_path, own_server)

    def run(*options: str) -> tuple[int, str]:
        code = main(["gc", "--shared", str(file), *options])
        said = capsys.readouterr()
        return code, said.out + said.err

    return run


def test_one_tenants_records_go_and_no_others(
    own_server: NetworkStore, open_shared: OpenShared, gc: Gc, tmp_path: Path
) -> None:
    one, two = open_shared(own_server, dram_slots=16), open_shared(own_server, dram_slots=16)
    tokens = conversation(1, NUM_TOKENS)
    names = {salt: write(one, tokens, salt) for salt in SALTS}
    stranger = Stranger(own_server)
    _, said = gc("--tenant", "alice")
    assert "nothing was changed" in said
    assert all(stranger.has(names[salt]) == [1] * WHOLE for salt in SALTS)

    code, said = gc("--tenant", "alice", "--yes", "--json")
    report = json.loads(said)
    assert (code, report["deleted"], report["records"]) == (EXIT_OK, True, WHOLE)
    assert stranger.has(names["alice"]) == [0] * WHOLE
    assert [fetch(two, tokens, salt) for salt in SALTS] == [WHOLE, 0, WHOLE]
    salt = tmp_path / "salt"
    salt.write_text("bob\n")
    salt.chmod(0o400)
    code, said = gc("--tenant-file", str(salt), "--yes", "--json")
    assert (code, json.loads(said)["records"]) == (EXIT_OK, WHOLE)
    assert stranger.has(names["bob"]) == [0] * WHOLE
    code, said = gc("--tenant", "alcie", "--yes")
    assert (code, "nothing of this cache_salt" in said) == (EXIT_OK, True)
    stranger.close()


def test_it_says_how_much_would_go(
    redis: Callable[..., NetworkStore],
    open_shared: OpenShared,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    server = redis()
    write(open_shared(server), conversation(1, NUM_TOKENS), "alice")
    file = settings_file(tmp_path, server)
    assert main(["gc", "--shared", str(file), "--tenant", "alice", "--json"]) == EXIT_OK
    found = json.loads(capsys.readouterr().out)
    size = WHOLE * (HEADER_BYTES + PAYLOAD_BYTES)
    assert (found["deleted"], found["records"], found["bytes"]) == (False, WHOLE, size)


def test_what_is_written_meanwhile_is_told(
    redis: Callable[..., NetworkStore],
    open_shared: OpenShared,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    server = redis()
    rig = open_shared(server)
    write(rig, conversation(1, NUM_TOKENS), "alice")
    remove = RedisBackend.remove

    def remove_late(backend: RedisBackend, prefix: str) -> int:
        removed = remove(backend, prefix)
        write(rig, conversation(2, NUM_TOKENS), "alice")
        return removed

    monkeypatch.setattr(RedisBackend, "remove", remove_late)
    file = settings_file(tmp_path, server)
    assert main(["gc", "--shared", str(file), "--tenant", "alice", "--yes"]) == EXIT_BAD
    assert f"{WHOLE} have been written since" in capsys.readouterr().out


def test_many_names_and_those_of_others(redis: Callable[..., NetworkStore]) -> None:
    """More than one look of SCAN, and a prefix that is a pattern elsewhere."""
    server = redis()
    backend = RedisBackend(server.settings["redis"])
    for number in range(2500):
        backend.write(f"a[1]*/{number:05}", b"four", overwrite=True)
    for name in ("a1/1", "a[1]x/1", "b[1]*/1", "a1*/1"):
        backend.write(name, b"other", overwrite=True)
    assert backend.count("a[1]*/") == (2500, 10_000)
    assert backend.remove("a[1]*/01") == 1000
    assert backend.remove("a[1]*/") == 1500
    assert backend.count("") == (4, 20)
    backend.close()


def test_what_others_put_there_does_not_stop_it(redis: Callable[..., NetworkStore]) -> None:
    """A set of Redis's own, a name that is too long, one that is no text."""
    server = redis()
    backend = RedisBackend(server.settings["redis"])
    backend.write("as1/aa1", b"four", overwrite=True)
    for command in (
        [b"SADD", b"as1/aaset", b"member"],
        [b"SET", b"as1/aa" + 70_000 * b"x", b"value"],
        [b"SET", b"as1/aa\xff\xfe", b"value"],
    ):
        with socket.create_connection(("127.0.0.1", server.port)) as made:
            parts = [b"*%d\r\n" % len(command)]
            parts += [b"$%d\r\n%s\r\n" % (len(word), word) for word in command]
            made.sendall(b"".join(parts))
            assert made.recv(100)[:1] in (b":", b"+")
    assert backend.count("as1/aa") == (3, 9)
    assert backend.remove("as1/aa") == 3
    assert backend.count("as1/aa") == (0, 0)
    backend.close()


def test_a_server_that_may_not_delete_is_told_so(
    redis: Callable[..., NetworkStore], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server = redis(
        "--user", "kv", "on", ">secret", "~as1/*", "resetchannels", "+get", "+set", "+exists",
        "--user", "admin", "on", ">secret", "~as1/*", "resetchannels",
        "+scan", "+strlen", "+unlink",
        url="redis://kv:secret@127.0.0.1",
    )  # fmt: skip
    file = settings_file(tmp_path, server)
    assert main(["gc", "--shared", str(file), "--tenant", "alice", "--yes"]) == EXIT_ERROR
    said = capsys.readouterr().err
    assert "NOPERM" in said
    assert "secret" not in said
    admin = server.settings["redis"]["url"].replace("kv:", "admin:")
    file = settings_file(tmp_path, server, redis=admin)
    assert main(["gc", "--shared", str(file), "--tenant", "alice", "--yes"]) == EXIT_OK


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--shared", "FILE", "--older-than", "1d"], "--tenant"),
        (["--shared", "FILE", "--tenant", "alice", "--older-than", "1d"], "--tenant"),
        (["/tmp", "--shared", "FILE", "--tenant", "alice"], "no DIR"),
        (["--tenant", "alice"], "found neither"),
        (["--shared", "FILE", "--tenant", "alice"], "no setting `shared`"),
    ],
)
def test_what_cannot_be_meant_is_refused(
    arguments: list[str], text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "attnstore.yaml"
    file.write_text(json.dumps({"dram": "1GiB", "nvme": {"path": "/x/kv", "capacity": "1GiB"}}))
    words = [str(file) if word == "FILE" else word for word in arguments]
    assert main(["gc", *words, "--yes"]) == EXIT_ERROR
    assert text in capsys.readouterr().err


def test_a_store_that_is_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deletion, "COMMAND_S", 1.0)
    nvme = {"path": "/x/kv", "capacity": "1GiB"}
    file = tmp_path / "attnstore.yaml"
    shared = {"redis": "redis://127.0.0.1:1"}
    file.write_text(json.dumps({"dram": "1GiB", "nvme": nvme, "shared": shared}))
    assert main(["gc", "--shared", str(file), "--tenant", "alice", "--yes"]) == EXIT_ERROR
