"""Chooses the model behind a route's name: by the size and the version that the name asks for, then by weight.

    assistant   assistant:large   assistant@2   assistant:small@2

By weighted rendezvous hashing (Schindelhauer and Schomaker 2005) a changed weight moves senders to or from that target alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from hashlib import blake2b
from typing import NamedTuple

from headrace.core.option import option, required

MAX_WEIGHT = 1e6

POINT_BYTES = 6
"""A double tells each point of this length from 0 and from 1."""


class Sticky(StrEnum):
    REQUEST = "request"
    SESSION = "session"
    TENANT = "tenant"


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteTarget:
    model: str = required("Name of a served model that answers for the route NAME.")
    size: str = option(
        "", "Its size, which a client asks for as `NAME:small`; for all targets or for none. The first one's is the default.", shown="none"
    )
    version: str = option("", "Its version, which a client asks for as `NAME@2`. In quotes where it is a number.", shown="none")
    weight: float = option(
        1.0, "Share among the targets of its size; 0 leaves it to those that ask for its version.", low=0.0, high=MAX_WEIGHT
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ShadowTarget:
    model: str = required("Name of a served model that gets copies of requests, whose output is dropped.")
    share: float = option(1.0, "Part of the route's requests that are copied.", above=0.0, high=1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRoute:
    targets: tuple[RouteTarget, ...] = required("Models that answer for it, each once.")
    sticky: str = option(
        Sticky.REQUEST.value,
        "What stays with one target: each `request` for itself, a `session` (without one its tenant), or a `tenant`. A session's turns "
        "keep their version.",
        one_of=tuple(Sticky),
    )
    shadow: ShadowTarget | None = option(None, "A model that gets copies.")

    @property
    def models(self) -> list[str]:
        return [target.model for target in self.targets]

    @property
    def sizes(self) -> list[str]:
        """The smallest first."""
        return _distinct(each.size for each in self.targets)

    def matching(self, wish: RouteWish) -> list[RouteTarget]:
        return [each for each in self.targets if wish.size in ("", each.size) and wish.version in ("", each.version)]

    def reachable(self, wish: RouteWish) -> list[RouteTarget]:
        """The targets that `choose_target` may choose."""
        among = self.matching(wish)
        sizes = _distinct(each.size for each in among)
        found: list[RouteTarget] = []
        for size in _distinct([*sizes[:1], *sizes[-1:]]):
            of_size = [each for each in among if each.size == size]
            found += [each for each in of_size if each.weight] or of_size[:1]
        return found

    def forms(self, name: str) -> list[str]:
        versions = _distinct(each.version for each in self.targets)
        return [name, *(f"{name}:{size}" for size in self.sizes if size), *(f"{name}@{version}" for version in versions if version)]


class RouteWish(NamedTuple):
    """The parts of a client's name. Empty: any size, any version"""

    route: str
    size: str = ""
    version: str = ""


def wish_of(name: str) -> RouteWish | None:
    rest, at, version = name.partition("@")
    route, colon, size = rest.partition(":")
    return None if (at and not version) or (colon and not size) else RouteWish(route, size, version)


class Sender(NamedTuple):
    """session: empty without one"""

    tenant: str
    session: str
    request_id: str

    def key(self, sticky: str) -> str:
        if self.session and sticky != Sticky.TENANT:
            return f"{self.tenant}\0{self.session}"
        return self.request_id if sticky == Sticky.REQUEST else self.tenant


class SizeHint(NamedTuple):
    """is_large: the last of the sizes, else the first; reason: a part of a sentence"""

    is_large: bool
    reason: str


def choose_target(name: str, route: ModelRoute, wish: RouteWish, sender: Sender, hint: Callable[[], SizeHint]) -> tuple[RouteTarget, str]:
    """The target, and why, in one sentence. name: the client's; wish: matches at least one target; hint: asked where the name and the
    version leave several sizes
    """
    among, why = route.matching(wish), f"{name} leads to it"
    sizes = _distinct(each.size for each in among)
    if len(sizes) > 1:
        is_large, reason = hint()
        size = sizes[-1 if is_large else 0]
        among, why = [each for each in among if each.size == size], f"{why} in the size {size} ({reason})"
    if len(among) > 1:
        key = sender.key(route.sticky)
        chosen = max(among, key=lambda each: -each.weight / math.log(_point(wish.route, each.model, key)))
        whole = sum(each.weight for each in among)
        return chosen, f"{why}, by its weight of {chosen.weight:g} in {whole:g} for each {route.sticky}"
    return among[0], why


def is_copied(share: float, route: str, request_id: str) -> bool:
    return _point(route, "\0", request_id) < share


def _point(*parts: str) -> float:
    """Above 0 and below 1, uniform."""
    digest = blake2b("\0\0".join(parts).encode(), digest_size=POINT_BYTES).digest()
    return (int.from_bytes(digest) + 0.5) / (1 << 8 * POINT_BYTES)


def _distinct(words: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(words))
