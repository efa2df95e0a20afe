"""Token ids to text while they are generated.

The part of a tokenizer that a serving engine adds: text must leave as it is generated, but a token is not a piece of
text. An emoji may be four tokens, and whether a token starts with a space depends on what is before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from minivllm.loading.tokenizer import Tokenizer

REPLACEMENT = "\ufffd"  # what bytes that are not UTF-8, or not yet, decode to


class IncrementalDetokenizer:
    """Turns one request's output tokens into text, piece by piece, as they come.

    The pieces together are what decoding prompt and output together adds to decoding the prompt. A piece is handed
    out when it is final, so never half a character. Each `append` decodes a few tokens, whatever the length so far
    (only invalid bytes, one after the other, are held back until something else comes).

    One case has no right answer: Llama-2-like vocabularies spell rare characters in byte tokens, and a run of those
    with one fault decodes to replacement characters as a whole, also the part that was fine and has been handed out.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int], skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        # `_window` is what gets decoded: first the context, tokens whose text is out already, which decide how the
        # next ones read (is there a space between? which character do these bytes complete?); from index `_context`
        # on, tokens whose text is not final yet.
        size, text = 4, ""
        while not text or text.startswith(REPLACEMENT):  # only special tokens, or from the middle of a character
            size *= 2
            self._window = list(prompt_token_ids[-size:])
            text = self._decode(self._window)
            if size >= len(prompt_token_ids):
                break
        self._set_context(text)

    def append(self, token_id: int) -> str:
        """The text that is final now that `token_id` has come; "" while a character is incomplete."""
        self._window.append(token_id)
        text = self._decode(self._window)
        piece = self._after_context(text)
        if not piece or text.endswith(REPLACEMENT):
            return ""
        # The tokens of this piece are context enough for the next, if they begin with a whole character.
        alone = self._decode(self._window[self._context :])
        if piece.endswith(alone):  # not equal: alone, Llama-2-like tokens lose their leading space
            self._window, text = self._window[self._context :], alone
        self._set_context(text)
        return piece

    def finish(self) -> str:
        """The text that is left: nothing, or the replacement characters of bytes that never became a character."""
        text = self._decode(self._window)
        piece = self._after_context(text)
        self._set_context(text)
        return piece

    def _set_context(self, text: str) -> None:
        """All of the window, which decodes to `text`, is context now."""
        self._context = len(self._window)
        self._context_text = text

    def _after_context(self, text: str) -> str:
        if text.startswith(self._context_text):
            return text[len(self._context_text) :]
        # The output completes a character that the prompt left unfinished: what follows the part they share is new.
        same = next((i for i, (a, b) in enumerate(zip(self._context_text, text, strict=False)) if a != b), len(text))
        return text[same:]

    def _decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids, self._skip_special_tokens)
