"""Tests the admin requests over TCP: which commands reach them, and what is refused. The supervisor is real, its processes are scripted."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import socket
import ssl
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from http.client import HTTPException
from pathlib import Path
from typing import Any

import pytest
from gateway_kit import gateway_config
from scripted_site import ScriptedSite, scripted_site
from tls_kit import TOKEN, authority, write_certificates

from headrace.cli.admin import control, keys, tenants
from headrace.cli.admin.client import AdminClient, RemoteAdminClient, _TcpConnection, open_client
from headrace.cli.admin.directory import KeyDirectory
from headrace.cli.exits import ServerFailed, UsageRefused
from headrace.core.errors import ConfigError
from headrace.fleet.admin import TOKEN_NAME, AdminRequests
from headrace.fleet.admin_listen import AdminListen
from headrace.fleet.authority import SiteAuthority
from headrace.fleet.config import FleetConfig, ModelSpec, check_can_become
from headrace.gateway.access.admin_requests import KeyRequests
from headrace.gateway.access.administration import Administration
from headrace.gateway.access.key_store import SqliteKeys
from headrace.gateway.cache.answer_cache import open_answer_store
from headrace.gateway.control.purge import cache_requests
from headrace.gateway.sessions.sessions import open_session_store
from headrace.gateway.site import TenantShare
from headrace.gateway.stores.config import Stores
from headrace.policy.limits.tier import BUILT_IN_TIERS
from headrace.wire.tls import files as tls_files
from headrace.wire.tls.files import TlsRole

pytestmark = pytest.mark.socket

NAMES = {TlsRole.ENGINE: ("127.0.0.1",), TlsRole.GATEWAY: ()}
"""What a certificate is for, by its role."""


def folder_of(parent: Path, name: str, role: TlsRole, made_by: SiteAuthority, token: str = TOKEN) -> Path:
    """A folder as `headrace tls init` makes it."""
    folder = parent / name
    folder.mkdir(mode=0o700)
    write_certificates(folder, made_by, role, *NAMES[role])
    (folder / "token").write_text(token)
    (folder / "token").chmod(0o600)
    return folder


def listen_in(folder: Path) -> AdminListen:
    """Without certificates."""
    return AdminListen(listen="127.0.0.1:0", token_file=str(folder / "token"))


class Site:
    """A deployment whose admin requests are answered at `url` over TLS once it runs, and what an operator has."""

    url: str

    def __init__(self, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
        self._caplog = caplog
        self.authority = authority()
        self.server = folder_of(folder, "server", TlsRole.ENGINE, self.authority)
        self.operator = folder_of(folder, "operator", TlsRole.GATEWAY, self.authority)

    @asynccontextmanager
    async def running(self, requests: Sequence[AdminRequests] = ()) -> AsyncIterator[ScriptedSite]:
        self._caplog.set_level(logging.INFO, "headrace.fleet.admin")
        async with scripted_site(requests=requests, admin=AdminListen(listen="127.0.0.1:0", tls_dir=str(self.server))) as site:
            [self.url] = re.findall(r"answered at (https://\S+)", self._caplog.text)
            yield site

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    @property
    def place(self) -> dict[str, Any]:
        """Where commands find it."""
        return {"admin": self.url, "tls_dir": self.operator}

    async def status(self, files: Path) -> Any:
        return await asyncio.to_thread(lambda: RemoteAdminClient(self.url, files).status())


@pytest.fixture
def made(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> Site:
    return Site(tmp_path, caplog)


async def test_commands_work_from_another_machine(made: Site, capsys: pytest.CaptureFixture[str]) -> None:
    async with made.running() as site:
        client = await asyncio.to_thread(open_client, None, made.url, made.operator)
        assert [each["name"] for each in (await made.status(made.operator))["models"]] == ["tiny"]
        said = await asyncio.to_thread(lambda: list(client.command("scale", {"model": "tiny", "replicas": 2})))
        assert said[-1] == {"event": "done"}
        await asyncio.to_thread(lambda: control.status(admin=made.url, tls_dir=made.operator))
        assert "tiny: 2 of 2 replicas ready" in capsys.readouterr().out
        assert client.is_running()
        assert set((await site.phases()).values()) == {"serving"}, "the socket in the run directory answers as ever"
    assert not client.is_running()


async def test_keys_are_created_and_revoked_from_another_machine(made: Site, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def administration(actor: str) -> Administration:
        return Administration(SqliteKeys(str(tmp_path / "keys.db")), tiers=BUILT_IN_TIERS, unix_time=time.time, actor=actor)

    async with made.running([KeyRequests(administration)]):
        place = made.place
        await asyncio.to_thread(lambda: keys.create(tenant="acme", budget=5.0, as_json=True, **place))
        issued = json.loads(capsys.readouterr().out)
        assert (await asyncio.to_thread(KeyDirectory(None, None, *place.values()).ask, "GET", "keys", issued["id"]))["budget"] == 5.0
        await asyncio.to_thread(lambda: keys.revoke(issued["id"], **place))
        capsys.readouterr()
        await asyncio.to_thread(lambda: keys.list_keys(tenant="acme", as_json=True, **place))
        assert [row["state"] for row in json.loads(capsys.readouterr().out)] == ["revoked"]
        await asyncio.to_thread(lambda: keys.audit(limit=1, as_json=True, **place))
        [record] = json.loads(capsys.readouterr().out)
        assert re.fullmatch(r".+ at 127\.0\.0\.1, through the admin socket", record["actor"])
        with pytest.raises(ServerFailed, match=r"refuses: .*key-none"):
            await asyncio.to_thread(lambda: keys.show("key-none", **place))
        with pytest.raises(UsageRefused, match="leave out --config and --state"):
            await asyncio.to_thread(lambda: keys.show(issued["id"], state=str(tmp_path), **place))


async def test_tenants_are_created_changed_and_removed_from_another_machine(
    made: Site, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def administration(actor: str) -> Administration:
        return Administration(SqliteKeys(str(tmp_path / "keys.db")), tiers=BUILT_IN_TIERS, unix_time=time.time, actor=actor)

    async with made.running([KeyRequests(administration)]):
        place = made.place
        await asyncio.to_thread(lambda: tenants.create("acme", budget=5.0, **place))
        await asyncio.to_thread(lambda: tenants.set_tenant("acme", tier="premium", option=["cache=true"], **place))
        capsys.readouterr()
        await asyncio.to_thread(lambda: tenants.list_tenants(as_json=True, **place))
        [tenant] = json.loads(capsys.readouterr().out)
        assert (tenant["name"], tenant["tier"], tenant["budget"], tenant["options"]) == ("acme", "premium", 5.0, {"cache": True})
        await asyncio.to_thread(lambda: tenants.remove("acme", **place))
        capsys.readouterr()
        await asyncio.to_thread(lambda: tenants.list_tenants(as_json=True, **place))
        assert json.loads(capsys.readouterr().out) == []
        with pytest.raises(UsageRefused, match="leave out --config and --state"):
            await asyncio.to_thread(lambda: tenants.show("acme", state=str(tmp_path), **place))


async def test_what_is_kept_of_a_tenant_is_removed_from_another_machine(
    made: Site, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = gateway_config(state=str(tmp_path))

    def administration(actor: str) -> Administration:
        return Administration(SqliteKeys(str(tmp_path / "keys.db")), tiers=BUILT_IN_TIERS, unix_time=time.time, actor=actor)

    stores = Stores(config.store, config.state, TenantShare(config.limits.max_tenant_share, config.num_tenants), time.time)
    for store in (open_answer_store(stores), open_session_store(stores)):
        await store.put("kept", b"", tenant="acme", ttl_s=60.0)
        await store.close()
    async with made.running([KeyRequests(administration, cache_requests(lambda: config, time.time))]):
        place = made.place
        for everything, num_removed in ((False, 1), (True, 1), (True, 0)):
            await asyncio.to_thread(partial(tenants.purge, "acme", everything=everything, as_json=True, **place))
            assert json.loads(capsys.readouterr().out) == {"removed": num_removed}
        with pytest.raises(UsageRefused, match="leave out --config and --state"):
            await asyncio.to_thread(lambda: tenants.purge("acme", state=str(tmp_path), **place))


async def test_another_token_is_refused_that_of_the_unix_socket_too(made: Site, tmp_path: Path) -> None:
    wrong = folder_of(tmp_path, "wrong", TlsRole.GATEWAY, made.authority, token="not-the-token-of-it")
    async with made.running() as site:
        with pytest.raises(ServerFailed, match="answered 401: The token is missing or wrong"):
            await made.status(wrong)
        (wrong / "token").write_text((site.run_dir / TOKEN_NAME).read_text())
        with pytest.raises(ServerFailed, match="answered 401"):
            await made.status(wrong)
        (site.run_dir / TOKEN_NAME).write_text(TOKEN)
        with pytest.raises(ServerFailed, match="answered 401"):
            await asyncio.to_thread(AdminClient(site.run_dir).status)


async def test_a_certificate_of_another_authority_or_role_and_none_at_all_are_refused(made: Site, tmp_path: Path) -> None:
    strange = folder_of(tmp_path, "strange", TlsRole.GATEWAY, authority())
    (strange / "ca.crt").write_bytes((made.operator / "ca.crt").read_bytes())
    none = ssl.create_default_context(cafile=str(made.operator / "ca.crt"))
    as_server = ssl.create_default_context(cafile=str(made.operator / "ca.crt"))
    as_server.load_cert_chain(made.server / "tls.crt", made.server / "tls.key")
    foreign = ssl.create_default_context(cafile=str(made.operator / "ca.crt"))
    foreign.load_cert_chain(strange / "tls.crt", strange / "tls.key")
    async with made.running():
        for context in (none, as_server, foreign):
            with pytest.raises((ssl.SSLError, ConnectionError, HTTPException)):
                await asyncio.to_thread(get_status, made.port, context)
        assert await asyncio.to_thread(get_status, made.port, own_context(made.operator)) == 200


async def test_an_operator_hears_why_the_handshake_failed(made: Site, tmp_path: Path) -> None:
    other = folder_of(tmp_path, "other", TlsRole.GATEWAY, authority())
    async with made.running():
        with pytest.raises(ServerFailed, match=r"the deployment's certificate was not signed by the authority in .*other/ca.crt"):
            await made.status(other)


async def test_plain_http_gets_no_answer_from_a_port_with_tls(made: Site) -> None:
    async with made.running():
        with pytest.raises((OSError, HTTPException)):
            await asyncio.to_thread(get_status, made.port, None)


async def test_a_renewed_certificate_is_shown_without_a_restart(made: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tls_files, "LOOK_S", 0.0)
    async with made.running():
        before = after = await asyncio.to_thread(shown_certificate, made)
        write_certificates(made.server, made.authority, TlsRole.ENGINE, *NAMES[TlsRole.ENGINE])
        while after == before:  # of the connections that come before the files have been looked at
            after = await asyncio.to_thread(shown_certificate, made)
        assert after == ssl.PEM_cert_to_DER_cert((made.server / "tls.crt").read_text())
        with pytest.raises((ssl.SSLError, ConnectionError, HTTPException)):  # a client's certificate is wanted as before
            await asyncio.to_thread(get_status, made.port, ssl.create_default_context(cafile=str(made.operator / "ca.crt")))


async def test_loopback_may_do_without_certificates_and_not_without_the_token(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "headrace.fleet.admin")
    (tmp_path / "token").write_text(TOKEN)
    (tmp_path / "token").chmod(0o600)
    async with scripted_site(admin=listen_in(tmp_path)):
        [url] = re.findall(r"answered at (http://\S+)", caplog.text)
        status = await asyncio.to_thread(RemoteAdminClient(url, tmp_path).status)
        assert [each["name"] for each in status["models"]] == ["tiny"]
        (tmp_path / "token").write_text(TOKEN + "x")
        with pytest.raises(ServerFailed, match="answered 401"):
            await asyncio.to_thread(RemoteAdminClient(url, tmp_path).status)


@pytest.mark.parametrize(
    ("listen", "words"),
    [
        ("0.0.0.0:7100", "admin.listen: '0.0.0.0' is not a loopback address, and no certificates are given"),
        ("host:7100", "is not a loopback address"),
        ("unix:/run/admin", "admin.listen: 'unix:/run/admin' is not HOST:PORT"),
        ("7100", "admin.listen: '7100' is neither"),
    ],
)
@pytest.mark.pure
def test_an_address_that_others_reach_wants_certificates(listen: str, words: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)):
        AdminListen(listen=listen, token_file="/token").checked()


@pytest.mark.pure
def test_a_token_is_never_optional_and_never_short(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"admin\.token_file: is empty"):
        AdminListen(listen="127.0.0.1:0").checked()
    (tmp_path / "token").write_text("short")
    (tmp_path / "token").chmod(0o600)
    with pytest.raises(ConfigError, match="5 characters are too few"):
        listen_in(tmp_path).opened()
    with pytest.raises(ConfigError, match=rf"admin\.tls_dir: {tmp_path}/none/token cannot be read"):
        AdminListen(listen="0.0.0.0:0", tls_dir=str(tmp_path / "none")).opened()


@pytest.mark.pure
def test_a_reload_cannot_move_it(tmp_path: Path) -> None:
    config = FleetConfig(models=(ModelSpec(name="m", folder=tmp_path),))
    with pytest.raises(ConfigError, match="admin: cannot change while the deployment runs"):
        check_can_become(config, replace(config, admin=listen_in(tmp_path)), served=())


@pytest.mark.parametrize(
    ("run_dir", "url", "files", "words"),
    [
        (None, "http://far:7100", Path("/files"), "would send the token unencrypted"),
        (None, "https://far", Path("/files"), "is not https://HOST:PORT"),
        (None, "https://far:7100", None, "--tls-dir"),
        (Path("/run"), "https://far:7100", Path("/files"), "--run-dir and --admin"),
        (None, None, Path("/files"), "--tls-dir: is for --admin"),
    ],
)
@pytest.mark.pure
def test_flags_that_do_not_fit_are_refused(run_dir: Path | None, url: str | None, files: Path | None, words: str) -> None:
    with pytest.raises(UsageRefused, match=re.escape(words)):
        open_client(run_dir, url, files)


def own_context(files: Path) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=str(files / "ca.crt"))
    context.load_cert_chain(files / "tls.crt", files / "tls.key")
    return context


def get_status(port: int, context: ssl.SSLContext | None) -> int:
    connection = _TcpConnection("127.0.0.1", port, context, 60.0)
    try:
        connection.request("GET", "/status", headers={"authorization": f"Bearer {TOKEN}"})
        return connection.getresponse().status
    finally:
        connection.close()


def shown_certificate(made: Site) -> bytes:
    with (
        socket.create_connection(("127.0.0.1", made.port)) as plain,
        own_context(made.operator).wrap_socket(plain, server_hostname="127.0.0.1") as connection,
    ):
        found = connection.getpeercert(binary_form=True)
        assert found is not None
        return found
