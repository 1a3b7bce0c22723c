# Both targets side by side.
# shellcheck shell=sh

# figures TARGET: one line a job (its name, IOPS, mean latency in us).
figures() {
    TARGET=$1
    login
    for kind in randread randwrite; do
        for depth in 1 32; do
            fio_job "$kind-4k-qd$depth" --filename="$ram" --rw=$kind --bs=4k --iodepth=$depth \
                --time_based --runtime="$2" --ramp_time=1 >/run/figures.log ||
                fail "$1: $kind at depth $depth"
            awk -F';' -v job="$kind-qd$depth" '$1 == 3 {
                if ($8 > 0) print job, $8, $16; else print job, $49, $57
            }' /run/fio.out >>"/run/figures.$1"
        done
    done
    check_credits "$1's load"
    logout
}

# compare ROUNDS SECONDS: usurp and LIO by turns in the same boot, the mean of the rounds. At depth
# 32 IOPS count, at depth 1 the latency. The goal: usurp is not behind. VM_RATIO makes it a condition.
compare() {
    [ "$TARGET" != lio ] || skip "there is nothing to compare LIO with"
    round=1
    while [ "$round" -le "$1" ]; do
        usurp_up
        figures usurp "$2"
        usurp_down
        lio_up || fail "LIO could not be set up"
        figures lio "$2"
        round=$((round + 1))
    done
    awk -v goal="${VM_RATIO:-0}" '
        { file = FILENAME; sub(/.*\./, "", file); n[file, $1]++; iops[file, $1] += $2; us[file, $1] += $3 }
        !($1 in seen) { seen[$1]; order[++jobs] = $1 }
        END {
            printf "  %-16s %10s %10s %7s %12s %12s %7s\n", "4k, in memory", "usurp IOPS", "LIO IOPS", \
                "ratio", "usurp us", "LIO us", "ratio"
            for (j = 1; j <= jobs; j++) {
                job = order[j]
                a = iops["usurp", job] / n["usurp", job]; b = iops["lio", job] / n["lio", job]
                c = us["usurp", job] / n["usurp", job]; d = us["lio", job] / n["lio", job]
                printf "  %-16s %10.0f %10.0f %7.2f %12.0f %12.0f %7.2f\n", job, a, b, a / b, c, d, c / d
                if (job ~ /qd32$/ && a / b < goal) bad = bad " " job
                if (job ~ /qd1$/ && goal > 0 && c / d > 1 / goal) bad = bad " " job
            }
            if (bad) print "  behind the goal:" bad
            exit bad != ""
        }' /run/figures.usurp /run/figures.lio >/run/table
    behind=$?
    cat /run/table
    cp /run/table /out/compare.txt
    [ $behind -eq 0 ] || fail "$(tail -n 1 /run/table)"
}
