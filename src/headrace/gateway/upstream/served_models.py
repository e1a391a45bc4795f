"""Which models this gateway serves, under which names, and what it needs to know of each."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from headrace.core.errors import InvalidRequest, ModelNotFound, Unavailable
from headrace.core.model_info import ModelInfo
from headrace.gateway.upstream.replicas import ReplicaPool
from headrace.gateway.upstream.tokens import Upstream
from headrace.observe.metrics import ReplicaReading
from headrace.text.folder import TextModel


@dataclass(frozen=True, slots=True)
class ServedModel:
    """One model. `created`: when this gateway began to serve it, in Unix seconds."""

    name: str
    aliases: tuple[str, ...]
    text: TextModel
    pool: ReplicaPool
    upstream: Upstream
    created: int

    @property
    def info(self) -> ModelInfo:
        """Raises Unavailable until a replica has said what it is."""
        info = self.pool.info
        if info is None:
            raise Unavailable(f"The model {self.name} is still starting.", retry_after_s=2.0)
        return info

    @property
    def sampling_defaults(self) -> Mapping[str, Any]:
        return self.info.sampling_defaults

    @property
    def fingerprint(self) -> str | None:
        """OpenAI's system_fingerprint: changes with the weights."""
        digest = self.info.digests.get("model", "")
        return f"fp_{digest[:12]}" if digest else None


class ModelTable:
    """Names and aliases to models. Nothing a client writes becomes a path: a name is in the table or it is refused."""

    def __init__(self, models: Iterable[ServedModel]) -> None:
        self.models = tuple(models)
        self._by_name = {name: model for model in self.models for name in (model.name, *model.aliases)}

    @property
    def names(self) -> list[str]:
        return list(self._by_name)

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

    def readings(self) -> Iterator[ReplicaReading]:
        for model in self.models:
            yield from model.pool.readings()


def now_unix() -> int:
    return int(time.time())
