"""Building blocks of decoders: attention, feed-forward, experts, rotary tables, and reading weights into them."""

from __future__ import annotations


def can_be_deferred(part: object) -> bool:
    """Whether a layer, and every layer in its `parts`, may be called while a `StepExecutor` defers operations.

    A layer may if its own class sets `runs_only_kernels = True`. The class promises that between its input and its result only the
    backend's operations and linears compute; views are no computation. Any other layer, a subclass of such a class included, runs at once:
    torch would otherwise read results that are not computed yet, without an error.
    """
    declares = vars(type(part)).get("runs_only_kernels", False) is True
    return declares and all(can_be_deferred(inner) for inner in getattr(part, "parts", ()))
