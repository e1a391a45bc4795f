"""Tests which part of a conversation stays when it has outgrown its window: the head, whole turns, the last one."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.gateway.sessions.history import (
    FORM,
    SUMMARY_TITLE,
    History,
    StoredSession,
    entry_of,
    last_turns,
    messages_json,
    most_that_fit,
    packed,
    prompt_messages,
    stored_in,
    transcript,
    turn_starts,
    unpacked,
)

pytestmark = pytest.mark.pure

ROLES = st.sampled_from(["system", "user", "assistant", "tool"])
HISTORIES = st.lists(ROLES, max_size=20).map(lambda roles: History([{"role": role, "content": str(n)} for n, role in enumerate(roles)]))


@given(HISTORIES)
def test_every_count_of_turns_keeps_the_head_and_the_end_and_cuts_before_a_user(history: History) -> None:
    head = list(history.messages[: history.num_head])
    for count in range(1, len(turn_starts(history)) + 1):
        kept, dropped = last_turns(history, count)
        assert list(kept.messages[: len(head)]) == head
        assert [*head, *dropped, *kept.messages[len(head) :]] == list(history.messages)
        assert kept.messages[-1] == history.messages[-1]
        assert not dropped or kept.messages[len(head)]["role"] == "user"


@given(st.integers(2, 200), st.integers(0, 200))
def test_the_search_finds_the_most_that_fit_and_asks_for_few(limit: int, fitting: int) -> None:
    asked: list[int] = []

    async def fits(count: int) -> bool:
        asked.append(count)
        return count <= fitting

    found = asyncio.run(most_that_fit(fits, limit))
    assert found == max(1, min(fitting, limit - 1))
    assert all(count <= max(2, 2 * fitting) for count in asked), "nothing much longer than what fits is counted"
    assert len(asked) <= 16


def test_a_summary_stands_in_the_system_message() -> None:
    turn = {"role": "user", "content": "Hi"}
    made = prompt_messages(History([turn], "short"))
    assert made == [{"role": "system", "content": f"{SUMMARY_TITLE}\nshort"}, turn]
    made = prompt_messages(History([{"role": "system", "content": "Be kind."}, turn], "short"))
    assert made[0]["content"] == f"Be kind.\n\n{SUMMARY_TITLE}\nshort"
    parts: list[dict[str, Any]] = [{"type": "text", "text": "Be kind."}]
    made = prompt_messages(History([{"role": "system", "content": parts}, turn], "short"))
    assert made[0]["content"] == [*parts, {"type": "text", "text": f"{SUMMARY_TITLE}\nshort"}]
    assert len(parts) == 1


def test_new_system_messages_take_the_place_of_the_old_ones() -> None:
    system = [{"role": "system", "content": word} for word in "abc"]
    turn = {"role": "user", "content": "Hi"}
    assert History([system[0], turn]).with_messages([turn]).messages == [system[0], turn, turn]
    assert History([system[0], turn], "s").with_messages([*system[1:], turn]) == History([*system[1:], turn, turn], "s")


def test_a_transcript_has_texts_and_calls() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "now", "arguments": "{}"}}
    said = transcript(
        [{"role": "user", "content": [{"type": "text", "text": "When?"}]}, {"role": "assistant", "content": None, "tool_calls": [call]}]
    )
    assert said == "user: When?\n\nassistant: (called now with {})"


@given(st.lists(st.text(), max_size=5), st.text())
def test_what_is_stored_is_read_again(texts: list[str], summary: str) -> None:
    texts = [text.encode("utf-8", "replace").decode() for text in texts]
    messages = [{"role": "user", "content": text} for text in texts]
    stored = StoredSession(FORM, 2, 3, "id", 0, summary.encode("utf-8", "replace").decode(), packed(messages_json(messages)))
    assert stored_in(entry_of(stored)) == stored
    assert unpacked(stored) == messages
    for other in (None, b"", b"no entry", entry_of(StoredSession(99, 2, 3, "id", 0, "", b""))):
        assert stored_in(other) is None
