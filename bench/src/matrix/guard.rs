//! No target is left behind spinning when a bench is ended early: SIGTERM, SIGINT and SIGHUP end
//! the target first, then this program. (SIGKILL cannot be caught: then the target goes on.)

use std::sync::atomic::{AtomicI32, Ordering};

use rustix::process::{Pid, Signal, kill_process};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};

use super::MatrixError;

/// The process id of the target that is running; 0 when there is none.
static TARGET: AtomicI32 = AtomicI32::new(0);
/// What a shell says for a program that ended by SIGINT.
const EXIT_CODE: i32 = 130;

/// Starts the thread that waits for signals; once, before the first target.
pub fn watch() -> Result<(), MatrixError> {
    let signals = signal_hook::iterator::Signals::new([SIGTERM, SIGINT, SIGHUP]);
    let mut signals = signals.map_err(|e| MatrixError::Machine(format!("signals: {e}")))?;
    let wait = move || {
        if signals.forever().next().is_some() {
            terminate(TARGET.load(Ordering::Acquire));
            eprintln!("usurp-matrix: ended by a signal");
            std::process::exit(EXIT_CODE);
        }
    };
    let thread = std::thread::Builder::new().name("matrix-signals".into()).spawn(wait);
    thread.map(drop).map_err(|e| MatrixError::Machine(format!("signal thread: {e}")))
}

/// From now on this process is ended with us.
pub fn set_target(pid: u32) {
    TARGET.store(i32::try_from(pid).unwrap_or(0), Ordering::Release);
}

/// There is no target any more. Before it is waited for: its number may be another's afterwards.
pub fn clear_target() {
    TARGET.store(0, Ordering::Release);
}

/// Asks a process to end; one that is gone already is no error.
pub fn terminate(pid: i32) {
    if let Some(pid) = Pid::from_raw(pid) {
        let _ = kill_process(pid, Signal::TERM);
    }
}
