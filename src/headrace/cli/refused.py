"""Flags people know from vLLM that Headrace does not have yet: refused by name, with what to do instead.

A value that asks for what happens anyway (`--tensor-parallel-size 1`) is accepted and dropped, so that existing command lines work.
Flags that are in no table are left to the parser, which suggests the nearest name.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from headrace.cli.exits import UsageRefused


@dataclass(frozen=True, slots=True)
class Refused:
    """remedy: what to do instead. accepted: values that ask for what happens anyway; None: the flag takes no value."""

    remedy: str
    accepted: tuple[str, ...] | None = ()


_QUANTIZED = "The KV cache is not quantized."
_LORA = "Adapters are not served yet; merge the adapter into the base weights."
_TOOLS = "Tool calls are not parsed yet; the model's text is returned as it is."
_TLS = "Terminate TLS in a proxy in front of the gateway."
_PARALLEL = "A replica runs in one process for now; use --replicas N to use more of the machine."
_MEDIA = "Only text models are served."

REFUSED: dict[str, Refused] = {
    "--calculate-kv-scales": Refused(_QUANTIZED, None),
    "--tensor-parallel-size": Refused(_PARALLEL, ("1",)),
    "-tp": Refused(_PARALLEL, ("1",)),
    "--pipeline-parallel-size": Refused(_PARALLEL, ("1",)),
    "-pp": Refused(_PARALLEL, ("1",)),
    "--data-parallel-size": Refused("Use --replicas N.", ("1",)),
    "-dp": Refused("Use --replicas N.", ("1",)),
    "--enable-expert-parallel": Refused(_PARALLEL, None),
    "--distributed-executor-backend": Refused(_PARALLEL, ("mp", "uni")),
    "--enable-lora": Refused(_LORA, None),
    "--lora-modules": Refused(_LORA),
    "--max-loras": Refused(_LORA),
    "--max-lora-rank": Refused(_LORA),
    "--enable-auto-tool-choice": Refused(_TOOLS, None),
    "--tool-call-parser": Refused(_TOOLS),
    "--tool-parser-plugin": Refused(_TOOLS),
    "--reasoning-parser": Refused("Reasoning is not split from the answer yet; it is part of the text."),
    "--structured-outputs-config": Refused("Constrained output is not supported yet."),
    "--guided-decoding-backend": Refused("Constrained output is not supported yet.", ("auto",)),
    "--speculative-config": Refused("Speculative decoding is not supported yet."),
    "--speculative-model": Refused("Speculative decoding is not supported yet."),
    "--num-speculative-tokens": Refused("Speculative decoding is not supported yet."),
    "--trust-remote-code": Refused("Code from a repository of a model is never run; known architectures are built in.", None),
    "--tokenizer": Refused("The tokenizer of the model's folder is used.", ()),
    "--tokenizer-mode": Refused("The model's tokenizer.json is used.", ("auto",)),
    "--skip-tokenizer-init": Refused("Use the Python API with prompt_token_ids and detokenize=False.", None),
    "--chat-template": Refused("Put the template into the model's folder as chat_template.jinja."),
    "--hf-overrides": Refused("Edit a copy of the model's config.json."),
    "--rope-scaling": Refused("Edit rope_scaling in a copy of the model's config.json."),
    "--rope-theta": Refused("Edit rope_theta in a copy of the model's config.json."),
    "--generation-config": Refused("Defaults come from the model's generation_config.json.", ("auto",)),
    "--override-generation-config": Refused("Edit a copy of the model's generation_config.json."),
    "--revision": Refused("Download the revision you want and give its folder."),
    "--code-revision": Refused("Code from a model's repository is never run."),
    "--tokenizer-revision": Refused("The tokenizer of the model's folder is used."),
    "--download-dir": Refused("Set HF_HOME, or give a local folder."),
    "--task": Refused("Only text generation is served.", ("auto", "generate")),
    "--runner": Refused("Only text generation is served.", ("auto", "generate")),
    "--convert": Refused("Only text generation is served.", ("auto", "none")),
    "--swap-space": Refused("Preempted sequences are recomputed, not swapped.", ("0",)),
    "--cpu-offload-gb": Refused("Weights stay where they are computed.", ("0",)),
    "--preemption-mode": Refused("Preempted sequences are recomputed.", ("recompute",)),
    "--enforce-eager": Refused("", None),
    "--num-gpu-blocks-override": Refused("Use --num-kv-blocks N."),
    "--kv-cache-memory-bytes": Refused("Use --kv-cache-bytes N."),
    "--kv-transfer-config": Refused("Prefill and decode run in one replica."),
    "--sliding-window": Refused("The window comes from the model's config.json."),
    "--limit-mm-per-prompt": Refused(_MEDIA),
    "--mm-processor-kwargs": Refused(_MEDIA),
    "--max-logprobs": Refused("At most 20 log-probabilities per token can be asked for.", ("20",)),
    "--ssl-keyfile": Refused(_TLS),
    "--ssl-certfile": Refused(_TLS),
    "--root-path": Refused("Rewrite paths in a proxy in front of the gateway.", ("/",)),
    "--middleware": Refused("Code named on a command line is never loaded."),
    "--disable-log-requests": Refused("Set gateway.request_log to none in the configuration file.", None),
    "--disable-log-stats": Refused("Metrics cost nothing until /metrics is read.", None),
    "--enable-log-requests": Refused("", None),
    "--uvicorn-log-level": Refused("Set gateway.request_log in the configuration file."),
    "--disable-frontend-multiprocessing": Refused("Gateway and engine are always separate processes.", None),
    "--api-server-count": Refused("One gateway process is started; run more behind a load balancer.", ("1",)),
    "--response-role": Refused("Answers have the role assistant.", ("assistant",)),
}
"""An empty remedy with accepted None: what the flag asks for is always so; it is accepted and dropped."""


def without_refused(arguments: Sequence[str]) -> list[str]:
    """The arguments without flags that ask for what happens anyway.

    Raises: UsageRefused for the first flag that asks for something else. Everything after a bare `--` is left alone.
    """
    kept: list[str] = []
    rest = list(arguments)
    while rest:
        word = rest.pop(0)
        if word == "--":
            return [*kept, word, *rest]
        name, equals, value = word.partition("=")
        if name not in REFUSED:
            kept.append(word)
            continue
        refused = REFUSED[name]
        if refused.accepted is not None and not equals and rest:
            value = rest.pop(0)
        _check(name, value, refused)
    return kept


def _check(name: str, value: str, refused: Refused) -> None:
    always_so = refused.accepted is None and not refused.remedy and not value
    if always_so or (refused.accepted and value in refused.accepted):
        return
    allowed = f" Only {' or '.join(refused.accepted)} is accepted." if refused.accepted else ""
    shown = f"{name} {value}".rstrip()
    raise UsageRefused(f"{shown}: not supported.{allowed} {refused.remedy}".rstrip())
