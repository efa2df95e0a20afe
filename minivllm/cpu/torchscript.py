"""Run PyTorch code without Python between its operations.

An operation on a few rows takes a few microseconds, and as much again goes into the Python around it. TorchScript runs
a recorded sequence of operations without. PyTorch has announced its end in favour of torch.compile, which needs a C++
compiler and a minute; so everything here also works without it, only slower.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def script(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`function`, compiled by TorchScript if it can be; results are the same."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return torch.jit.script(function)
    except Exception:  # whatever a PyTorch or Python that it does not fit raises: the function works without it
        return function


def trace(function: Callable[..., Any], *inputs: Tensor) -> Callable[..., Any]:
    """What `function` does to `inputs`, recorded: for any sizes, but always the same operations.

    Raises what TorchScript raises where that cannot be done.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.jit.trace(function, inputs, check_trace=False)
