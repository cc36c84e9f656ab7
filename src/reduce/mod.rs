//! Element types, reduction operations and the kernels that fold them.

/// How an element is represented in a buffer or message.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Repr {
    /// As the user has it.
    Raw,
    /// As partial results have it: f16 and bf16 as f32, everything else unchanged.
    Acc,
}
