"""The loop of an inference engine: schedule, execute, update, log. Standard library only.

A request is tokens here. Text, and what a caller waits for, are in `output_processor`; what happens when a step is
interrupted, in `llm_engine`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from minivllm.core.events import EventLog, StepEvent
from minivllm.core.scheduler import Scheduler
from minivllm.core.scheduler_output import SchedulerOutput
from minivllm.executor.base import Executor, ModelOutput
from minivllm.request import Request, RequestStatus


@dataclass(slots=True)
class StepResult:
    """What one step brought. `start` and `end` are the engine's clock, in seconds."""

    scheduler_output: SchedulerOutput
    model_output: ModelOutput
    finished: list[Request]
    start: float
    end: float


class EngineCore:
    """Scheduler and executor, and the log of what they did. Reads time from `clock` (seconds, real or virtual)."""

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        *,
        clock: Callable[[], float] = time.monotonic,
        event_log: EventLog | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.executor = executor
        self.clock = clock
        self.event_log = EventLog() if event_log is None else event_log
        self.in_flight: SchedulerOutput | None = None  # the step that was scheduled and is not complete
        self.step_start = 0.0
        self._aborted: list[str] = []  # since the last step, for the log

    def step(self) -> StepResult:
        """One step: each request that has its prompt behind it gets a token."""
        start = self.step_start = self.clock()
        self.in_flight = self.scheduler.schedule()
        model_output = self.executor.execute(self.in_flight)
        finished = self.scheduler.update_from_output(self.in_flight, model_output.sampled_token_ids)
        end = self.clock()
        self._log(self.in_flight, [request.request_id for request in finished], start, end)
        result = StepResult(self.in_flight, model_output, finished, start, end)
        self.in_flight = None
        return result

    def add_request(self, request: Request) -> None:
        """Queue a request; ValueError if it could never run."""
        self.scheduler.add_request(request)

    def abort_requests(self, request_ids: Iterable[str]) -> None:
        """End requests that nobody wants any more. Ids that are unknown or have ended are ignored."""
        aborted = self.scheduler.finish_requests(request_ids, RequestStatus.FINISHED_ABORTED)
        self._aborted += [request.request_id for request in aborted]

    def stop_requests(self, request_ids: Iterable[str]) -> None:
        """End requests in whose text the last step completed a stop string: they ended in that step."""
        stopped = self.scheduler.finish_requests(request_ids, RequestStatus.FINISHED_STOPPED)
        if stopped:
            self.event_log[-1].finished.extend(request.request_id for request in stopped)

    def log_failure(self, request_ids: Iterable[str]) -> None:
        """Note in the log that an error ended these requests, in the step in flight or, if there is none, the last."""
        if self.in_flight is not None:
            self._log(self.in_flight, list(request_ids), self.step_start, self.clock())
        else:
            self.event_log[-1].finished.extend(request_ids)

    def start_over(self, requests: Iterable[Request]) -> None:
        """After an interrupt: go on with `requests` as if they had just come."""
        self.in_flight = None
        self.scheduler.start_over(requests)

    def _log(self, output: SchedulerOutput, finished: list[str], start: float, end: float) -> None:
        computed = {
            request_id: before + output.num_scheduled_tokens[request_id]
            for request_id, before in output.num_computed_tokens.items()
        }
        self.event_log.append(
            StepEvent(
                step=output.step,
                start=start,
                end=end,
                scheduled=output.num_scheduled_tokens,
                computed=computed,
                new_blocks=output.new_block_ids,
                hits=output.num_hit_tokens,
                preempted=output.preempted_req_ids,
                finished=finished,
                aborted=self._aborted,
                num_free_blocks=output.num_free_blocks,
                num_running=output.num_running,
                num_waiting=output.num_waiting,
                stores=output.stores,
                loads=output.loads,
            )
        )
        self._aborted = []
