"""Implements vLLM's /tokenize and /detokenize, and the same below /v1."""

from __future__ import annotations

import msgspec
from msgspec import Struct

from headrace.core.errors import InvalidRequest
from headrace.gateway.generation.account import RequestAccount
from headrace.gateway.generation.service import Service
from headrace.gateway.http.exchange import Exchange
from headrace.gateway.surfaces.dialect.conversation import (
    Message,
    ToolDefinition,
    check_tools,
    checked_messages,
    function_tools,
    template_messages,
)
from headrace.gateway.surfaces.dialect.field_table import Inside
from headrace.gateway.surfaces.dialect.parse import convert, honoured_inside
from headrace.gateway.surfaces.endpoint import BodyParser, parsed_body
from headrace.gateway.upstream.generation_request import Conversation, PlainPrompts
from headrace.gateway.upstream.served_models import ServedModel
from headrace.observe.finished_request import Asked

_encode = msgspec.json.encode


class TokenizeRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    """vLLM's: either a prompt or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    tools: list[ToolDefinition] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    model: str | None = None
    tokens: list[int]


class TokenizeReply(Struct):
    count: int
    max_model_len: int | None
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeReply(Struct):
    prompt: str


def parse_tokenize(body: dict[str, object]) -> tuple[TokenizeRequest, list[str]]:
    ignored: dict[str, None] = {}
    if body.get("messages") is not None:
        tools = honoured_inside(body.get("tools"), Inside.TOOL, ignored, "tools")
        check_tools(tools)
        body = {**body, "messages": checked_messages(body["messages"], ignored), "tools": tools}
    request = convert(body, TokenizeRequest)
    if (request.prompt is None) == (request.messages is None):
        raise InvalidRequest("prompt", "exactly one of prompt and messages")
    if request.prompt is not None and request.tools is not None:
        raise InvalidRequest("tools", "messages beside it", None, "A prompt has no template.")
    if request.prompt is not None and request.add_generation_prompt is not None:
        raise InvalidRequest("add_generation_prompt", "messages beside it", request.add_generation_prompt, "A prompt has no template.")
    return request, list(ignored)


def parse_detokenize(body: dict[str, object]) -> tuple[DetokenizeRequest, list[str]]:
    return convert(body, DetokenizeRequest), []


TOKENIZE_BODY = BodyParser(parse_tokenize, TokenizeRequest)
DETOKENIZE_BODY = BodyParser(parse_detokenize, DetokenizeRequest)


async def tokenize(service: Service, exchange: Exchange, account: RequestAccount) -> None:
    """vLLM's bench reads token_strs, so they are there unless declined."""
    tenant = account.principal.tenant
    with service.memory.open(tenant) as charges:
        request = await parsed_body(service, exchange, account.principal, charges, TOKENIZE_BODY)
        model = _used_model(service, exchange, account, request.model)
        asked = model.upstream.tokenize(_prompt(request), needs_texts=request.return_token_strs is not False, tenant=tenant)
        async with exchange.watching():
            made = await exchange.unless_ended(asked)
        # A TokenizeReply, joined from JSON that the text worker made: there may be a million tokens.
        head = b'{"count":%d,"max_model_len":%s,"tokens":' % (made.num_tokens, _encode(model.upstream.max_model_len))
        parts = (head, made.ids_json, b',"token_strs":', made.texts_json, b"}")
        charges.answers.add(sum(map(len, parts)))
        await exchange.reply_parts(parts)


async def detokenize(service: Service, exchange: Exchange, account: RequestAccount) -> None:
    tenant = account.principal.tenant
    with service.memory.open(tenant) as charges:
        request = await parsed_body(service, exchange, account.principal, charges, DETOKENIZE_BODY)
        model = _used_model(service, exchange, account, request.model)
        async with exchange.watching():
            text = await exchange.unless_ended(model.upstream.detokenize(request.tokens, tenant=tenant))
        body = _encode(DetokenizeReply(prompt=text))
        charges.answers.add(len(body))
        await exchange.reply(200, body)


def _used_model(service: Service, exchange: Exchange, account: RequestAccount, name: str | None) -> ServedModel:
    """The model stays open until the exchange ends."""
    model = service.models.usable_by(account.principal).only(name)
    service.open_requests.use(exchange.request_id, account.principal.tenant, model.users)
    account.asked = Asked(name or model.name, model.base_name, model.adapter)
    return model


def _prompt(request: TokenizeRequest) -> Conversation | PlainPrompts:
    if request.messages is None:
        assert request.prompt is not None
        return PlainPrompts(prompts=[request.prompt], add_special_tokens=request.add_special_tokens is not False)
    if request.add_special_tokens:
        raise InvalidRequest("add_special_tokens", "absent, null or false beside messages", True, "The template writes the begin token.")
    return Conversation(
        messages=template_messages(request.messages),
        add_generation_prompt=request.add_generation_prompt is not False,
        tools=function_tools(request.tools or ()),
    )
