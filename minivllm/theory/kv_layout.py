"""How vLLM 0.30.0 cuts a model's KV cache into blocks (v1/core/kv_cache_utils.py): exact for its start-up lines.

All layers take their blocks from one pool, so all blocks have one size. Layers that keep the same tokens share a block
table; where a model mixes kinds of layers, they form groups of equal size, and what does not fill a group is padding.
"""

from __future__ import annotations

from dataclasses import dataclass

from minivllm.checks import require_int
from minivllm.theory.model_spec import FULL, LINEAR, SLIDING, ModelSpec
from minivllm.theory.quantity import Quantity
from minivllm.theory.sizing import concurrency, kv_bytes_per_token_and_layer, pipeline_stages, state_bytes_per_layer
from minivllm.units import cdiv


@dataclass(frozen=True)
class KVLayout:
    """The blocks of one model on one GPU."""

    block_sizes: dict[str, int]  # tokens of a block, by kind of layer
    block_bytes: Quantity  # on one GPU: the layers of the widest group
    num_groups: dict[str, int]  # kind of layer -> groups, each with a block table of its own
    sliding_window: int | None = None
    states: int = 2  # that a linear-attention layer holds for a request

    @property
    def block_size(self) -> int:
        """Tokens of a block; where kinds of layers differ, of the smallest."""
        return min(self.block_sizes.values())

    def blocks_per_request(self, num_tokens: int, tokens_in_flight: int = 1) -> Quantity:
        """Most blocks that a request of `num_tokens` holds at a time.

        A windowed group keeps what the window still reaches: `sliding_window` - 1 tokens, and up to `tokens_in_flight`
        that are being computed (vLLM: two steps of max_num_batched_tokens); and one block more, since a window may
        begin inside one. A linear group holds states, whatever the length.
        """
        require_int("num_tokens", num_tokens, 1)
        require_int("tokens_in_flight", tokens_in_flight, 1)
        formula: list[str] = []
        terms: dict[str, float] = {}
        total = 0
        if FULL in self.num_groups:
            formula.append("full_groups * ceil(tokens / block_size)")
            size = self.block_sizes[FULL]
            terms |= {"full_groups": self.num_groups[FULL], "tokens": num_tokens, "block_size": size}
            total += self.num_groups[FULL] * cdiv(num_tokens, size)
        if SLIDING in self.num_groups:
            assert self.sliding_window is not None  # a ModelSpec with such layers names it
            kept = min(self.sliding_window - 1 + tokens_in_flight, num_tokens)
            size = self.block_sizes[SLIDING]
            name = "block_size" if terms.get("block_size", size) == size else "windowed_block_size"
            formula.append(f"windowed_groups * (ceil(tokens_in_window / {name}) + 1)")
            terms |= {"windowed_groups": self.num_groups[SLIDING], "tokens_in_window": kept, name: size}
            total += self.num_groups[SLIDING] * (cdiv(kept, size) + 1)
        if LINEAR in self.num_groups:
            formula.append("linear_groups * states")
            terms |= {"linear_groups": self.num_groups[LINEAR], "states": self.states}
            total += self.num_groups[LINEAR] * self.states
        return Quantity(total, "blocks", "blocks of a request", " + ".join(formula), terms)

    def bytes_per_request(self, num_tokens: int, tokens_in_flight: int = 1) -> Quantity:
        """What the start-up check asks for: bytes of one request of that length, on one GPU."""
        blocks = self.blocks_per_request(num_tokens, tokens_in_flight)
        return Quantity(
            blocks * self.block_bytes, "B", "KV cache of a request",
            "blocks_per_request * block_bytes",
            {"blocks_per_request": blocks, "block_bytes": self.block_bytes},
        )  # fmt: skip

    def num_blocks(self, budget: float) -> Quantity:
        """Whole blocks that the budget holds, the null block included, which no request can have."""
        return Quantity(
            budget // self.block_bytes, "blocks", "blocks", "floor(budget / block_bytes)",
            {"budget": Quantity(budget, "B", "budget"), "block_bytes": self.block_bytes},
        )  # fmt: skip

    def max_concurrency(self, num_blocks: float, max_model_len: int, tokens_in_flight: int = 1) -> Quantity:
        """vLLM's "Maximum concurrency for L tokens per request". Its "KV cache size: N tokens" is this times L."""
        return concurrency(num_blocks, self.blocks_per_request(max_model_len, tokens_in_flight))

    def longest_request(self, num_blocks: float, most: int, tokens_in_flight: int = 1) -> int:
        """Tokens of the longest request, at most `most`, that fits into that many blocks; 0 if none does."""
        low, high = 0, most + 1
        while high - low > 1:
            middle = (low + high) // 2
            fits = self.blocks_per_request(middle, tokens_in_flight) <= num_blocks
            low, high = (middle, high) if fits else (low, middle)
        return low


def kv_layout(
    spec: ModelSpec,
    kv_dtype: str = "auto",
    tp: int = 1,
    pp: int = 1,
    *,
    block_size: int = 16,
    enable_prefix_caching: bool = True,
) -> KVLayout:
    """The layout of a model whose heads are shared out among `tp` GPUs and its layers among `pp` stages.

    A state of linear attention must fit into a block of a layer. Where it does not, `block_size` grows, in steps of
    the one given: 1,056 tokens for Qwen3.5-35B-A3B. With prefix caching such a layer keeps a copy of its state at a
    block boundary. Where a token takes less in one kind of layer than in another, a block holds more of those tokens
    (32 instead of 16 in Gemma-4's full layers). With stages, this is the one with the largest blocks.
    """
    require_int("block_size", block_size, 1)
    kinds = [kind for kind in (FULL, SLIDING) if kind in spec.layer_types] or [FULL]
    ones = {kind: kv_bytes_per_token_and_layer(spec, kv_dtype, tp, kind) for kind in kinds}
    one = max(ones.values())
    state = state_bytes_per_layer(spec, tp) if LINEAR in spec.layer_types else 0
    if state > block_size * one:
        block_size *= cdiv(int(state), int(block_size * one))
    # Tokens that do not fill a block evenly are not added: vLLM pads such blocks.
    block_sizes = {kind: block_size * (int(one / ones[kind]) if one % ones[kind] == 0 else 1) for kind in kinds}
    groups = layer_groups(spec)
    width = max(cdiv(stage.count(kind), groups[kind]) for stage in pipeline_stages(spec, pp) for kind in groups)
    block_bytes = Quantity(
        width * block_size * one, "B", "bytes of a block", "layers_of_a_group * block_size * bytes_per_token_and_layer",
        {"layers_of_a_group": width, "block_size": block_size, "bytes_per_token_and_layer": one},
    )  # fmt: skip
    return KVLayout(block_sizes, block_bytes, groups, spec.sliding_window, states=2 if enable_prefix_caching else 1)


def layer_groups(spec: ModelSpec) -> dict[str, int]:
    """How many groups the layers of each kind form.

    A group is as large as the rarest kind, or, where the kinds differ by less than half, as the most frequent one:
    Gemma-3-27B has 10 full and 52 windowed layers, hence 1 and 6 groups of 10, with 8 layers of padding.
    """
    counts = {kind: spec.layer_types.count(kind) for kind in (FULL, SLIDING, LINEAR) if kind in spec.layer_types}
    fewest, most = min(counts.values()), max(counts.values())
    size = most if most < 1.5 * fewest else fewest
    return {kind: cdiv(count, size) for kind, count in counts.items()}
