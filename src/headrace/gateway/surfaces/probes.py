"""Answers /health, /live, /ready, /version, /load and /metrics, and serves the pages for browsers, / and /docs.

Load balancers send OPTIONS / by default (HAProxy's `option httpchk`), which is answered as /health is. /docs is Swagger UI from files in
this package. The pages and /openapi.json need no key and show nothing of the site, not even its version.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from importlib.resources import files

import msgspec
from msgspec import Struct

import headrace
from headrace.core.errors import InvalidRequest
from headrace.gateway.generation.account import RequestAccount
from headrace.gateway.generation.service import Service
from headrace.gateway.http.errors import RouteNotFound
from headrace.gateway.http.exchange import Exchange
from headrace.gateway.surfaces.endpoint import QueryParameter, query_of
from headrace.gateway.upstream.served_models import ServedModel

_encode = msgspec.json.encode


class ReplicaReadiness(Struct):
    """Whether one replica is ready. reason: why not, else empty"""

    model: str
    replica: str
    ok: bool
    reason: str


class ProbeReply(Struct):
    """Body of /health, /live and /ready: the verdict and why."""

    ok: bool
    replicas: list[ReplicaReadiness]
    reason: str = ""


READY_QUERY = (
    QueryParameter("model", "Ask for this model, alias or route alone: one of its replicas must be ready."),
    QueryParameter("strict", "Without a value, or `true`: every replica must be ready."),
)
FAILING = "failed several requests in a row"

_STRICT = {"": True, "true": True, "1": True, "false": False, "0": False}


class VersionReply(Struct):
    version: str


class LoadReply(Struct):
    """vLLM's /load: requests in this server now."""

    server_load: int


async def live(service: Service, exchange: Exchange, account: RequestAccount) -> None:
    await exchange.reply(200, _encode(ProbeReply(ok=True, replicas=[])))


async def health(service: Service, exchange: Exchange, account: RequestAccount) -> None:
    """vLLM's meaning: 200 while every model has a living engine process, else 503."""
    dead = [model.name for model in service.models.models if not (model.is_alive or model.upstream.is_asleep)]
    reason = f"no engine for: {', '.join(dead)}" if dead else ""
    await exchange.reply(503 if dead else 200, _encode(ProbeReply(ok=not dead, replicas=[], reason=reason)))


async def ready(service: Service, exchange: Exchange, account: RequestAccount) -> None:
    """The query may ask for more (READY_QUERY). The body lists the replicas of all models whatever was asked."""
    query = _ready_query(exchange)
    models = service.models.configured(query["model"]) if "model" in query else service.models.models
    reasons = [_why_not_ready(models, is_strict=_STRICT[query.get("strict", "false")]), service.text_pool.reason]
    reason = "draining" if service.open_requests.is_draining else "; ".join(filter(None, reasons))
    states = [
        ReplicaReadiness(model=model.name, replica=replica.name, ok=not replica.reason, reason=replica.reason)
        for model in service.models.models
        for replica in model.upstream.replicas()
    ]
    await exchange.reply(503 if reason else 200, _encode(ProbeReply(ok=not reason, replicas=states, reason=reason)))


def _ready_query(exchange: Exchange) -> dict[str, str]:
    query = query_of(exchange, READY_QUERY, "a parameter of /ready: model or strict")
    if query.get("strict", "") not in _STRICT:
        raise InvalidRequest("strict", "no value, true or false", query["strict"])
    return query


def _why_not_ready(models: Sequence[ServedModel], *, is_strict: bool) -> str:
    """Empty: ready. A foreign server always counts as ready: it would fail for every gateway."""
    replicas = [(model.name, replica) for model in models for replica in model.upstream.replicas()]
    missing = [f"{model}/{replica.name} {replica.reason}" for model, replica in replicas if replica.is_missing]
    failing = [f"{model}/{replica.name} {FAILING}" for model, replica in replicas if replica.is_failing and not replica.reason]
    empty = [f"{model.name} has no replica" for model in models if not (model.upstream.replicas() or model.upstream.is_asleep)]
    if is_strict or len(missing) == len(replicas):
        return "; ".join([*missing, *(failing if is_strict else ()), *empty])
    return ""


async def version(service: Service, exchange: Exchange, account: RequestAccount) -> None:
    await exchange.reply(200, _encode(VersionReply(version=headrace.__version__)))


async def load(service: Service, exchange: Exchange, account: RequestAccount) -> None:
    """In all workers of this server. With several tenants, a key sees its own tenant's requests."""
    num_open = await service.site_metrics.num_open(service.shown_tenants(account.principal))
    await exchange.reply(200, _encode(LoadReply(server_load=num_open)))


async def metrics(service: Service, exchange: Exchange, account: RequestAccount) -> None:
    accept = (exchange.header(b"accept") or b"").decode("latin-1")
    body, content_type = await service.site_metrics.page(accept, service.shown_tenants(account.principal))
    await exchange.reply(200, body, [(b"content-type", content_type.encode())])


ABOUT = "Headrace answers OpenAI's API here. Where it has keys, all but /, the docs and the probes want 'Authorization: Bearer KEY'."
_CSP = b"default-src 'none'"


class FrontPage(Struct):
    """Paths of this server by what they are for. `chat` takes POST."""

    about: str = ABOUT
    chat: str = "/v1/chat/completions"
    models: str = "/v1/models"
    docs: str = "/docs"
    openapi: str = "/openapi.json"
    metrics: str = "/metrics"
    health: str = "/health"
    ready: str = "/ready"


_JSON_PAGE = msgspec.json.encode(FrontPage())
_HTML_PAGE = f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>Headrace</title></head><body>
<h1>Headrace</h1>
<p>{ABOUT}</p>
<ul>
<li><a href="/docs">Docs</a>: every path, with what it takes and gives (<a href="/openapi.json">openapi.json</a>)</li>
<li>Chat: POST /v1/chat/completions, or <code>headrace chat --url</code> and this address; <a href="/v1/models">models</a></li>
<li><a href="/metrics">Metrics</a> for Prometheus; <a href="/health">health</a>, <a href="/ready">ready</a></li>
</ul>
</body></html>
""".encode()


async def front(service: Service, exchange: Exchange, account: RequestAccount) -> None:
    if exchange.scope["method"] == "OPTIONS":
        await health(service, exchange, account)
        return
    if b"text/html" in (exchange.header(b"accept") or b"").lower():
        kind, body = b"text/html; charset=utf-8", _HTML_PAGE
    else:
        kind, body = b"application/json", _JSON_PAGE
    await exchange.reply(200, body, [(b"content-type", kind), (b"vary", b"Accept"), (b"content-security-policy", _CSP)])


_TYPES = {".js": b"text/javascript; charset=utf-8", ".css": b"text/css; charset=utf-8", ".html": b"text/html; charset=utf-8"}
_DOCS_CSP = b"default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; connect-src 'self'"
_DOCS_PAGE = "docs.html"


async def docs(service: Service, exchange: Exchange, account: RequestAccount) -> None:
    await _serve(exchange, _DOCS_PAGE)


async def docs_asset(service: Service, exchange: Exchange, account: RequestAccount) -> None:
    await _serve(exchange, exchange.scope["path_params"]["name"])


@cache
def _assets() -> dict[str, tuple[bytes, bytes]]:
    pages: dict[str, tuple[bytes, bytes]] = {}
    for entry in files("headrace.gateway").joinpath("static").iterdir():
        suffix = "." + entry.name.rpartition(".")[2]
        if suffix in _TYPES:
            pages[entry.name] = (_TYPES[suffix], entry.read_bytes())
    return pages


async def _serve(exchange: Exchange, name: str) -> None:
    asset = _assets().get(name)
    if asset is None:
        raise RouteNotFound(f"/docs/{name}")
    content_type, body = asset
    await exchange.reply(
        200, body, [(b"content-type", content_type), (b"content-security-policy", _DOCS_CSP), (b"cache-control", b"max-age=3600")]
    )
