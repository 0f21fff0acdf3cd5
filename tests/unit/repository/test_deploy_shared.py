# SPDX-License-Identifier: Apache-2.0
"""The examples in deploy/ with a tier that servers share: the store that is named is started."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from attnstore_vllm.config.settings import StoreConfig
from attnstore_vllm.config.shared import SharedConfig
from attnstore_vllm.config.values import parse_size
from tools import dashboard, docs_site

ROOT = Path(__file__).resolve().parents[3]
DOCKER, KUBERNETES = ROOT / "deploy" / "docker", ROOT / "deploy" / "kubernetes"
SPARE_BYTES = 1 << 30
"""Room in /dev/shm for what others put there: NCCL, vLLM's own queues."""
ACL = "user kv on >%s resetchannels ~as1/* +get +set +exists"
"""What our client needs, and no more: tests/shared runs as such a user."""
PIN = "mooncake-transfer-engine-non-cuda==0.3.13.post1"


def in_yaml(path: Path) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(path.read_text(encoding="utf-8")))


def settings(text: str) -> tuple[StoreConfig, SharedConfig]:
    config = StoreConfig.parse(yaml.safe_load(text))
    assert config.shared is not None
    return config, config.shared


def compose_file(name: str) -> tuple[dict[str, Any], StoreConfig, SharedConfig]:
    (compose,) = in_yaml(DOCKER / name)
    return compose, *settings(compose["configs"]["attnstore"]["content"])


def cluster(store: str) -> dict[tuple[str, str], dict[str, Any]]:
    """All objects of the example with this store, by kind and name."""
    files = [KUBERNETES / f"shared-{part}.yaml" for part in (store, "servers")]
    made = {(one["kind"], one["metadata"]["name"]): one for path in files for one in in_yaml(path)}
    assert len(made) == sum(len(in_yaml(path)) for path in files)
    return made


def pod_of(made: dict[tuple[str, str], dict[str, Any]], kind: str, name: str) -> dict[str, Any]:
    template = made[kind, name]["spec"]["template"]
    assert isinstance(template, dict)
    return template


def reaches(policy: dict[str, Any], pod: dict[str, Any]) -> bool:
    """Whether pods with these labels are what the policy is for."""
    selector, labels = policy["spec"]["podSelector"], pod["metadata"]["labels"]
    return all(labels.get(k) == v for k, v in selector.get("matchLabels", {}).items()) and all(
        labels.get(one["key"]) in one["values"] for one in selector.get("matchExpressions", ())
    )


@pytest.mark.parametrize("name", ["compose.yaml", "compose-redis.yaml"])
def test_a_compose_file_shares_by_the_store_that_it_starts(name: str) -> None:
    compose, config, shared = compose_file(name)
    services, options = compose["services"], dict(shared.options)
    for server in ("one", "two"):
        assert parse_size("shm", services[server]["shm_size"]) >= config.dram_bytes + SPARE_BYTES
        assert services[server]["networks"] == ["default", "store"]
    targets = yaml.safe_load(compose["configs"]["prometheus"]["content"])["scrape_configs"]
    assert targets[0]["static_configs"] == [{"targets": ["one:8000", "two:8000"]}]
    stores = set(services) - {"one", "two", "prometheus", "grafana"}
    # Nobody else is in their network, and no port of theirs is published.
    assert compose["networks"]["store"] == {"internal": True}
    assert all(services[one]["networks"] == ["store"] for one in stores)
    assert not any("ports" in services[one] for one in stores)
    if shared.kind == "mooncake":
        host, port = options["master"].split(":")
        assert f"--rpc_port={port}" in services[host]["command"]
        assert options["master"] in services["segment"]["command"]
    else:
        assert stores == {"cache"} and options["url"] == "redis://kv@cache:6379"
        assert ACL in services["cache"]["command"][-1].replace("$$", "$")
        assert str(shared.password_file) == "/run/secrets/redis"
        assert services["cache"]["secrets"] == ["redis"], "what it keeps it cannot seal"
        for one in ("one", "two"):
            assert {"source": "redis", "mode": 0o400} in services[one]["secrets"]
    assert str(shared.secret_file) == "/run/secrets/attnstore"
    assert all("attnstore" in services[one]["secrets"] for one in ("one", "two"))
    assert compose["secrets"]["attnstore"] == {"file": "/etc/attnstore-secret"}
    assert not any("attnstore" in services[one].get("secrets", ()) for one in stores)


PROVISIONING = {
    "datasources": {
        "name", "type", "uid", "access", "url", "isDefault", "editable", "orgId", "jsonData",
        "secureJsonData", "basicAuth", "basicAuthUser", "withCredentials", "version", "database",
        "user",
    },
    "providers": {
        "name", "type", "orgId", "folder", "folderUid", "disableDeletion", "allowUiUpdates",
        "updateIntervalSeconds", "options",
    },
}  # fmt: skip
"""The fields that Grafana 11 reads of these lists: it passes over others in silence."""


@pytest.mark.parametrize("name", ["compose.yaml", "compose-redis.yaml"])
def test_grafana_of_a_compose_file_has_the_dashboard_loaded(name: str) -> None:
    services = compose_file(name)[0]["services"]
    grafana = services["grafana"]
    assert re.fullmatch(r"grafana/grafana:\d+\.\d+\.\d+", grafana["image"]), "by its version"
    assert grafana["ports"] == ["127.0.0.1:3000:3000"], "it asks for no password"
    assert grafana["environment"]["GF_AUTH_BASIC_ENABLED"] == "false", "admin has a known one"
    inside: dict[str, Path] = {}
    for volume in grafana["volumes"]:
        here, there, mode = volume.split(":")
        inside[there] = (DOCKER / here).resolve(strict=True)
        assert mode == "ro"
    made: dict[str, dict[str, Any]] = {}
    for kind, key in (("datasources", "datasources"), ("dashboards", "providers")):
        (given,) = in_yaml(inside[f"/etc/grafana/provisioning/{kind}/attnstore.yml"])
        assert given.keys() == {"apiVersion", key} and given["apiVersion"] == 1
        (made[kind],) = given[key]
        assert made[kind].keys() <= PROVISIONING[key]
    source, provider = made["datasources"], made["dashboards"]
    host, port = source["url"].removeprefix("http://").split(":")
    assert host in services and services[host]["ports"] == [f"127.0.0.1:9090:{port}"]
    assert source["type"] == dashboard.SOURCE["type"] and source["isDefault"] is True
    folder = Path(provider["options"]["path"])
    assert provider["type"] == "file" and inside[f"{folder}/attnstore.json"] == dashboard.FILE
    home = grafana["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert home in inside


@pytest.mark.parametrize("name", ["compose.yaml", "compose-redis.yaml"])
def test_no_service_has_the_port_of_the_docs(name: str) -> None:
    """`make docs-serve` could not serve what the alerts link to."""
    services = compose_file(name)[0]["services"].values()
    open_at = [port.rpartition(":")[0] for each in services for port in each.get("ports", [])]
    assert len(set(open_at)) == len(open_at) == 4 and docs_site.ADDRESS not in open_at


@pytest.mark.parametrize("name", ["compose.yaml", "compose-redis.yaml"])
def test_prometheus_of_a_compose_file_knows_the_address_of_the_docs(name: str) -> None:
    text = compose_file(name)[0]["configs"]["prometheus"]["content"]
    (label,) = re.findall(r'attnstore_docs: "\$\{ATTNSTORE_DOCS:-(.*)\}"', text)
    assert label == f"http://{docs_site.ADDRESS}"


def test_one_version_of_the_client_of_mooncake_is_everywhere() -> None:
    names = ("Dockerfile", "mooncake.Dockerfile")
    for path in [ROOT / "pyproject.toml", *(DOCKER / name for name in names)]:
        assert PIN in path.read_text("utf-8"), path.name
    text = (DOCKER / "compose.yaml").read_text("utf-8")
    assert "--build-arg SHARED=mooncake" in text, "else its servers do not start"


@pytest.mark.parametrize("store", ["mooncake", "redis"])
def test_servers_of_a_cluster_share_by_the_store_that_is_there(store: str) -> None:
    made = cluster(store)
    config, shared = settings(made["ConfigMap", "attnstore-shared"]["data"]["attnstore.yaml"])
    where = dict(shared.options)["master" if store == "mooncake" else "url"]
    host, _, port = where.rpartition("@")[2].rpartition(":")
    service = made["Service", host]
    selected = service["spec"]["selector"]["app.kubernetes.io/name"]
    assert service["spec"]["ports"][0]["port"] == int(port)
    template = pod_of(made, "Deployment", selected)
    assert template["metadata"]["labels"]["app.kubernetes.io/name"] == selected
    (container,) = template["spec"]["containers"]
    assert container["ports"][0] == {"name": "rpc", "containerPort": int(port)}
    assert port in " ".join(container["command"])
    pod = pod_of(made, "StatefulSet", "vllm-attnstore-shared")["spec"]
    named = {volume["name"] for volume in pod["volumes"]} | {"nvme"}
    (shm,) = (one["emptyDir"] for one in pod["volumes"] if one["name"] == "shm")
    assert config.dram_bytes + SPARE_BYTES <= parse_size("shm", shm["sizeLimit"])
    for one in [*pod["initContainers"], *pod["containers"]]:
        mounts = {mount["mountPath"]: mount["name"] for mount in one["volumeMounts"]}
        assert set(mounts.values()) <= named
        assert str(config.nvme.path.parent) in mounts
        assert shared.secret_file is not None
        for path in (shared.secret_file, shared.password_file, dict(shared.options).get("ca")):
            assert path is None or str(Path(path).parent) in mounts
    (secret,) = (one["secret"] for one in pod["volumes"] if one["name"] == "secret")
    assert secret == {"secretName": "attnstore-secret", "defaultMode": 0o400}
    (client,) = (one["secret"] for one in pod["volumes"] if one["name"] == "redis")
    assert client["defaultMode"] == 0o400
    jobs = yaml.safe_load(made["ConfigMap", "attnstore-prometheus"]["data"]["prometheus.yml"])
    (name,) = jobs["scrape_configs"][0]["dns_sd_configs"][0]["names"]
    assert made["Service", name]["spec"]["clusterIP"] == "None"


@pytest.mark.parametrize("store", ["mooncake", "redis"])
def test_only_members_reach_what_has_no_password(store: str) -> None:
    made = cluster(store)
    policies = [one for (kind, _), one in made.items() if kind == "NetworkPolicy"]
    members = {
        name: pod_of(made, kind, name)
        for kind, name in made
        if kind in ("Deployment", "StatefulSet") and name != "attnstore-prometheus"
    }
    for name, pod in members.items():
        rules = [rule for p in policies if reaches(p, pod) for rule in p["spec"]["ingress"]]
        if store == "mooncake":
            assert pod["metadata"]["labels"]["attnstore-shared"] == "member"
        elif name == "vllm-attnstore-shared":
            assert not rules, "nothing of it listens but vLLM"
            continue
        open_ports = [rule["ports"] for rule in rules if "from" not in rule]
        http = [[{"protocol": "TCP", "port": 8000}]]
        assert open_ports == (http if name == "vllm-attnstore-shared" else [])
        member = {"podSelector": {"matchLabels": {"attnstore-shared": "member"}}}
        assert [member] in [rule.get("from") for rule in rules], name


def test_redis_of_a_cluster_has_tls_and_a_user_with_three_commands() -> None:
    pod = pod_of(cluster("redis"), "Deployment", "attnstore-redis")
    (container,) = pod["spec"]["containers"]
    command = container["command"][-1]
    assert ACL in command and "user default off" in command
    assert "--port 0 --tls-port 6379" in command
    assert parse_size("limit", container["resources"]["limits"]["memory"]) >= 1.25 * (64 << 30)
