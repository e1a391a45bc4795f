"""Tests the HTTP comparison: servers that are waited for and ended whatever happens, equal loads for all, cells, and their table."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from bench.peers import cells, engines, http, report, servers
from bench.peers.cells import Outcome
from bench.peers.engines import CannotRun, end_tree
from bench.peers.rows import Figure
from bench.peers.run import Turn
from bench.peers.servers import Server, ServerLaunch, flags_of, serving
from headrace.lab.datasets import make_requests
from headrace.lab.metrics import LoadRecord, Slo, summarize
from headrace.tensor.host.cpu_features import CpuFeatures

pytestmark = pytest.mark.pure

SERVER = """
import json, sys, time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert asked["ignore_eos"] and asked["model"] == "peer" and asked["temperature"] == 0
        self.send_response(200); self.end_headers()
        for _ in range(asked["max_tokens"]):
            self.wfile.write(b'data: {"choices": [{"text": "a"}]}\\n\\n')
        counts = {"prompt_tokens": len(asked["prompt"]), "completion_tokens": asked["max_tokens"]}
        self.wfile.write(f'data: {json.dumps({"choices": [], "usage": counts})}\\n\\ndata: [DONE]\\n\\n'.encode())
    def log_message(self, *words): pass
ThreadingHTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
"""
WITH_CHILD = """
import subprocess, sys
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
"""


@pytest.fixture
def launch_with(tmp_path: Path) -> Callable[[str], ServerLaunch]:
    def make(text: str) -> ServerLaunch:
        script = tmp_path / "server.py"
        script.write_text(text)
        return ServerLaunch(command=(sys.executable, str(script)), ready="/")

    return make


@pytest.fixture
def turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Turn:
    monkeypatch.setattr(cells, "FOLDER", tmp_path / "cells")
    monkeypatch.setattr("headrace.lab.environment.commit_of", lambda folder: "abc")  # git is another process
    return Turn(
        shape="llama-1.1b", precision="int8", engine="headrace", round=0, seed=0, wanted=list(http.rows_of("headrace")),
        facts={}, folders={str(tmp_path): "MODELS"}, script=None,
    )  # fmt: skip


@pytest.mark.process
def test_a_server_and_what_it_started_are_ended_although_the_work_failed(launch_with: Callable[[str], ServerLaunch]) -> None:
    family: list[psutil.Process] = []

    def work(server: Server) -> None:
        leader = psutil.Process(server.pid)
        family.extend([leader, *leader.children()])
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), serving(launch_with(WITH_CHILD + SERVER)) as server:
        work(server)
    assert len(family) == 2
    assert not any(process.is_running() for process in family)


@pytest.mark.process
def test_a_process_that_ignores_being_asked_is_made_to_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "END_TIMEOUT_S", 0.2)
    script = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('ready', flush=True); time.sleep(600)"
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as stubborn:
        assert stubborn.stdout is not None
        assert stubborn.stdout.readline() == "ready\n"
        end_tree(stubborn)
        assert stubborn.returncode == -9


@pytest.mark.process
def test_a_server_that_ends_or_never_answers_is_an_error(
    launch_with: Callable[[str], ServerLaunch], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(CannotRun, match="ended with 3"), serving(launch_with("raise SystemExit(3)")):
        pass
    monkeypatch.setattr(servers, "LOAD_TIMEOUT_S", 0.3)
    with pytest.raises(CannotRun, match=r"not ready in 0\.3 s"), serving(launch_with("import time; time.sleep(600)")):
        pass


def test_options_become_flags() -> None:
    assert flags_of({"max_model_len": 8, "enable_prefix_caching": False, "enforce_eager": True}) == [
        "--max-model-len", "8", "--no-enable-prefix-caching", "--enforce-eager"
    ]  # fmt: skip


def test_capacity_is_measured_once_and_rates_are_shares_of_it(turn: Turn, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[float, int]] = []

    def measured(load: http.Load, url: str, row: str) -> Figure:
        asked.append((load.rate, load.seed))
        return Figure(10.0, "req/s", ())

    @contextmanager
    def no_server(launch: ServerLaunch, log: Path) -> Iterator[SimpleNamespace]:
        yield SimpleNamespace(url="http://127.0.0.1:9", setting={})

    launch = ServerLaunch(command=("none",), ready="/")
    monkeypatch.setattr(http, "measured", measured)
    monkeypatch.setattr(http, "serving", no_server)
    monkeypatch.setattr(http, "server_of", lambda *named: launch)
    http.take(turn, Path("model"), Path("envs"), 2)
    assert asked == [(math.inf, 0), (math.inf, 0), (4.0, 0), (8.0, 0)]  # the warm-up comes first
    later = Turn(**{**vars_of(turn), "round": 1, "seed": 1, "engine": "vllm", "wanted": ["http-80"]})
    asked.clear()
    http.take(later, Path("model"), Path("envs"), 2)
    assert asked == [(math.inf, 1), (8.0, 1)]
    assert {cell.row for cell, _ in cells.load_all(cells.FOLDER)} == {"http-capacity", "http-40", "http-80"}


def vars_of(turn: Turn) -> dict[str, Any]:
    return dict(vars(turn))


def test_peers_wait_for_the_capacity(turn: Turn) -> None:
    turn.engine, turn.wanted = "vllm", ["http-40"]
    with pytest.raises(CannotRun, match="no http-capacity"):
        http.take(turn, Path("model"), Path("envs"), 2)


@pytest.mark.process
def test_a_cell_holds_what_the_client_saw_of_a_real_server(turn: Turn, launch_with: Callable[[str], ServerLaunch]) -> None:
    with serving(launch_with(SERVER)) as server:
        turn.wanted = ["http-capacity", "http-80"]
        http.load_server(turn, server.url, {"command": ["x"]})
    outcome, capacity = (cells.load(turn.cell(row).file)[turn.cell(row)] for row in ("http-80", "http-capacity"))
    assert capacity.value is not None
    found = outcome.load
    assert found["rate"] == pytest.approx(0.8 * capacity.value)
    assert (found["offered"], found["failed"]) == (http.NUM_REQUESTS, 0)
    requests = make_requests(http.NUM_REQUESTS, http.WORKLOAD, seed=0)
    assert found["output_tokens"] == sum(request.output_tokens for request in requests)
    assert found["prompt_tokens"] == sum(len(request.prompt_ids) for request in requests)
    assert found["num_gaps"] == sum(request.output_tokens - 1 for request in requests)
    assert outcome.value == found["goodput"]


def test_a_failed_request_leaves_quantiles_it_reaches_empty() -> None:
    good = LoadRecord(intended_s=0.0, sent_s=0.0, chunk_s=(1.0, 2.0), end_s=2.0, output_tokens=2, prompt_tokens=5)
    bad = LoadRecord(intended_s=0.0, sent_s=0.0, end_s=9.0, error="timeout")
    found = http.figures_of(summarize([good] * 9 + [bad], Slo(ttft_s=1.5)), 3.0)
    assert (found["failed"], found["ttft_p50_s"], found["ttft_p99_s"]) == (1, 1.0, None)
    assert found["goodput"] == pytest.approx(1.0)
    json.dumps(found, allow_nan=False)


def test_the_table_of_http_rows_says_rate_goodput_and_failures() -> None:
    def outcome(goodput: float, ttft_p99: float | None, failed: int) -> Outcome:
        load = {
            "rate": 0.5, "goodput": goodput, "output_tokens_per_s": 20.0, "failed": failed, "offered": 32, "ttft_p50_s": 0.5,
            "ttft_p99_s": ttft_p99, "itl_p50_s": 0.05, "itl_p99_s": 0.125, "client_lag_p99_s": 0.002,
        }  # fmt: skip
        environment = {"cpu": "a CPU", "num_cpus": 2, "time": "2026-01-02T03:04:05+00:00", "commit": "abc"}
        return Outcome(value=goodput, unit="req/s", setting={}, environment=environment, read_bandwidth_bytes_per_s=2e10, load=load)

    table: report.Table = {
        "http-40": {"headrace": {0: outcome(0.4, 1.5, 0), 1: outcome(0.5, 2.5, 0)}, "vllm": {0: outcome(0.0, None, 3)}},
    }
    text = "\n".join(report.http_section("llama-1.1b", "int8", table))
    assert "| 0.5 | headrace | 500 | 2,000 | 50 | 125 | 0.45 | 20 | 0 of 64 | 2 |" in text
    assert "| 0.5 | vllm | 500 | inf | 50 | 125 | 0 | 20 | 3 of 32 | 1 |" in text
    nothing = Outcome(value=None, unit="", setting={}, environment={}, read_bandwidth_bytes_per_s=None, error="no request was finished")
    rounds = {0: outcome(0.4, 1.5, 0), 1: nothing, 2: nothing}
    assert report._http_line("vllm", rounds) == "| 0.5 | vllm | inf | inf | inf | inf | 0 | 0 | 64 of 96 | 3 |"
    assert report._http_line("vllm", {0: nothing}).endswith(" all | 1 |")
    assert "within TTFT <= 4000 ms and TPOT <= 400 ms." in text
    assert "not run: llama.cpp" in text.lower()
    assert list(report.http_section("llama-1.1b", "int8", {"decode-1": {}})) == []
    assert list(report.offline_section("int8", table, {})) == []


@pytest.mark.parametrize("has_bf16", [True, False])
def test_vllm_serves_with_its_offline_options_in_a_type_the_cpu_multiplies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_bf16: bool
) -> None:
    monkeypatch.setattr(engines, "read_cpu_features", lambda: CpuFeatures("x86_64", frozenset({"avx512_bf16"} if has_bf16 else ())))
    python, weights = tmp_path / "vllm" / "bin" / "python", tmp_path / "m.compressed" / "int4"
    for folder in (python, weights):
        folder.mkdir(parents=True)
    command = http.server_of("vllm", tmp_path / "m", "int4", tmp_path, 2).command
    assert command[:5] == (str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(weights))
    assert "--no-enable-prefix-caching" in command
    assert ("--enforce-eager" in command) == (not has_bf16)
    assert has_bf16 or command[command.index("--dtype") + 1] == "bfloat16"


def test_headrace_serves_with_its_offline_options() -> None:
    launch = http.server_of("headrace", Path("m"), "int8", Path("envs"), 2)
    assert " ".join(launch.command).endswith(
        "serve --model m --served-model-name peer --max-model-len 4096 --no-enable-prefix-caching --num-threads 2 "
        "--kv-cache-dtype bfloat16 --quantization int8"
    )
    Path(launch.command[0]).resolve(strict=True)
