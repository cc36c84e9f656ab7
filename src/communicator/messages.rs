//! Point-to-point messages.

use super::Communicator;
use crate::{
    engine::{Message, OperationId},
    error::{Error, Result},
    reduce::Element,
};

impl Communicator {
    /// Sends a message to `peer`, and returns when the buffer may be used again. Small messages do not wait for the receiver as
    /// long as those it has not received come to less than 512 KiB (with 64 bytes for each); large ones (more than 64 KiB) do.
    /// A message to oneself is copied and waits for a later `recv`.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if there is no such rank, and those of a failed group.
    ///
    /// ```
    /// # let comm = raccl::Config::new().connect()?;
    /// comm.send(&[1.5_f32, 2.5], 0, 7)?;
    /// let mut buffer = [0.0_f32; 4];
    /// assert_eq!(comm.recv(&mut buffer, 0, 7)?, 2);
    /// assert_eq!(buffer[..2], [1.5, 2.5]);
    /// # Ok::<(), raccl::Error>(())
    /// ```
    pub fn send<T: Element>(&self, buffer: &[T], peer: usize, tag: u64) -> Result<()> {
        let message = self.outgoing(buffer, peer, tag, "send")?;
        // SAFETY: the slice is borrowed for the call.
        unsafe { self.engine().send(&self.inner.shared, message) }
    }

    /// Receives the next message of `peer` with `tag` and returns how many elements it had.
    ///
    /// # Errors
    /// [`Error::Truncated`] if the message is longer than the buffer; [`Error::InvalidArgument`] if there is no such rank or
    /// the message has no whole number of elements; and those of a failed group.
    ///
    /// ```
    /// let mut group = raccl::local_group(2)?;
    /// let (one, zero) = (group.pop().unwrap(), group.pop().unwrap());
    /// zero.send(b"hello", 1, 0)?;
    /// let mut buffer = [0; 16];
    /// let count = one.recv(&mut buffer, 0, 0)?;
    /// assert_eq!(&buffer[..count], b"hello");
    /// # Ok::<(), raccl::Error>(())
    /// ```
    pub fn recv<T: Element>(&self, buffer: &mut [T], peer: usize, tag: u64) -> Result<usize> {
        // SAFETY: the slice is exclusively borrowed for the call, which finishes the operation.
        let id = unsafe { self.start_recv(buffer, peer, tag, "recv") }?;
        self.finish_recv::<T>(id, buffer.len(), peer, tag, "recv")
    }

    /// Sends to one peer and receives from another (or the same) at the same time, with the same tag, and returns how many
    /// elements were received. Rings and exchanges of any length cannot deadlock with it.
    ///
    /// # Errors
    /// Those of [`send`](Communicator::send) and [`recv`](Communicator::recv).
    ///
    /// ```
    /// # let comm = raccl::Config::new().connect()?;
    /// let (right, left) = ((comm.rank() + 1) % comm.size(), (comm.rank() + comm.size() - 1) % comm.size());
    /// let mut halo = [0_i32; 8];
    /// comm.send_recv(&[5; 8], right, &mut halo, left, 0)?;
    /// # assert_eq!(halo, [5; 8]);
    /// # Ok::<(), raccl::Error>(())
    /// ```
    pub fn send_recv<T: Element, U: Element>(
        &self,
        send: &[T],
        to: usize,
        recv: &mut [U],
        from: usize,
        tag: u64,
    ) -> Result<usize> {
        let message = self.outgoing(send, to, tag, "send_recv")?;
        // SAFETY: the slice is exclusively borrowed for the call, which finishes the operation.
        let receiving = unsafe { self.start_recv(recv, from, tag, "send_recv") }?;
        // SAFETY: the slice is borrowed for the call, which finishes the operation.
        let sent = unsafe { self.engine().submit_send(&self.inner.shared, message) }
            .and_then(|id| self.engine().finish(id, "send_recv"));
        // Also after a failed send: the receive must be taken back before its buffer is given back.
        let received = self.finish_recv::<U>(receiving, recv.len(), from, tag, "send_recv");
        sent.and(received)
    }

    /// # Safety
    /// The buffer stays exclusively borrowed until the operation is finished.
    pub(super) unsafe fn start_recv<T: Element>(
        &self,
        buffer: &mut [T],
        peer: usize,
        tag: u64,
        operation: &'static str,
    ) -> Result<OperationId> {
        let message = Message {
            peer: self.world(peer, operation)?,
            tag,
            length: size_of_val(buffer),
            pointer: buffer.as_mut_ptr().cast(),
            operation,
            timeouts: self.timeouts,
        };
        // SAFETY: passed on.
        unsafe { self.engine().submit_recv(&self.inner.shared, message) }
    }

    /// # Safety
    /// The buffer stays borrowed until the operation is finished.
    pub(super) unsafe fn start_send<T: Element>(
        &self,
        buffer: &[T],
        peer: usize,
        tag: u64,
        operation: &'static str,
    ) -> Result<OperationId> {
        let message = self.outgoing(buffer, peer, tag, operation)?;
        // SAFETY: passed on.
        unsafe { self.engine().submit_send(&self.inner.shared, message) }
    }

    pub(super) fn finish_recv<T: Element>(
        &self,
        id: OperationId,
        room: usize,
        peer: usize,
        tag: u64,
        operation: &'static str,
    ) -> Result<usize> {
        let sent = self.engine().finish(id, operation)?;
        let size = size_of::<T>() as u64;
        let room = room as u64 * size;
        if sent > room {
            return Err(Error::Truncated { rank: self.rank(), peer, tag, sent, room });
        }
        if size == 0 {
            return Ok(0);
        }
        if !sent.is_multiple_of(size) {
            let reason =
                format!("a message of {sent} bytes came from rank {peer}, elements have {size} bytes");
            return Err(self.invalid(operation, reason));
        }
        // Not longer than the buffer, so it fits.
        Ok((sent / size) as usize)
    }

    fn outgoing<T: Element>(
        &self,
        buffer: &[T],
        peer: usize,
        tag: u64,
        operation: &'static str,
    ) -> Result<Message> {
        Ok(Message {
            peer: self.world(peer, operation)?,
            tag,
            length: size_of_val(buffer),
            pointer: buffer.as_ptr().cast::<u8>().cast_mut(),
            operation,
            timeouts: self.timeouts,
        })
    }
}
