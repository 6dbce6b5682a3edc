//! Lines of a streamed answer: NDJSON and server-sent events.

use anyhow::Context as _;
use reqwest::Response;

/// The longest line: output events hold at most some MiB.
const LINE_LIMIT: usize = 32 << 20;

/// Lines of an answer as they come.
#[derive(Debug)]
pub struct Lines {
    response: Response,
    held: Vec<u8>,
    start: usize,
}

impl Lines {
    /// The lines of this answer.
    pub fn new(response: Response) -> Self {
        Self { response, held: Vec::new(), start: 0 }
    }

    /// The next line without its end; `None` at the end.
    ///
    /// # Errors
    /// The connection broke, or a line is too long.
    pub async fn next(&mut self) -> anyhow::Result<Option<Vec<u8>>> {
        let mut searched = self.start;
        loop {
            if let Some(length) = self.held[searched..].iter().position(|&b| b == b'\n') {
                let end = searched + length;
                let line = self.held[self.start..end].to_vec();
                self.start = end + 1;
                return Ok(Some(line));
            }
            self.held.drain(..self.start);
            self.start = 0;
            searched = self.held.len();
            anyhow::ensure!(searched <= LINE_LIMIT, "a line of the answer is too long");
            match self.response.chunk().await.context("the answer broke off")? {
                Some(chunk) => self.held.extend_from_slice(&chunk),
                None if self.held.is_empty() => return Ok(None),
                None => return Ok(Some(std::mem::take(&mut self.held))),
            }
        }
    }
}
