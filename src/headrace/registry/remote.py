"""A registry: immutable versions and the aliases that point to them, under one URL of a folder, of S3 or of Google Cloud Storage.

    blobs/DIGEST                          a file's bytes, by their SHA-256; versions share them
    models/NAME/versions/VERSION.json     its manifest, written once, after all of its blobs
    models/NAME/aliases/ALIAS/NUMBER.json {"version": ...}; the highest number counts
    models/NAME/removed/VERSION.json      its name is not used again

All but blobs, whose bytes are always the same, is written once: of two writers of one name the store itself refuses the second ("put if
absent"). Writers of the store are trusted: a manifest says what the bytes are, and nothing vouches for the manifest. obstore signs,
repeats and speaks to the stores; credentials are read where the clients of these clouds read theirs (AWS_ACCESS_KEY_ID, AWS_ENDPOINT_URL,
AWS_ALLOW_HTTP, ...).
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from headrace.core.errors import CheckpointError, ConfigError, RegistryFailed
from headrace.registry.manifest import MAX_MANIFEST_BYTES, Manifest, StoredFile, describe, digest_of, files_of, read_manifest
from headrace.registry.names import LATEST, NAME, OCI, Reference, check_name, check_registry

CHUNK_BYTES = 8 << 20
UPLOAD_CHUNKS = 4
"""Sent at a time, so that an upload of up to 78 GiB holds 32 MiB."""
MAX_PARTS = 10_000
"""S3 takes no more of one file: those of larger ones are larger."""
GRACE_S = 24 * 3600.0
"""A blob that no version names is kept for that long: a push may be about to name it."""
MAX_PUSH_S = GRACE_S / 2
"""A blob that was there is counted on for half of it, and a push that takes longer is refused: its blobs may have been collected."""
MAX_TRIES = 8

OnProgress = Callable[[int, int], None]
"""Called with bytes done and bytes in all."""


@dataclass(frozen=True, slots=True)
class Found:
    """
    digest    of the manifest's bytes, or `names.artifact_key`
    archives  to be unpacked (`archives.unpack`): what they hold is not in the manifest. Their paths are how they are packed
    """

    manifest: Manifest
    digest: str
    archives: tuple[StoredFile, ...] = ()


@dataclass(frozen=True, slots=True)
class Collected:
    num_blobs: int
    num_bytes: int


class Registry:
    """url: checked by `names.check_registry`. Methods raise RegistryFailed where the store does not answer or refuses."""

    def __init__(self, url: str, clock: Callable[[], float] = time.time, *, may_make: bool = False) -> None:
        """may_make: a folder that is not there is made, as a push does"""
        self.url = check_registry(url)
        if url.startswith(OCI):
            remedy = "Push with oras or modctl, move tags there, and give pull, serve and verify --here its models."
            raise ConfigError("registry", f"{url} is an OCI registry, which is only read", remedy)
        self._clock = clock
        with failures(self.url):
            self._store = _open(self.url, may_make=may_make)

    # what is there

    def find(self, name: str, tag: str) -> Found:
        """tag: a version, or else an alias. Raises CheckpointError for a manifest that is none, ConfigError where there is none."""
        check_name("model", name)
        check_name("tag", tag)
        data = self._read(_version_key(name, tag), MAX_MANIFEST_BYTES)
        if data is None and (version := self.aliases(name).get(tag)) is not None:
            data = self._read(_version_key(name, version), MAX_MANIFEST_BYTES)
        if data is None:
            known = ", ".join([*self.versions(name), *self.aliases(name)]) or f"nothing of {name!r}"
            raise ConfigError("model", f"{Reference(self.url, name, tag)} is not in the registry", f"It has {known}.")
        manifest = read_manifest(data, str(Reference(self.url, name, tag)))
        if manifest.name != name:
            raise CheckpointError(str(Reference(self.url, name, tag)), f"is the manifest of {manifest.name}")
        return Found(manifest, digest_of(data))

    def names(self) -> list[str]:
        with failures(self.url):
            prefixes = self._obstore.list_with_delimiter(self._store, "models")["common_prefixes"]
        return sorted(prefix.rsplit("/", 1)[-1] for prefix in prefixes)

    def versions(self, name: str) -> list[str]:
        return sorted(key.rsplit("/", 1)[-1].removesuffix(".json") for key, _, _ in self._list(f"models/{name}/versions"))

    def aliases(self, name: str) -> dict[str, str]:
        """Alias -> version."""
        last = {key.split("/")[-2]: key for key in sorted(key for key, _, _ in self._list(f"models/{name}/aliases"))}
        return {alias: version for alias, key in last.items() if (version := self._alias_target(key)) is not None}

    def _alias_target(self, key: str) -> str | None:
        """None where a file that cannot be read, or not as an alias, is found."""
        try:
            version = json.loads(self._read(key, MAX_MANIFEST_BYTES) or b"{}").get("version")
        except (ValueError, AttributeError):
            return None
        return version if isinstance(version, str) and NAME.fullmatch(version) else None

    # changes

    def push(self, folder: Path, name: str, version: str, on_progress: OnProgress | None = None) -> tuple[Manifest, list[str]]:
        """Uploads what a model's or adapter's folder holds at its top, and points `latest` to it; also returns what is left out.

        Raises ConfigError where the version is there with other files, CheckpointError for a folder that holds none or changes meanwhile.
        """
        check_name("model", name)
        check_name("version", version)
        if version == LATEST or version in self.aliases(name):
            raise ConfigError("version", f"{version!r} is an alias", "Give the version a name of its own.")
        if self._head(_removed_key(name, version)) is not None:
            raise ConfigError("version", f"{name}:{version} was removed", "A version never changes: push under another one.")
        began = self._clock()
        kept, left_out = files_of(folder)
        files = []
        total, done = sum((folder / file).stat().st_size for file in kept), 0
        for file in kept:
            try:
                stored = _hashed(folder / file)
            except OSError as error:
                raise CheckpointError(str(folder / file), f"cannot be read: {error.strerror}") from error
            self._upload(folder / file, stored)
            files.append(stored)
            done += stored.size
            if on_progress is not None:
                on_progress(done, total)
        if self._clock() - began > MAX_PUSH_S:
            raise RegistryFailed(self.url, f"the push took more than {MAX_PUSH_S / 3600:g} hours", "Push again: what is there is kept.")
        manifest = Manifest(name, version, tuple(files), describe(folder, kept))
        data = manifest.encoded()
        if len(data) > MAX_MANIFEST_BYTES:
            raise CheckpointError(str(folder), f"has a manifest of {len(data)} bytes, more than {MAX_MANIFEST_BYTES}")
        is_new = self._create(_version_key(name, version), data)
        for stored in files:  # one that was old may have been collected since it was looked at
            self._upload(folder / stored.path, stored)
        if not is_new and not self.find(name, version).manifest.has_content_of(manifest):
            reason = f"{Reference(self.url, name, version)} is there with other files"
            raise ConfigError("version", reason, "A version never changes: push under another one.")
        if is_new or LATEST not in self.aliases(name):
            self.set_alias(name, LATEST, version)
        return manifest, left_out

    def set_alias(self, name: str, alias: str, version: str) -> None:
        """Raises ConfigError for an alias that is a version's name, or a version that is not there."""
        self.check_alias(name, alias)
        check_name("version", version)
        if self._read(_version_key(name, version), MAX_MANIFEST_BYTES) is None:
            known = ", ".join(self.versions(name)) or "none"
            raise ConfigError("version", f"{name} has no version {version!r} in {self.url}", f"It has {known}.")
        self._move(name, alias, version)

    def check_alias(self, name: str, alias: str) -> None:
        """Raises ConfigError for an alias that is a version's name."""
        check_name("alias", alias)
        if self._read(_version_key(name, alias), MAX_MANIFEST_BYTES) is not None:
            raise ConfigError("alias", f"{alias!r} is a version of {name}", "Give the alias another name.")

    def _move(self, name: str, alias: str, version: str) -> None:
        """version: empty: it points nowhere"""
        data = json.dumps({"version": version, "time": self._clock()}).encode()
        for _ in range(MAX_TRIES):
            numbers = [int(key.rsplit("/", 1)[-1].removesuffix(".json")) for key, _, _ in self._list(f"models/{name}/aliases/{alias}")]
            if self._create(f"models/{name}/aliases/{alias}/{max(numbers, default=0) + 1:012d}.json", data):
                if version and self._head(_removed_key(name, version)) is not None:
                    raise ConfigError(
                        "version", f"{name}:{version} was removed meanwhile, and {alias} points to it", "Move the alias again."
                    )
                return
        raise RegistryFailed(self.url, f"others keep moving the alias {alias} of {name}")

    def remove(self, name: str, version: str) -> None:
        """The version's name is not used again; `collect` deletes its blobs. Nodes that have it keep it. `latest` goes with the only
        version. Raises ConfigError.
        """
        version = self.find(name, version).manifest.version
        pointing = [alias for alias, target in self.aliases(name).items() if target == version]
        if pointing == [LATEST] and self.versions(name) == [version]:
            self._move(name, LATEST, "")
        elif pointing:
            raise ConfigError("version", f"{', '.join(pointing)} points to {name}:{version}", "Point it to another version first.")
        self._create(_removed_key(name, version), b"{}")
        with failures(self.url):
            self._obstore.delete(self._store, _version_key(name, version))

    def collect(self, *, dry_run: bool = False) -> Collected:
        """Deletes the blobs that no version names and that are older than GRACE_S."""
        before = self._clock() - GRACE_S
        named: set[str] = set()
        for name in self.names():
            for version in self.versions(name):
                named.update(file.sha256 for file in self.find(name, version).manifest.files)
        unnamed = [(key, size) for key, size, changed in self._list("blobs") if key.rsplit("/", 1)[-1] not in named and changed < before]
        for key, _ in () if dry_run else unnamed:
            entry = self._head(key)
            if entry is not None and entry[2] < before:  # else a push has sent it again since
                with failures(self.url):
                    self._obstore.delete(self._store, key)
        return Collected(len(unnamed), sum(size for _, size in unnamed))

    def check(self, name: str, tag: str) -> list[str]:
        """Reads a version's blobs, and returns the names of files whose bytes are missing or wrong."""
        wrong = []
        for file in self.find(name, tag).manifest.files:
            digest, entry = hashlib.sha256(), self._head(_blob_key(file))
            if entry is not None and entry[1] == file.size:
                for data in self.read_blob(file):
                    digest.update(data)
            if digest.hexdigest() != file.sha256:
                wrong.append(file.path)
        return wrong

    # bytes

    def read_range(self, file: StoredFile, start: int, size: int) -> memoryview:
        with failures(self.url):
            return memoryview(self._obstore.get_range(self._store, _blob_key(file), start=start, length=size))

    def read_blob(self, file: StoredFile) -> Iterator[memoryview]:
        for start in range(0, file.size, CHUNK_BYTES):
            yield self.read_range(file, start, min(CHUNK_BYTES, file.size - start))

    def _upload(self, path: Path, file: StoredFile) -> None:
        key = _blob_key(file)
        there = self._head(key)
        if there is not None and there[1] == file.size and self._clock() - there[2] < MAX_PUSH_S:
            return
        has_changed = False

        def chunks() -> Iterator[bytes]:
            """The last one is given once all are known to be right, so that wrong bytes are never stored under this name."""
            nonlocal has_changed
            digest, last = hashlib.sha256(), b""
            with path.open("rb") as source:
                while data := source.read(CHUNK_BYTES):
                    digest.update(data)
                    if last:
                        yield last
                    last = data
            has_changed = digest.hexdigest() != file.sha256
            if has_changed:
                raise ValueError("the file has changed")
            if last:
                yield last

        part_bytes = max(CHUNK_BYTES, -(-file.size // MAX_PARTS))
        try:
            with failures(self.url):
                self._obstore.put(self._store, key, chunks(), chunk_size=part_bytes, max_concurrency=UPLOAD_CHUNKS)
        except RegistryFailed as error:
            if has_changed:
                raise CheckpointError(str(path), "changed while it was pushed", "Push again.") from error
            raise

    @property
    def _obstore(self) -> Any:
        return import_obstore()

    def _head(self, key: str) -> tuple[str, int, float] | None:
        with failures(self.url):
            try:
                meta = self._obstore.head(self._store, key)
            except FileNotFoundError:
                return None
        return _entry(meta)

    def _read(self, key: str, most: int) -> bytes | None:
        with failures(self.url):
            try:
                result = self._obstore.get(self._store, key)
            except FileNotFoundError:
                return None
            if result.meta["size"] > most:
                raise RegistryFailed(self.url, f"{key} has {result.meta['size']} bytes, more than {most}")
            return bytes(result.bytes())

    def _create(self, key: str, data: bytes) -> bool:
        """False where the object is there."""
        with failures(self.url):
            try:
                self._obstore.put(self._store, key, data, mode="create")
            except import_obstore().exceptions.AlreadyExistsError:
                return False
        return True

    def _list(self, prefix: str) -> list[tuple[str, int, float]]:
        with failures(self.url):
            return [_entry(meta) for chunk in self._obstore.list(self._store, prefix) for meta in chunk]


def _entry(meta: Any) -> tuple[str, int, float]:
    """Key, bytes, seconds since 1970."""
    changed: datetime = meta["last_modified"]
    return str(meta["path"]), int(meta["size"]), changed.timestamp()


def _hashed(path: Path) -> StoredFile:
    digest, size = hashlib.sha256(), 0
    with path.open("rb") as source:
        while data := source.read(CHUNK_BYTES):
            digest.update(data)
            size += len(data)
    return StoredFile(path.name, size, digest.hexdigest())


def _version_key(name: str, version: str) -> str:
    return f"models/{name}/versions/{version}.json"


def _removed_key(name: str, version: str) -> str:
    return f"models/{name}/removed/{version}.json"


def _blob_key(file: StoredFile) -> str:
    return f"blobs/{file.sha256}"


def import_obstore() -> Any:
    try:
        import obstore
    except ImportError as error:
        raise ConfigError("registry", "the package obstore is not installed", "pip install 'headrace[registry]'") from error
    return obstore


def _open(url: str, *, may_make: bool) -> Any:
    import_obstore()
    from obstore.store import LocalStore, from_url

    if url.startswith("file://"):
        folder = Path(url.removeprefix("file://"))
        if not may_make and not folder.is_dir():
            raise ConfigError("registry", f"there is no folder {folder}", "headrace registry push makes it.")
        return LocalStore(folder, mkdir=may_make)
    return from_url(url, retry_config={"max_retries": MAX_TRIES})


@contextmanager
def failures(url: str) -> Iterator[None]:
    obstore = import_obstore()
    try:
        yield
    except (obstore.exceptions.BaseError, OSError, ValueError) as error:
        raise RegistryFailed(url, str(error).partition("\n")[0][:300]) from error
