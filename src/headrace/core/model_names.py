"""Rules for the names that clients may ask for."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence

from headrace.core.errors import ConfigError

MODEL_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/:@-]{0,255}")


def name_of_file(name: str) -> str:
    """A folder's or file's name as a model name: "My Model" -> "My-Model", "Mod\u00e8le" -> "Modele"; "model" where nothing is left."""
    if MODEL_NAME.fullmatch(name) is not None:
        return name
    letters = "".join(each for each in unicodedata.normalize("NFKD", name) if not unicodedata.combining(each))
    return re.sub(r"[^A-Za-z0-9._-]+", "-", letters).strip("._-")[:256] or "model"


def check_model_names(where: str, name: str, aliases: Sequence[str], taken: set[str]) -> None:
    """Raises ConfigError naming the path of a name that is invalid or taken.

    where  path of the model's section
    """
    for key, each in [("name", name), *((f"aliases[{index}]", alias) for index, alias in enumerate(aliases))]:
        check_free_name(f"{where}.{key}", each, taken)


def check_free_name(where: str, name: str, taken: set[str]) -> None:
    """Raises ConfigError."""
    if MODEL_NAME.fullmatch(name) is None:
        raise ConfigError(where, f"{name!r} is not a model name", "Letters, digits and ._/:@- only, at most 256.")
    if name in taken:
        raise ConfigError(where, f"{name!r} is served twice", "Write another name for one of the models.")
    taken.add(name)
