# SPDX-License-Identifier: Apache-2.0
"""Environments of tools' own, .cache/NAME, so that .venv has only what the package needs.

Without a network none can be made the first time; each tool says what it leaves out then. Standard
library only.
"""

from __future__ import annotations

import subprocess
import venv
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def programs(name: str, pins: Sequence[str], python: Path | None = None) -> Path | None:
    """The folder of its programs; made once for these pins. None if that cannot be done here.

    Args:
        pins: as pip takes them, each of one version.
        python: that the environment is for; None: the one that runs this.
    """
    folder = ROOT / ".cache" / name
    done = folder / "pins"
    if done.is_file() and done.read_text(encoding="utf-8") == repr(tuple(pins)):
        return folder / "bin"
    if python is None:
        venv.create(folder, with_pip=True, clear=True)
    else:
        subprocess.run([python, "-m", "venv", "--clear", folder], check=True)
    command = [str(folder / "bin" / "pip"), "install", "-qq", "--disable-pip-version-check", *pins]
    if subprocess.run(command, check=False).returncode != 0:
        return None
    done.write_text(repr(tuple(pins)), encoding="utf-8")
    return folder / "bin"
