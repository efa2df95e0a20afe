"""The exercise mechanism, on a sample of its own: what should pass passes, and each way to be wrong is seen."""

from dataclasses import replace
from pathlib import Path

import pytest

from tools import exercises
from tools.exercises import Kit, contract_problems, load_mutants, skeleton
from tools.notebooks import nbval, read, text

HERE = Path(__file__).parent / "sample"
SAMPLE = Kit(HERE / "sample.ipynb", HERE / "sample.skeleton.ipynb", HERE / "sample.toml")


@pytest.fixture
def sample():
    return read(SAMPLE.solution)


def cell(notebook, name):
    return next(c for c in notebook.cells if c.id == name)


def run(notebook, folder):
    path = folder / "notebook.ipynb"
    path.write_text(text(notebook), encoding="utf-8")
    return nbval([path])


def test_sample_keeps_the_contract(sample):
    assert contract_problems(sample, load_mutants(SAMPLE.mutants)) == []


@pytest.mark.parametrize(
    "way, phrase",
    [
        ("solution", "solution 8/8 green"),
        ("skeleton", "skeleton fails in exactly its 3 graded cells"),
        ("mutants", "6/6 mutants rejected with their own hint"),
    ],
)
def test_sample_passes_three_ways(way, phrase):
    assert exercises.CHECKS[way](SAMPLE) == exercises.Outcome([], phrase)


def test_skeleton_holds_no_answer_outside_the_folded_solution(sample):
    notebook = skeleton(sample)
    code = "\n".join(c.source for c in notebook.cells if c.cell_type == "code")
    assert "SOLUTION" not in code and "reversed(table)" not in code
    assert "kib_per_token = None  # KiB" in code
    assert cell(notebook, "give-back").source.endswith("    # your code here\n    raise NotImplementedError")
    assert not any(c.outputs or c.execution_count for c in notebook.cells if c.cell_type == "code")
    folded = [c.source for c in notebook.cells if "<summary>Solution</summary>" in c.source]
    assert len(folded) == 3 and "free.extend(reversed(table))" in folded[2]


def test_broken_checks_are_seen(sample, tmp_path):
    """Three exercises, each with a check that is broken in its own way, and a cell that needs an answer to run."""
    cell(sample, "blocks-needed-grade").source = 'print("✓ cannot fail")'
    cell(sample, "kib-per-token-grade").source = "assert kib_per_token and kib_per_token > 2"
    cell(sample, "give-back").source += "\n\n_ = kib_per_token + 1"
    mutants = {m.id: m for m in load_mutants(SAMPLE.mutants)}

    notebook = skeleton(sample)
    problems = "\n".join(exercises.skeleton_problems(notebook, run(notebook, tmp_path)))
    assert "graded cell blocks-needed-grade passes with nothing answered" in problems
    assert "graded cell kib-per-token-grade should say '✗ not answered yet' and says" in problems
    assert "cell give-back fails, but is not graded" in problems

    wrong_hint = replace(mutants["head-first"], hint="append, do not prepend")
    row = [mutants["floor"], replace(mutants["no-factor-2"], replacement="kib_per_token = 1"), wrong_hint]
    problems = exercises.mutant_problems(sample, row, row, run(exercises.mutated(sample, row), tmp_path))
    assert "mutant floor: accepted" in problems
    assert any(p.startswith("mutant no-factor-2: the failed check should print one line") for p in problems)
    assert any(p.startswith("mutant head-first: rejected without its hint") for p in problems)
    assert len(problems) == 3

    problems = exercises.solution_problems(sample, run(sample, tmp_path)[:-1])
    assert problems == ["cell give-back-grade was not run"]


def test_a_wrong_solution_is_seen(tmp_path, sample):
    cell(sample, "kib-per-token").source = cell(sample, "kib-per-token").source.replace("= 2 *", "= 3 *")
    path = tmp_path / "sample.ipynb"
    path.write_text(text(sample), encoding="utf-8")
    outcome = exercises.check_solution(replace(SAMPLE, solution=path))
    assert outcome.phrase == "solution 7/8 green"
    assert len(outcome.problems) == 1 and "cell kib-per-token-grade fails" in outcome.problems[0]


def test_a_hint_must_be_a_mutant_s_own(sample):
    """A message that would serve for any mistake does not count as naming one."""
    mutants = load_mutants(SAMPLE.mutants)[:2]
    line = "Traceback:\n✗ you round down, or else: a full last block needs no block after it"
    results = [
        exercises.CellResult("", c.id, 0, line if c.id == "blocks-needed-grade" else "")
        for c in sample.cells
        if c.cell_type == "code"
    ]
    problems = exercises.mutant_problems(sample, mutants[:1], mutants, results)
    assert len(problems) == 1 and "has the hint of always-one-more" in problems[0]


def test_drift_is_seen(tmp_path, sample):
    drifted = tmp_path / "skeleton.ipynb"
    assert SAMPLE.skeleton.read_text(encoding="utf-8") == text(skeleton(sample))
    drifted.write_text(SAMPLE.skeleton.read_text(encoding="utf-8").replace("1 %", "2 %"), encoding="utf-8")
    problems = exercises.check_skeleton(replace(SAMPLE, skeleton=drifted)).problems
    assert len(problems) == 1 and "make exercises" in problems[0]


def exit_code() -> int:
    with pytest.raises(SystemExit) as ended:
        exercises.main()
    return int(ended.value.code)


def test_a_notebook_that_was_worked_in_is_not_overwritten(tmp_path, sample, monkeypatch, capsys):
    kit = replace(SAMPLE, skeleton=tmp_path / "sample.ipynb")
    monkeypatch.setattr(exercises, "kits", lambda slugs: [kit])
    monkeypatch.setattr("sys.argv", ["exercises", "generate"])
    assert exit_code() == 0
    mine = read(kit.skeleton)
    next(cell for cell in mine.cells if cell.cell_type == "code")["execution_count"] = 1
    kit.skeleton.write_text(text(mine), encoding="utf-8")
    before = kit.skeleton.read_bytes()
    assert exit_code() == 1
    assert kit.skeleton.read_bytes() == before and "has been worked in" in capsys.readouterr().out
    monkeypatch.setattr("sys.argv", ["exercises", "generate", "--force"])
    assert exit_code() == 0
    assert not exercises.worked_in(kit.skeleton)


@pytest.mark.parametrize(
    "name, old, new, complaint",
    [
        ("blocks-needed", "SOLUTION blocks-needed", "SOLUTION", "needs a name of its own"),
        ("give-back", "SOLUTION give-back", "SOLUTION blocks-needed", "needs a name of its own"),
        ("kib-per-token", "kib_per_token = None  # KiB\n", "", "needs `answer = None` before it"),
        ("give-back", "    ### END SOLUTION", "", "give-back: a solution region is not closed"),
        ("task-free", "*create · 5 min · stretch*", "", "3 exercises, but 2 lines like"),
        ("task-free", "create · 5 min", "admire · 5 min", "3 exercises, but 2 lines like"),
        ("bytes-hints", "Hint 2", "Note", "needs one folded Hint 2"),
        ("give-back-grade", "# Check 3\n", "", "starts with no comment"),
        ("give-back-grade", "# Check 3\n", "# Check 3\ncases = 1\n", "sets cases, which may be names of the learner's"),
        ("blocks-needed-grade", "expect_function(", "# NBVAL_SKIP\nexpect_function(", "could hide a failure"),
    ],
)
def test_contract_violations_are_seen(sample, name, old, new, complaint):
    assert old in cell(sample, name).source
    cell(sample, name).source = cell(sample, name).source.replace(old, new)
    assert complaint in "\n".join(contract_problems(sample, load_mutants(SAMPLE.mutants)))


def test_a_graded_cell_must_be_able_to_fail(sample):
    cell(sample, "give-back-grade").metadata["tags"] = ["grade", "raises-exception"]
    assert "so it cannot fail" in "\n".join(contract_problems(sample, load_mutants(SAMPLE.mutants)))


def test_a_pass_must_say_why(sample):
    cell(sample, "give-back-grade").outputs = []
    assert "does not say ✓" in "\n".join(contract_problems(sample, load_mutants(SAMPLE.mutants)))


def test_a_hole_needs_a_graded_cell(sample):
    cell(sample, "give-back-grade").metadata["tags"] = []
    assert "no cell tagged 'grade'" in "\n".join(contract_problems(sample, load_mutants(SAMPLE.mutants)))


def test_mutants_are_two_to_four_distinct_and_of_an_exercise(sample):
    mutants = load_mutants(SAMPLE.mutants)
    assert "1 mutants; two to four" in "\n".join(contract_problems(sample, mutants[1:]))
    assert "5 mutants; two to four" in "\n".join(contract_problems(sample, mutants + mutants[:1] * 3))
    assert "share a hint" in "\n".join(contract_problems(sample, [*mutants, mutants[0]]))
    assert "no exercise 'x'" in "\n".join(contract_problems(sample, [*mutants, replace(mutants[0], exercise="x")]))
