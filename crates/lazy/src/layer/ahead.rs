//! Notices that a layer is read from front to back, and tells what to bring ahead.

use std::ops::Range;

/// Places that are followed at once.
const STREAMS: usize = 16;
/// Chunks of the first window.
const FIRST: usize = 2;

/// Readers of one layer that go forward.
#[derive(Debug, Default)]
pub(crate) struct Streams {
    streams: Vec<Stream>,
    clock: u64,
}

#[derive(Debug, Default)]
struct Stream {
    /// Where the next read begins if it goes on.
    next: usize,
    /// Up to where chunks were asked for.
    asked: usize,
    /// How many chunks lie between the two.
    window: usize,
    used: u64,
}

impl Streams {
    /// Takes note of a read; tells which chunks to bring ahead, of `total`, and at most `most` before the reader.
    pub fn note(&mut self, read: &Range<usize>, total: usize, most: usize) -> Option<Range<usize>> {
        self.clock += 1;
        let clock = self.clock;
        let goes_on = |s: &&mut Stream| read.start <= s.next && read.start + 1 >= s.next && read.end >= s.next;
        let Some(stream) = self.streams.iter_mut().find(goes_on) else {
            self.begin(read);
            return None;
        };
        stream.used = clock;
        if read.end == stream.next || most == 0 {
            return None;
        }
        stream.next = read.end;
        stream.asked = stream.asked.max(read.end);
        // Asked for in halves, so that a reader is not stopped by each.
        if stream.asked - read.end > stream.window / 2 {
            return None;
        }
        stream.window = (stream.window * 2).clamp(FIRST, most.max(FIRST));
        let ahead = stream.asked..(read.end + stream.window).min(total);
        stream.asked = stream.asked.max(ahead.end);
        (!ahead.is_empty()).then_some(ahead)
    }

    fn begin(&mut self, read: &Range<usize>) {
        let fresh = Stream { next: read.end, asked: read.end, window: 0, used: self.clock };
        let is_full = self.streams.len() >= STREAMS;
        match self.streams.iter_mut().min_by_key(|s| s.used) {
            Some(oldest) if is_full => *oldest = fresh,
            _ => self.streams.push(fresh),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn windows_grow_while_the_reader_goes_on() {
        let mut streams = Streams::default();
        let mut asked = Vec::new();
        for chunk in 0..40 {
            // Two reads for each chunk, as the kernel makes them.
            for _ in 0..2 {
                asked.extend(streams.note(&(chunk..chunk + 1), 45, 16));
            }
        }
        assert_eq!(asked[..3], [2..4, 4..7, 7..13]);
        assert!(asked.windows(2).all(|w| w[0].end == w[1].start), "{asked:?}");
        assert!(asked.iter().all(|a| a.len() <= 16 && a.end <= 45));
        assert_eq!(asked.last().unwrap().end, 45);
    }

    #[test]
    fn random_reads_bring_nothing_ahead() {
        let mut streams = Streams::default();
        for n in 0..1000_usize {
            let at = n * 7919 % 100_003;
            assert_eq!(streams.note(&(at..at + 1), 100_003, 16), None);
        }
        assert_eq!(streams.streams.len(), STREAMS);
    }
}
