"""Makes the endpoint of a surface that generates, from its path and types, the parser of its bodies, and the encoder of its answers.

tests/gateway/surfaces/test_another_surface.py has a whole surface of another API. An encoder numbers its events only where it uses
`Generation.event_log`.
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

    path     path of the surface, by which `dialect.field_table` lists the fields of its body
    request, reply, chunk  wire types of the body, the answer, and a stream's events
    parser   parser of the body
    names    gives the client's names of fields: name in `ParsedRequest` -> name in the body
    common   converts the surface's request to a `ParsedRequest`
    encoder  makes the encoder of the answer
    framing  framing of the surface's API: place of the key, errors, pings, ends of streams
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
        """The surface's endpoint, a row of `surfaces.routes`."""
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
