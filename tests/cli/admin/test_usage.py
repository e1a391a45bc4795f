"""Tests `headrace usage`, `headrace log archive` and `headrace log trace` as an operator runs them."""

from __future__ import annotations

import csv
import io
import json
import os
from pathlib import Path

import pytest
from finished import finished
from ledger_kit import usage
from typer.testing import CliRunner, Result

from headrace.cli.main import app
from headrace.core.errors import ConfigError, InvalidRequest
from headrace.gateway.ledger.record import encode_record
from headrace.gateway.ledger.spool import MAGIC, OPEN, Spool, frame
from headrace.gateway.ledger.usage_db import FILE, SQL, UsageDb
from headrace.observe.request_log import line_of

pytestmark = pytest.mark.pure


def run(*words: str) -> Result:
    return CliRunner().invoke(app, ["usage", *words])


@pytest.fixture
def state(tmp_path: Path) -> Path:
    sink = UsageDb(str(tmp_path / FILE), retention_days=90, unix_time=lambda: 0.0)
    sink.ship([encode_record(usage(number, tenant="globex" if number == 2 else "acme")) for number in range(3)])
    sink.close()
    return tmp_path


def test_rows_as_json(state: Path) -> None:
    rows = json.loads(run("--by", "tenant", "--json", "--state", str(state)).stdout)
    assert [(row["tenant"], row["requests"], row["prompt_tokens"], row["completion_tokens"]) for row in rows] == [
        ("acme", 2, 20, 10),
        ("globex", 1, 10, 5),
    ]


def test_rows_as_csv(state: Path) -> None:
    rows = list(csv.DictReader(io.StringIO(run("--by", "user,day", "--csv", "--state", str(state)).stdout)))
    assert [(row["tenant"], row["user"], row["day"], row["requests"]) for row in rows] == [
        ("acme", "", "2023-11-14", "2"),
        ("globex", "", "2023-11-14", "1"),
    ]


def test_rows_as_a_table(state: Path) -> None:
    head, acme, globex = run("--state", str(state)).stdout.splitlines()
    assert head.split() == ["tenant", "requests", "prompt_tokens", "cached_tokens", "completion_tokens", "cost_nanos", "cost"]
    assert (acme.split()[:3], globex.split()[:3]) == (["acme", "2", "20"], ["globex", "1", "10"])
    assert len(head) == len(acme) == len(globex)


def test_latencies_as_a_table_and_as_csv(state: Path) -> None:
    sink = UsageDb(str(state / FILE), retention_days=90, unix_time=lambda: 0.0)
    sink.ship([encode_record(usage(7, tenant="umbra", outcome="failed", ttft_ms=1234.56))])
    sink.close()
    head, acme, _, umbra = run("--latency", "--state", str(state)).stdout.splitlines()
    assert head.split()[:7] == ["tenant", "requests", "completed", "cancelled", "failed", "from_cache", "ttft_ms_p50"]
    assert (acme.split()[:6], umbra.split()[:7]) == (["acme", "2", "2", "0", "0", "0"], ["umbra", "1", "0", "0", "1", "0", "1,234.6"])
    [row] = csv.DictReader(io.StringIO(run("--latency", "--by", "model", "--csv", "--tenant", "umbra", "--state", str(state)).stdout))
    assert (row["model"], row["failed"], row["ttft_ms_p99"], row["queue_ms_p50"]) == ("fox", "1", "1234.56", "")


def test_tenant_and_time_limit_the_rows(state: Path) -> None:
    assert run("--tenant", "globex", "--state", str(state)).stdout.count("\n") == 2
    assert "No usage in this time is recorded" in run("--until", "2023-11-14", "--state", str(state)).stdout
    assert "No usage in this time is recorded" in run("--since", "1h", "--state", str(state)).stdout


def test_the_state_folder_is_found_as_every_command_finds_it(state: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "site.yaml"
    file.write_text(f"state: {state}\nmodels: [{{engine: {{model: headrace-tiny}}}}]\n")
    monkeypatch.delenv("HEADRACE_STATE", raising=False)
    assert "acme" in run("--config", str(file)).stdout
    monkeypatch.setenv("HEADRACE_STATE", str(state))
    assert "acme" in run().stdout


def test_what_a_killed_gateway_left_is_counted(state: Path) -> None:
    spool = Spool(state / "spool", [SQL])
    (spool.folder / OPEN / "1-1-1.seg").write_bytes(MAGIC + frame(encode_record(usage(10, tenant="initech"))))
    rows = json.loads(run("--json", "--state", str(state)).stdout)
    assert {row["tenant"]: row["requests"] for row in rows} == {"acme": 2, "globex": 1, "initech": 1}
    assert not os.listdir(spool.folder / OPEN)


def test_a_gateway_that_ships_is_left_alone(state: Path) -> None:
    spool = Spool(state / "spool", [SQL])
    (spool.folder / OPEN / "1-1-1.seg").write_bytes(MAGIC + frame(encode_record(usage(10, tenant="initech"))))
    with spool.shipping(SQL):
        assert "initech" not in run("--state", str(state)).stdout


def test_a_folder_without_usage_has_none(tmp_path: Path) -> None:
    assert run("--json", "--state", str(tmp_path)).stdout.strip() == "[]"
    assert not list(tmp_path.iterdir()), "reading makes nothing"


def test_wrong_words_are_refused(state: Path) -> None:
    assert isinstance(run("--by", "colour", "--state", str(state)).exception, InvalidRequest)
    assert isinstance(run("--since", "never", "--state", str(state)).exception, InvalidRequest)
    assert "give one of them" in str(run("--json", "--csv", "--state", str(state)).exception)


def test_a_file_that_is_no_usage_db_is_refused(tmp_path: Path) -> None:
    (tmp_path / FILE).write_bytes(b"something else " * 100)
    assert isinstance(run("--state", str(tmp_path)).exception, ConfigError)


def test_an_archive_without_a_topic_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "site.yaml"
    file.write_text("models: [{engine: {model: headrace-tiny}}]\nusage: {clickhouse: {url: 'http://localhost:8123'}}\n")
    done = CliRunner().invoke(app, ["log", "archive", "--config", str(file)])
    assert isinstance(done.exception, ConfigError)
    assert "usage.kafka: is missing" in str(done.exception)


# -- traces ----------------------------------------------------------------------------------------------------------------------------


def test_request_logs_become_one_trace(tmp_path: Path) -> None:
    """The files of a rotated log, in any order; requests that were refused are counted on stderr."""
    for name, time, num_tokens in (("log.1", 5.0, 3), ("log", 7.5, 4)):
        request = finished(time=time, model="m", prompt_tokens=20, completion_tokens=num_tokens)
        (tmp_path / name).write_text(f"{line_of(request)}\n{line_of(finished(time=9.0, model='m', status=429))}\n")
    done = CliRunner().invoke(app, ["log", "trace", str(tmp_path / "log"), str(tmp_path / "log.1")])
    assert [(entry["timestamp"], entry["output_length"]) for entry in map(json.loads, done.stdout.splitlines())] == [(0, 3), (2500, 4)]
    assert "2 sequences; 2 requests left out" in done.stderr
    assert CliRunner().invoke(app, ["log", "trace", "--model", "other", str(tmp_path / "log")]).exit_code == 1
