"""From logits to tokens, for a whole batch at once."""

from __future__ import annotations

import math
from collections.abc import Sequence
from hashlib import sha256
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from minivllm.executor.base import Logprob, PositionLogprobs
from minivllm.sampling_params import SamplingParams

PIECE = 256  # numbers of a row that are summed or compared at once
CANDIDATES = 256  # the largest logits of a row, among which top-k and top-p usually end


class Sampled(Protocol):
    """What sampling must know of a request."""

    request_id: str
    token_ids: list[int]  # prompt and output
    num_prompt_tokens: int
    sampling_params: SamplingParams
    end_token_ids: frozenset[int]

    @property
    def num_output_tokens(self) -> int: ...


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) that depends on a request's seed and a position in it, and on nothing else.

    A generator with a state would make a request's text depend on who shared its batch, and on preemptions.
    """
    return int.from_bytes(sha256(f"{seed}:{position}".encode()).digest()[:4], "little") / 2**32


def sample(logits: Tensor, requests: Sequence[Sampled]) -> tuple[list[int], dict[str, PositionLogprobs]]:
    """The next token of each request, and the logprobs of those that asked for them.

    logits [N, V] float32, one row per request; changed in place. The order of operations is vLLM's: reported
    logprobs are those of the raw logits; then bias, masks and penalties; greedy rows take the maximum; the others
    go through temperature, min_p, top_k, top_p.
    """
    params = [request.sampling_params for request in requests]
    asked = {i: p.logprobs for i, p in enumerate(params) if p.logprobs is not None}
    raw_logprobs = logits[list(asked)].log_softmax(dim=-1) if asked else None

    _mask_and_bias(logits, requests)
    penalised = [i for i, p in enumerate(params) if p.has_penalties]
    if penalised:
        logits[penalised] = apply_penalties(logits[penalised], [requests[i] for i in penalised])

    tokens = first_largest(logits)
    random_rows = [i for i, p in enumerate(params) if not p.is_greedy]
    if random_rows:
        tokens[random_rows] = _sample_random(logits[random_rows], [requests[i] for i in random_rows])
    token_ids = tokens.tolist()

    reported: dict[str, PositionLogprobs] = {}
    if raw_logprobs is not None:
        rows = top_logprobs(raw_logprobs, [token_ids[i] for i in asked], list(asked.values()))
        reported = {requests[i].request_id: row for i, row in zip(asked, rows, strict=True)}
    return token_ids, reported


def first_largest(logits: Tensor) -> Tensor:
    """`logits.argmax(-1)` of [N, V] without NaN, in a fifth of its time for large batches on a CPU.

    There `argmax` takes one number at a time and `amax` eight: so find the best piece of each row first.
    """
    whole = logits.shape[1] // PIECE * PIECE
    if logits.device.type != "cpu" or logits.shape[0] < 4 or whole < 16 * PIECE:
        return logits.argmax(dim=-1)
    pieces = logits[:, :whole].unflatten(1, (-1, PIECE))
    largest, piece = pieces.amax(dim=-1).max(dim=-1)
    token = piece * PIECE + pieces[torch.arange(len(logits), device="cpu"), piece].argmax(dim=-1)
    if whole < logits.shape[1]:
        rest = logits[:, whole:].max(dim=-1)
        token = torch.where(rest.values > largest, rest.indices + whole, token)
    return token


def _mask_and_bias(logits: Tensor, requests: Sequence[Sampled]) -> None:
    """No end before min_tokens, then logit_bias: one operation each, for all rows that ask for it."""
    masked: list[tuple[int, int]] = []  # (row, token)
    biased: list[tuple[int, int]] = []
    biases: list[float] = []
    for row, request in enumerate(requests):
        params = request.sampling_params
        if request.num_output_tokens < params.min_tokens:
            masked += [(row, token_id) for token_id in request.end_token_ids]
        if params.logit_bias:
            biased += [(row, token_id) for token_id in params.logit_bias]
            biases += params.logit_bias.values()
    if masked:
        logits[_index(masked, logits)] = -math.inf
    if biased:
        logits[_index(biased, logits)] += torch.tensor(biases, dtype=logits.dtype, device=logits.device)


def _index(places: Sequence[tuple[int, int]], logits: Tensor) -> tuple[Tensor, Tensor]:
    rows, token_ids = torch.tensor(places, device=logits.device).unbind(1)
    return rows, token_ids


def apply_penalties(logits: Tensor, requests: Sequence[Sampled]) -> Tensor:
    """logits [N, V] with repetition (prompt and output), frequency and presence (output only) penalties applied.

    repetition: positive logits are divided, negative ones multiplied. frequency: subtracted once per occurrence.
    presence: subtracted once.
    """
    num_tokens, device = logits.shape[1], logits.device
    seen = torch.zeros(logits.shape, dtype=torch.bool, device="cpu")
    counts = torch.zeros(logits.shape, dtype=torch.float32, device="cpu")
    for i, request in enumerate(requests):
        seen[i, request.token_ids] = True
        output = torch.tensor(request.token_ids[request.num_prompt_tokens :], dtype=torch.int64, device="cpu")
        counts[i] = torch.bincount(output, minlength=num_tokens)
    seen, counts = seen.to(device), counts.to(device)

    def column(name: str) -> Tensor:
        return torch.tensor([getattr(r.sampling_params, name) for r in requests], dtype=torch.float32, device=device)[
            :, None
        ]

    repetition = column("repetition_penalty")
    logits = torch.where(seen, torch.where(logits > 0, logits / repetition, logits * repetition), logits)
    return logits - column("frequency_penalty") * counts - column("presence_penalty") * (counts > 0)


def _sample_random(logits: Tensor, requests: Sequence[Sampled]) -> Tensor:
    """[N, V] -> [N]: one draw per row, by inverting the cumulative distribution at the row's own random number."""
    device = logits.device
    if device.type == "mps":  # no float64 there
        logits = logits.cpu()
    params = [request.sampling_params for request in requests]
    logits = logits / _column([p.temperature for p in params], logits.device)
    if any(p.min_p > 0 for p in params):
        floor = torch.tensor([p.min_p for p in params], dtype=torch.float32, device=logits.device)[
            :, None
        ].log()  # log(0) = -inf: off
        logits = logits.masked_fill(logits < logits.amax(dim=-1, keepdim=True) + floor, -math.inf)
    cut = [i for i, p in enumerate(params) if p.top_k > 0 or p.top_p < 1]
    if cut:
        logits[cut] = apply_top_k_top_p(logits[cut], [params[i].top_k for i in cut], [params[i].top_p for i in cut])
    u = [
        uniform(p.seed, len(request.token_ids))  # type: ignore[arg-type]  # the engine gives each request a seed
        for p, request in zip(params, requests, strict=True)
    ]
    return draw(logits.softmax(dim=-1), torch.tensor(u, dtype=torch.float64, device=logits.device)).to(device)


def _column(values: Sequence[float], device: torch.device) -> Tensor:
    """[N] numbers -> [N, 1] float32."""
    return torch.tensor(values, dtype=torch.float32, device=device)[:, None]


def draw(probs: Tensor, u: Tensor) -> Tensor:
    """Per row of probs [N, V]: the token at which their running sum first exceeds u [N] times their total.

    The running sum is in float64: with 50,000 or more entries one in float32 is off by more than the rare tokens'
    share. It goes over pieces of the row first and then inside one of them, which is little work.
    """
    pieces = F.pad(probs, (0, -probs.shape[1] % PIECE)).unflatten(1, (-1, PIECE))  # [N, P, PIECE]
    ends = pieces.sum(dim=-1).double().cumsum(dim=-1)  # [N, P]
    target = u[:, None] * ends[:, -1:]
    piece = (ends <= target).sum(dim=-1, keepdim=True)  # [N, 1]
    start = F.pad(ends, (1, 0)).gather(1, piece)
    inside = pieces[torch.arange(len(probs), device=probs.device), piece[:, 0]].double().cumsum(dim=-1)  # [N, PIECE]
    # The two sums round differently: stay below the piece's own end, behind which all probabilities are 0.
    target = torch.minimum(target - start, torch.nextafter(inside[:, -1:], torch.zeros_like(target)))
    return piece[:, 0] * PIECE + (inside <= target).sum(dim=-1)


def apply_top_k_top_p(logits: Tensor, top_k: Sequence[int], top_p: Sequence[float]) -> Tensor:
    """logits [N, V] with everything outside the `top_k` largest, then outside the smallest set whose probability
    reaches `top_p`, set to -inf. top_k <= 0 and top_p = 1 are off; ties with the k-th largest stay, as in vLLM."""
    num_tokens = logits.shape[1]
    k = torch.tensor([min(k, num_tokens) if k > 0 else num_tokens for k in top_k], device=logits.device)[:, None]
    # 1.0 must keep every token, also where rounding lets the running sum reach 1 early.
    p = _column([p if p < 1 else math.inf for p in top_p], logits.device)
    if logits.device.type != "cpu" or num_tokens <= CANDIDATES:
        return _cut(logits, *logits.sort(dim=-1, descending=True), k, p)[0]
    # A sort of 50,000 numbers takes as long as a layer of the model, and what stays is usually among the first few.
    result, complete = _cut(logits, *logits.topk(CANDIDATES, dim=-1), k, p)
    rows = (~complete).nonzero()[:, 0]
    if len(rows):
        result[rows] = _cut(logits[rows], *logits[rows].sort(dim=-1, descending=True), k[rows], p[rows])[0]
    return result


def _cut(logits: Tensor, ordered: Tensor, index: Tensor, k: Tensor, p: Tensor) -> tuple[Tensor, Tensor]:
    """`apply_top_k_top_p` given the C largest of each row, `ordered` [N, C] with their `index`, and k, p [N, 1]; and
    whether that is [N] all that stays, or there may be more than C."""
    num_tokens, num_ordered = logits.shape[1], ordered.shape[1]
    has_k = k < num_tokens
    kept = ordered >= ordered.gather(1, k.clamp(max=num_ordered) - 1)
    kept |= ~has_k
    probs = logits.softmax(dim=-1).gather(1, index) * kept
    total = torch.where(has_k, probs.sum(dim=-1, keepdim=True), 1.0)
    reached = probs.cumsum(dim=-1)
    outside = reached - probs >= p * total
    outside[:, 0] = False  # the likeliest stays, even where p is too small for a float32
    complete = torch.where(has_k, ~kept[:, -1:], reached[:, -1:] >= p * total) | (num_ordered == num_tokens)
    ordered = ordered.masked_fill(outside | ~kept, -math.inf)
    return torch.full_like(logits, -math.inf).scatter_(1, index, ordered), complete[:, 0]


def top_logprobs(logprobs: Tensor, token_ids: Sequence[int], counts: Sequence[int]) -> list[dict[int, Logprob]]:
    """Per row of logprobs [N, V]: the given token with its rank, then the `counts[i]` likeliest (-1: all)."""
    num_tokens = logprobs.shape[1]
    counts = [num_tokens if count == -1 else min(count, num_tokens) for count in counts]
    chosen = logprobs.gather(1, torch.tensor(token_ids, device=logprobs.device)[:, None])
    ranks = (logprobs >= chosen).sum(dim=-1).tolist()
    values, index = (x.tolist() for x in logprobs.topk(max(counts), dim=-1))
    own = chosen[:, 0].tolist()
    rows = []
    for i, count in enumerate(counts):
        row = {token_ids[i]: Logprob(own[i], ranks[i])}
        for rank in range(count):
            row.setdefault(index[i][rank], Logprob(values[i][rank], rank + 1))
        rows.append(row)
    return rows
