"""`headrace models`: list the model folders and GGUF files of a folder, with the reason for each one that cannot be served."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer

from headrace.bundled import DEFAULT_MODEL, DRAFT_MODEL, bundled_names, bundled_path
from headrace.core.errors import CheckpointError, ConfigError
from headrace.core.model_names import name_of_file
from headrace.core.speculation import DRAFT_MODEL as DRAFT_METHOD
from headrace.tensor.checkpoint.gguf.paths import SUFFIX, is_first, is_gguf, model_name

_DRAFTS = {"method": DRAFT_METHOD, "model": DRAFT_MODEL}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRow:
    """weight_bytes: in `dtype`; problem: why the model cannot be served; empty where it can be served"""

    name: str
    folder: str
    architecture: str = ""
    num_parameters: int = 0
    max_model_len: int = 0
    dtype: str = ""
    weight_bytes: int = 0
    adapters: tuple[str, ...] = ()
    problem: str = ""


def models(
    folder: Annotated[
        Path | None, typer.Argument(help="A model folder, a .gguf file, or a folder of these; default: the bundled models.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable.")] = False,
) -> None:
    """List the bundled models, or the models of a folder."""
    names = sorted(bundled_names(), key=lambda name: name != DEFAULT_MODEL)
    bundled = [path for name in names if (path := bundled_path(name)) is not None]
    folders = bundled if folder is None else model_folders(folder)
    rows = [describe_folder(path) for path in folders]
    if as_json:
        print(json.dumps([asdict(row) for row in rows], indent=2))
        return
    for row in rows:
        print("\n".join(shown(row)))


def model_folders(folder: Path) -> list[Path]:
    """[folder] where `folder` is a model, else the models directly inside `folder`, sorted.

    A model is a folder with a config.json, or a .gguf file. Raises ConfigError when no model is found.
    """
    if (folder / "config.json").is_file() or (is_gguf(folder) and folder.is_file()):
        return [folder]
    paths = sorted(path.parent for path in folder.glob("*/config.json")) if folder.is_dir() else []
    paths += sorted(path for path in folder.glob(f"*{SUFFIX}") if is_first(path)) if folder.is_dir() else []
    if not paths:
        remedy = "A model is a .gguf file, or a folder that holds config.json, tokenizer.json and *.safetensors."
        raise ConfigError(str(folder), "no model folder", remedy)
    return paths


def describe_folder(folder: Path) -> ModelRow:
    from headrace.tensor.checkpoint.gguf.folder import make_folder
    from headrace.tensor.models import describe

    is_file = is_gguf(folder) and folder.is_file()
    name = name_of_file(model_name(folder) if is_file else folder.name)
    has_weights = is_file or any(folder.glob("*.safetensors"))
    adapters = adapter_names(folder)
    try:
        described = describe(make_folder(folder) if is_file else folder)
    except (CheckpointError, ConfigError) as error:
        return ModelRow(name=name, folder=str(folder), adapters=adapters, problem=str(error))
    return ModelRow(
        name=name,
        folder=str(folder),
        architecture=described.architecture,
        num_parameters=described.num_parameters,
        max_model_len=described.max_model_len,
        dtype=described.dtype_name,
        weight_bytes=described.resident_bytes,
        adapters=adapters,
        problem="" if has_weights else "no safetensors file; --load-format dummy serves random weights",
    )


def adapter_names(folder: Path) -> tuple[str, ...]:
    """Sorted names of PEFT adapters: those in `folder`, and those in the sibling folder `adapters` that name this base model."""
    inside = [*folder.glob("*/adapter_config.json"), *folder.glob("adapters/*/adapter_config.json")]
    beside = [path for path in folder.parent.glob("adapters/*/adapter_config.json") if _base_name(path) == folder.name]
    return tuple(sorted(path.parent.name for path in [*inside, *beside]))


def _base_name(adapter_config: Path) -> str:
    try:
        base = json.loads(adapter_config.read_bytes()).get("base_model_name_or_path")
    except (OSError, ValueError, AttributeError):
        return ""
    return str(base).rstrip("/").rpartition("/")[2]


def shown(row: ModelRow) -> list[str]:
    lines = [f"{row.name}  {row.folder}"]
    if row.architecture:
        size = f"{row.num_parameters / 1e6:,.1f} M parameters, {row.weight_bytes / 2**20:,.1f} MiB as {row.dtype}"
        lines.append(f"  {row.architecture}, {size}, context {row.max_model_len} tokens")
    if row.name == DRAFT_MODEL:
        lines.append(f"  drafts for {DEFAULT_MODEL}: --speculative-config '{json.dumps(_DRAFTS)}'; it is served as a model of its own too")
    if row.adapters:
        lines.append(f"  adapters: {', '.join(row.adapters)}")
    if row.problem:
        lines.append(f"  {row.problem}")
    return lines
