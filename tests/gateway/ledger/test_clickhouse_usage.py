"""Tests the usage of a site in ClickHouse: the same rows as usage.db gives, with a record that was shipped twice counted once."""

from __future__ import annotations

import asyncio
import dataclasses
import http.server
import json
import socket
import sqlite3
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
from clickhouse_kit import ClickHouseServer
from gateway_kit import chat_body, gateway_config, open_bench
from ledger_kit import usage
from typer.testing import CliRunner

from headrace.cli.main import app
from headrace.core.errors import ConfigError
from headrace.core.strict_decode import plain
from headrace.gateway.ledger.clickhouse import ClickHouseSink, clickhouse_dialect, clickhouse_rows
from headrace.gateway.ledger.config import ClickHouseConfig
from headrace.gateway.ledger.record import encode_record
from headrace.gateway.ledger.usage_db import DAY_MS, FILE, UsageDb
from headrace.gateway.ledger.usage_query import GROUPS, LATENCY, UsageQuery, usage_rows, usage_statement
from headrace.text.folder import TextModel

pytestmark = pytest.mark.process

MIDNIGHT = 1_795_392_000_000
"""2026-11-23 00:00 UTC in Unix milliseconds."""

MODELS = [{"name": "tiny", "engine": {"model": "headrace-tiny"}}]
HOSTILE = "o'brien\\ OR 1=1 -- "
RECORDS = [
    usage(1, tenant="acme", user="ann", key_id="k1", time_ms=MIDNIGHT - 1, ttft_ms=12.5, tpot_ms=3.0),
    usage(2, tenant="acme", user="bob", key_id="k2", time_ms=MIDNIGHT, cost_nanos=2**52, outcome="failed"),
    usage(
        3, tenant="globex", user="ann", key_id="k3", time_ms=MIDNIGHT + DAY_MS - 1, model="owl", prompt_tokens=7, ttft_ms=80.0, queue_ms=1.5
    ),
    usage(4, tenant=HOSTILE, user="", key_id="k4", time_ms=MIDNIGHT + DAY_MS),
]
QUERIES = [
    *(UsageQuery(by=[group]) for group in GROUPS),
    UsageQuery(by=["day", "model"]),
    UsageQuery(by=["user", "tenant", "key"], since_ms=MIDNIGHT, until_ms=MIDNIGHT + DAY_MS),
    UsageQuery(by=["day"], tenant="acme", max_rows=1),
    UsageQuery(by=["tenant"], tenant=HOSTILE),
    UsageQuery(by=["tenant"], tenant="nobody\n"),
    *(UsageQuery(by=[group], figures=LATENCY) for group in GROUPS),
    UsageQuery(by=["day"], figures=LATENCY, since_ms=MIDNIGHT, tenant="acme"),
]


def filled(config: ClickHouseConfig) -> ClickHouseConfig:
    """With every record, and some of them twice, unmerged."""
    sink = ClickHouseSink(config)
    sink.ship([encode_record(record) for record in RECORDS])
    sink.ship([encode_record(record) for record in RECORDS[1:]])
    sink.close()
    return config


def rows_of_one_machine(folder: Path, query: UsageQuery) -> list[dict[str, object]]:
    sink = UsageDb(str(folder / FILE), retention_days=90, unix_time=time.time)
    sink.ship([encode_record(record) for record in RECORDS])
    sink.close()
    connection = sqlite3.connect(folder / FILE)
    try:
        return usage_rows(connection, query)
    finally:
        connection.close()


def test_both_stores_give_the_same_rows(server: ClickHouseServer, tmp_path: Path) -> None:
    config = filled(dataclasses.replace(server.config, table="headrace_test.same_rows"))
    for query in QUERIES:
        found = clickhouse_rows(config, query, timeout_s=30)
        assert found == rows_of_one_machine(tmp_path, query), query
    assert rows_of_one_machine(tmp_path, UsageQuery(by=["tenant"], tenant=HOSTILE)), "the tenant with quotes has rows"


def test_before_anything_was_shipped_there_are_no_rows(server: ClickHouseServer) -> None:
    config = dataclasses.replace(server.config, table="headrace_test.not_made_yet")
    assert clickhouse_rows(config, UsageQuery(by=["tenant"]), timeout_s=30) == []


async def test_a_tenant_sees_what_another_machine_recorded(server: ClickHouseServer, text: TextModel, tmp_path: Path) -> None:
    """And its own machine's a moment later."""
    config = filled(dataclasses.replace(server.config, table="headrace_test.site"))
    keys = [{"key": "sk-acme-0123456789", "tenant": "acme"}]
    headers = {"authorization": "Bearer sk-acme-0123456789"}
    async with open_bench(text, state=str(tmp_path), api_keys=keys, usage={"clickhouse": plain(config)}) as bench:

        async def requests() -> int:
            answer = await bench.client.get("/v1/usage?by=tenant&since=2026-01-01", headers=headers)
            assert answer.status_code == 200, answer.text
            return sum(row["requests"] for row in answer.json()["data"])

        assert await requests() == 2
        body = chat_body(max_tokens=2)
        assert (await bench.client.post("/v1/chat/completions", json=body, headers=headers)).status_code == 200
        async with asyncio.timeout(60):
            while await requests() < 3:
                await asyncio.sleep(0.1)


@pytest.mark.socket
async def test_where_clickhouse_hangs_the_client_is_told_so_and_nothing_else_waits(
    text: TextModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, seconds in {"QUERY_S": 0.2, "CLOSE_S": 0.2}.items():
        monkeypatch.setattr(f"headrace.gateway.ledger.ledger.{name}", seconds)
    keys = [{"key": "sk-acme-0123456789", "tenant": "acme"}]
    headers = {"authorization": "Bearer sk-acme-0123456789"}
    with socket.create_server(("127.0.0.1", 0)) as silent:
        usage_config = {"clickhouse": {"url": f"http://127.0.0.1:{silent.getsockname()[1]}"}}
        async with open_bench(text, state=str(tmp_path), api_keys=keys, usage=usage_config) as bench:
            asked = asyncio.create_task(bench.client.get("/v1/usage", headers=headers))
            body = chat_body(max_tokens=2)
            assert (await bench.client.post("/v1/chat/completions", json=body, headers=headers)).status_code == 200
            assert (await asked).status_code == 503


def test_the_command_reads_clickhouse_or_this_machine(server: ClickHouseServer, tmp_path: Path) -> None:
    config = filled(dataclasses.replace(server.config, table="headrace_test.command"))
    file = tmp_path / "config.yaml"
    file.write_text(json.dumps({"models": MODELS, "state": str(tmp_path), "usage": {"clickhouse": plain(config)}}))
    words = ["usage", "--by", "tenant", "--tenant", "acme", "--json", "--config", str(file)]
    site = CliRunner().invoke(app, words)
    assert [row["requests"] for row in json.loads(site.stdout)] == [2], (site.output, site.exception)
    assert json.loads(CliRunner().invoke(app, [*words, "--local"]).stdout) == []


@pytest.mark.socket
def test_a_server_that_is_gone_is_named(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(json.dumps({"models": MODELS, "usage": {"clickhouse": {"url": "http://127.0.0.1:1"}}}))
    failed = CliRunner().invoke(app, ["usage", "--config", str(file)])
    assert failed.exit_code != 0
    assert "usage.clickhouse" in str(failed.exception or failed.output)


@pytest.mark.socket
async def test_targets_follow_a_reload(text: TextModel, tmp_path: Path) -> None:
    """What waits for a target that is taken away stays in the spool; the next one that is named gets what comes from then on."""
    first, second = Collector(), Collector()
    state = str(tmp_path / "state")
    Path(state).mkdir(mode=0o700)
    with first, second:
        async with open_bench(text, state=state, usage={"retention_days": 5}) as bench:
            for collector in (first, second):
                changes: dict[str, Any] = {"clickhouse": {"url": collector.url}}
                await bench.reloader.reload(partial(gateway_config, state=state, usage=changes))
                answer = await bench.chat(max_tokens=2)
                async with asyncio.timeout(60):
                    while answer.headers["x-request-id"] not in collector.ids:
                        await asyncio.sleep(0.05)
            ledger = bench.gateway.service.explanations.ledger
            assert ledger is not None
            assert ledger._usage_db.retention_days == 90
            await bench.reloader.reload(partial(gateway_config, state=state))
            answer = await bench.chat(max_tokens=2)
            assert set(ledger.reading().sinks) == {"sql"}
            unreadable = {"clickhouse": {"url": first.url.replace("//", "//ledger@"), "password_file": str(tmp_path / "none")}}
            with pytest.raises(ConfigError, match=r"^usage\.clickhouse\.password_file: .*none"):
                await bench.reloader.reload(partial(gateway_config, state=state, usage=unreadable))
            assert set(ledger.reading().sinks) == {"sql"}, "nothing of a refused configuration holds"
        assert len(first.ids) == len(second.ids) == 1
        assert answer.headers["x-request-id"] not in second.ids


class Collector(http.server.ThreadingHTTPServer):
    """Stands for a ClickHouse that takes every row. ids: of the requests that it was sent"""

    daemon_threads = True

    def __init__(self) -> None:
        self.ids: set[str] = set()
        super().__init__(("127.0.0.1", 0), _Collecting)
        self.url = f"http://127.0.0.1:{self.server_port}"
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self.server_close()


class _Collecting(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Collector

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        self.server.ids |= {msgspec.json.decode(line)["request_id"] for line in body.splitlines()}
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        return


@pytest.mark.pure
def test_a_statement_has_nothing_of_a_tenants_name_but_a_literal() -> None:
    dialect = clickhouse_dialect(ClickHouseConfig(url="http://localhost:8123"))
    text = usage_statement(UsageQuery(by=["tenant"], tenant=HOSTILE), dialect)
    assert "tenant = 'o\\'brien\\\\ OR 1=1 -- '" in text
