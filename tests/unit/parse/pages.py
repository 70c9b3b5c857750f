"""Small pages in, readings out."""

from __future__ import annotations

from vllm_headroom.model import EnginePage, EngineReading
from vllm_headroom.parse.engines import parse_engines

ENGINE = 'engine="0",model_name="m"'


def read(*lines: str) -> tuple[EngineReading, ...]:
    page = parse_engines("\n".join(lines) + "\n")
    assert isinstance(page, EnginePage)
    return page.engines


def one(*lines: str) -> EngineReading:
    (engine,) = read(*lines)
    return engine


def info(engine: str = 'engine="0"', **labels: str) -> str:
    text = ",".join([engine, *(f'{name}="{value}"' for name, value in labels.items())]).strip(",")
    return f"vllm:cache_config_info{{{text}}} 1.0"


RUNNING = f"vllm:num_requests_running{{{ENGINE}}} 1"
