"""Checks a node's copies: whole or absent wherever a pull ends, never with wrong bytes, and within the disk."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.core.errors import CheckpointError, ConfigError, RegistryFailed
from headrace.registry import cache as cache_module
from headrace.registry.cache import RANGES_AHEAD, NodeCache
from headrace.registry.names import Reference
from headrace.registry.remote import CHUNK_BYTES, Registry

pytestmark = pytest.mark.socket

SIZES = {"config.json": 40, "model-1.safetensors": 3 * CHUNK_BYTES + 7, "model-2.safetensors": CHUNK_BYTES, "tokenizer.json": 0}


def pushed(folder: Path, version: str = "1", sizes: dict[str, int] = SIZES) -> Reference:
    source = folder / f"source-{version}"
    source.mkdir()
    for name, size in sizes.items():
        data = random.Random(f"{name} {version}").randbytes(size)
        (source / name).write_bytes(b"{}" if name == "config.json" else data)
    Registry(f"file://{folder}/registry", may_make=True).push(source, "llama", version)
    return Reference(f"file://{folder}/registry", "llama", version)


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> tuple[Reference, dict[str, bytes]]:
    folder = tmp_path_factory.mktemp("shared")
    return pushed(folder), content(folder / "source-1")


def test_a_pull_has_what_was_pushed_and_is_not_made_twice(tmp_path: Path) -> None:
    reference = pushed(tmp_path)
    cache = NodeCache(tmp_path / "cache")
    seen: list[tuple[int, int]] = []
    folder = cache.pull(reference, lambda done, total: seen.append((done, total)))
    assert content(folder) == content(tmp_path / "source-1")
    assert seen[-1] == (sum(SIZES.values()) - 38, sum(SIZES.values()) - 38)
    shutil.rmtree(tmp_path / "registry")
    assert cache.pull(reference) == folder, "a version that is here asks no registry"
    assert os.stat(folder / "config.json").st_mode & 0o777 == 0o400


def test_versions_share_what_is_equal(tmp_path: Path) -> None:
    cache = NodeCache(tmp_path / "cache")
    first = cache.pull(pushed(tmp_path, "1", {"model.safetensors": 100, "config.json": 1}))
    second = cache.pull(pushed(tmp_path, "2", {"model.safetensors": 100, "config.json": 1}))
    assert (first / "config.json").samefile(second / "config.json")
    assert not (first / "model.safetensors").samefile(second / "model.safetensors")


@pytest.fixture(autouse=True)
def released() -> Iterator[None]:
    """As if the process had ended."""
    yield
    release()


def release() -> None:
    for descriptor in cache_module._held.values():
        os.close(descriptor)
    cache_module._held.clear()


class Killed(BaseException):
    """Stands for SIGKILL: no handler of ours is for it."""


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 1 << 30), num_kills=st.integers(1, 3))
def test_a_pull_that_is_killed_leaves_it_right_or_absent(
    shared: tuple[Reference, dict[str, bytes]], tmp_path_factory: pytest.TempPathFactory, seed: int, num_kills: int
) -> None:
    """At a random call that changes files."""
    reference, right = shared
    chance = random.Random(seed)
    root = tmp_path_factory.mktemp("killed") / "cache"
    with pytest.MonkeyPatch.context() as patched:
        left = -1

        def counted(real: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                nonlocal left
                left -= 1
                if left == 0:
                    raise Killed
                return real(*args, **kwargs)

            return call

        for name in ("link", "fsync", "utime"):
            patched.setattr(os, name, counted(getattr(os, name)))
        for name in ("rename", "replace", "chmod", "mkdir", "write_bytes", "unlink"):
            patched.setattr(Path, name, counted(getattr(Path, name)))
        patched.setattr(Registry, "read_range", counted(Registry.read_range))
        for _ in range(num_kills):
            left = chance.randrange(1, 45)
            with suppress(Killed):
                NodeCache(root).pull(reference)
            for home in (root / "registry/versions").glob("[0-9a-f]*/llama"):
                assert content(home) == right
        left = -1
        assert content(NodeCache(root).pull(reference)) == right
        assert not list((root / "registry/parts").iterdir())
    shutil.rmtree(root.parent)


@pytest.mark.slow
@pytest.mark.process
def test_a_process_that_is_killed_while_it_pulls_leaves_it_right_or_absent(tmp_path: Path) -> None:
    """50 times at a random moment; each pull goes on from what the last one left."""
    reference = pushed(tmp_path, sizes=SIZES | {f"large-{index}.safetensors": 8 * CHUNK_BYTES for index in range(5)})
    right = content(tmp_path / "source-1")
    chance = random.Random(1)
    num_absent = 0
    for turn in range(50):
        root = tmp_path / f"cache-{turn // 5}"
        environ = {**os.environ, "HEADRACE_CACHE_DIR": str(root)}
        process = subprocess.Popen(
            [sys.executable, "-m", "headrace", "registry", "pull", str(reference)], stdout=subprocess.DEVNULL, env=environ
        )
        time.sleep(0.3 + 1.5 * chance.random())
        process.send_signal(signal.SIGKILL)
        process.wait()
        homes = list((root / "registry/versions").glob("[0-9a-f]*/llama"))
        num_absent += not homes
        assert all(content(home) == right for home in homes)
        if turn % 5 == 4:
            assert content(NodeCache(root).pull(reference)) == right
            shutil.rmtree(root)
    assert num_absent > 5


@pytest.mark.slow
@pytest.mark.process
def test_five_gigabytes_are_pulled_within_bounded_memory(tmp_path: Path) -> None:
    """Beside what the command takes for a small model. The file is zeros, which the source does not hold on disk."""
    peaks = []
    for size in (1000, 5 << 30):
        source = tmp_path / f"source-{size}"
        source.mkdir()
        with (source / "model.safetensors").open("wb") as weights:
            weights.truncate(size)
        Registry(f"file://{tmp_path}/registry", may_make=True).push(source, "llama", str(size))
        environ = {**os.environ, "HEADRACE_CACHE_DIR": str(tmp_path / "cache")}
        command = [sys.executable, "-m", "headrace", "registry", "pull", f"file://{tmp_path}/registry/llama:{size}"]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, env=environ)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = status
        assert status == 0
        peaks.append(usage.ru_maxrss << 10)
    assert peaks[1] - peaks[0] < 2 * RANGES_AHEAD * CHUNK_BYTES


def test_a_file_that_was_changed_on_the_disk_is_pulled_again(tmp_path: Path) -> None:
    reference = pushed(tmp_path)
    cache = NodeCache(tmp_path / "cache")
    weights = cache.pull(reference) / "model-2.safetensors"
    data = bytearray(weights.read_bytes())
    data[5] ^= 1
    weights.chmod(0o600)
    weights.write_bytes(bytes(data))
    assert content(cache.pull(reference)) == content(tmp_path / "source-1")


def test_verify_finds_what_a_look_at_times_does_not(tmp_path: Path) -> None:
    reference = pushed(tmp_path)
    cache = NodeCache(tmp_path / "cache")
    weights = cache.pull(reference) / "model-2.safetensors"
    times = weights.stat()
    weights.chmod(0o600)
    with weights.open("r+b") as file:
        file.write(b"\0\0")
    os.utime(weights, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert cache.verify(reference) == ["model-2.safetensors"]
    with pytest.raises(ConfigError, match="not on this machine"):
        cache.verify(reference)
    assert content(cache.pull(reference)) == content(tmp_path / "source-1")


class Usage(NamedTuple):
    total: int
    used: int
    free: int


def test_what_was_used_longest_ago_makes_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = NodeCache(tmp_path / "cache")
    size = {"model.safetensors": 1000}
    folders = {version: cache.pull(pushed(tmp_path, version, size)) for version in ("1", "2", "3")}
    for age, version in enumerate(("2", "1", "3")):
        os.utime(folders[version].parent / ".used", (1000 + age, 1000 + age))

    def disk(path: Path) -> Usage:
        used = sum(file.stat().st_size for file in (tmp_path / "cache/registry/blobs").iterdir())
        return Usage(3600, used, 3600 - used)

    release()
    monkeypatch.setattr(shutil, "disk_usage", disk)
    cache.pull(pushed(tmp_path, "4", size))
    assert {version: folder.exists() for version, folder in folders.items()} == {"1": True, "2": False, "3": True}
    release()
    with pytest.raises(RegistryFailed, match="no room"):
        cache.pull(pushed(tmp_path, "5", {"model.safetensors": 3500}))
    assert folders["1"].exists(), "what can never fit removes nothing"


def test_a_version_that_shares_a_damaged_file_is_not_made_of_it(tmp_path: Path) -> None:
    """The damage has the file's size and time."""
    cache = NodeCache(tmp_path / "cache")
    first = cache.pull(pushed(tmp_path, "1", {"config.json": 1, "model.safetensors": 50}))
    config = first / "config.json"
    times = config.stat()
    config.chmod(0o600)
    config.write_bytes(b"{ ")
    os.utime(config, ns=(times.st_atime_ns, times.st_mtime_ns))
    second = cache.pull(pushed(tmp_path, "2", {"config.json": 1, "model.safetensors": 60}))
    assert content(second) == content(tmp_path / "source-2")
    assert not first.exists(), "it would be served for good"


def test_a_version_that_changes_under_its_name_is_refused(tmp_path: Path) -> None:
    reference = pushed(tmp_path)
    cache = NodeCache(tmp_path / "cache")
    folder = cache.pull(reference)
    release()
    shutil.rmtree(folder.parent)
    manifest = tmp_path / "registry/models/llama/versions/1.json"
    manifest.chmod(0o600)
    manifest.write_bytes(manifest.read_bytes().replace(b'"format"', b'"FORMAT"'))
    with pytest.raises(CheckpointError, match="another manifest"):
        cache.pull(reference)


def test_a_part_that_a_crash_has_damaged_is_fetched_anew(tmp_path: Path) -> None:
    reference = pushed(tmp_path)
    cache = NodeCache(tmp_path / "cache")
    manifest = Registry(reference.registry).find("llama", "1").manifest
    large = next(file for file in manifest.files if file.path == "model-1.safetensors")
    (tmp_path / "cache/registry/parts" / large.sha256).write_bytes(bytes(CHUNK_BYTES + 5))
    seen: list[tuple[int, int]] = []
    assert content(cache.pull(reference, lambda done, total: seen.append((done, total)))) == content(tmp_path / "source-1")
    assert seen[-1][0] == seen[-1][1]


def test_a_model_may_be_called_as_the_caches_own_files(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "model.safetensors").write_bytes(b"x")
    Registry(f"file://{tmp_path}/registry", may_make=True).push(source, "seen", "1")
    assert NodeCache(tmp_path / "cache").pull(Reference(f"file://{tmp_path}/registry", "seen", "1")).name == "seen"


def test_a_folder_for_copies_that_others_may_write_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir(mode=0o777)
    (tmp_path / "cache").chmod(0o777)
    with pytest.raises(RegistryFailed, match="HEADRACE_CACHE_DIR"):
        NodeCache(tmp_path / "cache")


def test_free_removes_what_nobody_used(tmp_path: Path) -> None:
    cache = NodeCache(tmp_path / "cache")
    old, new = cache.pull(pushed(tmp_path, "1")), cache.pull(pushed(tmp_path, "2"))
    os.utime(old.parent / ".used", (1000, 1000))
    cache.free(3600)
    assert old.exists(), "this process uses it"
    release()
    (tmp_path / "cache/registry/blobs" / ("0" * 64)).write_bytes(b"of a pull that was killed")
    cache.free(3600)
    assert (old.exists(), new.exists()) == (False, True)
    assert not any(blob.stat().st_nlink == 1 for blob in (tmp_path / "cache/registry/blobs").iterdir())
