"""Sets the budgets of one grammar, and refuses what exceeds them by name. docs/structured.md lists them."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

from headrace.core.errors import InvalidRequest

if TYPE_CHECKING:
    from llguidance import LLParserLimits

MAX_JSON_DEPTH = 64
"""Levels of objects and arrays in the text of a JSON schema."""

MAX_LEXER_STATES = 8_000
"""States that the lexer of one compiled grammar may build while in use. A state takes about 0.5 KB, at most 2 KB, so that one grammar stays
below 16 MB. A counted repetition such as `.{1,2000}` takes a state per byte written, and about eight more for each mask. A full lexer is
renewed, which drops the states of earlier masks."""

MAX_COUNT = 7_000
"""The largest count of characters in a grammar (`maxLength`, `.{1,n}`). An output that used a larger one would exceed MAX_LEXER_STATES."""

MAX_RENEWAL_S = 0.25
"""CPU seconds that one sequence may spend on new lexers after finding the shared one full."""

STEP_LEXER_FUEL = 28_000
"""Lexer work of one mask, in llguidance's units: about 14,000 per millisecond."""

STEP_MAX_ITEMS = 20_000
"""Parser items of one mask. 20,000 take about a millisecond where rules are not ambiguous, and longer where they are (see MASK_CPU_S)."""

VET_CPU_S = 0.12
"""For compiling and `NUM_VETTED_STEPS` masks."""

VET_WALL_S = 10.0
"""Seconds by the clock, however busy the machine is."""

VET_MEMORY_BYTES = 192 << 20
"""Address space beyond that of its process."""

VET_STACK_BYTES = 8 << 20
"""Rules that refer to each other in a longer chain are refused."""

MAX_COMPILED_BYTES = 16 << 20

NUM_VETTED_STEPS = 48
"""Along outputs drawn at random from what the grammar allows."""

MASK_CPU_S = VET_CPU_S / NUM_VETTED_STEPS
"""On average, of advancing by one token and filling a mask. STEP_MAX_ITEMS does not bound this: in an ambiguous grammar, an item costs more
the longer the output is."""

MASK_BURST_S = 0.05
"""CPU time that a sequence may spend on its masks beyond that average."""

STORE_BYTES = 512 << 20
"""Memory of all compiled grammars, each counted with all the states that its lexer may build."""

TENANT_BYTES = STORE_BYTES * 3 // 4

STATES_BYTES = MAX_LEXER_STATES * 512
"""Added to the amount measured by vetting: for the states that the lexer may still build."""

PREPARE_TIMEOUT_S = 30.0
"""Seconds that a request waits for its grammar. The first request of an engine also waits until the model's vocabulary is read."""

MAX_WAITING_GRAMMARS = 64
"""Requests of one tenant that may wait for their grammars."""

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
    """Raises InvalidRequest if a string schema has a repetition count that is too large.

    A lexer takes a state for each byte written inside a repetition. Only single counts are checked, here and below. Where counts multiply,
    as in `(a{1,500}){1,500}`, or letters take several bytes, a longer output ends with the lexer's own error.
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
    for found in _LARK_EXPRESSION.finditer(source):
        check_regex_counts(found[1] or "")


def _counts(expression: str) -> Iterator[str]:
    """Numbers in braces, outside character sets and escapes."""
    for found in _COUNT.finditer(expression):
        for number in found.groups():
            if number:
                yield number.lstrip("0")[: _NUM_DIGITS + 1] or "0"


_STACK_SIZE = threading.Lock()


def start_deep_thread(target: Callable[[], None], name: str) -> threading.Thread:
    """Start a daemon thread with STACK_BYTES of stack. A daemon, as a grammar that hangs must not keep the process alive."""
    thread = threading.Thread(target=target, name=name, daemon=True)
    with _STACK_SIZE:  # the size is the process's, for threads that are started next
        usual = threading.stack_size(STACK_BYTES)
        try:
            thread.start()
        finally:
            threading.stack_size(usual)
    return thread
