"""Configuration of quantized weights in a file beside config.json, as older exporters wrote it."""

from __future__ import annotations

import os
from pathlib import Path

from headrace.tensor.checkpoint.config import ConfigFile
from headrace.tensor.checkpoint.files import read_json
from headrace.tensor.checkpoint.formats.names import SEPARATE


def read_separate(config: ConfigFile) -> ConfigFile | None:
    """What `quantization_config` would say, with its `quant_method`; None where no such file is. Raises CheckpointError naming the file.

    A file that names no method is of its writer's format; AutoAWQ's fields may stand in AutoGPTQ's file, as vLLM allows. A GPTQ file that
    names no version is of version 1: writers that know version 2 name it there.
    """
    folder = Path(config.file).parent
    name = next((name for name in SEPARATE if os.path.lexists(folder / name)), None)
    if name is None:
        return None
    values = read_json(folder, name)
    method = values.get("quant_method") or ("awq" if "w_bit" in values else SEPARATE[name])
    version = {"checkpoint_format": "gptq"} if method == "gptq" and "format" not in values else {}
    return ConfigFile(str(folder / name), {**version, **values, "quant_method": method})
