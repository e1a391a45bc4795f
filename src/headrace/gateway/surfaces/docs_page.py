"""/docs: Swagger UI from files in this package. No CDN, no fonts, no validator: it works on a machine without network.

Files are served from a table made at start; a name in a URL is looked up there and never joined to a path.
"""

from __future__ import annotations

from functools import cache
from importlib.resources import files

from headrace.gateway.generation.service import Service
from headrace.gateway.http.errors import RouteNotFound
from headrace.gateway.http.exchange import Exchange

_TYPES = {".js": b"text/javascript; charset=utf-8", ".css": b"text/css; charset=utf-8", ".html": b"text/html; charset=utf-8"}
_CSP = b"default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; connect-src 'self'"
_PAGE = "docs.html"


async def page(service: Service, exchange: Exchange) -> None:
    await _serve(exchange, _PAGE)


async def asset(service: Service, exchange: Exchange) -> None:
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
        200, body, [(b"content-type", content_type), (b"content-security-policy", _CSP), (b"cache-control", b"max-age=3600")]
    )
