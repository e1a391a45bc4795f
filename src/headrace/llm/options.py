"""Translates the keywords of `LLM`, which are vLLM's, into the engine's options; unknown keywords are refused by name."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from difflib import get_close_matches
from pathlib import Path

from headrace.core.errors import ConfigError
from headrace.core.option import options
from headrace.core.strict_decode import decode
from headrace.core.vllm_options import REMEDIES, WITHOUT_EFFECT
from headrace.engine.config import EngineConfig, find_gpus_to_start

log = logging.getLogger("headrace.llm")

_QUANTIZED = "Weights are rounded at load by quantization='int8', 'int4' or, on a GPU, 'fp8'; a checkpoint's own format is read as it is."

ONLY: Mapping[str, tuple[tuple[object, ...], str]] = {
    "data_parallel_size": ((1,), "An LLM is one replica; `headrace serve --replicas N` runs several."),
    "distributed_executor_backend": ((None, "mp", "uni"), "The ranks of an LLM are processes of this machine."),
    "trust_remote_code": ((False,), REMEDIES["trust_remote_code"]),
    "allow_deprecated_quantization": ((False,), _QUANTIZED),
    "tokenizer": ((None,), REMEDIES["tokenizer"]),
    "tokenizer_mode": (("auto",), REMEDIES["tokenizer_mode"]),
    "tokenizer_revision": ((None,), REMEDIES["tokenizer_revision"]),
    "skip_tokenizer_init": ((False,), "Give prompt_token_ids and SamplingParams(detokenize=False)."),
    "chat_template": ((None,), "The template of the model's folder is used."),
    "revision": ((None,), REMEDIES["revision"]),
    "hf_overrides": ((None, {}), REMEDIES["hf_overrides"]),
    "hf_token": ((None,), "Set HF_TOKEN, or download the model and give its folder."),
    "download_dir": ((None,), REMEDIES["download_dir"]),
    "config_format": (("auto", "hf"), "The Hugging Face layout is read."),
    "generation_config": (("auto",), "Defaults come from the model's generation_config.json."),
    "override_generation_config": ((None, {}), "Give SamplingParams."),
    "cpu_offload_gb": ((0, 0.0), REMEDIES["cpu_offload_gb"]),
    "lora_dtype": (("auto",), "Adapters are computed as the checkpoint has them."),
    "fully_sharded_loras": ((False,), "Adapters are not divided over ranks."),
    "speculative_model": ((None,), REMEDIES["speculative_model"]),
    "num_speculative_tokens": ((None,), REMEDIES["num_speculative_tokens"]),
    "structured_outputs_config": ((None,), "The only backend is llguidance; say what to match in SamplingParams(structured_outputs=...)."),
    "limit_mm_per_prompt": ((None, {}), REMEDIES["limit_mm_per_prompt"]),
    "mm_processor_kwargs": ((None, {}), REMEDIES["mm_processor_kwargs"]),
    "allowed_local_media_path": ((None, ""), REMEDIES["allowed_local_media_path"]),
    "task": (("auto", "generate"), REMEDIES["task"]),
    "runner": (("auto", "generate"), REMEDIES["runner"]),
    "convert": (("auto", "none"), REMEDIES["convert"]),
}
"""vLLM's keywords that are no options here -> (values that ask for the behaviour there is anyway, the remedy for other values)."""

SILENT: Mapping[str, tuple[object, ...]] = {"disable_log_stats": (True,), "swap_space": (0, 0.0), "preemption_mode": ("recompute",)}
"""Keyword -> values beside None and False that need no notice."""

VLLM_NAMES = {
    "memory_fraction": "gpu_memory_utilization",
    "num_kv_blocks": "num_gpu_blocks_override",
    "kv_cache_bytes": "kv_cache_memory_bytes",
    "queue_policy": "scheduling_policy",
}

ENGINE_FIELDS = {VLLM_NAMES.get(field, field): field for field, _ in options(EngineConfig) if field not in ("model", "lora_modules")}


def described(keywords: Collection[str]) -> str:
    about = dict(options(EngineConfig))
    lines = []
    for keyword, field in ENGINE_FIELDS.items():
        if keyword in keywords and keyword != "seed":  # LLM's docstring has it: it seeds more than the engine
            choices = f"{' | '.join(map(repr, about[field].one_of))}. " if about[field].one_of else ""
            lines.append(f"{keyword:<24}{choices}{about[field].plain_help.rstrip('.')} ({about[field].shown_default})")
    return "\n    ".join(lines)


def engine_config(folder: Path, given: Mapping[str, object]) -> EngineConfig:
    """Raises ConfigError naming the keyword."""
    about = dict(options(EngineConfig))
    values = {ENGINE_FIELDS[name]: value for name, value in given.items() if value is not None}
    values = {field: about[field].other_names.get(value, value) if isinstance(value, str) else value for field, value in values.items()}
    try:
        return decode(EngineConfig, {"model": str(folder), **values}).checked(find_gpus_to_start)
    except ConfigError as error:
        raise error.at(VLLM_NAMES.get(error.where, error.where)) from error


def refuse_unsupported(given: Mapping[str, object], known: frozenset[str]) -> None:
    """Raises ConfigError for a keyword that is unknown, or whose value is not in ONLY."""
    for name, value in given.items():
        if name in WITHOUT_EFFECT:
            if not (value is None or value is False or value in SILENT.get(name, ())):
                log.warning("%s=%r has no effect: %s.", name, value, WITHOUT_EFFECT[name])
            continue
        if name not in ONLY:
            close = get_close_matches(name, [*known, *ONLY, *WITHOUT_EFFECT], n=1, cutoff=0.6)
            if close and close[0] in ONLY:
                _check_only(close[0], value)  # the suggested keyword would be refused, too: refuse it at once
            raise ConfigError(
                name, "is not an option of LLM", f"Did you mean {close[0]}?" if close else f"Known: {', '.join(sorted(known))}."
            )
        _check_only(name, value)


def _check_only(name: str, value: object) -> None:
    accepted, remedy = ONLY[name]
    if not any(value == each and type(value) is type(each) for each in accepted):
        shown = " or ".join(map(repr, accepted))
        raise ConfigError(name, f"{value!r:.80} is not supported; only {shown} is", remedy)
