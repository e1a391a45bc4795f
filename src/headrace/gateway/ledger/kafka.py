"""Usage records as messages of a Kafka topic, keyed by the request's id. The package confluent-kafka brings the client (librdkafka)."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import Struct

from headrace.core.errors import ConfigError
from headrace.gateway.ledger.config import KafkaConfig
from headrace.gateway.ledger.sink import SinkFailed
from headrace.wire.private_files import check_private_file, read_token

KAFKA = "kafka"
DELIVERY_S = 30.0
"""Seconds in which a message is delivered or has failed; then its segment is sent again."""

CRITICAL = 2
"""librdkafka's log level (syslog's)."""

WAIT_S = 0.1
"""Seconds between two questions whether all is delivered."""

log = logging.getLogger("headrace.usage")


class MessageKey(Struct):
    """The part of a record that is the key of its message."""

    request_id: str


_key_of = msgspec.json.Decoder(MessageKey).decode


class KafkaSink:
    """A `Sink`. A record may be in the topic twice, after a crash or a timeout: both messages have its key and the same content."""

    name = KAFKA

    def __init__(self, config: KafkaConfig) -> None:
        """Connects in the background. Raises ConfigError."""
        self._config = config
        self._properties = producer_properties(config)
        self._interrupted = threading.Event()
        self._producer = self._open()

    def ship(self, payloads: Sequence[bytes]) -> None:
        delivery = _Delivery(len(payloads))
        for payload in payloads:
            self._produce(payload, delivery)
        while delivery.num_left and not self._interrupted.is_set():
            self._producer.poll(WAIT_S)
        if delivery.num_left or delivery.failure:
            raise SinkFailed(f"kafka: {delivery.failure or 'interrupted'}")

    def idle(self) -> None:
        """Serve the client's callbacks."""
        self._producer.poll(0)

    def interrupt(self) -> None:
        self._interrupted.set()

    def close(self) -> None:
        self._producer.purge()
        self._producer.flush(1.0)

    def _produce(self, payload: bytes, delivery: _Delivery) -> None:
        """Raises SinkFailed."""
        from confluent_kafka import KafkaException

        key = _key_of(payload).request_id
        while not self._interrupted.is_set():
            try:
                self._producer.produce(self._config.topic, payload, key, on_delivery=delivery.report)
                return
            except BufferError:  # the client's queue is full: it empties as messages are delivered
                self._producer.poll(WAIT_S)
            except KafkaException as error:
                self._producer = self._open()  # a producer that has failed for good takes nothing any more
                raise SinkFailed(f"kafka: {error.args[0]}") from None
        raise SinkFailed("kafka: interrupted")

    def _open(self) -> Any:
        confluent = kafka_package()
        try:
            return confluent.Producer(self._properties, logger=log)
        except confluent.KafkaException as error:
            raise ConfigError("usage.kafka", f"cannot be used: {error.args[0]}") from None


class _Delivery:
    """Messages of one batch that are under way, and why the last one failed that did."""

    def __init__(self, count: int) -> None:
        self.num_left = count
        self.failure = ""

    def report(self, error: object, _message: object) -> None:
        self.num_left -= 1
        if error is not None:
            self.failure = str(error)


def producer_properties(config: KafkaConfig) -> dict[str, Any]:
    """librdkafka's properties of a producer that keeps order and makes no duplicates within its life. Raises ConfigError."""
    return client_properties(config) | {
        "enable.idempotence": True,
        "acks": "all",
        "compression.type": "lz4",
        "linger.ms": 5,
        "message.timeout.ms": int(DELIVERY_S * 1000),
        "queue.buffering.max.messages": 100_000,
    }


def client_properties(config: KafkaConfig) -> dict[str, Any]:
    """Where the cluster is and how a client proves itself. Raises ConfigError."""
    protocol = ("SASL_" if config.user else "") + ("SSL" if config.tls else "PLAINTEXT")
    found: dict[str, Any] = {"bootstrap.servers": ",".join(config.brokers), "client.id": "headrace", "security.protocol": protocol}
    found["log_level"] = CRITICAL  # a line for each attempt at each broker otherwise; what fails is logged by `shipper`
    if config.user:
        password = read_token("usage.kafka.password_file", config.password_file)
        found |= {"sasl.mechanism": config.mechanism, "sasl.username": config.user, "sasl.password": password}
    if config.ca_file:
        found["ssl.ca.location"] = config.ca_file
    if config.certificate_file:
        check_private_file("usage.kafka.key_file", config.key_file)
        found |= {"ssl.certificate.location": config.certificate_file, "ssl.key.location": config.key_file}
    return found


def kafka_package() -> Any:
    """The module confluent_kafka. Raises ConfigError where it is not installed."""
    try:
        import confluent_kafka
    except ImportError:
        raise ConfigError("usage.kafka", "needs the package confluent-kafka", "pip install 'headrace[kafka]'") from None
    return confluent_kafka
