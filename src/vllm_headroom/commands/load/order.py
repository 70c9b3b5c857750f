"""What the user ordered: where the load goes, how much of what, and what bounds it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import httpx

from vllm_headroom.commands.load.lengths import Lengths
from vllm_headroom.commands.load.prompts import Api
from vllm_headroom.commands.load.target import within
from vllm_headroom.derive.attribution import Selection


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """Everything that is set; None where nothing is. `seconds` are a step's, `shared_ratio` is of each prompt."""

    url: httpx.URL
    metrics_url: httpx.URL | None
    api: Api
    model: str | None
    concurrency: int
    seconds: float
    grace_seconds: float
    timeout_seconds: float
    prompt_tokens: Lengths
    output_tokens: Lengths
    shared_ratio: float
    most_requests: int | None
    requests_per_second: float | None
    bearer_token_file: Path | None
    ca_file: Path | None
    gpus: Selection | None
    trace: Path

    @property
    def page(self) -> httpx.URL:
        """Where the engine's page is."""
        return self.metrics_url or within(self.url, "/metrics")

    def __str__(self) -> str:
        shared = f", {self.shared_ratio:.0%} of them shared" if self.shared_ratio else ""
        return f"{self.api}, prompts of about {self.prompt_tokens} tokens{shared}, answers of {self.output_tokens}"
