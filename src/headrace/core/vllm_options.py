"""Options of vLLM that Headrace does not have, for `LLM`'s keywords and the command line's flags."""

from __future__ import annotations

from collections.abc import Mapping

_NO_CODE = "Code from a model's repository is never run; known architectures are built in."
_TOKENIZER = "The tokenizer of the model's folder is used."
_MEDIA = "Only text models are served."
_TEXT_GENERATION = "Only text generation is served."

_SPECULATIVE = 'Write speculative_config: {"method": "draft_model", "model": FOLDER, "num_speculative_tokens": N}.'

_SWAP = "preempted sequences are recomputed, nothing is swapped"

WITHOUT_EFFECT: Mapping[str, str] = {
    "disable_log_stats": "the only statistics logged are those of drafts, while there are any",
    "swap_space": _SWAP,
    "preemption_mode": _SWAP,
    "max_seq_len_to_capture": "graphs that a GPU captures hold for contexts of every length; a CPU captures none",
    "compilation_config": "kernels and captured sizes are built in; enforce_eager captures no graphs",
    "disable_custom_all_reduce": "the ranks of a replica add up in memory that they share",
    "max_parallel_loading_workers": "each rank of a replica reads its own part of the weights, all at once",
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
    "speculative_model": _SPECULATIVE,
    "num_speculative_tokens": _SPECULATIVE,
    "limit_mm_per_prompt": _MEDIA,
    "mm_processor_kwargs": _MEDIA,
    "allowed_local_media_path": _MEDIA,
    "task": _TEXT_GENERATION,
    "runner": _TEXT_GENERATION,
    "convert": _TEXT_GENERATION,
}
"""What to do instead, as one sentence."""

_HIDDEN_STATES = "Nothing is drafted from the target's hidden states: use ngram, suffix or draft_model."
_ADAPTS = "How many tokens are drafted adapts by itself."
_OF_ENGINE = "The draft model is computed as the target is."
_BOUNDS = "A sequence is matched with itself alone, within bounds that are built in."
_EXACT = "A draft is accepted if it is the token that the target samples at its place."
_ONE_PROCESS = "The draft model runs in one process."

SPECULATIVE_METHOD_REMEDIES: Mapping[str, str] = {
    **dict.fromkeys(("eagle", "eagle3", "medusa", "mlp_speculator", "mtp", "dflash", "dspark", "extract_hidden_states"), _HIDDEN_STATES),
    "ngram_gpu": "Use ngram.",
    "custom_class": "Code that a configuration names is never loaded: use ngram, suffix or draft_model.",
}
"""vLLM's methods of drafting that are not here."""

SPECULATIVE_KEYS: Mapping[str, str] = {
    **dict.fromkeys(("disable_by_batch_size", "num_speculative_tokens_per_batch_size", "enable_adaptive_verification"), _ADAPTS),
    **dict.fromkeys(("rejection_sample_method", "synthetic_acceptance_rates", "synthetic_acceptance_length"), _EXACT),
    "draft_sample_method": "The draft model's tokens are chosen as the target's are.",
    **dict.fromkeys((f"suffix_decoding_{name}" for name in ("max_tree_depth", "max_cached_requests", "max_spec_factor")), _BOUNDS),
    "suffix_decoding_min_token_prob": _BOUNDS,
    **dict.fromkeys(("draft_tensor_parallel_size", "tensor_parallel_size", "use_local_argmax_reduction"), _ONE_PROCESS),
    "quantization": "The draft model's weights are computed with as its checkpoint has them.",
    **dict.fromkeys(("moe_backend", "attention_backend", "kv_cache_dtype", "enforce_eager", "draft_load_config"), _OF_ENGINE),
    "max_model_len": "It is that of the draft model's config.json.",
    "revision": REMEDIES["revision"],
    "code_revision": REMEDIES["code_revision"],
    "use_heterogeneous_vocab": "A draft model has the target's tokenizer.",
    **dict.fromkeys(("parallel_drafting", "speculative_token_tree"), "Tokens are drafted one after another."),
    **dict.fromkeys(
        ("disable_padded_drafter_batch", "disable_eagle_block_drop", "index_share_for_mtp_iteration", "dspark_draft_topk"),
        "It is for methods that are not supported.",
    ),
}
"""Keys of vLLM's speculative_config that are not here -> why, as one sentence."""
