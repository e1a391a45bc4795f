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
"""Most seconds of `ttl` and `s-maxage`: a year."""


class CacheControl(Struct, kw_only=True, frozen=True, rename=lambda name: name.replace("_", "-")):
    """A body's `cache`, as LiteLLM's proxy has it.

    use_cache  also where the answer is drawn at random
    no_cache   compute the answer, whatever is kept
    no_store   do not keep the answer
    ttl        seconds that it is kept at most
    s_maxage   seconds that an answer may be old, which is taken
    """

    use_cache: bool = False
    no_cache: bool = False
    no_store: bool = False
    ttl: float | None = None
    s_maxage: float | None = None

    @classmethod
    def of(cls, given: bool | CacheControl | None) -> CacheControl:
        """true: use it; false: neither take nor keep an answer. Raises InvalidRequest."""
        if given is None or isinstance(given, bool):
            return cls(use_cache=bool(given), no_cache=given is False, no_store=given is False)
        for name, value in (("ttl", given.ttl), ("s-maxage", given.s_maxage)):
            if value is not None and not 0 < value <= MAX_CACHE_S:
                raise InvalidRequest(f"cache.{name}", f"seconds above 0, at most {MAX_CACHE_S:.0f}", value)
        return given


NO_WISH = CacheControl()
NEITHER = CacheControl(no_cache=True, no_store=True)
"""Neither take nor keep an answer. Where a conversation is shortened to fit, the answer depends on more than the conversation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """All that an answer depends on, beside its tenant and `cache_salt`.

    model     its name
    sampling  the parameters that the client gave, by the names of `SamplingParams`
    control   the client's wish
    """

    model: str
    prompt: Conversation | PlainPrompts
    sampling: Mapping[str, Any]
    grammar: RequestedGrammar | None
    control: CacheControl

    @property
    def is_deterministic(self) -> bool:
        """Whether the same answer is meant each time: it is greedy, or its seed is given."""
        return self.sampling.get("temperature") == 0 or self.sampling.get("seed") is not None

    @property
    def has_prompt_logprobs(self) -> bool:
        return self.sampling.get("prompt_logprobs") is not None

    def key(self, salt: bytes, version: str) -> str:
        """Name of the answer among all.

        salt     of the tenant and of the client's `cache_salt`
        version  of the model's weights and whatever else results depend on, as far as it is known, and the numbers of the caller's limits
                 that bound the output
        """
        digest = hashlib.blake2b(salt, digest_size=32, person=b"headrace-answer")
        digest.update(msgspec.msgpack.encode(self._parts(version)))
        return digest.hexdigest()

    def _parts(self, version: str) -> tuple[object, ...]:
        """In one order in every process: a set has none, so it is sorted. Keys of objects keep the order that the prompt shows."""
        prompt, names = self.prompt, list[str]()
        if isinstance(prompt, Conversation):
            names = sorted(prompt.tool_choice.allowed)
            prompt = replace(prompt, tool_choice=replace(prompt.tool_choice, allowed=frozenset()))
        return self.model, version, type(prompt).__name__, prompt, names, sorted(self.sampling.items()), self.grammar


def entry_salt(tenant: str, cache_salt: str) -> bytes:
    """Begins the key of every entry of a tenant: the same at every gateway of a store, and at its next start. The tenant's name comes from
    the key of the request, so no client can choose it."""
    digest = hashlib.blake2b(digest_size=32, person=b"headrace-tenant")
    for part in (tenant.encode(), cache_salt.encode("utf-8", "surrogatepass")):
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.digest()
