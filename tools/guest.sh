#!/usr/bin/env bash
# Run a shell command in a throw-away QEMU guest that has Soft-RoCE NICs (rdma_rxe), so that RDMA code
# meets the kernel's own verbs on a machine without any NIC:
#
#   tools/guest.sh 'python3 /path/to/checks.py'
#
# The guest sees the root file system of this machine, read-only below a tmpfs, so environments and
# sources have their usual paths. Ends with the command's exit status; 98: the guest did not get there.
#
# Environment: GUEST_CACHE (the kernel; default .cache/guest)  GUEST_RAILS (2)  GUEST_LIMIT_S (280)
# GUEST_NODES (NUMA nodes, a processor each and equal memory; 1)
# Installs what is missing (tools/packages.sh guest) and fetches Debian's kernel once (70 MB).
set -euo pipefail
cd "$(dirname "$0")/.."
command=${1:?a command to run in the guest}
cache=${GUEST_CACHE:-.cache/guest}
rails=${GUEST_RAILS:-2}
nodes=${GUEST_NODES:-1}
limit_s=${GUEST_LIMIT_S:-280}
export PATH=$PATH:/usr/sbin:/sbin

[ "$(uname -m)" = x86_64 ] || { echo "the Soft-RoCE guest needs an x86-64 machine" >&2; exit 1; }
tools/packages.sh guest
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# 1. A kernel with rdma_rxe: unpacked, not installed, so no hook of the package runs here.
mkdir -p "$cache"
if [ ! -e "$cache/version" ]; then
    # The cloud flavour has no rdma_rxe.
    package=$(apt-cache depends linux-image-amd64 2>/dev/null |
        sed -n 's/.*Depends: \(linux-image-[0-9][^ ]*\).*/\1/p' | head -1)
    if [ -z "$package" ] && [ "$(id -u)" -eq 0 ]; then
        apt-get -qq update
        package=$(apt-cache depends linux-image-amd64 | sed -n 's/.*Depends: \(linux-image-[0-9][^ ]*\).*/\1/p' | head -1)
    fi
    [ -n "$package" ] || { echo "apt knows no linux-image-amd64, which the Soft-RoCE guest boots" >&2; exit 1; }
    mkdir "$work/deb" && chmod 777 "$work" "$work/deb"
    (cd "$work/deb" && apt-get -qq download "$package") ||
        { echo "apt cannot download $package, which the Soft-RoCE guest boots" >&2; exit 1; }
    dpkg -x "$work"/deb/*.deb "$work/kernel"
    version=$(basename "$work"/kernel/lib/modules/*)
    depmod -b "$work/kernel" "$version"
    rm -rf "$cache/kernel"
    mkdir -p "$cache/kernel/boot"
    mv "$work/kernel/lib" "$cache/kernel/lib"
    mv "$work/kernel/boot/vmlinuz-$version" "$cache/kernel/boot/"
    echo "$version" >"$cache/version"
fi
version=$(cat "$cache/version")

# 2. An initramfs: busybox and the modules that are needed, in order.
root=$work/initramfs
mkdir -p "$root"/{bin,proc,sys,dev,mods,lower,upper,new}
cp "$(command -v busybox)" "$root/bin/busybox"
for module in virtio_pci 9pnet_virtio 9p overlay dummy veth crc32_generic rdma_rxe rdma_ucm; do
    modprobe -d "$cache/kernel" -S "$version" --show-depends "$module" | awk '$1 == "insmod" { print $2 }'
done | awk '!seen[$0]++' | while read -r path; do
    cp "$path" "$root/mods/"
    basename "$path" >>"$root/mods/order"
done
cat >"$root/init" <<'INIT'
#!/bin/busybox sh
/bin/busybox --install -s /bin
mount -t proc proc /proc; mount -t sysfs sysfs /sys; mount -t devtmpfs dev /dev
for module in $(cat /mods/order); do
    case $module in dummy.ko*) options=numdummies=0 ;; *) options= ;; esac
    insmod "/mods/$module" $options || echo "GUEST: $module does not load"
done
mount -t 9p -o trans=virtio,version=9p2000.L,msize=1048576,cache=loose,ro root /lower || echo "GUEST: no root"
mount -t tmpfs -o size=80% tmp /upper; mkdir /upper/files /upper/work
mount -t overlay -o lowerdir=/lower,upperdir=/upper/files,workdir=/upper/work overlay /new || echo "GUEST: no overlay"
mount -t proc proc /new/proc; mount -t sysfs sysfs /new/sys; mount -t devtmpfs dev /new/dev
mkdir -p /new/dev/shm /new/dev/pts
mount -t tmpfs tmp /new/dev/shm; mount -t devpts pts /new/dev/pts; mount -t tmpfs tmp /new/run
cp /setup /new/run/setup
chroot /new /bin/bash /run/setup
echo "GUEST: status $?"
sync; poweroff -f
INIT
chmod +x "$root/init"
{
    cat <<'SETUP'
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
ulimit -l unlimited
ip link set lo up
SETUP
    for rail in $(seq 0 $((rails - 1))); do
        echo "ip link add dummy$rail type dummy"
        echo "ip link set dummy$rail mtu 9000 address 02:00:00:00:00:0$rail up"
        echo "ip addr add 10.77.$rail.1/24 dev dummy$rail"
        echo "rdma link add rxe$rail type rxe netdev dummy$rail || exit 97"
    done
    echo 'echo "GUEST: up after $(cut -d" " -f1 /proc/uptime) s with $(ls /sys/class/infiniband | tr "\n" " ")"'
    printf 'cd %q\n%s\n' "$PWD" "$command"
} >"$root/setup"
(cd "$root" && busybox find . | cpio -o -H newc --quiet | gzip -1) >"$work/initramfs.gz"

# 3. Boot. /dev/kvm may be there and unable to run this kernel: it counts only with vmx or svm.
accel=(-accel tcg,thread=multi -cpu max)
if [ -w /dev/kvm ] && grep -qwE 'vmx|svm' /proc/cpuinfo; then accel=(-accel kvm -cpu host); fi
layout=()
if [ "$nodes" -gt 1 ]; then
    for node in $(seq 0 $((nodes - 1))); do
        layout+=(-object "memory-backend-ram,id=memory$node,size=$((2560 / nodes))M")
        layout+=(-numa "node,nodeid=$node,memdev=memory$node,cpus=$node")
    done
fi
timeout "$limit_s" qemu-system-x86_64 "${accel[@]}" -machine q35 \
    -smp "$((nodes > 1 ? nodes : 2))" -m "$((2560 / nodes * nodes))" "${layout[@]}" \
    -nodefaults -no-user-config -display none -no-reboot -nic none -serial stdio \
    -kernel "$cache/kernel/boot/vmlinuz-$version" -initrd "$work/initramfs.gz" \
    -append "console=ttyS0 quiet panic=-1 mitigations=off random.trust_cpu=on" \
    -fsdev local,id=root,path=/,security_model=none,readonly=on,multidevs=remap \
    -device virtio-9p-pci,fsdev=root,mount_tag=root </dev/null | sed -u 's/\r//g' | tee "$work/console" || true
exit "$(sed -n 's/^GUEST: status \([0-9]*\).*/\1/p' "$work/console" | tail -1 | grep . || echo 98)"
