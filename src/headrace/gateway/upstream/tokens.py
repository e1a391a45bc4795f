"""Our own engines behind the seam: a request becomes token ids here, and nothing above knows of them.

Template, tokenizer and assemblers of one model live here, and its replicas. What needs the tokenizer runs in the text pool.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b

from headrace.core.errors import Unavailable
from headrace.core.ids import RequestId
from headrace.core.model_info import ModelInfo
from headrace.core.sampling import SamplingParams, check_token_ids, with_room
from headrace.gateway.generation.text_pool import TextPool
from headrace.gateway.http.errors import ContextLengthExceeded
from headrace.gateway.upstream.merge import MergedStream
from headrace.gateway.upstream.replicas import ReplicaPool
from headrace.gateway.upstream.seam import (
    Conversation,
    EventStream,
    GenerationRequest,
    PlainPrompts,
    PrincipalFacts,
    ReplicaHealth,
    Tokenization,
)
from headrace.gateway.upstream.token_prompt import TokenPrompt
from headrace.gateway.upstream.token_stream import Call, TokenStream
from headrace.text.folder import TextModel

FROM_MODEL = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""Parameters whose default is the model's generation_config.json (vLLM does the same)."""

ROUTE_KEY_TOKENS = 256
"""Requests that agree in so many first tokens share a system prompt at least."""


class TokenUpstream:
    """One model's replicas. An `Upstream`."""

    def __init__(self, text: TextModel, pool: ReplicaPool, text_pool: TextPool, *, draw_seed: Callable[[], int]) -> None:
        """draw_seed: for a request whose client names none"""
        self._text = text
        self._pool = pool
        self._text_pool = text_pool
        self._draw_seed = draw_seed

    @property
    def max_model_len(self) -> int | None:
        return self._pool.info.max_model_len if self._pool.info else None

    @property
    def fingerprint(self) -> str | None:
        digest = self._pool.info.digests.get("model", "") if self._pool.info else ""
        return f"fp_{digest[:12]}" if digest else None

    def replicas(self) -> list[ReplicaHealth]:
        return self._pool.health()

    async def prepare(self, request: GenerationRequest, principal: PrincipalFacts) -> TokenPrepared:
        info = self._info()
        params = self._params(request, info)

        def work() -> TokenPrepared:
            prompts = self._encode(request.prompt, info)
            calls = [_call(number, prompt.token_ids, params, request, info) for number, prompt in enumerate(prompts)]
            return TokenPrepared(self._pool, self._text, tuple(prompts), tuple(replace(call, principal=principal) for call in calls))

        return await self._text_pool.run(work)

    async def tokenize(self, prompt: Conversation | PlainPrompts, *, needs_texts: bool) -> Tokenization:
        return await self._text_pool.run(self._tokenized, prompt, self._info(), needs_texts)

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        return await self._text_pool.run(self._detokenized, token_ids)

    def _info(self) -> ModelInfo:
        """Raises Unavailable until a replica has said what it is."""
        if self._pool.info is None:
            raise Unavailable(f"The model {self._pool.model} is still starting.", retry_after_s=2.0)
        return self._pool.info

    def _params(self, request: GenerationRequest, info: ModelInfo) -> SamplingParams:
        """What the client gave, else what the model's author chose, with a seed. Raises InvalidRequest."""
        chosen = {name: info.sampling_defaults[name] for name in FROM_MODEL if name in info.sampling_defaults}
        params = SamplingParams(**{**chosen, **request.sampling})
        seed = params.seed if params.seed is not None else self._draw_seed()
        return params.with_(seed=seed).checked(vocab_size=info.vocab_size)

    # -- in the text pool ----------------------------------------------------------------------------------------------------------

    def _encode(self, prompt: Conversation | PlainPrompts, info: ModelInfo) -> list[TokenPrompt]:
        tokenizer = self._text.tokenizer
        if isinstance(prompt, Conversation):
            ids = self._text.template.encode(
                tokenizer,
                prompt.messages,
                add_generation_prompt=prompt.add_generation_prompt,
                continue_final_message=prompt.continue_final_message,
                kwargs=prompt.template_kwargs,
            )
            return [TokenPrompt(tuple(ids), "", tokenizer)]
        return [self._encode_plain(prompt, given, info) for given in prompt.prompts]

    def _encode_plain(self, prompt: PlainPrompts, given: str | Sequence[int], info: ModelInfo) -> TokenPrompt:
        """Text that nobody will read is not made."""
        tokenizer = self._text.tokenizer
        if isinstance(given, str):
            return TokenPrompt(tuple(tokenizer.encode(given, add_special_tokens=prompt.add_special_tokens)), given, tokenizer)
        check_token_ids("prompt", given, info.vocab_size)
        return TokenPrompt(tuple(given), tokenizer.decode(given) if prompt.needs_text else "", tokenizer)

    def _tokenized(self, prompt: Conversation | PlainPrompts, info: ModelInfo, needs_texts: bool) -> Tokenization:
        (made,) = self._encode(prompt, info)
        texts = [self._text.tokenizer.id_to_token(token_id) or "" for token_id in made.token_ids] if needs_texts else None
        return Tokenization(list(made.token_ids), texts)

    def _detokenized(self, token_ids: Sequence[int]) -> str:
        check_token_ids("tokens", token_ids, self._text.tokenizer.vocab_size)
        return self._text.tokenizer.decode(token_ids, skip_special_tokens=False)


@dataclass(frozen=True, slots=True)
class TokenPrepared:
    """Calls that nobody has begun. A `Prepared`."""

    _pool: ReplicaPool
    _text: TextModel
    prompts: tuple[TokenPrompt, ...]
    calls: tuple[Call, ...]

    @property
    def prompt_tokens(self) -> int:
        return sum(len(call.prompt_ids) for call in self.calls)

    @property
    def max_output_tokens(self) -> int:
        return sum(call.max_output_tokens * call.params.n for call in self.calls)

    @property
    def num_sequences(self) -> int:
        return sum(call.params.n for call in self.calls)

    @property
    def route_key(self) -> bytes:
        """Of the first prompt: its beginning under its salt, so that no tenant's key is another's."""
        call = self.calls[0]
        begin = ",".join(map(str, call.prompt_ids[:ROUTE_KEY_TOKENS]))
        return blake2b(begin.encode(), key=call.principal.salt, digest_size=16, person=b"headrace-route").digest()

    @property
    def seed(self) -> int | None:
        return self.calls[0].params.seed

    def stream(self) -> EventStream:
        n = self.calls[0].params.n
        streams = [TokenStream(self._pool, self._text.tokenizer, call, first_index=number * n) for number, call in enumerate(self.calls)]
        return streams[0] if len(streams) == 1 else MergedStream(streams, n)


def _call(number: int, prompt_ids: tuple[int, ...], params: SamplingParams, request: GenerationRequest, info: ModelInfo) -> Call:
    """The request's prompt `number`. Raises InvalidRequest for what the model cannot take, by the rules the engine holds it to."""
    room = info.max_model_len - len(prompt_ids)
    if room <= 0:
        rule = f"prompt tokens + at least 1 output token <= max_model_len ({info.max_model_len})"
        raise ContextLengthExceeded("prompt", rule, len(prompt_ids), "Shorten the prompt.")
    if params.max_tokens is None:  # what the model's author chose, if anything, as far as the context leaves room
        params = with_room(params, info.sampling_defaults.get("max_tokens"), room)
    call = Call(
        request_id=RequestId(f"{request.request_id}-{number}"),
        prompt_ids=prompt_ids,
        params=params,
        max_output_tokens=params.max_tokens or room,
        deadline_s=request.deadline_s,
    )
    call.engine_request(0).checked(vocab_size=info.vocab_size, max_model_len=info.max_model_len)
    return call
