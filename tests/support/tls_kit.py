"""Makes certificates of small authorities for tests, with whatever is wrong with them."""

from __future__ import annotations

import os
from datetime import UTC, datetime, timedelta
from pathlib import Path

from headrace.fleet.authority import SiteAuthority, make_authority, make_certificate, pem_of_certificate, pem_of_key
from headrace.wire.tls.files import TlsFiles, TlsRole, files_in

NOW = datetime.now(UTC)
LONG_AGO = NOW - timedelta(days=1000)
TOKEN = "0123456789abcdef-of-tests"


def authority(now: datetime = NOW) -> SiteAuthority:
    return make_authority(now)


def write_certificates(
    folder: Path,
    signer: SiteAuthority,
    role: TlsRole,
    *names: str,
    now: datetime = NOW,
    trusted: SiteAuthority | None = None,
) -> TlsFiles:
    """A folder with an end's three files. trusted: the authority in ca.crt, where it is another one than the signer."""
    folder.mkdir(parents=True, exist_ok=True)
    key, certificate = make_certificate(signer, role, names, now)
    files = files_in(folder)
    write_whole(Path(files.ca), pem_of_certificate((trusted or signer).certificate))
    write_whole(Path(files.certificate), pem_of_certificate(certificate))
    write_whole(Path(files.key), pem_of_key(key))
    return files


def write_whole(path: Path, content: bytes) -> None:
    """As a renewal should: another file in the place of the old one, closed to other users."""
    new = path.with_suffix(".new")
    with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(content)
    new.replace(path)
