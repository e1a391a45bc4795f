"""A blocking client of the OpenAI-compatible API, for `headrace chat` and `headrace agent`, from the standard library alone."""

from __future__ import annotations

import json
import ssl
from collections.abc import Generator
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from urllib.parse import urlsplit

from headrace.cli.exits import ServerFailed

CONNECT_TIMEOUT_S = 10.0


def server_root(url: str) -> str:
    """The root URL of a server, to which /v1/... is appended. Raises ServerFailed.

    "localhost:8000", "http://localhost:8000/" and "http://localhost:8000/v1" are the same server. A path before /v1 is kept.
    """
    parts = urlsplit(url if "//" in url else f"http://{url}")
    if "@" in parts.netloc:  # it would be kept in messages and recorded results
        raise ServerFailed("--url holds a user name or a password; it takes a server's address alone, and a key goes into --api-key")
    try:
        is_server = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # the port is no number
        is_server = False
    if not is_server or parts.query or parts.fragment:
        raise ServerFailed(f"{url!r} is not an http(s) URL of a server, like http://127.0.0.1:8000")
    return f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/').removesuffix('/v1').rstrip('/')}"


class ApiClient:
    """url: as `server_root` takes it"""

    def __init__(self, url: str, *, api_key: str | None = None) -> None:
        self.url = server_root(url)
        self._parts = urlsplit(self.url)
        self._headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {api_key}"} if api_key else {})

    def get(self, path: str) -> dict[str, object]:
        """Raises ServerFailed."""
        connection = self._connect()
        try:
            return _decode(self._request(connection, "GET", path, None))
        finally:
            connection.close()

    def models(self) -> list[str]:
        data = self.get("/v1/models").get("data")
        return [str(entry["id"]) for entry in data if isinstance(entry, dict) and "id" in entry] if isinstance(data, list) else []

    def chat(self, body: dict[str, object]) -> Generator[dict[str, object]]:
        """The chunks of a streamed chat completion. Closing the iterator closes the connection, which cancels the request.

        Raises ServerFailed if the server cannot be reached, answers with an error, sends one in the stream, or ends the stream too early.
        """
        connection = self._connect()
        try:
            response = self._request(connection, "POST", "/v1/chat/completions", {**body, "stream": True})
            for line in response:
                if not line.startswith(b"data:"):
                    continue
                data = line[5:].strip()
                if data == b"[DONE]":
                    return
                chunk = json.loads(data)
                if "error" in chunk:
                    raise ServerFailed(_message(chunk))
                yield chunk
            raise ServerFailed(f"{self.url}: the answer broke off; try again")
        except (OSError, HTTPException, ValueError) as error:
            raise ServerFailed(f"{self.url}: {error or type(error).__name__}") from error
        finally:
            connection.close()

    def _connect(self) -> HTTPConnection:
        host, port = self._parts.hostname or "", self._parts.port
        if self._parts.scheme == "https":
            return HTTPSConnection(host, port, timeout=CONNECT_TIMEOUT_S, context=ssl.create_default_context())
        return HTTPConnection(host, port, timeout=CONNECT_TIMEOUT_S)

    def _request(self, connection: HTTPConnection, method: str, path: str, body: dict[str, object] | None) -> HTTPResponse:
        try:
            connection.connect()
            if connection.sock is not None and body is not None:
                connection.sock.settimeout(None)  # an answer may take as long as it takes; keep-alives come meanwhile
            connection.request(method, self._parts.path + path, None if body is None else json.dumps(body), self._headers)
            response = connection.getresponse()
        except (OSError, HTTPException) as error:
            raise ServerFailed(f"{self.url}: {error or type(error).__name__}. Is a server running there?") from error
        if response.status != 200:
            raise ServerFailed(f"{self.url} answered {response.status}: {_message(_decode(response))}")
        return response


def _decode(response: HTTPResponse) -> dict[str, object]:
    try:
        value = json.loads(response.read())
    except (OSError, HTTPException, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def _message(body: dict[str, object]) -> str:
    error = body.get("error")
    return str(error.get("message", error)) if isinstance(error, dict) else str(error or "no reason given")
