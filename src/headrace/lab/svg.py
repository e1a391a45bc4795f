"""Draws plans, simulations and sweeps as SVG files with matplotlib, which is an optional dependency."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.core.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.figure import Figure


TITLE_CHARS = 100


def title_of(text: str) -> str:
    return textwrap.fill(text, TITLE_CHARS)


def label_log_axis(axis: Any) -> None:
    """Labels with round numbers that leave each other room; the data is drawn."""
    from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter

    low, high = axis.get_view_interval()
    few = (1.0, 2.0, 5.0) if high < 1000 * low else (1.0,)
    axis.set_major_locator(LogLocator(subs=few) if high > 10 * low else MaxNLocator(5))
    axis.set_major_formatter("{x:g}")
    axis.set_minor_formatter(NullFormatter())


def find_matplotlib(flag: str) -> Any:
    """The module. Raises ConfigError without it, naming the flag that needs it."""
    try:
        import matplotlib
    except ModuleNotFoundError:
        raise ConfigError(flag, "needs matplotlib", "pip install 'headrace[plots]'.") from None
    return matplotlib


def write_svg(file: Path, draw: Callable[[Any], Figure], *, flag: str = "--plot") -> None:
    """Raises ConfigError, also without matplotlib."""
    matplotlib = find_matplotlib(flag)
    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "headrace"
    from matplotlib import pyplot

    figure = draw(pyplot)
    try:
        figure.savefig(file, format="svg", metadata={"Date": None})
    except OSError as error:
        raise ConfigError(flag, f"{file} cannot be written ({error.strerror})") from None
    finally:
        pyplot.close(figure)
