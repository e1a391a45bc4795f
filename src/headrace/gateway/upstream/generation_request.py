"""Defines the request that an upstream gets, checked as far as no model is needed."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from headrace.core.grammar import Grammar
from headrace.core.ids import RequestId
from headrace.core.request import NO_TIER, PriorityClass, TierTerms
from headrace.core.tools import CallMode, FunctionTool, ToolChoice
from headrace.policy.admission import UnsentRequest
from headrace.policy.limits.price import UNBOUNDED, RequestCeiling
from headrace.policy.routing.wishes import NO_WISHES, RoutingWishes
from headrace.text.template_switch import TemplateSwitch

CALL_PASSED = ("extra_content", "provider_specific_fields")
"""The signatures of Gemini, of itself and by way of LiteLLM."""

REASONING_PASSED = ("reasoning_details", "thinking_blocks")
"""OpenRouter's and LiteLLM's reasoning with its signatures."""

PASSED_IN_BODY = ("user", "safety_identifier", "prompt_cache_key", "prompt_cache_retention")
PASSED_IN_CHAT = ("prompt_cache_options", "cache_control")
PASSED_INSIDE: Mapping[str, Sequence[str]] = {
    "messages[]": (*REASONING_PASSED, *CALL_PASSED, "cache_control"),
    "messages[].content[]": ("cache_control", "prompt_cache_breakpoint"),
    "messages[].tool_calls[]": (*CALL_PASSED, "cache_control"),
    "messages[].tool_calls[].function": ("provider_specific_fields",),
    "tools[]": ("cache_control",),
    "tools[].function": ("cache_control",),
}
"""Foreign servers read them and our engines have no use for them: marks of what is to be cached, and what a server wants back of its
earlier answer. By the object that they stand in.
"""

PASSED = frozenset((*PASSED_IN_BODY, *PASSED_IN_CHAT, *(f"{place}.{name}" for place, names in PASSED_INSIDE.items() for name in names)))
"""By their names in `x-headrace-ignored`."""

MARKS = frozenset(name for names in PASSED_INSIDE.values() for name in names) | {"reasoning"}

_HOLDS_MARKS = ("content", "tool_calls", "function")


def without(value: Any, names: Collection[str]) -> Any:
    if isinstance(value, list):
        return [without(each, names) for each in value]
    if not isinstance(value, dict):
        return value
    return {name: without(each, names) if name in _HOLDS_MARKS else each for name, each in value.items() if name not in names}


def names_inside(value: Any) -> set[str]:
    if isinstance(value, list):
        return set().union(*map(names_inside, value))
    if not isinstance(value, dict):
        return set()
    return set(value).union(*(names_inside(value[name]) for name in _HOLDS_MARKS if name in value))


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """separates_reasoning  the model's reasoning is separated from its text
    reasoning_fields     the client's fields behind `switches`, for a foreign server that reads them itself
    """

    messages: Sequence[Mapping[str, object]]
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    template_kwargs: Mapping[str, object] = field(default_factory=dict)
    tools: Sequence[FunctionTool] = ()
    tool_choice: ToolChoice = field(default_factory=ToolChoice)
    switches: Sequence[TemplateSwitch] = ()
    separates_reasoning: bool = True
    reasoning_fields: Mapping[str, object] = field(default_factory=dict)

    @property
    def shown_tools(self) -> Sequence[FunctionTool]:
        return () if self.tool_choice.mode is CallMode.NONE else self.tools


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainPrompts:
    """needs_text: the prompts' text will be shown (echo)"""

    prompts: Sequence[str | Sequence[int]]
    add_special_tokens: bool = True
    needs_text: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestedGrammar:
    """field: dotted, for errors; name: of the body's field that holds it"""

    grammar: Grammar
    field: str
    name: str
    value_json: str

    @property
    def num_bytes(self) -> int:
        return string_bytes(self.grammar.source) + string_bytes(self.value_json)


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """sampling     the parameters the client gave, by the names of `SamplingParams`; the upstream adds its own defaults
    deadline_at  time on the service's clock at which the answer ends, finished or not; None: no deadline

    session      of its tenant, in every gateway alike; empty: none
    unsent       counts the request until it is sent to a replica; None: it was not counted by admission
    admit        called where our engines are to answer after foreign servers that came first: counts it again, and raises Overloaded where
                 their queue is too long. None: admission does not look at it
    has_fallback  another upstream can answer as long as no output was read, so the request does not wait for a replica
    foreign_fields  fields for a foreign server as the client wrote them, beside or instead of those of `sampling`
    trace_headers   headers for a foreign server: the trace that this request belongs to
    routing      of it only what is about servers
    """

    request_id: RequestId
    prompt: Conversation | PlainPrompts
    sampling: Mapping[str, Any]
    grammar: RequestedGrammar | None = None
    deadline_at: float | None = None
    has_priority: bool = False
    earlier: EarlierOutput | None = None
    session: str = ""
    unsent: UnsentRequest | None = None
    admit: Callable[[], None] | None = None
    has_fallback: bool = False
    foreign_fields: Mapping[str, Any] = field(default_factory=dict)
    trace_headers: Mapping[str, str] = field(default_factory=dict)
    routing: RoutingWishes = NO_WISHES


@dataclass(frozen=True, slots=True, kw_only=True)
class EarlierOutput:
    """The output of a stream that ended before its client had all of it. See docs/failover.md, "A client that comes back".

    answer_id  ids of tool calls are made from it
    state      from `EventStream.saved_state`
    """

    answer_id: RequestId
    state: bytes
    offsets: Sequence[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class PrincipalFacts:
    """salt: separates prefix caches, never chosen by the client alone. ceiling: also bounds the output of a request without `max_tokens`"""

    tenant: str = ""
    priority: PriorityClass = PriorityClass.STANDARD
    tier: TierTerms = NO_TIER
    salt: bytes = b""
    ceiling: RequestCeiling = UNBOUNDED


def string_bytes(text: str) -> int:
    return len(text) if text.isascii() else 4 * len(text)
