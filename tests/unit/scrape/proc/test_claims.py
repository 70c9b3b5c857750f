"""Which of several engines is the one, before its page answers and after."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from tests.unit.scrape.proc.engines import ANOTHER, ANYTHING, NEIGHBOUR, ON_HOST, OURS, REFUSED, choice, named, tree


@pytest.mark.parametrize("command", ["vllm serve m", "vllm serve --config c.yaml"])
def test_one_server_that_may_come_to_listen_is_the_engine(command: str) -> None:
    assert choice(tree((10, 1, command), (11, 10, "VLLM::EngineCore"))).roots == (10,)


def test_one_that_will_listen_elsewhere_is_the_engine_only_where_something_stands_before_it() -> None:
    """A proxy or a port mapping listens also while the engine behind it loads."""
    assert choice(tree(NEIGHBOUR)).roots == ()
    assert choice(tree(OURS), away=[10]).roots == ()
    assert choice(tree(NEIGHBOUR), page_state=ANYTHING).roots == (20,)
    assert choice(tree(OURS), page_state=ANYTHING, away=[10]).roots == (10,)


def test_of_several_servers_it_is_the_one_with_the_port() -> None:
    assert choice(tree(OURS, NEIGHBOUR, ANOTHER), page_state=ANYTHING).roots == (10,)
    assert choice(tree(OURS, (20, 1, "vllm serve n")), away=[20]).roots == (10,)


def test_a_default_port_counts() -> None:
    assert choice(tree((10, 1, "vllm serve m"), NEIGHBOUR)).roots == (10,)


@pytest.mark.parametrize(
    "servers",
    [
        (NEIGHBOUR, ANOTHER),
        (OURS, (20, 1, "vllm serve n")),
        ((10, 1, "vllm serve --config c.yaml"), NEIGHBOUR),
    ],
    ids=["none has the port", "two have it", "one does not tell"],
)
def test_where_nothing_tells_none_is_taken(servers: tuple[tuple[int, int, str], ...]) -> None:
    choice_made = choice(tree(*servers), page_state=ANYTHING)

    assert (choice_made.roots, choice_made.ambiguous_engines) == ((), 2)
    assert choice_made.neighbours == {(pid, 1.0) for pid, _, _ in servers}


@pytest.mark.parametrize("neighbours", [(NEIGHBOUR,), (NEIGHBOUR, ANOTHER)])
def test_once_the_server_with_the_port_was_seen_its_neighbours_are_none_while_it_is_down(
    neighbours: tuple[tuple[int, int, str], ...],
) -> None:
    earlier_choice = choice(tree(OURS))

    alone = choice(tree(*neighbours), page_state=ANYTHING, earlier_choice=earlier_choice)
    assert (alone.roots, alone.ambiguous_engines) == ((), 0)
    assert choice(tree(OURS, *neighbours), earlier_choice=alone).roots == (10,)


def test_the_start_that_the_page_tells_is_surer_than_a_port() -> None:
    seen_tree = {**tree(OURS, NEIGHBOUR), 30: replace(tree(ANOTHER)[30], started_seconds=70.0)}

    assert choice(seen_tree, page_state=named(71.0)).roots == (30,)
    assert choice(seen_tree, page_state=named(900.0)).roots == (10,), "its clock was set"


def test_a_page_that_names_its_server_speaks_for_no_other() -> None:
    page_state = named(900.0)

    assert choice(tree(NEIGHBOUR), page_state=page_state).roots == ()
    assert (
        choice(
            tree(NEIGHBOUR), page_state=page_state, earlier_choice=choice(tree(NEIGHBOUR), page_state=ANYTHING)
        ).roots
        == ()
    )
    assert choice(tree(NEIGHBOUR), page_state=named()).roots == (20,), "it does not name it"


def test_a_program_that_embeds_vllm_is_known_by_its_own_start() -> None:
    process_tree = tree(
        (7, 1, "python serve.py"), (8, 7, "VLLM::EngineCore"), (17, 1, "python b.py"), (18, 17, "VLLM::Worker")
    )
    process_tree[7] = replace(process_tree[7], started_seconds=70.0)

    assert choice(process_tree, page_state=named(70.0)).roots == (8,)


def test_one_behind_a_mapping_is_known_again_and_those_beside_it_stay_strangers() -> None:
    """Two containers whose engines have the same port inside."""
    twins = {**tree(OURS), 20: replace(tree(OURS)[10], pid=20, started_seconds=70.0)}
    first_choice = choice(twins, page_state=named(70.0), away=[10, 20])
    assert first_choice.roots == (20,)

    dead = choice(tree(OURS), page_state=ANYTHING, earlier_choice=first_choice, away=[10])
    assert (dead.roots, dead.ambiguous_engines) == ((), 0)

    again = {**tree(OURS), 21: replace(twins[20], pid=21, started_seconds=90.0)}
    assert choice(again, earlier_choice=dead, away=[10, 21]).roots == (21,)


def test_the_one_that_was_chosen_stays_it_unless_its_pid_is_anothers() -> None:
    first_choice = choice(tree((10, 1, "vllm serve --config c.yaml")))
    process_tree = tree((10, 1, "vllm serve --config c.yaml"), (20, 1, "vllm serve --config d.yaml"))

    assert choice(process_tree, earlier_choice=first_choice).roots == (10,)
    recycled = {**process_tree, 10: replace(process_tree[10], started_seconds=50.0)}
    assert choice(recycled, earlier_choice=first_choice).ambiguous_engines == 2


def test_of_two_that_began_within_a_second_the_nearer_is_meant() -> None:
    process_tree = tree(OURS, NEIGHBOUR)
    process_tree[20] = replace(process_tree[20], started_seconds=1.9)

    assert choice(process_tree, page_state=named(1.9)).roots == (20,)


def test_of_two_of_which_neither_began_exactly_then_the_one_with_the_port_is_meant() -> None:
    """The clock was set by a second since: all starts moved alike."""
    process_tree = tree(OURS, NEIGHBOUR)
    process_tree[20] = replace(process_tree[20], started_seconds=2.0)

    assert choice(process_tree, page_state=named(2.3)).roots == (10,)


def test_what_was_seen_beside_a_named_server_is_none_until_the_page_names_it() -> None:
    """The last page of a dead server names a neighbour that began in the same second."""
    last_page, neighbour_entry = named(1.0), replace(tree(NEIGHBOUR)[20], started_seconds=1.5)
    first_choice = choice({**tree(OURS), 20: neighbour_entry}, page_state=last_page)

    dead = choice({20: neighbour_entry}, page_state=last_page, earlier_choice=first_choice)
    assert (first_choice.roots, dead.roots, dead.ambiguous_engines) == ((10,), (), 0)

    recycled = {10: replace(tree(NEIGHBOUR)[20], pid=10, started_seconds=1.1)}
    assert choice(recycled, page_state=last_page, earlier_choice=first_choice).roots == ()

    turned = choice({20: neighbour_entry}, page_state=named(1.5), earlier_choice=dead)
    assert turned.roots == (20,), "the address leads to another server"


def test_a_server_of_several_ports_is_known_by_the_one_that_answers() -> None:
    process_tree = tree(
        (20, 1, "vllm serve m --port 9000"), (21, 20, "VLLM::APIServer_DP0"), (22, 20, "VLLM::APIServer_DP1")
    )
    process_tree[22] = replace(process_tree[22], started_seconds=70.0)

    assert choice(process_tree, page_state=named(70.0)).roots == (20,)


@pytest.mark.parametrize("command", ["vllm serve m --port 9000", "vllm serve --config c.yaml"])
def test_on_a_host_one_that_only_may_be_it_is_not_known_to_be_before_the_page_answers(command: str) -> None:
    """In its own pod there is no other."""
    process_tree = tree((10, 1, command))

    choice_before = choice(process_tree, page_state=ON_HOST)
    assert (choice_before.roots, choice_before.ambiguous_engines) == ((), 1)
    assert choice(process_tree).roots == (() if "9000" in command else (10,))
    assert choice(process_tree, page_state=ANYTHING).roots == (10,)

    served = choice(process_tree, page_state=replace(named(), is_maybe_other_pods=True), earlier_choice=choice_before)
    assert served.roots == (10,)
    assert choice(process_tree, page_state=replace(REFUSED, is_maybe_other_pods=True), earlier_choice=served).roots == (
        10,
    )


def test_on_a_host_one_with_the_port_is_known_before_it_answers() -> None:
    assert choice(tree(OURS), page_state=ON_HOST).roots == (10,)


def test_one_that_was_sure_stays_it_under_a_title_though_its_clock_was_set() -> None:
    titled = tree((10, 1, "VLLM::APIServer"))

    assert choice(titled, page_state=named(900.0), earlier_choice=choice(tree(OURS))).roots == (10,)
