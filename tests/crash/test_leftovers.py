# SPDX-License-Identifier: Apache-2.0
"""A start that ends early leaves no shared memory, or leaves what the next start gives back.

Each story runs with a /dev/shm of its own, of 64 MiB, so that two pools of 40 MiB do not fit.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PRIVATE_SHM = "mount -t tmpfs -o size=64m tmpfs /dev/shm && exec "
BEGIN = """
import os, signal, subprocess, sys, time
from pathlib import Path
from attnstore_vllm.config.settings import StoreConfig
from attnstore_vllm.preflight import check_machine
from attnstore_vllm.transfer.pool import SharedPool
SLOTS = 40
def pool(name, member=0):
    return SharedPool(f"attnstore-{name}", SLOTS, 1 << 20, num_ranks=1, member=member)
def left():
    return sorted(path.name for path in Path("/dev/shm").iterdir())
nvme = {"path": sys.argv[1], "capacity": "1MiB"}
config = StoreConfig.parse({"dram": "40MiB", "nvme": nvme})
"""
CHILD = "import subprocess\nchild = subprocess.Popen([sys.executable, '-c', {child!r}, sys.argv[1]]"
CHILD += ", stdout=subprocess.PIPE)\nassert child.stdout.readline() == b'made\\n'\n"


def story(tmp_path: Path, script: str, child: str = "") -> str:
    """What the script prints. `child` is one that it starts first, and that has made its pool."""
    started = CHILD.format(child=BEGIN + child) if child else ""
    program = [sys.executable, "-c", BEGIN + started + script, str(tmp_path / "kv")]
    command = ["unshare", "-rm", "sh", "-c", PRIVATE_SHM + '"$@"', "sh"]
    if subprocess.run([*command, "true"], check=False, capture_output=True).returncode:
        pytest.skip("no mount namespaces here")
    done = subprocess.run(
        [*command, *program], check=False, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


MAKE = "made = pool('a')\nprint('made', flush=True)\n"


@pytest.mark.parametrize("name", ["a", "b"])
def test_a_start_right_after_a_killed_one_has_its_memory(tmp_path: Path, name: str) -> None:
    """Also under the same name: an engine_id that the user has chosen."""
    kill = "child.kill(); child.wait()\nassert left() == ['attnstore-a']\n"
    start = f"check_machine(config)\nassert left() == []\nmade = pool({name!r})\nprint(left())"
    assert story(tmp_path, kill + start, MAKE + "time.sleep(60)") == f"['attnstore-{name}']\n"
    # Without the check: vLLM's own --config, or an engine that is started alone.
    start = f"made = pool({name!r})\nprint(left())"
    assert story(tmp_path, kill + start, MAKE + "time.sleep(60)") == f"['attnstore-{name}']\n"


def test_a_start_beside_a_living_one_takes_nothing_from_it(tmp_path: Path) -> None:
    start = """
try:
    check_machine(config)
except Exception as error:
    print(type(error).__name__, left())
try:
    pool('b')
except Exception as error:
    print(type(error).__name__, left())
pool('a', 1).slot(0)
print(left())
child.kill()
"""
    left = "['attnstore-a']\n"
    said = story(tmp_path, start, MAKE + "time.sleep(60)")
    assert said == f"MachineError {left}ConfigError {left}[]\n"


WAYS_OUT = {
    "exception": "raise ValueError('in a constructor')",
    "exit": "sys.exit(3)",
    "interrupt": "os.kill(os.getpid(), signal.SIGINT); time.sleep(9)",
    "termination": (  # as vLLM's workers take it
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(3))\n"
        "os.kill(os.getpid(), signal.SIGTERM); time.sleep(9)"
    ),
}


@pytest.mark.parametrize("way", WAYS_OUT)
@pytest.mark.parametrize("where", ["made", "allocating"])
def test_no_way_out_of_python_leaves_a_region(tmp_path: Path, way: str, where: str) -> None:
    child = MAKE + WAYS_OUT[way]
    if where == "allocating":
        out = "\n    ".join(WAYS_OUT[way].split("\n"))
        child = f"""
from attnstore_vllm.transfer import pool as module
allocate = module.allocate
def interrupted(*arguments):
    allocate(*arguments)
    print('made', flush=True)
    {out}
module.allocate = interrupted
signal.signal(signal.SIGINT, signal.default_int_handler)
pool('a')
"""
    child = "signal.signal(signal.SIGINT, signal.default_int_handler)\n" + child
    assert story(tmp_path, "assert child.wait() != 0\nprint(left())", child) == "[]\n"


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_an_engine_killed_while_it_started_is_swept_by_who_started_it(
    tmp_path: Path, method: str
) -> None:
    """As ^C on `vllm serve`: its engines take no signal while they start, and are killed."""
    (tmp_path / "served.py").write_text(f"""
import multiprocessing, sys, time
from attnstore_vllm.plugin import _check
from attnstore_vllm.config.settings import StoreConfig
from attnstore_vllm.transfer.pool import SharedPool

def engine(made):
    pool = SharedPool("attnstore-a", 40, 1 << 20, num_ranks=1, member=0)
    made.set()
    time.sleep(60)

if __name__ == "__main__":
    nvme = {{"path": sys.argv[1], "capacity": "1MiB"}}
    _check(StoreConfig.parse({{"dram": "40MiB", "nvme": nvme}}), None, pins_memory=False)
    context = multiprocessing.get_context({method!r})
    made = context.Event()
    process = context.Process(target=engine, args=(made,))
    process.start()
    made.wait()
    process.kill()
    sys.exit("interrupted")
""")
    script = f"""
done = subprocess.run([sys.executable, {str(tmp_path / "served.py")!r}, sys.argv[1]])
assert done.returncode == 1
print(left())
"""
    assert story(tmp_path, script) == "[]\n"
