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
        try:
            for name in names:
                is_new = fetch(SOURCES[name], args.to, bar, args.origin)
                place = SOURCES[name].where(args.to)
                print(f"{name}: {place}{'' if is_new else ', here already'}", file=sys.stderr)
        except DataError as error:
            print(f"benchmarks.data: {error}", file=sys.stderr)
            return EXIT_ERROR
        return EXIT_OK
    show(args.to, as_json=args.json)
    return EXIT_OK


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
    table = Table("name", "file", "licence", "MB", "here")
    for row in rows:
        size = f"{SOURCES[str(row['name'])].num_bytes / 1e6:,.1f}"
        here = "yes" if row["is_here"] else ""
        table.add_row(str(row["name"]), str(row["what"]), str(row["licence"]), size, here)
    Console().print(table)


if __name__ == "__main__":
    sys.exit(main())
