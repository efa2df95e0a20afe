"""Every exercise, three ways: the solution passes, the skeleton fails where it should, mutants are told why."""

import pytest

from tools import exercises
from tools.notebooks import ROOT, read

KITS = exercises.kits()
EACH = pytest.mark.parametrize("kit", KITS, ids=[kit.slug for kit in KITS])


@EACH
def test_exercise_keeps_the_contract(kit):
    assert exercises.contract_problems(read(kit.solution), exercises.load_mutants(kit.mutants)) == []


@EACH
@pytest.mark.parametrize("way", exercises.CHECKS)
def test_exercise(kit, way, report):
    outcome = exercises.CHECKS[way](kit)
    report(f"exercises {kit.slug}", outcome.phrase)
    assert not outcome.problems, "\n".join(outcome.problems)


def test_every_exercise_notebook_has_a_source():
    learners = {path.stem for path in (ROOT / "exercises").glob("*.ipynb")}
    assert learners == {kit.slug for kit in KITS}
