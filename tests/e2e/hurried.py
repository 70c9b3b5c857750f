"""The daemon on a clock that runs $SPEED times as fast: what it waits a minute for comes within seconds."""

from __future__ import annotations

import os
from functools import partial

from vllm_headroom.__main__ import main
from vllm_headroom.commands.demo.clock import ScaledClock
from vllm_headroom.daemon import parts

if __name__ == "__main__":
    vars(parts)["SystemClock"] = partial(ScaledClock, float(os.environ["SPEED"]))
    main()
