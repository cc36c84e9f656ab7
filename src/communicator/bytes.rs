//! The same operations on plain bytes, for those who learn the element type at run time.

use std::sync::Arc;

use super::{
    Buffer, Communicator, Registration, Uncopied,
    collectives::{Request, reduction},
};
use crate::{
    engine::call::{Call, CallKind, digest},
    error::Result,
    plan::Collective,
    reduce::{DType, ReduceOp, Reducer},
};

/// A communicator without type parameters: what a framework's adapter holds as `Arc<dyn ByteCommunicator>`.
///
/// Buffers are bytes of any alignment, in native byte order. A call here and the same call with types on another rank are one
/// collective. See the methods of [`Communicator`] for what each does; the errors are the same, and
/// [`Error::InvalidArgument`](crate::Error::InvalidArgument) if an operation has no meaning for a type or a length is no whole
/// number of elements.
///
/// ```
/// use std::sync::Arc;
/// use raccl::{ByteCommunicator, DType, ReduceOp};
///
/// let comm: Arc<dyn ByteCommunicator> = Arc::new(raccl::Config::new().connect()?);
/// let mut bytes = 1.5_f32.to_ne_bytes();
/// comm.all_reduce(&mut bytes, DType::F32, ReduceOp::Sum)?;
/// assert_eq!(f32::from_ne_bytes(bytes), 1.5);
/// assert!(comm.all_reduce(&mut bytes, DType::F32, ReduceOp::BitAnd).is_err());
/// # Ok::<(), raccl::Error>(())
/// ```
pub trait ByteCommunicator: Send + Sync {
    /// See [`Communicator::rank`].
    fn rank(&self) -> usize;

    /// See [`Communicator::size`].
    fn size(&self) -> usize;

    /// See [`Communicator::barrier`].
    ///
    /// # Errors
    /// See the trait.
    fn barrier(&self) -> Result<()>;

    /// See [`Communicator::all_reduce`].
    ///
    /// # Errors
    /// See the trait.
    fn all_reduce(&self, buffer: &mut [u8], dtype: DType, op: ReduceOp) -> Result<()>;

    /// See [`Communicator::all_reduce_into`].
    ///
    /// # Errors
    /// See the trait.
    fn all_reduce_into(&self, input: &[u8], output: &mut [u8], dtype: DType, op: ReduceOp) -> Result<()>;

    /// See [`Communicator::all_gather`].
    ///
    /// # Errors
    /// See the trait.
    fn all_gather(&self, buffer: &mut [u8], dtype: DType) -> Result<()>;

    /// See [`Communicator::all_gather_into`].
    ///
    /// # Errors
    /// See the trait.
    fn all_gather_into(&self, input: &[u8], output: &mut [u8], dtype: DType) -> Result<()>;

    /// See [`Communicator::all_gather_v_into`]; `counts` in elements.
    ///
    /// # Errors
    /// See the trait.
    fn all_gather_v_into(
        &self,
        input: &[u8],
        output: &mut [u8],
        counts: &[usize],
        dtype: DType,
    ) -> Result<()>;

    /// See [`Communicator::reduce_scatter_into`].
    ///
    /// # Errors
    /// See the trait.
    fn reduce_scatter_into(&self, input: &[u8], output: &mut [u8], dtype: DType, op: ReduceOp) -> Result<()>;

    /// See [`Communicator::reduce_scatter_v_into`]; `counts` in elements.
    ///
    /// # Errors
    /// See the trait.
    fn reduce_scatter_v_into(
        &self,
        input: &[u8],
        output: &mut [u8],
        counts: &[usize],
        dtype: DType,
        op: ReduceOp,
    ) -> Result<()>;

    /// See [`Communicator::broadcast`].
    ///
    /// # Errors
    /// See the trait.
    fn broadcast(&self, buffer: &mut [u8], dtype: DType, root: usize) -> Result<()>;

    /// See [`Communicator::send`].
    ///
    /// # Errors
    /// See the trait.
    fn send(&self, buffer: &[u8], peer: usize, tag: u64) -> Result<()>;

    /// See [`Communicator::recv`]; returns bytes.
    ///
    /// # Errors
    /// See the trait.
    fn recv(&self, buffer: &mut [u8], peer: usize, tag: u64) -> Result<usize>;

    /// See [`Communicator::send_recv`]; returns bytes.
    ///
    /// # Errors
    /// See the trait.
    fn send_recv(&self, send: &[u8], to: usize, recv: &mut [u8], from: usize, tag: u64) -> Result<usize>;

    /// See [`Communicator::allocate`]; `length` in bytes.
    ///
    /// # Errors
    /// See the trait.
    fn allocate(&self, length: usize) -> Result<Buffer<u8>>;

    /// See [`Communicator::register`].
    ///
    /// # Safety
    /// As there.
    ///
    /// # Errors
    /// See the trait.
    unsafe fn register(&self, start: *mut u8, bytes: usize) -> Result<Registration>;

    /// See [`Communicator::uncopied`].
    fn uncopied(&self) -> Uncopied;

    /// See [`Communicator::split`].
    ///
    /// # Errors
    /// See the trait.
    fn split(&self, color: Option<u64>, key: i64) -> Result<Option<Arc<dyn ByteCommunicator>>>;

    /// See [`Communicator::abort`].
    fn abort(&self);
}

impl ByteCommunicator for Communicator {
    fn rank(&self) -> usize {
        self.rank()
    }

    fn size(&self) -> usize {
        self.size()
    }

    fn barrier(&self) -> Result<()> {
        self.barrier()
    }

    fn all_reduce(&self, buffer: &mut [u8], dtype: DType, op: ReduceOp) -> Result<()> {
        let reducer = self.reducer("all_reduce", dtype, op)?;
        let count = self.elements("all_reduce", buffer.len(), dtype)?;
        let data = buffer.as_mut_ptr();
        // SAFETY: the buffer is exclusively ours during the call and holds that many elements.
        unsafe { self.all_reduce_raw(data.cast_const(), data, count, true, reducer) }
    }

    fn all_reduce_into(&self, input: &[u8], output: &mut [u8], dtype: DType, op: ReduceOp) -> Result<()> {
        let reducer = self.reducer("all_reduce_into", dtype, op)?;
        let count = self.elements("all_reduce_into", input.len(), dtype)?;
        self.same_length("all_reduce_into", "output", output.len(), Some(input.len()))?;
        // SAFETY: both slices are borrowed for the call and hold that many elements.
        unsafe { self.all_reduce_raw(input.as_ptr(), output.as_mut_ptr(), count, false, reducer) }
    }

    fn all_gather(&self, buffer: &mut [u8], dtype: DType) -> Result<()> {
        let count = self.elements("all_gather", buffer.len(), dtype)?;
        let counts = self.equal_parts("all_gather", count)?;
        let data = buffer.as_mut_ptr();
        let request = Request {
            input: data.wrapping_add(self.rank() * counts[0] * dtype.size()).cast_const(),
            output: data,
            in_place: true,
            ..Request::gather(Call::new(CallKind::AllGather, dtype.size(), count), counts, dtype.size())
        };
        // SAFETY: the slice is borrowed for the call and has all parts.
        unsafe { self.run(request) }
    }

    fn all_gather_into(&self, input: &[u8], output: &mut [u8], dtype: DType) -> Result<()> {
        let count = self.elements("all_gather_into", input.len(), dtype)?;
        self.same_length("all_gather_into", "output", output.len(), input.len().checked_mul(self.size()))?;
        let call = Call::new(CallKind::AllGather, dtype.size(), count * self.size());
        let request = Request {
            input: input.as_ptr(),
            output: output.as_mut_ptr(),
            ..Request::gather(call, vec![count; self.size()], dtype.size())
        };
        // SAFETY: both slices are borrowed for the call; the lengths were checked.
        unsafe { self.run(request) }
    }

    fn all_gather_v_into(
        &self,
        input: &[u8],
        output: &mut [u8],
        counts: &[usize],
        dtype: DType,
    ) -> Result<()> {
        let count = self.elements("all_gather_v_into", output.len(), dtype)?;
        self.check_counts("all_gather_v_into", counts, count, "output")?;
        self.same_length(
            "all_gather_v_into",
            "input",
            input.len(),
            Some(counts[self.rank()] * dtype.size()),
        )?;
        let call = Call { digest: digest(counts), ..Call::new(CallKind::AllGatherV, dtype.size(), count) };
        let request = Request {
            input: input.as_ptr(),
            output: output.as_mut_ptr(),
            ..Request::gather(call, counts.to_vec(), dtype.size())
        };
        // SAFETY: both slices are borrowed for the call; the lengths were checked.
        unsafe { self.run(request) }
    }

    fn reduce_scatter_into(&self, input: &[u8], output: &mut [u8], dtype: DType, op: ReduceOp) -> Result<()> {
        let reducer = self.reducer("reduce_scatter_into", dtype, op)?;
        let count = self.elements("reduce_scatter_into", output.len(), dtype)?;
        self.same_length("reduce_scatter_into", "input", input.len(), output.len().checked_mul(self.size()))?;
        let call = reduction(CallKind::ReduceScatter, &reducer, count * self.size());
        // SAFETY: both slices are borrowed for the call; the lengths were checked.
        unsafe { self.scatter_bytes(call, input, output, vec![count; self.size()], reducer) }
    }

    fn reduce_scatter_v_into(
        &self,
        input: &[u8],
        output: &mut [u8],
        counts: &[usize],
        dtype: DType,
        op: ReduceOp,
    ) -> Result<()> {
        let reducer = self.reducer("reduce_scatter_v_into", dtype, op)?;
        let count = self.elements("reduce_scatter_v_into", input.len(), dtype)?;
        self.check_counts("reduce_scatter_v_into", counts, count, "input")?;
        self.same_length(
            "reduce_scatter_v_into",
            "output",
            output.len(),
            Some(counts[self.rank()] * dtype.size()),
        )?;
        let call = Call { digest: digest(counts), ..reduction(CallKind::ReduceScatterV, &reducer, count) };
        // SAFETY: both slices are borrowed for the call; the lengths were checked.
        unsafe { self.scatter_bytes(call, input, output, counts.to_vec(), reducer) }
    }

    fn broadcast(&self, buffer: &mut [u8], dtype: DType, root: usize) -> Result<()> {
        let count = self.elements("broadcast", buffer.len(), dtype)?;
        // SAFETY: the buffer is exclusively ours during the call and holds that many elements.
        unsafe { self.broadcast_raw(buffer.as_mut_ptr(), count, dtype.size(), root) }
    }

    fn send(&self, buffer: &[u8], peer: usize, tag: u64) -> Result<()> {
        self.send(buffer, peer, tag)
    }

    fn recv(&self, buffer: &mut [u8], peer: usize, tag: u64) -> Result<usize> {
        self.recv(buffer, peer, tag)
    }

    fn send_recv(&self, send: &[u8], to: usize, recv: &mut [u8], from: usize, tag: u64) -> Result<usize> {
        self.send_recv(send, to, recv, from, tag)
    }

    fn allocate(&self, length: usize) -> Result<Buffer<u8>> {
        self.allocate(length)
    }

    unsafe fn register(&self, start: *mut u8, bytes: usize) -> Result<Registration> {
        // SAFETY: the caller's promise is the same.
        unsafe { self.register(start, bytes) }
    }

    fn uncopied(&self) -> Uncopied {
        self.uncopied()
    }

    fn split(&self, color: Option<u64>, key: i64) -> Result<Option<Arc<dyn ByteCommunicator>>> {
        Ok(self.split(color, key)?.map(|part| Arc::new(part) as Arc<dyn ByteCommunicator>))
    }

    fn abort(&self) {
        self.abort();
    }
}

impl Communicator {
    /// # Safety
    /// `input` and `output` have the lengths that `counts` says.
    unsafe fn scatter_bytes(
        &self,
        call: Call,
        input: &[u8],
        output: &mut [u8],
        counts: Vec<usize>,
        reducer: Reducer<'_>,
    ) -> Result<()> {
        let element = reducer.raw_size();
        let request = Request {
            call,
            collective: Collective::ReduceScatter { counts },
            reducer: Some(reducer),
            input: input.as_ptr(),
            output: output.as_mut_ptr(),
            in_place: false,
            element,
        };
        // SAFETY: both slices are borrowed for the call; the caller checked the lengths.
        unsafe { self.run(request) }
    }

    fn reducer(&self, operation: &'static str, dtype: DType, op: ReduceOp) -> Result<Reducer<'static>> {
        Reducer::builtin(dtype, op).ok_or_else(|| {
            self.invalid(operation, format!("{op} has no meaning for elements of type {dtype}"))
        })
    }

    fn elements(&self, operation: &'static str, bytes: usize, dtype: DType) -> Result<usize> {
        if !bytes.is_multiple_of(dtype.size()) {
            let reason =
                format!("{bytes} bytes are no whole number of {dtype} elements of {} bytes", dtype.size());
            return Err(self.invalid(operation, reason));
        }
        Ok(bytes / dtype.size())
    }

    fn same_length(
        &self,
        operation: &'static str,
        name: &str,
        is: usize,
        expected: Option<usize>,
    ) -> Result<()> {
        match expected {
            Some(expected) if expected == is => Ok(()),
            Some(expected) => {
                Err(self.invalid(operation, format!("the {name} has {is} bytes instead of {expected}")))
            }
            None => {
                Err(self.invalid(operation, format!("the {name} would have more bytes than memory holds")))
            }
        }
    }
}
