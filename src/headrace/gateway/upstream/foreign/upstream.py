"""Lets OpenAI-compatible servers answer a model's requests (chat and completions over HTTP), behind the interface `seam`.

A server's chat template and tokenizer are not known here. An upper bound of the prompt's tokens follows from its bytes: a tokenizer that
reads every text makes at most one token of a byte. The bound does not hold where a normal form makes one character into several (NFKC),
which tokenizers of large models rarely have.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import math
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Any

import aiohttp
import msgspec

from headrace.core.clock import Clock
from headrace.core.errors import InvalidRequest
from headrace.core.request import PriorityClass
from headrace.core.sampling import FROM_MODEL, SamplingParams
from headrace.core.tools import CallMode
from headrace.gateway.http.errors import context_overflow
from headrace.gateway.upstream.foreign.attempt import AttemptResult, ForeignRequest
from headrace.gateway.upstream.foreign.chunk import SideField
from headrace.gateway.upstream.foreign.facts import listed_model, reported_load
from headrace.gateway.upstream.foreign.server import ForeignServer
from headrace.gateway.upstream.foreign.session import NOT_CONNECTED, open_session
from headrace.gateway.upstream.foreign.stream import ForeignRoute, HttpStream
from headrace.gateway.upstream.generation_request import PASSED, Conversation, GenerationRequest, PlainPrompts, PrincipalFacts
from headrace.gateway.upstream.model_config import ForeignConfig, named
from headrace.gateway.upstream.seam import Prepared, PreparedPrompt, ReplicaHealth, Tokenization, Upstream
from headrace.observe.reading_metrics import UpstreamReading
from headrace.policy.admission import QueueState, UnsentRequests
from headrace.policy.limits.price import RequestCeiling
from headrace.policy.routing.choice import Random
from headrace.policy.routing.failures import CircuitState, RetryBudget
from headrace.policy.routing.wishes import RoutingWishes, server_places

log = logging.getLogger("headrace.gateway")

_TOKENIZER = "a model that this server runs itself"


class HttpUpstream(Upstream):
    def __init__(self, name: str, servers: Sequence[ForeignServer], *, clock: Clock, random: Random) -> None:
        self.name = name
        self.servers = tuple(servers)
        self._budget = RetryBudget()
        self._clock = clock
        self._random = random

    @property
    def server_names(self) -> Sequence[str]:
        return [server.name for server in self.servers]

    @property
    def max_model_len(self) -> int | None:
        return max((server.max_model_len or 0 for server in self.servers), default=0) or None

    def queue(self, priority: PriorityClass, unsent: UnsentRequests) -> QueueState | None:
        now = self._clock()
        loads = [server.reported(now) for server in self.servers if not server.reason()]
        known = [load.num_waiting for load in loads if load is not None and load.num_waiting is not None]
        return QueueState(min(known), 0.0) if known and len(known) == len(loads) else None

    def replicas(self) -> list[ReplicaHealth]:
        return [
            ReplicaHealth(server.name, is_connected=True, reason=server.reason(), is_foreign=True, num_open=server.num_open)
            for server in self.servers
        ]

    def readings(self) -> Iterator[UpstreamReading]:
        now = self._clock()
        for server in self.servers:
            load = server.reported(now)
            yield UpstreamReading(
                model=self.name,
                replica=server.name,
                attempts={result.value: server.results[result] for result in AttemptResult},
                left_out={field.value: server.left_out[field] for field in SideField},
                num_open=server.num_open,
                is_circuit_open=server.breaker.state is not CircuitState.CLOSED,
                held_s=server.held_s(now),
                num_running=None if load is None else load.num_running,
                num_waiting=None if load is None else load.num_waiting,
            )

    async def prepare(self, request: GenerationRequest, principal: PrincipalFacts) -> Prepared:
        max_prompt_tokens = most_prompt_tokens(request.prompt, self.max_model_len)
        n = request.sampling.get("n") or 1
        num_copies = n if any("n" in server.refused for server in self.servers) else 1
        request = _within(request, principal.ceiling, max_prompt_tokens * num_copies)
        params = SamplingParams(**request.sampling).checked()
        prompts = _prompts(request.prompt)
        num_sequences = len(prompts) * params.n
        foreign = ForeignRequest(
            request_id=request.request_id,
            path="chat/completions" if isinstance(request.prompt, Conversation) else "completions",
            fields=foreign_body(request, params),
            trace_headers=request.trace_headers,
            salt=principal.salt,
            num_prompts=len(prompts),
            num_sequences=num_sequences,
        )
        return Prepared(
            stream=partial(self._stream, foreign, params.max_tokens, request.routing),
            prompts=prompts,
            prompt_tokens=None,
            max_prompt_tokens=max_prompt_tokens,
            num_prompt_copies=num_copies,
            max_output_tokens=None if params.max_tokens is None else params.max_tokens * num_sequences,
            num_sequences=num_sequences,
            seed=params.seed,
            ignored=["priority"] if request.has_priority else [],  # not sent; other fields without effect are not known
            taken=PASSED,
        )

    def _stream(self, request: ForeignRequest, max_tokens: int | None, wishes: RoutingWishes) -> HttpStream:
        places = server_places(self.server_names, wishes)
        new_route = partial(
            ForeignRoute,
            {server: places[server.name] for server in self.servers if server.name in places},
            max_tokens=max_tokens,
            keeps_first=wishes.keeps_first_server,
            budget=self._budget,
            clock=self._clock,
            random=self._random,
        )
        return HttpStream(self.name, request, new_route, self._clock)

    async def tokenize(self, prompt: Conversation | PlainPrompts, *, needs_texts: bool, tenant: str) -> Tokenization:
        raise InvalidRequest("model", _TOKENIZER, self.name, "The server behind this model keeps its tokenizer.")

    async def detokenize(self, token_ids: Sequence[int], *, tenant: str) -> str:
        raise InvalidRequest("model", _TOKENIZER, self.name, "The server behind this model keeps its tokenizer.")


def _within(request: GenerationRequest, ceiling: RequestCeiling, max_prompt_tokens: int) -> GenerationRequest:
    max_tokens, context_tokens = request.sampling.get("max_tokens"), ceiling.context_tokens
    if max_tokens is not None:
        if context_tokens is not None and max_tokens >= context_tokens:
            part = "messages" if isinstance(request.prompt, Conversation) else "prompt"
            error = context_overflow("max_tokens", context_tokens, part=part, prompt_tokens=1, max_tokens=max_tokens, is_least=True)
            raise error.of_tier(ceiling.tier)
        return request
    num_prompts = 1 if isinstance(request.prompt, Conversation) else len(request.prompt.prompts)
    num_sequences = num_prompts * (request.sampling.get("n") or 1)
    bounds = [ceiling.max_tokens(max_prompt_tokens, num_sequences), context_tokens and max(1, context_tokens - 1)]
    given = [bound for bound in bounds if bound is not None]
    return dataclasses.replace(request, sampling={**request.sampling, "max_tokens": min(given)}) if given else request


CHAT_PROMPTS = (PreparedPrompt(""),)


def _prompts(prompt: Conversation | PlainPrompts) -> Sequence[PreparedPrompt]:
    if isinstance(prompt, Conversation):
        return CHAT_PROMPTS
    return [PreparedPrompt(given if isinstance(given, str) else "") for given in prompt.prompts]


@asynccontextmanager
async def open_upstream(
    name: str, configs: Sequence[ForeignConfig], *, clock: Clock, unix_time: Clock, random: Random
) -> AsyncIterator[HttpUpstream]:
    """Watched until the block ends. No server need be up. Raises ConfigError for a server's key that cannot be read."""
    async with AsyncExitStack() as stack:
        servers = []
        for server_name, config in named(configs):
            session = await stack.enter_async_context(open_session(name, server_name, config))
            servers.append(ForeignServer(name, server_name, config, session, clock=clock, unix_time=unix_time))
        for server in servers:
            watching = watch(server, reads_load=len(servers) > 1, clock=clock)
            task = asyncio.create_task(watching, name=f"watch over {server.name} of {name}")
            stack.push_async_callback(_stop, task)
        yield HttpUpstream(name, servers, clock=clock, random=random)


async def _stop(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


_NAME_TO_DEFAULT = {field.name: getattr(SamplingParams(max_tokens=None), field.name) for field in dataclasses.fields(SamplingParams)}


def foreign_body(request: GenerationRequest, params: SamplingParams) -> dict[str, Any]:
    """Raises InvalidRequest naming a parameter that a foreign server cannot take."""
    _check_logprobs(request, params)
    begin: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
    fields = begin | _prompt_fields(request.prompt) | _sampling_fields(request) | _grammar_field(request) | dict(request.foreign_fields)
    if "max_completion_tokens" in fields:
        fields.pop("max_tokens", None)
    return fields


def _grammar_field(request: GenerationRequest) -> dict[str, Any]:
    wanted = request.grammar
    return {} if wanted is None else {wanted.name: msgspec.Raw(wanted.value_json.encode())}


def _prompt_fields(prompt: Conversation | PlainPrompts) -> dict[str, Any]:
    if isinstance(prompt, Conversation):
        fields: dict[str, Any] = {"messages": prompt.messages}
        if not prompt.add_generation_prompt:
            fields["add_generation_prompt"] = False
        if prompt.continue_final_message:
            fields["continue_final_message"] = True
        if prompt.template_kwargs:
            fields["chat_template_kwargs"] = dict(prompt.template_kwargs)
        return fields | _tool_fields(prompt) | dict(prompt.reasoning_fields)
    if prompt.needs_text and not all(isinstance(given, str) for given in prompt.prompts):
        raise InvalidRequest("echo", "prompts of text", None, "The server behind this model keeps its tokenizer: ids cannot be shown.")
    prompts = list(prompt.prompts)
    return {"prompt": prompts[0] if len(prompts) == 1 else prompts} | ({} if prompt.add_special_tokens else {"add_special_tokens": False})


def _tool_fields(prompt: Conversation) -> dict[str, Any]:
    if not prompt.tools:
        return {}
    fields: dict[str, Any] = {"tools": [tool.requested() for tool in prompt.tools]}
    choice = prompt.tool_choice
    if choice.name:
        return fields | {"tool_choice": {"type": "function", "function": {"name": choice.name}}}
    if choice.allowed:
        named = [{"type": "function", "function": {"name": tool.name}} for tool in prompt.tools if choice.allows(tool.name)]
        fields["tool_choice"] = {"type": "allowed_tools", "allowed_tools": {"mode": str(choice.mode), "tools": named}}
    elif choice.mode is not CallMode.AUTO:
        fields["tool_choice"] = str(choice.mode)
    return fields if choice.is_parallel else fields | {"parallel_tool_calls": False}


def _sampling_fields(request: GenerationRequest) -> dict[str, Any]:
    """Values equal to OpenAI's defaults are left out, so that the server's own defaults hold."""
    # A parameter of FROM_MODEL is sent whenever the client names it: a model may have defaults of its own.
    fields = {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in request.sampling.items()
        if value != _NAME_TO_DEFAULT[name] or name in FROM_MODEL
    }
    if fields.get("top_p") == 0:  # greedy, in the words that every server knows
        fields["temperature"] = fields.pop("top_p")
    num_top = fields.pop("logprobs", None)
    if num_top is not None:
        fields |= {"logprobs": True, "top_logprobs": num_top}
    return fields


def _check_logprobs(request: GenerationRequest, params: SamplingParams) -> None:
    """Servers differ in all forms but a chat's output."""
    remedy = "The server behind this model gives them for a chat's answer only."
    if params.prompt_logprobs is not None:
        raise InvalidRequest("prompt_logprobs", "absent or null", params.prompt_logprobs, remedy)
    if params.logprobs is not None and not isinstance(request.prompt, Conversation):
        raise InvalidRequest("logprobs", "absent or null", params.logprobs, remedy)


TEMPLATE_TOKENS = 64

TOOL_TEMPLATE_TOKENS = 512


def most_prompt_tokens(prompt: Conversation | PlainPrompts, max_model_len: int | None) -> int:
    bounds = [_of_chat(prompt)] if isinstance(prompt, Conversation) else [_of_plain(given) for given in prompt.prompts]
    return sum(bound if max_model_len is None else min(bound, max_model_len) for bound in bounds)


def _of_chat(chat: Conversation) -> int:
    num_bytes = len(msgspec.json.encode(chat.messages)) + TEMPLATE_TOKENS
    if not chat.shown_tools:
        return num_bytes
    return num_bytes + TOOL_TEMPLATE_TOKENS + len(msgspec.json.encode([tool.requested() for tool in chat.shown_tools]))


def _of_plain(prompt: str | Sequence[int]) -> int:
    if isinstance(prompt, str):
        return 2 + (len(prompt) if prompt.isascii() else len(prompt.encode("utf-8", "surrogatepass")))
    return len(prompt)


MODELS_S = 60.0

UNREACHABLE_S = 5.0

LOAD_S = 1.0

NO_ANSWER = (*NOT_CONNECTED, aiohttp.ClientError, OSError, TimeoutError)


async def watch(server: ForeignServer, *, reads_load: bool, clock: Clock) -> None:
    asked_at, has_load = -math.inf, False
    while True:
        if clock() - asked_at >= (MODELS_S if server.is_reachable else UNREACHABLE_S):
            asked_at = clock()
            await _read_models(server)
            has_load = reads_load
        if has_load:
            has_load = await _read_load(server)
        await asyncio.sleep(LOAD_S)


async def _read_models(server: ForeignServer) -> None:
    try:
        status, body = await server.session.get(server.session.models_url)
    except NOT_CONNECTED as error:
        if server.is_reachable:
            server.log_fault(f"cannot be reached: {type(error).__name__}")
        server.is_reachable = False
        return
    except NO_ANSWER:
        return  # a server that is slow or does not have the list may answer requests all the same
    server.is_reachable = True
    if status in (401, 403) and not server.is_key_refused:
        server.log_fault(f"does not list its models: status {status}; is its key right?")
    server.is_key_refused = status in (401, 403)
    listed = listed_model(body, server.far_name) if status == 200 else None
    if listed is not None and listed != server.listed:
        if listed.is_listed:
            server.log_fact(f"lists the model, with a context of {listed.max_model_len or 'unknown'} tokens")
        else:
            server.log_fault(f"does not list the model {server.far_name!r}")
        server.listed = listed


async def _read_load(server: ForeignServer) -> bool:
    num_sent, url = server.num_sent, server.session.metrics_url
    if url is None:
        return False
    try:
        status, page = await server.session.get(url)
    except NO_ANSWER:
        return True  # the list of models says whether the server can be reached
    load = reported_load(page, server.far_name) if status == 200 else None
    if load is not None:
        server.note_load(load, num_sent=num_sent)
    return load is not None
