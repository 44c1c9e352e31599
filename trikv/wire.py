"""Messages and core records: the schema's loader, its limits, and blobs to arrays.

Decided here: every bound that a message from outside must keep before anything is allocated for it.
This file does not know sockets, tasks or policy; it is the only one that knows the schema's path.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from importlib import resources
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import capnp
import numpy as np
from numpy.typing import NDArray

from trikv.core.calls import (
    Declare,
    GpuMemory,
    GroupPieces,
    Load,
    Query,
    Register,
    Save,
    Signals,
)
from trikv.core.errors import BadRequestError
from trikv.core.layout import ADDRESS_MAX, Piece, Range
from trikv.core.words import InstanceName, LeaseId, RequestId, Words

MESSAGE_WORDS_MAX: Final = 1 << 20  # 8 MiB: capnp refuses more before our code runs
BLOCKS_MAX: Final = 65_536
HASH_BYTES_MAX: Final = 32  # as wide as `Words`
HASH_BYTES: Final = (16, HASH_BYTES_MAX)
TEXT_BYTES_MAX: Final = 4_096
NAME_BYTES_MAX: Final = 256
REQUEST_BYTES_MAX: Final = 512
REQUESTS_MAX: Final = 4_096
FIELDS_MAX: Final = 128
FIELD_NAME_BYTES_MAX: Final = 64
RANKS_MAX: Final = 64
MEMORIES_MAX: Final = 4_096
GROUPS_MAX: Final = 16
PIECES_MAX: Final = 65_536
FENCES_MAX: Final = 65_536
EVENTS_MAX: Final = 256
SIGNALS_MAX: Final = 256
SIGNAL_BYTES: Final = 4
SECTIONS_MAX: Final = 8
IPC_HANDLE_BYTES: Final = 64
UUID_BYTES: Final = 16
ALLOCATION_BYTES_MAX: Final = 1 << 40
POSITIONS_MAX: Final = 1 << 24
BUDGET_S_MAX: Final = 3_600
WAIT_S_MAX: Final = 60


def _load_schema() -> Any:
    """Load `kv.capnp` once: from the wheel, else from the checkout beside the package."""
    capnp.remove_import_hook()
    packaged = resources.files("trikv") / "schema" / "kv.capnp"
    checkout = Path(__file__).resolve().parent.parent / "schema" / "kv.capnp"
    found = resources.as_file(packaged) if packaged.is_file() else nullcontext(checkout)
    with found as file:
        # Without the folder above capnp's own schemas a `-> stream` would abort the process.
        return capnp.load(str(file), imports=[str(Path(capnp.__file__).parent.parent)])


SCHEMA: Final[Any] = _load_schema()
PROTOCOL: Final[int] = int(SCHEMA.protocolVersion)


def text(value: str, name: str, *, bytes_max: int = TEXT_BYTES_MAX, bytes_min: int = 1) -> str:
    """Check the size of a text from outside.

    Raises:
        BadRequestError: too short or too long.
    """
    if not bytes_min <= len(value.encode()) <= bytes_max:
        raise BadRequestError(f"{name} must have {bytes_min} to {bytes_max} bytes")
    return value


def bounded(
    items: Sequence[Any], name: str, *, count_max: int, count_min: int = 0
) -> Sequence[Any]:
    """Check the length of a list from outside before it is walked.

    Raises:
        BadRequestError: too short or too long.
    """
    if not count_min <= len(items) <= count_max:
        raise BadRequestError(
            f"{name} must have {count_min} to {count_max} items, not {len(items)}"
        )
    return items


def hashes_to_words(blob: bytes, hash_bytes: int) -> Words:
    """Read one blob of block hashes.

    Args:
        blob: hashes one after another.
        hash_bytes: size of one, 16 or 32.

    Returns:
        Shape (n, 4); a view of `blob` where the size is 32.

    Raises:
        BadRequestError: a size that does not fit.
    """
    if hash_bytes not in HASH_BYTES:
        raise BadRequestError(f"hashBytes must be 16 or 32, not {hash_bytes}")
    count, rest = divmod(len(blob), hash_bytes)
    if rest or count > BLOCKS_MAX:
        raise BadRequestError(
            f"hashes: {len(blob)} bytes are no 0 to {BLOCKS_MAX} hashes of {hash_bytes}"
        )
    words = np.frombuffer(blob, dtype="<u8").reshape(count, hash_bytes // 8)
    if hash_bytes == HASH_BYTES_MAX:
        return words
    padded = np.zeros((count, 4), dtype=np.uint64)
    padded[:, : hash_bytes // 8] = words
    return padded


def words_to_hashes(words: Words, hash_bytes: int) -> bytes:
    """The blob that `hashes_to_words` reads."""
    return np.ascontiguousarray(words[:, : hash_bytes // 8], dtype="<u8").tobytes()


def ids_to_array(blob: bytes, name: str = "blocks") -> NDArray[np.int32]:
    """Read one blob of little-endian int32 numbers.

    Raises:
        BadRequestError: not a whole number of items, or too many.
    """
    if len(blob) % 4 or len(blob) > 4 * BLOCKS_MAX:
        raise BadRequestError(f"{name}: {len(blob)} bytes are no 0 to {BLOCKS_MAX} int32 numbers")
    return np.frombuffer(blob, dtype="<i4")


def array_to_ids(ids: NDArray[np.integer[Any]]) -> bytes:
    """The blob that `ids_to_array` reads."""
    return np.ascontiguousarray(ids, dtype="<i4").tobytes()


# -- calls of an engine


def read_declare(message: Any) -> Declare:
    """Read `Instance`.

    Raises:
        BadRequestError: a bound is broken.
    """
    count = int(message.rankCount)
    if not 1 <= count <= RANKS_MAX:
        raise BadRequestError(f"rankCount must lie in 1 to {RANKS_MAX}, not {count}")
    fields = {}
    for field in bounded(message.fields, "fields", count_max=FIELDS_MAX):
        name = text(field.name, "a field's name", bytes_max=FIELD_NAME_BYTES_MAX)
        if name in fields:
            raise BadRequestError(f"field {name!r} stands twice")
        fields[name] = text(field.value, f"field {name!r}", bytes_min=0)
    return Declare(_instance(message.name), count, tuple(sorted(fields.items())))


def read_register(message: Any) -> Register:
    """Read `Rank`.

    Raises:
        BadRequestError: a bound is broken, or a memory kind is not supported here.
    """
    rank = int(message.rank)
    if rank >= RANKS_MAX:
        raise BadRequestError(f"rank must lie in 0 to {RANKS_MAX - 1}, not {rank}")
    memories = bounded(message.memories, "memories", count_max=MEMORIES_MAX, count_min=1)
    groups = bounded(message.groups, "groups", count_max=GROUPS_MAX, count_min=1)
    count = int(message.fences.count)
    if count > FENCES_MAX:
        raise BadRequestError(f"fences must be at most {FENCES_MAX}, not {count}")
    address = int(message.fences.address)
    if count and not 0 < address < ADDRESS_MAX - 8 * count:
        raise BadRequestError("fences leave the address space")
    events = bounded(message.events, "events", count_max=EVENTS_MAX)
    ranges, gpu = _memories(memories, events)
    if gpu is not None:
        gpu = replace(gpu, signals=_signals(message.signals, ranges))
    return Register(_instance(message.instance), rank, ranges, _groups(groups), address, count, gpu)


def _memories(memories: Any, events: Any) -> tuple[tuple[Range, ...], GpuMemory | None]:
    kinds = {memory.which() for memory in memories}
    if kinds == {"process"}:
        found = [memory.process for memory in memories]
        return tuple(Range(int(one.address), int(one.bytes)) for one in found), None
    if kinds != {"cudaIpc"}:
        raise BadRequestError("all memories of a rank must be of one kind that this daemon knows")
    allocations = [memory.cudaIpc for memory in memories]
    devices = {_blob(one.deviceUuid, "deviceUuid", UUID_BYTES) for one in allocations}
    if len(devices) > 1:
        raise BadRequestError("all memories of a rank must be of one GPU")
    handles = tuple(_blob(one.handle, "handle", IPC_HANDLE_BYTES) for one in allocations)
    if len(set(handles)) < len(handles):
        raise BadRequestError("an allocation stands twice")
    sizes = [int(one.allocationBytes) for one in allocations]
    if max(sizes) > ALLOCATION_BYTES_MAX:
        raise BadRequestError(f"an allocation has at most {ALLOCATION_BYTES_MAX} bytes")
    # Addresses are the copier's business; these only keep allocations apart for the checks.
    ranges = tuple(Range((at + 1) * ALLOCATION_BYTES_MAX, size) for at, size in enumerate(sizes))
    recorded = tuple(_blob(one, "an event", IPC_HANDLE_BYTES) for one in events)
    return ranges, GpuMemory(devices.pop(), handles, recorded)


def _signals(message: Any, ranges: tuple[Range, ...]) -> Signals | None:
    memory, offset, count = int(message.memory), int(message.offset), int(message.count)
    if count == 0:
        return None
    if count > SIGNALS_MAX or memory >= len(ranges) or offset % SIGNAL_BYTES:
        raise BadRequestError(f"signals: at most {SIGNALS_MAX} words in a memory of the rank")
    if offset + SIGNAL_BYTES * count > ranges[memory].bytes:
        raise BadRequestError("signals leave their memory")
    return Signals(memory, offset, count)


def _blob(value: Any, name: str, size: int) -> bytes:
    if len(value) != size:
        raise BadRequestError(f"{name} must have {size} bytes, not {len(value)}")
    return bytes(value)


def _groups(groups: Any) -> tuple[GroupPieces, ...]:
    count = sum(len(group.pieces) for group in groups)
    if count > PIECES_MAX:
        raise BadRequestError(f"all groups together have at most {PIECES_MAX} pieces, not {count}")
    return tuple(_group(group) for group in groups)


def _group(group: Any) -> GroupPieces:
    pieces = bounded(group.pieces, "pieces", count_max=PIECES_MAX, count_min=1)
    layout = text(group.layout, "layout", bytes_max=NAME_BYTES_MAX)
    read = tuple(Piece(int(p.memory), int(p.offset), int(p.stride), int(p.bytes)) for p in pieces)
    replicas = int(group.replicas)
    if not 1 <= replicas <= RANKS_MAX:
        raise BadRequestError(f"replicas must lie in 1 to {RANKS_MAX}, not {replicas}")
    sections = tuple(
        int(end) for end in bounded(group.sections, "sections", count_max=SECTIONS_MAX)
    )
    if sections and (
        sections[-1] != sum(one.bytes for one in read)
        or any(end <= begin for begin, end in pairwise((0, *sections)))
    ):
        raise BadRequestError("sections must rise up to the end of the page")
    return GroupPieces(int(group.blockCount), read, layout, replicas, sections)


def read_query(message: Any) -> Query:
    """Read `Query`.

    Raises:
        BadRequestError: a bound is broken.
    """
    words = hashes_to_words(message.hashes, int(message.hashBytes))
    wait_s = float(message.waitSeconds)
    if not 0 <= wait_s <= WAIT_S_MAX:
        raise BadRequestError(f"waitSeconds must lie in 0 to {WAIT_S_MAX}")
    request = _request(message.request)
    return Query(request, int(message.group), words, wait_s, is_alone=bool(message.alone))


def read_save(message: Any) -> Save:
    """Read `Save`.

    Raises:
        BadRequestError: a bound is broken, or hashes and blocks differ in number.
    """
    words = hashes_to_words(message.hashes, int(message.hashBytes))
    blocks = ids_to_array(message.blocks)
    if len(words) != len(blocks):
        raise BadRequestError(f"{len(words)} hashes for {len(blocks)} blocks")
    first = int(message.first)
    if first + len(words) > POSITIONS_MAX:
        raise BadRequestError(f"a request has at most {POSITIONS_MAX} blocks")
    return Save(
        int(message.rank),
        int(message.group),
        _request(message.request),
        first,
        words,
        blocks,
        int(message.fence),
        int(message.generation),
        int(message.event),
        int(message.signal),
        int(message.value),
        str(message.altered) if message._has("altered") else None,  # noqa: SLF001  # pycapnp's own name
    )


def read_load(message: Any) -> Load:
    """Read `Load`.

    Raises:
        BadRequestError: a bound is broken.
    """
    blocks = ids_to_array(message.blocks)
    budget_s = float(message.budgetSeconds)
    if not 0 <= budget_s < BUDGET_S_MAX:
        raise BadRequestError(f"budgetSeconds must lie in 0 to {BUDGET_S_MAX}")
    return Load(
        int(message.rank),
        LeaseId(int(message.lease)),
        int(message.first),
        blocks,
        budget_s,
        int(message.event),
        int(message.signal),
        int(message.value),
        bool(message.ordered),
    )


def read_requests(message: Any) -> list[RequestId]:
    """Read the list of `release`.

    Raises:
        BadRequestError: a bound is broken.
    """
    return [_request(one) for one in bounded(message, "requests", count_max=REQUESTS_MAX)]


def _instance(value: str) -> InstanceName:
    return InstanceName(text(value, "the instance's name", bytes_max=NAME_BYTES_MAX))


def _request(value: str) -> RequestId:
    return RequestId(text(value, "request", bytes_max=REQUEST_BYTES_MAX))
