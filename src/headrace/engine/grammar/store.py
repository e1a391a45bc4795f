"""Keeps the compiled grammars of one engine: by tenant, bounded in bytes, and pinned while a request uses them."""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

from headrace.core.errors import Overloaded
from headrace.core.grammar import Grammar
from headrace.engine.grammar.limits import STATES_BYTES, STORE_BYTES, TENANT_BYTES

if TYPE_CHECKING:
    from llguidance import LLMatcher


class GrammarKey(NamedTuple):
    tenant: str
    grammar: Grammar


class Compiler(Protocol):
    num_words: int

    def compile(self, grammar: Grammar) -> LLMatcher: ...


@dataclass(slots=True, eq=False)
class _Compiled:
    """template: never advanced; copies of it share its lexer"""

    template: LLMatcher
    num_bytes: int
    num_pins: int = 0


class GrammarStore:
    """Used by several threads."""

    def __init__(self, compiler: Compiler, *, max_bytes: int = STORE_BYTES, tenant_bytes: int = TENANT_BYTES) -> None:
        self.num_words = compiler.num_words
        self.num_bytes = 0
        self._compiler = compiler
        self._max_bytes, self._tenant_bytes = max_bytes, tenant_bytes
        self._compiled: OrderedDict[GrammarKey, _Compiled] = OrderedDict()  # least recently used first
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._compiled)

    def pin(self, key: GrammarKey) -> bool:
        with self._lock:
            if (compiled := self._compiled.get(key)) is None:
                return False
            compiled.num_pins += 1
            self._compiled.move_to_end(key)
            return True

    def unpin(self, key: GrammarKey) -> None:
        with self._lock:
            self._compiled[key].num_pins -= 1

    def add(self, key: GrammarKey, template: LLMatcher, num_bytes: int) -> None:
        """Raises Overloaded if the grammars in use leave no room."""
        num_bytes += STATES_BYTES
        with self._lock:
            if key not in self._compiled:
                self._make_room(key.tenant, num_bytes)
                self._compiled[key] = _Compiled(template, num_bytes)
                self.num_bytes += num_bytes
            self._compiled[key].num_pins += 1

    def template(self, grammar: Grammar) -> LLMatcher:
        """A grammar that no request has prepared, as in a replay, is compiled."""
        with self._lock:
            compiled = self._pinned(grammar)
        return self._compiler.compile(grammar) if compiled is None else compiled.template

    def renewed(self, grammar: Grammar) -> LLMatcher:
        template = self._compiler.compile(grammar)
        with self._lock:
            if (compiled := self._pinned(grammar)) is not None:
                compiled.template = template
        return template

    def unshared(self, grammar: Grammar) -> LLMatcher:
        return self._compiler.compile(grammar)

    def check(self) -> None:
        with self._lock:
            assert self.num_bytes == sum(compiled.num_bytes for compiled in self._compiled.values()) <= self._max_bytes
            assert all(compiled.num_pins >= 0 for compiled in self._compiled.values())
            for tenant in {key.tenant for key in self._compiled}:
                assert self._bytes_of(tenant) <= self._tenant_bytes

    def _pinned(self, grammar: Grammar) -> _Compiled | None:
        return next((compiled for key, compiled in self._compiled.items() if compiled.num_pins and key.grammar == grammar), None)

    def _bytes_of(self, tenant: str) -> int:
        return sum(compiled.num_bytes for key, compiled in self._compiled.items() if key.tenant == tenant)

    def _make_room(self, tenant: str, num_bytes: int) -> None:
        own = [key for key in self._compiled if key.tenant == tenant]
        if not self._drop_idle(own, self._bytes_of(tenant) + num_bytes - self._tenant_bytes):
            raise Overloaded(f"this tenant's grammars in use take all of their {self._tenant_bytes >> 20} MiB")
        if not self._drop_idle(list(self._compiled), self.num_bytes + num_bytes - self._max_bytes):
            raise Overloaded(f"the grammars in use take all of their {self._max_bytes >> 20} MiB")

    def _drop_idle(self, keys: list[GrammarKey], excess: int) -> bool:
        for key in keys:
            if excess <= 0:
                return True
            if not self._compiled[key].num_pins:
                num_bytes = self._compiled.pop(key).num_bytes
                self.num_bytes -= num_bytes
                excess -= num_bytes
        return excess <= 0
