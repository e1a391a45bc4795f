"""Served models of the gateway's configuration: their replicas, and the rules that hold among all models.

The foreign servers of a model are in `gateway.upstream.foreign_config`, the rest of the file in `gateway.config`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from headrace.core.errors import ConfigError
from headrace.core.model_names import check_model_names
from headrace.gateway.upstream.foreign_config import ForeignConfig, check_foreign
from headrace.text.output.formats import AUTO
from headrace.wire.target import GrpcTarget, check_target, target_of
from headrace.wire.tls.files import TlsFiles

REPLICA_NAME = re.compile(r"[A-Za-z0-9._-]{1,128}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaConfig:
    """One engine process.

    name        label `replica` of the metrics
    address     of the engine's wire: unix:/path, or host:port with a token, and beyond loopback with tls
    token       what the engine wants to see; token_file: or a file that holds it, closed to other users
    tls         this gateway's certificates
    """

    name: str
    address: str
    token: str | None = field(default=None, repr=False)
    token_file: str = ""
    tls: TlsFiles | None = None

    def target(self) -> GrpcTarget:
        """The address with the token read. Raises ConfigError."""
        return target_of(self.address, token=self.token, token_file=self.token_file, tls=self.tls)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """One served model: our replicas, foreign servers, or both.

    name       what `GET /v1/models` shows; aliases answer as well
    folder     local folder with tokenizer.json, tokenizer_config.json and the chat template; beside `replicas`
    upstreams  foreign servers: they answer for it, or what no replica takes
    smaller    name of a served model that answers while every replica of this one has a long queue (`admission`); "" for none
    unavailable  why it has no replica now, in words that clients may read; beside an empty `replicas`

    tool_call_parser, reasoning_parser  names of rows in `text.output.formats`; auto: what the chat template asks for
    """

    name: str
    folder: str = ""
    tool_call_parser: str = AUTO
    reasoning_parser: str = AUTO
    replicas: tuple[ReplicaConfig, ...] = ()
    aliases: tuple[str, ...] = ()
    upstreams: tuple[ForeignConfig, ...] = ()
    smaller: str = ""
    unavailable: str = ""


def check_models(models: tuple[ModelConfig, ...]) -> None:
    """Raises ConfigError."""
    if not models:
        raise ConfigError("models", "is empty", "Declare at least one model.")
    names: set[str] = set()
    for index, model in enumerate(models):
        where = f"models[{index}]"
        check_model_names(where, model.name, model.aliases, names)
        check_foreign(f"{where}.upstreams", model.upstreams, taken=[replica.name for replica in model.replicas])
        if model.upstreams and not (model.folder or model.replicas):
            continue
        replicas = [replica.name for replica in model.replicas]
        if not model.folder:
            raise ConfigError(f"{where}.folder", "is missing", "A model needs folder and replicas, or upstreams.")
        if bool(replicas) == bool(model.unavailable) or len(set(replicas)) != len(replicas):
            raise ConfigError(f"{where}.replicas", "must name at least one replica, each name once; or none beside `unavailable`")
        for replica in model.replicas:
            if REPLICA_NAME.fullmatch(replica.name) is None:
                raise ConfigError(f"{where}.replicas", f"{replica.name!r} is not a replica name")
        for number, replica in enumerate(model.replicas):
            try:
                check_target(replica.address, token=replica.token, token_file=replica.token_file, tls=replica.tls)
            except ConfigError as error:
                raise error.at(f"{where}.replicas[{number}].address") from error
    _check_smaller(models)


def _check_smaller(models: tuple[ModelConfig, ...]) -> None:
    """A smaller model is a served one, and has none itself: what it cannot take either waits."""
    by_name = {name: model for model in models for name in (model.name, *model.aliases)}
    for index, model in enumerate(models):
        if not model.smaller:
            continue
        smaller = by_name.get(model.smaller)
        if smaller is None or smaller is model:
            raise ConfigError(f"models[{index}].smaller", f"{model.smaller!r} is not the name of another model here")
        if smaller.smaller:
            raise ConfigError(f"models[{index}].smaller", f"{model.smaller!r} has a smaller model itself", "Requests go down one step.")
