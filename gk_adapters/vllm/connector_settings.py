"""`kv_connector_extra_config`: the keys that gk's connector reads, checked once."""

from __future__ import annotations

import math
from typing import Any

from attrs import frozen

from gk_core.errors import RequestError
from gk_core.ports import Endpoint
from gk_core.pull import PullSettings

__all__ = ["ConnectorSettings", "connector_settings"]


@frozen(kw_only=True)
class ConnectorSettings:
    """Times and choices of one connector.

    Attributes:
        lease_seconds: how long a producer keeps blocks for a reader, and how far each claim moves that.
        max_lease_seconds: a lease ends this long after its grant, whatever is claimed.
        pull_deadline_seconds: a pull that is not done by then has failed.
        backend: NIXL plugin.
        progress_thread: let NIXL poll on a thread of its own, one busy core; off, the engines' own steps poll.
        allowed_producers: endpoints that hand-offs may name; None means any.
        weights_id: names the weights; empty: a hash over their small tensors.
    """

    lease_seconds: float = 30.0
    max_lease_seconds: float = 600.0
    pull_deadline_seconds: float = 30.0
    backend: str = "UCX"
    progress_thread: bool = False
    allowed_producers: frozenset[Endpoint] | None = None
    weights_id: str = ""

    def pull_settings(self, *, max_attempts: int = 2) -> PullSettings:
        """Times of a pull: claims several times per lease."""
        return PullSettings(
            deadline_seconds=self.pull_deadline_seconds,
            claim_interval_seconds=self.lease_seconds / 6,
            reply_timeout_seconds=min(1.0, self.lease_seconds / 6),
            max_attempts=max_attempts,
        )


def connector_settings(transfer_config: Any) -> ConnectorSettings:
    """Settings out of a KVTransferConfig; vLLM's own keys `kv_lease_duration` and `backends` mean what they mean there.

    Raises:
        RequestError: naming the key, what it must be and what it was.
    """
    extra = transfer_config.kv_connector_extra_config
    backends = extra.get("backends", ["UCX"])
    if not (isinstance(backends, list) and len(backends) == 1 and isinstance(backends[0], str)):
        raise RequestError(f"kv_connector_extra_config.backends must be a list of one NIXL plugin, got {backends!r}")
    progress = extra.get("gk_progress_thread", False)
    if not isinstance(progress, bool):
        raise RequestError(f"kv_connector_extra_config.gk_progress_thread must be true or false, got {progress!r}")
    weights_id = extra.get("gk_weights_id", "")
    if not isinstance(weights_id, str):
        raise RequestError(f"kv_connector_extra_config.gk_weights_id must be a string, got {weights_id!r}")
    lease = _seconds(extra, "kv_lease_duration", 30.0)
    most = _seconds(extra, "gk_max_lease_seconds", max(600.0, lease))
    if most < lease:
        raise RequestError(f"gk_max_lease_seconds must be at least kv_lease_duration {lease:g}, got {most:g}")
    return ConnectorSettings(
        lease_seconds=lease,
        max_lease_seconds=most,
        pull_deadline_seconds=_seconds(extra, "gk_pull_deadline_seconds", 30.0),
        backend=backends[0],
        progress_thread=progress,
        allowed_producers=_endpoints(extra.get("gk_allowed_producers")),
        weights_id=weights_id,
    )


def _seconds(extra: Any, key: str, default: float) -> float:
    value = extra.get(key, default)
    if type(value) not in (int, float) or not (math.isfinite(value) and 0 < value <= 86_400):
        raise RequestError(f"kv_connector_extra_config.{key} must be seconds, > 0 and <= 86400, got {value!r}")
    return float(value)


def _endpoints(value: object) -> frozenset[Endpoint] | None:
    if value is None:
        return None
    wrong = RequestError(f'gk_allowed_producers must be a list of "host:port", got {value!r}')
    if not isinstance(value, list):
        raise wrong
    found = set()
    for item in value:
        host, colon, port = item.rpartition(":") if isinstance(item, str) else ("", "", "")
        if not (host and colon and port.isdecimal() and 0 < int(port) < 65_536):
            raise wrong
        found.add(Endpoint(host=host.strip("[]"), port=int(port)))
    return frozenset(found)
