"""From what the user gives to requests: read, checked, and refused with the way out if they could never run."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence, Set
from hashlib import sha256
from typing import TYPE_CHECKING, Any

from minivllm.checks import is_finite, is_unicode, is_whole
from minivllm.config import SchedulerConfig
from minivllm.model_config import GenerationConfig
from minivllm.request import Request
from minivllm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from minivllm.loading.tokenizer import Tokenizer

Prompt = str | Sequence[int] | Mapping[str, Any]


class InputProcessor:
    """Turns one call of `add_request` into the requests that the scheduler gets: one for each of the `n` sequences."""

    def __init__(
        self,
        config: SchedulerConfig,
        vocab_size: int,
        tokenizer: Tokenizer | None,
        generation_config: GenerationConfig,
        seed: int,
        max_logprobs: int,
    ) -> None:
        self.max_logprobs = max_logprobs
        self.max_model_len = config.max_model_len
        self.policy = config.policy
        self.vocab_size = vocab_size
        self.tokenizer = tokenizer
        self.generation_config = generation_config
        self.seed = seed
        self._unseeded = itertools.count(1)

    def process(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | None,
        priority: int,
        arrival_time: float,
    ) -> tuple[str | None, list[Request]]:
        """(the prompt's text if it came as text, the requests). ValueError for what could never run."""
        params = self.default_sampling_params() if params is None else params
        if not isinstance(params, SamplingParams):
            raise ValueError(f"sampling_params must be a SamplingParams, got {type(params).__name__}.")
        params.check()  # it may have been changed since it was made
        if not is_finite(arrival_time):
            raise ValueError(f"arrival_time must be a number of seconds on the engine's clock, got {arrival_time!r}.")
        text, token_ids, cache_salt = self._read_prompt(prompt)
        self._check(token_ids, params, priority)
        eos_token_id, stop_token_ids = self._end_tokens(params)
        end_token_ids = [*stop_token_ids, *self.generation_config.eos_token_ids[:1]]
        self._check_something_is_left(params, end_token_ids)
        requests = [
            Request(
                request_id if params.n == 1 else f"{index}_{request_id}",
                token_ids,
                params.with_seed(self._seed_of(params, index)),
                arrival_time=arrival_time,
                priority=priority,
                cache_salt=cache_salt,
                eos_token_id=eos_token_id,
                stop_token_ids=stop_token_ids,
                end_token_ids=end_token_ids,
                max_tokens=self.max_model_len - len(token_ids) if params.max_tokens is None else params.max_tokens,
            )
            for index in range(params.n)
        ]
        return text, requests

    def default_sampling_params(self) -> SamplingParams:
        """vLLM's defaults, overridden by what the model's generation_config.json sets."""
        config = self.generation_config
        own: dict[str, Any] = {
            "temperature": config.temperature,
            "top_k": config.top_k,
            "top_p": config.top_p,
            "min_p": config.min_p,
            "repetition_penalty": config.repetition_penalty,
            "max_tokens": config.max_new_tokens,
        }
        return SamplingParams(**{name: value for name, value in own.items() if value is not None})

    def _read_prompt(self, prompt: Prompt) -> tuple[str | None, list[int], str | None]:
        """(text or None, token ids, cache salt or None)."""
        text: str | None = None
        salt: str | None = None
        token_ids: Any = prompt
        if isinstance(prompt, Mapping):
            unknown = set(prompt) - {"prompt", "prompt_token_ids", "cache_salt"}
            if unknown or not ({"prompt", "prompt_token_ids"} & set(prompt)):
                raise ValueError(
                    f"a prompt dict needs 'prompt' or 'prompt_token_ids', and may have 'cache_salt'; "
                    f"got {sorted(map(str, prompt))}."
                )
            salt = prompt.get("cache_salt")
            if salt is not None and not (isinstance(salt, str) and salt and is_unicode(salt)):
                raise ValueError(f"cache_salt must be a non-empty string of valid Unicode, got {salt!r}.")
            text = prompt.get("prompt")
            if text is not None and not isinstance(text, str):
                raise ValueError(
                    f"'prompt' must be text, got {type(text).__name__}; use 'prompt_token_ids' for token ids."
                )
            token_ids = prompt.get("prompt_token_ids")
            token_ids = text if token_ids is None else token_ids
        if isinstance(token_ids, str):
            text = token_ids
            if self.tokenizer is None:
                raise ValueError("this model has no tokenizer, so a prompt must be token ids, not text.")
            token_ids = self.tokenizer.encode(text, max_tokens=self.max_model_len)
        if isinstance(token_ids, (bytes, bytearray, Set, Mapping)) or not isinstance(token_ids, Iterable):
            raise _no_prompt(prompt)
        try:
            token_ids = list(token_ids)
        except TypeError:  # a tensor without dimensions says that it can be iterated over
            raise _no_prompt(prompt) from None
        return text, [_as_token_id(t, self.vocab_size) for t in token_ids], salt

    def _check(self, token_ids: Sequence[int], params: SamplingParams, priority: int) -> None:
        max_model_len = self.max_model_len
        if not token_ids:
            raise ValueError("the prompt is empty; it needs at least one token.")
        if len(token_ids) + 1 > max_model_len:
            raise ValueError(
                f"the prompt has {len(token_ids):,} tokens, but max_model_len is {max_model_len:,}, and at least one "
                f"place is needed for the output. Shorten the prompt to {max_model_len - 1:,} tokens, or raise "
                f"max_model_len."
            )
        if not is_whole(priority):
            raise ValueError(f"priority must be a whole number (smaller goes first), got {priority!r}.")
        if priority != 0 and self.policy != "priority":
            raise ValueError(
                f"priority={priority} has no effect under scheduling_policy='fcfs'. "
                f"Make the engine with scheduling_policy='priority'."
            )
        for name, ids in (("stop_token_ids", params.stop_token_ids or ()), ("logit_bias", params.logit_bias or ())):
            for token_id in ids:
                if not 0 <= token_id < self.vocab_size:
                    raise ValueError(
                        f"{name} names token {token_id}; the vocabulary has ids 0 to {self.vocab_size - 1}."
                    )
        for name in ("logprobs", "prompt_logprobs"):
            count = getattr(params, name)
            if count is None:
                continue
            if count > self.vocab_size:
                raise ValueError(
                    f"{name}={count} is more than the vocabulary's {self.vocab_size} tokens; -1 means all of them."
                )
            wanted = self.vocab_size if count == -1 else count
            if self.max_logprobs != -1 and wanted > self.max_logprobs:
                raise ValueError(
                    f"{name}={count} asks for {wanted:,} tokens at each position; this engine reports at most "
                    f"{self.max_logprobs}. Make it with max_logprobs={wanted}, or max_logprobs=-1 for no limit."
                )
        if params.stop and self.tokenizer is None:
            raise ValueError("stop strings need text, and this model has no tokenizer. Use stop_token_ids.")

    def _check_something_is_left(self, params: SamplingParams, end_token_ids: Sequence[int]) -> None:
        banned = len(set(end_token_ids)) if params.min_tokens > 0 else 0
        if banned >= self.vocab_size:
            raise ValueError(
                f"stop_token_ids and EOS name all {self.vocab_size:,} tokens of the vocabulary, and min_tokens="
                f"{params.min_tokens} forbids them: no token is left to sample. Name fewer, or set min_tokens=0."
            )

    def _end_tokens(self, params: SamplingParams) -> tuple[int | None, list[int]]:
        """(the EOS id, the stop token ids): a model may have several EOS ids; all but the first act as stop tokens."""
        eos_ids = () if params.ignore_eos else self.generation_config.eos_token_ids
        return (eos_ids[0] if eos_ids else None), [*(params.stop_token_ids or ()), *eos_ids[1:]]

    def _seed_of(self, params: SamplingParams, index: int) -> int:
        if params.seed is not None:
            return params.seed + index
        # Every request without a seed gets one of its own from the engine's, so that a run can be repeated.
        return int.from_bytes(sha256(f"{self.seed}/{next(self._unseeded)}".encode()).digest()[:8], "little")


def _no_prompt(prompt: object) -> ValueError:
    kind = type(prompt).__name__
    return ValueError(f"a prompt is text, a list of token ids, or a dict of either; got {kind}.")


def _as_token_id(value: Any, vocab_size: int) -> int:
    try:
        token_id = value.__index__()  # ints, and integers of numpy and torch
    except (AttributeError, TypeError):
        raise ValueError(f"a prompt of token ids must hold whole numbers, got {value!r}.") from None
    if isinstance(value, bool) or not 0 <= token_id < vocab_size:
        raise ValueError(f"token id {value!r} is out of range: the vocabulary has ids 0 to {vocab_size - 1}.")
    return token_id
