//! The ids of a new idmapped mount: those that the spec gives the bind, never those of a user
//! namespace that a process is in.

use std::fs::File;
use std::io;
use std::path::PathBuf;

use bindguard_core::mount_table::MountEntry;
use bindguard_core::spec::{BindIds, IdMaps, RequestedUserNamespace, SpecUsers};
use bindguard_sys::enter::{ContainerNamespace, HelperProcess, user_namespace_of};

/// Why an idmapped mount is not replaced.
#[derive(Debug, thiserror::Error)]
pub enum IdsError {
    /// The spec has no idmapped bind, several with different ids, or ids that belong to no
    /// namespace.
    #[error("the spec does not name the ids of this idmapped mount")]
    NotInSpec,
    /// The ids are in a form that only the runtime knows.
    #[error("the ids of this idmapped mount are only known to the runtime: {0}")]
    OfRuntime(String),
    /// The mount is gone, and with it the ids that the runtime gave the mount.
    #[error("the nested bind at {} was idmapped and is gone: only the runtime can make it again", .0.display())]
    OfGoneBind(PathBuf),
    /// There is no user namespace with these ids.
    #[error("make a user namespace with the ids of the idmapped mount")]
    Make(#[source] io::Error),
}

/// The user namespace with the ids of a new mount.
#[derive(Debug)]
pub(super) enum Users<'a> {
    OfContainer(&'a File),
    Own(File),
}

impl Users<'_> {
    /// The user namespace for a new mount like `mount`; `None` if `mount` is not idmapped.
    pub(super) fn of_mount_like<'a>(
        helper: &HelperProcess,
        stale: &MountEntry,
        spec: &SpecUsers,
        namespace: &'a ContainerNamespace,
    ) -> Result<Option<Users<'a>>, IdsError> {
        if !stale.attributes.is_idmapped() {
            return Ok(None);
        }
        let of_container = || match namespace.has_own_users() {
            true => Ok(Some(Users::OfContainer(namespace.users()))),
            false => Err(IdsError::NotInSpec),
        };
        match spec
            .ids_of_mount_at(&stale.mount_point)
            .ok_or(IdsError::NotInSpec)?
        {
            BindIds::OfContainer => of_container(),
            BindIds::Own(ids) if are_those_of_container(ids, spec) => of_container(),
            BindIds::Own(ids) => Ok(Some(Users::Own(
                user_namespace_of(helper, ids).map_err(IdsError::Make)?,
            ))),
            BindIds::OfRuntime(option) => Err(IdsError::OfRuntime(option.clone())),
        }
    }

    pub(super) fn file(&self) -> &File {
        match self {
            Self::OfContainer(file) => file,
            Self::Own(file) => file,
        }
    }
}

fn are_those_of_container(ids: &IdMaps, spec: &SpecUsers) -> bool {
    matches!(spec.namespace(), RequestedUserNamespace::WithIds(of_container) if of_container == ids)
}
