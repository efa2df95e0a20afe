"""Text to token ids and back, through the `tokenizers` library.

`IncrementalDetokenizer` is the part a serving engine adds: text must leave as it is generated, but a token is not
a piece of text. An emoji may be four tokens, and whether a token starts with a space depends on what is before it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

REPLACEMENT = "\ufffd"  # what bytes that are not UTF-8, or not yet, decode to


class Tokenizer:
    """A model's vocabulary, its special tokens and its chat template.

    `special_tokens` maps names as chat templates know them to text, e.g. {"eos_token": "<|im_end|>"}.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        special_tokens: Mapping[str, str] | None = None,
        chat_template: str | None = None,
    ) -> None:
        self._backend = backend
        # A tokenizer.json may carry the truncation and padding of someone's training run.
        self._backend.no_truncation()
        self._backend.no_padding()
        self.special_tokens = dict(special_tokens or {})
        self.chat_template = chat_template
        self.bos_token_id = self._special_id("bos_token")
        self.eos_token_id = self._special_id("eos_token")

    @classmethod
    def from_folder(cls, folder: str | Path) -> Tokenizer:
        """Read tokenizer.json and, where there are any, the tokenizer_config.json, special_tokens_map.json and
        chat_template.jinja beside it. Raises ValueError if a file is damaged."""
        folder = Path(folder)
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise ValueError(f"{folder} has no tokenizer.json")
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise ValueError(f"{path} is damaged or not a tokenizer: {error}") from None
        config = read_json(folder / "tokenizer_config.json") or {}
        special_tokens = {}
        for entries in (read_json(folder / "special_tokens_map.json") or {}, config):
            for name, value in entries.items():
                text = value.get("content") if isinstance(value, dict) else value
                if name.endswith("_token") and isinstance(text, str):
                    special_tokens[name] = text
        template_file = folder / "chat_template.jinja"
        template = read_text(template_file) if template_file.is_file() else config.get("chat_template")
        if isinstance(template, list) and all(isinstance(entry, dict) for entry in template):  # several, by name
            named = [entry for entry in template if isinstance(entry.get("name"), str) and "template" in entry]
            if len(named) == len(template):
                template = {entry["name"]: entry["template"] for entry in named}.get("default")
        if template is not None and not isinstance(template, str):
            raise ValueError(
                f"{folder / 'tokenizer_config.json'}: 'chat_template' is {str(template)[:100]}; expected a text, or a "
                'list of {"name": ..., "template": ...}. Correct it, or remove it to do without chat'
            )
        return cls(backend, special_tokens, template)

    @property
    def vocab_size(self) -> int:
        """How many tokens there are, added ones included. A model's own vocab_size may be padded beyond this."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`; `add_special_tokens` adds what the model expects around a text (often a bos token).

        Raises ValueError for what is not text: another type, or a str with a lone surrogate, which no encoding has.
        """
        if not isinstance(text, str):
            raise ValueError(f"only a str can be encoded, got {type(text).__name__}")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(
                f"the text holds a lone surrogate ({text[error.start]!r} at index {error.start}), which is not valid "
                "Unicode; read the text as UTF-8, or clean it: text.encode(errors='replace').decode()"
            ) from None
        return self._backend.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of `ids`. Ids that are no token (a model's padded vocabulary has some) decode to nothing."""
        return self._backend.decode(ids, skip_special_tokens=skip_special_tokens)

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


def render_chat_template(template: str, **variables: Any) -> str:
    """Render a chat template as transformers does. Templates come with checkpoints, so they run in jinja2's sandbox."""
    try:
        import jinja2
        import jinja2.ext
        import jinja2.sandbox
    except ImportError:
        raise ValueError("chat templates need jinja2: pip install jinja2") from None

    class Generation(jinja2.ext.Extension):
        """{% generation %}...{% endgeneration %} marks the assistant's text for training; here it is just text."""

        tags = frozenset({"generation"})

        def parse(self, parser):
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(value: Any, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
        # jinja2's own filter escapes <, > and & for HTML.
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    def strftime_now(format: str) -> str:
        from datetime import datetime

        return datetime.now().strftime(format)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals.update(raise_exception=raise_exception, strftime_now=strftime_now)
    try:
        return environment.from_string(template).render(**variables)
    except Exception as error:  # a template is someone else's program and may fail in any way
        raise ValueError(f"the model's chat template failed on these messages: {error}") from None


def read_text(path: Path) -> str:
    """A UTF-8 file. Raises ValueError, with the path, if it cannot be read as one."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} cannot be read as UTF-8 text: {error}. Save it as UTF-8, or get it again") from None


def read_json(path: Path) -> dict[str, Any] | None:
    """The object in a JSON file, or None if there is no such file. Raises ValueError if it holds anything else."""
    if not path.is_file():
        return None
    try:
        value = json.loads(read_text(path))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not valid JSON: {error}. Correct it, or get it again") from None
    except RecursionError:
        raise ValueError(f"{path} is nested too deeply to be read. Correct it, or get it again") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds a JSON {type(value).__name__}, not an object. Correct it, or get it again")
    return value
