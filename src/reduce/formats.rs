//! How elements lie in memory and come into vector registers.

use std::marker::PhantomData;

use super::vector::Vector;

/// A kind of element in memory, and the registers that hold a few.
///
/// # Safety
///
/// Implementors access no more memory than each function says. As for [`Vector`], every function needs an
/// instruction set, and memory need not be aligned unless a function says so.
pub(super) unsafe trait Format {
    type Vector: Vector;

    /// The values of [`LANES`](Self::LANES) elements: one vector or two.
    type Register: AsMut<[Self::Vector]> + AsRef<[Self::Vector]> + Copy;

    /// How partial results of these elements lie in memory.
    type Acc: Format<Vector = Self::Vector, Register = Self::Register>;

    /// Bytes of one element.
    const SIZE: usize;

    /// Elements of a register.
    const LANES: usize;

    /// Whether partial results lie in memory just as the elements do.
    const ACC_IS_RAW: bool;

    /// # Safety
    ///
    /// `LANES` elements are readable, and the processor has the instruction set.
    unsafe fn load(from: *const u8) -> Self::Register;

    /// # Safety
    ///
    /// `LANES` elements are writable, and the processor has the instruction set.
    unsafe fn store(value: Self::Register, to: *mut u8);

    /// Stores past the cache.
    ///
    /// # Safety
    ///
    /// As for `store`; `to` is aligned to the size of the vector.
    unsafe fn stream(value: Self::Register, to: *mut u8);

    /// Loads the first lanes; the others hold any number.
    ///
    /// # Safety
    ///
    /// `lanes <= LANES` elements are readable, and the processor has the instruction set.
    #[inline(always)]
    unsafe fn load_first(from: *const u8, lanes: usize) -> Self::Register {
        let mut buffer = Buffer::zeroed::<Self>();
        // SAFETY: readable by the caller's promise; the buffer has room for `LANES` elements and is our own.
        unsafe { Self::Vector::fill(&mut buffer, from, lanes * Self::SIZE) };
        // SAFETY: `LANES` elements are in the buffer.
        unsafe { Self::load(buffer.0.as_ptr()) }
    }

    /// Stores the first lanes.
    ///
    /// # Safety
    ///
    /// `lanes <= LANES` elements are writable, and the processor has the instruction set.
    #[inline(always)]
    unsafe fn store_first(value: Self::Register, to: *mut u8, lanes: usize) {
        let mut buffer = Buffer::zeroed::<Self>();
        // SAFETY: the buffer has room for `LANES` elements.
        unsafe { Self::store(value, buffer.0.as_mut_ptr()) };
        // SAFETY: writable by the caller's promise; the buffer holds `LANES` elements and is our own.
        unsafe { Self::Vector::drain(&buffer, to, lanes * Self::SIZE) }
    }
}

/// f32, and partial results of f32.
pub(super) struct Singles<V>(PhantomData<V>);

/// f16.
pub(super) struct F16s<V>(PhantomData<V>);

/// Partial results of f16.
pub(super) struct F16Sums<V>(PhantomData<V>);

/// bf16.
pub(super) struct Bf16s<V>(PhantomData<V>);

/// Partial results of bf16.
pub(super) struct Bf16Sums<V>(PhantomData<V>);

// SAFETY: each function asks its caller for what it asks of the vector.
unsafe impl<V: Vector> Format for Singles<V> {
    type Vector = V;
    type Register = [V; 1];
    type Acc = Self;
    const SIZE: usize = 4;
    const LANES: usize = V::LANES;
    const ACC_IS_RAW: bool = true;

    #[inline(always)]
    unsafe fn load(from: *const u8) -> [V; 1] {
        // SAFETY: the caller's promises are the same ones.
        [unsafe { V::load(from.cast()) }]
    }

    #[inline(always)]
    unsafe fn store([value]: [V; 1], to: *mut u8) {
        // SAFETY: the caller's promises are the same ones.
        unsafe { value.store(to.cast()) }
    }

    #[inline(always)]
    unsafe fn stream([value]: [V; 1], to: *mut u8) {
        // SAFETY: the caller's promises are the same ones.
        unsafe { value.stream(to.cast()) }
    }
}

macro_rules! halves {
    ($format:ident, $acc:ident, $load:ident, $store:ident, $stream:ident) => {
        // SAFETY: each function asks its caller for what it asks of the vector.
        unsafe impl<V: Vector> Format for $format<V> {
            type Vector = V;
            type Register = [V; 2];
            type Acc = $acc<V>;
            const SIZE: usize = 2;
            const LANES: usize = 2 * V::LANES;
            const ACC_IS_RAW: bool = false;

            #[inline(always)]
            unsafe fn load(from: *const u8) -> [V; 2] {
                // SAFETY: the caller's promises are the same ones.
                unsafe { V::$load(from) }
            }

            #[inline(always)]
            unsafe fn store(value: [V; 2], to: *mut u8) {
                // SAFETY: the caller's promises are the same ones.
                unsafe { V::$store(value, to) }
            }

            #[inline(always)]
            unsafe fn stream(value: [V; 2], to: *mut u8) {
                // SAFETY: the caller's promises are the same ones.
                unsafe { V::$stream(value, to) }
            }
        }
    };
}

halves!(F16s, F16Sums, load_f16, store_f16, stream_f16);
halves!(Bf16s, Bf16Sums, load_bf16, store_bf16, stream_bf16);

// SAFETY: each function asks its caller for what it asks of the vector.
unsafe impl<V: Vector> Format for F16Sums<V> {
    type Vector = V;
    type Register = [V; 2];
    type Acc = Self;
    const SIZE: usize = 4;
    const LANES: usize = 2 * V::LANES;
    const ACC_IS_RAW: bool = true;

    #[inline(always)]
    unsafe fn load(from: *const u8) -> [V; 2] {
        let from = from.cast::<f32>();
        // SAFETY: the first half of what the caller promises.
        let low = unsafe { V::load(from) };
        // SAFETY: two vectors are readable by the caller's promise.
        let from = unsafe { from.add(V::LANES) };
        // SAFETY: as above.
        let high = unsafe { V::load(from) };
        [low, high]
    }

    #[inline(always)]
    unsafe fn store([low, high]: [V; 2], to: *mut u8) {
        let to = to.cast::<f32>();
        // SAFETY: the first half of what the caller promises.
        unsafe { low.store(to) };
        // SAFETY: two vectors are writable by the caller's promise.
        let to = unsafe { to.add(V::LANES) };
        // SAFETY: as above.
        unsafe { high.store(to) }
    }

    #[inline(always)]
    unsafe fn stream([low, high]: [V; 2], to: *mut u8) {
        let to = to.cast::<f32>();
        // SAFETY: the first half of what the caller promises.
        unsafe { low.stream(to) };
        // SAFETY: two vectors are writable by the caller's promise.
        let to = unsafe { to.add(V::LANES) };
        // SAFETY: as above; what lies one vector after aligned memory is aligned.
        unsafe { high.stream(to) }
    }
}

// SAFETY: each function asks its caller for what it asks of the vector.
unsafe impl<V: Vector> Format for Bf16Sums<V> {
    type Vector = V;
    type Register = [V; 2];
    type Acc = Self;
    const SIZE: usize = 4;
    const LANES: usize = 2 * V::LANES;
    const ACC_IS_RAW: bool = true;

    #[inline(always)]
    unsafe fn load(from: *const u8) -> [V; 2] {
        // SAFETY: the caller's promises are the same ones.
        unsafe { V::load_spread(from.cast()) }
    }

    #[inline(always)]
    unsafe fn store(value: [V; 2], to: *mut u8) {
        // SAFETY: the caller's promise about the processor.
        let value = unsafe { V::gather(value) };
        // SAFETY: the caller's promises are the same ones.
        unsafe { F16Sums::store(value, to) }
    }

    #[inline(always)]
    unsafe fn stream(value: [V; 2], to: *mut u8) {
        // SAFETY: the caller's promise about the processor.
        let value = unsafe { V::gather(value) };
        // SAFETY: the caller's promises are the same ones.
        unsafe { F16Sums::stream(value, to) }
    }
}

/// Room for one register of any format.
#[repr(align(64))]
pub(super) struct Buffer(pub(super) [u8; Self::SIZE]);

impl Buffer {
    pub(super) const SIZE: usize = 128;

    #[inline(always)]
    fn zeroed<F: Format + ?Sized>() -> Self {
        const { assert!(F::LANES * F::SIZE <= Self::SIZE, "a register of this format is too large") };
        Self([0; Self::SIZE])
    }
}
