"""Tests `headrace config`: what is printed, what is hidden, what is left alone."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
import yaml

from headrace.cli.config import commands as config_commands
from headrace.cli.config.commands import check, init, show, shown
from headrace.cli.config.load import load
from headrace.core.errors import ConfigError

pytestmark = pytest.mark.pure

KEY = "a-long-enough-key"
SECRET = "abcd" * 8


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.cli.config.commands.os.environ", {})


def write(tmp_path: Path, model_folder: Path) -> Path:
    file = tmp_path / "h.yaml"
    file.write_text(f"models: [{{engine: {{model: {model_folder}}}}}]\ngateway: {{api_keys: [{{key: {KEY}}}]}}\nsite_key: {SECRET}\n")
    return file


def test_check_says_what_would_be_served(tmp_path: Path, model_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    check(write(tmp_path, model_folder))
    assert "ok. 1 model (some-model), 1 replica, 127.0.0.1:8000" in capsys.readouterr().out


def test_check_reads_a_file_that_a_variable_completes_as_serve_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The model of a file without `models` is the bundled one, whose replicas a variable may set. It was said to lack an engine."""
    file = tmp_path / "h.yaml"
    file.write_text("gateway: {port: 9000}\n")
    monkeypatch.setattr("headrace.cli.config.commands.os.environ", {"HEADRACE_MODELS__0__REPLICAS": "2"})
    check(file)
    assert "ok. 1 model (headrace-tiny), 2 replicas" in capsys.readouterr().out


def test_check_reads_kafkas_properties_and_shows_none_of_their_values(tmp_path: Path, model_folder: Path) -> None:
    file, secrets = write(tmp_path, model_folder), tmp_path / "kafka.properties"
    file.write_text(file.read_text() + f"usage: {{kafka: {{brokers: ['kafka-1:9093'], properties_file: {secrets}}}}}\n")
    with pytest.raises(ConfigError, match=r"usage\.kafka\.properties_file: .*cannot be read"):
        check(file)
    secrets.write_text(f"sasl.jaas.config={SECRET}\n")
    secrets.chmod(0o600)
    with pytest.raises(ConfigError, match=r"line 1 \(sasl\.jaas\.config\)") as refused:
        check(file)
    assert SECRET not in str(refused.value)
    secrets.write_text(f"security.protocol=SASL_SSL\nsasl.mechanism=PLAIN\nsasl.username=ledger\nsasl.password={SECRET}\n")
    check(file)
    secrets.write_text("security.protocol=PLAINTEXT\n")
    with pytest.raises(ConfigError, match=r"usage\.kafka\.brokers\[0\]: is on another machine"):
        check(file)


def test_show_prints_everything_but_secrets(tmp_path: Path, model_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    show(write(tmp_path, model_folder))
    text = capsys.readouterr().out
    assert KEY not in text
    assert "abcd" not in text
    data = yaml.safe_load(text)
    assert data["site_key"] == "(hidden)"
    assert len(data["gateway"]["api_keys"][0]["sha256"]) == 11
    assert data["models"][0]["engine"]["max_num_seqs"] == 64


def test_what_is_shown_is_a_file_again(tmp_path: Path, model_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Where there is no secret to hide: tables by name too, and no key that a file must not have."""
    file, again = tmp_path / "headrace.yaml", tmp_path / "again.yaml"
    models = f"models: [{{name: tiny, engine: {{model: {model_folder}}}}}]"
    file.write_text(f"{models}\nprices: {{tiny: {{input: 1}}}}\ntiers: {{gold: {{class: premium}}}}\n")
    show(file)
    again.write_text(capsys.readouterr().out)
    assert load(again, os.environ) == load(file, os.environ)


def test_init_writes_a_file_that_holds_and_overwrites_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "new.yaml"
    init(file)
    config = load(file, {})
    assert shown(config) == shown(load(None, {}))
    with pytest.raises(ConfigError, match="left alone"):
        init(file)
    init(None)
    assert file.read_text() in capsys.readouterr().out


def test_options_named_in_the_template_exist(tmp_path: Path, model_folder: Path) -> None:
    text = config_commands.begun_file(str(model_folder), "0" * 64)
    uncommented = "\n".join(re.sub(r"^( +)# ", r"\1", line) for line in text.splitlines())
    file = tmp_path / "all.yaml"
    file.write_text(uncommented)
    config = load(file, {})
    engine, (upstream,) = config.models[0].engine, config.models[1].upstreams
    assert engine is not None
    assert engine.max_model_len == 4096
    assert upstream.api_key_env == "ITS_KEY"
    assert config.gateway.api_keys[0].tenant == "acme"
