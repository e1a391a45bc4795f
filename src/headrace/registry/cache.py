"""A node's copies of versions: what was pulled once is not pulled again, and files that versions share lie there once.

    lock                     one process of the node changes the cache at a time
    blobs/DIGEST             a file, complete and checked
    parts/DIGEST             the beginning of one; a pull goes on from there
    versions/DIGEST/NAME/    a version under the digest of its manifest: hard links to its blobs
    versions/DIGEST/.seen    the files' sizes and times when they were checked
    versions/DIGEST/.used    its time is that of the last use; locked by each process that uses the version, as long as that lives
    tags/DIGEST              manifest's digest of a registry's version, so that a node that has it asks no registry
                             (a version of an OCI registry has `names.artifact_key` in the place of the manifest's digest)

A version's folder is renamed into its place once it is complete, so that it is there whole or not at all, wherever a pull ends. One that is
in use is not removed.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import shutil
import tempfile
import time
from collections import deque
from collections.abc import Iterator, Sequence, Set
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from headrace.core.errors import CheckpointError, ConfigError, RegistryFailed
from headrace.core.regular_files import MAX_FILE_BYTES, read_file
from headrace.machine.cache_folder import ENVIRONMENT, cache_root, open_private
from headrace.registry.archives import unpack
from headrace.registry.manifest import Manifest, StoredFile, checked, read_manifest
from headrace.registry.names import DIGEST, NAME, OCI, Reference, artifact_key
from headrace.registry.oci import OciRepository
from headrace.registry.remote import CHUNK_BYTES, Found, OnProgress, Registry

log = logging.getLogger(__name__)

RANGES_AHEAD = 4
"""Read from the store while one is written, so that a pull holds 40 MiB of files."""
FREE_SHARE = 0.05
"""A pull leaves this part of the disk free: versions that were used longest ago make room."""


class NodeCache:
    """root: private to this user (`open_private`)"""

    def __init__(self, root: Path | None = None) -> None:
        base = cache_root(os.environ) if root is None else root
        with _on_disk(base):
            self._root = open_private(base, ("registry",))
            self._blobs, self._parts, self._versions, self._tags = (
                open_private(base, ("registry", name)) for name in ("blobs", "parts", "versions", "tags")
            )

    def pull(self, reference: Reference, on_progress: OnProgress | None = None) -> Path:
        """The folder of that version, pulled where it is not here whole. It stays as long as this process lives.

        Raises RegistryFailed, ConfigError where it is not in the registry, CheckpointError for bytes that are not those pushed.
        """
        tag_file = self._tags / hashlib.sha256(str(reference).encode()).hexdigest()
        pinned = artifact_key(reference.name, reference.tag) if DIGEST.fullmatch(reference.tag) else self._pinned(tag_file)
        with _on_disk(self._root):
            if pinned and (folder := self._known(pinned, reference.name)) is not None:
                return folder
            registry = _registry_of(reference)
            found = registry.find(reference.name, reference.tag)
            if pinned not in ("", found.digest):
                reason = "has another manifest than when this machine pulled it first, and a version never changes"
                raise CheckpointError(str(reference), reason, f"If that is meant, remove {tag_file}.")
            with self._locked():
                if (folder := self._folder(found.digest, reference.name)) is None:
                    folder = self._fetch(registry, found, on_progress)
                _hold(folder.parent)
            if reference.tag == found.manifest.version:
                self._write(tag_file, found.digest.encode())
            return folder

    def version(self, folder: Path) -> str | None:
        """That of a folder that `pull` has given; None for another one."""
        seen = self._seen(folder.parent.name)
        return None if seen is None else seen[0].version

    def verify(self, reference: Reference) -> list[str]:
        """Reads all bytes of a version that is here, and returns the names of wrong files; then every version with one of them is removed.

        Raises ConfigError where it is not here.
        """
        digest = _registry_of(reference).find(reference.name, reference.tag).digest
        with _on_disk(self._root), self._locked():
            home, seen = self._versions / digest / reference.name, self._seen(digest)
            if seen is None or not home.is_dir():
                raise ConfigError("model", f"{reference} is not on this machine", "headrace registry pull brings it.")
            wrong = [file for file in seen[0].files if not _is_intact(home / file.path, file)]
            self._drop(wrong)
        return [file.path for file in wrong]

    def free(self, max_age_s: float) -> int:
        """Removes versions that no pull or start has asked for since, and that no process uses; the bytes that the disk has more. Parts of
        pulls go as well.
        """
        with _on_disk(self._root), self._locked():
            before = shutil.disk_usage(self._root).free
            for home, used in self._by_use():
                if time.time() - used > max_age_s:
                    self._remove(home)
            for part in self._parts.iterdir():
                if time.time() - part.stat().st_mtime > max_age_s:
                    part.unlink()
            self._sweep(frozenset())
            return max(0, shutil.disk_usage(self._root).free - before)

    # versions

    def _pinned(self, tag_file: Path) -> str:
        """The digest of the version's manifest, where it was pulled here; else empty."""
        with suppress(OSError, UnicodeDecodeError):
            digest = read_file(tag_file, 64).decode()
            return digest if NAME.fullmatch(digest) else ""
        return ""

    def _known(self, digest: str, name: str) -> Path | None:
        home = self._versions / digest
        if home.is_dir() and _hold(home) and (folder := self._unchanged(digest, name)) is not None:
            return folder  # without the cache's lock: it is not waited for behind another version's pull
        with self._locked():
            folder = self._folder(digest, name)
            if folder is not None:
                _hold(home)
            return folder

    def _unchanged(self, digest: str, name: str) -> Path | None:
        found = self._seen(digest)
        if found is None:
            return None
        manifest, stamps = found
        home = self._versions / digest
        folder = home / name
        if any(_stamp(folder / file.path) != stamps.get(file.path) for file in manifest.files):
            return None
        with suppress(FileNotFoundError):
            os.utime(home / ".used")
        return folder

    def _seen(self, digest: str) -> tuple[Manifest, dict[str, object]] | None:
        home = self._versions / digest
        try:
            seen = json.loads(read_file(home / ".seen", MAX_FILE_BYTES))
            return read_manifest(json.dumps(seen["manifest"]).encode(), str(home)), dict(seen["stamps"])
        except (OSError, ValueError, KeyError, TypeError, CheckpointError):
            return None

    def _folder(self, digest: str, name: str) -> Path | None:
        """None where it is not here. A file that was changed since it was checked is checked again; a version with a wrong one goes."""
        if (folder := self._unchanged(digest, name)) is not None or (found := self._seen(digest)) is None:
            return folder
        manifest, home = found[0], self._versions / digest
        wrong = [file for file in manifest.files if not _is_intact(home / name / file.path, file)]
        if wrong:
            log.warning("%s was changed on this disk: it is pulled again", home / name)
            self._drop(wrong)
            return None
        self._write(home / ".seen", _seen(manifest, home / name))
        return home / name

    def _fetch(self, registry: Registry | OciRepository, found: Found, on_progress: OnProgress | None) -> Path:
        files, done = (*found.manifest.files, *found.archives), 0
        self._drop([file for file in files if (self._blobs / file.sha256).exists() and not _is_intact(self._blobs / file.sha256, file)])
        missing = [file for file in files if not (self._blobs / file.sha256).exists()]
        total = sum(file.size for file in missing)
        begun = sum(_size(self._parts / file.sha256) for file in missing)
        self._make_room(total - begun, frozenset(file.sha256 for file in files))
        for file in missing:
            for count in self._fetch_blob(registry, file):
                done += count
                if on_progress is not None:
                    on_progress(done, total)
        manifest = self._with_unpacked(found, registry.url)
        home = Path(tempfile.mkdtemp(prefix="new-", dir=self._versions))
        folder = home / manifest.name
        folder.mkdir(mode=0o700)
        for file in manifest.files:
            os.link(self._blobs / file.sha256, folder / file.path)
        self._write(home / ".seen", _seen(manifest, folder))
        (home / ".used").touch(mode=0o600)
        target = self._versions / found.digest
        if target.exists():
            self._discard(target)
        home.rename(target)
        return target / manifest.name

    def _with_unpacked(self, found: Found, url: str) -> Manifest:
        """Blobs of archives go once their files are blobs."""
        files, where, target = list(found.manifest.files), f"{url}: {found.digest}", self._parts / "unpacked"
        kept = {file.sha256 for file in (*files, *found.archives)}
        for archive in found.archives:
            blob = self._blobs / archive.sha256
            for file in unpack(blob, archive.path, target, lambda num_bytes: self._make_room(num_bytes, kept), where):
                target.chmod(0o400)
                target.rename(self._blobs / file.sha256)
                files.append(file)
                kept.add(file.sha256)
        for archive in found.archives:
            (self._blobs / archive.sha256).unlink(missing_ok=True)
        return checked(replace(found.manifest, files=tuple(files)), where)

    def _fetch_blob(self, registry: Registry | OciRepository, file: StoredFile, is_second: bool = False) -> Iterator[int]:
        """Yields the bytes that have come, in turn. What a part has already is read again for the digest; where a crash has damaged it, the
        file is fetched from its beginning.
        """
        part = self._parts / file.sha256
        digest, there = hashlib.sha256(), 0
        with part.open("a+b") as target, ThreadPoolExecutor(1, thread_name_prefix="headrace-digest") as beside:
            target.seek(0)
            while data := target.read(CHUNK_BYTES):
                digest.update(data)
                there += len(data)
            if there:
                yield there
            for piece in _ranges(registry, file, there):
                hashed = beside.submit(digest.update, piece)
                target.write(piece)
                hashed.result()
                yield len(piece)
            target.flush()
            os.fsync(target.fileno())
        if digest.hexdigest() != file.sha256:
            part.unlink()
            if there and not is_second:
                yield -file.size
                yield from self._fetch_blob(registry, file, is_second=True)
                return
            raise CheckpointError(
                f"{registry.url}: {file.path}", "has other bytes than were pushed", "Push the version again, or use another one."
            )
        part.chmod(0o400)
        part.rename(self._blobs / file.sha256)

    # room

    def _make_room(self, num_bytes: int, kept: Set[str]) -> None:
        """kept: digests of blobs that stay"""
        for stale in self._versions.glob("new-*"):  # of a pull that was killed
            shutil.rmtree(stale, ignore_errors=True)
        if self._room() >= num_bytes:
            return
        self._sweep(kept)
        if self._room() + sum(blob.stat().st_size for blob in self._blobs.iterdir() if blob.name not in kept) >= num_bytes:
            for home, _ in self._by_use():
                if self._room() >= num_bytes:
                    return
                if self._remove(home, kept):
                    log.info("%s was removed from this machine: it was used longest ago", home)
        if self._room() < num_bytes:
            raise RegistryFailed(str(self._root), f"the disk has no room for {num_bytes} bytes", f"Free some, or set {ENVIRONMENT}.")

    def _room(self) -> int:
        usage = shutil.disk_usage(self._root)
        return int(usage.free - FREE_SHARE * usage.total)

    def _by_use(self) -> list[tuple[Path, float]]:
        """Versions used longest ago come first."""
        homes = [home for home in self._versions.iterdir() if not home.name.startswith("new-")]
        return sorted(((home, _time_of(home / ".used")) for home in homes), key=lambda pair: pair[1])

    def _remove(self, home: Path, kept: Set[str] = frozenset()) -> bool:
        """False where a process uses the version. kept: digests of blobs that stay"""
        with suppress(FileNotFoundError), (home / ".used").open("rb") as used:
            try:
                fcntl.flock(used, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
        self._discard(home)
        self._sweep(kept)
        return True

    def _discard(self, home: Path) -> None:
        gone = home.with_name(f"new-gone-{home.name}")
        shutil.rmtree(gone, ignore_errors=True)
        home.rename(gone)
        shutil.rmtree(gone)

    def _drop(self, damaged: Sequence[StoredFile]) -> None:
        """Removes these blobs, and all versions that have one of them, also where they are in use: they would be served for good."""
        digests = {file.sha256 for file in damaged}
        for home, _ in self._by_use() if digests else ():
            seen = self._seen(home.name)
            if seen is None or digests & {file.sha256 for file in seen[0].files}:
                self._discard(home)
        for digest in digests:
            (self._blobs / digest).unlink(missing_ok=True)

    def _sweep(self, kept: Set[str]) -> None:
        """Removes blobs of no version."""
        for blob in self._blobs.iterdir():
            if blob.stat().st_nlink == 1 and blob.name not in kept:
                blob.unlink()

    def _write(self, path: Path, data: bytes) -> None:
        temporary = path.with_name(f"{path.name}.{os.getpid()}")
        temporary.write_bytes(data)
        temporary.replace(path)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        with (self._root / "lock").open("wb") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                log.info("another process of this node changes %s: waiting for it", self._root)
                fcntl.flock(lock, fcntl.LOCK_EX)
            yield


@contextmanager
def _on_disk(root: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise RegistryFailed(str(root), f"this machine's copies cannot be kept there: {error}", f"Set {ENVIRONMENT}.") from error


def _registry_of(reference: Reference) -> Registry | OciRepository:
    if reference.registry.startswith(OCI):
        return OciRepository(f"{reference.registry}/{reference.name}")
    return Registry(reference.registry)


def _ranges(registry: Registry | OciRepository, file: StoredFile, start: int) -> Iterator[memoryview]:
    """The file's bytes from `start`, in order; RANGES_AHEAD requests run at a time."""
    starts = iter(range(start, file.size, CHUNK_BYTES))
    asked: deque[tuple[int, Future[memoryview]]] = deque()
    with ThreadPoolExecutor(RANGES_AHEAD, thread_name_prefix="headrace-pull") as pool:

        def ask() -> None:
            if (at := next(starts, None)) is not None:
                size = min(CHUNK_BYTES, file.size - at)
                asked.append((size, pool.submit(registry.read_range, file, at, size)))

        for _ in range(RANGES_AHEAD):
            ask()
        while asked:
            size, future = asked.popleft()
            data = future.result()
            if len(data) != size:
                raise CheckpointError(f"{registry.url}: {file.path}", f"is shorter than its {file.size} bytes")
            ask()
            yield data


def version_in(folder: Path) -> str:
    """Which version `NodeCache.pull` has put there; empty for another folder."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        return str(json.loads(read_file(folder.parent / ".seen", MAX_FILE_BYTES))["manifest"]["version"])
    return ""


def _seen(manifest: Manifest, folder: Path) -> bytes:
    stamps = {file.path: _stamp(folder / file.path) for file in manifest.files}
    return json.dumps({"manifest": json.loads(manifest.encoded()), "stamps": stamps}).encode()


def _stamp(path: Path) -> list[int] | None:
    """What changes when a file is written: size, time, number. None: it is not there."""
    try:
        facts = path.lstat()
    except OSError:
        return None
    return [facts.st_size, facts.st_mtime_ns, facts.st_ino]


_held: dict[Path, int] = {}
"""By a version's folder the descriptor that locks it as long as this process lives."""


def _hold(home: Path) -> bool:
    """Whether the version is there, and is not removed any more while this process lives."""
    descriptor = _held.get(home)
    if descriptor is not None and _is_same(descriptor, home / ".used"):
        return True
    if descriptor is not None:
        os.close(_held.pop(home))
    try:
        descriptor = os.open(home / ".used", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    fcntl.flock(descriptor, fcntl.LOCK_SH)
    if not _is_same(descriptor, home / ".used"):  # it was removed before it was locked
        os.close(descriptor)
        return False
    _held[home] = descriptor
    return True


def _is_same(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except OSError:
        return False


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _time_of(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _is_intact(path: Path, file: StoredFile) -> bool:
    digest = hashlib.sha256()
    try:
        with path.open("rb") as source:
            while data := source.read(CHUNK_BYTES):
                digest.update(data)
    except OSError:
        return False
    return digest.hexdigest() == file.sha256
