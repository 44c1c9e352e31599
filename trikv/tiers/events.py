"""Events of a GPU that are used again and again.

Decided here: nothing but that; there are two kinds, as those that know when they came cost their
stream a pause.
"""

from trikv.tiers import gpu


class Events:
    """Of one thread.

    Attributes:
        idle: those that nobody uses, untimed and timed ones.
    """

    def __init__(self) -> None:
        self.idle: tuple[list[gpu.Handle], list[gpu.Handle]] = ([], [])
        self._timed_ids: set[int] = set()  # of all timed ones, those in use included

    def take(self, *, is_timed: bool = False) -> gpu.Handle:
        """One that is nobody else's until it is put away."""
        idle = self.idle[is_timed]
        if idle:
            return idle.pop()
        event = gpu.new_event(is_timed=is_timed)
        if is_timed:
            self._timed_ids.add(id(event))
        return event

    def put_away(self, *events: gpu.Handle) -> None:
        """Nobody uses these any more."""
        for event in events:
            self.idle[id(event) in self._timed_ids].append(event)
