# SPDX-License-Identifier: Apache-2.0
"""Commands that read a directory which was made to harm them: each ends soon, with one sentence at
most, in bounded memory, and writes nothing that a terminal obeys.

Every integer of every header is set to its bounds, each with a checksum that fits, and many at a
time by chance. Each command runs in a process of its own, with a limit on memory and on time.
"""

from __future__ import annotations

import contextlib
import os
import random
import resource
import signal
import struct
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import NamedTuple

import pytest

from attnstore_vllm.cli import commands
from attnstore_vllm.cli.main import main
from attnstore_vllm.index.keys import SequenceKeys, root_key
from attnstore_vllm.io.checksum import checksum
from attnstore_vllm.tiers.nvme.format import (
    CHUNK_TOKENS_MAX,
    EXPANSION_MAX,
    PAGE_BYTES,
    SEGMENT_BYTES_MAX,
    Encoding,
    Header,
    Root,
    header_checksum,
    pages,
)
from tests.helpers import NAMESPACE, SHAPE, name_of, payload_of, tokens_of

assert commands, "imported here once, and not in each child"
LIMIT_S = 8
MEMORY_BYTES = 512 << 20
"""More than a command may take for a file of 100 KiB."""
RECORDS = 3
BOUNDS = (0, 1, 2**31, 2**60, 2**63, 2**64 - 1)

COMMANDS = {
    "inspect": ["inspect", "DIR"],
    "inspect --json": ["inspect", "DIR", "--json"],
    "verify": ["verify", "DIR"],
    "gc": ["gc", "DIR", "--tenant", "nobody"],
    "gc --to-size": ["gc", "DIR", "--to-size", "8KiB", "--json"],
    "gc --yes": ["gc", "DIR", "--older-than", "1d", "--yes"],
}


class Field(NamedTuple):
    """An integer of a header."""

    page: str
    name: str
    at: int
    num_bytes: int


FIELDS = [
    Field("root", "version", 8, 4),
    Field("root", "segment bytes", 32, 8),
    Field("segment", "version", 8, 4),
    Field("segment", "chunk tokens", 12, 4),
    Field("segment", "number", 48, 8),
    Field("segment", "payload bytes", 56, 8),
    Field("segment", "last used", 96, 8),
    Field("segment", "codec's version", 376, 4),
    Field("segment", "encoded bytes", 384, 8),
    Field("record", "version", 8, 4),
    Field("record", "tokens", 12, 4),
    Field("record", "number", 48, 8),
    Field("record", "sequence", 56, 8),
    Field("record", "payload bytes", 64, 8),
    Field("record", "position", 248, 8),
    Field("record", "written at", 256, 8),
    Field("record", "flags", -36, 4),
    Field("record", "codec's version", -16, 4),
    Field("record", "encoded bytes", -8, 8),
]
GROUPS = "groups: full/1 " + " ".join(f"window:{n}/1" for n in range(1, 20))
LABELS = {
    "clears the screen": b"\x1b[2J\x1b]0;owned\x07",
    "a line of its own": b"model\nBAD  payload checksum: 7\r",
    "turned": "model \u202egnp.exe\u2066\u200b".encode(),
    "no UTF-8": b"\xff\xfe\x80",
    "groups of a token": GROUPS.encode(),
    "groups without end": b"groups: full/16 window:" + b"9" * 200 + b"/1",
    "groups of nothing": b"groups: full/0 window:0/0",
}


class Crafted:
    """A slab of two segments, whose headers can be changed."""

    def __init__(self, *, encoded: bool) -> None:
        shape = SHAPE
        if encoded:
            shape = replace(SHAPE, encoding=Encoding("lossless", 1, pages(SHAPE.payload_bytes)))
        self.header_bytes = shape.header_bytes
        self.record_bytes = shape.record_bytes
        self.segment_bytes = PAGE_BYTES + RECORDS * shape.record_bytes
        self.data = bytearray(PAGE_BYTES + 2 * self.segment_bytes)
        self.data[:PAGE_BYTES] = Root(self.segment_bytes).encode()
        keys = SequenceKeys(root_key(NAMESPACE, None, b""), tokens_of(1, 96), 16)
        for number in range(2):
            segment = replace(shape, number=number, generation=bytes([number + 1]) * 16)
            at = self.segment_at(number)
            self.data[at : at + PAGE_BYTES] = segment.encode()
            for i in range(RECORDS):
                record = RECORDS * number + i
                name = name_of(keys, record)
                payload = payload_of(name)
                header = Header(
                    name, NAMESPACE, segment.generation, record, 7, len(payload),
                    checksum(payload), 1_700_000_000,
                    Encoding("lossless", 1, len(payload)) if encoded else None,
                )  # fmt: skip
                raw = bytearray(self.header_bytes)
                header.encode_into(memoryview(raw))
                at = self.record_at(number, i)
                self.data[at : at + len(raw)] = raw
                self.data[at + len(raw) : at + len(raw) + len(payload)] = payload
                self.seal(at, self.header_bytes)

    def segment_at(self, number: int) -> int:
        return PAGE_BYTES + number * self.segment_bytes

    def record_at(self, segment: int, number: int) -> int:
        return self.segment_at(segment) + PAGE_BYTES + number * self.record_bytes

    def pages_of(self, page: str) -> list[tuple[int, int]]:
        """(first byte, bytes) of each header of this kind."""
        if page == "root":
            return [(0, PAGE_BYTES)]
        if page == "segment":
            return [(self.segment_at(number), PAGE_BYTES) for number in range(2)]
        places = [(s, i) for s in range(2) for i in range(RECORDS)]
        return [(self.record_at(s, i), self.header_bytes) for s, i in places]

    def seal(self, at: int, num_bytes: int) -> None:
        raw = self.data[at : at + num_bytes]
        self.data[at + 16 : at + 32] = header_checksum(bytes(raw))

    def put(self, field: Field, value: int, *, everywhere: bool = True) -> None:
        for at, size in self.pages_of(field.page)[: None if everywhere else 1]:
            first = at + field.at % size
            raw = value.to_bytes(8, "little")[: field.num_bytes]
            self.data[first : first + field.num_bytes] = raw
            self.seal(at, size)

    def label(self, text: bytes) -> None:
        for at, size in self.pages_of("segment"):
            self.data[at + 104 : at + 360] = struct.pack("256s", text)
            self.seal(at, size)

    def write(self, directory: Path) -> Path:
        directory.mkdir(mode=0o700, exist_ok=True)
        (directory / "slab").write_bytes(self.data)
        (directory / "slab").chmod(0o600)
        return directory


class End(NamedTuple):
    """How a command ended. A signal is a negative code; None: one before it has ended the child."""

    code: int | None
    out: str
    err: str


def run(directory: Path, *names: str) -> list[End]:
    """Run commands one after the other, in one child."""
    files = [[directory / f"{i}.{what}" for what in ("code", "out", "err")] for i in range(9)]
    for path in (path for three in files for path in three):
        path.unlink(missing_ok=True)
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            taken = int(Path("/proc/self/statm").read_text().split()[0]) * PAGE_BYTES
            resource.setrlimit(resource.RLIMIT_AS, (taken + MEMORY_BYTES,) * 2)
            for name, three in zip(names, files, strict=False):
                _run_one([str(directory) if w == "DIR" else w for w in COMMANDS[name]], *three)
            os._exit(0)
        os._exit(99)
    _, status = os.waitpid(child, 0)
    ended = os.waitstatus_to_exitcode(status)
    found = []
    for code, out, err in files[: len(names)]:
        texts = [p.read_text(errors="surrogateescape") if p.exists() else "" for p in (out, err)]
        if code.exists():
            found.append(End(int(code.read_text()), *texts))
        else:
            is_next = all(end.code is not None and end.code >= 0 for end in found)
            found.append(End(ended if is_next else None, *texts))
    return found


def _run_one(arguments: list[str], code: Path, out: Path, err: Path) -> None:
    signal.alarm(LIMIT_S)
    with out.open("w", encoding="utf-8") as sys.stdout, err.open("w", encoding="utf-8") as errors:
        sys.stderr = errors
        try:
            number = main(arguments)
        except SystemExit as error:
            number = int(error.code or 0)
        except BaseException:
            traceback.print_exc()
            number = 99
    code.write_text(str(number))


def judged(end: End) -> str | None:
    """Why this was no good end of a command, None if it was."""
    code, out, err = end
    if code == -signal.SIGALRM:
        return f"did not end within {LIMIT_S} s"
    if code not in (0, 1, 2):
        return f"ended with {code}: {err[-300:]}"
    if "Traceback" in err or "memory" in err:
        return f"{err[-300:]}"
    if err.count("\n") > 1 + 6 * ("stored" in err):  # a refusal of gc lists what is stored
        return f"more than a sentence: {err}"
    if wrong := {c for c in (out + err).replace("\n", "") if not c.isprintable()}:
        return f"writes {wrong}"
    return None


def bad_ends(directory: Path, *names: str) -> list[str]:
    ends = zip(names, run(directory, *names), strict=True)
    return [f"{name}: {why}" for name, end in ends if (why := judged(end)) is not None]


def failures(crafted: Callable[[], Iterator[tuple[str, Crafted]]], directory: Path) -> list[str]:
    return [
        f"{what}: {why}"
        for what, slab in crafted()
        for why in bad_ends(slab.write(directory), *COMMANDS)
    ]


@pytest.mark.parametrize("encoded", [False, True], ids=["plain", "encoded"])
def test_what_is_not_changed_is_sound(tmp_path: Path, *, encoded: bool) -> None:
    """Else nothing is tried behind the first check."""
    directory = Crafted(encoded=encoded).write(tmp_path / "kv")
    inspected, verified = run(directory, "inspect", "verify")
    assert (inspected.code, inspected.err) == (0, "")
    assert f"{2 * RECORDS} chunks" in inspected.out
    assert f"{2 * RECORDS} records are good" in verified.out, verified


@pytest.mark.parametrize(
    "encoded", [False, pytest.param(True, marks=pytest.mark.long)], ids=["plain", "encoded"]
)
@pytest.mark.parametrize("page", ["root", "segment", "record"])
def test_every_integer_at_its_bounds(tmp_path: Path, page: str, *, encoded: bool) -> None:
    def crafted() -> Iterator[tuple[str, Crafted]]:
        for field in FIELDS:
            bounds = sorted({bound % (1 << 8 * field.num_bytes) for bound in BOUNDS})
            for value in bounds if field.page == page else ():
                slab = Crafted(encoded=encoded)
                slab.put(field, value)
                yield f"{page}'s {field.name} = {value}", slab

    assert failures(crafted, tmp_path / "kv") == []


@pytest.mark.parametrize("label", LABELS.values(), ids=LABELS)
def test_texts_that_a_terminal_or_a_reader_would_obey(tmp_path: Path, label: bytes) -> None:
    def crafted() -> Iterator[tuple[str, Crafted]]:
        slab = Crafted(encoded=False)
        slab.label(label)
        yield "label", slab

    assert failures(crafted, tmp_path / "kv") == []


def test_a_codec_of_such_a_name(tmp_path: Path) -> None:
    def crafted() -> Iterator[tuple[str, Crafted]]:
        slab = Crafted(encoded=True)
        for at, size in slab.pages_of("segment"):
            slab.data[at + 360 : at + 376] = b"\x1b[2J".ljust(16, b"\0")
            slab.seal(at, size)
        yield "codec", slab

    assert failures(crafted, tmp_path / "kv") == []


def test_many_integers_by_chance(tmp_path: Path) -> None:
    """Numbers that fit each other where one alone would be noticed."""
    dice = random.Random(45)

    def crafted() -> Iterator[tuple[str, Crafted]]:
        for _ in range(40):
            slab, told = Crafted(encoded=dice.random() < 0.5), []
            for field in dice.sample(FIELDS, dice.randint(2, 5)):
                value = (1 << dice.randrange(64)) + dice.choice((-1, 0, 0, PAGE_BYTES))
                value %= 1 << 8 * field.num_bytes
                slab.put(field, value, everywhere=dice.random() < 0.8)
                told.append(f"{field.page}'s {field.name} = {value}")
            yield ", ".join(told), slab

    assert failures(crafted, tmp_path / "kv") == []


def test_numbers_that_are_allowed_together(tmp_path: Path) -> None:
    """Each as large as a header may say it, so that it is the file's own bytes that count."""
    by_name = {(field.page, field.name): field for field in FIELDS}

    def crafted() -> Iterator[tuple[str, Crafted]]:
        for encoded, tokens, payload in product(
            (False, True), (16, CHUNK_TOKENS_MAX), (1 << 33, SEGMENT_BYTES_MAX)
        ):
            slab = Crafted(encoded=encoded)
            slab.put(by_name["root", "segment bytes"], SEGMENT_BYTES_MAX)
            slab.put(by_name["segment", "chunk tokens"], tokens)
            for page in ("segment", "record"):
                slab.put(by_name[page, "payload bytes"], payload)
                if encoded:
                    slab.put(by_name[page, "encoded bytes"], payload // EXPANSION_MAX)
            yield f"{tokens} tokens in {payload} bytes, {encoded=}", slab

    assert failures(crafted, tmp_path / "kv") == []


@pytest.mark.parametrize("size", [1 << 40, 1 << 42])
def test_a_file_that_says_it_is_large(tmp_path: Path, size: int) -> None:
    """With segments of two pages it has more of them than can be looked at: holes are not read."""
    slab = Crafted(encoded=False)
    slab.put(Field("root", "segment bytes", 32, 8), 2 * PAGE_BYTES)
    small = slab.write(tmp_path / "kv")
    os.truncate(small / "slab", size)
    large = Crafted(encoded=False)
    large.put(Field("root", "segment bytes", 32, 8), size // 2)
    assert bad_ends(small, "inspect", "verify", "gc") == []
    large.write(tmp_path / "kv")
    os.truncate(tmp_path / "kv" / "slab", size)
    assert bad_ends(small, "inspect", "verify", "gc") == []


def test_what_lies_beside_it_is_not_followed(tmp_path: Path) -> None:
    """Links, pipes and names of directories, which are text too."""
    directory = tmp_path / "kv"
    slab = Crafted(encoded=False)
    slab.write(directory)
    slab.write(directory / "dp\x1b[2J")
    (directory / "dp0").mkdir()
    os.mkfifo(directory / "dp0" / "slab")
    assert bad_ends(directory, *COMMANDS) == []
    (directory / "slab").unlink()
    (directory / "slab").symlink_to("/dev/zero")
    assert bad_ends(directory, *COMMANDS) == []
