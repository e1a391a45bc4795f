"""Tests reading the configuration of a running deployment again: which differences are reported, and which of two holds."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest

from headrace.cli.config.load import load
from headrace.cli.servers.source import ServeSource
from headrace.core.errors import ConfigError

pytestmark = pytest.mark.pure


def test_differences_name_models_and_show_no_secret(tmp_path: Path, model_folder: Path) -> None:
    path = tmp_path / "headrace.yaml"
    tiny = {"engine": {"model": str(model_folder), "num_threads": 1}}

    def write(*models: object, **gateway: object) -> None:
        path.write_text(json.dumps({"models": models, "gateway": gateway}))

    write(tiny, api_keys=[{"key": "first-key-1"}])
    read = partial(load, path, {"HEADRACE_GATEWAY__PORT": "9000"}, {"drain_timeout_s": 7})
    source = ServeSource(read(), read, Path)
    assert source.read().gateway["port"] == 9000
    assert source.differences() == ["the configuration is as it was"]
    other = {"name": "other", "engine": {"model": str(model_folder)}, "aliases": ["o"]}
    write({**tiny, "replicas": 2}, other, api_keys=[{"key": "first-key-1"}, {"key": "second-key-2", "tenant": "b"}])
    for _ in range(2):
        fleet = source.read()
        assert ([model.replicas for model in fleet.models], fleet.drain_timeout_s) == ([2, 1], 7)
        found = source.differences()
        assert found[:2] == [f"~ models[{model_folder.name}].replicas: 1 -> 2", "+ models[other]"]
        assert "second-key-2" not in str(found)
        assert "tenant='b'" in found[2]
    source.accept()
    source.read()
    assert source.differences() == ["the configuration is as it was"]


def test_a_file_with_a_fault_is_refused_and_what_holds_stays(tmp_path: Path, model_folder: Path) -> None:
    path = tmp_path / "headrace.yaml"
    path.write_text(json.dumps({"models": [{"engine": {"model": str(model_folder)}}]}))
    read = partial(load, path, {})
    source = ServeSource(read(), read, Path)
    path.write_text(json.dumps({"models": [{"engine": {"model": str(model_folder)}, "replica": 2}]}))
    with pytest.raises(ConfigError, match=r"models\[0\]\.replica: is not a known key"):
        source.read()
    assert source.differences() == ["the configuration is as it was"]
