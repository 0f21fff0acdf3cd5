# SPDX-License-Identifier: Apache-2.0
"""One cell of benchmarks/audit_others.py, with real engines: a connector without checksums serves
a number with one bit flipped, and that is called wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.others_parts.faults import FAULTS, Lab, try_fault
from benchmarks.others_parts.judge import Outcome
from benchmarks.others_parts.systems import SYSTEMS


@pytest.mark.long
def test_a_bit_that_vllms_example_serves_is_seen(tmp_path: Path) -> None:
    cell = try_fault(Lab(tmp_path), SYSTEMS["example"], FAULTS["bit"])
    assert (cell.outcome, cell.served) == (Outcome.WRONG, cell.of), cell
