# SPDX-License-Identifier: Apache-2.0
"""The files in deploy/ agree with each other, with the settings and with the package."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from attnstore_vllm.config.settings import StoreConfig
from attnstore_vllm.config.values import parse_size
from attnstore_vllm.plugin import expand, ours_in
from attnstore_vllm.preflight import TESTED_VLLM

ROOT = Path(__file__).resolve().parents[3]
KUBERNETES = ROOT / "deploy" / "kubernetes"
SPARE_BYTES = 1 << 30
"""Room in /dev/shm for what others put there: NCCL, vLLM's own queues."""


@pytest.fixture(scope="module")
def objects() -> dict[str, dict[str, Any]]:
    """The objects of the example, by kind."""
    text = (KUBERNETES / "attnstore.yaml").read_text(encoding="utf-8")
    return {one["kind"]: one for one in yaml.safe_load_all(text)}


@pytest.fixture(scope="module")
def values() -> dict[str, Any]:
    text = (KUBERNETES / "production-stack-values.yaml").read_text(encoding="utf-8")
    (model,) = yaml.safe_load(text)["servingEngineSpec"]["modelSpec"]
    assert isinstance(model, dict)
    return model


def pyproject(key: str) -> str:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    match = re.search(rf'^{key} = "(.*)"$', text, re.MULTILINE)
    assert match is not None
    return match[1]


def the_pod(objects: dict[str, dict[str, Any]]) -> dict[str, Any]:
    pod = objects["Deployment"]["spec"]["template"]["spec"]
    assert isinstance(pod, dict)
    return pod


def test_the_sizes_of_the_example_hang_together(objects: dict[str, dict[str, Any]]) -> None:
    config = StoreConfig.parse(yaml.safe_load(objects["ConfigMap"]["data"]["attnstore.yaml"]))
    pod = the_pod(objects)
    (shm,) = (one["emptyDir"] for one in pod["volumes"] if one["name"] == "shm")
    assert shm["medium"] == "Memory"
    assert config.dram_bytes + SPARE_BYTES <= parse_size("shm", shm["sizeLimit"])
    for container in [*pod["initContainers"], *pod["containers"]]:
        assert parse_size("shm", shm["sizeLimit"]) < parse_size(
            "memory", container["resources"]["limits"]["memory"]
        )
    for kind in ("PersistentVolume", "PersistentVolumeClaim"):
        spec = objects[kind]["spec"]
        storage = (spec.get("capacity") or spec["resources"]["requests"])["storage"]
        assert config.nvme.capacity_bytes < parse_size("storage", storage), kind


def test_the_pod_of_the_example_reaches_what_its_settings_name(
    objects: dict[str, dict[str, Any]],
) -> None:
    config = StoreConfig.parse(yaml.safe_load(objects["ConfigMap"]["data"]["attnstore.yaml"]))
    pod = the_pod(objects)
    named = {volume["name"] for volume in pod["volumes"]}
    for container in [*pod["initContainers"], *pod["containers"]]:
        mounts = {one["mountPath"]: one["name"] for one in container["volumeMounts"]}
        assert set(mounts.values()) <= named
        assert str(config.nvme.path.parent) in mounts, "nvme.path's parent must be there"
        assert "/dev/shm" in mounts
        assert "IPC_LOCK" in container["securityContext"]["capabilities"]["add"]
        words = [*container["command"], *container.get("args", [])]
        (settings,) = (word for word in words if word.endswith("attnstore.yaml"))
        assert str(Path(settings).parent) in mounts
    (server,) = pod["containers"]
    (timeout,) = (int(a.partition("=")[2]) for a in server["args"] if "shutdown-timeout" in a)
    assert timeout < pod["terminationGracePeriodSeconds"]
    assert objects["Deployment"]["spec"]["strategy"] == {"type": "Recreate"}


def test_the_values_of_production_stack_are_settings_that_a_start_takes(
    values: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    checked: list[StoreConfig] = []
    monkeypatch.setattr(
        "attnstore_vllm.plugin._check", lambda config, *_, **__: checked.append(config)
    )
    vllm = values["vllmConfig"]
    arguments = ["vllm", "serve", values["modelURL"], *vllm["extraArgs"]]
    transfer = json.loads(expand(arguments)[arguments.index("--kv-transfer-config") + 1])
    assert len(list(ours_in(transfer))) == 1
    (config,) = checked
    shm = parse_size("shmSize", values["shmSize"])
    assert config.dram_bytes + SPARE_BYTES <= shm < parse_size("limitMemory", values["limitMemory"])
    mounted = [one["mountPath"] for one in values["extraVolumeMounts"]]
    assert str(config.nvme.path.parent) in mounted
    # Where the chart would leave out /dev/shm, and turn off vLLM's own prefix cache.
    assert vllm["tensorParallelSize"] >= 1
    assert vllm["enablePrefixCaching"] is True


def test_everything_is_of_one_version_of_vllm_that_was_tested(
    objects: dict[str, dict[str, Any]], values: dict[str, Any]
) -> None:
    dockerfile = (ROOT / "deploy" / "docker" / "Dockerfile").read_text(encoding="utf-8")
    match = re.search(r"^ARG VLLM_VERSION=v(.+)$", dockerfile, re.MULTILINE)
    assert match is not None
    assert match[1] == TESTED_VLLM[-1]
    pod = the_pod(objects)
    images = {one["image"] for one in [*pod["initContainers"], *pod["containers"]]}
    assert images == {f"vllm-attnstore:v{match[1]}"}
    assert values["tag"] == f"v{match[1]}"


def test_the_image_is_built_of_all_that_the_build_reads() -> None:
    """`!NAME` in .dockerignore lets NAME into the context, of which it begins with nothing."""
    lines = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    assert lines[1] == "*"
    allowed = {line[1:] for line in lines if line.startswith("!")}
    assert all((ROOT / name).exists() for name in allowed)
    built = {"setup.py", "pyproject.toml", "MANIFEST.in", "csrc", "attnstore_vllm"}
    assert allowed >= built | {pyproject("readme"), "LICENSE", "tools/native_deps.sh"}


def test_a_wheel_is_made_for_every_python_that_the_package_names() -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    classified = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', text)
    built = [f"3.{minor}" for minor in re.findall(r"cp3(\d+)-\*", pyproject("build"))]
    assert built == classified
    assert pyproject("requires-python") == f">={built[0]}"


def test_the_citation_is_of_this_version() -> None:
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert cited["version"] == pyproject("version")
    assert cited["license"] == pyproject("license")
