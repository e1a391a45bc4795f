"""One conversation with a server, in which the model may call local functions."""

from __future__ import annotations

import json
from collections.abc import Generator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any, TextIO

from headrace.cli.chat.client import ApiClient
from headrace.cli.exits import ServerFailed
from headrace.core.errors import InvalidRequest
from headrace.core.sampling import SamplingParams, params_from_mapping
from headrace.functions import PythonFunction

SETTABLE = (
    *("temperature", "top_p", "top_k", "min_p", "max_tokens", "min_tokens", "seed", "stop", "ignore_eos"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty"),
)
HELP = """\
/help                 this text
/clear                forget the conversation; the system message stays
/system TEXT          set the system message; without TEXT, remove it
/set                  show the sampling parameters
/set NAME VALUE       set one: temperature, top_p, top_k, min_p, max_tokens, seed, stop, ...; VALUE "default" unsets it
/model [NAME]         show the models served, or change to another
/quit                 leave (so does Ctrl-D)
Ctrl-C stops an answer; at the prompt two of them leave."""
STOPPED = "error: stopped by the user"
SHOWN_CHARS = 300
"""Characters printed of a call, and of its result. The model gets all of them."""


@dataclass(slots=True)
class Turn:
    """One answer as it arrives. calls: by number; their arguments are still growing"""

    texts: list[str] = field(default_factory=list)
    calls: dict[int, dict[str, str]] = field(default_factory=dict)

    def add_call(self, piece: Mapping[str, object]) -> None:
        """Raises ServerFailed for a piece of any other kind of call."""
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


class ChatSession:
    """With `functions`, which the model may call, in at most `max_rounds` answers to a question: calls and results are printed to `log`."""

    def __init__(
        self,
        client: ApiClient,
        model: str,
        functions: Mapping[str, PythonFunction] | None = None,
        *,
        max_rounds: int = 0,
        out: TextIO,
        log: TextIO | None = None,
    ) -> None:
        self.client, self.model, self.out = client, model, out
        self.functions, self.max_rounds, self.log = functions or {}, max_rounds, log
        self.system: str | None = None
        self.messages: list[dict[str, object]] = []
        self.settings: dict[str, object] = {}

    def handle(self, line: str) -> bool:
        """Run a command or send a message. False: the session is to end. Raises ServerFailed when the server does not answer."""
        if line.startswith("/"):
            name, _, rest = line[1:].partition(" ")
            return self._command(name.strip(), rest.strip())
        if line.strip():
            self.ask(line)
        return True

    def ask(self, text: str) -> None:
        """An interrupted answer or call ends the question; its messages up to then stay. If a question fails, all of its messages go."""
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
        if turn.texts or not self.functions:
            self._print("")
        self.messages.append(turn.message())
        self._obey(turn)
        return bool(turn.calls)

    def _read(self, turn: Turn, *, may_call: bool) -> None:
        with closing(self._deltas(may_call=may_call)) as deltas:
            for delta in deltas:
                for piece in (delta.get("tool_calls") or ()) if self.functions else ():
                    turn.add_call(piece)
                if text := delta.get("content"):
                    turn.texts.append(text)
                    self._print(text, end="")

    def _deltas(self, *, may_call: bool) -> Generator[dict[str, Any]]:
        system = [{"role": "system", "content": self.system}] if self.system is not None else []
        body: dict[str, object] = {"model": self.model, "messages": [*system, *self.messages], **self.settings}
        if self.functions:
            body["tools"] = [function.tool.requested() for function in self.functions.values()]
            body["tool_choice"] = "auto" if may_call else "none"
        with closing(self.client.chat(body)) as chunks:
            for chunk in chunks:
                choices = chunk.get("choices")
                for choice in choices if isinstance(choices, list) else []:
                    yield choice.get("delta", {})

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

    def _command(self, name: str, rest: str) -> bool:
        match name:
            case "quit" | "exit" | "bye":
                return False
            case "help" | "?":
                self._print(HELP)
            case "clear":
                self.messages.clear()
                self._print("The conversation is forgotten.")
            case "system":
                self.system = rest or None
                self._print("System message set." if rest else "No system message.")
            case "set":
                self._set(*rest.split(maxsplit=1))
            case "model":
                self._choose(rest)
            case _:
                self._print(f"Unknown command /{name}. /help lists them.")
        return True

    def _set(self, name: str = "", value: str = "") -> None:
        if not name:
            shown = [f"{key} = {json.dumps(given)}" for key, given in self.settings.items()]
            self._print("\n".join(shown) or "Every parameter has the server's default.")
        elif name not in SETTABLE:
            self._print(f"{name} cannot be set. Known: {', '.join(SETTABLE)}.")
        elif not value or value == "default":
            self.settings.pop(name, None)
            self._print(f"{name} has the server's default.")
        else:
            self._try_setting(name, value)

    def _try_setting(self, name: str, text: str) -> None:
        try:
            value: object = text if name == "stop" else json.loads(text)
            settings = {**self.settings, name: value}
            params_from_mapping(settings, defaults=SamplingParams(max_tokens=None)).checked()
        except InvalidRequest as error:
            self._print(str(error))
        except ValueError:
            self._print(f"{name}: {text!r} is not a number, true or false.")
        else:
            self.settings = settings
            self._print(f"{name} = {json.dumps(value)}")

    def _choose(self, name: str) -> None:
        served = self.client.models()
        if name in served:
            self.model = name
        elif name:
            self._print(f"{name} is not served.")
        self._print("\n".join(f"{'*' if entry == self.model else ' '} {entry}" for entry in served))

    def _print(self, text: str, end: str = "\n") -> None:
        print(text, end=end, file=self.out, flush=True)
