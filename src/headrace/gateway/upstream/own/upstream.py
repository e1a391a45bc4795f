"""Answers requests with our own engines: turns a request into token ids, which no module above handles."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from headrace.core.errors import Unavailable
from headrace.core.grammar import Grammar
from headrace.core.hashing import recorded_blocks
from headrace.core.ids import RequestId
from headrace.core.model_info import ModelInfo
from headrace.core.plan import PAGE_TOKENS, LogprobColumns, TokenLogprobs, columns_of
from headrace.core.request import EngineRequest, PriorityClass
from headrace.core.sampling import FROM_MODEL, SamplingParams, with_default_max_tokens
from headrace.gateway.http.errors import ContextLengthExceeded, StreamConflict, context_overflow
from headrace.gateway.upstream.generation_request import Conversation, EarlierOutput, GenerationRequest, PlainPrompts, PrincipalFacts
from headrace.gateway.upstream.own.attempts import PromptCall
from headrace.gateway.upstream.own.model_text import ModelText
from headrace.gateway.upstream.own.output_parsing import (
    EarlierCallOutput,
    OutputParsing,
    after_reasoning,
    bound_grammar,
    calls_of,
    prompt_digest,
)
from headrace.gateway.upstream.own.replicas import ReplicaPool
from headrace.gateway.upstream.own.stream import MergedStream, TokenStream
from headrace.gateway.upstream.seam import EventStream, Hold, Prepared, PreparedPrompt, ReplicaHealth, Tokenization, Upstream
from headrace.policy.admission import QueueState, UnsentRequest, UnsentRequests
from headrace.policy.holding import HeldTerms
from headrace.policy.queues import traits_of
from headrace.policy.routing.wishes import RoutingWishes
from headrace.text.detokenize import Detokenizer
from headrace.text.logprobs import DecodedLogprobs
from headrace.text.output.formats import ModelFormats
from headrace.text.tokenizer import Tokenizer
from headrace.text.turns import ConversationTurns
from headrace.wire.client import ConnectionState

MAX_TOKENS_AT_ONCE = 16_384
"""Checks take about 80 ns per token."""

MAX_NAMED = 8


class TokenUpstream(Upstream):
    def __init__(
        self,
        text: ModelText,
        pool: ReplicaPool,
        *,
        draw_seed: Callable[[], int],
        formats: ModelFormats,
        adapter: str | None = None,
        adapter_digest: str = "",
    ) -> None:
        self._adapter, self._adapter_digest = adapter, adapter_digest
        self._formats = formats
        self._text = text
        self._pool = pool
        self._draw_seed = draw_seed

    @property
    def max_model_len(self) -> int | None:
        info = self._pool.info
        return info.max_model_len if info else None

    @property
    def fingerprint(self) -> str | None:
        info = self._pool.info
        digest = info.digests.get("model", "") if info else ""
        return "_".join(["fp", digest[:12], *filter(None, [self._adapter_digest[:12]])]) if digest else None

    def hold(self, terms: Callable[[], HeldTerms], unsent: UnsentRequest | None, wishes: RoutingWishes) -> Hold | None:
        return self._pool.hold(terms, unsent)

    def note_wanted(self) -> None:
        self._pool.note_wanted()

    @property
    def num_held(self) -> int:
        return self._pool.num_held

    @property
    def is_asleep(self) -> bool:
        return self._pool.is_asleep

    def queue(self, priority: PriorityClass, unsent: UnsentRequests) -> QueueState | None:
        return self._pool.queue(priority, unsent)

    @property
    def version(self) -> str:
        version = self._pool.version
        return f"{version}{self._adapter_digest}" if version else ""

    @property
    def knows_adapters(self) -> bool:
        """A model without a replica has none that could say more."""
        return self._pool.info is not None or not self._pool.replicas

    def adapter_names(self) -> Collection[str]:
        return self._pool.adapter_names()

    def adapted(self, name: str) -> TokenUpstream | None:
        digest = self._pool.adapter_digest(name)
        if digest is None:
            return None
        return TokenUpstream(self._text, self._pool, draw_seed=self._draw_seed, formats=self._formats, adapter=name, adapter_digest=digest)

    @property
    def is_alive(self) -> bool:
        return any(replica.connection.state is not ConnectionState.DOWN for replica in self._pool.replicas)

    def replicas(self) -> list[ReplicaHealth]:
        return self._pool.health()

    def retired_replicas(self) -> list[ReplicaHealth]:
        return self._pool.retired_health()

    async def prepare(self, request: GenerationRequest, principal: PrincipalFacts) -> Prepared:
        info, context_tokens = self._info(), principal.ceiling.context_tokens
        if context_tokens is None or context_tokens >= info.max_model_len:
            return await self._prepare(request, principal, info)
        try:
            return await self._prepare(request, principal, replace(info, max_model_len=context_tokens))
        except ContextLengthExceeded as error:
            raise error.of_tier(principal.ceiling.tier) from None

    async def _prepare(self, request: GenerationRequest, principal: PrincipalFacts, info: ModelInfo) -> Prepared:
        """info: with `max_model_len` reduced to the caller's tier"""
        earlier = None if request.earlier is None else _earlier_calls(request.earlier, request.sampling)
        params = self._params(request, info, None if earlier is None else earlier[0].seed)
        grammar = bound_grammar(self._formats, request.prompt, None if request.grammar is None else request.grammar.grammar)
        prompts, ignored = await self._encode(request.prompt, params.max_tokens, info, principal.tenant)
        if request.has_priority and info.queue_policy and not traits_of(info.queue_policy).has_classes:
            ignored = [*ignored, "priority"]
        if params.max_tokens is None:
            params = _with_max_tokens(params, prompts, principal, info)
        calls: list[PromptCall] = []
        for number, prompt in enumerate(prompts):
            if number or len(prompt.token_ids) > MAX_TOKENS_AT_ONCE:
                await asyncio.sleep(0)  # each call's checks take up to milliseconds: other tasks run between them
            bound = after_reasoning(self._formats, self._text.tokenizer, grammar, request.prompt, prompt.token_ids)
            parsing = OutputParsing.of(self._formats, self._text.tokenizer, request.prompt, prompt.token_ids)
            call = _call(number, prompt.token_ids, params, request, info, principal, grammar=bound, parsing=parsing)
            if self._adapter is not None:
                call = replace(call, request=replace(call.request, adapter=self._adapter, adapter_digest=self._adapter_digest))
            calls.append(call if earlier is None else _continued(call, earlier, number, request))
        prompt_tokens = sum([len(call.request.prompt_ids) for call in calls])
        return Prepared(
            stream=partial(self._stream, calls),
            prompts=prompts,
            prompt_tokens=prompt_tokens,
            max_prompt_tokens=prompt_tokens,
            max_output_tokens=sum([call.max_output_tokens * call.request.params.n for call in calls]),
            num_sequences=sum([call.request.params.n for call in calls]),
            seed=params.seed,
            ignored=ignored,
            keeps_events=params.prompt_logprobs is None,  # kept ids have no log-probabilities
        )

    def _stream(self, calls: Sequence[PromptCall]) -> EventStream:
        n = calls[0].request.params.n
        streams: list[EventStream] = [
            TokenStream(self._pool, self._text.tokenizer, call, first_index=number * n) for number, call in enumerate(calls)
        ]
        return streams[0] if len(streams) == 1 else MergedStream(streams, n)

    async def tokenize(self, prompt: Conversation | PlainPrompts, *, needs_texts: bool, tenant: str) -> Tokenization:
        if isinstance(prompt, Conversation):
            return await self._text.tokenize_chat(prompt, needs_texts=needs_texts, tenant=tenant)
        (text,) = prompt.prompts
        assert isinstance(text, str), "ids are tokenized"
        return await self._text.tokenize(text, add_special_tokens=prompt.add_special_tokens, needs_texts=needs_texts, tenant=tenant)

    async def detokenize(self, token_ids: Sequence[int], *, tenant: str) -> str:
        return await self._text.decode(token_ids, field="tokens", skip_special_tokens=False, tenant=tenant)

    def _info(self) -> ModelInfo:
        info = self._pool.info
        if info is None:
            if self._pool.unavailable or self._pool.is_closed:
                raise self._pool.why_unavailable()
            raise Unavailable(f"The model {self._pool.model} is still starting.", retry_after_s=2.0)
        return info

    def _params(self, request: GenerationRequest, info: ModelInfo, earlier_seed: int | None) -> SamplingParams:
        chosen = {name: info.sampling_defaults[name] for name in FROM_MODEL if name in info.sampling_defaults}
        seeds = (request.sampling.get("seed"), earlier_seed)
        seed = next((seed for seed in seeds if seed is not None), None)
        given = {**chosen, **request.sampling, "seed": self._draw_seed() if seed is None else seed}
        return SamplingParams(**given).checked(vocab_size=info.vocab_size)

    # -- prompts -------------------------------------------------------------------------------------------------------------------

    async def _encode(
        self, prompt: Conversation | PlainPrompts, max_tokens: int | None, info: ModelInfo, tenant: str
    ) -> tuple[list[TokenPrompt], list[str]]:
        if isinstance(prompt, Conversation):
            ids, unread = await self._text.encode_chat(prompt, max_model_len=info.max_model_len, tenant=tenant)
            made = replace(self._prompt(tuple(ids), ""), turns=self._turns(prompt), block_size=info.block_size)
            return [made], unread if len(unread) <= MAX_NAMED else ["chat_template_kwargs"]
        return await self._encode_plain(prompt, max_tokens, info, tenant), []

    async def _encode_plain(self, prompt: PlainPrompts, max_tokens: int | None, info: ModelInfo, tenant: str) -> list[TokenPrompt]:
        texts = [given for given in prompt.prompts if isinstance(given, str)]
        encoded = iter(
            await self._text.encode(texts, add_special_tokens=prompt.add_special_tokens, max_model_len=info.max_model_len, tenant=tenant)
            if texts
            else ()
        )
        made: list[TokenPrompt] = []
        for given in prompt.prompts:
            if isinstance(given, str):
                ids, text = tuple(next(encoded)), given
            else:
                check_fits_context(len(given), max_tokens, info, part="prompt")
                text = await self._text.decode(given, field="prompt", tenant=tenant) if prompt.needs_text else ""
                ids = tuple(given)
            made.append(self._prompt(ids, text))
        return made

    def _turns(self, prompt: Conversation) -> ConversationTurns:
        return ConversationTurns(
            starts=self._formats.turn_starts,
            roles=tuple([str(message["role"]) for message in prompt.messages]),
            has_generation_prompt=prompt.add_generation_prompt,
        )

    def _prompt(self, ids: tuple[int, ...], text: str) -> TokenPrompt:
        return TokenPrompt(text, len(ids), token_ids=ids, tokenizer=self._text.tokenizer)


def check_fits_context(num_tokens: int, max_tokens: int | None, info: ModelInfo, *, part: str) -> int:
    """Raises ContextLengthExceeded when fewer are left."""
    room = info.max_model_len - num_tokens
    if room < (max_tokens or 1):
        field = "prompt" if room < 1 else "max_tokens"
        raise context_overflow(field, info.max_model_len, part=part, prompt_tokens=num_tokens, max_tokens=max_tokens)
    return room


def _with_max_tokens(params: SamplingParams, prompts: Sequence[TokenPrompt], principal: PrincipalFacts, info: ModelInfo) -> SamplingParams:
    num_tokens = [len(prompt.token_ids) for prompt in prompts]
    ceiling = principal.ceiling
    room = info.max_model_len - max(num_tokens)
    allowed = ceiling.max_tokens(sum(num_tokens), len(prompts) * params.n)
    if allowed is None and ceiling.context_tokens is None:  # the engine knows its own context
        return params
    room = room if allowed is None else min(room, allowed)
    return with_default_max_tokens(params, info.sampling_defaults.get("max_tokens", room), room)


def _earlier_calls(earlier: EarlierOutput, sampling: Mapping[str, Any]) -> tuple[EarlierCallOutput, ...]:
    """A request with log-probabilities continues where its client stopped reading: kept ids have none."""
    calls = calls_of(earlier.state)
    if sampling.get("logprobs") is None:
        return calls
    n = len(calls[0].sequences)
    return tuple(call.up_to(earlier.offsets[number * n : (number + 1) * n]) for number, call in enumerate(calls))


def _continued(call: PromptCall, earlier: Sequence[EarlierCallOutput], number: int, request: GenerationRequest) -> PromptCall:
    """Raises StreamConflict if the prompt has other tokens now."""
    assert request.earlier is not None
    if number >= len(earlier) or earlier[number].prompt_digest != prompt_digest(call.request.prompt_ids):
        raise StreamConflict("The prompt of this request has other tokens than it had: its chat template or tokenizer was changed.")
    if earlier[number].adapter_digest != call.request.adapter_digest:
        raise StreamConflict("The adapter that this request names has other weights than it had: it was loaded again.")
    return replace(call, earlier=earlier[number], answer_id=RequestId(f"{request.earlier.answer_id}-{number}"))


def _call(
    number: int,
    prompt_ids: tuple[int, ...],
    params: SamplingParams,
    request: GenerationRequest,
    info: ModelInfo,
    principal: PrincipalFacts,
    *,
    grammar: Grammar | None,
    parsing: OutputParsing | None,
) -> PromptCall:
    """Raises InvalidRequest by the same rules as the engine."""
    part = "messages" if isinstance(request.prompt, Conversation) else "prompt"
    room = check_fits_context(len(prompt_ids), params.max_tokens, info, part=part)
    if params.max_tokens is None:  # the default of the model's author, or the rest of the context
        params = with_default_max_tokens(params, info.sampling_defaults.get("max_tokens"), room)
    engine_request = EngineRequest(
        request_id=RequestId(f"{request.request_id}-{number}"),
        prompt_ids=prompt_ids,
        params=params,
        tenant=principal.tenant,
        priority=principal.priority,
        tier=principal.tier,
        salt=principal.salt,
        grammar=grammar,
        deadline_at=request.deadline_at,
    )
    return PromptCall(
        request=engine_request.checked(vocab_size=info.vocab_size, max_model_len=info.max_model_len),
        max_output_tokens=params.max_tokens or room,
        parsing=parsing,
        session=request.session,
        unsent=request.unsent,
        has_fallback=request.has_fallback,
    )


OFFSET_TOKENS = 512
"""Tokens between two empty pages while offsets are counted: half a millisecond, as a page of log-probabilities."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenPrompt(PreparedPrompt):
    """turns, block_size: of a conversation"""

    token_ids: tuple[int, ...]
    tokenizer: Tokenizer
    turns: ConversationTurns | None = None
    block_size: int = 1

    def part_at(self, position: int) -> str | None:
        return None if self.turns is None else self.turns.part_of(self.token_ids, position, position + self.block_size)

    def recorded_blocks(self, key: bytes) -> str:
        return recorded_blocks(key, self.token_ids)

    def decoded_logprobs(self, logprobs: LogprobColumns) -> Iterator[DecodedLogprobs]:
        offsets = yield from self._offsets()
        first = columns_of([TokenLogprobs(self.token_ids[0], 0.0, 0)])
        yield DecodedLogprobs(self.tokenizer, first, offsets[:1], bytearray(b"\1"))
        end = 1
        for page in logprobs.pages(PAGE_TOKENS):
            begin, end = end, end + len(page)
            yield DecodedLogprobs(self.tokenizer, page, offsets[begin:end], bytearray(b"\1" * len(page)))

    def _offsets(self) -> Generator[DecodedLogprobs, None, array[int]]:
        """Number of characters of `text` before each token. A space that some tokenizers put before the first word is not in the text:
        offsets shift by it. All zero where the text is not shown.
        """
        if not self.text:
            return array("q", bytes(8 * len(self.token_ids)))
        offsets, reader = array("q"), Detokenizer(self.tokenizer)
        for begin in range(0, len(self.token_ids), OFFSET_TOKENS):
            for token_id in self.token_ids[begin : begin + OFFSET_TOKENS]:
                offsets.append(reader.num_chars)
                reader.push((token_id,))
            yield DecodedLogprobs(self.tokenizer)
        shift = max(0, reader.num_chars - len(self.text))
        return array("q", [max(0, offset - shift) for offset in offsets]) if shift else offsets
