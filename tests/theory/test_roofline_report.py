"""The report is the functions of `roofline`, put together: each figure from first principles."""

import math

import pytest

from minivllm.theory import find_device, find_model, roofline, sizing
from minivllm.theory.roofline_report import RooflineSettings, roofline_report

H100 = find_device("h100-sxm")


def test_figures():
    spec = find_model("qwen2.5-7b")
    report = roofline_report(spec, H100, RooflineSettings(context=512, batches=(1, 64), memory_efficiency=0.5))
    assert (report.context, report.compute_dtype, report.tp) == (512, "bfloat16", 1)
    assert (report.flop_s, report.bytes_s) == (H100.flop_s(), H100.bandwidth / 2)
    assert report.ridge == report.flop_s / report.bytes_s
    assert [(timed.phase, timed.batch) for timed in report.steps] == [("prefill", 1), ("decode", 1), ("decode", 64)]
    decode = report.steps[2]
    assert decode.step == roofline.decode_step(spec, 64, 512)
    assert decode.tokens_per_s == 64 / decode.time.seconds
    assert decode.time.memory_s == pytest.approx(decode.step.bytes / report.bytes_s)
    assert report.steps[0].tokens_per_s == 512 / report.steps[0].time.seconds
    assert report.critical_batch == pytest.approx(report.ridge)  # dense, 16 bits: 2 bytes and 2 operations a weight
    assert report.weights == sizing.weight_bytes(spec) and report.weights_fit


def test_all_experts_are_read_at_the_ridge():
    spec = find_model("mixtral-8x7b")
    dense = roofline_report(find_model("mistral-7b-v0.3"), H100, RooflineSettings()).critical_batch
    assert roofline_report(spec, H100, RooflineSettings()).critical_batch > 3 * dense  # 2 of 8 experts a token


def test_no_batch_hides_long_caches():
    report = roofline_report(find_model("llama-2-7b"), H100, RooflineSettings())
    assert report.context == 4096 and math.isinf(report.critical_batch_with_kv)


def test_defaults_are_the_model_s():
    report = roofline_report(find_model("gpt2"), H100, RooflineSettings())
    assert report.context == 1024 and report.spec.dtype == report.compute_dtype != "float32"
    with pytest.raises(ValueError, match="context 2,048 is more than gpt2 was made for"):
        roofline_report(find_model("gpt2"), H100, RooflineSettings(context=2048))


def test_what_does_not_fit():
    report = roofline_report(find_model("llama-3.1-405b"), find_device("t4"), RooflineSettings(batches=(1,)))
    assert not report.weights_fit and len(report.steps) == 2
