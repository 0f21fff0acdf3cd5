# SPDX-License-Identifier: Apache-2.0
"""Where a run writes: what is published is of whole runs, so a quick one writes to .cache."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from attnstore_vllm.errors import AttnStoreError

ROOT: Final = Path(__file__).parent.parent
RESULTS: Final = ROOT / "results"
CACHE: Final = ROOT / ".cache" / "quick"


class PublishedError(AttnStoreError):
    """A quick run was to write into results/."""


def destination(published: Path, asked: Path | None, *, is_quick: bool) -> Path:
    """The file or folder that a run writes.

    Args:
        published: of a whole run, in results/.
        asked: by the user, if at all.
    Raises: PublishedError.
    """
    if not is_quick:
        return asked or published
    path = asked or CACHE / published.relative_to(RESULTS)
    if path.resolve().is_relative_to(RESULTS.resolve()):
        raise PublishedError(f"{path}: --quick writes nothing in results/; name another --out")
    return path
