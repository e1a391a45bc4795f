"""Checks models of OCI registries: what is pulled, how access is had, and what is refused."""

from __future__ import annotations

import gzip
import json
import shutil
import sys
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import oci_kit
import pytest
from oci_kit import MODEL, SECRET, Layer, SmallRegistry, raw, tar_of

from headrace.core.errors import CheckpointError, ConfigError, RegistryFailed
from headrace.registry.cache import NodeCache
from headrace.registry.names import Reference, artifact_key, read_reference
from headrace.registry.oci import OciRepository
from headrace.registry.remote import CHUNK_BYTES, Registry

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

pytestmark = pytest.mark.socket

FILES = {"config.json": b"{}", "model.safetensors": bytes(range(256)) * 1000, "tokenizer.json": b"[1]"}
OTHERS = {"README.md": b"read", "modeling.py": b"import os", "onnx/model.safetensors": b"deeper", ".hidden.json": b"{}"}


@pytest.fixture(autouse=True)
def docker_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path / "docker"))
    (tmp_path / "docker").mkdir()
    return tmp_path / "docker"


@pytest.fixture
def make() -> Iterator[Callable[[], SmallRegistry]]:
    made: list[SmallRegistry] = []

    def make() -> SmallRegistry:
        made.append(SmallRegistry())
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.fixture
def registry(make: Callable[[], SmallRegistry]) -> SmallRegistry:
    return make()


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def pull(registry: SmallRegistry, tmp_path: Path, tag: str = "1") -> Path:
    return NodeCache(tmp_path / "cache").pull(Reference(registry.url, "llama", tag))


def keep_password(folder: Path, host: str, **entry: str) -> None:
    (folder / "config.json").write_text(json.dumps({"auths": {host: entry}, "credsStore": "desktop"}))


def test_an_artifact_has_its_model_files_and_no_others(registry: SmallRegistry, tmp_path: Path) -> None:
    digest = registry.push("1", raw(FILES | OTHERS))
    folder = pull(registry, tmp_path)
    assert content(folder) == FILES
    assert (folder.name, folder.parent.name) == ("llama", artifact_key("llama", digest))
    assert sum("/blobs/" in target for target, _ in registry.seen) == len(FILES), "what is not served is not pulled"


def test_one_artifact_under_two_names_is_two_folders_of_the_same_files(registry: SmallRegistry, tmp_path: Path) -> None:
    digest = registry.push("1", raw(FILES))
    cache = NodeCache(tmp_path / "cache")
    first, second = (cache.pull(Reference(registry.url, name, digest)) for name in ("llama", "other"))
    assert content(first) == content(second) == FILES
    assert (first / "config.json").samefile(second / "config.json")


def test_a_tag_may_move_and_a_digest_asks_nobody(registry: SmallRegistry, tmp_path: Path) -> None:
    digest = registry.push("1", raw(FILES))
    first = pull(registry, tmp_path, digest)
    second = registry.push("1", raw(FILES | {"config.json": b'{"a": 1}'}))
    assert pull(registry, tmp_path).parent.name == artifact_key("llama", second)
    registry.manifests.clear()
    assert pull(registry, tmp_path, digest) == first
    with pytest.raises(ConfigError, match="not in the registry"):
        pull(registry, tmp_path)


@pytest.mark.parametrize(
    ("ending", "pack"), [("tar", bytes), ("tar+gzip", gzip.compress), ("tar+zstd", zstd.compress)], ids=["tar", "gzip", "zstd"]
)
def test_archives_are_unpacked(registry: SmallRegistry, tmp_path: Path, ending: str, pack: Callable[[bytes], bytes]) -> None:
    weights = {"model.safetensors": FILES["model.safetensors"]}
    link = tarfile.TarInfo("tokenizer_config.json")
    link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
    others = pack(tar_of({f"./{name}": data for name, data in FILES.items() if name not in weights} | OTHERS, [link]))
    layers = [(f"{MODEL}.weight.v1.{ending}", "a", pack(tar_of(weights))), (f"{MODEL}.weight.config.v1.{ending}", "", others)]
    registry.push("1", layers)
    assert content(folder := pull(registry, tmp_path)) == FILES
    blobs = list((tmp_path / "cache/registry/blobs").iterdir())
    assert len(blobs) == len(FILES), "no archive is left"
    assert not list((tmp_path / "cache/registry/parts").iterdir())
    assert NodeCache(tmp_path / "cache").verify(Reference(registry.url, "llama", "1")) == []
    registry.blobs.clear()
    assert pull(registry, tmp_path) == folder


def test_archives_beside_files_make_one_version(registry: SmallRegistry, tmp_path: Path) -> None:
    config = (f"{MODEL}.weight.config.v1.tar", "", tar_of({"config.json": b"{}", "tokenizer.json": b"[1]"}))
    dataset = (f"{MODEL}.dataset.v1.tar", "", b"not asked for")
    registry.push("1", [*raw({"model.safetensors": FILES["model.safetensors"]}), config, dataset])
    assert content(pull(registry, tmp_path)) == FILES


@pytest.mark.parametrize("num_uses", [0, 3], ids=["password", "token that ends in the midst"])
def test_access_is_had_with_the_password_of_docker(
    registry: SmallRegistry, tmp_path: Path, docker_folder: Path, monkeypatch: pytest.MonkeyPatch, num_uses: int
) -> None:
    """Blobs are asked for one after the other here, so that three uses of a token are enough to go on."""
    monkeypatch.setattr("headrace.registry.cache.RANGES_AHEAD", 1)
    registry.push("1", raw(FILES | {f"model-{number}.safetensors": b"%d" % number for number in range(9)}))
    registry.password, registry.num_uses = SECRET, num_uses
    with pytest.raises(RegistryFailed, match=r"Give a user and a password in `auths` of .*config\.json"):
        pull(registry, tmp_path)
    keep_password(docker_folder, f"127.0.0.1:{registry.port}", username="reader", password="secret")
    assert len(content(pull(registry, tmp_path))) == 12
    used = {authorization for target, authorization in registry.seen if "/blobs/" in target}
    assert len(used) >= (4 if num_uses else 1)


def test_a_mounted_pull_secret_is_read(registry: SmallRegistry, tmp_path: Path, docker_folder: Path) -> None:
    registry.push("1", raw(FILES))
    registry.password = SECRET
    keep_password(docker_folder, f"127.0.0.1:{registry.port}", auth=SECRET)
    (docker_folder / "config.json").rename(docker_folder / ".dockerconfigjson")
    assert content(pull(registry, tmp_path)) == FILES


def test_a_token_is_had_without_a_password_where_anybody_may_read(registry: SmallRegistry, tmp_path: Path) -> None:
    registry.push("1", raw(FILES))
    registry.num_uses = 100
    assert content(pull(registry, tmp_path)) == FILES


def test_no_other_host_sees_the_authorization(make: Callable[[], SmallRegistry], tmp_path: Path, docker_folder: Path) -> None:
    registry, storage = make(), make()
    storage.blobs, registry.storage = registry.blobs, storage
    registry.push("1", raw(FILES))
    registry.password = SECRET
    keep_password(docker_folder, f"127.0.0.1:{registry.port}", auth=SECRET)
    assert content(pull(registry, tmp_path)) == FILES
    assert (len(storage.seen), {authorization for _, authorization in storage.seen}) == (len(FILES), {""})


def test_a_password_is_sent_to_no_realm_without_tls(registry: SmallRegistry, tmp_path: Path, docker_folder: Path) -> None:
    registry.push("1", raw(FILES))
    registry.password, registry.num_uses, registry.realm = SECRET, 1, "http://example.com/token"
    keep_password(docker_folder, f"127.0.0.1:{registry.port}", auth=SECRET)
    with pytest.raises(RegistryFailed, match="no https URL"):
        pull(registry, tmp_path)


def test_beyond_loopback_nothing_is_asked_without_tls(tmp_path: Path) -> None:
    with pytest.raises(RegistryFailed, match=r"https://registry\.invalid/v2/"):
        OciRepository("oci://registry.invalid/models/llama").find("llama", "1")


def layer(**fields: Any) -> bytes:
    whole = {"mediaType": f"{MODEL}.weight.v1.raw", "digest": "sha256:" + "0" * 64, "size": 1, "annotations": {oci_kit.PATH: "a.json"}}
    return json.dumps({"layers": [whole | fields]}).encode()


@pytest.mark.parametrize(
    ("manifest", "words"),
    [
        (layer(annotations={oci_kit.PATH: "../a.json"}), "leads out"),
        (layer(annotations={oci_kit.PATH: "/a.json"}), "leads out"),
        (layer(annotations={oci_kit.PATH: "..\\\\a.json"}), "leads out"),
        (layer(annotations={oci_kit.PATH: 5}), "no manifest"),
        (layer(digest="sha512:00"), "no SHA-256"),
        (layer(size=-1), "no SHA-256 and size"),
        (layer(size=True), "no SHA-256 and size"),
        (layer(size=1 << 50), "room|more than"),
        (layer(annotations={}), "0 files"),
        (b'{"manifests": [{}, {}]}', "index of 2"),
        (b"[" * 100_000, "no manifest"),
        (b"{}", "no manifest"),
        (b" " * (5 << 20), "more than 4194304"),
        (json.dumps({"layers": json.loads(layer())["layers"] * 2}).encode(), "twice"),
        (json.dumps({"layers": json.loads(layer())["layers"] * 2000}).encode(), "2000 layers"),
    ],
)
def test_a_manifest_that_cannot_be_right_is_refused(registry: SmallRegistry, tmp_path: Path, manifest: bytes, words: str) -> None:
    registry.manifests["1"] = manifest
    with pytest.raises((CheckpointError, RegistryFailed), match=words):
        pull(registry, tmp_path)
    assert not list((tmp_path / "cache/registry/versions").iterdir())


def archive(kind: str, data: bytes) -> list[Layer]:
    return [(f"{MODEL}.weight.v1.{kind}", "a", data)]


def header(kind: bytes, size: int, pax: dict[str, str] | None = None) -> bytes:
    info = tarfile.TarInfo("config.json")
    info.type, info.size, info.pax_headers = kind, size, pax or {}
    return info.tobuf(tarfile.PAX_FORMAT if pax else tarfile.GNU_FORMAT)


def long_name(size: int) -> bytes:
    return header(tarfile.GNUTYPE_LONGNAME, size) + bytes(-(-size // 512) * 512)


END = bytes(1024)
FILE = header(tarfile.REGTYPE, 3) + b"{}\n".ljust(512, b"\0")
DAMAGED = {
    "header": long_name(100 << 10) + FILE,
    "negative header": header(tarfile.GNUTYPE_LONGNAME, -1024) + FILE,
    "headers": (long_name(64 << 10) + FILE) * 100,
    "chain": long_name(10) * 3000 + FILE,
    "no map": header(tarfile.REGTYPE, 0, {"GNU.sparse.map": "0,x", "GNU.sparse.size": "5"}),
    "negative file": header(tarfile.REGTYPE, -1024) + FILE,
    "within a file": header(tarfile.REGTYPE, 99999) + FILE,
}


@pytest.mark.parametrize(
    ("layers", "words"),
    [
        (archive("tar", tar_of({"../a.json": b"{}"})), "leads out"),
        (archive("tar", tar_of({"/a.json": b"{}"})), "leads out"),
        (archive("tar", b"no archive" * 100), "damaged archive"),
        (archive("tar+gzip", b"no archive" * 100), "damaged archive"),
        (archive("tar+gzip", gzip.compress(tar_of(FILES))[:-300]), "damaged archive"),
        (archive("tar+zstd", b"no archive" * 100), "damaged archive"),
        *((archive("tar+gzip", gzip.compress(data + END)), "damaged archive") for data in DAMAGED.values()),
        (archive("tar", header(tarfile.REGTYPE, 1 << 40)), "unpacks to more than"),
        (archive("tar+zstd", zstd.compress(tar_of({"notes.md": bytes(80 << 20)}))), "unpacks to more than"),
        (archive("tar", tar_of({"notes.md": b"x"})), "0 files"),
        (archive("tar", tar_of({f"{number}.json": b"" for number in range(1025)})), "more than 1024 files"),
        ([*archive("tar", tar_of(FILES)), *raw({"config.json": b"other"})], "twice"),
    ],
    ids=["leads out", "absolute", "tar", "gzip", "cut", "zstd", *DAMAGED, "far", "bomb", "nothing", "many", "twice"],
)
def test_an_archive_that_cannot_be_right_is_refused(registry: SmallRegistry, tmp_path: Path, layers: list[Layer], words: str) -> None:
    registry.push("1", layers)
    with pytest.raises(CheckpointError, match=words):
        pull(registry, tmp_path)
    assert not list((tmp_path / "cache/registry/versions").iterdir())
    assert not (tmp_path / "cache/a.json").exists()


def test_other_bytes_than_the_digest_says_are_refused(registry: SmallRegistry, tmp_path: Path) -> None:
    digest = registry.push("1", raw(FILES))
    registry.manifests[digest] = registry.manifests[digest] + b" "
    with pytest.raises(CheckpointError, match="has the digest"):
        pull(registry, tmp_path, digest)
    weights = FILES["model.safetensors"]
    registry.blobs[oci_kit.digest_of(weights)] = weights[::-1]
    with pytest.raises(CheckpointError, match="other bytes"):
        pull(registry, tmp_path)


def test_nothing_is_written_to_an_oci_registry() -> None:
    with pytest.raises(ConfigError, match=r"is only read\. Push with oras"):
        Registry("oci://host/models")


@pytest.mark.parametrize("text", ['{"auths": []}', "[]", "{", '{"auths": {"HOST": {"password": "x"}}}'])
def test_a_configuration_of_docker_that_is_none_is_named(registry: SmallRegistry, tmp_path: Path, docker_folder: Path, text: str) -> None:
    registry.password = SECRET
    (docker_folder / "config.json").write_text(text.replace("HOST", f"127.0.0.1:{registry.port}"))
    with pytest.raises(ConfigError, match=r"docker/config\.json"):
        pull(registry, tmp_path)


@pytest.mark.process
def test_a_real_registry_that_wants_tokens_is_pulled_from(tmp_path: Path, docker_folder: Path) -> None:
    if shutil.which("docker-registry") is None:
        pytest.skip("docker-registry is not installed")
    large = {"model.safetensors": bytes(range(256)) * (CHUNK_BYTES // 100)}
    packed = (f"{MODEL}.weight.config.v1.tar+gzip", "", gzip.compress(tar_of({"tokenizer.json": b"[1]"})))
    with oci_kit.docker_registry(tmp_path) as url:
        digest = oci_kit.push(url, "1", [*raw({"config.json": b"{}"} | large), packed])
        reference = read_reference(f"{url}/llama@{digest}")
        with pytest.raises(RegistryFailed, match="gets no token"):
            NodeCache(tmp_path / "cache").pull(reference)
        keep_password(docker_folder, url.split("/")[2], auth=SECRET)
        folder = NodeCache(tmp_path / "cache").pull(reference)
        assert NodeCache(tmp_path / "cache").pull(read_reference(f"{url}/llama:1")) == folder
    assert content(folder) == FILES | large
