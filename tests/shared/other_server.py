# SPDX-License-Identifier: Apache-2.0
"""Another server: a process with a store of its own, which writes conversations to the tier.

    python -m tests.shared.other_server SETTINGS NAMESPACE FIRST COUNT

Prints a line when they are there, with its own process id and its child's; lives until stdin ends.
"""

from __future__ import annotations

import json
import os
import sys

from tests.helpers import conversation
from tests.shared.rigs import NUM_TOKENS, io_of, shared_rig, write


def main(settings: str, namespace: str, first: str, count: str) -> None:
    rig = shared_rig(json.loads(settings), bytes.fromhex(namespace), dram_slots=16)
    for number in range(int(first), int(first) + int(count)):
        write(rig, conversation(number, NUM_TOKENS))
    print(os.getpid(), io_of(rig).helper.pid, flush=True)
    sys.stdin.read()
    rig.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
