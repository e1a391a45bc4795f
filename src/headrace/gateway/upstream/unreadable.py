"""A model whose tokenizer or chat template cannot be used: its requests are refused, and no replica of it is connected to.

An operator mends the files and has the configuration read again (`control.texts`). The whole reason is in the log and in `headrace status`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

from headrace.core.errors import Unavailable
from headrace.core.request import PriorityClass
from headrace.gateway.upstream.generation_request import Conversation, GenerationRequest, PlainPrompts, PrincipalFacts
from headrace.gateway.upstream.seam import ReplicaHealth
from headrace.policy.admission.joining import JoiningRequests

RETRY_S = 10.0
"""Seconds after which a client may try again: an operator has to act first."""

REASON = "its tokenizer or chat template cannot be used"
"""Without a path: clients may read it."""


class UnreadableModel:
    """An `Upstream`. Every request is refused as Unavailable."""

    max_model_len: int | None = None
    fingerprint: str | None = None
    version = ""

    def __init__(self, model: str, replicas: Sequence[str]) -> None:
        """replicas: their names"""
        self._model = model
        self._replicas = replicas

    def queue(self, priority: PriorityClass, joining: JoiningRequests) -> None:
        return None

    def replicas(self) -> list[ReplicaHealth]:
        return [ReplicaHealth(name, is_connected=False, reason=REASON) for name in self._replicas]

    def retired_replicas(self) -> list[ReplicaHealth]:
        return []

    async def prepare(self, request: GenerationRequest, principal: PrincipalFacts) -> NoReturn:
        raise self._refusal()

    async def tokenize(self, prompt: Conversation | PlainPrompts, *, needs_texts: bool, tenant: str) -> NoReturn:
        raise self._refusal()

    async def detokenize(self, token_ids: Sequence[int], *, tenant: str) -> NoReturn:
        raise self._refusal()

    def _refusal(self) -> Unavailable:
        return Unavailable(f"The model {self._model} cannot be served now: {REASON}.", retry_after_s=RETRY_S)
