"""Keeps the weights of adapters on the host, bounded in number and so in bytes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection
from typing import Generic, Protocol, TypeVar


class AdapterWeights(Protocol):
    @property
    def num_bytes(self) -> int: ...


Weights = TypeVar("Weights", bound=AdapterWeights)


class AdapterPool(Generic[Weights]):
    """By digest, so that the old weights of a name stay until their last request ends. Has no lock: its owner has.

    highest_bytes, num_evicted  since it was made
    """

    def __init__(self, max_adapters: int, max_bytes: int) -> None:
        """max_bytes: of one adapter"""
        self._max_adapters, self._max_bytes = max_adapters, max_bytes
        self._weights: OrderedDict[str, Weights] = OrderedDict()  # least recently used first
        self.num_bytes = self.highest_bytes = self.num_evicted = 0

    def __contains__(self, digest: str) -> bool:
        return digest in self._weights

    def get(self, digest: str) -> Weights | None:
        return self._weights.get(digest)

    def use(self, digest: str) -> None:
        self._weights.move_to_end(digest)

    def make_room(self, kept: Collection[str | None]) -> None:
        """For one more, which is one of `kept`: those that have a place. There are at most `max_adapters` of them."""
        for digest in list(self._weights):
            if len(self._weights) < self._max_adapters:
                return
            if digest not in kept:
                self.num_bytes -= self._weights.pop(digest).num_bytes
                self.num_evicted += 1

    def add(self, digest: str, weights: Weights) -> None:
        """The caller has made room."""
        self._weights[digest] = weights
        self.num_bytes += weights.num_bytes
        self.highest_bytes = max(self.highest_bytes, self.num_bytes)

    def check(self) -> None:
        assert len(self._weights) <= self._max_adapters
        assert self.num_bytes == sum(weights.num_bytes for weights in self._weights.values())
        assert all(weights.num_bytes <= self._max_bytes for weights in self._weights.values())
