"""Sends an operator's commands to a running deployment: finds it, connects to its admin socket or over TCP, and reads the reply line by
line.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from http.client import HTTPConnection, HTTPException, HTTPResponse
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlencode, urlsplit

from headrace.cli.exits import ServerFailed, UsageRefused
from headrace.core.errors import ConfigError
from headrace.fleet.admin import SOCKET_NAME, TOKEN_NAME
from headrace.fleet.files import is_running, running_deployments
from headrace.machine.hosts import is_loopback
from headrace.machine.private_files import read_token

if TYPE_CHECKING:
    from ssl import SSLContext

CONNECT_TIMEOUT_S = 5.0

STATUS_TIMEOUT_S = 10.0
"""The supervisor waits two seconds for its gateways. Commands have no limit."""

RUN_DIR_VARIABLE = "HEADRACE_RUN_DIR"
"""The unit for systemd sets it."""


def find_deployment(run_dir: Path | None) -> Path:
    """The folder of the one deployment that runs here: `run_dir`, HEADRACE_RUN_DIR, or in the default place of `headrace serve`.

    Raises: ServerFailed when there is none, ConfigError when there are several.
    """
    if run_dir is None and (named := os.environ.get(RUN_DIR_VARIABLE)):
        run_dir = Path(named)
    if run_dir is not None and is_running(run_dir):
        return run_dir
    folders = running_deployments(run_dir)
    if not folders:
        place = f"in {run_dir}" if run_dir is not None else "for this user"
        raise ServerFailed(f"no deployment of `headrace serve` runs {place}. Name its run directory: --run-dir DIR.")
    if len(folders) > 1:
        choices = "".join(f"\n  --run-dir {folder}: {_described(folder)}" for folder in folders)
        raise ConfigError("--run-dir", f"is missing, and {len(folders)} deployments run", f"Add one of:{choices}")
    return folders[0]


def _described(folder: Path) -> str:
    try:
        status = AdminClient(folder).status()
    except ServerFailed as error:
        return str(error)
    return "; ".join([shown_place(status), *(", ".join([model["name"], *shown_upstreams(model)]) for model in status["models"])])


def shown_place(status: Mapping[str, Any]) -> str:
    """Where a deployment listens, and its configuration file. status: that of an older version has neither"""
    return f"{status.get('address', 'an older version')}, {status.get('config') or 'without a configuration file'}"


def shown_upstreams(model: Mapping[str, Any]) -> list[str]:
    return [f"answered by {' and '.join(model['upstreams'])}"] if model.get("upstreams") else []


class AdminClient:
    """Methods raise ServerFailed if the deployment does not answer, or ends before the answer does."""

    def __init__(self, folder: Path) -> None:
        """folder: the deployment's own. Raises ServerFailed if its token cannot be read"""
        self._folder = folder
        try:
            token = (folder / TOKEN_NAME).read_text(encoding="ascii")
        except OSError as error:
            raise ServerFailed(
                f"{folder / TOKEN_NAME} cannot be read ({error.strerror}): the deployment is starting or has ended"
            ) from None
        self._headers = _headers(token)

    @property
    def place(self) -> str:
        return f"in {self._folder}"

    def is_running(self) -> bool:
        return is_running(self._folder)

    def status(self) -> dict[str, Any]:
        with self._response("GET", "/status", timeout_s=STATUS_TIMEOUT_S) as response:
            status: dict[str, Any] = self._read(response)
        return status

    def adapters(self) -> list[dict[str, Any]]:
        with self._response("GET", "/adapters", timeout_s=STATUS_TIMEOUT_S) as response:
            rows: list[dict[str, Any]] = self._read(response)
        return rows

    def request(self, method: str, path: Sequence[str], query: Mapping[str, str], body: Mapping[str, object] | None) -> Any:
        """The JSON answer to a request about keys. Raises ServerFailed, too, if the deployment refuses the request."""
        target = "/" + "/".join(quote(part, safe="") for part in path) + (f"?{urlencode(query)}" if query else "")
        sent = None if body is None else json.dumps(body)
        with self._response(method, target, sent, timeout_s=STATUS_TIMEOUT_S, refusals=(400, 503)) as response:
            answer = self._read(response)
            if response.status != 200:
                raise ServerFailed(f"the deployment {self.place} refuses: {answer['error']}")
            return answer

    def command(self, name: str, body: Mapping[str, object]) -> Iterator[dict[str, Any]]:
        """Each line of the answer as it comes; the last one says how the command ended."""
        is_ended = False
        with self._response("POST", f"/{name}", json.dumps(body)) as response:
            for line in _lines(response):
                is_ended = line["event"] != "progress"
                yield line
        if not is_ended:
            raise ServerFailed("the deployment ended before the command did")

    def _connection(self, timeout_s: float | None) -> HTTPConnection:
        return _UnixConnection(self._folder / SOCKET_NAME, timeout_s)

    def _why(self, error: Exception) -> str:
        return str(error)

    def _read(self, response: HTTPResponse) -> Any:
        try:
            return json.loads(response.read())
        except (OSError, HTTPException, ValueError) as error:
            raise ServerFailed(f"the deployment {self.place} does not answer ({error})") from None

    @contextmanager
    def _response(
        self, method: str, path: str, body: str | None = None, *, timeout_s: float | None = None, refusals: Collection[int] = ()
    ) -> Iterator[HTTPResponse]:
        with closing(self._connection(timeout_s)) as connection:
            try:
                connection.request(method, path, body, self._headers)
                response = connection.getresponse()
            except (OSError, HTTPException) as error:
                raise ServerFailed(f"the deployment {self.place} does not answer ({self._why(error)})") from None
            with response:
                if response.status not in (200, *refusals):
                    said = response.read(400).decode(errors="replace")
                    raise ServerFailed(f"the deployment {self.place} answered {response.status}: {said}")
                yield response


class RemoteAdminClient(AdminClient):
    def __init__(self, url: str, files: Path) -> None:
        """files: folder with the token, and beyond loopback with this client's certificates. Raises ConfigError and UsageRefused"""
        import ssl

        from headrace.fleet.admin_listen import operator_context
        from headrace.wire.tls.files import files_in, token_path

        self._url = url
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or not parts.port or parts.path.strip("/"):
            raise UsageRefused(f"--admin: {url!r} is not https://HOST:PORT.")
        if parts.scheme == "http" and not is_loopback(parts.hostname):
            raise UsageRefused(f"--admin: {url!r} would send the token unencrypted to another machine. Write https.")
        self._host, self._port = parts.hostname, parts.port
        self._files = files_in(files)
        self._context: ssl.SSLContext | None = operator_context(self._files) if parts.scheme == "https" else None
        self._headers = _headers(read_token("--tls-dir", token_path("", str(files))))

    @property
    def place(self) -> str:
        return f"at {self._url}"

    def is_running(self) -> bool:
        try:
            socket.create_connection((self._host, self._port), CONNECT_TIMEOUT_S).close()
        except OSError:
            return False
        return True

    def _connection(self, timeout_s: float | None) -> HTTPConnection:
        return _TcpConnection(self._host, self._port, self._context, timeout_s)

    def _why(self, error: Exception) -> str:
        from headrace.wire.tls.files import handshake_fault

        return handshake_fault(error, own="this command", peer="the deployment", ca=self._files.ca) or str(error)


def open_client(run_dir: Path | None, admin: str | None, tls_dir: Path | None) -> AdminClient:
    if admin is None:
        if tls_dir is not None:
            raise UsageRefused("--tls-dir: is for --admin URL.")
        return AdminClient(find_deployment(run_dir))
    if run_dir is not None:
        raise UsageRefused("--run-dir and --admin: give one of them.")
    if tls_dir is None:
        raise UsageRefused("--tls-dir: name the folder with the token and this end's certificates.")
    return RemoteAdminClient(admin, tls_dir)


def _headers(token: str) -> dict[str, str]:
    return {"authorization": f"Bearer {token}", "content-type": "application/json"}


def _lines(response: HTTPResponse) -> Iterator[dict[str, Any]]:
    try:
        for line in response:
            yield json.loads(line)
    except (OSError, HTTPException, ValueError):
        return


class _UnixConnection(HTTPConnection):
    def __init__(self, path: Path, timeout_s: float | None = None) -> None:
        super().__init__("headrace")
        self._path = path
        self._timeout_s = timeout_s

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(CONNECT_TIMEOUT_S)
        self.sock.connect(str(self._path))
        self.sock.settimeout(self._timeout_s)


class _TcpConnection(HTTPConnection):
    """Waits for an answer for as long as the command takes, unlike a connection of `http.client`."""

    def __init__(self, host: str, port: int, context: SSLContext | None, timeout_s: float | None) -> None:
        super().__init__(host, port)
        self._context = context
        self._timeout_s = timeout_s

    def connect(self) -> None:
        self.sock = socket.create_connection((self.host, self.port), CONNECT_TIMEOUT_S)
        if self._context is not None:
            self.sock = self._context.wrap_socket(self.sock, server_hostname=self.host)
        self.sock.settimeout(self._timeout_s)
