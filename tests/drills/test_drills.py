"""Every drill is answerable, knows its own answer, and tells apart the mistakes that it names."""

import math
import random

import pytest

from minivllm import drills
from minivllm.cli.program import main
from minivllm.drills import TOPICS, UNITS, Drill, draw, make, maker_of, play
from minivllm.theory.quantity import Quantity

MAKERS = [maker for makers in TOPICS.values() for maker in makers]
SEEDS = range(12)


def in_asked_unit(drill):
    return drill.answer / UNITS[drill.answer.unit].get(drill.ask_in.lower(), 1)


@pytest.mark.parametrize("maker", MAKERS, ids=lambda maker: maker.__name__)
class TestEachDrill:
    def test_its_own_answer_is_right(self, maker):
        for seed in SEEDS:
            drill = make(maker, seed)
            assert drill.check(in_asked_unit(drill)).is_right
            assert drill.check(f"{in_asked_unit(drill):.4g} {drill.ask_in}").is_right or drill.tolerance == 0
            if not drill.is_conversion:
                assert drill.check(f"{float(drill.answer)!r} {next(iter(UNITS[drill.answer.unit]))}").is_right

    def test_every_mistake_is_named(self, maker):
        """By its own name, at every seed; a mistake that never shows would be dead text."""
        shown = set()
        for seed in SEEDS:
            drill = make(maker, seed)
            for mistake, value in drill.traps.items():
                verdict = drill.check(value / UNITS[drill.answer.unit].get(drill.ask_in.lower(), 1))
                assert not verdict.is_right
                assert verdict.message.startswith("that is what one gets ")
                shown.update(mistake.split("; or "))
        assert shown >= set(maker(random.Random(0)).traps)

    def test_mistakes_differ(self, maker):
        """Two mistakes with one value: the first would be blamed for the second."""
        for seed in SEEDS:
            values = list(make(maker, seed).traps.values())
            for i, value in enumerate(values):
                others = values[:i] + values[i + 1 :]
                assert not [o for o in others if math.isclose(o, value, rel_tol=1e-6)], make(maker, seed).question

    def test_the_question_varies_and_repeats(self, maker):
        questions = [make(maker, seed).question for seed in SEEDS]
        assert len(set(questions)) > 1
        assert questions == [make(maker, seed).question for seed in SEEDS]

    def test_it_is_explained(self, maker):
        drill = make(maker, 0)
        assert drill.answer.formula and len(drill.answer.explain(depth=0, width=1000).splitlines()) == 3
        assert drill.question.endswith(("?", ")"))


def test_how_many():
    assert len(MAKERS) >= 20 and {"sizing", "capacity", "roofline"} <= TOPICS.keys()


def test_questions_are_found_by_name():
    assert {maker_of(maker.__name__) for maker in MAKERS} == set(MAKERS)  # so no two have one name
    with pytest.raises(ValueError, match="unknown question 'kv'; questions: kv_per_token, "):
        maker_of("kv")


EXAMPLE = Drill("x", "How much?", Quantity(57344, "B", "x", "y", {"y": 57344}), "KiB", {"by halving": 28672})


@pytest.mark.parametrize(
    "text", ["56", "56 KiB", "56KiB", " 56.0 kib ", "57344 B", "57,344 bytes", "57.344 kB", "5.6e1"]
)
def test_answers_with_and_without_units(text):
    assert EXAMPLE.check(text).is_right


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("28", "that is what one gets by halving"),
        ("100", "too large, by a factor of 1.79"),
        ("1", "too small, by a factor of 56"),
        ("-56", "no"),
        ("0", "no"),
    ],
)
def test_wrong_answers(text, message):
    assert EXAMPLE.check(text) == drills.Verdict(False, message)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("fifty", "'fifty' is not a number; write one, with or without a unit \\(KiB\\)"),
        ("56 tokens", "the unit 'tokens' does not fit; a plain number counts as KiB"),
        ("5.6.1", "'5.6.1' is not a number"),
        ("1,75", "'1,75' can be read in two ways"),
        ("15,2 KiB", "'15,2' can be read in two ways"),
    ],
)
def test_what_is_no_answer(text, message):
    with pytest.raises(ValueError, match=message):
        EXAMPLE.check(text)


def test_draw():
    names = [drill.name for drill in draw(len(MAKERS), seed=1)]
    assert len(set(names)) == len(MAKERS)  # all of them before one comes again
    assert [drill.question for drill in draw(50, 3)] == [drill.question for drill in draw(50, 3)]
    sizing = {make(maker, 0).name for maker in TOPICS["sizing"]}
    assert {drill.name for drill in draw(30, 2, "sizing")} == sizing
    with pytest.raises(ValueError, match="unknown topic 'size'; topics: sizing, "):
        draw(1, 0, "size")


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (57344, "that would be right in B; KiB is asked for"),
        ("57.344", "that would be right in kB; KiB is asked for"),
        (0.0546875, "that would be right in MiB; KiB is asked for"),
        ("58", "too large, by 3.6 %"),
        ("560", "too large, by a factor of 10"),
        ("5600 MiB", "too large, by a factor of 102,000"),
        ("56 MiB", "too large, by a factor of 1,020"),  # its unit was typed: no slip
        ("57500", "that would be right in B; KiB is asked for"),
    ],
)
def test_what_is_wrong(answer, message):
    verdict = EXAMPLE.check(answer)
    assert not verdict.is_right and verdict.message == message


class TestPlay:
    def play(self, *answers):
        told, left = [], list(answers)

        def ask(prompt):
            if not left:
                raise EOFError
            answer = left.pop(0)
            if answer is KeyboardInterrupt:
                raise KeyboardInterrupt
            return answer

        return play([EXAMPLE, EXAMPLE], ask, told.append), "\n".join(told)

    def test_right_twice(self):
        score, told = self.play("56", "57344 B")
        assert score == (2, 2) and "Score: 2 of 2" in told and "✓ 56 KiB" in told

    def test_q_ends_the_round(self):
        score, told = self.play("56", "q")
        assert score == (1, 1) and "Score: 1 of 1" in told and "q ends" in told

    def test_a_wrong_answer_counts_even_if_the_round_ends(self):
        assert self.play("28")[0] == (0, 1)

    def test_the_nearest_mistake_is_named(self):
        traps = {"by adding": 28000, "by halving": 28672}
        near = Drill("x", "?", Quantity(57344, "B", "x", "y", {"y": 57344}), "KiB", traps, tolerance=0.05)
        assert near.check("28 KiB").message.endswith("by halving")

    def test_second_try_does_not_count(self):
        score, told = self.play("28", "56", "1", "2")
        assert score == (0, 2) and "✗ that is what one gets by halving" in told
        assert told.count("x = y") == 2  # explained after the second try, right or wrong

    def test_what_is_no_answer_is_no_try(self):
        assert self.play("?", "56", "56")[0] == (2, 2)

    def test_giving_up_and_leaving(self):
        assert self.play("", "56")[0] == (1, 2)
        assert self.play("56")[0] == (1, 1)
        assert self.play("56", KeyboardInterrupt)[0] == (1, 1)


def test_command(capsys, monkeypatch):
    monkeypatch.setattr("builtins.input", lambda prompt: (_ for _ in ()).throw(EOFError))
    assert main(["drill", "--topic", "sizing", "--seed", "3", "--count", "2"]) == 0
    out = capsys.readouterr().out
    assert "2 questions, seed 3." in out and "Score: 0 of 0" in out
    assert main(["drill", "--topic", "nonsense"]) == 2
    assert "unknown topic 'nonsense'" in capsys.readouterr().err


def test_quiz(capsys):
    quiz = drills.Quiz(count=3, seed=5, topic="sizing")
    quiz.questions()
    assert len(capsys.readouterr().out.splitlines()) == 3
    for number, drill in enumerate(quiz.drills[:2], 1):
        quiz.answer(number, f"{float(drill.answer)!r} {next(iter(UNITS[drill.answer.unit]))}")
    quiz.answer(3, -1)
    quiz.answer(3, in_asked_unit(quiz.drills[2]))  # too late to count
    assert quiz.score() == "2 of 3 right at the first try, 3 tried"
    assert [line[0] for line in capsys.readouterr().out.splitlines()] == ["✓", "✓", "✗", "✓"]
    quiz.explain(1)
    assert "=" in capsys.readouterr().out


class NoTruth:
    """Compares like an array of two: to no single truth."""

    __hash__ = None

    def __eq__(self, other):
        return self

    def __bool__(self):
        raise ValueError("the truth value is ambiguous")


def test_what_is_no_answer_is_no_try(capsys):
    quiz = drills.Quiz(count=2, seed=5, topic="sizing")
    quiz.answer(3, 1)
    quiz.explain(0)
    quiz.answer(1, ...)
    quiz.answer(1, None)
    quiz.answer(1, "much")
    quiz.answer(1, [1])
    quiz.answer(1, "  ")
    quiz.answer(1, NoTruth())
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "? question 3 does not exist: there are 2, counted from 1"
    assert lines[1] == "? question 0 does not exist: there are 2, counted from 1"
    assert lines[2:4] + lines[6:7] == ["question 1 is not answered yet"] * 3
    assert [line[0] for line in lines[4:6] + lines[7:]] == ["?", "?", "?"]
    assert quiz.score() == "0 of 2 right at the first try, 0 tried"


def test_a_conversion_asks_for_its_unit():
    """'80 GB' says how many GiB 80 GB are, but it only repeats the question."""
    drill = make(maker_of("gb_to_gib"), 1)
    gb = round(drill.answer / 1e9)
    with pytest.raises(ValueError, match="how many GiB it is; you gave GB"):
        drill.check(f"{gb} GB")
    assert drill.check(f"{gb * 1e9 / 2**30:.5g} GiB").is_right


def test_a_fraction_is_told_from_percent():
    drill = make(maker_of("repeated_work"), 1)
    assert drill.check(drill.answer / 100).message == "that is a fraction; percent is asked for"


@pytest.mark.parametrize(
    ("maker", "factor", "said"),
    [
        (maker_of("kv_per_token"), 0.5, "without the 2 bytes per number"),
        (maker_of("kv_per_request"), 0.5, "without the 2 bytes per number"),
        (maker_of("kv_on_two_gpus"), 0.5, "without the factor 2"),
        (maker_of("batch_at_ridge"), 2, "with the rate of 8-bit products"),
        (maker_of("ridge"), 2, "or the FP8 rate"),
    ],
)
def test_mistakes_that_give_the_same_value_are_named_together(maker, factor, said):
    for seed in SEEDS:
        drill = make(maker, seed)
        assert said in drill.check(in_asked_unit(drill) * factor).message
