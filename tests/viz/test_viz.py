"""The figures' data: block tables rebuilt from the event log are those that the engine had."""

import random
import subprocess
import sys

import matplotlib
import numpy as np
import pytest
from helpers.executors import TokenExecutor

from minivllm.core import EventLog
from minivllm.engine.args import EngineArgs, build_engine
from minivllm.sampling_params import SamplingParams
from minivllm.viz import block_history, block_map, block_tables, excerpt

matplotlib.use("agg")
BLOCK_SIZE, NUM_BLOCKS = 4, 24


def make_engine(event_log=None, **settings):
    settings = {"max_model_len": 64, "max_num_seqs": 6, "max_num_batched_tokens": 40} | settings
    args = EngineArgs(num_gpu_blocks_override=NUM_BLOCKS, block_size=BLOCK_SIZE, **settings)
    engine = build_engine(args, executor=TokenExecutor(), vocab_size=50)
    if event_log is not None:
        engine.engine_core.event_log = event_log
    return engine


def live_tables(engine):
    return {name: {b.block_id for b in t} for name, t in engine.scheduler.kv_cache_manager.block_tables.items()}


def add_random_request(engine, name, rng):
    prompt = [rng.choice((1, 2))] * rng.choice((3, 8, 13)) + [rng.randrange(50) for _ in range(rng.randint(1, 20))]
    engine.add_request(name, prompt, SamplingParams(max_tokens=rng.randint(1, 25)))


@pytest.mark.parametrize("seed", range(20))
def test_history_is_what_the_live_tables_were(seed):
    """Admissions with hits, growth, chunked prompts, preemption, ends: the tables agree after every step."""
    rng = random.Random(seed)
    engine, expected, ended = make_engine(), [], []
    for step in range(200):
        if step < 60 and rng.random() < 0.5:
            add_random_request(engine, str(step), rng)
        if not engine.has_unfinished_requests():
            continue
        engine.step()
        expected.append(live_tables(engine))
        ended.append(set(engine.event_log[-1].finished))
    assert not engine.has_unfinished_requests()
    history = block_history(engine.event_log, NUM_BLOCKS)
    assert len(history.steps) == len(expected)
    for row, tables in enumerate(expected):
        rebuilt = {
            name: set(np.flatnonzero(history.held[row, i]).tolist())
            for i, name in enumerate(history.requests)
            if history.held[row, i].any() and name not in ended[row]
        }
        assert rebuilt == tables
    free = [event.num_free_blocks for event in engine.event_log]
    assert (NUM_BLOCKS - 1 - (history.ref_counts > 0).sum(axis=1)).tolist() == free
    assert ((history.owners >= 0) == (history.ref_counts > 0)).all() and not history.held[:, :, 0].any()


def test_the_random_runs_contain_what_they_should():
    hits = preempted = shared = 0
    for seed in range(20):
        rng, engine = random.Random(seed), make_engine()
        for n in range(30):
            add_random_request(engine, str(n), rng)
        while engine.has_unfinished_requests():
            engine.step()
        hits += sum(sum(event.hits.values()) for event in engine.event_log)
        preempted += sum(len(event.preempted) for event in engine.event_log)
        shared += int((block_history(engine.event_log, NUM_BLOCKS).ref_counts > 1).sum())
    assert hits > 0 and preempted > 0 and shared > 0


def test_a_log_without_its_beginning_is_refused():
    engine = make_engine(EventLog(max_steps=3))
    engine.add_request("a", [1] * 9, SamplingParams(max_tokens=8))
    while engine.has_unfinished_requests():
        engine.step()
    with pytest.raises(ValueError, match=r"log|begin"):
        block_history(engine.event_log, NUM_BLOCKS)


def test_an_abort_frees_the_blocks_of_its_request():
    engine = make_engine()
    for name in "ab":
        engine.add_request(name, [1] * 9, SamplingParams(max_tokens=8))
    engine.step()
    engine.abort_request("a")
    engine.step()
    assert block_history(engine.event_log, NUM_BLOCKS).ref_counts[:, 1:5].tolist() == [[2, 2, 1, 1], [1, 1, 0, 1]]


def test_owners_and_reference_counts_of_a_shared_prefix():
    engine = make_engine()
    engine.add_request("a", [1] * 9, SamplingParams(max_tokens=2))
    engine.add_request("b", [1] * 8 + [2, 3], SamplingParams(max_tokens=3))
    while engine.has_unfinished_requests():
        engine.step()
    history = block_history(engine.event_log, NUM_BLOCKS)
    assert history.requests == ["a", "b"]
    assert history.ref_counts[:, 1:5].tolist() == [[2, 2, 1, 1], [2, 2, 1, 1], [1, 1, 0, 1]]
    assert history.owners[:, 1:5].tolist() == [[0, 0, 0, 1], [0, 0, 0, 1], [1, 1, -1, 1]]


def test_figures_have_a_cell_for_every_holder():
    engine = make_engine()
    engine.add_request("a", [1] * 9, SamplingParams(max_tokens=2))
    engine.add_request("b", [1] * 8 + [2, 3], SamplingParams(max_tokens=3))
    while engine.has_unfinished_requests():
        engine.step()
    texts = [t.get_text() for t in block_map(engine.event_log, NUM_BLOCKS, {"a": "A"}).axes[0].texts]
    assert texts.count("A+b") == 2 and texts.count("A") == 1 and texts.count("b") == 3  # two of them after A ended
    figure = block_tables({"A": [3, 1], "B": [3, 2]}, {"A": 6, "B": 8}, block_size=4, num_blocks=5)
    assert {"3", "1", "2", "null", "A: 6 tokens"} <= {t.get_text() for t in figure.axes[0].texts}


def test_drawing_changes_no_global_settings():
    before = matplotlib.rcParams.copy()
    engine = make_engine()
    engine.add_request("a", [1] * 9, SamplingParams(max_tokens=2))
    engine.step()
    block_map(engine.event_log, NUM_BLOCKS)
    assert matplotlib.rcParams == before


def test_importing_needs_matplotlib_and_numpy_only():
    code = "import sys, minivllm.viz; print(*sorted({'torch', 'pandas', 'IPython'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "\n"


def test_excerpt_is_live_and_refuses_a_line_that_is_gone():
    assert excerpt(add_random_request, "engine.add_request") == (
        "engine.add_request(name, prompt, SamplingParams(max_tokens=rng.randint(1, 25)))"
    )
    assert excerpt(live_tables).startswith("def live_tables(engine):\n    return")
    with pytest.raises(ValueError, match="live_tables has no line with 'gone'"):
        excerpt(live_tables, "gone")
