//! How a reactor is reached from other threads: a bounded `crossbeam-channel`.
//!
//! ```text
//!   control thread --send_blocking--> |            |
//!   other reactors --try_send-------> | <= capacity| --try_take (<= 32 a turn)--> Work::on_mail
//! ```
//! Owns the mails between the two. Never drops one while the inbox lives: a full mailbox gives the
//! mail back to its sender, who keeps it and tries again. Once the inbox is gone, mails still in it
//! are dropped and every send is refused ([`Mailbox::is_gone`]).

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crossbeam_channel::{Receiver, Sender};

/// The sending side; clone one for every sender.
pub struct Mailbox<M> {
    /// The channel's entry.
    sender: Sender<M>,
    /// False once the inbox was dropped.
    open: Arc<AtomicBool>,
}

/// The receiving side, owned by one reactor.
pub struct Inbox<M> {
    /// The channel's exit.
    receiver: Receiver<M>,
    /// A sender of our own, to hand out clones.
    mailbox: Mailbox<M>,
}

/// The mailbox is full or gone: the mail comes back.
#[derive(Debug, thiserror::Error)]
#[error("the mailbox is full")]
pub struct Full<M>(pub M);

/// A mailbox that holds at most `capacity` mails (at least 1), and its inbox.
pub fn mailbox<M>(capacity: usize) -> (Mailbox<M>, Inbox<M>) {
    assert!(capacity > 0, "a mailbox holds at least one mail");
    let (sender, receiver) = crossbeam_channel::bounded(capacity);
    let mailbox = Mailbox { sender, open: Arc::new(AtomicBool::new(true)) };
    (mailbox.clone(), Inbox { receiver, mailbox })
}

impl<M> Mailbox<M> {
    /// Sends without waiting; a full (or gone) mailbox gives the mail back. Takes no lock.
    pub fn try_send(&self, mail: M) -> Result<(), Full<M>> {
        self.sender.try_send(mail).map_err(|error| Full(error.into_inner()))
    }

    /// Waits until there is room. For the control thread only: a reactor never waits. Gives the
    /// mail back only when the inbox is gone.
    pub fn send_blocking(&self, mail: M) -> Result<(), Full<M>> {
        self.sender.send(mail).map_err(|error| Full(error.into_inner()))
    }

    /// True once the reactor ended: no send will ever succeed again.
    pub fn is_gone(&self) -> bool {
        !self.open.load(Ordering::Acquire)
    }

    /// How many mails wait.
    pub fn len(&self) -> usize {
        self.sender.len()
    }

    /// True when no mail waits.
    pub fn is_empty(&self) -> bool {
        self.sender.is_empty()
    }
}

impl<M> Clone for Mailbox<M> {
    fn clone(&self) -> Mailbox<M> {
        Mailbox { sender: self.sender.clone(), open: Arc::clone(&self.open) }
    }
}

impl<M> Inbox<M> {
    /// True when no mail waits: two loads, no fence, so it is cheap enough for every turn.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.receiver.is_empty()
    }

    /// The next mail, if any.
    pub fn try_take(&mut self) -> Option<M> {
        self.receiver.try_recv().ok()
    }

    /// One more sender.
    pub fn mailbox(&self) -> Mailbox<M> {
        self.mailbox.clone()
    }
}

impl<M> Drop for Inbox<M> {
    fn drop(&mut self) {
        self.mailbox.open.store(false, Ordering::Release);
    }
}

impl<M> std::fmt::Debug for Mailbox<M> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Mailbox: {} of {:?} mails", self.len(), self.sender.capacity())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_full_mailbox_gives_the_mail_back() {
        let (mailbox, mut inbox) = mailbox(2);
        assert!(inbox.is_empty() && mailbox.is_empty());
        mailbox.try_send(1).unwrap();
        mailbox.clone().try_send(2).unwrap();
        let Err(Full(mail)) = mailbox.try_send(3) else { panic!("there is no room") };
        assert_eq!((mail, mailbox.len(), mailbox.is_gone()), (3, 2, false));
        assert_eq!(
            (inbox.try_take(), inbox.try_take(), inbox.try_take()),
            (Some(1), Some(2), None)
        );
        inbox.mailbox().try_send(4).unwrap();
        assert_eq!(inbox.try_take(), Some(4));
    }

    #[test]
    fn a_gone_inbox_refuses_every_send() {
        let (mailbox, inbox) = mailbox(1);
        drop(inbox);
        assert!(mailbox.is_gone());
        assert_eq!(mailbox.try_send("a").unwrap_err().0, "a");
        assert_eq!(mailbox.send_blocking("b").unwrap_err().0, "b");
    }

    #[test]
    fn a_blocked_sender_goes_on_when_there_is_room() {
        let (mailbox, mut inbox) = mailbox(1);
        mailbox.try_send(0).unwrap();
        let sender = std::thread::spawn(move || mailbox.send_blocking(1));
        let mut got = Vec::new();
        while got.len() < 2 {
            got.extend(inbox.try_take());
            std::thread::yield_now();
        }
        assert_eq!(got, [0, 1]);
        sender.join().unwrap().unwrap();
    }

    #[test]
    fn a_blocked_sender_is_refused_when_the_inbox_goes() {
        let (mailbox, inbox) = mailbox(1);
        mailbox.try_send(0).unwrap();
        let sender = std::thread::spawn(move || mailbox.send_blocking(1));
        std::thread::sleep(std::time::Duration::from_millis(5));
        drop(inbox);
        assert_eq!(sender.join().unwrap().unwrap_err().0, 1);
    }

    #[test]
    #[should_panic(expected = "at least one mail")]
    fn a_mailbox_of_none_panics() {
        let _ = mailbox::<u32>(0);
    }
}
