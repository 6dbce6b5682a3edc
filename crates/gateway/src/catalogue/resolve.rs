//! From what a caller names to what a node is given: layers and the configuration of commands.
//!
//! A name is looked for among environments first, then among images (by name or digest). Variables and entry points are
//! laid over each other: image, environment, sandbox.

use super::compose::compose;
use super::{Catalogue, CatalogueError, environments, images, layers};
use corral_api::environment::ResolvedEnvironment;
use corral_api::sandbox::SandboxSpec;
use std::sync::Arc;

fn cache_key(project: &str, spec: &SandboxSpec) -> Result<String, CatalogueError> {
    match (&spec.environment, &spec.spec) {
        (Some(name), None) => Ok(format!("{project}\0n{name}")),
        (None, Some(inline)) => Ok(format!("{project}\0s{}", layers::to_json("environment", &inline.base, inline)?)),
        (Some(_), Some(_)) => Err(CatalogueError::BadSpec("give environment or spec, not both".into())),
        (None, None) => Err(CatalogueError::BadSpec("environment or spec is missing".into())),
    }
}

/// An environment with a sandbox's own settings laid over it.
fn for_sandbox(resolved: &ResolvedEnvironment, spec: &SandboxSpec) -> ResolvedEnvironment {
    let mut resolved = resolved.clone();
    resolved.config.env.extend(spec.env.clone());
    resolved.config.lay_over(spec.entrypoint.as_deref(), spec.cmd.as_deref());
    resolved
}

impl Catalogue {
    /// Resolves the environment of a sandbox from memory, where it was resolved since the last change.
    ///
    /// # Errors
    /// The specification cannot be honoured.
    pub fn resolved(&self, project: &str, spec: &SandboxSpec) -> Result<Option<ResolvedEnvironment>, CatalogueError> {
        spec.check().map_err(CatalogueError::BadSpec)?;
        let key = cache_key(project, spec)?;
        Ok(self.resolved.get(key.as_str()).map(|resolved| for_sandbox(&resolved, spec)))
    }

    /// Resolves the environment of a sandbox.
    ///
    /// # Errors
    /// The specification cannot be honoured, it names something that does not exist, or the database fails.
    pub fn resolve(&self, project: &str, spec: &SandboxSpec) -> Result<ResolvedEnvironment, CatalogueError> {
        spec.check().map_err(CatalogueError::BadSpec)?;
        let key = cache_key(project, spec)?;
        let generation = self.resolved.generation();
        let resolved = {
            let connection = self.connection();
            match (&spec.environment, &spec.spec) {
                (Some(name), _) => match environments::find(&connection, project, name)? {
                    Some(record) => compose(&connection, project, name, &record.spec)?,
                    None => {
                        let image = images::find(&connection, project, name).map_err(|error| match error {
                            CatalogueError::NotFound { name, .. } => {
                                CatalogueError::NotFound { what: "environment or image", name }
                            }
                            other => other,
                        })?;
                        ResolvedEnvironment {
                            name: name.clone(),
                            layers: image.layers.iter().map(|layer| layer.digest).collect(),
                            config: image.config,
                        }
                    }
                },
                (None, Some(inline)) => compose(&connection, project, &inline.base, inline)?,
                (None, None) => return Err(CatalogueError::BadSpec("environment or spec is missing".into())),
            }
        };
        let answer = for_sandbox(&resolved, spec);
        self.resolved.keep(generation, key, Arc::new(resolved));
        Ok(answer)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::catalogue::Page;
    use corral_api::digest::Digest;
    use corral_api::environment::EnvironmentSpec;
    use corral_api::image::{ImageConfig, ImageRecord, LayerKind, LayerRecord};

    fn layer(content: &str, kind: LayerKind) -> LayerRecord {
        LayerRecord { digest: Digest::of(content.as_bytes()), kind, at: "/".into(), size_bytes: 1, entries: 1 }
    }

    fn image(name: &str, layers: &[&str]) -> ImageRecord {
        ImageRecord {
            name: name.into(),
            digest: Digest::of(layers.concat().as_bytes()),
            source_digest: None,
            platform: "linux/amd64".into(),
            config: ImageConfig {
                env: [("A".to_owned(), "image".to_owned()), ("B".to_owned(), "image".to_owned())].into(),
                workdir: "/".into(),
                entrypoint: vec!["serve".into()],
                cmd: vec!["image".into()],
                ..ImageConfig::default()
            },
            layers: layers.iter().map(|l| layer(l, LayerKind::Base)).collect(),
            size_bytes: 1,
            snapshot: None,
        }
    }

    fn named(name: &str) -> SandboxSpec {
        SandboxSpec { environment: Some(name.into()), ..SandboxSpec::default() }
    }

    fn spec_on(base: &str, toolkit: &LayerRecord) -> EnvironmentSpec {
        EnvironmentSpec {
            base: base.into(),
            workspaces: vec![],
            toolkits: vec![toolkit.digest],
            env: [("B".to_owned(), "environment".to_owned()), ("C".to_owned(), "environment".to_owned())].into(),
            workdir: Some("/work".into()),
            user: Some("1000".into()),
            entrypoint: None,
            cmd: Some(vec!["environment".into()]),
        }
    }

    #[test]
    fn environments_lay_over_images_and_sandboxes_over_both() {
        let catalogue = Catalogue::in_memory().unwrap();
        let toolkit = layer("toolkit", LayerKind::Toolkit);
        catalogue.put_image("default", &image("base:1", &["a", "b"])).unwrap();
        catalogue.put_layer("default", &toolkit).unwrap();
        catalogue.put_environment("default", "task", spec_on("base:1", &toolkit)).unwrap();
        let mut spec = named("task");
        spec.env.insert("C".into(), "sandbox".into());
        for _ in 0..2 {
            let r = catalogue.resolve("default", &spec).unwrap();
            assert_eq!(r.layers, [Digest::of(b"a"), Digest::of(b"b"), toolkit.digest]);
            let env: Vec<_> = r.config.env.values().map(String::as_str).collect();
            assert_eq!(env, ["image", "environment", "sandbox"]);
            assert_eq!((r.config.workdir.as_str(), r.config.user.as_str()), ("/work", "1000"));
            assert_eq!(r.config.startup().unwrap(), ["serve", "environment"]);
            assert!(catalogue.resolved("default", &spec).unwrap().is_some());
        }
        spec.entrypoint = Some(vec!["own".into()]);
        assert_eq!(catalogue.resolve("default", &spec).unwrap().config.startup().unwrap(), ["own"]);
        spec.entrypoint = Some(vec![]);
        assert_eq!(catalogue.resolve("default", &spec).unwrap().config.startup(), None);
        let digest = Digest::of(b"ab").to_string();
        assert_eq!(catalogue.resolve("default", &named(&digest)).unwrap().layers.len(), 2);
        // A new import under the name is seen at once.
        catalogue.put_image("default", &image("base:1", &["c"])).unwrap();
        assert!(catalogue.resolved("default", &spec).unwrap().is_none());
        assert_eq!(catalogue.resolve("default", &spec).unwrap().layers[0], Digest::of(b"c"));
    }

    #[test]
    fn what_does_not_exist_is_named() {
        let catalogue = Catalogue::in_memory().unwrap();
        let toolkit = layer("toolkit", LayerKind::Toolkit);
        let text = catalogue.resolve("default", &named("nope")).unwrap_err().to_string();
        assert_eq!(text, "there is no environment or image \"nope\"");
        catalogue.put_image("default", &image("base", &["a"])).unwrap();
        let error = catalogue.put_environment("default", "e", spec_on("base", &toolkit)).unwrap_err();
        assert!(error.to_string().contains(&toolkit.digest.to_string()));
        let error = catalogue.resolve("default", &SandboxSpec::default()).unwrap_err();
        assert!(matches!(error, CatalogueError::BadSpec(_)));
        assert!(catalogue.put_image("default", &image("sha256:x", &[])).is_err());
    }

    #[test]
    fn what_is_referred_to_cannot_be_deleted() {
        let catalogue = Catalogue::in_memory().unwrap();
        let toolkit = layer("toolkit", LayerKind::Toolkit);
        catalogue.put_image("default", &image("base", &["a", "b"])).unwrap();
        catalogue.put_image("default", &image("other", &["a"])).unwrap();
        catalogue.put_layer("default", &toolkit).unwrap();
        catalogue.put_environment("default", "task", spec_on("base", &toolkit)).unwrap();
        for error in [
            catalogue.delete_image("default", "base").unwrap_err(),
            catalogue.delete_layer("default", &toolkit.digest).unwrap_err(),
        ] {
            assert!(error.to_string().ends_with("is in use by environment \"task\""), "{error}");
        }
        let error = catalogue.delete_layer("default", &Digest::of(b"b")).unwrap_err();
        assert!(error.to_string().ends_with("is in use by image \"base\""), "{error}");
        catalogue.delete_environment("default", "task").unwrap();
        assert_eq!(catalogue.delete_image("default", "base").unwrap(), [Digest::of(b"b")], "a is other's too");
        assert_eq!(catalogue.delete_layer("default", &toolkit.digest).unwrap(), toolkit);
        assert_eq!(catalogue.layers("default", &Page::default()).unwrap().records.len(), 2);
    }
}
