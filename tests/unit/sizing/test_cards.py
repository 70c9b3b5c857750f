"""Cards by their names."""

from __future__ import annotations

import pytest

from vllm_headroom.units import MIB, RefusedError
from vllm_headroom_tools.sizing.cards import CARDS, parse_gpus_by_name


@pytest.mark.parametrize(
    ("text", "name", "total_mib"),
    [
        ("H100", "H100", 81559),
        ("h100-80gb", "H100", 81559),
        ("NVIDIA H100 80GB HBM3", "H100", 81559),
        ("NVIDIA H100 PCIe", "H100", 81559),
        ("H100 NVL", "H100 NVL", 95830),
        ("H100-NVL", "H100 NVL", 95830),
        ("NVIDIA A100-SXM4-80GB", "A100-80GB", 81920),
        ("A100 40GB", "A100-40GB", 40960),
        ("a100-80g", "A100-80GB", 81920),
        ("Tesla T4", "T4", 15360),
        ("NVIDIA GeForce RTX 4090", "RTX 4090", 24564),
        ("4090", "RTX 4090", 24564),
        ("RTX PRO 6000", "RTX PRO 6000", 97887),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "RTX PRO 6000", 97887),
        ("AMD Instinct MI300X", "MI300X", 196592),
        ("GB10", "GB10", 122_572),
        ("DGX Spark", "GB10", 122_572),
        ("NVIDIA GH200 480GB", "GH200", 97871),
        ("B200 180GB", "B200", 183359),
        ("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", "RTX PRO 6000", 97887),
    ],
)
def test_a_card_has_its_memory_under_all_its_names(text: str, name: str, total_mib: int) -> None:
    choice = parse_gpus_by_name(text)

    assert (choice.card.name, choice.card.memory_bytes, choice.count) == (name, total_mib * MIB, None)


@pytest.mark.parametrize(
    "text", ["8xH200", "8x H200", "8 x H200", "8*h200", "8X NVIDIA H200", "H200x8", "H200:8", "8\u00d7H200", "H200 x 8"]
)
def test_a_number_of_cards(text: str) -> None:
    choice = parse_gpus_by_name(text)

    assert (choice.card.name, choice.count) == ("H200", 8)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("A100", "there are A100-40GB and A100-80GB"),
        ("H100 96GB", "H100 96GB: not a card that is known here, did you mean H100"),
        ("H101", "H101: not a card that is known here, did you mean H100?; else --gpu-memory SIZE"),
        ("0xH100", "it is no card"),
        ("", "it names no card"),
        ("RTX", "RTX: not a card that is known here"),
    ],
)
def test_another_name_is_refused_with_a_hint(text: str, problem: str) -> None:
    with pytest.raises(RefusedError) as refusal:
        parse_gpus_by_name(text)

    assert str(refusal.value).startswith(problem)


def test_every_card_is_found_by_its_own_name() -> None:
    assert [parse_gpus_by_name(card.name).card for card in CARDS] == list(CARDS)
