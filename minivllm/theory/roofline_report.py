"""A model's steps under a device's roofline: the least time of a prefill and of decodes, and the critical batches."""

from __future__ import annotations

from dataclasses import dataclass

from minivllm.theory.catalog import Device
from minivllm.theory.model_spec import ModelSpec, full_dtype
from minivllm.theory.plan import as_served
from minivllm.theory.quantity import Quantity
from minivllm.theory.roofline import (
    Step,
    StepOptions,
    StepTime,
    critical_batch,
    critical_batch_with_kv,
    decode_step,
    prefill_step,
    ridge_point,
    step_time,
)
from minivllm.theory.sizing import check_context, weight_bytes, weight_format

DEFAULT_CONTEXT = 4096
LARGE_BATCH = 4096  # tokens in a step of which every expert gets some


@dataclass(frozen=True)
class RooflineSettings:
    """What a user sets. Efficiencies are the reached shares of the device's rates, 0.001 to 1."""

    context: int | None = None  # tokens of each request; None is DEFAULT_CONTEXT, or the model's most
    batches: tuple[int, ...] = (1, 8, 32, 128, 256)  # of the decode steps
    tp: int = 1
    kv_dtype: str = "auto"
    weight_dtype: str = "auto"
    compute_dtype: str = "auto"  # of the products
    compute_efficiency: float = 1.0
    memory_efficiency: float = 1.0


@dataclass(frozen=True)
class TimedStep:
    """A step, and the least time that it takes on one GPU."""

    phase: str  # "prefill" or "decode"
    batch: int  # requests
    step: Step
    time: StepTime

    @property
    def tokens_per_s(self) -> float:
        """Tokens that all requests of the step compute in a second: with a prefill, of the prompt."""
        return self.step.num_tokens / self.time.seconds


@dataclass(frozen=True)
class RooflineReport:
    """Rates, bytes and steps are those of one GPU of `tp`."""

    spec: ModelSpec
    device: Device
    tp: int
    context: int  # tokens of each request
    compute_dtype: str  # of the products
    flop_s: float  # reached
    bytes_s: float  # reached
    weights: Quantity
    ridge: Quantity
    critical_batch: Quantity  # at which the linear layers reach the ridge
    critical_batch_with_kv: Quantity  # the same with each request's KV reads; infinite if no batch is large enough
    steps: tuple[TimedStep, ...]  # the prefill of one request, then a decode for each batch

    @property
    def weights_fit(self) -> bool:
        return self.weights < self.device.memory_bytes


def roofline_report(spec: ModelSpec, device: Device, settings: RooflineSettings) -> RooflineReport:
    """ValueError if something cannot be: a context beyond the model's, a dtype without a rate, a `tp` that divides
    nothing."""
    spec = as_served(spec)
    context = settings.context or min(DEFAULT_CONTEXT, spec.max_position_embeddings)
    check_context(spec, context)
    compute_dtype = _compute_dtype(spec, device, settings)
    options: StepOptions = {"weight_dtype": settings.weight_dtype, "kv_dtype": settings.kv_dtype, "tp": settings.tp}
    steps = [("prefill", 1, prefill_step(spec, context, **options))]
    steps += [("decode", batch, decode_step(spec, batch, context, **options)) for batch in settings.batches]
    timed = tuple(
        TimedStep(phase, batch, step, _time(step, device, compute_dtype, settings)) for phase, batch, step in steps
    )
    flop_s = device.flop_s(compute_dtype) * settings.compute_efficiency
    bytes_s = device.bandwidth * settings.memory_efficiency
    one = decode_step(spec, 1, context, **options).parts
    flops_per_token = one["projections"].flops + one["lm_head"].flops
    # At the ridge the batch is so large that all experts are read.
    large = decode_step(spec, LARGE_BATCH, context, **options).parts
    read = large["projections"].bytes + large["lm_head"].bytes
    attention = one["attention"]
    return RooflineReport(
        spec,
        device,
        settings.tp,
        context,
        compute_dtype,
        flop_s,
        bytes_s,
        weights=weight_bytes(spec, settings.weight_dtype, settings.tp),
        ridge=ridge_point(flop_s, bytes_s),
        critical_batch=critical_batch(flop_s, bytes_s, 2 * read / flops_per_token),
        critical_batch_with_kv=critical_batch_with_kv(
            flop_s, bytes_s, read, flops_per_token + attention.flops, attention.bytes
        ),
        steps=timed,
    )


def _compute_dtype(spec: ModelSpec, device: Device, settings: RooflineSettings) -> str:
    """What the products run in: fp8 for weights in fp8 where the device has such a rate, as in vLLM, else the model's
    dtype. Other quantised weights are unpacked before the product."""
    if settings.compute_dtype != "auto":
        return full_dtype(settings.compute_dtype)
    is_fp8 = weight_format(spec, settings.weight_dtype)[0] == "fp8"
    return "fp8" if is_fp8 and "fp8" in device.dense_tflop_s else spec.dtype


def _time(step: Step, device: Device, compute_dtype: str, settings: RooflineSettings) -> StepTime:
    return step_time(
        step,
        device.flop_s(compute_dtype),
        device.bandwidth,
        compute_efficiency=settings.compute_efficiency,
        memory_efficiency=settings.memory_efficiency,
        link_bytes_s=None if device.interconnect_gb_s is None else device.interconnect_gb_s * 1e9,
        tp=settings.tp,
    )
