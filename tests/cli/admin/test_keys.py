"""Tests `headrace keys` and `headrace tenants`: what an operator types and reads, on the state folder that a server has."""

from __future__ import annotations

import asyncio
import json
import os
import sqlite3
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from headrace.cli.admin.directory import open_administration, read_limits
from headrace.cli.config.load import load, load_settings
from headrace.cli.exits import UsageRefused, exit_code_of
from headrace.cli.main import app
from headrace.core.errors import ConfigError, HeadraceError, InvalidRequest
from headrace.gateway.access.admin_requests import KeyRequests
from headrace.gateway.access.auth import with_record
from headrace.gateway.access.key_store import TenantRecord
from headrace.gateway.access.principal import Principal
from headrace.gateway.limits.report import limit_requests
from headrace.gateway.limits.rules import rules_of
from headrace.gateway.limits.store import open_limits
from headrace.gateway.stores.config import StoreConfig
from headrace.policy.limits.tier import BUILT_IN_TIERS

pytestmark = pytest.mark.pure

FILE = "models: [{upstreams: [{url: http://h/v1}], name: far}]\ntiers: {gold: {class: premium}}\n"


@pytest.fixture(autouse=True)
def _no_time_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was used of a limit per minute comes back with time."""
    monkeypatch.setattr(time, "time", lambda: 1_800_000_000.0)


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HEADRACE_STATE", str(tmp_path / "state"))
    return tmp_path / "state"


def run(*words: str) -> Result:
    return CliRunner().invoke(app, words, catch_exceptions=True)


def done(*words: str) -> str:
    result = run(*words)
    assert result.exception is None, result.output
    return result.stdout


def printed(*words: str) -> Any:
    return json.loads(done(*words, "--json"))


def refused(*words: str) -> HeadraceError:
    error = run(*words).exception
    assert isinstance(error, HeadraceError)
    return error


def test_create_prints_an_id_and_a_key_and_nothing_else(state: Path) -> None:
    made = printed("keys", "create", "--tenant", "acme", "--tier", "free")
    assert made.keys() == {"id", "key"}
    assert made["key"].startswith("hr-")
    assert state.stat().st_mode & 0o777 == 0o700
    made = run("keys", "create", "--tenant", "acme")
    assert made.stdout.startswith("hr-")
    assert made.stdout.count("\n") == 1, "a shell can take it: KEY=$(headrace keys create ...)"
    assert "shown this once" in made.stderr


def test_every_limit_of_a_key_is_shown_and_the_key_is_not() -> None:
    made = printed(
        *("keys", "create", "--tenant", "acme", "--user", "ada", "--expires", "30d", "--budget", "10"),
        *("--models", "a, b", "--requests-per-minute", "7", "--tier", "batch"),
    )
    shown = printed("keys", "show", made["id"])
    assert (shown["tenant"], shown["user"], shown["tier"], shown["state"]) == ("acme", "ada", None, "active")
    assert (shown["budget"], shown["models"], shown["requests_per_minute"]) == (10.0, ["a", "b"], 7)
    assert shown["expires_at"] - shown["created_at"] == pytest.approx(30 * 86_400)
    assert printed("tenants", "show", "acme")["tier"] == "batch"
    everything = done("keys", "list") + done("keys", "show", made["id"]) + done("keys", "audit") + json.dumps(printed("keys", "list"))
    assert made["key"] not in everything
    assert made["key"][:8] in everything


def test_a_reader_is_made_and_listed_as_one() -> None:
    made = printed("keys", "create", "--tenant", "ops", "--role", "reader")
    printed("keys", "create", "--tenant", "ops")
    assert [(key["role"], key["tier"]) for key in printed("keys", "list")] == [("reader", None), ("user", None)]
    assert "ops     -     reader  -     active" in done("keys", "list")
    assert printed("keys", "show", made["id"])["role"] == "reader"
    assert printed("tenants", "show", "ops")["tier"] == "standard"
    assert 'role: expected one of user, reader, got "root"' in str(refused("keys", "create", "--tenant", "ops", "--role", "root"))
    assert "leave them out" in str(refused("keys", "create", "--tenant", "ops", "--role", "reader", "--tier", "free"))


def test_rotate_and_revoke_and_what_the_audit_says() -> None:
    made = printed("keys", "create", "--tenant", "acme")
    rotated = printed("keys", "rotate", made["id"], "--grace", "1h")
    assert rotated["id"] == made["id"]
    assert rotated["key"] != made["key"]
    assert printed("keys", "show", made["id"])["previous_until"] is not None
    assert done("keys", "revoke", made["id"]) == f"{made['id']} is revoked\n"
    assert [key["state"] for key in printed("keys", "list", "--tenant", "acme")] == ["revoked"]
    records = printed("keys", "audit")
    assert [record["action"] for record in records] == ["key.revoke", "key.rotate", "key.create"]
    assert all(record["actor"].endswith(", by command") for record in records)


def test_a_tenants_limits_are_shown_with_what_is_used_and_left() -> None:
    """The book is the server's: a process that has the same state folder has taken something."""
    done("tenants", "create", "acme", "--tier", "free", "--budget", "2.5")
    limits = {one["limit"]: one for one in printed("tenants", "show", "acme")["limits"]}
    expected = {"of": "tenant", "limit": "requests_per_minute", "number": 60, "used": 0, "left": 60, "reset_s": 0.0}
    assert limits["requests_per_minute"] == expected
    assert (limits["monthly_budget"]["number"], limits["monthly_budget"]["left"]) == (2.5, 2.5)

    record = TenantRecord(name="acme", tier="free", created_at=0.0, id=printed("tenants", "show", "acme")["id"], monthly_budget=2.5)
    principal = with_record(Principal(tenant="acme", tier=BUILT_IN_TIERS["free"]), record)

    async def take() -> None:
        store = open_limits(StoreConfig(), os.environ["HEADRACE_STATE"], clock=time.monotonic, unix_time=time.time)
        await store.take(None, [rule.claim(1_500_000_000 if rule.is_quota else 4) for rule in rules_of(principal)])
        await store.close()

    asyncio.run(take())
    limits = {one["limit"]: one for one in printed("tenants", "show", "acme")["limits"]}
    assert (limits["requests_per_minute"]["used"], limits["requests_per_minute"]["left"]) == (4, 56)
    assert (limits["monthly_budget"]["used"], limits["monthly_budget"]["left"]) == (1.5, 1.0)
    assert "requests_per_minute  60" in done("tenants", "show", "acme")


def test_limits_of_keys_and_users_are_shown_with_their_tenant_and_by_themselves(tmp_path: Path) -> None:
    file = tmp_path / "server.yaml"
    models, tiers = "models: [{upstreams: [{url: http://h/v1}], name: far}]", "{requests_per_minute: 9, user_requests_per_minute: 3}"
    site = "prices: {far: {output: 1}}\ngateway: {limits: {monthly_budget: 90}}"
    file.write_text(f"{models}\ntiers: {{small: {tiers}}}\n{site}\n")
    config = ("--config", str(file))
    made = printed("keys", "create", "--tenant", "acme", "--tier", "small", "--user", "ann", "--budget", "2", *config)
    gone = printed("keys", "create", "--tenant", "acme", "--tier", "small", "--user", "bob", *config)
    done("keys", "revoke", gone["id"], *config)
    expected = [
        ("tenant", "requests_per_minute", 9),
        ("user ann", "user_requests_per_minute", 3),
        (f"key {made['id']}", "key_monthly_budget", 2.0),
        ("deployment", "deployment_monthly_budget", 90.0),
    ]
    for command in (("tenants", "show", "acme"), ("keys", "show", made["id"])):
        shown = printed(*command, *config)["limits"]
        assert sorted((row["of"], row["limit"], row["number"]) for row in shown) == sorted(expected)
        assert all((row["used"], row["left"]) == (0, row["number"]) for row in shown)
    assert f"key {made['id']}  key_monthly_budget" in done("keys", "show", made["id"], *config)


def test_a_file_of_tiers_alone_does_for_every_command(tmp_path: Path) -> None:
    """It serves the bundled model. Every command but `serve MODEL` answered "models: is missing"."""
    file = tmp_path / "server.yaml"
    file.write_text(f"state: {tmp_path}/own\ntiers: {{free: {{requests_per_minute: 3, max_context_tokens: 64}}}}\n")
    config = ("--config", str(file))
    assert printed("keys", "create", "--tenant", "acme", "--tier", "free", *config)["key"].startswith("hr-")
    assert [row["tenant"] for row in printed("keys", "list", *config)] == ["acme"]
    assert printed("tenants", "show", "acme", *config)["limits"][0]["number"] == 3
    assert printed("usage", "--by", "tenant", *config) == []
    assert "1 model (headrace-tiny)" in done("config", "check", str(file))


def test_the_deployments_budget_is_shown_without_any_tenant(tmp_path: Path) -> None:
    assert "The deployment has no budget" in done("tenants", "budget")
    file = tmp_path / "server.yaml"
    file.write_text("prices: {headrace-tiny: {output: 1}}\ngateway: {limits: {daily_budget: 5}}\n")
    (row,) = printed("tenants", "budget", "--config", str(file))
    assert (row["of"], row["limit"], row["number"], row["used"]) == ("deployment", "deployment_daily_budget", 5.0, 0.0)
    assert "deployment_daily_budget" in done("tenants", "budget", "--config", str(file))


def test_what_a_command_does_not_know_is_said(tmp_path: Path) -> None:
    file = tmp_path / "server.yaml"
    file.write_text("tiers: {free: {requests_per_minute: 3}}\nroutes: {chat: {targets: [{model: headrace-tiny}]}}\n")
    create = ["keys", "create", "--tenant", "acme", "--budget", "5", "--config", str(file), "--models"]
    made = CliRunner().invoke(app, [*create, "nosuch,chat"])
    assert made.exit_code == 0
    assert "has no model nosuch; it has headrace-tiny, chat" in made.stderr
    assert "no price of headrace-tiny" in made.stderr, "the key's route leads to it"
    assert "built-in tiers" in CliRunner().invoke(app, ["tenants", "show", "acme"]).stderr
    assert "built-in tiers" not in CliRunner().invoke(app, ["tenants", "show", "acme", "--config", str(file)]).stderr


def test_models_whose_requests_are_free_in_a_budget_are_named(tmp_path: Path) -> None:
    def noted(*words: str) -> str:
        result = CliRunner().invoke(app, list(words))
        assert result.exit_code == 0, result.output
        return result.stderr

    free, priced = tmp_path / "free.yaml", tmp_path / "priced.yaml"
    free.write_text("tiers: {free: {requests_per_minute: 3}}\n")
    priced.write_text(
        "prices: {a: {output: 1}}\n"
        "models:\n  - {name: a, upstreams: [{url: 'http://127.0.0.1:9/v1'}]}\n"
        "  - {name: b, aliases: [c], upstreams: [{url: 'http://127.0.0.1:9/v1'}]}\n"
    )
    key, tenant = ("keys", "create", "--tenant", "acme", "--budget", "2"), ("tenants", "set", "acme", "--budget", "3")
    for command in (key, tenant, ("tenants", "create", "other", "--budget", "3")):
        assert f"{free} has no price of headrace-tiny: such requests cost nothing" in noted(*command, "--config", str(free))
    for command in (key, tenant):
        assert "by the server's `prices`" in noted(*command)
        assert "has no price of b: " in noted(*command, "--config", str(priced))
    assert "has no price of b: " in noted(*key, "--models", "c", "--config", str(priced))
    assert "price" not in noted(*key, "--models", "a", "--config", str(priced))
    assert "price" not in noted("tenants", "set", "acme", "--budget", "0", "--config", str(free)), "the tier's again"
    assert "price" not in noted(*key[:-2])


@pytest.mark.socket
async def test_limits_are_shown_over_the_admin_socket() -> None:
    made = await asyncio.to_thread(printed, "keys", "create", "--tenant", "acme", "--tier", "free", "--budget", "2")
    config = load_settings(None, os.environ)
    requests = KeyRequests(
        lambda actor: open_administration(config, actor=actor), limit_requests(lambda admin, work: read_limits(config, admin, work))
    )

    async def get(*path: str) -> Any:
        return await requests.answer("GET", path, {}, {}, "test")

    for path in (("tenants", "acme", "limits"), ("keys", made["id"], "limits")):
        status, rows = await get(*path)
        assert (status, [row["limit"] for row in rows]) == (200, ["requests_per_minute", "key_monthly_budget"])
    status, refused_with = await get("tenants", "absent", "limits")
    assert (status, "headrace tenants list" in refused_with["error"]) == (400, True)
    assert await get("limits") == (200, []), "the deployment has no budget"
    assert await get("tenants", "acme") is None


def test_a_tenant_may_turn_the_cache_on_off_and_back_to_the_gateways_default() -> None:
    done("tenants", "create", "acme", "--option", "cache=true")
    assert printed("tenants", "show", "acme")["options"] == {"cache": True}
    done("tenants", "set", "acme", "--option", "cache=false")
    assert printed("tenants", "show", "acme")["options"] == {"cache": False}
    done("tenants", "set", "acme", "--option", "cache=")
    assert printed("tenants", "show", "acme")["options"] == {}
    assert "one of true, false" in str(refused("tenants", "set", "acme", "--option", "cache=on"))


@pytest.mark.parametrize("words", [("keys", "create", "--tenant", "acme"), ("tenants", "create", "acme")], ids=lambda words: words[0])
def test_an_unknown_tier_is_answered_with_the_known_ones_and_where_others_are_declared(words: tuple[str, ...], tmp_path: Path) -> None:
    file = tmp_path / "site.yaml"
    file.write_text(FILE)
    said = str(refused(*words, "--tier", "gold"))
    assert f"one of {', '.join(BUILT_IN_TIERS)}" in said
    assert "Declare others under `tiers` of the server's configuration file; a command learns them by --config FILE." in said
    assert ", gold" in str(refused(*words, "--tier", "golden", "--config", str(file)))
    done(*words, "--tier", "gold", "--config", str(file))
    assert all(name in " ".join(done(*words[:2], "--help").split()) for name in BUILT_IN_TIERS)


def test_a_tenant_is_created_changed_and_removed() -> None:
    done("tenants", "create", "acme", "--tier", "free", "--option", "log_prompts=true")
    done("tenants", "set", "acme", "--budget", "5", "--option", "context_fitting=summary", "--option", "log_prompts=")
    assert printed("tenants", "list") == [
        {
            "name": "acme",
            "id": printed("tenants", "show", "acme")["id"],
            "tier": "free",
            "budget": 5.0,
            "options": {"context_fitting": "summary"},
            "created_at": printed("tenants", "show", "acme")["created_at"],
        }
    ]
    made = printed("keys", "create", "--tenant", "acme")
    assert isinstance(refused("tenants", "remove", "acme"), InvalidRequest)
    done("tenants", "remove", "acme", "--revoke-keys")
    assert printed("tenants", "list") == []
    assert printed("keys", "show", made["id"])["state"] == "revoked"


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("keys", "create", "--tenant", "acme", "--tier", "gold"), "one of enterprise, premium, standard, free, batch, got"),
        (("keys", "create", "--tenant", "acme", "--expires", "soon"), "--expires: 'soon' is no time"),
        (("keys", "create", "--tenant", "a b"), "tenant: expected"),
        (("keys", "show", "key-1"), "`headrace keys list` shows them"),
        (("tenants", "show", "acme"), "`headrace tenants list` shows them"),
        (("tenants", "set", "acme"), "give at least one of them"),
        (("tenants", "create", "acme", "--option", "x"), "is not NAME=VALUE"),
        (("tenants", "create", "acme", "--option", "log_prompts=maybe"), "one of true, false"),
    ],
)
def test_what_is_wrong_is_named(words: tuple[str, ...], reason: str) -> None:
    error = refused(*words)
    assert reason in str(error)
    assert exit_code_of(error) == 2
    assert isinstance(error, UsageRefused | InvalidRequest)


def test_tiers_and_folder_of_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HEADRACE_STATE")
    file = tmp_path / "headrace.yaml"
    file.write_text(f"{FILE}state: {tmp_path}/of-the-file\n")
    printed("keys", "create", "--tenant", "acme", "--tier", "gold", "--config", str(file))
    assert (tmp_path / "of-the-file" / "keys.db").exists()
    assert len(printed("keys", "list", "--state", str(tmp_path / "of-the-file"))) == 1
    assert printed("keys", "list", "--state", str(tmp_path / "other")) == []


def test_other_machines_are_served_once_there_is_a_stored_key(tmp_path: Path, state: Path) -> None:
    file = tmp_path / "headrace.yaml"
    file.write_text(f"{FILE}gateway: {{host: 0.0.0.0}}\n")
    environment = {"HEADRACE_STATE": str(state)}
    with pytest.raises(ConfigError, match=r"gateway\.host: .*headrace keys create"):
        load(file, environment)
    assert not state.exists(), "asking made nothing"
    printed("keys", "create", "--tenant", "acme", "--config", str(file))
    assert load(file, environment).gateway.host == "0.0.0.0"


def test_a_folder_of_another_version_is_refused(state: Path) -> None:
    printed("keys", "create", "--tenant", "acme")
    with sqlite3.connect(state / "keys.db") as connection:
        connection.execute("PRAGMA user_version = 99")
    assert "it has form 99" in str(refused("keys", "list"))
