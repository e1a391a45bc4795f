"""What a tenant may choose for itself: one row per option. A tenant without a choice has the gateway's default."""

from __future__ import annotations

from collections.abc import Mapping

from headrace.core.errors import InvalidRequest

ALLOWED: Mapping[str, tuple[object, ...]] = {
    "log_prompts": (True, False),
    "cache": (True, False),
    "context_fitting": ("refuse", "sliding_window", "summary"),
}
"""Option -> its values. log_prompts: usage records hold prompts; cache: whether answers are cached, whatever `cache.enabled` says;
context_fitting: what happens to a conversation that is longer than its model's context, where the request does not say."""


def checked_options(options: Mapping[str, object]) -> dict[str, object]:
    """The options if their rules hold. Raises InvalidRequest."""
    for name, value in options.items():
        if name not in ALLOWED:
            raise InvalidRequest("options", f"names of {', '.join(ALLOWED)}", name)
        if value not in ALLOWED[name] or type(value) is not type(ALLOWED[name][0]):
            raise InvalidRequest(f"options.{name}", f"one of {', '.join(map(_shown, ALLOWED[name]))}", value)
    return dict(options)


def _shown(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
