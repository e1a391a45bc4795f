"""Holds the concerns of a generating request, one stage each; a request passes them in the order of `STAGES`.

`generation.run` calls a stage, as Starlette calls a middleware, with the request and with `call_next`, which runs everything behind the
stage. The stage does its first part, awaits `call_next`, which returns the prepared answer before its first token, and does the rest. So
what stages do before `call_next` happens in the order of the rows, and what they do after it in the reverse order. Behind the last row
`fitting.prepare` asks the upstream.

A stage leaves what is to happen during the answer, or at its end, in the request's hooks (`Generation.recorders`, `before_end`, `ends`). A
stage that answers by itself does not await `call_next`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from headrace.gateway.generation.generation import CallNext, Generation
from headrace.gateway.generation.stages.accounts import log_prompt, record_prepared, reserve_limits, reserve_memory
from headrace.gateway.generation.stages.idempotency import answer_once
from headrace.gateway.generation.stages.model_choice import choose_model
from headrace.gateway.generation.stages.response_cache import use_cache
from headrace.gateway.generation.stages.resume import resume
from headrace.gateway.generation.stages.session import take_turn
from headrace.gateway.upstream.seam import Prepared

Stage = Callable[[Generation, CallNext], Awaitable[Prepared]]

STAGES: tuple[Stage, ...] = (
    take_turn,  # before and after
    log_prompt,  # before
    answer_once,  # before and after
    use_cache,  # before and after
    resume,  # before and after
    choose_model,  # before
    reserve_memory,  # before: the grammar; after: the third of three rows
    reserve_limits,  # after: the second of three rows
    record_prepared,  # after: the first of three rows
)
"""When a row acts, seen from the upstream's preparation. A request's ends run in the reverse order of the rows that left them."""
