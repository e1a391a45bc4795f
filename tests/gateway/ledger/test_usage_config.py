"""What of `usage` is refused before anything starts: above all, records on their way to another machine in the clear."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.core.errors import ConfigError
from headrace.core.strict_decode import decode
from headrace.gateway.ledger.config import UsageConfig
from headrace.gateway.stores.config import InsecureStore, StoreConfig

pytestmark = pytest.mark.pure

SECRET = {"user": "ledger", "password_file": "/run/secret"}


def config(data: dict[str, Any]) -> UsageConfig:
    return decode(UsageConfig, data, "usage").checked()


@pytest.mark.parametrize(
    ("data", "error"),
    [
        ({"retention_days": 0}, "usage.retention_days"),
        ({"fsync": "sometimes"}, "usage.fsync.*never, segment, write"),
        ({"kafka": {"brokers": []}}, "usage.kafka.brokers"),
        ({"kafka": {"brokers": ["localhost"]}}, r"usage.kafka.brokers\[0\].*HOST:PORT"),
        ({"kafka": {"brokers": ["http://localhost:9092"]}}, "HOST:PORT"),
        ({"kafka": {"brokers": ["localhost:9092"], "topic": "a b"}}, "usage.kafka.topic"),
        ({"kafka": {"brokers": ["localhost:9092"], "mechanism": "GSSAPI"}}, "usage.kafka.mechanism"),
        ({"kafka": {"brokers": ["localhost:9092"], "user": "x"}}, "usage.kafka.user.*without password_file"),
        ({"kafka": {"brokers": ["localhost:9092"], "tls": True, "key_file": "/k"}}, "usage.kafka.key_file.*without certificate_file"),
        ({"kafka": {"brokers": ["localhost:9092"], "ca_file": "/ca"}}, "usage.kafka.ca_file.*without tls"),
        ({"clickhouse": {"url": "localhost:8123"}}, "usage.clickhouse.url"),
        ({"clickhouse": {"url": "http://localhost:8123/?x=1"}}, "usage.clickhouse.url"),
        ({"clickhouse": {"url": "http://u:p@localhost:8123"}}, "holds a user or a password"),
        ({"clickhouse": {"url": "http://localhost:8123", "table": "usage; DROP"}}, "usage.clickhouse.table"),
        ({"clickhouse": {"url": "http://localhost:8123", "ca_file": "/ca"}}, "usage.clickhouse.ca_file.*without an https"),
        ({"clickhouse": {"url": "http://localhost:8123", "password_file": "/p"}}, "without user"),
    ],
)
def test_a_fault_is_named(data: dict[str, Any], error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        config(data)


@pytest.mark.parametrize(
    "section",
    [
        {"kafka": {"brokers": ["10.0.0.7:9092"]}},
        {"kafka": {"brokers": ["10.0.0.7:9092"], "tls": True}},
        {"kafka": {"brokers": ["10.0.0.7:9092"], **SECRET}},
        {"kafka": {"brokers": ["localhost:9092", "kafka.example:9092"]}},
        {"clickhouse": {"url": "http://10.0.0.7:8123"}},
        {"clickhouse": {"url": "http://clickhouse.example:8123", **SECRET}},
        {"clickhouse": {"url": "https://clickhouse.example:8443"}},
    ],
)
def test_a_store_on_another_machine_wants_encryption_and_authentication(section: dict[str, Any]) -> None:
    with pytest.raises(InsecureStore, match="allow_insecure"):
        config(section)
    [(name, data)] = section.items()
    config({name: {**data, "allow_insecure": True}})


@pytest.mark.parametrize(
    "section",
    [
        {"kafka": {"brokers": ["127.0.0.1:9092", "[::1]:9092", "localhost:9092"]}},
        {"kafka": {"brokers": ["kafka.example:9092"], "tls": True, **SECRET}},
        {"kafka": {"brokers": ["kafka.example:9092"], "tls": True, "certificate_file": "/c", "key_file": "/k"}},
        {"clickhouse": {"url": "http://localhost:8123"}},
        {"clickhouse": {"url": "https://clickhouse.example:8443/", **SECRET, "ca_file": "/ca"}},
    ],
)
def test_what_is_safe_is_taken(section: dict[str, Any]) -> None:
    config(section)


@pytest.mark.parametrize(
    ("url", "password_file"),
    [("redis://redis.example/0", "/p"), ("redis://10.0.0.7:6379/0", ""), ("rediss://redis.example/0", "")],
)
def test_redis_on_another_machine_wants_both_too(url: str, password_file: str) -> None:
    with pytest.raises(InsecureStore, match="allow_insecure"):
        StoreConfig(url=url, password_file=password_file).checked()
    StoreConfig(url=url, password_file=password_file, allow_insecure=True).checked()


@pytest.mark.parametrize("url", ["redis://localhost/0", "redis://127.0.0.1:6379/0", "redis://[::1]:6379", "unix:///run/redis.sock"])
def test_redis_of_this_machine_wants_neither(url: str) -> None:
    StoreConfig(url=url).checked()
