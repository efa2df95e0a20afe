"""The time of a step on a machine that was measured: two measured steps fix two unknowns, and the others follow.

A roofline bounds a step by data sheets. This predicts one: from rates that the machine reached, and from what a step
costs beside arithmetic and traffic. What holds on which machine is a question for a measurement; see the chapter
"Arithmetic intensity".
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from minivllm.theory.quantity import Quantity
from minivllm.theory.roofline import Step, step_time

ATTENTION = "attention"


@dataclass(frozen=True)
class StepModel:
    """Rates and overheads of one machine, and how compute and memory combine.

    `kv_bytes_s` is the rate at which attention gets through the cache, its arithmetic included, measured by itself; if
    None, attention counts like every other part. `overlap` is that of `step_time`: "none" adds compute and memory up,
    "all" takes the larger of the two.
    """

    flop_s: float
    bytes_s: float
    kv_bytes_s: float | None = None
    overlap: str = "none"
    fixed_s: float = 0.0  # per step
    per_request_s: float = 0.0

    def __post_init__(self) -> None:
        for name in ("flop_s", "bytes_s", "kv_bytes_s"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{name} is {value!r}, expected a positive number")

    def predict(self, step: Step) -> Quantity:
        """Seconds of the step."""
        kv_s = _kv_seconds(step, self.kv_bytes_s)
        rest = step_time(self._others(step), self.flop_s, self.bytes_s, overlap=self.overlap).seconds
        return Quantity(
            self.fixed_s + self.per_request_s * step.num_requests + rest + kv_s, "s", "step",
            "fixed + per_request * requests + linear_layers + kv_reads",
            {
                "fixed": Quantity(self.fixed_s, "s", "fixed"),
                "per_request": Quantity(self.per_request_s, "s", "per request"),
                "requests": step.num_requests,
                "linear_layers": rest,
                "kv_reads": Quantity(kv_s, "s", "KV reads"),
            },
        )  # fmt: skip

    def _others(self, step: Step) -> Step:
        """The step without what `kv_bytes_s` accounts for."""
        if self.kv_bytes_s is None:
            return step
        return replace(step, parts={name: part for name, part in step.parts.items() if name != ATTENTION})


def fit_rates(
    short: tuple[Step, float], long: tuple[Step, float], *, kv_bytes_s: float | None = None, overlap: str = "none"
) -> StepModel:
    """The FLOP/s and B/s that reproduce two measured steps, given as (step, seconds).

    With overlap "none", two equations with two unknowns. With "all", the short step is taken for all memory and the
    long one for all compute. ValueError if no positive rates do it.
    """
    model = StepModel(1.0, 1.0, kv_bytes_s, overlap)
    (step_a, a), (step_b, b) = ((model._others(s), t - _kv_seconds(s, kv_bytes_s)) for s, t in (short, long))
    if overlap == "all":
        per_byte, per_flop = a / step_a.bytes, b / step_b.flops
    elif overlap == "none":
        determinant = step_a.bytes * step_b.flops - step_b.bytes * step_a.flops
        if determinant == 0:
            raise ValueError("both steps have the same intensity, which leaves the two rates undetermined")
        per_byte = (a * step_b.flops - b * step_a.flops) / determinant
        per_flop = (step_a.bytes * b - step_b.bytes * a) / determinant
    else:
        raise ValueError(f"overlap is {overlap!r}, expected 'all' or 'none'")
    if not (per_byte > 0 and per_flop > 0):
        raise ValueError(
            f"no positive rates give {short[1]:.3g} s and {long[1]:.3g} s, but {per_byte:.3g} s per byte and "
            f"{per_flop:.3g} s per operation; measure again, or take steps that differ more"
        )
    model = replace(model, flop_s=1 / per_flop, bytes_s=1 / per_byte)
    if any(abs(model.predict(step) / seconds - 1) > 0.05 for step, seconds in (short, long)):
        raise ValueError(
            "with overlap 'all' the first step must be bound by memory and the second by compute, and these are not; "
            "give the one with the lower intensity first, or steps that differ more"
        )
    return model


def fit_overheads(model: StepModel, short: tuple[Step, float], long: tuple[Step, float]) -> StepModel:
    """`model` with the fixed time and the time per request that reproduce two measured steps, given as (step, seconds).

    They may come out negative, where the rates alone are too slow already.
    """
    bare = replace(model, fixed_s=0.0, per_request_s=0.0)
    a, b = (seconds - bare.predict(step) for step, seconds in (short, long))
    more = long[0].num_requests - short[0].num_requests
    if not more:
        raise ValueError(f"both steps have {short[0].num_requests} requests, which leaves the time per request open")
    per_request = (b - a) / more
    return replace(model, fixed_s=a - per_request * short[0].num_requests, per_request_s=per_request)


def _kv_seconds(step: Step, kv_bytes_s: float | None) -> float:
    return 0.0 if kv_bytes_s is None else step.parts[ATTENTION].bytes / kv_bytes_s
