#!/usr/bin/env bash
# Install what tests and benchmarks need of the distribution, if it is not there:
#
#   tools/packages.sh double   a C compiler and the headers of libibverbs
#   tools/packages.sh guest    a Soft-RoCE guest: QEMU, busybox, verbs, their Python binding
#   tools/packages.sh bench    iperf3
#
# Needs apt and root, only when something is missing. Ends with one line that says what cannot be had.
set -euo pipefail

missing=()
need() { # command or file, package
    if ! command -v "$1" >/dev/null && [ ! -e "$1" ]; then missing+=("$2"); fi
}

case ${1:-} in
double)
    need gcc gcc
    need /usr/include/stdio.h libc6-dev
    need /usr/include/infiniband/verbs.h libibverbs-dev
    ;;
guest)
    need qemu-system-x86_64 qemu-system-x86
    need busybox busybox-static
    need modprobe kmod
    need cpio cpio
    need ip iproute2
    need rdma iproute2
    need /usr/lib/x86_64-linux-gnu/libibverbs.so.1 libibverbs1
    need /usr/lib/x86_64-linux-gnu/libibverbs ibverbs-providers
    need /usr/lib/x86_64-linux-gnu/librdmacm.so.1 librdmacm1
    need /usr/lib/python3/dist-packages/pyverbs python3-pyverbs
    ;;
bench) need iperf3 iperf3 ;;
*) sed -n '2,8s/^# \{0,1\}//p' "$0"; exit 2 ;;
esac

[ ${#missing[@]} -eq 0 ] && exit 0
if ! command -v apt-get >/dev/null || [ "$(id -u)" -ne 0 ]; then
    echo "not installed, and apt or root is not here to do it: ${missing[*]}" >&2
    exit 1
fi
log=$(mktemp)
trap 'rm -f "$log"' EXIT
export DEBIAN_FRONTEND=noninteractive
if ! { apt-get -qq update && apt-get -qq install -y --no-install-recommends "${missing[@]}"; } >"$log" 2>&1; then
    echo "apt cannot install ${missing[*]}: $(grep -m1 '^E:' "$log" || tail -1 "$log")" >&2
    exit 1
fi
