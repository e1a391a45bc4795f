"""Makes OCI artifacts of models, and serves them: by a small server in this process, or by Debian's `docker-registry` in one of its own."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import re
import socket
import subprocess
import tarfile
import threading
import time
import urllib.request
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import padding, rsa

MODEL = "application/vnd.cncf.model"
PATH = "org.cncf.model.filepath"
START_S = 60.0
SECRET = base64.b64encode(b"reader:secret").decode()

Layer = tuple[str, str, bytes]
"""Media type, file's name, bytes."""


def digest_of(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def raw(files: Mapping[str, bytes]) -> list[Layer]:
    kinds = {".safetensors": "weight", ".gguf": "weight", ".py": "code", ".md": "doc"}
    return [(f"{MODEL}.{kinds.get(Path(name).suffix, 'weight.config')}.v1.raw", name, data) for name, data in files.items()]


def tar_of(files: Mapping[str, bytes], members: Iterable[tarfile.TarInfo] = ()) -> bytes:
    """members: added as they are, without bytes"""
    written = io.BytesIO()
    with tarfile.open(fileobj=written, mode="w") as archive:
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
        for member in members:
            archive.addfile(member)
    return written.getvalue()


def manifest_of(layers: Iterable[Layer]) -> bytes:
    config = {"mediaType": f"{MODEL}.config.v1+json", "digest": digest_of(b"{}"), "size": 2}
    found = [{"mediaType": kind, "digest": digest_of(data), "size": len(data), "annotations": {PATH: name}} for kind, name, data in layers]
    kind = "application/vnd.oci.image.manifest.v1+json"
    artifact = {"schemaVersion": 2, "mediaType": kind, "artifactType": f"{MODEL}.manifest.v1+json", "config": config, "layers": found}
    return json.dumps(artifact).encode()


class SmallRegistry:
    """
    manifests     by tag or digest
    password      wanted, as Basic has it; by a token's server where `num_uses` is not 0
    num_uses      of a token, which is then refused
    storage       blobs are at this one, to which requests for them are redirected
    seen          of every request: method, path, the header Authorization
    realm         where tokens are had; empty: here
    """

    def __init__(self) -> None:
        self.manifests: dict[str, bytes] = {}
        self.blobs: dict[str, bytes] = {}
        self.password, self.num_uses, self.realm = "", 0, ""
        self.storage: SmallRegistry | None = None
        self.seen: list[tuple[str, str]] = []
        self._tokens: dict[str, int] = {}
        self._lock = threading.Lock()
        registry = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, format: str, *args: object) -> None:
                pass

            def do_GET(self) -> None:
                status, headers, data = registry.answer(self.path, self.headers.get("Authorization", ""), self.headers.get("Range", ""))
                self.send_response(status)
                for name, value in {**headers, "Content-Length": str(len(data))}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(data)

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.port = self._server.server_port
        self.url = f"oci://127.0.0.1:{self.port}/models"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()

    def push(self, tag: str, layers: list[Layer]) -> str:
        """The digest."""
        data = manifest_of(layers)
        self.blobs |= {digest_of(blob): blob for _, _, blob in layers}
        self.manifests |= {tag: data, digest_of(data): data}
        return digest_of(data)

    def answer(self, target: str, authorization: str, wanted: str) -> tuple[int, dict[str, str], bytes]:
        path = urlsplit(target).path
        with self._lock:
            self.seen.append((target, authorization))
            if path == "/token":
                return self._token(parse_qs(urlsplit(target).query), authorization)
            if not self._is_let_in(authorization):
                realm = self.realm or f"http://127.0.0.1:{self.port}/token"
                challenge = f'Bearer realm="{realm}",service="tests"' if self.num_uses else 'Basic realm="tests"'
                return 401, {"WWW-Authenticate": challenge}, b""
        kind, _, key = path.removeprefix("/v2/models/").partition("/")[2].partition("/")
        if kind == "manifests" and key in self.manifests:
            return 200, {"Content-Type": "application/vnd.oci.image.manifest.v1+json"}, self.manifests[key]
        if kind == "blobs" and self.storage is not None:
            return 307, {"Location": f"http://localhost:{self.storage.port}{path}"}, b""
        found = re.fullmatch(r"bytes=(\d+)-(\d+)", wanted)
        if kind == "blobs" and key in self.blobs and found is not None:
            data = self.blobs[key][int(found.group(1)) : int(found.group(2)) + 1]
            return 206, {"Content-Range": f"bytes {found.group(1)}-{found.group(2)}/{len(self.blobs[key])}"}, data
        return 404, {}, b""

    def _is_let_in(self, authorization: str) -> bool:
        if not self.num_uses:
            return not self.password or authorization == f"Basic {self.password}"
        token = authorization.removeprefix("Bearer ")
        self._tokens[token] = self._tokens.get(token, 0) - 1
        return self._tokens[token] >= 0

    def _token(self, asked: dict[str, list[str]], authorization: str) -> tuple[int, dict[str, str], bytes]:
        is_right = asked == {"service": ["tests"], "scope": ["repository:models/llama:pull"]}
        if not is_right or (self.password and authorization != f"Basic {self.password}"):
            return 401, {}, b""
        token = f"token-{len(self._tokens)}"
        self._tokens[token] = self.num_uses
        return 200, {}, json.dumps({"token": token}).encode()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@contextmanager
def docker_registry(folder: Path) -> Iterator[str]:
    """The URL of a root in it. It wants tokens, which a `TokenServer` beside it signs, for the password SECRET."""
    with token_server(folder / "tokens.crt") as tokens, socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
        free.close()
        auth = {"realm": tokens.realm, "service": "tests", "issuer": "tests", "rootcertbundle": str(folder / "tokens.crt")}
        settings = {
            "version": 0.1,
            "log": {"level": "warn"},
            "storage": {"filesystem": {"rootdirectory": str(folder / "data")}},
            "http": {"addr": f"127.0.0.1:{port}"},
            "auth": {"token": auth},
        }
        (folder / "config.yml").write_text(json.dumps(settings))
        with (folder / "log").open("wb") as log:
            process = subprocess.Popen(["docker-registry", "serve", folder / "config.yml"], stdout=log, stderr=log)
        try:
            deadline = time.monotonic() + START_S
            while not _answers(port):
                assert process.poll() is None, (folder / "log").read_text()[-2000:]
                assert time.monotonic() < deadline, "the registry does not serve"
                time.sleep(0.05)
            yield f"oci://127.0.0.1:{port}/models"
        finally:
            process.kill()
            process.wait(START_S)


def push(url: str, tag: str, layers: list[Layer]) -> str:
    """As a client of the specification does, blob by blob and then the manifest; the digest."""
    base = f"http://{url.removeprefix('oci://').replace('/', '/v2/', 1)}/llama"
    token = json.loads(_get(f"{_realm_of(base)}?scope=repository:models/llama:pull,push", f"Basic {SECRET}"))["token"]
    for data in [b"{}", *(blob for _, _, blob in layers)]:
        place = _send("POST", f"{base}/blobs/uploads/", b"", token)
        _send("PUT", f"{place}{'&' if '?' in place else '?'}digest={digest_of(data)}", data, token)
    data = manifest_of(layers)
    _send("PUT", f"{base}/manifests/{tag}", data, token, "application/vnd.oci.image.manifest.v1+json")
    return digest_of(data)


class TokenServer:
    """Signs tokens as Docker's authorization servers do, for any scope."""

    def __init__(self, certificate: Path) -> None:
        self._key = rsa.generate_private_key(65537, 2048)
        name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "tests")])
        now = datetime.now(UTC)
        made = x509.CertificateBuilder(name, name, self._key.public_key(), x509.random_serial_number())
        made = made.not_valid_before(now - timedelta(days=1)).not_valid_after(now + timedelta(days=1))
        signed = made.add_extension(x509.BasicConstraints(ca=True, path_length=None), True).sign(self._key, hashes.SHA256())
        certificate.write_bytes(signed.public_bytes(serialization.Encoding.PEM))
        self._chain = [base64.b64encode(signed.public_bytes(serialization.Encoding.DER)).decode()]
        self.realm = ""

    def token(self, scope: str) -> str:
        kind, name, actions = scope.split(":")
        now = int(time.time())
        claims = {"iss": "tests", "sub": "reader", "aud": "tests", "exp": now + 600, "nbf": now - 60, "iat": now, "jti": "1"}
        access = [{"type": kind, "name": name, "actions": actions.split(",")}]
        parts = [{"alg": "RS256", "typ": "JWT", "x5c": self._chain}, {**claims, "access": access}]
        text = ".".join(_base64(json.dumps(part).encode()) for part in parts)
        return f"{text}.{_base64(self._key.sign(text.encode(), padding.PKCS1v15(), hashes.SHA256()))}"


@contextmanager
def token_server(certificate: Path) -> Iterator[TokenServer]:
    tokens = TokenServer(certificate)

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None:
            pass

        def do_GET(self) -> None:
            [scope] = parse_qs(urlsplit(self.path).query)["scope"]
            self.send_response(200 if self.headers.get("Authorization") == f"Basic {SECRET}" else 401)
            self.end_headers()
            self.wfile.write(json.dumps({"access_token": tokens.token(scope)} | {"token": tokens.token(scope)}).encode())

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    tokens.realm = f"http://127.0.0.1:{server.server_port}/token"
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield tokens
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _base64(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def _answers(port: int) -> bool:
    try:
        _get(f"http://127.0.0.1:{port}/v2/", "")
    except urllib.error.HTTPError as error:
        return error.code == 401
    except OSError:
        return False
    return True


def _realm_of(base: str) -> str:
    try:
        _get(f"{base}/manifests/1", "")
    except urllib.error.HTTPError as error:
        return str(error.headers["WWW-Authenticate"]).split('realm="')[1].split('"')[0]
    raise AssertionError("no token is wanted")


def _get(url: str, authorization: str) -> bytes:
    with urllib.request.urlopen(urllib.request.Request(url, headers={"Authorization": authorization}), timeout=30) as answer:
        data: bytes = answer.read()
    return data


def _send(method: str, url: str, data: bytes, token: str, kind: str = "application/octet-stream") -> str:
    """Where the answer says to go on."""
    headers: dict[str, Any] = {"Authorization": f"Bearer {token}", "Content-Type": kind}
    with urllib.request.urlopen(urllib.request.Request(url, data=data, method=method, headers=headers), timeout=30) as answer:
        return str(answer.headers["Location"])
