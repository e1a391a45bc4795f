"""Reads versions of models from an OCI registry: artifacts of the CNCF ModelPack specification, and files as oras pushes them.

A manifest lists layers by digest. A raw layer is a file under the name that an annotation gives it; a tar archive, packed or not, is
unpacked by `archives`. Tags move, digests do not. Writing is left to other tools.

obstore asks for manifests and for ranges of blobs, repeats, and follows redirects; it sends the authorization to no other host. A request
without one is answered with a challenge (RFC 9110): it says where a token is to be had, or that a password is wanted. Docker's passwords
are used.
"""

from __future__ import annotations

import base64
import json
import os
import re
import threading
from collections.abc import Callable, Mapping
from email.message import Message
from http.client import HTTPException
from pathlib import Path, PurePosixPath
from typing import Any, NoReturn, TypeVar
from urllib.error import HTTPError
from urllib.parse import urlencode, urlsplit
from urllib.request import HTTPRedirectHandler, Request, build_opener, parse_http_list, parse_keqv_list

from headrace.core.errors import CheckpointError, ConfigError, RegistryFailed, shorten
from headrace.core.regular_files import MAX_SECRET_BYTES, read_file
from headrace.machine.hosts import is_loopback
from headrace.registry.manifest import MAX_FILES, Manifest, StoredFile, checked, digest_of, is_kept
from headrace.registry.names import DIGEST, OCI, Reference, artifact_key
from headrace.registry.remote import MAX_TRIES, Found, failures, import_obstore

MAX_MANIFEST_BYTES = 4 << 20
"""What registries take."""
MAX_ANSWER_BYTES = 64 << 10
ANSWER_S = 30.0
KINDS = ("application/vnd.oci.image.manifest.v1+json", "application/vnd.oci.image.index.v1+json")
PATHS = ("org.cncf.model.filepath", "org.cnai.model.filepath", "org.opencontainers.image.title")
"""Annotations of a layer that name its file."""
NOT_SERVED = re.compile(r"application/vnd\.(cncf|cnai)\.model\.(code|dataset|doc)\.")
ARCHIVE = re.compile(r"[.+]tar(?:[.+](gzip|zstd))?$")
PASSWORDS = "Give a user and a password in `auths` of {} (identity tokens and credential helpers are not read)."

Value = TypeVar("Value")


class OciRepository:
    """url: oci://HOST/PATH, checked by `names.read_reference`. Methods raise RegistryFailed where the registry does not answer."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._host, _, self._path = url.removeprefix(OCI).partition("/")
        self._is_plain = is_loopback(urlsplit(f"//{self._host}").hostname or "")
        self._root = f"{'http' if self._is_plain else 'https'}://{self._host}/v2/"
        self._lock = threading.Lock()
        with failures(url):
            self._store = self._open({})

    def find(self, name: str, tag: str) -> Found:
        """Raises CheckpointError for a manifest that is none or has another digest than was asked for, ConfigError where there is none."""
        where = str(Reference(self.url.rpartition("/")[0], name, tag))
        data = self._manifest(tag, where)
        digest = f"sha256:{digest_of(data)}"
        if DIGEST.fullmatch(tag) and tag != digest:
            raise CheckpointError(where, f"has the digest {digest}", "The registry is damaged, or not to be trusted.")
        files, archives = read_layers(data, where)
        manifest = Manifest(name, digest.removeprefix("sha256:"), files)
        return Found(manifest if archives else checked(manifest, where), artifact_key(name, digest), archives)

    def read_range(self, file: StoredFile, start: int, size: int) -> memoryview:
        obstore = import_obstore()
        key = f"blobs/sha256:{file.sha256}"
        with failures(self.url):
            return memoryview(self._asked(lambda store: obstore.get_range(store, key, start=start, length=size)))

    def _manifest(self, tag: str, where: str) -> bytes:
        obstore = import_obstore()
        with failures(self.url):
            try:
                result = self._asked(lambda store: obstore.get(store, f"manifests/{tag}"))
            except FileNotFoundError:
                raise ConfigError("model", f"{where} is not in the registry") from None
            if result.meta["size"] > MAX_MANIFEST_BYTES:
                raise CheckpointError(where, f"has a manifest of {result.meta['size']} bytes, more than {MAX_MANIFEST_BYTES}")
            return bytes(result.bytes())

    def _open(self, headers: Mapping[str, str]) -> Any:
        import_obstore()
        from obstore.store import HTTPStore

        options = {"allow_http": self._is_plain, "default_headers": {"accept": ", ".join(KINDS), **headers}}
        return HTTPStore.from_url(self._root + self._path, client_options=options, retry_config={"max_retries": MAX_TRIES})

    def _asked(self, ask: Callable[[Any], Value]) -> Value:
        """Again with a new token where the registry wants one, or another one: they last some minutes."""
        store = self._store
        try:
            return ask(store)
        except import_obstore().exceptions.UnauthenticatedError:
            with self._lock:
                if self._store is store:
                    self._store = self._open({"authorization": self._authorization()})
            return ask(self._store)

    def _authorization(self) -> str:
        password = _password(self._host)
        for challenge in self._challenges():
            scheme, _, rest = challenge.partition(" ")
            if scheme.lower() == "bearer":
                return f"Bearer {self._token(parse_keqv_list(parse_http_list(rest)), password)}"
            if scheme.lower() == "basic" and password:
                return f"Basic {password}"
        return self._refuse("wants a password, or an authorization that is not known here")

    def _challenges(self) -> list[str]:
        try:
            _get(Request(self._root))
        except HTTPError as error:
            return error.headers.get_all("www-authenticate", []) if error.code == 401 else []
        except (OSError, HTTPException) as error:
            raise RegistryFailed(self.url, f"{self._root} does not answer: {error}") from error
        return []

    def _token(self, challenge: Mapping[str, str], password: str) -> str:
        realm = challenge.get("realm", "")
        parts = urlsplit(realm)
        if parts.scheme != "https" and not (self._is_plain and parts.scheme == "http" and is_loopback(parts.hostname or "")):
            self._refuse(f"wants a token of {shorten(realm)}, which is no https URL")
        asked = urlencode({"service": challenge.get("service", ""), "scope": f"repository:{self._path}:pull"})
        headers = {"Authorization": f"Basic {password}"} if password else {}
        try:
            answer = json.loads(_get(Request(f"{realm}{'&' if parts.query else '?'}{asked}", headers=headers)))
            token = answer.get("token") or answer["access_token"]
        except (OSError, HTTPException, ValueError, KeyError, AttributeError, RecursionError) as error:
            self._refuse(f"gets no token from {shorten(realm)}: {error}")
        return str(token)

    def _refuse(self, reason: str) -> NoReturn:
        raise RegistryFailed(self.url, reason, PASSWORDS.format(_docker_config()))


def read_layers(data: bytes, where: str) -> tuple[tuple[StoredFile, ...], tuple[StoredFile, ...]]:
    """Files to be served, and archives that hold others: their paths end in tar, gzip or zstd. Raises CheckpointError, naming `where`."""
    try:
        manifest = json.loads(data)
        if "manifests" in manifest:
            raise CheckpointError(where, f"is an index of {len(manifest['manifests'])} artifacts", "Give the digest of one of them.")
        layers = [_layer(layer, where) for layer in manifest["layers"]]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(where, f"is no manifest of an OCI artifact: {error!r}") from error
    if len(layers) > MAX_FILES:
        raise CheckpointError(where, f"has {len(layers)} layers, more than {MAX_FILES}")
    found = [(kind, file) for kind, file in layers if NOT_SERVED.match(kind) is None]
    files = tuple(file for kind, file in found if ARCHIVE.search(kind) is None and is_kept(file.path))
    archives = [(packing, file) for kind, file in found if (packing := ARCHIVE.search(kind)) is not None]
    return files, tuple(StoredFile(packing.group(1) or "tar", file.size, file.sha256) for packing, file in archives)


def _layer(layer: Mapping[str, Any], where: str) -> tuple[str, StoredFile]:
    """Its media type, and the file; empty path: it has none."""
    annotations: Mapping[str, str] = layer.get("annotations") or {}
    path = next((annotations[name] for name in PATHS if name in annotations), "")
    digest = DIGEST.fullmatch(layer["digest"])
    if digest is None or type(layer["size"]) is not int or layer["size"] < 0:
        raise CheckpointError(where, f"gives the layer {shorten(path)} no SHA-256 and size")
    return str(layer["mediaType"]), StoredFile(plain_path(path, where), layer["size"], digest.group(1))


def plain_path(path: str, where: str) -> str:
    """Raises CheckpointError for one that leads out of the model's folder."""
    parts = PurePosixPath(path)
    if parts.is_absolute() or ".." in parts.parts or "\\" in path:
        raise CheckpointError(where, f"names {shorten(path)}, which leads out of the model's folder")
    return str(parts) if path else ""


class _NoRedirects(HTTPRedirectHandler):
    """urllib would send the password along."""

    def redirect_request(self, req: Request, fp: Any, code: int, msg: str, headers: Message, newurl: str) -> None:
        return None


def _get(request: Request) -> bytes:
    with build_opener(_NoRedirects).open(request, timeout=ANSWER_S) as answer:
        data: bytes = answer.read(MAX_ANSWER_BYTES)
    return data


def _docker_config() -> Path:
    """In a mounted pull secret of Kubernetes the file has another name."""
    folder = Path(os.environ.get("DOCKER_CONFIG") or os.path.expanduser("~/.docker"))
    secret = folder / ".dockerconfigjson"
    return secret if secret.exists() else folder / "config.json"


def _password(host: str) -> str:
    """As Basic has it; empty: none is known."""
    path = _docker_config()
    try:
        auths = json.loads(read_file(path, MAX_SECRET_BYTES)).get("auths", {})
        entry = auths.get(host) or auths.get(f"https://{host}") or {}
        if "password" in entry:
            return base64.b64encode(f"{entry['username']}:{entry['password']}".encode()).decode()
        return str(entry.get("auth", ""))
    except FileNotFoundError:
        return ""
    except (OSError, ValueError, KeyError, AttributeError, RecursionError) as error:
        raise ConfigError(str(path), f"cannot be read as Docker's configuration: {error!r}") from error
