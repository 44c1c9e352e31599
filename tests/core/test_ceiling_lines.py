"""What a person reads about hit rates and ceilings."""

from typing import Any

from trikv.cli.ceiling import ADVICE, CASES, render_ceiling
from trikv.core.ceiling import Case, WindowFacts

WIDTH = 80
N = 10**10


def row(facts: WindowFacts) -> dict[str, Any]:
    return {
        "seconds": facts.length_s,
        "coveredSeconds": facts.covered_s,
        "namespace": facts.namespace,
        "askedBlocks": facts.asked_blocks,
        "hitRatio": facts.measured,
        "reachableRatio": facts.reachable,
        "freshRatio": facts.fresh,
        "case": facts.case.value,
    }


def window(
    length_s: float, missed: int, distinct_missed: int, *, asked: int = N, namespace: str = ""
) -> dict[str, Any]:
    facts = WindowFacts(
        length_s, length_s, namespace, asked, (asked - missed,), distinct_missed, distinct_missed
    )
    return row(facts)


def test_each_case_has_words_and_all_but_idle_advice() -> None:
    assert CASES.keys() == {case.value for case in Case}
    assert ADVICE.keys() == CASES.keys() - {"idle"}


def test_nothing_is_said_before_anything_was_asked() -> None:
    assert render_ceiling([window(900.0, 0, 0, asked=0)]) == []


def test_each_window_has_a_line_and_the_longest_speaks_first() -> None:
    lines = render_ceiling(
        [window(900.0, N // 2, N // 2), window(3600.0, N // 2, N // 4), window(86400.0, N, N)]
    )
    assert [line.split()[:2] for line in lines[2:5]] == [["15", "min"], ["1", "h"], ["24", "h"]]
    assert "at the ceiling" in lines[2]
    assert "far below it" in lines[3]
    assert "low ceiling" in lines[4]
    text = "\n".join(lines)
    assert text.index("Low ceiling:") < text.index("Far below it: 25.0%") < text.index("At the")
    assert max(map(len, lines)) <= WIDTH


def test_a_window_that_is_not_full_says_so() -> None:
    (line,) = [
        line
        for line in render_ceiling([window(86400.0, 5, 5) | {"coveredSeconds": 60.0}])
        if line.startswith("24 h")
    ]
    assert line.startswith("24 h so far ")


def test_namespaces_are_shown_when_there_are_several() -> None:
    everyone = window(900.0, 50, 10)
    one, two = (window(900.0, 50, 10, namespace=name * 16) for name in ("ab", "cd"))
    assert not any("abab" in line for line in render_ceiling([everyone, one]))
    shown = render_ceiling([everyone, one, two])
    assert [line.split()[0] for line in shown if line.startswith("  ")] == ["abababab", "cdcdcdcd"]
    assert max(map(len, shown)) <= WIDTH


def test_a_case_of_a_newer_daemon_is_shown_as_it_is() -> None:
    assert any(
        "new-case" in line for line in render_ceiling([window(60.0, 5, 5) | {"case": "new-case"}])
    )
