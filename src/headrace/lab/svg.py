"""Draws plans and simulations as SVG files with matplotlib, which is an optional dependency. Equal data gives equal files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.core.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def write_svg(file: Path, draw: Callable[[Any], Figure]) -> None:
    """Write the figure that `draw` makes; `draw` is called with pyplot. Raises ConfigError without matplotlib, or if the file cannot be
    written."""
    try:
        import matplotlib
    except ModuleNotFoundError:
        raise ConfigError("--plot", "needs matplotlib", "pip install 'headrace[plots]'.") from None
    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "headrace"
    from matplotlib import pyplot

    figure = draw(pyplot)
    try:
        figure.savefig(file, format="svg", metadata={"Date": None})
    except OSError as error:
        raise ConfigError("--plot", f"{file} cannot be written ({error.strerror})") from None
    finally:
        pyplot.close(figure)
