"""Finds the engines in a Service's EndpointSlices. Pure.

Slices may repeat an endpoint while the cluster moves it from one to another, and a pod with two addresses stands in a slice of each kind.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

MAX_ENGINES = 256
"""A Service may have more, which are not used."""

MAX_NAME_CHARS = 128


@dataclass(frozen=True, slots=True, order=True)
class EngineEndpoint:
    """name: the pod's"""

    name: str
    address: str


@dataclass(slots=True)
class _State:
    is_ready: bool = False
    is_terminating: bool = False


def engines_of(slices: Iterable[Mapping[str, Any]], port: str, known: Collection[EngineEndpoint] = ()) -> tuple[EngineEndpoint, ...]:
    """One endpoint for each pod, by name: of several one that is ready, that is known, that is IPv4.

    known  those that are used now. They stay while their pods are listed and not terminating: a pod that is no longer ready is left to the
           gateways, which see whether its engine answers, so that a node agent that is lost takes no engine away.
    """
    states: dict[EngineEndpoint, _State] = {}
    for each in slices:
        for endpoint, conditions in _endpoints(each, port):
            state = states.setdefault(endpoint, _State())
            state.is_ready |= conditions.get("ready") is not False  # absent counts as ready
            state.is_terminating |= bool(conditions.get("terminating"))
    usable = [each for each, state in states.items() if not state.is_terminating and (state.is_ready or each in known)]
    usable.sort(key=lambda each: (not states[each].is_ready, each not in known, each.address.startswith("["), each))
    chosen: dict[str, EngineEndpoint] = {}
    for endpoint in usable:
        chosen.setdefault(endpoint.name, endpoint)
    by_address = {endpoint.address: endpoint for endpoint in sorted(chosen.values(), reverse=True)}
    return tuple(sorted(by_address.values()))


def has_port(slices: Iterable[Mapping[str, Any]], port: str) -> bool:
    """True also where there is no endpoint, since a slice then names no port."""
    filled = [each for each in slices if each.get("endpoints")]
    return not filled or any(_number(each, port) is not None for each in filled)


def _number(found: Mapping[str, Any], port: str) -> int | None:
    return next((each.get("port") for each in found.get("ports") or () if each.get("name") == port), None)


def _endpoints(found: Mapping[str, Any], port: str) -> Iterator[tuple[EngineEndpoint, Mapping[str, Any]]]:
    number = _number(found, port)
    for each in found.get("endpoints") or () if number is not None else ():
        for address in (each.get("addresses") or ())[:1]:  # further ones have no meaning
            if (host := _host(address)) is not None:
                pod = each.get("targetRef") or {}
                name = str(pod.get("name") or host.strip("[]").replace(":", "-"))[-MAX_NAME_CHARS:]
                yield EngineEndpoint(name, f"{host}:{number}"), each.get("conditions") or {}


def _host(address: str) -> str | None:
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return None  # a slice of names, which no Service with a selector has
    return f"[{parsed}]" if parsed.version == 6 else str(parsed)
