# For the cases (in the guest): results, the RDMA device, the target under test, ib_srp, loads.
# shellcheck shell=sh

# The target port identifier of usurp, and its address. LIO's are in /run/lio.
ID_EXT=0002c903000e8acd
IOC_GUID=0002c903000e8acc
PORT=5555
# LIO listens on another port, so that both targets can be there at once.
LIO_PORT=5556
# How initiator and target are connected: rxe (RoCE) and siw (iWARP) are one device for both, on a dummy
# interface; wire is a device for each, rxe0 and rxe1, with a switch between them.
NETWORK=${NETWORK:-rxe}
case $NETWORK in
    wire) DEVICE=rxe0 TARGET_DEVICE=rxe1 ADDRESS4=192.0.2.2 ;;
    *) DEVICE=${NETWORK}0 TARGET_DEVICE=${NETWORK}0 ADDRESS4=192.0.2.1 ;;
esac
ADDRESS6=2001:db8::1
LISTEN="[::]:$PORT"
# A listener of siw for any address takes only what arrives by the device, and what this guest sends to
# itself arrives by lo.
[ "$NETWORK" != siw ] || LISTEN=$ADDRESS4:$PORT
RPORTS=/sys/class/srp_remote_ports

# ---- results ----------------------------------------------------------------

say() { echo "  $*"; }
now() { cut -d' ' -f1 /proc/uptime; }

# The case did not hold.
fail() {
    echo "  FAILED: $*"
    echo "$*" >/run/reason
    exit 1
}

# The case cannot be judged here.
skip() {
    echo "  skipped: $*"
    echo "$*" >/run/reason
    exit 77
}

# Lines of the kernel's log that this case brings about on purpose (an extended regular expression).
allow_log() { echo "$1" >>/run/allow; }

# wait_for SECONDS COMMAND...: until the command succeeds.
wait_for() {
    tries=$(($1 * 10))
    shift
    while ! "$@" >/dev/null 2>&1; do
        tries=$((tries - 1))
        [ "$tries" -gt 0 ] || return 1
        usleep 100000
    done
}

# ---- the RDMA devices -------------------------------------------------------

# On `lo`, rdma_listen finds no device; hence the dummy interface.
network_dummy() {
    modprobe dummy numdummies=0
    ip link add dummy0 type dummy || return 1
    # The IPv6 address would go with the link otherwise.
    echo 1 >/proc/sys/net/ipv6/conf/dummy0/keep_addr_on_down
    ip link set dummy0 mtu 4500
    ip addr add "$ADDRESS4/24" dev dummy0
    ip addr add "$ADDRESS6/64" dev dummy0 nodad
    ip link set dummy0 up
    rdma link add "$DEVICE" type "$NETWORK" netdev dummy0
}

# wire0 (192.0.2.1, the initiator's) - port0 - switch - port1 - wire1 (192.0.2.2, the target's). Both ends
# are addresses of this guest, which the kernel would connect without the wire: so what is made
# here (iif lo) goes by tables that know only the wire, and `local` is asked for what arrives.
network_wire() {
    modprobe -a veth bridge sch_netem
    ip link add switch type bridge || return 1
    ip link set switch up
    ip rule add pref 32000 lookup local
    for end in 0 1; do
        ip link add wire$end mtu 4500 type veth peer name port$end mtu 4500 || return 1
        ip link set port$end master switch up
        ip addr add 192.0.2.$((end + 1))/24 dev wire$end
        ip link set wire$end up
        echo 1 >/proc/sys/net/ipv4/conf/wire$end/accept_local
        echo 0 >/proc/sys/net/ipv4/conf/wire$end/rp_filter
        ip rule add pref $((1 + end)) iif wire$end lookup local
        ip rule add pref $((10 + end)) oif wire$end lookup $((100 + end))
        ip rule add pref $((20 + end)) to 192.0.2.$((2 - end)) iif lo lookup $((100 + end))
        ip route add 192.0.2.0/24 dev wire$end src 192.0.2.$((end + 1)) table $((100 + end))
    done
    ip rule del pref 0
    echo 0 >/proc/sys/net/ipv4/conf/all/rp_filter
    echo 1 >/proc/sys/net/ipv4/conf/all/arp_ignore
    echo 2 >/proc/sys/net/ipv4/conf/all/arp_announce
    wait_for 10 ping -c 1 -W 1 192.0.2.2 || return 1
    for end in 0 1; do rdma link add rxe$end type rxe netdev wire$end || return 1; done
}

network_up() {
    modprobe ipv6 2>/dev/null
    modprobe -a ib_uverbs rdma_cm rdma_ucm ib_umad sd_mod sg crc32_generic libcrc32c crc32c_generic
    case $NETWORK in
        rxe) modprobe rdma_rxe && network_dummy ;;
        siw) insmod /job/siw.ko && network_dummy ;;
        wire) modprobe rdma_rxe && network_wire ;;
    esac || return 1
    wait_for 5 grep -q ACTIVE "/sys/class/infiniband/$DEVICE/ports/1/state"
}

# network_repair: as it was, whatever the case before has pulled.
network_repair() {
    [ "$NETWORK" = wire ] || return 0
    for end in 0 1; do
        tc qdisc del dev port$end root
        tc qdisc del dev wire$end root
        ip link set port$end up
    done 2>/dev/null
    wait_for 10 ping -c 1 -W 1 192.0.2.2
}

# ---- the target under test --------------------------------------------------
# TARGET is usurp or lio. Both serve LUN 0, 64 MiB in memory, and LUN 1, a virtio disk: /dev/vda and
# /dev/vdb, as each wants its disk for itself.

# usurp_config [HOST]: prints the YAML file. HOST: the entry of `hosts`.
usurp_config() {
    anybody='{ initiator: any, luns: { 0: ram0, 1: disk0 } }'
    cat <<YAML
reactors: { cores: ${REACTOR_CORES:-auto}, idle: ${IDLE:-adaptive} }
memory: { hugepages: never }
bdevs:
  - { name: ram0, malloc: { size: 64MiB, hugepages: never } }
  - { name: disk0, uring: { path: /dev/vda } }
target:
  id_ext: "0x$ID_EXT"
  ioc_guid: "0x$IOC_GUID"
  listen: [ { rdma_cm: "$LISTEN" } ]
  hosts:
    - ${1:-$anybody}
YAML
}

usurp_up() {
    usurp_config "$@" >/run/usurp.yaml
    rm -f /run/ready /run/target.pid /run/target.exit
    # In a session of its own: the target outlives the case that started it, and what is its exit
    # code is known to whoever asks.
    # shellcheck disable=SC2016 # the inner shell's variables
    setsid /bin/sh -c './usurp run --ready-file /run/ready /run/usurp.yaml &
        echo $! >/run/target.pid
        wait $!
        echo $? >/run/target.exit' >>/run/target.log 2>&1 &
    wait_for 20 grep -q ready /run/ready ||
        fail "usurp was not ready after 20 s: $(tail -n 3 /run/target.log)"
}

# usurp_kill: as a crash would.
usurp_kill() {
    kill -KILL "$(cat /run/target.pid)"
    wait_for 10 test -s /run/target.exit || fail "usurp is still there 10 s after SIGKILL"
    rm /run/target.pid
}

# usurp_down: it must end when told to, with exit code 0: then all its pools were whole.
usurp_down() {
    [ -s /run/target.pid ] || return 0
    pid=$(cat /run/target.pid)
    rm /run/target.pid
    if [ -s /run/target.exit ]; then
        fail "usurp ended by itself, exit code $(cat /run/target.exit): $(tail -n 3 /run/target.log)"
    fi
    kill -TERM "$pid"
    if ! wait_for 15 test -s /run/target.exit; then
        kill -KILL "$pid"
        fail "usurp had not ended 15 s after SIGTERM: $(tail -n 3 /run/target.log)"
    fi
    [ "$(cat /run/target.exit)" -eq 0 ] || fail "after SIGTERM usurp ended with exit code" \
        "$(cat /run/target.exit): $(tail -n 3 /run/target.log)"
}

# The kernel's own target, once a boot. It cannot be restarted as a process can.
lio_up() {
    [ ! -s /run/lio ] || return 0
    modprobe -a target_core_mod target_core_iblock ib_srpt || return 1
    grep -q configfs /proc/mounts || mount -t configfs configfs /sys/kernel/config
    core=/sys/kernel/config/target/core srpt=/sys/kernel/config/target/srpt
    mkdir -p /var/target/pr "$core/rd_mcp_0/ram0" "$core/iblock_0/disk0" $srpt
    echo rd_pages=16384 >"$core/rd_mcp_0/ram0/control"
    echo udev_path=/dev/vdb,readonly=0 >"$core/iblock_0/disk0/control"
    # The port belongs to the fabric as a whole. With an IP address as the ACL's name, the target
    # is named after the GUID; the address is the target's own (a quirk of ib_srpt).
    echo $LIO_PORT >$srpt/discovery_auth/rdma_cm_port || return 1
    name=$(cut -d: -f5- <"/sys/class/infiniband/$TARGET_DEVICE/ports/1/gids/0")
    group=$srpt/$name/$name
    mkdir -p "$group" || return 1
    number=0
    for lun in rd_mcp_0/ram0 iblock_0/disk0; do
        echo 1 >"$core/$lun/enable" || return 1
        mkdir -p "$group/lun/lun_$number"
        ln -s "$core/$lun" "$group/lun/lun_$number/"
        for acl in $ADDRESS4 $ADDRESS6; do
            mkdir -p "$group/acls/$acl/lun_$number" || return 1
            ln -s "$group/lun/lun_$number" "$group/acls/$acl/lun_$number/"
        done
        number=$((number + 1))
    done
    echo 1 >"$group/enable" || return 1
    sed 's/^0x//' /sys/module/ib_srpt/parameters/srpt_service_guid >/run/lio
}

# target_up [HOSTS]: the target under test serves.
target_up() {
    case $TARGET in
        usurp) usurp_up "$@" ;;
        lio) lio_up || fail "LIO could not be set up" ;;
    esac
}

target_down() { usurp_down; }

# ---- the initiator ----------------------------------------------------------

# srp_load [PARAMETERS]: ib_srp with these parameters.
srp_load() {
    # shellcheck disable=SC2086 # one word for each
    modprobe ib_srp "$@" || fail "ib_srp does not load with: $*"
    wait_for 5 test -e "/sys/class/infiniband_srp/srp-$DEVICE-1/add_target" ||
        fail "ib_srp found no $DEVICE"
}

# add_target OPTIONS: one login; the exit status says whether the kernel took it.
add_target() {
    folder=/sys/class/infiniband_srp/srp-$DEVICE-1
    [ -e "$folder/add_target" ] || srp_load
    tries=50
    # dash's echo: busybox's writes again after an error, and so logs in again.
    while ! echo "$1" >"$folder/add_target"; do
        # The host of the last login is gone from sysfs a moment before ib_srp has forgotten it.
        dmesg | tail -n 5 | grep -q 'Already connected' || return 1
        tries=$((tries - 1))
        [ $tries -gt 0 ] || return 1
        usleep 100000
    done 2>/dev/null
}

# Where the target under test is: the beginning of add_target's options.
address_of() {
    case ${1:-$TARGET} in
        usurp) echo "id_ext=$ID_EXT,ioc_guid=$IOC_GUID,dest=${DEST:-$ADDRESS4}:$PORT" ;;
        lio) echo "id_ext=$(cat /run/lio),ioc_guid=$(cat /run/lio),dest=${DEST:-$ADDRESS4}:$LIO_PORT" ;;
    esac
}

# login [OPTIONS]: logs in and waits for both disks. Sets host (hostN), ram and disk (their block
# devices) and credits (req_lim when nothing is outstanding).
login() {
    add_target "$(address_of)${1:+,$1}" || fail "the login failed (options: ${1:-none})"
    find_disks || fail "logged in, but the disks did not come"
    settle
    credits=$(req_lim)
    say "$host: $(cat "/sys/class/scsi_host/$host/ch_count") channel(s), req_lim $credits," \
        "$ram and $disk"
}

# The newest host of ib_srp, and the disks that it brought.
find_disks() {
    host=''
    for path in /sys/class/scsi_host/host*; do
        [ ! -e "$path/ioc_guid" ] || host=${path##*/}
    done
    [ -n "$host" ] && wait_for 15 disks_there
}

disks_there() {
    ram='' disk=''
    for path in /sys/class/scsi_host/"$host"/device/target*/*:*/block/*; do
        case $path in
            *:0/block/*) ram=/dev/${path##*/} ;;
            *:1/block/*) disk=/dev/${path##*/} ;;
        esac
    done
    # A disk is in sysfs a moment before it can be opened.
    dd if="$ram" of=/dev/null count=0 && dd if="$disk" of=/dev/null count=0
}

req_lim() { cat "/sys/class/scsi_host/$host/req_lim"; }

# Until no command is outstanding: req_lim was the same for half a second.
settle() {
    same=0 last='' tries=100
    while [ "$same" -lt 5 ] && [ "$tries" -gt 0 ]; do
        usleep 100000
        value=$(req_lim)
        if [ "$value" = "$last" ]; then same=$((same + 1)); else same=0; fi
        last=$value tries=$((tries - 1))
    done
}

credits_are_back() { [ "$(req_lim)" = "$credits" ]; }

# After each load: every credit that the load took has come back.
check_credits() {
    wait_for 10 credits_are_back ||
        fail "req_lim is $(req_lim) after $1; it was $credits after the login"
}

# The host goes from sysfs first, the disconnect comes later: ib_srp is done when its QPs are gone.
no_hosts() {
    ! ls $RPORTS/port-* >/dev/null 2>&1 && ! { rdma resource show qp && rdma resource show cm_id; } |
        grep -qw ib_srp
}

logout() {
    for path in "$RPORTS"/port-*; do
        [ ! -e "$path/delete" ] || echo 1 >"$path/delete"
    done
    wait_for 30 no_hosts || fail "30 s after the logout the host is still there"
}

# state_is STATE: of every remote port (running, blocked, fail-fast, lost).
state() { cat $RPORTS/port-*/state 2>/dev/null || echo gone; }
state_is() { [ "$(state | sort -u)" = "$1" ]; }

# ---- loads ------------------------------------------------------------------

# fio NAME ARGUMENTS...: one job; its figures in one line, its errors are the case's.
fio_job() {
    job=$1
    shift
    fio --name="$job" --direct=1 --ioengine=libaio --iomem=malloc --output-format=terse \
        --terse-version=3 --output=/run/fio.out "$@" >/run/fio.err 2>&1
    code=$?
    # The jobs of one run have regions of their own.
    grep -h -v -e '^3;' -e 'multiple writers may overwrite' /run/fio.err /run/fio.out
    awk -F';' -v job="$job" '$1 == 3 {
        printf "  fio %s:", job
        if ($8 > 0) printf " read %d IOPS, %.1f MiB/s, %.0f us;", $8, $7 / 1024, $16
        if ($49 > 0) printf " write %d IOPS, %.1f MiB/s, %.0f us;", $49, $48 / 1024, $57
        print ""
    }' /run/fio.out
    return $code
}

# verified_load DEVICE BLOCK_SIZE SIZE: random writes, then reads of the same, then both mixed; every
# block carries a crc32c that is checked when it is read.
verified_load() {
    common="--filename=$1 --bs=$2 --size=$3 --iodepth=16 --verify=crc32c --verify_fatal=1"
    # shellcheck disable=SC2086 # one word for each
    {
        fio_job "write-$2" $common --rw=randwrite --do_verify=0 &&
            fio_job "read-$2" $common --rw=randread &&
            fio_job "mixed-$2" $common --rw=randrw --do_verify=1
    } || fail "fio with blocks of $2 on $1"
    check_credits "the load with blocks of $2 on $1"
}

# mixed_sizes DEVICE: random writes of 512 bytes to 1 MiB, read back and checked. fio's buffers are
# pages from all over, so that a long command has many segments.
mixed_sizes() {
    cat "/sys/block/${1#/dev/}/queue/max_hw_sectors_kb" >"/sys/block/${1#/dev/}/queue/max_sectors_kb"
    fio_job mixed-sizes --filename="$1" --rw=randwrite --bsrange=512-1m --blockalign=512 \
        --size="${2:-24m}" --iodepth=8 --verify=crc32c --verify_fatal=1 --do_verify=1 ||
        fail "fio with blocks of all sizes on $1"
    check_credits "the load with blocks of all sizes on $1"
}

# background_load DEVICE SECONDS [SIZE]: the load that goes on while something else happens.
background_load() {
    fio --name=background --filename="$1" --direct=1 --ioengine=libaio --rw=randrw --bs=4k \
        --size="${3:-48m}" --iodepth="${DEPTH:-16}" --verify=crc32c --verify_fatal=1 --verify_backlog=128 \
        --time_based --runtime="$2" --output=/run/background.out >/run/background.err 2>&1 &
    background=$!
}

# It must have ended without an error and without a wrong byte.
background_done() {
    wait "$background"
    code=$?
    cat /run/background.err
    grep -E '^ +(read|write):|err=|verify' /run/background.out
    [ "$code" -eq 0 ] || fail "fio ended with exit code $code: $(grep -m 1 -E 'verify|error' \
        /run/background.err /run/background.out)"
}
