"""Implements GET /v1/usage: what the caller's own tenant has used, from ClickHouse where it is configured, else from this machine's
usage.db.
"""

from __future__ import annotations

import msgspec
from msgspec import Struct

from headrace.gateway.generation.service import Service
from headrace.gateway.http.errors import RouteNotFound
from headrace.gateway.http.exchange import Exchange
from headrace.gateway.ledger.usage_query import GROUPS, UsageQuery, groups_of, unix_ms_of
from headrace.gateway.surfaces.endpoint import QueryParameter, query_of

MAX_ROWS = 1000
"""Rows of one answer; `has_more` says that there are more."""

USAGE_QUERY = (
    QueryParameter("by", f"Groups: one or more of {', '.join(GROUPS)}, with commas between. Default day."),
    QueryParameter("since", "From this time on: a day, a time in UTC, or how long ago (90m, 24h, 7d). Default 30d."),
    QueryParameter("until", "Before this time. Default now."),
)


class UsageRow(Struct, omit_defaults=True):
    """Sums of one group. cost: in the operator's currency"""

    requests: int
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    cost_nanos: int
    cost: float
    tenant: str | None = None
    user: str | None = None
    key: str | None = None
    model: str | None = None
    day: str | None = None


class UsageList(Struct):
    object: str
    data: list[UsageRow]
    has_more: bool


async def usage(service: Service, exchange: Exchange) -> None:
    """GET of usage rows. 404 on a server without a state folder, which keeps no usage."""
    if service.ledger is None:
        raise RouteNotFound(exchange.scope["path"])
    query = _query(exchange, service.unix_time())
    rows = await service.ledger.rows(query)
    found = [msgspec.convert(row, UsageRow) for row in rows[:MAX_ROWS]]
    await exchange.reply(200, msgspec.json.encode(UsageList(object="list", data=found, has_more=len(rows) > MAX_ROWS)))


def _query(exchange: Exchange, now: float) -> UsageQuery:
    """The usage query of a request, about the caller's tenant alone. Raises InvalidRequest."""
    given = query_of(exchange, USAGE_QUERY, "a parameter of /v1/usage: by, since, until")
    return UsageQuery(
        by=groups_of([given.get("by", "day")]),
        since_ms=max(unix_ms_of("since", given.get("since", "30d"), now), int(1000 * exchange.principal.tenant_since)),
        until_ms=unix_ms_of("until", given["until"], now) if "until" in given else None,
        tenant=exchange.principal.tenant,
        max_rows=MAX_ROWS + 1,
    )
