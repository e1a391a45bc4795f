"""Tests a file of librdkafka's properties: what of it is read, and that no error shows a secret."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.core.errors import ConfigError
from headrace.gateway.ledger.config import KafkaConfig, read_properties

pytestmark = pytest.mark.pure

SECRET = "open-sesame"
SASL = f"sasl.mechanism=PLAIN\nsasl.username=ledger\nsasl.password={SECRET}\n"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Closed to other users, and empty."""
    found = tmp_path / "kafka.properties"
    found.touch(0o600)
    return found


def read(file: Path) -> dict[str, str]:
    return read_properties("usage.kafka.properties_file", str(file))


def refused(file: Path, text: str) -> str:
    """The error about a file with this text, which holds SECRET."""
    assert SECRET in text
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read(file)
    assert SECRET not in str(caught.value)
    assert caught.value.__cause__ is None
    assert caught.value.where == "usage.kafka.properties_file"
    return str(caught.value)


def test_a_file_is_read_as_kcat_reads_it(file: Path, tmp_path: Path) -> None:
    authorities = tmp_path / "kafka ca.pem"
    authorities.touch()
    file.write_text(
        f"# of the platform team\n\nsecurity.protocol=SASL_SSL\n  ssl.ca.location = {authorities}\t\r\n"
        "sasl.mechanisms=SCRAM-SHA-256\nsasl.username=ledger\n #sasl.password=old\nsasl.password=#open=sesame\n"
    )
    assert read(file) == {
        "security.protocol": "SASL_SSL",
        "ssl.ca.location": str(authorities),
        "sasl.mechanism": "SCRAM-SHA-256",
        "sasl.username": "ledger",
        "sasl.password": "#open=sesame",
    }


@pytest.mark.parametrize(
    "name",
    [
        "plugin.library.paths",  # loads code
        "ssl.engine.location",
        "ssl.engine.id",
        "ssl.providers",
        "sasl.kerberos.kinit.cmd",  # runs a command
        "enable.ssl.certificate.verification",  # turns verification off
        "enable.sasl.oauthbearer.unsecure.jwt",
        "sasl.oauthbearer.token.endpoint.url",  # sends a secret elsewhere
        "bootstrap.servers",
        "metadata.broker.list",
        "debug",  # logs what is sent
        "ssl.ca.locations",
        "Security.Protocol",
        "ssl_key",
    ],
)
def test_a_property_that_is_not_on_the_list_is_refused_with_the_list(file: Path, name: str) -> None:
    message = refused(file, f"security.protocol=SASL_SSL\n{SASL}{name}=false\n")
    assert "line 5" in message
    assert "security.protocol, ssl.endpoint.identification.algorithm, sasl.mechanism," in message
    assert ("." not in name or name != name.lower()) or f"({name})" in message


@pytest.mark.parametrize(
    ("line", "error"),
    [
        ("ssl.endpoint.identification.algorithm=none", "not one of HTTPS"),
        ("ssl.endpoint.identification.algorithm=", "not one of HTTPS"),
        ("sasl.mechanism=GSSAPI", "not one of PLAIN, SCRAM-SHA-256, SCRAM-SHA-512"),
        ("sasl.mechanisms=OAUTHBEARER", "not one of PLAIN"),
        ("sasl.mechanism=PLAIN,GSSAPI", "not one of PLAIN"),
        ("security.protocol=TLS", "not one of PLAINTEXT, SSL, SASL_PLAINTEXT, SASL_SSL"),
        ("sasl.username=", "sasl.username is empty"),
    ],
)
def test_a_value_that_is_not_taken_is_refused_by_its_name(file: Path, line: str, error: str) -> None:
    assert error in refused(file, f"security.protocol=SASL_SSL\n{SASL}{line}\n")


@pytest.mark.parametrize("text", [SASL, f"ssl.key.password={SECRET}"])
def test_a_missing_protocol_would_leave_the_rest_without_effect_and_is_refused(file: Path, text: str) -> None:
    assert "security.protocol is missing" in refused(file, text)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        (f"security.protocol=PLAINTEXT\n{SASL}", "sasl.mechanism has no effect without SASL in security.protocol"),
        (f"security.protocol=ssl\nsasl.password={SECRET}", "sasl.password has no effect without SASL in security.protocol"),
        (f"security.protocol=PLAINTEXT\nssl.key.password={SECRET}", "ssl.key.password has no effect without SSL in security.protocol"),
        (f"security.protocol=SASL_PLAINTEXT\n{SASL}ssl.ca.location=/ca", "ssl.ca.location has no effect without SSL in security"),
        (f"security.protocol=SSL\nssl.certificate.location=/{SECRET}", "ssl.certificate.location has no effect without ssl.key.location"),
        (f"security.protocol=SSL\nssl.key.location=/{SECRET}", "ssl.key.location has no effect without ssl.certificate.location"),
        (f"security.protocol=SASL_SSL\n{SASL}ssl.key.password=x", "ssl.key.password has no effect without ssl.key.location"),
        (f"security.protocol=SASL_SSL\n{SASL}security.protocol=SASL_PLAINTEXT", "line 5: security.protocol is given twice"),
        (f"security.protocol=SASL_SSL\n{SASL}sasl.mechanisms=PLAIN", "line 5: sasl.mechanism is given twice"),
    ],
)
def test_a_property_that_would_be_ignored_is_refused_by_its_name(file: Path, text: str, error: str) -> None:
    """Each was read and not used: records were sent without the password, the TLS or the certificate that the file names."""
    assert error in refused(file, text)


def test_a_user_needs_a_mechanism_a_name_and_a_password(file: Path) -> None:
    """librdkafka's own mechanism is GSSAPI, for which it runs a command."""
    lines = SASL.splitlines()
    for left_out in lines:
        rest = "\n".join(line for line in lines if line != left_out)
        message = refused(file, f"security.protocol=SASL_SSL\n{rest}\n# {SECRET}")
        assert f"{left_out.partition('=')[0]} is missing" in message


@pytest.mark.parametrize(
    "line",
    [SECRET, f"{SECRET}=", f"={SECRET}", f"sasl.password: {SECRET}", f"sasl.password {SECRET}=x", f"sasl.pasword={SECRET}"],
)
def test_a_line_that_is_no_property_is_not_shown(file: Path, line: str) -> None:
    assert "line 2" in refused(file, f"client.id=x\n{line}")


@pytest.mark.parametrize("line", ["open.sesame", "open.sesame: x"])
def test_a_line_that_looks_like_a_property_without_a_value_is_not_shown(file: Path, line: str) -> None:
    file.write_text(line)
    with pytest.raises(ConfigError, match="line 1 is no property") as caught:
        read(file)
    assert "sesame" not in str(caught.value)


def test_a_file_that_is_not_text_is_not_shown(file: Path) -> None:
    file.write_bytes(f"sasl.password={SECRET}\xff".encode("latin-1"))
    with pytest.raises(ConfigError, match="cannot be read as UTF-8 text") as caught:
        read(file)
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o602])
def test_a_file_that_other_users_may_read_or_write_is_refused(file: Path, mode: int) -> None:
    file.write_text("security.protocol=PLAINTEXT")
    file.chmod(mode)
    with pytest.raises(ConfigError, match=r"usage\.kafka\.properties_file: .*kafka\.properties is open to other users.*chmod 600"):
        read(file)


def test_a_key_that_other_users_may_read_is_refused(file: Path, tmp_path: Path) -> None:
    key = tmp_path / "tls.key"
    key.write_text("a key")
    key.chmod(0o644)
    file.write_text(f"security.protocol=SSL\nssl.certificate.location={key}\nssl.key.location={key}\n")
    with pytest.raises(ConfigError, match=r"tls\.key is open to other users"):
        read(file)
    key.chmod(0o600)
    assert read(file)["ssl.key.location"] == str(key)


def test_a_file_that_is_not_there_is_named_with_a_remedy(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"usage\.kafka\.properties_file: .*none cannot be read \(No such file.*\)\. The user that runs"):
        read(tmp_path / "none")
    with pytest.raises(ConfigError, match="is not a file"):
        read(tmp_path)


@pytest.mark.parametrize("name", ["ssl.ca.location", "ssl.certificate.location", "ssl.key.location"])
def test_a_file_that_the_properties_name_and_that_cannot_be_read_is_named_with_its_property(file: Path, tmp_path: Path, name: str) -> None:
    """The check of a configuration passed, and the gateway then ended with an error of librdkafka that named no file."""
    names = ("ssl.ca.location", "ssl.certificate.location", "ssl.key.location")
    for each in names:
        (tmp_path / each).touch(0o600)
    file.write_text("security.protocol=SSL\n" + "".join(f"{each}={tmp_path / each}\n" for each in names))
    assert read(file)[name] == str(tmp_path / name)
    (tmp_path / name).unlink()
    with pytest.raises(ConfigError, match=rf"kafka\.properties: {name}: {tmp_path / name} cannot be read") as caught:
        read(file)
    assert caught.value.where == "usage.kafka.properties_file"


def test_a_configuration_shows_none_of_the_files_values(file: Path) -> None:
    file.write_text(f"security.protocol=SASL_SSL\n{SASL}")
    config = KafkaConfig(brokers=("kafka.example:9092",), properties_file=str(file)).checked("usage.kafka")
    assert config.properties()["sasl.password"] == SECRET
    assert SECRET not in repr(config)
