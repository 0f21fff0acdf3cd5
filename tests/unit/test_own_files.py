# SPDX-License-Identifier: Apache-2.0
"""Files of ours are opened by one module, which looks at what it opened before it is believed.

It is long since each kind of stranger's file, and each call that opens one, is listed here.
"""

from __future__ import annotations

import ast
import os
import socket
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from attnstore_vllm.own_files import (
    NotOursError,
    check_directory,
    check_parent,
    make_directory,
    open_own,
    open_regular,
    read_given,
    read_own,
    replace_own,
)
from tests.helpers import STRANGER, give_away, nobody_in_a_namespace

ROOT = Path(__file__).parents[2]
PACKAGE, LAB = ROOT / "attnstore_vllm", ROOT / "attnstore_lab"
SOURCES = sorted(path for folder in (PACKAGE, LAB) for path in folder.rglob("*.py"))


shared_group = pytest.mark.skipif(
    os.geteuid() == os.getegid() != 0, reason="this user's group is private"
)


def why_not(path: Path, flags: int = os.O_RDWR) -> str:
    with pytest.raises(NotOursError) as caught:
        os.close(open_own(path, flags))
    assert str(path) in str(caught.value)
    assert caught.value.filename == str(path)
    return caught.value.why


@pytest.fixture
def file(tmp_path: Path) -> Path:
    made = tmp_path / "file"
    made.write_bytes(b"content")
    return made


@pytest.mark.parametrize("flags", [os.O_RDONLY, os.O_RDWR, os.O_RDWR | os.O_CREAT])
def test_a_file_of_ours_is_opened_and_blocks(file: Path, flags: int) -> None:
    fd = open_own(file, flags)
    assert os.read(fd, 99) == b"content"
    assert os.get_blocking(fd), "io_uring answers EAGAIN on a file that does not block"
    assert not os.get_inheritable(fd)
    os.close(fd)


def test_what_is_made_is_for_its_user_alone(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        os.close(open_own(tmp_path / "new", os.O_RDWR | os.O_CREAT))
        make_directory(tmp_path / "folder")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / "folder").stat().st_mode) == 0o700


@pytest.mark.parametrize("flags", [os.O_RDONLY, os.O_WRONLY, os.O_RDWR, os.O_RDWR | os.O_CREAT])
def test_what_is_no_regular_file(tmp_path: Path, file: Path, flags: int) -> None:
    """A pipe that no writer opens must not be waited for."""
    link, dangling, pipe, plug = (tmp_path / name for name in ("link", "lost", "pipe", "socket"))
    link.symlink_to(file)
    dangling.symlink_to(tmp_path / "victim")
    os.mkfifo(pipe)
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(plug))
        for path in (link, dangling):
            assert "is a link" in why_not(path, flags)
        for path in (pipe, plug):
            assert "regular file" in why_not(path, flags)
    assert not (tmp_path / "victim").exists()
    with pytest.raises((NotOursError, IsADirectoryError)):
        open_own(tmp_path, flags)


def test_another_users_file(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also for root, who may open all."""
    theirs = give_away(file, monkeypatch)
    assert f"belongs to user {theirs}; expected this user, {os.geteuid()}" in why_not(file)
    os.close(open_regular(file, os.O_RDONLY))
    assert read_given(file) == b"content"


@pytest.mark.parametrize("mode", [0o602, pytest.param(0o620, marks=shared_group), 0o666])
def test_a_file_that_others_may_write_to(file: Path, mode: int) -> None:
    file.chmod(mode)
    assert (
        why_not(file) == f"has mode {mode:04o}, so others may write to it; run: chmod go-w {file}"
    )
    file.chmod(0o644)
    os.close(open_own(file, os.O_RDWR))


@pytest.mark.skipif(os.geteuid() != 0, reason="root alone may give files away")
def test_a_private_group_is_its_user(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the umask of 002 that many systems give to users whose group is their own."""
    folder = file.parent / "kv"
    folder.mkdir()
    for path, mode in ((file, 0o664), (folder, 0o775)):
        path.chmod(mode)
        os.chown(path, 1234, 1234)
    monkeypatch.setattr(os, "geteuid", lambda: 1234)
    os.close(open_own(file, os.O_RDWR))
    check_directory(folder)
    for path in (file, folder):
        os.chown(path, 1234, 100)
    assert "mode 0664" in why_not(file)
    with pytest.raises(NotOursError, match="mode 0775"):
        check_directory(folder)


@shared_group
def test_a_directory_that_was_given_to_its_group(tmp_path: Path) -> None:
    """As Kubernetes' fsGroup does at each start: directories 2770, and files 0660."""
    folder = tmp_path / "kv"
    folder.mkdir()
    (folder / "slab").write_bytes(b"")
    folder.chmod(0o2770)
    (folder / "slab").chmod(0o660)
    check_directory(folder)
    os.close(open_own(folder / "slab", os.O_RDWR))
    folder.chmod(0o770)
    with pytest.raises(NotOursError, match=r"mode 0770.*chmod go-w"):
        check_directory(folder)
    assert "mode 0660" in why_not(folder / "slab")
    (folder / "slab").chmod(0o662)
    folder.chmod(0o2770)
    assert "mode 0662" in why_not(folder / "slab")


@pytest.mark.parametrize(
    "mode", [0o777, 0o1777, 0o2777, 0o702, pytest.param(0o720, marks=shared_group)]
)
def test_a_lax_directory_is_refused_with_its_mode(tmp_path: Path, mode: int) -> None:
    folder = tmp_path / "kv"
    folder.mkdir()
    folder.chmod(mode)
    with pytest.raises(NotOursError, match=rf"kv has mode {mode:04o}.*run: chmod go-w .*kv"):
        check_directory(folder)
    folder.chmod(0o755)
    check_directory(folder)


def test_a_parent_in_which_names_can_be_changed(tmp_path: Path) -> None:
    folder = tmp_path / "lax" / "kv"
    folder.mkdir(parents=True)
    folder.parent.chmod(0o777)
    for check in (check_directory, check_parent):
        with pytest.raises(NotOursError, match=r"lax, which has mode 0777.*run: chmod \+t .*lax"):
            check(folder)
        with pytest.raises(NotOursError):
            check_parent(folder.parent / "yet to be made")
    folder.parent.chmod(0o1777)  # as /tmp
    check_directory(folder)
    check_parent(folder.parent / "yet to be made")


def test_another_users_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "kv"
    folder.mkdir()
    check_directory(folder)
    theirs = give_away(folder, monkeypatch)
    with pytest.raises(NotOursError, match=f"belongs to user {theirs}"):
        check_directory(folder)


@pytest.mark.skipif(os.geteuid() != 0, reason="it needs two users")
def test_the_group_of_nobody_has_others_in_it(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A list of rights for a stranger, too, shows as a right of the group."""
    os.chown(file, STRANGER, STRANGER)
    monkeypatch.setattr(os, "geteuid", lambda: STRANGER)
    file.chmod(0o600)
    os.close(open_own(file, os.O_RDWR))
    file.chmod(0o660)
    assert "others may write to it" in why_not(file)


IMPORTS = """
from attnstore_vllm.own_files import check_directory, read_own
from attnstore_vllm.tiers.shared.secret import read_secret
"""
LOOKS = """
for directory in map(Path, sys.argv[1:]):
    assert os.stat(directory).st_uid == os.geteuid()
    for look in (check_directory, lambda path: read_own(path / "file", 99)):
        try:
            look(directory)
            print("believed")
        except OSError as error:
            print(error)
    try:
        read_secret(directory / "file")
        print("believed")
    except Exception as error:
        print(error)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="it needs two users")
def test_nobody_in_a_user_namespace_believes_no_stranger() -> None:
    """There all users have its number that the namespace does not know."""
    with tempfile.TemporaryDirectory() as made:
        base = Path(made)
        base.chmod(0o1777)
        for name, uid in (("ours", 3000), ("theirs", 3001)):
            (base / name).mkdir(mode=0o755)
            (base / name / "file").write_bytes(64 * b"x")
            os.chown(base / name, uid, uid)
            os.chown(base / name / "file", uid, uid)
            (base / name / "file").chmod(0o400 if name == "ours" else 0o444)
        found = nobody_in_a_namespace(IMPORTS, LOOKS, 3000, base / "ours", base / "theirs")
    assert found[:3] == ["believed"] * 3
    assert len(found) == 6
    assert all(" belongs to " in line for line in found[3:]), found


def test_a_link_to_a_directory(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "kv").symlink_to(tmp_path / "real")
    for check in (check_directory, make_directory):
        with pytest.raises(NotOursError, match="is a link or a file"):
            check(tmp_path / "kv")


def test_a_replacement_follows_no_link_and_leaves_no_half(tmp_path: Path, file: Path) -> None:
    place = tmp_path / "place"
    place.symlink_to(file)
    (tmp_path / "place.new").symlink_to(file)
    replace_own(place, b"ours", durable=True)
    assert file.read_bytes() == b"content"
    assert read_own(place, 4) == b"ours"
    assert not place.is_symlink()
    with pytest.raises(OSError, match="more than 3 bytes"):
        read_own(place, 3)


def test_a_file_that_the_user_names_may_be_a_link_and_no_pipe(tmp_path: Path, file: Path) -> None:
    (tmp_path / "secret").symlink_to(file)  # as in Kubernetes
    assert read_given(tmp_path / "secret") == b"content"
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(NotOursError):
        read_given(tmp_path / "pipe")


# ---- the next one --------------------------------------------------------------------------

KERNEL, GIVEN, PACKAGED, NO_FILE, NO_NAME = (
    "a file of the kernel's",
    "a file that the user or vLLM names",
    "a file of this package",
    "no file at all",
    "a new file, without a name or with one by chance",
)
ELSEWHERE: dict[str, dict[str, str]] = {
    "attnstore_lab/bench/conversations.py": {"path.read_bytes": GIVEN, "read_bytes": GIVEN},
    "attnstore_lab/bench/environment.py": {"info.read_text": KERNEL},
    "attnstore_lab/bench/gaps.py": {"read_bytes": GIVEN},
    "attnstore_lab/palette.py": {"path.parent.mkdir": "a picture, where the user says"},
    "attnstore_lab/bench/replay.py": {"records.open": "a result, where the user says"},
    "attnstore_lab/cli/bench.py": {"args.api_key_file.read_text": GIVEN},
    "cli/doctor.py": {
        "Path.read_text": KERNEL,
        "file.read_text": GIVEN,
        "tempfile.TemporaryFile": NO_NAME,
    },
    "cli/main.py": {"os.open": "/dev/null"},
    "cli/speeds.py": {"tempfile.mkstemp": NO_NAME},
    "cli/settings_file.py": {"path.read_text": GIVEN},
    "identity/model_files.py": {"file.read_bytes": GIVEN},
    "identity/own_code.py": {
        "file.read_bytes": GIVEN,
        "file.read_text": GIVEN,
        "package.read_text": "metadata of an installed package",
    },
    "io/aiofiles_device.py": {"aiofiles.open": "with an opener, which is open_own()"},
    "io/disk_node.py": {"next.read_text": KERNEL},
    "tiers/peers/wire.py": {
        "os.open": "a directory, to name a socket by; the other end's user is asked"
    },
    "plugin.py": {"Path.read_text": GIVEN},
    "policy/eviction/departures.py": {"run.touch": NO_FILE},
    "policy/visits.py": {
        "estimator.open": NO_FILE,
        "self.touch": NO_FILE,
        "before.touch": NO_FILE,
    },
    "preflight.py": {
        "Path.read_text": KERNEL,
        "read_text": KERNEL,
        "tempfile.TemporaryFile": NO_NAME,
    },
    "tiers/residency.py": {"low.touch": NO_FILE},
    "tiers/shared/child.py": {"lane.open": NO_FILE},
    "config/secret_files.py": {
        "os.open": "a secret that the user names: its owner and mode are looked at"
    },
    "scheduler/held_blocks.py": {"self._pool.touch": "blocks of vLLM's pool: no file"},
    "attnstore_lab/sim/formats.py": {"path.read_bytes": GIVEN},
    "attnstore_lab/sim/hardware.py": {"path.read_text": GIVEN},
    "model_shape.py": {"path.read_text": GIVEN},
    "tiers/nvme/nvme_io.py": {"self._disk.tier.open": NO_FILE},
    "tiers/nvme/recovery.py": {"disk.tier.open": NO_FILE},
    "transfer/cuda_kernels.py": {"path.read_bytes": PACKAGED},
    "transfer/cuda_methods.py": {
        "path.parent.mkdir": "the user's own settings",
        "partial.write_text": "the user's own settings",
    },
    "transfer/pool.py": {"os.open": "a descriptor of ours, once more"},
    "transfer/pool_files.py": {"MAX_MAP_COUNT.read_text": KERNEL},
    "transfer/pool_memory.py": {
        "Path.read_text": KERNEL,
        "read_text": KERNEL,
        "_SHMEM_ENABLED.read_text": KERNEL,
        "_NODES_WITH_MEMORY.read_text": KERNEL,
    },
    "identity/weight_files.py": {"file.open": GIVEN},
}
"""Calls that open or make a file elsewhere, and why each is none of a file of ours by its name."""
OPENS = {
    "open", "read_text", "read_bytes", "write_text", "write_bytes", "mkdir", "makedirs", "touch",
    "mkstemp", "mkdtemp", "TemporaryFile", "NamedTemporaryFile", "TemporaryDirectory", "memmap",
    "fromfile", "tofile", "copyfile", "copy2", "symlink_to", "mknod", "mkfifo", "FileHandler",
    "shm_open", "truncate",
}  # fmt: skip


def called(node: ast.expr) -> str:
    """The dotted name of what is called, without the arguments of inner calls."""
    if isinstance(node, ast.Call):
        return called(node.func)
    if isinstance(node, ast.Attribute):
        owner = called(node.value)
        return f"{owner}.{node.attr}" if owner else node.attr
    return node.id if isinstance(node, ast.Name) else ""


def opening_calls(path: Path) -> Iterator[tuple[int, str]]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call):
            name = called(node.func)
            if name.rpartition(".")[2] in OPENS:
                yield node.lineno, name


def test_nothing_else_opens_a_file_of_ours() -> None:
    seen = set()
    for path in SOURCES:
        name = path.relative_to(ROOT).as_posix().removeprefix("attnstore_vllm/")
        if name == "own_files.py" or name.startswith("attnstore_lab/testing/"):
            continue
        for line, call in opening_calls(path):
            assert call in ELSEWHERE.get(name, {}), (
                f"{name}:{line}: {call}: open files of ours by attnstore_vllm/own_files.py; if "
                "this is none, say here what it is"
            )
            seen.add((name, call))
    listed = {(name, call) for name, calls in ELSEWHERE.items() for call in calls}
    assert listed == seen, "a line of the list is of no call"


def test_no_file_that_settings_name_is_read_unseen() -> None:
    """A pipe in its place would hang a start, and others might read a password. Such files are read
    by read_secret_file(), or by read_given()."""
    unseen = [name for name, calls in ELSEWHERE.items() if GIVEN in calls.values()]
    named = ("config/", "connector/", "scheduler/", "store/", "tiers/")
    assert not [name for name in unseen if name.startswith(named)]


def test_each_child_is_isolated_from_the_working_directory() -> None:
    """-I has what -P has, which Python 3.10 does not know."""
    found = 0
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.List | ast.Tuple | ast.Call):
                continue
            parts = node.args if isinstance(node, ast.Call) else node.elts
            names = [ast.unparse(part) for part in parts]
            if "sys.executable" in names:
                found += 1
                after = names[names.index("sys.executable") + 1 :]
                assert after[:1] == ["'-I'"], f"{path.relative_to(ROOT)}:{node.lineno}: {after}"
    assert found >= 3, "the children are started in another way: look at them there"
