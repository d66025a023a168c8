"""Which test holds which promise of the served engine, and that the test is there.

Each row is a fault that a servicer of this kind has had, stated the other way round. P numbers
are faults of running servers, D numbers weak points in their design, U numbers faults at their end.
"""

from __future__ import annotations

from pathlib import Path

import pytest

HERE = Path(__file__).parent
TESTS = HERE.parents[1]

ROWS: dict[str, tuple[str, ...]] = {
    "P1/D2 an id outside the vocabulary is refused by name, nothing crashes": (
        "engines/mlx/test_bad_input.py::test_bad_input_is_refused_by_name",
        "gateway/test_openai.py::test_a_bias_outside_the_vocabulary_is_a_400",
    ),
    "P2/D4 an empty prompt is refused, neighbours and log do not notice": (
        "engines/mlx/test_bad_input.py::test_neighbours_lose_nothing_to_bad_requests",
        "gateway/test_openai.py::test_an_empty_prompt_is_a_400",
    ),
    "P3/D3 a bad sampling value is refused before the batch, top_k past the vocabulary is off": (
        "engines/mlx/test_bad_input.py::test_bad_input_is_refused_by_name",
        "engines/mlx/test_bad_input.py::test_filters_that_filter_nothing_are_off",
        "gateway/test_openai.py::test_a_huge_top_k_is_no_fault",
    ),
    "P3/D5 a failed step costs the rows that caused it and no other a token": (
        "engines/mlx/test_engine_death.py::test_one_failed_step_costs_nobody_a_token",
        "engines/mlx/test_engine_death.py::test_three_lost_steps_in_a_row_end_the_engine",
        "engines/mlx/runtime/test_failures.py::test_a_poisoned_row_in_decode",
    ),
    "P4/D8 a seed reproduces alone, again and in a mixed batch": (
        "engines/mlx/test_sampled.py::test_a_seed_gives_the_same_again",
        "engines/mlx/test_sampled.py::test_a_seed_holds_in_a_mixed_batch",
        "gateway/test_openai.py::test_a_seed_gives_the_same_text",
    ),
    "P5/D14/D15 ids: a duplicate is refused, an ended one is free at once": (
        "engines/mlx/test_requests.py::test_a_duplicate_id_is_refused_and_the_first_unharmed",
        "engines/mlx/test_requests.py::test_an_id_can_be_used_again_at_once",
        "engines/mlx/test_requests.py::test_an_id_can_be_used_again_after_its_cancel",
        "engines/mlx/test_requests.py::test_an_abort_long_gone_does_not_meet_a_later_request",
    ),
    "P6 a new temperature compiles nothing and stops nobody": (
        "engines/mlx/test_neighbours.py::test_a_new_temperature_stops_nobody",
    ),
    "P7 a long prompt neither stops running streams nor holds up short prompts": (
        "engines/mlx/test_neighbours.py::test_a_long_prompt_does_not_stop_a_running_stream",
        "engines/mlx/test_neighbours.py::test_short_prompts_pass_a_long_one",
    ),
    "P8 log-probabilities are float32; a temperature near zero is greedy": (
        "engines/mlx/test_sampled.py::test_minus_one_and_more_than_all_give_the_vocabulary",
        "engines/mlx/test_adapters.py::test_float16_weights_are_served_with_float32_logprobs",
        "engines/mlx/test_bad_input.py::test_a_temperature_near_zero_is_greedy",
    ),
    "P9/D11 log-probabilities are no work of the event loop": (
        "engines/mlx/test_sampled.py::test_health_answers_while_logprobs_are_computed",
    ),
    "P10 penalties look at the whole output": (
        "engines/mlx/test_service.py::test_penalties_look_at_the_whole_output",
    ),
    "P11/D6/D21 prompt, output and queue have limits; prefixes are reused and reported": (
        "engines/mlx/test_bad_input.py::test_max_tokens_past_the_room_is_clamped",
        "engines/mlx/test_requests.py::test_past_the_queue_bound_is_exhausted",
        "engines/mlx/test_service.py::test_a_repeated_prefix_is_reported_as_cached",
        "gateway/test_openai.py::test_a_prompt_past_the_context_is_a_400",
    ),
    "P12/D22 the port answers from before the load to after the drain": (
        "engines/mlx/test_process.py::test_life_from_the_first_moment_to_the_last",
        "engines/mlx/test_process.py::test_a_second_signal_ends_at_once",
        "gateway/test_workers.py::test_sigterm_lets_a_stream_of_the_router_end_well",
    ),
    "P13/D1 both commands exist, every flag is explained, the served name is the public one": (
        "engines/mlx/test_process.py::test_help_names_every_flag",
        "gateway/test_openai.py::test_the_model_is_listed_by_its_served_name",
    ),
    "D7 the installed mlx-lm is served as mlx-lm itself runs it": (
        "engines/mlx/test_adapters.py::test_an_adapter_is_served_as_mlx_lm_runs_it",
        "engines/mlx/runtime/test_parity.py::",
    ),
    "D9/D17 an abort, of a running or a waiting request, ends with a complete": (
        "engines/mlx/test_requests.py::test_abort_ends_with_a_complete",
        "engines/mlx/test_requests.py::test_abort_and_deadline_of_a_waiting_request",
    ),
    "D10 max_tokens 0 and a negative temperature are refused": (
        "engines/mlx/test_bad_input.py::test_bad_input_is_refused_by_name",
    ),
    "D12/D13 a reader that does not read costs the server ids, not rows": (
        "engines/mlx/test_requests.py::test_a_reader_that_does_not_read_costs_little",
    ),
    "D16 a cancel or a deadline at any moment leaves nothing behind": (
        "engines/mlx/test_requests.py::test_cancels_at_any_moment_leave_nothing",
        "engines/mlx/test_requests.py::test_a_deadline_ends_the_request",
        "gateway/test_openai.py::test_a_client_that_leaves_stops_its_request",
    ),
    "D18 the generation thread hands over once a step and touches no asyncio object": (
        "engines/mlx/runtime/test_loop.py::",
    ),
    "D19 a dead generation thread ends streams, readiness and the process": (
        "engines/mlx/test_engine_death.py::test_a_dead_generation_thread_is_noticed_at_once",
    ),
    "D20 an idle server sleeps": ("engines/mlx/test_process.py::test_an_idle_server_sleeps",),
    "D23 importing the wing imports no mlx": ("unit/test_package.py::",),
    "D24 a setting that cannot work is named in one line, exit code 2": (
        "engines/mlx/test_process.py::test_a_setting_that_cannot_work_exits_2",
    ),
    "U1 no stop, whenever it comes, is a crash": (
        "engines/mlx/test_process.py::test_a_stop_after_serving_is_never_a_crash",
        "engines/mlx/test_process.py::test_sigterm_while_loading_ends_it",
        "engines/mlx/test_engine_death.py::test_the_thread_that_loaded_the_model_is_gone",
    ),
    "D25 what it runs on, weights included, is said in one line at the start": (
        "engines/mlx/test_service.py::test_model_facts",
    ),
}


@pytest.mark.parametrize("row", ROWS)
def test_the_promise_has_its_test(row: str) -> None:
    """A renamed test must not leave its promise unheld."""
    assert ROWS[row]
    for place in ROWS[row]:
        path, _, name = place.partition("::")
        text = (TESTS / path).read_text(encoding="utf-8")
        assert f"def {name or 'test_'}" in text
