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
                fail "$1: $kind at depth $depth: $(head -n 1 /run/figures.log)"
            say "$1$(cut -c 6- /run/figures.log)"
            awk -F';' -v job="$kind-qd$depth" '$1 == 3 {
                if ($8 > 0) print job, $8, $16; else print job, $49, $57
            }' /run/fio.out >>"/run/figures.$1"
        done
    done
    check_credits "$1's load"
    logout
}

# compare ROUNDS SECONDS: usurp and LIO by turns in the same boot, the median of an odd number of rounds.
# At depth 32 IOPS count, at depth 1 the latency. The goal: usurp is not behind; VM_RATIO makes it a
# condition.
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
        function median(values, name, job, count, i, j, t, list) {
            count = split(values[name, job], list, " ")
            for (i = 1; i <= count; i++)
                for (j = i + 1; j <= count; j++)
                    if (list[j] + 0 < list[i] + 0) { t = list[i]; list[i] = list[j]; list[j] = t }
            return list[int((count + 1) / 2)]
        }
        { name = FILENAME; sub(/.*\./, "", name) }
        { iops[name, $1] = iops[name, $1] " " $2; us[name, $1] = us[name, $1] " " $3 }
        !($1 in seen) { seen[$1]; order[++jobs] = $1 }
        END {
            format = "  %-16s %10s %10s %7s %10s %10s %7s\n"
            printf format, "4k, in memory", "usurp IOPS", "LIO IOPS", "ratio", "usurp us", "LIO us", "ratio"
            for (i = 1; i <= jobs; i++) {
                job = order[i]
                a = median(iops, "usurp", job); b = median(iops, "lio", job)
                c = median(us, "usurp", job); d = median(us, "lio", job)
                printf format, job, int(a), int(b), sprintf("%.2f", a / b), int(c), int(d), \
                    sprintf("%.2f", c / d)
                if (job ~ /qd32$/ && a / b < goal) behind = behind " " job
                if (job ~ /qd1$/ && goal > 0 && c / d > 1 / goal) behind = behind " " job
            }
            if (behind) print "  behind the goal:" behind
            exit behind != ""
        }' /run/figures.usurp /run/figures.lio >/run/table
    behind=$?
    cat /run/table
    cp /run/table /out/compare.txt
    [ $behind -eq 0 ] || fail "$(tail -n 1 /run/table)"
}
