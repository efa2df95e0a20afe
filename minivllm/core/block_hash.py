"""The hash that says which tokens a full block holds, and which tokens came before it."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from hashlib import sha256

from minivllm.request import Request

# The parent of every first block. Any fixed value does; it only has to be the same for all requests.
SEED_HASH = sha256(b"minivllm").digest()


def hash_block_tokens(
    parent_hash: bytes, token_ids: Sequence[int], extra_keys: Sequence[tuple[str, str]] = ()
) -> bytes:
    """sha256 over (parent hash, the block's token ids, extra keys), each with its length, so that no two inputs
    encode alike.

    The parent's hash makes it a chain: equal hashes mean equal tokens from the first one on. `extra_keys` are
    (tag, value) pairs; the tag keeps a LoRA called "x" apart from a salt "x".
    """
    parts = [parent_hash, struct.pack(f"<q{len(token_ids)}q", len(token_ids), *token_ids)]
    for pair in extra_keys:
        for text in pair:
            data = text.encode()
            parts.append(struct.pack("<q", len(data)) + data)
    return sha256(b"".join(parts)).digest()


def extend_block_hashes(request: Request, block_size: int) -> None:
    """Hash the blocks of `request` that have become full since the last call.

    The LoRA name goes into every block; the salt only into the first, and reaches the rest through the chain.
    """
    hashes, tokens = request.block_hashes, request.all_token_ids
    for index in range(len(hashes), request.num_tokens // block_size):
        extra_keys = []
        if request.lora_name:
            extra_keys.append(("lora", request.lora_name))
        if request.cache_salt and index == 0:
            extra_keys.append(("salt", request.cache_salt))
        parent = hashes[-1] if hashes else SEED_HASH
        hashes.append(hash_block_tokens(parent, tokens[index * block_size : (index + 1) * block_size], extra_keys))
