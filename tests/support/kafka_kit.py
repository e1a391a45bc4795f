"""Runs a Kafka cluster of the tests' own, of librdkafka's mock brokers.

`MockBrokers` are threads of this process. `mock_cluster` is a process of its own, so that the brokers can be stopped and go on.

python kafka_kit.py TOPIC NUM_PARTITIONS    prints the brokers' addresses, and serves until its standard input closes
"""

from __future__ import annotations

import ctypes
import importlib.util
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

NO_PACKAGE = "The package confluent-kafka is not installed: pip install 'headrace[kafka]'"
TOPIC = "usage-test"
PRODUCER = 0
REBALANCE_MS = 100
"""The cluster waits this long for more members of a new consumer group; by default 3 s, longer than a member's session may be."""


@dataclass
class MockCluster:
    process: subprocess.Popen[str]
    brokers: tuple[str, ...]

    def hang(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self.process.send_signal(signal.SIGCONT)


@contextmanager
def mock_cluster(topic: str = TOPIC, num_partitions: int = 3) -> Iterator[MockCluster]:
    command = [sys.executable, str(Path(__file__)), topic, str(num_partitions)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        brokers = process.stdout.readline().strip()
        assert brokers, "the mock cluster did not start"
        yield MockCluster(process, tuple(brokers.split(",")))
    finally:
        process.send_signal(signal.SIGCONT)
        process.kill()
        process.communicate()


def library() -> ctypes.CDLL:
    spec = importlib.util.find_spec("confluent_kafka")
    assert spec is not None, NO_PACKAGE
    assert spec.origin is not None
    [path] = (Path(spec.origin).parents[1] / "confluent_kafka.libs").glob("librdkafka-*.so*")
    import confluent_kafka  # loads what the library needs beside it  # noqa: F401

    return ctypes.CDLL(str(path))


class MockBrokers:
    """Three brokers, as threads. brokers: their addresses"""

    NUM_BROKERS = 3

    def __init__(self, topic: str, num_partitions: int) -> None:
        self._kafka = kafka = library()
        kafka.rd_kafka_conf_new.restype = kafka.rd_kafka_new.restype = kafka.rd_kafka_mock_cluster_new.restype = ctypes.c_void_p
        kafka.rd_kafka_mock_cluster_bootstraps.restype = ctypes.c_char_p
        reason = ctypes.create_string_buffer(512)
        handle = kafka.rd_kafka_new(PRODUCER, ctypes.c_void_p(kafka.rd_kafka_conf_new()), reason, len(reason))
        assert handle, reason.value
        self._handle = ctypes.c_void_p(handle)
        self._cluster = ctypes.c_void_p(kafka.rd_kafka_mock_cluster_new(self._handle, self.NUM_BROKERS))
        kafka.rd_kafka_mock_group_initial_rebalance_delay_ms(self._cluster, REBALANCE_MS)
        kafka.rd_kafka_mock_topic_create(self._cluster, topic.encode(), num_partitions, self.NUM_BROKERS)
        self.brokers = tuple(kafka.rd_kafka_mock_cluster_bootstraps(self._cluster).decode().split(","))

    def go_down(self) -> None:
        """Drop all connections, and take none until `come_up`."""
        for number in range(1, self.NUM_BROKERS + 1):
            self._kafka.rd_kafka_mock_broker_set_down(self._cluster, number)

    def come_up(self) -> None:
        for number in range(1, self.NUM_BROKERS + 1):
            self._kafka.rd_kafka_mock_broker_set_up(self._cluster, number)

    def close(self) -> None:
        self._kafka.rd_kafka_mock_cluster_destroy(self._cluster)
        self._kafka.rd_kafka_destroy(self._handle)


@contextmanager
def mock_brokers(topic: str = TOPIC, num_partitions: int = 3) -> Iterator[MockBrokers]:
    found = MockBrokers(topic, num_partitions)
    try:
        yield found
    finally:
        found.close()


def main(topic: str, num_partitions: int) -> None:
    print(",".join(MockBrokers(topic, num_partitions).brokers), flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
