//! A caller's own operation, with its types erased.

use std::marker::PhantomData;

use super::dtype::Element;
use super::reducer::Source;
use super::tree;

/// A borrowed `Fn(&T, &T) -> T` that has forgotten `T` and its own type.
#[derive(Clone, Copy)]
pub(super) struct CustomFold<'a> {
    /// Points to the function, borrowed for `'a`.
    function: *const (),
    /// The instance of [`fold`] for the types of the function.
    fold: unsafe fn(*const (), &[Source], *mut u8, usize),
    size: usize,
    borrow: PhantomData<&'a (dyn Sync + Send)>,
}

// SAFETY: `function` stands for a shared borrow of a function that `new` asked to be `Sync`; calling it is all
// that is done with it.
unsafe impl Send for CustomFold<'_> {}
// SAFETY: as for `Send`.
unsafe impl Sync for CustomFold<'_> {}

impl<'a> CustomFold<'a> {
    pub(super) fn new<T, F>(function: &'a F) -> Self
    where
        T: Element,
        F: Fn(&T, &T) -> T + Send + Sync,
    {
        Self {
            function: (&raw const *function).cast(),
            fold: fold::<T, F>,
            size: size_of::<T>(),
            borrow: PhantomData,
        }
    }

    /// Bytes of one element.
    pub(super) fn size(self) -> usize {
        self.size
    }

    /// Folds the sources in the canonical tree. A panic of the function passes through.
    ///
    /// # Safety
    ///
    /// As for [`Reducer::fold`](super::Reducer::fold), for elements of [`size`](Self::size) bytes.
    pub(super) unsafe fn fold(self, sources: &[Source], dst: *mut u8, count: usize) {
        // SAFETY: `new` took `fold` and `function` of the same types, and `'a` keeps the function alive; the
        // memory is as the caller promises.
        unsafe { (self.fold)(self.function, sources, dst, count) }
    }
}

/// # Safety
///
/// `function` points to a live `F`; for the rest as for [`Reducer::fold`](super::Reducer::fold).
unsafe fn fold<T, F>(function: *const (), sources: &[Source], dst: *mut u8, count: usize)
where
    T: Element,
    F: Fn(&T, &T) -> T,
{
    // SAFETY: the caller passes a pointer to a live `F`, which is only ever borrowed shared.
    let function = unsafe { &*function.cast::<F>() };
    for index in 0..count {
        let at = index * size_of::<T>();
        let load = |source: usize| {
            // SAFETY: `at` is inside the `count` elements that the caller promises to be readable.
            let element = unsafe { sources[source].ptr.add(at) };
            // SAFETY: as above, at any alignment; any bytes are a `T`, which is `Pod`.
            unsafe { element.cast::<T>().read_unaligned() }
        };
        let folded = tree::fold(sources.len(), load, |left, right| function(&left, &right));
        // SAFETY: `at` is inside the `count` elements that the caller promises to be writable.
        let element = unsafe { dst.add(at) };
        // SAFETY: as above, at any alignment; what aliases this element has been read.
        unsafe { element.cast::<T>().write_unaligned(folded) }
    }
}
