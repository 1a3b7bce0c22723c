# What goes wrong under load: resets, a target that dies, a link that goes down.
# shellcheck shell=sh

# What ib_srp and sd say on the way through a reset or a reconnect.
recovery_log='ib_srp: |reconnect attempt|REJ reason'

# resets KIND COUNT SECONDS: sg_reset (device, target, bus, host) again and again below a load. A reset of the
# LU aborts commands, and sg_reset's caller tells nobody: they come again after sd's timeout (30 s; here 8).
resets() {
    allow_log "$recovery_log"
    target_up
    login
    echo 8 >"/sys/block/${disk#/dev/}/device/timeout"
    background_load "$disk" "$3"
    sleep 1
    number=0
    while [ $number -lt "$2" ]; do
        sg_reset "--$1" "$disk" || fail "sg_reset --$1, time $number"
        number=$((number + 1))
        sleep 0.5
    done
    say "$number resets ($1)"
    background_done
    check_credits "the resets"
    [ "$(state)" = running ] || fail "the remote port is $(state)"
}

# The target dies below a load and comes back; what it had acknowledged is on the disk.
kill_restart() {
    [ "$TARGET" != lio ] || skip "the kernel's target cannot be killed"
    allow_log "$recovery_log"
    target_up
    srp_load reconnect_delay=1 fast_io_fail_tmo=30 dev_loss_tmo=60
    login
    background_load "$disk" 24
    for round in 1 2; do
        sleep 3
        usurp_kill
        wait_for 10 state_is blocked || fail "10 s after SIGKILL the remote port is $(state)"
        say "killed: $(state) at $(now)"
        sleep 1
        target_up
        wait_for 25 state_is running || fail "25 s after the restart the remote port is $(state)"
        say "restarted, time $round: $(state) at $(now)"
    done
    background_done
    check_credits "the restarts"
}

# An orderly stop and start below a load.
stop_restart() {
    [ "$TARGET" != lio ] || skip "the kernel's target is not stopped as a process is"
    allow_log "$recovery_log"
    target_up
    srp_load reconnect_delay=1 fast_io_fail_tmo=30 dev_loss_tmo=60
    login
    background_load "$disk" 14
    sleep 3
    target_down
    sleep 1
    target_up
    wait_for 25 state_is running || fail "25 s after the restart the remote port is $(state)"
    background_done
    check_credits "the restart"
}

# cable WAY SECONDS LOAD: the target's cable is out for so long below a load of LOAD seconds. WAY: down, its
# port loses the carrier; silent, both sides keep theirs, but nothing arrives. The connections break
# after two retries of 4 s; with 7, the default, rxe would retry for ever.
cable() {
    allow_log "$recovery_log"
    target_up
    srp_load reconnect_delay=1 fast_io_fail_tmo=120 dev_loss_tmo=240
    login tl_retry_count=2
    # Where the initiator's QPs do not notice, its error recovery does after 30 s, with an abort of 5 s for
    # each command. By then the cable must be back: it would set the disk offline.
    DEPTH=2
    background_load "$disk" "$3"
    sleep 3
    case $1 in
        down) ip link set port1 down ;;
        silent)
            tc qdisc add dev port1 root netem loss 100%
            tc qdisc add dev wire1 root netem loss 100%
            ;;
    esac
    say "out at $(now)"
    sleep "$2"
    say "still out at $(now): $(state)"
    network_repair
    say "back at $(now): $(state)"
    wait_for 60 state_is running || fail "60 s after the cable is back the remote port is $(state)"
    background_done
    say "the load ended at $(now): $(state)"
    check_credits "the absence of the link"
}
