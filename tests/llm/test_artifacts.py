"""Serves the bundled model as an OCI artifact: pulled by its name, and from the folder that a cluster mounts it as."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import pytest
from oci_kit import SmallRegistry, raw, tar_of

from headrace import LLM, SamplingParams
from headrace.bundled import FOLDER
from headrace.machine.cache_folder import ENVIRONMENT

pytestmark = pytest.mark.socket

TINY = FOLDER / "headrace-tiny"
FILES = {path.name: path.read_bytes() for path in TINY.iterdir() if path.suffix in (".json", ".jinja", ".safetensors")}


def greedy(model: str) -> tuple[int, ...]:
    params = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
    with LLM(model, dtype="float32", kernels="reference", max_model_len=64, max_num_seqs=1) as llm:
        return tuple(llm.generate(["Once upon a time"], params)[0].outputs[0].token_ids)


def test_an_artifact_answers_as_its_folder_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENVIRONMENT, str(tmp_path / "cache"))
    registry = SmallRegistry()
    digest = registry.push("1", raw(FILES))
    found = greedy(f"{registry.url}/llama:1")
    registry.close()
    assert found == greedy(f"{registry.url}/llama@{digest}") == greedy(str(TINY)), "without the registry the second time"


def test_a_mounted_artifact_is_a_folder_that_is_only_read(tmp_path: Path) -> None:
    with tarfile.open(fileobj=io.BytesIO(tar_of(FILES))) as archive:
        archive.extractall(tmp_path / "models", filter="data")
    folder = tmp_path / "models"
    for path in (*folder.iterdir(), folder):
        path.chmod(0o555 if path.is_dir() else 0o444)
    before = {path: path.stat().st_mtime_ns for path in (folder, *folder.iterdir())}
    assert greedy(str(folder)) == greedy(str(TINY))
    assert {path: path.stat().st_mtime_ns for path in (folder, *folder.iterdir())} == before
