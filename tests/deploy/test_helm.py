"""Tests the shipped chart: what Kubernetes, Headrace, Prometheus and KEDA read of what Helm makes of it. No cluster runs it here.

Kubernetes' schemas check its own objects, strictly. Those of other projects are held here to the few fields that they are known by.
"""

from __future__ import annotations

import re
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

import helm_python
import jsonschema
import kubernetes_validate
import pytest
import yaml
from helm_kit import CHART, EXAMPLES, NAMESPACE, RELEASE, Object, example, merged, pod_of, rendered, started_with
from prometheus_client.parser import text_string_to_metric_families
from typer.testing import CliRunner

from headrace.bundled import bundled_path
from headrace.cli.config.faults import unread_variables
from headrace.cli.config.load import load_settings
from headrace.cli.main import app
from headrace.core.load import EngineCounters, LoadSnapshot
from headrace.core.parallelism import MOST
from headrace.fleet.config import FleetConfig
from headrace.fleet.kubernetes.lease import LEASES
from headrace.fleet.kubernetes.service import KubernetesService
from headrace.fleet.kubernetes.watch import ENDPOINT_SLICES
from headrace.fleet.supervisor import CUT_GRACE_S, ENGINE_GRACE_S, GATEWAY_GRACE_S
from headrace.gateway.surfaces.routes import ENDPOINTS
from headrace.observe.metrics import Metrics, ReplicaReading
from headrace.observe.tenant_metrics import NO_TENANT
from tests.house.reader import ROOT

pytestmark = pytest.mark.pure

VERSIONS = ("1.30", "1.34", "1.37")
"""The oldest that the chart takes, one between, and the newest with schemas."""
CASES = ("", *sorted(path.stem for path in EXAMPLES.glob("*.yaml")))
FOREIGN = {
    "ScaledObject": "keda.sh/v1alpha1",
    "ServiceMonitor": "monitoring.coreos.com/v1",
    "InferencePool": "inference.networking.k8s.io/v1",
    "LeaderWorkerSet": "leaderworkerset.x-k8s.io/v1",
}
STAGED = "LeaderWorkerSet engines"


@cache
def made_of(name: str) -> dict[str, Object]:
    return rendered(example(name))


def variables(pod: Object) -> dict[str, str]:
    return {each["name"]: each["value"] for each in pod["containers"][0]["env"]}


# What Kubernetes takes


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", CASES)
def test_kubernetes_takes_every_object(name: str, version: str) -> None:
    for kind, made in made_of(name).items():
        if (foreign := FOREIGN.get(kind.split()[0])) is not None:
            assert made["apiVersion"] == foreign
        else:
            kubernetes_validate.validate(made, version, strict=True)


def test_the_schemas_are_strict() -> None:
    service = made_of("")["Service"]
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate({**service, "spec": {**service["spec"], "ports_": []}}, VERSIONS[0], strict=True)


def test_the_examples_have_every_kind_and_helm_finds_no_fault() -> None:
    kinds = {key.split()[0] for key in chain.from_iterable(map(made_of, CASES))}
    files = {path.stem for path in (CHART / "templates").glob("[a-z]*.yaml")}
    assert files == {kind.lower() for kind in kinds}
    for name in CASES:
        said = helm_python.lint(CHART, example(name), strict=True)
        assert not said["errors"]
        assert [each["error"] for each in said["messages"]] == ["icon is recommended"]


ENGINES: Object = {"enabled": True, "tls": {"gateway": "g", "engine": "e"}}


def far(**fields: Any) -> Object:
    remote = {"model": "headrace-tiny", "kubernetes": {"service": "demo-engines"}, "tls_dir": "/run/secrets/headrace-engines"}
    return {"name": "far", "remote": {**remote, **fields}}


def scaled(**fields: str) -> Object:
    kubernetes = {"service": "demo-engines", "workload": "statefulsets/demo-engines", **fields}
    return {**far(kubernetes=kubernetes), "autoscale": {"max": 3}}


REFUSED: dict[str, tuple[Object, str]] = {
    "an unknown value": ({"replicas": 2}, "replicas"),
    "an unknown value below": ({"autoscaling": {"max": 2}}, "max"),
    "no pod": ({"autoscaling": {"kind": "keda", "minReplicas": 0}}, "minReplicas"),
    "a tag that moves": ({"image": {"tag": "latest"}}, "tag"),
    "an address that no probe reaches": ({"config": {"gateway": {"host": "127.0.0.1"}}}, "host"),
    "two folders for the cache": ({"cache": {"claim": "a", "hostPath": "/b"}}, "cache"),
    "a state folder of two pods": ({"state": {"claim": "a"}, "replicaCount": 2}, "state.claim"),
    "a state folder of pods that come and go": ({"state": {"claim": "a"}, "autoscaling": {"kind": "hpa"}}, "state.claim"),
    "a port of https": ({"config": {"gateway": {"tls": {"certificate": "a", "key": "b"}}}}, "config.gateway.tls"),
    "metrics without a reader": ({"config": {"gateway": {"open_metrics": "none"}}, "serviceMonitor": {"enabled": True}}, "open_metrics"),
    "engines without certificates": ({"engines": {"enabled": True}}, "engines.tls"),
    "ranks of which a pod would have the first alone": ({"engines": {**ENGINES, "args": ["-tp", "2"]}}, "engines.args: -tp"),
    "ranks within the pods of stages": ({"engines": {**ENGINES, "stages": 2, "args": ["--tensor-parallel-size=2"]}}, "a pod has one"),
    "stages of which no pod knows": (
        {"engines": {**ENGINES, "args": ["--pipeline-parallel-size=2"]}},
        "--pipeline-parallel-size=2 is set by engines.stages",
    ),
    "a rank for all pods": ({"engines": {**ENGINES, "stages": 2, "args": ["--rank=1"]}}, "engines.args: --rank=1 is set by the chart"),
    "no stage": ({"engines": {"stages": 0}}, "stages"),
    "more stages than a replica has": ({"engines": {"stages": MOST + 1}}, "stages"),
    "groups that are scaled as pods": (
        {"engines": {**ENGINES, "stages": 2}, "config": {"models": [scaled()]}},
        "autoscale is allowed for leaderworkersets/demo-engines",
    ),
    "groups whose leaders are scaled by hand": (
        {
            "engines": {**ENGINES, "stages": 2},
            "config": {"models": [far(kubernetes={"service": "demo-engines", "workload": "statefulsets/demo-engines"})]},
        },
        "is statefulsets/demo-engines, and the pods of demo-engines are those of leaderworkersets/demo-engines",
    ),
    "another address of engines": ({"engines": {**ENGINES, "args": ["--listen=0.0.0.0:1"]}}, "engines.args: --listen=0.0.0.0:1 is set"),
    "a file in the place of flags": ({"engines": {**ENGINES, "args": ["--config=/f"]}}, "engines.args: --config=/f is set by the chart"),
    "engines that do not reach their model": (
        {"engines": {**ENGINES, "model": "s3://b/llama:1"}, "config": {"models": [far()]}},
        "networkPolicy.egress: is empty, and engines read s3://b/llama:1.",
    ),
    "engines that do not reach an adapter": (
        {"engines": {**ENGINES, "args": ["--lora-modules", "a=gs://b/a:2"]}, "config": {"models": [far()]}},
        "and engines read gs://b/a:2.",
    ),
    "engines that no model names": ({"engines": ENGINES}, "config.models: no model has remote.kubernetes.service demo-engines"),
    "a model that has its certificates elsewhere": ({"engines": ENGINES, "config": {"models": [far(tls_dir="/tls")]}}, "remote.tls_dir"),
    "a scaler of gateways that share their engines": (
        {"engines": ENGINES, "config": {"models": [far()]}, "autoscaling": {"kind": "keda"}},
        "autoscaling.kind",
    ),
    "a workload that the Role does not name": (
        {"engines": ENGINES, "config": {"models": [scaled(workload="deployments/demo-engines")]}},
        "config.models[0].remote.kubernetes.workload: autoscale is allowed for statefulsets/demo-engines",
    ),
    "a load without a workload": (
        {"engines": ENGINES, "config": {"models": [scaled(workload="")]}},
        "models[0].remote.kubernetes.workload",
    ),
    "pods of another chart": ({"config": {"models": [scaled()]}}, "config.models[0].remote.kubernetes.workload"),
    "a namespace without a Role": (
        {"engines": ENGINES, "config": {"models": [scaled(namespace="other")]}},
        "config.models[0].remote.kubernetes.namespace: is other",
    ),
    "two loads for one workload": (
        {"engines": ENGINES, "config": {"models": [scaled(), {**scaled(), "name": "near"}]}},
        "config.models[1].autoscale: statefulsets/demo-engines is scaled by the load of config.models[0] already",
    ),
    "a pool without a picker": ({"inferencePool": {"enabled": True}}, "picker.name"),
    "a pool of pods with two engines": (
        {
            "config": {"models": [{"replicas": 2, "engine": {"model": "headrace-tiny"}}]},
            "inferencePool": {"enabled": True, "picker": {"name": "a"}},
        },
        "one engine's gauges",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_work_is_refused_by_name(name: str) -> None:
    values, word = REFUSED[name]
    with pytest.raises(helm_python.HelmError, match=re.escape(word)):
        rendered(values)


@pytest.mark.parametrize("stages", [1, 2])
def test_a_release_has_a_name_with_which_its_pods_can_be_made(stages: int) -> None:
    """Kubernetes takes the objects of a longer one, and then makes no pod: no value of a label has more than 63 characters."""
    longest = "a" * (63 - len("-engines") - len("-0123456789") - (len("-255") if stages > 1 else 0))
    for release in (longest, longest + "a"):
        model = far(kubernetes={"service": f"{release}-engines"})
        values = {"engines": {**ENGINES, "stages": stages}, "config": {"models": [model]}}
        if release == longest:
            assert rendered(values, release)["Service engines"]["metadata"]["name"] == f"{release}-engines"
        else:
            with pytest.raises(helm_python.HelmError, match=f"{release} has {len(release)} characters"):
                rendered(values, release)
    assert rendered({}, "a" * 53), "without engines Helm's own limit holds"


TINY: Object = {"engine": {"model": "headrace-tiny"}}
OUTSIDE: dict[str, Object] = {
    "models[0]": {"models": [{"engine": {"model": "s3://b/m:1"}}]},
    "models[1]": {"models": [TINY, {**TINY, "adapters": {"pirate": "gs://b/pirate:2"}}]},
    "models[2]": {"models": [TINY, TINY, {"engine": {"model": "oci://ghcr.io/team/llama:2"}}]},
    "models[0].upstreams[1].url": {
        "models": [{**TINY, "upstreams": [{"url": "http://127.0.0.1:1/v1"}, {"url": "https://other.example/v1"}]}]
    },
    "models[0].remote.replicas[0].address": {
        "models": [{"remote": {"model": "headrace-tiny", "replicas": [{"name": "a", "address": "10.0.0.5:9000"}]}}]
    },
    "gateway.store.url": {"gateway": {"store": {"url": "rediss://redis.data.svc:6379/0"}}},
    "gateway.otlp_traces_endpoint": {"gateway": {"otlp_traces_endpoint": "http://collector.monitoring.svc:4318"}},
    "usage.kafka.brokers": {"usage": {"kafka": {"brokers": ["127.0.0.1:9092", "kafka.data.svc:9092"]}}},
    "usage.clickhouse.url": {"usage": {"clickhouse": {"url": "https://headrace@localhost.example:8443"}}},
}


@pytest.mark.parametrize("key", OUTSIDE)
def test_a_host_outside_the_pod_is_refused_by_its_key_while_no_rule_leads_out(key: str) -> None:
    with pytest.raises(helm_python.HelmError, match=re.escape(f"networkPolicy.egress: is empty, and config has other hosts in {key}.")):
        rendered({"config": OUTSIDE[key]})
    rendered({"config": OUTSIDE[key], "networkPolicy": {"enabled": False}})
    rendered({"config": OUTSIDE[key], "networkPolicy": {"egress": [{"ports": [{"port": 443}]}]}})


def test_hosts_inside_the_pod_need_no_rule() -> None:
    inside: Object = {
        "models": [
            {**TINY, "upstreams": [{"url": "http://127.0.0.1:9000/v1"}, {"url": "http://localhost/v1"}]},
            {"remote": {"model": "headrace-tiny", "replicas": [{"name": "a", "address": "unix:/run/headrace/a"}]}},
        ],
        "gateway": {"store": {"url": "unix:///run/headrace/redis"}, "otlp_traces_endpoint": "http://[::1]:4318"},
        "usage": {"kafka": {"brokers": ["localhost:9092"]}, "clickhouse": {"url": "http://headrace@127.0.0.1:8123"}},
    }
    rendered({"config": inside})


# What Headrace reads


@pytest.mark.parametrize("name", CASES)
def test_headrace_reads_the_configuration_as_it_was_given(name: str, tmp_path: Path) -> None:
    """Folders of the claim are stood for by a bundled model's."""
    objects = made_of(name)
    text = objects["ConfigMap"]["data"]["headrace.yaml"]
    given = merged(example(name))["config"]
    assert yaml.safe_load(text) == given
    for model in given["models"]:
        if (folder := (model.get("engine") or model["remote"])["model"]).startswith("/models/"):
            (tmp_path / "models").mkdir(exist_ok=True)
            (tmp_path / folder[1:]).symlink_to(bundled_path("headrace-tiny") or "")
    environment = variables(pod_of(objects)) | {"HEADRACE_SITE_KEY": "00" * 16}
    config = load_settings(written(tmp_path, text.replace("/models/", f"{tmp_path}/models/")), environment)
    assert not list(unread_variables(environment))
    assert config.state == "/var/lib/headrace/state"
    [port] = pod_of(objects)["containers"][0]["ports"]
    assert port["containerPort"] == config.gateway.port


def test_large_numbers_and_odd_words_stay_what_they_are(tmp_path: Path) -> None:
    limits = {"gateway": {"limits": {"max_body_bytes": 12345678}}, "start_timeout_s": 12345}
    given = limits | {"models": [{"name": "no", "engine": {"model": "headrace-tiny"}}], "prices": {"no": {"input": 0.000001}}}
    text = rendered({"config": given})["ConfigMap"]["data"]["headrace.yaml"]
    config = load_settings(written(tmp_path, text), {})
    assert (config.gateway.limits.max_body_bytes, config.start_timeout_s) == (12345678, 12345)
    assert config.prices["no"].input == 0.000001


def written(folder: Path, text: str) -> Path:
    file = folder / "headrace.yaml"
    file.write_text(text, encoding="utf-8")
    return file


def test_a_change_of_the_configuration_replaces_the_pods() -> None:
    digests = {
        rendered({"config": {"drain_timeout_s": seconds}})["Deployment"]["spec"]["template"]["metadata"]["annotations"]["checksum/config"]
        for seconds in (30, 31)
    }
    assert len(digests) == 2


# Probes, start and stop


@pytest.mark.parametrize("name", CASES)
def test_probes_ask_paths_that_need_no_key_and_leave_time(name: str, tmp_path: Path) -> None:
    pod = pod_of(made_of(name))
    [container] = pod["containers"]
    probes = {key: container[f"{key}Probe"] for key in ("startup", "readiness", "liveness")}
    paths = {key: probe["httpGet"]["path"] for key, probe in probes.items()}
    assert paths == {"startup": "/live", "readiness": "/ready", "liveness": "/live"}
    assert set(paths.values()) <= {endpoint.path for endpoint in ENDPOINTS if endpoint.is_probe and endpoint.method == "GET"}
    assert {probe["httpGet"]["port"] for probe in probes.values()} == {container["ports"][0]["name"]}
    config = merged(example(name))["config"]
    start_s = config.get("start_timeout_s", FleetConfig(models=()).start_timeout_s)
    assert probes["startup"]["periodSeconds"] * probes["startup"]["failureThreshold"] >= start_s
    assert made_of(name)["Deployment"]["spec"]["progressDeadlineSeconds"] > 2 * start_s
    longest_s = container["lifecycle"]["preStop"]["sleep"]["seconds"] + config["drain_timeout_s"]
    assert pod["terminationGracePeriodSeconds"] > longest_s + GATEWAY_GRACE_S + CUT_GRACE_S + ENGINE_GRACE_S


@pytest.mark.parametrize(
    ("name", "kind", "template"), [("engines", "StatefulSet engines", "template"), ("stages", STAGED, "leaderTemplate")]
)
def test_an_engine_in_a_pod_of_its_own_has_time_to_pull_and_again_to_load(name: str, kind: str, template: str) -> None:
    """There is no supervisor beside it that pulls before the time of its start begins."""
    start_s = merged(example(name))["config"].get("start_timeout_s", FleetConfig(models=()).start_timeout_s)
    probe = pod_of(made_of(name), kind, template)["containers"][0]["startupProbe"]
    assert probe["periodSeconds"] * probe["failureThreshold"] >= 2 * start_s


def test_a_start_without_a_limit_has_a_day() -> None:
    probe = pod_of(rendered({"config": {"start_timeout_s": 0}}))["containers"][0]["startupProbe"]
    assert probe["periodSeconds"] * probe["failureThreshold"] == 86400


# What the pod may do


@pytest.mark.parametrize("name", CASES)
def test_the_pod_has_no_rights_and_writes_to_its_volumes_alone(name: str) -> None:
    objects = made_of(name)
    pod = pod_of(objects)
    [container] = pod["containers"]
    assert "initContainers" not in pod
    assert not {"hostNetwork", "hostPID", "hostIPC"} & set(pod)
    assert objects["ServiceAccount"]["automountServiceAccountToken"] is False
    assert pod["automountServiceAccountToken"] is ("engines" in example(name))
    assert pod["enableServiceLinks"] is False
    assert pod["securityContext"] == {
        "runAsNonRoot": True,
        "runAsUser": 10001,
        "runAsGroup": 10001,
        "fsGroup": 10001,
        "fsGroupChangePolicy": "OnRootMismatch",
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert sorted(volumes) == sorted(mount["name"] for mount in container["volumeMounts"])
    writable = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"] if not mount.get("readOnly")}
    assert writable == {"state": "/var/lib/headrace", "cache": "/var/cache/headrace", "run": "/run/headrace", "tmp": "/tmp"}
    assert volumes["run"]["emptyDir"]["medium"] == "Memory", "keys are in its files"
    assert all(path.startswith(tuple(writable.values())) for path in variables(pod).values())


def test_secrets_are_named_and_their_files_closed_to_other_users() -> None:
    pod = pod_of(made_of("gpu"))
    assert pod["containers"][0]["envFrom"] == [{"secretRef": {"name": "headrace"}}]
    [secret] = [volume["secret"] for volume in pod["volumes"] if "secret" in volume]
    assert secret == {"secretName": "headrace-files", "defaultMode": 0o440}
    assert "Secret" not in made_of("gpu")


def test_the_network_is_closed_but_for_the_api_names_and_what_is_listed() -> None:
    plain, listed = (made_of(name)["NetworkPolicy"]["spec"] for name in ("", "gpu"))
    assert plain["policyTypes"] == ["Ingress", "Egress"]
    assert plain["ingress"] == [{"ports": [{"protocol": "TCP", "port": "http"}]}]
    assert plain["egress"] == [{"ports": [{"protocol": protocol, "port": 53} for protocol in ("UDP", "TCP")]}]
    values = example("gpu")["networkPolicy"]
    assert listed["ingress"][0]["from"] == values["from"]
    assert listed["egress"] == plain["egress"] + values["egress"]


# Scaling and metrics


@cache
def exported() -> set[str]:
    """Names of the samples that /metrics of a pod shows without a key."""
    load = LoadSnapshot(
        num_running=1, num_waiting=1, kv_blocks_free=1, kv_blocks_cached=1, kv_blocks_used=1, kv_blocks_total=3, counters=EngineCounters()
    )
    metrics = Metrics()
    metrics.read_engines(lambda: [ReplicaReading("m", "m-0", True, load, block_size=16)])
    page = metrics.page(tenants=NO_TENANT)[0].decode()
    return {sample.name for family in text_string_to_metric_families(page) for sample in family.samples}


def test_keda_asks_for_one_number_and_a_lost_prometheus_takes_no_pod_away() -> None:
    spec = made_of("gpu")["ScaledObject"]["spec"]
    values = merged(example("gpu"))["autoscaling"]
    [trigger] = spec["triggers"]
    metadata: dict[str, Any] = trigger["metadata"]
    assert trigger["type"] == "prometheus"
    assert all(isinstance(value, str) for value in metadata.values()), "KEDA's metadata is text"
    assert metadata["ignoreNullValues"] == "false"
    assert metadata["threshold"] == str(values["requestsPerPod"])
    series = rf'\{{namespace="{NAMESPACE}",service="{RELEASE}"\}}'
    asked = re.fullmatch(rf"sum\((\w+){series}\) \+ sum\((\w+){series}\)", metadata["query"])
    assert asked is not None, "two sums over everything, so that there is one element or none"
    assert set(asked.groups()) <= exported()
    assert spec["fallback"] == {"failureThreshold": 3, "replicas": values["minReplicas"], "behavior": "currentReplicasIfHigher"}
    assert spec["scaleTargetRef"] == {"name": made_of("gpu")["Deployment"]["metadata"]["name"]}
    assert (spec["minReplicaCount"], spec["maxReplicaCount"]) == (2, 8)
    assert "replicas" not in made_of("gpu")["Deployment"]["spec"], "an upgrade does not undo what was scaled"


def test_the_hpa_reads_the_metric_of_the_adapters_rule() -> None:
    [rule] = yaml.safe_load((EXAMPLES.parent / "prometheus-adapter.yaml").read_text(encoding="utf-8"))["rules"]["custom"]
    spec = made_of("picker")["HorizontalPodAutoscaler"]["spec"]
    [metric] = spec["metrics"]
    assert metric["pods"]["metric"]["name"] == rule["name"]["as"]
    assert set(re.findall(r"headrace_\w+", rule["metricsQuery"] + rule["seriesQuery"])) <= exported()
    assert spec["scaleTargetRef"]["name"] == made_of("picker")["Deployment"]["metadata"]["name"]
    assert spec["behavior"] == made_of("gpu")["ScaledObject"]["spec"]["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]


def test_services_budgets_monitors_and_pools_select_the_pods() -> None:
    for name in CASES:
        objects = made_of(name)
        labels = objects["Deployment"]["spec"]["template"]["metadata"]["labels"].items()
        selectors = [objects["Service"]["spec"]["selector"]]
        selectors += [objects[kind]["spec"]["selector"]["matchLabels"] for kind in ("Deployment", "PodDisruptionBudget")]
        selectors.append(objects["NetworkPolicy"]["spec"]["podSelector"]["matchLabels"])
        if pool := objects.get("InferencePool"):
            selectors.append(pool["spec"]["selector"]["matchLabels"])
        assert all(selector and selector.items() <= labels for selector in selectors)
        if monitor := objects.get("ServiceMonitor"):
            service = objects["Service"]
            assert monitor["spec"]["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
            [endpoint] = monitor["spec"]["endpoints"]
            assert endpoint["port"] in {port["name"] for port in service["spec"]["ports"]}
            assert endpoint["path"] in {each.path for each in ENDPOINTS}
    assert made_of("gpu")["ServiceMonitor"]["metadata"]["labels"]["release"] == "prometheus"


def test_a_picker_finds_the_gauges_of_its_protocol() -> None:
    objects = made_of("picker")
    spec = objects["InferencePool"]["spec"]
    assert objects["Deployment"]["spec"]["template"]["metadata"]["labels"]["llm-d.ai/engine-type"] == "vllm"
    assert set(re.findall(r"`(vllm:\w+)`", page_section("Endpoint pickers"))) <= exported()
    assert spec["targetPorts"] == [{"number": port["containerPort"]} for port in pod_of(objects)["containers"][0]["ports"]]
    assert spec["endpointPickerRef"] == {"name": "llama-epp", "port": {"number": 9002}, "failureMode": "FailOpen"}
    assert "llm-d.ai/engine-type" not in made_of("gpu")["Deployment"]["spec"]["template"]["metadata"]["labels"]


# Engines in pods of their own


def test_engines_listen_where_the_gateways_look_for_them() -> None:
    objects = made_of("engines")
    spec = objects["StatefulSet engines"]["spec"]
    [container] = pod_of(objects, "StatefulSet engines")["containers"]
    [remote] = [model["remote"] for model in merged(example("engines"))["config"]["models"]]
    service = objects["Service engines"]
    assert spec["serviceName"] == service["metadata"]["name"] == remote["kubernetes"]["service"]
    assert service["spec"]["clusterIP"] == "None"
    [port] = service["spec"]["ports"]
    assert (port["name"], port["port"]) == (KubernetesService(service="x").port_name, container["ports"][0]["containerPort"])
    assert {probe["tcpSocket"]["port"] for probe in (container["startupProbe"], container["readinessProbe"])} == {"engine"}
    labels = spec["template"]["metadata"]["labels"].items()
    selectors = [spec["selector"]["matchLabels"], service["spec"]["selector"]]
    selectors.append(objects["PodDisruptionBudget engines"]["spec"]["selector"]["matchLabels"])
    selectors.append(objects["NetworkPolicy engines"]["spec"]["podSelector"]["matchLabels"])
    assert all(selector and selector.items() <= labels for selector in selectors)
    assert not objects["Service"]["spec"]["selector"].items() <= labels, "clients reach no engine"


def test_an_engine_is_started_with_flags_that_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = pod_of(made_of("engines"), "StatefulSet engines")["containers"][0]["args"]
    given: list[dict[str, object]] = []
    monkeypatch.setattr("headrace.cli.servers.engine._from_flags", lambda *_, **__: given.append(_[0]))
    monkeypatch.setattr("headrace.engine.main.run_engine", lambda *_: None)
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert given == [
        {
            "engine.model": "/models/llama",
            "engine.device": "cuda",
            "engine.max_num_seqs": 256,
            "address": "0.0.0.0:7001",
            "tls_dir": "/run/secrets/headrace-engines",
            "replica": "$(POD_NAME)",
            "drain_timeout_s": 30.0,
        }
    ]


def test_engines_have_no_token_and_no_keys_and_drain_as_long_as_gateways() -> None:
    objects = made_of("engines")
    gateway, engine = pod_of(objects), pod_of(objects, "StatefulSet engines")
    assert engine["automountServiceAccountToken"] is False
    assert "envFrom" not in engine["containers"][0]
    for key in ("securityContext", "terminationGracePeriodSeconds", "serviceAccountName", "enableServiceLinks"):
        assert engine[key] == gateway[key]
    for key in ("securityContext", "lifecycle"):
        assert engine["containers"][0][key] == gateway["containers"][0][key]
    secrets = [[volume["secret"] for volume in pod["volumes"] if volume["name"] == "engines"] for pod in (gateway, engine)]
    assert secrets == [[{"secretName": f"headrace-{end}", "defaultMode": 0o440}] for end in ("gateway", "engine")]


def test_the_role_has_what_the_gateways_ask_for_and_nothing_more() -> None:
    objects = made_of("engines")
    found, scaled, made, held = objects["Role"]["rules"]
    assert found == {"apiGroups": [ENDPOINT_SLICES.group], "resources": [ENDPOINT_SLICES.plural], "verbs": ["list", "watch"]}
    name = objects["StatefulSet engines"]["metadata"]["name"]
    names = {"resources": ["statefulsets/scale"], "resourceNames": [name]}
    assert scaled == {"apiGroups": ["apps"], **names, "verbs": ["get", "patch"]}
    of_leases = {"apiGroups": [LEASES.group], "resources": [LEASES.plural]}
    assert made == {**of_leases, "verbs": ["create"]}
    assert held == {**of_leases, "resourceNames": [f"{name}-autoscaler"], "verbs": ["get", "update"]}
    assert "replicas" not in objects["StatefulSet engines"]["spec"], "an upgrade does not undo what was scaled"
    [remote] = [model["remote"] for model in merged(example("engines"))["config"]["models"]]
    assert remote["kubernetes"]["workload"] == f"statefulsets/{name}"
    fixed = rendered({"engines": {**ENGINES, "replicas": 3}, "config": {"models": [far()]}})
    assert (fixed["Role"]["rules"], fixed["StatefulSet engines"]["spec"]["replicas"]) == ([found], 3)
    by_hand = {"service": "demo-engines", "workload": f"statefulsets/{name}"}
    scaled_by_hand = rendered({"engines": ENGINES, "config": {"models": [far(kubernetes=by_hand)]}})
    assert scaled_by_hand["Role"]["rules"] == [found, scaled]
    binding = objects["RoleBinding"]
    assert binding["roleRef"]["name"] == objects["Role"]["metadata"]["name"]
    assert binding["subjects"] == [{"kind": "ServiceAccount", "name": pod_of(objects)["serviceAccountName"], "namespace": NAMESPACE}]
    assert not {"Role", "RoleBinding"} & set(made_of(""))


def test_engines_are_reached_by_gateways_alone() -> None:
    objects = made_of("engines")
    gateway, engine = (objects[kind]["spec"] for kind in ("NetworkPolicy", "NetworkPolicy engines"))
    [rule] = engine["ingress"]
    [peer] = rule["from"]
    assert peer["podSelector"]["matchLabels"].items() <= objects["Deployment"]["spec"]["template"]["metadata"]["labels"].items()
    [way] = [each for each in gateway["egress"] if each.get("to") == [{"podSelector": engine["podSelector"]}]]
    assert way["ports"] == rule["ports"] == [{"protocol": "TCP", "port": "engine"}]
    assert [{"protocol": "TCP", "port": port} for port in (443, 6443)] in [each["ports"] for each in gateway["egress"]]
    assert gateway["egress"][-1] == engine["egress"][-1] == example("engines")["networkPolicy"]["egress"][0]


# Engines of several pods


def closed(required: str, **properties: object) -> Object:
    return {"type": "object", "properties": properties, "required": required.split(), "additionalProperties": False}


NUMBER = {"type": "integer", "minimum": 0}
LEADER_WORKER_SET = closed(
    "leaderWorkerTemplate",
    replicas=NUMBER,
    startupPolicy={"enum": ["LeaderCreated", "LeaderReady"]},
    networkConfig=closed("subdomainPolicy", subdomainPolicy={"enum": ["Shared", "UniquePerReplica"]}),
    rolloutStrategy=closed(
        "type",
        type={"const": "RollingUpdate"},
        rollingUpdateConfiguration=closed("", partition=NUMBER, maxUnavailable=NUMBER, maxSurge=NUMBER),
    ),
    leaderWorkerTemplate=closed(
        "workerTemplate",
        size={"type": "integer", "minimum": 1},
        restartPolicy={"enum": ["RecreateGroupOnPodRestart", "RecreateGroupAfterStart", "None"]},
        leaderTemplate={"type": "object"},
        workerTemplate={"type": "object"},
    ),
)
"""What the definition of the resource has of its spec, as far as the chart uses it."""


@pytest.mark.parametrize("version", VERSIONS)
def test_a_leader_worker_set_is_taken_and_so_are_its_pods(version: str) -> None:
    fixed = rendered({"engines": {**ENGINES, "stages": 2, "replicas": 3}, "config": {"models": [far()]}})
    assert fixed[STAGED]["spec"]["replicas"] == 3
    for objects in (made_of("stages"), fixed):
        spec = objects[STAGED]["spec"]
        jsonschema.validate(spec, LEADER_WORKER_SET)
        for template in ("leaderTemplate", "workerTemplate"):
            pod = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "x"}, "template": spec["leaderWorkerTemplate"][template]}
            kubernetes_validate.validate(pod, version, strict=True)
    assert "replicas" not in made_of("stages")[STAGED]["spec"], "an upgrade does not undo what was scaled"
    assert "StatefulSet engines" not in fixed


def test_a_group_is_one_engine_of_the_service_by_its_leader() -> None:
    objects, alone = made_of("stages"), made_of("engines")
    spec, service = objects[STAGED]["spec"], objects["Service engines"]
    labels = [spec["leaderWorkerTemplate"][template]["metadata"]["labels"] for template in ("leaderTemplate", "workerTemplate")]
    assert labels[0] == labels[1]
    leader = {**labels[0], "leaderworkerset.sigs.k8s.io/worker-index": "0"}
    assert service["spec"]["selector"].items() <= leader.items()
    assert service["spec"]["selector"].items() - labels[0].items() == {("leaderworkerset.sigs.k8s.io/worker-index", "0")}
    assert spec["networkConfig"]["subdomainPolicy"] == "UniquePerReplica", "the controller's Service for all groups would have our name"
    for kind in ("PodDisruptionBudget engines", "NetworkPolicy engines"):
        found = objects[kind]["spec"]
        assert found.get("selector", found.get("podSelector"))["matchLabels"].items() <= labels[1].items(), "workers too"
    assert objects["PodDisruptionBudget engines"] == alone["PodDisruptionBudget engines"]
    scale = objects["Role"]["rules"][1]
    assert scale == {
        "apiGroups": ["leaderworkerset.x-k8s.io"],
        "resources": ["leaderworkersets/scale"],
        "resourceNames": [objects[STAGED]["metadata"]["name"]],
        "verbs": ["get", "patch"],
    }
    assert objects["Role"]["rules"][2:] == alone["Role"]["rules"][2:]


def test_ranks_of_a_group_reach_one_another_and_gateways_only_their_own_port() -> None:
    engine = made_of("stages")["NetworkPolicy engines"]["spec"]
    alone = made_of("engines")["NetworkPolicy engines"]["spec"]
    own, ports = [{"podSelector": engine["podSelector"]}], [{"protocol": "TCP", "port": port} for port in ("ranks", "engine")]
    assert engine["ingress"] == [alone["ingress"][0], {"from": own, "ports": ports}]
    assert engine["egress"] == [alone["egress"][0], {"to": own, "ports": ports}]
    for template in ("leaderTemplate", "workerTemplate"):
        [container] = pod_of(made_of("stages"), STAGED, template)["containers"]
        assert {port["name"] for port in container["ports"]} == {"engine", "ranks"}


def test_pods_of_a_group_are_as_closed_as_those_of_one_rank_and_the_leader_alone_is_asked() -> None:
    values = example("stages")
    [model] = values["config"]["models"]
    model["remote"]["kubernetes"]["workload"] = "statefulsets/demo-engines"
    alone = pod_of(rendered({**values, "engines": {**values["engines"], "stages": 1}}), "StatefulSet engines")
    assert alone["automountServiceAccountToken"] is False
    for template, of_leaders in (("leaderTemplate", set()), ("workerTemplate", {"startupProbe", "readinessProbe", "lifecycle"})):
        pod = pod_of(made_of("stages"), STAGED, template)
        assert without(pod, {"containers"}) == without(alone, {"containers"})
        [container], [expected] = pod["containers"], alone["containers"]
        own = {"args", "env", "ports"}
        assert without(container, own) == without(expected, own | of_leaders)


def without(found: Object, keys: set[str]) -> Object:
    return {key: value for key, value in found.items() if key not in keys}


@pytest.mark.parametrize(("template", "rank", "stands"), [("leaderTemplate", "0", True), ("workerTemplate", "2", False)])
def test_a_rank_is_started_with_flags_that_it_has(template: str, rank: str, stands: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    leader = f"{RELEASE}-engines-0.{RELEASE}-engines-0.{NAMESPACE}"
    given: list[Object] = []
    monkeypatch.setattr("headrace.cli.servers.engine._from_flags", lambda *_, **__: given.append(_[0]))
    monkeypatch.setattr("headrace.engine.main.run_engine", lambda *_: None)
    pod = {"POD_NAME": f"{RELEASE}-engines-0-{rank}", "POD_IP": "10.1.0.7", "LWS_LEADER_ADDRESS": leader, "LWS_WORKER_INDEX": rank}
    result = CliRunner().invoke(app, started_with(pod_of(made_of("stages"), STAGED, template), pod))
    assert result.exit_code == 0, result.output
    assert given == [
        {
            "engine.model": "/models/large",
            "engine.device": "cuda",
            "engine.max_num_seqs": 128,
            "engine.pipeline_parallel_size": 3,
            "rank": int(rank),
            "address": "0.0.0.0:7001" if stands else "10.1.0.7:7001",
            "rendezvous": "10.1.0.7:7100" if stands else f"{leader}:7100",
            "tls_dir": "/run/secrets/headrace-engines",
            "tls_name": f"{RELEASE}-engines.{NAMESPACE}.svc",
            "replica": pod["POD_NAME"],
            "drain_timeout_s": 30.0,
        }
    ]


# Volumes, upgrades and the page


def test_claims_and_folders_of_the_node_take_the_place_of_what_ends_with_the_pod() -> None:
    def volume(name: str, which: str) -> Object:
        [found] = [each for each in pod_of(made_of(name))["volumes"] if each["name"] == which]
        return {key: value for key, value in found.items() if key != "name"}

    assert volume("", "cache") == {"emptyDir": {"sizeLimit": "20Gi"}}
    assert volume("gpu", "cache") == {"hostPath": {"path": "/var/lib/headrace-cache", "type": "Directory"}}
    assert volume("folder", "cache") == {"persistentVolumeClaim": {"claimName": "headrace-cache"}}
    assert volume("folder", "models") == {"persistentVolumeClaim": {"claimName": "models", "readOnly": True}}
    assert volume("folder", "state") == {"persistentVolumeClaim": {"claimName": "headrace-state"}}
    strategies = [made_of(name)["Deployment"]["spec"]["strategy"]["type"] for name in ("", "folder")]
    assert strategies == ["RollingUpdate", "Recreate"], "two pods never share a state folder"


def page_section(title: str) -> str:
    page = (ROOT / "docs" / "kubernetes.md").read_text(encoding="utf-8")
    return page.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def test_every_value_is_on_the_page() -> None:
    page = (ROOT / "docs" / "kubernetes.md").read_text(encoding="utf-8")
    values = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
    assert [name for name in values if f"| `{name}" not in page and f"`, `{name}`" not in page] == []
