//! Finding the library and its functions at run time.

use std::ffi::{CStr, CString, c_char, c_void};
use std::fmt;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::abi;
use crate::device::DeviceList;
use crate::error::{Attempt, Error};

/// Names under which the system's own library is looked for.
const SYSTEM: &[&str] = if cfg!(target_vendor = "apple") {
    &["librdma.dylib", "/usr/lib/librdma.dylib"]
} else {
    &["libibverbs.so.1"]
};

/// Whose rules a library follows.
///
/// They differ in more than error numbers: Apple's driver has UC queue pairs only and counts queue depths in frames
/// of 4 KiB, Linux has RC too and drops a UC message that meets no posted receive.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Provider {
    /// Apple's RDMA over Thunderbolt, or a stand-in that says it behaves so.
    Apple,
    /// rdma-core's libibverbs.
    Linux,
}

/// A loaded verbs library.
///
/// Cheap to clone. The library itself stays loaded until the process ends, since drivers do not survive being
/// unloaded.
///
/// ```
/// use std::path::Path;
///
/// let error = raccl_sys::Library::load(Some(Path::new("/nowhere/librdma.dylib"))).unwrap_err();
/// assert!(error.to_string().contains("/nowhere/librdma.dylib"));
/// ```
#[derive(Clone)]
pub struct Library {
    shared: Arc<Shared>,
}

struct Shared {
    name: PathBuf,
    provider: Provider,
    functions: Functions,
}

impl Library {
    /// Loads the library at `path`, or the system's own where none is given.
    ///
    /// That it loads does not mean that there are devices: `librdma.dylib` is on Macs without Thunderbolt 5 too.
    pub fn load(path: Option<&Path>) -> Result<Library, Error> {
        let names: Vec<&Path> = match path {
            Some(path) => vec![path],
            None => SYSTEM.iter().map(Path::new).collect(),
        };
        let mut tried = Vec::new();
        for name in names {
            match open(name) {
                Ok(handle) => return Library::of_handle(handle, name),
                Err(reason) => tried.push(Attempt { name: name.into(), reason }),
            }
        }
        Err(Error::NoLibrary { tried })
    }

    /// The name or path it was loaded by.
    pub fn name(&self) -> &Path {
        &self.shared.name
    }

    /// Whose rules it follows.
    pub fn provider(&self) -> Provider {
        self.shared.provider
    }

    /// The devices of this machine; there may be none.
    pub fn devices(&self) -> Result<DeviceList, Error> {
        DeviceList::of(self)
    }

    /// The functions.
    pub(crate) fn functions(&self) -> &Functions {
        &self.shared.functions
    }

    fn of_handle(handle: Handle, name: &Path) -> Result<Library, Error> {
        let functions = Functions::find(&handle)
            .map_err(|symbols| Error::MissingSymbols { library: name.into(), symbols })?;
        let provider = provider(&handle);
        Ok(Library { shared: Arc::new(Shared { name: name.into(), provider, functions }) })
    }
}

impl fmt::Debug for Library {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Library")
            .field("name", &self.shared.name)
            .field("provider", &self.shared.provider)
            .finish()
    }
}

/// Declares [`Functions`] and how each is found.
macro_rules! functions {
    (required { $($required:ident)* } optional { $($optional:ident)* }) => {
        /// The exported functions of a library.
        pub(crate) struct Functions {
            $(pub(crate) $required: abi::$required,)*
            $(pub(crate) $optional: Option<abi::$optional>,)*
        }

        impl Functions {
            /// Looks each up; those required and missing are the error.
            fn find(handle: &Handle) -> Result<Functions, Vec<&'static str>> {
                let mut missing = Vec::new();
                $(let $required = handle.symbol(concat!("ibv_", stringify!($required)));
                if $required.is_none() {
                    missing.push(concat!("ibv_", stringify!($required)));
                })*
                if let ($(Some($required),)*) = ($($required,)*) {
                    Ok(Functions {
                        // SAFETY: the library exports a function of this name, whose type the verbs interface fixes.
                        $($required: unsafe { std::mem::transmute::<*mut c_void, abi::$required>($required) },)*
                        // SAFETY: as above; a null pointer is `None`.
                        $($optional: unsafe {
                            std::mem::transmute::<*mut c_void, Option<abi::$optional>>(
                                handle.symbol(concat!("ibv_", stringify!($optional))).unwrap_or(std::ptr::null_mut()),
                            )
                        },)*
                    })
                } else {
                    Err(missing)
                }
            }
        }
    };
}

functions! {
    required {
        get_device_list free_device_list get_device_name open_device close_device query_port query_gid
        alloc_pd dealloc_pd reg_mr dereg_mr create_cq destroy_cq create_qp modify_qp destroy_qp
    }
    optional { query_device query_qp }
}

/// What `dlopen` returned. Never closed.
struct Handle(*mut c_void);

impl Handle {
    /// The address of a symbol, `None` where there is none.
    fn symbol(&self, name: &str) -> Option<*mut c_void> {
        let name = CString::new(name).ok()?;
        // SAFETY: the handle came from `dlopen` and is never closed; `name` is a C string that outlives the call.
        let address = unsafe { libc::dlsym(self.0, name.as_ptr()) };
        (!address.is_null()).then_some(address)
    }
}

fn open(path: &Path) -> Result<Handle, String> {
    let name =
        CString::new(path.as_os_str().as_bytes()).map_err(|_| "the name contains a zero byte".to_string())?;
    // SAFETY: `name` is a C string that outlives the call. Running the library's initialisers is what the caller
    // asks for by naming it.
    let handle = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
    if handle.is_null() { Err(last_error()) } else { Ok(Handle(handle)) }
}

/// What the dynamic loader says about its last failure in this thread.
fn last_error() -> String {
    // SAFETY: takes no arguments; the text belongs to this thread until its next call of the loader.
    let text: *const c_char = unsafe { libc::dlerror() };
    if text.is_null() {
        return "the loader gives no reason".into();
    }
    // SAFETY: not null, so it is a C string; no other call of the loader happens while it is copied.
    unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
}

/// Whose rules the library follows: what it says itself, or else its system's.
fn provider(handle: &Handle) -> Provider {
    let system = if cfg!(target_vendor = "apple") { Provider::Apple } else { Provider::Linux };
    let Some(address) = handle.symbol("raccl_verbs_provider") else {
        return system;
    };
    // SAFETY: a library that exports this name gives it this type; see `abi::provider`.
    let says = unsafe { std::mem::transmute::<*mut c_void, abi::provider>(address) };
    // SAFETY: the function takes nothing and may be called at any time.
    if unsafe { says() } == abi::PROVIDER_APPLE { Provider::Apple } else { Provider::Linux }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_tried_is_in_the_error() {
        let error =
            Library::load(Some(Path::new("/nowhere/libverbs.so"))).expect_err("there is no such file");
        let Error::NoLibrary { tried } = &error else { panic!("{error}") };
        assert_eq!(tried.len(), 1);
        assert!(error.to_string().contains("/nowhere/libverbs.so"), "{error}");
    }

    #[test]
    fn another_library_is_refused_by_what_it_lacks() {
        let name = if cfg!(target_vendor = "apple") { "libSystem.B.dylib" } else { "libc.so.6" };
        let error = Library::load(Some(Path::new(name))).expect_err("the C library has no verbs");
        let Error::MissingSymbols { symbols, .. } = &error else { panic!("{error}") };
        assert!(symbols.contains(&"ibv_open_device"));
        assert!(!symbols.contains(&"ibv_query_qp"), "it is optional");
    }

    #[test]
    fn a_name_with_a_zero_byte_is_an_error() {
        assert!(matches!(Library::load(Some(Path::new("a\0b"))), Err(Error::NoLibrary { .. })));
    }
}
