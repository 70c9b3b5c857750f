import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.settings import load
from vllm_headroom.config import Settings, name_variable
from vllm_headroom_tools.options import BadOptions
from vllm_headroom_tools.settings import ModelSettings


def mistakes(argv: list[str], environ: dict[str, str]) -> tuple[str, ...]:
    """Return the lines of what load refuses, none when it refuses nothing; any other error is a fault."""
    try:
        load(argv, environ)
    except BadOptions as error:
        return error.lines
    return ()


OF_SERVICES = {
    "HEADROOM_SERVICE_HOST": "10.0.0.1",
    "HEADROOM_SERVICE_PORT": "9839",
    "HEADROOM_SERVICE_PORT_METRICS": "9839",
    "HEADROOM_PORT": "tcp://10.0.0.1:9839",
    "HEADROOM_PORT_9839_TCP": "tcp://10.0.0.1:9839",
    "HEADROOM_PORT_9839_TCP_PROTO": "tcp",
    "HEADROOM_PORT_9839_TCP_PORT": "9839",
    "HEADROOM_PORT_9839_TCP_ADDR": "10.0.0.1",
    "HEADROOM_LLAMA_70B_SERVICE_HOST": "10.0.0.1",
    "HEADROOM_LLAMA_70B_SERVICE_PORT_HTTP_METRICS": "9839",
    "HEADROOM_LLAMA_70B_PORT": "udp://10.0.0.1:9839",
    "HEADROOM_LLAMA_70B_PORT_53_UDP_ADDR": "10.0.0.1",
}


def test_what_kubernetes_injects_for_a_service_called_headroom_is_no_mistake() -> None:
    assert load([], OF_SERVICES) == ModelSettings()


def test_what_vllms_environment_has_for_the_probe_is_no_mistake() -> None:
    assert load([], {"HEADROOM_PROBE_SNAPSHOT": "/snapshots", "HEADROOM_PROBE_PEAKS": "on"}) == ModelSettings()


def test_what_only_looks_like_a_services_variable_is_a_mistake() -> None:
    lines = mistakes([], {"HEADROOM_LLAMA_PORT": "9839", "HEADROOM_PORT_X_TCP": "1", "HEADROOM_SERVICE": "x"})

    assert [line.split(":")[0] for line in lines] == ["HEADROOM_LLAMA_PORT", "HEADROOM_PORT_X_TCP", "HEADROOM_SERVICE"]


@settings(deadline=None)
@given(setting=st.sampled_from(sorted(Settings.model_fields)), text=st.text())
def test_any_text_is_a_value_or_one_line_that_names_its_setting(setting: str, text: str) -> None:
    name = name_variable(setting)

    lines = mistakes([], {name: text})

    assert len(lines) <= 1
    assert all(line.startswith(f"{name}: got ") for line in lines)


@settings(deadline=None)
@given(document=st.text() | st.from_regex(r"(gpus|listen_port|engine_headers|[a-z]+): [\[{&*!|>\"'a-z0-9,\]}: \n-]*"))
def test_any_file_is_settings_or_mistakes(document: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    file = tmp_path_factory.getbasetemp() / "any.yaml"
    file.write_bytes(document.encode(errors="surrogatepass"))

    assert all(len(line.splitlines()) == 1 for line in mistakes(["--config", str(file)], {}))
