"""Sets the budgets of one grammar (docs/structured.md), and refuses what exceeds them by name."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

from headrace.core.errors import InvalidRequest

if TYPE_CHECKING:
    from llguidance import LLParserLimits

MAX_JSON_DEPTH = 64

MAX_LEXER_STATES = 8_000
"""A state takes at most 2 KB, so that one grammar stays below 16 MB. A full lexer is renewed."""

MAX_COUNT = 7_000
"""An output that used a larger count of characters would exceed MAX_LEXER_STATES."""

MAX_RENEWAL_S = 0.25

STEP_LEXER_FUEL = 28_000
"""Lexer work of one mask, in llguidance's units: about two milliseconds."""

STEP_MAX_ITEMS = 20_000
"""Parser items of one mask: about a millisecond where rules are not ambiguous, and longer where they are (MASK_CPU_S)."""

VET_CPU_S = 0.12

VET_WALL_S = 10.0

VET_MEMORY_BYTES = 192 << 20

VET_STACK_BYTES = 8 << 20

MAX_COMPILED_BYTES = 16 << 20

NUM_VETTED_STEPS = 48

MASK_CPU_S = VET_CPU_S / NUM_VETTED_STEPS
"""STEP_MAX_ITEMS does not bound time: in an ambiguous grammar, an item costs more the longer the output is."""

MASK_BURST_S = 0.05

STORE_BYTES = 512 << 20

TENANT_BYTES = STORE_BYTES * 3 // 4

STATES_BYTES = MAX_LEXER_STATES * 512

PREPARE_TIMEOUT_S = 30.0
"""The first request of an engine also waits until the model's vocabulary is read."""

MAX_WAITING_GRAMMARS = 64

STACK_BYTES = 64 << 20
"""Eight times that of vetting, so that what vetting lets pass does not overflow it."""


def parser_limits() -> LLParserLimits:
    from llguidance import LLParserLimits

    return LLParserLimits(
        max_lexer_states=MAX_LEXER_STATES,
        step_lexer_fuel=STEP_LEXER_FUEL,
        step_max_items=STEP_MAX_ITEMS,
        verbose_errors=False,
    )


_COUNT = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\{[ ]*([0-9]+)[ ]*(?:,[ ]*([0-9]*)[ ]*)?\}", re.DOTALL)
_LARK_EXPRESSION = re.compile(r'"(?:\\.|[^"\\\n])*"|/((?:\\.|[^/\\\n])+)/')
_NUM_DIGITS = len(str(MAX_COUNT))


def check_string_counts(node: Mapping[str, object]) -> None:
    """Raises InvalidRequest.

    Only single counts are checked: where they multiply, a longer output ends with the lexer's own error.
    """
    for keyword in ("minLength", "maxLength"):
        count = node.get(keyword)
        if isinstance(count, int | float) and count > MAX_COUNT:
            raise InvalidRequest("grammar", f"{keyword} of at most {MAX_COUNT}", count, "Lower it, or leave it out.")


def check_regex_counts(expression: str) -> None:
    for count in _counts(expression):
        if len(count) > _NUM_DIGITS or int(count) > MAX_COUNT:
            raise InvalidRequest("grammar", f"counts of at most {MAX_COUNT} in a regular expression", count, "Lower it, or use + or *.")


def check_lark_counts(source: str) -> None:
    for match in _LARK_EXPRESSION.finditer(source):
        check_regex_counts(match[1] or "")


def _counts(expression: str) -> Iterator[str]:
    for match in _COUNT.finditer(expression):
        for number in match.groups():
            if number:
                yield number.lstrip("0")[: _NUM_DIGITS + 1] or "0"


_STACK_SIZE = threading.Lock()


def start_deep_thread(target: Callable[[], None], name: str) -> threading.Thread:
    """A daemon, as a grammar that hangs must not keep the process alive."""
    thread = threading.Thread(target=target, name=name, daemon=True)
    with _STACK_SIZE:  # the size is the process's, for threads that are started next
        usual = threading.stack_size(STACK_BYTES)
        try:
            thread.start()
        finally:
            threading.stack_size(usual)
    return thread
