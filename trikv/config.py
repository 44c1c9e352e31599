"""The daemon's settings: names, defaults, units and bounds of each.

This file does not know how they are read (`options.py`), or what they are for.
"""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from trikv import options
from trikv.options import (
    Option,
    choice,
    number,
    read_addresses,
    read_bool,
    read_durations,
    read_names,
    read_paths,
    size,
    size_or_auto,
)


@dataclass(frozen=True, slots=True)
class Settings:
    """What the daemon runs with; see OPTIONS for meaning and units."""

    addr: str | None
    pool_size: int | None
    slab_size: int | None
    use_hugepages: bool
    numa: str
    max_blocks: int | None
    persist: str | None
    takeover: bool
    max_engines: int
    eviction_policy: str
    enable_lfu_admission: bool
    quota_file: str | None
    ssd_cache_path: tuple[str, ...]
    ssd_cache_capacity: int | None
    ssd_write_through: bool
    ssd_write_budget: int | None
    ssd_ring: str
    metaserver_addr: tuple[str, ...]
    nics: tuple[str, ...]
    peer_data_port: int
    verify_peer: str
    peer_ssd_fraction: float
    cluster_secret_file: str | None
    insecure: bool
    record_trace: str | None
    trace_block_tokens: int
    copy_threads: int
    gpu_staging: int | None
    lease_seconds: float
    heartbeat_seconds: float
    fill_seconds: float
    drain_seconds: float
    freeze_seconds: float
    state_dir: str | None
    http_addr: str | None
    metric_hll_windows: tuple[float, ...]
    log_level: str
    log_format: str


OPTIONS: Final = (
    Option(
        "addr",
        str,
        None,
        "unix:/path or host:port to listen on; default: TRIKV_SOCKET, TRIKV_HOST and TRIKV_PORT, "
        "/run/trikv/trikv.sock, the user's runtime directory, 127.0.0.1:50055: "
        "the first that can be used",
    ),
    Option(
        "pool-size",
        size(4 << 20),
        None,
        "host memory for blocks, e.g. 30gb; default: half of what is available",
    ),
    Option(
        "slab-size",
        size(1 << 20),
        None,
        "unit in which models take room from each other; default: a 64th of the pool, 2mb to 80mb",
    ),
    Option(
        "use-hugepages",
        read_bool,
        default=False,
        help="back the pool with reserved 2 MiB pages (vm.nr_hugepages)",
    ),
    Option(
        "numa",
        choice("auto", "off"),
        "auto",
        "with several NUMA nodes: auto: the pool has an equal part in the memory of each node that "
        "has GPUs, and blocks are saved near their GPU; off: the kernel's choice",
    ),
    Option(
        "max-blocks",
        number(int, 1, 1 << 30),
        None,
        "rows of the index; default: one a 4 KiB page of the pool, at most 16 million",
    ),
    Option(
        "persist",
        str,
        None,
        "folder on tmpfs or hugetlbfs where the pool outlives the daemon, e.g. /dev/shm/trikv: the "
        "next daemon goes on with its blocks; default: the pool ends with the daemon",
    ),
    Option(
        "takeover",
        read_bool,
        default=False,
        help="end the daemon that serves this unix socket, wait for it, and take its place",
    ),
    Option("max-engines", number(int, 1, 4096), 64, "engines that may be attached at once"),
    Option(
        "eviction-policy",
        choice("leaf-first-lru", "s3-fifo"),
        "leaf-first-lru",
        "which blocks go when room is needed: leaf-first-lru or s3-fifo",
    ),
    Option(
        "enable-lfu-admission",
        read_bool,
        default=False,
        help="new blocks stay only when used more often than what they displace (W-TinyLFU before "
        "leaf-first-lru); for pools that are tiny beside what is asked for",
    ),
    Option(
        "quota-file",
        str,
        None,
        "TOML file with floor and share of the pool by tenant; read again when it changes",
    ),
    Option(
        "ssd-cache-path",
        read_paths,
        (),
        "folder, file or device for blocks that the pool has no room for, found again after a "
        "restart; repeatable, one for each disk",
    ),
    Option(
        "ssd-cache-capacity",
        size(8 << 20),
        None,
        "hard limit of each --ssd-cache-path, e.g. 500gb; may grow at a start, not shrink",
    ),
    Option(
        "ssd-write-through",
        read_bool,
        default=False,
        help="write each block at once, not only when it is used again or before it is evicted",
    ),
    Option(
        "ssd-write-budget",
        size(1 << 20),
        None,
        "bytes that may be written a day, to all disks together, e.g. 2tb; an eighth of it at "
        "once; default: no limit",
    ),
    Option(
        "ssd-ring",
        choice("auto", "liburing", "uring", "threads"),
        "auto",
        "how disks are driven: liburing, uring (our own), threads, or auto: the best that works",
    ),
    Option(
        "metaserver-addr",
        read_addresses,
        (),
        "host:port of a trikv-meta; repeatable: the daemon announces to all and asks any. With it "
        "--addr is the host:port by which other hosts reach this one, and engines use the unix "
        "socket",
    ),
    Option(
        "nics",
        read_names,
        ("auto",),
        "NICs for RDMA READ between hosts, e.g. mlx5_0,mlx5_1; off: TCP only; auto: all that work",
    ),
    Option(
        "peer-data-port",
        number(int, 0, 65_535),
        0,
        "TCP port from which other hosts fetch blocks; 0: any free one",
    ),
    Option(
        "verify-peer",
        choice("off", "sample", "always"),
        "off",
        "sums of blocks that came by RDMA: off, sample (one fetch of 16) or always; over TCP they "
        "are always compared",
    ),
    Option(
        "peer-ssd-fraction",
        number(float, 0, 0.25),
        0.05,
        "part of the pool for blocks that are read from SSDs for other hosts; 0: what is on SSDs "
        "is for this host only",
    ),
    Option(
        "cluster-secret-file",
        str,
        None,
        "file whose first line, 16 bytes or more, all nodes of the cluster know",
    ),
    Option(
        "insecure",
        read_bool,
        default=False,
        help="be a node without a secret, or at a loopback address",
    ),
    Option(
        "record-trace",
        str,
        None,
        "file for what engines ask for and save, without content, for `trikv replay`; at most 1gb",
    ),
    Option(
        "trace-block-tokens",
        number(int, 1, 1 << 20),
        16,
        "tokens of a block, as the recorded trace says",
    ),
    Option(
        "copy-threads",
        number(int, 1, 64),
        2,
        "threads that copy in each direction, for engines without a GPU",
    ),
    Option(
        "gpu-staging",
        size_or_auto(1 << 20),
        None,
        "memory of each GPU with engines in which pieces of blocks are gathered, both directions "
        "together; auto: a 64th of the GPU's. The more, the less copies slow a busy engine",
    ),
    Option(
        "lease-seconds",
        number(float, 1, 3600),
        30.0,
        "how long blocks found by a query stay loadable",
    ),
    Option(
        "heartbeat-seconds",
        number(float, 0.5, 3600),
        10.0,
        "silence after which an engine counts as gone",
    ),
    Option(
        "fill-seconds",
        number(float, 1, 3600),
        30.0,
        "time in which all ranks must have saved a block",
    ),
    Option(
        "drain-seconds",
        number(float, 0, 600),
        5.0,
        "time at SIGTERM for calls in flight, and for writing what no disk holds yet",
    ),
    Option(
        "freeze-seconds",
        number(float, 0, 3600),
        20.0,
        "a daemon frozen in the middle of a load is killed by the kernel after this time, so that "
        "the engine knows that nothing is written any more; 0: the engine waits",
    ),
    Option(
        "state-dir",
        str,
        None,
        "folder for the small file of hit-rate windows that outlives the daemon; default: beside "
        "the unix socket; a daemon on TCP keeps none",
    ),
    Option(
        "http-addr",
        str,
        None,
        "host:port of /metrics, /health and /ready, or off; default: 127.0.0.1:9091, and without "
        "HTTP when that is taken",
    ),
    Option(
        "metric-hll-windows",
        read_durations,
        (900.0, 3600.0, 86400.0),
        "how far back hit rates and their ceilings look [15m,1h,24h]",
    ),
    Option(
        "log-level",
        choice("debug", "info", "warning", "error"),
        "info",
        "debug, info, warning or error",
    ),
    Option(
        "log-format",
        choice("auto", "console", "json"),
        "auto",
        "console, json, or auto: console on a terminal",
    ),
)


def parser() -> argparse.ArgumentParser:
    """The command line of `trikv-daemon`."""
    description = "Keeps vLLM's KV blocks on this host while engines come and go."
    return options.parser("trikv-daemon", description, OPTIONS)


def load(arguments: Sequence[str], environ: Mapping[str, str]) -> Settings:
    """Read settings from all sources.

    Raises:
        SettingError: the message is one line and names the setting and where it came from.
    """
    return Settings(**options.load(parser(), OPTIONS, arguments, environ))
