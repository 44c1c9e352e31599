"""What copiers are told of loads that are about to come.

Decided here: whose copiers, and of which pages. A lease keeps its pages as they are until they are
loaded or it has ended, and a load of an ended lease is refused: so what a copier has read of them
by then is what the load will read. This file does not know what copiers make of it.
"""

from typing import Final

from trikv.core.calls import Query
from trikv.core.replicas import page_of
from trikv.core.words import InstanceName, LeaseId
from trikv.nursery.copying import Memory
from trikv.nursery.sessions import Sessions
from trikv.nursery.store import Store

PAGES_MAX: Final = 8192
"""Of longer prompts only that a load is about to come: the list is sent with each query."""


def announce(
    store: Store,
    sessions: Sessions,
    memory: Memory,
    name: InstanceName | None,
    call: Query,
    lease_id: LeaseId,
) -> None:
    """A query was answered with a lease: have the engine's copiers get ready for its loads."""
    instance = store.engines.by_name.get(name) if name is not None else None
    lease = store.cache.leases.active.get(lease_id)
    if instance is None or lease is None:
        return
    pages, slots = store.cache.pages, store.cache.blocks.slot[lease.entries]
    is_known = call.is_alone and len(lease.entries) <= PAGES_MAX
    for rank, facts in instance.ranks.items():
        theirs = sessions.open_sessions.get(facts.session)
        attachment = theirs.attachments.get(rank) if theirs is not None else None
        if attachment is None:
            continue
        layout = facts.groups[call.group]
        if is_known and layout.place is not None:
            offsets = pages.offsets(slots, page_of(rank, layout.replicas))
            memory.bring(layout.place, lease.id, offsets)
        else:
            memory.expect(attachment, into_engine=True)
