"""Tests `headrace bench`: a server's load test over a socket, and the offline measurements on a fake model."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import cast

import pytest
import typer

from headrace.cli.bench import offline as bench_offline
from headrace.cli.bench import serve as bench_serve
from headrace.cli.bench.common import make_shape
from headrace.cli.bench.offline import latency, steps, throughput
from headrace.cli.bench.sweep import sweep
from headrace.cli.exits import CommandExitCode, ServerFailed, UsageRefused
from headrace.core.errors import ConfigError
from headrace.engine.config import EngineConfig
from headrace.engine.loop import Engine, Outbox
from headrace.lab import environment
from headrace.lab.fake_runner import FakeOptions, fake_engine
from headrace.lab.offline import Collector
from headrace.lab.simulate import step_times
from headrace.lab.simulate.step_times import read_steps
from tests.cli.conftest import Headrace
from tests.cli.scripted import scripted_server

pytestmark = pytest.mark.pure

serve = partial(bench_serve.serve, cast(typer.Context, None))
"""Only a trace asks the command line which options were given."""


@pytest.fixture(autouse=True)
def _no_git(monkeypatch: pytest.MonkeyPatch) -> None:
    """Results name no commit here: git would be asked for it."""
    monkeypatch.setattr(environment, "_git", lambda *_: None)


@pytest.fixture
def fake_model(monkeypatch: pytest.MonkeyPatch) -> list[EngineConfig]:
    """Engines of the offline commands are fakes; returns the configurations they were built with."""
    built: list[EngineConfig] = []

    def engine(config: EngineConfig) -> tuple[Engine, Collector]:
        built.append(config)
        collector = Collector()
        return fake_engine(collector, FakeOptions(vocab_size=1000, max_model_len=512, step_seconds=0.001), built[-1]), collector

    monkeypatch.setattr(bench_offline, "_engine", engine)
    return built


@pytest.mark.socket
def test_serve_reports_and_writes_what_it_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "out.json"
    with scripted_server(*[["a", "b", "c"]] * 3, 429) as server:
        serve(
            url=server.url,
            num_prompts=4,
            request_rate=50.0,
            input_len=8,
            output_len=3,
            goodput=["ttft:10000"],
            bandwidth=False,
            output_json=file,
            api_key="sk-secret-key",
        )
        assert server.seen[0]["model"] == "tiny"
        assert len(server.seen[0]["prompt"]) == 8  # type: ignore[arg-type]
    data = json.loads(file.read_text())
    assert (data["report"]["finished"], data["report"]["offered"], len(data["records"])) == (3, 4, 4)
    assert data["report"]["goodput"] > 0
    assert data["settings"]["shape"]["input_tokens"] == 8
    assert data["environment"]["num_cpus"] >= 1
    assert "sk-secret-key" not in file.read_text()
    assert "Request goodput" in capsys.readouterr().out


@pytest.mark.parametrize("as_json", [False, True])
@pytest.mark.socket
def test_serve_says_why_when_nothing_was_answered(as_json: bool, capsys: pytest.CaptureFixture[str]) -> None:
    """It printed thirty lines of "inf"."""
    with scripted_server(429, 503, 429) as server, pytest.raises(typer.Exit) as ended:
        serve(url=server.url, num_prompts=3, bandwidth=False, as_json=as_json)
    assert ended.value.exit_code == CommandExitCode.FAILED
    out, error = capsys.readouterr()
    assert error.splitlines()[0] == "headrace: no request was answered"
    assert "3 of 3 requests failed:\n  2 x 429 error\n  1 x 503 error\n" in error
    assert "the queue is full" in error
    assert (json.loads(out)["report"]["errors"] if as_json else out) == ({"429 error": 2, "503 error": 1} if as_json else "")


@pytest.mark.parametrize("ending", ["", "/", "/v1", "/v1/"])
@pytest.mark.parametrize("scheme", ["http://", ""])
@pytest.mark.socket
def test_a_server_is_found_however_its_address_is_written(ending: str, scheme: str) -> None:
    with scripted_server(["a"], ["b"]) as server:
        url = server.url.replace("http://", scheme) + ending
        serve(url=url, num_prompts=2, bandwidth=False)
        assert len(server.seen) == 2


@pytest.mark.parametrize("wrong", [{"goodput": ["itl:5"]}, {"request_rate": 0.0}, {"dataset_name": "sharegpt"}, {"input_len": 0}])
def test_senseless_settings_are_usage_errors(wrong: dict[str, object]) -> None:
    with pytest.raises(UsageRefused):
        serve(url="http://127.0.0.1:9", bandwidth=False, **wrong)  # type: ignore[arg-type]


def traced(folder: Path, *hashes: list[int]) -> str:
    lines = [
        {"timestamp": 5000 + 10 * n, "input_length": 40, "output_length": 3, "hash_ids": ids, "block_size": 16}
        for n, ids in enumerate(hashes)
    ]
    (folder / "trace.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return str(folder / "trace.jsonl")


@pytest.mark.socket
def test_a_trace_is_replayed_with_the_beginnings_that_it_shares(headrace: Headrace, tmp_path: Path) -> None:
    trace, file = traced(tmp_path, [1, 2], [1, 3], [4, 2], [1, 2]), tmp_path / "out.json"
    with scripted_server(*[["a", "b", "c"]] * 3) as server:
        words = ("bench", "serve", "--url", server.url, "--no-bandwidth", "--trace", trace)
        done = headrace(*words, "--num-prompts", "3", "--output-json", str(file))
        assert done.returncode == 0, done.stderr
        first, second, third = (cast(list[int], body["prompt"]) for body in server.seen)
        assert [body["max_tokens"] for body in server.seen] == [3, 3, 3]
    assert first[:16] == second[:16]
    assert first[16:32] == third[16:32]
    assert len({tuple(ids[:16]) for ids in (first, second, third)}) == 2
    assert {len(ids) for ids in (first, second, third)} == {40}
    data = json.loads(file.read_text())
    assert data["settings"]["trace"] == trace
    assert "shape" not in data["settings"]
    due_s = [record["intended_s"] for record in data["records"]]
    assert [each - due_s[0] for each in due_s] == pytest.approx([0.0, 0.01, 0.02]), "the first at once, the others after its time"


@pytest.mark.parametrize(
    ("lines", "words", "code", "said"),
    [
        (1, ("--request-rate", "5"), 2, "--request-rate: a trace has its own times and lengths; leave one of the two out."),
        (1, ("--input-len", "128"), 2, "--input-len: a trace has its own times"),
        (0, (), 2, "has no request"),
        (3, (), 2, "its prompts have more than 100 tokens; give --num-prompts 2 or less."),
        (1, ("--trace", "/nowhere.jsonl"), 3, "/nowhere.jsonl: cannot be read"),
    ],
)
def test_a_trace_that_cannot_be_replayed_is_refused_before_anything_is_sent(
    headrace: Headrace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lines: int, words: tuple[str, ...], code: int, said: str
) -> None:
    monkeypatch.setattr(bench_serve, "MAX_TRACE_TOKENS", 100)
    done = headrace("bench", "serve", "--url", "http://127.0.0.1:9", "--trace", traced(tmp_path, *[[1]] * lines), *words)
    assert (done.returncode, said in done.stderr) == (code, True), done.stderr


def test_shared_prefix_is_half_the_prompt_unless_said() -> None:
    assert make_shape("shared-prefix", 100, 5, 0.0, 0, 2, 1000).prefix_tokens == 50
    assert make_shape("shared-prefix", 100, 5, 0.0, 80, 2, 1000).prefix_tokens == 80


@pytest.mark.socket
def test_a_sweep_measures_every_point_with_fresh_prompts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "out.json"
    with scripted_server(*[["a", "b", "c"]] * 13, 429) as server:
        sweep(
            url=server.url,
            batch_size="1,3",
            input_len="8",
            max_concurrency="1,2,3",
            output_len=3,
            price_per_1m=2.0,
            api_key="sk-secret-key",
            bandwidth=False,
            output_json=file,
        )
        prompts = [body["prompt"] for body in server.seen]
        assert all(body["model"] == "tiny" for body in server.seen)
    assert len(prompts) == len({str(prompt) for prompt in prompts}) == 4 + 1 + 3 * 3  # four warm it up
    data = json.loads(file.read_text())
    assert "sk-secret-key" not in file.read_text()
    assert data["environment"]["num_cpus"] >= 1
    assert data["settings"]["price_per_1m"] == 2.0
    rows = data["rows"]
    assert [(row["batch_size"], row["concurrency"], row["failed"]) for row in rows] == [(1, 1, 0), (3, 1, 0), (3, 2, 0), (3, 3, 1)]
    for row in rows:
        answered = row["batch_size"] - row["failed"]
        assert row["dollars"] == pytest.approx(answered * (8 + 3) * 2.0 / 1e6)
        assert row["ms_per_request"] == pytest.approx(row["seconds"] / answered * 1000)
        assert row["report"]["peak_concurrency"] <= row["concurrency"]
    out = capsys.readouterr().out.splitlines()
    assert "2 per 1M tokens" in out[0]
    assert [line.split()[:3] for line in out[2:6]] == [["1", "8", "1"], ["3", "8", "1"], ["3", "8", "2"], ["3", "8", "3"]]
    assert "\n".join(out).partition("FAILED at batch 3, prompts of 8, concurrency 3:\n1 of 3 requests failed:\n  1 x 429 error\n")[1]


@pytest.mark.socket
def test_a_sweep_ends_when_no_request_of_its_warm_up_is_answered(tmp_path: Path) -> None:
    with scripted_server(*[503] * 4) as server, pytest.raises(ServerFailed, match=r"warm-up was answered: 503 error: the queue is full"):
        sweep(url=server.url, bandwidth=False, input_len="8", output_json=tmp_path / "out.json")
    assert len(server.seen) == 4


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"batch_size": "1,x"}, "--batch-size: '1,x' is no list of whole numbers above 0"),
        ({"input_len": "128,"}, "--input-len"),
        ({"max_concurrency": "0"}, "--max-concurrency"),
        ({"batch_size": "100,1000,10000", "input_len": "8,64,512", "max_concurrency": "1,8,64,512"}, "36 points, 133,200 requests"),
    ],
)
def test_a_sweep_of_a_senseless_grid_asks_no_server(wrong: dict[str, str], message: str) -> None:
    with pytest.raises(UsageRefused, match=message):
        sweep(url="http://127.0.0.1:9", bandwidth=False, **wrong)  # type: ignore[arg-type]


def test_a_sweep_that_could_not_be_drawn_asks_no_server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match="--svg: needs matplotlib"):
        sweep(url="http://127.0.0.1:9", bandwidth=False, svg=tmp_path / "out.svg")


def test_throughput_counts_tokens_and_price(fake_model: list[EngineConfig], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "out.json"
    throughput(num_prompts=6, input_len=20, output_len=5, dollars_per_hour=3.6, bandwidth=False, output_json=file, async_scheduling=True)
    data = json.loads(file.read_text())
    values = data["values"]
    assert values["requests"] == 6
    assert values["batch size, most sequences at once"] == 6
    assert values["output tokens/s"] == pytest.approx(30 / values["total time (s)"])
    assert values["$ per 1M output tokens"] == pytest.approx(0.001 * values["total time (s)"] / 30 * 1e6)
    assert fake_model[0].depth == 2
    assert "output tokens/s" in capsys.readouterr().out


def test_latency_measures_whole_batches(fake_model: list[EngineConfig], capsys: pytest.CaptureFixture[str]) -> None:
    latency(batch_size=3, input_len=16, output_len=4, num_iters=2, num_iters_warmup=1, bandwidth=False, as_json=True)
    data = json.loads(capsys.readouterr().out)
    values = data["values"]
    assert values["latency of a batch (ms), mean"] >= 4.0  # four steps of at least a millisecond
    assert values["decode step (ms), p50"] >= 1.0
    assert fake_model[0].max_num_seqs == 3


def test_steps_are_kept_with_the_options_they_were_measured_with(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def engine(config: EngineConfig, outbox: Outbox) -> Engine:
        return fake_engine(outbox, FakeOptions(verify=False, max_model_len=200), config)

    monkeypatch.setattr(bench_offline, "_built", engine)
    monkeypatch.setattr(step_times, "mean_error", lambda *_: 0.01)
    file = tmp_path / "steps.json"
    steps(output=file, limit=1e9, max_num_seqs=4, quantization="int8")
    assert read_steps(file).engine == EngineConfig(model="headrace-tiny", max_num_seqs=4, quantization="int8").checked()
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(step_times, "mean_error", lambda *_: 0.449)
    steps(output=file, limit=1e9, max_num_seqs=4)
    assert "Warning: the fit is off by 45%" in capsys.readouterr().err


def test_prompts_that_cannot_fit_are_refused(fake_model: list[EngineConfig]) -> None:
    with pytest.raises(UsageRefused, match="do not fit max_model_len"):
        throughput(input_len=500, output_len=100, bandwidth=False)


def values_of(command: Callable[..., None], capsys: pytest.CaptureFixture[str], **options: object) -> dict[str, object]:
    command(input_len=16, output_len=4, as_json=True, **options)
    data = json.loads(capsys.readouterr().out)
    values: dict[str, object] = data["values"]
    return values


MBU = [
    (throughput, {"num_prompts": 3}, "MBU, at least (weights + KV read by decoding / time / read bandwidth)"),
    (latency, {"batch_size": 2, "num_iters": 1, "num_iters_warmup": 0}, "MBU ((weights + KV) / decode step / read bandwidth), p50"),
]


@pytest.mark.parametrize(("command", "options", "row"), MBU, ids=["throughput", "latency"])
def test_share_of_bandwidth_is_shown_or_why_it_is_not_known(
    command: Callable[..., None],
    options: dict[str, object],
    row: str,
    fake_model: list[EngineConfig],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def measures(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        assert command[1:] == [str(environment.bandwidth_script()), "--json"]
        return subprocess.CompletedProcess(command, 0, '{"read_bytes_per_s": 2e6, "pattern": "sum"}', "")

    def fails(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        raise subprocess.CalledProcessError(1, command, stderr="no memory")

    monkeypatch.setattr("headrace.lab.environment.subprocess.run", measures)
    values = values_of(command, capsys, **options)
    assert values["read bandwidth (GB/s)"] == 0.002
    share = values[row]
    assert isinstance(share, float)
    assert share > 0
    monkeypatch.setattr("headrace.lab.environment.subprocess.run", fails)
    assert values_of(command, capsys, **options)[row] == (
        "not known: the read bandwidth could not be measured: bandwidth.py ended with status 1: no memory"
    )
    assert values_of(command, capsys, bandwidth=False, **options)[row] == "not known: not asked for (--no-bandwidth)"


def test_the_checkout_has_the_script_that_is_asked() -> None:
    assert environment.bandwidth_script() is not None
