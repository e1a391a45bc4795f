"""Rules for the names that clients may ask for: which characters, and each name once in a site."""

from __future__ import annotations

import re
from collections.abc import Sequence

from headrace.core.errors import ConfigError

MODEL_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/:@-]{0,255}")


def check_model_names(where: str, name: str, aliases: Sequence[str], taken: set[str]) -> None:
    """Check one model's names, and add them to `taken`, the names of the models before it.

    where  path of the model's section

    Raises ConfigError naming the path of a name that is invalid or taken.
    """
    for key, each in [("name", name), *((f"aliases[{index}]", alias) for index, alias in enumerate(aliases))]:
        if MODEL_NAME.fullmatch(each) is None:
            raise ConfigError(f"{where}.{key}", f"{each!r} is not a model name", "Letters, digits and ._/:@- only, at most 256.")
        if each in taken:
            raise ConfigError(f"{where}.{key}", f"{each!r} is served twice")
        taken.add(each)
