"""What the settings come to: sizes that depend on the machine, and which classes decide.

Decided here: defaults that no table can state, and which settings contradict each other. This file
opens nothing.
"""

from pathlib import Path
from typing import Final

from trikv.config import Settings
from trikv.core.pages import PAGE_ALIGN
from trikv.core.policies import ADMISSION, DEFAULT, MAKERS, Maker
from trikv.core.tenants import Tenants
from trikv.nursery.quotas import read_rules
from trikv.options import SettingError
from trikv.tiers import kept
from trikv.tiers import pool as pools

SLAB_BYTES_MIN: Final = 2 << 20
SLAB_BYTES_MAX: Final = 80 << 20  # a slab changes hands in one step: at most 20,480 blocks, 8 ms
SLABS_WANTED: Final = 64


def slab_bytes_for(pool_bytes: int, wanted: int | None) -> int:
    """Size of a slab, whole pages: the setting, else a 64th of the pool within bounds."""
    size = wanted or min(max(pool_bytes // SLABS_WANTED, SLAB_BYTES_MIN), SLAB_BYTES_MAX)
    return min(size, pool_bytes) // PAGE_ALIGN * PAGE_ALIGN


def pool_bytes_for(settings: Settings) -> int:
    """Size of the pool: the setting, else that of the kept one, else half of what is available.

    Raises:
        SettingError: the machine has not so much, or a slab does not fit.
    """
    kept_bytes = kept.kept_bytes(Path(settings.persist)) if settings.persist else 0
    size = settings.pool_size or kept_bytes or pools.default_bytes()
    available = pools.available_bytes() + kept_bytes
    if settings.pool_size and not settings.use_hugepages and size > available:
        raise SettingError(f"--pool-size: {size} bytes, but only {available} are available")
    if settings.slab_size and settings.slab_size > size:
        raise SettingError("--slab-size: larger than the pool")
    return size


def policy_of(settings: Settings) -> Maker:
    """The order of eviction.

    Raises:
        SettingError: the frequency filter stands before leaf-first LRU only.
    """
    if not settings.enable_lfu_admission:
        return MAKERS[settings.eviction_policy]
    if settings.eviction_policy != DEFAULT:
        raise SettingError(f"--enable-lfu-admission: needs --eviction-policy {DEFAULT}")
    return MAKERS[ADMISSION]


def tenants_of(settings: Settings, pool_bytes: int) -> Tenants | None:
    """Quotas, when there is a file of them.

    Raises:
        SettingError: the file cannot be used.
    """
    if settings.quota_file is None:
        return None
    return Tenants(pool_bytes, read_rules(settings.quota_file))
