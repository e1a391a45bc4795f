"""Starts a gateway and its engines with a link to each that can be made bad: by a proxy in this process, or between network namespaces."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from bench.network_faults import Direction, FaultyLink, LinkFault
from bench.storms.by_hand import HERE, HandStarted, site_by_hand
from bench.storms.namespaces import namespaces

PACE_S = 0.01
FAKE_ENGINE: dict[str, Any] = {"max_num_seqs": 64}
REAL_ENGINE: dict[str, Any] = {"max_num_seqs": 16, "num_threads": 1, "deterministic": True, "num_kv_blocks": 800}


class Link(Protocol):
    """What is between the gateway and one engine."""

    def set(self, fault: LinkFault, *directions: Direction) -> None: ...


@dataclass(frozen=True, slots=True)
class Linked:
    """A gateway whose engines are ready, and the links to them."""

    gateway: HandStarted
    links: Mapping[str, Link]

    @property
    def url(self) -> str:
        return f"http://{self.gateway.address}"


@asynccontextmanager
async def linked(num_engines: int, *, is_fake: bool, in_namespaces: bool) -> AsyncIterator[Linked]:
    """is_fake: engines that compute nothing. Raises AssertionError with the log of a process that ends or does not start."""
    names = [f"e{number}" for number in range(num_engines)]
    async with AsyncExitStack() as stack:
        links: dict[str, Link] = {}
        places, gateway_at = dict.fromkeys(names, HERE), HERE
        if in_namespaces:
            made = stack.enter_context(namespaces(names))
            places, gateway_at, links = made.engines, made.gateway, dict(made.links)
        site = stack.enter_context(site_by_hand(*dict.fromkeys(place.host for place in places.values())))
        fake, options = ({"step_seconds": PACE_S}, FAKE_ENGINE) if is_fake else (None, REAL_ENGINE)
        engines = {name: site.engine(name, at=places[name], fake=fake, engine=options) for name in names}
        addresses = {}
        for name, engine in engines.items():
            await asyncio.to_thread(engine.wait_serving)
            addresses[name] = engine.address
            if not in_namespaces:
                links[name] = link = await stack.enter_async_context(FaultyLink(HERE.host, engine.port, seed=len(links)))
                addresses[name] = f"{HERE.host}:{link.port}"
        gateway = site.gateway("gateway", addresses, at=gateway_at)
        await asyncio.to_thread(gateway.wait_ready)
        yield Linked(gateway, links)
        assert gateway.process is not None
        assert gateway.process.poll() is None, f"the gateway ended:\n{gateway.log[-3000:]}"
