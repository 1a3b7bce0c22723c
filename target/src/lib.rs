//! Usurp's target: the I/O path that joins SRP, SCSI, bdevs and the fabric, and the control plane
//! around it.
//!
//! | module | what it owns |
//! |---|---|
//! | [`path`] | one turn of a reactor; with `conn`, `command`, `transfer`: the I/O path |
//! | [`channels`], [`tmf`] | the path's rarer work: channels come and go, task management |
//! | [`control`] | logins, nexuses, placement of channels, shutdown |
//! | [`serve`] | starting and ending the process's target |
//! | [`cli`] | the command line and its exit codes |
//! | [`config`] | the YAML file, checked |
//! | [`doctor`] | what a machine lacks |

#![forbid(unsafe_code)]

pub mod abort;
mod banner;
pub mod channels;
pub mod cli;
pub mod command;
pub mod config;
pub mod conn;
pub mod control;
pub mod doctor;
pub mod ioctx;
mod login_info;
pub mod luns;
pub mod mail;
pub mod path;
pub mod serve;
pub mod shared;
pub mod tmf;
pub mod transfer;
pub mod wrid;
