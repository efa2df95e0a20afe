"""Sampling, against what the definitions say and against counting."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minivllm.executor import sampler
from minivllm.executor.sampler import (
    apply_penalties,
    apply_top_k_top_p,
    draw,
    first_largest,
    sample,
    top_logprobs,
    uniform,
)
from minivllm.executor.torch_executor import CachedRequestState
from minivllm.sampling_params import SamplingParams

V = 12


def request(name="r", prompt=(1, 2), output=(), eos=None, stop=(), **params):
    params.setdefault("seed", 0)
    ends = frozenset({*stop, eos} - {None})
    return CachedRequestState(
        name, [*prompt, *output], len(prompt), SamplingParams(**params), ends, np.zeros(1, dtype=np.int64)
    )


def logits(seed=0, n=1):
    return torch.randn(n, V, generator=torch.Generator().manual_seed(seed)) * 2


def draws(row, n=4000, **params):
    """How often each token is drawn from one row of logits, over `n` seeds."""
    requests = [request(str(seed), seed=seed, **params) for seed in range(n)]
    tokens, _ = sample(row.repeat(n, 1), requests)
    return torch.bincount(torch.tensor(tokens), minlength=V) / n


def test_greedy_is_argmax():
    x = logits(n=5)
    tokens, reported = sample(x.clone(), [request(str(i), temperature=0) for i in range(5)])
    assert tokens == x.argmax(-1).tolist() and reported == {}


@pytest.mark.parametrize("num_tokens", [300, 4096, 4097, 5119, 50257])
@pytest.mark.parametrize("num_rows", [1, 7])
def test_the_first_of_equal_logits_is_greedy(num_tokens, num_rows):
    generator = torch.Generator().manual_seed(num_tokens)
    for values in (3, 1000):
        x = torch.randint(values, (num_rows, num_tokens), generator=generator).float()
        x[0, -1] = values + 1  # the very last, behind the whole pieces
        first = [(row == row.max()).nonzero()[0].item() for row in x]
        assert first_largest(x).tolist() == first


def test_masks_and_biases_of_different_rows():
    x = torch.zeros(4, V)
    requests = [
        request("masked", eos=3, stop=(4,), min_tokens=2),
        request("past its minimum", output=(1, 1), eos=3, stop=(4,), min_tokens=2, logit_bias={3: 1.0}),
        request("biased", logit_bias={5: 2.0, 6: -1.0}),
        request("plain", temperature=0),
    ]
    sample(x, requests)
    assert x[0].isneginf().nonzero().flatten().tolist() == [3, 4] and x[0].isfinite().sum() == V - 2
    assert x[1].tolist() == [0, 0, 0, 1] + [0] * (V - 4)
    assert x[2].tolist() == [0] * 5 + [2, -1] + [0] * (V - 7)
    assert not x[3].any()


@pytest.mark.parametrize("num_tokens", [5, 256, 1000, 50257])
def test_draw_inverts_the_running_sum(num_tokens):
    """Also at both ends, and never a token of probability 0."""
    generator = torch.Generator().manual_seed(num_tokens)
    probs = torch.rand(400, num_tokens, generator=generator) ** 4
    probs[torch.rand(400, num_tokens, generator=generator) < 0.5] = 0
    probs[:, 1] = 0.1
    probs /= probs.sum(dim=-1, keepdim=True)
    u = torch.rand(400, generator=generator, dtype=torch.float64)
    u[0], u[1] = 0, 1 - 2**-32
    token = draw(probs, u)
    assert (probs[range(400), token] > 0).all()
    running = np.cumsum(probs.double().numpy(), axis=-1)
    end = running[range(400), token.numpy()]
    start = end - probs.double().numpy()[range(400), token.numpy()]
    target = u.numpy() * running[:, -1]
    assert (start <= target + 1e-7).all() and (target <= end + 1e-7).all()


@pytest.mark.parametrize(
    ("top_k", "top_p"),
    [(0, 0.9), (0, 0.999999), (50, 1.0), (50, 0.5), (256, 1.0), (300, 0.9), (4999, 1.0), (0, 1e-9)],
)
@pytest.mark.parametrize("spread", [0.01, 1.0, 8.0])
def test_the_candidates_give_what_a_full_sort_gives(top_k, top_p, spread, monkeypatch):
    x = torch.randn(3, 5000, generator=torch.Generator().manual_seed(1)) * spread
    got = apply_top_k_top_p(x, [top_k] * 3, [top_p] * 3)
    monkeypatch.setattr(sampler, "CANDIDATES", 5000)
    expected = apply_top_k_top_p(x, [top_k] * 3, [top_p] * 3)
    differ = (got.isneginf() != expected.isneginf()).sum(dim=-1)
    assert (differ <= 1).all()  # the running sums round differently: one token on the edge may be in or out
    both = got.isfinite() & expected.isfinite()
    assert torch.equal(got[both], expected[both])


def test_ties_beyond_the_candidates_stay():
    x = torch.zeros(2, 5000)
    x[1, 7] = 1
    got = apply_top_k_top_p(x, [3, 1], [1.0, 1.0])
    assert got[0].isfinite().all() and got[1].isfinite().nonzero().flatten().tolist() == [7]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_frequencies_are_the_softmax(temperature):
    row = logits()
    expected = (row[0] / temperature).softmax(-1)
    assert (draws(row, temperature=temperature) - expected).abs().max() < 0.03


def test_top_k_keeps_k():
    row = logits()
    got = draws(row, n=2000, top_k=3)
    best = row[0].topk(3).indices.tolist()
    assert set(got.nonzero().flatten().tolist()) == set(best)
    assert (got[best] - row[0][best].softmax(-1)).abs().max() < 0.04


def test_top_p_keeps_the_smallest_set_that_reaches_p():
    probs = torch.tensor([0.4, 0.3, 0.2, 0.1])
    for p, kept in ((0.39, 1), (0.41, 2), (0.69, 2), (0.71, 3), (0.95, 4), (1.0, 4)):
        out = apply_top_k_top_p(probs.log()[None], [0], [p])
        assert out.isfinite().sum() == kept, p


def test_top_k_comes_before_top_p():
    probs = torch.tensor([0.4, 0.3, 0.2, 0.1])
    # Of the two that top_k leaves, the first has 4/7 = 0.57 and is enough for p = 0.5.
    assert apply_top_k_top_p(probs.log()[None], [2], [0.5]).isfinite().sum() == 1
    assert apply_top_k_top_p(probs.log()[None], [2], [0.6]).isfinite().sum() == 2


def test_top_k_keeps_ties_with_the_last_one():
    assert apply_top_k_top_p(torch.tensor([[3.0, 1.0, 1.0, 0.0]]), [2], [1.0]).isfinite().tolist() == [
        [True, True, True, False]
    ]


def test_rows_with_and_without_limits_in_one_batch():
    x = torch.tensor([[0.0, 1.0, 2.0]]).repeat(3, 1)
    out = apply_top_k_top_p(x, [0, 1, 99], [1.0, 1.0, 0.5])
    assert out.isfinite().sum(-1).tolist() == [3, 1, 1]


def test_min_p_is_relative_to_the_likeliest():
    row = torch.full((1, V), -math.inf)
    row[0, :3] = torch.tensor([0.6, 0.3, 0.1]).log()
    assert draws(row, n=500, min_p=0.4).nonzero().flatten().tolist() == [0, 1]
    assert draws(row, n=500, min_p=0.6).nonzero().flatten().tolist() == [0]


@settings(max_examples=50, deadline=None, derandomize=True)
@given(st.integers(0, 10**9), st.integers(1, 5), st.integers(0, 4))
def test_the_draw_depends_on_seed_and_position_only(seed, neighbours, place):
    row = logits(seed)
    mine = request("mine", seed=seed, output=[3] * place)
    alone = sample(row.clone(), [mine])[0][0]
    others = [request(str(i), seed=i, temperature=0.7, top_k=5) for i in range(neighbours)]
    batch = torch.cat([logits(seed + 1, neighbours), row])
    assert sample(batch, [*others, mine])[0][-1] == alone


def test_uniform_numbers_are_uniform_and_differ_by_seed_and_position():
    u = torch.tensor([uniform(seed, position) for seed in range(100) for position in range(100)])
    assert u.min() >= 0 and u.max() < 1 and abs(u.mean() - 0.5) < 0.01 and abs(u.var() - 1 / 12) < 0.005
    assert len(set(u.tolist())) > 9990
    assert uniform(1, 11) != uniform(11, 1) and uniform(-1, 0) != uniform(1, 0) and uniform(2**80, 0) < 1


def test_a_token_of_probability_zero_is_never_drawn():
    row = torch.full((1, V), -math.inf)
    row[0, [2, 5]] = 0.0
    assert draws(row, n=3000).nonzero().flatten().tolist() == [2, 5]


def test_large_vocabulary_rare_tokens_keep_their_share():
    """A running sum in float32 loses the tail of 50,000 equal tokens; the last fifth must get its fifth."""
    n, size = 2000, 50_000
    requests = [request(str(i), seed=i) for i in range(n)]
    tokens = torch.tensor(
        [t for i in range(0, n, 100) for t in sample(torch.zeros(100, size), requests[i : i + 100])[0]]
    )
    assert abs((tokens >= 0.8 * size).float().mean() - 0.2) < 0.03


def test_penalties():
    x = torch.tensor([[2.0, -2.0, 1.0, 1.0, 0.5] + [0.0] * (V - 5)])
    r = request(prompt=[0, 1], output=[2, 2, 3], repetition_penalty=2.0, frequency_penalty=0.25, presence_penalty=0.5)
    out = apply_penalties(x, [r])[0]
    # repetition looks at prompt and output; frequency and presence at the output only
    assert out[:5].tolist() == [1.0, -4.0, 0.5 - 2 * 0.25 - 0.5, 0.5 - 0.25 - 0.5, 0.5]


def test_penalties_without_output_yet():
    x = torch.ones(1, V)
    out = apply_penalties(x, [request(prompt=[0], presence_penalty=1.0, repetition_penalty=2.0)])
    assert out[0, :2].tolist() == [0.5, 1.0]


def test_penalised_and_other_rows_do_not_mix():
    x = torch.zeros(2, V)
    x[:, 4] = 5.0
    rows = [
        request("a", prompt=[4], temperature=0, repetition_penalty=2.0, logit_bias={4: -9.0}),
        request("b", temperature=0),
    ]
    tokens, _ = sample(x, rows)
    assert tokens[0] != 4 and tokens[1] == 4


def test_logit_bias_and_min_tokens():
    x = torch.zeros(1, V)
    x[0, 7] = 3.0
    assert sample(x.clone(), [request(temperature=0, logit_bias={3: 4.0})])[0] == [3]
    x[0, 8] = 2.0
    ends = dict(eos=7, stop=[8], temperature=0, min_tokens=2)
    assert sample(x.clone(), [request(**ends)])[0] == [0]  # EOS and the stop token are masked
    assert sample(x.clone(), [request(output=[0, 0], **ends)])[0] == [7]


def test_logprobs_are_those_of_the_raw_logits_with_rank():
    x = logits()
    expected = x[0].log_softmax(-1)
    r = request(temperature=0.3, top_k=2, logprobs=2, logit_bias={0: 50.0})
    (token,), reported = sample(x.clone(), [r])
    assert token == 0  # the bias decides; the report does not know it
    row = reported["r"]
    assert next(iter(row)) == 0 and row[0].logprob == pytest.approx(expected[0].item(), abs=1e-5)
    assert row[0].rank == (expected >= expected[0]).sum().item()
    assert set(row) == {0, *expected.topk(2).indices.tolist()}
    assert [row[t].rank for t in expected.topk(2).indices.tolist()] == [1, 2]


def test_logprobs_zero_reports_the_token_and_minus_one_everything():
    x = logits()
    assert len(top_logprobs(x.log_softmax(-1), [3], [0])[0]) == 1
    everything = top_logprobs(x.log_softmax(-1), [3], [-1])[0]
    assert len(everything) == V and sum(math.exp(e.logprob) for e in everything.values()) == pytest.approx(
        1.0, abs=1e-5
    )


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"temperature": -0.1}, r"temperature must be a finite number in \[0, 2\], got -0.1"),
        ({"temperature": math.nan}, "temperature must be a finite number"),
        ({"temperature": 10**400}, "temperature must be a finite number"),
        ({"temperature": 2.5}, r"temperature must be a finite number in \[0, 2\], got 2.5"),
        ({"temperature": "hot"}, "temperature must be a finite number"),
        ({"top_p": 0.0}, r"top_p must be a finite number in \(0, 1\], got 0.0"),
        ({"top_p": 1.1}, r"top_p must be a finite number in \(0, 1\], got 1.1"),
        ({"top_k": -2}, r"top_k must be a whole number of at least -1 \(0 or -1: off\), got -2"),
        ({"top_k": 2.0}, "top_k must be a whole number"),
        ({"min_p": 1.5}, r"min_p must be a finite number in \[0, 1\], got 1.5"),
        ({"n": 0}, "n must be a whole number of at least 1, got 0"),
        ({"n": 2, "temperature": 0}, r"n=2 with temperature 0 would give 2 equal answers. Use n=1, or a temperature"),
        ({"n": 2, "temperature": 1e-6}, "n=2 with temperature 0"),
        ({"max_tokens": 0}, "max_tokens must be a whole number of at least 1, got 0"),
        ({"max_tokens": True}, "max_tokens must be a whole number"),
        ({"min_tokens": -1}, "min_tokens must be a whole number of at least 0, got -1"),
        ({"min_tokens": 17}, r"min_tokens \(17\) must not exceed max_tokens \(16\)"),
        ({"presence_penalty": 3}, r"presence_penalty must be a finite number in \[-2, 2\], got 3"),
        ({"frequency_penalty": -2.1}, r"frequency_penalty must be a finite number in \[-2, 2\]"),
        ({"repetition_penalty": 0.0}, r"repetition_penalty must be a finite number in \[1e-06, 1e\+06\], got 0.0"),
        ({"repetition_penalty": math.inf}, "repetition_penalty must be a finite number"),
        ({"stop": ["", "x"]}, r"stop must hold non-empty strings, got \['', 'x'\]"),
        ({"stop": [3]}, "stop must hold non-empty strings"),
        ({"stop_token_ids": [1.5]}, r"stop_token_ids must hold whole numbers, got \[1.5\]"),
        ({"logprobs": -2}, r"logprobs must be a whole number of at least -1 \(-1: all\), got -2"),
        ({"prompt_logprobs": "all"}, "prompt_logprobs must be a whole number"),
        ({"n": 16385}, "n must be at most 16,384, got 16,385"),
        ({"stop": 5}, "stop must be a list, got 5"),
        ({"stop_token_ids": 5}, "stop_token_ids must be a list, got 5"),
        ({"logit_bias": [1]}, r"logit_bias must be a dict {token id: number}, got \[1\]"),
        ({"logit_bias": {5: 1e308}}, "logit_bias of token 5 must be a finite number within ±1,000,000, got 1e[+]308"),
        ({"repetition_penalty": 1e-300}, "repetition_penalty must be a finite number in"),
        ({"ignore_eos": "no"}, "ignore_eos must be True or False, got 'no'"),
        ({"skip_special_tokens": None}, "skip_special_tokens must be True or False, got None"),
        ({"seed": 1.0}, "seed must be a whole number or None, got 1.0"),
        ({"logit_bias": {"3": 1.0}}, r"logit_bias keys must be token ids \(whole numbers\), got '3'"),
        ({"logit_bias": {3: math.inf}}, "logit_bias of token 3 must be a finite number within ±1,000,000, got inf"),
    ],
)
def test_bad_sampling_values(kwargs, message):
    with pytest.raises(ValueError, match=message):
        SamplingParams(**kwargs)


def test_numpy_numbers_are_numbers():
    params = SamplingParams(max_tokens=np.int64(3), temperature=np.float32(0.5), stop_token_ids=np.array([0, 7]))
    assert params.max_tokens == 3 and params.stop_token_ids == [0, 7]


def test_a_top_p_below_what_float32_can_hold_keeps_the_likeliest():
    assert apply_top_k_top_p(torch.tensor([[0.0, 3.0, 1.0]]), [0], [1e-60]).isfinite().tolist() == [
        [False, True, False]
    ]


def test_tiny_temperatures_as_in_vllm():
    assert SamplingParams(temperature=1e-6).temperature == 0.0
    assert SamplingParams(temperature=1e-3).temperature == 1e-2
