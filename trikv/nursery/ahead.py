"""What copiers are told of loads that are about to come.

Decided here: whose copiers, and of which pages. A lease keeps its pages as they are until they are
loaded or it has ended, and a load of an ended lease is refused: so what a copier has read of them
by then is what the load will read. This file does not know what copiers make of it.
"""

from typing import Final

from trikv.core.calls import Answer, Query
from trikv.core.replicas import page_of
from trikv.core.words import InstanceName, LeaseId
from trikv.nursery.copying import Memory
from trikv.nursery.sessions import Sessions
from trikv.nursery.store import Store

AHEAD_BYTES: Final = 64 << 20
"""What a bus brings in 1.2 ms, somewhat more than between a query's answer and the load's order. If
nobody loads it, another load may have to wait for as long."""


def announce(
    store: Store,
    sessions: Sessions,
    memory: Memory,
    name: InstanceName | None,
    call: Query,
    answer: Answer,
) -> None:
    """A query was answered with a lease: have the engine's copiers get ready for its loads.

    Of an engine that computes nothing they may begin with the last pages: the first ones it may
    have itself. Not where more is coming, which it will ask for.
    """
    instance = store.engines.by_name.get(name) if name is not None else None
    lease = store.cache.leases.active.get(LeaseId(answer.lease))
    if instance is None or lease is None:
        return
    pages, slot = store.cache.pages, store.cache.blocks.slot
    begins = call.is_alone and answer.coming_count == 0
    for rank, facts in instance.ranks.items():
        theirs = sessions.open_sessions.get(facts.session)
        attachment = theirs.attachments.get(rank) if theirs is not None else None
        if attachment is None or call.group >= len(facts.groups):
            continue
        layout = facts.groups[call.group]
        if begins and layout.place is not None:
            last = lease.entries[-max(1, AHEAD_BYTES // layout.page_bytes) :]
            offsets = pages.offsets(slot[last], page_of(rank, layout.replicas))
            memory.bring(layout.place, lease.id, offsets)
        else:
            memory.expect(attachment, into_engine=True)
