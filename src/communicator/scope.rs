//! Non-blocking operations that cannot outlive their buffers.

use std::{
    cell::RefCell,
    marker::PhantomData,
    panic::{AssertUnwindSafe, catch_unwind, resume_unwind},
};

use super::{Communicator, collectives::Request};
use crate::{
    engine::{OperationId, refuse_inside},
    error::Result,
    reduce::{Element, Operation},
};

impl Communicator {
    /// Runs `body` with a scope in which operations can be started without waiting for them. All of them are finished when
    /// `scope` returns, whatever `body` does, so buffers may be borrowed from outside.
    ///
    /// # Errors
    /// The first error of an operation that was not waited for, or what `body` returns.
    ///
    /// ```
    /// let mut group = raccl::local_group(2)?;
    /// let (one, zero) = (group.pop().unwrap(), group.pop().unwrap());
    /// let other = std::thread::spawn(move || one.send(&[7_u8], 0, 3));
    /// let mut received = [0_u8; 1];
    /// zero.scope(|scope| {
    ///     let pending = scope.recv(&mut received, 1, 3)?;
    ///     // ... compute ...
    ///     pending.wait()?;
    ///     Ok(())
    /// })?;
    /// assert_eq!(received, [7]);
    /// # other.join().unwrap()?;
    /// # Ok::<(), raccl::Error>(())
    /// ```
    ///
    /// A buffer in flight cannot be touched:
    ///
    /// ```compile_fail,E0506
    /// # let comm = raccl::Config::new().connect()?;
    /// let mut buffer = [0_u8; 4];
    /// comm.scope(|scope| {
    ///     let pending = scope.recv(&mut buffer, 0, 0)?;
    ///     buffer[0] = 1;
    ///     pending.wait()?;
    ///     Ok(())
    /// })?;
    /// # Ok::<(), raccl::Error>(())
    /// ```
    pub fn scope<'env, R>(
        &'env self,
        body: impl for<'scope> FnOnce(&'scope Scope<'scope, 'env>) -> Result<R>,
    ) -> Result<R> {
        let scope =
            Scope { comm: self, open: RefCell::new(Vec::new()), _scope: PhantomData, _env: PhantomData };
        let result = catch_unwind(AssertUnwindSafe(|| body(&scope)));
        // Here, not in a guard's drop: nothing that `body` can do keeps this from running.
        let mut finished = Ok(());
        for (id, operation) in scope.open.take() {
            let end = self.engine().finish(id, operation).map(|_| ());
            finished = finished.and(end);
        }
        match result {
            Ok(result) => result.and_then(|value| finished.map(|()| value)),
            Err(panic) => resume_unwind(panic),
        }
    }
}

/// Starts operations that are finished when the scope ends; see [`Communicator::scope`].
pub struct Scope<'scope, 'env: 'scope> {
    comm: &'env Communicator,
    /// Operations that were started and not waited for.
    open: RefCell<Vec<(OperationId, &'static str)>>,
    /// Invariant in both, as `std::thread::Scope` is: neither may shrink or grow.
    _scope: PhantomData<&'scope mut &'scope ()>,
    _env: PhantomData<&'env mut &'env ()>,
}

/// An operation in flight. Dropping it does not wait; the end of the scope does.
#[must_use = "the scope's end waits for it, but then its result is lost"]
pub struct Pending<'scope, T> {
    id: OperationId,
    /// Parts of it that were started before.
    earlier: Vec<OperationId>,
    comm: &'scope Communicator,
    open: &'scope RefCell<Vec<(OperationId, &'static str)>>,
    operation: &'static str,
    finish: Finish<T>,
}

/// How the engine's result becomes the caller's.
type Finish<T> = Box<dyn FnOnce(&Communicator, OperationId) -> Result<T>>;

impl<'scope> Scope<'scope, '_> {
    /// Starts sending `buffer` to `peer`.
    ///
    /// # Errors
    /// As [`Communicator::send`].
    ///
    /// ```
    /// # let comm = raccl::Config::new().connect()?;
    /// comm.scope(|scope| scope.send(&[1_u8, 2], 0, 9)?.wait())?;
    /// # comm.recv(&mut [0_u8; 2], 0, 9)?;
    /// # Ok::<(), raccl::Error>(())
    /// ```
    pub fn send<T: Element>(
        &'scope self,
        buffer: &'scope [T],
        peer: usize,
        tag: u64,
    ) -> Result<Pending<'scope, ()>> {
        // SAFETY: the buffer is borrowed for `'scope`, and `Communicator::scope` finishes the operation before that ends.
        let id = unsafe { self.comm.start_send(buffer, peer, tag, "send") }?;
        let finish = |comm: &Communicator, id| comm.engine().finish(id, "send").map(|_| ());
        Ok(self.pending(id, "send", Box::new(finish)))
    }

    /// Starts receiving the next message of `peer` with `tag` into `buffer`; waiting gives the number of elements.
    ///
    /// # Errors
    /// As [`Communicator::recv`].
    ///
    /// ```
    /// # let comm = raccl::Config::new().connect()?;
    /// let mut buffer = [0_u8; 2];
    /// let count = comm.scope(|scope| {
    ///     let pending = scope.recv(&mut buffer, 0, 9)?;
    ///     comm.send(&[1_u8, 2], 0, 9)?;
    ///     pending.wait()
    /// })?;
    /// assert_eq!(count, 2);
    /// # Ok::<(), raccl::Error>(())
    /// ```
    pub fn recv<T: Element>(
        &'scope self,
        buffer: &'scope mut [T],
        peer: usize,
        tag: u64,
    ) -> Result<Pending<'scope, usize>> {
        let room = buffer.len();
        // SAFETY: as in `send`, and the borrow is exclusive.
        let id = unsafe { self.comm.start_recv(buffer, peer, tag, "recv") }?;
        let finish = move |comm: &Communicator, id| comm.finish_recv::<T>(id, room, peer, tag, "recv");
        Ok(self.pending(id, "recv", Box::new(finish)))
    }

    /// Starts an all-reduce in place. Its place in the order of collectives is where it is started.
    ///
    /// # Errors
    /// As [`Communicator::all_reduce`].
    ///
    /// ```
    /// # let comm = raccl::Config::new().connect()?;
    /// let (mut a, mut b) = ([1.0_f32; 10], [2.0_f32; 10]);
    /// comm.scope(|scope| {
    ///     let first = scope.all_reduce(&mut a, &raccl::Sum)?;
    ///     let second = scope.all_reduce(&mut b, &raccl::Sum)?;
    ///     first.wait()?;
    ///     second.wait()
    /// })?;
    /// # Ok::<(), raccl::Error>(())
    /// ```
    pub fn all_reduce<T: Element, O: Operation<T>>(
        &'scope self,
        buffer: &'scope mut [T],
        operation: &'scope O,
    ) -> Result<Pending<'scope, ()>> {
        let data: *mut u8 = buffer.as_mut_ptr().cast();
        let mut rounds = Vec::new();
        for request in Request::all_reduce(data, data, buffer.len(), true, operation.reducer()) {
            // SAFETY: as in `recv`; the operation is borrowed as long. A round that was started is finished by the scope even
            // if a later one cannot be.
            let id = unsafe { self.comm.start(request) }?;
            self.open.borrow_mut().push((id, "all_reduce"));
            rounds.push(id);
        }
        let last = rounds.pop().expect("an all-reduce has a round at least");
        let finish = |comm: &Communicator, id| comm.engine().finish(id, "all_reduce").map(|_| ());
        let finish = Box::new(finish);
        let (comm, open) = (self.comm, &self.open);
        Ok(Pending { id: last, earlier: rounds, comm, open, operation: "all_reduce", finish })
    }

    fn pending<T>(
        &'scope self,
        id: OperationId,
        operation: &'static str,
        finish: Finish<T>,
    ) -> Pending<'scope, T> {
        self.open.borrow_mut().push((id, operation));
        Pending { id, earlier: Vec::new(), comm: self.comm, open: &self.open, operation, finish }
    }
}

impl<T> Pending<'_, T> {
    /// Waits for the operation and returns its result.
    ///
    /// # Errors
    /// Those of the operation.
    pub fn wait(self) -> Result<T> {
        // Before the scope is told not to wait for it any more.
        refuse_inside(self.operation, self.comm.rank())?;
        let mut finished = Ok(());
        for id in self.earlier {
            self.open.borrow_mut().retain(|&(open, _)| open != id);
            finished = finished.and(self.comm.engine().finish(id, self.operation).map(|_| ()));
        }
        self.open.borrow_mut().retain(|&(open, _)| open != self.id);
        let last = (self.finish)(self.comm, self.id);
        finished.and(last)
    }

    /// True if [`wait`](Pending::wait) would not wait. Also moves all operations of the group on.
    ///
    /// # Errors
    /// Those of a failed group.
    pub fn test(&self) -> Result<bool> {
        refuse_inside(self.operation, self.comm.rank())?;
        let engine = self.comm.engine();
        for &id in &self.earlier {
            if !engine.test(id, self.operation)? {
                return Ok(false);
            }
        }
        engine.test(self.id, self.operation)
    }
}
