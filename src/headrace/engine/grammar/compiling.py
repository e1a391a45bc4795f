"""Compiles a grammar over a model's vocabulary, or says in a client's words why it cannot be compiled."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from headrace.core.errors import InvalidRequest
from headrace.core.grammar import Grammar, GrammarKind
from headrace.engine.grammar.limits import parser_limits
from headrace.engine.grammar.sources import llguidance_source
from headrace.engine.grammar.vocabulary import TokenTrie

if TYPE_CHECKING:
    from llguidance import LLMatcher

MAX_REASON_CHARS = 300

NAMES = {
    GrammarKind.JSON_SCHEMA: "a JSON schema",
    GrammarKind.REGEX: "a regular expression",
    GrammarKind.LARK: "a grammar",
}
"""Names of grammars in errors for clients. Choices, GBNF and function calls are Lark sources too, so that Lark is not named."""


NAME_EXCLUDED = ". Allow it in properties, propertyNames, patternProperties or additionalProperties."
"""The remedy for a required property that one of these excludes. llguidance's message does not name `propertyNames`, which it only sees
rewritten."""


def compile_grammar(trie: TokenTrie, grammar: Grammar) -> LLMatcher:
    """A matcher at the start of the grammar. Its copies match outputs of their own and share its lexer's states.

    Raises InvalidRequest. Cost: milliseconds, up to seconds for a grammar that was not vetted; releases the GIL.
    """
    from llguidance import LLMatcher

    matcher = LLMatcher(trie.tokenizer, llguidance_source(grammar, trie.control_ids), log_level=0, limits=parser_limits())
    if matcher.is_error():
        raise refusal(grammar, matcher.get_error())
    return matcher


def refusal(grammar: Grammar, reason: str) -> InvalidRequest:
    """Why llguidance does not compile a grammar."""
    name = NAMES[grammar.kind]
    if grammar.kind is GrammarKind.REGEX:
        reason = _regex_reason(reason)
    elif embedded := re.search(r"failed to compile JSON schema: (.*?)(?=\n *\d+ \||\Z)", reason, re.DOTALL):
        name, reason = NAMES[GrammarKind.JSON_SCHEMA], embedded[1]
    remedy = NAME_EXCLUDED if reason.startswith("Unsatisfiable schema: required property") else ""
    return InvalidRequest("grammar", f"{name} that can be compiled", remedy=one_line(reason) + remedy)


def _regex_reason(reason: str) -> str:
    """The fault in a regular expression, without the expression and its position in the Lark grammar made from it."""
    if found := re.search(r"^error: (.+)$", reason, re.MULTILINE):
        return f"{found[1][:1].upper()}{found[1][1:]}."
    _, _, rest = reason.rpartition("(in regex): ")
    return rest.splitlines()[0] if rest else reason


def one_line(reason: str) -> str:
    """llguidance's message on one line, bounded; it may quote the client's source."""
    text = " ".join(reason.replace("<non-verbose/>", "").split())
    return text if len(text) <= MAX_REASON_CHARS else text[: MAX_REASON_CHARS - 3] + "..."
