"""Stands for a cluster's API server: EndpointSlices, scales and Leases over its real protocol, on TLS, with a service account's token.

Objects have versions, an update of an old one is a conflict (409), a watch begins after a version and ends with 410 where the changes since
are forgotten. Roles are checked. Nothing else of Kubernetes is here: no controllers, so that a test plays what they would do.
"""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from tls_kit import authority, write_certificates

from headrace.fleet.kubernetes import api
from headrace.fleet.kubernetes.api import KubernetesApi
from headrace.wire.tls.files import TlsRole

HOST, NAMESPACE, TOKEN = "127.0.0.1", "llm", "token-of-a-service-account"
GROUPS = {
    "endpointslices": "discovery.k8s.io",
    "deployments": "apps",
    "statefulsets": "apps",
    "leaderworkersets": "leaderworkerset.x-k8s.io",
    "leases": "coordination.k8s.io",
}
VERBS = {"GET": "get", "POST": "create", "PUT": "update", "PATCH": "patch"}

Object = dict[str, Any]
Key = tuple[str, str]
"""Plural, and name."""


class Refused(Exception):
    def __init__(self, code: int, reason: str, message: str) -> None:
        self.body = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": code, "reason": reason, "message": message}
        self.code = code


class KubeServer:
    """
    tokens     that are valid
    forbidden  pairs of verb and plural that the Role does not allow
    asked      verb, plural and name of each call, in order
    oldest     versions before it are forgotten
    slow_s     before a call is carried out, and again before it is answered
    """

    def __init__(self, folder: Path) -> None:
        self.account = folder
        self.tokens = {TOKEN}
        self.forbidden: set[tuple[str, str]] = set()
        self.asked: list[tuple[str, str, str]] = []
        self.objects: dict[Key, Object] = {}
        self.version = 100
        self.oldest = 0
        self.slow_s = 0.0
        self.port = 0
        self._history: list[tuple[int, str, Key, Object]] = []
        self._changed = asyncio.Condition()
        self._watching: set[asyncio.Transport] = set()
        self._ends_watches = asyncio.Event()
        self._runner: web.AppRunner | None = None
        folder.mkdir(exist_ok=True)
        signer = authority()
        self._tls = write_certificates(folder / "server", signer, TlsRole.ENGINE, HOST)
        (folder / "ca.crt").write_bytes(Path(self._tls.ca).read_bytes())
        (folder / "token").write_text(TOKEN)
        (folder / "namespace").write_text(NAMESPACE)

    @property
    def api(self) -> KubernetesApi:
        return KubernetesApi(f"https://{HOST}:{self.port}", self.account)

    def calls(self, verb: str) -> int:
        return sum(each == verb for each, _, _ in self.asked)

    # -- what a test does -----------------------------------------------------------------------------------------------------------

    def rotate_token(self) -> None:
        (self.account / "token").write_text(f"{TOKEN}-{self.version}")
        self.tokens = {f"{TOKEN}-{self.version}"}

    async def start(self) -> None:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(self._tls.certificate, self._tls.key)
        app = web.Application()
        app.router.add_route("*", "/apis/{group}/v1/namespaces/{namespace}/{plural}", self._serve)
        app.router.add_route("*", "/apis/{group}/v1/namespaces/{namespace}/{plural}/{name}", self._serve)
        app.router.add_route("*", "/apis/{group}/v1/namespaces/{namespace}/{plural}/{name}/{part}", self._serve)
        self._runner = web.AppRunner(app, access_log=None, handle_signals=False, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, HOST, self.port, ssl_context=context)
        await site.start()
        self.port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        """It answers nothing until it starts again, at the same port."""
        self.break_watches()
        if self._runner is not None:
            await self._runner.cleanup()
        self._runner = None

    def break_watches(self) -> None:
        """Their connections are reset."""
        for transport in [*self._watching]:
            transport.abort()

    async def end_watches(self) -> None:
        """As the server does after their time."""
        self._ends_watches.set()
        async with self._changed:
            self._changed.notify_all()
        await asyncio.sleep(0)

    def forget(self) -> None:
        """The store is compacted."""
        self.oldest = self.version
        self._history.clear()

    async def put(self, plural: str, name: str, content: Object) -> None:
        kind = "MODIFIED" if (plural, name) in self.objects else "ADDED"
        metadata = {**content.get("metadata", {}), "name": name, "namespace": NAMESPACE}
        await self._store(kind, (plural, name), {**content, "metadata": metadata})

    async def remove(self, plural: str, name: str) -> None:
        await self._store("DELETED", (plural, name), self.objects.pop((plural, name)))

    async def bookmark(self) -> None:
        """Says to watches which version they have reached; other objects have changed."""
        await self._store("BOOKMARK", ("endpointslices", ""), {"kind": "EndpointSlice", "metadata": {}})

    def replicas(self, plural: str, name: str) -> int:
        found: int = self.objects[plural, name]["spec"]["replicas"]
        return found

    # -- the protocol ---------------------------------------------------------------------------------------------------------------

    async def _store(self, kind: str, key: Key, changed: Object) -> Object:
        self.version += 1
        changed = deepcopy(changed)
        changed["metadata"]["resourceVersion"] = str(self.version)
        if kind in ("ADDED", "MODIFIED"):
            self.objects[key] = changed
        self._history.append((self.version, kind, key, changed))
        async with self._changed:
            self._changed.notify_all()
        return changed

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        plural, name, part = (request.match_info.get(key, "") for key in ("plural", "name", "part"))
        try:
            if request.headers.get("authorization") not in {f"Bearer {token}" for token in self.tokens}:
                raise Refused(401, "Unauthorized", "Unauthorized")
            verb = VERBS[request.method] if name or request.method != "GET" else "watch" if "watch" in request.query else "list"
            self.asked.append((verb, plural, name))
            resource = f"{plural}/{part}" if part else plural
            if request.match_info["namespace"] != NAMESPACE or (verb, resource) in self.forbidden:
                said = (
                    f'{resource}.{GROUPS[plural]} is forbidden: User "system:serviceaccount:llm:demo" cannot {verb} resource "{resource}"'
                )
                raise Refused(403, "Forbidden", said)
            assert request.match_info["group"] == GROUPS[plural]
            if verb == "watch":
                return await self._watch(request, plural)
            body = json.loads(await request.read() or b"null")
            await asyncio.sleep(self.slow_s)
            answer = await self._answer(verb, plural, name, part, body, request)
            await asyncio.sleep(self.slow_s)
            return web.json_response(answer)
        except Refused as refused:
            return web.json_response(refused.body, status=refused.code)

    async def _answer(self, verb: str, plural: str, name: str, part: str, body: Object, request: web.Request) -> Object:
        key = (plural, name or ((body or {}).get("metadata") or {}).get("name", ""))
        if verb == "list":
            items = [each for (kind, _), each in self.objects.items() if kind == plural and _is_selected(each, request)]
            return {"kind": "List", "metadata": {"resourceVersion": str(self.version)}, "items": items}
        if verb == "create":
            if key in self.objects:
                raise Refused(409, "AlreadyExists", f"{plural} {key[1]!r} already exists")
            return await self._store("ADDED", key, body)
        if key not in self.objects:
            raise Refused(404, "NotFound", f"{plural} {name!r} not found")
        stored = self.objects[key]
        if verb == "get":
            return _scale_of(stored) if part else stored
        version = (body.get("metadata") or {}).get("resourceVersion")
        if version not in (None, stored["metadata"]["resourceVersion"]):
            raise Refused(409, "Conflict", f"Operation cannot be fulfilled on {plural} {name!r}: the object has been modified")
        if verb == "update":
            return await self._store("MODIFIED", key, body)
        assert request.content_type == "application/merge-patch+json"
        spec = {**stored["spec"], **body["spec"]}
        changed = await self._store("MODIFIED", key, {**stored, "spec": spec})
        return _scale_of(changed) if part else changed

    async def _watch(self, request: web.Request, plural: str) -> web.StreamResponse:
        seen = int(request.query["resourceVersion"])
        response = web.StreamResponse(headers={"content-type": "application/json"})
        response.enable_chunked_encoding()
        await response.prepare(request)
        transport = request.transport
        assert isinstance(transport, asyncio.Transport)
        self._watching.add(transport)
        self._ends_watches.clear()
        loop = asyncio.get_running_loop()
        deadline = loop.time() + float(request.query["timeoutSeconds"])
        try:
            with suppress(ConnectionError):
                if seen < self.oldest:
                    gone = Refused(410, "Expired", f"too old resource version: {seen} ({self.oldest})")
                    await response.write(_line({"type": "ERROR", "object": gone.body}))
                    return response
                while loop.time() < deadline and not self._ends_watches.is_set():
                    for event in self._events_after(seen, plural, request):
                        await response.write(_line(event))
                    seen = max(seen, self.version)
                    async with self._changed:
                        with suppress(TimeoutError):
                            async with asyncio.timeout_at(deadline):
                                await self._changed.wait()
        finally:
            self._watching.discard(transport)
        return response

    def _events_after(self, seen: int, plural: str, request: web.Request) -> Iterator[Object]:
        for version, kind, key, changed in [*self._history]:
            if version > seen and key[0] == plural and (kind == "BOOKMARK" or _is_selected(changed, request)):
                yield {"type": kind, "object": changed}


def _is_selected(each: Object, request: web.Request) -> bool:
    wanted = dict(part.split("=") for part in request.query.get("labelSelector", "").split(",") if part)
    return wanted.items() <= (each["metadata"].get("labels") or {}).items()


def _scale_of(stored: Object) -> Object:
    status = {"replicas": stored.get("status", {}).get("replicas", 0)}
    return {"kind": "Scale", "metadata": stored["metadata"], "spec": {"replicas": stored["spec"]["replicas"]}, "status": status}


def _line(event: Object) -> bytes:
    return json.dumps(event).encode() + b"\n"


def endpoint(pod: str, address: str, *, ready: bool | None = True, terminating: bool = False) -> Object:
    conditions = {"ready": ready, "serving": ready or None, "terminating": terminating}
    return {"addresses": [address], "conditions": conditions, "targetRef": {"kind": "Pod", "name": pod, "namespace": NAMESPACE}}


def slice_of(*endpoints: Object, port: int = 7001, port_name: str = "engine", kind: str = "IPv4", service: str = "engines") -> Object:
    """Without its name."""
    metadata = {"labels": {"kubernetes.io/service-name": service}}
    return {"metadata": metadata, "addressType": kind, "endpoints": [*endpoints], "ports": [{"name": port_name, "port": port}]}


@asynccontextmanager
async def kube_server(folder: Path) -> AsyncIterator[KubeServer]:
    server = KubeServer(folder)
    await server.start()
    try:
        yield server
    finally:
        await server.stop()


def use_pod(kube: KubeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """This process is in a pod of the cluster."""
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", HOST)
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", str(kube.port))
    monkeypatch.setattr(api, "SERVICE_ACCOUNT", kube.account)
