"""What makes a surface that generates: its path and types, how its body is read, and how events become its answer.

A whole one of another API: tests/gateway/test_another_surface.py. An encoder numbers its events only where it uses `Generation.event_log`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from headrace.core.errors import InvalidRequest
from headrace.gateway.access.principal import Principal
from headrace.gateway.generation.answer_encoder import AnswerEncoder
from headrace.gateway.generation.generation import Generation
from headrace.gateway.generation.parsed_request import ParsedRequest
from headrace.gateway.generation.run import generate
from headrace.gateway.generation.service import Service
from headrace.gateway.http.exchange import Exchange
from headrace.gateway.http.framing import OPENAI, Framing
from headrace.gateway.surfaces.dialect.parse import error_as_written
from headrace.gateway.surfaces.endpoint import BodyParser, Endpoint, parsed_body
from headrace.gateway.upstream.seam import Prepared

RequestT = TypeVar("RequestT")


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratingSurface(Generic[RequestT]):
    """The handler of one path.

    path     where the field table has rows of it (`dialect.field_table`), these are the fields of its body
    request, reply, chunk  wire types of its body, of its answer, and of a stream's events
    parser   of its body
    names    fields of `ParsedRequest` -> the names that this client used
    common   the request as every surface has it
    encoder  of its answer
    framing  of its errors, its pings and the end of its streams, and where its clients put the key
    """

    path: str
    summary: str
    request: type
    reply: type
    chunk: type
    parser: BodyParser[RequestT]
    names: Callable[[RequestT], Mapping[str, str]]
    common: Callable[[RequestT, Principal], ParsedRequest]
    encoder: Callable[[RequestT, Prepared, Generation], AnswerEncoder]
    framing: Framing = OPENAI

    @property
    def endpoint(self) -> Endpoint[GeneratingSurface[RequestT]]:
        """Its row."""
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

    async def __call__(self, service: Service, exchange: Exchange) -> None:
        tenant = exchange.principal.tenant
        with service.open_requests.admit(exchange.request_id, tenant, exchange.end), service.memory.open(tenant) as charges:
            request = await parsed_body(service, exchange, charges, self.parser)
            try:
                generation = Generation(service, exchange, charges, self.common(request, exchange.principal))
                await generate(generation, lambda prepared: self.encoder(request, prepared, generation))
            except InvalidRequest as error:
                if (renamed := error_as_written(error, self.names(request))) is None:
                    raise
                raise renamed from error
