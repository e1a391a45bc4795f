"""Kills `headrace log archive` between reading records from Kafka and committing them, again and again.

Each process runs the real `Archive` with small batches. After some of these it stops at one of two places, right after a batch was read or
right after ClickHouse has answered, and is killed (SIGKILL) there, so that the batch is read again by its successor. The last one runs to
the topic's end, while ClickHouse hangs for two seconds. `bench.storms.usage_kills` fills the topic, and says what this is part of.
"""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import Any
from unittest.mock import patch

from headrace.core.strict_decode import decode, plain
from headrace.gateway.ledger import kafka
from headrace.gateway.ledger.clickhouse import ClickHouseSink
from headrace.gateway.ledger.config import ClickHouseConfig, KafkaConfig, UsageConfig
from headrace.gateway.ledger.kafka import Archive, client_properties

BATCH_RECORDS = 500
MAX_BATCHES = 3
"""Records of each insert of a process that will be killed, and the batches of which the last one is the one it is killed at."""

SESSION_MS = 3000
"""A killed consumer's partitions are free after this time; librdkafka's default of 45 s would be the storm's length."""

READ, INSERTED = "read", "inserted"


class HaltedArchive(Archive):
    """Stops for good at its `halt_batch`-th batch: before the insert (READ), or between the insert and the commit (INSERTED)."""

    def __init__(self, config: UsageConfig, place: str, halt_batch: int) -> None:
        super().__init__(config)
        self._place = place
        self._num_left = halt_batch

    def _insert(self, payloads: Sequence[bytes]) -> None:
        self._num_left -= 1
        self._halt(READ)
        super()._insert(payloads)
        self._halt(INSERTED)

    def _halt(self, place: str) -> None:
        if self._num_left == 0 and self._place == place:
            print(place, flush=True)
            signal.pause()


def free_partitions_soon() -> None:
    """Give the archives of this process sessions of SESSION_MS."""

    def properties(config: KafkaConfig) -> dict[str, Any]:
        return client_properties(config) | {"session.timeout.ms": SESSION_MS, "heartbeat.interval.ms": SESSION_MS // 4}

    patch("headrace.gateway.ledger.kafka.client_properties", properties).start()


def run_child(place: str, halt_batch: int, config: Mapping[str, Any]) -> None:
    """In a process of its own, until it is killed, or to the topic's end."""
    kafka.MAX_MESSAGES = BATCH_RECORDS
    free_partitions_soon()
    HaltedArchive(decode(UsageConfig, config), place, halt_batch).run(until_end=True)


def archived(server: Any, config: Mapping[str, Any], expected: set[str], num_kills: int) -> dict[str, object]:
    """Archive the topic; what ClickHouse lacks then, and what FINAL shows twice. server: a `clickhouse_kit.ClickHouseServer`"""
    whole = {**config, "clickhouse": plain(server.config)}
    chance = random.Random(0)
    kills = [_killed(whole, chance.choice((READ, INSERTED)), chance.randint(1, MAX_BATCHES)) for _ in range(num_kills)]
    free_partitions_soon()
    server.hang()
    threading.Timer(2.0, server.go_on).start()
    Archive(decode(UsageConfig, whole)).run(until_end=True)
    found = ids_in_clickhouse(server.config)
    return {
        "archives_killed": {place: kills.count(place) for place in (READ, INSERTED)},
        "lost": len(expected - set(found)),
        "duplicates": len(found) - len(set(found)),
    }


def _killed(config: Mapping[str, Any], place: str, halt_batch: int) -> str:
    """Where an archive was when it was killed; empty: it came to the topic's end before."""
    words = [sys.executable, "-m", "bench.storms.usage_archive", place, str(halt_batch), json.dumps(config)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        halted_at = process.stdout.readline().strip()
        process.kill()
    return halted_at


def ids_in_clickhouse(config: ClickHouseConfig) -> list[str]:
    """Of every row, as FINAL shows them."""
    sink = ClickHouseSink(config)
    try:
        return sink.query(f"SELECT request_id FROM {config.full_table} FINAL FORMAT TabSeparated").decode().split()
    finally:
        sink.close()


if __name__ == "__main__":
    run_child(sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3]))
