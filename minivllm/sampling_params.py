"""How to choose the next token. Names, defaults and ranges are those of vLLM 0.30.0."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from minivllm.checks import check_seed, is_finite, is_whole, require_bool

# vLLM treats smaller temperatures as greedy, and lifts those just above it: logits divided by less overflow.
GREEDY_BELOW = 1e-5
MIN_TEMPERATURE = 1e-2
MAX_N = 16384  # vLLM's default limit
# Beyond these a float32 logit overflows, or vanishes beside the others.
MAX_BIAS = 1e6
REPETITION_RANGE = (1e-6, 1e6)


@dataclass(kw_only=True)
class SamplingParams:
    """Sampling parameters of one request; ValueError on a value that cannot be meant.

    n: sequences to generate; each is a request of its own (seed + index).
    temperature: 0 is greedy. top_k: 0 or -1 is off. top_p: 1.0 is off. min_p: 0.0 is off.
    seed: fixes the random numbers, which depend on nothing but it and the position.
    max_tokens: None means as many as max_model_len allows. min_tokens: EOS and stop tokens are masked until then.
    stop: strings that end the text (and are cut from it unless `include_stop_str_in_output`).
    logprobs, prompt_logprobs: how many of the likeliest tokens to report per position (-1: all of them).
    presence_penalty, frequency_penalty look at the output; repetition_penalty at prompt and output.
    logit_bias: token id -> number added to its logit.
    """

    n: int = 1
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] | None = None

    _checked = None  # the fields as they were when they were checked

    def __post_init__(self) -> None:
        self.stop = [self.stop] if isinstance(self.stop, str) else _as_list("stop", self.stop)
        self.stop_token_ids = _as_list("stop_token_ids", self.stop_token_ids)
        if self.logit_bias is not None and not isinstance(self.logit_bias, Mapping):
            raise ValueError(f"logit_bias must be a dict {{token id: number}}, got {self.logit_bias!r}.")
        self.logit_bias = dict(self.logit_bias or {})
        self.check()
        if 0 < self.temperature < GREEDY_BELOW:
            self.temperature = 0.0
        elif GREEDY_BELOW <= self.temperature < MIN_TEMPERATURE:
            self.temperature = MIN_TEMPERATURE
        self._checked = {**copy.deepcopy(vars(self)), "_checked": None}

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def has_penalties(self) -> bool:
        return self.presence_penalty != 0.0 or self.frequency_penalty != 0.0 or self.repetition_penalty != 1.0

    def check(self) -> None:
        """Raise ValueError if a value cannot be meant. Runs on construction, and again when a request is added, in case
        that somebody has changed a field meanwhile."""
        if self._checked is not None and {**vars(self), "_checked": None} == self._checked:
            return
        for name in ("stop", "stop_token_ids"):  # lists since the construction, unless somebody has changed them
            if not isinstance(getattr(self, name), list):
                raise ValueError(f"{name} must be a list, got {getattr(self, name)!r}.")
        if not isinstance(self.logit_bias, Mapping):
            raise ValueError(f"logit_bias must be a dict {{token id: number}}, got {self.logit_bias!r}.")
        for name, minimum in {"n": 1, "top_k": -1, "min_tokens": 0}.items():
            _check_int(name, getattr(self, name), minimum)
        for name, minimum in {"max_tokens": 1, "logprobs": -1, "prompt_logprobs": -1}.items():
            if getattr(self, name) is not None:
                _check_int(name, getattr(self, name), minimum)
        if self.n > MAX_N:
            raise ValueError(f"n must be at most {MAX_N:,}, got {self.n:,}.")
        if self.seed is not None:
            check_seed(self.seed, "a whole number or None")
        for name in ("ignore_eos", "skip_special_tokens", "include_stop_str_in_output"):
            require_bool(name, getattr(self, name))

        _check_range("temperature", self.temperature, 0.0, 2.0)
        _check_range("top_p", self.top_p, 0.0, 1.0, open_below=True)
        _check_range("min_p", self.min_p, 0.0, 1.0)
        _check_range("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _check_range("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _check_range("repetition_penalty", self.repetition_penalty, *REPETITION_RANGE)

        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens ({self.min_tokens}) must not exceed max_tokens ({self.max_tokens}).")
        if self.n > 1 and self.temperature < GREEDY_BELOW:
            raise ValueError(
                f"n={self.n} with temperature 0 would give {self.n} equal answers. Use n=1, or a temperature above 0."
            )
        if not all(isinstance(s, str) and s for s in self.stop or ()):
            raise ValueError(f"stop must hold non-empty strings, got {self.stop!r}.")
        if not all(is_whole(t) for t in self.stop_token_ids or ()):
            raise ValueError(f"stop_token_ids must hold whole numbers, got {self.stop_token_ids!r}.")
        for token_id, bias in (self.logit_bias or {}).items():
            if not is_whole(token_id):
                raise ValueError(f"logit_bias keys must be token ids (whole numbers), got {token_id!r}.")
            if not is_finite(bias) or abs(bias) > MAX_BIAS:
                raise ValueError(
                    f"logit_bias of token {token_id} must be a finite number within ±{MAX_BIAS:,.0f}, got {bias!r}."
                )

    def with_seed(self, seed: int) -> SamplingParams:
        """These, for one of the `n` sequences."""
        child = copy.copy(self)
        child.n, child.seed = 1, seed
        return child


def _as_list(name: str, values: object) -> list:
    if values is None:
        return []
    if isinstance(values, (str, bytes)) or not isinstance(values, Iterable):
        raise ValueError(f"{name} must be a list, got {values!r}.")
    return list(values)


def _check_int(name: str, value: object, minimum: int) -> None:
    if not is_whole(value) or value < minimum:
        off = {"top_k": " (0 or -1: off)", "logprobs": " (-1: all)", "prompt_logprobs": " (-1: all)"}.get(name, "")
        raise ValueError(f"{name} must be a whole number of at least {minimum}{off}, got {value!r}.")


def _check_range(name: str, value: object, low: float, high: float, *, open_below: bool = False) -> None:
    if not is_finite(value) or value < low or value > high or (open_below and value == low):
        bounds = f"{'(' if open_below else '['}{low:g}, {high:g}]"
        raise ValueError(f"{name} must be a finite number in {bounds}, got {value!r}.")
