"""The table of all request fields, with the treatment of each. Checks, the table in docs/api.md and /openapi.json are made from its rows.

    honoured   the field has its documented effect, or the request is refused
    inert      the field never changes an answer (`metadata`): accepted and checked for size, otherwise unused
    passed on  as inert at our engines; sent to a foreign server, which may read it (marks of caches, signatures of calls)
    refused    the field belongs to a known API but is not supported: accepted only with a value that means "off" or "default"

A request with a field that has no row is refused, and the error names the field.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import partial

from headrace.core.grammar import MAX_GRAMMAR_BYTES
from headrace.gateway.surfaces.dialect.routing_fields import MAX_WISHED_MODELS, MAX_WISHED_SERVERS
from headrace.gateway.upstream.generation_request import PASSED_IN_BODY, PASSED_IN_CHAT, PASSED_INSIDE
from headrace.policy.routing.wishes import OWN_ENGINES

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
BOTH = (CHAT, COMPLETIONS)


class Treatment(StrEnum):
    HONOURED = "honoured"
    INERT = "inert"
    PASSED = "passed on"
    REFUSED = "refused unless default"


class Inside(StrEnum):
    """An object inside a body, by its name in the documentation and in `x-headrace-ignored`."""

    MESSAGE = "messages[]"
    PART = "messages[].content[]"
    CALL = "messages[].tool_calls[]"
    CALLED_FUNCTION = "messages[].tool_calls[].function"
    STREAM_OPTIONS = "stream_options"
    TOOL = "tools[]"
    FUNCTION = "tools[].function"
    TOOL_CHOICE = "tool_choice"
    CHOSEN_FUNCTION = "tool_choice.function"
    ALLOWED_TOOLS = "tool_choice.allowed_tools"
    ALLOWED_TOOL = "tool_choice.allowed_tools.tools[]"
    ALLOWED_FUNCTION = "tool_choice.allowed_tools.tools[].function"
    REASONING = "reasoning"
    THINKING = "thinking"
    RESPONSE_FORMAT = "response_format"
    JSON_SCHEMA = "response_format.json_schema"
    STRUCTURED_OUTPUTS = "structured_outputs"
    CACHE = "cache"
    PROVIDER = "provider"
    MAX_PRICE = "provider.max_price"
    MIN_THROUGHPUT = "provider.preferred_min_throughput"


@dataclass(frozen=True, slots=True)
class FieldRule:
    """places  bodies (paths) and objects inside a body (`Inside`) that may have the field
    note    for users: the rule of a field that is not refused; of a refused field the reason, and what to do instead
    off     values with no effect, accepted like null. A refused field accepts no other value
    is_any  an inert field whose value is not checked, or a passed one of any value within MAX_PASSED_BYTES
    kinds   values that the `type` of a tool may have
    """

    name: str
    places: tuple[str, ...]
    treatment: Treatment
    note: str
    off: tuple[object, ...] = ()
    is_any: bool = False
    kinds: tuple[str, ...] = ()

    def is_off(self, value: object) -> bool:
        """Equality is that of JSON: 1 equals 1.0, and true does not equal 1."""
        return bool(self.off) and any(value == off and isinstance(value, bool) == isinstance(off, bool) for off in self.off)

    @property
    def off_words(self) -> str:
        shown = ["absent", "null", *map(json.dumps, self.off)]
        return ", ".join(shown[:-1]) + " or " + shown[-1]


MAX_INERT_CHARS = 512

MAX_PASSED_BYTES = 256 << 10
"""As JSON."""

MAX_METADATA = 16

_FUNCTIONS = "Use tools and tool_choice."
_BUDGET = "Reasoning has no budget of its own: use max_tokens."
_SAME_SWITCH = "as enable_thinking"
_KEPT = "What a foreign server wants back of its earlier answer. At most 256 KiB of JSON."
_MARK = "Marks what a foreign server is to cache. Our engines find equal beginnings without marks. At most 256 KiB of JSON."
_WHITESPACE = "A model may write JSON compact, with single spaces, or indented."
_GRAMMAR = f"Lark (llguidance's dialect) or GBNF, in which rules have `::=`; at most {MAX_GRAMMAR_BYTES} bytes."
_REGEX = "The whole answer matches it: Rust's syntax, without look-around and back-references."
_SCHEMA = f"A JSON schema, as an object or as JSON text; at most {MAX_GRAMMAR_BYTES} bytes."
_TEXT_ONLY = "Text only."
_CACHE = "Cached blocks of our engines live by use."
_SERVERS = f"Names of the model's foreign servers, or {OWN_ENGINES} for our own engines; at most {MAX_WISHED_SERVERS}."
_METADATA = f"At most {MAX_METADATA} strings of at most {MAX_INERT_CHARS} characters."
_SHORT_TEXT = f"A string of at most {MAX_INERT_CHARS} characters."


def _row(
    treatment: Treatment,
    name: str,
    places: str | tuple[str, ...],
    note: str,
    *off: object,
    is_any: bool = False,
    kinds: tuple[str, ...] = (),
) -> FieldRule:
    return FieldRule(name, (places,) if isinstance(places, str) else places, treatment, note, off, is_any, kinds)


_honoured, _inert, _refused = (partial(_row, each) for each in (Treatment.HONOURED, Treatment.INERT, Treatment.REFUSED))
_unread = partial(_inert, is_any=True)


def _passed(name: str, note: str) -> FieldRule:
    bodies = BOTH if name in PASSED_IN_BODY else (CHAT,) if name in PASSED_IN_CHAT else ()
    inside = [Inside(place) for place, names in PASSED_INSIDE.items() if name in names]
    return _row(Treatment.PASSED, name, (*bodies, *inside), note, is_any=name not in PASSED_IN_BODY)


_SERVED = (
    _honoured(
        "model",
        BOTH,
        "A name that GET /v1/models lists, or `ROUTE:SIZE@VERSION`; may be left out where one model is served.",
    ),
    _honoured("messages", CHAT, "At least one; required."),
    _honoured("prompt", COMPLETIONS, "A string, a list of strings, a list of token ids, or a list of such lists; required."),
    _honoured("stream", BOTH, "Server-sent events instead of one answer."),
    _honoured("stream_options", BOTH, "Only with stream."),
    _honoured("n", BOTH, "1..64 sequences per prompt; prompts times n is capped (128)."),
    _honoured("best_of", COMPLETIONS, "Must equal n: there is no ranking of discarded sequences."),
    _honoured(
        "max_tokens",
        CHAT,
        "At least 1; prompt and output together fit the context. Default: `max_new_tokens` of generation_config.json, else what is left.",
    ),
    _honoured("max_tokens", COMPLETIONS, "At least 1 (0 with echo); prompt and output together fit the context. Default: 16."),
    _honoured("max_completion_tokens", CHAT, "OpenAI's newer name of max_tokens; if both are given they must agree."),
    _honoured("min_tokens", BOTH, "End tokens, stop_token_ids and stop strings do nothing before this many."),
    _honoured("temperature", BOTH, "0..2; 0 is greedy. Default: the model's generation_config.json, else 1."),
    _honoured("top_p", BOTH, "0..1; 0 is greedy. Default as temperature."),
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
    _honoured(
        "chat_template_kwargs", CHAT, 'Scalars for variables that the model\'s own template reads; of others only null, false, 0 or "".'
    ),
    _honoured("echo", COMPLETIONS, "The prompt precedes the text; with logprobs its log-probabilities are shown as well."),
    _honoured("logprobs", CHAT, "true or false: log-probabilities of the tokens of the answer."),
    _honoured("logprobs", COMPLETIONS, "0..20 of the best, and the chosen token's own log-probability."),
    _honoured("top_logprobs", CHAT, "0..20 of the best; needs logprobs."),
    _honoured("prompt_logprobs", BOTH, "0..20 for every prompt token but the first (vLLM's shape); not with stream."),
    _honoured(
        "priority",
        BOTH,
        "premium, standard or batch (or 1, 2 for the last two). May only lower the key's class; 0 leaves it. "
        "Named in `x-headrace-ignored` where the model's `queue_policy` is not `priority`, the default, or another server answers for it.",
        0,
    ),
    _honoured(
        "context_fitting",
        CHAT,
        "refuse, sliding_window or summary: what is done with a conversation that does not fit the context (docs/sessions.md). "
        "Default: the tenant's option, else refuse.",
    ),
    _honoured("cache_salt", BOTH, "Separates prefix caches within a tenant; at most 256 characters."),
)

_MESSAGES = (
    _honoured("role", Inside.MESSAGE, "system, developer (treated as system), user, assistant or tool; required."),
    _honoured("content", Inside.MESSAGE, "A string or a list of text parts; required, but for an assistant's message with tool_calls."),
    _honoured("name", Inside.MESSAGE, "Handed to the template; most do not show it to the model, the bundled one among them."),
    _honoured(
        "tool_calls", Inside.MESSAGE, "An assistant's calls of an earlier turn, at most 128; refused where the template shows none.", []
    ),
    _honoured("tool_call_id", Inside.MESSAGE, "Of the call that a message of role tool answers. Handed to the template."),
    _honoured("reasoning_content", Inside.MESSAGE, "An assistant's reasoning of an earlier turn, for templates that read it.", ""),
    _honoured("reasoning", Inside.MESSAGE, "Another name of reasoning_content; if both are given they must agree.", ""),
    _unread("parsed", Inside.MESSAGE, "What the official client's `parse` made of an earlier answer. Any value."),
    _refused("refusal", Inside.MESSAGE, "Answers hold none.", ""),
    _refused("audio", Inside.MESSAGE, _TEXT_ONLY),
    _refused("function_call", Inside.MESSAGE, "Send tool_calls."),
    _refused("annotations", Inside.MESSAGE, "Answers hold none.", []),
    _passed("reasoning_details", _KEPT),
    _passed("thinking_blocks", _KEPT),
    _passed("extra_content", f"{_KEPT} Gemini's signature of a call stands there."),
    _passed("provider_specific_fields", _KEPT),
    _refused("prefix", Inside.MESSAGE, "Use continue_final_message.", False),
    _passed("cache_control", _MARK),
    _honoured("type", Inside.PART, '"text"; required.'),
    _honoured("text", Inside.PART, "A string; required."),
    _passed("prompt_cache_breakpoint", _MARK),
    _honoured("id", Inside.CALL, "A string. Handed to the template."),
    _honoured("type", Inside.CALL, '"function", also where absent.', kinds=("function",)),
    _honoured("function", Inside.CALL, "What was called; required."),
    _unread("index", Inside.CALL, "The call's number in the stream that it came from. Any value."),
    _honoured("name", Inside.CALLED_FUNCTION, "A string; required."),
    _unread("parsed_arguments", Inside.CALLED_FUNCTION, "What the official client's `parse` made of the arguments. Any value."),
    _honoured(
        "arguments",
        Inside.CALLED_FUNCTION,
        "A JSON object as a string; empty is an object without members. Any other string reaches the chat template as it is.",
    ),
    _honoured("include_usage", Inside.STREAM_OPTIONS, "A last chunk with usage."),
    _honoured("continuous_usage_stats", Inside.STREAM_OPTIONS, "Usage in every chunk, of its choice so far; needs include_usage."),
    _refused("include_obfuscation", Inside.STREAM_OPTIONS, "Chunks are not padded.", False),
)

_TOOLS = (
    _honoured("tools", CHAT, "At most 128 functions in at most 128 KiB; refused where the chat template shows none to the model.", []),
    _honoured(
        "tool_choice",
        CHAT,
        "none (the functions are left out of the prompt), auto (the default), required, one function, or some of them. "
        "What required, a function and allowed_tools force, the grammar of the model's format guarantees.",
    ),
    _honoured("parallel_tool_calls", CHAT, "false: at most one call in an output; default true."),
    _honoured("type", Inside.TOOL, '"function", also where absent.', kinds=("function",)),
    _honoured("function", Inside.TOOL, "Required."),
    _honoured("name", Inside.FUNCTION, "1..64 letters, digits, _ and -, not twice; required."),
    _honoured("description", Inside.FUNCTION, "For the model."),
    _honoured("parameters", Inside.FUNCTION, "JSON Schema of an object; without it the function takes no arguments."),
    _honoured("strict", Inside.FUNCTION, "true: arguments follow the schema, also with auto. The model is not shown it."),
    _honoured("type", Inside.TOOL_CHOICE, '"function", also where absent, or "allowed_tools".', kinds=("function", "allowed_tools")),
    _honoured("function", Inside.TOOL_CHOICE, "Required where the type is function."),
    _honoured("allowed_tools", Inside.TOOL_CHOICE, "Required where the type is allowed_tools."),
    _honoured("name", (Inside.CHOSEN_FUNCTION, Inside.ALLOWED_FUNCTION), "A function of tools; required."),
    _honoured("mode", Inside.ALLOWED_TOOLS, "auto or required; required."),
    _honoured("tools", Inside.ALLOWED_TOOLS, "At least one: the functions of tools that may be called. The model is shown all."),
    _honoured("type", Inside.ALLOWED_TOOL, '"function", also where absent.', kinds=("function",)),
    _honoured("function", Inside.ALLOWED_TOOL, "Required."),
)

_REASONING = (
    _honoured(
        "enable_thinking",
        CHAT,
        "Sets the variable of that name in the chat template, else `thinking`. Without either, true is refused and false changes nothing.",
    ),
    _honoured("think", CHAT, f"Ollama's: true or false {_SAME_SWITCH}; low, medium, high as reasoning_effort."),
    _honoured("thinking", CHAT, f"LiteLLM's and Anthropic's: an object, {_SAME_SWITCH}."),
    _honoured(
        "reasoning_effort",
        CHAT,
        "none as enable_thinking false; minimal, low, medium, high, xhigh set the template's variable, and are refused without it.",
    ),
    _honoured("reasoning", CHAT, "OpenRouter's: an object.", {}),
    _honoured("include_reasoning", CHAT, "false: reasoning that is separated from the text is left out of the answer; default true."),
    _honoured("separate_reasoning", CHAT, "SGLang's. false: reasoning stays in the text; default true."),
    _honoured("reasoning_format", CHAT, "llama.cpp's: none leaves reasoning in the text; auto (the default) and deepseek separate it."),
    _honoured("effort", Inside.REASONING, "As reasoning_effort."),
    _honoured("enabled", Inside.REASONING, f"true or false, {_SAME_SWITCH}."),
    _honoured("exclude", Inside.REASONING, "true: as include_reasoning false."),
    _refused("max_tokens", Inside.REASONING, _BUDGET),
    _honoured("type", Inside.THINKING, "enabled or disabled; required."),
    _refused("budget_tokens", Inside.THINKING, _BUDGET),
)

_STRUCTURED = (
    _honoured("response_format", BOTH, "The answer is JSON, by a schema if there is one; text asks for nothing.", {"type": "text"}),
    _honoured("type", Inside.RESPONSE_FORMAT, "text, json_object or json_schema; required."),
    _honoured("json_schema", Inside.RESPONSE_FORMAT, "Required with type json_schema."),
    _honoured("schema", Inside.RESPONSE_FORMAT, f"The schema itself, as llama.cpp takes it. {_SCHEMA}"),
    _honoured("schema", Inside.JSON_SCHEMA, f"{_SCHEMA} Required."),
    _inert("name", Inside.JSON_SCHEMA, _SHORT_TEXT),
    _inert("description", Inside.JSON_SCHEMA, _SHORT_TEXT),
    _refused("strict", Inside.JSON_SCHEMA, "The schema binds the answer with or without it.", True, False),
    _honoured("structured_outputs", BOTH, "vLLM's: exactly one of json, regex, choice, grammar and json_object."),
    _honoured("json", Inside.STRUCTURED_OUTPUTS, _SCHEMA),
    _honoured("regex", Inside.STRUCTURED_OUTPUTS, _REGEX),
    _honoured("choice", Inside.STRUCTURED_OUTPUTS, "The answer is one of these texts."),
    _honoured("grammar", Inside.STRUCTURED_OUTPUTS, _GRAMMAR),
    _honoured("json_object", Inside.STRUCTURED_OUTPUTS, "true: the answer is a JSON object."),
    _refused("structural_tag", Inside.STRUCTURED_OUTPUTS, "Use a grammar in Lark, which may hold JSON schemas (%json)."),
    _refused("whitespace_pattern", Inside.STRUCTURED_OUTPUTS, _WHITESPACE),
    _refused("disable_any_whitespace", Inside.STRUCTURED_OUTPUTS, _WHITESPACE, False),
    _refused("disable_additional_properties", Inside.STRUCTURED_OUTPUTS, "Say additionalProperties: false in the schema.", False),
    _refused("disable_fallback", Inside.STRUCTURED_OUTPUTS, "There is one backend.", True, False),
    _honoured("guided_json", BOTH, _SCHEMA),
    _honoured("guided_regex", BOTH, _REGEX),
    _honoured("guided_choice", BOTH, "The answer is one of these texts."),
    _honoured("guided_grammar", BOTH, _GRAMMAR),
    _refused("guided_decoding_backend", BOTH, "llguidance compiles every grammar.", "auto", "guidance"),
    _refused("guided_whitespace_pattern", BOTH, _WHITESPACE),
    _honoured("regex", BOTH, f"SGLang's. {_REGEX}"),
    _honoured("ebnf", BOTH, f"SGLang's. {_GRAMMAR}"),
    _honoured("json_schema", BOTH, f"SGLang's and llama.cpp's. {_SCHEMA}"),
    _honoured("grammar", BOTH, f"llama.cpp's. {_GRAMMAR}", ""),
    _honoured("format", BOTH, 'Ollama\'s: "json" (an object), or a JSON schema as an object.', ""),
)

_OPENAI = (
    _passed("user", _SHORT_TEXT),
    _passed("safety_identifier", _SHORT_TEXT),
    _passed("prompt_cache_key", f"{_SHORT_TEXT} Our engines find prefixes by content."),
    _passed("prompt_cache_retention", f"{_SHORT_TEXT} {_CACHE}"),
    _passed("prompt_cache_options", _MARK),
    _honoured("metadata", CHAT, f"{_METADATA} `session_id` names the session (docs/sessions.md); other entries have no effect."),
    _inert("metadata", COMPLETIONS, _METADATA),
    _refused("store", BOTH, "Answers are not stored.", False),
    _refused("service_tier", BOTH, "Classes come with the API key; see priority.", "auto", "default"),
    _refused("functions", CHAT, _FUNCTIONS, []),
    _refused("function_call", CHAT, _FUNCTIONS, "none", "auto"),
    _refused("modalities", CHAT, _TEXT_ONLY, ["text"]),
    _refused("audio", CHAT, _TEXT_ONLY),
    _refused("prediction", CHAT, "Predicted outputs are not served."),
    _refused("moderation", CHAT, "Nothing is moderated here."),
    _refused("verbosity", CHAT, "Verbosity control is not served.", "medium"),
    _refused("web_search_options", CHAT, "The server fetches nothing."),
    _refused("suffix", COMPLETIONS, "Insertion is not served.", ""),
)

_VLLM = (
    _inert("session_id", BOTH, _SHORT_TEXT),
    _refused("mm_processor_kwargs", BOTH, _TEXT_ONLY, {}),
    _refused("media_io_kwargs", CHAT, _TEXT_ONLY, {}),
    _refused("mm_payload", BOTH, _TEXT_ONLY, "tensors"),
    _refused("return_mm_kwargs", BOTH, _TEXT_ONLY, False),
    _refused("prompt_embeds", COMPLETIONS, "Prompts are text or token ids."),
    _refused("thinking_token_budget", BOTH, _BUDGET),
    _refused("use_beam_search", BOTH, "Beam search is not served; use n.", False),
    _refused("length_penalty", BOTH, "Beam search is not served.", 1.0),
    _refused("early_stopping", BOTH, "Beam search is not served.", False),
    _refused("truncate_prompt_tokens", BOTH, "Prompts are never cut silently; shorten it yourself."),
    _refused("truncation_side", BOTH, "Prompts are never cut silently; shorten it yourself."),
    _refused("allowed_token_ids", BOTH, "Use logit_bias."),
    _refused("bad_words", BOTH, "Use logit_bias.", []),
    _refused("logprob_token_ids", BOTH, "Use logprobs."),
    _refused("repetition_detection", BOTH, "Use repetition_penalty."),
    _refused("logits_processors", BOTH, "Code of clients is not run.", []),
    _refused("watermarking", BOTH, "Answers are not watermarked.", False),
    _refused("chat_template", CHAT, "Templates come with the model only."),
    _refused("documents", CHAT, "Put the text into a message.", []),
    _refused("add_special_tokens", CHAT, "The template writes the begin token.", False),
    _refused("spaces_between_special_tokens", BOTH, "Text is decoded as the tokenizer does it.", True),
    _refused("return_tokens_as_token_ids", BOTH, "Token ids are not shown yet.", False),
    _refused("return_token_ids", BOTH, "Token ids are not shown yet.", False),
    _refused("return_token_offsets", BOTH, "Use logprobs of /v1/completions, which have text_offset.", False),
    _refused("return_prompt_text", CHAT, "Chat answers do not repeat the prompt.", False),
    _refused("echo", CHAT, "Chat answers do not repeat the prompt.", False),
    _refused("stream_interval", BOTH, "Chunks grow with the backlog alone.", 1),
    _refused("request_id", BOTH, "Ids are made by the server; send an x-request-id header to find yours in the log."),
    _refused("kv_transfer_params", BOTH, "KV transfer is not served yet.", {}),
    _refused("ec_transfer_params", BOTH, "KV transfer is not served yet.", {}),
    _refused("routed_experts_prompt_start", BOTH, "Routed experts are not shown.", 0),
    _refused("vllm_xargs", BOTH, "Engine arguments come from the operator.", {}),
)

_SGLANG = (
    _refused("lora_path", BOTH, "Name the adapter as model; GET /v1/models lists those that are loaded."),
    _refused("stream_reasoning", CHAT, "Everything is streamed as it comes.", True),
    _refused("no_stop_trim", BOTH, "Use include_stop_str_in_output.", False),
    _refused("return_hidden_states", BOTH, "Hidden states are not shown.", False),
    _refused("rid", BOTH, "Ids are made by the server; send an x-request-id header to find yours in the log."),
)

_OLLAMA = (
    _refused("keep_alive", BOTH, "Models stay loaded for as long as the server runs.", -1, "-1", "-1m", "5m"),
    _refused("options", BOTH, "Send its entries as fields of the body: temperature, top_p, seed; num_predict is max_tokens.", {}),
    _refused("images", BOTH, _TEXT_ONLY, []),
)

_LLAMA_CPP = (
    _refused("cache_prompt", BOTH, "Equal beginnings are always reused.", True),
    _refused("n_predict", BOTH, "Use max_tokens.", -1),
    _refused("n_keep", BOTH, "Prompts are never cut silently; shorten it yourself.", 0),
    _refused("n_probs", BOTH, "Use logprobs.", 0),
    _refused("repeat_penalty", BOTH, "Use repetition_penalty.", 1.0),
    _refused("typical_p", BOTH, "Use top_p or min_p.", 1.0),
    _refused("typ_p", BOTH, "Use top_p or min_p.", 1.0),
    _refused("tfs_z", BOTH, "Use top_p or min_p.", 1.0),
    _refused("mirostat", BOTH, "Use temperature.", 0),
    _refused("dynatemp_range", BOTH, "Use temperature.", 0.0),
    _refused("xtc_probability", BOTH, "Use min_p.", 0.0),
    _refused("dry_multiplier", BOTH, "Use repetition_penalty.", 0.0),
    _refused("samplers", BOTH, "The order is top_k, top_p, min_p.", []),
    _refused("id_slot", BOTH, "Slots are the engine's own.", -1),
    _refused("timings_per_token", BOTH, "Times are in /metrics.", False),
    _refused("return_progress", BOTH, "Progress is not reported.", False),
)

_OPENROUTER = (
    _honoured(
        "models", BOTH, f"At most {MAX_WISHED_MODELS} names: the first is asked where model is absent, the others follow as fallbacks do."
    ),
    _refused("route", BOTH, "Name the models in models.", "fallback"),
    _honoured("provider", BOTH, "An object ([routing.md](routing.md#a-requests-own-wishes))."),
    _honoured("order", Inside.PROVIDER, f"{_SERVERS} They are asked first, in this order."),
    _honoured("only", Inside.PROVIDER, f"{_SERVERS} No other answers."),
    _honoured("ignore", Inside.PROVIDER, f"{_SERVERS} They do not answer."),
    _honoured(
        "allow_fallbacks",
        Inside.PROVIDER,
        "false: only those of order are asked, without it only the server that is chosen first; default true.",
    ),
    _honoured("sort", Inside.PROVIDER, "price or throughput: the model and its fallbacks are asked in this order."),
    _honoured("max_price", Inside.PROVIDER, "An object: models that cost more do not answer."),
    _honoured("prompt", Inside.MAX_PRICE, "Of a million prompt tokens that no cache holds; at least 0."),
    _honoured("completion", Inside.MAX_PRICE, "Of a million generated tokens; at least 0."),
    _refused("request", Inside.MAX_PRICE, "Tokens alone have a price."),
    _refused("image", Inside.MAX_PRICE, _TEXT_ONLY),
    _refused("audio", Inside.MAX_PRICE, _TEXT_ONLY),
    _honoured("preferred_min_throughput", Inside.PROVIDER, "Tokens per second of a stream, or an object: slower models are asked last."),
    _honoured("p50", Inside.MIN_THROUGHPUT, "The same number. It is compared with the measured mean; at least 0."),
    *(_refused(name, Inside.MIN_THROUGHPUT, "The mean alone is measured: use p50.") for name in ("p75", "p90", "p99")),
    _refused("preferred_max_latency", Inside.PROVIDER, "No time to the first token is promised: use preferred_min_throughput."),
    _refused("require_parameters", Inside.PROVIDER, "No field that means something is left out for a server.", True, False),
    _refused("data_collection", Inside.PROVIDER, "What a foreign server keeps is the operator's contract: use only.", "allow"),
    _refused("zdr", Inside.PROVIDER, "What a foreign server keeps is the operator's contract: use only.", False),
    _refused("enforce_distillable_text", Inside.PROVIDER, "Licences of models are not known here.", False),
    _refused("quantizations", Inside.PROVIDER, "How a foreign server computes is not known here: use only.", []),
    _refused("transforms", BOTH, "Prompts are never cut silently; shorten it yourself.", []),
    _refused("plugins", BOTH, "The server fetches nothing.", []),
    _refused("usage", BOTH, "Whole answers have usage; for streams use stream_options.include_usage.", {}, {"include": False}),
    _refused("top_a", BOTH, "Use min_p.", 0.0),
)

_LITELLM = (
    _honoured("fallbacks", BOTH, f"At most {MAX_WISHED_MODELS} names of models that may answer where the asked one cannot, in this order."),
    _refused("context_window_fallbacks", BOTH, "Use fallbacks, which are asked for any reason.", []),
    _refused("context_length_exceeded_behavior", BOTH, "Prompts are never cut silently; shorten it yourself.", "error"),
    _refused("num_retries", BOTH, "Retries are the client's.", 0),
    _refused("caching", BOTH, "Use cache.", False),
    _honoured(
        "cache",
        BOTH,
        "Of the response cache ([caches.md](caches.md)), where that is on. true: use it although the answer is drawn at random. "
        "false: neither take nor keep an answer. Or an object.",
    ),
    _honoured("use-cache", Inside.CACHE, "true: as `cache` true."),
    _honoured("no-cache", Inside.CACHE, "true: compute the answer, whatever is kept."),
    _honoured("no-store", Inside.CACHE, "true: do not keep the answer."),
    _honoured("ttl", Inside.CACHE, "Seconds that the answer is kept, at most what the server's configuration says."),
    _honoured("s-maxage", Inside.CACHE, "Seconds: only an answer that is at most as old is taken."),
    _refused("guardrails", BOTH, "Nothing is moderated here.", []),
    _refused("safe_prompt", CHAT, "Put your own words into a system message.", False),
    _refused("random_seed", BOTH, "Use seed."),
    _refused("mock_response", BOTH, "Answers come from the model."),
)

GROUPS: Mapping[str, tuple[FieldRule, ...]] = {
    "OpenAI's and vLLM's, served": _SERVED,
    "Messages, their parts and calls, and stream_options": _MESSAGES,
    "Functions": _TOOLS,
    "Reasoning": _REASONING,
    "What the answer must match (one of these fields per request)": _STRUCTURED,
    "OpenAI's, not served": _OPENAI,
    "vLLM's, not served": _VLLM,
    "SGLang's": _SGLANG,
    "Ollama's": _OLLAMA,
    "llama.cpp's": _LLAMA_CPP,
    "OpenRouter's": _OPENROUTER,
    "LiteLLM's, and those of servers it speaks to": _LITELLM,
}

TABLE: tuple[FieldRule, ...] = tuple(rule for rules in GROUPS.values() for rule in rules)

RULES: Mapping[str, Mapping[str, FieldRule]] = {
    str(place): {rule.name: rule for rule in TABLE if place in rule.places} for place in {each for rule in TABLE for each in rule.places}
}
"""Place -> field -> row."""


def _inner_places(place: str) -> dict[str, str]:
    prefix = "" if place.startswith("/") else f"{place}."
    name_to_places = {name: (f"{prefix}{name}", f"{prefix}{name}[]") for name in RULES[place]}
    return {name: inner for name, places in name_to_places.items() for inner in places if inner in RULES and inner != Inside.MESSAGE}


INNER_PLACES: Mapping[str, Mapping[str, str]] = {place: _inner_places(place) for place in RULES}
"""Place -> field -> place of the objects in the field. `messages` is left out: `dialect.conversation` checks messages."""
