"""From tokens to what the caller gets: text that grows, stop strings, and the `n` sequences of one request together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, get_args

from minivllm.engine.outputs import CompletionOutput, RequestMetrics, RequestOutput
from minivllm.executor.base import PositionLogprobs
from minivllm.request import Request, RequestStatus

if TYPE_CHECKING:
    from minivllm.loading.detokenizer import IncrementalDetokenizer


# When `step` returns an output for a request: after every token, once at the end, or never (its text is read directly).
OutputKind = Literal["cumulative", "final_only", "none"]
OUTPUT_KINDS = get_args(OutputKind)


class RequestState:
    """One running sequence on the caller's side: its request, and the text that its tokens have become."""

    def __init__(
        self, request: Request, index: int, parent: ParentRequest, detokenizer: IncrementalDetokenizer | None
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


class ParentRequest:
    """What the caller knows as one request: `n` sequences with one prompt."""

    def __init__(self, request_id: str, prompt: str | None, metrics: RequestMetrics, output_kind: OutputKind) -> None:
        self.request_id = request_id
        self.prompt = prompt
        self.metrics = metrics
        self.output_kind = output_kind
        self.children: list[RequestState] = []
        self.prompt_logprobs: dict[int, PositionLogprobs] = {}

    @property
    def finished(self) -> bool:
        return all(child.request.is_finished for child in self.children)

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
            finished=self.finished,
            num_cached_tokens=max(first.num_cached_tokens, 0),
            prompt_logprobs=prompt_logprobs,
            metrics=self.metrics,
        )


def first_stop_string(text: str, old_length: int, stops: Sequence[str]) -> tuple[str, int] | None:
    """The stop string that ends first in `text`, and where it ends, among those that reach past `old_length`."""
    found: tuple[str, int] | None = None
    for stop in stops:
        at = text.find(stop, max(old_length - len(stop) + 1, 0))
        if at >= 0 and (found is None or at + len(stop) < found[1]):
            found = (stop, at + len(stop))
    return found
