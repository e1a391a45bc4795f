"""Tests sums of usage by any group, and the times that a question may name."""

from __future__ import annotations

import random
import sqlite3
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from ledger_kit import usage

from headrace.core.errors import InvalidRequest
from headrace.gateway.ledger.record import encode_record
from headrace.gateway.ledger.usage_db import DAY_MS, DAYS, FILE, SUMMED, USAGE, UsageDb
from headrace.gateway.ledger.usage_query import LATENCY, UsageQuery, groups_of, unix_ms_of, usage_rows
from headrace.gateway.stores.sqlite_thread import has_table, open_sqlite

pytestmark = pytest.mark.pure

CACHES = ("response", "idempotency")
OUTCOMES = ("cancelled", "failed", "deadline")
NOON = 1_795_435_200_000
"""2026-11-23 12:00 UTC in Unix milliseconds."""


@pytest.fixture
def connection(tmp_path: Path) -> Iterator[sqlite3.Connection]:
    sink = UsageDb(str(tmp_path / FILE), retention_days=90, unix_time=lambda: NOON / 1000)
    records = [
        usage(1, tenant="acme", user="ann", key_id="k1", time_ms=NOON - DAY_MS),
        usage(2, tenant="acme", user="bob", key_id="k2", time_ms=NOON),
        usage(3, tenant="globex", user="ann", key_id="k3", time_ms=NOON, model="owl", prompt_tokens=7),
    ]
    sink.ship([encode_record(record) for record in records])
    sink.ship([encode_record(record) for record in records])
    sink.close()
    found = sqlite3.connect(tmp_path / FILE)
    yield found
    found.close()


def shown(connection: sqlite3.Connection, **query: Any) -> list[tuple[object, ...]]:
    """The groups and their numbers of requests."""
    found = UsageQuery(**query)
    return [tuple(row[name] for name in (*found.columns, "requests")) for row in usage_rows(connection, found)]


def test_each_group_has_its_rows_and_a_record_counts_once(connection: sqlite3.Connection) -> None:
    assert shown(connection, by=["tenant"]) == [("acme", 2), ("globex", 1)]
    assert shown(connection, by=["user"]) == [("acme", "ann", 1), ("acme", "bob", 1), ("globex", "ann", 1)]
    assert shown(connection, by=["key"]) == [("acme", "k1", 1), ("acme", "k2", 1), ("globex", "k3", 1)]
    assert shown(connection, by=["model"]) == [("fox", 2), ("owl", 1)]
    assert shown(connection, by=["day"]) == [("2026-11-22", 1), ("2026-11-23", 2)]
    assert shown(connection, by=["day", "model"]) == [("2026-11-22", "fox", 1), ("2026-11-23", "fox", 1), ("2026-11-23", "owl", 1)]


def test_adapters_are_told_apart_below_their_base_model(tmp_path: Path) -> None:
    sink = UsageDb(str(tmp_path / FILE), retention_days=90, unix_time=lambda: NOON / 1000)
    sink.ship([encode_record(usage(number, time_ms=NOON, adapter_id=name)) for number, name in enumerate(("", "sql", "sql"))])
    sink.close()
    connection = sqlite3.connect(tmp_path / FILE)
    assert shown(connection, by=["adapter"]) == [("fox", "", 1), ("fox", "sql", 2)]
    assert shown(connection, by=["model"]) == [("fox", 3)]
    connection.close()


def test_rows_have_every_sum(connection: sqlite3.Connection) -> None:
    [row] = usage_rows(connection, UsageQuery(by=["tenant"], tenant="globex"))
    assert row == {
        "tenant": "globex",
        "requests": 1,
        "prompt_tokens": 7,
        "cached_tokens": 4,
        "completion_tokens": 5,
        "cost_nanos": 1000,
        "cost": 1e-6,
    }
    assert list(row) == UsageQuery(by=["tenant"]).names


def test_times_are_shown_as_quantiles_of_the_records_that_have_them(tmp_path: Path) -> None:
    sink = UsageDb(str(tmp_path / FILE), retention_days=90, unix_time=lambda: NOON / 1000)
    times = random.Random(1).sample(range(1, 1001), 1000)
    records = [usage(number, model="owl", time_ms=NOON, ttft_ms=float(ms), tpot_ms=None) for number, ms in enumerate(times)]
    records += [usage(2000 + number, model="owl", time_ms=NOON, outcome=outcome, ttft_ms=None) for number, outcome in enumerate(OUTCOMES)]
    records += [usage(3000, model="elk", time_ms=NOON, ttft_ms=7.25)]
    records += [usage(3001 + number, model="elk", time_ms=NOON, ttft_ms=0.1, cache_tier=tier) for number, tier in enumerate(CACHES)]
    sink.ship([encode_record(record) for record in records])
    sink.close()
    connection = sqlite3.connect(tmp_path / FILE)
    elk, owl = usage_rows(connection, UsageQuery(by=["model"], figures=LATENCY))
    connection.close()
    assert {name: owl[name] for name in ("model", "requests", "completed", "cancelled", "failed")} == {
        "model": "owl",
        "requests": 1003,
        "completed": 1000,
        "cancelled": 1,
        "failed": 2,
    }
    assert (owl["ttft_ms_p50"], owl["ttft_ms_p99"]) == (501.0, 991.0)
    assert (elk["requests"], elk["from_cache"], elk["ttft_ms_p50"], elk["ttft_ms_p99"]) == (3, 2, 7.25, 7.25)
    assert list(owl) == list(elk) == ["model", *LATENCY.names]


def test_times_are_from_and_before(connection: sqlite3.Connection) -> None:
    assert shown(connection, by=["tenant"], since_ms=NOON) == [("acme", 1), ("globex", 1)]
    assert shown(connection, by=["tenant"], until_ms=NOON) == [("acme", 1)]
    assert shown(connection, by=["tenant"], max_rows=1) == [("acme", 2)]


def test_records_beyond_their_time_are_forgotten(tmp_path: Path) -> None:
    now = [NOON / 1000]
    sink = UsageDb(str(tmp_path / FILE), retention_days=2, unix_time=lambda: now[0])
    sink.ship([encode_record(usage(days, time_ms=NOON - days * DAY_MS)) for days in range(5)])
    sink.idle()
    sink.close()
    connection = sqlite3.connect(tmp_path / FILE)
    assert [row[0] for row in connection.execute("SELECT time_ms FROM usage ORDER BY time_ms DESC")] == [
        NOON - days * DAY_MS for days in range(3)
    ]
    connection.close()


def test_words_may_hold_several_groups() -> None:
    assert groups_of(["tenant,day", "model", "day"]) == ["tenant", "day", "model"]
    with pytest.raises(InvalidRequest, match="tenant, user, key, model, adapter, day"):
        groups_of(["colour"])


@pytest.mark.parametrize(
    ("text", "unix_ms"),
    [
        ("2026-11-23", NOON - DAY_MS // 2),
        ("2026-11-23T12:00:00Z", NOON),
        ("2026-11-23T12:00:00", NOON),
        ("2026-11-23T13:00:00+01:00", NOON),
        ("24h", NOON - DAY_MS),
        ("1d", NOON - DAY_MS),
        ("90m", NOON - 90 * 60_000),
    ],
)
def test_times_are_days_times_or_how_long_ago(text: str, unix_ms: int) -> None:
    assert unix_ms_of("since", text, NOON / 1000) == unix_ms


@pytest.mark.parametrize("text", ["", "yesterday", "7", "7w", "-1d", "2026-13-01", "9999999d"])
def test_what_is_no_time_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequest, match="since"):
        unix_ms_of("since", text, NOON / 1000)


def summed_from_records(connection: sqlite3.Connection, since_ms: int | None, until_ms: int | None, tenant: str | None) -> list[Any]:
    """By day and model, without the sums of days."""
    text = (
        "SELECT strftime('%Y-%m-%d', time_ms / 1000, 'unixepoch'), model, count(*), sum(prompt_tokens), sum(cost_nanos) FROM usage"
        " WHERE time_ms >= ? AND time_ms < ? AND tenant LIKE ? GROUP BY 1, 2 ORDER BY 1, 2"
    )
    return connection.execute(text, (since_ms or 0, until_ms or 2**62, tenant or "%")).fetchall()


def summed(connection: sqlite3.Connection, since_ms: int | None, until_ms: int | None, tenant: str | None) -> list[Any]:
    rows = usage_rows(connection, UsageQuery(by=["day", "model"], since_ms=since_ms, until_ms=until_ms, tenant=tenant))
    return [(row["day"], row["model"], row["requests"], row["prompt_tokens"], row["cost_nanos"]) for row in rows]


def many_records(rng: random.Random, count: int) -> list[bytes]:
    return [
        encode_record(
            usage(
                number,
                time_ms=NOON - rng.randrange(6 * DAY_MS),
                tenant=rng.choice(["acme", "globex"]),
                model=rng.choice(["fox", "owl"]),
                key_id=rng.choice(["k1", "k2"]),
                prompt_tokens=rng.randrange(100),
                cost_nanos=rng.randrange(100),
            )
        )
        for number in range(count)
    ]


def test_the_sums_of_days_give_what_the_records_give_for_any_time(tmp_path: Path) -> None:
    rng = random.Random(7)
    sink = UsageDb(str(tmp_path / FILE), retention_days=4, unix_time=lambda: NOON / 1000)
    records = many_records(rng, 3000)
    sink.ship(records)
    sink.ship(records[:100])
    connection = sqlite3.connect(tmp_path / FILE)
    for is_deleted in (False, True):
        if is_deleted:
            sink.idle()  # up to a thousand of the oldest
        for _ in range(100):
            since, until = sorted(NOON - rng.randrange(-DAY_MS, 7 * DAY_MS) for _ in range(2))
            since_ms, until_ms = rng.choice([None, since, since - since % DAY_MS]), rng.choice([None, until, until - until % DAY_MS])
            asked = since_ms, until_ms, rng.choice([None, "acme"])
            assert summed(connection, *asked) == summed_from_records(connection, *asked), asked
    sink.close()
    assert connection.execute("SELECT count(*) FROM usage").fetchone()[0] < 2500, "some were deleted"
    connection.close()


def test_a_file_of_an_earlier_version_gets_its_sums_and_can_be_read_without_them(tmp_path: Path) -> None:
    path = tmp_path / FILE
    old = replace(USAGE, added={})
    connection = open_sqlite(str(path), old)
    sink = UsageDb.__new__(UsageDb)
    sink._connection = connection
    sink.ship(many_records(random.Random(3), 500))
    assert not has_table(connection, DAYS)
    before = summed(connection, NOON - 3 * DAY_MS, None, "acme")
    assert before == summed_from_records(connection, NOON - 3 * DAY_MS, None, "acme")
    newer = open_sqlite(str(path), USAGE)
    assert has_table(newer, DAYS)
    assert summed(newer, NOON - 3 * DAY_MS, None, "acme") == before
    sink.ship([encode_record(usage(1000, time_ms=NOON))])  # the earlier program goes on, and its records are in the sums
    assert summed(newer, None, None, None) == summed_from_records(newer, None, None, None)
    for opened in (connection, newer):
        opened.close()


def test_a_file_of_an_earlier_shape_gains_its_columns_and_keeps_its_rows(tmp_path: Path) -> None:
    earlier = ("request_id", "time_ms", "tenant", "user", "key_id", "model", "outcome", *SUMMED)
    shape = {name: kind for name, kind in USAGE.columns["usage"].items() if name in earlier}
    make_table = f"CREATE TABLE usage ({', '.join(f'{name} {kind}' for name, kind in shape.items())}, PRIMARY KEY (request_id))"
    old = open_sqlite(str(tmp_path / FILE), replace(USAGE, statements=(make_table, *USAGE.statements[1:]), columns={}))
    insert = f"INSERT INTO usage ({', '.join(shape)}) VALUES ({', '.join('?' * len(shape))})"
    old.execute(insert, [getattr(usage(1), name) for name in shape])
    sink = UsageDb(str(tmp_path / FILE), retention_days=90, unix_time=lambda: NOON / 1000)
    sink.ship([encode_record(usage(2, ttft_ms=1.5, requested_model="assistant", estimated_tokens=7, prompt="hi"))])
    old.execute(insert, [getattr(usage(3), name) for name in shape])  # the earlier program goes on
    names = "request_id, ttft_ms, requested_model, estimated_tokens, prompt"
    found = sink._connection.execute(f"SELECT {names} FROM usage ORDER BY request_id").fetchall()
    assert [row[1:] for row in found] == [(None, "", 0, None), (1.5, "assistant", 7, "hi"), (None, "", 0, None)]
    assert shown(sink._connection, by=["tenant"]) == [("acme", 3)]
    old.close()
    sink.close()


def test_a_month_is_read_from_the_sums_of_its_days(tmp_path: Path) -> None:
    sink = UsageDb(str(tmp_path / FILE), retention_days=90, unix_time=lambda: NOON / 1000)
    sink.ship([encode_record(usage(number, time_ms=NOON - DAY_MS + number)) for number in range(5000)])
    sink.close()
    connection = sqlite3.connect(tmp_path / FILE)
    steps = 0

    def step() -> None:
        nonlocal steps
        steps += 1

    connection.set_progress_handler(step, 100)
    [row] = usage_rows(connection, UsageQuery(by=["day"], tenant="acme", since_ms=NOON - 30 * DAY_MS))
    assert row["requests"] == 5000
    assert steps < 20, "2,000 instructions of SQLite's machine; the records alone would take ten times as many"
    connection.close()
