from __future__ import annotations

import json

import pytest

from vllm_headroom_tools.openai import ListedModel, find_error, parse_first_model, parse_object, parse_server_version

DEEP = "[" * 100_000


@pytest.mark.parametrize(
    ("listed", "model"),
    [
        ({"data": [{"id": "a", "max_model_len": 8}, {"id": "b"}]}, ListedModel(name="a", max_tokens=8)),
        ({"data": [{"id": "a"}]}, ListedModel(name="a", max_tokens=None)),
        ({"data": [{"id": "a", "max_model_len": "8"}]}, ListedModel(name="a", max_tokens=None)),
        ({"data": [{"id": 3}]}, None),
        ({"data": ["a"]}, None),
        ({"data": []}, None),
        ({"data": {}}, None),
        ([], None),
    ],
)
def test_the_first_model_is_found_where_one_is_listed(listed: object, model: ListedModel | None) -> None:
    assert parse_first_model(json.dumps(listed)) == model


@pytest.mark.parametrize("text", ["", "<html>", DEEP, "[1]", "null", '{"data": NaN}', '{"data": 1e999}'])
def test_what_is_no_object_says_nothing(text: str) -> None:
    assert parse_object(text) == {}
    assert parse_first_model(text) is None
    assert parse_server_version(text) is None


@pytest.mark.parametrize(
    ("version_document", "version"), [({"version": "0.11.2"}, "0.11.2"), ({"version": 3}, None), ({}, None)]
)
def test_a_version_is_a_text(version_document: object, version: str | None) -> None:
    assert parse_server_version(json.dumps(version_document)) == version


@pytest.mark.parametrize(
    ("error_document", "error"),
    [
        ({"error": {"message": "m", "code": 500}}, "m"),
        ({"error": {"code": 500}}, "{'code': 500}"),
        ({"error": "plain"}, "plain"),
        ({"object": "error", "message": "old"}, "old"),
        ({"choices": []}, None),
        ({}, None),
    ],
)
def test_an_error_is_its_message(error_document: dict[str, object], error: str | None) -> None:
    assert find_error(error_document) == error
