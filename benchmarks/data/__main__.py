# SPDX-License-Identifier: Apache-2.0
"""Public data that benchmarks use.

python -m benchmarks.data                               what there is, and what is here
python -m benchmarks.data fetch sharegpt                one file, from its public place
python -m benchmarks.data fetch --all                   all of them: 0.7 GB
python -m benchmarks.data fetch --all --from FOLDER     without a network: from a folder
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from benchmarks.data import FOLDER, SOURCES, DataError, digest, fetch

EXIT_OK, EXIT_ERROR = 0, 2


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 0, or 2 if a file is not to be had."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.data",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("action", nargs="?", choices=("list", "fetch"), default="list")
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(SOURCES))
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--from", dest="origin", type=Path, metavar="FOLDER")
    parser.add_argument("--to", type=Path, default=FOLDER, metavar="FOLDER")
    parser.add_argument("--json", action="store_true", help="print JSON in place of a table")
    args = parser.parse_args(argv)
    if unknown := [name for name in args.names if name not in SOURCES]:
        parser.error(f"{unknown[0]!r} is unknown; there are {', '.join(SOURCES)}")
    if args.action == "fetch":
        names = list(SOURCES) if args.all else args.names
        if not names:
            parser.error(f"name what to fetch, or say --all; there are {', '.join(SOURCES)}")
        return fetch_all(names, args.to, args.origin)
    show(args.to, as_json=args.json)
    return EXIT_OK


def fetch_all(names: Sequence[str], to: Path, origin: Path | None) -> int:
    """One after the other. A file that is absent keeps back none of the others."""
    absent = []
    for name in names:
        try:
            is_new = fetch(SOURCES[name], to, bar, origin)
        except DataError as error:
            print(f"benchmarks.data: {name}: {error}", file=sys.stderr)
            absent.append(name)
            continue
        place = SOURCES[name].where(to)
        print(f"{name}: {place}{'' if is_new else ', here already'}", file=sys.stderr)
    if absent and len(names) > 1:
        print(f"absent, of {len(names)} files: {', '.join(absent)}", file=sys.stderr)
    return EXIT_ERROR if absent else EXIT_OK


@contextmanager
def bar(file: str, num_bytes: int) -> Iterator[Callable[[int], object]]:
    with tqdm(total=num_bytes, desc=file, unit="B", unit_scale=True, disable=None) as shown:
        yield shown.update


def show(folder: Path, *, as_json: bool) -> None:
    rows = [
        {
            "name": name,
            "what": source.words,
            "licence": source.licence,
            "bytes": source.num_bytes,
            "sha256": source.sha256,
            "url": source.url,
            "is_here": (at := source.where(folder)).exists() and digest(at) == source.sha256,
        }
        for name, source in SOURCES.items()
    ]
    if as_json:
        print(json.dumps(rows, indent=1))
        return
    table = Table(box=None)
    # Names are what `fetch` is told, so they are whole, however narrow the terminal is.
    table.add_column("name", no_wrap=True, min_width=max(map(len, SOURCES)))
    for title in ("file", "licence"):
        table.add_column(title, overflow="fold")
    for title in ("MB", "here"):
        table.add_column(title, no_wrap=True, justify="right")
    for row in rows:
        size = f"{SOURCES[str(row['name'])].num_bytes / 1e6:,.1f}"
        here = "yes" if row["is_here"] else ""
        table.add_row(str(row["name"]), str(row["what"]), str(row["licence"]), size, here)
    Console().print(table)


if __name__ == "__main__":
    sys.exit(main())
