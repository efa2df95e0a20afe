"""A step is data: an executor in another process, fed through pickle alone, gives the same tokens."""

from __future__ import annotations

import multiprocessing
import random

import pytest
from helpers.engines import VOCAB, make_engine, random_model, run_to_the_end

from minivllm.executor.torch_executor import TorchExecutor
from minivllm.sampling_params import SamplingParams

POOL = {"num_blocks": 40, "block_size": 4, "max_model_len": 64}


def serve(connection) -> None:
    """The other process: a model of its own, and whatever comes through the pipe."""
    import torch

    torch.set_num_threads(1)
    executors: dict[str, TorchExecutor] = {}
    while True:
        family, scheduler_output = connection.recv()
        if scheduler_output is None:  # a new workload: an executor that knows nobody
            executors[family] = make_engine(*random_model(family), **POOL).executor
            continue
        connection.send(executors[family].execute(scheduler_output))


class RemoteExecutor:
    """Sends each step through the pipe; `Connection.send` pickles."""

    def __init__(self, connection, family: str) -> None:
        self.connection, self.family = connection, family
        connection.send((family, None))

    def execute(self, scheduler_output):
        self.connection.send((self.family, scheduler_output))
        return self.connection.recv()


@pytest.fixture(scope="module")
def connection():
    context = multiprocessing.get_context("spawn")
    mine, theirs = context.Pipe()
    process = context.Process(target=serve, args=(theirs,), daemon=True)
    process.start()
    yield mine
    process.terminate()
    process.join()


def random_requests(rng: random.Random) -> list[tuple[list[int], SamplingParams, int]]:
    """(prompt, params, step at which it arrives) of a few requests that share prefixes and compete for the pool."""
    requests = []
    for number in range(rng.randint(2, 7)):
        shared, own = rng.choice((0, 8, 19)), rng.randint(1, 25)
        prompt = [(7 * j) % VOCAB for j in range(shared)] + [rng.randrange(VOCAB) for _ in range(own)]
        params = SamplingParams(
            max_tokens=rng.randint(1, 16),
            temperature=rng.choice((0.0, 1.0)),
            seed=number,
            presence_penalty=rng.choice((0.0, 0.5)),
            logprobs=rng.choice((None, 2)),
        )
        requests.append((prompt, params, rng.choice((0, 0, 2, 5))))
    return requests


def run(engine, requests) -> dict:
    outputs = {}
    for step in range(6):
        for number, (prompt, params, arrival) in enumerate(requests):
            if arrival == step:
                engine.add_request(str(number), prompt, params)
        outputs.update((o.request_id, o) for o in engine.step() if o.finished)
    outputs |= run_to_the_end(engine)
    return {i: (o.outputs[0].token_ids, o.outputs[0].logprobs) for i, o in outputs.items()}


def test_the_same_tokens_over_a_hundred_workloads(connection):
    preempted = 0
    for seed in range(100):
        rng = random.Random(seed)
        family, requests = rng.choice(("gpt2", "llama")), random_requests(rng)
        settings = {"max_num_seqs": 4, "max_num_batched_tokens": rng.choice((8, 64)), **POOL}
        settings["num_blocks"] = rng.choice((17, 40))
        model = random_model(family)
        here = make_engine(*model, **settings)
        there = make_engine(*model, **settings)
        there.engine_core.executor = RemoteExecutor(connection, family)
        assert run(there, requests) == run(here, requests)
        preempted += sum(len(event.preempted) for event in there.event_log)
    assert preempted > 20
