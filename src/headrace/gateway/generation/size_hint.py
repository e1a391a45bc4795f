"""Asks the classifier which size of a route suits a request."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from typing import TYPE_CHECKING, Any

from headrace.bundled import CLASSIFIER
from headrace.core.request import PriorityClass
from headrace.gateway.upstream.generation_request import Conversation, PlainPrompts
from headrace.policy.routing.model_size import size_for
from headrace.policy.routing.routes import ModelRoute, SizeHint

if TYPE_CHECKING:
    from headrace.text.classifier import RequestClassifier

BYTES_PER_TOKEN = 4
"""About as many as English text has, with the JSON around it."""


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


def size_hint(prompt: Conversation | PlainPrompts, num_bytes: int, priority: PriorityClass) -> SizeHint:
    """num_bytes: of the request's body"""
    found = _classifier().classify(_asked_text(prompt))
    return size_for(found.task, found.question, num_tokens=num_bytes // BYTES_PER_TOKEN, priority=priority)


def _asked_text(prompt: Conversation | PlainPrompts) -> str:
    """The last message of the user, or the first prompt. Empty: it is not text"""
    if isinstance(prompt, PlainPrompts):
        return first if isinstance(first := prompt.prompts[0], str) else ""
    content: Any = next((message["content"] for message in reversed(prompt.messages) if message["role"] == "user"), "")
    if isinstance(content, list):
        return "\n".join(part["text"] for part in content if part.get("type") == "text")
    return content or ""
