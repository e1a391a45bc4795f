"""Makes a `FinishedRequest` from the names that its fields have in a line of the request log."""

from __future__ import annotations

from headrace.observe.finished_request import End, FinishedRequest, Outcome, RequestArrival
from headrace.observe.request_log import FIELDS


def finished(**fields: object) -> FinishedRequest:
    """A request that failed, with `fields` (see `FIELDS`)."""
    made = FinishedRequest(RequestArrival("abc", "POST", "/v1/chat/completions"), End(Outcome.FAILED))
    places = {
        **FIELDS,
        "model": "asked.model",
        "adapter": "asked.adapter",
        "version": "asked.version",
        "detail": "end.detail",
        "tier": "caller.tier",
        "charged": "answered.charged",
    }
    for name, value in fields.items():
        part, *inner, last = places[name].split(".")
        value_of_part = getattr(made, part)
        if inner:
            within = getattr(value_of_part, inner[0])._replace(**{last: value})
            changed = value_of_part._replace(**{inner[0]: within})
        else:
            changed = value_of_part._replace(**{last: value})
        made = made._replace(**{part: changed})
    return made
