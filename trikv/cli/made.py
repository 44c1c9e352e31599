"""Traces made on the spot from a seed: conversations, coding agents, and a scan through both.

Decided here: how such requests are drawn. Named `made:KIND` or `made:KIND:SEED` on the command
line; the same name is the same trace for ever.

* conversation: users come at random, each of a few turns; a turn is the whole history and more, and
  the next one comes after a while. A third share one of a few system prompts.
* agent: long sessions that grow by a few blocks a step, quickly, from one of a few long roots; now
  and then a session goes back and takes another way.
* scan: the agents, and one client that reads through documents that are never asked for again.
"""

from random import Random
from typing import Final

from trikv.cli.traces import MADE, Trace, TraceError, from_lists

BLOCK_TOKENS: Final = 16
AGENT_BACK_P: Final = 0.03  # how often a step begins by going back
Request = tuple[float, int, list[int]]  # time, session, ids


class _Ids:
    """Fresh ids."""

    def __init__(self) -> None:
        self._next = 0

    def take(self, count: int) -> list[int]:
        first, self._next = self._next, self._next + count
        return list(range(first, self._next))


def make_trace(name: str) -> Trace:
    """A trace by its name.

    Raises:
        TraceError: no such kind, or a seed that is not a number.
    """
    kind, _, seed = name.removeprefix(MADE).partition(":")
    if kind not in KINDS or not (seed or "0").isdigit():
        raise TraceError(f"{name}: expected {MADE}KIND[:SEED] with KIND of {', '.join(KINDS)}")
    requests = KINDS[kind](Random(int(seed or "0")), _Ids())
    requests.sort(key=lambda one: one[0])
    return from_lists(
        name,
        BLOCK_TOKENS,
        ids=[ids for _, _, ids in requests],
        at_s=[at_s for at_s, _, _ in requests],
        session=[session for _, session, _ in requests],
        input_tokens=[len(ids) * BLOCK_TOKENS for _, _, ids in requests],
    )


def _conversation(random: Random, fresh: _Ids, *, users: int = 1200) -> list[Request]:
    systems = [fresh.take(random.randint(20, 120)) for _ in range(8)]
    requests: list[Request] = []
    for session in range(users):
        at_s = random.uniform(0, 3600)
        has_system = random.random() < 1 / 3
        ids = list(random.choice(systems[: 1 + session % len(systems)])) if has_system else []
        for _ in range(min(1 + int(random.expovariate(0.4)), 30)):
            ids = ids + fresh.take(1 + int(random.lognormvariate(3.2, 1.0)))
            requests.append((at_s, session, ids))
            ids = ids + fresh.take(random.randint(4, 40))  # the answer comes back in the next turn
            at_s += random.lognormvariate(4.0, 1.0)
    return requests


def _agent(random: Random, fresh: _Ids, *, sessions: int = 120) -> list[Request]:
    roots = [fresh.take(random.randint(200, 500)) for _ in range(4)]
    requests: list[Request] = []
    for session in range(sessions):
        at_s = random.uniform(0, 3600)
        ids = random.choice(roots) + fresh.take(random.randint(10, 60))
        for _ in range(random.randint(10, 60)):
            if random.random() < AGENT_BACK_P:
                ids = ids[: random.randint(len(ids) // 2, len(ids))]
            ids = ids + fresh.take(random.randint(4, 60))
            requests.append((at_s, session, ids))
            at_s += random.lognormvariate(2.0, 0.8)
    return requests


def _scan(random: Random, fresh: _Ids) -> list[Request]:
    requests = _agent(random, fresh)
    for number in range(400):
        requests.append((9.0 * number, 1_000_000, fresh.take(random.randint(300, 600))))
    return requests


KINDS: Final = {"conversation": _conversation, "agent": _agent, "scan": _scan}
