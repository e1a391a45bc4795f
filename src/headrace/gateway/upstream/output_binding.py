"""What a model's output is bound to: the grammar that a request asks for, that of the calls it forces, and where they begin to bind.

How the output is read afterwards is `upstream.token_stream`'s.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from headrace.core.errors import InvalidRequest
from headrace.core.grammar import Grammar, GrammarKind
from headrace.core.tools import CallMode, ToolChoice
from headrace.gateway.upstream.generation_request import Conversation, PlainPrompts
from headrace.text.messages import begun_answer
from headrace.text.output.forced import forced_grammar
from headrace.text.output.model_formats import ModelFormats
from headrace.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class OutputBinding:
    """The rules of one model."""

    formats: ModelFormats
    tokenizer: Tokenizer

    def grammar(self, prompt: Conversation | PlainPrompts, wanted: Grammar | None) -> Grammar | None:
        """What the output must match. wanted: by the request's own field for it

        Raises InvalidRequest for functions whose calls cannot be read or forced, and for a grammar that calls cannot stand beside.
        """
        if not isinstance(prompt, Conversation) or not prompt.shown_tools:
            return wanted
        tool_format = self.formats.tools
        if tool_format is None:
            remedy = "Name it with --tool-call-parser where the server is started."
            raise InvalidRequest("tools", "a model whose way to write calls is known to the server", None, remedy)
        document = None if wanted is None else _document(wanted, prompt.tool_choice)
        made = forced_grammar(tool_format, prompt.shown_tools, prompt.tool_choice, document=document, token_ids=self.formats.token_ids)
        return None if made is None else made.checked(field="tools")

    def after_reasoning(self, grammar: Grammar | None, prompt: Conversation | PlainPrompts, prompt_ids: Sequence[int]) -> Grammar | None:
        """The grammar, binding after the reasoning with which the model may begin its answer to a conversation."""
        if grammar is None or not isinstance(prompt, Conversation):
            return grammar
        begun = begun_answer(prompt.messages, continue_final_message=prompt.continue_final_message)
        return replace(grammar, reasoning=self.formats.reasoning_span(self.tokenizer, prompt_ids, begun))


def _document(wanted: Grammar, choice: ToolChoice) -> Mapping[str, object]:
    """The schema of a document that may stand in place of calls. Raises InvalidRequest where none may, and for another kind of grammar."""
    if choice.mode is CallMode.REQUIRED:
        rule = 'tool_choice "auto" or "none" beside it, because the output is calls alone'
        raise InvalidRequest("grammar", rule, None, "Leave one of the two out.")
    if wanted.kind is not GrammarKind.JSON_SCHEMA:
        rule = 'a JSON schema where the model may call functions, or tool_choice "none" beside it'
        raise InvalidRequest("grammar", rule, str(wanted.kind), "Send functions and grammar in two requests.")
    schema: object = json.loads(wanted.source)
    return schema if isinstance(schema, dict) else {} if schema else {"not": {}}
