//! Messages for which the protos crate has no type, read field by field. Unused fields are skipped.

use protobuf::CodedInputStream;
use protobuf::rt::skip_field_for_tag;

use super::Options;

const fn text(field: u32) -> u32 {
    (field << 3) | 2
}

const fn number(field: u32) -> u32 {
    field << 3
}

/// `runtimeoptions.v1.Options`.
#[derive(Default)]
pub(super) struct Generic {
    /// A file with the table.
    pub(super) config_path: String,
    /// The table itself.
    pub(super) config_body: Vec<u8>,
}

impl Generic {
    /// Reads the message.
    pub(super) fn decode(bytes: &[u8]) -> protobuf::Result<Self> {
        const CONFIG_PATH: u32 = text(2);
        const CONFIG_BODY: u32 = text(3);
        let mut generic = Self::default();
        let mut input = CodedInputStream::from_bytes(bytes);
        while let Some(tag) = input.read_raw_tag_or_eof()? {
            match tag {
                CONFIG_PATH => generic.config_path = input.read_string()?,
                CONFIG_BODY => generic.config_body = input.read_bytes()?,
                other => skip_field_for_tag(other, &mut input)?,
            }
        }
        Ok(generic)
    }
}

/// `containerd.linux.runc.CreateOptions`, see `runtime/linux/runctypes/runc.proto` of containerd
/// 1.7.
pub(super) fn first_shims_options(bytes: &[u8]) -> protobuf::Result<Options> {
    const NO_PIVOT_ROOT: u32 = number(1);
    const NO_NEW_KEYRING: u32 = number(8);
    const SHIM_CGROUP: u32 = text(9);
    const IO_UID: u32 = number(10);
    const IO_GID: u32 = number(11);
    const CRIU_WORK_PATH: u32 = text(12);
    const CRIU_IMAGE_PATH: u32 = text(13);
    let mut options = Options::default();
    let mut input = CodedInputStream::from_bytes(bytes);
    while let Some(tag) = input.read_raw_tag_or_eof()? {
        match tag {
            NO_PIVOT_ROOT => options.no_pivot_root = input.read_bool()?,
            NO_NEW_KEYRING => options.no_new_keyring = input.read_bool()?,
            SHIM_CGROUP => options.shim_cgroup = input.read_string()?,
            IO_UID => options.io_uid = input.read_uint32()?,
            IO_GID => options.io_gid = input.read_uint32()?,
            CRIU_WORK_PATH => options.criu_work_path = input.read_string()?,
            CRIU_IMAGE_PATH => options.images_to_restore = input.read_string()?,
            other => skip_field_for_tag(other, &mut input)?,
        }
    }
    Ok(options)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_user_namespaces_owner_of_the_pipes() {
        // no_pivot_root, an open_tcp that is skipped, io_uid and io_gid 100000
        let bytes = [0x08, 1, 0x10, 1, 0x50, 0xa0, 0x8d, 6, 0x58, 0xa0, 0x8d, 6];
        let options = first_shims_options(&bytes).unwrap();
        assert!(options.no_pivot_root && !options.no_new_keyring);
        assert_eq!((options.io_uid, options.io_gid), (100_000, 100_000));
    }
}
