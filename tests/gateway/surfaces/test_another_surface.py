"""Tests a surface of another API, made in this file: one value and one row, and the gateway serves it as it serves OpenAI's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import pytest
from gateway_kit import MODEL, SAID, open_bench
from msgspec import Struct

from headrace.core.request import PriorityClass
from headrace.core.update import FinishReason
from headrace.gateway import text_host
from headrace.gateway.access.principal import Principal
from headrace.gateway.generation import parsed_request
from headrace.gateway.generation.call import Ready
from headrace.gateway.generation.parsed_request import ParsedRequest
from headrace.gateway.http.asgi import Framing
from headrace.gateway.http.errors import ErrorReply
from headrace.gateway.surfaces import openapi, routes
from headrace.gateway.surfaces.dialect.parse import convert
from headrace.gateway.surfaces.endpoint import MAX_INLINE_BYTES, BodyParser, Endpoint, GeneratingSurface
from headrace.gateway.surfaces.routes import ENDPOINTS
from headrace.gateway.upstream.generation_request import Conversation
from headrace.gateway.upstream.seam import OutputEvent, TokenUsage
from headrace.text.folder import TextModel

pytestmark = pytest.mark.loop

PATH, KEY = "/v1/messages", "sk-of-acme-0123456789"
STOPPED = {FinishReason.STOP: "end_turn", FinishReason.LENGTH: "max_tokens"}


class MessagesRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    """num_candidates: a field that Anthropic does not have, for the parameter n"""

    model: str
    max_tokens: int
    messages: list[dict[str, str]]
    stream: bool = False
    service_tier: str = "auto"
    num_candidates: int = 1


def parse_messages(body: dict[str, object]) -> tuple[MessagesRequest, list[str]]:
    return convert(body, MessagesRequest), []


def common(request: MessagesRequest, principal: Principal) -> ParsedRequest:
    return ParsedRequest(
        model=request.model,
        prompt=Conversation(messages=request.messages),
        sampling={"max_tokens": request.max_tokens, "n": request.num_candidates},
        is_streaming=request.stream,
        priority=PriorityClass.STANDARD if request.service_tier == "standard_only" else principal.priority,
    )


def event(name: str, **fields: Any) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (name.encode(), msgspec.json.encode({"type": name, **fields}))


class MessagesAnswer:
    """An `AnswerEncoder`."""

    def __init__(self, request: MessagesRequest, ready: Ready) -> None:
        self._head = {"id": f"msg_{ready.call.answer_id}", "type": "message", "role": "assistant", "model": ready.call.shown_model}
        self._texts: list[str] = []
        self._stopped = ""
        self._has_begun = False

    def add(self, events: Sequence[OutputEvent]) -> None:
        for each in events:
            self._texts.append(each.text)
            self._stopped = STOPPED[each.finish] if each.finish is not None else ""

    def encode_body(self, usage: TokenUsage) -> Iterator[bytes]:
        content = [{"type": "text", "text": "".join(self._texts)}]
        used = {"input_tokens": usage.prompt_tokens, "output_tokens": usage.completion_tokens}
        yield msgspec.json.encode({**self._head, "content": content, "stop_reason": self._stopped, "usage": used})

    def encode_events(self, events: Sequence[OutputEvent]) -> Iterator[bytes]:
        if not self._has_begun:
            self._has_begun = True
            yield event("message_start", message=self._head)
        self.add(events)
        for each in events:
            if each.text:
                yield event("content_block_delta", index=0, delta={"type": "text_delta", "text": each.text})

    def encode_end(self, usage: TokenUsage) -> bytes:
        used = {"output_tokens": usage.completion_tokens}
        return event("message_delta", delta={"stop_reason": self._stopped}, usage=used)


def error_of(error: ErrorReply) -> dict[str, str]:
    return {"type": error.error.type, "message": error.error.message}


class MessagesError(Struct):
    error: dict[str, str]
    type: str = "error"


class MessagesReply(Struct):
    id: str
    content: list[dict[str, str]]
    stop_reason: str
    usage: dict[str, int]


PARSER = BodyParser(parse_messages, MessagesRequest)

MESSAGES = Endpoint(
    "POST",
    PATH,
    GeneratingSurface(
        parser=PARSER,
        names=lambda request: {"prompt": "messages", "n": "num_candidates", "priority": "service_tier"},
        common=common,
        encoder=MessagesAnswer,
    ),
    "Anthropic's messages.",
    request=MessagesRequest,
    reply=MessagesReply,
    chunk=MessagesReply,
    parser=PARSER,
    generates=True,
    framing=Framing(
        key_header=b"x-api-key",
        key_scheme=b"",
        error_type=MessagesError,
        error_body=lambda error: msgspec.json.encode(MessagesError(error_of(error))),
        error_event=lambda error: event("error", error=error_of(error)),
        ping=event("ping"),
        end=event("message_stop"),
    ),
)


@pytest.fixture(autouse=True)
def _row(monkeypatch: pytest.MonkeyPatch) -> None:
    answered = routes.AnsweredPath(PATH, PATH)
    answered.add(MESSAGES)
    monkeypatch.setitem(routes._PATHS, PATH, answered)
    monkeypatch.setitem(text_host.PARSERS, PATH, PARSER)


def body(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "max_tokens": 8, "messages": [{"role": "user", "content": "Hello"}], **fields}


def events_of(text: str) -> list[tuple[str, dict[str, Any]]]:
    blocks = [block.split("\n") for block in text.split("\n\n") if block]
    return [(name.removeprefix("event: "), msgspec.json.decode(data.removeprefix("data: "))) for name, data in blocks]


async def test_whole_and_streamed_answers_have_the_same_text(text: TextModel) -> None:
    async with open_bench(text) as bench:
        whole = (await bench.client.post(PATH, json=body())).json()
        assert whole["stop_reason"] == "max_tokens"
        assert whole["usage"]["output_tokens"] == 8
        streamed = events_of((await bench.client.post(PATH, json=body(stream=True))).text)
        assert [name for name, _ in streamed[:1] + streamed[-2:]] == ["message_start", "message_delta", "message_stop"]
        assert streamed[-2][1]["delta"]["stop_reason"] == "max_tokens"
        said = "".join(data["delta"]["text"] for name, data in streamed if name == "content_block_delta")
        assert said == whole["content"][0]["text"]
        assert said
        assert SAID.startswith(said)


async def test_keys_and_errors_have_the_form_of_the_api(text: TextModel) -> None:
    async with open_bench(text, api_keys=[{"key": KEY, "tenant": "acme"}]) as bench:
        for headers in ({}, {"authorization": f"Bearer {KEY}"}):
            refused = await bench.client.post(PATH, json=body(), headers=headers)
            assert refused.status_code == 401
            assert refused.json()["type"] == "error"
            assert "X-Api-Key" in refused.json()["error"]["message"]
            assert "www-authenticate" not in refused.headers
        assert (await bench.client.post(PATH, json=body(), headers={"x-api-key": KEY})).status_code == 200
        unknown = await bench.client.post(PATH, json=body(model="none"), headers={"x-api-key": KEY})
        assert (unknown.status_code, unknown.json()["error"]["type"]) == (404, "invalid_request_error")
        openai = await bench.client.post("/v1/chat/completions", json=body(), headers={"x-api-key": KEY})
        assert openai.json()["error"]["code"] == "invalid_api_key"


async def test_a_quiet_stream_is_kept_alive_and_ends_in_an_error_of_the_api(text: TextModel) -> None:
    async with open_bench(text, timeouts={"request_s": 5.0}) as bench:
        bench.gateway.service.pipeline.watch.ping_s = 1.0
        bench.replica.go.clear()
        streamed = events_of((await bench.client.post(PATH, json=body(stream=True))).text)
        assert {name for name, _ in streamed[:-1]} == {"ping"}  # and no message_stop behind the error
        assert streamed[-1][0] == "error"
        assert streamed[-1][1]["error"]["type"] == "timeout_error"


@pytest.mark.parametrize("padding", [0, MAX_INLINE_BYTES])
async def test_a_text_worker_reads_a_large_body_as_the_event_loop_reads_a_small_one(text: TextModel, padding: int) -> None:
    async with open_bench(text) as bench:
        content = msgspec.json.encode(body()) + b" " * padding
        answer = await bench.client.post(PATH, content=content, headers={"content-type": "application/json"})
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["output_tokens"] == 8


@pytest.mark.parametrize("padding", [0, MAX_INLINE_BYTES])
async def test_an_unknown_field_is_refused_by_the_parser_of_the_api(text: TextModel, padding: int) -> None:
    async with open_bench(text) as bench:
        content = msgspec.json.encode(body(temprature=0.5)) + b" " * padding
        refused = await bench.client.post(PATH, content=content, headers={"content-type": "application/json"})
        assert (refused.status_code, refused.json()["type"]) == (400, "error")
        assert refused.json()["error"]["message"].startswith("temprature: expected a field this server knows.")
        assert not bench.replica.requests


@pytest.mark.parametrize(
    ("fields", "refusal"),
    [
        (
            {"num_candidates": 3},
            "num_candidates: expected at most 2 sequences (prompts times num_candidates), got 3. Send several requests.",
        ),
        ({"messages": [{"role": "user", "content": "Hello"}] * 3}, "messages: expected at most 2 messages, got 3. Drop the oldest ones."),
        (
            {"service_tier": "standard_only"},
            'service_tier: expected not above this key\'s class (batch), got "standard". A request may only lower it.',
        ),
    ],
)
async def test_the_caps_of_every_surface_hold_for_it(
    fields: dict[str, Any], refusal: str, text: TextModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    for bound in ("MAX_SEQUENCES", "MAX_MESSAGES"):
        monkeypatch.setattr(parsed_request, bound, 2)
    key = {"key": KEY, "tenant": "acme", "tier": "batch"}
    async with open_bench(text, api_keys=[key]) as bench:
        refused = await bench.client.post(PATH, json=body(**fields), headers={"x-api-key": KEY})
        assert (refused.status_code, refused.json()["error"]["message"]) == (400, refusal)
        assert not bench.replica.requests
        assert (await bench.client.post(PATH, json=body(), headers={"x-api-key": KEY})).status_code == 200


@pytest.mark.pure
def test_its_description_has_its_own_types_and_key() -> None:
    made = msgspec.json.decode(openapi.document((*ENDPOINTS, MESSAGES)))
    described, schemas = made["paths"][PATH]["post"], made["components"]["schemas"]
    assert described["responses"]["400"]["content"]["application/json"]["schema"] == {"$ref": "#/components/schemas/MessagesError"}
    assert set(schemas["MessagesError"]["properties"]) == {"type", "error"}
    assert described["security"] == [{"x-api-key": []}, {}]
    assert made["components"]["securitySchemes"]["x-api-key"] == {"type": "apiKey", "in": "header", "name": "x-api-key"}
    asked = schemas["MessagesRequest"]
    assert set(asked["properties"]) == {*body(stream=True), "service_tier", "num_candidates"}
    assert asked["additionalProperties"] is False
    chat = made["paths"]["/v1/chat/completions"]["post"]
    assert chat["responses"]["400"]["content"]["application/json"]["schema"] == {"$ref": "#/components/schemas/ErrorBody"}
    assert made["components"]["securitySchemes"][next(iter(chat["security"][0]))] == {"type": "http", "scheme": "bearer"}
