"""Every exception this package raises on purpose.

::

    BiclError
    ├── ConfigError            a flag, environment value or model shape that cannot work; at start
    │   ├── LayoutError        page size, tile, head_dim or dtype that the layout does not allow
    │   └── BackendError       the chosen backend is missing, did not load or does not fit
    ├── InvalidInputError      a call's or a request's arguments are wrong; nothing was changed
    │   └── UnsupportedError   a documented feature of the interface that this build does not have
    ├── CapacityError          a request that can never fit, however long it waits
    ├── OverloadedError        no room now; the same call may succeed later
    ├── TransferError          a copy between tiers failed; what it was to bring is computed instead
    └── IntegrityError         bookkeeping contradicts itself; the owner must stop using the cache

"No room right now" inside the scheduler is a return value, not an exception.
"""

from __future__ import annotations

__all__ = [
    "BackendError",
    "BiclError",
    "CapacityError",
    "ConfigError",
    "IntegrityError",
    "InvalidInputError",
    "LayoutError",
    "OverloadedError",
    "TransferError",
    "UnsupportedError",
]


class BiclError(Exception):
    """Base of all errors raised on purpose by this package."""


class ConfigError(BiclError, ValueError):
    """A setting cannot work. The message names the value, the limit and the remedy."""


class LayoutError(ConfigError):
    """A page, tile, head_dim or dtype that the layout does not allow."""


class BackendError(ConfigError):
    """A backend that was asked for is missing, failed to load, or does not fit this machine."""


class InvalidInputError(BiclError, ValueError):
    """Arguments of a call are wrong; the call changed nothing."""


class UnsupportedError(InvalidInputError, NotImplementedError):
    """A known feature of the interface that is not available here; the message names it."""


class CapacityError(BiclError):
    """A request needs more than the cache will ever have."""


class OverloadedError(BiclError):
    """No room at present; retry later."""


class TransferError(BiclError, RuntimeError):
    """Pages that were to come from another tier did not; compute their tokens instead."""


class IntegrityError(BiclError, RuntimeError):
    """Page accounting contradicts itself (lost, doubled or doubly freed page)."""
