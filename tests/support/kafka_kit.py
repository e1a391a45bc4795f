"""A Kafka cluster of the tests' own: librdkafka's mock brokers, in a process of its own, so that they can be stopped and go on.

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
    """librdkafka as the package brings it."""
    spec = importlib.util.find_spec("confluent_kafka")
    assert spec is not None, NO_PACKAGE
    assert spec.origin is not None
    [path] = (Path(spec.origin).parents[1] / "confluent_kafka.libs").glob("librdkafka-*.so*")
    import confluent_kafka  # loads what the library needs beside it  # noqa: F401

    return ctypes.CDLL(str(path))


def main(topic: str, num_partitions: int) -> None:
    kafka = library()
    kafka.rd_kafka_conf_new.restype = kafka.rd_kafka_new.restype = kafka.rd_kafka_mock_cluster_new.restype = ctypes.c_void_p
    kafka.rd_kafka_mock_cluster_bootstraps.restype = ctypes.c_char_p
    reason = ctypes.create_string_buffer(512)
    handle = kafka.rd_kafka_new(PRODUCER, ctypes.c_void_p(kafka.rd_kafka_conf_new()), reason, len(reason))
    assert handle, reason.value
    cluster = kafka.rd_kafka_mock_cluster_new(ctypes.c_void_p(handle), 3)
    kafka.rd_kafka_mock_group_initial_rebalance_delay_ms(ctypes.c_void_p(cluster), REBALANCE_MS)
    kafka.rd_kafka_mock_topic_create(ctypes.c_void_p(cluster), topic.encode(), num_partitions, 3)
    print(kafka.rd_kafka_mock_cluster_bootstraps(ctypes.c_void_p(cluster)).decode(), flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
