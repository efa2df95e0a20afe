"""Exercises: one source notebook and one file of mutants each; the learner's notebook and the checks follow from them.

    python -m tools.exercises generate [SLUG ...]   write exercises/SLUG.ipynb from exercises/solutions/SLUG.ipynb
    python -m tools.exercises check [SLUG ...]      the three-way check: solution, skeleton, mutants

`exercises/README.md` says how to write one. The holes are marked as nbgrader marks them, with a name added:
`### BEGIN SOLUTION name` ... `### END SOLUTION`. nbgrader itself would do the stripping, but installing it puts a
"Validate" button into every learner's JupyterLab that calls an unanswered notebook a success, since it looks only at
nbgrader's own cell metadata.
"""

import argparse
import re
import symtable
import sys
import tempfile
import textwrap
import tomllib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

from nbformat import NotebookNode
from nbformat.v4 import new_markdown_cell

from tools.notebooks import ROOT, CellResult, nbval, normalise, read, text

REGION = re.compile(
    r"^(?P<indent>[ \t]*)### BEGIN SOLUTION(?P<name>[^\n]*)\n(?P<body>.*?)^[ \t]*### END SOLUTION[^\n]*\n?", re.M | re.S
)
FACTS = re.compile(r"\b(apply|analyse|evaluate|create) · \d+ min · (core|stretch)\b")
FORBIDDEN_TAGS = {"raises-exception", "nbval-raises-exception", "nbval-skip"}  # with one of these a cell cannot fail
STUB = "# your code here\nraise NotImplementedError\n"
NOT_ANSWERED = "✗ not answered yet"


@dataclass(frozen=True)
class Mutant:
    """A plausible wrong answer."""

    id: str
    exercise: str  # name of the region that it replaces
    replacement: str
    hint: str  # part of the message that must meet it, and no other mutant of the exercise
    why: str  # why people make this mistake


@dataclass(frozen=True)
class Exercise:
    """One exercise of a notebook: the hole, the graded cell that follows it, and the markdown around."""

    name: str
    cell: int  # index of the cell with the hole
    grade: int  # index of the graded cell
    last: int  # index of the last cell that belongs to it: the graded cell, or the hints after it
    top_level: bool  # the hole stands at the left margin, after `answer = None`
    body: str


@dataclass(frozen=True)
class Kit:
    """The files of one exercise notebook."""

    solution: Path
    skeleton: Path
    mutants: Path

    @property
    def slug(self) -> str:
        """The chapter that it belongs to."""
        return self.solution.stem


def kits(slugs: Sequence[str] = ()) -> list[Kit]:
    """The exercise notebooks of the book, or the named ones."""
    folder, mutants = ROOT / "exercises", ROOT / "tests" / "book" / "mutants"
    names = slugs or sorted(path.stem for path in (folder / "solutions").glob("*.ipynb"))
    return [Kit(folder / "solutions" / f"{n}.ipynb", folder / f"{n}.ipynb", mutants / f"{n}.toml") for n in names]


def exercises(notebook: NotebookNode) -> list[Exercise]:
    """The exercises of a solution notebook, in order. Raises ValueError if a hole has no name or no graded cell."""
    cells, found = notebook.cells, []
    holes = [(i, m) for i, c in enumerate(cells) if c.cell_type == "code" for m in REGION.finditer(c.source + "\n")]
    for number, (index, match) in enumerate(holes):
        name = match["name"].strip()
        end = next((i for i, _ in holes[number + 1 :] if i > index), len(cells))
        if not name or name in [e.name for e in found]:
            raise ValueError(f"every hole needs a name of its own: ### BEGIN SOLUTION name (here: {name!r})")
        grade = next((i for i in range(index + 1, end) if "grade" in tags(cells[i])), None)
        if grade is None:
            raise ValueError(f"{name}: no cell tagged 'grade' follows its hole")
        hints = [i for i in range(index, end) if "<summary>Hint" in cells[i].source and i <= grade + 1]
        body = textwrap.dedent(match["body"])
        found.append(Exercise(name, index, grade, max([grade, *hints]), not match["indent"], body))
    return found


def tags(cell: NotebookNode) -> list[str]:
    """The tags of a cell."""
    return cell.metadata.get("tags", [])


def grade_cells(notebook: NotebookNode) -> list[str]:
    """Ids of the graded cells."""
    return [cell.id for cell in notebook.cells if "grade" in tags(cell)]


def load_mutants(path: Path) -> list[Mutant]:
    """The mutants of one exercise notebook."""
    with path.open("rb") as file:
        return [Mutant(**entry) for entry in tomllib.load(file)["mutant"]]


def replace_region(source: str, name: str, replacement: str) -> str:
    """`source` with the body of the region `name` replaced, indented like its marker; the markers go."""

    def new(match: re.Match) -> str:
        if match["name"].strip() != name:
            return match[0]
        return textwrap.indent(textwrap.dedent(replacement).strip("\n") + "\n", match["indent"]) if replacement else ""

    return REGION.sub(new, source + "\n").rstrip("\n")


def skeleton(solution: NotebookNode) -> NotebookNode:
    """The learner's notebook: holes for the regions, no outputs, and each solution folded away below its exercise."""
    notebook, found = deepcopy(solution), exercises(solution)
    for exercise in found:
        cell = notebook.cells[exercise.cell]
        cell.source = replace_region(cell.source, exercise.name, "" if exercise.top_level else STUB)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
        if "grade" in tags(cell):  # a check knows the answer: folded in Jupyter and on the site
            cell.metadata["tags"] = [*tags(cell), "hide-input"]
            cell.metadata["jupyter"] = {"source_hidden": True}
            cell.metadata["mystnb"] = {"code_prompt_show": "Show the check", "code_prompt_hide": "Hide the check"}
    for last in sorted({e.last for e in found}, reverse=True):
        here = [e for e in found if e.last == last]
        notebook.cells.insert(last + 1, solution_cell(solution, here))
    return normalise(notebook)


def worked_in(path: Path) -> bool:
    """Whether somebody has run cells of a learner's notebook: a generated one holds no counts and no outputs."""
    return path.exists() and any(c.get("execution_count") or c.get("outputs") for c in read(path).cells)


def solution_cell(solution: NotebookNode, found: list[Exercise]) -> NotebookNode:
    """The folded solution: the answer alone if the hole was `answer = None`, else the whole cell."""
    parts = []
    for exercise in found:
        whole = REGION.sub(lambda m: m["body"], solution.cells[exercise.cell].source + "\n")
        part = (exercise.body if exercise.top_level else whole).strip("\n")
        if part not in parts:
            parts.append(part)
    code = "\n\n".join(parts)
    source = f"<details>\n<summary>Solution</summary>\n\n```python\n{code}\n```\n\n</details>"
    return new_markdown_cell(source, id=f"solution-{found[0].name}"[:64])


def mutated(solution: NotebookNode, mutants: Sequence[Mutant]) -> NotebookNode:
    """The solution with one region of some exercises replaced by a wrong answer."""
    notebook = deepcopy(solution)
    where = {e.name: e.cell for e in exercises(solution)}
    for mutant in mutants:
        cell = notebook.cells[where[mutant.exercise]]
        cell.source = replace_region(cell.source, mutant.exercise, mutant.replacement)
    return notebook


def contract_problems(solution: NotebookNode, mutants: Sequence[Mutant]) -> list[str]:
    """What the two files of an exercise violate, without running anything."""
    try:
        found = exercises(solution)
    except ValueError as error:
        return [str(error)]
    problems = []
    for cell in solution.cells:
        if bad := FORBIDDEN_TAGS.intersection(tags(cell)):
            problems.append(f"cell {cell.id}: tagged {', '.join(bad)}, so it cannot fail")
        if "NBVAL_" in cell.source:
            problems.append(f"cell {cell.id}: an NBVAL_ comment could hide a failure; use tags")
        if re.search("(BEGIN|END) SOLUTION", REGION.sub("", cell.source + "\n")):
            problems.append(f"cell {cell.id}: a solution region is not closed")
        if "grade" in tags(cell):
            if not cell.source.startswith("# "):
                problems.append(f"cell {cell.id}: starts with no comment like '# Check 1' for its fold to show")
            names = symtable.symtable(cell.source, cell.id, "exec").get_symbols()
            bound = [s.get_name() for s in names if s.is_assigned() and not s.get_name().startswith("_")]
            if bound:
                problems.append(
                    f"cell {cell.id}: sets {', '.join(sorted(bound))}, which may be names of the learner's; wrap it "
                    "in a function"
                )
            shown = "".join(o.get("text", "") for o in cell.get("outputs", []))
            if not shown.startswith("✓ "):
                problems.append(f"cell {cell.id}: its stored output does not say ✓ and why the answer matters")
    grades = {solution.cells[e.grade].id for e in found}
    problems += [f"cell {g}: graded, but no hole precedes it" for g in grade_cells(solution) if g not in grades]
    stated = sum(len(FACTS.findall(c.source)) for c in solution.cells if c.cell_type == "markdown")
    if stated != len(grades):
        problems.append(f"{len(grades)} exercises, but {stated} lines like 'apply · 5 min · core'")
    for exercise in found:
        first = max([e.last + 1 for e in found if e.last < exercise.cell], default=0)
        around = "\n".join(c.source for c in solution.cells[first : exercise.last + 1])
        if exercise.top_level and "= None" not in solution.cells[exercise.cell].source.partition("### BEGIN")[0]:
            problems.append(f"{exercise.name}: a hole at the left margin needs `answer = None` before it")
        for step in ("Hint 1", "Hint 2"):
            if around.count(f"<summary>{step}</summary>") != 1:
                problems.append(f"{exercise.name}: needs one folded {step}: <details><summary>{step}</summary>")
    names = {e.name: solution.cells[e.grade].id for e in found}
    per_grade = {g: [m for m in mutants if names.get(m.exercise) == g] for g in grades}
    for mutant in mutants:
        if mutant.exercise not in names:
            problems.append(f"mutant {mutant.id}: there is no exercise {mutant.exercise!r}")
    for grade, own in per_grade.items():
        if not 2 <= len(own) <= 4:
            problems.append(f"cell {grade}: {len(own)} mutants; two to four are asked for")
        if len({m.hint for m in own}) < len(own):
            problems.append(f"cell {grade}: two mutants share a hint")
    if len({m.id for m in mutants}) < len(mutants):
        problems.append("two mutants share an id")
    return problems


def solution_problems(solution: NotebookNode, results: Sequence[CellResult]) -> list[str]:
    """The first way: everything is green."""
    return _unrun(solution, results) + [f"solution: cell {r.cell} fails:\n{r.failure}" for r in results if r.failure]


def skeleton_problems(notebook: NotebookNode, results: Sequence[CellResult]) -> list[str]:
    """The second way: exactly the graded cells fail, and say that nothing was answered yet."""
    failing, graded = {r.cell: r for r in results if r.failure}, grade_cells(notebook)
    problems = _unrun(notebook, results)
    problems += [f"skeleton: graded cell {g} passes with nothing answered" for g in graded if g not in failing]
    for cell, result in failing.items():
        if cell not in graded:
            problems.append(f"skeleton: cell {cell} fails, but is not graded:\n{result.failure}")
        elif not result.traceback.startswith(NOT_ANSWERED) or "\n" in result.traceback:
            problems.append(f"skeleton: graded cell {cell} should say {NOT_ANSWERED!r} and says:\n{result.traceback}")
    return problems


def mutant_problems(
    solution: NotebookNode, mutants: Sequence[Mutant], all_mutants: Sequence[Mutant], results: Sequence[CellResult]
) -> list[str]:
    """The third way: each of `mutants` fails in its own graded cell with its own hint, and nothing else fails."""
    grade_of = {e.name: solution.cells[e.grade].id for e in exercises(solution)}
    failing = {r.cell: r for r in results if r.failure}
    problems = _unrun(solution, results)
    for mutant in mutants:
        result = failing.pop(grade_of[mutant.exercise], None)
        if result is None:
            problems.append(f"mutant {mutant.id}: accepted")
            continue
        line = result.traceback
        others = [m for m in all_mutants if grade_of[m.exercise] == grade_of[mutant.exercise] and m is not mutant]
        if not line.startswith("✗ ") or "\n" in line:
            problems.append(f"mutant {mutant.id}: the failed check should print one line and prints:\n{line}")
        elif mutant.hint not in line:
            problems.append(f"mutant {mutant.id}: rejected without its hint {mutant.hint!r}: {line}")
        elif wrong := [m.id for m in others if m.hint in line]:
            problems.append(f"mutant {mutant.id}: the same message has the hint of {', '.join(wrong)}: {line}")
    culprits = ", ".join(m.id for m in mutants)
    problems += [f"mutants {culprits}: cell {c} fails too:\n{r.failure}" for c, r in failing.items()]
    return problems


def _unrun(notebook: NotebookNode, results: Sequence[CellResult]) -> list[str]:
    """Code cells that nbval did not report on."""
    missing = {c.id for c in notebook.cells if c.cell_type == "code"} - {r.cell for r in results}
    return [f"cell {cell} was not run" for cell in sorted(missing)]


def rounds(mutants: Sequence[Mutant]) -> list[list[Mutant]]:
    """Mutants of different exercises run together, one of each exercise at a time: exercises are independent."""
    by_exercise: dict[str, list[Mutant]] = {}
    for mutant in mutants:
        by_exercise.setdefault(mutant.exercise, []).append(mutant)
    return [[m for m in row if m] for row in zip_longest(*by_exercise.values())]


@dataclass(frozen=True)
class Outcome:
    """Result of one of the three ways: what is wrong (nothing, one hopes), and a phrase for the report."""

    problems: list[str]
    phrase: str


def check_solution(kit: Kit) -> Outcome:
    """Run the solution; the stored outputs must reproduce."""
    notebook = read(kit.solution)
    results = nbval([kit.solution], strict=True)
    green = sum(not r.failure for r in results)
    return Outcome(solution_problems(notebook, results), f"solution {green}/{len(results)} green")


def check_skeleton(kit: Kit) -> Outcome:
    """Compare the skeleton with the one that the solution gives today, and run it."""
    notebook = skeleton(read(kit.solution))
    problems = []
    if not kit.skeleton.exists() or kit.skeleton.read_text(encoding="utf-8") != text(notebook):
        problems.append(f"{kit.skeleton.name}: not what its solution gives; run `make exercises` and commit")
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch, "skeleton.ipynb")
        path.write_text(text(notebook), encoding="utf-8")
        results = nbval([path])
    problems += skeleton_problems(notebook, results)
    failing = [r.cell for r in results if r.failure]
    exactly = "exactly " if sorted(failing) == sorted(grade_cells(notebook)) else "NOT only "
    return Outcome(problems, f"skeleton fails in {exactly}its {len(grade_cells(notebook))} graded cells")


def check_mutants(kit: Kit) -> Outcome:
    """Run the mutants."""
    notebook, mutants = read(kit.solution), load_mutants(kit.mutants)
    problems = []
    with tempfile.TemporaryDirectory() as scratch:
        paths = {Path(scratch, f"round{n}.ipynb").resolve(): row for n, row in enumerate(rounds(mutants))}
        for path, row in paths.items():
            path.write_text(text(mutated(notebook, row)), encoding="utf-8")
        results = nbval(list(paths))
        for path, row in paths.items():
            problems += mutant_problems(notebook, row, mutants, [r for r in results if r.notebook == str(path)])
    blamed = [m for m in mutants if any(p.startswith(f"mutant {m.id}:") for p in problems)]
    good = len(mutants) - len(blamed)
    return Outcome(problems, f"{good}/{len(mutants)} mutants rejected with their own hint")


CHECKS = {"solution": check_solution, "skeleton": check_skeleton, "mutants": check_mutants}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("command", choices=["generate", "check"])
    parser.add_argument("slug", nargs="*", help="default: all")
    parser.add_argument("--force", action="store_true", help="generate: also over a notebook that was worked in")
    arguments = parser.parse_args()
    chosen, failed = kits(arguments.slug), False
    for kit in chosen:
        if arguments.command == "generate":
            if worked_in(kit.skeleton) and not arguments.force:
                print(f"✗ exercises/{kit.skeleton.name} has been worked in; copy it elsewhere, then add --force")
                failed = True
                continue
            kit.skeleton.write_text(text(skeleton(read(kit.solution))), encoding="utf-8")
            print(f"✓ exercises/{kit.skeleton.name} from its solution")
            continue
        problems = contract_problems(read(kit.solution), load_mutants(kit.mutants))
        with ThreadPoolExecutor(2) as pool:
            outcomes = list(pool.map(lambda check, kit=kit: check(kit), CHECKS.values()))
        problems += [p for outcome in outcomes for p in outcome.problems]
        print(f"{kit.slug}: {'; '.join(outcome.phrase for outcome in outcomes)}")
        print("".join(f"✗ {problem}\n" for problem in problems), end="")
        failed = failed or bool(problems)
    sys.exit(failed)


if __name__ == "__main__":
    main()
