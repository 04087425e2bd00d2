"""The zoo: faults of other engines, each as a small story that this one must live through.

Each test is named after what went wrong; the number of the public report is in its docstring. docs/simulator.md lists
them all. Every step is checked by the harness as in any other run; what a test itself asserts is that the story
really came to the point where the fault was.
"""

from __future__ import annotations

import pytest
from sim_stage import CROSS, FULL, INDEX, STATE, Script, Stage, chunks, window

from headrace.sim.layouts import TEMPLATES
from headrace.sim.oracle import media_name
from headrace.sim.swarm import Swarm
from headrace.types.cache_specs import kind_of
from headrace.types.requests import MediaSpan

STORE = {"store": "plain"}
HAS_ALL = {"depth": 1}


def everybody_ends(stage: Stage) -> None:
    stage.drain()
    for name, record in stage.records.items():
        assert record.aborted or record.finish is not None, name


# Hits over several kinds of cache.


@pytest.mark.parametrize("store", ["none", "plain", "divergent"])
def test_groups_disagree_about_a_hit(store: str) -> None:
    """vllm #46453, #44243: the longest hit of one group, or a hit cut by index, is no hit of the others."""
    stage = Stage([FULL, STATE], blocks=[20, 8], batch=16, store=store, checkpoint_tokens=0)
    stage.post("long", [1, 2, 3, 4, 1, 2, 3, 4, 1])
    everybody_ends(stage)
    # Full attention has the first 6 tokens of this one; a state exists at 8 only, which it does not reach.
    stage.post("fork", [1, 2, 3, 4, 1, 2, 0, 0, 0, 0])
    everybody_ends(stage)
    # The end of what both share was worth a checkpoint; now it can be hit.
    stage.post("third", [1, 2, 3, 4, 1, 2, 2, 2])
    stage.step()
    assert stage.counts["hit recurrent"] == 1
    everybody_ends(stage)


def test_a_state_is_found_by_its_boundary_and_not_by_its_place() -> None:
    """vllm #51358: a recurrent state was saved by its position in the table: null, reassigned or speculative."""
    stage = Stage([STATE, FULL], blocks=[6, 20], batch=3, checkpoint_tokens=2)
    prompt = [1, 2, 3, 4, 0, 1, 2, 3, 4, 0]
    for name in ("first", "second", "third"):
        stage.post(name, prompt, most=6)
        everybody_ends(stage)
    assert stage.counts["checkpoints saved"] >= 4
    assert stage.counts["copied recurrent"] >= 1


def test_a_state_of_this_step_is_not_used_in_this_step() -> None:
    """vllm #29387: the second request of a step hit a recurrent state that the first had not computed yet."""
    stage = Stage([STATE], blocks=8, batch=32, hash_tokens=2, checkpoint_tokens=2)
    stage.post("first", [1, 2, 3, 4, 0])
    stage.post("second", [1, 2, 3, 4, 0])
    plan = stage.schedule()
    assert [row.start for row in plan.rows] == [0, 0]
    everybody_ends(stage)


def test_side_pages_are_part_of_a_hit() -> None:
    """sglang #30057: KV pages came back without the index pages that belong to them."""
    stage = Stage([FULL, INDEX], blocks=12)
    prompt = [1, 2, 3, 4, 1, 2, 3, 4]
    stage.post("first", prompt)
    everybody_ends(stage)
    kv = stage.core.scheduler.kv
    index_pool = kv.memory.pools[1]
    index_pool.evict(len(index_pool.idle_list()) - 1)
    stage.post("second", prompt)
    stage.schedule()
    full_blocks = len(kv.memory.pools[0].cached_hashes())
    assert full_blocks > 2, "the keys and values are still there"
    assert stage.counts["hit tokens"] <= 2
    stage.apply()
    everybody_ends(stage)


def test_one_group_cannot_evict_the_hit_of_another() -> None:
    """vllm #43884, #33775: blocks for one group were taken from the hit of the next, which was not pinned yet."""
    stage = Stage([window(4), FULL], blocks=[5, 6], slots=2, batch=2, longest=12)
    prompt = [1, 2, 3, 4, 0, 1]
    for number in range(6):
        stage.post(f"r{number}", [*prompt, number % 5], most=3)
        stage.post(f"s{number}", [*prompt, number % 5, 1], most=3)
        everybody_ends(stage)
    assert stage.counts["hits"] >= 3


def test_a_window_that_is_not_aligned_takes_one_block_more() -> None:
    """vllm #48959: a window of 128 blocks spanned 129, and the bound said 128."""
    stage = Stage([window(5)], block_tokens=4, blocks=3, batch=3, slots=1, longest=30)
    stage.post("r", [1, 2, 3, 4, 0, 1, 2, 3, 4, 0, 1], most=12)
    everybody_ends(stage)
    assert stage.ends("r") == "length"


def test_chunks_need_nothing_at_their_boundary() -> None:
    """kv.md 3: a hit that ends at a chunk boundary reads no block of the chunked group."""
    stage = Stage([chunks(4), FULL], block_tokens=2, blocks=12, batch=16)
    stage.post("first", [1, 2, 3, 4, 1, 2, 3, 4, 0])
    everybody_ends(stage)
    stage.post("second", [1, 2, 3, 4, 1, 2, 3, 4, 4, 4])
    stage.schedule()
    assert stage.counts["hit tokens"] == 8
    stage.apply()
    everybody_ends(stage)


@pytest.mark.parametrize("what", ["salt and adapter", "media", "embeddings"])
def test_equal_values_of_two_kinds_are_two_things(what: str) -> None:
    """vllm #44701, #30931, #42125: untagged extra keys; one adapter's KV served another's request."""
    stage = Stage(batch=16, blocks=64, encoder_budget_rows=4)
    prompt = [1, 2, 3, 4, 1]
    if what == "salt and adapter":
        variants: list[dict[str, object]] = [{}, {"cache_salt": "a"}, {"adapter": b"a"}, {"adapter": b"b"}]
    elif what == "media":
        one, other = (MediaSpan(media_name(number, 2, 2), 0, 2, 2) for number in (1, 2))
        later = MediaSpan(one.identifier, 2, 2, 2)
        variants = [{"media": [one]}, {"media": [other]}, {"media": [later]}, {}]
    else:
        from headrace.sim.oracle import embeds_digest
        from headrace.types.requests import EmbedsSpan

        variants = [{"embeds": [EmbedsSpan(embeds_digest(number, 2), 2, 2)]} for number in (1, 2)] + [{}]
    for turn in ("first", "second"):
        before = stage.counts["hit tokens"]
        for number, fields in enumerate(variants):
            stage.post(f"{turn} {number}", prompt, **fields)
            everybody_ends(stage)
    assert stage.counts["hit tokens"] - before == 4 * len(variants), "in the end, each finds its own"


def test_output_is_the_same_after_the_first_cached_run() -> None:
    """vllm #40896, #54490: greedy output changed once a prefix was cached."""
    stage = Stage([FULL, window(3), STATE], blocks=[16, 16, 6], checkpoint_tokens=2)
    for number in range(4):
        stage.post(f"r{number}", [1, 2, 3, 4, 0, 1, 2, 3], most=8)
        everybody_ends(stage)
    outputs = {tuple(record.output_ids) for record in stage.records.values()}
    assert len(outputs) == 1
    assert stage.counts["hits"] == 3


def test_prompt_log_probabilities_are_whole() -> None:
    """vllm #50792, #14239: chunked prefill or KV from outside left prompt log-probabilities unset."""
    stage = Stage(batch=3, script=Script(numbers=HAS_ALL), **STORE)
    stage.post("first", [1, 2, 3, 4, 0, 1, 2])
    everybody_ends(stage)
    stage.post("second", [1, 2, 3, 4, 0, 1, 2], logprobs=True)
    everybody_ends(stage)
    assert stage.records["second"].prompt_positions == [1, 2, 3, 4, 5, 6]  # type: ignore[index]


# Overlap: results that come after the next plan.


def test_blocks_of_the_preempted_go_to_the_next_plan() -> None:
    """vllm-ascend #14055, vllm #45357: blocks were given back while a step in flight still wrote to them."""
    stage = Stage(block_tokens=1, blocks=12, ahead=True, batch=16, slots=6, longest=12)
    for number in range(60):
        # Admission learns that answers are long only from preemptions.
        stage.post(f"r{number}", [number % 5, number // 5 % 5], most=10)
        stage.schedule()
        if stage.in_flight_steps == 2:
            stage.apply()
    everybody_ends(stage)
    assert stage.counts["preempted in flight"] >= 1


def test_nothing_is_freed_behind_a_window_on_planned_progress() -> None:
    """vllm #47282: loads overwrote blocks that were freed on optimistic counts while an older step still read them."""
    stage = Stage(
        [window(3), FULL], block_tokens=1, blocks=[6, 24], ahead=True, script=Script(numbers=HAS_ALL), **STORE
    )
    stage.post("reader", [1, 2, 3, 4], most=14, logprobs=True)
    for number in range(5):
        stage.post(f"loader{number}", [number, 1, 2, 3, 4, 0], most=2)
    everybody_ends(stage)
    assert stage.counts["loads"] >= 3


def test_an_abort_during_the_forward_pass() -> None:
    """vllm #26400: a prefill that was cancelled during the forward pass kept its KV."""
    stage = Stage(ahead=True, batch=4)
    stage.post("gone", [1, 2, 3, 4, 0, 1, 2, 3])
    stage.post("stays", [1, 2, 3])
    stage.schedule()
    stage.execute()
    stage.abort(stage.live_ids()[0])
    stage.schedule()
    stage.apply()
    assert stage.state("stays") == "running"
    everybody_ends(stage)


def test_a_grammar_knows_every_token_before_it_masks() -> None:
    """vllm #29379, #49694: a mask was made before the token of the step in flight, or drafts were taken against it."""
    stage = Stage(ahead=True, drafts=2, batch=16)
    stage.post("masked", [1, 2, 3], most=10, grammar="x")
    stage.post("free", [1, 2, 3], most=10)
    everybody_ends(stage)
    assert stage.counts["gated rows"] >= 9
    assert stage.counts["rows with drafts"] >= 1


def test_a_grammar_that_fails_ends_its_request_alone() -> None:
    """vllm #43920: a malformed grammar after a valid one killed the core."""
    stage = Stage(script=Script(["grammar fails"]))
    stage.post("broken", [1, 2, 3], grammar="x")
    stage.script.switch()
    stage.post("good", [1, 2, 3], grammar="y")
    everybody_ends(stage)
    assert stage.ends("broken") == "invalid_request"
    assert stage.ends("good") == "length"


# Outside stores.


@pytest.mark.parametrize("template", sorted(TEMPLATES))
def test_a_store_beside_every_kind_of_cache(template: str) -> None:
    """vllm #51150: a model with chunked attention died at start-up as soon as KV was to be loaded."""
    import random

    specs = TEMPLATES[template](random.Random(1))
    sizes = [6 for spec in dict.fromkeys(specs) if kind_of(spec) != "shared"]
    batch = 12
    stage = Stage(
        specs,
        block_tokens=[size * 2 for size in sizes],
        blocks=12,
        batch=batch,
        script=Script(numbers=HAS_ALL),
        hash_tokens=4 if template == "mamba" else None,
        **STORE,
    )
    for number in range(3):
        stage.post(f"r{number}", [1, 2, 3, 4, 0] * 5 + [number])
        stage.step(2)
    everybody_ends(stage)
    assert stage.counts["loads"] >= 1


def test_a_promise_that_is_not_kept_is_not_believed_twice() -> None:
    """vllm #49176, sglang #30322: a positive answer outlived the failed load, and the request waited for ever."""
    stage = Stage(script=Script(["load fails"], HAS_ALL), **STORE)
    stage.post("r", [1, 2, 3, 4, 0, 1, 2])
    everybody_ends(stage)
    assert stage.ends("r") == "length"
    assert stage.counts["loads"] == 1


def test_a_block_that_is_gone_at_the_load_costs_no_request() -> None:
    """vllm #54914, vllm-ascend #15060: a key that was there at the look-up is gone at the load; that was fatal."""
    stage = Stage([FULL, window(4)], script=Script(["load partial"], {**HAS_ALL, "valid": 3}), **STORE)
    stage.post("r", [1, 2, 3, 4, 0, 1, 2, 3, 4])
    everybody_ends(stage)
    assert stage.ends("r") == "length"
    assert stage.counts["loading -> waiting"] + stage.counts["loading -> running"] == 1


def test_a_load_that_never_reports_does_not_hold_its_request() -> None:
    """vllm #35943, #46283: no deadline on the receiving side; the request hung and its blocks were lost."""
    stage = Stage(blocks=24, script=Script(["load late"], {**HAS_ALL, "delay": 3}), **STORE)
    stage.post("r", [1, 2, 3, 4, 0, 1, 2])
    stage.step()
    assert stage.state("r") == "loading"
    stage.jump(1.0)
    while stage.live_ids():
        stage.step()
    assert stage.ends("r") == "length"
    assert len(stage.core.open_jobs()) == 1, "its blocks stay with the job"
    everybody_ends(stage)


def test_a_load_for_a_request_that_has_ended_keeps_its_blocks() -> None:
    """vllm #46951: blocks of one load were not recorded, were given away, and were stored as somebody else's."""
    stage = Stage(blocks=8, script=Script(["load late"], HAS_ALL), **STORE)
    stage.post("gone", [1, 2, 3, 4, 0, 1, 2, 3, 4])
    stage.step()
    stage.abort(stage.live_ids()[0])
    stage.script.switch()
    stage.script.numbers["depth"] = 0
    for number in range(3):
        stage.post(f"r{number}", [number, 2, 3, 4])
    everybody_ends(stage)


def test_a_report_that_comes_twice_counts_once() -> None:
    """LMCache #2954: a block was unpinned twice, and freed under its user."""
    stage = Stage(blocks=8, script=Script(["report twice"], HAS_ALL), **STORE)
    for number in range(4):
        stage.post(f"r{number}", [number, 1, 2, 3, 4], most=8)
    everybody_ends(stage)
    assert stage.faults.fired["report twice"] >= 2


def test_a_report_to_a_former_life_ends_nothing() -> None:
    """vllm #51637: a counter was keyed by an id that came again: nobody ran and everybody waited."""
    stage = Stage(script=Script(["report of a former life"], {**HAS_ALL, "delay": 4}), **STORE)
    stage.post("r", [1, 2, 3, 4, 0, 1, 2])
    stage.step()
    assert stage.state("r") == "loading"
    stage.crash()
    stage.script.numbers["former"] = 1
    everybody_ends(stage)
    assert stage.ends("r") == "length"
    assert stage.counts["loads"] == 2


def test_what_was_looked_up_and_not_loaded_holds_nothing() -> None:
    """LMCache #1034: pinned at the look-up, never loaded, never unpinned: the tier filled and never hit."""
    stage = Stage(script=Script(["lookup never answers"]), **STORE)
    for number in range(6):
        stage.post(f"r{number}", [number % 5, 1, 2])
    stage.step()
    for name in stage.live_ids()[:3]:
        stage.abort(name)
    everybody_ends(stage)
    assert stage.counts["aborts lookup"] == 3


def test_waiting_requests_do_not_all_load_at_once() -> None:
    """vllm #49902: every waiting request promoted and pinned its blocks, and nothing was left to run in."""
    stage = Stage(blocks=20, slots=2, script=Script(numbers={**HAS_ALL, "delay": 4}), **STORE)
    for number in range(8):
        stage.post(f"r{number}", [number % 5, number // 5, 1, 2, 3, 4], most=2)
    for _ in range(6):
        stage.step()
        assert len(stage.core.open_jobs()) <= 2, "no more than there are slots"
    everybody_ends(stage)


def test_what_has_not_landed_is_not_published() -> None:
    """vllm #34526, #35092: blocks were passed on before the load that filled them had landed."""
    stage = Stage(blocks=24, script=Script(numbers={**HAS_ALL, "delay": 4}), **STORE)
    prompt = [1, 2, 3, 4, 0, 1, 2]
    stage.post("first", prompt)
    stage.step()
    stage.script.numbers["depth"] = 0
    stage.post("second", prompt)
    stage.step()
    assert stage.state("first") == "loading"
    assert stage.counts["hits"] == 0
    everybody_ends(stage)


def test_an_unnamed_encoder_input_is_never_loaded_from_outside() -> None:
    """Our own: a decoder over an encoder input without a name loaded what lay under its hashes."""
    stage = Stage([FULL, CROSS], blocks=12, script=Script(numbers=HAS_ALL), **STORE)
    stage.post("one", [1, 2, 3, 4, 0], encoder_tokens=3)
    stage.post("other", [1, 2, 3, 4, 0], encoder_tokens=4)
    everybody_ends(stage)
    assert stage.counts["loads"] == 0


# Encoders.


def image(number: int, start: int, tokens: int, rows: int) -> MediaSpan:
    return MediaSpan(media_name(number, tokens, rows), start, tokens, rows)


def test_an_item_larger_than_the_encoder_cache_still_runs() -> None:
    """vllm #26223, #25890: one item above the cache made steps of zero tokens for ever."""
    stage = Stage(encoder_rows=2, encoder_budget_rows=6)
    stage.post("large", [1, 2, 3, 4, 0], media=[image(1, 1, 2, 5)])
    stage.post("larger", [1, 2, 3, 4, 0], media=[image(2, 1, 2, 7)])
    everybody_ends(stage)
    assert stage.ends("large") == "length"
    assert stage.ends("larger") == "media_too_large"


def test_items_that_are_needed_at_once_are_judged_together() -> None:
    """Our own: each item fits a step, both together never do, and the first row needs both."""
    stage = Stage([FULL, CROSS], blocks=12, encoder_rows=2, encoder_budget_rows=3)
    media = [MediaSpan(media_name(7, 0, 2), 0, 0, 2), image(1, 0, 2, 2)]
    stage.post("r", [1, 2, 3], media=media, encoder_tokens=3)
    everybody_ends(stage)
    assert stage.ends("r") == "media_too_large"


def test_two_items_in_a_hybrid_do_not_hang() -> None:
    """vllm #40707, #47738: rounding to a state boundary turned the encoder's cut into zero tokens."""
    stage = Stage([STATE, FULL], blocks=[6, 20], batch=8, encoder_rows=3, encoder_budget_rows=3, checkpoint_tokens=4)
    media = [image(1, 1, 3, 3), image(2, 5, 3, 3)]
    stage.post("r", [1] * 12, media=media)
    everybody_ends(stage)
    assert stage.ends("r") == "length"


def test_outputs_are_kept_until_progress_is_confirmed() -> None:
    """vllm #38551, #39544: an output was freed on planned progress, while drafts or a step in flight needed it."""
    stage = Stage(ahead=True, drafts=2, slots=3, batch=9, encoder_rows=3, encoder_budget_rows=3)
    for number in range(4):
        media = [image(number, 1, 3, 3), image(number + 1, 4, 3, 3)]
        stage.post(f"r{number}", [1] * 9, media=media, most=5)
    everybody_ends(stage)
    assert stage.core.device.encoders.freed >= 1


def test_an_eviction_is_told_by_the_final_state() -> None:
    """vllm #52482: an output was evicted and allocated again in one pass; the step deleted what it needed."""
    stage = Stage(slots=4, batch=32, encoder_rows=10, encoder_budget_rows=10)
    stage.post("r0", [1] * 6, media=[image(1, 0, 2, 5), image(2, 2, 2, 5)], most=1)
    stage.step()
    stage.post("r1", [1] * 6, media=[image(3, 0, 2, 6)], most=1)
    stage.post("r2", [1] * 6, media=[image(1, 0, 2, 5)], most=1)
    everybody_ends(stage)


def test_an_image_that_is_shown_twice_stays_until_its_last_place() -> None:
    """vllm #54284: the first of two equal images took the output with it."""
    stage = Stage(batch=3, slots=2, encoder_rows=4, encoder_budget_rows=4)
    same = media_name(1, 2, 3)
    media = [MediaSpan(same, 0, 2, 3), MediaSpan(same, 6, 2, 3)]
    stage.post("r", [1] * 9, media=media)
    stage.post("other", [1] * 5, media=[image(2, 1, 2, 4)])
    everybody_ends(stage)
    assert stage.ends("r") == "length"


# Clients, crashes, events.


def test_a_leader_that_goes_away_lets_its_followers_go_on() -> None:
    """vllm #51629: with several completions and a disconnect, the parent's record stayed for ever."""
    stage = Stage(batch=4)
    leader = stage.post("leader", [1, 2, 3, 4, 0, 1, 2, 3, 4])
    for number in range(2):
        stage.post(f"follower{number}", [1, 2, 3, 4, 0, 1, 2, 3, 4], leader_id=leader)
    stage.step()
    assert stage.state("follower0") == "leader"
    stage.abort(leader)
    everybody_ends(stage)
    assert not stage.core.scheduler.has_work


def test_a_consumer_that_comes_late_sees_what_is_cached() -> None:
    """llm-d-router #2853, llm-d-kv-cache #372, vllm #44451: an index that missed events never recovered."""
    stage = Stage([window(3), FULL, STATE], blocks=[8, 12, 5], checkpoint_tokens=2)
    for number in range(4):
        stage.post(f"r{number}", [1, 2, 3, 4, number, 1, 2], most=5)
        stage.step(3)
    kv = stage.core.scheduler.kv
    hashes = [{event.block_hash for event in kv.snapshot() if event.group == group} for group in range(3)]
    assert hashes == stage.core.mirror.hashes
    assert all(hashes)
    everybody_ends(stage)


def test_the_unfinished_go_on_after_a_crash() -> None:
    """Design 2: a client sees a pause; the tokens that it has count."""
    stage = Stage(ahead=True)
    stage.post("r", [1, 2, 3], most=12)
    stage.post("waits", [1, 2, 3], grammar="x")
    stage.step(5)
    stage.schedule()
    had = len(stage.records["r"].output_ids)  # type: ignore[index]
    stage.crash()
    everybody_ends(stage)
    assert 0 < had < 12
    assert stage.ends("r") == stage.ends("waits") == "length"


def test_a_deadline_passes_in_every_state() -> None:
    """kv.md 18.14: each wait has a deadline, or an owner who must answer."""
    script = Script(["lookup never answers", "grammar late"], {"grammar": 2})
    stage = Stage(slots=1, blocks=24, script=script, **STORE)
    stage.post("looks up", [1, 2, 3], deadline_s=0.02)
    stage.post("compiles", [1, 2, 3], grammar="x", deadline_s=0.02)
    while stage.live_ids():
        stage.step()
    script.switch()
    stage.post("runs", [1, 2, 3], most=30, deadline_s=stage.now_s + 0.01)
    stage.post("waits", [1, 2, 3], deadline_s=stage.now_s + 0.005)
    everybody_ends(stage)
    assert {stage.ends(name) for name in stage.records} == {"request_timeout"}
    states = {name: f"{name} -> finished" for name in ("lookup", "grammar", "running", "waiting")}
    assert all(stage.counts[move] for move in states.values()), dict(stage.counts)


def test_a_tenant_cannot_take_everything() -> None:
    """Issue 3: quotas; one tenant's burst leaves room for the others."""
    stage = Stage(blocks=12, slots=4, quota=0.4, batch=16)
    for number in range(5):
        stage.post(f"greedy{number}", [number, 1, 2, 3], tenant="a", most=6)
    stage.post("modest", [1, 2, 3], tenant="b", most=2)
    stage.step()
    assert stage.state("modest") == "running"
    assert stage.state("greedy4") == "quota"
    everybody_ends(stage)


def test_fatal_once_is_not_fatal_for_ever() -> None:
    """Broken content is forgotten: a failed request leaves nothing behind that others could hit."""
    stage = Stage(batch=16)
    stage.post("broken", [1, 2, 3, 4, 0, 1, 2], fails_at=2)
    everybody_ends(stage)
    stage.post("good", [1, 2, 3, 4, 0, 1, 2])
    everybody_ends(stage)
    assert stage.ends("broken") == "non_finite_logits"
    assert stage.ends("good") == "length"
    assert stage.counts["hits"] == 0


def test_a_second_run_of_the_same_seed_is_the_same_run() -> None:
    """vllm #44238: corruption in 12 hours of stress that nobody could reproduce: there was no oracle and no seed."""
    first, second = Swarm(11), Swarm(11)
    assert first.run(60) == second.run(60)
    assert first.harness.actions == second.harness.actions
