from __future__ import annotations

import json

import pytest

from vllm_headroom_tools.openai import Model, error_of, first_model, json_object, server_version

DEEP = "[" * 100_000


@pytest.mark.parametrize(
    ("listed", "model"),
    [
        ({"data": [{"id": "a", "max_model_len": 8}, {"id": "b"}]}, Model(name="a", most_tokens=8)),
        ({"data": [{"id": "a"}]}, Model(name="a", most_tokens=None)),
        ({"data": [{"id": "a", "max_model_len": "8"}]}, Model(name="a", most_tokens=None)),
        ({"data": [{"id": 3}]}, None),
        ({"data": ["a"]}, None),
        ({"data": []}, None),
        ({"data": {}}, None),
        ([], None),
    ],
)
def test_the_first_model_is_found_where_one_is_listed(listed: object, model: Model | None) -> None:
    assert first_model(json.dumps(listed)) == model


@pytest.mark.parametrize("text", ["", "<html>", DEEP, "[1]", "null", '{"data": NaN}', '{"data": 1e999}'])
def test_what_is_no_object_says_nothing(text: str) -> None:
    assert json_object(text) == {}
    assert first_model(text) is None
    assert server_version(text) is None


@pytest.mark.parametrize(("said", "version"), [({"version": "0.11.2"}, "0.11.2"), ({"version": 3}, None), ({}, None)])
def test_a_version_is_a_text(said: object, version: str | None) -> None:
    assert server_version(json.dumps(said)) == version


@pytest.mark.parametrize(
    ("said", "error"),
    [
        ({"error": {"message": "m", "code": 500}}, "m"),
        ({"error": {"code": 500}}, "{'code': 500}"),
        ({"error": "plain"}, "plain"),
        ({"object": "error", "message": "old"}, "old"),
        ({"choices": []}, None),
        ({}, None),
    ],
)
def test_an_error_is_its_message(said: dict[str, object], error: str | None) -> None:
    assert error_of(said) == error
