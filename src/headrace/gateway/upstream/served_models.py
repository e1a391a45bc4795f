"""The models that this gateway serves, by name and alias."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NoReturn

from headrace.core.errors import InvalidRequest, ModelNotFound, Unavailable
from headrace.gateway.access.open_requests import UseCount
from headrace.gateway.access.principal import Principal
from headrace.gateway.upstream.generation_request import Conversation, GenerationRequest, PlainPrompts, PrincipalFacts
from headrace.gateway.upstream.seam import ReplicaHealth, Upstream
from headrace.observe.metrics import ReplicaReading
from headrace.policy.admission.unsent import UnsentRequests


@dataclass(frozen=True, slots=True, eq=False)
class ServedModel:
    """One model as one configuration has it.

    created  when this gateway began to serve it, in Unix seconds
    smaller  name of the model that answers while this one is busy; "" for none
    users    the requests that asked for it and have not ended
    unsent   its admitted requests that no replica was sent yet
    """

    name: str
    aliases: tuple[str, ...]
    upstream: Upstream
    created: int
    users: UseCount = field(default_factory=UseCount)
    smaller: str = ""
    unsent: UnsentRequests = field(default_factory=UnsentRequests)

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name, *self.aliases)

    @property
    def is_alive(self) -> bool:
        """True while at least one of its replicas is connected."""
        return any(replica.is_connected for replica in self.upstream.replicas())

    def readings(self) -> Iterator[ReplicaReading]:
        """Its replicas first, then retired ones, which may have the same names."""
        for replica in (*self.upstream.replicas(), *self.upstream.retired_replicas()):
            yield ReplicaReading(self.name, replica.name, not replica.reason, replica.load)


class ModelTable:
    """Names and aliases to models. Nothing a client writes becomes a path: a name is in the table or it is refused."""

    def __init__(self, models: Iterable[ServedModel]) -> None:
        self.models = tuple(models)
        self._by_name = {name: model for model in self.models for name in model.names}

    @property
    def names(self) -> list[str]:
        return list(self._by_name)

    def usable_by(self, principal: Principal) -> ModelTable:
        """The models that a caller may use: for it there are no other ones."""
        return self if principal.may_use_all else ModelTable(model for model in self.models if principal.may_use(*model.names))

    def get(self, name: str) -> ServedModel:
        """Raises ModelNotFound naming what is served."""
        model = self._by_name.get(name)
        if model is None:
            raise ModelNotFound(name, self.names)
        return model

    def only(self, name: str | None) -> ServedModel:
        """The named model, or the single one where the client named none (vLLM's /tokenize allows it)."""
        if name is not None:
            return self.get(name)
        if len(self.models) == 1:
            return self.models[0]
        raise InvalidRequest("model", f"one of: {', '.join(self.names)}", remedy="It is required where several models are served.")


UNREADABLE_RETRY_S = 10.0
"""Seconds after which a client may try a model again whose text cannot be read: an operator has to mend its files."""

UNREADABLE = "its tokenizer or chat template cannot be used"
"""Without a path: clients may read it."""


class UnreadableModel(Upstream):
    """A model whose tokenizer or chat template cannot be used: no replica of it is connected to.

    Every request is refused as Unavailable. An operator mends the files and has the configuration read again (`control.texts`). The whole
    reason is in the log and in `headrace status`.
    """

    def __init__(self, model: str, replicas: Sequence[str]) -> None:
        """replicas: their names"""
        self._model = model
        self._replicas = replicas

    def replicas(self) -> list[ReplicaHealth]:
        return [ReplicaHealth(name, is_connected=False, reason=UNREADABLE) for name in self._replicas]

    async def prepare(self, request: GenerationRequest, principal: PrincipalFacts) -> NoReturn:
        raise self._refusal()

    async def tokenize(self, prompt: Conversation | PlainPrompts, *, needs_texts: bool, tenant: str) -> NoReturn:
        raise self._refusal()

    async def detokenize(self, token_ids: Sequence[int], *, tenant: str) -> NoReturn:
        raise self._refusal()

    def _refusal(self) -> Unavailable:
        return Unavailable(f"The model {self._model} cannot be served now: {UNREADABLE}.", retry_after_s=UNREADABLE_RETRY_S)
