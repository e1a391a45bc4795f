"""Functions for `headrace agent --tool examples/weather.py`: hints and docstrings are all that a function needs."""

from __future__ import annotations

WEATHER = {"Paris": "rain, 14 degrees", "Rome": "sun, 24 degrees", "Oslo": "snow, -3 degrees"}


def get_weather(city: str) -> str:
    """The weather in a city now.

    Args:
        city: name of the city in English
    """
    return WEATHER[city]


def add(a: float, b: float) -> float:
    """The sum of two numbers."""
    return a + b
