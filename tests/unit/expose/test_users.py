"""Logins are checked in a fair order, at a bounded cost."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Coroutine
from typing import Any

import bcrypt
import pytest

from vllm_headroom.expose.web import logins
from vllm_headroom.expose.web.logins import MOST_CACHED_OUTCOMES, MOST_WAITING_LOGINS, Users

PASSWORD = "right"  # noqa: S105 - of nobody
CHEAP = bcrypt.hashpw(PASSWORD.encode(), bcrypt.gensalt(4)).decode()
COSTLY = CHEAP.replace("$04$", "$05$")
USERS = {"prometheus": CHEAP}


def login(name: str, password: str) -> str:
    return "Basic " + base64.b64encode(f"{name}:{password}".encode()).decode()


def ask(users: Users, password: str, client: str, name: str = "prometheus") -> Coroutine[Any, Any, bool | None]:
    return users.is_login_valid(USERS, login(name, password), client)


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[bytes, bytes]]:
    """Return the list that takes every password that is really checked, with its hash."""
    checks: list[tuple[bytes, bytes]] = []
    check = logins._is_right

    def note(password: bytes, wanted: bytes) -> bool:
        checks.append((password, wanted))
        return check(password, wanted)

    monkeypatch.setattr(logins, "_is_right", note)
    return checks


def test_a_newcomer_is_checked_before_those_who_guessed_wrong(checked: list[tuple[bytes, bytes]]) -> None:
    async def run() -> tuple[bool | None, list[bool | None]]:
        users = Users()
        assert await ask(users, "wrong", "10.0.0.1") is False
        strangers = [asyncio.create_task(ask(users, f"guess {n}", "10.0.0.1")) for n in range(20)]
        await asyncio.sleep(0)
        right = await ask(users, PASSWORD, "10.0.0.2")
        return right, await asyncio.gather(*strangers)

    right, strangers = asyncio.run(run())

    assert right is True
    assert strangers == [False] * 20
    # one guess was being checked when it came, and another may have been begun
    assert PASSWORD.encode() in [password for password, _ in checked[1:4]]


def test_beside_a_flood_the_worst_waits_in_vain_and_the_newcomer_does_not() -> None:
    async def run() -> tuple[bool | None, list[bool | None]]:
        users = Users()
        assert await ask(users, "wrong", "10.0.0.1") is False
        flood = [asyncio.create_task(ask(users, f"guess {n}", "10.0.0.1")) for n in range(2 * MOST_WAITING_LOGINS)]
        await asyncio.sleep(0)
        right = await ask(users, PASSWORD, "10.0.0.2")
        return right, await asyncio.gather(*flood)

    right, flood = asyncio.run(run())

    assert right is True
    assert flood.count(None) >= MOST_WAITING_LOGINS - 1


def test_a_repeated_mistake_is_checked_once(checked: list[tuple[bytes, bytes]]) -> None:
    async def run() -> list[bool | None]:
        users = Users()
        return [await ask(users, "wrong", "10.0.0.1") for _ in range(5)]

    assert asyncio.run(run()) == [False] * 5
    assert len(checked) == 1


def test_an_unknown_name_costs_what_the_costliest_of_the_file_costs(checked: list[tuple[bytes, bytes]]) -> None:
    async def run() -> bool | None:
        return await Users().is_login_valid({"a": CHEAP, "b": COSTLY}, login("nobody", PASSWORD), "10.0.0.1")

    assert asyncio.run(run()) is False
    assert checked == [(PASSWORD.encode(), COSTLY.encode())]


def test_the_password_of_the_costliest_user_lets_no_other_name_in() -> None:
    assert asyncio.run(ask(Users(), PASSWORD, "10.0.0.1", name="nobody")) is False


def list_costs(checked: list[tuple[bytes, bytes]]) -> list[int]:
    return [int(password_hash[4:6]) for _, password_hash in checked]


@pytest.mark.parametrize("name", ["cheap", "costly", "nobody"])
def test_a_wrong_password_takes_as_long_whatever_the_name(name: str, checked: list[tuple[bytes, bytes]]) -> None:
    users = {"cheap": CHEAP, "costly": CHEAP.replace("$04$", "$06$")}

    assert asyncio.run(Users().is_login_valid(users, login(name, "wrong"), "10.0.0.1")) is False
    assert sum(2**cost for cost in list_costs(checked)) == 2**6


def test_a_right_login_is_not_forgotten_for_guesses(checked: list[tuple[bytes, bytes]]) -> None:
    async def run() -> bool | None:
        users = Users()
        assert await ask(users, PASSWORD, "10.0.0.1") is True
        users._outcomes.update((bytes([n % 256, n // 256]), False) for n in range(MOST_CACHED_OUTCOMES))
        assert await ask(users, "wrong", "10.0.0.1") is False
        checked.clear()
        return await ask(users, PASSWORD, "10.0.0.1")

    assert asyncio.run(run()) is True
    assert checked == []


def test_a_right_login_of_the_past_lets_nobody_in_once_its_hash_is_replaced() -> None:
    async def run() -> bool | None:
        users = Users()
        assert await ask(users, PASSWORD, "10.0.0.1") is True
        other_hash = bcrypt.hashpw(b"other", bcrypt.gensalt(4)).decode()
        return await users.is_login_valid({"prometheus": other_hash}, login("prometheus", PASSWORD), "10.0.0.1")

    assert asyncio.run(run()) is False


@pytest.mark.parametrize("shares_address", [True, False])
def test_a_login_that_is_repeated_is_checked_before_new_guesses(
    shares_address: bool,  # noqa: FBT001 - a parameter of the test
    checked: list[tuple[bytes, bytes]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Guessers have the address of the right client, which made mistakes before, or a fresh one for each guess."""

    async def run() -> bool | None:
        users = Users()
        assert await ask(users, "mistake", "10.0.0.1") is False
        with monkeypatch.context() as hurried:
            hurried.setattr(logins, "CHECK_SECONDS", 0.0)
            assert await ask(users, PASSWORD, "10.0.0.1") is None, "it is refused once"
        guesses = []
        for number in range(100):
            client = "10.0.0.1" if shares_address else f"fd00::{number}"
            guesses.append(asyncio.create_task(ask(users, f"guess {number}", client)))
        await asyncio.sleep(0)
        checked.clear()
        right = await ask(users, PASSWORD, "10.0.0.1")
        for guess in guesses:
            guess.cancel()
        return right

    assert asyncio.run(run()) is True
    assert len(checked) <= 4, "one guess was being checked, and every second check is the oldest login's"
