"""Checks a registry: in a folder, and the same against an S3 server."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from s3_kit import BUCKET, S3Server

from headrace.core.errors import CheckpointError, ConfigError, RegistryFailed
from headrace.registry import remote
from headrace.registry.cache import NodeCache
from headrace.registry.manifest import StoredFile
from headrace.registry.names import Reference
from headrace.registry.remote import GRACE_S, Registry


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    server = S3Server(tmp_path_factory.mktemp("s3"))
    try:
        server.start()
        yield server
    finally:
        server.stop()


@pytest.fixture(params=[pytest.param("file", marks=pytest.mark.socket), pytest.param("s3", marks=pytest.mark.process)])
def url(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "file":
        return f"file://{tmp_path}/registry"
    for name, value in request.getfixturevalue("s3").environ.items():
        monkeypatch.setenv(name, value)
    return f"s3://{BUCKET}/{tmp_path.name}"


def model(folder: Path, **files: bytes) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    (folder / "model.safetensors").write_bytes(b"weights" * 10)
    for name, data in files.items():
        (folder / f"{name}.safetensors").write_bytes(data)
    return folder


def test_versions_never_change_and_aliases_move(url: str, tmp_path: Path) -> None:
    registry = Registry(url, may_make=True)
    first, _ = registry.push(model(tmp_path / "a"), "llama", "1")
    assert registry.push(model(tmp_path / "a"), "llama", "1")[0].has_content_of(first)
    with pytest.raises(ConfigError, match="never changes"):
        registry.push(model(tmp_path / "b", more=b"x"), "llama", "1")
    second, _ = registry.push(tmp_path / "b", "llama", "2")
    registry.set_alias("llama", "stable", "1")
    assert registry.names() == ["llama"]
    assert registry.versions("llama") == ["1", "2"]
    assert registry.aliases("llama") == {"latest": "2", "stable": "1"}
    assert registry.find("llama", "stable").manifest.files == first.files
    assert registry.find("llama", "latest").manifest.files == second.files
    registry.set_alias("llama", "stable", "2")
    assert registry.find("llama", "stable").manifest.version == "2"
    registry.push(tmp_path / "a", "llama", "1")
    assert registry.aliases("llama")["latest"] == "2", "what was there is not the latest again"


def test_two_that_move_an_alias_at_once_both_do(url: str, tmp_path: Path) -> None:
    registry = Registry(url, may_make=True)
    for version in ("1", "2", "3", "4"):
        registry.push(model(tmp_path / version), "llama", version)
    threads = [threading.Thread(target=registry.set_alias, args=("llama", "canary", version)) for version in ("1", "2", "3", "4")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert registry.aliases("llama")["canary"] in ("1", "2", "3", "4")
    assert len(registry._list("models/llama/aliases/canary")) == 4


def test_names_that_are_taken_or_unknown_are_refused(url: str, tmp_path: Path) -> None:
    registry = Registry(url, may_make=True)
    folder = model(tmp_path / "a")
    registry.push(folder, "llama", "1")
    registry.set_alias("llama", "old", "1")
    for refused in (
        lambda: registry.push(folder, "llama", "latest"),
        lambda: registry.push(folder, "../llama", "1"),
        lambda: registry.set_alias("llama", "1", "1"),
        lambda: registry.set_alias("llama", "stable", "9"),
        lambda: registry.find("llama", "9"),
        lambda: registry.find("other", "1"),
        lambda: registry.remove("llama", "1"),
    ):
        with pytest.raises(ConfigError):
            refused()


def test_a_removed_version_is_not_pushed_again_and_its_bytes_go_after_a_day(url: str, tmp_path: Path) -> None:
    now = time.time()
    registry = Registry(url, lambda: now, may_make=True)
    registry.push(model(tmp_path / "a", only_in_1=b"1"), "llama", "1")
    registry.push(model(tmp_path / "b", only_in_2=b"22"), "llama", "2")
    registry.remove("llama", "1")
    with pytest.raises(ConfigError, match="was removed"):
        registry.push(tmp_path / "a", "llama", "1")
    assert registry.collect().num_blobs == 0
    now += GRACE_S + 60
    assert registry.collect(dry_run=True).num_bytes == 1
    assert (registry.collect().num_blobs, registry.collect().num_blobs) == (1, 0)
    assert registry.check("llama", "2") == []


def test_a_blob_that_may_be_collected_soon_is_sent_again(url: str, tmp_path: Path) -> None:
    now = time.time()
    registry = Registry(url, lambda: now, may_make=True)
    registry.push(model(tmp_path / "a"), "llama", "1")
    sent = {key: changed for key, _, changed in registry._list("blobs")}
    registry.push(tmp_path / "a", "llama", "2")
    assert {key: changed for key, _, changed in registry._list("blobs")} == sent
    now += GRACE_S
    time.sleep(1.1)  # the stores' times are in whole seconds
    registry.push(tmp_path / "a", "llama", "3")
    assert all(changed > sent[key] for key, _, changed in registry._list("blobs"))


def test_wrong_bytes_are_refused_and_named(url: str, tmp_path: Path) -> None:
    registry = Registry(url, may_make=True)
    manifest, _ = registry.push(model(tmp_path / "a", big=b"b" * (9 << 20)), "llama", "1")
    weights = next(file for file in manifest.files if file.path == "big.safetensors")
    flipped = bytearray(b"b" * (9 << 20))
    flipped[8 << 20] ^= 1
    registry._obstore.put(registry._store, f"blobs/{weights.sha256}", bytes(flipped))
    assert registry.check("llama", "1") == ["big.safetensors"]
    cache = NodeCache(tmp_path / "cache")
    with pytest.raises(CheckpointError, match="other bytes"):
        cache.pull(Reference(url, "llama", "1"))
    registry._obstore.put(registry._store, f"blobs/{weights.sha256}", b"short")
    with pytest.raises(CheckpointError, match="shorter"):
        cache.pull(Reference(url, "llama", "1"))
    registry._obstore.put(registry._store, f"blobs/{weights.sha256}", (tmp_path / "a/big.safetensors").read_bytes())
    assert (cache.pull(Reference(url, "llama", "1")) / "big.safetensors").read_bytes() == b"b" * (9 << 20)


def test_the_only_version_goes_with_latest(url: str, tmp_path: Path) -> None:
    registry = Registry(url, may_make=True)
    registry.push(model(tmp_path / "a"), "llama", "1")
    registry.remove("llama", "1")
    assert (registry.versions("llama"), registry.aliases("llama")) == ([], {})
    registry.push(tmp_path / "a", "llama", "2")
    assert registry.aliases("llama") == {"latest": "2"}


def test_a_file_that_changes_while_it_is_pushed_is_not_stored(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor are the bytes of an earlier version with the same name lost."""
    now = time.time()
    registry = Registry(url, lambda: now, may_make=True)
    folder = model(tmp_path / "a", big=b"a" * (20 << 20))
    registry.push(folder, "llama", "1")
    now += GRACE_S
    hashed = remote._hashed

    def then_changed(path: Path) -> StoredFile:
        stored = hashed(path)
        if path.name == "big.safetensors":
            path.write_bytes(b"a" * ((20 << 20) - 1) + b"b")
        return stored

    monkeypatch.setattr(remote, "_hashed", then_changed)
    with pytest.raises(CheckpointError, match="changed while"):
        registry.push(folder, "llama", "2")
    assert registry.check("llama", "1") == []
    assert registry.versions("llama") == ["1"]


@pytest.mark.socket
def test_a_registry_that_is_only_read_makes_no_folder(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no folder"):
        Registry(f"file://{tmp_path}/absent")
    assert not (tmp_path / "absent").exists()


@pytest.mark.socket
def test_a_registry_that_does_not_answer_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.registry.remote.MAX_TRIES", 1)
    for name, value in {"AWS_ENDPOINT_URL": "http://127.0.0.1:9", "AWS_ALLOW_HTTP": "true", "AWS_REGION": "x"}.items():
        monkeypatch.setenv(name, value)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "x")
    with pytest.raises(RegistryFailed, match="s3://bucket/a"):
        Registry("s3://bucket/a").find("llama", "1")


@pytest.mark.socket
def test_a_manifest_of_another_model_is_refused(tmp_path: Path) -> None:
    registry = Registry(f"file://{tmp_path}/registry", may_make=True)
    registry.push(model(tmp_path / "a"), "llama", "1")
    (tmp_path / "registry/models/other/versions").mkdir(parents=True)
    (tmp_path / "registry/models/llama/versions/1.json").rename(tmp_path / "registry/models/other/versions/1.json")
    with pytest.raises(CheckpointError, match="manifest of llama"):
        registry.find("other", "1")
