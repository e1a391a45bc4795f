"""Opens the connections to one foreign server, and reads its key.

Connections use no proxy or login of the environment, keep no cookies, follow no redirects, unpack nothing, and go to no link-local address
unless it is allowed. Nothing from a client becomes part of a URL, nor of a header but its trace context, which was checked; the request id
in a header is made here.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import aiohttp

from headrace.core.errors import ConfigError
from headrace.core.regular_files import MAX_SECRET_BYTES, read_file
from headrace.gateway.upstream.model_config import ForeignConfig
from headrace.machine.hosts import is_link_local
from headrace.machine.private_files import why_not_private

log = logging.getLogger("headrace.gateway")

MAX_FACTS_BYTES = 2 << 20

NOT_CONNECTED = (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError, UnicodeError)

CONNECT_S = 5.0

FACTS_S = 5.0


class ForeignSession:
    def __init__(self, config: ForeignConfig, session: aiohttp.ClientSession, api_key: str) -> None:
        self._url = config.url.rstrip("/")
        self.models_url = f"{self._url}/models"
        self._session = session
        self._headers = {"accept-encoding": "identity", **({"authorization": f"Bearer {api_key}"} if api_key else {})}

    @property
    def metrics_url(self) -> str | None:
        """Beside /v1 as in vLLM; None for a base URL that does not end with /v1."""
        return self._url.removesuffix("/v1") + "/metrics" if self._url.endswith("/v1") else None

    async def post(self, path: str, body: bytes, request_id: str, trace: Mapping[str, str]) -> aiohttp.ClientResponse:
        """The caller closes it."""
        headers = {"accept": "text/event-stream", "content-type": "application/json", "x-request-id": request_id}
        return await self._session.post(
            f"{self._url}/{path}", data=body, headers={**self._headers, **headers, **trace}, allow_redirects=False
        )

    async def get(self, url: str) -> tuple[int, bytes]:
        """A body beyond MAX_FACTS_BYTES becomes empty."""
        async with (
            asyncio.timeout(FACTS_S),
            self._session.get(url, headers=self._headers, allow_redirects=False) as response,
        ):
            body = bytearray()
            while piece := await response.content.read(64 << 10):
                body += piece
                if len(body) > MAX_FACTS_BYTES:
                    return response.status, b""
            return response.status, bytes(body)


@asynccontextmanager
async def open_session(model: str, name: str, config: ForeignConfig) -> AsyncIterator[ForeignSession]:
    api_key = read_key(config)
    session = aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, socket_factory=partial(_guarded_socket, model, name)),
        timeout=aiohttp.ClientTimeout(total=None, connect=CONNECT_S),
        cookie_jar=aiohttp.DummyCookieJar(),
        auto_decompress=False,
        trust_env=False,
    )
    async with session:
        yield ForeignSession(config, session, api_key)


def read_key(config: ForeignConfig) -> str:
    """Raises ConfigError, never showing what was read."""
    where = "api_key_env" if config.api_key_env else "api_key_file"
    try:
        key = os.environ[config.api_key_env] if config.api_key_env else _text_of(config.api_key_file)
    except KeyError:
        raise ConfigError(where, f"the variable {config.api_key_env} is not set") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(where, f"{config.api_key_file} cannot be read ({getattr(error, 'strerror', None) or 'not ASCII'})") from None
    if config.api_key_file and (reason := why_not_private(where, config.api_key_file)):
        log.warning("%s", reason)
    key = key.strip()
    if (config.api_key_env or config.api_key_file) and (not key or not key.isascii() or not key.isprintable()):
        raise ConfigError(where, "does not hold a key", "One line of printable ASCII.")
    return key


def _text_of(file: str) -> str:
    return read_file(file, MAX_SECRET_BYTES).decode("ascii") if file else ""


def _guarded_socket(model: str, name: str, address: tuple[Any, ...]) -> socket.socket:
    """Raises PermissionError for a link-local address."""
    family, kind, protocol, _, place = address
    if is_link_local(place[0]):
        reason = "has a link-local address and is not connected to"
        log.warning("model %s: its server %s %s", model, name, reason)
        raise PermissionError("a link-local address")
    return socket.socket(family, kind, protocol)
