"""Tests an end's certificate files: what is refused at start, what is read again, and what a change must not break."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
from tls_kit import LONG_AGO, authority, write_certificates, write_whole

from headrace.core.errors import ConfigError
from headrace.machine.private_files import read_token
from headrace.wire.tls.files import Certificates, TlsFiles, TlsRole, files_in, token_path

pytestmark = pytest.mark.pure

SITE = authority()


def gateway_files(folder: Path) -> TlsFiles:
    return write_certificates(folder, SITE, TlsRole.GATEWAY)


@pytest.mark.parametrize("role", list(TlsRole))
def test_certificates_of_each_role_load(tmp_path: Path, role: TlsRole) -> None:
    loaded = Certificates(write_certificates(tmp_path, SITE, role, "gpu1"), role).current()
    assert loaded.key.startswith(b"-----BEGIN PRIVATE KEY-----")
    assert loaded.certificate.startswith(b"-----BEGIN CERTIFICATE-----")


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o644])
def test_a_key_that_others_may_read_is_refused(tmp_path: Path, mode: int) -> None:
    files = gateway_files(tmp_path)
    os.chmod(files.key, mode)
    with pytest.raises(ConfigError, match=rf"tls_dir: .*tls.key is open to other users \(mode {mode:04o}\)\. chmod 600"):
        Certificates(files, TlsRole.GATEWAY)


@pytest.mark.parametrize("name", ["ca", "certificate", "key"])
def test_a_file_that_is_not_there_is_named(tmp_path: Path, name: str) -> None:
    files = gateway_files(tmp_path)
    os.unlink(getattr(files, name))
    with pytest.raises(ConfigError, match=rf"tls_dir: {getattr(files, name)} cannot be read \(No such file"):
        Certificates(files, TlsRole.GATEWAY)


@pytest.mark.parametrize("name", ["ca", "certificate", "key"])
def test_a_file_that_is_no_pem_is_named(tmp_path: Path, name: str) -> None:
    files = gateway_files(tmp_path)
    write_whole(Path(getattr(files, name)), b"not PEM\n")
    with pytest.raises(ConfigError, match=f"tls_dir: .*{Path(getattr(files, name)).name}"):
        Certificates(files, TlsRole.GATEWAY)


def test_a_key_of_another_certificate_is_refused(tmp_path: Path) -> None:
    files, other = gateway_files(tmp_path / "a"), gateway_files(tmp_path / "b")
    with pytest.raises(ConfigError, match="does not fit"):
        Certificates(TlsFiles(ca=files.ca, certificate=files.certificate, key=other.key), TlsRole.GATEWAY)


@pytest.mark.parametrize("role", list(TlsRole))
def test_a_certificate_of_another_authority_or_role_is_refused_by_its_own_end(tmp_path: Path, role: TlsRole) -> None:
    strange = write_certificates(tmp_path / "a", authority(), role, "gpu1", trusted=SITE)
    with pytest.raises(ConfigError, match=f"not signed by the authority in .* a certificate for the {role}"):
        Certificates(strange, role)
    other_role = TlsRole.GATEWAY if role is TlsRole.ENGINE else TlsRole.ENGINE
    with pytest.raises(ConfigError, match="for another role"):
        Certificates(write_certificates(tmp_path / "b", SITE, other_role, "gpu1"), role)


def test_an_expired_certificate_loads_with_a_warning_since_it_may_be_renewed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    Certificates(write_certificates(tmp_path, SITE, TlsRole.GATEWAY, now=LONG_AGO), TlsRole.GATEWAY)
    assert "tls.crt has expired; other machines refuse it" in caplog.text


def test_a_key_with_a_passphrase_is_refused_without_asking_for_it(tmp_path: Path) -> None:
    from cryptography.hazmat.primitives import serialization

    files = gateway_files(tmp_path)
    key = serialization.load_pem_private_key(Path(files.key).read_bytes(), None)
    encryption = serialization.BestAvailableEncryption(b"secret")
    write_whole(Path(files.key), key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, encryption))
    with pytest.raises(ConfigError, match="no PEM file without passphrase"):
        Certificates(files, TlsRole.GATEWAY)


def test_a_folder_has_the_names_that_cert_manager_writes(tmp_path: Path) -> None:
    assert [Path(path).name for path in files_in(tmp_path).paths] == ["ca.crt", "tls.crt", "tls.key"]


@pytest.mark.parametrize(("token_file", "tls_dir", "path"), [("", "", ""), ("/t", "", "/t"), ("", "/c", "/c/token"), ("/t", "/c", "/t")])
def test_the_token_of_the_folder_counts_where_no_other_is_named(token_file: str, tls_dir: str, path: str) -> None:
    assert token_path(token_file, tls_dir) == path


def test_a_token_is_one_word_of_a_private_file(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text("  0123456789abcdef\n")
    path.chmod(0o600)
    assert read_token("token_file", str(path)) == "0123456789abcdef"
    path.chmod(0o640)
    with pytest.raises(ConfigError, match=r"token_file: .* is open to other users"):
        read_token("token_file", str(path))
    path.chmod(stat.S_IRUSR | stat.S_IWUSR)
    path.write_text("two words")
    with pytest.raises(ConfigError, match="more than one word") as refused:
        read_token("token_file", str(path))
    assert "two words" not in str(refused.value)
