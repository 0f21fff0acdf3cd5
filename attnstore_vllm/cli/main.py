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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
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
    with ends_on_the_spot("attnstore"):
        from attnstore_vllm.cli import commands  # noqa: PLC0415  see above
    return commands


@contextmanager
def ends_on_the_spot(name: str) -> Iterator[Callable[[], None]]:
    """An interrupt ends the process, without an exception: for what must not be left half made.

    Gives what ends this sooner than the block's end.

    Args:
        name: of the command, as it is told.
    """

    def end(number: int, frame: object) -> None:
        os.write(2, f"{name}: interrupted\n".encode())
        os._exit(EXIT_INTERRUPTED)

    def is_over() -> None:
        if signal.getsignal(signal.SIGINT) is end:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    # One that is ignored stays so, as in a script's background.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, end)
    try:
        yield is_over
    finally:
        is_over()


if __name__ == "__main__":
    sys.exit(main())
