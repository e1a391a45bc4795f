"""Serves the pages for browsers: GET / says what this server is and where its paths are, /docs what each path takes and gives.

The front page is JSON for everything but browsers. It needs no key and shows nothing of the site. Load balancers send OPTIONS / by default
(HAProxy's `option httpchk`), which is answered as /health is.

/docs is Swagger UI from files in this package. It loads nothing from elsewhere (no CDN, no fonts, no validator), so it works on a machine
without network. Files are served from a table made at start; a name in a URL is looked up there and never joined to a path. These paths and
/openapi.json need no key, and are the same on every server: they show nothing of the site, not even its version.
"""

from __future__ import annotations

from functools import cache
from importlib.resources import files

import msgspec
from msgspec import Struct

from headrace.gateway.generation.service import Service
from headrace.gateway.http.errors import RouteNotFound
from headrace.gateway.http.exchange import Exchange
from headrace.gateway.surfaces import probes

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


async def front(service: Service, exchange: Exchange) -> None:
    if exchange.scope["method"] == "OPTIONS":
        await probes.health(service, exchange)
        return
    if b"text/html" in (exchange.header(b"accept") or b"").lower():
        kind, body = b"text/html; charset=utf-8", _HTML_PAGE
    else:
        kind, body = b"application/json", _JSON_PAGE
    await exchange.reply(200, body, [(b"content-type", kind), (b"vary", b"Accept"), (b"content-security-policy", _CSP)])


_TYPES = {".js": b"text/javascript; charset=utf-8", ".css": b"text/css; charset=utf-8", ".html": b"text/html; charset=utf-8"}
_DOCS_CSP = b"default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; connect-src 'self'"
_DOCS_PAGE = "docs.html"


async def docs(service: Service, exchange: Exchange) -> None:
    await _serve(exchange, _DOCS_PAGE)


async def docs_asset(service: Service, exchange: Exchange) -> None:
    await _serve(exchange, exchange.scope["path_params"]["name"])


@cache
def _assets() -> dict[str, tuple[bytes, bytes]]:
    """Served name -> (content type, bytes)."""
    found: dict[str, tuple[bytes, bytes]] = {}
    for entry in files("headrace.gateway").joinpath("static").iterdir():
        suffix = "." + entry.name.rpartition(".")[2]
        if suffix in _TYPES:
            found[entry.name] = (_TYPES[suffix], entry.read_bytes())
    return found


async def _serve(exchange: Exchange, name: str) -> None:
    asset = _assets().get(name)
    if asset is None:
        raise RouteNotFound(f"/docs/{name}")
    content_type, body = asset
    await exchange.reply(
        200, body, [(b"content-type", content_type), (b"content-security-policy", _DOCS_CSP), (b"cache-control", b"max-age=3600")]
    )
