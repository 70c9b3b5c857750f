"""The page for people at `/`."""

from vllm_headroom.expose.page.document import html, landing_page

__all__ = ["html", "landing_page"]
