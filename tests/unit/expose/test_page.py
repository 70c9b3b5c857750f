"""The page for people."""

from __future__ import annotations

from vllm_headroom import catalog
from vllm_headroom.expose.page import landing_page
from vllm_headroom.model import Published, Sample

GPU = ("0", "GPU-a")


def shown(*samples: Sample, notice: str = "") -> str:
    return landing_page(Published(samples=samples, monotonic_seconds=0.0), version="1.2.3", notice=notice)


def test_before_the_first_sample_the_page_says_so() -> None:
    assert "No sample has been published yet." in landing_page(None, version="1.2.3", notice="")


def test_what_is_known_is_shown_and_what_is_not_is_called_unknown() -> None:
    html = shown(
        Sample(catalog.GPU_INFO, (*GPU, "H100", "process"), 1.0), Sample(catalog.GPU_MEMORY_USED, GPU, 3 * 2**30)
    )

    assert "<td>3.00 GiB</td>" in html
    assert "<td>unknown</td>" in html


def test_a_failed_source_stands_out() -> None:
    html = shown(Sample(catalog.SOURCE_UP, ("engine",), 0.0), Sample(catalog.SOURCE_READ_SECONDS, ("engine",), 0.0125))

    assert '<td>engine</td><td><span class="bad">failed</span></td><td>12.5 ms</td>' in html


def test_names_from_outside_cannot_write_html() -> None:
    html = shown(Sample(catalog.ENGINE_INFO, ("<script>", "0", "vllm"), 1.0))

    assert "<script>" not in html
    assert "&lt;script&gt; / 0" in html


def test_a_notice_is_shown() -> None:
    assert '<p class="notice">simulated &amp; fast</p>' in shown(notice="simulated & fast")
