"""Renders conversations to text and token ids through the model's own chat template; clients cannot bring one."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path

from headrace.core.errors import CheckpointError, InvalidRequest, RequestTooLarge
from headrace.text.files import read_optional_object, read_text
from headrace.text.messages import Marks, Message, marked_objects, normal_messages, strings_in, with_written_arguments
from headrace.text.template_switch import TemplateSwitch, switched
from headrace.text.tokenizer import Tokenizer, any_of
from headrace.text.tokenizer_config import SPECIAL_TOKEN_NAMES

MAX_CHAT_CHARS = 4 * 2**20
MAX_KWARG_CHARS = 4096
MAX_UNREAD_NAME_CHARS = 64
MAX_GROWTH = 4
OWN_CHARS, OWN_CHARS_PER_MESSAGE = 64 << 10, 1024
"""The most characters of a rendered conversation: MAX_GROWTH x those of its input, and these."""

_RESERVED = frozenset(
    {"messages", "tools", "documents", "conversations", "chat_template", "tokenize", "add_generation_prompt", "continue_final_message"}
    | {"return_assistant_tokens_mask", "raise_exception", "strftime_now", "namespace", "dict", "range", "loop", "self", "true", "false"}
    | {"none", "if", "else", "for", "in", "is", "not", "and", "or", "set", "cycler", "joiner", "lipsum", *SPECIAL_TOKEN_NAMES}
)
_TAG = re.compile(r"[<\[].*[>\]]\Z", re.DOTALL)
_CANNOT_COPE = (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError)


class ChatTemplate:
    """Immutable; safe to use from several threads."""

    def __init__(self, sources: Mapping[str, str], special_tokens: Mapping[str, str]) -> None:
        self._sources = dict(sources)
        # A folder may name its tokens freely, except by the names of other variables of templates.
        self._special_tokens = {
            name: token for name, token in special_tokens.items() if name in SPECIAL_TOKEN_NAMES or name not in _RESERVED
        }
        self._tokens: dict[str, tuple[str, ...]] = {}

    @classmethod
    def load(cls, folder: str | Path, tokenizer: Tokenizer) -> ChatTemplate:
        """A folder without a template refuses conversations. Raises CheckpointError."""
        return cls(_sources(Path(folder)), tokenizer.special_tokens)

    @property
    def exists(self) -> bool:
        return bool(self._sources)

    @property
    def sources(self) -> tuple[str, ...]:
        return tuple(self._sources.values())

    def compile(self) -> None:
        """Raises CheckpointError.

        A template that does not end does so here: the caller must bound the process.
        """
        from jinja2.exceptions import TemplateError, TemplateSyntaxError

        from headrace.text.chat_renderer import render

        for source in self._sources.values():
            _names_in(source)
            try:
                render(source, [])
            except TemplateSyntaxError as error:
                raise _broken(error) from error
            except (TemplateError, *_CANNOT_COPE):
                pass  # it compiled; an empty conversation is not what it expects

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, object]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        documents: Sequence[Mapping[str, object]] | None = None,
        kwargs: Mapping[str, object] | None = None,
    ) -> str:
        """To get token ids use `encode`, which is safe.

        Raises: InvalidRequest, RequestTooLarge.
        """
        chat = _Chat(normal_messages(messages), tools, documents, dict(kwargs or {}))
        chat.strings()
        return self._render(chat, add_generation_prompt=add_generation_prompt, continue_final_message=continue_final_message)

    def encode(
        self,
        tokenizer: Tokenizer,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, object]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        documents: Sequence[Mapping[str, object]] | None = None,
        kwargs: Mapping[str, object] | None = None,
    ) -> list[int]:
        """Control tokens written by users become ordinary tokens."""
        return self.rendered(
            tokenizer,
            messages,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            documents=documents,
            kwargs=kwargs,
        ).encode(tokenizer)

    def rendered(
        self,
        tokenizer: Tokenizer,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, object]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        documents: Sequence[Mapping[str, object]] | None = None,
        kwargs: Mapping[str, object] | None = None,
        switches: Sequence[TemplateSwitch] = (),
    ) -> RenderedChat:
        source = self._source(bool(tools))
        read = _names_in(source)
        switched_kwargs, without_effect = switched(kwargs or {}, switches, read)
        chat = _Chat(normal_messages(messages), tools, documents, switched_kwargs)
        strings = chat.strings()
        if hidden := next((text for text in strings if tokenizer.hides_control_token(text)), None):
            raise InvalidRequest("messages", "text that does not normalize to a control token", hidden)
        tokens = self._control_tokens(tokenizer)
        pattern = any_of(tokens)
        if any(map(pattern.search, strings)):
            marks = Marks.absent_from([*strings, *self._sources.values()])
            chat = chat.marked(marks, pattern, any_of(tokenizer.control_tokens))
        else:
            marks = None
        text = self._render(chat, add_generation_prompt=add_generation_prompt, continue_final_message=continue_final_message)
        unread = [f"chat_template_kwargs.{name}" for name in chat.kwargs if name not in read]
        if chat.has_reasoning and "reasoning_content" not in source:
            unread.append("messages[].reasoning_content")
        return RenderedChat(text, None if marks is None else marks.split(text, tokens), (*unread, *without_effect))

    # -- inside ------------------------------------------------------------------------------------------------------------------

    def _control_tokens(self, tokenizer: Tokenizer) -> tuple[str, ...]:
        """Includes added tokens that this template itself writes as tags (`<tool_call>`, `[INST]`)."""
        tokens = self._tokens.get(tokenizer.digest)
        if tokens is None:
            text = "\0".join(self._sources.values())
            tags = {token for token in tokenizer.added_tokens if _TAG.match(token) and token in text}
            tokens = self._tokens[tokenizer.digest] = tuple(sorted(tags | set(tokenizer.control_tokens)))
        return tokens

    def _source(self, has_tools: bool) -> str:
        if not self._sources:
            raise InvalidRequest("messages", "a model with a chat template", None, "This model has none: send a prompt to /v1/completions.")
        name = "tool_use" if has_tools and "tool_use" in self._sources else "default"
        if name not in self._sources:
            raise InvalidRequest("messages", "a default chat template", None, f"This model only has: {', '.join(sorted(self._sources))}.")
        return self._sources[name]

    def _render(self, chat: _Chat, *, add_generation_prompt: bool, continue_final_message: bool) -> str:
        source = self._source(bool(chat.tools))
        _check_kwargs(chat.kwargs, source, self._special_tokens)
        _check_tools(chat, source)
        if continue_final_message and add_generation_prompt:
            raise InvalidRequest("continue_final_message", "add_generation_prompt = false beside continue_final_message", True)
        from jinja2.exceptions import TemplateError, TemplateSyntaxError

        from headrace.text.chat_renderer import render

        write = partial(
            render,
            source,
            tools=list(chat.tools) if chat.tools else None,
            documents=list(chat.documents) if chat.documents else None,
            continue_final_message=continue_final_message,
            add_generation_prompt=add_generation_prompt,
            **self._special_tokens,
            **{name: value for name, value in chat.kwargs.items() if name in _names_in(source)},
        )
        try:
            try:
                text = write(chat.messages)
            except TypeError:  # DeepSeek's templates concatenate arguments with text, so they need JSON text; all others read objects
                text = write(with_written_arguments(chat.messages))
        except TemplateSyntaxError as error:
            raise _broken(error) from error
        except TemplateError as error:
            raise _refused(error.message or "") from error
        except _CANNOT_COPE as error:  # their texts may quote the whole conversation
            raise _refused(f"{type(error).__name__} in the template") from error
        if len(text) > chat.max_rendered_chars:
            raise RequestTooLarge(
                "messages", f"at most {chat.max_rendered_chars} characters once rendered", len(text), "Send a shorter conversation."
            )
        return text


def import_engine() -> None:
    """Takes a tenth of a second the first time."""
    import headrace.text.chat_renderer  # noqa: F401


@dataclass(frozen=True, slots=True)
class RenderedChat:
    """pieces  the text cut at the marks, for `Tokenizer.encode_pieces`; None without marks
    unread  fields that this template does not read
    """

    text: str
    pieces: Sequence[tuple[str, bool]] | None = None
    unread: tuple[str, ...] = ()

    @property
    def plain_text(self) -> str:
        return self.text if self.pieces is None else "".join(piece for piece, _ in self.pieces)

    def encode(self, tokenizer: Tokenizer) -> list[int]:
        if self.pieces is None:
            return tokenizer.encode(self.text, add_special_tokens=False, allow_control_tokens=True, field="messages")
        return tokenizer.encode_pieces(self.pieces, field="messages")


class _Chat:
    def __init__(
        self,
        messages: list[dict[str, object]],
        tools: Sequence[Mapping[str, object]] | None,
        documents: Sequence[Mapping[str, object]] | None,
        kwargs: dict[str, object],
    ) -> None:
        self.messages = messages
        self.tools = _objects(tools, "tools")
        self.documents = _objects(documents, "documents")
        self.kwargs = kwargs
        self._num_chars = 0

    @property
    def has_reasoning(self) -> bool:
        return any("reasoning_content" in message for message in self.messages)

    @property
    def max_rendered_chars(self) -> int:
        """A template that writes more is broken or hostile. Call `strings` before."""
        own_chars = OWN_CHARS + OWN_CHARS_PER_MESSAGE * len(self.messages)
        return min(MAX_CHAT_CHARS, MAX_GROWTH * self._num_chars + own_chars)

    def strings(self) -> list[str]:
        strings = list(strings_in(self.messages, "messages"))
        strings += strings_in(self.tools, "tools")
        strings += strings_in(self.documents, "documents")
        strings += strings_in(self.kwargs, "chat_template_kwargs")
        total = self._num_chars = sum(map(len, strings))
        if total > MAX_CHAT_CHARS:
            raise RequestTooLarge("messages", f"at most {MAX_CHAT_CHARS} characters in all", total, "Send a shorter conversation.")
        return strings

    def marked(self, marks: Marks, everything: re.Pattern[str], control: re.Pattern[str]) -> _Chat:
        """Tags (`<think>`) in an assistant's turn, the model's own output, are not marked: the next prompt then hits the prefix cache."""
        patterns = [control if message["role"] == "assistant" else everything for message in self.messages]
        made = _Chat(
            marked_objects(marks, self.messages, patterns),
            marked_objects(marks, self.tools, [everything] * len(self.tools)),
            marked_objects(marks, self.documents, [everything] * len(self.documents)),
            marked_objects(marks, [self.kwargs], [everything])[0],
        )
        made._num_chars = self._num_chars
        return made


def _objects(given: object, name: str) -> list[Mapping[str, object]]:
    if given is None:
        return []
    if not isinstance(given, list | tuple):
        raise InvalidRequest(name, "a list of objects", given)
    for number, item in enumerate(given):
        if not isinstance(item, Mapping):
            raise InvalidRequest(f"{name}[{number}]", "an object", item)
    return list(given)


def _check_kwargs(kwargs: Mapping[str, object], source: str, special_tokens: Collection[str]) -> None:
    for name, value in kwargs.items():
        field = f"chat_template_kwargs.{name[:80]}"
        is_ours = name in _RESERVED or name in special_tokens
        if is_ours or (name not in _names_in(source) and not _asks_for_nothing(name, value)):
            raise InvalidRequest(field, "a variable that this model's chat template reads", value, "Leave it out for this model.")
        if isinstance(value, int | float) and abs(value) <= 2**53:
            continue
        if value is not None and not (isinstance(value, str) and len(value) <= MAX_KWARG_CHARS):
            raise InvalidRequest(field, f"true, false, null, a number or a string of at most {MAX_KWARG_CHARS} characters", value)


def _check_tools(chat: _Chat, source: str) -> None:
    remedy = "Leave it out for this model, or serve one that was trained to call functions."
    if chat.tools and "tools" not in source:
        raise InvalidRequest("tools", "a model whose chat template shows functions", None, remedy)
    for number, message in enumerate(chat.messages):
        if message.get("tool_calls") and "tool_calls" not in source:  # templates write message.tool_calls and message["tool_calls"]
            raise InvalidRequest(f"messages[{number}].tool_calls", "a model whose chat template shows calls", None, remedy)


def _asks_for_nothing(name: str, value: object) -> bool:
    return name.isascii() and name.isidentifier() and len(name) <= MAX_UNREAD_NAME_CHARS and value in (None, False, "")


@lru_cache(maxsize=16)
def _names_in(source: str) -> frozenset[str]:
    """Raises CheckpointError."""
    from jinja2 import Environment
    from jinja2.exceptions import TemplateSyntaxError

    try:
        return frozenset(str(value) for _, kind, value in Environment().lex(source) if kind == "name")
    except TemplateSyntaxError as error:
        raise _broken(error) from error


def _broken(error: Exception) -> CheckpointError:
    return CheckpointError("chat_template", f"is not a valid template ({str(error)[:200]})")


def _refused(message: str) -> InvalidRequest:
    shown = ascii(message[:300])[1:-1]
    return InvalidRequest("messages", "a conversation this model's chat template accepts", None, f"The template says: {shown}")


def _sources(folder: Path) -> dict[str, str]:
    """Template sources by name; "default" is the main one. Named templates of earlier files win, as in transformers."""
    named: dict[str, str] = {}
    for sources in _layers(folder):
        if "default" not in named:
            named = {**{name: source for name, source in sources.items() if source.strip()}, **named}
    return named


def _layers(folder: Path) -> Iterator[dict[str, str]]:
    files: dict[str, str] = {}
    if (folder / "chat_template.jinja").is_file():
        files["default"] = read_text(folder / "chat_template.jinja")
    if (folder / "additional_chat_templates").is_dir():
        for path in sorted((folder / "additional_chat_templates").glob("*.jinja")):
            files[path.stem] = read_text(path, home=folder)
    yield files
    for file in ("tokenizer_config.json", "chat_template.json"):
        yield _sources_in(file, read_optional_object(folder / file).get("chat_template"))


def _sources_in(file: str, given: object) -> dict[str, str]:
    if given is None:
        return {}
    if isinstance(given, str):
        return {"default": given}
    if isinstance(given, Mapping):
        given = [{"name": name, "template": source} for name, source in given.items()]
    named: dict[str, str] = {}
    for entry in given if isinstance(given, list) else [None]:
        name, source = (entry.get("name"), entry.get("template")) if isinstance(entry, Mapping) else (None, None)
        if not isinstance(name, str) or not isinstance(source, str):
            raise CheckpointError(file, "chat_template must be a string, an object of them, or a list of {name, template}")
        named[name] = source
    return named
