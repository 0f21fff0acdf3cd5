# SPDX-License-Identifier: Apache-2.0
"""The NUMA node of a disk, by a sysfs of the test's own; the warning where GPUs are on others."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import pytest

from attnstore_vllm.connector import build
from attnstore_vllm.io import disk_node
from attnstore_vllm.io.disk_node import disk_numa_node, warn_if_far

CONTROLLER = "devices/pci0000:00/0000:00:03.0"
PARTITION = f"{CONTROLLER}/nvme/nvme0/nvme0n1/nvme0n1p1"


@pytest.fixture
def sysfs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Its root: the test's own directory lies on a partition of an NVMe disk."""
    root = tmp_path / "sys"
    (root / PARTITION).mkdir(parents=True)
    (root / "dev" / "block").mkdir(parents=True)
    device = tmp_path.stat().st_dev
    link = root / "dev" / "block" / f"{os.major(device)}:{os.minor(device)}"
    link.symlink_to(root / PARTITION)
    monkeypatch.setattr(disk_node, "_BLOCK_DEVICES", link.parent)
    return root


@pytest.mark.parametrize(
    ("text", "expected"), [("1\n", 1), ("0\n", 0), ("-1\n", None), ("\n", None), (None, None)]
)
def test_the_node_of_the_controller(
    sysfs: Path, tmp_path: Path, text: str | None, expected: int | None
) -> None:
    if text is not None:
        (sysfs / CONTROLLER / "numa_node").write_text(text)
    assert disk_numa_node(tmp_path) == expected
    assert disk_numa_node(tmp_path / "kv" / "dp0") == expected  # it will be there


def test_the_nearest_that_says_a_node_counts(sysfs: Path, tmp_path: Path) -> None:
    (sysfs / CONTROLLER / "numa_node").write_text("0\n")
    (sysfs / CONTROLLER / "nvme" / "nvme0" / "numa_node").write_text("3\n")
    assert disk_numa_node(tmp_path) == 3


def test_a_device_that_sysfs_does_not_know(sysfs: Path, tmp_path: Path) -> None:
    """As of a network file system, and of a volume that is gone."""
    (sysfs / CONTROLLER / "numa_node").write_text("1\n")
    (link,) = (sysfs / "dev" / "block").iterdir()
    link.unlink()
    assert disk_numa_node(tmp_path) is None
    link.symlink_to(sysfs / CONTROLLER / "gone")
    assert disk_numa_node(tmp_path) is None


@pytest.mark.parametrize(
    ("disk", "gpus", "said"),
    [
        (1, [0, 0], "on node 0;"),
        (0, [3, 1, 3], "on node 1, 3;"),
        (1, [1, 1], None),
        (1, [0, 1], None),  # some of its GPUs are near
        (1, [], None),
        (None, [0], None),
    ],
)
def test_a_disk_far_from_its_gpus_is_said_once(
    disk: int | None,
    gpus: list[int],
    said: str | None,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(disk_node, "disk_numa_node", lambda path: disk)
    with caplog.at_level(logging.WARNING, "attnstore_vllm"):
        warn_if_far(Path("/mnt/kv/dp1"), gpus)
    if said is None:
        assert caplog.messages == []
        return
    (line,) = caplog.messages
    assert line.startswith(f"/mnt/kv/dp1 is on a disk of NUMA node {disk}, ")
    assert said in line
    assert "Name the paths of nvme.path in the order of their nodes" in line


def test_the_first_rank_of_an_engine_looks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rest of a start is not for this test."""
    seen: list[tuple[Path, list[int]]] = []

    class EnoughError(Exception):
        """The start ends here."""

    def look(path: Path, nodes: list[int]) -> None:
        seen.append((path, nodes))
        raise EnoughError

    def attributes(**of: Any) -> Any:
        return type("Some", (), of)

    part = attributes(nvme=attributes(path=tmp_path / "dp1"))
    geometry = attributes(num_ranks=4, of_a_node=lambda ranks: attributes(num_ranks=ranks))
    for name, value in (
        ("_config", lambda _: part),
        ("geometry_of", lambda *_: geometry),
        ("rank_in_engine", lambda _: 2),  # the first of the second node
        ("ranks_of_a_node", lambda _, num_ranks: num_ranks // 2),
        ("gpu_nodes", lambda rank, num_ranks: [7] * num_ranks),
        ("_outer", lambda: None),
        ("warn_of_order", lambda _: None),
        ("warn_if_far", look),
    ):
        monkeypatch.setattr(build, name, value)
    nothing: Any = None
    with pytest.raises(EnoughError):
        build.build_worker(nothing, nothing)
    assert seen == [(tmp_path / "dp1", [7, 7])]
