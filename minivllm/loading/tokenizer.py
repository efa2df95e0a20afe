"""Text to token ids and back, through the `tokenizers` library."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from minivllm.checks import is_unicode
from minivllm.files import (
    MAX_TABLE_BYTES,
    is_file,
    printable,
    printable_errors,
    read_bytes,
    read_json,
    read_text,
)
from minivllm.loading.chat_template import render_chat_template


class Tokenizer:
    """A model's vocabulary, its special tokens and its chat template.

    `special_tokens` maps names as chat templates know them to text, e.g. {"eos_token": "<|im_end|>"}; `source` is where
    it comes from, for messages.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        special_tokens: Mapping[str, str] | None = None,
        chat_template: str | None = None,
        source: str | Path = "the tokenizer",
    ) -> None:
        self._backend = backend
        # A tokenizer.json may carry the truncation and padding of someone's training run.
        self._backend.no_truncation()
        self._backend.no_padding()
        self.special_tokens = dict(special_tokens or {})
        self.chat_template = chat_template
        self.source = source
        self.bos_token_id = self._special_id("bos_token")
        self.eos_token_id = self._special_id("eos_token")

    @classmethod
    @printable_errors()
    def from_folder(cls, folder: str | Path) -> Tokenizer:
        """Read tokenizer.json and, where there are any, the tokenizer_config.json, special_tokens_map.json and
        chat_template.jinja beside it. Raises ValueError if a file is damaged."""
        folder = Path(folder)
        path = folder / "tokenizer.json"
        if not is_file(path):
            raise ValueError(f"{folder} has no tokenizer.json")
        data = read_bytes(path, MAX_TABLE_BYTES)
        try:
            backend = tokenizers.Tokenizer.from_buffer(data)
        except BaseException as error:
            raise _explain(error, f"{path} is damaged or not a tokenizer") from None
        config = read_json(folder / "tokenizer_config.json") or {}
        special_tokens = {}
        for entries in (read_json(folder / "special_tokens_map.json") or {}, config):
            for name, value in entries.items():
                text = value.get("content") if isinstance(value, dict) else value
                if name.endswith("_token") and isinstance(text, str):
                    special_tokens[name] = text
        for name, text in special_tokens.items():
            if not is_unicode(text):
                raise ValueError(f"{folder / 'tokenizer_config.json'} or special_tokens_map.json: {name!r} is {text!r}")
        template_file = folder / "chat_template.jinja"
        template = read_text(template_file) if is_file(template_file) else config.get("chat_template")
        if isinstance(template, list) and all(isinstance(entry, dict) for entry in template):  # several, by name
            named = [entry for entry in template if isinstance(entry.get("name"), str) and "template" in entry]
            if len(named) == len(template):
                template = {entry["name"]: entry["template"] for entry in named}.get("default")
        if template is not None and not isinstance(template, str):
            raise ValueError(
                f"{folder / 'tokenizer_config.json'}: 'chat_template' is {str(template)[:100]}; expected a text, or a "
                'list of {"name": ..., "template": ...}. Correct it, or remove it to do without chat'
            )
        return cls(backend, special_tokens, template, path)

    @property
    def vocab_size(self) -> int:
        """How many tokens there are, added ones included. A model's own vocab_size may be padded beyond this."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    @functools.cached_property
    def longest_token_chars(self) -> int:
        """Characters in the longest token: `n` tokens hold at most `n` times as many characters of text.

        (Not so for a tokenizer that drops or joins characters, say all spaces: it could read more.)
        """
        return max(map(len, self._backend.get_vocab(with_added_tokens=True)), default=1)

    def encode(self, text: str, add_special_tokens: bool = True, max_tokens: int | None = None) -> list[int]:
        """Token ids of `text`; `add_special_tokens` adds what the model expects around a text (often a bos token).

        `max_tokens` is for a text that nobody has looked at: if it has more characters than so many tokens can hold, it
        is refused at once. (Otherwise the length of the result is not limited.) Tokenizing takes a second for half a
        million characters, and nothing can interrupt it; longer still with a tokenizer.json whose rules multiply the
        text, which this does not see.

        Raises ValueError for such a text, for what is not text (another type, or a str with a lone surrogate, which no
        encoding has), and for a text on which the tokenizer fails.
        """
        if not isinstance(text, str):
            raise ValueError(f"only a str can be encoded, got {type(text).__name__}")
        if max_tokens is not None and len(text) > max_tokens * self.longest_token_chars:
            most = max_tokens * self.longest_token_chars
            raise ValueError(
                f"the text has {len(text):,} characters, and {max_tokens:,} tokens hold at most {most:,} (the longest "
                f"token has {self.longest_token_chars}); shorten it"
            )
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(
                f"the text holds a lone surrogate ({text[error.start]!r} at index {error.start}), which is not valid "
                "Unicode; read the text as UTF-8, or clean it: text.encode(errors='replace').decode()"
            ) from None
        try:
            return self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        except BaseException as error:
            raise _explain(error, f"{self.source} fails on this text") from None

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of `ids`. Ids that are no token (a model's padded vocabulary has some) decode to nothing.

        Raises ValueError if the tokenizer fails on them."""
        try:
            return self._backend.decode(ids, skip_special_tokens=skip_special_tokens)
        except BaseException as error:
            raise _explain(error, f"{self.source} fails on these token ids") from None

    def apply_chat_template(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True) -> str:
        """The prompt text for a conversation. Encode it with `add_special_tokens=False`: the template has written them.

        Raises ValueError if the model has no template, or if the template is faulty or refuses the messages.
        """
        if self.chat_template is None:
            raise ValueError(
                "this model has no chat template: it is a base model. Give a plain text prompt, load an "
                "instruction-tuned model, or set tokenizer.chat_template"
            )
        return render_chat_template(
            self.chat_template,
            messages=messages,
            add_generation_prompt=add_generation_prompt,
            tools=None,
            documents=None,
            **self.special_tokens,
        )

    def _special_id(self, name: str) -> int | None:
        text = self.special_tokens.get(name)
        return None if text is None else self._backend.token_to_id(text)


def is_panic(error: BaseException) -> bool:
    """Whether this is a bug of the library: a Rust panic, which is no Exception."""
    return type(error).__name__ == "PanicException"


def _explain(error: BaseException, problem: str) -> BaseException:
    """What to raise for an error of the library, which raises bare Exceptions: a ValueError that says what to do."""
    # Anything else has nothing to do with the file; or a signal handler of the caller's raised it.
    if not (is_panic(error) or type(error) in (Exception, ValueError)):
        return error
    reason = printable(error).rstrip(".")
    return ValueError(f"{printable(problem)}: {reason}. Get tokenizer.json again, or another version of tokenizers")
