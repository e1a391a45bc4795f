"""Finds the model and the traffic of a plan or a simulation. A model is a folder or a .gguf file, or an entry of the catalogue.

No weight is read: sizes are those in the files' headers, or without files those that the configuration makes. Torch is imported, but not
for the catalogue.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.bundled import bundled_path
from headrace.cli.exits import UsageRefused
from headrace.core.errors import CheckpointError
from headrace.tensor.checkpoint.config import ConfigFile, read_config
from headrace.tensor.checkpoint.gguf.paths import is_gguf, model_name

if TYPE_CHECKING:
    from headrace.policy.placement.model import ModelShape, WeightSizes
    from headrace.policy.placement.need import Traffic
    from headrace.tensor.checkpoint.formats.format import WeightFormat
    from headrace.tensor.models.spec import DecoderSpec

TABLES = frozenset({"embed_tokens", "lm_head", "token_embd", "output"})
"""Parts of the names of embeddings and heads, in safetensors and in GGUF."""

HELD_BYTES = {"none": 2.0, "int8": 1.0, "fp8": 1.0, "int4": 0.5}
"""`Precision` -> bytes of a weight in the engine's memory, without scales."""


@dataclass(frozen=True, slots=True)
class PlannedModel:
    """dtype: as `policy.placement.model.WEIGHT_BYTES` calls it; is_here: its files are; notes: for the reader of a plan"""

    shape: ModelShape
    dtype: str
    notes: tuple[str, ...] = ()
    is_here: bool = True


def find_model(name: str, catalogue: Mapping[str, Mapping[str, object]], dtype: str | None = None) -> PlannedModel:
    """dtype: None: as the weights are stored

    Raises ConfigError if there is none, CheckpointError as the engine would, or naming the field that is not planned for.
    """
    from headrace.lab.plan.shapes import find_entry
    from headrace.tensor.checkpoint.gguf.architectures import make_config
    from headrace.tensor.checkpoint.gguf.shards import read_gguf

    path = Path(name)
    if is_gguf(name) and path.is_file():
        model = read_gguf(path)
        return _planned(ConfigFile(name, make_config(model)), model_name(path), dtype, model.tensor_bytes)
    folder = path if path.is_dir() else bundled_path(name)
    if folder is None:
        shape, kept = find_entry(name, catalogue)
        return PlannedModel(shape, dtype or kept, is_here=False)
    return _planned(read_config(folder), folder.resolve().name, dtype, None)


def _planned(config: ConfigFile, name: str, dtype: str | None, tensor_bytes: Mapping[str, int] | None) -> PlannedModel:
    """tensor_bytes: of the weights' files; None: they are beside config.json, if anywhere"""
    from headrace.engine.shapes import shape_of
    from headrace.lab.plan.shapes import read_dtype, read_shape, refuse_other_layers
    from headrace.tensor.models import MODEL_TYPES, find_architecture, read_spec

    text, notes = config, []
    try:
        architecture: str | None = find_architecture(config)
    except CheckpointError as refused:
        notes.append(f"Headrace does not serve this model: {refused.reason}.")
        refuse_other_layers(config)
        text = config.section("text_config") if config.has("text_config") else config
        architecture = MODEL_TYPES.get(text.text("model_type", ""))
    named = ConfigFile(text.file, {**text.values, "architectures": [architecture]}, text.prefix)
    spec = None if architecture is None else read_spec(named)[1]
    shape = read_shape(text, name) if spec is None else shape_of(spec, name)
    plain = read_dtype(text, config)
    if dtype is not None:
        return PlannedModel(shape, dtype, tuple(notes))
    sizes, kept, more = _stored_sizes(config, shape, spec, plain, tensor_bytes)
    return PlannedModel(replace(shape, stored=sizes), kept, (*notes, *more))


def _stored_sizes(
    config: ConfigFile, shape: ModelShape, spec: DecoderSpec | None, plain: str, tensor_bytes: Mapping[str, int] | None
) -> tuple[WeightSizes | None, str, list[str]]:
    """Sizes of quantized weights, None for plain ones; the dtype; and notes. plain: dtype of weights that are not quantized"""
    from headrace.policy.placement.model import WeightSizes
    from headrace.tensor.checkpoint.formats.table import find_section, read_format
    from headrace.tensor.checkpoint.gguf.checkpoint import GgufFormat

    stored, section = read_format(config), find_section(config)
    if stored is None or section is None:
        return None, plain, []
    notes: list[str] = []
    tensor_sizes: Mapping[str, float] | None = tensor_bytes
    if tensor_sizes is None:
        tensor_sizes, notes = _file_sizes(Path(config.file).parent, is_gguf=isinstance(stored, GgufFormat))
    if tensor_sizes is None:
        assert not isinstance(stored, GgufFormat), "its file is always there"
        tensor_sizes = _planned_sizes(section, stored, shape, spec, plain)
    tables = sum(size for name, size in tensor_sizes.items() if not TABLES.isdisjoint(name.split(".")))
    sizes = WeightSizes((sum(tensor_sizes.values()) - tables) / shape.num_layer_params, tables / shape.num_table_params)
    held = HELD_BYTES[precision := stored.precision.value]
    if spec is not None and held > 1.1 * sizes.layer:
        notes.append(f"Headrace holds most of these weights in {8 * held:g} bits, which are {8 * sizes.layer:.3g} in the files.")
    return sizes, _dtype_of(sizes.layer, plain, is_float=precision in ("fp8", "none")), notes


def _planned_sizes(
    section: ConfigFile, stored: WeightFormat, shape: ModelShape, spec: DecoderSpec | None, plain: str
) -> Mapping[str, float]:
    """Bytes of each weight by config.json. Of an architecture that is not served, all linears are taken to be stored as one of them is."""
    from headrace.policy.placement.model import WEIGHT_BYTES
    from headrace.tensor.checkpoint.formats.planned import planned_bytes
    from headrace.tensor.models import weight_shapes

    if spec is not None:
        return planned_bytes(section, stored, weight_shapes(spec), WEIGHT_BYTES[plain])
    name, one = "model.layers.0.mlp.down_proj.weight", (shape.hidden_size, shape.mlp_size)
    size = planned_bytes(section, stored, {name: one}, WEIGHT_BYTES[plain])[name] / prod(one)
    return {name: size * shape.num_layer_params, "lm_head.weight": WEIGHT_BYTES[plain] * shape.num_table_params}


def _file_sizes(folder: Path, *, is_gguf: bool) -> tuple[Mapping[str, int] | None, list[str]]:
    """Bytes of each tensor by the headers of the folder's files, None where there are none; and notes."""
    from headrace.tensor.checkpoint.folder import INDEX, SINGLE, Checkpoint
    from headrace.tensor.checkpoint.gguf.folder import find_source
    from headrace.tensor.checkpoint.gguf.shards import read_gguf

    if is_gguf:
        return read_gguf(find_source(folder).first).tensor_bytes, []
    if not any(os.path.lexists(folder / name) for name in (SINGLE, INDEX)):
        return None, []
    try:
        return Checkpoint(folder).tensor_bytes, []
    except CheckpointError as error:
        return None, [f"The weights cannot be read, and their sizes are those that config.json makes: {error.reason}."]


def _dtype_of(size: float, plain: str, *, is_float: bool) -> str:
    if size > 1.5:
        return plain
    return "int4" if size < 0.66 else "fp8" if is_float else "int8"


DEFAULT_USER_TOKENS_PER_S = 20.0

SECONDS_PER_DAY = 86_400

LIMITS = {
    "--tokens-per-user": (1e-3, 1e6),
    "--requests-per-second": (1e-6, 1e9),
    "--requests-per-day": (0.1, 1e14),
    "--peak": (1.0, 1000.0),
}
"""Flag -> (least, most): outside them a figure would overflow."""


@dataclass(slots=True)
class AskedTraffic:
    """notes: assumptions that `traffic` made"""

    context: int | None
    input_len: int | None
    output_len: int | None
    users: int | None
    tokens_per_user: float | None
    requests_per_second: float | None
    requests_per_day: float | None
    peak: float
    notes: list[str] = field(default_factory=list)

    def traffic(self, shape: ModelShape) -> Traffic:
        """Raises UsageRefused naming the flag."""
        from headrace.policy.placement.need import Traffic

        self._check()
        mean = self.requests_per_day / SECONDS_PER_DAY if self.requests_per_day is not None else self.requests_per_second
        if shape.is_encoder:
            if self.users is not None or self.tokens_per_user is not None or self.output_len is not None:
                raise UsageRefused(f"--users: {shape.name} generates nothing. Give --requests-per-second, inputs that are read.")
            length = self.input_len or self._context(shape)
            rate = (mean or 0.0) * length
            return Traffic(
                prompt_tokens=length,
                output_tokens=0,
                tokens_per_s=rate * self.peak,
                mean_tokens_per_s=rate if self.peak > 1 else 0.0,
                counts_prompts=True,
            )
        if self.users is not None and self.tokens_per_user is None:
            self.tokens_per_user = DEFAULT_USER_TOKENS_PER_S
            self.notes.append(f"No --tokens-per-user: {self.tokens_per_user:g} per second, faster than people read, are assumed.")
        of_users = self.users * self.tokens_per_user if self.users is not None and self.tokens_per_user is not None else 0.0
        prompt, output = self._lengths(shape, of_users, mean)
        rate = of_users or (mean or 0.0) * output
        return Traffic(
            prompt_tokens=prompt,
            output_tokens=output,
            tokens_per_s=rate * self.peak,
            mean_tokens_per_s=rate if self.peak > 1 else 0.0,
            user_tokens_per_s=self.tokens_per_user or 0.0,
            counts_prompts=mean is not None,
        )

    def _check(self) -> None:
        values = (self.tokens_per_user, self.requests_per_second, self.requests_per_day, self.peak)
        for (flag, (low, high)), value in zip(LIMITS.items(), values, strict=True):
            if value is not None and not low <= value <= high:
                raise UsageRefused(f"{flag}: expected a number from {low:g} to {high:g}, got {value:g}.")
        if self.requests_per_second is not None and self.requests_per_day is not None:
            raise UsageRefused("--requests-per-day: give it or --requests-per-second, not both.")
        has_rate = self.requests_per_second is not None or self.requests_per_day is not None
        if self.tokens_per_user is not None and self.users is None and not has_rate:
            raise UsageRefused("--tokens-per-user needs --users: how many users there are.")
        if self.peak != 1 and not has_rate and self.users is None:
            raise UsageRefused("--peak needs a load: --requests-per-day, --requests-per-second or --users.")
        if self.input_len is not None and self.output_len is not None and self.context is not None:
            raise UsageRefused("--context: it is --input-len and --output-len together; leave it out.")

    def _context(self, shape: ModelShape) -> int:
        if self.context is not None:
            return self.context
        from headrace.policy.placement.need import DEFAULT_CONTEXT

        length = min(DEFAULT_CONTEXT, shape.max_positions)
        self.notes.append(f"No --context: {length} tokens of prompt and answer are assumed.")
        return length

    def _lengths(self, shape: ModelShape, of_users: float, mean: float | None) -> tuple[int, int]:
        from headrace.policy.placement.need import OUTPUT_SHARE

        if of_users and mean is not None:
            return self._lengths_of_users(shape, of_users, mean)
        if self.input_len is not None and self.output_len is not None:
            return self.input_len, self.output_len
        length = self._context(shape)
        if (one := self.input_len or self.output_len) is not None:
            if one >= length:
                flag = "--input-len" if self.input_len is not None else "--output-len"
                raise UsageRefused(f"{flag}: {one} must be less than the context's {length}. Give --context, or both lengths.")
            return (one, length - one) if self.input_len is not None else (length - one, one)
        output = length // OUTPUT_SHARE
        if mean is not None:
            self.notes.append(f"Answers of {output} tokens, a quarter of the context, are assumed: --output-len would say.")
        return length - output, output

    def _lengths_of_users(self, shape: ModelShape, of_users: float, mean: float) -> tuple[int, int]:
        """The answers' length follows from the users, their speed and the rate of requests."""
        if self.output_len is not None:
            raise UsageRefused("--output-len: it follows from --users, --tokens-per-user and --requests-per-second; leave one of them out.")
        length, output = self._context(shape), round(of_users / mean)
        if self.input_len is not None and self.context is None:
            length = self.input_len + output
        if not 1 <= output < length:
            each = f"{of_users:,.0f} tokens/s in all are {of_users / mean:,.1f} tokens for each request"
            raise UsageRefused(f"--requests-per-second: {each}; an answer must have at least 1 and fewer than the context's {length}.")
        return length - output, output
