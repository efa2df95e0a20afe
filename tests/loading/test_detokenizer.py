"""Streaming detokenisation: the pieces are the text, none is half a character, none waits without need."""

import os.path
import random

import pytest
from helpers.vocabularies import byte_level, sentencepiece_like
from hypothesis import given, settings
from hypothesis import strategies as st

from minivllm.loading.detokenizer import IncrementalDetokenizer

BYTE_LEVEL, SENTENCEPIECE = byte_level(), sentencepiece_like()
BOTH = pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, SENTENCEPIECE], ids=["byte_level", "sentencepiece"])

CLUSTERS = ["👩‍👩‍👧‍👦", "👍🏽", "🇫🇷", "🏳️‍🌈", "e\u0301\u0323", "日本語", "한국어", "नमस्ते", "ﷺ", "𐍈"]
CLUSTERS += [" ", "  ", "\n", "the fox", "\u200d"]
TEXTS = st.lists(st.one_of(st.sampled_from(CLUSTERS), st.text(max_size=5)), max_size=12).map("".join)


def in_context(tokenizer, prompt_ids, output_ids, skip=True):
    """What the output adds to the prompt's text: the definition that the stream must meet."""
    prompt, whole = tokenizer.decode(prompt_ids, skip), tokenizer.decode(prompt_ids + output_ids, skip)
    return whole[len(os.path.commonprefix([prompt, whole])) :]  # noqa: RUF071 - of strings, which is what is meant


def stream(tokenizer, prompt_ids, output_ids, skip=True):
    detokenizer = IncrementalDetokenizer(tokenizer, prompt_ids, skip)
    return [detokenizer.append(token_id) for token_id in output_ids], detokenizer.finish()


def check(tokenizer, prompt_ids, output_ids, skip=True):
    pieces, rest = stream(tokenizer, prompt_ids, output_ids, skip)
    assert "".join(pieces) + rest == in_context(tokenizer, prompt_ids, output_ids, skip)
    so_far = ""
    for i, piece in enumerate(pieces):
        so_far += piece
        if not tokenizer.decode(prompt_ids + output_ids[: i + 1], skip).endswith("\ufffd"):
            assert so_far == in_context(tokenizer, prompt_ids, output_ids[: i + 1], skip), "text was held back"
    return pieces, rest


@BOTH
@settings(deadline=None)  # the machine may be busy
@given(text=TEXTS, data=st.data())
def test_any_text_split_anywhere(tokenizer, text, data):
    """Prompt and output are one text, cut between any two tokens, so also inside a character."""
    ids = tokenizer.encode(text)
    cut = data.draw(st.integers(0, len(ids)))
    pieces, rest = check(tokenizer, ids[:cut], ids[cut:])
    if "\ufffd" not in text:
        assert "\ufffd" not in "".join(pieces) + rest


@BOTH
@settings(deadline=None)  # the machine may be busy
@given(prompt=TEXTS, output=TEXTS)
def test_prompt_then_output(tokenizer, prompt, output):
    prompt_ids, output_ids = tokenizer.encode(prompt), tokenizer.encode(output, add_special_tokens=False)
    pieces, rest = check(tokenizer, prompt_ids, output_ids)
    assert ("\ufffd" in output) or "\ufffd" not in "".join(pieces) + rest
    if tokenizer is BYTE_LEVEL:
        assert "".join(pieces) + rest == output


BYTE_IDS = st.integers(0, BYTE_LEVEL.vocab_size + 5)  # some are no token at all, as in a padded vocabulary


@settings(max_examples=300, deadline=None)
@given(prompt_ids=st.lists(BYTE_IDS, max_size=12), output_ids=st.lists(BYTE_IDS, max_size=40), skip=st.booleans())
def test_any_ids_byte_level(prompt_ids, output_ids, skip):
    check(BYTE_LEVEL, prompt_ids, output_ids, skip)


# Only single bytes: characters, halves of characters, overlong and stray bytes in every order.
HIGH_BYTES = st.sampled_from([BYTE_LEVEL.encode("a")[0], *range(4 + 94, 4 + 256)])


@settings(max_examples=300, deadline=None)
@given(prompt_ids=st.lists(HIGH_BYTES, max_size=10), output_ids=st.lists(HIGH_BYTES, max_size=30))
def test_any_bytes(prompt_ids, output_ids):
    check(BYTE_LEVEL, prompt_ids, output_ids)


def is_byte(token_id):
    return (SENTENCEPIECE._backend.id_to_token(token_id) or "").startswith("<0x")


WORD_IDS = st.sampled_from([i for i in range(SENTENCEPIECE.vocab_size + 3) if not is_byte(i)])


@settings(deadline=None)  # the machine may be busy
@given(prompt_ids=st.lists(WORD_IDS, max_size=12), output_ids=st.lists(WORD_IDS, max_size=30), skip=st.booleans())
def test_any_ids_but_bytes_sentencepiece(prompt_ids, output_ids, skip):
    check(SENTENCEPIECE, prompt_ids, output_ids, skip)


@settings(deadline=None)  # the machine may be busy
@given(prompt_ids=st.lists(st.integers(0, 353), max_size=12), output_ids=st.lists(st.integers(0, 353), max_size=30))
def test_any_ids_sentencepiece_never_fail(prompt_ids, output_ids):
    """With faulty byte runs there is no one right text (see the class), but there is a text."""
    pieces, rest = stream(SENTENCEPIECE, prompt_ids, output_ids)
    assert isinstance("".join(pieces) + rest, str)


def test_an_emoji_comes_whole():
    ids = BYTE_LEVEL.encode("👩")
    assert len(ids) > 1
    pieces, rest = stream(BYTE_LEVEL, BYTE_LEVEL.encode("hi "), ids)
    assert pieces == [""] * (len(ids) - 1) + ["👩"] and rest == ""


def test_output_completes_a_character_of_the_prompt():
    ids = BYTE_LEVEL.encode("x👩y")
    assert stream(BYTE_LEVEL, ids[:-2], ids[-2:]) == (["👩", "y"], "")


def test_an_incomplete_character_comes_with_finish():
    ids = BYTE_LEVEL.encode("ab👩")
    pieces, rest = stream(BYTE_LEVEL, [], ids[:-1])
    assert "".join(pieces) == "ab" and rest == "\ufffd"


def test_finish_twice_gives_nothing_more():
    detokenizer = IncrementalDetokenizer(BYTE_LEVEL, [])
    detokenizer.append(BYTE_LEVEL.encode("👩")[0])
    assert detokenizer.finish() == "\ufffd" and detokenizer.finish() == ""


def test_the_space_before_a_word():
    """Alone "▁the" decodes to "the"; after a prompt it is " the", as first word of all it is "the"."""
    prompt, word = SENTENCEPIECE.encode("fox"), SENTENCEPIECE.encode("dog", add_special_tokens=False)
    assert "".join(stream(SENTENCEPIECE, prompt, word)[0]) == " dog"
    assert "".join(stream(SENTENCEPIECE, [], word)[0]) == "dog"
    assert "".join(stream(SENTENCEPIECE, [SENTENCEPIECE.bos_token_id], word)[0]) == "dog"
    eos = [SENTENCEPIECE.eos_token_id] * 50
    assert "".join(stream(SENTENCEPIECE, prompt + eos, eos + word)[0]) == " dog"


def test_bytes_after_a_prompt_that_ends_in_bytes():
    """The context must not begin inside a character: it would spoil the whole run of byte tokens."""
    prompt, output = "👩한👍𐍈é" * 3, "👩한👍"
    prompt_ids = SENTENCEPIECE.encode(prompt)
    whole_ids = SENTENCEPIECE.encode(prompt + output)
    assert whole_ids[: len(prompt_ids)] == prompt_ids
    pieces, rest = stream(SENTENCEPIECE, prompt_ids, whole_ids[len(prompt_ids) :])
    assert [piece for piece in pieces if piece] == ["👩", "한", "👍"] and rest == ""


def test_special_tokens_are_text_when_they_are_wanted():
    ids = BYTE_LEVEL.encode("a<|im_end|>b")
    assert "".join(stream(BYTE_LEVEL, [], ids)[0]) == "ab"
    assert "".join(stream(BYTE_LEVEL, [], ids, skip=False)[0]) == "a<|im_end|>b"


@BOTH
def test_cost_does_not_grow(tokenizer):
    """However long the text, an `append` decodes a few tokens."""
    rng = random.Random(1)
    decoded = []

    class Counting:
        def decode(self, ids, skip):
            decoded.append(len(ids))
            return tokenizer.decode(ids, skip)

    text = "".join(rng.choices(CLUSTERS, k=600))
    ids = tokenizer.encode(text)
    assert len(ids) > 2000
    pieces, rest = stream(Counting(), ids[:1500], ids[1500:])
    assert "".join(pieces) + rest == in_context(tokenizer, ids[:1500], ids[1500:])
    assert max(decoded) <= 64 and sum(decoded) < 20 * len(ids)
