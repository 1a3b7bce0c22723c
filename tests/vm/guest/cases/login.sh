# Logging in and out, and logins that must be refused.
# shellcheck shell=sh

# login_many COUNT: in and out, the disks come each time, one block is read.
login_many() {
    target_up
    round=1
    while [ "$round" -le "$1" ]; do
        add_target "$(address_of)" || fail "login $round failed"
        find_disks || fail "no disks after login $round"
        dd if="$disk" of=/dev/null bs=4k count=1 iflag=direct 2>/run/dd.err ||
            fail "reading after login $round: $(head -n 1 /run/dd.err)"
        logout
        round=$((round + 1))
    done
    say "$1 logins and logouts"
}

# channels [COUNT]: as many as asked for (nothing: the kernel's own choice), and all of them work.
channels() {
    target_up
    login "${1:+ch_count=$1}"
    [ -z "$1" ] || [ "$(cat "/sys/class/scsi_host/$host/ch_count")" -eq "$1" ] ||
        fail "$(cat "/sys/class/scsi_host/$host/ch_count") channels instead of $1"
    fio_job "channels-${1:-default}" --filename="$ram" --rw=randrw --bs=4k --size=2m --iodepth=8 \
        --numjobs=2 --offset_increment=8m --cpus_allowed=0,1 --cpus_allowed_policy=split \
        --group_reporting --verify=crc32c --verify_fatal=1 ||
        fail "fio over ${1:-default} channels"
    check_credits "the load"
}

# address VERSION: over IPv4 or IPv6.
address() {
    case $1 in
        4) DEST=$ADDRESS4 ;;
        6) DEST="[$ADDRESS6]" ;;
    esac
    target_up
    login
    verified_load "$ram" 4k 2m
}

# refused REASON OPTIONS: the kernel's log must have this reason.
refused() {
    allow_log 'SRP.LOGIN.*REJ|REJ received|connection .*failed|Connection .*failed'
    if add_target "$2"; then fail "the target took a login that it must refuse"; fi
    dmesg | grep srp | sed 's/^/  /'
    # ib_srp has words of its own for this one.
    [ "$1" != 0x00010002 ] || dmesg | grep -q "requested max_it_iu_len too large" ||
        fail "the kernel's log has no reject for an IU length that is too large"
    [ "$1" = 0x00010002 ] || dmesg | grep -q "REJECTED, reason $1" ||
        fail "the kernel's log has no reject with reason $1"
    # And the target goes on.
    [ -z "$3" ] || return 0
    modprobe -r ib_srp
    login
}

refuse_target_id() {
    target_up
    refused 0x00010003 "$(address_of | sed 's/id_ext=\(.*\),ioc/id_ext=1111222233334444,ioc/')"
}

# Only one initiator has a rule, and it is another.
refuse_initiator() {
    [ "$TARGET" != lio ] || skip "LIO goes by the target's own address over RDMA/CM"
    target_up '{ initiator: "0x11112222333344445555666677778888", luns: { 0: ram0, 1: disk0 } }'
    refused 0x00010003 "$(address_of)" only
}

# An initiator whose immediate data would need longer IUs than the target takes.
refuse_iu_length() {
    target_up
    srp_load max_imm_data=65536
    refused 0x00010002 "$(address_of)"
}

# One that caps its IUs below what the target takes.
short_ius() {
    target_up
    login max_it_iu_size=512
    mixed_sizes "$ram" 8m
}
