"""Runs one model's template and tokenizer in the text workers. Every call names the tenant whose share of the queue it takes, raises
Overloaded when there is no room, and frees its place when its task is cancelled.
"""

from __future__ import annotations

from array import array
from collections.abc import Awaitable, Sequence

from headrace.core.errors import Unavailable
from headrace.gateway.text_workers import frames
from headrace.gateway.text_workers.limits import check_fits
from headrace.gateway.text_workers.pool import Done, TextPool
from headrace.gateway.upstream.generation_request import MARKS, Conversation, without
from headrace.gateway.upstream.seam import Tokenization
from headrace.gateway.upstream.served_models import UNREADABLE_RETRY_S
from headrace.text.tokenizer import Tokenizer


class ModelText:
    def __init__(self, pool: TextPool, name: str, tokenizer: Tokenizer) -> None:
        self._pool = pool
        self._name = name
        self.tokenizer = tokenizer

    async def encode_chat(self, conversation: Conversation, *, max_model_len: int | None, tenant: str) -> tuple[array[int], list[str]]:
        """Token ids, and the fields that the template does not read.

        Raises InvalidRequest for a conversation that the template refuses or that exceeds a worker's bounds, ContextLengthExceeded for one
        that cannot fit, Overloaded and Unavailable when no worker takes the job.
        """
        job = self._chat_job(conversation, max_model_len)
        answer, tail = await self._submit(job, tenant=tenant, field="messages")
        (ids,) = _split(answer, tail)
        assert isinstance(answer, frames.Ids)
        return ids, answer.unread

    async def encode(self, texts: Sequence[str], *, add_special_tokens: bool, max_model_len: int | None, tenant: str) -> list[array[int]]:
        """Raises as `encode_chat`, and InvalidRequest for a lone surrogate."""
        bound = self.tokenizer.bound
        if bound is not None and bound.counts_spaces:  # other bounds split the text, which takes too long here: a worker does it
            for text in texts:
                check_fits("prompt", text, bound, max_model_len)
        job = frames.EncodeTexts(self._name, list(texts), add_special_tokens, max_model_len)
        return _split(*await self._submit(job, tenant=tenant, field="prompt"))

    async def tokenize_chat(self, conversation: Conversation, *, needs_texts: bool, tenant: str) -> Tokenization:
        job = frames.Tokenize(self._chat_job(conversation, None), needs_texts)
        return _tokens(*await self._submit(job, tenant=tenant, field="messages"))

    async def tokenize(self, text: str, *, add_special_tokens: bool, needs_texts: bool, tenant: str) -> Tokenization:
        job = frames.EncodeTexts(self._name, [text], add_special_tokens, None)
        return _tokens(*await self._submit(frames.Tokenize(job, needs_texts), tenant=tenant, field="prompt"))

    async def decode(self, token_ids: Sequence[int], *, field: str, skip_special_tokens: bool = True, tenant: str) -> str:
        job = frames.DecodeIds(self._name, field, skip_special_tokens)
        answer, _ = await self._submit(job, frames.ids_to_bytes(field, token_ids), tenant=tenant, field=field)
        assert isinstance(answer, frames.Text)
        return answer.text

    def _submit(self, job: frames.WorkerJob, tail: bytes = b"", *, tenant: str, field: str) -> Awaitable[Done]:
        if self._name in self._pool.failures:
            raise Unavailable("The tokenizer or the chat template of this model cannot be read now.", retry_after_s=UNREADABLE_RETRY_S)
        return self._pool.submit(job, tail, tenant=tenant, field=field)

    def _chat_job(self, conversation: Conversation, max_model_len: int | None) -> frames.EncodeChat:
        return frames.EncodeChat(
            model=self._name,
            messages=[without(message, MARKS) for message in conversation.messages],
            add_generation_prompt=conversation.add_generation_prompt,
            continue_final_message=conversation.continue_final_message,
            kwargs=dict(conversation.template_kwargs),
            max_model_len=max_model_len,
            tools=[tool.shown() for tool in conversation.shown_tools],
            switches=list(conversation.switches),
        )


def _split(answer: frames.AnyAnswer, tail: memoryview) -> list[array[int]]:
    assert isinstance(answer, frames.Ids)
    ids = frames.ids_from_bytes(tail)
    prompts: list[array[int]] = []
    first = 0
    for count in answer.counts:
        prompts.append(ids[first : first + count])
        first += count
    return prompts


def _tokens(answer: frames.AnyAnswer, tail: memoryview) -> Tokenization:
    assert isinstance(answer, frames.Tokens)
    return Tokenization(answer.count, bytes(tail[: answer.num_id_bytes]), bytes(tail[answer.num_id_bytes :]))
