"""llama.cpp through llama-cpp-python's low-level interface: one batch of all sequences a step, greedy."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import llama_cpp
import numpy as np
from timing import measure, parse_args


class Engine:
    def __init__(self, path: str, threads: int, num_sequences: int, length: int) -> None:
        self.silent = llama_cpp.llama_log_callback(lambda *_: None)
        llama_cpp.llama_log_set(self.silent, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()
        self.model = llama_cpp.llama_model_load_from_file(path.encode(), llama_cpp.llama_model_default_params())
        if not self.model:
            raise SystemExit(f"llama.cpp could not load {path}")
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = num_sequences * length
        params.n_batch = params.n_ubatch = 512
        params.n_seq_max = num_sequences
        params.kv_unified = False  # a cache per sequence: in a common one, each attends over all and throws away
        params.n_threads = params.n_threads_batch = threads
        params.type_k = params.type_v = llama_cpp.GGML_TYPE_F32
        self.context = llama_cpp.llama_init_from_model(self.model, params)
        if not self.context:
            raise SystemExit(f"llama.cpp could not make a context of {num_sequences * length} tokens")
        self.vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self.model))
        self.batch = llama_cpp.llama_batch_init(512, 0, 1)

    def _decode(self, entries: list[tuple[int, int, int, bool]]) -> None:
        """entries: (token, position, sequence, whether its logits are wanted)."""
        batch = self.batch
        batch.n_tokens = len(entries)
        for i, (token, position, sequence, wanted) in enumerate(entries):
            batch.token[i], batch.pos[i], batch.n_seq_id[i] = token, position, 1
            batch.seq_id[i][0], batch.logits[i] = sequence, wanted
        if llama_cpp.llama_decode(self.context, batch) != 0:
            raise SystemExit("llama_decode failed")

    def _argmax(self, i: int) -> int:
        logits = llama_cpp.llama_get_logits_ith(self.context, i)
        return int(np.ctypeslib.as_array(logits, (self.vocab_size,)).argmax())

    def generate(self, prompts: list[list[int]], num_tokens: int) -> Iterator[int]:
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self.context), True)
        entries = [
            (token, position, sequence, position == len(prompt) - 1)
            for sequence, prompt in enumerate(prompts)
            for position, token in enumerate(prompt)
        ]
        last: dict[int, int] = {}
        for start in range(0, len(entries), 512):
            chunk = entries[start : start + 512]
            self._decode(chunk)
            last.update((entry[2], self._argmax(i)) for i, entry in enumerate(chunk) if entry[3])
        yield len(prompts)
        for step in range(num_tokens - 1):
            self._decode([(last[s], len(prompt) + step, s, True) for s, prompt in enumerate(prompts)])
            last = {s: self._argmax(s) for s in range(len(prompts))}


if __name__ == "__main__":
    args = parse_args(__doc__)
    engine = Engine(args.model, args.threads, max(args.batch), args.prompt + args.output)
    measure(args, engine.vocab_size, engine.generate)
