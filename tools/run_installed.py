# SPDX-License-Identifier: Apache-2.0
"""Run a module of this repository with the attnstore_vllm that is installed.

    python tools/run_installed.py MODULE [ARGUMENTS]

`python -m` puts the folder it is started in first, and so the package's source, which has no
extensions after `pip install .`; here it comes last. Standard library only.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent

if __name__ == "__main__":
    del sys.argv[0]
    sys.path = [path for path in sys.path if Path(path or ".").resolve() != HERE]
    sys.path.append(str(HERE.parent))
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
