//! What lies between the `object_store` crate and the network: two things that the crate does not offer.
//!
//! - It completes uploads unconditionally. Every upload of this store is to create an object, so the condition is added
//!   to each completion. Headers other than `host` and `x-amz-*` need not be signed
//!   (AWS Signature Version 4, canonical headers); the crate leaves this one unsigned itself where it sends it.
//! - Its errors do not show the status of an answer. [`watched`] notes it for the call that it is of.

use async_trait::async_trait;
use http::header::{HeaderValue, IF_NONE_MATCH};
use http::{Method, StatusCode};
use object_store::ClientOptions;
use object_store::client::{
    HttpClient, HttpConnector, HttpError, HttpRequest, HttpResponse, HttpService, ReqwestConnector,
};
use std::cell::Cell;

tokio::task_local! {
    /// The last status of the running call that was no success.
    static REFUSED: Cell<Option<StatusCode>>;
}

/// Runs a call and tells the last status that was no success, if any.
pub(super) async fn watched<T>(call: impl Future<Output = T>) -> (T, Option<StatusCode>) {
    REFUSED
        .scope(Cell::new(None), async {
            let done = call.await;
            (done, REFUSED.with(Cell::get))
        })
        .await
}

/// Makes the clients that [`Watching`] describes.
#[derive(Debug)]
pub(super) struct Connector;

impl HttpConnector for Connector {
    fn connect(&self, options: &ClientOptions) -> object_store::Result<HttpClient> {
        Ok(HttpClient::new(Watching(ReqwestConnector::default().connect(options)?)))
    }
}

#[derive(Debug)]
struct Watching(HttpClient);

#[async_trait]
impl HttpService for Watching {
    async fn call(&self, mut request: HttpRequest) -> Result<HttpResponse, HttpError> {
        let completes = request.method() == Method::POST
            && request.uri().query().is_some_and(|query| query.split('&').any(|part| part.starts_with("uploadId=")));
        if completes {
            request.headers_mut().insert(IF_NONE_MATCH, HeaderValue::from_static("*"));
        }
        let answer = self.0.execute(request).await?;
        if !answer.status().is_success() {
            // Outside of a call there is nobody to tell.
            let _told = REFUSED.try_with(|status| status.set(Some(answer.status())));
        }
        Ok(answer)
    }
}
