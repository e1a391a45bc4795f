"""Loads a draft model: what it must have in common with the target is checked before any weight is read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from headrace.core.errors import ConfigError
from headrace.core.model_info import TEXT_FILES, KvGroup, text_digests
from headrace.core.speculation import DRAFT_MODEL
from headrace.engine.config import EngineConfig
from headrace.engine.kv_sizing import describe_bytes
from headrace.engine.runner.drafts.model import ModelDrafter
from headrace.engine.runner.slots import SlotState
from headrace.tensor.batch import allocate_kv, stored_as
from headrace.tensor.checkpoint.config import read_config
from headrace.tensor.checkpoint.end_tokens import read_end_tokens
from headrace.tensor.device import DEVICES
from headrace.tensor.kernels import Backend
from headrace.tensor.models import LoadedModel, ModelDescription, describe, load_model
from headrace.tensor.sampling import Sampler

_WHERE = "speculative_config.model"


@dataclass(frozen=True, slots=True)
class DraftDescription:
    """
    model         its max_model_len is at most the target's
    target_group  index of the target's KV group in whose blocks the draft's KV is: full attention, so that no block of it is given back
                  while the sequence runs. Layers of the draft that have a window read what they need of it
    """

    folder: Path
    model: ModelDescription
    target_group: int


@dataclass(frozen=True, slots=True)
class LoadedDraft:
    """kv_groups: as stored, in kv_dtype"""

    described: DraftDescription
    loaded: LoadedModel
    kv_dtype: torch.dtype
    kv_groups: tuple[KvGroup, ...]

    @property
    def line(self) -> str:
        loaded, longest = self.loaded, self.loaded.max_model_len
        weights = f"{describe_bytes(loaded.resident_bytes)} of weights"
        return f"draft model: {loaded.architecture} from {self.described.folder}, {weights}; it drafts within the first {longest:,} tokens"

    def allocate(self, num_blocks: tuple[int, ...], config: EngineConfig) -> Callable[[SlotState, Sampler], ModelDrafter]:
        """num_blocks: per KV group of the target, pad block included. Returns what makes the drafter of a runner, and warms it up."""
        model, group, device = self.loaded.model, self.described.target_group, DEVICES[config.device]
        counts = (num_blocks[group],) * len(self.kv_groups)
        kv = allocate_kv(model.kv_shapes, model.group_of, counts, config.block_size, self.kv_dtype, device)

        def make(slots: SlotState, sampler: Sampler) -> ModelDrafter:
            drafter = ModelDrafter(slots, sampler, model=model, kv=kv, group=group, max_model_len=self.loaded.max_model_len)
            drafter.warm_up()
            return drafter

        return make


def describe_draft(config: EngineConfig, target: ModelDescription) -> DraftDescription | None:
    """None: no model drafts. Raises CheckpointError, and ConfigError for a model that cannot draft for the target."""
    if config.speculative_config is None or config.speculative_config.method != DRAFT_MODEL:
        return None
    folder = Path(config.speculative_config.model)
    model = describe(folder)
    groups = [index for index, group in enumerate(target.kv_groups) if group.window is None]
    if not groups:
        reason = f"every layer of {config.model} has a window, and a draft model's KV is in blocks of layers with full attention"
        raise ConfigError(_WHERE, reason, "Use the method ngram or suffix.")
    _check_vocabulary(folder, model, Path(config.model), target)
    return DraftDescription(folder, replace(model, max_model_len=min(model.max_model_len, target.max_model_len)), groups[0])


def _check_vocabulary(folder: Path, model: ModelDescription, target_folder: Path, target: ModelDescription) -> None:
    """Raises ConfigError: a token id must stand for the same text, and the same ids must end it."""
    for what, mine, its in (
        ("vocabulary size", f"{model.vocab_size:,}", f"{target.vocab_size:,}"),
        ("tokenizer.json (SHA-256)", _tokenizer(folder), _tokenizer(target_folder)),
        ("end tokens", _end_tokens(folder, model), _end_tokens(target_folder, target)),
    ):
        if mine != its:
            remedy = "Use a draft model that has the target's tokenizer, or the method ngram or suffix."
            raise ConfigError(_WHERE, f"{what} of {folder}: {mine}; of {target_folder}: {its}", remedy)


def _tokenizer(folder: Path) -> str:
    files = {name: (folder / name).read_bytes() for name in TEXT_FILES["tokenizer"] if (folder / name).is_file()}
    return text_digests(files)["tokenizer"] or "none"


def _end_tokens(folder: Path, model: ModelDescription) -> str:
    return " ".join(str(token) for token in sorted(read_end_tokens(folder, read_config(folder), model.vocab_size)))


def load_draft(
    described: DraftDescription, config: EngineConfig, backend: Backend, dtype: torch.dtype, kv_dtype: torch.dtype
) -> LoadedDraft:
    """With the target's kernels and dtypes. Weights are held as the checkpoint stores them, and not rounded further."""
    loaded = load_model(
        described.folder,
        backend=backend,
        dtype=dtype,
        device=DEVICES[config.device],
        load_format=config.load_format,
        seed=config.seed,
        max_model_len=described.model.max_model_len,
    )
    return LoadedDraft(described, loaded, kv_dtype, tuple(stored_as(group, kv_dtype) for group in loaded.model.kv_groups))
