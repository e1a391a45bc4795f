"""GET /: what this server is and where its paths are, as a page for browsers and as JSON elsewhere. It wants no key and shows nothing of
the site.

Load balancers send OPTIONS / by default (HAProxy's `option httpchk`): it is answered as /health is.
"""

from __future__ import annotations

import msgspec
from msgspec import Struct

from headrace.gateway.generation.service import Service
from headrace.gateway.http.exchange import Exchange
from headrace.gateway.surfaces import probes

ABOUT = "Headrace answers OpenAI's API here. Where the server has keys, every path but / and the probes wants 'Authorization: Bearer KEY'."
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


async def page(service: Service, exchange: Exchange) -> None:
    if exchange.scope["method"] == "OPTIONS":
        await probes.health(service, exchange)
        return
    if b"text/html" in (exchange.header(b"accept") or b"").lower():
        kind, body = b"text/html; charset=utf-8", _HTML_PAGE
    else:
        kind, body = b"application/json", _JSON_PAGE
    await exchange.reply(200, body, [(b"content-type", kind), (b"vary", b"Accept"), (b"content-security-policy", _CSP)])
