# SPDX-License-Identifier: Apache-2.0
"""Integrity is not authenticity: who takes a checksum without a key, and why that is enough there.

Such a checksum finds damage. Who can write the bytes can take it anew. So bytes from outside this
process's own directory need a key, or an owner that was verified.
"""

from __future__ import annotations

import ast
from pathlib import Path

from tests.test_tidy import OURS, PACKAGE

UNKEYED = {
    "checksum", "page_checksums", "copy_checksums", "header_checksum", "crc32", "adler32",
    "xxh3_128", "xxh3_128_digest", "xxhash", "digest ==", "hashlib",
    "md5", "sha1", "sha256", "sha512", "blake2b", "blake2s",
}  # fmt: skip
"""Names of functions that take one, and of modules that have others."""

WHY = {
    "io/checksum.py": "defines them",
    "io/codec.py": "compares what it has decoded, of a record that was verified, with its encoding",
    "tiers/nvme/format.py": "headers of the slab: a file in this engine's own directory",
    "tiers/nvme/recovery.py": "the same",
    "cli/slab_file.py": "the same, for `attnstore verify` and its like",
    "cli/node_file.py": "the same, of another node (tiers/nvme/node_disk.py)",
    "tiers/peers/owner.py": "of this engine's own pool",
    "tiers/peers/peers_io.py": "siblings' pools: socket, peer and files are of our user (wire.py)",
    "tiers/shared/secret.py": "where there is no secret, as a warning says; else BLAKE3 has a key",
    "io/aiofiles_device.py": "takes one where a disk's request asks for it (tiers/nvme/format.py)",
    "transfer/board.py": "figures for metrics, no KV: a forged board may show wrong ones",
    "identity/weight_files.py": "kept digests of weights, in this engine's own directory",
    "store/audited_bounds.py": "names hits by this process's key, in this engine's own directory",
    "policy/audit_draw.py": "draws by a secret seed: nothing is compared with it",
    "policy/tails.py": "an estimate's own memory: two texts of one sum cost no answer",
    "policy/sessions.py": "a session's name in this process's memory, within its own tenant",
    "identity/live_model.py": "of weights in this process's memory, against its own last look",
}
"""By file: why only this server could forge its bytes."""


def takes(path: Path) -> set[str]:
    """Unkeyed functions that a file calls or imports; and `digest ==`, where what a hash function
    without a key gives is compared with what was read."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom | ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.Call):
            found.add(ast.unparse(node.func).rpartition(".")[2])
        elif isinstance(node, ast.Compare) and "digest()" in ast.unparse(node):
            found.add("digest ==")
    return found & UNKEYED


def test_each_unkeyed_checksum_has_a_reason() -> None:
    found = {path.relative_to(PACKAGE).as_posix(): takes(path) for path in OURS}
    files = {name for name, functions in found.items() if functions}
    new = {name: sorted(found[name]) for name in sorted(files - WHY.keys())}
    assert not new, (
        "these take a checksum without a key. Who else can write what it is of? Use SharedKeys of "
        f"tiers/shared/secret.py, or give the reason above: {new}"
    )
    assert not WHY.keys() - files, "these take none any more: strike them from the list"


def test_all_of_the_network_stores_bytes_are_checked_with_a_key() -> None:
    """In tiers/shared/ nothing but secret.py takes a hash at all: the others have its keys."""
    for path in sorted((PACKAGE / "tiers" / "shared").glob("*.py")):
        if path.name != "secret.py":
            text = path.read_text(encoding="utf-8")
            assert "blake3" not in text, path
            assert not takes(path), path
