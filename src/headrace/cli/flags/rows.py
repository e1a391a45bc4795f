"""The flags of `headrace serve`, `headrace gateway` and `headrace engine`, and the key that each sets.

Those of the engine's options are made from `EngineConfig`. The others stand here and not beside their keys: what declares those takes too
long to import for `--help`. Flag names are vLLM's where vLLM has the option.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import is_dataclass
from functools import partial
from pathlib import Path
from typing import Any, get_type_hints

from headrace.cli.exits import UsageRefused
from headrace.cli.flags.flag import CommandFlag, number_or, whole_number
from headrace.core.option import Option, options
from headrace.core.strict_decode import inner
from headrace.engine.config import EngineConfig

MODEL, ENGINE, NETWORK, SECURITY, OPERATION = "Model", "Engine", "Network", "Security", "Operation"

_ONLY_FOLDER = "Folder, .gguf file, bundled model or, untested, hub id; default: the bundled headrace-tiny."


def _flag(
    group: str,
    names: str,
    paths: str,
    help: str,
    kind: Any = str,
    *,
    common: bool = False,
    split: Callable[[Any], Sequence[object]] | None = None,
    **about: Any,
) -> CommandFlag:
    option = Option(help=help, is_common=common)
    return CommandFlag(
        group=group, names=tuple(names.split()), paths=tuple(paths.split()), option=option, kind=kind, split=split, about=about
    )


def _replica(word: str) -> dict[str, str]:
    name, separator, address = word.partition("=")
    if not (name and separator and address):
        raise UsageRefused(f"--replica: {word!r} is not NAME=ADDRESS. Write --replica gpu1=10.0.0.7:7001.")
    return {"name": name, "address": address}


def _text(path: Path) -> tuple[str]:
    return (str(path),)


def _json_object(flag: str, word: str) -> dict[str, Any]:
    try:
        given = json.loads(word)
    except (ValueError, RecursionError) as error:
        raise UsageRefused(f"{flag}: {word!r} is not JSON ({error})") from None
    if not isinstance(given, dict):
        raise UsageRefused(f"{flag}: {word} is not a JSON object")
    return given


def _engine_flags() -> Iterator[CommandFlag]:
    hints = get_type_hints(EngineConfig)
    for name, option in options(EngineConfig):
        if name == "lora_modules":  # each command declares its own
            continue
        word = name.replace("_", "-")
        if is_dataclass(inner(hints[name])):
            split = partial(_section, f"--{word}")
            yield CommandFlag(group=ENGINE, paths=(name,), names=(f"--{word}",), option=option, split=split, about={"metavar": "JSON"})
            continue
        kinds = (kind for kind in (bool, int, float, str) if hints[name] in (kind, kind | None))
        kind = bool if option.switch else int if option.words else next(kinds)
        made = f"--{word}/--no-{word}" if kind is bool else f"--{word}"
        names = (made,) if option.flags is None else option.flags
        if names:
            parser = number_or(option.words) if option.words else whole_number
            about = {"parser": parser, "metavar": "|".join(("<int>", *option.words))} if kind is int else {}
            yield CommandFlag(group=ENGINE, paths=(name,), names=names, kind=kind, option=option, split=_converter(option), about=about)


def _section(flag: str, word: str) -> tuple[object]:
    return (_json_object(flag, word),)


def _converter(option: Option) -> Callable[[Any], Sequence[object]]:
    def convert(given: object) -> tuple[object]:
        if option.switch is not None and isinstance(given, bool):
            return (option.switch[given],)
        return (option.other_names.get(given, given) if isinstance(given, str) else given,)

    return convert


ENGINE_FLAGS = tuple(_engine_flags())


def engine_flags(*fields: str, without: Collection[str] = ()) -> tuple[CommandFlag, ...]:
    """The flags of these fields of `EngineConfig`; without `fields`, of every field not in `without`."""
    return tuple(flag for flag in ENGINE_FLAGS if (flag.field in fields if fields else flag.field not in without))


_NAMES = _flag(
    MODEL,
    "--served-model-name",
    "model.name model.aliases",
    "What clients ask for; again for aliases.",
    list[str],
    common=True,
    split=lambda names: (names[0], list(names[1:])),
)


def _adapter(word: str) -> tuple[str, str]:
    """Name and folder, of NAME=FOLDER or of vLLM's JSON."""
    if not word.startswith("{"):
        name, separator, path = word.partition("=")
        if not (name and separator and path):
            raise UsageRefused(f"--lora-modules: {word!r} is not NAME=FOLDER. Write --lora-modules sql=/adapters/sql.")
        return name, path
    given = _json_object("--lora-modules", word)
    name, path, base = (given.pop(key, None) for key in ("name", "path", "base_model_name"))
    if given or not (isinstance(name, str) and isinstance(path, str)):
        raise UsageRefused(f'--lora-modules: {word} is not {{"name": NAME, "path": FOLDER}}; base_model_name is the only other key.')
    if base is not None:
        print(f"headrace: base_model_name of {name} has no effect: an adapter's parent is the model as it is served.", file=sys.stderr)
    return name, path


def _adapters(words: Sequence[str]) -> dict[str, str]:
    adapters: dict[str, str] = {}
    for name, path in map(_adapter, words):
        if name in adapters:
            raise UsageRefused(f"--lora-modules: {name!r} is given twice")
        adapters[name] = path
    return adapters


def _lora_modules(path: str, split: Callable[[Any], Sequence[object]]) -> CommandFlag:
    text = "Adapters: NAME=FOLDER, or a bundled one's name for FOLDER; several, and again for more."
    return _flag(ENGINE, "--lora-modules", path, text, list[str], common=True, split=split, metavar="NAME=FOLDER")


_PARSERS = (
    _flag(
        MODEL,
        "--tool-call-parser",
        "model.tool_call_parser",
        "How the model writes calls: hermes, llama3_json, mistral, ...; none. Default auto.",
        common=True,
    ),
    _flag(
        MODEL,
        "--reasoning-parser",
        "model.reasoning_parser",
        "How the model marks reasoning: qwen3, deepseek_r1, ...; none. Default auto.",
        common=True,
    ),
)
_LISTEN = (
    _flag(NETWORK, "--host", "gateway.host", "Where to listen; beyond loopback wants --api-key. Default 127.0.0.1.", common=True),
    _flag(NETWORK, "--port", "gateway.port", "0 takes a free one. Default 8000.", int, common=True),
)
_WORKERS = "Gateway processes on this port, each with its part of the limits. Default 1."
_CLIENTS = (
    _flag(
        SECURITY,
        "--api-key",
        "gateway.api_keys",
        "Clients must send one of these.",
        list[str],
        common=True,
        split=lambda keys: ([{"key": key} for key in keys],),
        envvar="HEADRACE_API_KEY",
    ),
    _flag(SECURITY, "--allow-open", "allow_open", "Listen beyond loopback without API keys.", bool, common=True),
    _flag(
        SECURITY,
        "--allowed-hosts",
        "gateway.allowed_hosts",
        "Name a Host header may carry; again for more. Default: any, on loopback its own names.",
        list[str],
    ),
    _flag(
        SECURITY,
        "--allowed-origins",
        "gateway.allowed_origins",
        "Origin whose pages a browser lets use this server, or *; again for more.",
        list[str],
        common=True,
    ),
    _flag(SECURITY, "--ssl-certfile", "gateway.tls.certificate", "Certificate of the port, in PEM; it speaks https then.", common=True),
    _flag(SECURITY, "--ssl-keyfile", "gateway.tls.key", "The certificate's private key, in PEM.", common=True),
)
_LOG_FORMAT = _flag(
    OPERATION, "--log-format", "log_format", "text, json, or auto: text on a terminal and JSON elsewhere. Default auto.", common=True
)
_DRAIN = _flag(OPERATION, "--drain-timeout", "drain_timeout_s", "Seconds running requests may take after SIGTERM.", float)
_EXPERIMENTAL = _flag(OPERATION, "--experimental", "experimental", "Allow what has not been run where Headrace is tested.", bool)
_OPERATION = (
    _flag(
        OPERATION,
        "--request-log",
        "gateway.request_log",
        "One line per request: on (stdout), off, stderr or a file. Default on.",
        common=True,
    ),
    _flag(
        OPERATION, "--log-prompt-blocks", "gateway.log_prompt_blocks", "Add keyed hashes of prompts to it, for headrace log trace.", bool
    ),
    _flag(OPERATION, "--otlp-traces-endpoint", "gateway.otlp_traces_endpoint", "Collector of traces, http://HOST:4318. Default: none."),
    _LOG_FORMAT,
    _flag(
        OPERATION,
        "--state",
        "state",
        "Folder of keys, limits and usage. Default ~/.local/state/headrace.",
        common=True,
        metavar="DIR",
    ),
    _DRAIN,
    _EXPERIMENTAL,
)
_TLS_FOLDER = _flag(
    SECURITY,
    "--tls-dir",
    "tls_dir",
    "Folder with ca.crt, tls.crt, tls.key and token, as headrace tls init makes it.",
    Path,
    common=True,
    split=_text,
)


def _token_file(help: str) -> CommandFlag:
    return _flag(SECURITY, "--token-file", "token_file", help, Path, common=True, split=_text)


SERVE_FLAGS = (
    _flag("", "", "model.engine.model", _ONLY_FOLDER, metavar="MODEL"),
    _flag(MODEL, "--model", "model.engine.model", "The same as MODEL.", common=True),
    _NAMES,
    _flag(MODEL, "--replicas", "model.replicas", "Engine processes, each with its own weights.", int, common=True),
    *_PARSERS,
    *(flag.below("model.engine") for flag in ENGINE_FLAGS),
    _lora_modules("model.adapters", lambda words: (_adapters(words),)),
    _flag(ENGINE, "--lora-root", "lora_root", "Folder below which `headrace adapters load` may load. Default: it may not.", metavar="DIR"),
    *_LISTEN,
    _flag(NETWORK, "--gateway-workers", "gateway.workers", _WORKERS, int, common=True),
    *_CLIENTS,
    *_OPERATION,
)

GATEWAY_FLAGS = (
    _flag(
        "",
        "",
        "model.remote.model",
        "What the engines serve: folder, bundled model or, untested, hub id. Default headrace-tiny.",
        metavar="MODEL",
    ),
    _flag(
        MODEL,
        "--replica",
        "model.remote.replicas",
        "An engine: HOST:PORT or unix:/PATH; again for more.",
        list[str],
        common=True,
        split=lambda words: ([_replica(word) for word in words],),
        metavar="NAME=ADDRESS",
    ),
    _NAMES,
    *_PARSERS,
    *_LISTEN,
    _flag(NETWORK, "--workers", "gateway.workers", _WORKERS, int, common=True),
    _TLS_FOLDER.below("model.remote"),
    _token_file("File with the token that the engines want; for TCP.").below("model.remote"),
    *_CLIENTS,
    *_OPERATION,
)

ENGINE_PROCESS_FLAGS = (
    _flag("", "", "engine.model", _ONLY_FOLDER, metavar="MODEL"),
    *(flag.below("engine") for flag in ENGINE_FLAGS),
    _lora_modules("engine.lora_modules", lambda words: ([{"name": name, "path": path} for name, path in _adapters(words).items()],)),
    _flag(NETWORK, "--listen", "address", "HOST:PORT or unix:/PATH; port 0 takes a free one.", common=True, metavar="ADDRESS"),
    _TLS_FOLDER,
    _token_file("File with the token that gateways must send; for TCP."),
    _flag(NETWORK, "--rank", "rank", "Which of its replica's processes this is; 0 is the one that listens. Default 0.", int),
    _flag(
        NETWORK,
        "--rendezvous",
        "rendezvous",
        "Where the processes of a replica meet: unix:/PATH, or HOST:PORT of rank 0.",
        metavar="ADDRESS",
    ),
    _flag(SECURITY, "--tls-name", "tls_name", "Name in the certificates of the other ranks. Default: each rank's host.", metavar="NAME"),
    _flag(OPERATION, "--name", "replica", "In the log and in answers to gateways. Default: the model folder's name.", common=True),
    _LOG_FORMAT,
    _DRAIN,
    _EXPERIMENTAL,
)
