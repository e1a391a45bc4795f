"""Holds one conversation with a server: messages, sampling parameters, and the slash commands that change them.

Answers are printed to `out`. `cli.chat` reads the lines from the terminal.
"""

from __future__ import annotations

import json
from collections.abc import Generator, Mapping
from contextlib import closing
from typing import Any, TextIO

from headrace.cli.client import ApiClient
from headrace.cli.exits import ServerFailed
from headrace.core.errors import InvalidRequest
from headrace.core.sampling import SamplingParams, params_from_mapping

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


class ChatSession:
    """client: of the server. model: the served name to ask. out: where answers and replies to commands are printed."""

    def __init__(self, client: ApiClient, model: str, *, out: TextIO) -> None:
        self.client, self.model, self.out = client, model, out
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
        """Send the conversation with `text` at its end and print the answer as it arrives.

        The part of an interrupted answer that has arrived stays in the conversation; a failed question is removed.
        """
        self.messages.append({"role": "user", "content": text})
        answer: list[str] = []
        try:
            with closing(self._answer()) as pieces:
                for piece in pieces:
                    answer.append(piece)
                    self._print(piece, end="")
        except KeyboardInterrupt:
            self._print(" [stopped]", end="")
        except ServerFailed:
            self.messages.pop()
            raise
        self._print("")
        self.messages.append({"role": "assistant", "content": "".join(answer)})

    def _answer(self) -> Generator[str]:
        with closing(self._deltas()) as deltas:
            for delta in deltas:
                if text := delta.get("content"):
                    yield text

    def _deltas(self, more: Mapping[str, object] | None = None) -> Generator[dict[str, Any]]:
        """The `delta` of each chunk of an answer to the conversation. more: further fields of the request's body"""
        system = [{"role": "system", "content": self.system}] if self.system is not None else []
        body: dict[str, object] = {"model": self.model, "messages": [*system, *self.messages], **self.settings, **(more or {})}
        with closing(self.client.chat(body)) as chunks:
            for chunk in chunks:
                choices = chunk.get("choices")
                for choice in choices if isinstance(choices, list) else []:
                    yield choice.get("delta", {})

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
