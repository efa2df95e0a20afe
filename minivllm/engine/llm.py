"""The offline API: a list of prompts in, a list of outputs out."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from tqdm.auto import tqdm

from minivllm.checks import is_whole
from minivllm.core.events import EventLog
from minivllm.engine.args import EngineArgs, build_engine
from minivllm.engine.input_processor import Prompt
from minivllm.engine.outputs import RequestOutput
from minivllm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from minivllm.executor.torch_executor import TorchExecutor

logger = logging.getLogger(__name__)


class LLM:
    """A model, a paged KV cache and a scheduler, ready to generate.

    `model` and all other settings are those of `EngineArgs`: LLM("tiny", block_size=8, max_num_seqs=4).
    Raises ValueError for settings that cannot work and for models that are not there or damaged.
    """

    def __init__(self, model: str | Path = "tiny", **settings: Any) -> None:
        args = EngineArgs(model=model, **settings)
        self.llm_engine = build_engine(args)
        self.executor = cast("TorchExecutor", self.llm_engine.executor)
        self.model_config = self.executor.model.config
        self.scheduler_config = self.llm_engine.scheduler.config
        self.cache_config = self.llm_engine.scheduler.kv_cache_manager.config
        self.tokenizer = self.llm_engine.output_processor.tokenizer
        self._next_id = 0
        self._lock = threading.RLock()
        self._own: set[str] = set()  # requests of `generate` calls that have not returned
        self.capacity_report = self.cache_config.capacity_report(
            self.scheduler_config.max_model_len, self.executor.device.type
        )
        logger.info(self.capacity_report)

    @property
    def model(self) -> torch.nn.Module:
        """A `minivllm.models.causal_lm.CausalLM`, as it runs."""
        return self.executor.model

    @property
    def event_log(self) -> EventLog:
        """One record per engine step since the start."""
        return self.llm_engine.event_log

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: Sequence[int] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Generate for every prompt, and return the outputs in the prompts' order.

        prompts: one or a list of: text, token ids, {"prompt": ...} or {"prompt_token_ids": ...}, the dicts
        optionally with "cache_salt". sampling_params: one for all, or one per prompt; None: the model's defaults.
        priority: one per prompt, smaller goes first (scheduling_policy="priority" only).
        Raises ValueError if any prompt can never run; none runs then. Ctrl-C, or an error in a forward pass, aborts
        the requests of this call and leaves the engine usable. Calls from several threads wait for each other.
        """
        each: list[Any] = [prompts] if _is_one_prompt(prompts) else list(prompts)
        params = _one_per_prompt("sampling_params", sampling_params, len(each), SamplingParams)
        priorities = _one_per_prompt("priority", priority, len(each), ()) if priority is not None else [0] * len(each)

        engine = self.llm_engine
        with self._lock:
            self._forget(self._own)  # of a call that was interrupted, and whose cleaning up was interrupted as well
            request_ids = [self._new_id() for _ in each]
            self._own.update(request_ids)
            try:
                for request_id, prompt, param, prio in zip(request_ids, each, params, priorities, strict=True):
                    engine.add_request(request_id, prompt, param, priority=prio, output_kind="taken")
                outputs = {output.request_id: output for output in self._run(set(request_ids), use_tqdm)}
            except BaseException:
                self._forget(request_ids)
                raise
            self._own.clear()
        return [outputs[request_id] for request_id in request_ids]

    def _forget(self, request_ids: Iterable[str]) -> None:
        """Abort requests whose outputs nobody will take."""
        request_ids = list(request_ids)
        if request_ids:
            self.llm_engine.abort_request(request_ids)
            self.llm_engine.take(request_ids)
            self._own.difference_update(request_ids)

    def _new_id(self) -> str:
        """The next number that no request of the engine has as its id."""
        while self.llm_engine.has_request(request_id := str(self._next_id)):
            self._next_id += 1
        self._next_id += 1
        return request_id

    def _run(self, unfinished: set[str], use_tqdm: bool) -> Iterator[RequestOutput]:
        """Step until all of `unfinished` are done; yields their outputs as they finish."""
        engine = self.llm_engine
        start, shown, before = time.monotonic(), 0.0, engine.num_generation_tokens
        use_tqdm = use_tqdm and sys.stderr is not None  # pythonw and services have none
        with tqdm(total=len(unfinished), desc="Generating", unit="req", disable=not use_tqdm) as bar:
            while unfinished:
                engine.advance()
                for output in engine.take(unfinished):
                    unfinished.discard(output.request_id)
                    bar.update()
                    yield output
                elapsed = time.monotonic() - start
                # Redrawing at every step would cost more than a step of a small model.
                if use_tqdm and (elapsed - shown > 0.2 or not unfinished):
                    shown = elapsed
                    bar.set_postfix_str(f"{(engine.num_generation_tokens - before) / elapsed:.1f} tokens/s")

    def chat(
        self,
        messages: Sequence[Mapping[str, str]] | Sequence[Sequence[Mapping[str, str]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        add_generation_prompt: bool = True,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Generate an answer to one conversation, or to each of a list of them, by the model's chat template.

        A conversation is a list of {"role": ..., "content": ...}. ValueError if the model has no template.
        """
        if self.tokenizer is None:
            raise ValueError("this model has no tokenizer, so it cannot chat; use generate with token ids.")
        conversations = _read_conversations(messages)
        texts = [self.tokenizer.apply_chat_template(c, add_generation_prompt) for c in conversations]
        # The template has written the special tokens; adding them again would double the first.
        options: dict[str, Any] = {"add_special_tokens": False, "max_tokens": self.scheduler_config.max_model_len}
        prompts = [{"prompt": text, "prompt_token_ids": self.tokenizer.encode(text, **options)} for text in texts]
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm)


def _read_conversations(messages: object) -> list[list[Mapping]]:
    """A list of conversations, from one or several."""
    if isinstance(messages, Sequence) and not isinstance(messages, str):
        conversations = [messages] if messages and isinstance(messages[0], Mapping) else messages
        if all(_is_conversation(conversation) for conversation in conversations):
            return list(conversations)
    raise ValueError(
        f"chat takes a conversation or a list of them; a conversation is a list of dicts with 'role' and 'content', "
        f"got {messages!r:.80}."
    )


def _is_conversation(value: object) -> bool:
    return (
        isinstance(value, Sequence)
        and bool(value)
        and all(isinstance(message, Mapping) and "role" in message for message in value)
    )


def _is_one_prompt(prompts: object) -> bool:
    if isinstance(prompts, (str, Mapping)):
        return True
    if not isinstance(prompts, Sequence):
        raise ValueError(f"prompts must be a prompt or a list of prompts, got {type(prompts).__name__}.")
    return bool(prompts) and is_whole(prompts[0])


def _one_per_prompt(name: str, values: object, num_prompts: int, single: type | tuple) -> list:
    if values is None or isinstance(values, single):
        return [values] * num_prompts
    if not isinstance(values, Iterable):
        raise ValueError(f"{name} must be a list with one entry per prompt, got {values!r}.")
    values = list(values)
    if len(values) != num_prompts:
        raise ValueError(
            f"{name} has {len(values)} entries for {num_prompts} prompts; give one for all, or one for each."
        )
    return values
