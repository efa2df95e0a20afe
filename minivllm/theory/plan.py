"""A capacity plan: how many requests of which length fit on which GPUs, and what limits them."""

from __future__ import annotations

from dataclasses import dataclass, replace

from minivllm.checks import require_int
from minivllm.theory.catalog import Device
from minivllm.theory.defaults import default_batch_limits
from minivllm.theory.kv_layout import KVLayout, kv_layout
from minivllm.theory.model_spec import ModelSpec
from minivllm.theory.quantity import Quantity
from minivllm.theory.sizing import (
    NoRoom,
    activation_bytes,
    check_context,
    check_parallel,
    kv_budget,
    kv_bytes_per_token,
    possible_tp,
    weight_bytes,
)
from minivllm.units import GIB

# Assumed for what vLLM finds outside of PyTorch (CUDA context, NCCL buffers) and for CUDA graphs.
OTHER_BYTES = GIB // 2


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
    layout: KVLayout

    @property
    def num_blocks(self) -> Quantity:
        """Blocks of the pool; one of them is the null block, which no request can have."""
        return self.layout.num_blocks(self.budget)

    @property
    def per_request(self) -> Quantity:
        """Bytes of one request of full length."""
        return self.layout.bytes_per_request(self.settings.context, self._tokens_in_flight)

    @property
    def requests_in_memory(self) -> Quantity:
        """Whole requests of full length that the pool holds at the same time."""
        blocks = self.layout.blocks_per_request(self.settings.context, self._tokens_in_flight)
        return Quantity(
            max(0, (self.num_blocks - 1) // blocks), "requests", "requests at once",
            "max(0, floor((num_blocks - 1) / blocks_per_request))",
            {"num_blocks": self.num_blocks, "blocks_per_request": blocks},
        )  # fmt: skip

    @property
    def max_concurrency(self) -> Quantity:
        """vLLM's start-up line: requests of full length, as a fraction, the null block counted in."""
        return self.layout.max_concurrency(self.num_blocks, self.settings.context, self._tokens_in_flight)

    @property
    def num_tokens(self) -> int:
        """vLLM's start-up line "GPU KV cache size": for models that keep every token, blocks x their tokens."""
        return int(self.max_concurrency * self.settings.context)

    @property
    def longest_context(self) -> int:
        """Tokens of the longest request that the pool holds, at most what the model was made for."""
        longest = self.layout.longest_request(
            self.num_blocks - 1, self.spec.max_position_embeddings, self._tokens_in_flight
        )
        # With more tokens a step may be larger, so that activations leave less: then look again from there.
        while longest > self.settings.context:
            there = _plan(self.spec, self.device, replace(self.settings, context=longest))
            if there.requests_in_memory >= 1:
                break
            longest = there.layout.longest_request(there.num_blocks - 1, longest, there._tokens_in_flight)
        return longest

    @property
    def _tokens_in_flight(self) -> int:
        """Each stage works on a batch, and vLLM prepares one more meanwhile (async scheduling)."""
        return (self.settings.pp + 1) * self.max_num_batched_tokens

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
            fit = int(self.requests_in_memory)
            binding = f"KV memory ({fit:,} request{'s' if fit > 1 else ''} of {self.settings.context:,} tokens)"
        if wanted is None:
            return binding
        return f"{binding}: the {wanted:,} wanted {'fit' if self.fits else 'do not fit'}"


def as_served(spec: ModelSpec) -> ModelSpec:
    """vLLM loads a float32 checkpoint in 16 bits (config/model.py, _resolve_auto_dtype)."""
    return replace(spec, dtype="bfloat16") if spec.dtype == "float32" else spec


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
    spec = as_served(spec)
    check_parallel(spec, settings.tp, settings.pp)
    check_context(spec, settings.context)
    batched, max_num_seqs = _batch_limits(device, settings)
    per_token = kv_bytes_per_token(spec, settings.kv_dtype, settings.tp, settings.pp)
    weights, activation_peak = _memory(spec, settings, max_num_seqs, batched)
    budget = kv_budget(
        device.memory_bytes, settings.gpu_memory_utilization, weights, activation_peak, settings.other_bytes
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
        per_token=per_token,
        layout=kv_layout(spec, settings.kv_dtype, settings.tp, settings.pp, block_size=settings.block_size),
    )


def _batch_limits(device: Device, settings: Settings) -> tuple[int, int]:
    """(max_num_batched_tokens, max_num_seqs) as vllm serve sets what the user does not. ValueError if they clash."""
    default_tokens, default_seqs = default_batch_limits(device.memory_bytes, device.name, server=True)
    max_num_seqs = settings.max_num_seqs or default_seqs
    batched = settings.max_num_batched_tokens or min(default_tokens, max_num_seqs * settings.context)
    if settings.max_num_seqs is None:
        max_num_seqs = min(max_num_seqs, batched)
    if batched < max_num_seqs:
        raise ValueError(
            f"max_num_batched_tokens ({batched:,}) is less than max_num_seqs ({max_num_seqs:,}): each running request "
            f"needs one token of a step. Set max_num_batched_tokens to {max_num_seqs:,} or more"
        )
    return batched, max_num_seqs


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
