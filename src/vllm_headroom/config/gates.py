"""The gates that a kubelet asks before it sends traffic, and before it lets an engine live on."""

from __future__ import annotations

from pydantic import BaseModel

from vllm_headroom.config.fields import seconds, setting


class GateSettings(BaseModel):
    """The settings of the gates; unset, a gate is always open."""

    gate_ready_seconds: float | None = seconds(
        None,
        60,
        86400,
        "Close /gate/ready while the engine may be out of memory within this time.",
        shown="always open",
    )
    gate_ready_most_seconds: float = seconds(
        900, 60, 86400, "The longest that /gate/ready stays closed; then it stays open for as long."
    )
    gate_live_seconds: float | None = seconds(
        None,
        3600,
        604800,
        "Let /gate/live fail when an engine surely leaks and the quietest hour before its end is here, at most once in"
        " this time.",
        shown="always open",
    )
    gate_name: str = setting(
        "",
        "The name of this replica among those of its Service, by which they take turns: that of the pod.",
        accepts="a name",
        word="NAME",
        max_length=253,
        shown="the host name, which is the pod's",
    )
