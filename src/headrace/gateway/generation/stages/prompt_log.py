"""Keeps the prompt for the usage record, for a tenant that has chosen it."""

from __future__ import annotations

from headrace.gateway.generation.call import Call, CallNext, Ready
from headrace.gateway.ledger.record import prompt_json
from headrace.gateway.upstream.generation_request import Conversation


async def log_prompt(call: Call, call_next: CallNext) -> Ready:
    if call.principal.logs_prompts:
        prompt = call.parsed.prompt
        call.ending.prompt = prompt_json(prompt.messages if isinstance(prompt, Conversation) else prompt.prompts)
    return await call_next(call)
