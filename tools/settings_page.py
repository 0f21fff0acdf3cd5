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

EXAMPLE = {"dram": "64GiB", "nvme.path": "/mnt/nvme/attnstore", "nvme.capacity": "2TiB"}


def pages() -> dict[Path, str]:
    return {
        ROOT / "docs" / "configuration.md": setting_texts.as_page(),
        ROOT / "configs" / "attnstore.yaml": setting_texts.as_yaml(EXAMPLE),
    }


if __name__ == "__main__":
    for path, text in pages().items():
        path.write_text(text, encoding="utf-8")
