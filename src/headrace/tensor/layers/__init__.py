"""Building blocks of decoders: attention, feed-forward, experts, rotary tables, and reading weights into them."""

from __future__ import annotations


def can_be_deferred(part: object) -> bool:
    """Whether a layer, and every layer in its `parts`, may be called while a `StepExecutor` defers operations.

    By `runs_only_kernels = True` its own class promises that between its input and its result only the backend's operations and linears
    compute; views are no computation. Any other layer, a subclass included, runs at once: torch would otherwise read results that are not
    computed yet.
    """
    declares = vars(type(part)).get("runs_only_kernels", False) is True
    return declares and all(can_be_deferred(inner) for inner in getattr(part, "parts", ()))
