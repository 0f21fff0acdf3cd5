# SPDX-License-Identifier: Apache-2.0
"""Redis over TLS with a password: who may is served, who may not goes on without the tier."""

from __future__ import annotations

import json
import logging
import os
import pty
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from attnstore_lab.testing.network_stores import NetworkStore, no_tls
from attnstore_vllm.config.settings import StoreConfig
from attnstore_vllm.config.shared import SharedConfig
from attnstore_vllm.errors import DeviceError
from attnstore_vllm.policy.breaker import PAUSE_MIN_S
from attnstore_vllm.tiers.shared.redis_backend import RedisBackend
from attnstore_vllm.tiers.shared.start import try_store
from tests.helpers import Rig, conversation
from tests.shared import rigs
from tests.shared.rigs import NUM_TOKENS, fetch, io_of, write

PASSWORD = "right-secret"
USER = ("--user", "default", "off", "--user", "kv", "on", f">{PASSWORD}", "~as1/*",
        "resetchannels", "+get", "+set", "+exists")  # fmt: skip
WHOLE = NUM_TOKENS // 16
why_not = cache(no_tls)


class Certificate(NamedTuple):
    """One that signs itself, so that it is its own CA."""

    crt: Path
    key: Path


def certificate(directory: Path, name: str, *key_options: str) -> Certificate:
    made = Certificate(directory / f"{name}.crt", directory / f"{name}.key")
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256",
               *(key_options or ("-nodes",)), "-days", "2", "-subj", f"/CN={name}",
               "-addext", "subjectAltName=IP:127.0.0.1",
               "-keyout", str(made.key), "-out", str(made.crt)]  # fmt: skip
    subprocess.run(command, check=True, capture_output=True)
    return made


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Certificate:
    if (reason := why_not()) is not None:
        pytest.skip(reason)
    return certificate(tmp_path_factory.mktemp("tls"), "server")


def of_server(own: Certificate, *more: str) -> tuple[str, ...]:
    given = ("--tls-cert-file", str(own.crt), "--tls-key-file", str(own.key))
    return (*given, *(more or ("--tls-auth-clients", "no")))


@pytest.fixture
def secured(own: Certificate, redis: Callable[..., NetworkStore]) -> NetworkStore:
    return redis(*USER, tls=of_server(own))


@pytest.fixture
def given(tmp_path: Path, own: Certificate) -> Callable[..., SharedConfig]:
    """As a user writes it in the YAML; other values by name."""

    def parse(server: NetworkStore, password: str = PASSWORD, **other: Any) -> SharedConfig:
        (tmp_path / "password").write_text(f"{password}\n")
        (tmp_path / "password").chmod(0o600)
        where = other.pop("where", "rediss://kv@127.0.0.1:{port}/0").format(port=server.port)
        shared = {"redis": where, "password_file": str(tmp_path / "password"), "deadline": "3s"}
        shared |= {"ca": str(own.crt)} if where.startswith("rediss:") else {}
        shared |= {key: str(value) for key, value in other.items()}
        nvme = {"path": str(tmp_path / "nvme"), "capacity": "1GiB"}
        config = StoreConfig.parse({"dram": "1GiB", "nvme": nvme, "shared": shared})
        assert config.shared is not None
        return config.shared

    return parse


@pytest.fixture
def open_with(namespace: bytes) -> Iterator[Callable[..., Rig]]:
    made: list[Rig] = []

    def open_it(shared: SharedConfig, **options: Any) -> Rig:
        made.append(rigs.shared_rig(shared.for_client(), namespace, **options))
        return made[-1]

    yield open_it
    for rig in made:
        rig.close()
        rig.store.check_integrity()


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


def test_the_right_certificate_and_password_are_served(
    secured: NetworkStore,
    given: Callable[..., SharedConfig],
    open_with: Callable[..., Rig],
    caplog: pytest.LogCaptureFixture,
) -> None:
    shared = given(secured)
    assert try_store(shared) < 3
    one, two = open_with(shared), open_with(shared)
    write(one, conversation(1, NUM_TOKENS))
    assert fetch(two, conversation(1, NUM_TOKENS)) == WHOLE
    assert not lines(caplog)


def test_a_connection_with_tls_is_kept(
    secured: NetworkStore, given: Callable[..., SharedConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = RedisBackend(given(secured).for_client()["redis"])
    monkeypatch.setattr(socket, "create_connection", None)
    for _ in range(3):
        time.sleep(0.05)  # whatever the server sends by itself has come
        assert backend.exist(["as1/a"]) == [False]
    backend.close()


def test_after_a_restart_of_the_server_nothing_fails_on_an_old_connection(
    secured: NetworkStore, given: Callable[..., SharedConfig], open_with: Callable[..., Rig]
) -> None:
    one, two = open_with(given(secured)), open_with(given(secured))
    write(one, conversation(1, NUM_TOKENS))
    assert fetch(two, conversation(1, NUM_TOKENS)) == WHOLE
    secured.kill()
    secured.start()
    write(one, conversation(2, NUM_TOKENS))
    assert fetch(two, conversation(2, NUM_TOKENS)) == WHOLE
    failed = {name for rig in (one, two) for name in rigs.counts(rig) if name.startswith("shared_")}
    assert not failed


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ("ca", "certificate verify failed"),
        ("password", "WRONGPASS"),
        ("name", "certificate is not valid for"),
        ("plain", "Redis"),
        ("no file", "shared.ca, cert or key cannot be used .*No such file"),
        ("key with a password", "the key one without a password"),
    ],
)
def test_who_may_not_goes_on_without_the_tier_and_one_line_says_why(
    secured: NetworkStore,
    given: Callable[..., SharedConfig],
    open_with: Callable[..., Rig],
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
    wrong: str,
    reason: str,
) -> None:
    shared = {
        "ca": lambda: given(secured, ca=certificate(tmp_path, "stranger").crt),
        "password": lambda: given(secured, "wrong-secret"),
        "name": lambda: given(secured, where="rediss://kv@localhost:{port}"),
        "plain": lambda: given(secured, where="redis://kv@127.0.0.1:{port}"),
        "no file": lambda: given(secured, ca=tmp_path / "none.crt"),
        "key with a password": lambda: given(secured, **locked(tmp_path)),
    }[wrong]()
    with pytest.raises(DeviceError, match=reason):
        try_store(shared)
    rig = open_with(shared, joins=False)
    rig.until(lambda: bool(lines(caplog)))
    for number in range(3):
        assert fetch(rig, conversation(number, NUM_TOKENS)) == 0, "the engine computes"
    io = io_of(rig)
    assert io.gauges_now()["shared_in_use", "reads"] == 0
    time.sleep(PAUSE_MIN_S + 0.2)  # it has been tried again
    (line,) = lines(caplog)
    assert re.search(reason, line) and "is out of use" in line
    assert not (io.health.reads.in_use or io.health.writes.in_use)
    assert "secret" not in caplog.text
    assert rig.store.residency.num_held() == 0


def locked(directory: Path) -> dict[str, Path]:
    """A client's certificate whose key has a password, which nobody is there to type."""
    made = certificate(directory, "locked", "-passout", "pass:abcd")
    return {"cert": made.crt, "key": made.key}


def test_a_server_that_asks_for_certificates_serves_who_has_one(
    own: Certificate,
    redis: Callable[..., NetworkStore],
    given: Callable[..., SharedConfig],
    open_with: Callable[..., Rig],
    tmp_path: Path,
) -> None:
    client = certificate(tmp_path, "client")
    server = redis(*USER, tls=of_server(own, "--tls-ca-cert-file", str(client.crt)))
    with pytest.raises(DeviceError, match="Redis"):
        try_store(given(server))
    shared = given(server, cert=client.crt, key=client.key)
    one, two = open_with(shared), open_with(shared)
    write(one, conversation(1, NUM_TOKENS))
    assert fetch(two, conversation(1, NUM_TOKENS)) == WHOLE


ASKS = "import json, sys; from attnstore_vllm.tiers.shared.redis_backend import RedisBackend; \
RedisBackend(json.loads(sys.argv[1])).exist(['a'])"


def test_no_terminal_is_asked_for_the_password_of_a_key(own: Certificate, tmp_path: Path) -> None:
    paths = {name: str(path) for name, path in locked(tmp_path).items()}
    with socket.create_server(("127.0.0.1", 0)) as taken:  # it takes connections, and is silent
        url = f"rediss://127.0.0.1:{taken.getsockname()[1]}"
        settings = {"url": url, "timeout_s": 1.0, "ca": str(own.crt), **paths}
        ours, theirs = pty.openpty()
        try:
            done = subprocess.run(
                ["setsid", "--ctty", sys.executable, "-c", ASKS, json.dumps(settings)],
                stdin=theirs, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, timeout=20,
                check=False, text=True,
            )  # fmt: skip
        finally:
            os.close(ours)
            os.close(theirs)
    assert "the key one without a password" in done.stderr
