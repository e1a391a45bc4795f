"""Checks `headrace registry`, and that a version is served under its model's name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from gguf_files import bundled_gguf

from headrace.bundled import bundled_path
from headrace.cli.config.load import ServeSource
from headrace.cli.config.sections import ModelSection, ServeConfig
from headrace.core.errors import CheckpointError, ConfigError
from headrace.engine.config import EngineConfig
from headrace.fleet.weights import pulled_model, resolve_adapter, resolve_model
from headrace.registry.cache import version_in
from tests.cli.conftest import Headrace

pytestmark = pytest.mark.socket


@pytest.fixture
def url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("HEADRACE_CACHE_DIR", str(tmp_path / "cache"))
    return f"file://{tmp_path}/registry"


def test_a_version_from_push_to_removal(url: str, headrace: Headrace) -> None:
    assert headrace("registry", "push", "headrace-draft", f"{url}/draft:1").returncode == 0
    assert headrace("registry", "push", "headrace-tiny", f"{url}/draft:2").stdout == f"{url}/draft:2: 6 files, 4989238 bytes\n"
    assert headrace("registry", "promote", f"{url}/draft:1", "stable").stdout == f"{url}/draft:stable -> 1\n"
    rows = json.loads(headrace("registry", "list", url, "--json").stdout)
    assert [(row["version"], row["aliases"]) for row in rows] == [("1", "stable"), ("2", "latest")]
    assert "LlamaForCausalLM" in headrace("registry", "list", f"{url}/draft").stdout
    folder = Path(headrace("registry", "pull", f"{url}/draft:stable").stdout.strip())
    bundled = bundled_path("headrace-draft")
    assert bundled is not None
    assert (folder / "model.safetensors").read_bytes() == (bundled / "model.safetensors").read_bytes()
    assert headrace("registry", "verify", f"{url}/draft:stable").returncode == 0
    assert headrace("registry", "verify", "--here", f"{url}/draft:stable").returncode == 0
    assert headrace("registry", "gc", url, "--dry-run").stdout == "0 files, 0 bytes would go\n"
    assert headrace("registry", "gc").returncode == 0
    refused = headrace("registry", "remove", f"{url}/draft:1")
    assert (refused.returncode, "stable points to draft:1" in refused.stderr) == (3, True)
    assert headrace("registry", "promote", f"{url}/draft:2", "stable").returncode == 0
    assert headrace("registry", "remove", f"{url}/draft:1").returncode == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("push", "headrace-tiny", "REF"), "names no version"),
        (("push", "/nowhere", "REF:1"), "there is no folder"),
        (("pull", "REF:9"), "there is no folder"),
        (("pull", "http://a/b:1"), "begins with none of"),
        (("push", "headrace-tiny", "oci://host/draft:1"), "is only read"),
        (("gc", "--dry-run"), "is for a registry"),
    ],
)
def test_what_cannot_be_done_is_refused(url: str, arguments: tuple[str, ...], words: str, headrace: Headrace) -> None:
    refused = headrace("registry", *(word.replace("REF", f"{url}/draft") for word in arguments))
    assert (refused.returncode, words in refused.stderr) == (3, True), refused.stderr


def test_a_gguf_file_is_served_by_reference(url: str, headrace: Headrace, tmp_path: Path) -> None:
    folder = tmp_path / "gguf"
    folder.mkdir()
    model = bundled_path("headrace-tiny")
    assert model is not None
    bundled_gguf(model, folder / "model.gguf", "Q8_0")
    assert headrace("registry", "push", str(folder), f"{url}/small:1").returncode == 0
    assert (resolve_model(f"{url}/small:1") / "config.json").exists()


def test_a_deployment_keeps_the_version_that_its_alias_had(url: str, headrace: Headrace) -> None:
    headrace("registry", "push", "headrace-draft", f"{url}/draft:1")
    folder = resolve_model(f"{url}/draft:latest")
    headrace("registry", "push", "headrace-tiny", f"{url}/draft:2")
    assert resolve_model(f"{url}/draft:latest") == folder
    assert [version_in(each) for each in (folder, pulled_model(f"{url}/draft:latest"), Path(url))] == ["1", "2", ""]


def test_a_rollout_pulls_what_an_alias_leads_to_now_and_a_reload_keeps_what_is_served(url: str, headrace: Headrace) -> None:
    headrace("registry", "push", "headrace-draft", f"{url}/draft:1")
    config = ServeConfig(models=(ModelSection(engine=EngineConfig(model=f"{url}/draft:latest")),))
    source = ServeSource(config, lambda: config, resolve_model)
    served = source.read({}).pulled
    headrace("registry", "push", "headrace-tiny", f"{url}/draft:2")
    [alias] = served
    after = source.renewed(served, {alias: alias}).pulled
    assert [version_in(pulled[alias]) for pulled in (served, after)] == ["1", "2"]
    assert source.read(after).pulled == after
    assert source.read(served).pulled == served, "it was rolled back"
    with pytest.raises(ConfigError, match="is not in the registry"):
        source.renewed(served, {alias: f"{url}/draft:3"})


def test_a_reference_stands_for_a_folder(url: str, headrace: Headrace, monkeypatch: pytest.MonkeyPatch) -> None:
    headrace("registry", "push", "headrace-draft", f"{url}/draft:1")
    assert resolve_model(f"{url}/draft").name == "draft"
    assert resolve_adapter(f"{url}/draft:1").name == "draft"
    blob = next(path for path in Path(url.removeprefix("file://")).glob("blobs/*") if path.stat().st_size > 10_000)
    damaged = bytearray(blob.read_bytes())
    damaged[100] ^= 1
    blob.write_bytes(bytes(damaged))
    monkeypatch.setenv("HEADRACE_CACHE_DIR", url.removeprefix("file://") + "-cache")
    with pytest.raises(CheckpointError, match="other bytes"):
        resolve_model(f"{url}/draft:1")
