"""A table of the detector's witnesses.

The table shows what each witness measures and adds, and which test covers it. The judge calls the
functions directly rather than through this table. The benchmark turns the witnesses off one at a
time. For each row, a test turns off the witness and checks that the test named in the row fails.
"""

from collections.abc import Callable
from typing import Any, Final

from msgspec import Struct

from vllm_headroom.derive.leak import estimate, facts, growth_evidence, judge, precedent, track


class Witness(Struct, frozen=True, kw_only=True):
    """A row of the table: a rule with evidence for or against a leak."""

    name: str
    measures: str
    adds: str
    """What the rule adds to the odds of a leak, or what it forbids."""

    functions: tuple[Callable[..., Any], ...]
    constants: dict[str, object]
    """The constants, by name. Why each constant has its value is explained where it is defined."""

    source: str
    """Where the constants and the formula come from."""

    fails_without: str
    """A test that fails without the witness, and the recorded day that it replays."""


WITNESSES: Final = (
    Witness(
        name="how often it rises",
        measures="in how many blocks memory rose, against the rarity of records and first uses",
        adds="the log likelihood ratio of each block, in all at most 12; an alarm needs 10",
        functions=(growth_evidence.weigh_blocks,),
        constants={
            "RISE_SOURCES": growth_evidence.RISE_SOURCES,
            "RISE_CHANCE_IN_A_LEAK": growth_evidence.RISE_CHANCE_IN_A_LEAK,
            "LEAST_RISE_CHANCE": growth_evidence.LEAST_RISE_CHANCE,
            "USELESS_CHANCE": growth_evidence.USELESS_CHANCE,
            "LEAST_RISE_ODDS": judge.LEAST_RISE_ODDS,
        },
        source="Rényi: the n-th of exchangeable demands is a record with chance 1/n",
        fails_without="tests/unit/derive/leak/test_large_and_fast.py"
        "::test_a_warm_up_that_takes_half_of_the_room_is_none_though_each_block_rises",
    ),
    Witness(
        name="pace",
        measures="growth at a constant rate, by time or requests, against growth by folds of work",
        adds="the log likelihood ratio of the two, at most 12",
        functions=(growth_evidence.weigh_pace,),
        constants={"WITNESS_ODDS_LIMIT": judge.WITNESS_ODDS_LIMIT},
        source="Poisson's law of steps of the window's typical size",
        fails_without="tests/unit/derive/leak/test_limits.py"
        "::test_growth_by_the_logarithm_of_swinging_work_is_no_alarm_where_each_rise_is_small",
    ),
    Witness(
        name="shape",
        measures="the shares of the growth in the later half and in each quarter of a window",
        adds="nothing; without its shares growth is no verdict",
        functions=(growth_evidence.is_even,),
        constants={
            "LATER_HALF_SHARE": growth_evidence.LATER_HALF_SHARE,
            "FIRST_QUARTER_SHARE": growth_evidence.FIRST_QUARTER_SHARE,
            "LAST_QUARTER_SHARE": growth_evidence.LAST_QUARTER_SHARE,
        },
        source="our choice; without it the recorded day quiet-level is a warning",
        fails_without="tests/unit/derive/leak/test_limits.py"
        "::test_growth_after_quiet_hours_is_nothing_before_ten_minutes_however_fast",
    ),
    Witness(
        name="clipped rises",
        measures="each rise as at most three median rises",
        adds="nothing; one large demand moves neither the shape nor the time left",
        functions=(growth_evidence.clip_rises, estimate.clip_largest_rise),
        constants={"CLIP_MEDIANS": growth_evidence.CLIP_MEDIANS, "LARGE_BYTES": facts.LARGE_BYTES},
        source="our choice; recorded days of torch's allocator are found later without",
        fails_without="tests/unit/derive/leak/test_large_and_fast.py"
        "::test_one_large_demand_early_in_a_leak_does_not_put_the_alarm_off",
    ),
    Witness(
        name="patience",
        measures="how long growth has lasted, against the time left",
        adds="nothing; an alarm on a straight line waits for an hour, or longer for a twentieth of"
        " the time left, and one on uneven growth for 0.36 of it",
        functions=(growth_evidence.compute_patience, growth_evidence.measure_deviation),
        constants={
            "LEAKING_SECONDS": growth_evidence.LEAKING_SECONDS,
            "HASTE_SHARE": growth_evidence.HASTE_SHARE,
            "HASTE_SECONDS": growth_evidence.HASTE_SECONDS,
            "PATIENCE_SHARE": growth_evidence.PATIENCE_SHARE,
            "UNEVEN_PATIENCE_SHARE": growth_evidence.UNEVEN_PATIENCE_SHARE,
            "LINE_DEVIATION": growth_evidence.LINE_DEVIATION,
            "LONGEST_PATIENCE_SECONDS": growth_evidence.LONGEST_PATIENCE_SECONDS,
            "UNKNOWN_PATIENCE_SECONDS": growth_evidence.UNKNOWN_PATIENCE_SECONDS,
            "ASSUMED_ROOM_BYTES": growth_evidence.ASSUMED_ROOM_BYTES,
        },
        source="bounded ramps (caches, LoRA slots) are linear until they end, or slow down like"
        " 1 - exp(-t / tau), which never lasts for 1/e of the time left in a larger room",
        fails_without="tests/unit/derive/leak/test_limits.py"
        "::test_where_the_room_lasts_for_days_an_even_fill_of_hours_is_a_warning"
        "_and_what_goes_on_an_alarm",
    ),
    Witness(
        name="keeps its pace",
        measures="the growth of the last two thirds of the run, without its first quarter, against"
        " that of the third before, by time and by requests",
        adds="nothing; growth that has slowed down is at most a warning, unless it is steady and"
        " the room is soon full",
        functions=(judge.is_fading,),
        constants={"KEPT_PACE": judge.KEPT_PACE},
        source="a straight line doubles, a logarithm repeats; caches and heaps of simulated engines"
        " fill like 1 - exp(-t / tau), with tau of 1 to 14 hours",
        fails_without="tests/unit/derive/leak/test_limits.py"
        "::test_a_cache_that_fills_ever_more_slowly_is_a_warning_and_a_leak_beneath_it_an_alarm",
    ),
    Witness(
        name="large steps",
        measures="the pace of windows that begin with a step and are worth two",
        adds="a separate verdict, for leaks in too few rises for the others",
        functions=(growth_evidence.find_step_windows, growth_evidence.judge_steps),
        constants={
            "LEAST_STEPS_BYTES": growth_evidence.LEAST_STEPS_BYTES,
            "LEAST_STEPS": growth_evidence.LEAST_STEPS,
            "GROWING_ODDS": growth_evidence.GROWING_ODDS,
            "LEAKING_ODDS": growth_evidence.LEAKING_ODDS,
            "YOUNG_SECONDS": growth_evidence.YOUNG_SECONDS,
            "ROOM_SHARE": growth_evidence.ROOM_SHARE,
            "ENOUGH_BYTES": growth_evidence.ENOUGH_BYTES,
        },
        source="Poisson's law, as pace; few bounded caches take a quarter of the room or 1.5 GiB",
        fails_without="tests/unit/derive/leak/test_time_left.py"
        "::test_an_alarm_of_large_steps_ends_when_they_do",
    ),
    Witness(
        name="sizes of steps",
        measures="whether the sizes of large steps come again, or outgrow each other",
        adds="up to 6 for each repeated size, 0.5 for a smaller one, -1 for a record",
        functions=(growth_evidence.score_likeness,),
        constants={
            "REPEATED_BYTES": growth_evidence.REPEATED_BYTES,
            "REPEATED_ODDS": growth_evidence.REPEATED_ODDS,
            "MOST_REPEATED_ODDS": growth_evidence.MOST_REPEATED_ODDS,
            "SMALLER_ODDS": growth_evidence.SMALLER_ODDS,
            "RECORD_ODDS": growth_evidence.RECORD_ODDS,
            "SURE_OF_STEPS": growth_evidence.SURE_OF_STEPS,
        },
        source="fitted to simulated days",
        fails_without="tests/unit/derive/leak/test_large_and_fast.py"
        "::test_steps_that_each_outgrow_the_last_are_records_and_no_leak_and_equal_ones_are",
    ),
    Witness(
        name="load that doubled",
        measures="the most requests that ever ran at once",
        adds="nothing; when they have doubled, work is counted from there, as after a start",
        functions=(track.observe,),
        constants={"LOAD_LEAP": track.LOAD_LEAP},
        source="steady load exceeds its first minutes by a half at most; without it the recorded"
        " day quiet-level is a warning",
        fails_without="tests/unit/derive/leak/test_higher_load.py"
        "::test_just_after_load_doubled_growth_proves_as_little_as_after_a_start",
    ),
    Witness(
        name="steady growth",
        measures="whether each of eleven blocks rose by nearly the same",
        adds="an alarm without odds once three quarters of the time left have passed",
        functions=(growth_evidence.is_steady,),
        constants={
            "STEADY_BLOCKS": growth_evidence.STEADY_BLOCKS,
            "STEADY_SPREAD": growth_evidence.STEADY_SPREAD,
            "SOON_SHARE": judge.SOON_SHARE,
            "LATE_SHARE": growth_evidence.LATE_SHARE,
        },
        source="warm-ups that took half of a card had a variance of 0.8 to 4 squared means",
        fails_without="tests/unit/derive/leak/test_higher_load.py"
        "::test_equal_chunks_that_fill_a_small_card_for_hours_are_an_alarm_whatever_load_does",
    ),
    Witness(
        name="kept on a full card",
        measures="the room that is left when growth pauses or is given back during an alarm",
        adds="nothing; with less than 1 GiB an alarm is held for longer",
        functions=(judge.update_alarm,),
        constants={"NEARLY_FULL_BYTES": judge.NEARLY_FULL_BYTES},
        source="torch's allocator gives back its cache, which hides the growth beneath",
        fails_without="tests/unit/derive/leak/test_steps.py"
        "::test_an_alarm_ends_when_most_is_given_back"
        "_and_on_a_full_card_when_nothing_grows_for_long[a full card gives back its cache]",
    ),
    Witness(
        name="lows that rise",
        measures="how much of the growth a release leaves",
        adds="nothing; a release after which the lows are higher does not end an alarm",
        functions=(judge.update_alarm,),
        constants={"LOW_SHARE": judge.LOW_SHARE},
        source="our choice; torch's garbage_collection_threshold releases nine tenths of a leak",
        fails_without="tests/unit/derive/leak/test_releases.py"
        "::test_a_release_does_not_end_an_alarm_while_the_lows_rise",
    ),
    Witness(
        name="most of the room",
        measures="the growth of the run, against what is left of the room",
        adds="an alarm without odds once growth took six times what is left, has not slowed down,"
        " goes on, and is not a single large demand",
        functions=(judge.find_growth_without_room,),
        constants={
            "GONE_RATIO": judge.GONE_RATIO,
            "CLIPPED_GONE_RATIO": judge.CLIPPED_GONE_RATIO,
        },
        source="our choice; simulated engines whose uneven steps left no evidence ran out of memory"
        " without an alarm",
        fails_without="tests/unit/derive/leak/test_room_gone.py"
        "::test_uneven_growth_that_took_most_of_the_room_is_an_alarm",
    ),
    Witness(
        name="no concern",
        measures="the growth of half a day, against the room",
        adds="nothing; what would take a year to fill ends an alarm",
        functions=(judge.update_alarm,),
        constants={
            "FADED_SECONDS": judge.FADED_SECONDS,
            "NO_CONCERN_SECONDS": judge.NO_CONCERN_SECONDS,
        },
        source="our choice; an engine is restarted within a year",
        fails_without="tests/unit/derive/leak/test_releases.py"
        "::test_growth_that_would_take_a_year_to_fill_the_room_is_no_alarm",
    ),
    Witness(
        name="next step",
        measures="whether the next of three steps of one size, or each twice the last, fits",
        adds="an alarm without odds where it does not, with the time left until it comes",
        functions=(growth_evidence.find_next_step,),
        constants={
            "LEAST_REPEATS": growth_evidence.LEAST_REPEATS,
            "REPEATED_RATIO": growth_evidence.REPEATED_RATIO,
            "JOINED_SECONDS": growth_evidence.JOINED_SECONDS,
            "REALLOCATED_SECONDS": growth_evidence.REALLOCATED_SECONDS,
        },
        source="our choice; a simulated engine took 2.47 GB four times, with 2.04 GB left",
        fails_without="tests/unit/derive/leak/test_releases.py"
        "::test_a_step_that_does_not_fit_is_an_alarm_with_the_time_until_it_comes",
    ),
    Witness(
        name="room that is gone",
        measures="whether less is free than an allocation needs when an alarm would begin",
        adds="nothing; such growth is at most a warning",
        functions=(judge.is_room_gone,),
        constants={"OUT_OF_MEMORY_BYTES": facts.OUT_OF_MEMORY_BYTES},
        source="our choice; a simulated engine filled its card with demands of new kinds and served"
        " for 15 hours more",
        fails_without="tests/unit/derive/leak/test_pages.py"
        "::test_no_alarm_begins_when_the_room_is_gone",
    ),
    Witness(
        name="a straight line",
        measures="whether each of six blocks rose by nearly the same, with minutes left",
        adds="an alarm without odds after three minutes, whatever load does",
        functions=(growth_evidence.is_straight,),
        constants={
            "STRAIGHT_SPREAD": growth_evidence.STRAIGHT_SPREAD,
            "STRAIGHT_BYTES": growth_evidence.STRAIGHT_BYTES,
            "STRAIGHT_LEFT_SECONDS": judge.STRAIGHT_LEFT_SECONDS,
            "STARTUP_SHARE": judge.STARTUP_SHARE,
        },
        source="our choice; a burst of requests on a tight card fills it before eleven blocks end",
        fails_without="tests/unit/derive/leak/test_yesterday.py"
        "::test_a_straight_line_to_full_within_minutes_is_an_alarm_from_its_third",
    ),
    Witness(
        name="a record of load",
        measures="the load of less than an hour, against each quarter of an hour before",
        adds="nothing; under a record such growth is at most a warning, unless it is steady",
        functions=(judge.is_busiest,),
        constants={"BUSIEST_RATIO": judge.BUSIEST_RATIO},
        source="our choice; a simulated engine nearly filled its card under a record of load",
        fails_without="tests/unit/derive/leak/test_releases.py"
        "::test_memory_that_follows_a_record_of_load_is_no_alarm",
    ),
    Witness(
        name="a start",
        measures="the growth of less than an hour, against the memory that was held at first",
        adds="nothing; growth by more than a quarter of that memory is at most a warning, unless it"
        " is steady",
        functions=(judge.looks_like_start,),
        constants={"STARTUP_SHARE": judge.STARTUP_SHARE},
        source="our choice; on a card whose holders are unknown, another process loads its weights",
        fails_without="tests/unit/derive/leak/test_releases.py"
        "::test_a_process_that_starts_on_a_card_whose_holders_are_unknown_is_no_alarm",
    ),
    Witness(
        name="full and breathing",
        measures="whether lows rise, and the peak is exceeded, as the alarm's growth would do",
        adds="nothing; an alarm ends where neither does",
        functions=(judge.is_breathing,),
        constants={
            "SLOWED_SHARE": judge.SLOWED_SHARE,
            "LEAST_BREATH_BLOCKS": judge.LEAST_BREATH_BLOCKS,
        },
        source="a host tier of the KV cache that is full is released in part and filled again",
        fails_without="tests/unit/derive/leak/test_yesterday.py"
        "::test_a_tier_that_is_full_and_breathes_is_no_alarm",
    ),
    Witness(
        name="released before",
        measures="whether the run has held this much before, and has released most of it",
        adds="nothing; growth up to that height is at most a warning",
        functions=(precedent.has_released,),
        constants={
            "FALLEN_SHARE": precedent.FALLEN_SHARE,
            "LEVEL_MARGIN_SHARE": precedent.LEVEL_MARGIN_SHARE,
        },
        source="our choice; what is taken by a job, a log buffer or a cache, and released again, is"
        " no leak the next time either",
        fails_without="tests/unit/derive/leak/test_releases.py"
        "::test_what_was_released_is_no_alarm_when_it_is_taken_again",
    ),
    Witness(
        name="yesterday",
        measures="what the run before, and the same hours of the days before, held while well",
        adds="nothing; growth up to that height is at most a warning",
        functions=(precedent.find_excused_bytes,),
        constants={
            "LEVEL_SECONDS": precedent.LEVEL_SECONDS,
            "LEVEL_SHARE": precedent.LEVEL_SHARE,
            "FALLEN_SHARE": precedent.FALLEN_SHARE,
            "LOWER_LOAD": precedent.LOWER_LOAD,
            "LEAST_ROOM_BYTES": precedent.LEAST_ROOM_BYTES,
            "LEVEL_MARGIN_SHARE": precedent.LEVEL_MARGIN_SHARE,
            "LOAD_MARGIN_SHARE": precedent.LOAD_MARGIN_SHARE,
        },
        source="our choice; a cache fills each morning, and memory may follow a daily load slowly",
        fails_without="tests/unit/derive/leak/test_yesterday.py"
        "::test_the_fill_of_each_morning_is_an_alarm_on_the_first_day_only",
    ),
)
