# SPDX-License-Identifier: Apache-2.0
"""Peers by their owner: sockets and pools of another user are none of ours, whoever offers them."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from attnstore_vllm.tiers.peers.sibling import PeerPool, Sibling
from attnstore_vllm.tiers.peers.wire import SOCKET_NAME, WireError, connect, listen
from attnstore_vllm.transfer.pool import SLOTS_AT
from tests.helpers import nobody_in_a_namespace

STRANGER = 12345
pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")


def test_a_socket_of_another_user_is_no_siblings(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Also if a process of ours listens there: its name was given to a stranger."""
    listening = listen(tmp_path)
    made = connect(tmp_path)
    assert made is not None
    made.close()
    os.chown(tmp_path / SOCKET_NAME, STRANGER, -1)
    with pytest.raises(WireError, match=f"its socket is of user {STRANGER}"):
        connect(tmp_path)
    sibling = Sibling(tmp_path, b"hello", 4096)
    for _ in range(3):
        assert not sibling.connect()
    assert caplog.text.count("is no sibling: its socket is of user") == 1
    listening.close()


def test_a_socket_that_is_a_link_is_no_siblings(tmp_path: Path) -> None:
    theirs, ours = tmp_path / "theirs", tmp_path / "ours"
    theirs.mkdir()
    ours.mkdir()
    listening = listen(theirs)
    (ours / SOCKET_NAME).symlink_to(theirs / SOCKET_NAME)
    os.chown(ours / SOCKET_NAME, STRANGER, -1, follow_symlinks=False)
    with pytest.raises(WireError, match=f"user {STRANGER}"):
        connect(ours)
    listening.close()


def test_a_pool_of_another_user_is_not_mapped(tmp_path: Path) -> None:
    path = tmp_path / "pool"
    path.write_bytes(bytes(SLOTS_AT + 4 * 4096))
    opened = os.open(path, os.O_RDONLY)
    assert PeerPool((4, 4096, 1), [opened]).num_slots == 4
    os.chown(path, STRANGER, -1)
    with pytest.raises(WireError, match=f"a file of a pool is of user {STRANGER}"):
        PeerPool((4, 4096, 1), [opened])
    os.close(opened)


IMPORTS = """
from attnstore_vllm.tiers.peers.sibling import PeerPool
from attnstore_vllm.tiers.peers.wire import connect
"""
LOOKS = """
for directory in map(Path, sys.argv[1:]):
    pool = os.open(directory / "pool", os.O_RDONLY)
    for look in (lambda: connect(directory), lambda: PeerPool((4, 4096, 1), [pool])):
        try:
            print("none" if look() is None else "believed")
        except Exception as error:
            print(error)
"""


def test_nobody_in_a_user_namespace_has_no_strangers_for_siblings() -> None:
    """There all users have its number that the namespace does not know."""
    sockets = []
    with tempfile.TemporaryDirectory() as made:
        base = Path(made)
        base.chmod(0o755)
        for name, uid in (("ours", 3000), ("theirs", 3001)):
            (base / name).mkdir()
            (base / name / "pool").write_bytes(bytes(SLOTS_AT + 4 * 4096))
            for path in (base / name, base / name / "pool"):
                os.chown(path, uid, uid)
            os.seteuid(uid)
            sockets.append(listen(base / name))
            os.seteuid(0)
            (base / name / SOCKET_NAME).chmod(0o666)
        found = nobody_in_a_namespace(IMPORTS, LOOKS, 3000, base / "ours", base / "theirs")
    for listening in sockets:
        listening.close()
    assert found[:2] == ["believed", "believed"]
    assert [line.partition(" is of ")[0] for line in found[2:]] == [
        "its socket",
        "a file of a pool",
    ], found
