"""Records in a Kafka topic: librdkafka's own mock brokers, which hang and go on."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from kafka_kit import NO_PACKAGE, TOPIC, MockCluster, mock_cluster
from ledger_kit import usage, wait_until

from bench.storms.usage_kills import ids_in_sql, ids_in_topic, storm
from headrace.core.errors import ConfigError
from headrace.gateway.ledger import kafka
from headrace.gateway.ledger.config import KafkaConfig, UsageConfig
from headrace.gateway.ledger.kafka import KafkaSink, client_properties, producer_properties
from headrace.gateway.ledger.record import encode_record
from headrace.gateway.ledger.shipper import Shipper
from headrace.gateway.ledger.sink import SinkFailed
from headrace.gateway.ledger.spool import Spool
from headrace.gateway.ledger.spool_thread import SpoolThread

pytest.importorskip("confluent_kafka", reason=NO_PACKAGE)


@pytest.fixture
def cluster() -> Iterator[MockCluster]:
    with mock_cluster() as found:
        yield found


def config(cluster: MockCluster) -> UsageConfig:
    return UsageConfig(kafka=KafkaConfig(brokers=cluster.brokers, topic=TOPIC)).checked()


def sink_of(cluster: MockCluster) -> KafkaSink:
    kafka_config = config(cluster).kafka
    assert kafka_config is not None
    return KafkaSink(kafka_config)


def test_every_record_is_a_message_with_its_requests_id_as_key(cluster: MockCluster) -> None:
    sink = sink_of(cluster)
    records = [usage(number) for number in range(500)]
    sink.ship([encode_record(record) for record in records])
    sink.close()
    assert sorted(ids_in_topic(config(cluster))) == [record.request_id for record in records]


def test_brokers_that_hang_get_everything_once_they_go_on(cluster: MockCluster, tmp_path: Path) -> None:
    spool = Spool(tmp_path / "spool", ["kafka"], 1 << 30)
    shipper = Shipper(spool, sink_of(cluster))
    shipper.start()
    thread = SpoolThread(spool, fsync="never", on_segment=shipper.wake)
    thread.put(usage(0))
    wait_until(lambda: shipper.num_shipped == 1)
    cluster.hang()
    started = time.monotonic()
    for number in range(1, 200):
        thread.put(usage(number))
    assert time.monotonic() - started < 1, "nothing waits for Kafka"
    wait_until(lambda: thread.num_recorded == 200)
    cluster.go_on()
    wait_until(lambda: shipper.num_shipped == 200, timeout_s=60)
    thread.close(10)
    shipper.stop()
    shipper.join(10)
    assert set(ids_in_topic(config(cluster))) == {usage(number).request_id for number in range(200)}


def ship_again_and_again(sink: KafkaSink, number: int) -> None:
    """Until it is delivered in time."""
    deadline = time.monotonic() + 30
    while True:
        try:
            sink.ship([encode_record(usage(number))])
            break
        except SinkFailed:
            assert time.monotonic() < deadline


def test_a_batch_that_is_not_delivered_in_time_fails(cluster: MockCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kafka, "DELIVERY_S", 1.5)
    sink = sink_of(cluster)
    ship_again_and_again(sink, 1)
    cluster.hang()
    with pytest.raises(SinkFailed, match=r"kafka: .*[Tt]imed out"):
        sink.ship([encode_record(usage(2))])
    cluster.go_on()
    ship_again_and_again(sink, 2)
    assert set(ids_in_topic(config(cluster))) >= {usage(number).request_id for number in (1, 2)}
    sink.close()


def test_a_wait_for_brokers_can_be_interrupted(cluster: MockCluster) -> None:
    sink = sink_of(cluster)
    cluster.hang()
    sink.interrupt()
    started = time.monotonic()
    with pytest.raises(SinkFailed, match="interrupted"):
        sink.ship([encode_record(usage(1))])
    assert time.monotonic() - started < 5
    sink.close()


def test_killed_writers_lose_nothing_that_was_in_the_spool(cluster: MockCluster, tmp_path: Path) -> None:
    plain = {"kafka": {"brokers": list(cluster.brokers), "topic": TOPIC}}
    outcome = storm(tmp_path, plain, 4, [cluster], seed=1)
    assert outcome.expected
    in_sql = ids_in_sql(tmp_path)
    assert outcome.expected <= set(in_sql)
    assert len(in_sql) == len(set(in_sql))
    assert outcome.expected <= set(ids_in_topic(config(cluster)))


# -- properties ------------------------------------------------------------------------------------------------------------------------


def test_a_producer_waits_for_all_replicas_and_repeats_without_duplicates() -> None:
    properties = producer_properties(KafkaConfig(brokers=("localhost:9092",)))
    assert (properties["acks"], properties["enable.idempotence"]) == ("all", True)


def test_user_and_tls_make_the_protocol(tmp_path: Path) -> None:
    secret = tmp_path / "password"
    secret.write_text("open sesame".replace(" ", "-"))
    secret.chmod(0o600)
    found = client_properties(
        KafkaConfig(brokers=("kafka.example:9092",), tls=True, ca_file="/ca", user="ledger", password_file=str(secret)).checked("kafka")
    )
    wanted = {
        "security.protocol": "SASL_SSL",
        "sasl.mechanism": "SCRAM-SHA-512",
        "sasl.username": "ledger",
        "sasl.password": "open-sesame",
        "ssl.ca.location": "/ca",
    }
    assert {name: found[name] for name in wanted} == wanted
    assert client_properties(KafkaConfig(brokers=("localhost:9092",)))["security.protocol"] == "PLAINTEXT"


def test_a_password_that_others_may_read_is_refused(tmp_path: Path) -> None:
    secret = tmp_path / "password"
    secret.write_text("open")
    secret.chmod(0o644)
    with pytest.raises(ConfigError, match="open to other users"):
        client_properties(KafkaConfig(brokers=("localhost:9092",), user="ledger", password_file=str(secret)))
