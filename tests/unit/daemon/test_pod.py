"""Which pod the sidecar is in."""

from __future__ import annotations

import pytest

from vllm_headroom.daemon.pod import read_engine_pod


@pytest.mark.parametrize(
    ("environ", "container", "log_command"),
    [
        ({"POD_NAMESPACE": "llm", "POD_NAME": "vllm-0"}, None, "kubectl logs --previous -n llm vllm-0 -c vllm"),
        (
            {"POD_NAMESPACE": "llm", "POD_NAME": "vllm-0", "HEADROOM_ENGINE_CONTAINER": "server"},
            None,
            "kubectl logs --previous -n llm vllm-0 -c server",
        ),
        ({"POD_NAMESPACE": "llm", "POD_NAME": "a.b"}, "server", "kubectl logs --previous -n llm a.b -c server"),
        ({"POD_NAME": "vllm-0"}, None, None),
        ({"POD_NAMESPACE": "llm", "POD_NAME": "$(reboot)"}, None, None),
        ({}, None, None),
    ],
)
def test_it_is_named_only_where_all_of_its_names_are_known(
    monkeypatch: pytest.MonkeyPatch, environ: dict[str, str], container: str | None, log_command: str | None
) -> None:
    for name in ("POD_NAMESPACE", "POD_NAME", "HEADROOM_ENGINE_CONTAINER"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)

    pod = read_engine_pod(container)

    assert (None if pod is None else pod.log_command) == log_command
