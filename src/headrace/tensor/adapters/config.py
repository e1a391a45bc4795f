"""adapter_config.json: which linears an adapter changes, and by how much.

A field that is not known here, or that changes what PEFT computes in a way that is not computed here, must be empty.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import cast

from headrace.core.errors import shorten
from headrace.tensor.adapters.patterns import NamePattern
from headrace.tensor.checkpoint.config import ConfigFile

CONFIG = "adapter_config.json"
MAX_RANK = 2**20
MAX_ALPHA = 2.0**20
MAX_PATTERNS = 4096

INERT = frozenset(
    ("auto_mapping", "base_model_name_or_path", "corda_config", "ensure_weight_tying", "eva_config", "inference_mode", "loftq_config",
     "lora_dropout", "lora_ga_config", "megatron_core", "peft_version", "qalora_group_size", "revision", "runtime_config")
)  # fmt: skip
"""Fields about training, or about where the base came from: shapes decide whether the base fits."""
READ = frozenset(
    ("alpha_pattern", "bias", "exclude_modules", "init_lora_weights", "layers_pattern", "layers_to_transform", "lora_alpha", "peft_type",
     "r", "rank_pattern", "target_modules", "task_type", "use_rslora")
)  # fmt: skip
NEUTRAL_STARTS = ("gaussian", "eva", "orthogonal", "mica")
"""Values of init_lora_weights that leave the base weights alone."""
MERGE = "Merge the adapter into the base model (merge_and_unload), or train one without it."
REFUSED = {
    "alora_invocation_tokens": "activated LoRA is not computed",
    "fan_in_fan_out": "weights stored as [in, out] are not read",
    "layer_replication": "layers are not replicated",
    "lora_bias": "a bias of lora_B is not computed",
    "modules_to_save": "whole modules are not replaced",
    "target_parameters": "adapters of bare parameters, such as those of experts, are not computed",
    "trainable_token_indices": "embeddings of tokens are not replaced",
    "use_dora": "DoRA is not computed",
}


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """Names are of linears, e.g. "model.layers.0.self_attn.q_proj".

    ranks, alphas      the first whose pattern matches the end of a name counts
    targets, excluded  a pattern of whole names, or ends of names
    layers             of targets; None: all
    layer_lists        what stands before a layer's number; empty: anything
    """

    rank: int
    alpha: float
    is_rank_stabilized: bool
    ranks: tuple[tuple[NamePattern, float], ...]
    alphas: tuple[tuple[NamePattern, float], ...]
    targets: NamePattern | frozenset[str]
    excluded: NamePattern | frozenset[str]
    layers: frozenset[int] | None
    layer_lists: tuple[str, ...]

    def rank_of(self, name: str) -> float:
        return _value_for(name, self.ranks, self.rank)

    def scale_of(self, name: str) -> float:
        rank = self.rank_of(name)
        return _value_for(name, self.alphas, self.alpha) / (math.sqrt(rank) if self.is_rank_stabilized else rank)

    def has_target(self, name: str) -> bool:
        """Whether PEFT 0.21 would change the linear."""
        if _is_among(self.excluded, name):
            return False
        return _is_among(self.targets, name) and (self.layers is None or self._layer_of(name) in self.layers)

    def _layer_of(self, name: str) -> int | None:
        befores = [rf"(?:^|.*?\.){re.escape(each)}" for each in self.layer_lists] or [r".*?\.[^.]*"]
        found = next((match for before in befores if (match := re.match(rf"{before}\.(?P<layer_index>\d+)\.", name))), None)
        return None if found is None else int(found["layer_index"])


def _is_among(modules: NamePattern | frozenset[str], name: str) -> bool:
    if isinstance(modules, NamePattern):
        return modules.matches(name)
    return any(f".{name}".endswith(f".{each}") for each in modules)


def _value_for(name: str, patterns: tuple[tuple[NamePattern, float], ...], default: float) -> float:
    return next((value for pattern, value in patterns if pattern.matches_end(name)), default)


def parse_config(file: ConfigFile) -> AdapterConfig:
    """Raises CheckpointError."""
    _check_method(file)
    targets, layers, lists = _modules(file, "target_modules"), _layers(file), _texts(file, "layers_pattern")
    if not targets:
        file.refuse("target_modules", "must name the linears that the adapter changes", "Save the adapter with PEFT's save_pretrained.")
    if isinstance(targets, NamePattern) and file.has("layers_to_transform"):
        file.refuse("layers_to_transform", "must be null where target_modules is a string", "Write the layers into that pattern.")
    if lists and layers is None:
        file.refuse("layers_pattern", "must be null where no layers_to_transform are named")
    if not all(re.fullmatch(r"[\w.]+", each) for each in lists):
        file.refuse("layers_pattern", 'must be a name, such as "layers", or a list of names')
    ranks, alphas = _patterns(file, "rank_pattern"), _patterns(file, "alpha_pattern")
    return AdapterConfig(
        rank=file.integer("r", 1, MAX_RANK, default=8),
        alpha=file.number("lora_alpha", -MAX_ALPHA, MAX_ALPHA, default=8),
        is_rank_stabilized=file.flag("use_rslora", False),
        ranks=tuple((pattern, ranks.integer(key, 1, MAX_RANK)) for key, pattern in _compiled_keys(file, ranks)),
        alphas=tuple((pattern, alphas.number(key, -MAX_ALPHA, MAX_ALPHA)) for key, pattern in _compiled_keys(file, alphas)),
        targets=targets,
        excluded=_modules(file, "exclude_modules"),
        layers=layers,
        layer_lists=lists,
    )


def _check_method(file: ConfigFile) -> None:
    if file.text("peft_type") != "LORA":
        file.refuse("peft_type", "only LORA is computed", MERGE)
    if file.text("task_type", "CAUSAL_LM") != "CAUSAL_LM":
        file.refuse("task_type", "must be CAUSAL_LM or null", "Use an adapter that was trained to generate text.")
    if file.text("bias", "none") != "none":
        file.refuse("bias", 'must be "none": biases of the base are not replaced', MERGE)
    start = file.values.get("init_lora_weights")
    if isinstance(start, str) and start.lower() not in NEUTRAL_STARTS:
        file.refuse(
            "init_lora_weights",
            "such adapters stand beside changed base weights",
            "Save it as plain LoRA: save_pretrained(..., path_initial_model_for_weight_conversion=...).",
        )
    for name in sorted(file.values.keys() - INERT - READ):
        if file.values[name] not in (None, False, [], {}):
            file.refuse(name, REFUSED.get(name, "a field that is not known here, and may change what is computed"), MERGE)


def _modules(file: ConfigFile, name: str) -> NamePattern | frozenset[str]:
    value = file.values.get(name)
    if not isinstance(value, str):
        return frozenset(_texts(file, name))
    return _compiled(file, name, ".*" if name == "target_modules" and value.lower() == "all-linear" else value)


def _texts(file: ConfigFile, name: str) -> tuple[str, ...]:
    value = file.values.get(name)
    texts = [value] if isinstance(value, str) else file.items(name)
    if len(texts) > MAX_PATTERNS:
        file.refuse(name, f"has more than {MAX_PATTERNS} entries")
    if not all(isinstance(each, str) for each in texts):
        file.refuse(name, "must be a string or a list of strings")
    return tuple(cast("list[str]", texts))


def _layers(file: ConfigFile) -> frozenset[int] | None:
    value = file.values.get("layers_to_transform")
    layers = [value] if isinstance(value, int) else file.items("layers_to_transform")
    if not all(isinstance(each, int) and not isinstance(each, bool) for each in layers):
        file.refuse("layers_to_transform", "must be a layer's number or a list of them")
    return frozenset(cast("list[int]", layers)) or None


def _patterns(file: ConfigFile, name: str) -> ConfigFile:
    section = file.section(name)
    if len(section.values) > MAX_PATTERNS:
        file.refuse(name, f"has more than {MAX_PATTERNS} entries")
    return section


def _compiled_keys(file: ConfigFile, section: ConfigFile) -> list[tuple[str, NamePattern]]:
    return [(key, _compiled(file, section.prefix.removesuffix("."), key)) for key in section.values]


def _compiled(file: ConfigFile, name: str, pattern: str) -> NamePattern:
    try:
        return NamePattern(pattern)
    except ValueError as error:
        file.refuse(name, f"{shorten(pattern)}: {error}", "Write a simpler pattern, or a list of names.")
