"""Tests records in a Kafka topic: librdkafka's own mock brokers, which go away and come back, or hang and go on."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from kafka_kit import NO_PACKAGE, TOPIC, MockBrokers, MockCluster, mock_brokers, mock_cluster
from ledger_kit import usage
from patience import until

from bench.storms.usage_kills import ids_in_sql, ids_in_topic, storm
from headrace.core.errors import ConfigError
from headrace.gateway.ledger import kafka
from headrace.gateway.ledger.config import ClickHouseConfig, KafkaConfig, UsageConfig
from headrace.gateway.ledger.kafka import Archive, KafkaSink, client_properties, producer_properties
from headrace.gateway.ledger.record import SinkFailed, encode_record
from headrace.gateway.ledger.shipper import Shipper
from headrace.gateway.ledger.spool import Spool
from headrace.gateway.ledger.spool_thread import SpoolThread

pytest.importorskip("confluent_kafka", reason=NO_PACKAGE)


pytestmark = pytest.mark.socket

NUM_KILLS, SEED = 2, 4
"""With this seed the brokers hang during one of the two lives, which take a moment each."""


@pytest.fixture
def cluster() -> Iterator[MockBrokers]:
    with mock_brokers() as found:
        yield found


def config(cluster: MockBrokers | MockCluster) -> UsageConfig:
    return UsageConfig(kafka=KafkaConfig(brokers=cluster.brokers, topic=TOPIC)).checked()


def sink_of(cluster: MockBrokers) -> KafkaSink:
    kafka_config = config(cluster).kafka
    assert kafka_config is not None
    return KafkaSink(kafka_config)


def test_every_record_is_a_message_with_its_requests_id_as_key(cluster: MockBrokers) -> None:
    sink = sink_of(cluster)
    records = [usage(number) for number in range(500)]
    sink.ship([encode_record(record) for record in records])
    sink.close()
    assert sorted(ids_in_topic(config(cluster))) == [record.request_id for record in records]


def test_brokers_that_go_away_keep_no_record_waiting_and_get_everything_once_they_are_back(cluster: MockBrokers, tmp_path: Path) -> None:
    spool = Spool(tmp_path / "spool", ["kafka"])
    shipper = Shipper(spool, sink_of(cluster))
    shipper.start()
    thread = SpoolThread(spool, on_segment=shipper.wake)
    thread.put(usage(0))
    until(lambda: shipper.num_shipped == 1)
    cluster.go_down()
    for number in range(1, 200):
        thread.put(usage(number))
    until(lambda: thread.num_recorded == 200)
    assert shipper.num_shipped == 1, "they are on the disk, and nothing waited for Kafka"
    cluster.come_up()
    until(lambda: shipper.num_shipped == 200)
    thread.close(60)
    shipper.stop()
    shipper.join(60)
    assert set(ids_in_topic(config(cluster))) == {usage(number).request_id for number in range(200)}


def ship_again_and_again(sink: KafkaSink, number: int) -> None:
    """Until it is delivered in time."""

    def is_delivered() -> bool:
        try:
            sink.ship([encode_record(usage(number))])
        except SinkFailed:
            return False
        return True

    until(is_delivered)


def test_a_batch_that_is_not_delivered_in_time_fails(cluster: MockBrokers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kafka, "DELIVERY_S", 0.5)
    sink = sink_of(cluster)
    ship_again_and_again(sink, 1)
    cluster.go_down()
    with pytest.raises(SinkFailed, match=r"kafka: .*[Tt]imed out"):
        sink.ship([encode_record(usage(2))])
    cluster.come_up()
    ship_again_and_again(sink, 2)
    assert set(ids_in_topic(config(cluster))) >= {usage(number).request_id for number in (1, 2)}
    sink.close()


def test_a_wait_for_brokers_can_be_interrupted(cluster: MockBrokers) -> None:
    sink = sink_of(cluster)
    cluster.go_down()
    waiting = threading.Timer(0.1, sink.interrupt)
    waiting.start()
    with pytest.raises(SinkFailed, match="interrupted"):
        sink.ship([encode_record(usage(1))])
    waiting.join()
    sink.close()


@pytest.mark.process
def test_killed_writers_lose_nothing_that_was_in_the_spool_whether_brokers_hang_or_not(tmp_path: Path) -> None:
    with mock_cluster() as cluster:
        plain = {"kafka": {"brokers": list(cluster.brokers), "topic": TOPIC}}
        outcome = storm(tmp_path, plain, NUM_KILLS, [cluster], seed=SEED)
        assert 0 < outcome.num_hung < NUM_KILLS
        assert outcome.expected
        in_sql = ids_in_sql(tmp_path)
        assert outcome.expected <= set(in_sql)
        assert len(in_sql) == len(set(in_sql))
        assert outcome.expected <= set(ids_in_topic(config(cluster)))


# -- properties ------------------------------------------------------------------------------------------------------------------------


@pytest.mark.pure
def test_a_producer_waits_for_all_replicas_and_repeats_without_duplicates() -> None:
    properties = producer_properties(KafkaConfig(brokers=("localhost:9092",)))
    assert (properties["acks"], properties["enable.idempotence"]) == ("all", True)


@pytest.mark.pure
def test_the_clusters_address_and_the_file_make_a_client(tmp_path: Path) -> None:
    """librdkafka takes them: it has read the certificates before it connects."""
    file = tmp_path / "kafka.properties"
    file.write_text(
        "security.protocol=sasl_ssl\nssl.endpoint.identification.algorithm=https\nclient.id=ledger-7\n"
        "sasl.mechanisms=SCRAM-SHA-512\nsasl.username=ledger\nsasl.password=open=sesame\n"
    )
    file.chmod(0o600)
    config = KafkaConfig(brokers=("localhost:1", "127.0.0.1:1"), properties_file=str(file)).checked("usage.kafka")
    found = client_properties(config)
    assert found["bootstrap.servers"] == "localhost:1,127.0.0.1:1"
    assert (found["client.id"], found["security.protocol"], found["sasl.password"]) == ("ledger-7", "SASL_SSL", "open=sesame")
    KafkaSink(config).close()
    plain = client_properties(KafkaConfig(brokers=("localhost:9092",)))
    assert (plain["client.id"], "security.protocol" in plain) == ("headrace", False)


@pytest.mark.pure
def test_a_certificate_that_is_none_is_an_error_of_the_configuration_that_names_the_property(tmp_path: Path) -> None:
    """The gateway showed the client's own error object; the archive ended with a traceback."""
    file, authorities = tmp_path / "kafka.properties", tmp_path / "ca.pem"
    file.touch(0o600)
    file.write_text(f"security.protocol=SSL\nssl.ca.location={authorities}\n")
    authorities.write_text("no certificate")
    kafka_config = KafkaConfig(brokers=("localhost:1",), properties_file=str(file))
    with pytest.raises(ConfigError, match=r"^usage\.kafka: cannot be used: Failed to create producer: ssl\.ca\.location failed"):
        KafkaSink(kafka_config)
    with pytest.raises(ConfigError, match=r"^usage\.kafka: cannot be used: Failed to create consumer: ssl\.ca\.location failed"):
        Archive(UsageConfig(kafka=kafka_config, clickhouse=ClickHouseConfig(url="http://localhost:8123")))
