"""Tests a site's private authority: what it makes, that it overwrites nothing, and that both ends take its certificates."""

from __future__ import annotations

import shutil
import stat
import subprocess
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from headrace.core.errors import ConfigError
from headrace.fleet.authority import AUTHORITY_DAYS, AUTHORITY_KEY_NAME, CERTIFICATE_DAYS, init_site
from headrace.machine.private_files import read_token
from headrace.wire.target import MIN_TOKEN_CHARS
from headrace.wire.tls.files import Certificates, TlsRole, files_in

pytestmark = pytest.mark.pure

NOW = datetime(2026, 11, 1, tzinfo=UTC)


def contents(folder: Path) -> dict[Path, bytes]:
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_site_is_made_with_private_keys_and_one_token(tmp_path: Path) -> None:
    site = tmp_path / "site"
    gateway, gpu1, gpu2 = init_site(site, [["gpu1", "10.0.0.7"], ["::1"]], now=NOW)
    assert [made.path.name for made in (gateway, gpu1, gpu2)] == ["gateway", "engine-gpu1", "engine---1"]
    assert gpu1.valid_until == NOW + timedelta(days=CERTIFICATE_DAYS)
    modes = {path: stat.S_IMODE((site / path).stat().st_mode) for path in contents(site)}
    assert {path.name: mode for path, mode in modes.items() if mode == 0o600}.keys() == {AUTHORITY_KEY_NAME, "tls.key", "token"}
    assert all(mode == 0o600 for path, mode in modes.items() if path.suffix != ".crt")
    assert stat.S_IMODE(site.stat().st_mode) == stat.S_IMODE(gpu1.path.stat().st_mode) == 0o700
    tokens = {read_token("token_file", str(path / "token")) for path in (site, gateway.path, gpu1.path, gpu2.path)}
    assert [len(token) >= MIN_TOKEN_CHARS for token in tokens] == [True]


@pytest.mark.skipif(shutil.which("openssl") is None, reason="the openssl command is not installed")
@pytest.mark.process
def test_strict_openssl_takes_what_it_makes(tmp_path: Path) -> None:
    gateway, engine = init_site(tmp_path / "site", [["gpu1"]])
    for made, purpose in ((gateway, "sslclient"), (engine, "sslserver")):
        files = files_in(made.path)
        command = ["openssl", "verify", "-x509_strict", "-purpose", purpose, "-CAfile", files.ca, files.certificate]
        assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.endswith("OK\n")


def test_what_it_makes_is_taken_by_the_end_it_is_for(tmp_path: Path) -> None:
    gateway, engine = init_site(tmp_path / "site", [["gpu1"]])
    Certificates(files_in(gateway.path), TlsRole.GATEWAY)
    Certificates(files_in(engine.path), TlsRole.ENGINE)


def test_a_second_run_keeps_everything_and_a_new_host_is_added(tmp_path: Path) -> None:
    site = tmp_path / "site"
    init_site(site, [["gpu1"]], now=NOW)
    before = contents(site)
    again = init_site(site, [["gpu1"]], now=NOW + timedelta(days=3))
    assert contents(site) == before
    assert [made.is_new for made in again] == [False, False]
    more = init_site(site, [["gpu1"], ["gpu2"]], now=NOW)
    assert [made.is_new for made in more] == [False, False, True]
    assert {path: content for path, content in contents(site).items() if path in before} == before


def test_a_removed_folder_is_made_anew_by_the_same_authority(tmp_path: Path) -> None:
    site = tmp_path / "site"
    _, engine = init_site(site, [["gpu1"]], now=NOW)
    before = contents(site)
    for path in engine.path.iterdir():
        path.unlink()
    engine.path.rmdir()
    init_site(site, [["gpu1"]], now=NOW)
    changed = {str(path) for path, content in contents(site).items() if before[path] != content}
    assert changed == {"engine-gpu1/tls.crt", "engine-gpu1/tls.key"}


def test_no_certificate_outlives_its_authority(tmp_path: Path) -> None:
    site = tmp_path / "site"
    init_site(site, now=NOW - timedelta(days=AUTHORITY_DAYS - 100))
    _, engine = init_site(site, [["gpu1"]], now=NOW)
    assert (engine.valid_until - NOW).days in (99, 100)


def test_a_host_that_has_a_certificate_for_other_names_is_refused(tmp_path: Path) -> None:
    site = tmp_path / "site"
    init_site(site, [["gpu1"]], now=NOW)
    before = contents(site)
    with pytest.raises(ConfigError, match=r"has a certificate for gpu1, and not for gpu1, 10\.0\.0\.7\. Remove it"):
        init_site(site, [["gpu1", "10.0.0.7"]], now=NOW)
    assert contents(site) == before


@pytest.mark.parametrize("name", ["tls.crt", "tls.key", "ca.crt", "token"])
def test_half_a_folder_is_refused_and_nothing_of_it_is_overwritten(tmp_path: Path, name: str) -> None:
    site = tmp_path / "site"
    _, engine = init_site(site, [["gpu1"]], now=NOW)
    (engine.path / name).unlink()
    before = contents(site)
    with pytest.raises(ConfigError, match=f"lacks {name}. Remove it"):
        init_site(site, [["gpu1"]], now=NOW)
    assert contents(site) == before


@pytest.mark.parametrize("name", ["authority.key", "ca.crt", "token"])
def test_half_an_authority_is_refused(tmp_path: Path, name: str) -> None:
    site = tmp_path / "site"
    init_site(site, now=NOW)
    (site / name).unlink()
    with pytest.raises(ConfigError, match="something else than a whole authority"):
        init_site(site, now=NOW)


def test_a_folder_with_other_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match="something else than a whole authority"):
        init_site(tmp_path)
    assert contents(tmp_path) == {Path("notes.txt"): b"mine"}


def test_a_certificate_of_another_authority_is_not_kept(tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    init_site(one, [["gpu1"]])
    init_site(other, [["gpu1"]])
    (one / "engine-gpu1" / "tls.crt").write_bytes((other / "engine-gpu1" / "tls.crt").read_bytes())
    with pytest.raises(ConfigError, match="not signed by this folder's authority"):
        init_site(one, [["gpu1"]])


@pytest.mark.parametrize("name", ["ca.crt", "tls.key", "token"])
def test_a_folder_with_a_file_of_another_site_is_not_kept(tmp_path: Path, name: str) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    init_site(one, [["gpu1"]])
    init_site(other, [["gpu1"]])
    (one / "engine-gpu1" / name).write_bytes((other / "engine-gpu1" / name).read_bytes())
    with pytest.raises(ConfigError, match=rf"{name}: is another one than this site's.*Remove it"):
        init_site(one, [["gpu1"]])


@pytest.mark.parametrize("name", ["gpu1:7001", "https://gpu1", "*.example.org", "", "a b", "-gpu", "../up", "x" * 64])
def test_a_host_that_is_no_name_is_refused_before_anything_is_written(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="neither a host's name nor an address"):
        init_site(tmp_path / "site", [[name]])
    assert not (tmp_path / "site").exists()
