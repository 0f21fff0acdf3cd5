# SPDX-License-Identifier: Apache-2.0
"""The conversations that come with the benchmarks."""

from pathlib import Path
from typing import Final

SAMPLE: Final = Path(__file__).parent / "data" / "conversations.json"
"""In ShareGPT format; 4 to 7 questions each."""
