"""Which requests are sent again, when, and how often."""

from __future__ import annotations

import enum
import logging
import random
import time
from dataclasses import dataclass, field

_log = logging.getLogger("corral")


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Bounds of repeating. A request goes out at most ``attempts`` times within ``total`` seconds."""

    attempts: int = 10
    """The most times a request is sent; 1 = never again."""
    total: float = 60.0
    """No new attempt begins after this many seconds."""
    base: float = 0.1
    """Longest wait before the second attempt; it doubles with each further one."""
    cap: float = 5.0
    """The longest wait the client chooses; the server may ask for more."""


class Repeat(enum.Enum):
    """When a request may be sent again."""

    REFUSED = "refused"
    """Only when it surely was not carried out: no connection, 429, 503."""
    SAFE = "safe"
    """Also when the answer was lost: doing it twice is the same as once."""


@dataclass(slots=True)
class Attempts:
    """Counts the attempts of one request."""

    policy: RetryPolicy
    made: int = 0
    began: float = field(default_factory=time.monotonic)

    def wait(self, retry_after: float | None = None, *, why: str = "") -> float | None:
        """Seconds to wait before the next attempt, or None when there shall be none. With ``why`` it is logged."""
        self.made += 1
        if self.made >= self.policy.attempts:
            return None
        # Full jitter keeps a thousand clients that were refused together from coming back together.
        wait = random.uniform(0, min(self.policy.cap, self.policy.base * 2 ** min(self.made - 1, 30)))
        if retry_after is not None:
            wait = retry_after + random.uniform(0, max(self.policy.base, retry_after / 2))
        left = self.policy.total - (time.monotonic() - self.began)
        if wait >= left:
            return None
        if why:
            _log.info("%s; attempt %d of %d in %.1f s", why, self.made + 1, self.policy.attempts, wait)
        return wait

    def progressed(self) -> None:
        """A stream went on: it may break as often again."""
        self.made = 0
        self.began = time.monotonic()
