"""The demo's daemon with the guardrail of a real one, the files of whose service account are in $ACCOUNT."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

from vllm_headroom.__main__ import main
from vllm_headroom.clock import SystemClock
from vllm_headroom.config import Settings
from vllm_headroom.daemon import evict
from vllm_headroom.daemon.parts import Parts
from vllm_headroom_tools.demo import run


async def run_with_guardrail(demo: Any, settings: Settings, **how: Any) -> int:
    vars(run)["Parts"] = partial(Parts, evictor=evict.build_evictor(settings, SystemClock()))
    return int(await demo(settings, **how))


if __name__ == "__main__":
    vars(evict)["ACCOUNT"] = Path(os.environ["ACCOUNT"])
    vars(evict)["TURN_SECONDS"] = 0.5  # a refused request is sent again after one second
    vars(run)["run"] = partial(run_with_guardrail, run.run)
    main()
