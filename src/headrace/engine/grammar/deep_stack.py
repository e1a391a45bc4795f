"""Starts threads with a deep stack. llguidance recurses over a grammar's rules, and the stack is deep enough for any grammar that vetting
passes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from headrace.engine.grammar.limits import STACK_BYTES

_STACK_SIZE = threading.Lock()


def start_deep_thread(target: Callable[[], None], name: str) -> threading.Thread:
    """Start a daemon thread that runs `target`. A daemon, as a grammar that hangs must not keep the process alive."""
    thread = threading.Thread(target=target, name=name, daemon=True)
    with _STACK_SIZE:  # the size is the process's, for threads that are started next
        usual = threading.stack_size(STACK_BYTES)
        try:
            thread.start()
        finally:
            threading.stack_size(usual)
    return thread
