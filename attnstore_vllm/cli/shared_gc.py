# SPDX-License-Identifier: Apache-2.0
"""`attnstore gc --shared FILE`: delete a tenant's KV in the tier that servers share.

FILE has the servers' settings, or the same with a user of the store's that may delete. Without
--yes it says what would go, if the store can list it.
"""

from __future__ import annotations

import signal
from pathlib import Path

from attnstore_vllm.cli.settings_file import read_settings
from attnstore_vllm.config.values import format_size
from attnstore_vllm.errors import ConfigError
from attnstore_vllm.tiers.shared.deletion import Deletion, delete_tenant


def delete(file: Path, salt: str, *, is_dry: bool) -> Deletion:
    """Raises: ConfigError; DeviceError of the store."""
    shared = read_settings(file).config().shared
    if shared is None:
        raise ConfigError(
            f"{file} has no setting `shared`, which names the store that servers share; give DIR "
            "instead to delete in a server's own directory"
        )
    # A client in native code does not end for Python's handler.
    before = signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        return delete_tenant(shared, salt, is_dry=is_dry)
    finally:
        signal.signal(signal.SIGINT, before)


def show(found: Deletion) -> None:
    if found.records is None:
        print(f"{found.where} cannot list what it has; nothing was changed. --yes deletes it")
        return
    if not (found.records or found.left):
        print(f"{found.where} has nothing of this cache_salt; nothing was changed")
        return
    size = "" if found.bytes is None else f" ({format_size(found.bytes)})"
    what = f"{found.records} records{size} in {found.where}"
    if not found.is_done:
        print(f"{what} would go; nothing was changed. --yes deletes them")
        return
    print(f"{what} are gone")
    if found.left:
        print(
            f"{found.left} have been written since: a server still has KV of this tenant. "
            "Delete it there first (attnstore gc DIR), and then here again"
        )
