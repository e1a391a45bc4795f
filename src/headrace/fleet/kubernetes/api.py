"""Asks the API server of the cluster in which this pod runs: single calls, and watches.

Each call opens a connection of its own, so that a rotated token or authority is in use from the next one on. Calls are rare: a watch is one
call of some minutes.
"""

from __future__ import annotations

import json
import os
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp.http_exceptions import LineTooLong

from headrace.core.errors import HeadraceError
from headrace.core.regular_files import MAX_SECRET_BYTES, read_file
from headrace.fleet.kubernetes.service import API_HOST, API_PORT

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")

CALL_S = 10.0
WATCH_S = 120
"""The server ends a watch after these seconds: a connection that is lost without a sign is noticed soon after them."""

MAX_ANSWER_BYTES = 32 << 20
MAX_EVENT_BYTES = 4 << 20
"""An object has 1.5 MiB at most in the cluster's store."""

NOT_FOUND, CONFLICT = 404, 409

METHODS = {"get": "GET", "list": "GET", "watch": "GET", "create": "POST", "update": "PUT", "patch": "PATCH"}
"""By a Role's verbs."""

KubernetesObject = dict[str, Any]


class KubernetesFailed(HeadraceError):
    """status: of the API server's answer; 0: none came"""

    def __init__(self, reason: str, status: int = 0) -> None:
        self.status = status
        super().__init__(reason)


@dataclass(frozen=True, slots=True)
class ApiResource:
    """plural: as a Role names it, "deployments/scale" for a part of an object"""

    group: str
    plural: str

    def path(self, namespace: str, name: str) -> str:
        kind, _, part = self.plural.partition("/")
        return "/".join(filter(None, ("/apis", self.group, "v1", "namespaces", namespace, kind, name, part)))


@dataclass(frozen=True, slots=True)
class KubernetesApi:
    """account: folder of the service account's token, of the API server's authority and of the pod's namespace"""

    url: str
    account: Path

    @classmethod
    def of_pod(cls) -> KubernetesApi:
        host = os.environ[API_HOST]
        return cls(f"https://{f'[{host}]' if ':' in host else host}:{os.environ[API_PORT]}", SERVICE_ACCOUNT)

    def own_namespace(self) -> str:
        """Raises KubernetesFailed."""
        return self._read("namespace")

    async def call(
        self, verb: str, resource: ApiResource, namespace: str, name: str = "", body: object = None, **query: str
    ) -> KubernetesObject:
        """Raises KubernetesFailed."""
        async with self._answer(verb, resource, namespace, name, body, query) as response:
            return _object(await _whole(response))

    async def watch(self, resource: ApiResource, namespace: str, **query: str) -> AsyncGenerator[KubernetesObject, None]:
        """Events until the server ends the watch. Raises KubernetesFailed."""
        query |= {"watch": "true", "allowWatchBookmarks": "true", "timeoutSeconds": str(WATCH_S)}
        async with self._answer("watch", resource, namespace, "", None, query) as response:
            async for line in response.content:
                event = _object(line)
                if event.get("type") == "ERROR":
                    raise KubernetesFailed(*_fault(event.get("object")))
                yield event

    @asynccontextmanager
    async def _answer(
        self, verb: str, resource: ApiResource, namespace: str, name: str, body: object, query: Mapping[str, str]
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Raises KubernetesFailed, also for what goes wrong within the block."""
        total_s, read_s = (None, WATCH_S + CALL_S) if verb == "watch" else (CALL_S, None)
        headers = {"authorization": f"Bearer {self._read('token')}", "accept": "application/json"}
        if body is not None:
            headers["content-type"] = f"application/{'merge-patch+' if verb == 'patch' else ''}json"
        try:
            async with (
                aiohttp.ClientSession(
                    self.url,
                    timeout=aiohttp.ClientTimeout(total_s, sock_connect=CALL_S, sock_read=read_s),
                    connector=aiohttp.TCPConnector(ssl=self._context(), force_close=True),
                    read_bufsize=MAX_EVENT_BYTES // 2,  # aiohttp takes a line of twice this
                ) as session,
                session.request(
                    METHODS[verb],
                    resource.path(namespace, name),
                    params=query,
                    headers=headers,
                    data=None if body is None else json.dumps(body),
                    allow_redirects=False,
                ) as response,
            ):
                if response.status not in (200, 201):
                    raise _refusal(response.status, await _whole(response), verb, resource, namespace, name)
                yield response
        except (aiohttp.ClientError, LineTooLong, OSError, ValueError) as error:  # a TimeoutError is an OSError; ValueError: no JSON
            said = " ".join(str(error).split())[:500] or type(error).__name__
            raise KubernetesFailed(f"the API server at {self.url} gave no answer: {said}") from error

    def _context(self) -> ssl.SSLContext:
        return ssl.create_default_context(cadata=self._read("ca.crt"))

    def _read(self, name: str) -> str:
        path = self.account / name
        try:
            return read_file(path, MAX_SECRET_BYTES).decode("ascii").strip()
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "no text"
            raise KubernetesFailed(f"{path} cannot be read ({reason}): the pod needs a service account's token") from error


async def _whole(response: aiohttp.ClientResponse) -> bytes:
    body = bytearray()
    async for piece in response.content.iter_any():
        body += piece
        if len(body) > MAX_ANSWER_BYTES:
            raise ValueError(f"an answer of more than {MAX_ANSWER_BYTES >> 20} MiB")
    return bytes(body)


def _object(text: bytes) -> KubernetesObject:
    """Raises ValueError."""
    made = json.loads(text)
    if not isinstance(made, dict):
        raise ValueError("not an object")
    return made


def _refusal(status: int, body: bytes, verb: str, resource: ApiResource, namespace: str, name: str) -> KubernetesFailed:
    what = f"{resource.plural} {name}".strip()
    try:
        said, _ = _fault(_object(body))
    except ValueError:
        said = "no Kubernetes answer"
    remedies = {
        401: "The service account's token is not valid there.",
        403: f'Its Role needs apiGroups: ["{resource.group}"], resources: ["{resource.plural}"], verbs: ["{verb}"].',
    }
    return KubernetesFailed(f"{verb} {what} in {namespace}: {status}, {said}. {remedies.get(status, '')}".rstrip(), status)


def _fault(status: object) -> tuple[str, int]:
    """A `Status` of the API server: what it says, and its code."""
    said = status if isinstance(status, dict) else {}
    code = said.get("code")
    return str(said.get("message") or said.get("reason") or "no reason").rstrip(".")[:500], code if isinstance(code, int) else 0
