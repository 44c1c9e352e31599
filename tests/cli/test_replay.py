"""Replay against a model that shares nothing with the core, and the command as a whole."""

import json
import subprocess
import sys
from collections import OrderedDict
from pathlib import Path
from random import Random

import numpy as np
import pytest

from trikv.cli import main as command
from trikv.cli.made import KINDS, make_trace
from trikv.cli.rerun import Case, Service, run
from trikv.cli.traces import Trace, TraceError, ceiling, from_lists, interleave, read_trace
from trikv.core import room
from trikv.core.policies import MAKERS


def lru_hits(trace: Trace, capacity: int, *, leaf_first: bool) -> list[int]:
    """Whole requests on an ordered dict, oldest first."""
    resident: OrderedDict[int, None] = OrderedDict()
    hits = []
    for row in range(len(trace)):
        ids = trace.ids[trace.starts[row] : trace.starts[row + 1]].tolist()
        count = next((at for at, one in enumerate(ids) if one not in resident), len(ids))
        hits.append(count)
        touch(resident, ids[:count], leaf_first=leaf_first)
        mine = {one for one in ids if one in resident}
        absent = [one for one in ids if one not in resident]
        others = [one for one in resident if one not in mine]
        for one in others[: max(0, len(resident) + len(absent) - capacity)]:
            del resident[one]
        absent = absent[: capacity - len(resident)]
        if count < len(ids):
            known = {*mine, *absent}
            touch(resident, [one for one in ids if one in known], leaf_first=leaf_first)
    return hits


def touch(resident: OrderedDict[int, None], ids: list[int], *, leaf_first: bool) -> None:
    for one in reversed(ids) if leaf_first else ids:
        resident[one] = None
        resident.move_to_end(one)


def small_trace(seed: int) -> Trace:
    """Random walks in a tree: much sharing, requests of 1 to 40 blocks."""
    random = Random(seed)
    children: dict[int, list[int]] = {}
    fresh, requests = 1, []
    for _ in range(400):
        node, ids = 0, []
        for _ in range(random.randint(1, 40)):
            below = children.setdefault(node, [])
            if not below or random.random() < 0.15:
                below.append(fresh)
                fresh += 1
            node = random.choice(below)
            ids.append(node)
        requests.append(ids)
    count = len(requests)
    return from_lists(
        f"tree {seed}",
        16,
        ids=requests,
        at_s=[0.1 * one for one in range(count)],
        session=[one % 7 for one in range(count)],
        input_tokens=[16 * len(ids) for ids in requests],
    )


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("policy", ["leaf-first-lru", "root-first-lru"])
def test_each_request_finds_what_the_model_says(
    policy: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room, "EVICT_BATCH", 1)
    trace = small_trace(seed)
    for share in (0.02, 0.1, 0.3, 0.7):
        blocks = max(1, int(trace.distinct * share))
        found = run(trace, Case(blocks, policy)).hits.tolist()
        assert found == lru_hits(trace, blocks, leaf_first=policy == "leaf-first-lru"), share


@pytest.mark.parametrize("policy", sorted(MAKERS))
def test_a_cache_for_all_blocks_is_at_the_ceiling(policy: str) -> None:
    for trace in (small_trace(9), make_trace("made:conversation:3").take(np.arange(800))):
        outcome = run(trace, Case(trace.distinct, policy))
        assert outcome.hits.sum() / trace.asked == ceiling(trace) > 0
        assert outcome.evicted == outcome.refused == 0


def test_in_batches_the_default_loses_little() -> None:
    trace = small_trace(5)
    blocks = trace.distinct // 5
    model = sum(lru_hits(trace, blocks, leaf_first=True)) / trace.asked
    assert abs(run(trace, Case(blocks, "leaf-first-lru")).hits.sum() / trace.asked - model) < 0.03


def test_eight_engines_with_one_pool_find_more_than_with_eight() -> None:
    trace = small_trace(6)
    blocks = trace.distinct // 2
    shared = run(trace, Case(blocks, "leaf-first-lru", engines=8, pools=1))
    private = run(trace, Case(blocks, "leaf-first-lru", engines=8, pools=8))
    assert shared.hits.tolist() == run(trace, Case(blocks, "leaf-first-lru")).hits.tolist()
    assert shared.hits.sum() > private.hits.sum()
    alone = [
        run(trace.take(np.arange(k, 400, 8)), Case(blocks // 8, "leaf-first-lru")) for k in range(8)
    ]
    assert private.hits.sum() == sum(one.hits.sum() for one in alone)


def test_stored_once_a_rank_is_a_cache_of_an_eighth() -> None:
    trace = small_trace(7).take(np.arange(100))
    once = run(trace, Case(trace.distinct // 8, "leaf-first-lru"))
    each = run(trace, Case(trace.distinct // 8 * 8, "leaf-first-lru", ranks=8))
    assert each.hits.tolist() == once.hits.tolist()


@pytest.mark.parametrize("through", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_a_disk_for_all_blocks_brings_a_small_pool_to_the_ceiling(
    seed: int, *, through: bool
) -> None:
    trace = small_trace(seed)
    blocks = max(40, trace.distinct // 10)  # the longest request fits
    outcome = run(
        trace,
        Case(blocks, "leaf-first-lru", ssd_blocks=trace.distinct, write_through=through),
    )
    assert outcome.hits.sum() / trace.asked == ceiling(trace)
    alone = run(trace, Case(blocks, "leaf-first-lru"))
    assert outcome.hits.sum() > alone.hits.sum()
    assert 0 < outcome.ssd_hits.sum() <= outcome.read
    assert (outcome.ssd_hits <= outcome.hits).all()
    assert outcome.written <= trace.distinct
    assert outcome.written == trace.distinct or not through


@pytest.mark.parametrize("seed", range(3))
def test_pool_and_disk_find_what_a_pool_of_the_disks_size_finds(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room, "EVICT_BATCH", 1)
    trace = small_trace(seed)
    blocks, ssd_blocks = max(40, trace.distinct // 10), trace.distinct // 3
    case = Case(blocks, "leaf-first-lru", ssd_blocks=ssd_blocks, write_through=True)
    model = sum(lru_hits(trace, ssd_blocks, leaf_first=True))
    assert abs(int(run(trace, case).hits.sum()) - model) <= 0.02 * model


def test_sessions_stay_with_their_engine() -> None:
    trace = small_trace(8)
    case = Case(trace.distinct, "leaf-first-lru", engines=7, pools=7, by_session=True)
    alone = [
        run(
            trace.take(np.flatnonzero(trace.session == k)),
            Case(trace.distinct // 7, "leaf-first-lru"),
        )
        for k in range(7)
    ]
    assert run(trace, case).hits.sum() == sum(one.hits.sum() for one in alone)


def test_the_service_model() -> None:
    trace = from_lists("t", 10, ids=[[1, 2, 3]], at_s=[0.0], session=[0], input_tokens=[34])
    service = Service(prefill_tokens_s=100, load_bytes_s=1000, token_bytes=5, fixed_s=1.0)
    none = np.array([0])
    assert service.times_s(trace, np.array([2]), none) == pytest.approx([0.14 + 0.1 + 1.0])
    service = Service(100, 1000, token_bytes=5, ssd_bytes_s=100)
    times_s = service.times_s(trace, np.array([2]), np.array([1]))
    assert times_s == pytest.approx([0.14 + 0.1 + trace.block_tokens * 5 / 100])


# -- traces


def write(path: Path, rows: list[dict[str, object]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_public_formats(tmp_path: Path) -> None:
    rows = [
        {"timestamp": 3000, "input_length": 900, "output_length": 1, "hash_ids": [1, 2]},
        {"timestamp": 1000, "input_length": 700, "output_length": 1, "hash_ids": [1]},
    ]
    trace = read_trace(write(tmp_path / "mooncake.jsonl", rows))
    assert (trace.name, trace.block_tokens, trace.distinct, trace.asked) == ("mooncake", 512, 2, 3)
    assert trace.at_s.tolist() == [0.0, 2.0]
    assert trace.ids.tolist() == [1, 1, 2]
    assert trace.input_tokens.tolist() == [700, 900]
    assert ceiling(trace) == 1 / 3
    agents = [row | {"session": 4} for row in rows]
    trace = read_trace(write(tmp_path / "agents.jsonl", agents))
    assert (trace.block_tokens, trace.session.tolist()) == (64, [4, 4])
    text = "".join(json.dumps(row | {"a": "\u2028"}, ensure_ascii=False) + "\n" for row in agents)
    (tmp_path / "other.jsonl").write_text(text, encoding="utf-8")  # JSON's line ends are fewer
    assert read_trace(str(tmp_path / "other.jsonl")).asked == 3


def test_our_format_tells_spaces_and_saves_apart(tmp_path: Path) -> None:
    head = {"trikv_trace": 1, "block_tokens": 16}
    rows = [
        {"t": 5.0, "engine": 0, "space": 1, "ids": [7, 8]},
        {"t": 5.5, "engine": 0, "space": 1, "ids": [9], "first": 2},
        {"t": 6.0, "engine": 1, "space": 1, "ids": [7, 8, 9]},
        {"t": 6.5, "engine": 1, "space": 2, "ids": [7, 8, 9]},
    ]
    trace = read_trace(write(tmp_path / "ours.jsonl", [head, *rows]))
    assert trace.asked == 8
    assert ceiling(trace) == 3 / 8
    assert run(trace, Case(20, "leaf-first-lru")).hits.tolist() == [0, 0, 3, 0]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", ":1: not JSON"),
        ("[]", ":1: not an object"),
        ('{"timestamp": 1}', "lacks or spoils a field"),
        ('{"trikv_trace": 2}', "version 2"),
        ('{"trikv_trace": 1, "block_tokens": 16}\n{"t": 1}', "lacks or spoils a field"),
        (None, "No such file"),
    ],
)
def test_a_bad_trace_is_one_line(tmp_path: Path, text: str | None, says: str) -> None:
    path = tmp_path / "bad.jsonl"
    if text is not None:
        path.write_text(text)
    with pytest.raises(TraceError, match=says) as caught:
        read_trace(str(path))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("rest", ['{"t": 5.5, "eng', "\0" * 4096, '{"t": 5.5}\n{"t": 6, "ids": [1'])
def test_a_recording_whose_end_was_cut_off_is_used_and_it_is_said(
    tmp_path: Path,
    rest: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    head = {"trikv_trace": 1, "block_tokens": 16}
    row = {"t": 5.0, "engine": 0, "space": 1, "ids": [7, 8]}
    path = tmp_path / "ours.jsonl"
    write(path, [head, row, row])
    assert not read_trace(str(path)).is_cut
    row_too = json.dumps(row | {"t": 5.5})
    path.write_text(path.read_text() + rest.replace('{"t": 5.5}', row_too))
    trace = read_trace(str(path))
    assert trace.is_cut
    assert trace.asked == (6 if "\n" in rest else 4)
    trikv(monkeypatch, str(path), "--json", "--capacity", "2")
    assert "its last line was cut off and is left out" in capsys.readouterr().err
    path.write_text(path.read_text() + "\n")
    with pytest.raises(TraceError, match="not JSON"):
        read_trace(str(path))


def test_interleaved_sessions_keep_their_order_and_gaps() -> None:
    trace = make_trace("made:agent:1")
    mixed = interleave(trace, 3)
    assert len(mixed) == len(trace)
    assert (np.diff(mixed.at_s) >= 0).all()
    for session in (0, 5, 11):
        before = np.flatnonzero(trace.session == session)
        after = np.flatnonzero(mixed.session == session)
        assert np.allclose(np.diff(trace.at_s[before]), np.diff(mixed.at_s[after]))
        ids = [trace.ids[trace.starts[row] : trace.starts[row + 1]].tolist() for row in before]
        assert ids == [mixed.ids[mixed.starts[r] : mixed.starts[r + 1]].tolist() for r in after]
    spans = [mixed.at_s[mixed.session == session] for session in np.unique(mixed.session)]
    running = [sum(span.min() <= at <= span.max() for span in spans) for at in mixed.at_s[::20]]
    assert 2 <= max(running) <= 3


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_made_traces_are_the_same_each_time(kind: str) -> None:
    one, same, other = (make_trace(f"made:{kind}{seed}") for seed in ("", ":0", ":1"))
    assert one.ids.tolist() == same.ids.tolist() != other.ids.tolist()
    assert (np.diff(one.at_s) >= 0).all()
    assert 0.05 < ceiling(one) < 0.99


# -- the command


def trikv(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", ["trikv", "replay", "--jobs", "1", *arguments])
    command.main()


def test_rows_for_programs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"timestamp": 0, "input_length": 40, "output_length": 1, "hash_ids": [1, 2, 3, 4]}] * 2
    path = write(tmp_path / "twice.jsonl", rows)
    trikv(
        monkeypatch,
        path,
        "--json",
        "--capacity",
        "50%,4",
        "--engines",
        "2",
        "--pools",
        "shared,private",
        "--policy",
        "all",
    )
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(found) == 2 * 2 * 4
    rates = {(row["capacity_blocks"], row["pools"]): row["hit_rate"] for row in found}
    assert rates == {(2, 1): 0.25, (2, 2): 0.0, (4, 1): 0.5, (4, 2): 0.0}
    assert all(row["ceiling"] == 0.5 for row in found)


def test_the_table_fits_80_columns_in_processes_of_its_own() -> None:
    words = [sys.executable, "-m", "trikv.cli.main", "replay", "made:agent:2", "--jobs", "2"]
    words += ["--capacity", "5%,100%", "--engines", "8", "--pools", "shared,private"]
    out = subprocess.run(words, check=True, capture_output=True, text=True).stdout
    lines = out.splitlines()
    assert len(lines) == 3 + 4
    assert max(map(len, lines)) <= 80
    assert "100.0%" in lines[5]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["made:weather"], "expected made:KIND"),
        (["made:agent:x"], "expected made:KIND"),
        (["made:agent", "--capacity", "lots"], "--capacity lots"),
        (["made:agent", "--policy", "lru"], "--policy lru"),
        (["made:agent", "--pools", "both"], "--pools both"),
        (["made:agent", "--ranks", "0"], "--ranks 0"),
    ],
)
def test_wrong_words_give_one_line(
    arguments: list[str], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SystemExit, match=says):
        trikv(monkeypatch, *arguments)


def test_without_matplotlib_a_plot_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "trikv.cli.plot", None)
    with pytest.raises(SystemExit, match=r"pip install 'trikv\[replay\]'"):
        trikv(monkeypatch, "made:agent", "--plot", "x.png")


@pytest.mark.parametrize("ending", ["png", "svg"])
def test_plots(ending: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / f"curve.{ending}"
    rows = [{"timestamp": 0, "input_length": 40, "output_length": 1, "hash_ids": [1, 2, 3, 4]}] * 2
    trikv(monkeypatch, write(tmp_path / "t.jsonl", rows), "--plot", str(path))
    head = path.read_bytes()[:200]
    assert head.startswith(b"\x89PNG") if ending == "png" else b"<?xml" in head
