"""minivllm.exercises: what the learner reads for each kind of answer."""

import math
import sys
from fractions import Fraction

import nbformat
import pytest

from minivllm.exercises import Misconception, NotAnswered, all_given, expect, expect_function, grading, require
from tools import exercises
from tools.notebooks import ROOT, nbval, read


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


def test_of_two_near_mistakes_the_nearest_is_named():
    checks = {"by adding": 50.0, "by halving": 50.2}
    assert message(expect, 50.2, 100, rel=0.05, misconceptions=checks, why="") == "✗ by halving"
    assert "too low" in message(expect, 51.2, 100, rel=0.05, misconceptions=checks, why="")  # within 5 %, but not near


def test_the_name_of_the_answer_stands_before_every_message():
    checks = {"upside down": 0.25}
    for wrong, line in [
        (0.25, "upside down"),
        ("4", "a number in GB is asked for; you gave '4'"),
        (4e9, "that is the right amount in the wrong unit: you gave it in B; the question asks for GB"),
        (5, "5 GB is too high, by a factor of 1.25. Look"),
    ]:
        shown = message(expect, wrong, 4, name="size", unit="GB", misconceptions=checks, look="Look", why="")
        assert shown.startswith(f"✗ size: {line}")


def test_what_is_missing_is_named():
    all_given(a=1, b=0)
    all_given(a=None, b=...)  # `expect` says so
    assert message(all_given, a=1, b=None, c=...) == "✗ still to do: b, c"


@pytest.mark.parametrize("name", ["sum", "max", "len", "range"])
def test_a_variable_that_hides_a_builtin_is_named(name, monkeypatch):
    monkeypatch.setattr(sys.modules["__main__"], name, 6, raising=False)
    line = f"✗ you have a variable called {name}, which hides Python's own; run `del {name}` and this cell again"

    def check():
        with grading(""):
            pass

    assert message(check) == line
    assert message(expect, 1, 1, why="") == line
    assert message(expect_function, abs, abs, [(1,)], why="") == line


def test_a_check_that_stumbles_itself_is_one_line_and_fails(tmp_path):
    """Before its cells, or with a builtin hidden. An error of the learner's own keeps its traceback."""
    sources = [
        "from minivllm.exercises import expect",
        "# Check 1\ndef _check_1():\n    expect(answer, 1, why='')\n\n\n_check_1()",
        "# Check 2\nexpect(answer, 1, why='')",
        "typo",
        "range = 3",
        "# Check 3\ndef _check_3():\n    return [0 for _ in range(3)]\n\n\n_check_3()",
        "None + 1",
    ]
    path = tmp_path / "early.ipynb"
    nbformat.write(nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(s) for s in sources]), path)
    results = nbval([path])
    assert [bool(r.failure) for r in results] == [False, True, True, True, False, True, True]
    assert [r.traceback for r in results[1:3]] == ["✗ run the cells above first: `answer` is not defined yet"] * 2
    assert "NameError" in results[3].traceback and "✗" not in results[3].traceback
    assert results[5].traceback.startswith("✗ you have a variable called range")
    assert "TypeError" in results[6].traceback and "✗" not in results[6].traceback


def graded(slug, name, answer):
    """What the check of one exercise says about an answer, without a kernel."""
    source = read(ROOT / "exercises" / "solutions" / f"{slug}.ipynb")
    found = exercises.exercises(source)
    one = next(e for e in found if e.name == name)
    begin = max([e.last + 1 for e in found if e.last < one.cell], default=0)
    setup = next(i for i, cell in enumerate(source.cells) if cell.source.startswith("## "))
    changed = exercises.mutated(source, [exercises.Mutant("", name, answer, "", "")]) if answer else source
    names = {"__name__": "exercise"}
    for cell in [*changed.cells[:setup], *changed.cells[max(begin, setup) : one.grade]]:
        if cell.cell_type == "code":
            exec(cell.source, names)
    with pytest.raises(Misconception) as caught:
        exec(changed.cells[one.grade].source, names)
    return str(caught.value)


DOUBLING = """
end = self.length + len(keys)
if END:
    room = torch.zeros(2 ** end.bit_length(), *self.room.shape[1:])
    room[: self.length] = self.room[: self.length]
    self.room = room
self.room[self.length : end] = keys
self.length = end
return self.room[:end]
"""
SHAPES = 'shape = (num_tokens, kv_heads, head_dim)\nreturn {"k": shape, "v": shape}, '
ALL = "(o := (p + m) * bytes_per_token / 1e9), (a := sum(range(p + 1, p + m + 1)) * bytes_per_token / 1e9)"


@pytest.mark.parametrize(
    ("slug", "exercise", "answer", "hint"),
    [
        ("kv-cache", "count", "a = m * p + m * (m - 1) // 2\nreturn a, m, 1 - m / a", "the prompt is computed as well"),
        (
            "kv-cache",
            "shapes",
            SHAPES + "2 * layers * num_tokens * kv_heads * head_dim * 2",
            "you took 2 bytes per number",
        ),
        ("kv-cache", "shapes", SHAPES + "2 * layers * num_tokens * kv_heads * head_dim", "every number has 8 bytes"),
        ("kv-cache", "shapes", SHAPES + "'many'", "should be a number of bytes"),
        ("kv-cache", "shapes", "return [], 0", "a dict like {'k': (tokens, heads, size)}"),
        (
            "kv-cache",
            "step",
            "keys, values = torch.cat([keys, k[None]]), torch.cat([values, v[None]])\n"
            "return values[0].repeat_interleave(len(q) // len(k), dim=0), keys, values",
            "your mask leaves token 0 only",
        ),
        ("kv-cache", "test", "return torch.allclose(cached, plain, rtol=1e-2, atol=1e-3)", "has a relative part, rtol"),
        ("kv-cache", "test", "return torch.allclose(cached, plain, atol=1e-3)", "has a relative part, rtol"),
        (
            "kv-cache",
            "test",
            "return torch.allclose(cached, plain, rtol=0, atol=1e-3, equal_nan=True)",
            "a NaN in the same place of both passes",
        ),
        (
            "kv-cache",
            "test",
            "return not (cached.isnan().any() or ((cached - plain).abs() > 1e-3).any())",
            "a NaN in `plain` alone passes",
        ),
        ("kv-cache", "test", "return not ((cached - plain).abs() > 1e-3).any()", "a NaN passes"),
        ("kv-cache", "test", "return bool((cached - plain).abs().mean() <= 1e-3)", "drowns in a mean"),
        ("kv-cache", "test", "return bool(((cached - plain).abs() <= 1e-2).all())", "one logit is off by 0.002"),
        (
            "kv-cache",
            "read",
            f"last_gb, all_gb = {ALL}\nshare = 100 * R * a / (R * a + m * weights_gb)",
            "share: the last step is asked for",
        ),
        ("kv-cache", "read", f"last_gb, all_gb = {ALL}", "still to do: share"),
        (
            "kv-cache",
            "copies",
            "return sum(range(p + 1, n + 1)) * bytes_per_token, n * bytes_per_token",
            "the prompt's own write is missing",
        ),
        ("kv-cache", "doubling", DOUBLING.replace("END", "False"), "the room is full and you did not replace it"),
        ("kv-cache", "doubling", DOUBLING.replace("END", "end >= len(self.room)"), "old one had space (`>` or `>=`?)"),
        (
            "kv-sizing",
            "token",
            'return 2 * config["num_hidden_layers"] * config["hidden_size"] * (\n'
            '    4 if config["torch_dtype"] == "float32" else 2)',
            "you took hidden_size",
        ),
        (
            "kv-sizing",
            "token",
            'heads, hidden = config["num_attention_heads"], config["hidden_size"]\n'
            'kv = config.get("num_key_value_heads", heads)\n'
            'return 2 * config["num_hidden_layers"] * kv * config.get("head_dim", hidden // heads)',
            "the bytes per number are missing",
        ),
        (
            "kv-sizing",
            "units",
            "token_mb, total_gb, llama_gb, llama_gib = 0.65536, 2684.35, 536.87, 524.288",
            "llama_gib: you divided by 1,024 x 1,000 x 1,000",
        ),
        (
            "kv-sizing",
            "units",
            "token_mb, total_gb, llama_gb, llama_gib = 0.65536, 2684.35, 536.87, 512",
            "llama_gib: you divided by 1,024 x 1,024 x 1,000",
        ),
        (
            "kv-sizing",
            "units",
            "token_mb, total_gb, llama_gb, llama_gib = 0.65536, 2684.35, 536.87, 0.5",
            "llama_gib: that is one request",
        ),
        (
            "kv-sizing",
            "units",
            "token_mb, total_gb, llama_gb, llama_gib = 0.65536, 2684.35, 0.536870912, 500",
            "llama_gb: that is one request",
        ),
        ("kv-sizing", "whole", "example, decimal, binary, llama13 = 20, 41, 39, 25", "applies utilisation to the rest"),
        ("kv-sizing", "whole", "example, decimal, binary, llama13 = 19, 42, 39, 25", "decimal: 42 rounds 41.02 up"),
        ("kv-sizing", "gpu", "return 163_840", "expected 327,680. How many KV heads does one GPU hold, or which part"),
        ("arithmetic-intensity", "ridge", "ridge = sparse_tflops / bandwidth_tb_s", "brought the bytes per weight in"),
        (
            "arithmetic-intensity",
            "ridge",
            "ridge = sparse_tflops / 4 / bandwidth_tb_s",
            "halved it twice, or you brought the bytes per weight in",
        ),
        ("arithmetic-intensity", "critical", "return flop_s / bytes_s", "or you let the rate grow"),
        (
            "arithmetic-intensity",
            "step",
            "return max(weights / bytes_s, 2 * params / flop_s) + batch * context * kv / bytes_s",
            "the products grow with the batch",
        ),
        (
            "arithmetic-intensity",
            "chunk",
            "tokens = min(prompt - min(hits, prompt - 1), chunk) + decodes\n"
            'return "compute" if tokens >= ridge else "memory"',
            "at the ridge itself the step still counts as memory-bound",
        ),
        ("arithmetic-intensity", "puzzle", "own_ms = 1", "still to do: shared_ms, tokens_s_16, kv_tokens"),
        ("arithmetic-intensity", "puzzle", "own_ms = shared_ms = tokens_s_16 = kv_tokens = 'x'", "own_ms: a number in"),
    ],
)
def test_wrong_answers_beside_the_mutants(slug, exercise, answer, hint, capsys):
    """More of them than the four mutants of an exercise."""
    assert hint in graded(slug, exercise, answer)


@pytest.mark.parametrize(
    ("slug", "exercise", "answer"),
    [
        ("kv-cache", "count", "a = torch.tensor(m * p + m * (m - 1) // 2.0)\nreturn a, p + m - 1, 1 - (p + m - 1) / a"),
        (
            "kv-cache",
            "shapes",
            "import numpy as np\nshape = np.array([num_tokens, kv_heads, head_dim])\n"
            'return {"k": shape, "v": tuple(shape)}, np.prod(shape) * 2 * layers * size',
        ),
        ("kv-cache", "shapes", SHAPES + "torch.tensor(2 * layers * num_tokens * kv_heads * head_dim * size)"),
        (
            "kv-cache",
            "shapes",
            f"from fractions import Fraction\n{SHAPES}Fraction(2 * layers * num_tokens * kv_heads * head_dim * size)",
        ),
        ("kv-cache", "test", "return torch.allclose(cached, plain, rtol=0, atol=1e-3)"),
        ("kv-cache", "test", "return bool((cached - plain).abs().max() <= 1e-3)"),
    ],
)
def test_right_answers_of_other_types(slug, exercise, answer):
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        graded(slug, exercise, answer)


def test_a_learner_s_globals_do_not_matter():
    for name, answer in [
        ("log", "GB = GIB = 2**20"),
        ("second", "GB = GIB = 2**20"),
    ]:
        source = read(ROOT / "exercises" / "solutions" / "kv-sizing.ipynb")
        body = next(e.body for e in exercises.exercises(source) if e.name == name)
        with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
            graded("kv-sizing", name, f"{answer}\n{body}")


def test_fractions_count_as_numbers():
    expect(Fraction(1, 2), 0.5, why="")
