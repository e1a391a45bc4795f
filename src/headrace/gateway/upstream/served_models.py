"""Finds the models that this gateway serves, by name and alias, or by the name of a route (`policy.routing.routes`).

A LoRA adapter that the engines of a model have is a model too. No configuration names it: it is made of its base model when it is asked
for.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import NamedTuple, NoReturn

from headrace.core.errors import InvalidRequest, ModelNotFound, Unavailable
from headrace.core.request import PriorityClass
from headrace.gateway.access.open_requests import UseCount
from headrace.gateway.access.principal import Principal
from headrace.gateway.upstream.generation_request import Conversation, GenerationRequest, PlainPrompts, PrincipalFacts
from headrace.gateway.upstream.seam import ReplicaHealth, Upstream
from headrace.observe.finished_request import ModelStep
from headrace.observe.metrics import ReplicaReading
from headrace.policy.admission import OverloadWatch, UnsentRequests
from headrace.policy.fallbacks import NO_FALLBACKS, FallbackReason, Fallbacks
from headrace.policy.routing.routes import ModelRoute, RouteWish, Sender, SizeHint, choose_target, is_copied, wish_of
from headrace.policy.routing.wishes import AnswerMeans, RoutingWishes

log = logging.getLogger("headrace.gateway")

MAX_LOGGED = 100
"""Names of a model's adapters that another model has, too."""


@dataclass(frozen=True, slots=True, eq=False)
class ServedModel:
    """users    count of the requests that asked for this model or an adapter of it and have not ended
    overload  by class, whether more requests come than the model answers
    parent   of an adapter, the name of its base model; else empty
    means    of the answers of this process, of the model and its adapters
    hidden_adapters  names of adapters that are not served, since another model has the name; each was logged
    """

    name: str
    aliases: tuple[str, ...]
    upstream: Upstream
    created: int
    users: UseCount = field(default_factory=UseCount)
    fallbacks: Fallbacks = NO_FALLBACKS
    unsent: UnsentRequests = field(default_factory=UnsentRequests)
    overload: Mapping[PriorityClass, OverloadWatch] = field(default_factory=lambda: {each: OverloadWatch() for each in PriorityClass})
    parent: str = ""
    hidden_adapters: set[str] = field(default_factory=set)
    means: AnswerMeans = field(default_factory=AnswerMeans)

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name, *self.aliases)

    @property
    def base_name(self) -> str:
        """The configured model's: of its price, and of its series on the metrics page."""
        return self.parent or self.name

    @property
    def adapter(self) -> str | None:
        return self.name if self.parent else None

    def adapted(self, name: str) -> ServedModel | None:
        upstream = self.upstream.adapted(name)
        return (
            None if upstream is None else replace(self, name=name, aliases=(), upstream=upstream, fallbacks=NO_FALLBACKS, parent=self.name)
        )

    def hide_adapter(self, name: str, other: str) -> None:
        if name not in self.hidden_adapters and len(self.hidden_adapters) < MAX_LOGGED:
            self.hidden_adapters.add(name)
            log.warning("the adapter %s of %s is not served: %s has that name", name, self.name, other)

    @property
    def is_alive(self) -> bool:
        return self.upstream.is_alive

    def readings(self) -> Iterator[ReplicaReading]:
        for replica in (*self.upstream.replicas(), *self.upstream.retired_replicas()):
            is_ready = not replica.reason or replica.is_asleep
            yield ReplicaReading(self.name, replica.name, is_ready, replica.load, replica.block_size)


class NamedModels(NamedTuple):
    """The models that a client's name may lead to: one, or those of a route that have the size and the version of the name."""

    models: Sequence[ServedModel]
    route: ModelRoute | None = None
    wish: RouteWish = RouteWish("")


class ChosenModel(NamedTuple):
    """steps: the choice that a route made; shadow: gets a copy of the request"""

    model: ServedModel
    steps: Sequence[ModelStep] = ()
    shadow: ServedModel | None = None


class ModelTable:
    """A client's name is only looked up here, and never used as a path.

    models  the configured ones; adapters of theirs are not among them
    routes  that the caller may use, by name
    """

    def __init__(self, models: Iterable[ServedModel], routes: Mapping[str, ModelRoute], principal: Principal | None = None) -> None:
        """principal: None, every model may be used"""
        self._configured = tuple(models)
        self._all_routes = routes
        self._principal = principal
        self._by_name = {name: model for model in self._configured for name in model.names}
        self.models = tuple(model for model in self._configured if self._may_use(*model.names))
        self.routes = {name: route for name, route in routes.items() if self._may_use(name)}

    def _may_use(self, *names: str) -> bool:
        return self._principal is None or self._principal.may_use(*names)

    @property
    def names(self) -> list[str]:
        return [*(name for model in self.models for name in model.names), *self.routes, *self.adapters()]

    def adapters(self) -> dict[str, ServedModel]:
        """Name of each adapter -> its base model, which itself may be none that the caller may use."""
        base_models: dict[str, ServedModel] = {}
        for model in self._configured:
            for name in sorted(model.upstream.adapter_names()):
                if (other := self._by_name.get(name) or base_models.get(name)) is not None or name in self._all_routes:
                    model.hide_adapter(name, "a route" if other is None else other.name)
                elif self._may_use(name):
                    base_models[name] = model
        return base_models

    def usable_by(self, principal: Principal) -> ModelTable:
        """Other models do not exist for the caller, but a route that it may use leads to any. An adapter may be one customer's: the
        permission for its base model is none for it.
        """
        return self if principal.may_use_all else ModelTable(self._configured, self._all_routes, principal)

    def get(self, name: str) -> ServedModel:
        """Raises as `find`."""
        return self.find(name).models[0]

    def reached(self, name: str, by: str | None) -> ServedModel:
        """As `get`, and any target of the route where the caller asked for one. by: the name that the caller asked for"""
        route = None if by is None else self.find(by).route
        model = self._by_name.get(name)
        is_target = route is not None and model is not None and any(target in model.names for target in route.models)
        return model if model is not None and is_target else self.get(name)

    def find(self, name: str) -> NamedModels:
        """A name that is served as it is comes before a route's size and version. Raises ModelNotFound; Unavailable while the name may be
        that of an adapter.
        """
        model = self._by_name.get(name)
        if model is None and name not in self._all_routes:
            model = next(filter(None, (each.adapted(name) for each in self._configured)), None)
        if model is None and (wish := wish_of(name)) is not None and (route := self.routes.get(wish.route)) is not None:
            models = [self._by_name[target.model] for target in route.matching(wish)]
            if not models:
                raise ModelNotFound(name, route.forms(wish.route))
            return NamedModels(models, route, wish)
        if model is not None and self._may_use(*model.names):
            return NamedModels((model,))
        if model is None and self._may_use(name) and not all(each.upstream.knows_adapters for each in self._configured):
            raise Unavailable(f"{name} is no model here, but may be an adapter of one that is still starting.", retry_after_s=2.0)
        raise ModelNotFound(name, self.names)

    def configured(self, name: str) -> list[ServedModel]:
        """Without adapters, for callers that show no key: an adapter's name may be one customer's secret, and a route's too. Raises
        ModelNotFound, which names models alone.
        """
        if (model := self._by_name.get(name)) is not None:
            return [model]
        wish = wish_of(name)
        route = None if wish is None else self._all_routes.get(wish.route)
        models = [] if wish is None or route is None else [self._by_name[target.model] for target in route.reachable(wish)]
        if not models:
            raise ModelNotFound(name, list(self._by_name))
        return models

    def choose(self, name: str | None, sender_of: Callable[[], Sender], hint: Callable[[], SizeHint]) -> ChosenModel:
        """Raises as `only`. sender_of: asked for a route alone; hint: as in `choose_target`"""
        if name is None:
            return ChosenModel(self.only(None))
        (first, *_), route, wish = self.find(name)
        if route is None:
            return ChosenModel(first)
        sender, shadow = sender_of(), None
        target, reason = choose_target(name, route, wish, sender, hint)
        model = self._by_name[target.model]
        if route.shadow is not None and is_copied(route.shadow.share, wish.route, sender.request_id):
            shadow = self._by_name[route.shadow.model]
        return ChosenModel(model, (ModelStep(model.name, True, reason),), shadow)

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
    """A model whose tokenizer or chat template cannot be used, or that is served no more. No replica is connected, and every request is
    refused as Unavailable.

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


FallbackChain = tuple[tuple[FallbackReason | None, ServedModel], ...]
"""Reason None: for every reason."""


def fallback_chain(asked: ServedModel, wishes: RoutingWishes, models: ModelTable, principal: Principal, *, by: str | None) -> FallbackChain:
    """The client's own fallbacks, then the configured ones. A configured one that the key may not use is left out.

    by  the name that the client asked for

    Raises InvalidRequest for a name of the client's that its key may not use, and Unavailable while it may be that of an adapter.
    """
    named = [("models", name) for name in wishes.models] + [("fallbacks", name) for name in wishes.fallbacks]
    if not named and asked.fallbacks == NO_FALLBACKS:
        return ()
    models = models.usable_by(principal)
    chain: list[tuple[FallbackReason | None, ServedModel]] = []
    for place, name in named:
        try:
            candidate = models.find(name)
        except ModelNotFound as error:
            raise InvalidRequest(place, f"names of models that are served ({error.limit})", name, error.remedy) from None
        if candidate.route is not None:
            raise InvalidRequest(place, "names of models, and this is a route", name, "Name one of its models.")
        chain.append((None, candidate.models[0]))
    for reason, name in asked.fallbacks.named():
        with suppress(ModelNotFound):
            chain.append((reason, models.reached(name, by)))
    return tuple([(reason, model) for reason, model in chain if model.name != asked.name])
