# SPDX-License-Identifier: Apache-2.0
"""Many random stories of CudaEngine over the fake driver.

    python -m tests.cuda_stories [--stories 10000] [--first 0] [--jobs 2] [--json]

The first story with a wrong byte ends it, with its seed. Needs a C++ compiler and no GPU.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from tests.cuda_story import tell
from tests.fake_driver import driver
from tests.story_runner import run


def main(arguments: Sequence[str] | None = None) -> int:
    driver()  # it is built once
    return run("cuda-stories", __doc__, tell, arguments)


if __name__ == "__main__":
    sys.exit(main())
