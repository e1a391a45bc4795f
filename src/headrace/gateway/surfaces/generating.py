"""Makes the endpoint of a surface that generates."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

from headrace.core.errors import InvalidRequest
from headrace.gateway.access.memory_charges import RequestCharges
from headrace.gateway.access.principal import Principal
from headrace.gateway.generation.answer_encoder import AnswerEncoder
from headrace.gateway.generation.call import Call, Ready, RequestAccount
from headrace.gateway.generation.parsed_request import ParsedRequest
from headrace.gateway.generation.service import Service
from headrace.gateway.http.asgi import OPENAI, Framing
from headrace.gateway.http.exchange import Exchange
from headrace.gateway.surfaces.dialect.parse import error_as_written
from headrace.gateway.surfaces.endpoint import BodyParser, Endpoint, parsed_body
from headrace.observe.timeline import READ

RequestT = TypeVar("RequestT")


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratingSurface(Generic[RequestT]):
    """path     by it `dialect.field_table` lists the fields of its body
    names    gives the client's names of fields: name in `ParsedRequest` -> name in the body
    common   converts the surface's request to a `ParsedRequest`
    encoder  makes the encoder of the answer
    """

    path: str
    summary: str
    request: type
    reply: type
    chunk: type
    parser: BodyParser[RequestT]
    names: Callable[[RequestT], Mapping[str, str]]
    common: Callable[[RequestT, Principal], ParsedRequest]
    encoder: Callable[[RequestT, Ready], AnswerEncoder]
    framing: Framing = OPENAI

    @property
    def endpoint(self) -> Endpoint[GeneratingSurface[RequestT]]:
        return Endpoint(
            "POST",
            self.path,
            self,
            self.summary,
            request=self.request,
            reply=self.reply,
            chunk=self.chunk,
            parser=self.parser,
            framing=self.framing,
            generates=True,
        )

    async def __call__(self, service: Service, exchange: Exchange, account: RequestAccount) -> None:
        principal, tenant = account.principal, account.principal.tenant
        with service.open_requests.admit(exchange.request_id, tenant, exchange.end), service.memory.open(tenant) as charges:
            exchange.marks.enter(READ)
            request = await parsed_body(service, exchange, principal, charges, self.parser)
            try:
                call = _call(service, exchange, account, charges, self.common(request, principal))
                await service.pipeline.run(call, partial(self.encoder, request))
            except InvalidRequest as error:
                if (renamed := error_as_written(error, self.names(request))) is None:
                    raise
                raise renamed from error


def _call(service: Service, exchange: Exchange, account: RequestAccount, charges: RequestCharges, parsed: ParsedRequest) -> Call:
    """Raises ModelNotFound, InvalidRequest or Unavailable."""
    chosen = service.choose_model(exchange, account.principal, parsed, charges.prompts.num_bytes)
    service.open_requests.use(exchange.request_id, account.principal.tenant, chosen.model.users)
    return Call.opened(
        exchange,
        account,
        charges,
        parsed,
        config=service.config,
        models=service.models,
        chosen=chosen,
        salt_key=service.salt_key,
        now=int(service.unix_time()),
    )
