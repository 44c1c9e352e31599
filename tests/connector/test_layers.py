"""Loads that layers wait for one by one: where pages are cut, and which hooks are believed."""

import logging
import time
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.connector.doubles import FakeCalls
from trikv.connector import engine, layers, overlap
from trikv.connector.calls import Answer, pack
from trikv.connector.holding import Holding
from trikv.connector.jobs import LoadJob, SaveJob
from trikv.connector.layers import Layers, LoadLostError, section_ends
from trikv.connector.worker import WorkerHalf
from trikv.wire import SECTIONS_MAX

LOG = logging.getLogger("test.layers")
COUNT = 16
NAMES = [f"l{n}" for n in range(COUNT)]
ENDS = {name: 128 * (n + 1) for n, name in enumerate(NAMES)}
JOB = LoadJob("r", 5, 0, pack([4, 5]), signal=3, value=9, hash_bytes=32, hashes=bytes(64))
SECTION_OF = [0] * 12 + [1] * 3 + [2]
VALUES = [7, 8, 9]


class Words:
    """Streams that wait: what was held in which, and what was written."""

    def __init__(self) -> None:
        self.stream = 1
        self.held: list[tuple[int, int, int]] = []
        self.written: list[tuple[int, int]] = []
        self.fails = False

    def hold(self, number: int, value: int) -> None:
        if self.fails:
            raise RuntimeError("the GPU cannot")
        self.held.append((self.stream, number, value))

    def write(self, number: int, value: int) -> None:
        self.written.append((number, value))


@pytest.fixture(autouse=True)
def _fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "ORDERED_BYTES_MIN", 1)
    monkeypatch.setattr(overlap, "RETRY_S", 0.001)


class Rank:
    """A worker whose forwards may wait by layers."""

    def __init__(self, *, is_trusted: bool = True) -> None:
        self.calls = FakeCalls()
        self.half = WorkerHalf(self.calls, LOG)  # type: ignore[arg-type]
        self.half.register("i", 0, {"l": torch.zeros(8, 2, 4, 4)}, 8, 128)
        self.words = Words()
        self.half._overlap.words = self.words
        self.half._overlap.layers = Layers(ENDS, section_ends(ENDS), self.words)
        self.half._overlap._recover_s = 0.01
        if is_trusted:
            self.step("NONE")

    def launch(self, names: list[str]) -> None:
        for name in names:
            self.half.launched(name)

    def step(self, way: str, names: list[str] = NAMES, *, loads_last: bool = False) -> None:
        """One without a held load."""
        if not loads_last:
            self.half.start_loads([], way)
        self.launch(names)
        if loads_last:
            self.half.start_loads([], way)
        self.half.start_saves([])
        self.half.finished()

    def is_ordered(self, way: str = "NONE") -> bool:
        """Whether a held load would be waited for by sections, in a whole step."""
        self.words.held.clear()
        self.half.start_loads([JOB], way)
        job, future = self.calls.loads.pop("r")
        self.launch(NAMES)
        self.half.start_saves([])
        future.set_result(())
        self.half.finished()
        values = [value for _, _, value in self.words.held]
        assert values in (VALUES, [9])
        assert job.is_ordered or values == [9]
        return values == VALUES


# -- where a page is cut


def test_a_quarter_of_the_layers_comes_last_and_of_these_a_quarter() -> None:
    assert section_ends({f"l{n}": 10 * (n + 1) for n in range(32)}) == (240, 300, 320)
    assert section_ends({f"l{n}": 10 * (n + 1) for n in range(80)}) == (600, 750, 800)
    assert section_ends({f"l{n}": 10 * (n + 1) for n in range(8)}) == (60, 80)
    assert section_ends({f"l{n}": 10 * (n + 1) for n in range(7)}) == ()


@given(sizes=st.lists(st.integers(1, 99), min_size=1, max_size=200), shared=st.integers(0, 3))
def test_sections_end_where_layers_do(sizes: list[int], shared: int) -> None:
    ends = {f"l{n}": sum(sizes[: n + 1]) for n in range(len(sizes))}
    ends |= {f"again {n}": ends["l0"] for n in range(shared)}  # other names of one layer's memory
    found = section_ends(ends)
    assert len(found) <= SECTIONS_MAX
    if found:
        assert found == tuple(sorted(set(found)))
        assert set(found) <= set(ends.values())
        assert found[-1] == sum(sizes)


def test_values_of_sections_belong_to_no_other_load_of_the_word() -> None:
    holding = Holding(1.0, 1)
    last: dict[int, int] = {}
    for _ in range(200):
        number, value = holding.take()
        assert value - SECTIONS_MAX + 1 > last.get(number, 1)
        last[number] = value


# -- what waits for what


def test_each_layer_waits_for_its_section_and_for_those_before() -> None:
    rank = Rank()
    rank.half.start_loads([JOB], "NONE")
    assert rank.calls.loads["r"][0].is_ordered
    assert rank.words.held == [(1, 3, 7)], "the GPU waits for the first section at once"
    for name, section in zip(NAMES, SECTION_OF, strict=True):
        rank.half.launched(name)
        assert rank.words.held[-1] == (1, 3, VALUES[section])
    assert len(rank.words.held) == 3, "a section costs one wait"
    rank.half.start_saves([])
    rank.calls.loads["r"][1].set_result(())
    assert rank.half.finished() == (set(), set())
    assert rank.words.written == [(3, 9)]


@given(order=st.permutations(range(COUNT)), streams=st.lists(st.integers(1, 2), min_size=COUNT))
def test_in_whatever_order_and_stream_layers_come(order: list[int], streams: list[int]) -> None:
    rank = Rank()
    rank.half.start_loads([JOB], "NONE")
    for at, layer in enumerate(order):
        rank.words.stream = streams[at]
        rank.half.launched(NAMES[layer])
        theirs = [value for stream, _, value in rank.words.held if stream == streams[at]]
        assert max(theirs) >= VALUES[SECTION_OF[layer]]
    rank.half.start_saves([])


def test_a_layer_that_was_not_registered_waits_for_everything() -> None:
    rank = Rank()
    rank.half.start_loads([JOB], "NONE")
    rank.half.launched("somebody else")
    assert rank.words.held[-1] == (1, 3, 9)


def test_every_load_of_a_step_is_waited_for() -> None:
    rank = Rank()
    other = LoadJob("s", 6, 0, pack([6]), signal=5, value=17, hash_bytes=32, hashes=bytes(32))
    rank.half.start_loads([JOB, other], "NONE")
    rank.launch(NAMES)
    for number, value in ((3, 9), (5, 17)):
        shown = [seen for _, one, seen in rank.words.held if one == number]
        assert shown[0] == value - 2
        assert shown[-1] == value
    rank.half.start_saves([])
    for _, future in rank.calls.loads.values():
        future.set_result(())
    rank.half.finished()


def test_a_load_sent_ahead_is_waited_for_by_layers_too() -> None:
    rank = Rank()
    rank.half.begin(JOB)
    assert rank.calls.loads["r"][0].is_ordered
    rank.calls.loads["r"][1].set_result(())
    rank.half.start_loads([JOB], "PIECEWISE")  # but this step is run in another way
    assert [value for _, _, value in rank.words.held] == [9]


def test_small_loads_are_sent_in_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "ORDERED_BYTES_MIN", 2 * ENDS[NAMES[-1]] + 1)
    assert not Rank().is_ordered()
    monkeypatch.setattr(layers, "ORDERED_BYTES_MIN", 2 * ENDS[NAMES[-1]])
    assert Rank().is_ordered()


# -- when hooks are believed


def test_a_forward_in_which_all_hooks_were_called_is_enough() -> None:
    rank = Rank(is_trusted=False)
    assert not rank.is_ordered(), "not yet"
    assert rank.is_ordered(), "that one has shown it"


def test_hooks_before_a_late_start_count_too() -> None:
    rank = Rank(is_trusted=False)
    rank.step("NONE", loads_last=True)
    assert rank.is_ordered()


@pytest.mark.parametrize("missing", ["l0", "l7", "l15"])
def test_all_hooks_or_none(missing: str) -> None:
    rank = Rank(is_trusted=False)
    rank.step("NONE", [name for name in NAMES if name != missing])
    assert not rank.is_ordered()


def test_hooks_of_two_forwards_do_not_add_up() -> None:
    rank = Rank(is_trusted=False)
    rank.step("NONE", NAMES[:8])
    rank.step("NONE", NAMES[8:])
    assert not rank.is_ordered()


def test_one_way_to_run_a_forward_says_nothing_about_another() -> None:
    rank = Rank()
    assert not rank.is_ordered("PIECEWISE")
    assert rank.is_ordered("PIECEWISE")
    assert rank.is_ordered("NONE")


def test_a_way_without_hooks_is_never_believed() -> None:
    rank = Rank(is_trusted=False)
    for _ in range(3):
        assert not rank.is_ordered("")


# -- when they were believed in vain


@pytest.mark.parametrize("missing", ["l0", "l7", "l15"])
def test_a_forward_that_skips_a_hook_ends_the_engine_and_keeps_nothing(missing: str) -> None:
    rank = Rank()
    rank.half.start_saves([SaveJob(1, "s", 0, 32, bytes(32), pack([1]))])
    _, word, generation, _ = rank.calls.saves[1]
    rank.half.start_loads([JOB], "NONE")
    rank.launch([name for name in NAMES if name != missing])
    with pytest.raises(LoadLostError, match=f"layer {missing}.*request r"):
        rank.half.start_saves([SaveJob(2, "t", 0, 32, bytes(32), pack([2]))])
    assert 2 not in rank.calls.saves, "its blocks may be wrong"
    assert rank.half._fences.generation(word) != generation
    rank.calls.loads.pop("r")[1].set_result(())
    rank.half.start_loads([], "NONE")
    assert not rank.half._overlap.layers._trusted  # type: ignore[union-attr]
    rank.half.finished()
    rank.step("NONE")
    assert not rank.is_ordered(), "it is not asked to prove itself again"


def test_hooks_that_came_before_the_load_s_start_do_not_count() -> None:
    rank = Rank()
    rank.launch(NAMES)
    rank.half.start_loads([JOB], "NONE")
    rank.calls.loads["r"][1].set_result(())
    with pytest.raises(LoadLostError):
        rank.half.finished()  # also where vLLM does not call `wait_for_save`


def test_a_wait_that_fails_is_no_wait() -> None:
    rank = Rank()
    rank.half.start_loads([JOB], "NONE")
    rank.launch(NAMES[:12])
    rank.words.fails = True
    for name in NAMES[12:]:
        with pytest.raises(RuntimeError):
            rank.half.launched(name)
    with pytest.raises(LoadLostError, match="4"):
        rank.half.start_saves([])


# -- loads that fail


def answer(count: int) -> Any:
    future: Future[Answer] = Future()
    future.set_result(Answer(count, 77, 30.0))
    return lambda *_: future


def test_a_load_that_fails_frees_all_layers_once_it_is_there() -> None:
    rank = Rank()
    rank.half._overlap._recover_s = 5.0
    rank.calls.query = answer(2)  # type: ignore[method-assign]
    rank.half.start_loads([JOB], "NONE")
    rank.launch(NAMES)
    rank.half.start_saves([])
    rank.calls.loads["r"][1].set_result((1,))
    while "again/r" not in rank.calls.loads:
        time.sleep(0.001)
    assert rank.words.written == []
    again, future = rank.calls.loads["again/r"]
    assert (again.signal, again.is_ordered) == (0, False)
    future.set_result(())
    rank.half.finished()
    assert rank.words.written == [(3, 9)], "the last section's value: all waits are over"


def test_what_is_computed_from_missing_blocks_is_not_kept() -> None:
    """Saves are void before the GPU goes on: it could be done before this process has ended."""
    rank = Rank()
    rank.calls.query = answer(0)  # type: ignore[method-assign]
    at_write: list[int] = []
    rank.half.start_loads([JOB], "NONE")
    rank.launch(NAMES)
    rank.half.start_saves([SaveJob(1, "s", 0, 32, bytes(32), pack([1]))])
    _, word, generation, _ = rank.calls.saves[1]
    write = rank.words.write

    def watched(number: int, value: int) -> None:
        at_write.append(rank.half._fences.generation(word))
        write(number, value)

    rank.words.write = watched  # type: ignore[method-assign]
    rank.calls.loads["r"][1].set_result((0,))
    with pytest.raises(LoadLostError):
        rank.half.finished()
    assert rank.words.written == [(3, 9)]
    assert at_write != [generation]
    rank.half.start_saves([SaveJob(2, "t", 0, 32, bytes(32), pack([2]))])
    assert 2 not in rank.calls.saves
    assert rank.half.take_report() is not None, "it counts as answered"


# -- what a forward's context says


def context(**facts: Any) -> Any:
    usual = {
        "cudagraph_runtime_mode": SimpleNamespace(name="PIECEWISE"),
        "ubatch_slices": None,
        "attn_metadata": {"l0": object()},
    }
    return SimpleNamespace(**usual | facts)


def test_ways_that_call_hooks() -> None:
    assert engine.forward_mode(context()) == "PIECEWISE"
    assert engine.forward_mode(context(cudagraph_runtime_mode=SimpleNamespace(name="NONE"))) == (
        "NONE"
    )


@pytest.mark.parametrize(
    "other",
    [
        context(cudagraph_runtime_mode=SimpleNamespace(name="FULL")),
        context(cudagraph_runtime_mode=SimpleNamespace(name="FULL_AND_PIECEWISE")),
        context(cudagraph_runtime_mode=None),
        context(attn_metadata=None),  # as runner V2 shows a full graph
        context(attn_metadata={}),
        context(ubatch_slices=[1, 2]),
        SimpleNamespace(cudagraph_runtime_mode=SimpleNamespace(name="NONE"), attn_metadata={1: 2}),
        SimpleNamespace(),
        None,
    ],
)
def test_ways_that_may_not(other: Any) -> None:
    assert engine.forward_mode(other) == ""
