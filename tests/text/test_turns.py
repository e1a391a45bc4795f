"""Tests which message is named for a position in a rendered conversation."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.text.folder import TextModel
from headrace.text.turns import ConversationTurns, turn_start_ids

pytestmark = pytest.mark.pure

CHAT: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is the capital of <|im_start|>France?"},
    {"role": "assistant", "content": "Paris."},
    {"role": "user", "content": "And the fox?"},
]


def test_each_token_of_a_real_prompt_is_in_its_own_message(chat_model: TextModel) -> None:
    tokenizer, template = chat_model.tokenizer, chat_model.template
    turns = ConversationTurns(
        starts=turn_start_ids(tokenizer, template.sources), roles=tuple([message["role"] for message in CHAT]), has_generation_prompt=True
    )
    ids = template.encode(tokenizer, CHAT)
    ends = [len(template.encode(tokenizer, CHAT[:count], add_generation_prompt=False)) for count in range(1, 5)]
    expected = [f"messages[{sum(end <= position for end in ends)}]" for position in range(ends[-1])]
    expected += ["generation prompt"] * (len(ids) - ends[-1])
    assert [turns.part_of(ids, position, position + 1) for position in range(len(ids))] == expected
    assert turns.part_of(ids, ends[0] - 2, ends[0] + 1) == "messages[0] to messages[1]"
    assert turns.part_of(ids, ends[3] - 1, ends[3] + 64) == "messages[3] to generation prompt"


LAYOUTS = {
    "every message a turn": ("b T sys T usr T", "system user", "0 0 0 1 1 g"),
    "a system prompt of the template": ("b T own T usr T", "user", "s s s 0 0 g"),
    "tools first": ("b tools T usr T", "user", "s s 0 0 g"),
    "a system message without a turn": ("b sys sys T usr T", "system user", "0 0 0 1 1 g"),
    "a system message inside the user's turn": ("b T sys usr T", "system user", "? ? ? ? ?"),
    "two results in one turn": ("T own T usr T call T result result T", "user assistant tool tool", "? ? ? ? ? ? ? ? ? ?"),
    "no turns": ("b usr", "user", "? ?"),
    "more turns than messages": ("T usr T usr T usr T ast T", "user assistant", "? ? ? ? ? ? ? ? ?"),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layout_is_read_or_nothing_is_said(name: str) -> None:
    layout, roles, expected = LAYOUTS[name]
    ids = [1 if word == "T" else 2 for word in layout.split()]
    turns = ConversationTurns(starts=frozenset({1}), roles=tuple(roles.split()), has_generation_prompt=True)
    names = {"s": "system prompt", "g": "generation prompt", "?": None}
    wanted = [names.get(word, f"messages[{word}]") for word in expected.split()]
    assert [turns.part_of(ids, position, position + 1) for position in range(len(ids))] == wanted
