"""What keeps this process from asking anybody."""

from __future__ import annotations

import errno
from typing import Final

SHORTAGES: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.EADDRNOTAVAIL, errno.ENOBUFS, errno.ENOMEM})
"""No descriptor, port or memory is left on this side: it says nothing of who would have answered."""
