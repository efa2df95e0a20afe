"""Checks for exercises: what went wrong in one line, and why a right answer matters.

A graded cell of an exercise notebook calls `expect` (a value), `expect_function` (a function of the learner's) or opens
`grading` (anything else). A failed check shows one line and none of the code in this file, in Jupyter and in nbval.
`exercises/README.md` says how to write an exercise. Standard library only.
"""

import linecache
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

__all__ = ["Misconception", "NotAnswered", "all_given", "expect", "expect_function", "grading", "require"]

_BYTES = {"B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_BYTES |= {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_SCALES: list[Mapping[str, float]] = [_BYTES, {"s": 1, "ms": 1e-3, "µs": 1e-6}, {"%": 0.01, "as a fraction": 1}]
# What checks call, and people like to call their variables.
_CALLED: list[Any] = [abs, all, any, bool, dict, float, getattr, int, isinstance, len, list, max, min, next, range]
_CALLED += [round, set, sorted, str, sum, tuple, type, zip]
_NEEDED = {function.__name__: function for function in _CALLED}


class Misconception(AssertionError):
    """A wrong answer that we recognise; shown to the learner as one line."""

    def _render_traceback_(self) -> list[str]:
        """What IPython prints in place of a traceback."""
        return [f"✗ {self}"]


class NotAnswered(Misconception):
    """The hole of an exercise is still empty."""

    def __init__(self) -> None:
        super().__init__("not answered yet: fill in the cell above, run it, then run this one again")


def require(condition: object, hint: str) -> None:
    """Raise Misconception(`hint`) unless `condition` holds. For use inside `grading`."""
    if not condition:
        raise Misconception(hint)


def all_given(**answers: Any) -> None:
    """Name the answers that are missing, unless all are: then the first `expect` says that nothing is answered."""
    _refuse_hidden()
    missing = [name for name, answer in answers.items() if answer is None or answer is ...]
    require(len(missing) in (0, len(answers)), f"still to do: {', '.join(missing)}")


@contextmanager
def grading(why: str) -> Iterator[None]:
    """Wrap a check that calls the learner's code. Any error becomes one line; success prints `why` it matters."""
    _refuse_hidden()
    try:
        yield
    except Misconception:
        raise
    except NotImplementedError:
        raise NotAnswered from None
    except Exception as error:
        raise Misconception(f"your code raised {_describe(error)}") from None
    print(f"✓ {why}")


def expect(
    answer: Any,
    right: Any,
    *,
    why: str,
    name: str = "",
    unit: str = "",
    rel: float = 0.0,
    tol: float = 0.0,
    misconceptions: Mapping[str, Any] | None = None,
    look: str = "",
) -> None:
    """Check a value that the learner assigned; `name` says which one, where a cell checks several.

    A number is right within the relative tolerance `rel` or the absolute tolerance `tol` (both 0: exactly); anything
    else must be equal. A wrong one is compared with `misconceptions` {hint: the value that this mistake gives}, within
    a quarter of `rel` or half of `tol` (which leaves room for a rounded last digit), and the nearest is named; then
    with the right value in a neighbouring `unit` (GB for GiB, ms for s ...); failing that, the message says how far off
    it is, and where to `look`. None and `...` mean: not answered yet.

    Raises Misconception, or ValueError (an error of the exercise) if a misconception gives the right value.
    """
    misconceptions = dict(misconceptions or {})
    for hint, wrong in misconceptions.items():
        if _same(wrong, right, rel, tol):
            raise ValueError(f"this check cannot tell right from wrong: {_show(right)} is also the answer of {hint!r}")
    with grading(why):
        if answer is None or answer is ...:
            raise NotAnswered
        if _same(answer, right, rel, tol):
            return
        wrong = _what_is_wrong(answer, right, unit, rel, tol, misconceptions, look)
        raise Misconception(f"{name}: {wrong}" if name else wrong)


def _what_is_wrong(
    answer: Any, right: Any, unit: str, rel: float, tol: float, misconceptions: Mapping[str, Any], look: str
) -> str:
    """The message for a wrong value."""
    if _number(right) is not None and _number(answer) is None:
        return f"a number{_in(unit)} is asked for; you gave {_show(answer)}"
    near = [hint for hint, wrong in misconceptions.items() if _same(answer, wrong, rel / 4, tol / 2)]
    if near:
        return min(near, key=lambda hint: _apart(answer, misconceptions[hint]))
    for other, wrong in _unit_slips(right, unit):
        if not _same(wrong, right, rel, tol) and _same(answer, wrong, max(rel, 1e-3), tol):
            return f"that is the right amount in the wrong unit: you gave it {other}; {_ask(unit)}"
    if type(right) is int and rel == tol == 0 and not _is_whole(answer):
        return f"a whole number is asked for; you gave {answer!r}"
    return ". ".join(filter(None, [_distance(answer, right, unit), look]))


def expect_function(
    function: Callable[..., Any],
    right: Callable[..., Any],
    cases: Sequence[tuple],
    *,
    why: str,
    rel: float = 0.0,
    tol: float = 0.0,
    misconceptions: Mapping[str, Callable[..., Any]] | None = None,
    look: str = "",
) -> None:
    """Check a function that the learner wrote, against `right` on `cases` (tuples of arguments, copied for each call).

    If it is wrong somewhere and agrees on all cases with one of `misconceptions` {hint: the function that this mistake
    gives}, the message is that hint; failing that, it shows the first case that differs, and where to `look`.

    Raises Misconception, or ValueError (an error of the exercise) if the cases cannot tell a misconception from right.
    """

    _refuse_hidden()

    def agree(one: list, other: list) -> bool:
        return all(_same(a, b, rel, tol) for a, b in zip(one, other, strict=True))

    wanted = [right(*deepcopy(case)) for case in cases]
    mistaken = {hint: [f(*deepcopy(case)) for case in cases] for hint, f in (misconceptions or {}).items()}
    for hint, values in mistaken.items():
        if agree(values, wanted):
            raise ValueError(f"this check cannot tell right from wrong: no case shows {hint!r}")
    name = getattr(function, "__name__", "your function")
    with grading(why):
        got = [_call(name, function, case) for case in cases]
        if agree(got, wanted):
            return
        for hint, values in mistaken.items():
            if agree(got, values):
                raise Misconception(hint)
        case, value, want = next(
            (c, g, w) for c, g, w in zip(cases, got, wanted, strict=True) if not _same(g, w, rel, tol)
        )
        shown = [_show(value), _show(want)]
        if shown[0] == shown[1]:  # they differ in digits that are not shown
            shown = [repr(value), repr(want)]
        message = f"{_call_text(name, case)} gave {shown[0]}; expected {shown[1]}"
        raise Misconception(". ".join(filter(None, [message, look])))


def _call(name: str, function: Callable[..., Any], case: tuple) -> Any:
    """`function(*case)`, with an error in it told together with the arguments."""
    try:
        return function(*deepcopy(case))
    except (Misconception, NotImplementedError):
        raise
    except Exception as error:
        raise Misconception(f"{_call_text(name, case)} raised {_describe(error)}") from None


def _call_text(name: str, case: tuple) -> str:
    shown = (_show(value, limit=400) for value in case)
    # 18944 and not 18,944, which would read as two arguments
    plain = (
        text.replace(",", "") if _number(value) is not None else text for text, value in zip(shown, case, strict=True)
    )
    return f"{name}({', '.join(plain)})"


def _number(value: Any) -> float | int | None:
    """`value` as a Python number, or None if it is none. Takes numpy and torch scalars; a bool is not a number."""
    if isinstance(value, (bool, str, bytes)):
        return None
    if isinstance(value, (int, float)):
        return value
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        return None


def _same(a: Any, b: Any, rel: float, tol: float) -> bool:
    """Equal, or equal within the tolerances, also inside lists, tuples and arrays."""
    a, b = (v.tolist() if hasattr(v, "tolist") else v for v in (a, b))
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(_same(x, y, rel, tol) for x, y in zip(a, b, strict=True))
    x, y = _number(a), _number(b)
    if x is None or y is None:
        return type(a) is type(b) and bool(a == b)
    try:
        return x == y or math.isclose(x, y, rel_tol=rel, abs_tol=tol)
    except OverflowError:  # a whole number beyond what a float holds
        return False


def _apart(a: Any, b: Any) -> float:
    """How far two numbers are apart; 0 for anything else."""
    x, y = _number(a), _number(b)
    return 0.0 if x is None or y is None else abs(x - y)


def _is_whole(value: Any) -> bool:
    number: Any = _number(value)
    return isinstance(number, int) or (math.isfinite(number) and number.is_integer())


def _unit_slips(right: Any, unit: str) -> list[tuple[str, float]]:
    """(unit, value) for the other units in which the right answer might have been given."""
    for scale in _SCALES if _number(right) is not None else ():
        if unit in scale:
            value = right * scale[unit]
            return [(o if o.startswith("as") else f"in {o}", value / s) for o, s in scale.items() if o != unit]
    return []


def _in(unit: str) -> str:
    return f" in {unit}" if unit else ""


def _ask(unit: str) -> str:
    """'the question asks for GiB (1 GiB = 1,073,741,824 B)'"""
    size = f" (1 {unit} = {_BYTES[unit]:,} B)" if unit in _BYTES and unit != "B" else ""
    return f"the question asks for {unit}{size}"


def _distance(answer: Any, right: Any, unit: str) -> str:
    """How a wrong answer relates to the right one, without giving that away."""
    x, y = _number(answer), _number(right)
    if x is None or y is None or not (abs(x) < 1e300 and abs(y) < 1e300):  # a NaN, too
        return f"{_show(answer)} is not it"
    shown = f"{_show(answer)}{' ' if unit not in ('', '%') else ''}{unit} is too {'high' if x > y else 'low'}"
    if x * y <= 0:
        return shown
    ratio = max(x / y, y / x)
    return f"{shown}, by {100 * (ratio - 1):.2g} %" if ratio < 1.1 else f"{shown}, by a factor of {ratio:.3g}"


def _show(value: Any, limit: int = 80) -> str:
    """A short, readable form of a value."""
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}" if abs(value) >= 10_000 else str(value)
    if isinstance(value, float):
        return f"{value:.6g}"
    text = " ".join(repr(value).split())
    return text if len(text) <= limit else text[: limit - 3] + "..."


def _hidden() -> str:
    """What to say of a variable in the notebook that has the name of a builtin; empty if there is none."""
    variables = vars(sys.modules["__main__"])
    for name, needed in _NEEDED.items():
        if variables.get(name, needed) is not needed:
            return f"you have a variable called {name}, which hides Python's own; run `del {name}` and this cell again"
    return ""


def _refuse_hidden() -> None:
    """Raise Misconception if a variable in the notebook has the name of a builtin that checks call."""
    if hidden := _hidden():
        raise Misconception(hidden)


def _show_error(shell: Any, kind: type, error: Any, trace: Any, tb_offset: int | None = None) -> None:
    """What IPython does with these errors: one line if the check itself stumbled, the usual traceback otherwise."""
    step = trace
    while step.tb_next is not None:
        step = step.tb_next
    if linecache.getline(step.tb_frame.f_code.co_filename, 1).startswith("# Check "):
        line = _hidden()
        if not line and kind is NameError:
            line = f"run the cells above first: `{error.name}` is not defined yet"
        if line:
            error._render_traceback_ = lambda: [f"✗ {line}"]
    shell.showtraceback((kind, error, trace), tb_offset=tb_offset)


if "IPython" in sys.modules and (_shell := sys.modules["IPython"].get_ipython()) is not None:
    _shell.set_custom_exc((NameError, TypeError), _show_error)


def _describe(error: Exception) -> str:
    """'ZeroDivisionError: division by zero, in the line `n / b`', the line being the learner's."""
    line, step, checks = "", error.__traceback__, set()
    while step is not None:
        frame = step.tb_frame
        if frame.f_code.co_name.startswith("_"):  # a check, or what checks share
            checks.add(frame.f_code.co_filename)
        elif frame.f_globals.get("__name__") == "__main__" and frame.f_code.co_filename not in checks:
            line = linecache.getline(frame.f_code.co_filename, step.tb_lineno, frame.f_globals).strip() or line
        step = step.tb_next
    text = f"{type(error).__name__}: {' '.join(str(error).split())}".removesuffix(": ")
    return f"{text}, in the line `{line}`" if line else text
