"""What `bench.ttft` says of tokens and bytes, with each lie planted once."""

from typing import Any

import pytest

from bench.lines import Line
from bench.ttft_engine import Measured
from bench.ttft_verdict import COLD, OWN, RESTARTED, WARM, Bytes, Verdict, checked, places

LOOKED_AT = places([2], 6, 4)
OUTPUTS = {0: [5, 6], 1: [7, 8], 2: [9, 9]}


def measured(name: str, cached: int, *, first: int = 0, count: int = 2) -> Measured:
    numbers = range(first, first + count)
    outputs = [list(OUTPUTS[number]) for number in numbers]
    return Measured(name, first, [40.0 + number for number in numbers], [cached] * count, outputs)


def rounds() -> dict[str, Measured]:
    found = {name: measured(name, tokens) for name, tokens in ((COLD, 0), (WARM, 96))}
    found[RESTARTED] = measured(RESTARTED, 96)
    for name in list(found):
        tokens = found[name].cached_tokens[0]
        found[checked(name)] = measured(checked(name), tokens, first=2, count=1)
    return found


def note(kind: str, name: str, position: int, digest: str) -> dict[str, Any]:
    request = f"{checked(name)}/2/77-1-abcd"
    note = {"kind": kind, "request": request, "position": position, "digest": digest}
    return note | {"is_held": kind == "load" and position == 4}


def notes() -> list[dict[str, Any]]:
    made = [note("save", COLD, at, f"bytes {at}") for at in (0, 4)]
    for name in (WARM, RESTARTED):
        made += [note("load", name, at, f"bytes {at}") for at in (0, 4)]
    return made


def judge(
    found: dict[str, Measured], noted: list[dict[str, Any]]
) -> tuple[dict[str, Line], list[str]]:
    """The lines of trikv-held by case, after `none` and PegaFlow, and what is wrong."""
    verdict = Verdict(16, 100, LOOKED_AT)
    list(verdict.lines("none", [measured(COLD, 0), measured(OWN, 96)], None))
    list(verdict.lines("pegaflow", [measured(COLD, 0), measured(WARM, 99)], None))
    assert not verdict.failures
    seen = Bytes()
    seen.add(noted)
    lines = list(verdict.lines("trikv-held", list(found.values()), seen))
    return {line.case.removeprefix("trikv-held "): line for line in lines}, verdict.failures


def test_figures_checks_target_and_baseline_are_in_the_lines() -> None:
    lines, failures = judge(rounds(), notes())
    assert not failures
    assert lines.keys() == {"cold", "warm", "warm, engine restarted"}
    warm = lines["warm"]
    assert (warm.value, warm.baseline, warm.target, warm.is_ok) == (40.5, 40.5, 38.0, False)
    assert warm.facts == {
        "p50": 40.5,
        "max": 41.0,
        "cached_tokens": 96,
        "cached_tokens_wanted": 96,
        "same_outputs": True,
        "same_as_own": True,
        "bytes_equal": True,
        "blocks_compared": 2,
        "blocks_held": 1,
    }
    assert "bytes_equal" not in lines["cold"].facts
    assert lines["warm, engine restarted"].baseline is None


def test_the_first_notes_of_a_block_count() -> None:
    again = note("save", COLD, 4, "computed again")
    assert not judge(rounds(), [*notes(), again])[1]


@pytest.mark.parametrize("at", [2, 3, 4])
def test_a_byte_that_differs_or_a_load_that_is_missing_is_told(at: int) -> None:
    for noted in (notes(), notes()):
        changed = [*noted[:at], noted[at] | {"digest": "other"}, *noted[at + 1 :]]
        for wrong in (changed, noted[:at] + noted[at + 1 :]):
            lines, failures = judge(rounds(), wrong)
            assert [line.facts.get("bytes_equal") for line in lines.values()].count(False) == 1
            assert len(failures) == 1


def test_without_notes_nothing_is_equal() -> None:
    assert len(judge(rounds(), [])[1]) == 2


def test_blocks_that_all_look_alike_prove_nothing() -> None:
    alike = [one | {"digest": "zeros"} for one in notes()]
    assert len(judge(rounds(), alike)[1]) == 2


@pytest.mark.parametrize("name", [COLD, WARM, checked(RESTARTED)])
def test_a_token_that_differs_is_told(name: str) -> None:
    found = rounds()
    found[name].outputs[-1][-1] += 1
    _, failures = judge(found, notes())
    # Of prompt 2 the cold outputs came first: they are right by definition.
    assert failures == [f"trikv-held {_title(name)}: outputs differ"]


@pytest.mark.parametrize(("name", "cached"), [(COLD, 16), (WARM, 80), (checked(WARM), 0)])
def test_tokens_that_were_not_cached_or_were_are_told(name: str, cached: int) -> None:
    found = rounds()
    found[name].cached_tokens[0] = cached
    _, failures = judge(found, notes())
    assert failures == [f"trikv-held {_title(name)}: cached tokens differ"]


def _title(name: str) -> str:
    name = name.removeprefix("checked-")
    return "warm, engine restarted" if name == RESTARTED else name
