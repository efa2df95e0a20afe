"""What a run keeps in memory, part by part, and the process's peak beside it.

    python tests/bench/memory.py --model smollm2-135m --batch 8 --prompt 512 --output 32

Everything is above what the process holds after its imports. A run fills its whole KV pool, so that the pool counts.
"""

from __future__ import annotations

import resource
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent / "peers"))
from timing import make_prompts, parse_args

from minivllm import LLM, SamplingParams
from minivllm.cpu.packed_linear import PackedLinear
from minivllm.loading import gguf_file  # noqa: F401 - imported when a model is loaded: what it takes is no part of a run

MIB = 2**20


def peak_mib() -> float:
    """The largest resident set of this process so far (Linux counts in KiB, macOS in bytes)."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / MIB if sys.platform == "darwin" else peak / 1024


def main() -> None:
    args = parse_args(__doc__)
    torch.set_num_threads(args.threads)
    torch.randn(64, 64) @ torch.randn(64, 64)  # the libraries' own buffers
    imports = peak_mib()
    batch, length = max(args.batch), args.prompt + args.output
    llm = LLM(
        args.model,
        max_model_len=length,
        max_num_seqs=batch,
        max_num_batched_tokens=max(1024, batch),
        num_gpu_blocks_override=1 + batch * -(-length // 16),
    )
    loaded = peak_mib() - imports
    params = SamplingParams(max_tokens=args.output, temperature=0, ignore_eos=True)
    for run in range(2):
        llm.generate(make_prompts(batch, args.prompt, llm.model_config.vocab_size, run), params, use_tqdm=False)
    peak = peak_mib() - imports

    model, config = llm.executor.model, llm.model_config
    packed = sum(
        4 * layer.in_features * layer.out_features for layer in model.modules() if isinstance(layer, PackedLinear)
    )
    weights = (sum(parameter.nbytes for parameter in model.parameters()) + packed) / MIB
    pool = llm.executor.kv_cache.pages.nbytes / MIB
    # The widest moment of a chunk: the residual stream, the norm's result, gate, up and their product; then the logits.
    tokens = min(llm.scheduler_config.max_num_batched_tokens, batch * args.prompt)
    widest = tokens * (3 * config.hidden_size + 3 * config.intermediate_size) + 2 * batch * config.vocab_size
    activations = 4 * widest / MIB
    expected = weights + pool + activations
    print(
        f"imports_mib={imports:.0f} load_peak_mib={loaded:.0f} peak_mib={peak:.0f} weights_mib={weights:.0f} "
        f"pool_mib={pool:.0f} activations_mib={activations:.0f} peak_over_parts={peak / expected:.2f}"
    )


if __name__ == "__main__":
    main()
