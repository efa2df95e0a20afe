"""The embedded model: its corpus is deterministic, its files are right, it recalls and it tells stories."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator

import pytest
import torch
from tokenizers import Tokenizer

from data import corpus, evaluate, train
from data.train import TINY


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def tiny():
    return evaluate.load()


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(TINY / "tokenizer.json"))


# --- corpus -----------------------------------------------------------------------------------------------------------


def write(seed: int) -> str:
    rng = random.Random(seed)
    return corpus.story_document(rng) + corpus.recall_document(rng, 300, 0.5)


def test_a_seed_gives_one_text():
    assert write(3) == write(3)
    assert write(3) != write(4)
    assert corpus.held_out_recall(3) == corpus.held_out_recall(3)
    assert corpus.held_out_recall(3) != corpus.held_out_recall(4)


def test_stories_are_filled_in():
    for seed in range(200):
        assert not set("[]{}|") & set(write(seed).replace(corpus.END_OF_TEXT, ""))


def notes_in(text: str) -> set[tuple[str, str, str]]:
    """(name, thing, place) of every note."""
    lines = [line.split() for line in text.splitlines() if line.startswith("Note:")]
    return {(words[1], words[4], words[7].rstrip(".")) for words in lines}


def test_facts_asked_in_evaluation_never_occur_in_training():
    trained = {note for seed in range(300) for note in notes_in(write(seed))}
    asked = {note for seed in range(300) for note in notes_in(corpus.held_out_recall(seed)[0])}
    assert len(trained) > 1000 and len(asked) > 1000
    assert not any(corpus.is_held_out(name, thing) for name, thing, _ in trained)
    assert all(corpus.is_held_out(name, thing) for name, thing, _ in asked)


@pytest.mark.parametrize(("distance", "context"), [(25, None), (100, None), (200, 1000), (900, 1000)])
def test_a_recall_prompt_has_its_facts_and_its_distance(tokenizer, distance, context):
    for seed in range(30):
        prompt, answer = corpus.held_out_recall(seed, facts=7, distance=distance, context=context)
        tokens = tokenizer.encode(prompt).tokens
        assert len(notes_in(prompt)) == 7
        assert tokens[len(tokens) - distance] == answer.replace(" ", "Ġ")
        assert len(tokens) == (context or len(tokens)) <= 1024


def test_a_distance_shorter_than_the_question_is_refused():
    with pytest.raises(ValueError, match="distance 20 is too short"):
        corpus.held_out_recall(0, distance=20)


@pytest.mark.parametrize("facts", [1, 6, 20, corpus.MAX_FACTS])
def test_as_many_facts_as_asked_for(facts):
    for seed in range(10):
        assert len(set(corpus.draw_facts(random.Random(seed), facts, held_out=True))) == facts


def test_more_facts_than_there_are_pairs_are_refused():
    with pytest.raises(ValueError, match="73 facts"):
        corpus.held_out_recall(0, facts=73, distance=900)


def test_facts_share_names_or_things_and_places_vary():
    assert len(set(corpus.PLACES)) >= 50
    for seed in range(50):
        facts = corpus.draw_facts(random.Random(seed), 6, held_out=True)
        assert len(set(facts)) == 6
        assert len({fact.name for fact in facts}) < 6 or len({fact.thing for fact in facts}) < 6


# --- tokenizer --------------------------------------------------------------------------------------------------------

TEXTS = [
    "Once upon a time",
    "Zoë naïvely\n\n\tpaid 3€ \r\n",
    "日本語 🦊🏽 \u202e العربية",
    " \x00\x7f",
    "<|endoftext|>x",
    "don't  stop",
]


@pytest.mark.parametrize("text", TEXTS)
def test_any_text_round_trips(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_every_word_of_the_grammar_is_one_token(tokenizer):
    rng = random.Random(5)
    for _ in range(100):
        text = corpus.story_document(rng, made_up_names=0) + corpus.recall_document(rng, 200, 0.4)
        assert len(tokenizer.encode(text).ids) == corpus.count_tokens(text)


# --- model ------------------------------------------------------------------------------------------------------------


def test_the_files_are_small():
    assert sum(file.stat().st_size for file in TINY.iterdir()) < 8e6


def test_logits_equal_those_of_transformers(tiny):
    transformers = pytest.importorskip("transformers")
    model, tokenizer = tiny
    theirs = transformers.GPT2LMHeadModel.from_pretrained(TINY, dtype=torch.float32, attn_implementation="eager").eval()
    prompt, _ = corpus.held_out_recall(0, distance=700, context=1000)
    tokens = torch.tensor([tokenizer.encode(prompt).ids])
    with torch.inference_mode():
        ours = train.forward(model, tokens, evaluate.positions_of(tokens))
        torch.testing.assert_close(ours, theirs(tokens).logits, atol=1e-4, rtol=0)


def test_transformers_reads_the_tokenizer(tokenizer):
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoTokenizer.from_pretrained(TINY)
    text = write(0) + TEXTS[1]
    assert theirs.encode(text) == tokenizer.encode(text).ids
    assert theirs.eos_token_id == json.loads((TINY / "config.json").read_text())["eos_token_id"]


def test_it_recalls_facts_it_never_saw(tiny):
    assert evaluate.recall(*tiny, distance=100, lines=100) >= 0.9


def test_it_tells_a_story_in_the_words_of_the_grammar(tiny):
    text, count = evaluate.continuation(*tiny, "Once upon a time")
    assert 50 < count < 250, "a story, and then its end"
    assert text.count(".") > 4


# --- training ---------------------------------------------------------------------------------------------------------


def test_training_starts_as_it_did():
    assert train.check(steps=10) < 1e-3


def test_the_tokenizer_is_the_one_the_grammar_gives():
    assert train.build_tokenizer().to_str() == Tokenizer.from_file(str(TINY / "tokenizer.json")).to_str()


def test_training_can_be_resumed(tmp_path, tokenizer, monkeypatch):
    monkeypatch.setattr(train, "STAGES", (train.Stage(4, 32, 2, recall=0.5, sparse=0.0),))
    monkeypatch.setattr(train, "STEPS", 4)
    monkeypatch.setattr(train, "SAVE_EVERY", 2)
    checkpoint = tmp_path / "checkpoint.pt"

    def run(**options) -> Iterator[float]:
        return (step["loss"] for step in train.train(train.fresh_model(tokenizer), tokenizer, **options))

    whole = list(run())
    interrupted = run(checkpoint=checkpoint)
    assert [next(interrupted) for _ in range(3)] == whole[:3]  # saved after the second
    assert list(run(checkpoint=checkpoint, resume=True)) == whole[2:]
