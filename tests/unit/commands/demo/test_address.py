"""The address that the demo shows on a terminal."""

from pathlib import Path

from tests.settings import load_as
from vllm_headroom_tools.demo.command import DemoSettings, format_address


def test_the_address_has_the_port_and_the_scheme_of_the_page(tmp_path: Path) -> None:
    web_config = tmp_path / "web.yml"
    web_config.write_text("{}")
    plain = load_as(DemoSettings, ["--listen-port", "9900"], {})
    encrypted = load_as(DemoSettings, ["--web-config-file", str(web_config)], {})

    assert format_address(plain) == "http://localhost:9900/"
    assert format_address(encrypted) == "https://localhost:9839/"
