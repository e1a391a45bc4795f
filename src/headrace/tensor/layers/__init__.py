"""Building blocks of decoders: weights on their way in, attention, feed-forward, experts, rotary tables.

A block is given numbers (a spec) and tensor names; what differs between architectures is in `tensor.models`.
"""

from __future__ import annotations


def can_be_deferred(part: object) -> bool:
    """Whether a layer, and all it is made of, may be called while a `StepExecutor` puts operations off.

    Its class says `runs_only_kernels = True`: between its input and its result nothing computes but operations and linears of the
    backend, which wait for what was put off before they compute in another way; views are no computation. A class that says nothing,
    a subclass of one that said it included, is run as it is called: torch would read results that are not there yet, and no error
    would tell. `parts`: what it calls.
    """
    declares = vars(type(part)).get("runs_only_kernels", False) is True
    return declares and all(can_be_deferred(inner) for inner in getattr(part, "parts", ()))
