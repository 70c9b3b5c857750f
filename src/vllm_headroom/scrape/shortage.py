"""Shortages of the daemon's own resources, which prevent it from reading any source."""

import errno
from typing import Final

from vllm_headroom.model import Failure
from vllm_headroom.vocabulary import Reason, Source

SHORTAGES: Final = frozenset(
    {errno.EAGAIN, errno.EMFILE, errno.ENFILE, errno.EADDRNOTAVAIL, errno.ENOBUFS, errno.ENOMEM}
)
"""The error numbers for a shortage of threads, descriptors, ports or memory in the daemon. The
source itself may be working.
"""


def build_unavailable(source: Source, trouble: str, error: OSError, advice: str = "") -> Failure:
    """Return a failure with the reason UNAVAILABLE, for a source that could not be read.

    If the error is a shortage, the message advises raising the limit. For any other error, the
    message ends with `advice`.
    """
    if error.errno in SHORTAGES:
        advice = "raise that limit of the sidecar, or find what uses it up on its machine"
    message = f"{trouble} ({error.strerror or error}): {advice}"
    return Failure(source=source, reason=Reason.UNAVAILABLE, message=message)
