"""Which engines may exchange blocks: namespaces by fingerprint of named fields.

Decided here: what goes into the fingerprint and how, the epochs of a namespace, and what an
operator is told when two engines that look alike do not share. This file does not know where the
fields come from.
"""

import hashlib
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from trikv.core.errors import OverloadedError
from trikv.core.layout import Geometry
from trikv.core.words import SpaceId

Fields = tuple[tuple[str, str], ...]
"""Sorted (name, value) pairs with unique names."""
Pages = tuple[tuple[Geometry, ...], ...]
"""A group's pages of a block, in rank order; ranks with the same bytes have one together."""

PROBE_FIELD = "hash_probe"
LABEL_FIELD = "label"
TENANT_FIELD = "tenant"
ALTERED_FIELD = "altered"
"""Of an instance whose weights were changed in place: a text that no other one has."""
NAMESPACES_MAX = 1_024
FINGERPRINT_BYTES = 16
ORIGIN_BYTES = 32


def fingerprint(fields: Fields, groups: Pages) -> bytes:
    """Name a namespace by everything its bytes depend on.

    Every part is tagged and length-prefixed, so that no two different inputs spell the same text.
    The `label` field is for people and is left out: the same weights under another name share.
    How many ranks hold a page is left out too: its bytes are the same.

    Args:
        fields: what the scheduler declared.
        groups: what the workers have registered.

    Returns:
        16 bytes.
    """
    digest = hashlib.blake2b(digest_size=FINGERPRINT_BYTES, person=b"trikv namespace")
    for name, value in fields:
        if name != LABEL_FIELD:
            _add(digest, "field", name, value)
    for page in range(max(map(len, groups), default=0)):
        for group, pages in enumerate(groups):
            if page >= len(pages):
                continue
            geometry = pages[page]
            lengths = ",".join(
                f"{size}x{len(list(run))}" for size, run in itertools.groupby(geometry.piece_bytes)
            )
            _add(
                digest,
                "page",
                str(page),
                str(group),
                str(geometry.page_bytes),
                lengths,
                geometry.layout,
            )
    return digest.digest()


def origin_of(fingerprint: bytes, group: int) -> bytes:
    """What the blocks of one cache group are called outside this process: 32 bytes."""
    return (fingerprint + group.to_bytes(4, "little")).ljust(ORIGIN_BYTES, b"\0")


def parts_of(origin: bytes) -> tuple[bytes, int]:
    """Fingerprint and cache group of an origin."""
    end = FINGERPRINT_BYTES
    return origin[:end], int.from_bytes(origin[end : end + 4], "little")


def _add(digest: "hashlib.blake2b", *parts: str) -> None:
    for part in parts:
        raw = part.encode()
        digest.update(len(raw).to_bytes(4, "little") + raw)
    digest.update(b"\xff\xff\xff\xff")  # no part is this long: an end that no part can imitate


@dataclass(slots=True)
class Namespace:
    """One namespace that engines of this daemon use or have used.

    Attributes:
        spaces: a space per cache group, of the present epoch.
        instances: how many ready instances use it now.
    """

    fingerprint: bytes
    fields: Fields
    pages: tuple[tuple[int, ...], ...]  # a group: bytes of each page
    spaces: tuple[SpaceId, ...]
    epoch: int = 0
    instances: int = 0

    @property
    def label(self) -> str:
        """What people call it."""
        return dict(self.fields).get(LABEL_FIELD, "?")

    @property
    def tenant(self) -> str:
        """Whose it is; empty when nobody said."""
        return dict(self.fields).get(TENANT_FIELD, "")


@dataclass(slots=True)
class Namespaces:
    """All namespaces, by fingerprint, and the spaces that are theirs."""

    by_fingerprint: dict[bytes, Namespace] = field(default_factory=dict)
    _numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    _reserved: dict[tuple[bytes, int], SpaceId] = field(default_factory=dict)

    def reserve(self, fingerprint: bytes, group: int) -> SpaceId:
        """The space that a cache group will have when its namespace is opened."""
        key = fingerprint, group
        if key not in self._reserved:
            self._reserved[key] = self._space()
        return self._reserved[key]

    def open(self, fields: Fields, groups: Pages) -> Namespace:
        """Find or make the namespace of a complete instance; counts one more user.

        Raises:
            OverloadedError: `NAMESPACES_MAX` are known; nothing was changed.
        """
        key = fingerprint(fields, groups)
        found = self.by_fingerprint.get(key)
        if found is None:
            if len(self.by_fingerprint) >= NAMESPACES_MAX:
                raise OverloadedError(f"{NAMESPACES_MAX} namespaces are in use")
            pages = tuple(tuple(geometry.page_bytes for geometry in group) for group in groups)
            spaces = (self._reserved.pop((key, group), None) for group in range(len(pages)))
            found = Namespace(key, fields, pages, tuple(space or self._space() for space in spaces))
            self.by_fingerprint[key] = found
        found.instances += 1
        return found

    def renew(self, namespace: Namespace) -> tuple[SpaceId, ...]:
        """Begin a new epoch: all blocks so far become unreachable at once.

        Returns:
            The old epoch's spaces, whose blocks are now to be dropped.
        """
        old = namespace.spaces
        namespace.spaces = self._spaces(len(old))
        namespace.epoch += 1
        return old

    def forget(self, namespace: Namespace) -> None:
        """Drop the record of a namespace without users and without blocks."""
        assert namespace.instances == 0
        del self.by_fingerprint[namespace.fingerprint]

    def notes(self, namespace: Namespace) -> list[str]:
        """What the operator should know about a namespace that others resemble, one line each."""
        return list(self._notes(namespace))

    def _notes(self, namespace: Namespace) -> Iterable[str]:
        for other in self.by_fingerprint.values():
            if other is namespace or other.pages != namespace.pages:
                continue
            names = differing(namespace.fields, other.fields)
            if names == [PROBE_FIELD]:
                yield (
                    f"same model as namespace {other.fingerprint.hex()[:8]} but other block "
                    "hashes, so nothing is shared: set the same PYTHONHASHSEED and "
                    "--prefix-caching-hash-algo on all engines"
                )

    def _spaces(self, count: int) -> tuple[SpaceId, ...]:
        return tuple(self._space() for _ in range(count))

    def _space(self) -> SpaceId:
        return SpaceId(next(self._numbers))


def differing(ours: Fields, theirs: Fields) -> list[str]:
    """Names of the fields that keep two namespaces apart, without the label."""
    a, b = dict(ours), dict(theirs)
    return sorted(
        name for name in a.keys() | b.keys() if name != LABEL_FIELD and a.get(name) != b.get(name)
    )
