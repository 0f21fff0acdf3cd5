# SPDX-License-Identifier: Apache-2.0
"""Type what README.md and docs/getting-started-cpu.md say, in this clone, and look at what comes.

    python3 tools/type_pages.py [--quick]        (in an image: tools/bare_image.sh)

The code blocks are read from the pages, so that the pages are what is tried. HOW says of each how
it is typed; a block that it does not know, or one that is gone, fails. Ends with 1 at the first
command that does not do what its page says. Standard library only.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

ROOT = Path(__file__).resolve().parent.parent
PAGES = ("README.md", "docs/getting-started-cpu.md")
FENCE = re.compile(r"^```\w*\n(.*?)^```", re.MULTILINE | re.DOTALL)
MODEL = ".cache/demo/model"
DISK, DIRECTORY = "/mnt/nvme/attnstore", Path("/var/tmp/attnstore")
"""README's, for a machine with such a disk, and that in its place here, as in the guide. What was
not there before is removed: README's takes half of the disk."""
READY = "Application startup complete"
READY_S, ENDED_S = 900.0, 120.0
ACTIVATE = ". .venv/bin/activate\n"
UNIT = "make test ARGS=tests/unit"
QUICK_TESTS = (
    "cli/test_cli_settings store/test_store_exit repository/test_setup_env io/test_devices "
    "config/test_settings transfer/test_native transfer/test_pool"
)
"""Of tests/unit, those that ask what was built."""


@dataclass(frozen=True)
class How:
    """How a block is typed.

    Args:
        kind: shell: it must end with 0. serve: its last command runs until the page's end.
            elsewhere: it is not typed here, and `why` says where it is.
        quick: (what, in its place) with --quick.
        expects: a regular expression that its output has.
        done: a line of it that `make setup` has done here.
    """

    kind: Literal["shell", "serve", "elsewhere"] = "shell"
    quick: tuple[str, str] = ("", "")
    expects: str = ""
    why: str = ""
    done: str = ""


HOW = {
    ("README.md", "make demo"): How("elsewhere", why="the guide has it"),
    ("README.md", "pip install ."): How("serve", done="pip install ."),
    ("docs/getting-started-cpu.md", "apt install"): How("elsewhere", why="an option of the image"),
    ("docs/getting-started-cpu.md", "make demo"): How(
        quick=("make demo", 'make demo ARGS="--conversations 4 --turns 3"'),
        expects="TTFT of turn 2",
    ),
    ("docs/getting-started-cpu.md", ". .venv/bin/activate\nattnstore init"): How("serve"),
    ("docs/getting-started-cpu.md", ". .venv/bin/activate\npython"): How(
        expects=r"'dram_tokens': [1-9]"
    ),
    ("docs/getting-started-cpu.md", "curl"): How(expects=r'tier="(dram|nvme)".* [1-9]'),
}
"""By page and a block's beginning."""


class WrongError(Exception):
    """A page says what is not so."""


def blocks(page: str) -> list[tuple[str, How]]:
    """The page's blocks with how they are typed. Raises: WrongError."""
    found = FENCE.findall((ROOT / page).read_text(encoding="utf-8"))
    known = {begin: how for (of, begin), how in HOW.items() if of == page}
    typed = []
    for block in found:
        begins = [begin for begin in known if block.startswith(begin)]
        if len(begins) != 1:
            raise WrongError(f"{page}: HOW (tools/type_pages.py) does not know\n{block}")
        typed.append((block, known[begins[0]]))
    if len(typed) != len(known):
        raise WrongError(f"{page}: HOW (tools/type_pages.py) has a block that is not there")
    return typed


def run(command: str, expects: str = "") -> None:
    print(f"$ {command}", flush=True)
    started = time.monotonic()
    with subprocess.Popen(
        ["bash", "-ec", command],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as running:
        assert running.stdout is not None
        said = []
        for line in running.stdout:
            print(f"  {line}", end="", flush=True)
            said.append(line)
    print(f"  ({time.monotonic() - started:.0f} s)", flush=True)
    if running.returncode != 0:
        raise WrongError(f"this ended with {running.returncode}: {command}")
    if expects and not re.search(expects, "".join(said)):
        raise WrongError(f"{expects!r} is expected of: {command}")


class Serving:
    """A server that a page starts, until it is ended as the page says, with Ctrl-C."""

    def __init__(self, command: str) -> None:
        print(f"$ {command}  &", flush=True)
        self._command = command
        self._log = ROOT / ".cache" / "server.log"
        with self._log.open("w", encoding="utf-8") as log:
            self._running = subprocess.Popen(
                ["bash", "-c", f"{ACTIVATE}exec env {command}"],
                cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
        until = time.monotonic() + READY_S
        while READY not in self._said():
            if self._running.poll() is not None or time.monotonic() > until:
                self.end()
                raise WrongError(f"{READY!r} is expected of: {command}\n{self._said()[-8000:]}")
            time.sleep(0.5)

    def _said(self) -> str:
        return self._log.read_text(encoding="utf-8", errors="replace")

    def end(self) -> None:
        """Raises: WrongError if it does not end."""
        if self._running.poll() is None:
            os.killpg(self._running.pid, signal.SIGINT)
            try:
                self._running.wait(ENDED_S)
            except subprocess.TimeoutExpired as error:
                os.killpg(self._running.pid, signal.SIGKILL)
                self._running.wait()
                raise WrongError(f"Ctrl-C does not end: {self._command}") from error


def serve(block: str, done: str = "") -> Serving:
    """Type all of a block but what is done and its server, and then start that one."""
    if done:
        block = re.sub(rf"^{re.escape(done)}.*\n", "", block, flags=re.MULTILINE)
    block = block.replace(DISK, str(DIRECTORY))
    before, _, command = block.rpartition("\nVLLM_CPU" if "\nVLLM_CPU" in block else "\nvllm serve")
    started = command.replace("\\\n", " ").strip()
    if "\nVLLM_CPU" in block:
        started = f"VLLM_CPU{started}"
    else:  # README's is for any machine: on this one HBM is memory, and is small
        started = f"VLLM_CPU_KVCACHE_SPACE=1 vllm serve {started}".replace("MODEL", MODEL)
    run(before if before.startswith(ACTIVATE) else ACTIVATE + before)
    return Serving(started)


def type_page(page: str, *, quick: bool) -> None:
    serving, was_there = None, DIRECTORY.exists()
    try:
        for block, how in blocks(page):
            if how.kind == "elsewhere":
                print(f"not typed here ({how.why}): {block}", end="", flush=True)
            elif how.kind == "serve":
                serving = serve(block, how.done)
            else:
                run(block.replace(*how.quick) if quick else block, how.expects)
    finally:
        if serving is not None:
            serving.end()
        if not was_there:
            shutil.rmtree(DIRECTORY, ignore_errors=True)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true", help="a short demo, some of the tests")
    args = parser.parse_args()
    try:
        for page in PAGES:
            blocks(page)
        run("make setup")
        for page in reversed(PAGES):  # the guide's demo makes the model that README's server has
            type_page(page, quick=args.quick)
        if UNIT not in (ROOT / PAGES[-1]).read_text(encoding="utf-8"):
            raise WrongError(f"{PAGES[-1]} does not say `{UNIT}` any more")
        names = " ".join(f"tests/unit/{name}.py" for name in QUICK_TESTS.split())
        run(f'make test ARGS="{names}"' if args.quick else UNIT)
    except WrongError as error:
        print(f"type_pages: {error}", file=sys.stderr)
        return 1
    print("type_pages: all that the pages say was typed, and did what they say")
    return 0


if __name__ == "__main__":
    sys.exit(main())
