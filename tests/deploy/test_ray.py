"""Tests the shipped manifest for KubeRay: what Kubernetes and Headrace read of it, and that its parts fit. No cluster runs it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from headrace.cli.config.load import load, load_settings
from headrace.core.errors import ConfigError
from headrace.fleet.ray.host import LAST_REQUEST_S
from headrace.fleet.supervisor import CUT_GRACE_S, ENGINE_GRACE_S, GATEWAY_GRACE_S
from headrace.gateway.surfaces.routes import ENDPOINTS
from tests.house.reader import ROOT

pytestmark = pytest.mark.pure

MANIFEST = ROOT / "deploy" / "ray" / "headrace.yaml"
VERSIONS = ("1.30", "1.34", "1.37")

Object = dict[str, Any]


@pytest.fixture(scope="module")
def made() -> dict[str, Object]:
    """By kind: one of each."""
    return {each["kind"]: each for each in yaml.safe_load_all(MANIFEST.read_text())}


def templates(made: dict[str, Object]) -> dict[str, Object]:
    cluster = made["RayCluster"]["spec"]
    [workers] = cluster["workerGroupSpecs"]
    groups = {"head": cluster["headGroupSpec"], "worker": workers, "serve": made["Deployment"]["spec"]}
    return {name: each["template"] for name, each in groups.items()}


def pods(made: dict[str, Object]) -> dict[str, Object]:
    return {name: template["spec"] for name, template in templates(made).items()}


@pytest.mark.parametrize("version", VERSIONS)
def test_kubernetes_takes_its_own_objects_and_every_pod(made: dict[str, Object], version: str) -> None:
    for kind, each in made.items():
        if kind != "RayCluster":
            kubernetes_validate.validate(each, version, strict=True)
    for spec in pods(made).values():
        kubernetes_validate.validate({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, "spec": spec}, version, strict=True)


def test_the_configuration_is_one_and_its_replicas_fit_the_nodes(made: dict[str, Object], tmp_path: Path) -> None:
    path = tmp_path / "headrace.yaml"
    path.write_text(made["ConfigMap"]["data"]["headrace.yaml"])
    config = load_settings(path, {})
    assert config.ray is not None
    [workers] = made["RayCluster"]["spec"]["workerGroupSpecs"]
    assert config.ray.bundle == {"CPU": int(workers["rayStartParams"]["num-cpus"])}
    [container] = pods(made)["worker"]["containers"]
    assert container["resources"]["requests"]["cpu"] == workers["rayStartParams"]["num-cpus"]
    assert sum(model.replicas for model in config.models) <= workers["maxReplicas"]
    assert config.ray.address == f"{made['RayCluster']['metadata']['name']}-head-svc:6379"
    [serve] = pods(made)["serve"]["containers"]
    assert f"ray start --address {config.ray.address} --num-cpus 0" in serve["args"][0]
    assert config.gateway.port == serve["ports"][0]["containerPort"]
    sleep_s = serve["lifecycle"]["preStop"]["sleep"]["seconds"]
    grace_s = sleep_s + config.drain_timeout_s + GATEWAY_GRACE_S + CUT_GRACE_S + ENGINE_GRACE_S + LAST_REQUEST_S
    assert pods(made)["serve"]["terminationGracePeriodSeconds"] > grace_s


def test_the_api_has_a_key_that_only_the_supervisor_gets(made: dict[str, Object], tmp_path: Path) -> None:
    path = tmp_path / "headrace.yaml"
    path.write_text(made["ConfigMap"]["data"]["headrace.yaml"])
    state = {"HEADRACE_STATE": str(tmp_path / "state")}
    with pytest.raises(ConfigError, match="there is no API key"):
        load(path, state)
    [serve] = pods(made)["serve"]["containers"]
    keys = {each["name"]: each["valueFrom"]["secretKeyRef"]["key"] for each in serve["env"] if each["name"].startswith("HEADRACE_")}
    assert keys == {name: name for name in ("HEADRACE_API_KEY", "HEADRACE_SITE_KEY")}
    assert "".join(f"-u {name} " for name in keys) + "ray start" in serve["args"][0], "nor does Ray's own process inherit them"
    assert pods(made)["serve"]["enableServiceLinks"] is False


def test_only_pods_of_the_deployment_reach_ray(made: dict[str, Object]) -> None:
    policy = made["NetworkPolicy"]["spec"]
    chosen = policy["podSelector"]["matchLabels"].items()
    among_them, of_all = policy["ingress"]
    assert among_them == {"from": [{"podSelector": policy["podSelector"]}]}
    ports = {name: [port["name"] for each in pod["containers"] for port in each.get("ports", ())] for name, pod in pods(made).items()}
    assert {name for name, each in ports.items() if of_all["ports"][0]["port"] in each} == {"serve"}
    assert all(chosen <= template["metadata"]["labels"].items() for template in templates(made).values())


def test_only_workers_have_room_for_replicas(made: dict[str, Object]) -> None:
    assert made["RayCluster"]["spec"]["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"
    assert made["Deployment"]["spec"]["replicas"] == 1, "two would overwrite each other's request to Ray's autoscaler"


def test_every_process_of_ray_has_the_same_token(made: dict[str, Object]) -> None:
    options = made["RayCluster"]["spec"]["authOptions"]
    [serve] = pods(made)["serve"]["containers"]
    environment = {each["name"]: each for each in serve["env"]}
    assert options["mode"] == environment["RAY_AUTH_MODE"]["value"] == "token"
    assert environment["RAY_AUTH_TOKEN"]["valueFrom"]["secretKeyRef"] == {"name": options["secretName"], "key": "auth_token"}


def test_probes_ask_what_the_gateway_answers(made: dict[str, Object]) -> None:
    [serve] = pods(made)["serve"]["containers"]
    paths = {serve[f"{name}Probe"]["httpGet"]["path"] for name in ("readiness", "liveness", "startup")}
    assert paths <= {endpoint.path for endpoint in ENDPOINTS}, json.dumps(sorted(paths))
