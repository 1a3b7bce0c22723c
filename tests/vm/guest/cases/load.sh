# Loads on both bdevs with every block verified, and ib_srp's ways to describe memory.
# shellcheck shell=sh

# load BDEV BLOCK_SIZE SIZE: random writes, reads and both mixed; BDEV is ram or disk.
load() {
    target_up
    login max_sect=2048
    if [ "$1" = ram ]; then on=$ram; else on=$disk; fi
    cat "/sys/block/${on#/dev/}/queue/max_hw_sectors_kb" >"/sys/block/${on#/dev/}/queue/max_sectors_kb"
    verified_load "$on" "$2" "$3"
}

# descriptors OPTIONS PARAMETER...: ib_srp with these module parameters and a login with these options
# (- for none).
descriptors() {
    options=$1
    shift
    target_up
    srp_load "$@"
    login "${options#-}"
    mixed_sizes "$ram" 16m
    mixed_sizes "$disk" 8m
}

# More descriptors than fit into an IU: the target fetches the table itself by RDMA READ.
external_table() {
    [ "$TARGET" != lio ] || skip "LIO refuses descriptor tables that are not in the IU"
    descriptors "allow_ext_sg=1,cmd_sg_entries=2,sg_tablesize=128,max_sect=1024" \
        never_register=1 indirect_sg_entries=128 use_imm_data=0
}

# filesystem BDEV: ext4 with real files, unmounted, checked, mounted, the same bytes.
filesystem() {
    modprobe ext4
    target_up
    login
    if [ "$1" = ram ]; then on=$ram; else on=$disk; fi
    mke2fs -q -t ext4 -F "$on" || fail "mke2fs"
    mount -t ext4 "$on" /mnt || fail "mount"
    for copy in 1 2 3; do
        mkdir "/mnt/$copy"
        cp -L /bin/fio /bin/e2fsck /bin/ip /bin/strace /lib/x86_64-linux-gnu/libc.so.6 "/mnt/$copy/"
    done
    number=0
    while [ $number -lt 200 ]; do
        echo "file $number" >"/mnt/small-$number"
        number=$((number + 1))
    done
    rm -r /mnt/2 /mnt/small-1*
    (cd /mnt && find . -type f -exec sha256sum {} + | sort -k 2) >/run/sums
    umount /mnt || fail "umount"
    e2fsck -fn "$on" || fail "e2fsck found mistakes"
    # A second initiator session sees what the first has left.
    logout
    login
    if [ "$1" = ram ]; then on=$ram; else on=$disk; fi
    mount -t ext4 -o ro "$on" /mnt || fail "mount after another login"
    (cd /mnt && sha256sum -c /run/sums >/run/checked 2>&1) || fail "$(grep -v OK /run/checked | head -n 1)"
    umount /mnt
    say "$(wc -l </run/sums) files are as they were"
    check_credits "the files"
}
