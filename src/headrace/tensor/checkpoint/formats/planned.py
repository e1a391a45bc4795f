"""Bytes that a quantized checkpoint's weights will have, by the configuration alone: for a plan that is made before the files are there.

Which linears are left plain is known here by the lists of the formats' writers, and by what all of them leave plain: norms, biases,
routers, the embedding, and the head unless it is named.
"""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from math import prod

from headrace.tensor.checkpoint.config import ConfigFile
from headrace.tensor.checkpoint.formats.format import WeightFormat
from headrace.tensor.checkpoint.formats.patterns import Name, read_patterns

LISTS = ("modules_to_not_convert", "ignored_layers", "ignore", "exclude_modules")
"""Linears which are left plain: by name, by a part of a name, by a glob pattern, or by "re:" and a regular expression."""
PATTERN = "re:"


def planned_bytes(section: ConfigFile, stored: WeightFormat, shapes: Mapping[str, tuple[int, ...]], plain_bytes: float) -> dict[str, float]:
    """section: what `stored` was read from; plain_bytes: of one weight that is not quantized.

    Raises CheckpointError for a list of names that cannot be read.
    """
    fields = section.section("quantization") if section.has("quantization") else section
    left = [entry for name in LISTS for entry in fields.items(name) if isinstance(entry, str)]
    patterns = read_patterns(section.file, [entry.removeprefix(PATTERN) for entry in left if entry.startswith(PATTERN)])

    def is_left(stem: str) -> bool:
        name = Name(stem)
        return any(
            patterns[entry.removeprefix(PATTERN)].matches(name)
            if entry.startswith(PATTERN)
            else fnmatchcase(stem, entry) or f".{entry}." in f".{stem}."
            for entry in left
        )

    has_head = stored.method == "compressed-tensors" or fields.values.get("lm_head") is True
    found: dict[str, float] = {}
    for name, shape in shapes.items():
        stem = name.removesuffix(".weight")
        is_linear = len(shape) == 2 and (".layers." in name or (has_head and stem == "lm_head")) and not stem.endswith(".gate")
        size = stored.stored_bytes(stem, (shape[0], shape[1])) if is_linear and not is_left(stem) else None
        found[name] = prod(shape) * plain_bytes if size is None else size
    return found
