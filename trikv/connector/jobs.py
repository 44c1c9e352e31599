"""What the two halves of the connector tell each other, once a step.

Decided here: nothing; plain records of bytes and numbers that survive pickling between processes
and between daemon versions. This file does not know vLLM, sockets or tensors.
"""

from dataclasses import KW_ONLY, dataclass, field
from typing import Final

SIGNAL_COUNT: Final = 32
"""Words of a rank's GPU memory in which loads show their end; see `LoadJob.signal`. As many more
are for loads that no forward waits for; see `Arrivals`."""
AGAIN: Final = "again/"
"""Before a request's id: the name under which a load that failed is tried again."""
IDLE_S: Final = 0.001
"""How long a step that computes nothing may wait for an answer, instead of going round at once.

An engine that waits for a load goes round its loop without sleeping, and takes the processor from
the thread that hears the answer.
"""


@dataclass(frozen=True, slots=True)
class LoadJob:
    """Blocks of a lease that one request waits for."""

    request: str
    lease: int  # 0: there is none, the load must fail
    first: int  # position inside the lease
    blocks: bytes  # engine block ids, little-endian int32
    _: KW_ONLY
    is_alone: bool = False  # the engine computes nothing and sees at once when they are there
    signal: int = 0  # from 1: this step's forward waits for that word; 0: it does not need them
    value: int = 0  # to be this
    is_ordered: bool = False  # section after section, and the word shows each; the worker decides
    hash_bytes: int = 0  # the rest only where a forward waits
    hashes: bytes = b""  # of all blocks up to the last of these, from the request's first on

    @property
    def key(self) -> tuple[str, int]:
        """What no other load of this engine has."""
        return self.request, self.lease

    @property
    def is_held(self) -> bool:
        """Whether this step's forward waits for them."""
        return self.signal > 0


@dataclass(frozen=True, slots=True)
class SaveJob:
    """Blocks of one request that are complete when the step's forward has run."""

    number: int  # unique in this engine
    request: str
    first: int  # position inside the request
    hash_bytes: int
    hashes: bytes
    blocks: bytes  # as above
    _: KW_ONLY
    is_alone: bool = False  # the step computes nothing else; signal and value then as above
    signal: int = 0
    value: int = 0
    altered: str | None = None  # see `Forgetting`, when they were computed; None: not known

    @property
    def key(self) -> tuple[str, int]:
        """What no other save of this engine has, and no load."""
        return "", self.number


@dataclass(frozen=True, slots=True)
class StepJobs:
    """Scheduler to worker: what one step starts and gives up."""

    loads: tuple[LoadJob, ...] = ()
    saves: tuple[SaveJob, ...] = ()
    preempted: frozenset[str] = frozenset()  # their blocks may be overwritten in this very step
    delayed: tuple[str, ...] = ()  # ended; their blocks are kept until reported as sent
    is_idle: bool = False  # nothing is computed in this step: waiting a little costs nobody time


@dataclass(slots=True)
class Report:
    """Worker to scheduler: saves that read no memory any more, by number of ranks that say so."""

    answered: dict[int, int] = field(default_factory=dict)

    def add(self, other: "Report") -> None:
        """Count another rank's report, or a later one of the same rank."""
        for number, ranks in other.answered.items():
            self.answered[number] = self.answered.get(number, 0) + ranks
