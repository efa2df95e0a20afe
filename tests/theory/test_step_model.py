"""The model of a measured machine: what it is fitted to it reproduces, and made-up machines it finds again."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minivllm.theory import find_model
from minivllm.theory.roofline import decode_step, step_time
from minivllm.theory.step_model import StepModel, fit_overheads, fit_rates

MODEL = find_model("smollm2-135m")
SHORT, LONG = decode_step(MODEL, 1, 64), decode_step(MODEL, 32, 64)
CASES = [decode_step(MODEL, batch, context) for batch in (1, 4, 16, 32) for context in (64, 1024)]
rates = st.tuples(st.floats(1e10, 1e15), st.floats(1e9, 1e13))
kv_rates = st.one_of(st.none(), st.floats(1e9, 1e13))


@given(rates, kv_rates)
def test_rates_are_found_again(machine, kv_bytes_s):
    real = StepModel(*machine, kv_bytes_s)
    found = fit_rates((SHORT, real.predict(SHORT)), (LONG, real.predict(LONG)), kv_bytes_s=kv_bytes_s)
    for step in CASES:
        assert found.predict(step) == pytest.approx(real.predict(step), rel=1e-6)


@given(rates, kv_rates, st.floats(0, 1e-2), st.floats(0, 1e-3))
def test_overheads_are_found_again(machine, kv_bytes_s, fixed, per_request):
    real = StepModel(*machine, kv_bytes_s, fixed_s=fixed, per_request_s=per_request)
    bare = StepModel(*machine, kv_bytes_s)
    found = fit_overheads(bare, (SHORT, real.predict(SHORT)), (LONG, real.predict(LONG)))
    assert found.fixed_s == pytest.approx(fixed, abs=1e-9)
    assert found.per_request_s == pytest.approx(per_request, abs=1e-9)


@pytest.mark.parametrize("overlap", ["none", "all"])
def test_reproduces_what_it_was_fitted_to(overlap):
    """The chapter's case: 1 and 32 requests at context 64, with a slower rate for the cache."""
    model = fit_rates((SHORT, 0.040), (LONG, 0.120), kv_bytes_s=6e9, overlap=overlap)
    assert model.predict(SHORT) == pytest.approx(0.040, rel=0.01)
    assert model.predict(LONG) == pytest.approx(0.120, rel=0.01)
    between = decode_step(MODEL, 8, 64)
    other = fit_rates((SHORT, 0.040), (LONG, 0.120), kv_bytes_s=6e9, overlap={"none": "all", "all": "none"}[overlap])
    assert (model.predict(between) > other.predict(between)) == (overlap == "none")


def test_attention_counts_once():
    slow_cache, like_the_rest = StepModel(1e12, 1e10, 1e9), StepModel(1e12, 1e10)
    step = decode_step(MODEL, 16, 1024)
    without = sum(part.bytes / 1e10 + part.flops / 1e12 for name, part in step.parts.items() if name != "attention")
    assert slow_cache.predict(step) == pytest.approx(without + step.parts["attention"].bytes / 1e9)
    assert like_the_rest.predict(step) == step_time(step, 1e12, 1e10, overlap="none").seconds


def test_explains_itself():
    text = StepModel(1e12, 1e10, 1e9, fixed_s=1e-3).predict(LONG).explain()
    assert "fixed + per_request * requests + linear_layers + kv_reads" in text and "0.001 s + 0 s * 32 + " in text


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: fit_rates((SHORT, 0.1), (SHORT, 0.1)), "the same intensity"),
        (lambda: fit_rates((SHORT, 0.1), (LONG, 0.01)), "no positive rates give 0.1 s and 0.01 s"),
        (lambda: fit_rates((SHORT, 0.1), (LONG, 0.2), overlap="parts"), "overlap is 'parts', expected 'all' or 'none'"),
        (lambda: fit_rates((LONG, 0.2), (SHORT, 0.1), overlap="all"), "give the one with the lower intensity first"),
        (lambda: StepModel(1e12, 1e10, 0), "kv_bytes_s is 0, expected a positive number"),
        (lambda: fit_overheads(StepModel(1e12, 1e10), (SHORT, 1), (SHORT, 1)), "both steps have 1 requests"),
    ],
)
def test_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
