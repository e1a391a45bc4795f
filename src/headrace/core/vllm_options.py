"""Options of vLLM that Headrace does not have, for `LLM`'s keywords and the command line's flags."""

from __future__ import annotations

from collections.abc import Mapping

_NO_CODE = "Code from a model's repository is never run; known architectures are built in."
_TOKENIZER = "The tokenizer of the model's folder is used."
_MEDIA = "Only text models are served."
_TEXT_GENERATION = "Only text generation is served."

_SWAP = "preempted sequences are recomputed, nothing is swapped"

WITHOUT_EFFECT: Mapping[str, str] = {
    "disable_log_stats": "no statistics are logged",
    "swap_space": _SWAP,
    "preemption_mode": _SWAP,
    "max_seq_len_to_capture": "graphs that a GPU captures hold for contexts of every length; a CPU captures none",
    "compilation_config": "kernels and captured sizes are built in; enforce_eager captures no graphs",
    "disable_custom_all_reduce": "a replica is one process",
    "max_parallel_loading_workers": "weights are read by one process",
    "use_v2_block_manager": "there is one block manager",
}
"""The end of the notice "NAME has no effect: ..."."""

REMEDIES: Mapping[str, str] = {
    "trust_remote_code": _NO_CODE,
    "code_revision": _NO_CODE,
    "tokenizer": _TOKENIZER,
    "tokenizer_revision": _TOKENIZER,
    "tokenizer_mode": "The model's tokenizer.json is used.",
    "revision": "Download the revision you want and give its folder.",
    "hf_overrides": "Edit a copy of the model's config.json.",
    "download_dir": "Set HF_HOME, or give a local folder.",
    "cpu_offload_gb": "Weights stay where they are computed.",
    "speculative_config": "Speculative decoding is not supported yet.",
    "limit_mm_per_prompt": _MEDIA,
    "mm_processor_kwargs": _MEDIA,
    "allowed_local_media_path": _MEDIA,
    "task": _TEXT_GENERATION,
    "runner": _TEXT_GENERATION,
    "convert": _TEXT_GENERATION,
}
"""What to do instead, as one sentence."""
