"""adapter_config.json: which linears an adapter changes, and by how much.

A field that is not known here, or that changes what PEFT computes in a way that is not computed here, must be empty. Patterns are matched
in bounded time, since a folder may come from anywhere.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

from headrace.core.errors import shorten
from headrace.tensor.checkpoint.config import ConfigFile
from headrace.tensor.checkpoint.formats.patterns import Name, read_patterns

CONFIG = "adapter_config.json"
MAX_RANK = 2**20
MAX_ALPHA = 2.0**20
MAX_PATTERNS = 4096
MAX_PATTERN_CHARS = 1000

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


_PLAIN = re.compile(r"[\w.]+")

Matches = Callable[[Name], bool]
"""Raises CheckpointError for a pattern that takes too long."""


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """Names are of linears, e.g. "model.layers.0.self_attn.q_proj".

    ranks, alphas  of patterns, of which the first that matches counts
    layers         of targets; None: all
    layer_lists    patterns of what stands before a layer's number, and of the number
    """

    rank: int
    alpha: float
    is_rank_stabilized: bool
    ranks: tuple[tuple[Matches, float], ...]
    alphas: tuple[tuple[Matches, float], ...]
    is_target: Matches
    is_excluded: Matches
    layers: frozenset[int] | None
    layer_lists: tuple[Matches, ...]

    def rank_of(self, name: str) -> float:
        return _value_for(name, self.ranks, self.rank)

    def scale_of(self, name: str) -> float:
        rank = self.rank_of(name)
        return _value_for(name, self.alphas, self.alpha) / (math.sqrt(rank) if self.is_rank_stabilized else rank)

    def has_target(self, name: str) -> bool:
        """Whether PEFT 0.21 would change the linear."""
        if self.is_excluded(Name(name)):
            return False
        return self.is_target(Name(name)) and (self.layers is None or self._layer_of(name) in self.layers)

    def _layer_of(self, name: str) -> int | None:
        return layer_of(name) if not self.layer_lists or any(matches(Name(name)) for matches in self.layer_lists) else None


def layer_of(name: str) -> int | None:
    return next((int(part) for part in name.split(".") if part.isdecimal()), None)


def _value_for(text: str, patterns: tuple[tuple[Matches, float], ...], default: float) -> float:
    name = Name(text)
    return next((value for matches, value in patterns if matches(name)), default)


def parse_config(file: ConfigFile) -> AdapterConfig:
    """Raises CheckpointError."""
    _check_method(file)
    targets, layers, lists = file.values.get("target_modules"), _layers(file), _texts(file, "layers_pattern")
    if not targets:
        file.refuse("target_modules", "must name the linears that the adapter changes", "Save the adapter with PEFT's save_pretrained.")
    if isinstance(targets, str) and file.has("layers_to_transform"):
        file.refuse("layers_to_transform", "must be null where target_modules is a string", "Write the layers into that pattern.")
    if lists and layers is None:
        file.refuse("layers_pattern", "must be null where no layers_to_transform are named")
    ranks, alphas = _patterns(file, "rank_pattern"), _patterns(file, "alpha_pattern")
    return AdapterConfig(
        rank=file.integer("r", 1, MAX_RANK, default=8),
        alpha=file.number("lora_alpha", -MAX_ALPHA, MAX_ALPHA, default=8),
        is_rank_stabilized=file.flag("use_rslora", False),
        ranks=tuple((_suffix(file, "rank_pattern", key), ranks.integer(key, 1, MAX_RANK)) for key in ranks.values),
        alphas=tuple((_suffix(file, "alpha_pattern", key), alphas.number(key, -MAX_ALPHA, MAX_ALPHA)) for key in alphas.values),
        is_target=_modules(file, "target_modules"),
        is_excluded=_modules(file, "exclude_modules"),
        layers=layers,
        layer_lists=tuple(_compiled(file, "layers_pattern", each, r"(?:^|.*?\.){}\.\d+\.") for each in lists),
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


def _modules(file: ConfigFile, name: str) -> Matches:
    value = file.values.get(name)
    if name == "target_modules" and isinstance(value, str) and value.lower() == "all-linear":
        return lambda linear: True
    if isinstance(value, str) and value:
        return _compiled(file, name, value, r"(?:{})\Z")
    modules = tuple(f".{each}" for each in _texts(file, name))
    return lambda linear: f".{linear.text}".endswith(modules)


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


def _suffix(file: ConfigFile, field: str, key: str) -> Matches:
    """A key matches the end of a name, from a dot on, as in PEFT 0.21."""
    if len(key) <= MAX_PATTERN_CHARS and _PLAIN.fullmatch(key):  # of one repetition, which is soon done
        plain = re.compile(rf"(.*\.)?({key})$")
        return lambda name: plain.match(name.text) is not None
    return _compiled(file, field, key, r"(.*\.)?({})$")


def _compiled(file: ConfigFile, field: str, pattern: str, form: str) -> Matches:
    if len(pattern) > MAX_PATTERN_CHARS:
        file.refuse(field, f"has a pattern of more than {MAX_PATTERN_CHARS} characters")
    text = form.replace("{}", pattern)
    try:
        re.compile(text)
    except (re.error, OverflowError, RecursionError) as error:
        file.refuse(field, f"{shorten(pattern)} is not a regular expression ({error})")
    return read_patterns(file.file, [text])[text].matches
