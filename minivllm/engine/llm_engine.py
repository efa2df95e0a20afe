"""The step loop: requests in, tokens out, one step after another."""

from __future__ import annotations

import contextlib
import dataclasses
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from hashlib import sha256
from typing import TYPE_CHECKING, Any

from minivllm.core.events import EventLog, StepEvent
from minivllm.core.scheduler import Scheduler, SchedulerOutput
from minivllm.engine.outputs import CompletionOutput, RequestMetrics, RequestOutput
from minivllm.executor.base import Executor, ModelOutput, PositionLogprobs
from minivllm.model_config import GenerationConfig
from minivllm.request import Request, RequestStatus
from minivllm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from minivllm.models.tokenizer import IncrementalDetokenizer, Tokenizer

Prompt = str | Sequence[int] | Mapping[str, Any]


class _Sequence:
    """One running sequence on the caller's side: its request, and the text that its tokens have become."""

    def __init__(
        self, request: Request, index: int, parent: _Parent, detokenizer: IncrementalDetokenizer | None
    ) -> None:
        self.request = request
        self.index = index
        self.parent = parent
        self.detokenizer = detokenizer
        self.text = ""
        self.logprobs: list[PositionLogprobs] | None = [] if request.sampling_params.logprobs is not None else None

    def append(self, token_id: int) -> str | None:
        """Take the next token into the text; the stop string that it completes, if any."""
        params = self.request.sampling_params
        # The token that ended the sequence (EOS or a stop token) is not part of its text.
        ended_by_token = self.request.status == RequestStatus.FINISHED_STOPPED and not params.include_stop_str_in_output
        if self.detokenizer is None:
            return None
        old_length = len(self.text)
        if not ended_by_token:
            self.text += self.detokenizer.append(token_id)
        if self.request.is_finished:
            self.text += self.detokenizer.finish()
        if self.request.num_output_tokens <= params.min_tokens:
            return None
        stop = first_stop_string(self.text, old_length, params.stop)
        if stop is None:
            return None
        text, end = stop
        self.text = self.text[: end if params.include_stop_str_in_output else end - len(text)]
        return text

    @property
    def settled_text(self) -> str:
        """The text that no stop string to come can take back."""
        params = self.request.sampling_params
        if self.request.is_finished or not params.stop or params.include_stop_str_in_output:
            return self.text
        held_back = max(len(stop) for stop in params.stop) - 1
        return self.text[: max(len(self.text) - held_back, 0)]

    def output(self) -> CompletionOutput:
        return CompletionOutput(
            index=self.index,
            text=self.settled_text,
            token_ids=self.request.output_token_ids,
            logprobs=None if self.logprobs is None else list(self.logprobs),
            finish_reason=self.request.finish_reason,
            stop_reason=self.request.stop_reason,
        )


class _Parent:
    """What the caller knows as one request: `n` sequences with one prompt."""

    def __init__(self, request_id: str, prompt: str | None, metrics: RequestMetrics, stream: bool) -> None:
        self.request_id = request_id
        self.prompt = prompt
        self.metrics = metrics
        self.stream = stream
        self.sequences: list[_Sequence] = []
        self.prompt_logprobs: dict[int, PositionLogprobs] = {}

    @property
    def finished(self) -> bool:
        return all(sequence.request.is_finished for sequence in self.sequences)

    def output(self) -> RequestOutput:
        first = self.sequences[0].request
        prompt_logprobs = None
        if first.sampling_params.prompt_logprobs is not None:
            # The first token has no logprob: nothing precedes it.
            prompt_logprobs = [self.prompt_logprobs.get(i) for i in range(first.num_prompt_tokens)]
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=first.all_token_ids[: first.num_prompt_tokens],
            outputs=[sequence.output() for sequence in self.sequences],
            finished=self.finished,
            num_cached_tokens=max(first.num_cached_tokens, 0),
            prompt_logprobs=prompt_logprobs,
            metrics=self.metrics,
        )


class LLMEngine:
    """Scheduler + executor + text. Knows no torch; reads time from `clock` (seconds, real or virtual).

    `add_request` refuses what can never run; `step` runs one step and returns what it changed.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        *,
        vocab_size: int,
        tokenizer: Tokenizer | None = None,
        generation_config: GenerationConfig | None = None,
        seed: int = 0,
        clock: Callable[[], float] = time.monotonic,
        event_log: EventLog | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.executor = executor
        self.vocab_size = vocab_size
        self.tokenizer = tokenizer
        self.generation_config = generation_config or GenerationConfig()
        self.seed = seed
        self.clock = clock
        self.event_log = EventLog() if event_log is None else event_log
        self._sequences: dict[str, _Sequence] = {}
        self._parents: dict[str, _Parent] = {}
        self._num_unseeded = 0
        self._num_streams = 0
        self.num_generation_tokens = 0  # sampled since the start

    # ---- requests come and go ----------------------------------------------------------------------------------

    def add_request(
        self,
        request_id: str,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        priority: int = 0,
        arrival_time: float | None = None,
        stream: bool = True,
    ) -> None:
        """Queue a request.

        prompt: text, token ids, or a dict with "prompt" or "prompt_token_ids" and optionally "cache_salt" (requests
        share cached blocks only with requests of the same salt).
        sampling_params: None means the model's own defaults.
        stream: return an output at every step, not only at the end.
        Raises ValueError for whatever could never run, with the numbers and the way out; nothing is queued then.
        """
        if request_id in self._parents:
            raise ValueError(f"request id {request_id!r} is in use; give each request an id of its own.")
        params = self.default_sampling_params() if sampling_params is None else sampling_params
        if not isinstance(params, SamplingParams):
            raise ValueError(f"sampling_params must be a SamplingParams, got {type(params).__name__}.")
        text, token_ids, cache_salt = self._read_prompt(prompt)
        self._check(token_ids, params, priority)
        arrival_time = self.clock() if arrival_time is None else arrival_time

        parent = _Parent(request_id, text, RequestMetrics(arrival_time), stream)
        eos, stop_token_ids = self._end_tokens(params)
        max_tokens = self.scheduler.max_model_len - len(token_ids) if params.max_tokens is None else params.max_tokens
        for index in range(params.n):
            request = Request(
                request_id if params.n == 1 else f"{index}_{request_id}",
                token_ids,
                dataclasses.replace(params, n=1, seed=self._seed_of(params, index)),
                arrival_time=arrival_time,
                priority=priority,
                cache_salt=cache_salt,
                eos_token_id=eos,
                stop_token_ids=stop_token_ids,
                max_tokens=max_tokens,
            )
            parent.sequences.append(_Sequence(request, index, parent, self._detokenizer(token_ids, params)))
        with _uninterrupted():
            self._add_to_scheduler(parent)

    def _detokenizer(self, prompt_token_ids: Sequence[int], params: SamplingParams) -> IncrementalDetokenizer | None:
        if self.tokenizer is None:
            return None
        from minivllm.models.tokenizer import IncrementalDetokenizer

        return IncrementalDetokenizer(self.tokenizer, prompt_token_ids, params.skip_special_tokens)

    def _add_to_scheduler(self, parent: _Parent) -> None:
        added: list[str] = []
        try:
            for sequence in parent.sequences:
                self.scheduler.add_request(sequence.request)
                added.append(sequence.request.request_id)
        except ValueError:
            self.scheduler.finish_requests(added, RequestStatus.FINISHED_ABORTED)
            raise
        self._parents[parent.request_id] = parent
        self._sequences.update((s.request.request_id, s) for s in parent.sequences)

    def abort_request(self, request_ids: str | Iterable[str]) -> list[RequestOutput]:
        """End requests now and free their blocks. Ids that are unknown or have ended are ignored.

        Returns the last output of each, with finish_reason "abort" for what had not ended by itself.
        """
        ids = [request_ids] if isinstance(request_ids, str) else list(request_ids)
        outputs = []
        with _uninterrupted():
            for request_id in ids:
                parent = self._parents.pop(request_id, None)
                if parent is None:
                    continue
                children = [sequence.request.request_id for sequence in parent.sequences]
                self.scheduler.finish_requests(children, RequestStatus.FINISHED_ABORTED)
                for child in children:
                    self._sequences.pop(child, None)
                outputs.append(parent.output())
        return outputs

    def has_unfinished_requests(self) -> bool:
        return self.scheduler.has_unfinished_requests()

    def reset_prefix_cache(self) -> bool:
        """Forget all cached blocks; False, with nothing changed, while a request holds any."""
        return self.scheduler.reset_prefix_cache()

    def default_sampling_params(self) -> SamplingParams:
        """vLLM's defaults, overridden by what the model's generation_config.json sets."""
        config = self.generation_config
        own = {
            "temperature": config.temperature,
            "top_k": config.top_k,
            "top_p": config.top_p,
            "min_p": config.min_p,
            "repetition_penalty": config.repetition_penalty,
            "max_tokens": config.max_new_tokens,
        }
        return SamplingParams(**{name: value for name, value in own.items() if value is not None})

    # ---- one step ----------------------------------------------------------------------------------------------

    def step(self) -> list[RequestOutput]:
        """Schedule, compute, update: one token for every request that has its prompt behind it.

        Returns an output for each streaming request that got a token, and for each request that ended. If the
        forward pass raises (or Ctrl-C interrupts it), the requests of this step are ended, their blocks are freed
        and none of their unfilled blocks can be hit; the others stay, and the next step works. The exception is
        passed on.
        """
        start = self.clock()
        output, done = None, False
        try:
            # A Ctrl-C that was held back is raised as a block ends, so each end is inside the try.
            with _uninterrupted():
                output = self.scheduler.schedule()
            result = self.executor.execute(output)
            with _uninterrupted():
                outputs = self._process(output, result, start)
                done = True
            return outputs
        except BaseException:
            if output is not None and not done:
                with _uninterrupted():
                    self._fail(output)
            raise

    def _process(self, output: SchedulerOutput, result: ModelOutput, start: float) -> list[RequestOutput]:
        finished = self.scheduler.update_from_output(output, result.sampled_token_ids)
        end = self.clock()
        changed: dict[str, _Parent] = {}
        stopped: list[str] = []
        for request, token_id in zip(output.scheduled, result.sampled_token_ids, strict=True):
            sequence = self._sequences[request.request_id]
            parent, metrics = sequence.parent, sequence.parent.metrics
            if metrics.first_scheduled_time is None:
                metrics.first_scheduled_time = start
            if request.request_id in result.prompt_logprobs:
                parent.prompt_logprobs.update(result.prompt_logprobs[request.request_id])
            if token_id is None:
                continue
            self.num_generation_tokens += 1
            if metrics.first_token_time is None:
                metrics.first_token_time = end
            metrics.last_token_time = end
            if sequence.logprobs is not None:
                sequence.logprobs.append(result.logprobs[request.request_id])
            stop_string = sequence.append(token_id)
            if stop_string is not None:
                request.stop_reason = stop_string
                if request.is_finished:  # by length, with the very same token: the stop string is the better reason
                    request.status = RequestStatus.FINISHED_STOPPED
                else:
                    stopped.append(request.request_id)
            changed[parent.request_id] = parent
        finished += self.scheduler.finish_requests(stopped, RequestStatus.FINISHED_STOPPED)
        for request in output.preempted:
            sequence = self._sequences.get(request.request_id)  # absent if it was aborted after a reset preempted it
            if sequence is not None:
                sequence.parent.metrics.num_preemptions += 1
        self._log(output, finished, start, end)

        for request in finished:
            del self._sequences[request.request_id]
        outputs = []
        for parent in changed.values():
            if parent.finished:
                del self._parents[parent.request_id]
            if parent.finished or parent.stream:
                outputs.append(parent.output())
        return outputs

    def _log(self, output: SchedulerOutput, finished: Sequence[Request], start: float, end: float) -> None:
        self.event_log.append(
            StepEvent(
                step=output.step,
                start=start,
                end=end,
                scheduled=output.num_scheduled_tokens,
                computed={request.request_id: request.num_computed_tokens for request in output.scheduled},
                new_blocks=output.new_block_ids,
                hits=output.num_hit_tokens,
                preempted=[request.request_id for request in output.preempted],
                finished=[request.request_id for request in finished],
                num_free_blocks=output.num_free_blocks,
                num_running=output.num_running,
                num_waiting=output.num_waiting,
            )
        )

    def _fail(self, output: SchedulerOutput) -> None:
        """End the requests of a step that was not completed, with the siblings that share their prompt."""
        sequences = [self._sequences.get(request.request_id) for request in output.scheduled]
        self.scheduler.fail_step(output)
        self.abort_request({sequence.parent.request_id for sequence in sequences if sequence is not None})

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> Iterator[str]:
        """Add one request and yield its text as it comes; other requests of the engine move on with it.

        Leaving the loop early aborts the request.
        """
        if sampling_params is not None and sampling_params.n != 1:
            raise ValueError(f"stream yields one text, but sampling_params.n is {sampling_params.n}. Use n=1.")
        self._num_streams += 1
        request_id = f"stream-{self._num_streams}"
        self.add_request(request_id, prompt, sampling_params)
        sent = 0
        try:
            while request_id in self._parents:
                for output in self.step():
                    if output.request_id == request_id:
                        text = output.outputs[0].text
                        if len(text) > sent:
                            yield text[sent:]
                            sent = len(text)
        finally:
            self.abort_request(request_id)

    # ---- reading and checking what the user gives ---------------------------------------------------------------

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
            if salt is not None and not (isinstance(salt, str) and salt):
                raise ValueError(f"cache_salt must be a non-empty string, got {salt!r}.")
            text = prompt.get("prompt")
            token_ids = prompt.get("prompt_token_ids", text)
        if isinstance(token_ids, str):
            text = token_ids
            if self.tokenizer is None:
                raise ValueError("this model has no tokenizer, so a prompt must be token ids, not text.")
            token_ids = self.tokenizer.encode(text)
        if isinstance(token_ids, (bytes, bytearray)) or not isinstance(token_ids, Iterable):
            kind = type(prompt).__name__
            raise ValueError(f"a prompt is text, a list of token ids, or a dict of either; got {kind}.")
        return text, [_as_token_id(t, self.vocab_size) for t in token_ids], salt

    def _check(self, token_ids: Sequence[int], params: SamplingParams, priority: int) -> None:
        max_model_len = self.scheduler.max_model_len
        if not token_ids:
            raise ValueError("the prompt is empty; it needs at least one token.")
        if len(token_ids) + 1 > max_model_len:
            raise ValueError(
                f"the prompt has {len(token_ids):,} tokens, but max_model_len is {max_model_len:,}, and at least one "
                f"place is needed for the output. Shorten the prompt to {max_model_len - 1:,} tokens, or raise "
                f"max_model_len."
            )
        if not isinstance(priority, int) or isinstance(priority, bool):
            raise ValueError(f"priority must be a whole number (smaller goes first), got {priority!r}.")
        if priority != 0 and self.scheduler.config.policy != "priority":
            raise ValueError(
                f"priority={priority} has no effect under scheduling_policy='fcfs'. "
                f"Make the engine with scheduling_policy='priority'."
            )
        for name, ids in (("stop_token_ids", params.stop_token_ids), ("logit_bias", params.logit_bias)):
            for token_id in ids:
                if not 0 <= token_id < self.vocab_size:
                    raise ValueError(
                        f"{name} names token {token_id}; the vocabulary has ids 0 to {self.vocab_size - 1}."
                    )
        for name in ("logprobs", "prompt_logprobs"):
            count = getattr(params, name)
            if count is not None and count > self.vocab_size:
                raise ValueError(
                    f"{name}={count} is more than the vocabulary's {self.vocab_size} tokens; -1 means all of them."
                )
        if params.stop and self.tokenizer is None:
            raise ValueError("stop strings need text, and this model has no tokenizer. Use stop_token_ids.")

    def _end_tokens(self, params: SamplingParams) -> tuple[int | None, list[int]]:
        """(the EOS id, the stop token ids): a model may have several EOS ids; all but the first act as stop tokens."""
        eos_ids = () if params.ignore_eos else self.generation_config.eos_token_ids
        return (eos_ids[0] if eos_ids else None), [*params.stop_token_ids, *eos_ids[1:]]

    def _seed_of(self, params: SamplingParams, index: int) -> int:
        if params.seed is not None:
            return params.seed + index
        # Every request without a seed gets one of its own from the engine's, so that a run can be repeated.
        self._num_unseeded += 1
        return int.from_bytes(sha256(f"{self.seed}/{self._num_unseeded}".encode()).digest()[:8], "little")


def _as_token_id(value: object, vocab_size: int) -> int:
    try:
        token_id = value.__index__()  # ints, and integers of numpy and torch
    except (AttributeError, TypeError):
        raise ValueError(f"a prompt of token ids must hold whole numbers, got {value!r}.") from None
    if isinstance(value, bool) or not 0 <= token_id < vocab_size:
        raise ValueError(f"token id {value!r} is out of range: the vocabulary has ids 0 to {vocab_size - 1}.")
    return token_id


def first_stop_string(text: str, old_length: int, stops: Sequence[str]) -> tuple[str, int] | None:
    """The stop string that ends first in `text`, and where it ends, among those that reach past `old_length`."""
    found: tuple[str, int] | None = None
    for stop in stops:
        at = text.find(stop, max(old_length - len(stop) + 1, 0))
        if at >= 0 and (found is None or at + len(stop) < found[1]):
            found = (stop, at + len(stop))
    return found


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    """Hold a Ctrl-C back until the end of the block, so that no bookkeeping is left half done.

    The blocks take microseconds; the forward pass between them can be interrupted.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # signals only ever interrupt the main thread
        return
    pending: list[tuple] = []
    previous = signal.signal(signal.SIGINT, lambda *args: pending.append(args))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
        if pending and callable(previous):
            previous(*pending[0])
