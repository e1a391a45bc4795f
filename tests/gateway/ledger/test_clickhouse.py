"""Tests records in ClickHouse: a real server (Debian's 18.16), which stops, hangs and goes on; and the statements in a recent dialect."""

from __future__ import annotations

import http.server
import json
import socket
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from clickhouse_kit import ClickHouseServer
from kafka_kit import NO_PACKAGE, TOPIC, mock_cluster
from ledger_kit import usage
from patience import until

from headrace.core.errors import ConfigError
from headrace.gateway.ledger.clickhouse import ClickHouseRefused, ClickHouseSink, clickhouse_dialect, create_table
from headrace.gateway.ledger.config import ClickHouseConfig, KafkaConfig, UsageConfig
from headrace.gateway.ledger.kafka import Archive, KafkaSink
from headrace.gateway.ledger.record import SinkFailed, encode_record
from headrace.gateway.ledger.shipper import Shipper
from headrace.gateway.ledger.spool import Spool
from headrace.gateway.ledger.spool_thread import SpoolThread
from headrace.gateway.ledger.usage_query import LATENCY, USE, UsageQuery, usage_statement

pytestmark = pytest.mark.process

TABLE = "headrace_test.headrace_usage"


@pytest.fixture
def sink(server: ClickHouseServer) -> Iterator[ClickHouseSink]:
    found = ClickHouseSink(server.config)
    found.query(f"DROP TABLE IF EXISTS {TABLE}") if b"headrace_test" in found.query("SHOW DATABASES") else None
    yield found
    found.close()


def ids(sink: ClickHouseSink) -> list[str]:
    """As FINAL shows them."""
    return sink.query(f"SELECT request_id FROM {TABLE} FINAL ORDER BY request_id").decode().split()


def test_the_table_is_made_and_records_are_kept_as_they_are(sink: ClickHouseSink) -> None:
    sink.ship([encode_record(usage(1, prompt='[{"content": "h\u00e9llo\\n"}]', ttft_ms=1.5, user="ann")), encode_record(usage(2))])
    found = sink.query(f"SELECT request_id, tenant, user, prompt_tokens, cost_nanos, ttft_ms, prompt, toString(time) FROM {TABLE}")
    first, second = sorted(found.decode().splitlines())
    assert first.split("\t")[1:6] == ["acme", "ann", "10", "1000", "1.5"]
    assert "h\u00e9llo" in first
    assert second.split("\t")[5:7] == ["\\N", "\\N"]


def test_a_record_that_is_shipped_again_is_one_row(sink: ClickHouseSink) -> None:
    records = [encode_record(usage(number)) for number in range(100)]
    sink.ship(records)
    sink.ship(records[50:])
    assert ids(sink) == [usage(number).request_id for number in range(100)]


def test_fields_that_the_table_lacks_are_left_out(sink: ClickHouseSink) -> None:
    """As when a newer version ships to a table that an older one made."""
    sink.create()
    sink.ship([encode_record(usage(1))[:-1] + b',"from_the_future":{"a":1}}'])
    assert ids(sink) == [usage(1).request_id]


EARLIER = (
    f"CREATE TABLE {TABLE} (request_id String, time_ms Int64, tenant String, model String, outcome String, prompt_tokens UInt32,"
    " time DateTime MATERIALIZED toDateTime(intDiv(time_ms, 1000)))"
    " ENGINE = ReplacingMergeTree PARTITION BY toYYYYMM(time) ORDER BY (tenant, time_ms, request_id)"
)


def test_a_table_of_an_earlier_shape_gains_its_columns(sink: ClickHouseSink) -> None:
    sink.query("CREATE DATABASE IF NOT EXISTS headrace_test")
    sink.query(EARLIER)
    sink.query(f"INSERT INTO {TABLE} (request_id, time_ms, tenant) VALUES ('{'0' * 24}', 1700000000000, 'acme')")
    for number in (1, 2):
        sink.ship([encode_record(usage(number, ttft_ms=1.5, requested_model="assistant", estimated_tokens=7))])
    found = sink.query(f"SELECT ttft_ms, requested_model, prompt, estimated_tokens FROM {TABLE} ORDER BY request_id").decode().splitlines()
    assert found == ["\\N\t\t\\N\t0", *["1.5\tassistant\t\\N\t7"] * 2]


def test_a_user_who_may_add_no_column_ships_without_it(
    sink: ClickHouseSink, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    sink.query("CREATE DATABASE IF NOT EXISTS headrace_test")
    sink.query(EARLIER)
    real = sink.query

    def refuse(statement: str, *given: bytes) -> bytes:
        if statement.startswith("ALTER"):
            raise ClickHouseRefused(497, "Not enough privileges")
        return real(statement, *given)

    with monkeypatch.context() as patched:
        patched.setattr(sink, "query", refuse)
        sink.ship([encode_record(usage(1, ttft_ms=1.5))])
    assert "Not enough privileges" in caplog.text
    assert ids(sink) == [usage(1).request_id]


def test_a_server_that_is_killed_gets_everything_once_it_is_back(server: ClickHouseServer, sink: ClickHouseSink, tmp_path: Path) -> None:
    sink.create()
    spool = Spool(tmp_path / "spool", ["clickhouse"])
    shipper = Shipper(spool, ClickHouseSink(server.config))
    shipper.start()
    thread = SpoolThread(spool, on_segment=shipper.wake)
    for number in range(50):
        thread.put(usage(number))
    until(lambda: shipper.num_shipped == 50)
    server.stop()
    for number in range(50, 100):
        thread.put(usage(number))
    until(lambda: shipper.num_failures > 0)
    server.start()
    until(lambda: shipper.num_shipped == 100)
    thread.close(60)
    shipper.stop()
    shipper.join(60)
    assert ids(sink) == [usage(number).request_id for number in range(100)]


def test_a_wrong_password_is_a_failure_that_does_not_show_it(server: ClickHouseServer, tmp_path: Path) -> None:
    secret = tmp_path / "password"
    secret.write_text("not-the-password")
    secret.chmod(0o600)
    wrong = ClickHouseSink(replace(server.config, password_file=str(secret)))
    with pytest.raises(SinkFailed) as failed:
        wrong.ship([encode_record(usage(1))])
    wrong.close()
    assert "not-the-password" not in str(failed.value)


@pytest.mark.slow
def test_the_archive_moves_the_topic_to_clickhouse(server: ClickHouseServer, sink: ClickHouseSink) -> None:
    pytest.importorskip("confluent_kafka", reason=NO_PACKAGE)
    sink.create()
    with mock_cluster() as cluster:
        config = UsageConfig(kafka=KafkaConfig(brokers=cluster.brokers, topic=TOPIC), clickhouse=server.config).checked()
        assert config.kafka is not None
        producer = KafkaSink(config.kafka)
        producer.ship([encode_record(usage(number)) for number in range(300)])
        archive = Archive(config)
        server.hang()
        threading.Timer(1.0, server.go_on).start()
        archive.run(until_end=True)
        assert archive.num_archived == 300
        producer.ship([encode_record(usage(number)) for number in range(300, 310)])
        producer.close()
        again = Archive(config)
        again.run(until_end=True)
        assert again.num_archived == 10, "the first 300 were committed"
    assert ids(sink) == [usage(number).request_id for number in range(310)]


@pytest.mark.pure
def test_an_archive_wants_both_ends() -> None:
    with pytest.raises(ConfigError, match=r"usage\.kafka: is missing"):
        Archive(UsageConfig(clickhouse=ClickHouseConfig(url="http://localhost:8123")))
    with pytest.raises(ConfigError, match=r"usage\.clickhouse: is missing"):
        Archive(UsageConfig(kafka=KafkaConfig(brokers=("localhost:9092",))))


# -- without a server ------------------------------------------------------------------------------------------------------------------


@pytest.mark.socket
def test_a_server_that_hangs_fails_in_time_and_can_be_interrupted() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        config = ClickHouseConfig(url=f"http://127.0.0.1:{silent.getsockname()[1]}")
        hasty, patient = ClickHouseSink(config, answer_s=0.1), ClickHouseSink(config, answer_s=600.0)
        with pytest.raises(SinkFailed, match="clickhouse: timed out"):
            hasty.ship([encode_record(usage(1))])
        has_ended = threading.Event()

        def is_over() -> bool:
            patient.interrupt()  # nothing happens before it is connected
            return has_ended.is_set()

        interrupting = threading.Thread(target=until, args=(is_over,))
        interrupting.start()
        with pytest.raises(SinkFailed, match="clickhouse"):
            patient.ship([encode_record(usage(1))])
        has_ended.set()
        interrupting.join()


class Refusing(http.server.BaseHTTPRequestHandler):
    """Answers every statement with ClickHouse's error 241, as recent versions write it."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        body = b"Code: 241. DB::Exception: Memory limit exceeded. (MEMORY_LIMIT_EXCEEDED) (version 26.9.2.1)\n"
        self.send_response(500)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        return


@pytest.mark.socket
def test_an_error_of_the_server_has_its_code() -> None:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Refusing) as far:
        threading.Thread(target=far.serve_forever, daemon=True).start()
        sink = ClickHouseSink(ClickHouseConfig(url=f"http://127.0.0.1:{far.server_port}"))
        with pytest.raises(ClickHouseRefused, match="Memory limit exceeded") as refused:
            sink.ship([encode_record(usage(1))])
        assert refused.value.code == 241
        sink.close()
        far.shutdown()


@pytest.mark.socket
def test_nothing_at_the_address_is_a_failure() -> None:
    sink = ClickHouseSink(ClickHouseConfig(url="http://127.0.0.1:1"))
    with pytest.raises(SinkFailed, match=r"clickhouse: .*refused"):
        sink.ship([encode_record(usage(1))])


@pytest.mark.socket
@pytest.mark.slow
def test_statements_are_those_of_a_recent_clickhouse(tmp_path: Path) -> None:
    """chDB is ClickHouse in this process."""
    chdb = pytest.importorskip("chdb.session", reason="chdb is not installed: make test-slow installs it")
    session = chdb.Session(str(tmp_path / "chdb"))
    config = ClickHouseConfig(url="http://localhost:8123", table=TABLE)
    session.query("CREATE DATABASE IF NOT EXISTS headrace_test")
    session.query(create_table(config))
    rows = "\n".join(encode_record(usage(number, ttft_ms=1.5)).decode() for number in range(100))
    for _ in range(2):
        session.query(f"INSERT INTO {TABLE} FORMAT JSONEachRow\n{rows}")
    found = session.query(f"SELECT count(), uniqExact(request_id), sum(prompt_tokens), min(time) FROM {TABLE} FINAL", "CSV")
    assert str(found).strip() == '100,100,1000,"2023-11-14 22:13:20"'
    for figures, expected in (
        (USE, [["fox", 100, 1000, 400, 500, 100_000]]),
        (LATENCY, [["fox", 100, 100, 0, 0, 0, [1.5, 1.5], [], [], []]]),
    ):
        statement = usage_statement(UsageQuery(by=["model"], figures=figures), clickhouse_dialect(config))
        settings = "SETTINGS output_format_json_quote_64bit_integers = 0"
        assert json.loads(str(session.query(f"{statement} {settings}", "JSONCompact")))["data"] == expected
    session.close()
