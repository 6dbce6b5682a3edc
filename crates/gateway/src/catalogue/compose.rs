//! From a specification to layers and the configuration of commands.

use super::{CatalogueError, images, layers};
use corral_api::environment::{EnvironmentSpec, ResolvedEnvironment};
use rusqlite::Connection;

/// The most layers of an environment, so that no stack fails to mount (overlayfs takes 500 lower layers).
pub const MAX_LAYERS: usize = 400;

/// Composes a specification under the name it is shown by.
pub(super) fn compose(
    connection: &Connection,
    project: &str,
    name: &str,
    spec: &EnvironmentSpec,
) -> Result<ResolvedEnvironment, CatalogueError> {
    spec.check().map_err(CatalogueError::BadSpec)?;
    let image = images::find(connection, project, &spec.base)?;
    let mut resolved = ResolvedEnvironment {
        name: name.into(),
        layers: image.layers.iter().map(|layer| layer.digest).collect(),
        config: image.config,
    };
    for digest in spec.workspaces.iter().chain(&spec.toolkits) {
        if layers::find(connection, project, digest)?.is_none() {
            return Err(CatalogueError::NotFound { what: "layer", name: digest.to_string() });
        }
        resolved.layers.push(*digest);
    }
    if resolved.layers.len() > MAX_LAYERS {
        let text = format!("{} layers: at most {MAX_LAYERS} are allowed", resolved.layers.len());
        return Err(CatalogueError::BadSpec(text));
    }
    resolved.config.env.extend(spec.env.clone());
    if let Some(workdir) = &spec.workdir {
        resolved.config.workdir.clone_from(workdir);
    }
    if let Some(user) = &spec.user {
        resolved.config.user.clone_from(user);
    }
    resolved.config.lay_over(spec.entrypoint.as_deref(), spec.cmd.as_deref());
    Ok(resolved)
}
