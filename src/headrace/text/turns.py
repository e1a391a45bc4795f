"""Says which message of a conversation holds a token of the rendered prompt, by the tokens with which its turns begin.

Users' text cannot contain these tokens (`template.ChatTemplate.encode`). A template that lays turns out in another way is noticed by their
number, and then nothing is said.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from headrace.text.tokenizer import Tokenizer

# fmt: off
TURN_STARTS = (
    "<|im_start|>", "<|start_header_id|>", "<|header_start|>", "<start_of_turn>", "<|start_of_role|>",
    "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>", "<\uff5cUser\uff5c>", "<\uff5cAssistant\uff5c>",
    "[SYSTEM_PROMPT]", "[INST]", "[/INST]",
)
# fmt: on
"""ChatML, Llama 3 and 4, Gemma, Granite; Phi and GLM, DeepSeek; Mistral, where an assistant's turn begins with the end of the user's."""

SYSTEM_PROMPT = "system prompt"
"""What the template writes before the first message, often with the tools."""

GENERATION_PROMPT = "generation prompt"
SYSTEM_ROLES = ("system", "developer")


def turn_start_ids(tokenizer: Tokenizer, templates: Iterable[str]) -> frozenset[int]:
    text = "\0".join(templates)
    found = [tokenizer.token_to_id(token) for token in TURN_STARTS if token in text and token in tokenizer.added_tokens]
    return frozenset([token_id for token_id in found if token_id is not None])


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversationTurns:
    """starts: ids of the tokens with which a turn begins; roles: of the messages, in order"""

    starts: frozenset[int]
    roles: tuple[str, ...]
    has_generation_prompt: bool

    def part_of(self, prompt_ids: Sequence[int], begin: int, end: int) -> str | None:
        """Where the tokens [begin, end) stand: one part, or the first and the last of several. None: not known"""
        head, block, rest = map(self._num_begun, (prompt_ids[: begin + 1], prompt_ids[begin + 1 : end], prompt_ids[end:]))
        begins_with_turn = not self.starts.isdisjoint(prompt_ids[:2])  # a BOS before it is no part of its own
        before = self._num_before(head + block + rest, begins_with_turn=begins_with_turn)
        if before is None:
            return None
        first, last = [self._name(max(num_begun, begins_with_turn) - 1 - before) for num_begun in (head, head + block)]
        return first if first == last else f"{first} to {last}"

    def _num_begun(self, ids: Sequence[int]) -> int:
        return sum(map(ids.count, self.starts))

    def _num_before(self, num_turns: int, *, begins_with_turn: bool) -> int | None:
        """Turns before that of the first message; -1 where a system message stands before the first turn. Inside the first user's turn,
        as Gemma's, nothing shows where it ends.
        """
        if any(role == following for role, following in pairwise(self.roles)):
            return None  # templates may write them as one turn
        has_system_message = self.roles[0] in SYSTEM_ROLES
        more = num_turns - len(self.roles) - self.has_generation_prompt
        if more == 0 or (more == 1 and not has_system_message):
            return more
        return -1 if more == -1 and has_system_message and not begins_with_turn else None

    def _name(self, message: int) -> str:
        if message < 0:
            return SYSTEM_PROMPT
        return f"messages[{message}]" if message < len(self.roles) else GENERATION_PROMPT
