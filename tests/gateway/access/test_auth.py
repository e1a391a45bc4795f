"""Tests who may ask: default-deny on every route and method, whatever the request looks like; Host and Origin; keys that stay secret."""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from gateway_kit import MODEL, TestBench, chat_body, dial, metric, open_bench, serving

from headrace.core.errors import ConfigError
from headrace.core.hashing import TENANT_SALT_BYTES
from headrace.core.ids import RequestId
from headrace.core.request import PriorityClass, TierTerms
from headrace.gateway.config import config_from
from headrace.gateway.surfaces.routes import ENDPOINTS
from headrace.text.folder import TextModel

pytestmark = pytest.mark.loop

KEY = "sk-canary-7f3a9c51d2e84b60"
OTHER = "sk-other-0123456789abcdef"
KEYS = [
    {"key": KEY, "tenant": "alice"},
    {"sha256": hashlib.sha256(OTHER.encode()).hexdigest(), "tenant": "bob", "tier": "premium"},
]
PROBES = {"/", "/health", "/live", "/ping", "/ready"}
MANUAL = {"/docs", "/docs/{name}", "/openapi.json"}
PUBLIC = PROBES | MANUAL
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE")
BAD = {
    "none": {},
    "unknown": {"authorization": "Bearer sk-wrong-0123456789abcdef"},
    "prefix": {"authorization": f"Bearer {KEY[:-1]}"},
    "longer": {"authorization": f"Bearer {KEY}x"},
    "case": {"authorization": f"Bearer {KEY.upper()}"},
    "empty": {"authorization": "Bearer "},
    "basic": {"authorization": f"Basic {KEY}"},
    "bare": {"authorization": KEY},
    "digest": {"authorization": f"Bearer {hashlib.sha256(KEY.encode()).hexdigest()}"},
    "x-api-key": {"x-api-key": KEY},
    "huge": {"authorization": "Bearer " + "x" * 10_000},
    "sql": {"authorization": "Bearer ' OR '1'='1"},
    "forwarded": {"x-forwarded-for": "127.0.0.1", "x-real-ip": "127.0.0.1", "forwarded": "for=127.0.0.1"},
    "rewritten": {"x-original-url": "/health", "x-rewrite-url": "/health", "x-forwarded-prefix": "/health"},
    "override": {"x-http-method-override": "GET", "x-forwarded-host": "localhost", "x-forwarded-proto": "https"},
}


@pytest.fixture
async def keyed(text: TextModel) -> AsyncIterator[TestBench]:
    async with open_bench(text, api_keys=KEYS) as opened:
        yield opened


def path_of(path: str) -> str:
    return path.replace("{model:path}", MODEL).replace("{name}", "docs.js")


@pytest.mark.parametrize("endpoint", [endpoint for endpoint in ENDPOINTS if endpoint.path not in PUBLIC], ids=lambda e: e.path)
async def test_every_route_and_method_wants_a_key(keyed: TestBench, endpoint: Any) -> None:
    for name, headers in BAD.items():
        for method in METHODS:
            response = await keyed.client.request(method, path_of(endpoint.path), headers=headers)
            assert response.status_code == 401, (name, method, endpoint.path)
            assert method == "HEAD" or response.json()["error"]["code"] == "invalid_api_key"
            assert response.headers["www-authenticate"] == "Bearer"


@pytest.mark.pure
def test_only_probes_and_the_manual_are_public() -> None:
    assert {endpoint.path for endpoint in ENDPOINTS if endpoint.is_probe} == PROBES
    assert {endpoint.path for endpoint in ENDPOINTS if endpoint.is_manual} == MANUAL


VARIANTS = [
    "//v1/models",
    "/v1//models",
    "/v1/models/",
    "/v1/models/..",
    "/V1/models",
    "/v1/./models",
    "/health/../v1/models",
    "/health/..;/v1/models",
    "/health%2f..%2fv1%2fmodels",
    "/%76%31/models",
    "/v1%2fmodels",
    "/v1/models%00",
    "/health%00/v1/models",
    "/health;/v1/models",
    "/./health",
    "/health%20",
    "/health%0d%0a",
    "/HEALTH",
    "/live/x",
    "/v1/models?x=/health",
    "/metrics?/health",
    "/v1/models/%2e%2e/%2e%2e/health",
    "/docs/..%2f..%2fhealth",
    "/docs/%2e%2e/health",
    "/\\health",
    "/health\\..\\v1/models",
    "/docs//health",
]


FORGED: tuple[dict[str, str], ...] = (
    {},
    {"host": "localhost/health?"},
    {"x-forwarded-prefix": "/health", "x-forwarded-host": "localhost"},
    {"referer": "http://localhost/health", "x-original-url": "/health"},
)


async def test_path_variants_open_nothing(keyed: TestBench) -> None:
    """Sent as raw bytes: no client normalises them on the way."""
    async with serving(keyed.gateway) as port:
        for path in VARIANTS:
            for forged in FORGED:
                status, body = await raw_get(port, path, {"host": "localhost", **forged})
                assert status in (400, 401, 403) or (path.startswith("/docs/") and status == 404), path
                assert b"max_model_len" not in body


@pytest.mark.parametrize("path", ["/health/", "//health", "/live//", "/ready%2f"])
async def test_a_probe_with_slashes_too_many_is_the_probe(keyed: TestBench, path: str) -> None:
    async with serving(keyed.gateway) as port:
        status, body = await raw_get(port, path, {"host": "localhost"})
    assert status == 200
    assert b"max_model_len" not in body


async def raw_get(port: int, target: str, headers: dict[str, str]) -> tuple[int, bytes]:
    async with dial(port) as (reader, writer):
        head = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        writer.write(f"GET {target} HTTP/1.1\r\n{head}connection: close\r\n\r\n".encode())
        status = int((await reader.readline()).split()[1])
        return status, await reader.read()


@pytest.mark.parametrize(
    "target", ["http://localhost/v1/models", "http://localhost@evil/v1/models", "http://evil/health/../v1/models", "*", "v1/models"]
)
async def test_absolute_and_odd_targets_open_nothing(keyed: TestBench, target: str) -> None:
    async with serving(keyed.gateway) as port:
        status, _ = await raw_get(port, target, {"host": "localhost"})
        assert status in (400, 401)


async def test_several_authorizations_are_none(keyed: TestBench) -> None:
    headers = [("authorization", f"Bearer {KEY}"), ("authorization", "Bearer other")]
    assert (await keyed.client.get("/v1/models", headers=headers)).status_code == 401


@pytest.mark.parametrize(
    ("key", "tenant", "priority", "tier"),
    [(KEY, "alice", "STANDARD", TierTerms(name="standard")), (OTHER, "bob", "PREMIUM", TierTerms(name="premium", weight=4.0))],
)
async def test_a_key_brings_its_tenant_class_and_tier(keyed: TestBench, key: str, tenant: str, priority: str, tier: TierTerms) -> None:
    response = await keyed.client.post("/v1/chat/completions", json=chat_body(), headers={"authorization": f"Bearer {key}"})
    assert response.status_code == 200
    sent = keyed.replica.requests[0]
    assert (sent.tenant, sent.priority, sent.tier) == (tenant, PriorityClass[priority], tier)


@pytest.mark.parametrize(("asked", "status"), [("premium", 400), (0, 200), ("standard", 200), ("batch", 200), (2, 200), ("root", 400)])
async def test_a_body_may_only_lower_its_class(keyed: TestBench, asked: Any, status: int) -> None:
    response = await keyed.client.post("/v1/chat/completions", json=chat_body(priority=asked), headers={"authorization": f"bearer {KEY}"})
    assert response.status_code == status
    if status == 200:
        wanted = PriorityClass.BATCH if asked in ("batch", 2) else PriorityClass.STANDARD
        assert keyed.replica.requests[0].priority is wanted


async def test_salts_differ_by_tenant_and_by_cache_salt(keyed: TestBench) -> None:
    for key, extra in ((KEY, {}), (OTHER, {}), (KEY, {"cache_salt": "x"}), (KEY, {}), (OTHER, {"cache_salt": "x"})):
        await keyed.client.post("/v1/chat/completions", json=chat_body(**extra), headers={"authorization": f"Bearer {key}"})
    salts = [request.salt for request in keyed.replica.requests]
    assert salts[0] == salts[3]
    assert len(set(salts)) == 4
    assert [salt[:TENANT_SALT_BYTES] for salt in salts] == [salts[0], salts[1], salts[0], salts[0], salts[1]], "the tenant's part is first"


async def test_salts_of_clients_without_a_key_have_nothing_in_common(bench: TestBench) -> None:
    for extra in ({}, {"cache_salt": "x"}, {"cache_salt": "y"}):
        await bench.client.post("/v1/chat/completions", json=chat_body(**extra))
    assert len({request.salt[:TENANT_SALT_BYTES] for request in bench.replica.requests}) == 3


async def test_metrics_may_be_opened(text: TextModel) -> None:
    async with open_bench(text, api_keys=KEYS, open_metrics="totals") as bench:
        assert (await bench.client.get("/metrics")).status_code == 200
        assert (await bench.client.get("/v1/models")).status_code == 401


READER = "sk-reader-0123456789abcdef"
WITH_READER = [*KEYS, {"key": READER, "tenant": "alice", "role": "reader"}]


async def tenants_on_page(bench: TestBench, key: str) -> tuple[set[str], bool]:
    """The tenants with series on the page that this key reads (empty: no key), and whether tiers have some; two tenants are used first."""
    for used in (KEY, OTHER):
        answer = await bench.client.post("/v1/chat/completions", json=chat_body(), headers={"authorization": f"Bearer {used}"})
        assert answer.status_code == 200
    page = await bench.client.get("/metrics", headers={"authorization": f"Bearer {key}"} if key else {})
    samples = [line for line in page.text.splitlines() if not line.startswith("#")]
    return set(re.findall(r'tenant="([^"]*)"', "\n".join(samples))), any(line.startswith("headrace_tier_") for line in samples)


@pytest.mark.parametrize(
    ("key", "tenants", "has_tiers"),
    [(KEY, {"alice"}, False), (OTHER, {"bob"}, False), (READER, {"alice", "bob"}, True)],
)
async def test_a_key_reads_its_own_tenants_metrics_and_a_readers_key_all(
    text: TextModel, key: str, tenants: set[str], has_tiers: bool
) -> None:
    async with open_bench(text, api_keys=WITH_READER) as bench:
        assert await tenants_on_page(bench, key) == (tenants, has_tiers)


async def sites_families(bench: TestBench, key: str) -> set[str]:
    """Families on the page that this key reads, without those of tenants and tiers."""
    page = await bench.client.get("/metrics", headers={"authorization": f"Bearer {key}"})
    families = re.findall(r"^# TYPE (\S+)", page.text, re.MULTILINE)
    return {name for name in families if not name.startswith(("headrace_tenant_", "headrace_tier_"))}


async def test_a_tenant_cannot_subtract_its_own_use_from_the_sites(text: TextModel) -> None:
    async with open_bench(text, api_keys=WITH_READER) as bench:
        assert await tenants_on_page(bench, KEY) == ({"alice"}, False)
        assert await sites_families(bench, KEY) == {"headrace_replica_ready"}
        assert {"headrace_requests_total", "headrace_generation_tokens_total", "headrace_gateway_requests_open"} <= await sites_families(
            bench, READER
        )


@pytest.mark.parametrize(("key", "num_open"), [(KEY, 2), (OTHER, 0), (READER, 2)])
async def test_load_counts_the_requests_of_the_keys_tenant_and_for_a_reader_all(text: TextModel, key: str, num_open: int) -> None:
    async with open_bench(text, api_keys=WITH_READER) as bench:
        admit = bench.gateway.service.open_requests.admit
        with admit(RequestId("one"), "alice", lambda error: None), admit(RequestId("two"), "alice", lambda error: None):
            answer = await bench.client.get("/load", headers={"authorization": f"Bearer {key}"})
    assert answer.json() == {"server_load": num_open}


async def test_the_key_of_the_only_tenant_reads_the_whole_page(text: TextModel) -> None:
    async with open_bench(text, api_keys=[KEYS[0]]) as bench:
        assert {"headrace_requests_total", "headrace_generation_tokens_total"} <= await sites_families(bench, KEY)


@pytest.mark.parametrize(("shown", "tenants"), [("totals", set()), ("all", {"alice", "bob"})])
async def test_open_metrics_show_tenants_only_where_all_is_open(text: TextModel, shown: str, tenants: set[str]) -> None:
    async with open_bench(text, api_keys=KEYS, open_metrics=shown) as bench:
        assert await tenants_on_page(bench, "") == (tenants, shown == "all")


@pytest.mark.parametrize(
    ("options", "refusal"),
    [
        ({"open_metrics": True}, "open_metrics: expected str, got bool"),
        ({"open_metrics": "tenants"}, "open_metrics: 'tenants' is not one of none, totals, all"),
    ],
)
@pytest.mark.pure
def test_metrics_that_are_opened_to_no_known_degree_are_refused(options: dict[str, object], refusal: str) -> None:
    with pytest.raises(ConfigError, match=f"^{refusal}"):
        config_from({"models": [{"name": "m", "folder": "/m", "replicas": [{"name": "r", "address": "unix:/s"}]}], **options})


async def test_unknown_paths_tell_nothing_without_a_key(keyed: TestBench) -> None:
    assert (await keyed.client.get("/nope")).status_code == 401
    found = await keyed.client.get("/nope", headers={"authorization": f"Bearer {KEY}"})
    assert (found.status_code, found.json()["error"]["code"]) == (404, "not_found")


@pytest.mark.parametrize(
    "path", ["/v1/load_lora_adapter", "/update_weights", "/admin", "/v1/files", "/sleep", "/reset_prefix_cache", "/shutdown", "/pause"]
)
@pytest.mark.parametrize("method", ["GET", "POST", "DELETE", "PUT"])
async def test_there_is_no_admin_surface(bench: TestBench, path: str, method: str) -> None:
    assert (await bench.client.request(method, path)).status_code == 404


async def test_wrong_method_names_the_right_ones(bench: TestBench) -> None:
    response = await bench.client.get("/v1/chat/completions")
    assert (response.status_code, response.headers["allow"]) == (405, "POST")
    assert response.json()["error"]["code"] == "method_not_allowed"


HOSTS = [
    "evil.example",
    "localhost.evil.example",
    "127.0.0.1.evil.example",
    "2130706433",
    "127.1",
    "0.0.0.0",
    "[::ffff:127.0.0.1]",
    "local host",
]
HOSTS += [
    "localhost:99999999",
    "localhost@evil",
    "evil#localhost",
    "",
    "localhost,evil",
    "lo\u00e7alhost",
    "localhost/",
    "[::1",
    "192.168.0.1",
]


@pytest.mark.parametrize("host", HOSTS)
async def test_foreign_hosts_are_refused(bench: TestBench, host: str) -> None:
    response = await bench.client.get("/v1/models", headers=[(b"host", host.encode())])
    assert response.status_code in (400, 403)


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:8000", "127.0.0.1", "127.0.0.1:80", "[::1]:8000"])
async def test_loopback_hosts_are_answered(bench: TestBench, host: str) -> None:
    assert (await bench.client.get("/v1/models", headers={"host": host})).status_code == 200


ORIGINS = [
    "http://evil.example",
    "https://localhost.evil.example",
    "null",
    "file://",
    "http://localhost:9999",
    "localhost",
    "http://localhost@evil",
]


@pytest.mark.parametrize("origin", ORIGINS)
@pytest.mark.parametrize("method", ["GET", "POST", "OPTIONS"])
async def test_foreign_origins_are_refused(bench: TestBench, origin: str, method: str) -> None:
    response = await bench.client.request(method, "/v1/chat/completions", headers={"origin": origin}, json=chat_body())
    assert response.status_code == 403
    assert "access-control-allow-origin" not in response.headers


async def test_own_origin_is_answered(bench: TestBench) -> None:
    assert (await bench.client.get("/v1/models", headers={"origin": "http://localhost", "host": "localhost"})).status_code == 200


@pytest.mark.parametrize(("allowed", "status"), [([], 200), (["api.example"], 403)])
async def test_bound_elsewhere_any_host_unless_listed(text: TextModel, allowed: list[str], status: int) -> None:
    async with open_bench(text, host="0.0.0.0", allowed_hosts=allowed) as bench:
        assert (await bench.client.get("/v1/models", headers={"host": "other.example"})).status_code == status
        assert (await bench.client.get("/v1/models", headers={"host": "api.example:8000"})).status_code == 200


async def test_bound_to_loopback_its_own_names_stay_beside_those_listed(text: TextModel) -> None:
    async with open_bench(text, allowed_hosts=["api.example"]) as bench:
        for host, status in (("api.example", 200), ("127.0.0.1:8000", 200), ("localhost", 200), ("other.example", 403)):
            assert (await bench.client.get("/v1/models", headers={"host": host})).status_code == status


async def test_keys_and_prompts_are_in_no_output(text: TextModel, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A canary key and a canary prompt through answers, errors, metrics, schemas, both logs and the configuration's repr."""
    canary = "xyzzy-canary-prompt"
    logged = tmp_path / "requests.jsonl"
    outputs: list[str] = []
    with caplog.at_level(logging.DEBUG):
        async with open_bench(text, api_keys=KEYS, request_log=str(logged)) as bench:
            headers = {"authorization": f"Bearer {KEY}", "x-request-id": f"id-{KEY}"[:20]}
            for body in (chat_body(), chat_body(temperature=9), {"model": MODEL}):
                body = {**body, "user": canary}
                outputs.append((await bench.client.post("/v1/chat/completions", json=body, headers=headers)).text)
            bench.replica.on_submit = lambda request, stream: (_ for _ in ()).throw(RuntimeError(f"{canary}"))
            failed = await bench.client.post(
                "/v1/chat/completions", json=chat_body(messages=[{"role": "user", "content": canary}]), headers=headers
            )
            assert failed.status_code == 500
            outputs.append(failed.text)
            for path in ("/metrics", "/openapi.json", "/ready", "/v1/models", "/load"):
                answer = await bench.client.get(path, headers=headers)
                assert answer.status_code == 200, path
                outputs.append(answer.text)
            outputs.append(repr(bench.gateway.config))
    outputs += [logged.read_text(), caplog.text]
    for output in outputs:
        assert KEY not in output
        assert canary not in output
    assert all("detail" not in line or line["detail"] == "RuntimeError" for line in map(json.loads, logged.read_text().splitlines()))


async def test_a_bug_is_answered_without_its_words(bench: TestBench, caplog: pytest.LogCaptureFixture) -> None:
    bench.replica.on_submit = lambda request, stream: (_ for _ in ()).throw(ValueError("at 0x7f12345678 in /srv/secret.py"))
    response = await bench.chat()
    assert response.status_code == 500
    assert response.json()["error"]["code"] == "internal_error"
    assert "0x7f" not in response.text
    assert "secret" not in response.text
    assert response.headers["x-request-id"] in caplog.text


@pytest.mark.parametrize(
    ("given", "logged"), [("abc-123", "abc-123"), ("a" * 129, None), ("a b", None), ("\u00e4", None), ("x\ty", None), ("", None)]
)
async def test_client_request_id_is_only_logged(text: TextModel, tmp_path: Path, given: str, logged: str | None) -> None:
    path = tmp_path / "log"
    async with open_bench(text, request_log=str(path)) as bench:
        response = await bench.client.get("/version", headers=[(b"x-request-id", given.encode())])
    line = json.loads(path.read_text())
    assert line.get("client_request_id") == logged
    assert response.headers["x-request-id"] == line["request_id"] != given


async def test_a_generating_request_without_a_key_is_counted_as_rejected(text: TextModel, tmp_path: Path) -> None:
    log = tmp_path / "log"
    async with open_bench(text, request_log=str(log), api_keys=KEYS) as bench:
        assert (await bench.chat()).status_code == 401
        assert metric(bench.gateway, "headrace_requests_total", model="", replica="", outcome="refused") == 1
    assert json.loads(log.read_text())["outcome"] == "refused"


# -- what a key may use -----------------------------------------------------------------------------------------------------------------

TIERS = {"small": {"requests_per_minute": 3, "max_context_tokens": 64, "models": ["other"]}, "wide": {"models": [MODEL]}}


async def test_a_model_that_the_tier_does_not_name_does_not_exist_for_the_key(text: TextModel) -> None:
    keys = [{"key": KEY, "tenant": "acme", "tier": "small"}, {"key": OTHER, "tenant": "bob", "tier": "wide"}]
    async with open_bench(text, api_keys=keys, tiers=TIERS) as bench:
        refused = {"authorization": f"Bearer {KEY}"}
        response = await bench.client.post("/v1/chat/completions", json=chat_body(), headers=refused)
        assert (response.status_code, response.json()["error"]["code"]) == (404, "model_not_found")
        assert MODEL not in response.json()["error"]["message"].partition(", got")[0], "what is served is not the key's to know"
        assert (await bench.client.post("/tokenize", json={"model": MODEL, "prompt": "x"}, headers=refused)).status_code == 404
        assert (await bench.client.get(f"/v1/models/{MODEL}", headers=refused)).status_code == 404
        assert (await bench.client.get("/v1/models", headers=refused)).json()["data"] == []
        allowed = {"authorization": f"Bearer {OTHER}"}
        assert (await bench.client.post("/v1/chat/completions", json=chat_body(), headers=allowed)).status_code == 200


async def test_a_model_shows_the_limits_that_hold_for_the_key(text: TextModel) -> None:
    tiers = {"small": {"requests_per_minute": 3, "max_context_tokens": 64}}
    async with open_bench(text, api_keys=[{"key": KEY, "tenant": "acme", "tier": "small"}], tiers=tiers) as bench:
        card, *_ = (await bench.client.get("/v1/models", headers={"authorization": f"Bearer {KEY}"})).json()["data"]
    assert card["max_context_tokens"] == 64 < card["max_model_len"]
    assert card["rate_limits"] == {
        "tier": "small",
        "requests_per_minute": 3,
        "input_tokens_per_minute": None,
        "output_tokens_per_minute": None,
        "max_concurrent_requests": None,
    }


@pytest.mark.parametrize(
    ("key", "refusal"),
    [
        ({"tier": "gold"}, r"api_keys\[0\]\.tier: 'gold' is not a tier\. There are: enterprise, premium, standard, free, batch\."),
        ({"weight": 2.0}, r"api_keys\[0\]\.weight: is not a known key\. Known: key, sha256, tenant, user, tier, role\."),
        ({"priority": "batch"}, r"api_keys\[0\]\.priority: is not a known key\. Known: key, sha256, tenant, user, tier, role\."),
    ],
)
@pytest.mark.pure
def test_a_key_names_a_tier_that_there_is(key: dict[str, object], refusal: str) -> None:
    with pytest.raises(ConfigError, match=refusal):
        config_from({"models": [{"name": "m", "upstreams": [{"url": "http://h/v1"}]}], "api_keys": [{"key": KEY, **key}]})
