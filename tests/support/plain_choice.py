"""The reference implementation of `DeviceChoice`, on host tensors: plain torch, with the host's filters (`kernels.filters`).

Tests compare the GPU's implementation with this one, and run the code for asynchronous devices on a machine without a GPU.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from headrace.core.sampling import MAX_LOGPROBS
from headrace.tensor.kernels.choice import IN_PROMPT, MAX_TABLE_CHANGES, ChoiceKind, Chosen, DecodeRows, Field, RowTensors, SlotTensors
from headrace.tensor.kernels.filters import FilterLimits, draw

_LARGEST = torch.finfo(torch.float32).max


class PlainChoice:
    def write_tables(self, tables: Tensor, changes: Tensor) -> None:
        count = int(changes[0])
        first = 1 + MAX_TABLE_CHANGES
        tables.view(-1)[changes[1 : 1 + count].long()] = changes[first : first + count]

    def decode_rows(self, fields: Tensor, slots: SlotTensors, block_size: int) -> DecodeRows:
        row_slots, positions = fields[Field.ROW_SLOT].long(), fields[Field.POSITION].long()
        ids = torch.where(fields[Field.ID] < 0, slots.newest[row_slots], fields[Field.ID]).long()
        tables = slots.tables[:, row_slots]
        blocks = tables[:, torch.arange(len(ids)), positions // block_size].long()
        return DecodeRows(ids, positions, blocks * block_size + positions % block_size, tables)

    def choose(self, logits: Tensor, fields: Tensor, slots: SlotTensors, rows: RowTensors, kind: ChoiceKind) -> None:
        raw = logits.float()
        good = raw.amax(dim=1).isfinite()
        edited = raw
        if kind.edited:
            edited = rows.edited[: len(raw)].copy_(raw)
            for row in good.nonzero()[:, 0].tolist():
                _edit(edited[row], fields[:, row], slots, rows.masks)
        tokens = _tokens(edited, good, fields)
        chosen = rows.chosen[:, : len(raw)]
        chosen[Chosen.TOKEN] = tokens
        if kind.reported:
            for row in ((tokens >= 0) & (fields[Field.NUM_TOP] >= 0)).nonzero()[:, 0].tolist():
                _report(raw[row], int(tokens[row]), int(fields[Field.NUM_TOP, row]), chosen[:, row])
        of_slot = fields[Field.SLOT].long()
        slots.newest[of_slot] = tokens.clamp(min=0)
        counted = (tokens >= 0) & _is_penalised(fields)
        slots.seen[of_slot[counted], tokens[counted].long()] += 1


def _floats(fields: Tensor, field: Field) -> Tensor:
    return fields[field].view(torch.float32)


def _is_penalised(fields: Tensor) -> Tensor:
    repetition, frequency, presence = (_floats(fields, field) for field in (Field.REPETITION, Field.FREQUENCY, Field.PRESENCE))
    return (repetition != 1.0) | (frequency != 0.0) | (presence != 0.0)


def _edit(logits: Tensor, fields: Tensor, slots: SlotTensors, masks: Tensor) -> None:
    slot, num_bias, num_ends, mask = (int(fields[field]) for field in (Field.SLOT, Field.NUM_BIAS, Field.NUM_ENDS, Field.MASK))
    biased = slots.bias_ids[slot, :num_bias].long()
    logits[biased] += slots.biases[slot, :num_bias]
    if _is_penalised(fields):
        _penalise(logits, slots.seen[slot], *(float(_floats(fields, f)) for f in (Field.REPETITION, Field.FREQUENCY, Field.PRESENCE)))
    if mask >= 0:
        tokens = torch.arange(len(logits), dtype=torch.int32)
        is_allowed = (masks[mask][tokens // 32] >> (tokens % 32)) & 1
        logits[is_allowed == 0] = -torch.inf
    ends = slots.end_ids[slot, :num_ends].long()
    kept = logits[ends]
    logits[ends] = -torch.inf
    if logits.max() == -torch.inf:  # nothing but end tokens is left: a grammar may be at its end
        logits[ends] = kept


def _penalise(logits: Tensor, seen: Tensor, repetition: float, frequency: float, presence: float) -> None:
    ids = seen.nonzero()[:, 0]
    values, counts = logits[ids].double(), seen[ids] & (IN_PROMPT - 1)
    values = torch.where(values > 0, values / repetition, values * repetition)
    values -= frequency * counts
    values -= presence * (counts > 0)
    logits[ids] = values.clamp(max=_LARGEST).float()


def _tokens(logits: Tensor, good: Tensor, fields: Tensor) -> Tensor:
    """The token [B] int32 of each row of logits [B, V]; -1 where they are not a distribution."""
    host = logits.numpy()
    peak = host.max(axis=1)
    best = np.where(good.numpy() & np.isfinite(peak), np.argmax(host, axis=1), -1)
    temperature = _floats(fields, Field.TEMPERATURE).numpy()
    random = np.flatnonzero((best >= 0) & (temperature > 0))
    if len(random):
        top_k = np.minimum(fields[Field.TOP_K].numpy()[random], host.shape[1]).astype(np.int64)
        top_p, min_p, uniform = (_floats(fields, field).numpy()[random] for field in (Field.TOP_P, Field.MIN_P, Field.UNIFORM))
        limits = FilterLimits(temperature[random], top_k, top_p.astype(np.float64), min_p)
        with np.errstate(all="ignore"):
            best[random] = draw(host[random], peak[random], uniform.astype(np.float64), limits)
    return torch.from_numpy(best.astype(np.int32))


def _report(raw: Tensor, token: int, num_top: int, chosen: Tensor) -> None:
    floats = chosen.view(torch.float32)
    log_sum = raw.logsumexp(dim=0)
    floats[Chosen.LOGPROB] = raw[token] - log_sum
    chosen[Chosen.RANK] = 1 + (raw > raw[token]).sum()
    best = raw.sort(descending=True, stable=True)  # equal ones by rising id
    count = min(num_top, len(raw), MAX_LOGPROBS)
    chosen[Chosen.TOP_ID : Chosen.TOP_ID + count] = best.indices[:count].int()
    floats[Chosen.TOP_LOGPROB : Chosen.TOP_LOGPROB + count] = best.values[:count] - log_sum
