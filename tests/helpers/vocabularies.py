"""Small tokenizers of the two kinds that exist in the wild, trained on the spot."""

from __future__ import annotations

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers

from minivllm.loading.tokenizer import Tokenizer

TRAINING_TEXT = [
    "The quick brown fox jumps over the lazy dog. Then it rests, and the dog jumps over the fox.",
    "Die schnelle Füchsin, naïve café, 東京の天気は晴れです。 日本語 日本 👍🏽 👩‍👩‍👧 🇫🇷 é é",
    "def f(x):\n    return x ** 2  # spaces   and\ttabs",
] * 4
SPECIAL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]


def byte_level() -> Tokenizer:
    """Like GPT-2, Llama 3, Qwen: every token is a piece of a byte sequence, any ids decode."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(TRAINING_TEXT, trainer)
    return Tokenizer(backend, {"bos_token": "<s>", "eos_token": "</s>"})


def sentencepiece_like() -> Tokenizer:
    """Like Llama 2 and Mistral: words begin with a mark for the space before them, the first one's is dropped when
    decoding, a bos token goes first, and characters outside the vocabulary are spelled in byte tokens."""
    backend = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        special_tokens=["<unk>", *SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256))],
        show_progress=False,
    )
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.train_from_iterator(TRAINING_TEXT[:1], trainer)
    # Trained, byte tokens are ordinary tokens; only these are special.
    kept = tokenizers.Tokenizer.from_str(backend.to_str().replace('"special":true', '"special":false'))
    kept.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in ["<unk>", *SPECIAL]])
    kept.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    kept.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", kept.token_to_id("<s>"))])
    return Tokenizer(kept, {"bos_token": "<s>", "eos_token": "</s>"})
