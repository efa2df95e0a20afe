"""What to change so that the wanted requests fit: each way is tried with the planner before it is named."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from minivllm.theory.model_spec import SLIDING
from minivllm.theory.plan import Plan, fits
from minivllm.theory.sizing import possible_tp
from minivllm.units import cdiv


def ways_out(plan: Plan) -> list[dict[str, Any]]:
    """Changes of settings with which the wanted requests fit, each tried: alternatives to one another. If none is
    enough, as many requests as do fit; empty if that is none."""
    wanted = plan.settings.concurrency or 1
    base = _seats(plan, wanted)
    if base and _fits(plan, base):
        return [base]
    found = _single_changes(plan, base)
    if not found and plan.settings.block_size > 16:
        base["block_size"] = 16
        found = [base] if _fits(plan, base) else _single_changes(plan, base)
    if found:
        return found
    more = (base | {"tp": tp} for tp in possible_tp(plan.spec) if tp > plan.settings.tp)
    both = next((change for change in more if _longest_that_fits(plan, change)), None)
    return _shorter(plan, both) if both else _fewer_requests(plan)


def _fewer_requests(plan: Plan) -> list[dict[str, Any]]:
    """As many requests as fit with these settings, with seats for all of them, if that is one or more."""

    def change(requests: int) -> dict[str, Any]:
        return {"concurrency": requests} | _seats(plan, requests)

    low, high = 0, int(plan.requests_in_memory) + 1  # more seats take memory, so it may be fewer
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if _fits(plan, change(middle)) else (low, middle)
    return [change(low)] if low else []


def _seats(plan: Plan, requests: int) -> dict[str, Any]:
    """What must be raised for so many requests to run at all."""
    change = {"max_num_seqs": requests} if plan.max_num_seqs < requests else {}
    return change | ({"max_num_batched_tokens": requests} if plan.max_num_batched_tokens < requests else {})


def _single_changes(plan: Plan, base: dict[str, Any]) -> list[dict[str, Any]]:
    """Of each kind the change that is enough beside `base` and changes least."""
    settings = plan.settings
    changes = [base | {"tp": tp} for tp in possible_tp(plan.spec) if tp > settings.tp]
    if settings.kv_dtype == "auto":
        changes.append(base | {"kv_dtype": "fp8"})
    if SLIDING in plan.spec.layer_types and plan.max_num_batched_tokens > 2048:
        changes.append({"max_num_batched_tokens": 2048} | base)
    if settings.weight_dtype == "auto" and settings.weight_bytes is None and plan.spec.quantization is None:
        changes.append(base | {"weight_dtype": "fp8"})
    changes += _shorter(plan, base)
    found: dict[str, dict[str, Any]] = {}
    for change in changes:
        if ", ".join(change) not in found and _fits(plan, change):
            found[", ".join(change)] = change
    return list(found.values())


def _shorter(plan: Plan, change: dict[str, Any]) -> list[dict[str, Any]]:
    """The change with the longest context that makes it enough, if there is one."""
    context = _longest_that_fits(plan, change)
    return [change | {"context": context}] if context else []


def _longest_that_fits(plan: Plan, change: dict[str, Any]) -> int:
    """The longest context, in whole blocks, with which the wanted requests fit; 0 if none does."""
    low, high = 0, cdiv(plan.settings.context, plan.settings.block_size)
    while high - low > 1:
        middle = (low + high) // 2
        enough = _fits(plan, change | {"context": middle * plan.settings.block_size})
        low, high = (middle, high) if enough else (low, middle)
    return low * plan.settings.block_size


def _fits(plan: Plan, change: dict[str, Any]) -> bool:
    return fits(plan.spec, plan.device, replace(plan.settings, **change))
