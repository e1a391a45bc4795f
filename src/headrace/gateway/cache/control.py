"""Reads a request's cache options, and makes the key of its answer in the response cache."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import msgspec
from msgspec import Struct

from headrace.core.errors import InvalidRequest
from headrace.gateway.upstream.generation_request import Conversation, PlainPrompts, RequestedGrammar

MAX_CACHE_S = 31_536_000.0


class CacheControl(Struct, kw_only=True, frozen=True, rename=lambda name: name.replace("_", "-")):
    """ttl       most seconds for which the answer is stored
    s_maxage  most seconds since a cached answer was recorded
    """

    use_cache: bool = False
    no_cache: bool = False
    no_store: bool = False
    ttl: float | None = None
    s_maxage: float | None = None

    @classmethod
    def of(cls, given: bool | CacheControl | None) -> CacheControl:
        if given is None or isinstance(given, bool):
            return cls(use_cache=bool(given), no_cache=given is False, no_store=given is False)
        for name, value in (("ttl", given.ttl), ("s-maxage", given.s_maxage)):
            if value is not None and not 0 < value <= MAX_CACHE_S:
                raise InvalidRequest(f"cache.{name}", f"seconds above 0, at most {MAX_CACHE_S:.0f}", value)
        return given


NO_WISH = CacheControl()
NEITHER = CacheControl(no_cache=True, no_store=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """Everything that an answer depends on, except its tenant and `cache_salt`."""

    model: str
    prompt: Conversation | PlainPrompts
    sampling: Mapping[str, Any]
    grammar: RequestedGrammar | None
    control: CacheControl

    @property
    def is_deterministic(self) -> bool:
        return 0 in (self.sampling.get("temperature"), self.sampling.get("top_p")) or self.sampling.get("seed") is not None

    @property
    def has_prompt_logprobs(self) -> bool:
        return self.sampling.get("prompt_logprobs") is not None

    def key(self, salt: bytes, version: str) -> str:
        """version: text that changes with the model's weights, with whatever else results depend on, and with those limits of the
        caller that bound the output
        """
        digest = hashlib.blake2b(salt, digest_size=32, person=b"headrace-answer")
        digest.update(msgspec.msgpack.encode(self._parts(version)))
        return digest.hexdigest()

    def _parts(self, version: str) -> tuple[object, ...]:
        """In the same order in every process: a set is sorted, JSON objects keep their order."""
        prompt, names = self.prompt, list[str]()
        if isinstance(prompt, Conversation):
            names = sorted(prompt.tool_choice.allowed)
            prompt = replace(prompt, tool_choice=replace(prompt.tool_choice, allowed=frozenset()))
        return self.model, version, type(prompt).__name__, prompt, names, sorted(self.sampling.items()), self.grammar


def entry_salt(tenant: str, cache_salt: str) -> bytes:
    """The salt of every cache key of a tenant, the same at every gateway and after a restart."""
    digest = hashlib.blake2b(digest_size=32, person=b"headrace-tenant")
    for part in (tenant.encode(), cache_salt.encode("utf-8", "surrogatepass")):
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.digest()
