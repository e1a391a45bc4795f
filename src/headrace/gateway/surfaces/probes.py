"""/health, /live, /ready, /version, /load and /metrics: what is alive, what is ready and why not, how much runs."""

from __future__ import annotations

import msgspec
from msgspec import Struct

import headrace
from headrace.gateway.generation.service import Service
from headrace.gateway.http.exchange import Exchange

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


class VersionReply(Struct):
    version: str


class LoadReply(Struct):
    """vLLM's /load: requests in this server now."""

    server_load: int


async def live(service: Service, exchange: Exchange) -> None:
    """200 while this process answers, which means that its event loop turns. Nothing else is checked."""
    await exchange.reply(200, _encode(ProbeReply(ok=True, replicas=[])))


async def health(service: Service, exchange: Exchange) -> None:
    """vLLM's meaning: 200 while every model has a living engine process, else 503."""
    dead = [model.name for model in service.models.models if not model.is_alive]
    reason = f"no engine for: {', '.join(dead)}" if dead else ""
    await exchange.reply(503 if dead else 200, _encode(ProbeReply(ok=not dead, replicas=[], reason=reason)))


async def ready(service: Service, exchange: Exchange) -> None:
    """200 while this gateway takes requests, prompts can be read, and every replica of every model answers and its loop turns. Foreign
    servers are listed as well: one that fails does so for every gateway, and sending clients to another gateway would not help."""
    replicas = [(model.name, replica) for model in service.models.models for replica in model.upstream.replicas()]
    states = [
        ReplicaReadiness(model=model, replica=replica.name, ok=not replica.reason, reason=replica.reason) for model, replica in replicas
    ]
    reasons = [f"{model}/{replica.name} {replica.reason}" for model, replica in replicas if replica.reason and not replica.is_foreign]
    if service.text_pool.reason:
        reasons.append(service.text_pool.reason)
    reason = "draining" if service.open_requests.is_draining else "; ".join(reasons)
    await exchange.reply(503 if reason else 200, _encode(ProbeReply(ok=not reason, replicas=states, reason=reason)))


async def version(service: Service, exchange: Exchange) -> None:
    await exchange.reply(200, _encode(VersionReply(version=headrace.__version__)))


async def load(service: Service, exchange: Exchange) -> None:
    """vLLM's /load: generating requests in this server now."""
    await exchange.reply(200, _encode(LoadReply(server_load=service.open_requests.num_open)))


async def metrics(service: Service, exchange: Exchange) -> None:
    accept = (exchange.header(b"accept") or b"").decode("latin-1")
    body, content_type = service.metrics.page(accept)
    await exchange.reply(200, body, [(b"content-type", content_type.encode())])
