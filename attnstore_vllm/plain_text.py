# SPDX-License-Identifier: Apache-2.0
"""Text for a log or a terminal: what files give, and numbers of things."""

from __future__ import annotations


def printable(text: str) -> str:
    """The text with an escape, as \\x1b, in place of each character that prints nothing by itself.

    Those are controls of terminals, ends of lines, and marks that turn the direction of writing.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def quantity(number: int, thing: str) -> str:
    """The number with the thing's name: "1 tenant", "2 tenants"."""
    return f"{number} {thing}{'' if number == 1 else 's'}"
