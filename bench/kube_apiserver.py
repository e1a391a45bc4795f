"""Tries the chart's objects and what gateway pods ask for on a real API server: schemas, roles, watches, scales and Leases.

    python -m bench.kube_apiserver --apiserver FILE [--etcd FILE] [--crd FILE] -> bench/results/kube-apiserver.json

apiserver: a kube-apiserver; crd: the CustomResourceDefinition of LeaderWorkerSets, without which they are left out. It runs on loopback
with RBAC, as does etcd. There are no controllers and no nodes: no pod ever comes, and the endpoints are written here. Gateways' calls are
made with the service account of the chart. An API server before 1.21 has EndpointSlices as v1beta1, and they are asked for there; what it
does not have at all is listed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import secrets
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import helm_python
import yaml

from bench.harness import RESULTS, ROOT, write_portable
from headrace.fleet.kubernetes import watch
from headrace.fleet.kubernetes.api import ApiResource, KubernetesApi, KubernetesFailed
from headrace.fleet.kubernetes.lease import LeaderLease
from headrace.fleet.kubernetes.scale import WorkloadScaler
from headrace.fleet.kubernetes.service import KubernetesService
from headrace.fleet.kubernetes.watch import EndpointWatch
from headrace.lab.environment import environment
from headrace.policy.scaling.budget import DayUse

RELEASE, NAMESPACE = "demo", "llm"
SERVICE = f"{RELEASE}-engines"
START_S, WAIT_S = 120.0, 30.0

Object = dict[str, Any]


class Cluster:
    """An API server and its store; url and ca.crt of `folder` reach it, with the token of an administrator or of the chart's account."""

    def __init__(self, folder: Path, apiserver: str, etcd: str) -> None:
        self.folder, self._apiserver, self._etcd = folder, apiserver, etcd
        self._ports = [free_port() for _ in range(3)]
        self.url = f"https://127.0.0.1:{self._ports[0]}"
        self.tokens = {name: secrets.token_hex(16) for name in ("admin", "gateway")}
        users = {"admin": 'admin,1,"system:masters"', "gateway": f'system:serviceaccount:{NAMESPACE}:{RELEASE},2,"system:serviceaccounts"'}
        (folder / "tokens.csv").write_text("".join(f"{self.tokens[name]},{user}\n" for name, user in users.items()))
        run("openssl", "genrsa", "-out", f"{folder}/account.key", "2048")

    def store(self) -> list[str]:
        client, peer = (f"http://127.0.0.1:{port}" for port in self._ports[1:])
        words = ["--data-dir", f"{self.folder}/etcd", "--listen-client-urls", client, "--advertise-client-urls", client]
        return [
            self._etcd,
            *words,
            "--listen-peer-urls",
            peer,
            "--initial-advertise-peer-urls",
            peer,
            "--initial-cluster",
            f"default={peer}",
        ]

    def server(self) -> list[str]:
        words = {
            "etcd-servers": f"http://127.0.0.1:{self._ports[1]}",
            "bind-address": "127.0.0.1",
            "secure-port": str(self._ports[0]),
            "cert-dir": f"{self.folder}/tls",
            "token-auth-file": f"{self.folder}/tokens.csv",
            "authorization-mode": "RBAC",
            "service-account-key-file": f"{self.folder}/account.key",
            "service-account-signing-key-file": f"{self.folder}/account.key",
            "service-account-issuer": "https://kubernetes.default.svc",
            "service-cluster-ip-range": "10.96.0.0/16",
            "disable-admission-plugins": "ServiceAccount",
        }
        return [self._apiserver, *(f"--{name}={value}" for name, value in words.items())]

    def api(self, name: str) -> KubernetesApi:
        """With the account's folder of a pod."""
        account = self.folder / name
        account.mkdir(exist_ok=True)
        for file, text in (
            ("token", self.tokens[name]),
            ("namespace", NAMESPACE),
            ("ca.crt", (self.folder / "tls/apiserver.crt").read_text()),
        ):
            (account / file).write_text(text)
        return KubernetesApi(self.url, account)

    def ask(self, method: str, path: str, body: object = None) -> tuple[int, Object]:
        """As the administrator, by curl: what is tried here is not asked by what is tried."""
        words = ["-sSk", "-X", method, "-H", f"Authorization: Bearer {self.tokens['admin']}", "-w", "\n%{http_code}", f"{self.url}{path}"]
        given = ["-H", "Content-Type: application/json", "--data-binary", "@-"] if body is not None else []
        said = subprocess.run(["curl", *words, *given], input=json.dumps(body), stdout=subprocess.PIPE, text=True, check=False).stdout
        text, _, status = said.rpartition("\n")
        try:
            return int(status), json.loads(text)
        except ValueError:
            return int(status or 0), {"message": text}


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


def run(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True)


@contextmanager
def started(words: list[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    with open(log, "ab") as file:
        process = subprocess.Popen(words, stdout=file, stderr=file)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()  # a server that is asked to end waits for its watches
            process.wait(60)


async def until(condition: Callable[[], object]) -> float:
    """Returns the seconds that it took."""
    began = time.monotonic()
    while not condition():
        if time.monotonic() > began + WAIT_S:
            sys.exit(f"not within {WAIT_S:.0f} s")
        await asyncio.sleep(0.05)
    return time.monotonic() - began


def rendered(example: str) -> list[Object]:
    values = yaml.safe_load((ROOT / "deploy/helm/examples" / f"{example}.yaml").read_text())
    with helm_python.Chart.load(ROOT / "deploy/helm/headrace") as chart:
        files = chart.render(values, name=RELEASE, namespace=NAMESPACE)
    return [made for path, text in files.items() if path.endswith(".yaml") for made in yaml.safe_load_all(text) if made]


def create(cluster: Cluster, made: Object, resources: dict[tuple[str, str], str]) -> str:
    """Empty: the server took it with every field that it was sent; else what it said."""
    plural = resources.get((made["apiVersion"], made["kind"]))
    if plural is None:
        return "the server does not know its version"
    group = f"/apis/{made['apiVersion']}" if "/" in made["apiVersion"] else f"/api/{made['apiVersion']}"
    status, said = cluster.ask("POST", f"{group}/namespaces/{NAMESPACE}/{plural}", made)
    if status == 409:  # of an earlier example, or of the namespace
        return ""
    return "; ".join(lost(made, said, made["kind"])) if status == 201 else str(said.get("message"))


def lost(sent: object, got: object, where: str) -> list[str]:
    """Fields that the server dropped since it does not know them."""
    if isinstance(sent, dict) and isinstance(got, dict):
        return [each for key, value in sent.items() for each in lost(value, got.get(key), f"{where}.{key}")]
    if isinstance(sent, list) and isinstance(got, list) and len(sent) == len(got):
        return [each for index, value in enumerate(sent) for each in lost(value, got[index], f"{where}[{index}]")]
    return [f"{where} is dropped"] if got is None and sent not in (None, "", [], {}, False, 0) else []


def known(cluster: Cluster) -> dict[tuple[str, str], str]:
    """(version, kind) -> plural"""
    versions = ["v1", *(each["groupVersion"] for group in cluster.ask("GET", "/apis")[1]["groups"] for each in group["versions"])]
    lists = {each: cluster.ask("GET", f"/apis/{each}" if "/" in each else f"/api/{each}")[1].get("resources", []) for each in versions}
    return {(version, each["kind"]): each["name"] for version, found in lists.items() for each in found if "/" not in each["name"]}


class BetaSlices(ApiResource):
    def path(self, namespace: str, name: str) -> str:
        return super().path(namespace, name).replace("/v1/", "/v1beta1/", 1)


def slice_of(version: str, pods: dict[str, bool]) -> Object:
    """pods: name -> whether it is ready"""
    endpoints = [
        {"addresses": [f"10.0.0.{number}"], "conditions": {"ready": ready}, "targetRef": {"kind": "Pod", "name": name}}
        for number, (name, ready) in enumerate(pods.items(), 1)
    ]
    metadata = {"name": f"{SERVICE}-a", "labels": {"kubernetes.io/service-name": SERVICE}}
    ports = [{"name": "engine", "port": 7001, "protocol": "TCP"}]
    return {
        "apiVersion": version,
        "kind": "EndpointSlice",
        "metadata": metadata,
        "addressType": "IPv4",
        "endpoints": endpoints,
        "ports": ports,
    }


async def follow(cluster: Cluster, version: str, restart: Callable[[], None]) -> dict[str, float]:
    """Seconds until a watch with the gateway's account had seen each change; the last one came while the server was away."""
    path = f"/apis/{version}/namespaces/{NAMESPACE}/endpointslices"
    cluster.ask("POST", path, slice_of(version, {"p0": True}))
    following = EndpointWatch(cluster.api("gateway"), KubernetesService(service=SERVICE), lambda: None)
    task = asyncio.create_task(following.run())

    def names() -> list[str]:
        return [engine.name for engine in following.engines]

    def put(pods: dict[str, bool]) -> None:
        assert cluster.ask("PUT", f"{path}/{SERVICE}-a", slice_of(version, pods))[0] == 200

    try:
        found = {"listed": await until(lambda: names() == ["p0"])}
        put({"p0": True, "p1": True, "p2": False})
        found["a pod came"] = await until(lambda: names() == ["p0", "p1"])
        put({"p1": True})
        found["a pod went"] = await until(lambda: names() == ["p1"])
        await asyncio.to_thread(restart)
        put({"p1": True, "p3": True})
        found["the server came again"] = await until(lambda: names() == ["p1", "p3"] and not following.failure)
        return found
    finally:
        task.cancel()


async def scale(cluster: Cluster, workload: str) -> dict[str, object]:
    scaler = WorkloadScaler(cluster.api("gateway"), NAMESPACE, workload)
    before = [await scaler.num_replicas()]
    for wanted in (3, 0, 2):
        before.append(await scaler.scale(wanted))
    refused = ""
    try:
        await WorkloadScaler(cluster.api("gateway"), NAMESPACE, f"{workload}-of-another").num_replicas()
    except KubernetesFailed as error:
        refused = str(error)
    return {"before": before, "after": await scaler.num_replicas(), "refused": refused}


async def lead(cluster: Cluster) -> dict[str, object]:
    """Two pods, of which the holder ends."""
    leases = [LeaderLease(cluster.api("gateway"), NAMESPACE, f"{SERVICE}-autoscaler", name) for name in ("a", "b")]
    tasks = []
    for lease in leases:
        tasks.append(asyncio.create_task(lease.run()))
        await until(lambda: leases[0].is_held)
    leases[0].use = DayUse(1.0, 2.0)
    await asyncio.sleep(10)
    held = [lease.is_held for lease in leases]
    tasks[0].cancel()
    after_s = await until(lambda: leases[1].is_held)
    tasks[1].cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return {"held": held, "next_holder_s": after_s, "use": str(leases[1].use), "failures": [lease.failure for lease in leases]}


async def tried(cluster: Cluster, crd: Path | None, restart: Callable[[], None]) -> dict[str, object]:
    cluster.ask("POST", "/api/v1/namespaces", {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}})
    if crd is not None:
        text = crd.read_text().replace('default: ""', "default: unset")  # server 1.20 takes no empty text there
        status, said = cluster.ask("POST", "/apis/apiextensions.k8s.io/v1/customresourcedefinitions", yaml.safe_load(text))
        assert status == 201, str(said.get("message"))[:1000]
        await until(lambda: ("leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet") in known(cluster))
    resources = known(cluster)
    workloads = ["statefulsets"] + (["leaderworkersets"] if crd is not None else [])
    objects: dict[str, str] = {}
    found: dict[str, object] = {"version": cluster.ask("GET", "/version")[1]["gitVersion"], "objects": objects}
    for example, workload in zip(("engines", "stages"), workloads, strict=False):
        for made in rendered(example):
            objects[f"{example} {made['kind']} {made['metadata']['name']}"] = create(cluster, made, resources)
            if made["kind"] == "Role":  # the examples share a release: each has a Role of its name
                cluster.ask("PUT", f"/apis/{made['apiVersion']}/namespaces/{NAMESPACE}/roles/{made['metadata']['name']}", made)
        found[workload] = await scale(cluster, f"{workload}/{SERVICE}")
    version = next(each for each in ("discovery.k8s.io/v1", "discovery.k8s.io/v1beta1") if (each, "EndpointSlice") in resources)
    if version.endswith("beta1"):
        watch.ENDPOINT_SLICES = BetaSlices("discovery.k8s.io", "endpointslices")
    return {**found, "slices": version, "watch_s": await follow(cluster, version, restart), "lease": await lead(cluster)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--apiserver", required=True)
    parser.add_argument("--etcd", default="etcd")
    parser.add_argument("--crd", type=Path)
    given = parser.parse_args()
    with ExitStack() as ending:
        folder = Path(ending.enter_context(tempfile.TemporaryDirectory()))
        cluster = Cluster(folder, given.apiserver, given.etcd)
        ending.enter_context(started(cluster.store(), folder / "log"))
        serving = ending.enter_context(ExitStack())

        def start() -> None:
            serving.enter_context(started(cluster.server(), folder / "log"))
            began = time.monotonic()
            while cluster.ask("GET", "/readyz")[0] != 200:
                if time.monotonic() > began + START_S:
                    sys.exit((folder / "log").read_text()[-3000:])
                time.sleep(0.2)

        def restart() -> None:
            serving.close()
            start()

        start()
        found = asyncio.run(tried(cluster, given.crd, restart))
    write_portable(RESULTS / "kube-apiserver.json", {"environment": asdict(environment()), **found})
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    os.umask(0o077)
    main()
