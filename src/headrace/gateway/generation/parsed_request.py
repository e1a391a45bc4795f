"""Defines the parsed body of a generating request: one type for all surfaces, with the caps that hold for all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

from msgspec import Struct, field, structs

from headrace.bundled import CLASSIFIER
from headrace.core.errors import InvalidRequest, counted
from headrace.core.request import PriorityClass
from headrace.gateway.cache.control import NO_WISH, CacheControl
from headrace.gateway.sessions.history import ContextFitting
from headrace.gateway.upstream.generation_request import Conversation, PlainPrompts, RequestedGrammar
from headrace.policy.routing.model_size import size_for
from headrace.policy.routing.routes import ModelRoute, SizeHint
from headrace.policy.routing.wishes import NO_WISHES, RoutingWishes

if TYPE_CHECKING:
    from headrace.text.classifier import RequestClassifier

BYTES_PER_TOKEN = 4
"""About as many as English text has, with the JSON around it."""

MAX_SEQUENCES = 128
"""Sequences of one request: prompts times `n`."""

MAX_MESSAGES = 1024
"""Messages of a chat: a template's loop runs once for each."""


class ParsedRequest(Struct, frozen=True, kw_only=True):
    """A generating request as its surface has parsed it.

    model        name or alias; None: the only served model
    sampling     the parameters the client gave, by the names of `SamplingParams`
    logprobs_field  name of the field that asked for prompt log-probabilities, for refusals
    num_shown    choices that show the prompt's log-probabilities
    num_kept_encodings  JSON forms of the prompt's log-probabilities that stay until the answer is written
    foreign_fields  as in `GenerationRequest`
    """

    model: str | None
    prompt: Conversation | PlainPrompts
    sampling: Mapping[str, Any]
    is_streaming: bool
    priority: PriorityClass
    grammar: RequestedGrammar | None = None
    has_priority: bool = False
    cache_salt: str = ""
    cache: CacheControl = NO_WISH
    logprobs_field: str = "prompt_logprobs"
    num_shown: int = 1
    num_kept_encodings: int = 0
    fitting: ContextFitting = ContextFitting.REFUSE
    metadata: Mapping[str, str] = field(default_factory=dict)
    foreign_fields: Mapping[str, Any] = field(default_factory=dict)
    routing: RoutingWishes = NO_WISHES

    def with_prompt(self, prompt: Conversation | PlainPrompts) -> ParsedRequest:
        return structs.replace(self, prompt=prompt)

    def size_hint(self, num_bytes: int) -> SizeHint:
        """Which size of a route suits it, as the classifier says. num_bytes: of its body"""
        kind = _classifier().classify(_asked_text(self.prompt))
        return size_for(kind.task, kind.question, num_tokens=num_bytes // BYTES_PER_TOKEN, priority=self.priority)

    def check_caps(self, own: PriorityClass) -> None:
        """Raises InvalidRequest beyond MAX_SEQUENCES or MAX_MESSAGES, and for a priority class above `own`, the key's."""
        num_prompts = 1
        if isinstance(self.prompt, Conversation):
            check_num_messages("prompt", len(self.prompt.messages))
        else:
            num_prompts = len(self.prompt.prompts)
        if (num_sequences := num_prompts * self.sampling.get("n", 1)) > MAX_SEQUENCES:
            rule = f"at most {counted(MAX_SEQUENCES, 'sequence')} (prompts times n)"
            raise InvalidRequest("n", rule, num_sequences, "Send several requests.")
        if self.priority < own:
            rule = f"not above this key's class ({own.name.lower()})"
            raise InvalidRequest("priority", rule, self.priority.name.lower(), "A request may only lower it.")


def check_num_messages(field: str, num_messages: int) -> None:
    """Raises InvalidRequest."""
    if num_messages > MAX_MESSAGES:
        raise InvalidRequest(field, f"at most {MAX_MESSAGES} messages", num_messages, "Drop the oldest ones.")


@cache
def _classifier() -> RequestClassifier:
    from headrace.text.classifier import RequestClassifier  # numpy, which no other request needs

    return RequestClassifier(CLASSIFIER.read_bytes())


def with_classifier(routes: Iterable[ModelRoute]) -> Callable[[], None]:
    """Loads the classifier in this thread if a route has several sizes, so that no request waits for it. A `control.reload.Follow`: nothing
    is left to apply.
    """
    if any(len(route.sizes) > 1 for route in routes):
        _classifier()
    return lambda: None


def _asked_text(prompt: Conversation | PlainPrompts) -> str:
    """The last message of the user, or the first prompt. Empty: it is not text"""
    if isinstance(prompt, PlainPrompts):
        return first if isinstance(first := prompt.prompts[0], str) else ""
    content: Any = next((message["content"] for message in reversed(prompt.messages) if message["role"] == "user"), "")
    if isinstance(content, list):
        return "\n".join(part["text"] for part in content if part.get("type") == "text")
    return content or ""
