"""Does work that can wait, in pieces, on its own thread, while the engine has no request.

Packing weights (`tensor.packed.store`) takes CPUs and memory bandwidth for seconds, and would make the first answers slow. An engine that
always has a request does no idle work.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

POLL_S = 0.05
"""Seconds between two checks whether the engine is idle."""

REST_S = 0.5
"""Idle time begins this long after the last request: a client that sends its next request at once leaves none."""


def do_while_idle(
    pieces: Iterator[None], *, is_idle: Callable[[], bool], is_over: Callable[[], bool], sleep: Callable[[float], None] = time.sleep
) -> None:
    """Take the pieces one by one while the engine is idle. Returns after the last one, or once the engine is over.

    pieces   each takes some milliseconds, for which a request that arrives shares the machine with it
    is_idle  whether no request is in the engine
    is_over  whether the engine takes no requests any more
    """
    rested_s = 0.0
    while not is_over():
        rested_s = rested_s + POLL_S if is_idle() else 0.0
        if rested_s <= REST_S:
            sleep(POLL_S)
        elif next(pieces, _DONE) is _DONE:
            return


_DONE = object()
