"""A capacity plan: how many requests of which length fit on which GPUs, and what limits them."""

from __future__ import annotations

from dataclasses import dataclass, replace

from minivllm.config import require_int
from minivllm.theory.catalog import Device
from minivllm.theory.model_spec import ModelSpec
from minivllm.theory.quantity import GIB, Quantity
from minivllm.theory.sizing import (
    NoRoom,
    activation_bytes,
    check_context,
    check_parallel,
    kv_budget,
    kv_bytes_per_request,
    kv_bytes_per_token,
    longest_context,
    num_kv_blocks,
    possible_tp,
    requests_that_fit,
    weight_bytes,
)

# Assumed for what vLLM finds outside of PyTorch (CUDA context, NCCL buffers) and for CUDA graphs.
OTHER_BYTES = GIB // 2
# Batches that are computed or scheduled at a time: vLLM prepares one while another runs (async scheduling).
IN_FLIGHT = 2
# From here on vllm serve takes larger defaults (engine/arg_utils.py); the A100 is left out of them there.
LARGE_GPU_BYTES = 70 * GIB


@dataclass(frozen=True)
class Settings:
    """What a user sets; None is vLLM's default, or the model's own."""

    context: int  # tokens of one request, prompt and output together: max_model_len
    concurrency: int | None = None  # requests wanted at the same time
    tp: int = 1
    pp: int = 1
    kv_dtype: str = "auto"
    weight_dtype: str = "auto"
    weight_bytes: float | None = None  # of all GPUs together, where the files are known
    gpu_memory_utilization: float = 0.92
    block_size: int = 16
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    activation_bytes: float | None = None
    other_bytes: float = OTHER_BYTES

    def __post_init__(self) -> None:
        for name in ("context", "tp", "pp", "block_size"):
            require_int(name, getattr(self, name), 1)
        for name in ("concurrency", "max_num_seqs", "max_num_batched_tokens"):
            if getattr(self, name) is not None:
                require_int(name, getattr(self, name), 1)
        for name in ("weight_bytes", "activation_bytes", "other_bytes"):
            value = getattr(self, name)
            if value is not None and not value >= 0:
                raise ValueError(f"{name} is {value!r}, expected 0 or more bytes")


@dataclass(frozen=True)
class Plan:
    """All memory is per GPU; tokens and requests are those of the whole server."""

    spec: ModelSpec
    device: Device
    settings: Settings
    max_num_seqs: int
    max_num_batched_tokens: int
    weights: Quantity
    activation_peak: Quantity
    budget: Quantity
    per_token: Quantity
    per_request: Quantity
    requests_in_memory: Quantity

    @property
    def num_blocks(self) -> int:
        """Blocks of `block_size` tokens in all layers; for models that keep every token."""
        return int(num_kv_blocks(self.budget, self.per_token, self.settings.block_size)) if self.per_token else 0

    @property
    def longest_context(self) -> int:
        """Tokens of the longest request that the KV budget holds, at most what the model was made for."""
        longest = longest_context(
            self.spec,
            self.budget,
            self.settings.kv_dtype,
            self.settings.tp,
            self.settings.pp,
            block_size=self.settings.block_size,
            max_num_batched_tokens=IN_FLIGHT * self.max_num_batched_tokens,
        )
        return min(longest, self.spec.max_position_embeddings)

    @property
    def num_tokens(self) -> int:
        return self.num_blocks * self.settings.block_size

    @property
    def max_concurrency(self) -> float:
        """Requests of full length that the KV budget holds, as a fraction, as vLLM prints it."""
        return self.budget / self.per_request

    @property
    def requests_at_once(self) -> int:
        return min(int(self.requests_in_memory), self.max_num_seqs)

    @property
    def fits(self) -> bool:
        """Whether one request of full length fits, and the wanted number of them where one is given."""
        return self.requests_at_once >= (self.settings.concurrency or 1)

    @property
    def limit(self) -> str:
        """What binds: the first thing to change for more requests at once."""
        wanted = self.settings.concurrency
        if self.requests_in_memory < 1:
            return (
                f"KV memory: not one request of {self.settings.context:,} tokens fits; the longest that does has "
                f"{self.longest_context:,}"
            )
        if self.max_num_seqs < self.requests_in_memory:
            binding = f"max_num_seqs ({self.max_num_seqs:,}); memory would hold {int(self.requests_in_memory):,}"
        else:
            binding = f"KV memory ({int(self.requests_in_memory):,} requests of {self.settings.context:,} tokens)"
        if wanted is None:
            return binding
        return f"{binding}: the {wanted:,} wanted {'fit' if self.fits else 'do not fit'}"


def default_max_num_seqs(device: Device) -> int:
    """vllm serve 0.30.0: 1,024 on GPUs of 70 GiB or more that are not an A100, otherwise 256."""
    return 1024 if _is_large(device) else 256


def default_max_num_batched_tokens(device: Device) -> int:
    """vllm serve 0.30.0: 16,384 from 160 GiB on, 8,192 from 70 GiB on except for the A100, otherwise 2,048."""
    if device.memory_bytes >= 160 * GIB:
        return 16384
    return 8192 if _is_large(device) else 2048


def _is_large(device: Device) -> bool:
    return device.memory_bytes >= LARGE_GPU_BYTES and "a100" not in device.name


def make_plan(spec: ModelSpec, device: Device, settings: Settings) -> Plan:
    """The plan for that model on `tp` x `pp` of those devices.

    Raises ValueError, in one line, if the context is longer than the model's, the heads cannot be shared among the
    GPUs, or the weights leave no room; the message says by how much, and from how many GPUs on they would.
    """
    try:
        return _plan(spec, device, settings)
    except NoRoom as error:
        smallest = smallest_tp(spec, device, replace(settings, concurrency=None))
        hint = f"; --tp {smallest} would do" if smallest else "; no --tp would do"
        gpus = settings.tp * settings.pp
        raise ValueError(f"{spec.name} does not fit on {gpus} x {device.title}: {error}{hint}") from None


def fits(spec: ModelSpec, device: Device, settings: Settings) -> bool:
    """Whether these settings hold the weights and the wanted requests, or at least one."""
    try:
        return _plan(spec, device, settings).fits
    except ValueError:
        return False


def smallest_tp(spec: ModelSpec, device: Device, settings: Settings) -> int | None:
    """The smallest number of GPUs, as tensor parallelism, that holds the weights and the wanted requests (at least
    one); None if none does."""
    return next((tp for tp in possible_tp(spec) if fits(spec, device, replace(settings, tp=tp))), None)


def _plan(spec: ModelSpec, device: Device, settings: Settings) -> Plan:
    check_parallel(spec, settings.tp, settings.pp)
    check_context(spec, settings.context)
    max_num_seqs = settings.max_num_seqs or default_max_num_seqs(device)
    batched = settings.max_num_batched_tokens or default_max_num_batched_tokens(device)
    weights, activation_peak = _memory(spec, settings, max_num_seqs, batched)
    budget = kv_budget(
        device.memory_bytes, settings.gpu_memory_utilization, weights, activation_peak, settings.other_bytes
    )
    sizes = {"kv_dtype": settings.kv_dtype, "tp": settings.tp, "pp": settings.pp}
    per_request = kv_bytes_per_request(
        spec,
        settings.context,
        **sizes,
        block_size=settings.block_size,
        max_num_batched_tokens=IN_FLIGHT * batched,
    )
    return Plan(
        spec=spec,
        device=device,
        settings=settings,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=batched,
        weights=weights,
        activation_peak=activation_peak,
        budget=budget,
        per_token=kv_bytes_per_token(spec, **sizes),
        per_request=per_request,
        requests_in_memory=requests_that_fit(budget, per_request),
    )


def _memory(
    spec: ModelSpec, settings: Settings, max_num_seqs: int, max_num_batched_tokens: int
) -> tuple[Quantity, Quantity]:
    """Weights and activation peak on one of `tp` x `pp` GPUs."""
    if settings.weight_bytes is None:
        weights = weight_bytes(spec, settings.weight_dtype, settings.tp, settings.pp)
    else:
        gpus = settings.tp * settings.pp
        terms = {"files": settings.weight_bytes, "GPUs": gpus}
        weights = Quantity(settings.weight_bytes / gpus, "B", "weights", "files / GPUs", terms)
    if settings.activation_bytes is None:
        activations = activation_bytes(spec, max_num_batched_tokens, max_num_seqs, settings.tp)
    else:
        activations = Quantity(settings.activation_bytes, "B", "activation peak")
    return weights, activations
