"""The step loop: requests in, tokens out, one step after another."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from minivllm.core.events import EventLog, StepEvent
from minivllm.core.scheduler import Scheduler, SchedulerOutput
from minivllm.engine.input_processor import InputProcessor, Prompt
from minivllm.engine.output_processor import OUTPUT_KINDS, OutputKind, ParentRequest, RequestState
from minivllm.engine.outputs import RequestMetrics, RequestOutput
from minivllm.executor.base import Executor, ModelOutput
from minivllm.model_config import GenerationConfig
from minivllm.request import Request, RequestStatus
from minivllm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from minivllm.loading.detokenizer import IncrementalDetokenizer
    from minivllm.loading.tokenizer import Tokenizer


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
        self.tokenizer = tokenizer
        self.input_processor = InputProcessor(
            scheduler.config, vocab_size, tokenizer, generation_config or GenerationConfig(), seed
        )
        self.clock = clock
        self.event_log = EventLog() if event_log is None else event_log
        self._states: dict[str, RequestState] = {}
        self._parents: dict[str, ParentRequest] = {}
        self._aborted: list[str] = []  # since the last step, for the event log
        self._abort_later: list[str] = []  # asked for while a step was in progress
        self._stepping = False
        self._undelivered: dict[str, RequestOutput] = {}
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
        output_kind: OutputKind = "cumulative",
    ) -> None:
        """Queue a request.

        prompt: text, token ids, or a dict with "prompt" or "prompt_token_ids" and optionally "cache_salt" (requests
        share cached blocks only with requests of the same salt).
        sampling_params: None means the model's own defaults.
        output_kind: "cumulative" returns an output after every token, "final_only" one at the end.
        Raises ValueError for whatever could never run, with the numbers and the way out; nothing is queued then.
        """
        if request_id in self._parents:
            raise ValueError(f"request id {request_id!r} is in use; give each request an id of its own.")
        if output_kind not in OUTPUT_KINDS:
            raise ValueError(f"output_kind must be one of {', '.join(OUTPUT_KINDS)}, got {output_kind!r}.")
        arrival_time = self.clock() if arrival_time is None else arrival_time
        text, requests = self.input_processor.process(request_id, prompt, sampling_params, priority, arrival_time)
        parent = ParentRequest(request_id, text, RequestMetrics(arrival_time), output_kind)
        for index, request in enumerate(requests):
            parent.children.append(RequestState(request, index, parent, self._detokenizer(request)))
        with _uninterrupted():
            self._add_to_scheduler(parent)

    def _detokenizer(self, request: Request) -> IncrementalDetokenizer | None:
        if self.tokenizer is None:
            return None
        from minivllm.loading.detokenizer import IncrementalDetokenizer

        return IncrementalDetokenizer(
            self.tokenizer, request.all_token_ids, request.sampling_params.skip_special_tokens
        )

    def _add_to_scheduler(self, parent: ParentRequest) -> None:
        added: list[str] = []
        try:
            for state in parent.children:
                self.scheduler.add_request(state.request)
                added.append(state.request.request_id)
        except BaseException:
            self.scheduler.finish_requests(added, RequestStatus.FINISHED_ABORTED)
            raise
        self._parents[parent.request_id] = parent
        self._states.update((s.request.request_id, s) for s in parent.children)

    def abort_request(self, request_ids: str | Iterable[str]) -> list[RequestOutput]:
        """End requests now and free their blocks. Ids that are unknown or have ended are ignored.

        Returns the last output of each, with finish_reason "abort" for what had not ended by itself. While a step is
        in progress (a hook calls, or a dropped stream is collected) they end after it, and nothing is returned.
        """
        if isinstance(request_ids, str):
            request_ids = [request_ids]
        elif isinstance(request_ids, bytes) or not isinstance(request_ids, Iterable):
            raise ValueError(f"abort_request takes a request id or several, got {request_ids!r}.")
        if self._stepping:
            self._abort_later += request_ids
            return []
        with _uninterrupted():
            return self._abort(request_ids)

    def _abort(self, request_ids: Iterable[str]) -> list[RequestOutput]:
        parents = [self._parents.pop(i) for i in dict.fromkeys(request_ids) if i in self._parents]
        # Without the children that have ended by themselves. All at once: each call searches the whole queue.
        children = [s.request.request_id for p in parents for s in p.children if s.request.request_id in self._states]
        self.scheduler.finish_requests(children, RequestStatus.FINISHED_ABORTED)
        self._aborted += children
        for child in children:
            del self._states[child]
        return [parent.output() for parent in parents]

    def has_request(self, request_id: str) -> bool:
        """Whether the id is in use."""
        return request_id in self._parents

    def has_unfinished_requests(self) -> bool:
        return self.scheduler.has_unfinished_requests()

    def reset_prefix_cache(self) -> bool:
        """Forget all cached blocks; False, with nothing changed, while a request holds any."""
        return self.scheduler.reset_prefix_cache()

    # ---- one step ----------------------------------------------------------------------------------------------

    def step(self) -> list[RequestOutput]:
        """Schedule, compute, update: one token for every request that has its prompt behind it.

        Returns an output for each request that got a token or ended, by its `output_kind`, and what `keep` holds. If
        the forward pass raises (or Ctrl-C interrupts it), the requests of this step are ended, their blocks are freed
        and none of their unfilled blocks can be hit; the others stay, and the next step works. The exception is
        passed on. One caller at a time: RuntimeError if a step is in progress.
        """
        if self._stepping:
            raise RuntimeError(
                "a step of this engine is in progress, in another thread or further up this call. Let one thread step "
                "an engine (LLM.generate sees to that), or give each its own."
            )
        start = self.clock()
        output, done = None, False
        try:
            self._stepping = True
            # A Ctrl-C that was held back is raised as a block ends, so each end is inside the try.
            with _uninterrupted():
                output = self.scheduler.schedule()
            result = self.executor.execute(output)
            with _uninterrupted():
                self.keep(self._process(output, result, start))
                done = True
        except BaseException:
            if output is not None and not done:
                with _uninterrupted():
                    self._fail(output, start)
            raise
        finally:
            self._stepping = False
            if self._abort_later:
                later, self._abort_later = self._abort_later, []
                self.abort_request(later)
        outputs, self._undelivered = list(self._undelivered.values()), {}
        return outputs

    def keep(self, outputs: Iterable[RequestOutput]) -> None:
        """Have the next `step` return these outputs too: somebody took them who had not asked for them, or an
        interrupt came before they could be returned. A later output of the same request takes the place of an
        earlier one."""
        self._undelivered.update((output.request_id, output) for output in outputs)

    def _process(self, output: SchedulerOutput, result: ModelOutput, start: float) -> list[RequestOutput]:
        finished = self.scheduler.update_from_output(output, result.sampled_token_ids)
        end = self.clock()
        changed: dict[str, ParentRequest] = {}
        stopped: list[str] = []
        for request, token_id in zip(output.scheduled, result.sampled_token_ids, strict=True):
            state = self._states[request.request_id]
            parent, metrics = state.parent, state.parent.metrics
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
            if state.logprobs is not None:
                state.logprobs.append(result.logprobs[request.request_id])
            stop_string = state.append(token_id)
            if stop_string is not None:
                request.stop_reason = stop_string
                if request.is_finished:  # by length, with the very same token: the stop string is the better reason
                    request.status = RequestStatus.FINISHED_STOPPED
                else:
                    stopped.append(request.request_id)
            changed[parent.request_id] = parent
        finished += self.scheduler.finish_requests(stopped, RequestStatus.FINISHED_STOPPED)
        for request in output.preempted:
            state = self._states.get(request.request_id)  # absent if it was aborted after a reset preempted it
            if state is not None:
                state.parent.metrics.num_preemptions += 1
        self._log(output, finished, start, end)

        for request in finished:
            del self._states[request.request_id]
        outputs = []
        for parent in changed.values():
            if parent.finished:
                del self._parents[parent.request_id]
            if parent.output_kind == "cumulative" or (parent.finished and parent.output_kind == "final_only"):
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
                aborted=self._aborted,
                num_free_blocks=output.num_free_blocks,
                num_running=output.num_running,
                num_waiting=output.num_waiting,
            )
        )
        self._aborted = []

    def _fail(self, output: SchedulerOutput, start: float) -> None:
        """End the requests of a step that was not completed, with the siblings that share their prompt."""
        self.scheduler.fail_step(output)
        # Some may have ended for the scheduler already, if it was our own part after it that failed.
        self._log(output, output.scheduled, start, self.clock())
        states = [self._states.pop(request.request_id, None) for request in output.scheduled]
        self._abort(state.parent.request_id for state in states if state is not None)

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> Iterator[str]:
        """Add one request and yield its text as it comes; other requests of the engine move on with it.

        It starts with the first `next`. Leaving the loop early aborts the request.
        """
        if self.tokenizer is None:
            raise ValueError("this model has no tokenizer, so there is no text to stream; use add_request and step.")
        if sampling_params is not None and sampling_params.n != 1:
            raise ValueError(f"stream yields one text, but sampling_params.n is {sampling_params.n}. Use n=1.")
        while self.has_request(request_id := f"stream-{self._num_streams}"):
            self._num_streams += 1
        try:
            # Inside the try: an interrupt may come after the request was added and before we are told.
            self.add_request(request_id, prompt, sampling_params, output_kind="none")
            state = self._parents[request_id].children[0]
            sent = 0
            while True:
                # The state is read, not the step's output: somebody else's step may have moved it on.
                text = state.settled_text
                if len(text) > sent:
                    piece, sent = text[sent:], len(text)
                    yield piece
                elif state.request.status == RequestStatus.FINISHED_ERROR:
                    raise RuntimeError("this request was ended by an error in a forward pass that another caller ran.")
                elif state.request.is_finished:
                    return
                else:
                    self.keep(self.step())
        finally:
            self.abort_request(request_id)


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    """Hold a Ctrl-C back until the end of the block, so that no bookkeeping is left half done.

    The blocks take a few microseconds per request; the forward pass between them can be interrupted.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # signals only ever interrupt the main thread
        return
    pending: list[tuple] = []
    previous = signal.signal(signal.SIGINT, lambda *args: pending.append(args))
    try:
        yield
    finally:
        # None: the handler was not set from Python, and cannot be put back from here.
        signal.signal(signal.SIGINT, signal.default_int_handler if previous is None else previous)
        if pending and callable(previous):
            previous(*pending[0])
