"""Is a value what it should be? Numbers of numpy count as numbers, True and False do not."""

from __future__ import annotations

import math
import numbers
from typing import TypeGuard


def is_whole(value: object) -> TypeGuard[int]:
    """Whether `value` is a whole number; numpy's count, True and False do not."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def is_finite(value: object) -> TypeGuard[float]:
    """Whether `value` is a finite number; numpy's count, True and False do not."""
    if not isinstance(value, numbers.Real) or isinstance(value, bool):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number beyond what a float holds
        return False


def is_unicode(text: str) -> bool:
    """Whether `text` can be encoded: a lone surrogate, which JSON can spell, cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def require_int(name: str, value: object, minimum: int) -> None:
    """Raise ValueError unless `value` is a whole number of at least `minimum`."""
    if not is_whole(value) or value < minimum:
        raise ValueError(f"{name} must be a whole number of at least {minimum}, got {value!r}.")


def require_bool(name: str, value: object) -> None:
    """Raise ValueError unless `value` is True or False: "no" would count as true."""
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be True or False, got {value!r}.")


def check_seed(value: object, kind: str = "a whole number") -> None:
    """Raise ValueError unless `value` is a whole number of at most 64 bits. (Of thousands of digits, it could not even
    be printed.)"""
    if not is_whole(value):
        raise ValueError(f"seed must be {kind}, got {value!r}.")
    if abs(value) >= 2**64:
        raise ValueError(f"seed must be a whole number of at most 64 bits, got one of {int(value).bit_length()} bits.")
