"""GPTQ: integers of 2, 3, 4 or 8 bits, packed along the inputs, with a scale and a zero point per output and group of inputs.

| part | shape, of a weight [N, K] with G groups | |
|---|---|---|
| `qweight` | int32 [K * bits / 32, N] | integers packed along K |
| `qzeros` | int32 [G, N * bits / 32] | zero points packed along N; version 1 stores them less one |
| `scales` | float [G, N] | |
| `g_idx` | int32 [K] | group of each input |

weight[n, k] = (integer - zero point) * scale. Source: the file format of AutoGPTQ and GPTQModel.

- The version is `checkpoint_format`, in newer files `format`: "gptq" is version 1, "gptq_v2" stores zero points as they are.
- The zero points of symmetric weights (`sym`) are the middle of the range. Files store them too, under the name of either version in the
  way of either, and kernels that know `sym` do not read them; so they may be stored in either way, or left out. Any others are refused.
- Without `sym` and without a version, weights whose zero points are all the middle are taken for symmetric, and others are refused: files
  from before version 2 do not name a version, and some of today's writers do not either. Older ones with a quantize_config.json alone are
  of version 1 (`formats.table`).
- Version 1 cannot store a zero point of 0. A stored one with all bits set is 0 to some of its readers (most kernels of AutoGPTQ) and
  2 ** bits to others (vLLM), and packers let it run over into its neighbours, so it is refused.
- With `desc_act` (act-order) `g_idx` gives the groups, in any order. Without it groups are consecutive, and a `g_idx` that says otherwise
  is refused; zeros say nothing.
- `dynamic` has GPTQModel's rules for single modules. The first whose pattern matches counts: "-:" excludes modules, which are stored as
  plain weights, "+:" or nothing gives them other `bits`, `group_size`, `desc_act` or `sym`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.core.errors import CheckpointError
from headrace.tensor.checkpoint.config import ConfigFile
from headrace.tensor.checkpoint.formats.format import StoredParts
from headrace.tensor.checkpoint.formats.nibbles import decoded, nibbles, unpack
from headrace.tensor.checkpoint.formats.patterns import Name, Pattern, read_patterns
from headrace.tensor.checkpoint.formats.scaled import Blocks, bytes_with_scales
from headrace.tensor.kernels.rounding import Precision, RoundedWeight

BITS = (2, 3, 4, 8)
SCALES = ("F16", "BF16", "F32")
VERSIONS = {"gptq": 1, "gptq_v2": 0}
"""Added to a stored zero point, by `checkpoint_format`."""
EXCLUDES, CHANGES = "-:", "+:"
"""A rule of `dynamic` without either changes too."""
_ASYMMETRIC = (
    'Write "sym": false into quantization_config, and "checkpoint_format": "gptq" where zero points are stored less one, as AutoGPTQ does, '
    '"gptq_v2" where they are stored as they are.'
)


@dataclass(frozen=True, slots=True)
class GptqWeight:
    """words [K * bits / 32, N] int32; scales and zeros float32 [N, G]; groups int64 [K]: each input's group."""

    words: Tensor
    scales: Tensor
    zeros: Tensor
    groups: Tensor
    bits: int

    def dense(self, rows: slice) -> Tensor:
        values = unpack(self.words[:, rows].t().contiguous(), self.bits).float()
        zeros, scales = (of_group[rows].index_select(1, self.groups) for of_group in (self.zeros, self.scales))
        return values.sub_(zeros).mul_(scales)

    def rounded(self, rows: slice) -> RoundedWeight | None:
        inputs = len(self.groups)
        size = inputs // self.scales.shape[1]
        if self.bits > 4 or not torch.equal(self.groups, torch.arange(inputs) // max(size, 1)):
            return None
        values = decoded(rows, inputs, lambda part: unpack(self.words[:, part].t().contiguous(), self.bits))
        return nibbles(values.sub_(8), self.scales[rows], self.zeros[rows] - 8)


@dataclass(frozen=True, slots=True)
class GptqScheme:
    """
    group         inputs of a group; -1: all
    added         to a stored zero point; None: the file names no version
    is_symmetric  None: the file does not say
    is_ordered    groups are consecutive
    """

    bits: int
    group: int
    added: int | None
    is_symmetric: bool | None
    is_ordered: bool

    @property
    def title(self) -> str:
        return f"{self.bits} bits" + (f" in groups of {self.group}" if self.group > 0 else "")

    @property
    def precision(self) -> Precision:
        return Precision.INT4 if self.bits <= 4 and self.is_ordered else Precision.INT8

    def read(self, parts: StoredParts, stem: str, shape: tuple[int, int]) -> GptqWeight:
        (outputs, inputs), bits = shape, self.bits
        if inputs * bits % 32 or outputs * bits % 32:
            raise CheckpointError(stem, f"a weight of shape {list(shape)} cannot be packed in words of 32 bits, {bits} bits each")
        count = 1 if self.group < 0 else -(-inputs // self.group)
        words = parts.read_part(f"{stem}.qweight", (inputs * bits // 32, outputs), ("I32",))
        zeros = self._zeros(parts, f"{stem}.qzeros", (count, outputs))
        scales = parts.read_part(f"{stem}.scales", (count, outputs), SCALES)
        groups = self._groups(parts, f"{stem}.g_idx", inputs, count)
        return GptqWeight(words, scales.float().t().contiguous(), zeros.t().contiguous(), groups, bits)

    def _zeros(self, parts: StoredParts, name: str, shape: tuple[int, int]) -> Tensor:
        """float32 [G, N]. Raises CheckpointError for one that is beyond the integers' range, and for what is not decided."""
        middle = torch.full(shape, float(1 << (self.bits - 1)))
        if self.is_symmetric and not parts.has(name):
            return middle
        words = parts.read_part(name, (shape[0], shape[1] * self.bits // 32), ("I32",))
        if not parts.has_values:
            return middle
        stored = unpack(words, self.bits).float()
        is_middle = any(torch.equal(stored, middle - less) for less in VERSIONS.values())
        if is_middle and self.is_symmetric is not False:
            return middle
        if self.is_symmetric:
            raise CheckpointError(name, "its zero points are not the middle of the range, though config.json has sym = true", _ASYMMETRIC)
        if self.added is None:
            raise CheckpointError(name, "nothing says how its zero points are stored", _ASYMMETRIC)
        zeros, highest = stored + self.added, (1 << self.bits) - 1
        if (number := int((zeros > highest).sum())) > 0:
            reason = f"holds {number} zero points beyond {highest}, the highest integer of {self.bits} bits"
            raise CheckpointError(name, reason, "Quantize the model again, with checkpoint_format gptq_v2.")
        return zeros

    def _groups(self, parts: StoredParts, name: str, inputs: int, count: int) -> Tensor:
        """Each input's group, int64 [K]. Raises CheckpointError for groups that do not exist or contradict `desc_act`."""
        consecutive = torch.arange(inputs) // (inputs if self.group < 0 else self.group)
        if not parts.has(name) and (self.is_ordered or count == 1):
            return consecutive
        groups = parts.read_part(name, (inputs,), ("I32",)).long()
        lowest, highest = int(groups.min()), int(groups.max())
        if lowest < 0 or highest >= count:
            raise CheckpointError(name, f"names groups {lowest} to {highest}, but there are {count}, from 0")
        if not self.is_ordered:
            return groups
        if highest > 0 and not torch.equal(groups, consecutive):
            raise CheckpointError(name, "its groups are not consecutive, but config.json has desc_act = false")
        return consecutive


@dataclass(frozen=True, slots=True)
class GptqFormat:
    """rules: of single modules, the first that matches counts; None: they are stored as plain weights."""

    scheme: GptqScheme
    rules: tuple[tuple[Pattern, GptqScheme | None], ...]

    method = "gptq"

    @property
    def title(self) -> str:
        schemes = [self.scheme, *(scheme for _, scheme in self.rules if scheme is not None)]
        return "gptq, " + " or ".join(dict.fromkeys(scheme.title for scheme in schemes))

    @property
    def precision(self) -> Precision:
        return self.scheme.precision

    def precision_of(self, stem: str) -> Precision:
        scheme = self._scheme(stem)
        return Precision.NONE if scheme is None else scheme.precision

    def is_quantized(self, parts: StoredParts, stem: str) -> bool:
        return any(parts.has(f"{stem}.{part}") for part in ("qweight", "qzeros", "scales"))

    def stored_bytes(self, stem: str, shape: tuple[int, int]) -> float | None:
        if (scheme := self._scheme(stem)) is None:
            return None
        indices = 4 * shape[1]
        return indices + bytes_with_scales(shape, scheme.bits, Blocks(1, max(scheme.group, 0)), 16 + scheme.bits)

    def open(self, parts: StoredParts, stem: str, shape: tuple[int, int]) -> GptqWeight:
        if (scheme := self._scheme(stem)) is None:
            raise CheckpointError(stem, "is stored quantized, though a rule of config.json's dynamic excludes it")
        return scheme.read(parts, stem, shape)

    def _scheme(self, stem: str) -> GptqScheme | None:
        name = Name(stem)
        return next((scheme for pattern, scheme in self.rules if pattern.matches(name)), self.scheme)


def read_format(section: ConfigFile) -> GptqFormat:
    rules = section.section("dynamic")
    patterns = read_patterns(section.file, map(_pattern, rules.values))
    found: list[tuple[Pattern, GptqScheme | None]] = []
    for rule in rules.values:
        changes = rules.section(rule)
        changed = ConfigFile(section.file, {**section.values, **changes.values}, changes.prefix)
        found.append((patterns[_pattern(rule)], None if rule.startswith(EXCLUDES) else _read_scheme(changed)))
    return GptqFormat(_read_scheme(section), tuple(found))


def _pattern(rule: str) -> str:
    return rule[2:] if rule.startswith((EXCLUDES, CHANGES)) else rule


def _read_scheme(section: ConfigFile) -> GptqScheme:
    bits = section.integer("bits", 2, 8)
    if bits not in BITS:
        section.refuse("bits", f"only {', '.join(map(str, BITS))} are supported")
    group = section.integer("group_size", -1, 1 << 20)
    if group == 0:
        section.refuse("group_size", "must be -1, for one group, or positive")
    versions = {section.text(name): name for name in ("checkpoint_format", "format") if section.has(name)}
    for version, name in versions.items():
        if version not in VERSIONS:
            section.refuse(name, f"only {' and '.join(VERSIONS)} are supported", "Convert the checkpoint to one of them.")
    if len(versions) > 1:
        section.refuse("format", "contradicts checkpoint_format", "Leave the wrong one out.")
    if section.flag("is_marlin_format", False):
        section.refuse("is_marlin_format", "Marlin's layout is not supported", "Use the checkpoint that it was converted from.")
    return GptqScheme(
        bits=bits,
        group=group,
        added=next((VERSIONS[version] for version in versions), None),
        is_symmetric=section.flag("sym", False) if section.has("sym") else None,
        is_ordered=not section.flag("desc_act", True),
    )
