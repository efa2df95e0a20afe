"""Train `tiny`: `python -m data.train --out DIR [--resume]`. One CPU core needs 40 minutes.

Recall is hard to learn from scratch with this little training, so three things help it along:

- **Sequences go from dense and short to sparse and long** (`STAGES`). Short ones start at random positions, so that
  all 1,024 position embeddings are trained.
- **Positions start as sinusoids** in dimensions of their own. "The token n places back" is then one linear map, the
  same at every position.
- **One circuit is built in.** The first layer's heads start out looking 2, 3, 5 and 6 tokens back (`OFFSETS`), and one
  head of the second layer starts out comparing what they found and copying the place it belongs to (`init_weights`).
  That alone answers a third or so of the recall questions. Training keeps it, sharpens it and teaches the rest.

Every batch follows from the seed and the step alone, so a resumed run sees what an uninterrupted one would have seen.
"""

from __future__ import annotations

import argparse
import json
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor, nn
from tqdm import tqdm

from data.corpus import END_OF_TEXT, NAMES, PIECE, recall_document, story_document
from minivllm.model_config import ModelConfig
from minivllm.models.gpt2 import GPT2
from minivllm.models.layers import Attend

TINY = Path(__file__).parent / "tiny"
FIRST_LOSSES = TINY / "first_losses.json"

SEED = 1
CONTEXT = 1024
LEARNING_RATE = 2e-3
WARMUP = 100
SAVE_EVERY = 100
ANSWER_WEIGHT = 5.0  # how much more the place in a recall answer counts than another token
POSITION_DIMS = 32  # a head's width: what one head can compare
OFFSETS = (2, 3, 5, 6)  # in "Anna hid the key in the barn": how far back thing and name are from "the" and from "barn"


@dataclass(frozen=True)
class Stage:
    steps: int
    tokens: int  # per row
    rows: int
    recall: float  # share of rows that are recall documents; the others are stories
    sparse: float  # see recall_document


STAGES = (
    Stage(300, 128, 16, recall=0.6, sparse=0.0),
    Stage(300, 256, 8, recall=0.5, sparse=0.3),
    Stage(400, 512, 8, recall=0.5, sparse=0.5),
    Stage(750, 1024, 4, recall=0.5, sparse=0.6),
)
STEPS = sum(stage.steps for stage in STAGES)


def stage_at(step: int) -> Stage:
    for stage in STAGES:
        if step < stage.steps:
            return stage
        step -= stage.steps
    return STAGES[-1]


def learning_rate(step: int) -> float:
    """Linear warm-up, then half a cosine down to a twentieth."""
    progress = min(1.0, step / STEPS)
    return LEARNING_RATE * min(1.0, (step + 1) / WARMUP) * (0.05 + 0.95 * (1 + math.cos(math.pi * progress)) / 2)


# --- tokenizer --------------------------------------------------------------------------------------------------------


def build_tokenizer() -> Tokenizer:
    """A byte-level BPE whose vocabulary is the 256 bytes and the whole words of the grammar.

    `ignore_merges` lets a word that is in the vocabulary be one token without a chain of merges leading to it, so no
    entry is spent on the steps between. Any other word is spelled in bytes, so every text round-trips.
    """
    rng = random.Random("vocabulary")
    words = {prefix + name for name in NAMES for prefix in ("", " ")}
    for _ in range(2000):
        words.update(PIECE.findall(story_document(rng, made_up_names=0) + recall_document(rng, 300, 0.3)))
    words.discard(END_OF_TEXT)

    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokens = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens += sorted({piece for word in words for piece, _ in byte_level.pre_tokenize_str(word)} - set(tokens))
    vocab = {token: i for i, token in enumerate([*tokens, END_OF_TEXT])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], ignore_merges=True))
    tokenizer.pre_tokenizer = byte_level
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(END_OF_TEXT, special=True, normalized=False)])
    return tokenizer


# --- model ------------------------------------------------------------------------------------------------------------


def model_config(vocab_size: int) -> ModelConfig:
    return ModelConfig(
        model_type="gpt2",
        vocab_size=vocab_size,
        hidden_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=32,
        intermediate_size=512,
        max_position_embeddings=CONTEXT,
        hidden_act="gelu_new",
        norm_eps=1e-5,
        tie_word_embeddings=True,
    )


@torch.no_grad()
def init_weights(model: GPT2) -> None:
    """Random weights, except for the position embeddings and the recall circuit (see the top of this file)."""
    config = model.config
    hidden, head_dim = config.hidden_size, config.head_dim
    for name, weight in model.named_parameters():
        if weight.dim() == 2:
            scale = 0.1 if name.endswith("c_proj.weight") else 0.5  # what is added to the residual stream starts small
            nn.init.normal_(weight, std=scale / math.sqrt(weight.shape[0]))

    waves = POSITION_DIMS // 2
    frequency = 2.2 * (1 / 1400) ** (torch.arange(waves) / (waves - 1))  # periods of 3 to 4,000 tokens
    angle = torch.arange(CONTEXT)[:, None] * frequency
    model.wpe.weight.zero_()
    model.wpe.weight[:, :POSITION_DIMS] = 0.1 * torch.cat([angle.cos(), angle.sin()], dim=1)
    model.wte.weight.normal_(std=0.05)
    model.wte.weight[:, :POSITION_DIMS] = 0

    query, key, value = model.h[0].attn.c_attn.weight.split(hidden, dim=1)  # each [hidden, heads * head_dim]
    query.zero_()
    key.zero_()
    wave = torch.arange(waves)
    # Heads 0 and 1 see the thing, 2 and 3 the name, each two through one random projection, so as to be comparable.
    half = head_dim // 2
    reads = [nn.init.orthogonal_(torch.empty(hidden - POSITION_DIMS, half)) for _ in range(2)]
    written = nn.init.orthogonal_(torch.empty(len(OFFSETS) * half, hidden // 2)).split(half)
    for head, offset in enumerate(OFFSETS):
        columns = slice(head * head_dim, (head + 1) * head_dim)
        # cos(a - o) = cos a cos o + sin a sin o, sin(a - o) = sin a cos o - cos a sin o, for every wave.
        rotate = torch.zeros(POSITION_DIMS, POSITION_DIMS)
        cos, sin = (frequency * offset).cos(), (frequency * offset).sin()
        rotate[wave, wave], rotate[waves + wave, wave] = cos, sin
        rotate[waves + wave, waves + wave], rotate[wave, waves + wave] = cos, -sin
        query[:POSITION_DIMS, columns] = 2 * rotate
        key[:POSITION_DIMS, columns] = 2 * torch.eye(POSITION_DIMS)
        rows = slice(head * head_dim, head * head_dim + half)
        value[:, rows] = 0
        value[POSITION_DIMS:, rows] = reads[head // 2]
        model.h[0].attn.c_proj.weight[rows] = 0
        model.h[0].attn.c_proj.weight[rows, : hidden // 2] = 0.15 * written[head]

    # Head 0 of the second layer compares what heads 0 and 2 brought to "the" with what heads 1 and 3 brought to a
    # place, half its width for the thing and half for the name, and copies that place to the word to be predicted.
    query, key, value = model.h[1].attn.c_attn.weight.split(hidden, dim=1)
    for matrix, (thing, name) in ((query, (0, 2)), (key, (1, 3))):
        matrix[:, :head_dim] = 0
        matrix[: hidden // 2, :head_dim] = 2 * torch.cat([written[thing], written[name]]).T
    copy = nn.init.orthogonal_(torch.empty(hidden // 2, head_dim))
    value[:, :head_dim] = 0
    value[hidden // 2 :, :head_dim] = copy
    model.h[1].attn.c_proj.weight[:head_dim] = 0
    model.h[1].attn.c_proj.weight[:head_dim, hidden // 2 :] = copy.T


def batched_attention(rows: int) -> Attend:
    """Plain causal attention over `rows` sequences of equal length that lie one after another in the flat tokens."""

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.unflatten(0, (rows, -1)).transpose(1, 2) for x in (q, k, v))  # [rows, H, T, D]
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(0, 1)

    return attend


def forward(model: GPT2, tokens: Tensor, positions: Tensor) -> Tensor:
    """Logits [B, T, V] for tokens and positions [B, T]."""
    hidden = model(tokens.flatten(), positions.flatten(), batched_attention(len(tokens)))
    return model.compute_logits(hidden).unflatten(0, tokens.shape)


def save(model: GPT2, tokenizer: Tokenizer, folder: Path) -> None:
    """Write the model as a folder that Hugging Face's `GPT2LMHeadModel` and `AutoTokenizer` load."""
    folder.mkdir(parents=True, exist_ok=True)
    config = model.config
    end = tokenizer.token_to_id(END_OF_TEXT)
    tensors = {name: t.contiguous() for name, t in model.state_dict().items() if name != "lm_head.weight"}  # tied
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    tokenizer.save(str(folder / "tokenizer.json"))
    files = {
        "config.json": {
            "architectures": ["GPT2LMHeadModel"],
            "model_type": "gpt2",
            "vocab_size": config.vocab_size,
            "n_embd": config.hidden_size,
            "n_layer": config.num_hidden_layers,
            "n_head": config.num_attention_heads,
            "n_inner": config.intermediate_size,
            "n_positions": config.max_position_embeddings,
            "n_ctx": config.max_position_embeddings,
            "activation_function": config.hidden_act,
            "layer_norm_epsilon": config.norm_eps,
            "attn_pdrop": 0.0,
            "embd_pdrop": 0.0,
            "resid_pdrop": 0.0,
            "tie_word_embeddings": True,
            "bos_token_id": end,
            "eos_token_id": end,
            "dtype": "float32",
        },
        "generation_config.json": {"bos_token_id": end, "eos_token_id": end, "do_sample": False},
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": END_OF_TEXT,
            "eos_token": END_OF_TEXT,
            "unk_token": END_OF_TEXT,
            "model_max_length": CONTEXT,
            "clean_up_tokenization_spaces": False,
        },
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, indent=2) + "\n")


# --- training ---------------------------------------------------------------------------------------------------------


def make_batch(tokenizer: Tokenizer, stage: Stage, rng: random.Random) -> tuple[Tensor, Tensor]:
    """Tokens [rows, tokens + 1] and positions [rows, tokens]."""
    needed = stage.tokens + 1
    rows, starts = [], []
    for _ in range(stage.rows):
        if rng.random() < stage.recall:
            ids = tokenizer.encode(recall_document(rng, needed, stage.sparse)).ids
        else:
            ids = []
            while len(ids) < needed:
                ids += tokenizer.encode(story_document(rng)).ids
        rows.append(ids[:needed])
        starts.append(rng.choice((0, rng.randint(0, CONTEXT - stage.tokens))))
    return torch.tensor(rows), torch.tensor(starts)[:, None] + torch.arange(stage.tokens)


def answer_mask(tokens: Tensor, tokenizer: Tokenizer) -> Tensor:
    """True where a token of `tokens` [B, T] is the place in a recall answer, `A: Anna hid the key in the barn`."""
    mask = torch.zeros_like(tokens, dtype=torch.bool)
    a, hid = (tokens == tokenizer.token_to_id(token) for token in ("A", "Ġhid"))
    mask[:, 8:] = a[:, :-8] & hid[:, 3:-5]
    return mask


def train(model: GPT2, tokenizer: Tokenizer, checkpoint: Path | None = None, resume: bool = False) -> Iterator[dict]:
    """Train step by step, yielding after each step its number, loss and recall; saves to `checkpoint` now and then."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.01)
    first = 0
    if resume and checkpoint is not None and checkpoint.exists():
        state = torch.load(checkpoint, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["step"]
    for step in range(first, STEPS):
        tokens, positions = make_batch(tokenizer, stage_at(step), random.Random(f"{SEED} {step}"))
        targets, answers = tokens[:, 1:], answer_mask(tokens, tokenizer)[:, 1:]
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step)
        logits = forward(model, tokens[:, :-1], positions)
        losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view_as(targets)
        weights = 1 + (ANSWER_WEIGHT - 1) * answers
        optimizer.zero_grad()
        ((losses * weights).sum() / weights.sum()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if checkpoint is not None and ((step + 1) % SAVE_EVERY == 0 or step + 1 == STEPS):
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1}
            torch.save(state, checkpoint)
        hits = logits.detach().argmax(-1)[answers] == targets[answers]
        yield {"step": step, "loss": losses.mean().item(), "recall": hits.float().mean().item()}


def fresh_model(tokenizer: Tokenizer) -> GPT2:
    torch.manual_seed(SEED)
    model = GPT2(model_config(tokenizer.get_vocab_size()))
    init_weights(model)
    return model


def first_losses(tokenizer: Tokenizer, steps: int) -> list[float]:
    """The losses of the first steps of a training run, for comparison with the ones that were shipped."""
    run = train(fresh_model(tokenizer), tokenizer)
    return [next(run)["loss"] for _ in range(steps)]


def check(steps: int = 50) -> float:
    """Repeat the first steps; return the largest difference from the recorded losses."""
    recorded = json.loads(FIRST_LOSSES.read_text())[:steps]
    repeated = first_losses(Tokenizer.from_file(str(TINY / "tokenizer.json")), steps)
    return max(abs(a - b) for a, b in zip(recorded, repeated, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the tiny model.")
    parser.add_argument("--out", type=Path, help="folder for the model and the checkpoint")
    parser.add_argument("--resume", action="store_true", help="continue from the checkpoint in --out")
    parser.add_argument("--check", action="store_true", help="only repeat the first 50 steps and compare their losses")
    args = parser.parse_args()
    if args.check:
        difference = check()
        print(f"first 50 losses differ by at most {difference:.2e}")
        raise SystemExit(difference > 1e-3)
    if args.out is None:
        parser.error("--out DIR is needed")

    tokenizer = build_tokenizer()
    model = fresh_model(tokenizer)
    args.out.mkdir(parents=True, exist_ok=True)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters, {tokenizer.get_vocab_size()} tokens")
    checkpoint = args.out / "checkpoint.pt"
    bar = tqdm(total=STEPS, unit="step", mininterval=5)
    with (args.out / "log.jsonl").open("a") as log:
        for record in train(model, tokenizer, checkpoint, args.resume):
            bar.update(record["step"] + 1 - bar.n)
            bar.set_postfix(loss=f"{record['loss']:.3f}", recall=f"{record['recall']:.2f}")
            log.write(json.dumps(record) + "\n")
            log.flush()
    save(model, tokenizer, args.out)


if __name__ == "__main__":
    main()
