# For the scripts beside this one: where the checkout is, cargo, and what the system lacks.
# shellcheck shell=bash
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
command -v cargo >/dev/null || export PATH="$HOME/.cargo/bin:$PATH"

# Whether any of the patterns matches a file.
any() {
    local pattern
    for pattern; do
        if compgen -G "$pattern" >/dev/null; then return 0; fi
    done
    return 1
}

# The packages without which there is no build at all.
missing_for_build() {
    command -v gcc >/dev/null || echo gcc
    command -v make >/dev/null || echo make
}

# The packages without which the feature `verbs` cannot be built: the crate ibverbs runs
# rdma-core's cmake (which looks for libnl by pkg-config), then bindgen (which loads libclang).
missing_for_verbs() {
    command -v cmake >/dev/null || echo cmake
    command -v pkg-config >/dev/null || echo pkg-config
    any '/usr/include/infiniband/verbs.h' || echo libibverbs-dev
    any '/usr/include/rdma/rdma_cma.h' || echo librdmacm-dev
    any '/usr/include/libnl3/netlink/route/link.h' || echo libnl-route-3-dev
    if [ -z "${LIBCLANG_PATH:-}" ]; then
        { any '/usr/lib/llvm-*/lib/libclang.so*' '/usr/lib/*/libclang-[0-9]*.so*' \
            '/usr/lib64/libclang.so*' '/usr/lib/libclang.so*' &&
            any '/usr/lib/llvm-*/lib/clang/*/include/stddef.h' \
                '/usr/lib*/clang/*/include/stddef.h'; } || echo libclang-dev
    fi
}

# cargo's flags for this machine. USURP_VERBS=yes or =no decides by hand.
feature_flags() {
    case "${USURP_VERBS:-auto}" in
        yes) ;;
        no) echo --no-default-features ;;
        *) if [ -n "$(missing_for_verbs)" ]; then echo --no-default-features; fi ;;
    esac
}
