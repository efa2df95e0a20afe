"""An interrupt at any moment, several close together, in any thread: nothing wrong, stuck or lost afterwards.

Deterministic: a profile function raises at the k-th call, for one k after the other, which are the places where CPython
looks for signals. Then real signals, alarms and threads, for the timing that this cannot think of.
"""

from __future__ import annotations

import itertools
import os
import random
import signal
import sys
import threading
import time

import pytest
from helpers.executors import FillingExecutor

from minivllm.core.block_tier import LRUTier
from minivllm.engine.args import EngineArgs, build_engine
from minivllm.sampling_params import SamplingParams

PROMPT, TOKENS = list(range(20, 40)), 6


def tokens_of(request_id: str, j: int) -> int:
    return 100 + 7 * j + len(request_id)


def make_engine(tier=None, **settings):
    """With a second tier the pool is so small that blocks go there and come back."""
    settings = {"block_size": 4, "max_num_seqs": 3, "max_num_batched_tokens": 16, **settings}
    args = EngineArgs(max_model_len=32, num_gpu_blocks_override=24 if tier is None else 14, **settings)
    return build_engine(args, executor=FillingExecutor(tokens_of, block_size=4), vocab_size=1000, tier=tier)


# A generator that is thrown away while an interrupt comes: Python says that it was ignored, and it was.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


class Interrupter:
    """Raises KeyboardInterrupt at given numbers of calls."""

    def __init__(self, *at: int) -> None:
        self.at, self.count = set(at), 0
        self.is_on = False  # only while the engine is called, not in the test's own lines

    def __call__(self, frame, event, arg) -> None:
        if self.is_on and event in ("call", "c_call", "c_return"):
            self.count += 1
            if self.count in self.at:
                raise KeyboardInterrupt

    def __enter__(self):
        self.outer = sys.getprofile()
        sys.setprofile(self)
        return self

    def __exit__(self, *args):
        sys.setprofile(self.outer)


def finish(engine, outputs: dict) -> None:
    for _ in range(200):
        if not engine.has_unfinished_requests():
            return
        outputs.update((o.request_id, o) for o in engine.step() if o.finished)
        engine.scheduler.kv_cache_manager.check_invariants()
    raise AssertionError("stuck: " + repr(engine.scheduler.requests))


def check(engine, outputs: dict, request_ids) -> None:
    """All have their tokens, the pool is whole, and no block that was never filled was read."""
    for request_id in request_ids:
        (out,) = outputs[request_id].outputs
        assert out.token_ids == [tokens_of(request_id, j) for j in range(TOKENS)], request_id
    pool = engine.scheduler.kv_cache_manager.block_pool
    assert pool.num_free_blocks == pool.num_usable_blocks and not engine.executor.wrong
    assert not engine.scheduler.requests and not engine.output_processor.states


def session(interrupter: Interrupter | None, tier_slots: int = 0) -> int:
    """Others' requests wait or run; mine come, step, and abort one, under interrupts. Number of calls."""
    engine = make_engine(LRUTier(tier_slots) if tier_slots else None)
    params = SamplingParams(max_tokens=TOKENS, ignore_eos=True)
    outputs, added = {}, ["other", "late"]
    engine.add_request("other", PROMPT, params)
    engine.step()
    engine.add_request("late", [*PROMPT[:8], 1, 2, 3], params)
    calls = [lambda: engine.add_request("mine", PROMPT, params), lambda: engine.add_request("gone", PROMPT, params)]
    calls += [engine.step, engine.step, lambda: engine.abort_request("gone"), engine.step, engine.reset_prefix_cache]
    with interrupter or Interrupter() as profile:
        for call in calls:
            for _ in range(4):  # a caller tries again what was interrupted
                try:
                    profile.is_on = True
                    result = call()
                    profile.is_on = False
                except KeyboardInterrupt:
                    profile.is_on = False
                    outputs.update((o.request_id, o) for o in engine.last_outputs if o.finished)
                    continue
                except ValueError as error:  # it had been added after all
                    profile.is_on = False
                    assert "is in use" in str(error)
                    break
                outputs.update((o.request_id, o) for o in (result if isinstance(result, list) else ()) if o.finished)
                break
    finish(engine, outputs)
    check(engine, outputs, [*added, "mine"])
    assert "gone" not in outputs or outputs["gone"].outputs[0].finish_reason in ("abort", "length")
    return profile.count


def test_one_interrupt_at_every_call():
    total = session(None)
    assert total > 500
    for k in range(1, total + 1):
        session(Interrupter(k))


def test_one_interrupt_at_every_call_with_a_second_tier():
    for k in range(1, session(None, tier_slots=6) + 1, 2):
        session(Interrupter(k), tier_slots=6)


@pytest.mark.parametrize("distances", [(1,), (2,), (5,), (1, 1), (3, 7), (40,)])
def test_several_interrupts_close_together(distances):
    total = session(None)
    for k in range(1, total + 1, 3):
        session(Interrupter(*itertools.accumulate((k, *distances))))


def test_an_error_inside_free_is_repaired(monkeypatch):
    """And so is one in every other function of the bookkeeping, before and after it did its work."""
    from minivllm.core import BlockPool, KVCacheManager, Scheduler

    functions = [
        (Scheduler, name) for name in ("schedule", "add_request", "finish_requests", "update_from_output", "_preempt")
    ]
    functions += [(KVCacheManager, name) for name in ("free", "allocate_slots", "get_computed_blocks", "_publish")]
    functions += [(BlockPool, name) for name in ("free_blocks", "get_new_blocks", "publish", "touch", "evict")]
    hurt = 0
    for (owner, name), when, nth in itertools.product(functions, ("before", "after"), (1, 2, 3, 5)):
        original, calls = getattr(owner, name), itertools.count(1)

        def failing(*args, original=original, calls=calls, when=when, nth=nth, **kwargs):
            number = next(calls)
            if number == nth and when == "before":
                raise OSError("injected")
            result = original(*args, **kwargs)
            if number == nth and when == "after":
                raise OSError("injected")
            return result

        engine, outputs = make_engine(), {}
        params = SamplingParams(max_tokens=TOKENS, ignore_eos=True)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(owner, name, failing)
            for number in range(5):
                try:
                    engine.add_request(str(number), PROMPT[: 9 + 2 * number], params)
                except OSError:
                    hurt += 1
            for _ in range(60):
                try:
                    outputs.update((o.request_id, o) for o in engine.step() if o.finished)
                except OSError:
                    hurt += 1
            assert not engine.has_unfinished_requests()
        engine.scheduler.kv_cache_manager.check_invariants()
        assert not engine.executor.wrong
        for number in range(5):  # each was told: its tokens, or that an error ended it
            (out,) = outputs[str(number)].outputs
            expected = [tokens_of(str(number), j) for j in range(TOKENS)]
            assert out.finish_reason == "error" or out.token_ids == expected
    assert hurt > 50


@pytest.fixture(scope="module")
def llm():
    from minivllm import LLM

    return LLM("tiny", block_size=4, num_gpu_blocks_override=400)


def generate(llm, prompts, params):
    return [out.outputs[0].token_ids for out in llm.generate(prompts, params, use_tqdm=False)]


PROMPTS = [{"prompt_token_ids": [20 + (7 * i + j) % 300 for j in range(20 + 9 * i)]} for i in range(3)]
GREEDY = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)


def is_whole(llm) -> bool:
    llm.llm_engine.scheduler.kv_cache_manager.check_invariants()
    pool = llm.llm_engine.scheduler.kv_cache_manager.block_pool
    return pool.num_free_blocks == pool.num_usable_blocks and not llm.llm_engine.has_unfinished_requests()


def storm(llm, rounds: int, send) -> int:
    """Generate under signals that `send(until)` sends from another process or timer; how many calls they cut short."""
    rng, cut = random.Random(0), 0
    expected = generate(llm, PROMPTS, GREEDY)
    for _ in range(rounds):
        try:
            stop = send(rng)
            try:
                generate(llm, PROMPTS, GREEDY)
            finally:
                stop()
        except (KeyboardInterrupt, TimeoutError):
            cut += 1
    assert generate(llm, PROMPTS, GREEDY) == expected and is_whole(llm)
    return cut


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="no signals of this kind")
@pytest.mark.parametrize("kind", ["two or three Ctrl-C", "alarm"])
def test_real_signals(llm, kind):
    def handler(*args):
        raise TimeoutError

    def alarm(rng):
        signal.setitimer(signal.ITIMER_REAL, rng.uniform(0.0005, 0.03))
        return lambda: signal.setitimer(signal.ITIMER_REAL, 0)

    def interrupts(rng):
        delay, gaps = rng.uniform(0.0005, 0.03), [rng.uniform(1e-5, 3e-4) for _ in range(rng.choice((1, 2)))]
        done = threading.Event()

        def send():
            if done.wait(delay):
                return
            for gap in (0.0, *gaps):
                time.sleep(gap)
                if not done.is_set():
                    os.kill(os.getpid(), signal.SIGINT)

        thread = threading.Thread(target=send)
        thread.start()

        def stop():
            while True:  # the last one may arrive here
                try:
                    done.set()
                    thread.join()
                    time.sleep(0.002)
                    return
                except KeyboardInterrupt:
                    continue

        return stop

    previous = signal.signal(signal.SIGALRM, handler)
    try:
        assert storm(llm, 300, alarm if kind == "alarm" else interrupts) > 20
    finally:
        signal.signal(signal.SIGALRM, previous)


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_threads_add_and_abort_while_others_step(policy):
    engine, outputs, errors = make_engine(scheduling_policy=policy), {}, []
    params = SamplingParams(max_tokens=TOKENS, ignore_eos=True)

    def add(first: int) -> None:
        try:
            for number in range(first, first + 300):
                engine.add_request(f"{number:04}", PROMPT[:9], params, priority=number % 7 * (policy == "priority"))
                if number % 5 == 0:
                    engine.abort_request(f"{number:04}")
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=add, args=(first,)) for first in (0, 1000, 2000)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads) or engine.has_unfinished_requests():
        outputs.update((o.request_id, o) for o in engine.step() if o.finished)
    assert not errors
    check(engine, outputs, [f"{n:04}" for first in (0, 1000, 2000) for n in range(first, first + 300) if n % 5])


def test_generate_ends_when_its_request_is_aborted_by_a_hook_or_a_thread(llm):
    engine = llm.llm_engine
    llm.executor.on_logits = lambda request, first, logits: engine.abort_request(request.request_id)
    try:
        outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    finally:
        llm.executor.on_logits = None
    assert {out.outputs[0].finish_reason for out in outputs} == {"abort"}

    long = SamplingParams(max_tokens=900, ignore_eos=True)
    thread = threading.Thread(target=lambda: outputs.extend(llm.generate(["Once"] * 2, long, use_tqdm=False)))
    thread.start()
    while not engine.scheduler.running:
        time.sleep(0.001)
    engine.abort_request(next(iter(engine.output_processor.parents)))
    thread.join(60)
    assert not thread.is_alive() and sorted(o.outputs[0].finish_reason for o in outputs[3:]) == ["abort", "length"]
    assert is_whole(llm)


def test_a_failed_pass_tells_every_caller(llm):
    engine = llm.llm_engine
    engine.add_request("mine", "Once upon a time", SamplingParams(max_tokens=50, temperature=0))
    engine.step()
    forward = llm.executor.attention.forward

    def failing(*args):
        raise RuntimeError("out of memory")

    llm.executor.attention.forward = failing
    try:
        with pytest.raises(RuntimeError, match="out of memory"):
            llm.generate("The dog", GREEDY, use_tqdm=False)
    finally:
        llm.executor.attention.forward = forward
    (told,) = engine.step()
    assert told.request_id == "mine" and told.outputs[0].finish_reason == "error" and is_whole(llm)


def test_what_is_left_of_a_dead_request_reaches_nobody(llm):
    """An output that was ready when its request was aborted is not given to a later request with that id."""
    engine = llm.llm_engine
    engine.add_request("a", "Once", SamplingParams(max_tokens=1), output_kind="final_only")
    engine.advance()
    engine.add_request("a", "The dog ran", SamplingParams(max_tokens=3), output_kind="final_only")
    outputs = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    assert [(o.prompt, len(o.outputs[0].token_ids)) for o in outputs] == [("The dog ran", 3)]
