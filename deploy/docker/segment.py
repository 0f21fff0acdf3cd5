# SPDX-License-Identifier: Apache-2.0
"""A segment of memory for Mooncake Store: python3 segment.py GIB MASTER"""

from __future__ import annotations

import signal
import socket
import sys

from mooncake.store import MooncakeDistributedStore


def main(gib: str, master: str) -> None:
    store = MooncakeDistributedStore()
    host = socket.gethostbyname(socket.gethostname())
    result = store.setup(host, "P2PHANDSHAKE", int(gib) << 30, 64 << 20, "tcp", "", master)
    if result:
        sys.exit(f"{master} does not answer ({result})")
    signal.sigwait({signal.SIGTERM, signal.SIGINT})
    store.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
