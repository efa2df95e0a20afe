"""One thread where several get no more than one core, all where they do: on machines that exist in numbers only."""

from __future__ import annotations

import itertools

import pytest
import torch

from minivllm import LLM, SamplingParams
from minivllm.cpu.threads import StepThreads


@pytest.fixture(autouse=True)
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


class Machine:
    """Each step is 10 ms of wall time; torch's threads get at most `cores`."""

    def __init__(self, cores: float) -> None:
        self.cores, self.now, self.used = cores, 0.0, 0.0
        self.threads = StepThreads(lambda: self.now, lambda: self.used)

    def step(self) -> int:
        """Its number of threads."""
        with self.threads:
            number = torch.get_num_threads()
            self.now += 0.01
            self.used += 0.01 * min(self.cores, number)
        assert torch.get_num_threads() == 2  # the user's number outside
        return number

    def run(self, seconds: float) -> list[int]:
        return [self.step() for _ in range(round(seconds / 0.01))]


def test_a_quiet_machine_keeps_its_threads():
    assert set(Machine(cores=1.45).run(20.0)) == {2}


def test_on_a_busy_machine_one_thread_after_half_a_second():
    steps = Machine(cores=1.0).run(1.0)
    assert set(steps[:50]) == {2} and set(steps[51:]) == {1}


def test_all_are_tried_again_less_and_less_often():
    steps = Machine(cores=1.0).run(100.0)
    tries = [i for i in range(1, len(steps)) if steps[i - 1] == 1 and steps[i] == 2]
    pauses = [(b - a) / 100 for a, b in itertools.pairwise(tries)]
    assert pauses[:3] == pytest.approx([4.5, 8.5, 16.5], abs=0.05) and max(pauses) < 31
    assert steps.count(2) / len(steps) < 0.05


def test_when_the_other_program_ends_all_come_back():
    machine = Machine(cores=1.0)
    machine.run(5.0)
    machine.cores = 1.5
    assert set(machine.run(10.0)[-200:]) == {2}
    machine.cores = 1.0
    assert machine.run(1.0)[-1] == 1  # and the next one is noticed as soon as the first


def test_a_pause_between_steps_is_no_sign_of_a_busy_machine():
    machine = Machine(cores=1.45)
    for _ in range(200):
        assert machine.step() == 2
        machine.now += 1.0


def test_a_step_that_fails_gives_the_threads_back():
    machine = Machine(cores=1.0)
    machine.run(0.6)
    with pytest.raises(KeyboardInterrupt), machine.threads:
        assert torch.get_num_threads() == 1
        raise KeyboardInterrupt
    assert torch.get_num_threads() == 2


def test_an_interrupt_before_the_threads_are_given_back_is_made_good_by_the_next_step(monkeypatch):
    machine = Machine(cores=1.0)
    machine.run(0.6)
    monkeypatch.setattr(StepThreads, "_restore", lambda self: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt), machine.threads:
        pass
    assert torch.get_num_threads() == 1
    monkeypatch.undo()
    assert machine.step() == 1 and torch.get_num_threads() == 2


def test_what_the_user_sets_meanwhile_stays():
    machine = Machine(cores=1.0)
    machine.run(0.6)
    torch.set_num_threads(1)
    with machine.threads:
        machine.now += 0.01
    assert torch.get_num_threads() == 1
    torch.set_num_threads(2)


def test_one_thread_is_never_judged():
    torch.set_num_threads(1)
    machine = Machine(cores=1.0)
    for _ in range(100):
        with machine.threads:
            machine.now += 0.01
    assert not machine.threads.uses_one


def test_the_engine_uses_it_unless_it_is_switched_off():
    from minivllm.cpu import CPUKernels

    llm = LLM("tiny")
    assert isinstance(llm.executor.threads, StepThreads)
    llm.executor.threads.uses_one, llm.executor.threads._until = True, float("inf")
    seen = []
    llm.executor.on_logits = lambda *args: seen.append(torch.get_num_threads())
    llm.generate("Once", SamplingParams(max_tokens=3), use_tqdm=False)
    assert set(seen) == {1} and torch.get_num_threads() == 2
    assert not isinstance(LLM("tiny", cpu_kernels=CPUKernels(adaptive_threads=False)).executor.threads, StepThreads)
