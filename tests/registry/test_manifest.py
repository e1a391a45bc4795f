"""Checks manifests: what they refuse, and what is said of a folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.bundled import bundled_adapter, bundled_path
from headrace.core.errors import CheckpointError
from headrace.registry.manifest import Manifest, StoredFile, describe, files_of, read_manifest

pytestmark = pytest.mark.pure

DIGEST = "0" * 64
GOOD = Manifest("a", "1", (StoredFile("model.safetensors", 3, DIGEST), StoredFile("config.json", 0, DIGEST)), {"format": "safetensors"})


def test_a_manifest_is_read_as_it_was_written() -> None:
    assert read_manifest(GOOD.encoded(), "here") == GOOD


@pytest.mark.parametrize(
    "change",
    [
        {"files": []},
        {"files": [{"path": "../x.json", "size": 1, "sha256": DIGEST}]},
        {"files": [{"path": "a/x.json", "size": 1, "sha256": DIGEST}]},
        {"files": [{"path": "x.py", "size": 1, "sha256": DIGEST}]},
        {"files": [{"path": "x.json", "size": -1, "sha256": DIGEST}]},
        {"files": [{"path": "x.json", "size": 1 << 60, "sha256": DIGEST}]},
        {"files": [{"path": "x.json", "size": 1, "sha256": "../" + DIGEST[3:]}]},
        {"files": [{"path": "x.json", "size": 1, "sha256": DIGEST}] * 2},
        {"files": [{"path": f"{index}.json", "size": 1, "sha256": DIGEST} for index in range(1025)]},
        {"name": "../a"},
        {"version": "/etc"},
        {"more": 1},
        {"facts": {"a": 1}},
    ],
)
def test_a_manifest_that_leads_elsewhere_is_refused(change: dict[str, object]) -> None:
    data = json.dumps({**json.loads(GOOD.encoded()), **change}).encode()
    with pytest.raises(CheckpointError, match="somewhere"):
        read_manifest(data, "somewhere")


@given(st.binary(max_size=200))
def test_any_bytes_are_a_manifest_or_refused(data: bytes) -> None:
    with pytest.raises(CheckpointError):
        read_manifest(data, "somewhere")


def test_code_links_and_folders_are_left_out(tmp_path: Path) -> None:
    for name in ("model.safetensors", "config.json", "modeling.py", "pytorch_model.bin", ".hidden.json"):
        (tmp_path / name).write_text("{}")
    (tmp_path / "more").mkdir()
    kept, left_out = files_of(tmp_path)
    assert kept == ["config.json", "model.safetensors"]
    assert left_out == [".hidden.json", "modeling.py", "more", "pytorch_model.bin"]


def test_a_link_out_of_the_folder_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (tmp_path / "secret.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"")
    (folder / "config.json").symlink_to(tmp_path / "secret.json")
    with pytest.raises(CheckpointError, match="leads out"):
        files_of(folder)


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="no weights"):
        files_of(tmp_path)


def test_what_is_said_of_the_bundled_model_and_of_an_adapter() -> None:
    model = bundled_path("headrace-tiny")
    assert model is not None
    facts = describe(model, files_of(model)[0])
    assert (facts["architecture"], facts["precision"], facts["context"], facts["format"]) == (
        "LlamaForCausalLM", "bfloat16", "2048", "safetensors"
    )  # fmt: skip
    adapters = sorted((model.parent / "adapters").iterdir())
    adapter = bundled_adapter(adapters[0].name)
    assert adapter is not None
    assert describe(adapter, files_of(adapter)[0])["kind"] == "adapter"
