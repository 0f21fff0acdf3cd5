# SPDX-License-Identifier: Apache-2.0
"""The `attnstore` command: how it starts, and with which exit code it ends.

commands.py has what it does. It is imported in main(), since that takes half a second: Ctrl-C is to
be as quiet then as it is later.
"""

from __future__ import annotations

import io
import os
import signal
import sys
from collections.abc import Sequence
from types import ModuleType

from attnstore_vllm.errors import AttnStoreError

EXIT_OK, EXIT_BAD, EXIT_ERROR = 0, 1, 2
EXIT_INTERRUPTED, EXIT_PIPE = 130, 141
"""As a shell says of a program that SIGINT or SIGPIPE has ended."""


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0, 1 (verify found something bad, a request of bench failed),
    2 (it could not be done), 130 (it was interrupted), 141 (its reader had closed the pipe)."""
    name = "attnstore"
    try:
        commands = _commands()
        if isinstance(sys.stdout, io.TextIOWrapper):  # what the locale cannot write is escaped
            sys.stdout.reconfigure(errors="backslashreplace")
        try:
            args = commands.parser().parse_args(argv)
        except SystemExit:  # --help and --version have written, and wrong arguments have not
            sys.stdout.flush()
            raise
        name = f"attnstore {args.command}"
        code: int = commands.run(args)
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_PIPE
    except KeyboardInterrupt:
        print(f"{name}: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except MemoryError:
        print(f"{name}: this takes more memory than there is", file=sys.stderr)
        return EXIT_ERROR
    except (AttnStoreError, OSError) as error:
        print(f"{name}: {error}", file=sys.stderr)
        return EXIT_ERROR


def _commands() -> ModuleType:
    """The module of the commands, imported.

    An interrupt ends the process on the spot: an exception would pass through modules that are half
    imported, and some of Python's own callbacks print it and go on.
    """
    is_default = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if is_default:  # one that is ignored stays so, as in a script's background
        signal.signal(signal.SIGINT, _end)
    try:
        from attnstore_vllm.cli import commands  # noqa: PLC0415  see above
    finally:
        if is_default:
            signal.signal(signal.SIGINT, signal.default_int_handler)
    return commands


def _end(number: int, frame: object) -> None:
    os.write(2, b"attnstore: interrupted\n")
    os._exit(EXIT_INTERRUPTED)


if __name__ == "__main__":
    sys.exit(main())
