//! How a bucket is reached.

use super::connector::Connector;
use crate::error::StoreError;
use crate::key::Key;
use object_store::aws::{AmazonS3, AmazonS3Builder, AmazonS3ConfigKey};
use object_store::{BackoffConfig, ClientOptions, RetryConfig};
use std::fmt;
use std::time::Duration;
use url::{Host, Url};

/// What proves who we are.
#[derive(Clone, PartialEq, Eq)]
pub enum S3Credentials {
    /// The usual variables: `AWS_ACCESS_KEY_ID` and `AWS_SECRET_ACCESS_KEY` (and `AWS_SESSION_TOKEN`), or those of a
    /// web identity, of ECS or of EKS.
    Environment,
    /// The cloud's metadata service, for machines that have a role.
    Instance,
    /// A key pair.
    Static {
        /// The name of the key.
        key_id: String,
        /// The secret.
        secret: String,
        /// The token of a temporary pair.
        token: Option<String>,
    },
    /// None: requests are not signed.
    Anonymous,
}

impl fmt::Debug for S3Credentials {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Environment => "Environment",
            Self::Instance => "Instance",
            Self::Static { .. } => "Static(…)",
            Self::Anonymous => "Anonymous",
        })
    }
}

/// How a bucket is reached. The credentials must allow to list it, not only to read and write: without that, S3 answers
/// that an object which is not there is forbidden.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct S3Config {
    /// Its name.
    pub bucket: String,
    /// What all keys are below, so that several stores fit into one bucket.
    pub prefix: Option<Key>,
    /// The service; AWS's own of the region where there is none.
    pub endpoint: Option<Url>,
    /// Its region. Services other than AWS mostly take any.
    pub region: String,
    /// The bucket goes into the path of requests instead of their host name.
    pub path_style: bool,
    /// Requests may go without TLS.
    pub allow_http: bool,
    /// What proves who we are.
    pub credentials: S3Credentials,
    /// How long a call may take with all its tries; each request may take half of it. An upload of parts has it for
    /// each part.
    pub timeout: Duration,
}

impl S3Config {
    /// A bucket of AWS with usual settings: credentials of the environment, a minute for each call.
    pub fn new(bucket: impl Into<String>, region: impl Into<String>) -> Self {
        Self {
            bucket: bucket.into(),
            prefix: None,
            endpoint: None,
            region: region.into(),
            path_style: false,
            allow_http: false,
            credentials: S3Credentials::Environment,
            timeout: Duration::from_secs(60),
        }
    }

    /// Where the bucket is, without secrets.
    pub(super) fn describe(&self) -> String {
        let place = match &self.endpoint {
            Some(endpoint) => endpoint.origin().ascii_serialization(),
            None => self.region.clone(),
        };
        let prefix = self.prefix.as_ref().map(|prefix| format!("/{prefix}")).unwrap_or_default();
        format!("bucket {}{prefix} at {place}", self.bucket)
    }

    /// The client of the bucket.
    pub(super) fn client(&self) -> Result<AmazonS3, StoreError> {
        self.check()?;
        let options = ClientOptions::new()
            .with_allow_http(self.allow_http)
            .with_timeout(self.timeout / 2)
            .with_connect_timeout(Duration::from_secs(5).min(self.timeout / 2))
            .with_pool_idle_timeout(Duration::from_secs(30));
        let backoff = BackoffConfig {
            init_backoff: Duration::from_millis(100),
            max_backoff: Duration::from_secs(5),
            ..BackoffConfig::default()
        };
        let retry = RetryConfig { backoff, max_retries: 4, retry_timeout: self.timeout };
        let mut builder = AmazonS3Builder::new()
            .with_bucket_name(&self.bucket)
            .with_region(&self.region)
            .with_virtual_hosted_style_request(!self.path_style)
            .with_client_options(options)
            // Not every service has the request that deletes many.
            .with_disable_bulk_delete(true)
            .with_retry(retry)
            .with_http_connector(Connector);
        if let Some(endpoint) = &self.endpoint {
            builder = builder.with_endpoint(self.endpoint_of_bucket(endpoint)?);
        }
        builder = match &self.credentials {
            S3Credentials::Environment => from_environment(builder)?,
            S3Credentials::Instance => builder,
            S3Credentials::Anonymous => builder.with_skip_signature(true),
            S3Credentials::Static { key_id, secret, token } => {
                let builder = builder.with_access_key_id(key_id).with_secret_access_key(secret);
                if let Some(token) = token { builder.with_token(token) } else { builder }
            }
        };
        builder.build().map_err(|error| StoreError::config(format!("bucket {}: {error}", self.bucket)))
    }

    fn check(&self) -> Result<(), StoreError> {
        let name = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || matches!(b, b'.' | b'-');
        if !(3..=63).contains(&self.bucket.len()) || !self.bucket.bytes().all(name) {
            return Err(StoreError::config(format!(
                "{:?} is no name of a bucket: 3 to 63 of a-z, 0-9, '.' and '-'",
                self.bucket
            )));
        }
        if self.timeout < Duration::from_millis(100) {
            return Err(StoreError::config("timeout_ms must be at least 100"));
        }
        let Some(endpoint) = &self.endpoint else { return Ok(()) };
        match endpoint.scheme() {
            "https" => {}
            "http" if self.allow_http => {}
            "http" => {
                return Err(StoreError::config(format!(
                    "the endpoint {endpoint} has no TLS: add allow_http=true if that is meant"
                )));
            }
            other => return Err(StoreError::config(format!("an endpoint is https:// or http://, not {other}://"))),
        }
        let bare = endpoint.path() == "/" && endpoint.query().is_none() && endpoint.fragment().is_none();
        if !bare || !endpoint.username().is_empty() || endpoint.password().is_some() {
            return Err(StoreError::config("an endpoint is scheme, host and port, and nothing else"));
        }
        Ok(())
    }

    /// What requests are sent to: with the bucket in its host name, unless that is to be in the path.
    fn endpoint_of_bucket(&self, endpoint: &Url) -> Result<String, StoreError> {
        if self.path_style {
            return Ok(endpoint.as_str().trim_end_matches('/').to_owned());
        }
        let Some(Host::Domain(host)) = endpoint.host() else {
            return Err(StoreError::config(format!(
                "the endpoint {endpoint} is an address, which cannot hold the bucket's name: add path_style=true"
            )));
        };
        let port = endpoint.port().map(|port| format!(":{port}")).unwrap_or_default();
        Ok(format!("{}://{}.{host}{port}", endpoint.scheme(), self.bucket))
    }
}

/// Takes credentials from the environment, and nothing else: an endpoint or a switch left there must not redirect us.
fn from_environment(mut builder: AmazonS3Builder) -> Result<AmazonS3Builder, StoreError> {
    let mut found = false;
    for (name, value) in std::env::vars() {
        let Some(Ok(key)) = name.starts_with("AWS_").then(|| name.to_ascii_lowercase().parse()) else { continue };
        use AmazonS3ConfigKey as K;
        match key {
            K::AccessKeyId | K::WebIdentityTokenFile | K::ContainerCredentialsRelativeUri => found = true,
            K::ContainerCredentialsFullUri => found = true,
            K::SecretAccessKey | K::Token | K::RoleArn | K::RoleSessionName | K::StsEndpoint => {}
            K::ContainerAuthorizationTokenFile => {}
            _ => continue,
        }
        builder = builder.with_config(key, value);
    }
    if found {
        return Ok(builder);
    }
    Err(StoreError::config(
        "no credentials: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or add credentials=instance (the machine's role) \
         or credentials=anonymous to the store's URL",
    ))
}
