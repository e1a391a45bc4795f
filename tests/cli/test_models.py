"""Tests `headrace models`: facts from config.json, adapters by name, and why a folder cannot be served."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from gguf_files import byte_level_keys, entry, gguf_bytes, model_keys
from tiny_models import TINY

from headrace.bundled import DEFAULT_MODEL, FOLDER
from headrace.cli.models import adapter_names, describe_folder, model_folders, models
from headrace.core.errors import ConfigError
from headrace.core.speculation import SpeculativeConfig
from headrace.core.strict_decode import decode
from headrace.engine.config import EngineConfig
from headrace.fleet.weights import resolve_model

pytestmark = pytest.mark.pure


def make_model(folder: Path, **changes: object) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({**TINY, **changes}))
    return folder


def make_adapter(folder: Path, base: str) -> None:
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": base}))


def test_folders_are_described_or_say_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_model(tmp_path / "good")
    (tmp_path / "good" / "model.safetensors").touch()
    make_model(tmp_path / "odd", architectures=["UnknownForCausalLM"])
    make_model(tmp_path / "weightless")
    models(tmp_path, as_json=True)
    good, odd, weightless = json.loads(capsys.readouterr().out)
    assert (good["name"], good["architecture"], good["max_model_len"], good["problem"]) == ("good", "LlamaForCausalLM", 512, "")
    assert good["num_parameters"] > 50_000
    assert "UnknownForCausalLM" in odd["problem"]
    assert "--load-format dummy" in weightless["problem"]
    models(tmp_path)
    text = capsys.readouterr().out
    assert "context 512 tokens" in text
    assert "UnknownForCausalLM" in text


def test_the_bundled_draft_says_how_it_drafts(capsys: pytest.CaptureFixture[str]) -> None:
    models(None, as_json=False)
    [said] = re.findall(r"drafts for headrace-tiny: --speculative-config '(.*?)'", capsys.readouterr().out)
    drafting = decode(EngineConfig, {"model": DEFAULT_MODEL, "device": "cpu", "speculative_config": json.loads(said)}).checked()
    assert drafting.with_folders(resolve_model).speculative_config == SpeculativeConfig(
        method="draft_model", model=str(FOLDER / "headrace-draft")
    )


def test_the_name_is_what_the_model_is_served_as(tmp_path: Path) -> None:
    assert describe_folder(make_model(tmp_path / "My Mod\u00e8le #1")).name == "My-Modele-1"


def test_adapters_are_found_inside_and_beside_their_base(tmp_path: Path) -> None:
    base = make_model(tmp_path / "base")
    make_adapter(base / "style", "anything")
    make_adapter(tmp_path / "adapters" / "domain", "/elsewhere/base")
    make_adapter(tmp_path / "adapters" / "other", "another-model")
    (tmp_path / "adapters" / "broken").mkdir()
    (tmp_path / "adapters" / "broken" / "adapter_config.json").write_text("{")
    assert adapter_names(base) == ("domain", "style")


def test_a_gguf_file_is_a_model_of_its_own_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_CACHE_DIR", str(tmp_path / "cache"))
    keys = {**model_keys(TINY, "llama"), **byte_level_keys(FOLDER / "headrace-tiny", "headrace")}
    table = entry(torch.zeros(2560, int(str(TINY["hidden_size"]))), "F16")
    (tmp_path / "all").mkdir()
    file, damaged = tmp_path / "all" / "some-Q4_K_M.gguf", tmp_path / "all" / "odd-00001-of-00002.gguf"
    file.write_bytes(gguf_bytes(keys, {"token_embd.weight": table}))
    for path in (damaged, damaged.with_name("odd-00002-of-00002.gguf")):
        path.write_bytes(b"GGUF")
    assert model_folders(tmp_path / "all") == [damaged, file]
    assert model_folders(file) == [file]
    row = describe_folder(file)
    assert (row.name, row.architecture, row.problem) == ("some-Q4_K_M", "LlamaForCausalLM", "")
    odd = describe_folder(damaged)
    assert odd.name == "odd"
    assert odd.problem.startswith(str(damaged))


def test_one_folder_or_a_folder_of_folders(tmp_path: Path) -> None:
    base = make_model(tmp_path / "all" / "base")
    assert model_folders(base) == model_folders(tmp_path / "all") == [base]
    with pytest.raises(ConfigError, match="no model folder"):
        model_folders(tmp_path / "absent")
