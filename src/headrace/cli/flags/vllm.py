"""Reads the words of a command line before the parser does: vLLM's flags and spellings, and flags without their value.

A flag of TABLE is translated where Headrace has the same under another name, dropped with a notice where it changes nothing here, or
refused with what to do instead. A value that asks for what happens anyway (`--tokenizer-mode auto`) is dropped without a notice. The
parser would take any word for a value: `serve --api-key --enable-prefix-caching` would serve with the key "--enable-prefix-caching".
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from headrace.cli.exits import UsageRefused
from headrace.core.vllm_options import REMEDIES, WITHOUT_EFFECT

if TYPE_CHECKING:
    from typer._click.core import Command

_FLAG = re.compile(r"--?[a-zA-Z]|--$")


def is_flag(word: str) -> bool:
    """A flag cannot be the value of the flag before it. "-1" is a value."""
    return _FLAG.match(word) is not None


def dashed(name: str) -> str:
    """vLLM also accepts underscores."""
    return name.replace("_", "-") if name.startswith("--") else name


def refuse_missing_values(command: Command, words: Sequence[str]) -> None:
    """words: of a command line for `command` and its sub-commands. Raises UsageRefused for a flag without its value."""
    for word, following in pairwise([*words, "--"]):
        if word == "--":
            return
        if word in (commands := getattr(command, "commands", {})):
            command = commands[word]
        elif dashed(word) in _flags_with_value(command) and is_flag(following):
            remedy = "" if following == "--" else f" If {following} is the value, write {dashed(word)}={following}."
            raise UsageRefused(f"{dashed(word)}: a value is missing.{remedy}")


def _flags_with_value(command: Command) -> set[str]:
    options = [param for param in command.params if param.param_type_name == "option" and not getattr(param, "is_flag", False)]
    return {name for option in options for name in option.opts}


@dataclass(frozen=True, slots=True)
class RefusedFlag:
    """accepted: values that ask for the behaviour that Headrace has anyway; None: the flag takes no value"""

    remedy: str
    accepted: tuple[str, ...] | None = ()

    @property
    def takes_value(self) -> bool:
        return self.accepted is not None

    def message(self, name: str, value: str = "") -> str:
        allowed = f" Only {' or '.join(self.accepted)} is accepted." if self.accepted else ""
        return f"{f'{name} {value}'.rstrip()}: not supported.{allowed} {self.remedy}"


@dataclass(frozen=True, slots=True)
class IgnoredFlag:
    """why: the end of the notice "--flag has no effect: ..."; accepted: values that need no notice"""

    why: str
    takes_value: bool = False
    accepted: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class TranslatedFlag:
    """ours: the arguments that replace the flag; its value, if it takes one, is appended"""

    ours: tuple[str, ...]
    takes_value: bool = False


_QUANTIZED = "Use --kv-cache-dtype int8: its scales are computed as tokens come."
_GENERATION = "Serve a copy of the model's folder without generation_config.json, or with another one."
_PROMPTS = "prompts are never logged; --request-log off leaves out the line per request too"

_ACCEPTED: dict[str, tuple[str, ...] | None] = {
    "trust_remote_code": None,
    "tokenizer_mode": ("auto",),
    "task": ("auto", "generate"),
    "runner": ("auto", "generate"),
    "convert": ("auto", "none"),
    "cpu_offload_gb": ("0",),
}
_NEEDS_NO_NOTICE = {"swap_space": ("0",), "preemption_mode": ("recompute",)}
_WITHOUT_VALUE = ("disable_log_stats", "disable_custom_all_reduce", "use_v2_block_manager")

TABLE: dict[str, RefusedFlag | IgnoredFlag | TranslatedFlag] = {
    # the same under another name
    "--data-parallel-size": TranslatedFlag(("--replicas",), takes_value=True),
    "-dp": TranslatedFlag(("--replicas",), takes_value=True),
    "--api-server-count": TranslatedFlag(("--gateway-workers",), takes_value=True),
    "-asc": TranslatedFlag(("--gateway-workers",), takes_value=True),
    "--num-gpu-blocks-override": TranslatedFlag(("--num-kv-blocks",), takes_value=True),
    "--kv-cache-memory-bytes": TranslatedFlag(("--kv-cache-bytes",), takes_value=True),
    "--disable-uvicorn-access-log": TranslatedFlag(("--request-log", "off")),
    # harmless
    **{
        f"--{name.replace('_', '-')}": IgnoredFlag(why, name not in _WITHOUT_VALUE, _NEEDS_NO_NOTICE.get(name, ()))
        for name, why in WITHOUT_EFFECT.items()
    },
    "--disable-log-requests": IgnoredFlag(_PROMPTS),
    "--max-log-len": IgnoredFlag(_PROMPTS, takes_value=True),
    "--enable-log-requests": IgnoredFlag("every request is a line of the request log, without its prompt"),
    "--uvicorn-log-level": IgnoredFlag("there is one log level; --request-log says where the line per request goes", takes_value=True),
    "--disable-frontend-multiprocessing": IgnoredFlag("gateway and engine are always processes of their own"),
    "--enable-auto-tool-choice": IgnoredFlag("a model may call functions wherever a request has tools"),
    "--exclude-tools-when-tool-choice-none": IgnoredFlag('with tool_choice "none" functions are always left out of the prompt'),
    "--enable-reasoning": IgnoredFlag("reasoning is separated where the chat template shows its form, or --reasoning-parser names it"),
    "--enable-prompt-tokens-details": IgnoredFlag("usage always says how many prompt tokens were cached"),
    # not here
    **{f"--{name.replace('_', '-')}": RefusedFlag(remedy, _ACCEPTED.get(name, ())) for name, remedy in REMEDIES.items()},
    "--calculate-kv-scales": RefusedFlag(_QUANTIZED, None),
    "--distributed-executor-backend": RefusedFlag(
        "Ranks are processes of one machine; on several they are started by hand.", ("mp", "uni")
    ),
    "--lora-dtype": RefusedFlag("Adapters are computed as the model is.", ("auto",)),
    "--fully-sharded-loras": RefusedFlag("One factor of each update is divided over ranks, which adds no exchange.", None),
    "--default-mm-loras": RefusedFlag("Only text models are served."),
    "--tool-parser-plugin": RefusedFlag("Code named on a command line is never loaded; --tool-call-parser names a known form of calls."),
    "--reasoning-parser-plugin": RefusedFlag("Code named on a command line is never loaded; --reasoning-parser names a known form."),
    "--structured-outputs-config": RefusedFlag("The only backend is llguidance; a request says what its output must match."),
    "--guided-decoding-backend": RefusedFlag("The only backend is llguidance.", ("auto", "guidance")),
    "--skip-tokenizer-init": RefusedFlag("Use the Python API with prompt_token_ids and detokenize=False.", None),
    "--chat-template": RefusedFlag("Put the template into the model's folder as chat_template.jinja."),
    "--rope-scaling": RefusedFlag("Edit rope_scaling in a copy of the model's config.json."),
    "--rope-theta": RefusedFlag("Edit rope_theta in a copy of the model's config.json."),
    "--generation-config": RefusedFlag(_GENERATION, ("auto",)),
    "--override-generation-config": RefusedFlag(_GENERATION),
    "--kv-transfer-config": RefusedFlag("Prefill and decode run in one replica."),
    "--sliding-window": RefusedFlag("The window comes from the model's config.json."),
    "--max-logprobs": RefusedFlag("At most 20 log-probabilities per token can be asked for.", ("20",)),
    "--root-path": RefusedFlag("Rewrite paths in a proxy in front of the gateway.", ("/",)),
    "--middleware": RefusedFlag("Code named on a command line is never loaded."),
    "--response-role": RefusedFlag("Answers have the role assistant.", ("assistant",)),
}

SEVERAL = ("--served-model-name", "--lora-modules", "--api-key", "--allowed-hosts", "--allowed-origins", "--goodput")
"""Flags that are repeated for several values here, where vLLM takes several values after one flag."""


def translated(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """(arguments for the parser, notices about flags without effect). Raises UsageRefused for the first flag that is not supported, or
    that lacks a value."""
    kept: list[str] = []
    notices: list[str] = []
    rest = list(_one_value_each(arguments))
    while rest:
        word = rest.pop(0)
        if word == "--":
            return [*kept, word, *rest], notices
        name, equals, value = word.partition("=")
        name = dashed(name)
        entry, is_negated = _entry_of(name)
        if entry is None:
            kept.append(word)
            continue
        if entry.takes_value and not equals:
            value = rest.pop(0) if rest and not is_flag(rest[0]) else ""
        if entry.takes_value and not value and not isinstance(entry, RefusedFlag):
            raise UsageRefused(f"{name}: a value is missing")
        if equals and not entry.takes_value:
            if value == "false" and not is_negated:
                continue  # the flag is not given
            if is_negated or (value != "true" and not isinstance(entry, RefusedFlag)):
                raise UsageRefused(f"{name}={value}: the flag takes no value. Write {name} alone, or leave it out.")
            value = "" if value == "true" else value
        if isinstance(entry, TranslatedFlag):
            kept += [*entry.ours, *([value] if entry.takes_value else [])]
        elif isinstance(entry, IgnoredFlag):
            if not value or value not in entry.accepted:
                notices.append(f"{f'{name} {value}'.rstrip()} has no effect: {entry.why}.")
        elif not is_negated and not (value and value in (entry.accepted or ())):
            raise UsageRefused(entry.message(name, value))
    return kept, notices


def _entry_of(name: str) -> tuple[RefusedFlag | IgnoredFlag | TranslatedFlag | None, bool]:
    """The flag's row, and whether it is written with `--no-`: `--no-trust-remote-code` asks for what Headrace does anyway."""
    if name in TABLE or not name.startswith("--no-"):
        return TABLE.get(name), False
    entry = TABLE.get(f"--{name.removeprefix('--no-')}")
    has_negation = entry is not None and not isinstance(entry, TranslatedFlag) and not entry.takes_value
    return (entry, True) if has_negation else (None, False)


def _one_value_each(arguments: Sequence[str]) -> Iterator[str]:
    """`--api-key a b` becomes `--api-key a --api-key b`.

    If no MODEL precedes the flag, a second word after `serve`'s flag is taken for MODEL, not for a second value, unless it can be no model.
    """
    has_model = list(arguments[:1]) != ["serve"] or not arguments[1:2] or not arguments[1].startswith("-")
    has_model = has_model or any(word.partition("=")[0] == "--model" for word in arguments)
    flag, num_values = "", 0
    for word in arguments:
        if word.startswith("-"):
            name, equals, _ = word.partition("=")
            flag, num_values = (dashed(name) if dashed(name) in SEVERAL else ""), int(bool(equals))
        elif flag and (has_model or _is_adapter(flag, word)):
            num_values += 1
            if num_values > 1:
                yield flag
        yield word


def _is_adapter(flag: str, word: str) -> bool:
    return flag == "--lora-modules" and ("=" in word or word.startswith("{"))
