"""The request that an upstream gets, checked as far as no model is needed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from headrace.core.grammar import Grammar
from headrace.core.ids import RequestId
from headrace.core.request import NO_TIER, PriorityClass, TierTerms
from headrace.core.tools import CallMode, FunctionTool, ToolChoice
from headrace.policy.admission.unsent import UnsentRequest
from headrace.policy.limits.ceiling import UNBOUNDED, RequestCeiling
from headrace.text.template_switch import TemplateSwitch


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """One prompt, to be rendered by a chat template.

    messages             role, content, perhaps a name, calls, the id of the call that a tool answers (see `headrace.text.messages`)
    tools                functions that the model may call
    switches             fields of the request that set a variable of the template
    separates_reasoning  the model's reasoning is no part of its text
    reasoning_fields     the fields behind `switches` as the client wrote them, for a server that reads them itself
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
        """The functions that the prompt shows: none of them where the model must not call any."""
        return () if self.tool_choice.mode is CallMode.NONE else self.tools


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainPrompts:
    """Prompts without a template, each a text or token ids; ids are taken as they are.

    needs_text  the text of every prompt will be shown (echo): ids are decoded as well
    """

    prompts: Sequence[str | Sequence[int]]
    add_special_tokens: bool = True
    needs_text: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestedGrammar:
    """What the output must match, for our engines and for servers that read the client's own field.

    field       dotted name of the field that says it, as the client wrote it; errors name it
    name        the field of the body that holds it
    value_json  that field's value
    """

    grammar: Grammar
    field: str
    name: str
    value_json: str

    @property
    def num_bytes(self) -> int:
        """Approximate memory of its strings."""
        return string_bytes(self.grammar.source) + string_bytes(self.value_json)


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """What one client wants, checked as far as no model is needed for it.

    prompt       one conversation, or any number of plain prompts
    sampling     the parameters the client gave, by the names of `SamplingParams`; the upstream adds its own defaults
    grammar      what the output must match; None: any text
    deadline_at  when the answer ends, finished or not, on the service's clock; None = no deadline
    has_priority the client named a priority class; which one counts is in `PrincipalFacts`
    earlier      what an earlier stream of the same request has given; the answer goes on there
    preferred_replica  name of one whose prefix cache has the prompt's beginning; empty: none is known
    unsent       counts the request until a replica was sent it; None: no admission decided on it
    has_fallback  while nothing of the answer was read, another upstream can give it: the request does not wait for a replica
    """

    request_id: RequestId
    prompt: Conversation | PlainPrompts
    sampling: Mapping[str, Any]
    grammar: RequestedGrammar | None = None
    deadline_at: float | None = None
    has_priority: bool = False
    earlier: EarlierOutput | None = None
    preferred_replica: str = ""
    unsent: UnsentRequest | None = None
    has_fallback: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class EarlierOutput:
    """The output of a stream that ended before its client had all of it. See docs/failover.md, "A client that comes back".

    answer_id  of the request that began the answer: its tool calls are named by it
    state      as `EventStream.saved_state` gave it
    offsets     per sequence: up to where the client has its output (`OutputEvent.offset`)
    """

    answer_id: RequestId
    state: bytes
    offsets: Sequence[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class PrincipalFacts:
    """What a request inherits from its key. `salt` separates prefix caches; it never comes from the client alone.

    tier     the tier's share and goals
    ceiling  bounds the context, and the output where the client gives no `max_tokens`
    """

    tenant: str = ""
    priority: PriorityClass = PriorityClass.STANDARD
    tier: TierTerms = NO_TIER
    salt: bytes = b""
    ceiling: RequestCeiling = UNBOUNDED


def string_bytes(text: str) -> int:
    """Memory of a string's characters at most: one byte each, or four if any is not ASCII."""
    return len(text) if text.isascii() else 4 * len(text)
