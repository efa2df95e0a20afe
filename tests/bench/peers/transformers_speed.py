"""transformers: `generate` with its default (dynamic) cache, greedy, all prompts of one length."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import transformers
from timing import measure, parse_args


def main() -> None:
    args = parse_args(__doc__)
    torch.set_num_threads(args.threads)
    model = transformers.AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).eval()
    # No end but the length. `generate` is called twice, for the first token and for the rest: its set-up is a few ms.
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0

    def generate(prompts: list[list[int]], num_tokens: int) -> Iterator[int]:
        ids = torch.tensor(prompts)
        past = transformers.DynamicCache(config=model.config)
        mask = torch.ones_like(ids)
        with torch.inference_mode():
            common = dict(do_sample=False, past_key_values=past, use_cache=True)
            ids = model.generate(ids, attention_mask=mask, max_new_tokens=1, min_new_tokens=1, **common)
            yield len(prompts)
            mask = torch.ones_like(ids)
            n = num_tokens - 1
            model.generate(ids, attention_mask=mask, max_new_tokens=n, min_new_tokens=n, **common)

    measure(args, model.config.vocab_size, generate)


if __name__ == "__main__":
    main()
