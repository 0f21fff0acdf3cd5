# SPDX-License-Identifier: Apache-2.0
"""A directory that the machine cannot serve is told as that, with its path: never as a trait of the
model, and never as a traceback.

A library that is loaded before libc fails calls on one directory: all locks, as NFS without a lock
daemon does; or one call of any kind, each in turn, so that the next place is found too.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SHIM = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/types.h>
#include <unistd.h>

int fail_at = 0, seen = 0, locks_fail = 0;  /* fail_at: the number of the call that fails */

static int is_ours(const char *path) {
  const char *directory = getenv("SHIM_DIRECTORY");
  return directory && path && !strncmp(path, directory, strlen(directory));
}

static int is_ours_fd(int fd) {
  char name[64], path[4096];
  snprintf(name, sizeof name, "/proc/self/fd/%d", fd);
  ssize_t length = readlink(name, path, sizeof path - 1);
  if (length < 0) return 0;
  path[length] = 0;
  return is_ours(path);
}

static int fails(int ours) {
  if (!ours || ++seen != fail_at) return 0;
  errno = EIO;
  return 1;
}

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))
#define OPEN(name) \
  int name(const char *path, int flags, ...) { \
    va_list list; va_start(list, flags); int mode = va_arg(list, int); va_end(list); \
    return fails(is_ours(path)) ? -1 : REAL(name)(path, flags, mode); }
OPEN(open)
OPEN(open64)
#define ON_FD(type, name, given, passed) \
  type name given { return fails(is_ours_fd(fd)) ? -1 : REAL(name) passed; }
ON_FD(ssize_t, read, (int fd, void *to, size_t n), (fd, to, n))
ON_FD(ssize_t, write, (int fd, const void *from, size_t n), (fd, from, n))
ON_FD(ssize_t, pread64, (int fd, void *to, size_t n, off64_t at), (fd, to, n, at))
ON_FD(ssize_t, pwrite64, (int fd, const void *from, size_t n, off64_t at), (fd, from, n, at))
ON_FD(int, ftruncate64, (int fd, off64_t n), (fd, n))
ON_FD(int, fdatasync, (int fd), (fd))
ON_FD(int, fsync, (int fd), (fd))
ON_FD(int, fallocate, (int fd, int mode, off_t at, off_t n), (fd, mode, at, n))

int mkdir(const char *path, mode_t mode) {
  return fails(is_ours(path)) ? -1 : REAL(mkdir)(path, mode);
}

int rename(const char *from, const char *to) {
  return fails(is_ours(from)) ? -1 : REAL(rename)(from, to);
}

int flock(int fd, int operation) {
  int ours = is_ours_fd(fd);
  if (ours && locks_fail) { errno = ENOLCK; return -1; }
  return fails(ours) ? -1 : REAL(flock)(fd, operation);
}
"""

BEGIN = """
import ctypes, os, sys
from pathlib import Path
from attnstore_vllm.config.settings import StoreConfig
from attnstore_vllm.errors import ConfigError, MachineError
from attnstore_vllm.io.choose import open_device
from attnstore_vllm.preflight import check_machine, lock_directory, machine_errors
from attnstore_vllm.tiers.nvme.slab import open_slab
from tests.helpers import SHAPE, capacity_for
shim = ctypes.CDLL(os.environ["SHIM"])
def shim_int(name):
    return ctypes.c_int.in_dll(shim, name)
top = Path(sys.argv[1])
def config(path):
    return StoreConfig.parse({"dram": "2MiB", "nvme": {"path": str(path), "capacity": "1MiB"}})
"""

NO_LOCKS = """
shim_int("locks_fail").value = 1
from attnstore_vllm.cli.main import main
(top / "old").mkdir(mode=0o700)
(top / "old" / "lock").write_text("7")
for directory in (top / "old", top / "new", top / "kv" / "dp0"):
    directory.parent.mkdir(exist_ok=True, mode=0o700)
    for call in (lambda: check_machine(config(directory)), lambda: lock_directory(directory)):
        try:
            call()
        except MachineError as error:
            assert str(directory) in str(error) and "cannot be locked" in str(error), error
            assert "name a directory of a local disk" in str(error)
        else:
            sys.exit(f"{directory} was taken for one with locks")
open_slab(top / "old" / "slab", capacity_for(8), SHAPE)
assert main(["gc", str(top / "old"), "--to-size", "4KiB", "--yes"]) == 2
print("told")
"""

EACH_CALL = """
def start(directory):
    '''What an engine does with its directory before it serves (connector/build.py).'''
    check_machine(config(directory))
    lock = lock_directory(directory)
    try:
        with machine_errors(directory):
            slab = open_slab(directory / "slab", capacity_for(8), SHAPE)
            device, _ = open_device(slab.path, 1, "aiofiles")
            device.close(1.0)
    finally:
        os.close(lock)

refused, number = 0, 0
for state in ("new", "again"):
    directory = top / state
    if state == "again":
        shim_int("fail_at").value = 0
        start(directory)
    for number in range(1, 400):
        if state == "new":
            directory = top / f"new{number}"
        shim_int("seen").value = 0
        shim_int("fail_at").value = number
        try:
            start(directory)
        except MachineError as error:
            assert str(directory) in str(error), error
            refused += 1
        if shim_int("seen").value < number:
            break
    else:
        sys.exit("it does not end")
print("told", refused)
"""

EACH_FILE = """
import logging
from attnstore_vllm.config.settings import TraceConfig
from attnstore_vllm.identity.weight_files import Memo, Stamp
from attnstore_vllm.scheduler.recorder import Recorder
from attnstore_vllm.tiers.nvme.node_disk import NodeDisk
from attnstore_vllm.tiers.peers.generation import Generation
from attnstore_vllm.tiers.shared import shared_generation
from types import SimpleNamespace

class Lines(logging.Handler):
    def emit(self, record):
        lines.append(record.getMessage())

lines = []
logging.getLogger("attnstore_vllm").addHandler(Lines())

def weights(directory, number):
    Memo(directory).keep({Stamp(1, 2, 3, 4, number): bytes(32)})

def siblings(directory, number):
    Generation(directory, directory / "group", bytes(32)).advance()

def shared(directory, number):
    found = shared_generation.load(directory, bytes(32))
    must_renew = found.must_renew
    found.weights_seen(True)
    try:
        shared_generation.save(directory, bytes(32), found.to_json())
    except OSError as error:  # SharedIo logs it so
        lines.append(f"the shared tier is not used: it cannot be noted: {error}")
    return must_renew

def node(directory, number):
    memory = memoryview(bytearray(8192))
    pool = SimpleNamespace(
        num_slots=2, slot_bytes=4096, slot=memory.__getitem__, close=lambda: None,
        address=ctypes.addressof(ctypes.c_char.from_buffer(memory.obj)),
    )
    NodeDisk(pool, directory, 1 << 16, "aiofiles", 1.0, 1, lambda: None).close()

def trace(directory, number):
    Recorder(TraceConfig(path=directory), 16, {}).close()

def uring(directory, number):
    with machine_errors(directory):
        slab = open_slab(directory / "slab", capacity_for(8), SHAPE)
        open_device(slab.path, 1, "auto")[0].close(1.0)

use = globals()[sys.argv[2]]
told, silent = 0, []
for state in ("new", "again"):
    for number in (*([0] if state == "again" else []), *range(400)):  # at 0 no call fails
        directory = top / (f"new{number}" if state == "new" else "again")
        directory.mkdir(mode=0o700, exist_ok=True)
        lines.clear()
        shim_int("seen").value = 0
        shim_int("fail_at").value = number
        result = None
        try:
            result = use(directory, number)
        except ConfigError as error:
            assert isinstance(error, MachineError) or isinstance(error.__cause__, OSError), error
            lines.append(str(error))
        shim_int("fail_at").value = 0
        done = result, sorted(path.name for path in directory.iterdir())
        if number == 0:
            assert not lines, lines
            wanted = done
        elif shim_int("seen").value < number:
            break
        elif any(str(directory) in line for line in lines):
            told += 1
        elif lines or done != wanted:  # else it was no loss, as to make a directory that is there
            silent.append(f"{state}, call {number}: {lines or 'nothing'}")
        assert not any("model" in line for line in lines), lines
    else:
        sys.exit("it does not end")
print("told", told, *silent, sep="\\n")
"""


@pytest.fixture(scope="module")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no compiler here")
    where = tmp_path_factory.mktemp("shim")
    (where / "shim.c").write_text(SHIM)
    command = [compiler, "-shared", "-fPIC", "-D_LARGEFILE64_SOURCE", "-o", str(where / "shim.so")]
    subprocess.run([*command, str(where / "shim.c"), "-ldl"], check=True)
    return where / "shim.so"


def story(shim: Path, directory: Path, script: str, *more: str) -> tuple[str, str]:
    settings = {"LD_PRELOAD": str(shim), "SHIM": str(shim), "SHIM_DIRECTORY": str(directory)}
    done = subprocess.run(
        [sys.executable, "-c", BEGIN + script, str(directory), *more],
        check=False, capture_output=True, text=True, timeout=120, env={**os.environ, **settings},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


def test_a_file_system_without_locks(shim: Path, tmp_path: Path) -> None:
    """At the first start, at the next one, and from the command line."""
    out, err = story(shim, tmp_path, NO_LOCKS)
    assert out == "told\n"
    (told,) = err.splitlines()
    assert str(tmp_path / "old") in told and "cannot be locked" in told


def test_each_call_on_the_directory_fails_once(shim: Path, tmp_path: Path) -> None:
    """What is no MachineError ends the story with a traceback."""
    out, _ = story(shim, tmp_path, EACH_CALL)
    told, refused = out.split()
    assert told == "told" and int(refused) > 20


@pytest.mark.parametrize("use", ["weights", "siblings", "shared", "node", "trace", "uring"])
def test_each_call_on_each_file_is_told_with_its_path(use: str, shim: Path, tmp_path: Path) -> None:
    """weights.json, the generations of siblings and of the shared tier, node.bin, the trace, and
    the slab under io_uring. A failed call is told with its path, or is no loss."""
    out, _ = story(shim, tmp_path, EACH_FILE, use)
    _, told, *silent = out.splitlines()
    assert not silent, "\n".join(silent)
    assert int(told) > 3
