"""Tests what of `usage` is refused before anything starts: above all, records sent to another machine without encryption."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headrace.core.errors import ConfigError
from headrace.core.strict_decode import decode
from headrace.gateway.ledger.config import KafkaConfig, UsageConfig
from headrace.gateway.ledger.kafka import client_properties
from headrace.gateway.stores.config import InsecureStore, StoreConfig

pytestmark = pytest.mark.pure

SECRET = {"password_file": "/run/secret"}


def config(data: dict[str, Any]) -> UsageConfig:
    return decode(UsageConfig, data, "usage").checked()


@pytest.mark.parametrize(
    ("data", "error"),
    [
        ({"retention_days": 0}, "usage.retention_days"),
        ({"kafka": {"brokers": []}}, "usage.kafka.brokers"),
        ({"kafka": {"brokers": ["localhost"]}}, r"usage.kafka.brokers\[0\].*HOST:PORT"),
        ({"kafka": {"brokers": ["http://localhost:9092"]}}, "HOST:PORT"),
        ({"kafka": {"brokers": ["localhost:9092"], "topic": "a b"}}, "usage.kafka.topic"),
        ({"clickhouse": {"url": "localhost:8123"}}, "usage.clickhouse.url"),
        ({"clickhouse": {"url": "http://localhost:8123/?x=1"}}, "usage.clickhouse.url"),
        ({"clickhouse": {"url": "http://u:p@localhost:8123"}}, "holds a password"),
        ({"clickhouse": {"url": "http://localhost:8123", "table": "usage; DROP"}}, "usage.clickhouse.table"),
        ({"clickhouse": {"url": "http://localhost:8123", "table": "a.b.c"}}, "usage.clickhouse.table.*DATABASE.TABLE"),
        ({"clickhouse": {"url": "http://localhost:8123", "table": ".usage"}}, "usage.clickhouse.table"),
        ({"clickhouse": {"url": "http://localhost:8123", "password_file": "/p"}}, "usage.clickhouse.url.*has no user"),
        ({"clickhouse": {"url": "http://u@localhost:8123"}}, "usage.clickhouse.password_file.*has no password"),
    ],
)
def test_a_fault_is_named(data: dict[str, Any], error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        config(data)


@pytest.mark.parametrize(
    "section",
    [
        {"kafka": {"brokers": ["10.0.0.7:9092"]}},
        {"kafka": {"brokers": ["localhost:9092", "kafka.example:9092"]}},
        {"clickhouse": {"url": "http://10.0.0.7:8123"}},
        {"clickhouse": {"url": "http://ledger@clickhouse.example:8123", **SECRET}},
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
        {"clickhouse": {"url": "http://localhost:8123"}},
        {"clickhouse": {"url": "https://ledger@clickhouse.example:8443/", **SECRET}},
    ],
)
def test_what_is_safe_is_taken(section: dict[str, Any]) -> None:
    config(section)


SASL = "sasl.mechanism=PLAIN\nsasl.username=ledger\nsasl.password=open-sesame\n"


@pytest.mark.parametrize(
    ("text", "is_safe"),
    [
        ("security.protocol=PLAINTEXT", False),
        (f"security.protocol=SASL_PLAINTEXT\n{SASL}", False),
        ("security.protocol=SSL", False),
        ("security.protocol=SSL\nssl.certificate.location={key}\nssl.key.location={key}", True),
        (f"security.protocol=SASL_SSL\n{SASL}", True),
        (f"security.protocol=sasl_ssl\n{SASL}", True),
    ],
)
def test_brokers_on_another_machine_want_tls_and_a_user_or_a_certificate_in_the_file(tmp_path: Path, text: str, is_safe: bool) -> None:
    key, file = tmp_path / "key", tmp_path / "kafka.properties"
    for path, content in ((key, "a key"), (file, text.replace("{key}", str(key)))):
        path.write_text(content)
        path.chmod(0o600)
    far = {"brokers": ["localhost:9092", "kafka.example:9092"], "properties_file": str(file)}
    if is_safe:
        kafka_of(far).properties()
    else:
        with pytest.raises(InsecureStore, match=r"usage\.kafka\.brokers\[1\].*SASL_SSL.*allow_insecure"):
            kafka_of(far).properties()
    kafka_of({**far, "allow_insecure": True}).properties()
    kafka_of({**far, "brokers": ["localhost:9092"]}).properties()


def test_nothing_is_sent_to_another_machine_in_the_clear_whatever_was_checked_before() -> None:
    with pytest.raises(InsecureStore):
        client_properties(KafkaConfig(brokers=("kafka.example:9092",)))


def kafka_of(data: dict[str, Any]) -> KafkaConfig:
    found = config({"kafka": data}).kafka
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("table", "full"),
    [({}, "default.headrace_usage"), ({"table": "usage"}, "default.usage"), ({"table": "ledger.usage"}, "ledger.usage")],
)
def test_a_table_without_a_database_is_in_the_one_named_default(table: dict[str, str], full: str) -> None:
    found = config({"clickhouse": {"url": "http://localhost:8123", **table}}).clickhouse
    assert found is not None
    assert found.full_table == full


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
