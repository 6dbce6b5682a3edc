"""Where the gateway is, and with which key."""

from __future__ import annotations

import contextlib
import json
import os
import resource
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from ._errors import NotConfigured


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A gateway and a key for it."""

    url: str
    key: str

    @property
    def is_loopback(self) -> bool:
        """Whether it is on this machine."""
        host = urlsplit(self.url).hostname or ""
        return host in {"localhost", "::1"} or host.startswith("127.")


def credentials_path() -> Path:
    """The file ``corral up`` writes: ``$XDG_CONFIG_HOME/corral/credentials.json``."""
    named = os.environ.get("CORRAL_CREDENTIALS")
    if named:
        return Path(named)
    config = os.environ.get("XDG_CONFIG_HOME")
    return (Path(config) if config else Path.home() / ".config") / "corral" / "credentials.json"


def resolve(url: str | None, key: str | None) -> Endpoint:
    """Arguments first, then ``CORRAL_API_URL`` and ``CORRAL_API_KEY``, then the credentials file."""
    url = url or os.environ.get("CORRAL_API_URL")
    key = key or os.environ.get("CORRAL_API_KEY")
    if not (url and key):
        path = credentials_path()
        try:
            kept = json.loads(path.read_text())
            url, key = url or str(kept["url"]), key or str(kept["key"])
        except FileNotFoundError:
            raise NotConfigured(
                f"no credentials: run `corral up`, or set CORRAL_API_URL and CORRAL_API_KEY ({path} is missing)"
            ) from None
        except (ValueError, KeyError, TypeError, OSError) as error:
            raise NotConfigured(f"{path} is not a credentials file: {error}") from error
    if urlsplit(url).scheme not in {"http", "https"} or not urlsplit(url).hostname:
        raise NotConfigured(f"{url!r} is not an http or https URL")
    return Endpoint(url.rstrip("/"), key)


def allow_open_files(wanted: int) -> None:
    """Raises the soft limit of open files to what the connections may need, within the hard limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    target = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < target:
        # A limit that stays low only makes requests wait for a connection.
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (target, hard))
