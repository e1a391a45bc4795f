"""From the Kafka topic to ClickHouse: what `headrace log archive` runs.

A batch's offsets are committed after ClickHouse has answered, so a crash in between has it inserted again, which `ReplacingMergeTree` makes
one row per request.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence

from headrace.core.counted import counted
from headrace.core.errors import ConfigError
from headrace.gateway.ledger.clickhouse import ClickHouseSink
from headrace.gateway.ledger.config import UsageConfig
from headrace.gateway.ledger.kafka import client_properties, kafka_package
from headrace.gateway.ledger.sink import SinkFailed

log = logging.getLogger("headrace.usage")

GROUP = "headrace-archive"
"""The consumer group, whose members share the topic's partitions: any number of archives may run."""

MAX_MESSAGES = 10_000
FILL_S = 1.0
"""Messages of one insert, and seconds that it waits for them: ClickHouse wants few large inserts."""

FIRST_RETRY_S, LAST_RETRY_S = 0.2, 10.0


class Archive:
    """num_archived: records that ClickHouse has, since this began"""

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
        self._consumer = confluent.Consumer(client_properties(config.kafka) | properties, logger=log)
        self._consumer.subscribe([config.kafka.topic])

    def stop(self) -> None:
        """Have `run` return soon. From any thread, or a signal handler."""
        self._stopping.set()

    def run(self, *, until_end: bool = False) -> None:
        """Until it is stopped; with `until_end` until every record has been archived that the topic has. Raises SinkFailed."""
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
        """Records that came, and whether every partition was read to its end."""
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
        """Have the records not read again. Where that fails they are, and are one row each all the same."""
        try:
            self._consumer.commit(asynchronous=False)
        except self._exception as error:
            log.warning("usage: kafka: %s", error.args[0])

    def _insert(self, payloads: Sequence[bytes]) -> None:
        """Until ClickHouse has them. Raises SinkFailed once it is stopped."""
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
