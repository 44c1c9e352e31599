"""A path that fails is left alone, longer and longer until it has worked."""

from trikv.core.pauses import PAUSE_S_MAX, Pauses


def lengths(pauses: Pauses, errors: int, now_s: float = 0.0) -> list[float]:
    """How long each pause takes when an error follows each as soon as it is over."""
    found = []
    for _ in range(errors):
        assert pauses.fail(1, now_s=now_s)
        length_s = next(s for s in range(10_000) if pauses.is_over(1, now_s=now_s + s))
        found.append(length_s)
        now_s += length_s
    return found


def test_each_further_error_doubles_the_pause_up_to_a_limit() -> None:
    assert lengths(Pauses(2, 30.0), 6) == [30, 60, 120, 240, 480, PAUSE_S_MAX]
    assert lengths(Pauses(2, 3_600.0), 2) == [3_600, 3_600]
    assert lengths(Pauses(2, 0.0), 2) == [0, 0]


def test_one_that_has_worked_begins_anew() -> None:
    pauses = Pauses(2, 30.0)
    lengths(pauses, 3)
    pauses.work(1)
    assert lengths(pauses, 2, now_s=1e6) == [30, 60]


def test_errors_during_a_pause_do_not_lengthen_it() -> None:
    pauses = Pauses(2, 30.0)
    assert pauses.fail(0, now_s=0.0)
    assert not pauses.fail(0, now_s=29.0)
    assert pauses.is_over(0, now_s=30.0)
    assert pauses.is_over(1, now_s=0.0)
