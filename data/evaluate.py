"""What `tiny` can do, in numbers and in text: `python -m data.evaluate` prints what its model card says."""

from __future__ import annotations

import argparse
import random
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor
from tqdm import tqdm

from data.corpus import END_OF_TEXT, held_out_recall
from data.train import CONTEXT, STAGES, TINY, Stage, batched_attention, forward, make_batch
from minivllm.loading.weights import load_model
from minivllm.models.gpt2 import GPT2

DISTANCES = (25, 50, 100, 200, 300, 450, 600, 750, 900)
PROMPTS = (
    "Once upon a time",
    "Tom wanted to bake a",
    "One rainy morning, Nora was bored at home. She found an old map",
)


def load(folder: Path = TINY) -> tuple[GPT2, Tokenizer]:
    """Model (float32) and tokenizer of a folder that `data.train` wrote."""
    return load_model(folder, dtype="float32").model, Tokenizer.from_file(str(folder / "tokenizer.json"))


def positions_of(tokens: Tensor) -> Tensor:
    return torch.arange(tokens.shape[1]).expand_as(tokens)


@torch.inference_mode()
def validation_loss(model: GPT2, tokenizer: Tokenizer, recall: float, batches: int = 25) -> float:
    """Mean loss per token on full contexts of text that training did not see."""
    rng = random.Random("validation")
    stage = Stage(steps=0, tokens=CONTEXT, rows=4, recall=recall, sparse=STAGES[-1].sparse)
    total = 0.0
    for _ in range(batches):
        tokens, positions = make_batch(tokenizer, stage, rng)
        logits = forward(model, tokens[:, :-1], positions)
        total += F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).item()
    return total / batches


@torch.inference_mode()
def recall(model: GPT2, tokenizer: Tokenizer, distance: int, lines: int = 500, **options: int | None) -> float:
    """Share of held-out recall prompts whose answer is the most likely next token."""
    right = 0
    for start in range(0, lines, 10):
        pairs = [held_out_recall(seed, distance=distance, **options) for seed in range(start, min(start + 10, lines))]
        prompts = [tokenizer.encode(prompt).ids for prompt, _ in pairs]
        width = max(map(len, prompts))
        tokens = torch.tensor([ids + [0] * (width - len(ids)) for ids in prompts])  # the padding comes after: unseen
        hidden = model(tokens.flatten(), positions_of(tokens).flatten(), batched_attention(len(prompts)))
        last = torch.tensor([row * width + len(ids) - 1 for row, ids in enumerate(prompts)])
        for token, (_, answer) in zip(model.compute_logits(hidden[last]).argmax(-1), pairs, strict=True):
            right += tokenizer.decode([int(token)]) == answer
    return right / lines


@torch.inference_mode()
def continuation(model: GPT2, tokenizer: Tokenizer, prompt: str, max_tokens: int = 250) -> tuple[str, int]:
    """Greedy continuation up to the end-of-text mark, with all of the text read again for every token."""
    ids = tokenizer.encode(prompt).ids
    end = tokenizer.token_to_id(END_OF_TEXT)
    count = 0
    while count < max_tokens:
        tokens = torch.tensor([ids])
        token = int(forward(model, tokens, positions_of(tokens))[0, -1].argmax())
        count += 1
        if token == end:
            break
        ids.append(token)
    return tokenizer.decode(ids), count


@torch.inference_mode()
def prefill_speed(model: GPT2, repeats: int = 5) -> float:
    """Tokens per second of a forward pass over a full context."""
    tokens = torch.zeros(1, CONTEXT, dtype=torch.long)
    forward(model, tokens, positions_of(tokens))
    begin = time.perf_counter()
    for _ in range(repeats):
        forward(model, tokens, positions_of(tokens))
    return repeats * CONTEXT / (time.perf_counter() - begin)


def main() -> None:
    parser = argparse.ArgumentParser(description="Evaluate the tiny model.")
    parser.add_argument("--model", type=Path, default=TINY, help="folder of the model")
    parser.add_argument("--lines", type=int, default=500, help="recall prompts per distance")
    args = parser.parse_args()

    begin = time.perf_counter()
    model, tokenizer = load(args.model)
    load_s = time.perf_counter() - begin
    size = sum(file.stat().st_size for file in args.model.iterdir())
    print(f"parameters       {sum(p.numel() for p in model.parameters()):,}")
    print(f"size             {size / 1e6:.2f} MB (all files of {args.model.name}/)")
    print(f"load time        {load_s:.3f} s")
    print(f"prefill          {prefill_speed(model):,.0f} tokens/s, {torch.get_num_threads()} threads")
    for share in (0.0, STAGES[-1].recall):
        loss = validation_loss(model, tokenizer, share)
        print(f"validation loss  {loss:.3f} with {share:.0%} recall documents, the rest stories")
    print(f"\nheld-out recall, {args.lines} prompts each, 6 facts\ndistance   short prompt   prompt of 1,000 tokens")
    for distance in tqdm(DISTANCES, unit="distance", leave=False):
        short = recall(model, tokenizer, distance, args.lines)
        full = recall(model, tokenizer, distance, args.lines, context=1000)
        tqdm.write(f"{distance:8d}   {short:12.1%}   {full:23.1%}")

    for prompt in PROMPTS:
        begin = time.perf_counter()
        text, count = continuation(model, tokenizer, prompt)
        speed = count / (time.perf_counter() - begin)
        print(f"\n--- {prompt!r}: {count} tokens, {speed:.0f} tokens/s without a cache\n{text}")


if __name__ == "__main__":
    main()
