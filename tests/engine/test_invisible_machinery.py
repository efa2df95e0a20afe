"""Paging, block size, caching, a second tier, chunking, batching, preemption and backend never change what anyone gets.

Compared as logits at every computed position: on random weights an argmax hides errors of a few percent.
"""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from helpers.engines import VOCAB, LogitsRecorder, cdiv, make_engine, plain_logits, random_model, run_to_the_end
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from minivllm.core import KVCacheManager
from minivllm.cpu import CPUKernels, paged_decode, prepare
from minivllm.sampling_params import SamplingParams

MAX_MODEL_LEN = 64
TOLERANCE = 1e-4
MODELS = {family: random_model(family) for family in ("gpt2", "llama")}


# As `LLM` does it, but with all layers packed: these are smaller than any that it would pack.
PREPARED = {family: prepare(random_model(family)[0], CPUKernels(), min_packed_bytes=0) for family in MODELS}


@st.composite
def workloads(draw):
    block_size = draw(st.sampled_from([1, 2, 4, 8, 16]))
    longest = cdiv(MAX_MODEL_LEN - 1, block_size)
    max_num_seqs = draw(st.sampled_from([4, 1, 2, 3, 6]))
    chunked = draw(st.integers(0, 4)) > 0
    policy = draw(st.sampled_from(["fcfs", "priority"]))
    settings = {
        "block_size": block_size,
        # From a pool that holds one request of full length to one that holds two: preemption is common.
        "num_blocks": 1 + longest + draw(st.integers(0, longest)),
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": draw(st.integers(max_num_seqs, 48)) if chunked else MAX_MODEL_LEN,
        "enable_chunked_prefill": chunked,
        "long_prefill_token_threshold": draw(st.sampled_from([0, 0, 5, 16])),
        "enable_prefix_caching": draw(st.sampled_from([True, True, False])),
        "tier_slots": draw(st.sampled_from([0, 3, 40])),
        "watermark": draw(st.sampled_from([0.0, 0.0, 0.1])),
        "scheduling_policy": policy,
        "attention_backend": draw(st.sampled_from(["fast", "fast", "fast", "blockwise", "reference"])),
    }
    requests = []
    for number in range(draw(st.integers(2, 8))):
        prompt_len = draw(st.integers(1, 40)) + draw(st.sampled_from([0, 16, 23]))
        shared = min(draw(st.sampled_from([0, 12, 17, 32, 63])), prompt_len)
        family = draw(st.sampled_from([0, 0, 1]))
        prompt = [(7 * family + 3 * j) % VOCAB for j in range(shared)]
        prompt += [(11 * number + 5 * j + 1) % VOCAB for j in range(prompt_len - shared)]
        requests.append(
            {
                "prompt": {"prompt_token_ids": prompt, "cache_salt": draw(st.sampled_from([None, None, None, "a"]))},
                "params": SamplingParams(
                    max_tokens=draw(st.sampled_from([24, 1, 5, 12])),
                    temperature=draw(st.sampled_from([0.0, 1.0])),
                    seed=number,
                ),
                "priority": draw(st.integers(0, 2)) if policy == "priority" else 0,
                "arrival": draw(st.sampled_from([0, 0, 0, 1, 3, 8, 12])),
                "abort": draw(st.sampled_from([None, None, None, 0, 2, 5, 11])),
            }
        )
    # Packed and traced, or as it was built; attention in tiles of 4 tokens, or one for each request.
    form = {"prepared": draw(st.booleans()), "tile": draw(st.sampled_from([4, 64]))}
    return draw(st.sampled_from(["gpt2", "llama"])), form, settings, requests


def run_workload(workload) -> set[str]:
    """Run one workload with every check; the kinds of event that it contained."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(paged_decode, "TILE", workload[1]["tile"])
        return _run_workload(*workload)


def _run_workload(family: str, form: dict, config: dict, requests: list[dict]) -> set[str]:
    model, model_config = MODELS[family]
    served = PREPARED[family] if form["prepared"] else model
    engine = make_engine(served, model_config, max_model_len=MAX_MODEL_LEN, **config)
    recorder = LogitsRecorder(engine)
    finished, aborted = {}, set()
    step = 0
    while engine.has_unfinished_requests() or any(r["arrival"] >= step for r in requests):
        for number, request in enumerate(requests):
            if request["arrival"] == step:
                engine.add_request(str(number), request["prompt"], request["params"], priority=request["priority"])
            if request["abort"] is not None and request["arrival"] + request["abort"] == step:
                aborted.update(output.request_id for output in engine.abort_request(str(number)))
        for output in engine.step():
            if output.finished:
                finished[output.request_id] = output
        engine.scheduler.kv_cache_manager.check_invariants()
        step += 1
        assert step < 3000, "the workload does not end"

    assert finished.keys() | aborted == {str(n) for n in range(len(requests))} and not finished.keys() & aborted
    for number, output in finished.items():
        request = requests[int(number)]
        wanted = min(request["params"].max_tokens, MAX_MODEL_LEN - len(output.prompt_token_ids))
        assert len(output.outputs[0].token_ids) == wanted and output.outputs[0].finish_reason == "length"
    assert recorder.largest_error(model) < TOLERANCE
    pool = engine.scheduler.kv_cache_manager.block_pool
    assert pool.num_free_blocks == pool.num_usable_blocks

    log = [event for event in engine.event_log if event.scheduled]
    prompt_len = {str(n): len(request["prompt"]["prompt_token_ids"]) for n, request in enumerate(requests)}
    kinds = {
        "preemption": any(event.preempted for event in engine.event_log),
        "prefix hit": any(hits for event in log for hits in event.hits.values()),
        "load": any(event.loads for event in log),
        "prefill beside decode": any(1 in e.scheduled.values() and max(e.scheduled.values()) > 1 for e in log),
        "chunked prompt": any(event.computed[r] < prompt_len[r] for event in log for r in event.scheduled),
        "abort": bool(aborted),
        "priority": config["scheduling_policy"] == "priority",
    }
    return {kind for kind, present in kinds.items() if present}


def test_random_workloads():
    seen: Counter[str] = Counter()

    @settings(max_examples=320, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
    @given(workloads())
    def run(workload):
        seen.update(["workloads", *run_workload(workload)])

    run()
    print(dict(seen))
    # A generator that no longer produced preemptions or hits would let everything pass for nothing.
    assert seen["workloads"] >= 300
    assert all(
        seen[kind] >= 30
        for kind in ("preemption", "prefix hit", "load", "prefill beside decode", "chunked prompt", "abort")
    ), seen


class TestEachPieceAlone:
    """The same prompts in the one setting that exercises each piece; readable when the random test fails."""

    prompts = ([(3 * j + 1) % VOCAB for j in range(40)], [(3 * j + 1) % VOCAB for j in range(33)], [5, 9, 2])

    def run(self, family="llama", **config):
        model, model_config = MODELS[family]
        config = {"num_blocks": 64, "block_size": 4, **config}
        engine = make_engine(model, model_config, max_model_len=MAX_MODEL_LEN, **config)
        recorder = LogitsRecorder(engine)
        for i, prompt in enumerate(self.prompts):
            engine.add_request(str(i), prompt, SamplingParams(max_tokens=16, temperature=0))
        outputs = run_to_the_end(engine)
        assert recorder.largest_error(model) < TOLERANCE
        return engine, [outputs[str(i)].outputs[0].token_ids for i in range(len(self.prompts))]

    @pytest.mark.parametrize("family", ["gpt2", "llama"])
    @pytest.mark.parametrize("backend", ["fast", "blockwise", "reference"])
    def test_backends(self, family, backend):
        self.run(family, attention_backend=backend)

    @pytest.mark.parametrize("block_size", [1, 3, 16, 64])
    def test_block_size(self, block_size):
        _, tokens = self.run(block_size=block_size, num_blocks=200 // block_size + 8)
        assert tokens == self.run()[1]

    def test_second_tier(self):
        """The pool holds little more than one prompt at a time; what it forgets comes back."""
        model, model_config = MODELS["llama"]
        engine = make_engine(
            model, model_config, max_model_len=MAX_MODEL_LEN, num_blocks=18, block_size=4, tier_slots=40
        )
        recorder = LogitsRecorder(engine)
        tokens = []
        for i, prompt in enumerate([self.prompts[0], [(7 * j) % VOCAB for j in range(50)], self.prompts[0]]):
            engine.add_request(str(i), prompt, SamplingParams(max_tokens=9, temperature=0))
            tokens.append(run_to_the_end(engine)[str(i)].outputs[0].token_ids)
        assert engine.event_log[-9].hits == {"2": 36}  # nine blocks: two are still in the pool
        assert sum(len(event.loads) for event in engine.event_log) == 7
        assert tokens[2] == tokens[0]
        assert recorder.largest_error(model) < TOLERANCE

    def test_chunked_prefill(self):
        engine, tokens = self.run(max_num_batched_tokens=8, max_num_seqs=3)
        assert max(len(e.scheduled) and max(e.scheduled.values()) for e in engine.event_log) == 8
        assert tokens == self.run()[1]

    def test_prefix_caching_hits_within_one_step(self):
        engine, tokens = self.run()
        assert engine.event_log[0].hits == {"0": 0, "1": 32, "2": 0}
        assert tokens == self.run(enable_prefix_caching=False)[1]

    def test_preemption(self):
        engine, tokens = self.run(num_blocks=20, enable_prefix_caching=False)
        assert any(e.preempted for e in engine.event_log)
        assert tokens == self.run()[1]

    def test_resume_after_preemption_hits_its_own_blocks(self):
        engine, tokens = self.run(num_blocks=20)
        preempted = {r for e in engine.event_log for r in e.preempted}
        hits = [e.hits[r] for e in list(engine.event_log)[1:] for r in e.hits if r in preempted]
        assert hits and max(hits) > 0
        assert tokens == self.run()[1]


def run_hole_scenario():
    """See TestKnownHole in tests/core: `low` is preempted in the very step that was to fill its block 5."""
    model, model_config = MODELS["llama"]
    engine = make_engine(
        model,
        model_config,
        num_blocks=9,
        block_size=4,
        max_model_len=28,
        scheduling_policy="priority",
        max_num_seqs=4,
        max_num_batched_tokens=64,
        long_prefill_token_threshold=8,
    )
    recorder = LogitsRecorder(engine)
    low = [(5 * j + 2) % VOCAB for j in range(24)]
    high = [(7 * j + 3) % VOCAB for j in range(12)]
    engine.add_request("low", low, SamplingParams(max_tokens=4, temperature=0), priority=9)
    engine.step()
    engine.add_request("high", high, SamplingParams(max_tokens=1, temperature=0), priority=0)
    run_to_the_end(engine)
    assert [e.preempted for e in engine.event_log if e.preempted] == [["low"]]
    return recorder.largest_error(model)


def test_the_known_hole_reads_what_was_never_computed(monkeypatch):
    monkeypatch.setattr(KVCacheManager, "free_unfilled", lambda self, request, num_computed: self.free(request))
    assert run_hole_scenario() > 0.1


def test_the_known_hole_is_closed():
    assert run_hole_scenario() < TOLERANCE


def test_the_comparison_sees_a_wrong_block(monkeypatch):
    """One wrong slot of one layer must be visible, or the tests above prove nothing."""
    model, model_config = MODELS["llama"]
    engine = make_engine(model, model_config, num_blocks=32, block_size=4, max_model_len=MAX_MODEL_LEN)
    recorder = LogitsRecorder(engine)
    engine.add_request("a", list(range(20)), SamplingParams(max_tokens=4, temperature=0))
    engine.step()
    engine.executor.kv_cache.pages[1, 1, 2, 1] += 0.5
    run_to_the_end(engine)
    assert recorder.largest_error(model) > 100 * TOLERANCE


def test_plain_logits_is_causal():
    model, _ = MODELS["gpt2"]
    short, long = plain_logits(model, [1, 2, 3]), plain_logits(model, [1, 2, 3, 4])
    torch.testing.assert_close(short, long[:3], atol=1e-5, rtol=0)
