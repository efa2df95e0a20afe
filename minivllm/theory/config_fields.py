"""One field of a config.json: the value, checked, or one line that says which key holds what instead of what.

A key with null counts as absent, as in transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from minivllm.checks import is_whole

Config = Mapping[str, Any]
LARGEST, MAX_LAYERS = 2**31 - 1, 1000


def refuse(config: Config, key: str, expected: str) -> ValueError:
    """The error that says what `key` is, and should be."""
    found = f"{key!r} is {_shorten(config[key])}" if key in config else f"{key!r} is missing"
    return ValueError(f"{found}; expected {expected}")


def whole(config: Config, *keys: str, default: int | None = None, low: int = 0) -> int:
    """A size: the first of `keys` that the config has. Without a `default` one of them must be there."""
    for key in keys:
        value = config.get(key)
        if value is not None or (default is None and len(keys) == 1):
            high = MAX_LAYERS if "layer" in key else LARGEST
            if not is_whole(value) or not low <= value <= high:
                raise refuse(config, key, f"a whole number from {low} to {high:,}")
            return int(value)
    if default is None:
        raise ValueError(f"the config has no {' or '.join(keys)}; if its model type has a default, write it in")
    return default


def flag(config: Config, key: str, default: bool = False) -> bool:
    value = config.get(key)
    if value is not None and not isinstance(value, bool):
        raise refuse(config, key, "true or false")
    return default if value is None else value


def names(config: Config, key: str) -> tuple[str, ...]:
    """A list of names, or none."""
    value = config.get(key)
    is_list = isinstance(value, list | tuple) and all(isinstance(name, str) for name in value)
    if value is not None and not is_list:
        raise refuse(config, key, "a list of names")
    return tuple(value or ())


def text(config: Config, key: str) -> str:
    if not isinstance(config.get(key), str):
        raise refuse(config, key, "a name")
    return config[key]


def _shorten(value: object, limit: int = 100) -> str:
    shown = repr(value)
    return shown if len(shown) <= limit else f"{shown[:limit]}..."
