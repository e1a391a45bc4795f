"""Kills a process that writes usage records again and again, while its sinks stop and go on, and looks for lost and repeated records.

Each process opens the ledger of one state folder, as a gateway does, writes numbered records, and prints how many are in the spool. It is
killed (SIGKILL) after a random time; the next one finds what it left. Kafka's brokers (librdkafka's mock cluster) hang and go on meanwhile.
With `--clickhouse` the topic is then archived to Debian's ClickHouse by as many archives that are killed (`usage_archive`), and the same is
done with writers that ship to ClickHouse themselves, which hangs and goes on. At the end nothing that was in the spool may be missing at a
sink, and no request may be there twice.

    PYTHONPATH=tests/support python -m bench.storms.usage_kills --kills 50 --down-s 120 [--clickhouse] [--record]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from bench.storms.common import RESULTS
from bench.storms.usage_archive import archived, ids_in_clickhouse
from headrace.core.strict_decode import decode, plain
from headrace.gateway.ledger.config import UsageConfig
from headrace.gateway.ledger.ledger import open_ledger
from headrace.gateway.ledger.record import UsageRecord
from headrace.gateway.ledger.usage_db import FILE
from headrace.lab.environment import environment
from headrace.lab.report import write_json

RUN_RECORDS = 1_000_000
"""Numbers of one process's records begin at its own number times this."""

BURST, BURST_S = 20, 0.01
DRAIN_S = 120.0


class Interruptible(Protocol):
    """A sink's server."""

    def hang(self) -> None: ...
    def go_on(self) -> None: ...


@dataclass
class KillOutcome:
    """
    num_spooled  records that were known to be in the spool when their process died, by process
    num_hung     processes during whose life a server hung
    """

    num_spooled: list[int] = field(default_factory=list)
    num_hung: int = 0

    @property
    def expected(self) -> set[str]:
        return {request_id(run * RUN_RECORDS + number) for run, count in enumerate(self.num_spooled) for number in range(count)}


def request_id(number: int) -> str:
    return f"{number:024x}"


def record(number: int) -> UsageRecord:
    return UsageRecord(
        request_id=request_id(number),
        time_ms=int(time.time() * 1000),
        tenant=f"tenant-{number % 7}",
        model="storm",
        outcome="completed",
        prompt_tokens=100,
        cached_tokens=0,
        completion_tokens=10,
        cost_nanos=1,
        ttft_ms=1.5,
    )


def write_records(folder: str, config: UsageConfig, run: int | None) -> None:
    """In a process of its own, until it is killed. run: its number; None: ship what is left, and end."""
    ledger = open_ledger(folder, config, time.time)
    assert ledger is not None
    number = 0
    deadline = time.monotonic() + DRAIN_S
    while run is not None:
        for _ in range(BURST):
            ledger.write(record(run * RUN_RECORDS + number))
            number += 1
        print(ledger.reading().num_recorded, flush=True)
        time.sleep(BURST_S)
    time.sleep(2.0)  # segments without an owner are adopted
    while any(sink.waiting_bytes for sink in ledger.reading().sinks.values()):
        assert time.monotonic() < deadline, "not everything was shipped in time"
        time.sleep(0.1)
    asyncio.run(ledger.close())


def command(folder: Path, config: Mapping[str, Any], run: int | None) -> list[str]:
    words = ["" if run is None else str(run), str(folder), json.dumps(config)]
    return [sys.executable, "-m", "bench.storms.usage_kills", "--child", *words]


def storm(
    folder: Path, config: Mapping[str, Any], num_kills: int, servers: Sequence[Interruptible] = (), *, down_s: float = 0.0, seed: int = 0
) -> KillOutcome:
    """Kill processes that write; then ship the rest.

    folder   the state folder, which is made
    config   of `usage`, as plain data
    servers  hang during a third of the processes
    down_s   and during the first one, which lives this long
    """
    folder.mkdir(exist_ok=True)
    outcome, chance = KillOutcome(), random.Random(seed)
    if down_s:
        for server in servers:
            server.hang()
        outcome.num_hung += bool(servers)
        outcome.num_spooled.append(_killed_after(command(folder, config, 0), down_s))
        for server in servers:
            server.go_on()
    for run in range(len(outcome.num_spooled), num_kills):
        hanging = [server for server in servers if chance.random() < 1 / 3]
        for server in hanging:
            server.hang()
        outcome.num_hung += bool(hanging)
        outcome.num_spooled.append(_killed_after(command(folder, config, run), chance.uniform(0.05, 1.2)))
        for server in hanging:
            server.go_on()
    subprocess.run(command(folder, config, None), check=True, timeout=2 * DRAIN_S)
    return outcome


def _killed_after(words: list[str], seconds: float) -> int:
    """Start a process, kill it so long after its first line, and return the number in its last line."""
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        last = process.stdout.readline()
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            last = process.stdout.readline()
        process.kill()
        rest = [line for line in process.stdout.read().splitlines() if line]
    return int(rest[-1] if len(rest) > 1 else last)  # the last line may be torn: one before it is not


def ids_in_sql(folder: Path) -> list[str]:
    import sqlite3

    connection = sqlite3.connect(folder / FILE)
    try:
        return [row[0] for row in connection.execute("SELECT request_id FROM usage")]
    finally:
        connection.close()


def ids_in_topic(config: UsageConfig) -> list[str]:
    """Keys of every message of the topic."""
    from confluent_kafka import OFFSET_BEGINNING, Consumer, TopicPartition

    from headrace.gateway.ledger.kafka import client_properties

    assert config.kafka is not None
    topic = config.kafka.topic
    consumer = Consumer(client_properties(config.kafka) | {"group.id": "storm", "enable.auto.commit": False})
    partitions = consumer.list_topics(topic, 30.0).topics[topic].partitions
    consumer.assign([TopicPartition(topic, number, OFFSET_BEGINNING) for number in partitions])
    ends = [consumer.get_watermark_offsets(TopicPartition(topic, number), 30.0) for number in partitions]
    num_left = sum(high - low for low, high in ends)
    found: list[str] = []
    while len(found) < num_left:
        found += [
            message.key().decode() for message in consumer.consume(min(10_000, num_left - len(found)), 1.0) if message.error() is None
        ]
    consumer.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--down-s", type=float, default=0.0, help="seconds for which each sink hangs while records come")
    parser.add_argument("--clickhouse", action="store_true", help="ship to Debian's ClickHouse, too, by archives and straight")
    parser.add_argument("--record", action="store_true", help=f"write the result to {RESULTS}")
    parser.add_argument("--child", nargs=3, metavar=("RUN", "FOLDER", "CONFIG"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child is not None:
        run, folder, config = options.child
        write_records(folder, decode(UsageConfig, json.loads(config)).checked(), int(run) if run else None)
        return
    result = run_storm(options.kills, down_s=options.down_s, with_clickhouse=options.clickhouse)
    print(json.dumps(result, indent=2))
    if options.record:
        found = {"environment": asdict(environment()), "arguments": vars(options), **result}
        write_json(RESULTS / "usage-kills.json", found)


def run_storm(num_kills: int, *, down_s: float, with_clickhouse: bool) -> dict[str, object]:
    """What was lost and what is there twice, by sink: both are to be 0, but for messages of the topic, which have keys."""
    from clickhouse_kit import ClickHouseServer
    from kafka_kit import TOPIC, mock_cluster

    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="headrace-usage-")))
        cluster = stack.enter_context(mock_cluster())
        config: dict[str, Any] = {"kafka": {"brokers": list(cluster.brokers), "topic": TOPIC}}
        outcome = storm(folder / "kafka", config, num_kills, [cluster], down_s=down_s)
        expected = outcome.expected
        in_topic = ids_in_topic(decode(UsageConfig, config))
        result: dict[str, object] = {
            "kills": num_kills,
            "down_s": down_s,
            "spooled": len(expected),
            "sql": _compared(expected, ids_in_sql(folder / "kafka")),
            "kafka": {"lost": len(expected - set(in_topic)), "messages_sent_again": len(in_topic) - len(set(in_topic))},
        }
        if with_clickhouse:
            server = ClickHouseServer(folder / "clickhouse")
            server.start()
            stack.callback(server.stop)
            result["clickhouse"] = archived(server, config, expected, num_kills)
            result["clickhouse_without_kafka"] = _straight(folder / "straight", server, num_kills, down_s)
        return result


def _straight(folder: Path, server: Any, num_kills: int, down_s: float) -> dict[str, object]:
    """The same with writers that ship to ClickHouse themselves, into a table of its own."""
    config = replace(server.config, table="straight")
    outcome = storm(folder, {"clickhouse": plain(config)}, num_kills, [server], down_s=down_s, seed=1)
    expected = outcome.expected
    found = _compared(expected, ids_in_clickhouse(config))
    return {"spooled": len(expected), **found, "sql": _compared(expected, ids_in_sql(folder))}


def _compared(expected: set[str], found: Sequence[str]) -> dict[str, int]:
    return {"lost": len(expected - set(found)), "duplicates": len(found) - len(set(found))}


if __name__ == "__main__":
    main()
