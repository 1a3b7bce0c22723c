//! The report for people: Markdown, so that it can stand in docs/performance.md as it is, with its
//! columns aligned, so that it can be read on a terminal too.

use std::collections::BTreeSet;
use std::fmt::Write as _;

use super::format::{figure, rate, rate_spread, spread};
use super::jobs::{CREDITS, MALLOC_MIB};
use super::probe::{Filing, Placement};
use super::record::{BARE, BENCH, Record, Start};
use super::reference;
use super::rows::{Beside, Row};
use super::stats::Spread;

/// The whole report.
pub fn report(record: &Record) -> String {
    let parts = [head(record), path(record), starts(record), limits(record)];
    parts.join("\n")
}

fn head(record: &Record) -> String {
    let (machine, settings) = (&record.machine, &record.settings);
    let quick = if settings.quick { " (--quick: not to be quoted)" } else { "" };
    let commit = machine.commit.as_deref().unwrap_or("unknown");
    let mut text = format!(
        "{}.\nCommit {commit}; {} rounds of {} s{quick}; target on core {}, initiator on core {}; \
         {} huge pages free; {:.0} s in all.\n",
        machine.line(),
        settings.rounds,
        settings.seconds,
        settings.target_core,
        settings.initiator_core,
        machine.huge_pages_free,
        record.elapsed_s,
    );
    if !machine.is_reference() {
        let (peer, theirs) = (reference::PEER, reference::MACHINE);
        let _ = writeln!(
            text,
            "**Not the machine of {peer}'s figures** ({theirs}): the ratios below compare CPUs too."
        );
    }
    let disturbed = record.disturbed();
    if disturbed * 2 > record.runs.len() {
        let _ = writeln!(
            text,
            "**Not a quiet machine**: {disturbed} of {} runs were disturbed; not to be quoted.",
            record.runs.len()
        );
    }
    for warning in &record.target_warnings {
        let _ = writeln!(text, "The target said: {warning}");
    }
    text
}

/// Whole path: the rows, and what is to be known about them.
fn path(record: &Record) -> String {
    let is_busy_known = record.rows.iter().all(|row| row.target_busy_ns_per_cmd.is_some());
    let cpu = if is_busy_known { "target busy ns/cmd" } else { "target CPU ns/cmd" };
    let peer = reference::PEER;
    let heads = ["job", "cores", "runs", "IOPS", "p50 us", "p99 us", cpu, peer, "ratio"];
    let mut notes: Vec<&str> = Vec::new();
    let lines = record.rows.iter().map(|row| cells(row, &mut notes)).collect::<Vec<_>>();
    let mut text = aligned(&heads.map(String::from), &lines);
    text.push('\n');
    let _ = writeln!(
        text,
        "Median (least-most) of the runs that count; runs: counted/filed, `!` when even those were \
         disturbed. One channel, {CREDITS} credits; malloc has {MALLOC_MIB} MiB."
    );
    if !is_busy_known {
        let _ = writeln!(
            text,
            "Target CPU: time of its reactor thread by commands. It spins, so this is all the time \
             of its core, waiting included; at depth 1 most of it is waiting."
        );
    }
    for (at, note) in notes.iter().enumerate() {
        let _ = writeln!(text, "[{}] {note}.", at + 1);
    }
    for job in jobs_without_row(record) {
        let _ = writeln!(text, "No run of {job} counts.");
    }
    let left_out = |filing, why| match record.count(filing) {
        0 => String::new(),
        count => format!("Left out: {count} of {} runs, {why}.\n", record.runs.len()),
    };
    text += &left_out(Filing::Flipped, "the cores changed places meanwhile");
    text += &left_out(Filing::Unknown, "the cores could not be probed");
    let disturbed = record.disturbed();
    if disturbed > 0 {
        let _ = writeln!(text, "Disturbed: {disturbed} of {} runs.", record.runs.len());
    }
    text
}

/// Jobs of which every run was left out.
fn jobs_without_row(record: &Record) -> BTreeSet<&str> {
    let has_row = |job: &&str| record.rows.iter().any(|row| row.job == *job);
    record.runs.iter().map(|run| run.job.as_str()).filter(|job| !has_row(job)).collect()
}

fn cells<'a>(row: &'a Row, notes: &mut Vec<&'a str>) -> Vec<String> {
    let mark = if row.is_disturbed { " !" } else { "" };
    let p50_beside = row.reference.as_ref().and_then(|r| r.p50_us);
    let peer = match &row.reference {
        None => String::new(),
        Some(beside) => {
            let p50 = p50_beside.map_or(String::new(), |p50| format!(", p50 {}", figure(p50)));
            format!("{}{p50}{}", rate(beside.iops), note_mark(beside, notes))
        }
    };
    vec![
        row.title.clone(),
        row.placement.word().to_string(),
        format!("{}/{}{mark}", row.counted, row.filed),
        rate_spread(&row.iops),
        spread(&row.p50_us),
        spread(&row.p99_us),
        spread(&row.target_busy_ns_per_cmd.unwrap_or(row.target_ns_per_cmd)),
        peer,
        row.reference.as_ref().map_or(String::new(), |beside| format!("{:.2}", beside.ratio)),
    ]
}

/// ` [n]`, the note's number; the same note keeps its number.
fn note_mark<'a>(beside: &Beside, notes: &mut Vec<&'a str>) -> String
where
    'static: 'a,
{
    let Some(note) = beside.note else { return String::new() };
    let at = notes.iter().position(|known| *known == note).unwrap_or_else(|| {
        notes.push(note);
        notes.len() - 1
    });
    format!(" [{}]", at + 1)
}

/// Time to start, and memory.
fn starts(record: &Record) -> String {
    let of = |kind: &str, value: fn(&Start) -> Option<f64>| {
        let starts = record.starts.iter().filter(|start| start.kind == kind);
        Spread::of(starts.filter_map(value))
    };
    let mib = 1.0 / 1024.0;
    let (peer_ms, peer_mib) = (reference::START_MS, reference::RESIDENT_MB * 1e6 / 1048576.0);
    let ready = |start: &Start| Some(start.ready_ms);
    let other = |start: &Start| Some(start.resident_without_arenas_kib as f64);
    let after = |start: &Start| start.resident_without_arenas_after_kib.map(|kib| kib as f64);
    let rows = [
        ("start until ready, one null LUN, ms", of(BARE, ready), Some(peer_ms)),
        ("start until ready, the LUNs of the bench, ms", of(BENCH, ready), None),
        ("resident without arenas, one null LUN, MiB", of(BARE, other), Some(peer_mib)),
        ("resident without arenas, after the jobs, MiB", of(BENCH, after), None),
    ];
    let line = |(what, found, peer): &(&str, Option<Spread>, Option<f64>)| {
        let found = (*found)?;
        let found = if what.ends_with("MiB") { found.scaled(mib) } else { found };
        Some(vec![
            what.to_string(),
            spread(&found),
            peer.map_or(String::new(), figure),
            peer.map_or(String::new(), |peer| format!("{:.2}", peer / found.median)),
        ])
    };
    let lines: Vec<_> = rows.iter().filter_map(line).collect();
    let heads = ["start and memory (less is better)", "median", reference::PEER, "ratio"];
    aligned(&heads.map(String::from), &lines)
}

/// The machine's own limits.
fn limits(record: &Record) -> String {
    let mut lines = Vec::new();
    let probes: Vec<f64> = record
        .runs
        .iter()
        .flat_map(|run| [run.round_trip_ns_before, run.round_trip_ns_after])
        .flatten()
        .collect();
    for placement in Placement::ALL {
        let here = probes.iter().copied().filter(|ns| Placement::of(*ns) == placement);
        let count = here.clone().count();
        if let Some(found) = Spread::of(here) {
            let what = format!("cache-line round trip, {}, {count} probes, ns", placement.word());
            lines.push(vec![what, spread(&found)]);
        }
    }
    if let Some(copies) = &record.copies {
        for (what, found) in [
            ("memcpy 4 KiB, hot, ns", copies.hot_4k_ns),
            ("memcpy 4 KiB, cold, ns", copies.cold_4k_ns),
            ("memcpy 128 KiB, cold, ns", copies.cold_128k_ns),
        ] {
            lines.push(vec![what.to_string(), spread(&found)]);
        }
    }
    aligned(&["the machine".to_string(), "median".to_string()], &lines)
}

/// A Markdown table with its columns padded to one width.
fn aligned(heads: &[String], lines: &[Vec<String>]) -> String {
    let width = |at: usize| {
        let cells = lines.iter().map(|line| line[at].chars().count());
        cells.chain([heads[at].chars().count(), 3]).max().expect("there is a head")
    };
    let widths: Vec<usize> = (0..heads.len()).map(width).collect();
    let line = |cells: &[String]| {
        let padded = cells.iter().zip(&widths).map(|(cell, &width)| format!("{cell:<width$}"));
        format!("| {} |\n", padded.collect::<Vec<_>>().join(" | "))
    };
    let rule = widths.iter().map(|&width| "-".repeat(width)).collect::<Vec<_>>();
    let mut text = line(heads) + &line(&rule);
    text.extend(lines.iter().map(|cells| line(cells)));
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::matrix::jobs;
    use crate::matrix::machine::Machine;
    use crate::matrix::record::Run;
    use crate::matrix::record::{SCHEMA, Settings};
    use crate::matrix::rows::rows;

    fn record() -> Record {
        let jobs = [jobs::PATH[0], jobs::PATH[10]];
        let runs = vec![
            Run::sample(&jobs[0], 1.0e6, Filing::Near, false),
            Run::sample(&jobs[0], 1.2e6, Filing::Near, false),
            Run::sample(&jobs[0], 0.5e6, Filing::Far, true),
            Run::sample(&jobs[1], 70e3, Filing::Near, false),
            Run::sample(&jobs[1], 70e3, Filing::Flipped, false),
        ];
        let start = |kind, kib| Start {
            kind,
            round: 1,
            ready_ms: 59.0,
            resident_kib: 600_000,
            resident_without_arenas_kib: kib,
            resident_without_arenas_after_kib: None,
        };
        Record {
            schema: SCHEMA,
            version: "0",
            machine: Machine::default(),
            settings: Settings {
                quick: true,
                rounds: 2,
                seconds: 1.5,
                target_core: 0,
                initiator_core: 1,
            },
            elapsed_s: 42.0,
            copies: None,
            rows: rows(&jobs, &runs),
            starts: vec![start(BARE, 4096), start(BENCH, 5120)],
            runs,
            target_warnings: vec!["WARN no direct I/O".into()],
        }
    }

    #[test]
    fn rows_have_medians_spreads_the_peer_and_the_ratio() {
        let text = path(&record());
        let lines: Vec<Vec<&str>> = text
            .lines()
            .filter(|line| line.starts_with('|'))
            .map(|line| line.split('|').map(str::trim).collect())
            .collect();
        assert_eq!(lines.len(), 2 + 3);
        assert_eq!(
            lines[2][1..5],
            ["null, 4 KiB randread, depth 1", "near", "2/2", "1.10 M (1.00-1.20)"]
        );
        assert_eq!(lines[2][8..10], ["789 k, p50 1.29 [1]", "1.39"]);
        assert_eq!((lines[3][2], lines[3][3]), ("far", "1/1 !"));
        assert_eq!(lines[4][8], "68.0 k [2]");
        assert!(text.contains("[2] bdevperf: the block device alone"), "{text}");
        assert!(text.contains("Left out: 1 of 5 runs, the cores changed places"), "{text}");
        assert!(text.contains("Disturbed: 1 of 5 runs"), "{text}");
        assert!(text.contains("It spins"), "{text}");
    }

    #[test]
    fn a_job_that_no_run_counts_for_is_named() {
        let mut record = record();
        record.runs.push(Run::sample(&jobs::PATH[5], 1.0, Filing::Flipped, false));
        let text = path(&record);
        assert!(text.contains("No run of malloc-4k-randread-128 counts."), "{text}");
        assert_eq!(text.matches("No run of").count(), 1);
    }

    #[test]
    fn a_quick_run_and_a_strange_machine_say_so() {
        let text = report(&record());
        for part in ["not to be quoted", "Not the machine of SPDK", "The target said: WARN no"] {
            assert!(text.contains(part), "{part}: {text}");
        }
    }

    #[test]
    fn starts_are_compared_the_other_way_round() {
        let text = starts(&record());
        assert!(text.contains("4.00 (4.00-4.00)"), "4096 KiB are 4 MiB: {text}");
        assert!(text.contains("| 59.0 (59.0-59.0) | 236        | 4.00  |"), "{text}");
        assert!(!text.contains("after the jobs"), "{text}");
    }

    #[test]
    fn the_columns_are_aligned() {
        let heads = ["a".to_string(), "long head".to_string()];
        let text = aligned(&heads, &[vec!["wide cell".into(), "x".into()]]);
        let widths: Vec<usize> = text.lines().map(str::len).collect();
        assert!(widths.windows(2).all(|w| w[0] == w[1]), "{text}");
    }

    #[test]
    fn the_json_has_runs_and_rows() {
        let json: serde_json::Value = serde_json::from_str(&record().json()).unwrap();
        assert_eq!(json["schema"], 1);
        assert_eq!(json["runs"].as_array().unwrap().len(), 5);
        assert_eq!(json["rows"][0]["placement"], "near");
        assert_eq!(json["runs"][4]["filing"], "flipped");
        assert_eq!(json["rows"][0]["reference"]["iops"], 789e3);
    }
}
