"""From tokens to what the caller gets: text that grows, stop strings, logprobs, metrics, and the `n` sequences of one
request together.

What is written here is what callers have been told. A step that is interrupted half way is done again from here, so
each sequence moves on by one assignment, which happens or does not.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple, get_args

from minivllm.engine.core import StepResult
from minivllm.engine.outputs import CompletionOutput, RequestMetrics, RequestOutput
from minivllm.executor.base import PositionLogprobs
from minivllm.request import Request, RequestStatus

if TYPE_CHECKING:
    from minivllm.loading.detokenizer import IncrementalDetokenizer
    from minivllm.loading.tokenizer import Tokenizer


# When `step` returns an output for a request: after every token, once at the end, or never: "taken" keeps the last one
# until somebody takes it, and of "none" only the text is read.
OutputKind = Literal["cumulative", "final_only", "taken", "none"]
OUTPUT_KINDS = get_args(OutputKind)


class Progress(NamedTuple):
    """How far a sequence has come."""

    num_tokens: int = 0
    text: str = ""
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class RequestState:
    """One running sequence on the caller's side: its tokens, and the text that they have become."""

    def __init__(self, request: Request, index: int, parent: ParentRequest, tokenizer: Tokenizer | None) -> None:
        self.request = request
        self.index = index
        self.parent = parent
        self.progress = Progress()
        self._tokenizer = tokenizer
        self._detokenizer = self._new_detokenizer()
        self._token_ids: list[int] = []  # of these and the logprobs, the first `progress.num_tokens` count
        self._logprobs: list[PositionLogprobs] | None = None if request.sampling_params.logprobs is None else []

    @property
    def is_finished(self) -> bool:
        return self.progress.finish_reason is not None

    def append(self, token_id: int, logprobs: PositionLogprobs | None, status: RequestStatus | None) -> bool:
        """Take the next token into the text; `status` is why it ended the sequence for the scheduler, if it did.

        Whether the sequence goes on for the scheduler but is complete, since a stop string is.
        """
        params, old = self.request.sampling_params, self.progress
        text, stop = old.text, None
        if self._detokenizer is not None:
            # The token that ended the sequence (EOS or a stop token) is not part of its text.
            ended_by_token = status == RequestStatus.FINISHED_STOPPED and not params.include_stop_str_in_output
            if not ended_by_token:
                text += self._detokenizer.append(token_id)
            if status is not None:
                text += self._detokenizer.finish()
            if params.stop and old.num_tokens + 1 > params.min_tokens:
                stop = first_stop_string(text, len(old.text), params.stop)
        reason: str | None = None
        stop_reason: int | str | None = None
        if stop is not None:  # also if it ended by length, with the very same token: this is the better reason
            stop_string, end = stop
            text = text[: end if params.include_stop_str_in_output else end - len(stop_string)]
            reason, stop_reason = "stop", stop_string
        elif status is not None:
            reason, stop_reason = self.request.finish_reason, self.request.stop_reason
        self._token_ids.append(token_id)
        if self._logprobs is not None:
            self._logprobs.append(logprobs)  # type: ignore[arg-type]  # there where they were asked for
        self.progress = Progress(old.num_tokens + 1, text, reason, stop_reason)
        return stop is not None and status is None

    def finish(self, reason: str) -> None:
        """End it for a reason that is not in its tokens: "abort" or "error"."""
        if not self.is_finished:
            self.progress = self.progress._replace(finish_reason=reason)

    def restore(self) -> Request:
        """After an interrupt, `progress` is what counts: bring everything else back to it, the request too."""
        num_tokens = self.progress.num_tokens
        del self._token_ids[num_tokens:]
        if self._logprobs is not None:
            del self._logprobs[num_tokens:]
        self._detokenizer = self._new_detokenizer()
        if self._detokenizer is not None:
            for token_id in self._token_ids:
                self._detokenizer.append(token_id)
        self.request.truncate_output(num_tokens)
        return self.request

    def _new_detokenizer(self) -> IncrementalDetokenizer | None:
        if self._tokenizer is None:
            return None
        from minivllm.loading.detokenizer import IncrementalDetokenizer

        prompt = self.request.all_token_ids[: self.request.num_prompt_tokens]
        return IncrementalDetokenizer(self._tokenizer, prompt, self.request.sampling_params.skip_special_tokens)

    @property
    def settled_text(self) -> str:
        """The text that no stop string to come can take back."""
        params, text = self.request.sampling_params, self.progress.text
        if self.is_finished or not params.stop or params.include_stop_str_in_output:
            return text
        held_back = max(len(stop) for stop in params.stop) - 1
        return text[: max(len(text) - held_back, 0)]

    def output(self) -> CompletionOutput:
        progress = self.progress
        return CompletionOutput(
            index=self.index,
            text=self.settled_text,
            token_ids=self._token_ids[: progress.num_tokens],
            logprobs=None if self._logprobs is None else self._logprobs[: progress.num_tokens],
            finish_reason=progress.finish_reason,
            stop_reason=progress.stop_reason,
        )


class ParentRequest:
    """What the caller knows as one request: `n` sequences with one prompt."""

    def __init__(
        self,
        request_id: str,
        prompt: str | None,
        requests: Sequence[Request],
        tokenizer: Tokenizer | None,
        output_kind: OutputKind,
    ) -> None:
        self.request_id = request_id
        self.prompt = prompt
        self.metrics = RequestMetrics(requests[0].arrival_time)
        self.output_kind = output_kind
        self.children = [RequestState(request, index, self, tokenizer) for index, request in enumerate(requests)]
        self.prompt_logprobs: dict[int, PositionLogprobs] = {}

    @property
    def is_finished(self) -> bool:
        return all(child.is_finished for child in self.children)

    def output(self) -> RequestOutput:
        first = self.children[0].request
        prompt_logprobs = None
        if first.sampling_params.prompt_logprobs is not None:
            # The first token has no logprob: nothing precedes it.
            prompt_logprobs = [self.prompt_logprobs.get(i) for i in range(first.num_prompt_tokens)]
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=first.all_token_ids[: first.num_prompt_tokens],
            outputs=[child.output() for child in self.children],
            finished=self.is_finished,
            num_cached_tokens=max(first.num_cached_tokens, 0),
            prompt_logprobs=prompt_logprobs,
            metrics=dataclasses.replace(
                self.metrics, num_preemptions=sum(child.request.num_preemptions for child in self.children)
            ),
        )


class OutputProcessor:
    """All requests that callers wait for. Outputs lie in `outbox` until the end of a step, or in `kept` until somebody
    takes them."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self.tokenizer = tokenizer
        self.parents: dict[str, ParentRequest] = {}
        self.states: dict[str, RequestState] = {}  # of all children that have not ended
        self.outbox: dict[str, RequestOutput] = {}
        self.kept: dict[str, RequestOutput] = {}
        self.num_generation_tokens = 0  # since the start

    def add(self, parent: ParentRequest) -> None:
        """Register a request; ValueError if its id, or one of its sequences', is in use."""
        for request_id in (parent.request_id, *(child.request.request_id for child in parent.children)):
            state = self.states.get(request_id)
            owner = None if state is None else state.parent.request_id
            if owner in self.parents and owner != request_id:
                raise ValueError(
                    f"request id {request_id!r} is in use: a sequence of request {owner!r} (n > 1) has it; give each "
                    f"request an id of its own."
                )
            if request_id in self.parents or owner in self.parents:
                raise ValueError(f"request id {request_id!r} is in use; give each request an id of its own.")
        for outputs in (self.outbox, self.kept):  # of an earlier request with this id
            outputs.pop(parent.request_id, None)
        self.states.update({child.request.request_id: child for child in parent.children})
        self.parents[parent.request_id] = parent

    def process(self, result: StepResult) -> list[str]:
        """Take a step's tokens in. Returns the requests that are complete though the scheduler does not know it,
        because their text holds a stop string."""
        model_output, end = result.model_output, result.end
        ended = {request.request_id: request.status for request in result.finished}
        for request_id, judged in model_output.prompt_logprobs.items():
            self.states[request_id].parent.prompt_logprobs.update(judged)
        changed: dict[str, ParentRequest] = {}
        stopped: list[str] = []
        for request_id, token_ids in zip(
            result.scheduler_output.num_scheduled_tokens, model_output.sampled_token_ids, strict=True
        ):
            state = self.states[request_id]
            metrics = state.parent.metrics
            if metrics.first_scheduled_time is None:
                metrics.first_scheduled_time = result.start
            if not token_ids:
                continue
            if metrics.first_token_time is None:
                metrics.first_token_time = end
            metrics.last_token_time = end
            status = ended.get(request_id)
            last = len(token_ids) - 1
            if status is not None:  # tokens behind the one that ended it were dropped
                last = state.request.num_output_tokens - state.progress.num_tokens - 1
            logprobs = model_output.logprobs.get(request_id)
            for i in range(last + 1):
                self.num_generation_tokens += 1
                is_complete = state.append(
                    token_ids[i], logprobs[i] if logprobs else None, status if i == last else None
                )
                if is_complete:
                    stopped.append(request_id)
                    break
            changed[state.parent.request_id] = state.parent
        for parent in changed.values():
            self.deliver(parent)
        return stopped

    def deliver(self, parent: ParentRequest) -> None:
        """Put the request's output where its caller finds it, and forget what has ended."""
        running = [child for child in parent.children if child.progress.finish_reason is None]
        is_finished = not running
        if parent.output_kind == "cumulative" or (is_finished and parent.output_kind != "none"):
            outputs = self.kept if parent.output_kind == "taken" else self.outbox
            outputs[parent.request_id] = parent.output()
        if len(running) < len(parent.children):
            for child in parent.children:
                if child not in running:
                    self.states.pop(child.request.request_id, None)
        if is_finished:
            self.parents.pop(parent.request_id, None)

    def end(self, request_ids: Iterable[str], reason: str) -> list[str]:
        """End requests by their callers' ids, with reason "abort" or "error"; the ids of their sequences."""
        children: list[str] = []
        for request_id in dict.fromkeys(request_ids):
            parent = self.parents.get(request_id)
            if parent is not None:
                children += [child.request.request_id for child in parent.children if not child.is_finished]
                for child in parent.children:
                    child.finish(reason)
                self.deliver(parent)
        return children

    def restore(self) -> list[Request]:
        """After an interrupt: the requests to go on with, as their callers know them, oldest first."""
        requests: list[Request] = []
        self.states = {}
        for parent in list(self.parents.values()):
            for child in parent.children:
                if not child.is_finished:
                    self.states[child.request.request_id] = child
                    requests.append(child.restore())
            if parent.is_finished:
                self.deliver(parent)
        return requests


def first_stop_string(text: str, old_length: int, stops: Sequence[str]) -> tuple[str, int] | None:
    """The stop string that ends first in `text`, and where it ends, among those that reach past `old_length`."""
    found: tuple[str, int] | None = None
    for stop in stops:
        at = text.find(stop, max(old_length - len(stop) + 1, 0))
        if at >= 0 and (found is None or at + len(stop) < found[1]):
            found = (stop, at + len(stop))
    return found
