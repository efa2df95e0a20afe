"""minivllm.exercises: what the learner reads for each kind of answer."""

import math

import pytest

from minivllm.exercises import Misconception, NotAnswered, expect, expect_function, grading, require


def message(check, *arguments, **keywords):
    """The line that a failed check shows."""
    with pytest.raises(Misconception) as caught:
        check(*arguments, **keywords)
    (line,) = caught.value._render_traceback_()
    assert line == f"✗ {caught.value}" and "\n" not in line
    assert caught.value.__suppress_context__ or caught.value.__context__ is None
    return line


def test_right_answers_say_why(capsys):
    expect(28.0, 28, why="it fits")
    expect(1.009, 1.0, rel=0.01, why="close enough")
    expect("B", "B", why="letters too")
    expect((1, 2.0), [1, 2], why="sequences")
    expect_function(lambda n: -(-n // 16), lambda n: math.ceil(n / 16), [(17,), (0,)], why="functions")
    assert capsys.readouterr().out.splitlines() == [
        "✓ it fits",
        "✓ close enough",
        "✓ letters too",
        "✓ sequences",
        "✓ functions",
    ]


@pytest.mark.parametrize("empty", [None, ...])
def test_an_empty_hole_is_not_a_wrong_answer(empty):
    with pytest.raises(NotAnswered, match="not answered yet"):
        expect(empty, 3, why="")


def test_the_misconception_that_gives_the_number_is_named():
    checks = {"the factor 2 is missing": 14, "query heads for KV heads": 196}
    assert message(expect, 14, 28, misconceptions=checks, why="") == "✗ the factor 2 is missing"
    assert message(expect, 196, 28, misconceptions=checks, why="") == "✗ query heads for KV heads"


def test_a_neighbouring_unit_is_named():
    line = message(expect, 57.98, 54, unit="GiB", rel=0.01, why="")
    assert "you gave it in GB" in line and "1 GiB = 1,073,741,824 B" in line
    assert "you gave it in ms" in message(expect, 1500, 1.5, unit="s", why="")
    assert "you gave it as a fraction" in message(expect, 0.83, 83, unit="%", why="")


def test_an_unknown_wrong_number_says_how_far_off_and_where_to_look():
    assert message(expect, 56, 28, unit="KiB", why="", look="Count the heads") == (
        "✗ 56 KiB is too high, by a factor of 2. Count the heads"
    )
    assert message(expect, 29.4, 28.0, unit="KiB", why="") == "✗ 29.4 KiB is too high, by 5 %"
    assert message(expect, 19.97, 19, why="") == "✗ a whole number is asked for; you gave 19.97"
    assert message(expect, 0, 28, unit="KiB", why="") == "✗ 0 KiB is too low"
    assert message(expect, False, True, why="") == "✗ False is not it"
    assert message(expect, [1.0], [2.0], unit="GiB", why="") == "✗ [1.0] is not it"
    assert message(expect, 10**400, 5, why="").endswith("is not it")
    assert message(expect, float("nan"), 5.0, why="") == "✗ nan is not it"
    assert message(expect, "A", "B", why="") == "✗ 'A' is not it"


def test_a_number_is_asked_for():
    assert message(expect, "28", 28, unit="KiB", why="") == "✗ a number in KiB is asked for; you gave '28'"
    assert "a number is asked for" in message(expect, True, 1, why="")


def test_tolerances_hold_on_both_sides():
    expect(1.01, 1.0, rel=0.01, why="")
    message(expect, 1.03, 1.0, rel=0.01, why="")
    message(expect, 0.97, 1.0, rel=0.01, why="")
    message(expect, 19.97, 19, why="")


def test_a_wrong_function_is_recognised_by_what_it_does():
    checks = {"you round down": lambda n, b: n // b, "one too many": lambda n, b: n // b + 1}
    cases = [(17, 16), (16, 16)]
    right = lambda n, b: -(-n // b)  # noqa: E731
    assert message(expect_function, lambda n, b: int(n / b), right, cases, misconceptions=checks, why="") == (
        "✗ you round down"
    )

    def blocks(n, b):
        return n

    line = message(expect_function, blocks, right, cases, misconceptions=checks, look="Try it by hand", why="")
    assert line == "✗ blocks(17, 16) gave 17; expected 2. Try it by hand"


def test_an_error_in_the_answer_is_one_line_with_its_arguments():
    def blocks(n):
        return n / 0

    assert message(expect_function, blocks, lambda n: n, [(3,)], why="") == (
        "✗ blocks(3) raised ZeroDivisionError: division by zero"
    )

    def hole(n):
        raise NotImplementedError

    with pytest.raises(NotAnswered):
        expect_function(hole, lambda n: n, [(3,)], why="")


def test_a_function_cannot_spoil_the_cases(capsys):
    def pops(values):
        return values.pop()

    expect_function(pops, lambda values: values[-1], [([1, 2],)] * 2, why="ok")


def test_a_check_that_cannot_tell_right_from_wrong_is_the_author_s_error():
    with pytest.raises(ValueError, match="cannot tell right from wrong"):
        expect(4, 4, misconceptions={"squared, not doubled": 2**2}, why="")
    with pytest.raises(ValueError, match="no case shows"):
        expect_function(
            lambda n: 1, lambda n: -(-n // 16), [(16,)], misconceptions={"floor": lambda n: n // 16}, why=""
        )


def test_grading_turns_any_error_into_one_line(capsys):
    with grading("it matters"):
        require(True, "no")
    assert capsys.readouterr().out == "✓ it matters\n"

    def broken():
        with grading("it matters"):
            {}["key"]

    assert message(broken) == "✗ your code raised KeyError: 'key'"
    assert capsys.readouterr().out == ""


def test_numpy_and_torch_values_count_as_numbers():
    numpy, torch = pytest.importorskip("numpy"), pytest.importorskip("torch")
    expect(numpy.float32(2), 2, why="")
    expect(torch.tensor(2), 2, why="")
    expect(numpy.arange(3), [0, 1, 2], why="")
    assert "too low" in message(expect, numpy.int64(1), 2, why="")
