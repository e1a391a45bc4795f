"""Tests a gateway process whose engines are pods: requests go on while pods come and go, and while the API server is lost.

The API server is `kube_kit`, which plays the cluster too; the engines compute nothing, and speak TLS as pods do.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import text_kit
from kube_kit import KubeServer, endpoint, kube_server, slice_of, use_pod
from patience import PATIENCE_S, eventually
from server_kit import CROWD, STEP_S
from tls_kit import TOKEN, authority, write_certificates, write_whole
from wire_kit import Served, socket_dir

from headrace.engine.config import EngineConfig
from headrace.fleet.config import FleetConfig, ModelSpec, ReplicaRange
from headrace.fleet.kubernetes.service import KubernetesService
from headrace.fleet.supervisor import FleetReady, Supervisor
from headrace.lab.fake_runner import FakeOptions
from headrace.machine.signals import first_of
from headrace.wire.tls.files import TlsFiles, TlsRole

pytestmark = pytest.mark.process

MODEL, SERVICE, TLS_NAME = "fake", "engines", "engines.llm.svc"
PAGES_S = 0.1


@dataclass
class Pods:
    """The engines' pods; what the cluster would say of them. Addresses of loopback stand for the pods'."""

    kube: KubeServer
    tls: TlsFiles
    engines: dict[str, Served] = field(default_factory=dict)
    leaving: set[str] = field(default_factory=set)

    async def start(self, name: str, host: str) -> None:
        options = FakeOptions(**{**CROWD, "step_seconds": STEP_S})
        engine = Served(options, EngineConfig(model="fake", max_num_seqs=4), f"{host}:0", token=TOKEN, tls=self.tls)
        await engine.start()
        self.engines[name] = engine
        await self.say()

    async def leave(self, name: str) -> None:
        self.leaving.add(name)
        await self.say()

    async def end(self, name: str) -> None:
        engine = self.engines.pop(name)
        self.leaving.discard(name)
        await self.say()
        await engine.stop()
        engine.check()

    async def say(self) -> None:
        """Into a slice for each pod, since each has a port of its own."""
        for plural, name in [*self.kube.objects]:
            if plural == "endpointslices" and name.removeprefix(f"{SERVICE}-") not in self.engines:
                await self.kube.put(plural, name, slice_of())
        for name, engine in self.engines.items():
            host, _, port = engine.service.address.rpartition(":")
            found = slice_of(endpoint(name, host, terminating=name in self.leaving), port=int(port))
            await self.kube.put("endpointslices", f"{SERVICE}-{name}", found)


@dataclass
class Site:
    pods: Pods
    port: int
    session: aiohttp.ClientSession

    @asynccontextmanager
    async def asking(self, max_tokens: int) -> AsyncIterator[aiohttp.ClientResponse]:
        body = {"model": MODEL, "prompt": "a", "max_tokens": max_tokens, "stream": True, "ignore_eos": True}
        async with self.session.post(f"http://127.0.0.1:{self.port}/v1/completions", json=body) as response:
            yield response

    async def answer(self, max_tokens: int = 3) -> int:
        """Status of a whole answer."""
        async with self.asking(max_tokens) as response:
            text = await response.text()
            assert response.status != 200 or text.endswith("data: [DONE]\n\n"), text
            return response.status

    async def replicas(self) -> dict[str, str]:
        async with self.session.get(f"http://127.0.0.1:{self.port}/ready") as response:
            shown: dict[str, Any] = json.loads(await response.text())
        return {each["replica"]: each["reason"] for each in shown["replicas"]}

    async def serving(self, *names: str) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while await self.replicas() != dict.fromkeys(names, ""):
                await asyncio.sleep(PAGES_S)


@asynccontextmanager
async def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, autoscale: ReplicaRange | None = None) -> AsyncIterator[Site]:
    signer = authority()
    gateway_files, tls_dir = write_certificates(tmp_path / "gateway", signer, TlsRole.GATEWAY), tmp_path / "gateway"
    write_whole(tls_dir / "token", TOKEN.encode())
    assert gateway_files
    engine_files = write_certificates(tmp_path / "engine", signer, TlsRole.ENGINE, TLS_NAME)
    folder = text_kit.save_byte_level(tmp_path / "model")
    async with AsyncExitStack() as stack:
        kube = await stack.enter_async_context(kube_server(tmp_path / "account"))
        use_pod(kube, monkeypatch)
        pods = Pods(kube, engine_files)
        await pods.start("e-0", "127.0.0.2")
        alike = {"name": SERVICE, "address": f"{SERVICE}:1", "tls_dir": str(tls_dir)}
        service = KubernetesService(service=SERVICE, workload=f"statefulsets/{SERVICE}")
        spec = ModelSpec(name=MODEL, folder=folder, replicas=0, remote=(alike,), kubernetes=service, autoscale=autoscale)
        await kube.put("statefulsets", SERVICE, {"spec": {"replicas": 1}})
        gateway = {"port": 0, "request_log": "off"}
        config = FleetConfig(models=(spec,), gateway=gateway, run_dir=str(stack.enter_context(socket_dir())))
        ready: asyncio.Future[FleetReady] = asyncio.get_running_loop().create_future()
        running = asyncio.create_task(Supervisor(config, on_ready=ready.set_result).run())
        await first_of(ready, running)
        session = await stack.enter_async_context(aiohttp.ClientSession())
        try:
            made = Site(pods, int(str(ready.result().gateway["port"])), session)
            await made.serving("e-0")
            yield made
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            for name in [*pods.engines]:
                await pods.end(name)


async def test_requests_go_on_while_pods_come_and_go_and_the_api_server_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with site(tmp_path, monkeypatch) as made:
        pods = made.pods
        assert await made.answer() == 200
        async with made.asking(200) as long:
            await long.content.readline()
            await pods.start("e-1", "127.0.0.3")
            await pods.leave("e-0")
            await made.serving("e-1")
            assert await made.answer() == 200
            assert (await long.text()).endswith("data: [DONE]\n\n"), "a stream of a pod that leaves ends whole"
        await pods.end("e-0")
        await pods.kube.stop()
        await pods.start("e-0", "127.0.0.4")
        assert [await made.answer() for _ in range(5)] == [200] * 5
        await pods.kube.start()
        await made.serving("e-0", "e-1")
        await pods.leave("e-0")
        await pods.leave("e-1")
        await eventually(lambda: pods.engines["e-0"].service.num_open == 0)
        async with asyncio.timeout(PATIENCE_S):
            while (status := await made.answer()) == 200:
                await asyncio.sleep(PAGES_S)
        assert status == 503
        await pods.start("e-2", "127.0.0.5")
        await made.serving("e-2")
        assert await made.answer() == 200


async def test_a_pod_that_the_load_asks_for_serves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with site(tmp_path, monkeypatch, ReplicaRange(max=2)) as made, asyncio.TaskGroup() as asked:
        long = [asked.create_task(made.answer(4000)) for _ in range(4)]
        async with asyncio.timeout(PATIENCE_S):
            while made.pods.kube.replicas("statefulsets", SERVICE) == 1:
                await asyncio.sleep(PAGES_S)
        assert not any(each.done() for each in long), "one pod is full, and another one was asked for"
        await made.pods.start("e-1", "127.0.0.3")
        await made.serving("e-0", "e-1")
        assert await made.answer() == 200
        for each in long:
            each.cancel()
