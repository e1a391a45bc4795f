"""Reads what a gateway has counted of its limits, for tests."""

from __future__ import annotations

from gateway_kit import TestBench, eventually

from headrace.gateway.http.asgi import OPENAI
from headrace.gateway.limits.rules import rules_of
from headrace.policy.limits.book import Claim


async def used(bench: TestBench, limit: str, key: str) -> int:
    """What counts of a limit of that key's tenant, once everything is charged."""
    limiter = bench.gateway.service.limiter
    await eventually(lambda: not limiter.num_uncharged)
    principal = await bench.gateway.active.authenticator.principal([(b"authorization", f"Bearer {key}".encode())], OPENAI)
    claims: list[Claim] = [rule.claim(None) for rule in rules_of(principal) if rule.name == limit]
    (reading,) = (await limiter._store.take(None, claims)).readings
    return reading.current
