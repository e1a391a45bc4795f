"""The concerns of a generating request, a stage each. `generation.run` calls them; a request passes them in the order of `STAGES`.

A stage is called with the request and with what comes behind it, as a Starlette middleware is: it does its part, awaits `call_next`, which
gives the prepared answer before its first token, and does the rest. What happens while the answer is made, or at its end, it leaves at the
request's hooks (`Generation.recorders`, `before_end`, `ends`). A stage that answers by itself does not call on.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from headrace.gateway.generation.generation import Generation
from headrace.gateway.generation.stages.accounts import log_prompt, record_prepared, reserve_limits, reserve_memory
from headrace.gateway.generation.stages.fitting import fit_context
from headrace.gateway.generation.stages.model_choice import choose_model
from headrace.gateway.generation.stages.resume import resume
from headrace.gateway.generation.stages.reuse import reuse
from headrace.gateway.generation.stages.session import take_turn
from headrace.gateway.upstream.seam import Prepared

Stage = Callable[[Generation, Callable[[], Awaitable[Prepared]]], Awaitable[Prepared]]

STAGES: tuple[Stage, ...] = (
    take_turn,
    log_prompt,
    reuse,
    resume,
    choose_model,
    reserve_memory,
    reserve_limits,
    record_prepared,
    fit_context,
)
"""Before the upstream, in this order. A request's ends run in the reverse order."""
