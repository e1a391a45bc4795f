"""A node's copies of versions: what was pulled once is not pulled again, and files that versions share lie there once.

    lock                     one process of the node changes the cache at a time
    blobs/DIGEST             a file, complete and checked
    parts/DIGEST             the beginning of one; a pull goes on from there
    versions/DIGEST/NAME/    a version under the digest of its manifest: hard links to its blobs
    versions/DIGEST/seen     the files' sizes and times when they were checked; its own time is that of the last use
    tags/DIGEST              manifest's digest of a registry's version, so that a node that has it asks no registry

A version's folder is renamed into its place once it is complete, so that it is there whole or not at all, wherever a pull ends.
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
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

from headrace.core.errors import CheckpointError, RegistryFailed
from headrace.core.regular_files import MAX_FILE_BYTES, read_file
from headrace.registry.manifest import Manifest, StoredFile, read_manifest
from headrace.registry.names import NAME, Reference
from headrace.registry.remote import CHUNK_BYTES, Found, OnProgress, Registry
from headrace.tensor.host.cache_folder import cache_root, open_private

log = logging.getLogger(__name__)

RANGES_AHEAD = 4
"""Read from the store while one is written, so that a pull holds 40 MiB of files."""
FREE_SHARE = 0.05
"""A pull leaves this part of the disk free: versions that were used longest ago make room."""


class NodeCache:
    """root: private to this user (`open_private`)"""

    def __init__(self, root: Path | None = None) -> None:
        base = cache_root(os.environ) if root is None else root
        self._root = open_private(base, ("registry",))
        self._blobs, self._parts, self._versions, self._tags = (
            open_private(base, ("registry", name)) for name in ("blobs", "parts", "versions", "tags")
        )

    def pull(self, reference: Reference, on_progress: OnProgress | None = None) -> Path:
        """The folder of that version, pulled where it is not here whole.

        Raises RegistryFailed, ConfigError where it is not in the registry, CheckpointError for bytes that are not those pushed.
        """
        tag_file = self._tags / hashlib.sha256(str(reference).encode()).hexdigest()
        if (folder := self._known(tag_file, reference)) is not None:
            return folder
        registry = Registry(reference.registry)
        found = registry.find(reference.name, reference.tag)
        with self._locked():
            if (folder := self._folder(found.digest, reference.name)) is None:
                folder = self._fetch(registry, found, on_progress)
        if reference.tag == found.manifest.version:
            self._write(tag_file, found.digest.encode())
        return folder

    def verify(self, reference: Reference) -> list[str]:
        """Reads all bytes of a version that is here, and returns the names of wrong files; then the version is removed."""
        found = Registry(reference.registry).find(reference.name, reference.tag)
        with self._locked():
            home = self._versions / found.digest / reference.name
            wrong = [file.path for file in found.manifest.files if home.is_dir() and not _is_intact(home / file.path, file)]
            if wrong:
                self._remove(home.parent, found.manifest)
        return wrong

    def free(self, max_age_s: float) -> int:
        """Removes versions that no pull or start has asked for since; the bytes that the disk has more. Parts of pulls go as well."""
        with self._locked():
            before = shutil.disk_usage(self._root).free
            for home, used in self._by_use():
                if time.time() - used > max_age_s:
                    self._remove(home)
            for part in self._parts.iterdir():
                if time.time() - part.stat().st_mtime > max_age_s:
                    part.unlink()
            return max(0, shutil.disk_usage(self._root).free - before)

    # versions

    def _known(self, tag_file: Path, reference: Reference) -> Path | None:
        with suppress(OSError, UnicodeDecodeError):
            digest = read_file(tag_file, 64).decode()
            if NAME.fullmatch(digest):
                if (folder := self._unchanged(digest, reference.name)) is not None:
                    return folder  # without the lock: it is not waited for behind another version's pull
                with self._locked():
                    return self._folder(digest, reference.name)
        return None

    def _unchanged(self, digest: str, name: str) -> Path | None:
        found = self._seen(digest)
        if found is None:
            return None
        manifest, stamps = found
        folder = self._versions / digest / name
        if any(_stamp(folder / file.path) != stamps.get(file.path) for file in manifest.files):
            return None
        os.utime(folder.parent / "seen")
        return folder

    def _seen(self, digest: str) -> tuple[Manifest, dict[str, object]] | None:
        home = self._versions / digest
        try:
            seen = json.loads(read_file(home / "seen", MAX_FILE_BYTES))
            return read_manifest(json.dumps(seen["manifest"]).encode(), str(home)), dict(seen["stamps"])
        except (OSError, ValueError, KeyError, TypeError, CheckpointError):
            return None

    def _folder(self, digest: str, name: str) -> Path | None:
        """None where it is not here. A file that was changed since it was checked is checked again; a version with a wrong one goes."""
        if (folder := self._unchanged(digest, name)) is not None or (found := self._seen(digest)) is None:
            return folder
        manifest, home = found[0], self._versions / digest
        if not all(_is_intact(home / name / file.path, file) for file in manifest.files):
            log.warning("%s was changed on this disk: it is pulled again", home / name)
            self._remove(home, manifest)
            return None
        self._write(home / "seen", _seen(manifest, home / name))
        return home / name

    def _fetch(self, registry: Registry, found: Found, on_progress: OnProgress | None) -> Path:
        manifest, done = found.manifest, 0
        missing = [file for file in manifest.files if not (self._blobs / file.sha256).exists()]
        self._make_room(sum(file.size for file in missing))
        total = sum(file.size for file in missing)
        for file in missing:
            for count in self._fetch_blob(registry, file):
                done += count
                if on_progress is not None:
                    on_progress(done, total)
        home = Path(tempfile.mkdtemp(prefix="new-", dir=self._versions))
        folder = home / manifest.name
        folder.mkdir(mode=0o700)
        for file in manifest.files:
            os.link(self._blobs / file.sha256, folder / file.path)
        self._write(home / "seen", _seen(manifest, folder))
        target = self._versions / found.digest
        if target.exists():
            self._remove(target)
        home.rename(target)
        return target / manifest.name

    def _fetch_blob(self, registry: Registry, file: StoredFile) -> Iterator[int]:
        """Yields the bytes that have come, in turn. What a part has already is read again for the digest."""
        part = self._parts / file.sha256
        digest, there = hashlib.sha256(), 0
        with part.open("a+b") as target:
            target.seek(0)
            while data := target.read(CHUNK_BYTES):
                digest.update(data)
                there += len(data)
            if there:
                yield there
            for piece in _ranges(registry, file, there):
                target.write(piece)
                digest.update(piece)
                yield len(piece)
            target.flush()
            os.fsync(target.fileno())
        if digest.hexdigest() != file.sha256:
            part.unlink()
            raise CheckpointError(
                f"{registry.url}: {file.path}", "has other bytes than were pushed", "Push the version again, or use another one."
            )
        part.chmod(0o400)
        part.rename(self._blobs / file.sha256)

    # room

    def _make_room(self, num_bytes: int) -> None:
        for stale in self._versions.glob("new-*"):  # of a pull that was killed
            shutil.rmtree(stale, ignore_errors=True)
        for home, _ in self._by_use():
            if self._room() >= num_bytes:
                return
            log.info("%s is removed from this node: it was used longest ago", home)
            self._remove(home)
        if self._room() < num_bytes:
            raise RegistryFailed(str(self._root), f"the disk has no room for {num_bytes} bytes", "Free some, or set HEADRACE_CACHE_DIR.")

    def _room(self) -> int:
        usage = shutil.disk_usage(self._root)
        return int(usage.free - FREE_SHARE * usage.total)

    def _by_use(self) -> list[tuple[Path, float]]:
        """Versions used longest ago come first."""
        homes = [home for home in self._versions.iterdir() if not home.name.startswith("new-")]
        return sorted(((home, _time_of(home / "seen")) for home in homes), key=lambda pair: pair[1])

    def _remove(self, home: Path, damaged: Manifest | None = None) -> None:
        """An engine that has its files open keeps them. damaged: its blobs go even where other versions have them."""
        gone = home.with_name(f"new-gone-{home.name}")
        with suppress(OSError):
            home.rename(gone)
            shutil.rmtree(gone)
        for file in damaged.files if damaged is not None else ():
            blob = self._blobs / file.sha256
            if blob.exists() and not _is_intact(blob, file):
                blob.unlink()
        for blob in self._blobs.iterdir():
            if blob.stat().st_nlink == 1:
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


def _ranges(registry: Registry, file: StoredFile, start: int) -> Iterator[memoryview]:
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
