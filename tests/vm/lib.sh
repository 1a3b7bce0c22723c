# For the scripts beside this one: folders, and what the host must have.
# shellcheck shell=bash
set -euo pipefail
vm=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
top=$(cd "$vm/../.." && pwd)
# Downloads and images; everything in it can be made again.
cache=${VM_CACHE:-$top/build/vm-cache}
# release: the kernel of the host's own Debian release; backports: that of its backports.
kernel=${VM_KERNEL:-release}
# The exit status of a script that cannot do its work on this host and has said why.
readonly UNABLE=77

say() { echo "${0##*/}: $*" >&2; }
nicely() { nice -n 10 "$@"; }

# Ends the script: this host lacks something, and nothing here is wrong.
unable() {
    say "$*"
    mkdir -p "$cache"
    echo "$*" >"$cache/unable"
    exit "$UNABLE"
}

# The packages that the host itself needs to build and boot the guest.
missing_on_host() {
    local command package
    while read -r command package; do
        command -v "$command" >/dev/null || echo "$package"
    done <<'TABLE'
qemu-system-x86_64 qemu-system-x86
cpio cpio
xz xz-utils
zstd zstd
depmod kmod
gcc gcc
make make
dpkg-source dpkg-dev
TABLE
    [ -e /usr/include/libaio.h ] || echo libaio-dev
    [ -e /usr/include/zlib.h ] || echo zlib1g-dev
}

# One image and one download at a time, also when two checkouts share a cache.
lock_cache() {
    mkdir -p "$cache"
    cache=$(cd "$cache" && pwd)
    exec 9>"$cache/lock"
    flock 9
}
