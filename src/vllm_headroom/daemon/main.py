"""The daemon as a process of its own."""

from __future__ import annotations

import asyncio
import logging
import os
from typing import NoReturn

import uvloop

from vllm_headroom.config.plain import PlainSettings
from vllm_headroom.daemon import app, logs


def run(settings: PlainSettings) -> NoReturn:
    """Run the daemon until it is told to stop, and end the process with its status; an error of its own is raised.

    The process ends without waiting for threads: one may wait for a resolver that does not answer (10 s, measured), and
    SIGTERM may not.
    """
    logs.configure(settings.log_format, settings.log_level)
    status = asyncio.Runner(loop_factory=uvloop.new_event_loop).run(app.serve(settings))
    logging.shutdown()
    os._exit(status)
