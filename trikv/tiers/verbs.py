"""RDMA verbs, by whichever Python binding is there.

Decided here: which one. The `ibverbs` wheel is taken first: it lets go of the GIL and gives its
memory back; rdma-core's `pyverbs` is what distributions have. Nobody calls `load` on a machine
without a NIC, so neither is imported there.
"""

from collections.abc import Callable
from typing import Final

from trikv.tiers import verbsdistro, verbswheel
from trikv.tiers.nics import NicFacts
from trikv.tiers.pairs import Nic

_LOADERS: Final = {"ibverbs": verbswheel.load, "pyverbs": verbsdistro.load}
BINDINGS: Final = tuple(_LOADERS)


class NoVerbsError(Exception):
    """No binding can be used; one line says why."""


def load(binding: str = "auto") -> Callable[[NicFacts], Nic]:
    """How a NIC is opened.

    Args:
        binding: one of `BINDINGS`, or "auto": the first that can be imported.

    Raises:
        NoVerbsError: none can.
    """
    reasons = []
    for name in BINDINGS if binding == "auto" else (binding,):
        try:
            return _LOADERS[name]()
        except (ImportError, OSError) as error:
            reasons.append(f"{name}: {error}")
    raise NoVerbsError("; ".join(reasons))
