# SPDX-License-Identifier: Apache-2.0
"""Writes docs/configuration.md and configs/attnstore.yaml from attnstore_vllm/config/texts.py.

python3 tools/settings_page.py        (tests/unit/config/test_texts.py says when it is due)
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from attnstore_vllm.config import texts as setting_texts  # noqa: E402
from tools.wrap_pages import wrapped  # noqa: E402

EXAMPLE = {"dram": "64GiB", "nvme.path": "/mnt/nvme/attnstore", "nvme.capacity": "2TiB"}
EXAMPLES = {
    **EXAMPLE,
    "dram.size": "64GiB",
    "dram.codec": "lossless\n  size: 64GiB",
    "nvme.io": "uring",
    "nvme.io_deadline": "15s",
    "nvme.daily_writes": "10TiB",
    "nvme.scrub": "4MiB",
    "nvme.codec": "lossless",
    "nvme.approximate": "all\n  codec: int8",
    "chunk_tokens": "512",
    "load_deadline": "500ms",
    "step_budget": "65536",
    "eviction": "lru",
    "look_ahead": "false",
    "compute_if_sooner": "false",
    "write_buffer": "2GiB",
    "states_every": "4096",
    "ttl": "7d",
    "pinning": "{share: 0.1, tenant_share: 0.02, longest: 1h}",
    "pinning.share": "0.2",
    "pinning.tenant_share": "0.05",
    "pinning.longest": "30m",
    "truncation.enabled": "true",
    "truncation.min_tokens": "128",
    "truncation.sinks": "4",
    "truncation.share": "everyone",
    "truncation.documents": "true",
    "truncation.recompute": "off",
    "truncation.recompute_by": "first",
    "truncation.recompute_last": "64",
    "share": "salted",
    "shared": "{redis: redis://cache.example:6379}",
    "shared.redis": "rediss://attnstore@cache.example:6379/0",
    "shared.mooncake": "{master: cache.example:50051}",
    "shared.password_file": "/etc/attnstore/password",
    "shared.secret_file": "/etc/attnstore/secret",
    "shared.ca": "/etc/attnstore/ca.pem",
    "shared.cert": "/etc/attnstore/server.pem",
    "shared.key": "/etc/attnstore/server.key",
    "shared.deadline": "2s",
    "shared.bandwidth": "1GiB",
    "shared.daily_writes": "5TiB",
    "shared.prefix": "team-a/",
    "trace": "{path: /var/log/attnstore}",
    "trace.path": "/var/log/attnstore",
    "trace.sample": "0.1",
    "trace.size": "1GiB",
    "audit": "{rate: 1/10000}",
    "audit.rate": "1/200",
    "audit.tokens": "4000",
    "audit.stop_after": "1",
    "audit.keep": "off",
    "io_depth": "32",
    "peers": "off",
    "data_parallel_size": "2",
}
"""By key, as YAML, with what else of its section must be given. Of a setting that is not here the
example is its default."""


def example(setting: setting_texts.Setting) -> str:
    """The setting in a file, in its section."""
    section, _, name = setting.key.rpartition(".")
    line = f"{name}: {EXAMPLES.get(setting.key, setting.default)}"
    return f"{section}:\n  {line}" if section else line


def section(setting: setting_texts.Setting) -> str:
    """Its part of the page, under a heading of its name."""
    given = setting.default is None or setting.default == "required"
    default = "none: it must be given" if given else f"`{setting.default}`"
    return (
        f"## `{setting.key}`\n{setting.what}\n\n"
        f"- **Default**: {default}\n"
        f"- **Unit or values**: {setting.unit}\n"
        f"- **When to change it**: {setting.change}\n\n"
        f"```yaml\n{example(setting)}\n```\n"
    )


def as_page() -> str:
    """docs/configuration.md."""
    made = "<!-- python3 tools/settings_page.py writes this page. -->\n"
    parts = [made + setting_texts.PAGE_HEAD, *map(section, setting_texts.SETTINGS)]
    return wrapped("\n".join(parts))


def pages() -> dict[Path, str]:
    return {
        ROOT / "docs" / "configuration.md": as_page(),
        ROOT / "configs" / "attnstore.yaml": setting_texts.as_yaml(EXAMPLE),
    }


if __name__ == "__main__":
    for path, text in pages().items():
        path.write_text(text, encoding="utf-8")
