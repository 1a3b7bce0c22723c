# For the scripts beside this one: folders, and what the host must have.
# shellcheck shell=bash
set -euo pipefail
vm=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
top=$(cd "$vm/../.." && pwd)
# Downloads and images; everything in it can be made again.
cache=${VM_CACHE:-$top/build/vm-cache}
# shellcheck disable=SC2034 # for the scripts that read this one
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

# The image that build-image has made: image, its kernel_dir.
use_image() {
    cache=$(cd "$cache" && pwd)
    image=$(echo "$cache"/image-*-"$kernel".cpio)
    kernel_dir=${image##*/image-}
    kernel_dir=$(readlink -f "$cache/kernel-${kernel_dir%.cpio}")
}

# apt-get with lists of its own: the release, its backports and its source packages, from the archive
# that the host uses. `foreign` also ignores what is installed here.
own_apt() {
    local release=$1
    local apt=$cache/apt-$release deb822=/etc/apt/sources.list.d/debian.sources
    mkdir -p "$apt"/{lists/partial,archives/partial,parts}
    if [ -r "$deb822" ]; then
        # Its stanzas (the release, its updates), then the first one again as the backports.
        {
            sed 's/^Types:.*/Types: deb deb-src/' "$deb822"
            echo
            awk -v RS= 'NR == 1' "$deb822" |
                sed -e 's/^Types:.*/Types: deb/' -e "s/^Suites:.*/Suites: $release-backports/"
        } >"$apt/parts/guest.sources"
    elif grep -qs '^deb ' /etc/apt/sources.list; then
        {
            sed -n "/^deb /{p;s/^deb /deb-src /p}" /etc/apt/sources.list
            sed -n "s/^deb \\(.*\\) $release \\(.*\\)/deb \\1 $release-backports \\2/p" /etc/apt/sources.list
        } >"$apt/parts/guest.list"
    else
        unable "neither debian.sources nor sources.list in /etc/apt names Debian's archive"
    fi
    : >"$apt/status"
    own_lists=(
        -o Dir::Etc::sourcelist=/dev/null -o "Dir::Etc::sourceparts=$apt/parts"
        -o "Dir::State::lists=$apt/lists" -o Dir::Cache::pkgcache= -o Dir::Cache::srcpkgcache=
        -o APT::Sandbox::User=root -q
    )
    foreign=("${own_lists[@]}" -o "Dir::Cache::archives=$apt/archives"
        -o "Dir::State::status=$apt/status")
    if [ ! -e "$apt/updated" ] || [ -n "$(find "$apt/updated" -mtime +1)" ]; then
        say "apt-get update, with lists of its own"
        nicely apt-get "${foreign[@]}" update >"$apt/update.log" 2>&1 ||
            unable "apt-get update failed: $(tail -n 1 "$apt/update.log")"
        touch "$apt/updated"
    fi
}
