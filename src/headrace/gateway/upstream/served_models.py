"""Finds the models that this gateway serves, by name and alias."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NoReturn

from headrace.core.errors import InvalidRequest, ModelNotFound, Unavailable
from headrace.core.request import PriorityClass
from headrace.gateway.access.open_requests import UseCount
from headrace.gateway.access.principal import Principal
from headrace.gateway.upstream.generation_request import Conversation, GenerationRequest, PlainPrompts, PrincipalFacts
from headrace.gateway.upstream.seam import ReplicaHealth, Upstream
from headrace.observe.metrics import ReplicaReading
from headrace.policy.admission import OverloadWatch, UnsentRequests


@dataclass(frozen=True, slots=True, eq=False)
class ServedModel:
    """One served model under one configuration.

    users    count of the requests that asked for this model and have not ended
    overload  by class, whether more requests come than the model answers
    """

    name: str
    aliases: tuple[str, ...]
    upstream: Upstream
    created: int
    users: UseCount = field(default_factory=UseCount)
    smaller: str = ""
    unsent: UnsentRequests = field(default_factory=UnsentRequests)
    overload: Mapping[PriorityClass, OverloadWatch] = field(default_factory=lambda: {each: OverloadWatch() for each in PriorityClass})

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name, *self.aliases)

    @property
    def is_alive(self) -> bool:
        return any(replica.is_connected for replica in self.upstream.replicas())

    def readings(self) -> Iterator[ReplicaReading]:
        for replica in (*self.upstream.replicas(), *self.upstream.retired_replicas()):
            yield ReplicaReading(self.name, replica.name, not replica.reason, replica.load)


class ModelTable:
    """The served models by name and alias. A client's name is only looked up here, and never used as a path."""

    def __init__(self, models: Iterable[ServedModel]) -> None:
        self.models = tuple(models)
        self._by_name = {name: model for model in self.models for name in model.names}

    @property
    def names(self) -> list[str]:
        return list(self._by_name)

    def usable_by(self, principal: Principal) -> ModelTable:
        """Other models do not exist for the caller."""
        return self if principal.may_use_all else ModelTable(model for model in self.models if principal.may_use(*model.names))

    def get(self, name: str) -> ServedModel:
        model = self._by_name.get(name)
        if model is None:
            raise ModelNotFound(name, self.names)
        return model

    def only(self, name: str | None) -> ServedModel:
        """None: the only served one, as vLLM's /tokenize allows. Raises ModelNotFound or InvalidRequest."""
        if name is not None:
            return self.get(name)
        if len(self.models) == 1:
            return self.models[0]
        raise InvalidRequest("model", f"one of: {', '.join(self.names)}", remedy="It is required where several models are served.")


UNREADABLE_RETRY_S = 10.0
"""Seconds after which a client may try a model again whose text cannot be read."""

UNREADABLE = "its tokenizer or chat template cannot be used"
"""Without a path: clients may read it."""


class UnreadableModel(Upstream):
    """A model whose tokenizer or chat template cannot be used. No replica is connected, and every request is refused as Unavailable.

    An operator repairs the files and reloads the configuration (`control.texts`).
    """

    def __init__(self, model: str, replicas: Sequence[str]) -> None:
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
