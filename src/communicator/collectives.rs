//! The collective operations.

use super::Communicator;
use crate::{
    engine::{
        OperationId, Submission,
        call::{Call, CallKind, algorithm_code, digest},
    },
    error::Result,
    plan::Collective,
    reduce::{Element, Operation, Reducer},
};

/// Bytes of an all-reduce or broadcast in one round. Blocking calls have one round in flight, so that the memory for what is received is bounded.
const ROUND: usize = if cfg!(test) { 1 << 20 } else { 64 << 20 };

/// A collective on memory whose validity the caller vouches for.
pub(super) struct Request<'a> {
    pub(super) call: Call,
    pub(super) collective: Collective,
    pub(super) reducer: Option<Reducer<'a>>,
    pub(super) input: *const u8,
    pub(super) output: *mut u8,
    pub(super) in_place: bool,
    pub(super) element: usize,
}

impl Communicator {
    /// Returns when every rank has called it.
    ///
    /// # Errors
    /// Those of a failed group; see [`Communicator`].
    ///
    /// ```
    /// # let comm = raccl::Config::new().connect()?;
    /// comm.barrier()?;
    /// # Ok::<(), raccl::Error>(())
    /// ```
    pub fn barrier(&self) -> Result<()> {
        let request = Request::movement(Call::new(CallKind::Barrier, 0, 0), Collective::Barrier, 0);
        // SAFETY: a barrier has no buffers.
        unsafe { self.run(request) }
    }

    /// Combines the buffers of all ranks element by element and leaves the result in all of them. All ranks call it with
    /// buffers of the same length.
    ///
    /// # Errors
    /// [`Error::Mismatch`](crate::Error::Mismatch) if another rank makes another call, and those of a failed group.
    ///
    /// ```
    /// # let comm = raccl::Config::new().connect()?;
    /// let mut gradient = vec![0.5_f32; 1000];
    /// comm.all_reduce(&mut gradient, raccl::Avg)?;
    /// # assert_eq!(gradient[999], 0.5);
    /// # Ok::<(), raccl::Error>(())
    /// ```
    pub fn all_reduce<T: Element, O: Operation<T>>(&self, buffer: &mut [T], operation: O) -> Result<()> {
        let reducer = operation.reducer();
        let data: *mut T = buffer.as_mut_ptr();
        // SAFETY: the buffer is exclusively ours during the call and holds that many elements.
        unsafe { self.all_reduce_raw(data.cast_const().cast(), data.cast(), buffer.len(), true, reducer) }
    }

    /// As [`all_reduce`](Communicator::all_reduce), from one buffer into another of the same length.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`](crate::Error::InvalidArgument) if the lengths differ, and as `all_reduce`.
    ///
    /// ```
    /// # let comm = raccl::Config::new().connect()?;
    /// let (input, mut output) = ([3_i32, -4], [0; 2]);
    /// comm.all_reduce_into(&input, &mut output, raccl::Max)?;
    /// # assert_eq!(output, [3, -4]);
    /// # Ok::<(), raccl::Error>(())
    /// ```
    pub fn all_reduce_into<T: Element, O: Operation<T>>(
        &self,
        input: &[T],
        output: &mut [T],
        operation: O,
    ) -> Result<()> {
        if input.len() != output.len() {
            return Err(self.lengths("all_reduce_into", "output", output.len(), input.len()));
        }
        // SAFETY: both slices are borrowed for the call and hold that many elements.
        unsafe {
            self.all_reduce_raw(
                input.as_ptr().cast(),
                output.as_mut_ptr().cast(),
                input.len(),
                false,
                operation.reducer(),
            )
        }
    }

    /// Gathers one part of every rank into the buffers of all: `buffer` has `size()` parts of equal length, this rank's part
    /// (the one at its rank) is its contribution.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`](crate::Error::InvalidArgument) if the length does not divide by `size()`, and as
    /// [`all_reduce`](Communicator::all_reduce).
    ///
    /// ```
    /// # let comm = raccl::Config::new().connect()?;
    /// let mut ranks = vec![0_u64; comm.size()];
    /// ranks[comm.rank()] = comm.rank() as u64;
    /// comm.all_gather(&mut ranks)?;
    /// # assert_eq!(ranks, [0]);
    /// # Ok::<(), raccl::Error>(())
    /// ```
    pub fn all_gather<T: Element>(&self, buffer: &mut [T]) -> Result<()> {
        let counts = self.equal_parts("all_gather", buffer.len())?;
        let call = Call::new(CallKind::AllGather, size_of::<T>(), buffer.len());
        self.gather(call, None, buffer, counts)
    }

    /// As [`all_gather`](Communicator::all_gather), from a buffer of this rank's part.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`](crate::Error::InvalidArgument) if `output` is not `size()` times as long as `input`, and as
    /// [`all_reduce`](Communicator::all_reduce).
    ///
    /// ```
    /// # let comm = raccl::Config::new().connect()?;
    /// let mut all = vec![0_u8; 3 * comm.size()];
    /// comm.all_gather_into(&[1, 2, 3], &mut all)?;
    /// # assert_eq!(all, [1, 2, 3]);
    /// # Ok::<(), raccl::Error>(())
    /// ```
    pub fn all_gather_into<T: Element>(&self, input: &[T], output: &mut [T]) -> Result<()> {
        let expected = input.len().checked_mul(self.size());
        if expected != Some(output.len()) {
            return Err(self.lengths(
                "all_gather_into",
                "output",
                output.len(),
                expected.unwrap_or(usize::MAX),
            ));
        }
        let call = Call::new(CallKind::AllGather, size_of::<T>(), output.len());
        self.gather(call, Some(input), output, vec![input.len(); self.size()])
    }

    /// As [`all_gather`](Communicator::all_gather) with parts of different lengths: rank `i` contributes `counts[i]` elements,
    /// which may be none. `counts` is the same on all ranks.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`](crate::Error::InvalidArgument) if `counts` has not one entry a rank or does not add up to the
    /// buffer's length, and as [`all_reduce`](Communicator::all_reduce).
    ///
    /// ```
    /// # let comm = raccl::Config::new().connect()?;
    /// let mut words = *b"abc";
    /// comm.all_gather_v(&mut words, &[3])?;
    /// # Ok::<(), raccl::Error>(())
    /// ```
    pub fn all_gather_v<T: Element>(&self, buffer: &mut [T], counts: &[usize]) -> Result<()> {
        self.check_counts("all_gather_v", counts, buffer.len(), "buffer")?;
        let call =
            Call { digest: digest(counts), ..Call::new(CallKind::AllGatherV, size_of::<T>(), buffer.len()) };
        self.gather(call, None, buffer, counts.to_vec())
    }

    /// As [`all_gather_v`](Communicator::all_gather_v), from a buffer of this rank's part.
    ///
    /// # Errors
    /// As [`all_gather_v`](Communicator::all_gather_v), and if `input` is not `counts[rank()]` long.
    ///
    /// ```
    /// # let comm = raccl::Config::new().connect()?;
    /// let mut all = [0_u8; 3];
    /// comm.all_gather_v_into(b"abc", &mut all, &[3])?;
    /// # assert_eq!(&all, b"abc");
    /// # Ok::<(), raccl::Error>(())
    /// ```
    pub fn all_gather_v_into<T: Element>(
        &self,
        input: &[T],
        output: &mut [T],
        counts: &[usize],
    ) -> Result<()> {
        self.check_counts("all_gather_v_into", counts, output.len(), "output")?;
        if input.len() != counts[self.rank()] {
            return Err(self.lengths("all_gather_v_into", "input", input.len(), counts[self.rank()]));
        }
        let call =
            Call { digest: digest(counts), ..Call::new(CallKind::AllGatherV, size_of::<T>(), output.len()) };
        self.gather(call, Some(input), output, counts.to_vec())
    }

    /// Combines the buffers of all ranks and leaves each rank one of `size()` parts of the result: rank `i` the `i`-th. The
    /// rank's part lies where it lay in the buffer and is returned; the rest of the buffer is left with unspecified values.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`](crate::Error::InvalidArgument) if the length does not divide by `size()`, and as
    /// [`all_reduce`](Communicator::all_reduce).
    ///
    /// ```
    /// # let comm = raccl::Config::new().connect()?;
    /// let mut values = vec![2_i64; 4 * comm.size()];
    /// let mine = comm.reduce_scatter(&mut values, raccl::Sum)?;
    /// assert_eq!(mine.len(), 4);
    /// # Ok::<(), raccl::Error>(())
    /// ```
    pub fn reduce_scatter<'b, T: Element, O: Operation<T>>(
        &self,
        buffer: &'b mut [T],
        operation: O,
    ) -> Result<&'b mut [T]> {
        let counts = self.equal_parts("reduce_scatter", buffer.len())?;
        let call = Call::new(CallKind::ReduceScatter, size_of::<T>(), buffer.len());
        self.scatter_in_place(call, buffer, &counts, operation.reducer())
    }

    /// As [`reduce_scatter`](Communicator::reduce_scatter), with the result in a buffer of its own.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`](crate::Error::InvalidArgument) if `input` is not `size()` times as long as `output`, and as
    /// [`all_reduce`](Communicator::all_reduce).
    ///
    /// ```
    /// # let comm = raccl::Config::new().connect()?;
    /// let mut mine = [0.0_f64; 2];
    /// comm.reduce_scatter_into(&vec![1.0; 2 * comm.size()], &mut mine, raccl::Sum)?;
    /// # assert_eq!(mine, [1.0, 1.0]);
    /// # Ok::<(), raccl::Error>(())
    /// ```
    pub fn reduce_scatter_into<T: Element, O: Operation<T>>(
        &self,
        input: &[T],
        output: &mut [T],
        operation: O,
    ) -> Result<()> {
        let expected = output.len().checked_mul(self.size());
        if expected != Some(input.len()) {
            return Err(self.lengths(
                "reduce_scatter_into",
                "input",
                input.len(),
                expected.unwrap_or(usize::MAX),
            ));
        }
        let call = Call::new(CallKind::ReduceScatter, size_of::<T>(), input.len());
        let counts = vec![output.len(); self.size()];
        self.scatter(call, input, output, counts, operation.reducer())
    }

    /// As [`reduce_scatter`](Communicator::reduce_scatter) with parts of different lengths: rank `i` gets `counts[i]` elements,
    /// which may be none. `counts` is the same on all ranks.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`](crate::Error::InvalidArgument) if `counts` has not one entry a rank or does not add up to the
    /// buffer's length, and as [`all_reduce`](Communicator::all_reduce).
    ///
    /// ```
    /// # let comm = raccl::Config::new().connect()?;
    /// let mut values = [1_u8, 2, 3];
    /// assert_eq!(comm.reduce_scatter_v(&mut values, &[3], raccl::BitOr)?, [1, 2, 3]);
    /// # Ok::<(), raccl::Error>(())
    /// ```
    pub fn reduce_scatter_v<'b, T: Element, O: Operation<T>>(
        &self,
        buffer: &'b mut [T],
        counts: &[usize],
        operation: O,
    ) -> Result<&'b mut [T]> {
        self.check_counts("reduce_scatter_v", counts, buffer.len(), "buffer")?;
        let call = Call {
            digest: digest(counts),
            ..Call::new(CallKind::ReduceScatterV, size_of::<T>(), buffer.len())
        };
        self.scatter_in_place(call, buffer, counts, operation.reducer())
    }

    /// As [`reduce_scatter_v`](Communicator::reduce_scatter_v), with the result in a buffer of its own.
    ///
    /// # Errors
    /// As [`reduce_scatter_v`](Communicator::reduce_scatter_v), and if `output` is not `counts[rank()]` long.
    ///
    /// ```
    /// # let comm = raccl::Config::new().connect()?;
    /// let mut mine = [0_u8; 3];
    /// comm.reduce_scatter_v_into(&[1, 2, 3], &mut mine, &[3], raccl::Max)?;
    /// # assert_eq!(mine, [1, 2, 3]);
    /// # Ok::<(), raccl::Error>(())
    /// ```
    pub fn reduce_scatter_v_into<T: Element, O: Operation<T>>(
        &self,
        input: &[T],
        output: &mut [T],
        counts: &[usize],
        operation: O,
    ) -> Result<()> {
        self.check_counts("reduce_scatter_v_into", counts, input.len(), "input")?;
        if output.len() != counts[self.rank()] {
            return Err(self.lengths("reduce_scatter_v_into", "output", output.len(), counts[self.rank()]));
        }
        let call = Call {
            digest: digest(counts),
            ..Call::new(CallKind::ReduceScatterV, size_of::<T>(), input.len())
        };
        self.scatter(call, input, output, counts.to_vec(), operation.reducer())
    }

    /// Copies the root's buffer into the buffers of all ranks, which have the same length.
    ///
    /// The root does not wait for the others to enter, except for one that has not yet entered the broadcast before: it may be
    /// one broadcast ahead of them, or else a rank that called something else there would go unnoticed.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`](crate::Error::InvalidArgument) if there is no rank `root`, and as
    /// [`all_reduce`](Communicator::all_reduce).
    ///
    /// ```
    /// # let comm = raccl::Config::new().connect()?;
    /// let mut settings = if comm.rank() == 0 { [1.0, 2.0] } else { [0.0; 2] };
    /// comm.broadcast(&mut settings, 0)?;
    /// # Ok::<(), raccl::Error>(())
    /// ```
    pub fn broadcast<T: Element>(&self, buffer: &mut [T], root: usize) -> Result<()> {
        let data: *mut T = buffer.as_mut_ptr();
        // SAFETY: the buffer is exclusively ours during the call and holds that many elements.
        unsafe { self.broadcast_raw(data.cast(), buffer.len(), size_of::<T>(), root) }
    }

    /// # Safety
    /// `input` and `output` hold `count` elements of the reducer's size; they are one if `in_place`, else apart; nobody else
    /// uses them during the call.
    pub(super) unsafe fn all_reduce_raw(
        &self,
        input: *const u8,
        output: *mut u8,
        count: usize,
        in_place: bool,
        reducer: Reducer<'_>,
    ) -> Result<()> {
        for request in Request::all_reduce(input, output, count, in_place, reducer) {
            // SAFETY: a part of what the caller vouches for.
            unsafe { self.run(request) }?;
        }
        Ok(())
    }

    /// # Safety
    /// `data` holds `count` elements of `element` bytes, and nobody else uses them during the call.
    pub(super) unsafe fn broadcast_raw(
        &self,
        data: *mut u8,
        count: usize,
        element: usize,
        root: usize,
    ) -> Result<()> {
        self.world(root, "broadcast")?;
        let most = round(element);
        let mut begin = 0_usize;
        for index in 0.. {
            let end = count.min(begin.saturating_add(most));
            // A root is below 2^32: every rank has a socket.
            let call =
                Call { root: root as u32, digest: index, ..Call::new(CallKind::Broadcast, element, count) };
            let part = data.wrapping_add(begin * element);
            let request = Request {
                input: part.cast_const(),
                output: part,
                ..Request::movement(call, Collective::Broadcast { root, count: end - begin }, element)
            };
            // SAFETY: a part of what the caller vouches for.
            unsafe { self.run(request) }?;
            begin = end;
            if begin == count {
                break;
            }
        }
        Ok(())
    }

    /// # Safety
    /// As the collective demands of its buffers, during the call.
    pub(super) unsafe fn run(&self, request: Request<'_>) -> Result<()> {
        let submission = self.submission(request);
        // SAFETY: passed on.
        unsafe { self.engine().collective(&self.inner.shared, submission) }
    }

    /// # Safety
    /// As the collective demands of its buffers and reducer, until `Engine::finish` has returned for the result.
    pub(super) unsafe fn start(&self, request: Request<'_>) -> Result<OperationId> {
        let submission = self.submission(request);
        // SAFETY: passed on.
        unsafe { self.engine().submit(&self.inner.shared, submission) }
    }

    fn submission(&self, request: Request<'_>) -> Submission {
        let Request { mut call, mut collective, reducer, input, output, in_place, mut element } = request;
        if element == 0 {
            // Elements without bytes: nothing moves but the headers.
            element = 1;
            collective = without_elements(collective);
        }
        let acc_size = reducer.as_ref().map_or(element, |reducer| reducer.acc_size().max(1));
        let ordered = reducer.as_ref().is_some_and(|reducer| reducer.op() == crate::ReduceOp::Custom);
        let (rank, size) = (self.rank(), self.size());
        let planned = self.inner.planner.plan(collective, rank, size, in_place, element, acc_size, ordered);
        call.algorithm = algorithm_code(planned.plan.algorithm);
        Submission {
            prepared: planned,
            signature: call.encode(),
            operation: call.name(),
            raw_size: element,
            acc_size,
            reducer: reducer.map(|reducer| {
                // SAFETY: only the lifetime changes; the engine uses it until the operation is finished, as the callers of
                // `run` and `start` vouch.
                unsafe { std::mem::transmute::<Reducer<'_>, Reducer<'static>>(reducer) }
            }),
            input,
            output,
            timeouts: self.timeouts,
        }
    }

    pub(super) fn gather<T: Element>(
        &self,
        call: Call,
        input: Option<&[T]>,
        output: &mut [T],
        counts: Vec<usize>,
    ) -> Result<()> {
        let begin: usize = counts[..self.rank()].iter().sum();
        let data: *mut T = output.as_mut_ptr();
        let request = Request {
            input: input.map_or(data.wrapping_add(begin).cast_const(), <[T]>::as_ptr).cast(),
            output: data.cast(),
            in_place: input.is_none(),
            ..Request::movement(call, Collective::AllGather { counts }, size_of::<T>())
        };
        // SAFETY: both slices are borrowed for the call; lengths and counts were checked by the caller.
        unsafe { self.run(request) }
    }

    fn scatter<T: Element>(
        &self,
        call: Call,
        input: &[T],
        output: &mut [T],
        counts: Vec<usize>,
        reducer: Reducer<'_>,
    ) -> Result<()> {
        let request = Request {
            call: with_reducer(call, &reducer),
            collective: Collective::ReduceScatter { counts },
            reducer: Some(reducer),
            input: input.as_ptr().cast(),
            output: output.as_mut_ptr().cast(),
            in_place: false,
            element: size_of::<T>(),
        };
        // SAFETY: both slices are borrowed for the call; lengths and counts were checked by the caller.
        unsafe { self.run(request) }
    }

    fn scatter_in_place<'b, T: Element>(
        &self,
        call: Call,
        buffer: &'b mut [T],
        counts: &[usize],
        reducer: Reducer<'_>,
    ) -> Result<&'b mut [T]> {
        let begin: usize = counts[..self.rank()].iter().sum();
        let mine = begin..begin + counts[self.rank()];
        let data: *mut T = buffer.as_mut_ptr();
        let request = Request {
            call: with_reducer(call, &reducer),
            collective: Collective::ReduceScatter { counts: counts.to_vec() },
            reducer: Some(reducer),
            input: data.cast_const().cast(),
            output: data.wrapping_add(begin).cast(),
            in_place: true,
            element: size_of::<T>(),
        };
        // SAFETY: the slice is borrowed for the call; lengths and counts were checked by the caller.
        unsafe { self.run(request) }?;
        Ok(&mut buffer[mine])
    }

    pub(super) fn equal_parts(&self, operation: &'static str, length: usize) -> Result<Vec<usize>> {
        if !length.is_multiple_of(self.size()) {
            let reason =
                format!("a buffer of {length} elements does not divide into {} equal parts", self.size());
            return Err(self.invalid(operation, format!("{reason}; {operation}_v takes unequal ones")));
        }
        Ok(vec![length / self.size(); self.size()])
    }

    pub(super) fn check_counts(
        &self,
        operation: &'static str,
        counts: &[usize],
        length: usize,
        name: &str,
    ) -> Result<()> {
        if counts.len() != self.size() {
            let reason = format!("{} counts for {} ranks", counts.len(), self.size());
            return Err(self.invalid(operation, reason));
        }
        let sum = counts.iter().try_fold(0_usize, |sum, &count| sum.checked_add(count));
        if sum != Some(length) {
            let sum = sum.map_or("more than memory holds".to_owned(), |sum| sum.to_string());
            return Err(self.invalid(
                operation,
                format!("the counts add up to {sum}, the {name} has {length} elements"),
            ));
        }
        Ok(())
    }

    fn lengths(&self, operation: &'static str, name: &str, is: usize, expected: usize) -> crate::Error {
        self.invalid(operation, format!("the {name} has {is} elements instead of {expected}"))
    }
}

impl<'a> Request<'a> {
    /// The rounds of an all-reduce, one at least. The same on all ranks, however they make the call.
    pub(super) fn all_reduce(
        input: *const u8,
        output: *mut u8,
        count: usize,
        in_place: bool,
        reducer: Reducer<'a>,
    ) -> impl Iterator<Item = Request<'a>> {
        let element = reducer.raw_size();
        let most = round(element);
        (0..count.div_ceil(most).max(1)).map(move |index| {
            let begin = index * most;
            let end = count.min(begin.saturating_add(most));
            // There are fewer than 2^32 rounds in any memory.
            let call = Call { digest: index as u32, ..reduction(CallKind::AllReduce, &reducer, count) };
            Request {
                call,
                collective: Collective::AllReduce { count: end - begin },
                reducer: Some(reducer),
                input: input.wrapping_add(begin * element),
                output: output.wrapping_add(begin * element),
                in_place,
                element,
            }
        })
    }
}

impl Request<'_> {
    /// A gather whose buffers are still to be named.
    pub(super) fn gather(call: Call, counts: Vec<usize>, element: usize) -> Request<'static> {
        Request::movement(call, Collective::AllGather { counts }, element)
    }

    fn movement(call: Call, collective: Collective, element: usize) -> Request<'static> {
        // Pointers of an operation without buffers are never followed.
        let empty: &mut [u8] = &mut [];
        let in_place = matches!(collective, Collective::Broadcast { .. });
        Request {
            call,
            collective,
            reducer: None,
            input: empty.as_ptr(),
            output: empty.as_mut_ptr(),
            in_place,
            element,
        }
    }
}

/// The signature of a reduction.
pub(super) fn reduction(kind: CallKind, reducer: &Reducer<'_>, count: usize) -> Call {
    with_reducer(Call::new(kind, reducer.raw_size(), count), reducer)
}

fn with_reducer(call: Call, reducer: &Reducer<'_>) -> Call {
    Call { dtype: reducer.dtype_code(), reduce: reducer.op().code(), ..call }
}

fn without_elements(collective: Collective) -> Collective {
    match collective {
        Collective::Barrier => Collective::Barrier,
        Collective::AllReduce { .. } => Collective::AllReduce { count: 0 },
        Collective::AllGather { counts } => Collective::AllGather { counts: vec![0; counts.len()] },
        Collective::ReduceScatter { counts } => Collective::ReduceScatter { counts: vec![0; counts.len()] },
        Collective::Broadcast { root, .. } => Collective::Broadcast { root, count: 0 },
    }
}

/// Elements in one round.
fn round(element: usize) -> usize {
    ROUND.checked_div(element).map_or(usize::MAX, |most| most.max(1))
}
