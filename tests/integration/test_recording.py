"""A daemon records its traffic, and replay finds what the daemon found."""

import asyncio
from pathlib import Path

import pytest
import trio
from trio.testing import MockClock

from tests.conftest import Start
from tests.integration.daemons import attached, hashes, start_daemon, wire_ok
from trikv.cli.rerun import Case, run
from trikv.cli.traces import read_trace
from trikv.core.words import InstanceName, SpaceId
from trikv.nursery import recording
from trikv.nursery.recording import Recorder
from trikv.wire import hashes_to_words


def test_a_replay_of_what_was_recorded_finds_what_was_found(start: Start, tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_text("earlier")
    daemon = start_daemon(start, tmp_path, "--pool-size", "8mb", "--record-trace", str(file))
    found: list[int] = []

    async def main() -> None:
        async with attached(daemon.address, block_count=64, page_bytes=1 << 14) as engine:
            for turn in range(6):
                request = f"turn-{turn}"
                blob = hashes(*(f"word-{n}" for n in range(8 + 8 * turn)))
                for _ in range(2):  # asking again is recorded once
                    hit = wire_ok(await engine.query(blob, request=request)).hitCount
                found.append(hit)
                answer = blob + hashes(*(f"answer-{turn}-{n}" for n in range(4)))
                count = len(answer) // 32 - hit
                wire_ok(
                    await engine.save(
                        answer[32 * hit :], list(range(count)), request=request, first=hit
                    )
                )
                await engine.session.release([request])

    asyncio.run(main())
    assert daemon.end() == 0
    assert (tmp_path / "trace.jsonl.old").read_text() == "earlier"
    assert "word-" not in file.read_text()
    trace = read_trace(str(file))
    hits = run(trace, Case(512, "leaf-first-lru")).hits
    assert hits[~trace.is_save].tolist() == found == [0, 8, 16, 24, 32, 40]
    assert trace.distinct == 48 + 6 * 4


def words(*names: object):  # noqa: ANN201
    return hashes_to_words(hashes(*names), 32)


def test_numbers_are_the_same_in_one_file_and_others_in_the_next() -> None:
    one, other = Recorder("x"), Recorder("y")
    assert one.ids(words(1, 2, 1))[0] == one.ids(words(1))[0] == one.ids(words(1, 2, 1))[2]
    assert len(set(one.ids(words(*range(5000))))) == 5000
    assert max(one.ids(words(*range(100)))) < 1 << 53
    assert set(one.ids(words(*range(100)))).isdisjoint(other.ids(words(*range(100))))


def test_at_its_bounds_it_leaves_out_or_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recording, "PENDING_MAX", 3)
    recorder = Recorder(str(tmp_path / "t.jsonl"), bytes_max=300)
    name, space = InstanceName("e"), SpaceId(1)

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(recorder.run, 16)
            for _ in range(5):
                recorder.note(1.0, name, space, words(1), None)
            await trio.sleep(10)
            recorder.note(1.0, name, space, words(*range(9)), 3)
            await trio.sleep(10)  # it is over: the nursery ends by itself
            recorder.note(1.0, name, space, words(1), None)

    trio.run(main, clock=MockClock(autojump_threshold=0.1))
    assert recorder.left_out_total == 2
    assert read_trace(recorder.path).first.tolist() == [0, 0, 0, 3]
    assert not recorder._pending


def test_a_place_that_cannot_be_written_ends_the_recording_only(tmp_path: Path) -> None:
    recorder = Recorder(str(tmp_path / "nowhere" / "t.jsonl"))
    trio.run(recorder.run, 16)
    recorder.note(1.0, InstanceName("e"), SpaceId(1), words(1), None)
    assert not recorder._pending
