"""Tests `headrace engine`: what is refused before it starts, and what a process survives before there is an engine in it."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from patience import PATIENCE_S

from headrace.bundled import bundled_adapter, bundled_path
from headrace.cli.admin.tls import init
from headrace.cli.exits import CommandExitCode
from headrace.cli.main import main
from headrace.core.adapters import AdapterSource
from headrace.core.speculation import SpeculativeConfig
from headrace.engine.config import EngineConfig
from headrace.engine.server.config import ProcessConfig

pytestmark = pytest.mark.pure

SCRIPT = """
import sys, time
from pathlib import Path

from headrace.cli.servers.engine import engine
from headrace.engine import main

run_engine = main.run_engine

def run_later(*arguments):
    print("importing", flush=True)
    sys.stdin.readline()
    run_engine(*arguments)

def build(*arguments, **named):
    print("building", flush=True)
    time.sleep(3600)

main.run_engine, main.build_served_engine = run_later, build
engine(config=Path(sys.argv[1]))
"""
"""`headrace engine` with its two slow parts made to last: importing the engine, until a line comes in, and building it, for good."""


@pytest.fixture
def starting(tmp_path: Path, model_folder: Path) -> Iterator[subprocess.Popen[str]]:
    config = tmp_path / "engine.json"
    config.write_text(json.dumps({"replica": "r", "address": f"unix:{tmp_path}/e.sock", "engine": {"model": str(model_folder)}}))
    pipe = subprocess.PIPE
    process = subprocess.Popen([sys.executable, "-c", SCRIPT, str(config)], stdin=pipe, stdout=pipe, stderr=pipe, text=True)
    with process:
        yield process
        process.kill()


@pytest.mark.process
def test_a_dump_asked_for_before_the_engine_is_ready_is_refused_in_the_log(starting: subprocess.Popen[str]) -> None:
    assert starting.stdin is not None
    assert starting.stdout is not None
    assert starting.stdout.readline() == "importing\n"
    starting.send_signal(signal.SIGUSR1)
    print(file=starting.stdin, flush=True)
    assert starting.stdout.readline() == "building\n"
    starting.send_signal(signal.SIGUSR1)
    starting.send_signal(signal.SIGTERM)
    _, log = starting.communicate(timeout=PATIENCE_S)
    assert "SIGUSR1: there are no plans to dump" in log
    assert starting.returncode == 0


@pytest.mark.parametrize(
    ("arguments", "code", "what"),
    [
        ([], CommandExitCode.USAGE, "--listen: the address is missing"),
        (["--listen", "0.0.0.0:7001"], CommandExitCode.CONFIG, "'0.0.0.0' is not a loopback address, and no certificates are given"),
        (["--listen", "127.0.0.1:7001"], CommandExitCode.CONFIG, "needs a token"),
        (["--listen", "gpu1"], CommandExitCode.CONFIG, "'gpu1' is neither unix:/path nor host:port"),
        (["--listen", "unix:/run/e.sock", "--tls-dir", "/certs"], CommandExitCode.CONFIG, "A Unix socket needs none"),
        (["--listen", "unix:/run/e.sock", "--max-num-seqs", "0"], CommandExitCode.CONFIG, "headrace: --max-num-seqs: 0 is outside"),
        (["--listen", "unix:/run/e.sock", "--device", "tpu"], CommandExitCode.CONFIG, "headrace: --device: 'tpu' is not one of"),
        (["/absent", "--listen", "unix:/run/e.sock"], CommandExitCode.CONFIG, "there is no folder /absent"),
        (["--config", "/absent.yaml"], CommandExitCode.CONFIG, "/absent.yaml"),
        (["--config", "e.yaml", "--listen", "gpu1:7001"], CommandExitCode.USAGE, "--listen: the file given with --config holds everything"),
        (
            ["--config", "e.yaml", "--max-num-seqs", "3"],
            CommandExitCode.USAGE,
            "--max-num-seqs: the file given with --config holds everything",
        ),
        (["--listen", "unix:/run/e.sock", "--log-format", "xml"], CommandExitCode.USAGE, "--log-format: 'xml' is not one of"),
    ],
)
def test_what_an_engine_is_not_started_with_is_refused_under_the_flags_name(
    arguments: list[str], code: int, what: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["headrace", "engine", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == code
    assert what in capsys.readouterr().err


@pytest.mark.socket
def test_an_engine_does_not_start_with_a_gateways_certificate(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("headrace.engine.main.set_up_logging", lambda: None)
    monkeypatch.setattr("headrace.engine.main.prepare_openmp", lambda environment: None)
    monkeypatch.setattr("headrace.engine.main.leave", sys.exit)
    init(tmp_path / "site", host=["127.0.0.2"])
    arguments = ["--listen", "127.0.0.2:0", "--tls-dir", str(tmp_path / "site" / "gateway")]
    monkeypatch.setattr(sys, "argv", ["headrace", "engine", str(model_folder), *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 78
    assert "tls.crt is for another role (its extended key usage). It must be a certificate for the engine." in caplog.text


def test_flags_become_the_engines_and_its_process_configuration(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[tuple[ProcessConfig, EngineConfig]] = []
    monkeypatch.setattr("headrace.engine.main.run_engine", lambda read: started.append(read()))
    arguments = ["--listen", "gpu1:7001", "--tls-dir", str(tmp_path), "--name", "left", "--drain-timeout", "5", "--max-num-seqs", "7"]
    monkeypatch.setattr(sys, "argv", ["headrace", "engine", str(model_folder), *arguments])
    with pytest.raises(SystemExit):
        main()
    [(process, engine)] = started
    assert (process.replica, process.address, process.drain_timeout_s) == ("left", "gpu1:7001", 5.0)
    assert (process.tls_dir, process.token_file) == (str(tmp_path), "")
    assert (engine.model, engine.max_num_seqs) == (str(model_folder), 7)


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ([], ""),
        (["--enable-lora"], ""),
        (["--no-enable-lora"], "headrace: --lora-modules: names adapters, and enable_lora is off."),
        (["law=/none"], "headrace: lora_modules[1].path: there is no folder '/none'."),
    ],
)
def test_an_engine_by_hand_has_adapters_too(
    more: list[str], reason: str, model_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    started: list[tuple[ProcessConfig, EngineConfig]] = []
    monkeypatch.setattr("headrace.engine.main.run_engine", lambda read: started.append(read()))
    arguments = ["--listen", "unix:/run/e.sock", "--lora-modules", "sql=pirate", *more]
    monkeypatch.setattr(sys, "argv", ["headrace", "engine", str(model_folder), *arguments])
    with pytest.raises(SystemExit):
        main()
    assert reason in capsys.readouterr().err
    if not reason:
        [(_, engine)] = started
        assert engine.lora_modules == (AdapterSource(name="sql", path=str(bundled_adapter("pirate"))),)
        assert engine.enable_lora


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"method": "draft_model", "model": "headrace-draft"}, ""),
        ({"method": "eagle"}, "headrace: speculative_config.method: 'eagle' is not supported."),
        ({"method": "suffix", "suffix_decoding_max_tree_depth": 9}, ".suffix_decoding_max_tree_depth: is not supported."),
        ({"method": "draft_model", "model": "./no-folder"}, "headrace: speculative_config.model: there is no folder ./no-folder."),
    ],
)
def test_an_engine_by_hand_drafts_too(
    given: dict[str, object], reason: str, model_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    started: list[tuple[ProcessConfig, EngineConfig]] = []
    monkeypatch.setattr("headrace.engine.main.run_engine", lambda read: started.append(read()))
    arguments = ["--listen", "unix:/run/e.sock", "--device", "cpu", "--speculative-config", json.dumps(given)]
    monkeypatch.setattr(sys, "argv", ["headrace", "engine", str(model_folder), *arguments])
    with pytest.raises(SystemExit):
        main()
    assert reason in capsys.readouterr().err
    assert [engine.speculative_config for _, engine in started] == (
        [] if reason else [SpeculativeConfig(method="draft_model", model=str(bundled_path("headrace-draft")))]
    )


def test_a_yaml_file_holds_what_the_flags_say(model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[tuple[ProcessConfig, EngineConfig]] = []
    monkeypatch.setattr("headrace.engine.main.run_engine", lambda read: started.append(read()))
    file = tmp_path / "engine.yaml"
    text = f"replica: left\naddress: gpu1:7001\ntoken_file: /t/token\ntls_dir: /c\nengine: {{model: {model_folder}, max_num_seqs: 7}}\n"
    file.write_text(text)
    monkeypatch.setattr(sys, "argv", ["headrace", "engine", "--config", str(file)])
    with pytest.raises(SystemExit):
        main()
    [(process, engine)] = started
    assert (process.replica, process.tls_dir, process.token_file) == ("left", "/c", "/t/token")
    assert engine.max_num_seqs == 7


def test_a_file_names_models_as_the_command_line_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[tuple[ProcessConfig, EngineConfig]] = []
    monkeypatch.setattr("headrace.engine.main.run_engine", lambda read: started.append(read()))
    file = tmp_path / "engine.yaml"
    file.write_text("{replica: left, address: 'unix:/run/e.sock', engine: {model: headrace-tiny}}")
    monkeypatch.setattr(sys, "argv", ["headrace", "engine", "--config", str(file)])
    with pytest.raises(SystemExit):
        main()
    assert started[0][1].model == str(bundled_path("headrace-tiny"))
