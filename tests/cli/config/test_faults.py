"""Tests that all faults of a configuration are reported at once, each with its line, and none caused by another one's repair."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from headrace.cli.config.faults import OTHER_VARIABLES, faults, unread_variables
from headrace.cli.config.load import load
from headrace.cli.config.yaml_files import parse_document
from headrace.core.errors import ConfigError
from tests.cli.conftest import Headrace
from tests.house.options import config_options
from tests.house.reader import ROOT

pytestmark = pytest.mark.pure

BROKEN = """\
models:
  - name: a
    replicas: two
    engine:
      model: /absent
      max_num_seq: 0
      dtype: float17
      seed: x
  - name: a
    engine: {model: M, max_num_seqs: 0}
  - name: far
    upstreams: [{ulr: "http://x/v1"}]
  - engine: {model: M}
    remote: {model: M, replicas: [{name: r, address: "unix:/r"}]}
gatway: {}
gateway:
  port: 70000
  api_keys:
    - {key: short}
    - {key: long-enough-key, tier: top}
  timeouts: {drain: 5, failover_s: -1}
drain_timeout_s: -4
"""
FOUND = [
    (3, "models[0].replicas", "expected int"),
    (5, "models[0].engine.model", "there is no folder"),
    (6, "models[0].engine.max_num_seq", "Did you mean max_num_seqs?"),
    (7, "models[0].engine.dtype", "'float17' is not one of auto, float32, bfloat16, float16."),
    (8, "models[0].engine.seed", "expected int"),
    (9, "models[1].name", "served twice"),
    (10, "models[1].engine.max_num_seqs", "0 is outside"),
    (12, "models[2].upstreams[0].ulr", "Did you mean url?"),
    (13, "models[3]", "needs exactly one of"),
    (15, "gatway", "Did you mean gateway?"),
    (17, "gateway.port", "70000 is outside"),
    (19, "gateway.api_keys[0].key", "is shorter than"),
    (20, "gateway.api_keys[1].tier", "'top' is not a tier"),
    (21, "gateway.timeouts.drain", "Set drain_timeout_s at the top level."),
    (21, "gateway.timeouts.failover_s", "is negative"),
    (22, "drain_timeout_s", "outside 0..86400"),
]


@pytest.fixture
def broken(tmp_path: Path, model_folder: Path) -> Path:
    file = tmp_path / "broken.yaml"
    file.write_text(BROKEN.replace("model: M", f"model: {model_folder}"))
    return file


def test_every_fault_is_found_with_its_line_and_no_other(broken: Path) -> None:
    found = {fault.error.where: fault for fault in faults(broken, {})}
    assert set(found) == {where for _, where, _ in FOUND}
    for line, where, words in FOUND:
        assert found[where].line == line, where
        assert words in str(found[where].error)
        assert found[where].message(broken).startswith(f"{broken}:{line}: {where}: ")


@pytest.mark.parametrize("number", range(len(BROKEN.splitlines())))
def test_a_file_without_one_of_its_lines_still_has_an_answer(broken: Path, number: int) -> None:
    """Mending ends, whatever is wrong; what YAML cannot read is one fault."""
    lines = BROKEN.splitlines(keepends=True)
    broken.write_text("".join(lines[:number] + lines[number + 1 :]))
    try:
        found = [str(fault.error) for fault in faults(broken, {})]
    except ConfigError as error:
        found = [str(error)]
    assert found
    assert len(found) > 5 or "is not valid YAML" in found[0]


@pytest.mark.parametrize(
    ("text", "wheres"),
    [
        ("", []),
        ("models: 5", ["models"]),
        ("models: [5]", ["models[0]"]),
        ("gateway: 7\nmodels: []", ["gateway", "models"]),
        (
            "models: [M]\ngateway: {allowed_hosts: [1, 2], limits: 4}",
            ["gateway.allowed_hosts[0]", "gateway.allowed_hosts[1]", "gateway.limits"],
        ),
        ("models: [{aliases: [a, a, 5], engine: {model: headrace-tiny}}]", ["models[0].aliases[1]", "models[0].aliases[2]"]),
        (
            "models: [{aliases: [a, a, /], engine: {model: headrace-tiny}}]\ngateway: {port: -1}",
            ["gateway.port", "models[0].aliases[1]", "models[0].aliases[2]"],
        ),
        # What a misspelt or superfluous section holds is checked as well.
        (
            "modles: [{enigne: {model: headrace-tiny, sede: x, max_num_seqs: 0}}]\ngatway: {port: -1}",
            ["gatway", "gatway.port", "modles", "modles[0].enigne", "modles[0].enigne.max_num_seqs", "modles[0].enigne.sede"],
        ),
        (
            "models: [{engine: {model: headrace-tiny, max_num_seqs: 0}, upstreams: [{url: 'ftp://x', order: -1}]}]",
            ["models[0].engine.max_num_seqs", "models[0].upstreams[0].order", "models[0].upstreams[0].url"],
        ),
        ("models: [{replicas: 0, aliases: [/]}]", ["models[0]", "models[0].aliases[0]", "models[0].replicas"]),
        (
            "models: [M]\ngateway: {api_keys: [{key: short, sha256: x, tier: top}, {tier: -1}]}",
            [
                "gateway.api_keys[0]",
                "gateway.api_keys[0].key",
                "gateway.api_keys[0].sha256",
                "gateway.api_keys[0].tier",
                "gateway.api_keys[1]",
                "gateway.api_keys[1].tier",
            ],
        ),
        ("models: [M]\ngatway: {port: -1}\ngateway: {prot: -1}", ["gateway.prot", "gatway"]),
        ("models: [{upstreams: [{url: 'ftp://x'}]}]", ["models[0].name", "models[0].upstreams[0].url"]),
        ("models: [{engine: {model: headrace-tiny, device: cuda, dtype: float17}}]", ["models[0].engine.dtype"]),
        ("models: [M]\ngateway: {timeouts: {idle_s: -1}}", ["gateway.timeouts.idle_s"]),
        ("models: [{upstreams: [{ulr: 5, model: m}], name: a}]", ["models[0].upstreams[0].ulr"]),
        ("models: [M]\ngateway: {models: [], timeouts: {drain_s: 5}}", ["gateway.models", "gateway.timeouts.drain_s"]),
    ],
)
def test_odd_files_have_their_own_faults_and_no_others(tmp_path: Path, model_folder: Path, text: str, wheres: list[str]) -> None:
    file = tmp_path / "odd.yaml"
    file.write_text(text.replace("[M]", f"[{{engine: {{model: {model_folder}}}}}]"))
    assert sorted(fault.error.where for fault in faults(file, {})) == wheres


def test_a_key_given_twice_is_one_fault_among_the_others(tmp_path: Path, model_folder: Path) -> None:
    """It hid every other one. Its last value counts, and is checked."""
    file = tmp_path / "twice.yaml"
    file.write_text(
        f"gateway:\n  port: 1\n  hots: x\n  port: 70000\nmodels:\n  - engine: {{model: {model_folder}, seed: 1, seed: x}}\n"
        "    replicas: 0\ngateway: {port: -1, port: 2, port: -3}\n"
    )
    found = faults(file, {})
    assert [(fault.line, fault.error.where) for fault in found if "given twice" in fault.error.reason] == [
        (4, "gateway.port"),
        (6, "models[0].engine.seed"),
        (8, "gateway"),
        (8, "gateway.port"),
        (8, "gateway.port"),
    ]
    assert [(fault.line, fault.error.where) for fault in found if "given twice" not in fault.error.reason] == [
        (6, "models[0].engine.seed"),
        (7, "models[0].replicas"),
        (8, "gateway.port"),
    ]
    assert found[0].message(file) == f"{file}:4: gateway.port: is given twice, first on line 2. Leave one of them out."


def test_a_key_that_is_merged_and_written_is_not_given_twice(tmp_path: Path, model_folder: Path) -> None:
    file = tmp_path / "merged.yaml"
    file.write_text(f"<<: {{drain_timeout_s: 5}}\ndrain_timeout_s: 7\nmodels: [{{engine: {{model: {model_folder}}}}}]\n")
    assert faults(file, {}) == []
    assert load(file, {}).drain_timeout_s == 7


def test_a_fault_of_a_variable_is_named_by_it(tmp_path: Path, model_folder: Path) -> None:
    file = tmp_path / "good.yaml"
    file.write_text(f"models: [{{engine: {{model: {model_folder}}}}}]")
    environment = {"HEADRACE_GATEWAY__HOTS": "x", "HEADRACE_GATEWAY__PORT": "-1", "HEADRACE_MODELS__0__ENGINE__SEED": "x"}
    found = faults(file, environment)
    assert {fault.error.where: fault.line for fault in found} == dict.fromkeys(environment)
    assert "Did you mean HEADRACE_GATEWAY__HOST?" in found[0].message(file)
    assert faults(file, {}) == []


def test_check_prints_them_all_and_fails(headrace: Headrace, broken: Path) -> None:
    done = headrace("config", "check", str(broken))
    assert done.returncode == 3
    lines = done.stderr.splitlines()
    assert lines[-1] == f"headrace: {broken}: {len(FOUND)} faults"
    assert len(lines) == len(FOUND) + 1
    assert [int(line.removeprefix(f"{broken}:").partition(":")[0]) for line in lines[:-1]] == sorted(line for line, _, _ in FOUND)


def test_serve_says_them_all_too_and_a_wrong_flag_alone(headrace: Headrace, broken: Path, model_folder: Path) -> None:
    assert headrace("serve", "--config", str(broken)).stderr.splitlines()[-1] == f"headrace: {broken}: {len(FOUND)} faults"
    broken.write_text(f"models: [{{engine: {{model: {model_folder}}}}}]")
    assert headrace("serve", "--config", str(broken), "--port", "-1").stderr == "headrace: --port: -1 is outside 0..65535.\n"


def test_lines_are_those_of_the_keys() -> None:
    lines = {"a": 1, "a.b": 2, "a.b[0]": 3, "a.b[0].c": 3, "a.b[1]": 4}
    assert parse_document("a:\n  b:\n    - c: 1\n    - 2\n", "x").lines == lines
    assert parse_document("", "x").lines == {}


def test_variables_that_nothing_reads_are_named() -> None:
    environment = {
        "HEADRACE_PORT": "8000",
        "HEADRACE_XYZZY": "1",
        "HEADRACE_API_KEY": "k",
        "HEADRACE_GATEWAY__PORT": "1",
        "HEADRACE_EXPERIMENTAL": "true",
        "HEADRACE_SERVICE_HOST": "10.0.0.1",  # Kubernetes sets these for a service named headrace
        "HEADRACE_PORT_8000_TCP_ADDR": "10.0.0.1",
        "PATH": "/bin",
    }
    assert list(unread_variables(environment)) == [
        "HEADRACE_PORT is not read. Did you mean HEADRACE_GATEWAY__PORT?",
        "HEADRACE_XYZZY is not read.",
    ]
    [said] = unread_variables({"HEADRACE_API_KEYS": "k"})  # a server that its operator takes for a closed one
    assert said.startswith("HEADRACE_API_KEYS is not read.")
    assert list(unread_variables({"HEADRACE_PORT": "tcp://10.0.0.1:8000"})) == []


def test_every_variable_of_the_source_is_known() -> None:
    texts = [file.read_text(encoding="utf-8") for file in (ROOT / "src").rglob("*.py")]
    named = {name for text in texts for name in re.findall(r'"(HEADRACE_[A-Z_]+)"', text) if "__" not in name}
    assert named <= {*OTHER_VARIABLES, "HEADRACE_", *(f"HEADRACE_{path.upper()}" for path, _ in config_options() if "." not in path)}
