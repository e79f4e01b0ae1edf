"""What a step drafts by what it costs and by what became of earlier drafts, and that no token depends on it."""

import itertools
import random
from dataclasses import replace

import pytest

from helpers.generation import noted, same_undrafted
from helpers.models import DRAFTER_ALONE, paged, tiny_drafter, tiny_model, uneven_batch, with_tree
from helpers.scheduling import random_sequences, run_as_alone, scheduler, without_drafts
from redrafter import ReDrafter
from redrafter.drafting import loss_budget
from redrafter.drafting.policy import AcceptanceHistory, CostPolicy, DraftedStep, DraftPolicy, StepRows
from redrafter.drafting.prompt_lookup import WithPromptLookup
from redrafter.drafting.proposer import TRAINED, SearchProposer, UndraftedProposer, step_tokens
from redrafter.drafting.recycled import LIKELIHOODS, SAMPLED
from redrafter.drafting.step_times import StepCosts, StepTimes, time_at
from redrafter.drafting.tree_choice import best_tree, expected_drafts, expected_of
from redrafter.engine import step_timing
from redrafter.engine.step_timing import measure_step_costs, time_to_read
from redrafter.model.linear_layers import forward_bytes
from redrafter.model.target import Target
from redrafter.scheduler.running_batch import RunningBatch

FLAT = ((1, 1.0), (4096, 1.001))  # the time of a step that is bound by memory
FREE = ((1, 0.0),)
# Of a bf16 8B model on an H200, in ms.
PRODUCTS = ((1, 3.97), (26, 4.04), (64, 4.24), (128, 4.64), (208, 6.0), (256, 7.3), (512, 12.3), (1024, 23.4))


def search(beams: int, depth: int, nodes: int, shared: int | None = None) -> SearchProposer:
    return SearchProposer(None, None, beams, depth, nodes, shared)  # nothing drafts here


def test_times_are_straight_between_points_and_never_fall():
    costs = StepCosts(((1, 1.0), (10, 0.9), (20, 2.0)), FREE)
    assert [time_at(costs.forward, n) for n in (1, 5, 10, 15, 20, 30)] == pytest.approx([0.9, 0.9, 0.9, 1.45, 2, 3.1])


def test_a_step_costs_its_forward_and_each_level_of_its_search():
    costs = StepCosts(((1, 1.0), (101, 101.0)), ((1, 0.0), (100, 100.0)))
    assert costs.time_of(UndraftedProposer(), 4) == 4
    assert costs.time_of(UndraftedProposer(), 4, more=64) == 68
    assert costs.time_of(search(2, 3, 5), 4) == 20 + 3 * time_at(costs.level, 8)
    assert costs.time_of(WithPromptLookup(search(2, 3, 5), 2), 4) == 28 + 3 * time_at(costs.level, 8)
    assert costs.time_of(search(2, 3, 7, shared=9), 4) == 9 + 3 * time_at(costs.level, 8)


def test_more_verified_drafts_are_expected_to_bring_more_and_each_less():
    for beams, depth in ((1, 5), (5, 5)):
        expected = [expected_drafts(TRAINED, beams, depth, drafts) for drafts in range(1 + beams * depth)]
        more = [b - a for a, b in itertools.pairwise(expected)]
        assert expected[0] == 0
        assert min(more) > 0
        assert more == pytest.approx(sorted(more, reverse=True))
    assert expected_drafts(TRAINED, 1, 1, 1) == pytest.approx(0.6, abs=0.05)


def choice(costs: StepCosts, *kinds: SearchProposer, size: int = 1, copying=None, reading: float = 0.0) -> CostPolicy:
    times = StepTimes(replace(costs, reading=reading), UndraftedProposer())
    return CostPolicy(times, {size: kinds}, copying=copying and {size: copying})


def choose(chosen: CostPolicy, size: int = 1, cached: int = 0, more: int = 0):
    return chosen.choose(StepRows(size, size, size, more, cached))


def record(chosen: DraftPolicy, proposer, accepted: int, copied: int = 0, size: int = 1, cached: int = 0) -> None:
    rows = StepRows(size, size, size, cached=cached)
    chosen.record(DraftedStep(rows, proposer, [accepted] + [0] * (size - 1), [proposer.depth] * size, copied))


def steps(chosen: CostPolicy, count: int, accepted: float, size: int = 1, cached: int = 0) -> list[int]:
    """Take steps in which so much of each draft is accepted, and return the depths of their searches."""
    depths, dice = [], random.Random(0)
    for _ in range(count):
        proposer = choose(chosen, size, cached)
        depths.append(proposer.depth)
        if proposer.depth:
            record(
                chosen, proposer, sum(dice.random() < accepted for _ in range(size * proposer.depth)), 0, size, cached
            )
    return depths


def test_a_good_drafter_drafts_always_and_a_bad_one_pauses():
    levels = StepCosts(FLAT, ((1, 0.1),))
    assert steps(choice(levels, search(1, 5, 6)), 100, accepted=1.0) == [5] * 100
    depths = steps(choice(levels, search(1, 5, 6)), 400, accepted=0.0)
    assert 0 not in depths[:4], "a few unlucky steps end no drafts"
    assert depths.count(0) > 0.8 * len(depths)


@pytest.mark.parametrize(("rows", "gain", "least"), [(1, 1.16, 0.85), (1, 1.25, 0.95), (8, 1.1, 0.55), (8, 0.97, 0.0)])
def test_drafts_with_a_small_gain_are_kept_through_their_unlucky_steps(rows, gain, least):
    cost, count = 1.3, 3000
    chosen = choice(StepCosts(FLAT, ((1, 0.15),)), search(1, 2, 3), size=rows)
    drafted = sum(depth > 0 for depth in steps(chosen, count, accepted=(gain * cost - 1) / 2, size=rows)) / count
    assert drafted > least
    assert gain > 1 or drafted < 0.05


@pytest.mark.parametrize("rows", [128, 256, 512])
@pytest.mark.parametrize("share", [0.0, 0.3, 0.6, 1.0, 1.4])
def test_sampled_steps_of_many_rows_take_no_longer_for_their_tokens_than_undrafted_ones(rows, share):
    # Of an 8B in bfloat16 on an H200 with an EAGLE-3 head, in ms.
    forward = (
        (64, 5.0),
        (128, 5.64),
        (192, 6.79),
        (256, 7.56),
        (384, 10.69),
        (512, 13.05),
        (1024, 25.69),
        (2048, 53.79),
    )
    costs = StepCosts(forward, ((160, 0.207), (320, 0.25), (1280, 0.794)))
    tree = best_tree(costs, search(5, 5, 26), rows, share=True, sampled=True)
    drafted = search(tree.beams, tree.depth, tree.nodes, tree.shared_nodes)
    chosen, dice, time, tokens = choice(costs, drafted, size=rows), random.Random(rows), 0.0, 0
    gain = share * expected_of(drafted, drafted.depth, step_tokens(drafted, rows) / rows - 1, sampled=True)
    step = StepRows(rows, rows, rows, sampled=True)
    while tokens < 128 * rows:  # one call
        proposer = chosen.choose(step)
        time += costs.time_of(proposer, rows)
        accepted = [0] * rows
        if proposer.depth:
            accepted = [sum(dice.random() < gain / proposer.depth for _ in range(proposer.depth)) for _ in accepted]
            chosen.record(DraftedStep(step, proposer, accepted, [proposer.depth] * rows))
        tokens += rows + sum(accepted)
    assert tokens / time > 0.98 * rows / costs.time_of(UndraftedProposer(), rows)


@pytest.mark.parametrize(("cached", "pays"), [(0, False), (2000, True)])
def test_drafts_that_lose_with_short_texts_gain_with_long_ones_which_every_step_reads(cached, pays):
    costs = StepCosts(((64, 1.0), (128, 1.6)), FREE)  # and half of the drafts are accepted
    depths = steps(choice(costs, search(1, 1, 2), size=64, reading=0.001), 200, 0.5, size=64, cached=cached)
    assert (sum(depths) > 180) if pays else (sum(depths) < 20)


@pytest.mark.parametrize("architecture", ["llama", "gpt_oss"])
def test_the_time_to_read_a_token_follows_from_the_bytes_of_layers_without_a_window(architecture):
    engine = paged(with_tree(tiny_model(architecture), tiny_drafter(), 3, 3))
    config = engine.model.config
    kinds = getattr(config, "layer_types", None) or config.num_hidden_layers * ["full_attention"]
    assert ("sliding_attention" in kinds) == (architecture == "gpt_oss")
    slot = (
        kinds.count("full_attention") * 2 * config.num_key_value_heads * config.head_dim * engine.model.dtype.itemsize
    )
    assert time_to_read(engine.make_memory(), 3.0) == pytest.approx(3.0 * slot / forward_bytes(engine.model))


def test_costs_are_measured_by_steps_of_the_engine_itself(llama, monkeypatch):
    monkeypatch.setattr(step_timing, "TOKENS", (1, 8, 32))
    monkeypatch.setattr(step_timing, "ROWS", (1, 8))
    engine, seconds = paged(with_tree(llama, tiny_drafter(), 3, 3)), step_timing._seconds  # noqa: SLF001
    # On a busy machine a step without drafts may seem to take longer than one with drafts.
    monkeypatch.setattr(step_timing, "_seconds", lambda *args: seconds(*args) + 9.0 * bool(args[1].depth))
    costs = measure_step_costs(engine.make_memory(), engine.proposer)
    assert [tokens for tokens, _ in costs.forward] == [1, 8, 32]
    assert [beams for beams, _ in costs.level] == [3, 24]
    assert costs.forward[0][1] > 0


def test_steps_of_small_batches_draft_while_they_read_prompts_too():
    costs = StepCosts(((1, 1.0), (64, 1.0), (128, 2.5)), ((1, 0.05),))
    few, many = (choice(costs, search(1, 1, 2), size=size) for size in (16, 32))
    assert [choose(few, 16, more=tokens).depth for tokens in (0, 64)] == [1, 1]
    assert [choose(many, 32, more=tokens).depth for tokens in (0, 64)] == [1, 0]


def test_no_step_that_reads_prompts_is_undrafted_only_to_be_timed():
    times = StepTimes(StepCosts(FLAT, ((1, 0.15),)), UndraftedProposer(), corrected_every=1)
    chosen = CostPolicy(times, {1: [search(1, 2, 3)]})
    assert [choose(chosen, more=tokens).depth for tokens in (0, 64, 0)] == [0, 2, 0]


def test_drafts_that_gain_again_go_on():
    chosen = choice(StepCosts(FLAT, ((1, 0.15),)), search(1, 2, 3))
    steps(chosen, 300, accepted=0.0)
    assert all(steps(chosen, 400, accepted=0.9)[200:])


@pytest.mark.parametrize(
    ("searched", "copied", "kind"), [(0.0, 0.9, "copied"), (0.0, 0.02, "none"), (0.95, 0.9, "searched")]
)
def test_steps_of_a_pause_copy_from_the_text_where_that_alone_pays(searched, copied, kind):
    both = WithPromptLookup(search(1, 3, 4), 4)
    alone = WithPromptLookup(UndraftedProposer(), 4)
    chosen = choice(StepCosts(((1, 1.0), (5, 1.1), (9, 1.15)), ((1, 0.1),)), both, copying=alone)
    dice, taken = random.Random(0), []
    for _ in range(400):
        proposer = choose(chosen)
        taken.append({id(both): "searched", id(alone): "copied"}.get(id(proposer), "none"))
        if proposer.depth:
            right = sum(dice.random() < searched for _ in range(3)) if proposer is both else 0
            more = dice.random() < copied
            record(chosen, proposer, right + more, more)
    assert taken[0] == "searched"
    assert taken[-200:].count(kind) > 170


def test_a_text_that_repeated_itself_does_not_keep_later_ones_from_being_drafted_for():
    both, alone = WithPromptLookup(search(1, 3, 4), 4), WithPromptLookup(UndraftedProposer(), 4)
    chosen = choice(StepCosts(((1, 1.0), (5, 1.1), (9, 1.15)), ((1, 0.1),)), both, copying=alone)
    taken = []
    for step in range(800):
        repeats = step < 200
        taken.append(proposer := choose(chosen))
        if proposer is both:
            right, copied = 0 if repeats else 3, 4 * repeats
            record(chosen, both, right + copied, copied)
        elif proposer is alone:
            record(chosen, alone, 4 * repeats, 4 * repeats)
    assert taken[100:200].count(alone) > 80
    assert taken[-200:].count(both) == 200


def test_batch_sizes_pause_independently():
    times = StepTimes(StepCosts(FLAT, ((1, 0.5),)), UndraftedProposer())
    chosen = CostPolicy(times, {2: [search(1, 1, 2)], 64: [search(1, 1, 2)]})
    steps(chosen, 4, accepted=0.0, size=64)
    assert choose(chosen, 64).depth == 0
    assert choose(chosen, 2).depth == 1


@pytest.mark.parametrize(("time", "depth"), [(2.3, 1), (2.8, 0)])
def test_drafts_pay_with_prompts_if_they_gain_more_than_other_steps_would_in_their_time(time, depth):
    # Alone, 37 drafts are accepted in 0.2; with the prompts, in 0.3 or 0.8, in which other steps write 24 or 64 tokens.
    # Per step, 101 tokens in 2.8 are more than 64 in 2.0.
    chosen = choice(StepCosts(((64, 1.0), (128, 1.2), (192, 2.0), (256, time)), FREE), search(1, 1, 2), size=64)
    assert [choose(chosen, 64, more=more).depth for more in (0, 128)] == [1, depth]


def test_a_gpu_verifies_fewer_nodes_in_larger_batches():
    costs = StepCosts(PRODUCTS, ((1, 0.15), (320, 0.3)))
    found = {rows: best_tree(costs, search(5, 5, 26), rows, share=rows >= 32) for rows in (1, 8, 32, 64, 128, 512)}
    nodes = [(shape.shared_nodes or rows * shape.nodes) / rows for rows, shape in found.items()]
    assert nodes == sorted(nodes, reverse=True)
    assert nodes[0] == 26
    assert nodes[-1] < 2


def test_trees_fill_the_tiles_of_products_whose_time_has_steps():
    def milliseconds(tokens: int) -> float:  # of an 8B in 4 bits on an H200
        tiles = {8: 3.2, 16: 3.6, 32: 4.1, 64: 5.6}
        return next((time for size, time in tiles.items() if tokens <= size), 10.2 + tokens / 200)

    measured, true = (
        StepCosts(tuple((tokens, milliseconds(tokens)) for tokens in each), ((1, 0.16),))
        for each in (step_timing.TOKENS, range(1, 2049))
    )
    for rows in (1, 2, 4, 8, 16, 32, 64):
        measured_tree, best = (best_tree(costs, search(5, 5, 26), rows, share=rows >= 32) for costs in (measured, true))
        assert measured_tree == best


@pytest.fixture
def often(monkeypatch):
    """Let steps look at other kinds each time, and take any that promises as much."""
    monkeypatch.setattr(ReDrafter, "pauses", True)
    monkeypatch.setattr(loss_budget, "RETRY", 2)
    monkeypatch.setattr(loss_budget, "ALLOWED_SHARE", 1.0)


def switching(engine: ReDrafter) -> ReDrafter:
    """Let an engine take another kind of step every few steps, none among them."""
    honest, turn = CostPolicy.choose, itertools.count()
    costs = StepCosts(((1, 1.0), (100, 3.0)), ((1, 0.05),))
    engine.step_costs = lambda memory: costs

    class Switching(CostPolicy):
        def choose(self, step: StepRows):
            honest(self, step)
            return self.proposers[next(turn) // 2 % len(self.proposers)]

    made = engine.draft_policy

    def policy_of(sizes, memory):
        found = made(sizes, memory)
        found.__class__ = Switching
        return found

    engine.draft_policy = policy_of
    return engine


@pytest.mark.parametrize("how", [{"do_sample": False}, {"do_sample": True, "seed": 3}], ids=["greedy", "sampled"])
@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("copies", [False, True])
def test_steps_of_any_kind_in_turn_write_what_plain_decoding_does(llama, rows, how, copies, often, monkeypatch):
    taken = noted(monkeypatch, RunningBatch, "prepare_step", lambda step, *_: step.proposer)
    drafter = tiny_drafter(draft_beams=3, draft_len_per_beam=4)
    engine = switching(ReDrafter(Target(llama), drafter, options=None if copies else DRAFTER_ALONE))
    ids, mask = uneven_batch(rows)
    same_undrafted(engine, ids, mask, max_new_tokens=40, eos_token_id=None, **how)
    assert len(set(map(id, taken))) > 1 + copies


def test_served_rows_write_what_each_writes_alone_whatever_drafts(often, monkeypatch):
    taken = noted(monkeypatch, RunningBatch, "prepare_step", lambda step, *_: step.proposer)
    model = tiny_model("llama")
    model.generation_config.eos_token_id = None
    engine = switching(ReDrafter(Target(model), tiny_drafter(draft_beams=3, draft_len_per_beam=4)))
    run_as_alone(scheduler(engine, max_batch_size=6), without_drafts(random_sequences(14, seed=3)), 1)
    assert len(set(map(id, taken))) > 2


@pytest.mark.parametrize("how", [{"do_sample": False}, {"do_sample": True, "seed": 3}], ids=["greedy", "sampled"])
def test_steps_follow_from_costs_and_tokens_alone(llama, how, often, monkeypatch):
    ids, mask = uneven_batch(5)
    runs = []
    for _ in range(2):
        engine = ReDrafter(Target(llama), tiny_drafter(draft_beams=3, draft_len_per_beam=4))
        with monkeypatch.context() as patch:
            taken = noted(patch, RunningBatch, "prepare_step", lambda step, *_: str(step.proposer.sizes))
            out = engine.generate(ids, mask, max_new_tokens=40, eos_token_id=None, **how)
            runs.append((out.tolist(), taken))
    assert runs[0] == runs[1]
    assert len(set(runs[0][1])) > 1


def copies(drafting: DraftPolicy, count: int, copied: int, match: bool | None = True) -> list[bool]:
    """Take steps in which copies, where there are some, bring so many tokens, and return which ones copied."""
    taken = []
    for _ in range(count):
        proposer = drafting.choose(StepRows(1, 1, 1, match=match))
        taken.append(proposer.without_text is not None)
        if proposer.depth:
            record(drafting, proposer, 2 + copied * taken[-1], copied * taken[-1])
    return taken


def copying() -> CostPolicy:
    alone, both = search(1, 3, 4), WithPromptLookup(search(1, 3, 4), 4)
    costs = StepCosts(((1, 1.0), (4, 1.0), (5, 1.1), (8, 1.1)), ((1, 0.1),))
    return CostPolicy(
        StepTimes(costs, UndraftedProposer()), {1: [alone, both]}, copying={1: WithPromptLookup(UndraftedProposer(), 4)}
    )


def test_copies_are_left_out_while_they_gain_nothing_and_tried_again():
    assert all(copies(copying(), 500, copied=2))
    drafting = copying()
    taken = copies(drafting, 2000, copied=0)
    assert all(taken[:5])
    assert sum(taken[-138:]) <= 2
    assert sum(taken) < 0.03 * len(taken)
    assert all(copies(drafting, 500, copied=3)[350:])


def test_copies_are_made_where_a_text_may_match_or_nobody_knows():
    assert not any(copies(copying(), 20, copied=2, match=False))
    fixed = DraftPolicy({1: WithPromptLookup(search(1, 3, 4), 4)})
    assert not any(copies(fixed, 20, copied=2, match=False))
    assert all(copies(fixed, 20, copied=0, match=None))


def test_rows_that_end_one_by_one_lose_one_budget_and_not_one_at_each_batch_size():
    history = AcceptanceHistory()
    history.budget_for(8).observe(-loss_budget.ALLOWED)
    assert not any(history.budget_for(size).allows_drafts(size, 1.0, pays=True) for size in (4, 2, 1))
    assert history.budget_for(64).allows_drafts(64, 1.0, pays=True), "many rows share steps whose drafts cost otherwise"


def test_a_step_is_charged_by_its_own_cached_tokens_though_the_next_is_chosen():
    depths: dict[int, list[int]] = {0: [], 10_000: []}
    for ahead, taken in depths.items():  # tokens of the step that a GPU launches before it records this one
        chosen = choice(StepCosts(FLAT, ((1, 0.4),)), search(1, 2, 3), reading=0.001)
        for _ in range(100):
            proposer = choose(chosen)
            chosen.choose(StepRows(1, 1, 1, cached=ahead, sampled=True))
            taken.append(proposer.depth)
            if proposer.depth:
                record(chosen, proposer, accepted=0)
    assert depths[0] == depths[10_000]


def test_a_step_counts_among_steps_of_its_own_sampling_though_the_next_is_chosen():
    histories = {sampled: AcceptanceHistory() for sampled in (False, True)}
    tree = search(1, 3, 4)
    drafting = CostPolicy(StepTimes(StepCosts(FLAT, FREE), UndraftedProposer()), {1: [tree]}, histories)
    assert drafting.choose(StepRows(1, 1, 1)) is tree
    drafting.choose(StepRows(1, 1, 1, sampled=True))  # as on a GPU, where steps are launched ahead
    before = [histories[sampled].search.value for sampled in (False, True)]
    drafting.record(DraftedStep(StepRows(1, 1, 1), tree, [0], [3]))
    after = [histories[sampled].search.value for sampled in (False, True)]
    assert after[0] < before[0]
    assert after[1] == before[1]


def test_a_table_has_to_gain_more_where_rows_end_at_different_steps():
    class Uneven(SearchProposer):
        gains_unevenly = True

    costs = StepCosts(FLAT, ((1, 0.5),))
    for rows in (1, 8):
        even, uneven = (kind(None, None, 2, 1, 3) for kind in (SearchProposer, Uneven))
        chosen = [choose(choice(costs, each, size=rows), rows).depth for each in (even, uneven)]
        assert chosen == [1, int(rows == 1)]


def test_a_table_drafts_fewer_levels_and_tokens_where_steps_sample():
    class Table(SearchProposer):
        likelihoods, sampled_likelihoods = LIKELIHOODS, SAMPLED

    # Of an 8B's cost on an H200, in ms.
    costs = StepCosts(((1, 4.4), (8, 4.5), (16, 4.6), (26, 4.75), (53, 5.4), (128, 6.9)), ((1, 0.06),))
    greedy, sampled = (
        best_tree(costs, Table(None, None, 5, 5, 26), 1, share=False, sampled=each) for each in (False, True)
    )
    assert (greedy.depth, greedy.nodes) == (5, 26)
    assert sampled.depth <= 3
    assert 4 <= sampled.nodes <= 12


def test_steps_that_sample_choose_from_proposers_of_their_own():
    few, many = search(1, 1, 2), search(5, 5, 26)
    policy = CostPolicy(StepTimes(StepCosts(FLAT, FREE), UndraftedProposer()), {1: [many]}, sampled={1: [few]})
    for sampled, chosen in ((False, many), (True, few)):
        assert policy.choose(StepRows(1, 1, 1, sampled=sampled)) is chosen
        assert policy.choices(1, sampled=sampled) == [chosen]
    assert {many, few} < set(policy.proposers)


@pytest.mark.parametrize(("rows", "depth"), [(1, 4), (4, 0)])
def test_copies_in_place_of_drafts_of_several_rows_have_to_gain_more(rows, depth):
    costs = StepCosts(((rows, 1.0), (5 * rows, 1.7)), ((1, 9.0),))  # copies give 2 tokens for 1.7 times the time
    copying = WithPromptLookup(UndraftedProposer(), 4)
    assert choose(choice(costs, search(1, 1, 2), size=rows, copying=copying), rows).depth == depth
    without = CostPolicy(StepTimes(costs, UndraftedProposer()), {}, copying={rows: copying})
    assert choose(without, rows).depth == 4
