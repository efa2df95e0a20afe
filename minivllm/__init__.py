"""minivllm: a small inference engine shaped like vLLM V1, for reading and for running.

    from minivllm import LLM, SamplingParams
    llm = LLM("tiny")
    print(llm.generate("Once upon a time", SamplingParams(max_tokens=20))[0].outputs[0].text)

Names load on first use, so that `import minivllm` and everything in `minivllm.core` need the standard library only.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from minivllm.cpu.threads import limit_spinning

if TYPE_CHECKING:
    from minivllm.engine.llm import LLM
    from minivllm.engine.llm_engine import LLMEngine
    from minivllm.engine.outputs import CompletionOutput, RequestOutput
    from minivllm.sampling_params import SamplingParams

__version__ = "0.1.0"

limit_spinning()  # before torch starts its threads

_HOME = {
    "LLM": "minivllm.engine.llm",
    "LLMEngine": "minivllm.engine.llm_engine",
    "CompletionOutput": "minivllm.engine.outputs",
    "RequestOutput": "minivllm.engine.outputs",
    "SamplingParams": "minivllm.sampling_params",
}

__all__ = ["LLM", "CompletionOutput", "LLMEngine", "RequestOutput", "SamplingParams"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'minivllm' has no attribute {name!r}")
    try:
        return getattr(importlib.import_module(_HOME[name]), name)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] == "minivllm":
            raise
        message = f"{name} needs {error.name}, which is not installed: pip install 'inside-llm-inference[engine]'"
        raise ModuleNotFoundError(message, name=error.name) from None
