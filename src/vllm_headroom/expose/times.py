"""Render times so that the page's script can show them in the reader's time zone."""

from vllm_headroom.units import format_instant, to_datetime


def render_time(seconds: float) -> str:
    """Return a time element whose text is the UTC time, to the second."""
    machine_time = to_datetime(seconds).strftime("%Y-%m-%dT%H:%M:%SZ")
    return f'<time datetime="{machine_time}">{format_instant(seconds)}</time>'
