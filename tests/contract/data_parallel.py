"""A page of many data-parallel engines, made from the recorded page of one."""

from __future__ import annotations

import re

from tests.contract.recorded import FOLDER


def data_parallel_page(engines: int, version: str = "0.32.0") -> str:
    """Repeat every series of the engine for each rank, as a multi-process server shows them.

    `num_gpu_blocks` becomes the sum over all engines on each of them, process_* and `_created` go.
    """
    page = (FOLDER / f"vllm-{version}" / "load-waiting.prom").read_text()
    page = re.sub(r'num_gpu_blocks="(\d+)"', lambda match: f'num_gpu_blocks="{int(match[1]) * engines}"', page)
    kept_lines = (line for line in page.splitlines() if not re.match(r"process_|\S+_created", line))
    return "".join(
        line.replace('engine="0"', f'engine="{rank}"') + "\n" for line in kept_lines for rank in _ranks(line, engines)
    )


def _ranks(line: str, engines: int) -> range:
    return range(engines if 'engine="0"' in line else 1)
