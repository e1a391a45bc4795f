"""Every field a request body may name, and what becomes of it. The table in docs/api.md is this table, printed; a test compares them.

    honoured   does what it says, or the request is refused
    inert      has no effect on an answer by nature; accepted, checked for size, otherwise unused
    refused    belongs to OpenAI's or vLLM's API and is not served (yet): accepted only at a value that means "off"

A field that is in no row is refused by name with a suggestion.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from difflib import get_close_matches
from enum import StrEnum

from headrace.core.errors import InvalidRequest


class Treatment(StrEnum):
    HONOURED = "honoured"
    INERT = "inert"
    REFUSED = "refused unless default"


class Surface(StrEnum):
    CHAT = "chat"
    COMPLETIONS = "completions"


BOTH = (Surface.CHAT, Surface.COMPLETIONS)
CHAT = (Surface.CHAT,)
COMPLETIONS = (Surface.COMPLETIONS,)


@dataclass(frozen=True, slots=True)
class FieldRule:
    """One row.

    note  the rule of an honoured field, or the remedy of a refused one
    off   values of a refused field that are accepted beside null
    """

    name: str
    surfaces: tuple[Surface, ...]
    treatment: Treatment
    note: str
    off: tuple[object, ...] = ()


def _honoured(name: str, surfaces: tuple[Surface, ...], note: str) -> FieldRule:
    return FieldRule(name, surfaces, Treatment.HONOURED, note)


def _inert(name: str, note: str) -> FieldRule:
    return FieldRule(name, BOTH, Treatment.INERT, note)


def _refused(name: str, surfaces: tuple[Surface, ...], note: str, *off: object) -> FieldRule:
    return FieldRule(name, surfaces, Treatment.REFUSED, note, off)


TABLE: tuple[FieldRule, ...] = (
    _honoured("model", BOTH, "A name or alias that GET /v1/models lists; required."),
    _honoured("messages", CHAT, "Roles system, developer (treated as system), user, assistant; content a string or text parts; required."),
    _honoured("prompt", COMPLETIONS, "A string, a list of strings, a list of token ids, or a list of such lists; required."),
    _honoured("stream", BOTH, "Server-sent events instead of one answer."),
    _honoured(
        "stream_options",
        BOTH,
        "include_usage: a last chunk with usage; continuous_usage_stats beside it: usage in every chunk, of its choice so far; "
        "include_obfuscation: only false. Only with stream.",
    ),
    _honoured("n", BOTH, "1..64 sequences per prompt; prompts times n is capped (128)."),
    _honoured("best_of", COMPLETIONS, "Must equal n: there is no ranking of discarded sequences."),
    _honoured(
        "max_tokens",
        BOTH,
        "At least 1 (0 with echo); prompt and output together fit the context. "
        "Default: completions 16; chat the `max_new_tokens` of generation_config.json, else what is left.",
    ),
    _honoured("max_completion_tokens", CHAT, "OpenAI's newer name of max_tokens; if both are given they must agree."),
    _honoured("min_tokens", BOTH, "End tokens, stop_token_ids and stop strings do nothing before this many."),
    _honoured("temperature", BOTH, "0..2; 0 is greedy. Default: the model's generation_config.json, else 1."),
    _honoured("top_p", BOTH, "Above 0, at most 1. Default as temperature."),
    _honoured("top_k", BOTH, "0 or -1 is off. Default as temperature."),
    _honoured("min_p", BOTH, "0..1. Default as temperature."),
    _honoured("presence_penalty", BOTH, "-2..2."),
    _honoured("frequency_penalty", BOTH, "-2..2."),
    _honoured("repetition_penalty", BOTH, "Above 0, at most 10; 1 is off. Default as temperature."),
    _honoured("logit_bias", BOTH, "Token id -> -100..100, at most 1024 entries."),
    _honoured("seed", BOTH, "64-bit integer. Drawn by the server when absent."),
    _honoured("stop", BOTH, "A string or at most 16 strings of at most 1024 bytes; never part of the text."),
    _honoured("stop_token_ids", BOTH, "At most 64 token ids."),
    _honoured("ignore_eos", BOTH, "The model's end tokens do not end the output."),
    _honoured("include_stop_str_in_output", BOTH, "The stop string stays in the text."),
    _honoured("skip_special_tokens", BOTH, "Control tokens are left out of the text; default true."),
    _honoured("add_special_tokens", COMPLETIONS, "The tokenizer adds its own begin token; default true."),
    _honoured("add_generation_prompt", CHAT, "The template opens the assistant's turn; default true."),
    _honoured("continue_final_message", CHAT, "The last message is left open to be continued; needs add_generation_prompt false."),
    _honoured("chat_template_kwargs", CHAT, "Scalars for variables that the model's own template reads; others are refused by name."),
    _honoured("echo", COMPLETIONS, "The prompt precedes the text; with logprobs it is scored as well."),
    FieldRule("logprobs", CHAT, Treatment.HONOURED, "true or false: log-probabilities of the tokens of the answer."),
    FieldRule("logprobs", COMPLETIONS, Treatment.HONOURED, "0..20: the chosen token's log-probability and so many of the best."),
    _honoured("top_logprobs", CHAT, "0..20 of the best; needs logprobs."),
    _honoured("prompt_logprobs", BOTH, "0..20 for every prompt token but the first (vLLM's shape); not with stream."),
    _honoured("priority", BOTH, "premium, standard or batch (or 0, 1, 2). May only lower the key's class."),
    _honoured("cache_salt", BOTH, "Separates prefix caches within a tenant; at most 256 characters."),
    _inert("user", "A string of at most 512 characters."),
    _inert("safety_identifier", "A string of at most 512 characters."),
    _inert("prompt_cache_key", "A string of at most 512 characters. Prefixes are found by content."),
    _inert("metadata", "At most 16 strings of at most 512 characters."),
    _refused("store", BOTH, "Answers are not stored.", False),
    _refused("service_tier", BOTH, "Classes come with the API key; see priority.", "auto", "default"),
    _refused("tools", CHAT, "Tool calls are not served yet.", []),
    _refused("tool_choice", CHAT, "Tool calls are not served yet.", "none", "auto"),
    _refused("parallel_tool_calls", CHAT, "Tool calls are not served yet.", True),
    _refused("functions", CHAT, "Tool calls are not served yet.", []),
    _refused("function_call", CHAT, "Tool calls are not served yet.", "none", "auto"),
    _refused("response_format", BOTH, "Structured output is not served yet.", {"type": "text"}),
    _refused("structured_outputs", BOTH, "Structured output is not served yet."),
    _refused("guided_json", BOTH, "Structured output is not served yet."),
    _refused("guided_regex", BOTH, "Structured output is not served yet."),
    _refused("guided_choice", BOTH, "Structured output is not served yet."),
    _refused("guided_grammar", BOTH, "Structured output is not served yet."),
    _refused("guided_decoding_backend", BOTH, "Structured output is not served yet."),
    _refused("guided_whitespace_pattern", BOTH, "Structured output is not served yet."),
    _refused("modalities", CHAT, "Text only.", ["text"]),
    _refused("audio", CHAT, "Text only."),
    _refused("mm_processor_kwargs", BOTH, "Text only."),
    _refused("prediction", CHAT, "Predicted outputs are not served."),
    _refused("reasoning_effort", CHAT, "Reasoning control is not served yet."),
    _refused("verbosity", CHAT, "Verbosity control is not served."),
    _refused("web_search_options", CHAT, "The server fetches nothing."),
    _refused("prompt_cache_retention", BOTH, "Cached blocks live by use."),
    _refused("suffix", COMPLETIONS, "Insertion is not served."),
    _refused("use_beam_search", BOTH, "Beam search is not served; use n.", False),
    _refused("length_penalty", BOTH, "Beam search is not served.", 1.0),
    _refused("early_stopping", BOTH, "Beam search is not served.", False),
    _refused("truncate_prompt_tokens", BOTH, "Prompts are never cut silently; shorten it yourself."),
    _refused("allowed_token_ids", BOTH, "Use logit_bias."),
    _refused("bad_words", BOTH, "Use logit_bias.", []),
    _refused("logits_processors", BOTH, "Code of clients is not run."),
    _refused("chat_template", CHAT, "Templates come with the model only."),
    _refused("documents", CHAT, "Put the text into a message.", []),
    _refused("add_special_tokens", CHAT, "The template writes the begin token.", False),
    _refused("spaces_between_special_tokens", BOTH, "Text is decoded as the tokenizer does it.", True),
    _refused("return_tokens_as_token_ids", BOTH, "Token ids are not shown yet.", False),
    _refused("return_token_ids", BOTH, "Token ids are not shown yet.", False),
    _refused("request_id", BOTH, "Ids are made by the server; send an x-request-id header to find yours in the log."),
    _refused("kv_transfer_params", BOTH, "KV transfer is not served yet."),
    _refused("vllm_xargs", BOTH, "Engine arguments come from the operator."),
    FieldRule("echo", CHAT, Treatment.REFUSED, "Chat answers do not repeat the prompt.", (False,)),
)

_RULES: dict[Surface, dict[str, FieldRule]] = {
    surface: {rule.name: rule for rule in TABLE if surface in rule.surfaces} for surface in Surface
}


def honoured_fields(body: dict[str, object], surface: Surface) -> dict[str, object]:
    """The part of a body that means something: honoured fields that are not null. Raises InvalidRequest for what is not served."""
    rules = _RULES[surface]
    kept: dict[str, object] = {}
    for name, value in body.items():
        rule = rules.get(name)
        if rule is None:
            raise unknown_field(name, rules)
        if value is None:
            continue
        if rule.treatment is Treatment.HONOURED:
            kept[name] = value
        elif rule.treatment is Treatment.INERT:
            _check_inert(name, value)
        elif not any(_is_same(value, off) for off in rule.off):
            raise InvalidRequest(name, off_words(rule), value, rule.note)
    return kept


def _is_same(value: object, off: object) -> bool:
    """JSON's equality: 1 and 1.0 are one number, true is none."""
    return value == off and isinstance(value, bool) == isinstance(off, bool)


def unknown_field(name: str, known: Iterable[str], prefix: str = "") -> InvalidRequest:
    close = get_close_matches(name[:80], list(known), n=1)
    remedy = f"Did you mean {prefix}{close[0]}?" if close else "docs/api.md lists every field."
    return InvalidRequest(f"{prefix}{name[:80]}", "a field this server knows", remedy=remedy)


def off_words(rule: FieldRule) -> str:
    """The rule of a refused field in words: which values mean off."""
    shown = ["absent", "null", *(_json(off) for off in rule.off)]
    return ", ".join(shown[:-1]) + " or " + shown[-1]


def _json(value: object) -> str:
    import json

    return json.dumps(value)


def _check_inert(name: str, value: object) -> None:
    if name != "metadata":
        if not isinstance(value, str) or len(value) > 512:
            raise InvalidRequest(name, "a string of at most 512 characters", value)
        return
    small = isinstance(value, dict) and len(value) <= 16
    if not small or any(not isinstance(text, str) or len(text) > 512 for pair in value.items() for text in pair):  # type: ignore[attr-defined]
        raise InvalidRequest(name, "at most 16 strings of at most 512 characters", value)


def render_table() -> str:
    """The rows as the Markdown table of docs/api.md."""
    lines = ["| field | endpoints | treatment | rule |", "|---|---|---|---|"]
    for rule in TABLE:
        note = f"Only {off_words(rule)}. {rule.note}" if rule.treatment is Treatment.REFUSED else rule.note
        lines.append(f"| `{rule.name}` | {', '.join(rule.surfaces)} | {rule.treatment} | {note} |")
    return "\n".join(lines) + "\n"
