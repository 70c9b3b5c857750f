"""What of the daemon's settings the command takes: where the probe writes."""

from __future__ import annotations

from typing import ClassVar

from vllm_headroom.config.settings import Settings


class ProbeSettings(Settings):
    """The daemon's settings, in whose environment this is run; its options are those that it uses."""

    no_options: ClassVar = frozenset(Settings.model_fields) - {"probe_dir"}
