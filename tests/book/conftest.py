"""What the tests of the book share: the built site, a browser, and a report at the end."""

import resource

import pytest

REPORT = "book report"


@pytest.fixture
def report(record_property):
    """report(subject, phrase): a phrase for the summary that follows the tests."""
    return lambda subject, phrase: record_property(REPORT, f"{subject}: {phrase}")


@pytest.fixture
def cpu_seconds(monkeypatch):
    """cpu_seconds(): processor time that finished child processes, of one thread, have used since the test began.

    It is what the work takes on a quiet machine, and hardly more on a busy one, unlike time by the clock.
    """
    monkeypatch.setenv("OMP_NUM_THREADS", "1")

    def used():
        usage = resource.getrusage(resource.RUSAGE_CHILDREN)
        return usage.ru_utime + usage.ru_stime

    start = used()
    return lambda: used() - start


def pytest_terminal_summary(terminalreporter):
    """One line per chapter and exercise: what was run and what came out."""
    lines: dict[str, list[str]] = {}
    for reports in terminalreporter.stats.values():
        for one in reports:
            if getattr(one, "when", "") == "call":
                for key, value in one.user_properties:
                    if key == REPORT:
                        subject, phrase = value.split(": ", 1)
                        lines.setdefault(subject, []).append(phrase)
    if lines:
        terminalreporter.section("notebooks, exercises, site")
    for subject, phrases in sorted(lines.items()):
        terminalreporter.write_line(f"{subject}: {'; '.join(sorted(phrases, reverse=True))}")
