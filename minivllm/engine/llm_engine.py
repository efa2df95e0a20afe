"""The engine that callers talk to: several of them, on several threads, who may interrupt it at any moment.

`EngineCore` moves tokens and `OutputProcessor` tells callers. What this adds is safety, by three rules:

- One at a time. Whoever changes something holds the lock; what is asked for meanwhile (from a hook, another thread, a
  stream that is dropped) waits in the inbox.
- Whatever cuts a change short (a failed forward pass, Ctrl-C, an alarm, an error in our own bookkeeping) may have left
  anything half done. So nothing is mended: the engine starts over, with an empty pool, and every request goes on from
  what its caller was told. Tokens depend on the request and the position only, so they come out the same.
- If it was an error of a scheduled step, the requests of that step end by it, and their callers are told.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, TypeVar

from minivllm.core.events import EventLog
from minivllm.core.scheduler import Scheduler
from minivllm.engine.core import EngineCore
from minivllm.engine.input_processor import InputProcessor, Prompt
from minivllm.engine.output_processor import OUTPUT_KINDS, OutputKind, OutputProcessor, ParentRequest
from minivllm.engine.outputs import RequestOutput
from minivllm.executor.base import Executor
from minivllm.model_config import GenerationConfig
from minivllm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from minivllm.loading.tokenizer import Tokenizer

T = TypeVar("T")


class LLMEngine:
    """Requests in, outputs out. Knows no torch; reads time from `clock` (seconds, real or virtual).

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
        max_logprobs: int = 20,
        clock: Callable[[], float] = time.monotonic,
        event_log: EventLog | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.engine_core = EngineCore(scheduler, executor, clock=clock, event_log=event_log)
        self.input_processor = InputProcessor(
            scheduler.config, vocab_size, tokenizer, generation_config or GenerationConfig(), seed, max_logprobs
        )
        self.output_processor = OutputProcessor(tokenizer)
        self.last_outputs: list[RequestOutput] = []  # what the last `step` returned
        self._lock = threading.RLock()
        self._registering = threading.RLock()
        self._owner: int | None = None  # the thread whose change is in progress
        self._stepping = False  # and whether that change is a step
        self._intact = True  # no change was cut short
        self._inbox: deque[tuple[str, list[ParentRequest]]] = deque()
        self._stream_numbers = itertools.count()

    @property
    def executor(self) -> Executor:
        return self.engine_core.executor

    @property
    def event_log(self) -> EventLog:
        """One record a step, since the start."""
        return self.engine_core.event_log

    @property
    def num_generation_tokens(self) -> int:
        """Sampled since the start."""
        return self.output_processor.num_generation_tokens

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
        """Queue a request; any thread may, at any time.

        prompt: text, token ids, or a dict with "prompt" or "prompt_token_ids" and optionally "cache_salt" (requests
        share cached blocks only with requests of the same salt).
        sampling_params: None means the model's own defaults.
        output_kind: "cumulative" returns an output after every token, "final_only" one at the end, "taken" keeps that
        one for `take`.
        Raises ValueError for whatever could never run, with the numbers and the way out; nothing is queued then.
        """
        if not isinstance(request_id, str):
            raise ValueError(f"a request id is a str, got {request_id!r:.100}.")
        if output_kind not in OUTPUT_KINDS:
            raise ValueError(f"output_kind must be one of {', '.join(OUTPUT_KINDS)}, got {output_kind!r}.")
        arrival_time = self.engine_core.clock() if arrival_time is None else arrival_time
        text, requests = self.input_processor.process(request_id, prompt, sampling_params, priority, arrival_time)
        for request in requests:
            self.scheduler.check_fits(request)
        parent = ParentRequest(request_id, text, requests, self.output_processor.tokenizer, output_kind)
        with self._registering:
            self.output_processor.add(parent)
            self._inbox.append(("add", [parent]))
        self._apply_inbox()

    def abort_request(self, request_ids: str | Iterable[str]) -> list[RequestOutput]:
        """End requests now and free their blocks. Ids that are unknown or have ended are ignored.

        Returns the last output of each, with finish_reason "abort" for what had not ended by itself. While a step is
        in progress (a hook calls, another thread, or a dropped stream is collected) they end after it, and nothing is
        returned.
        """
        if isinstance(request_ids, str):
            request_ids = [request_ids]
        elif isinstance(request_ids, bytes) or not isinstance(request_ids, Iterable):
            raise ValueError(f"abort_request takes a request id or several, got {request_ids!r}.")
        parents = [self.output_processor.parents.get(request_id) for request_id in dict.fromkeys(request_ids)]
        self._inbox.append(("abort", [parent for parent in parents if parent is not None]))
        self._apply_inbox()
        return [self._last_output(parent) for parent in parents if parent is not None and parent.is_finished]

    def _last_output(self, parent: ParentRequest) -> RequestOutput:
        # Whoever aborts has it now; only "taken" stays, for a `generate` that waits for it elsewhere.
        output = self.output_processor.outbox.pop(parent.request_id, None)
        return parent.output() if output is None else output

    def has_request(self, request_id: str) -> bool:
        """Whether the id is in use."""
        return request_id in self.output_processor.parents

    def has_unfinished_requests(self) -> bool:
        return bool(self.output_processor.parents)

    def reset_prefix_cache(self) -> bool:
        """Forget all cached blocks; False, with nothing changed, while a request holds any."""
        return False if self._is_busy() else self._change(self.scheduler.reset_prefix_cache)

    # ---- one step ----------------------------------------------------------------------------------------------

    def step(self) -> list[RequestOutput]:
        """Schedule, compute, update: one token for every request that has its prompt behind it.

        Returns an output for each request that got a token or ended, by its `output_kind`, and what `keep` holds. If
        the forward pass raises, the requests of this step are ended with finish_reason "error" (the next step returns
        their outputs), their blocks are freed and none of their unfilled blocks can be hit; the others stay. If
        something interrupts the step (Ctrl-C), it is done again by the next one. The exception is passed on in both
        cases. One caller at a time: RuntimeError if a step is in progress.
        """
        self.advance()
        self.last_outputs = list(self.output_processor.outbox.values())
        self.output_processor.outbox = {}
        return self.last_outputs

    def advance(self) -> None:
        """`step`, but the outputs stay with the engine, for `take` or the next `step`."""
        if self._is_busy():
            raise RuntimeError(
                "a step of this engine is in progress, in another thread or further up this call. Let one thread step "
                "an engine (LLM.generate sees to that), or give each its own."
            )
        self._change(self._step, is_step=True)

    def take(self, request_ids: Iterable[str]) -> list[RequestOutput]:
        """The last outputs of those that have ended, of requests with output_kind "taken"."""
        kept = self.output_processor.kept
        return [kept.pop(request_id) for request_id in list(kept) if request_id in request_ids]

    def keep(self, outputs: Iterable[RequestOutput]) -> None:
        """Have the next `step` return these outputs too: somebody took them who had not asked for them. A later output
        of the same request takes the place of an earlier one."""
        for output in outputs:
            self.output_processor.outbox.setdefault(output.request_id, output)

    def _step(self) -> None:
        core, result = self.engine_core, None
        try:
            result = core.step()
            core.stop_requests(self.output_processor.process(result))
        except Exception:
            output = core.in_flight if result is None else result.scheduler_output
            if output is not None:  # else the scheduler failed, and nobody's tokens were computed
                states = self.output_processor.states
                parents = [states[child].parent.request_id for child in output.num_scheduled_tokens if child in states]
                self.output_processor.end(parents, "error")  # siblings, which share their prompt, end with them
                core.log_failure(output.num_scheduled_tokens)
            raise

    # ---- one at a time, and never half done --------------------------------------------------------------------

    def _is_busy(self) -> bool:
        """Whether one would have to wait for a step, or for oneself further up this call."""
        return self._stepping or self._owner == threading.get_ident()

    def _change(self, change: Callable[[], T], *, is_step: bool = False) -> T:
        """Run `change` alone. If the one before was cut short, start over first."""
        with self._lock:
            try:
                self._owner, self._stepping = threading.get_ident(), is_step
                if not self._intact:
                    self._start_over()
                self._intact = False
                with self._registering:  # nobody is between the two halves of being added
                    if self._inbox:
                        self._empty_inbox()
                    if len(self.output_processor.states) != len(self.scheduler.requests):  # but somebody was cut short
                        self._start_over()
                        self._intact = False
                result = change()
                if self._inbox:
                    self._empty_inbox()
                self._intact = True
                return result
            except BaseException:
                if not self._intact:
                    self._start_over()  # if nothing comes in between; else the next change does it
                raise
            finally:
                self._owner, self._stepping = None, False  # no call, so no interrupt can come before it

    def _start_over(self) -> None:
        """Go on from what the callers were told. Can be interrupted and done again."""
        self.engine_core.start_over(self.output_processor.restore())
        self._intact = True

    def _apply_inbox(self) -> None:
        """Do what the inbox asks for, now, or as the change in progress ends."""
        if not self._is_busy():
            self._change(lambda: None)

    def _empty_inbox(self) -> None:
        """Each entry may be applied again after an interrupt, so it leaves the inbox when it is done."""
        while self._inbox:
            kind, parents = self._inbox[0]
            if kind == "add":
                self._add(parents)
            else:
                self._abort(parents)
            self._inbox.popleft()

    def _add(self, parents: Iterable[ParentRequest]) -> None:
        for child in (child for parent in parents for child in parent.children):
            if not child.is_finished and child.request.request_id not in self.scheduler.requests:
                self.engine_core.add_request(child.request)

    def _abort(self, parents: Iterable[ParentRequest]) -> None:
        # By object: the id may have ended meanwhile, and be another request's.
        known = self.output_processor.parents
        request_ids = [parent.request_id for parent in parents if known.get(parent.request_id) is parent]
        # All at once: each call of the scheduler's searches the whole queue.
        self.engine_core.abort_requests(self.output_processor.end(request_ids, "abort"))

    # ---- streams -----------------------------------------------------------------------------------------------

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> Iterator[str]:
        """Add one request and yield its text as it comes; other requests of the engine move on with it.

        It starts with the first `next`. Leaving the loop early aborts the request. RuntimeError if somebody else
        aborts it, or ends it by an error.
        """
        if self.output_processor.tokenizer is None:
            raise ValueError("this model has no tokenizer, so there is no text to stream; use add_request and step.")
        if sampling_params is not None and sampling_params.n != 1:
            raise ValueError(f"stream yields one text, but sampling_params.n is {sampling_params.n}. Use n=1.")
        while self.has_request(request_id := f"stream-{next(self._stream_numbers)}"):
            pass
        try:
            # Inside the try: an interrupt may come after the request was added and before we are told.
            self.add_request(request_id, prompt, sampling_params, output_kind="none")
            state = self.output_processor.parents[request_id].children[0]
            sent = 0
            while True:
                # The state is read, not the step's output: somebody else's step may have moved it on.
                text, reason = state.settled_text, state.progress.finish_reason
                if len(text) > sent:
                    piece, sent = text[sent:], len(text)
                    yield piece
                elif reason == "error":
                    raise RuntimeError("this request was ended by an error in a forward pass that another caller ran.")
                elif reason == "abort":
                    raise RuntimeError("this request was aborted by another caller before its text was complete.")
                elif reason is not None:
                    return
                else:
                    self.advance()
        finally:
            self.abort_request(request_id)
