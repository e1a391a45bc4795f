"""Sends usage records to a Kafka topic, keyed by the request's id, and moves them from there to ClickHouse (`headrace log archive`)."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import Struct

from headrace.core.errors import ConfigError, counted
from headrace.gateway.ledger.clickhouse import ClickHouseSink
from headrace.gateway.ledger.config import KafkaConfig, UsageConfig
from headrace.gateway.ledger.record import FIRST_RETRY_S, LAST_RETRY_S, SinkFailed

KAFKA = "kafka"
DELIVERY_S = 30.0

CRITICAL = 2
"""librdkafka's log level (syslog's)."""

WAIT_S = 0.1

log = logging.getLogger("headrace.usage")


class MessageKey(Struct):
    request_id: str


_key_of = msgspec.json.Decoder(MessageKey).decode


class KafkaSink:
    """After a crash or a timeout a record may be in the topic twice, with equal key and content."""

    name = KAFKA

    def __init__(self, config: KafkaConfig) -> None:
        self._config = config
        self._properties = producer_properties(config)
        self._interrupted = threading.Event()
        self._producer = _open("Producer", self._properties)

    def ship(self, payloads: Sequence[bytes]) -> None:
        delivery = _Delivery(len(payloads))
        for payload in payloads:
            self._produce(payload, delivery)
        while delivery.num_left and not self._interrupted.is_set():
            self._producer.poll(WAIT_S)
        if delivery.num_left or delivery.failure:
            raise SinkFailed(f"kafka: {delivery.failure or 'interrupted'}")

    def idle(self) -> None:
        self._producer.poll(0)

    def interrupt(self) -> None:
        self._interrupted.set()

    def close(self) -> None:
        self._producer.purge()
        self._producer.flush(1.0)

    def _produce(self, payload: bytes, delivery: _Delivery) -> None:
        """Raises SinkFailed."""
        key = _key_of(payload).request_id
        while not self._interrupted.is_set():
            try:
                self._producer.produce(self._config.topic, payload, key, on_delivery=delivery.report)
                return
            except BufferError:  # the client's queue is full: it empties as messages are delivered
                self._producer.poll(WAIT_S)
            except kafka_package().KafkaException as error:
                self._producer = _open("Producer", self._properties)  # a producer that has failed for good takes nothing any more
                raise SinkFailed(f"kafka: {error.args[0]}") from None
        raise SinkFailed("kafka: interrupted")


class _Delivery:
    def __init__(self, count: int) -> None:
        self.num_left = count
        self.failure = ""

    def report(self, error: object, _message: object) -> None:
        self.num_left -= 1
        if error is not None:
            self.failure = str(error)


def producer_properties(config: KafkaConfig) -> dict[str, Any]:
    """librdkafka's properties of a producer that keeps order and makes no duplicates until it is closed."""
    return client_properties(config) | {
        "enable.idempotence": True,
        "acks": "all",
        "compression.type": "lz4",
        "linger.ms": 5,
        "message.timeout.ms": int(DELIVERY_S * 1000),
        "queue.buffering.max.messages": 100_000,
    }


def client_properties(config: KafkaConfig) -> dict[str, Any]:
    return {
        "client.id": "headrace",
        **config.properties(),
        "bootstrap.servers": ",".join(config.brokers),
        "log_level": CRITICAL,  # a line for each attempt at each broker otherwise; what fails is logged by `shipper`
    }


def _open(kind: str, properties: dict[str, Any]) -> Any:
    """Raises ConfigError for properties that librdkafka does not take."""
    confluent = kafka_package()
    try:
        return getattr(confluent, kind)(properties, logger=log)
    except confluent.KafkaException as error:
        raise ConfigError("usage.kafka", f"cannot be used: {error.args[0].str()}") from None


def kafka_package() -> Any:
    """Raises ConfigError where it is not installed."""
    try:
        import confluent_kafka
    except ImportError:
        raise ConfigError("usage.kafka", "needs the package confluent-kafka", "pip install 'headrace[kafka]'") from None
    return confluent_kafka


GROUP = "headrace-archive"
"""The consumer group, whose members share the topic's partitions: any number of archives may run."""

MAX_MESSAGES = 10_000
FILL_S = 1.0
"""ClickHouse wants few large inserts."""


class Archive:
    def __init__(self, config: UsageConfig) -> None:
        """Raises ConfigError."""
        if config.kafka is None or config.clickhouse is None:
            missing = "usage.kafka" if config.kafka is None else "usage.clickhouse"
            raise ConfigError(missing, "is missing", "The archive reads from usage.kafka and writes to usage.clickhouse.")
        self.num_archived = 0
        self._at_end: set[tuple[str, int]] = set()
        self._stopping = threading.Event()
        self._sink = ClickHouseSink(config.clickhouse)
        properties = {"group.id": GROUP, "enable.auto.commit": False, "auto.offset.reset": "earliest", "enable.partition.eof": True}
        confluent = kafka_package()
        self._exception = confluent.KafkaException
        self._end_of_partition = confluent.KafkaError._PARTITION_EOF
        self._consumer = _open("Consumer", client_properties(config.kafka) | properties)
        self._consumer.subscribe([config.kafka.topic])

    def stop(self) -> None:
        """From any thread, or a signal handler."""
        self._stopping.set()

    def run(self, *, until_end: bool = False) -> None:
        """Raises SinkFailed."""
        try:
            while not self._stopping.is_set():
                payloads, is_at_end = self._next_batch()
                if payloads:
                    self._insert(payloads)
                    self._commit()
                    self.num_archived += len(payloads)
                elif until_end and is_at_end:
                    break
        finally:
            self._consumer.close()
            self._sink.close()

    def _next_batch(self) -> tuple[list[bytes], bool]:
        """The records that have arrived, and whether every partition was read to its end."""
        payloads = []
        for message in self._consumer.consume(MAX_MESSAGES, FILL_S):
            place = (message.topic(), message.partition())
            error = message.error()
            if error is None:
                self._at_end.discard(place)
                payloads.append(message.value())
            elif error.code() == self._end_of_partition:
                self._at_end.add(place)
            else:
                log.warning("usage: kafka: %s", error)
        assigned = {(one.topic, one.partition) for one in self._consumer.assignment()}
        return payloads, bool(assigned) and assigned <= self._at_end

    def _commit(self) -> None:
        try:
            self._consumer.commit(asynchronous=False)
        except self._exception as error:
            log.warning("usage: kafka: %s", error.args[0])

    def _insert(self, payloads: Sequence[bytes]) -> None:
        """Raises SinkFailed for a failure after `stop`."""
        retry_s = FIRST_RETRY_S
        while True:
            try:
                self._sink.ship(payloads)
                return
            except SinkFailed as failed:
                if self._stopping.is_set():
                    raise
                if retry_s in (FIRST_RETRY_S, LAST_RETRY_S):
                    log.warning("usage: %s wait: %s", counted(len(payloads), "record"), failed)
            self._stopping.wait(retry_s)
            retry_s = min(2 * retry_s, LAST_RETRY_S)
