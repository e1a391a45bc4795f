"""Holds one conversation in which the model may call local functions: ask, call, send the results back, ask again, until it answers in
text.

Answers are printed to `out`, calls and their results to `log`. `cli.agent` reads the lines of the user.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, field
from typing import TextIO

from headrace.cli.chat_session import ChatSession
from headrace.cli.client import ApiClient
from headrace.cli.exits import ServerFailed
from headrace.functions import PythonFunction

STOPPED = "error: stopped by the user"
SHOWN_CHARS = 300
"""Characters printed of a call, and of its result. The model gets all of them."""


@dataclass(slots=True)
class Turn:
    """One answer as it arrives. calls: by number, in OpenAI's format; their arguments are still growing"""

    texts: list[str] = field(default_factory=list)
    calls: dict[int, dict[str, str]] = field(default_factory=dict)

    def add_call(self, piece: Mapping[str, object]) -> None:
        """Add a piece of a function call. Raises ServerFailed for a piece of any other kind of call."""
        function, number = piece.get("function"), piece.get("index", 0)
        if not isinstance(function, Mapping) or not isinstance(number, int):
            raise ServerFailed("the server sent a tool call that calls no function")
        call = self.calls.setdefault(number, {"id": "", "name": "", "arguments": ""})
        for name, text in (("id", piece.get("id")), ("name", function.get("name")), ("arguments", function.get("arguments"))):
            call[name] += str(text or "")

    def message(self) -> dict[str, object]:
        calls = [
            {"id": call["id"], "type": "function", "function": {"name": call["name"], "arguments": call["arguments"]}}
            for _, call in sorted(self.calls.items())
        ]
        content = "".join(self.texts)
        return (
            {"role": "assistant", "content": content or None, "tool_calls": calls} if calls else {"role": "assistant", "content": content}
        )


class AgentSession(ChatSession):
    """A conversation with a model that may call functions. functions: by name; max_rounds: answers with calls to one question"""

    def __init__(
        self,
        client: ApiClient,
        model: str,
        functions: Mapping[str, PythonFunction],
        *,
        max_rounds: int,
        out: TextIO,
        log: TextIO,
    ) -> None:
        super().__init__(client, model, out=out)
        self.functions = functions
        self.max_rounds = max_rounds
        self.log = log

    def ask(self, text: str) -> None:
        """Send the conversation with `text` at its end, and run the calls of each answer. If a question fails, all of its messages are
        removed.

        An interrupted answer or call ends the question; its messages and calls up to then stay in the conversation.
        """
        num_before = len(self.messages)
        self.messages.append({"role": "user", "content": text})
        try:
            for number in range(self.max_rounds + 1):
                if not self._round(may_call=number < self.max_rounds):
                    return
        except KeyboardInterrupt:
            self._print(" [stopped]")
        except ServerFailed:
            del self.messages[num_before:]
            raise

    def _round(self, *, may_call: bool) -> bool:
        """Read one answer and run its calls. False: the answer has no calls, so it is the last one."""
        turn = Turn()
        try:
            self._read(turn, may_call=may_call)
        except KeyboardInterrupt:
            turn.calls.clear()  # the last one may be cut
            self.messages.append(turn.message())
            raise
        if turn.texts:
            self._print("")
        self.messages.append(turn.message())
        self._obey(turn)
        return bool(turn.calls)

    def _read(self, turn: Turn, *, may_call: bool) -> None:
        tools = [function.tool.requested() for function in self.functions.values()]
        with closing(self._deltas({"tools": tools, "tool_choice": "auto" if may_call else "none"})) as deltas:
            for delta in deltas:
                for piece in delta.get("tool_calls") or ():
                    turn.add_call(piece)
                if text := delta.get("content"):
                    turn.texts.append(text)
                    self._print(text, end="")

    def _obey(self, turn: Turn) -> None:
        """Run the calls of an answer. After Ctrl-C, each remaining call has the result STOPPED: templates want one for every call."""
        interrupt: KeyboardInterrupt | None = None
        for _, call in sorted(turn.calls.items()):
            try:
                result = STOPPED if interrupt else self._result(call["name"], call["arguments"])
            except KeyboardInterrupt as error:
                interrupt, result = error, STOPPED
            self.messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
        if interrupt is not None:
            raise interrupt

    def _result(self, name: str, arguments: str) -> str:
        self._log(f"-> {name}({arguments})")
        function = self.functions.get(name)
        known = ", ".join(self.functions)
        result = function.answer(arguments) if function is not None else f"error: there is no function {name}; there are: {known}"
        self._log(f"<- {result}")
        return result

    def _log(self, line: str) -> None:
        shown = line if len(line) <= SHOWN_CHARS else f"{line[:SHOWN_CHARS]} ..."
        print(shown, file=self.log, flush=True)
