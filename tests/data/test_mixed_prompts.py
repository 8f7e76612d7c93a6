"""Several sources of prompts: their shares, against counting; their rewards and metrics."""

from __future__ import annotations

from collections import Counter, defaultdict
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pyrl_ext.data.mixed_prompts import MixedPrompts
from pyrl_ext.data.prompt_dataset import build_source
from pyrl_ext.data.prompts import PromptSource
from pyrl_ext.data.rising_task import RisingTask
from pyrl_ext.data.tasks import Task
from pyrl_ext.pack.index import BatchIndex
from pyrl_ext.plan import Plan
from pyrl_ext.plan.show.summary import facts
from pyrl_ext.rollout.dynamic_sampling import stream_step
from pyrl_ext.rollout.evaluation import by_source
from pyrl_ext.rollout.source_metrics import source_metrics
from pyrl_ext.samples import Prompt, Sample
from pyrl_ext.schedule.shares import Shares
from tests.helpers.engines import random_sample
from tests.helpers.prompts import write_lines
from tests.helpers.tiny import tiny_plan

WEIGHTS = st.dictionaries(
    st.sampled_from("abcde"),
    st.one_of(st.integers(1, 50), st.sampled_from([0.1, 0.25, 1.5, 1 / 3, 12.75])),
    min_size=1,
)


@settings(deadline=None)
@given(WEIGHTS, st.integers(0, 400))
def test_before_counts_the_owners_of_all_places_before(weights: dict[str, float], place: int):
    shares = Shares(weights)
    counted = Counter(shares.owners(0, place))
    assert shares.before(place) == {name: counted[name] for name in weights}


@settings(deadline=None)
@given(WEIGHTS, st.integers(0, 2**40), st.integers(0, 60))
def test_places_far_ahead_have_their_shares_and_follow_each_other(
    weights: dict[str, float], place: int, n: int
):
    shares = Shares(weights)
    before = shares.before(place)
    after = shares.before(place + n)
    assert sum(before.values()) == place
    assert Counter(shares.owners(place, n)) == Counter(after) - Counter(before)
    assert all(after[name] >= before[name] for name in weights)
    whole = sum(shares.weights.values())
    for name, weight in shares.weights.items():
        assert abs(before[name] - place * weight / whole) <= len(weights) / 2


def test_whole_weights_are_met_exactly():
    shares = Shares({"a": 3, "b": 2, "c": 1})
    for rounds in (1, 7, 10**9):
        assert shares.before(6 * rounds) == {"a": 3 * rounds, "b": 2 * rounds, "c": rounds}


def lines(name: str, count: int) -> PromptSource:
    def prompts(kind: str, size: int) -> list[Prompt]:
        return [Prompt(i, (5, i + 1), i, f"{name} {kind} {i}") for i in range(size)]

    return PromptSource(prompts("train", count), prompts("held-out", 6), seed=3)


def numbers() -> Task:
    return Task("copy", lambda text: list(text.encode()), 0, 3, {"length": 9}, "numbers/train")


def mix(seed: int = 3) -> MixedPrompts:
    sources = {"first": lines("first", 40), "second": lines("second", 25), "numbers": numbers()}
    return MixedPrompts(sources, {"first": 4, "second": 2.5, "numbers": 1}, seed)


def test_take_is_a_function_of_the_step_whatever_was_taken_before():
    """So a resumed run, steps that begin ahead and their repetition have the same prompts."""
    prompts = mix()
    steps = [prompts.take(step, 8) for step in range(9)]
    for step in (5, 2, 8, 2):
        assert prompts.take(step, 8) == mix().take(step, 8) == steps[step]
    assert mix(seed=4).take(3, 8) != steps[3]


def test_sources_have_the_same_prompts_in_whichever_order_a_config_lists_them():
    weights = {"one": 1, "two": 1, "three": 1}
    sources = {name: lines(name, 20) for name in weights}
    turned = dict(reversed(sources.items()))
    first = MixedPrompts(sources, weights)
    second = MixedPrompts(turned, dict(reversed(weights.items())))
    for step in range(3):
        assert first.take(step, 4) == second.take(step, 4)
    assert first.held_out(4) == second.held_out(4)


def test_take_goes_through_each_source_by_its_weight():
    """15 prompts are 8, 5 and 2 of them: five steps are an epoch of both files."""
    prompts = mix()
    taken = [p for step in range(5) for p in prompts.take(step, 15)]
    assert sorted(p.id for p in taken) == list(range(75))
    assert Counter(p.source for p in taken) == {"first": 40, "second": 25, "numbers": 10}
    assert len({p.text for p in taken}) == 75
    assert all(p.text.startswith(p.source) for p in taken if p.source != "numbers")
    assert all(prompts.source_of(p.id) == p.source for p in taken)
    again = [p.text for p in prompts.take(5, 15) if p.source == "second"]
    assert set(again) < {p.text for p in taken}


def test_take_mixes_sources_within_a_step():
    """Engines take every n-th prompt, and minibatches are stretches of a step."""
    orders = {tuple(p.source for p in mix().take(step, 15)) for step in range(8)}
    assert len(orders) == 8


def test_refills_have_other_prompts_than_the_steps():
    prompts = mix()
    streams = [stream_step(step, number, 3) for step in range(6) for number in range(4)]
    taken = [p for stream in streams for p in prompts.take(stream, 5)]
    assert len({p.id for p in taken}) == len(taken)
    assert all(prompts.source_of(p.id) == p.source for p in taken)
    drawn = [p.text for p in taken if p.source == "numbers"]
    assert len({*drawn}) == len(drawn) > 10


def test_held_out_has_of_each_source_its_share():
    prompts = mix()
    held_out = prompts.held_out(15)
    assert [p.id for p in held_out] == [*range(-1, -1 - len(held_out), -1)]
    # of eight that are its share, the first has six
    assert Counter(p.source for p in held_out) == {"first": 6, "second": 5, "numbers": 2}
    trained = {p.text for step in range(9) for p in prompts.take(step, 15)}
    assert trained.isdisjoint(p.text for p in held_out)
    assert by_source(held_out)["second"] == [-9, -10, -11, -12, -13]
    assert by_source(lines("alone", 9).held_out(3)) == {}


# levels -------------------------------------------------------------------------------------------


def rising(ahead: int = 0) -> RisingTask:
    def level(number: int) -> Task:
        options = {"length": number}
        return Task("copy", lambda text: list(text.encode()), 0, 3, options, "rising/train")

    return RisingTask([level(5), level(7), level(9)], 0.5, ahead)


def lengths(task: RisingTask, step: int) -> set[int]:
    return {len(prompt.answer) for prompt in task.take(step, 4)}


def test_the_next_level_begins_at_the_step_after_a_high_reward_and_the_last_one_stays():
    task = rising()
    seen: list[set[int]] = []
    for step, reward in enumerate([0.1, 0.49, 0.5, 0.2, 0.9, 1.0, 0.0]):
        seen.append(lengths(task, step))
        assert seen[-1] == lengths(task, stream_step(step, 2, 3))  # refills are of the step's level
        assert task.note(step, reward) == (step in (2, 4))
    assert seen == [{5}, {5}, {5}, {7}, {7}, {9}, {9}]
    assert [lengths(task, step) for step in range(7)] == seen
    assert {len(prompt.answer) for prompt in task.held_out(3)} == {9}


def test_steps_that_are_generated_ahead_keep_their_level():
    """With two steps ahead, step 3 may have begun before the rewards of step 0 are known."""
    task = rising(ahead=2)
    begun = {step: task.level(step) for step in range(3)}
    for step in range(8):
        begun[step + 2] = task.level(step + 2)
        assert task.level(step) == begun[step]
        # rewards of the first level's last steps do not end the second one
        assert task.note(step, 0.7) == (step in (0, 3))
    assert [begun[step] for step in range(8)] == [0, 0, 0, 1, 1, 1, 2, 2]


# the sources of a plan ----------------------------------------------------------------------------


def length(prompt: Prompt, text: str, tokens: list[int]) -> dict[str, float]:
    return {"length": float(len(tokens)), prompt.source: 10.0}


def fails(prompt: Prompt, text: str, tokens: list[int]) -> float:
    raise ValueError("no")


def plan_of(folder: Path, reward: str = "length") -> Plan:
    records = [{"question": f"{i}+1=", "answer": i + 1} for i in range(9)]
    file = f"{write_lines(folder / 'a.jsonl', *records)}, columns: {{prompt: question}}"
    sources = [
        f"mine: {{prompts: {file}, reward: '{__name__}:{reward}'}}",
        f"named: {{prompts: {file}, reward: exact_match, weight: 2}}",
        "down: {task: countdown, task_options: {length: 3, end: ''}}",
    ]
    all_sources = f"data.sources={{{', '.join(sources)}}}"
    return tiny_plan("data.task=null", "data.task_options={}", all_sources)


def response(prompt: Prompt, tokens: list[int]) -> Sample:
    sample = random_sample(prompt.id, 0, 1 + len(tokens))
    sample.tokens[1:] = sample.tokens.new_tensor(tokens)
    return replace(sample, prompt_len=1, finish_reason="length")


def test_each_source_scores_its_own_prompts(tmp_path: Path):
    with closing(build_source(plan_of(tmp_path))) as source:
        prompts = source.prompts.take(0, 4)
        assert Counter(p.source for p in prompts) == {"mine": 1, "named": 2, "down": 1}
        scorer = source.scorer(prompts)
        found: dict[str, Sample] = {}
        waiting = {}
        for prompt in prompts:
            tokens = list(
                source.tokenizer(str(prompt.answer), add_special_tokens=False)["input_ids"]
            )
            waiting[prompt.source] = scorer([response(prompt, tokens)])
        for name, wait in waiting.items():
            (found[name],) = wait(defaultdict(float))
    size = len(found["mine"].response)
    assert found["mine"].components == {"length": size, "mine": 10.0}
    assert found["mine"].reward == size + 10
    assert found["named"].reward == 1.0
    assert 0 < found["down"].reward < 1  # right, without a stop
    stats = BatchIndex.of([*found.values()]).stats()
    assert stats["reward/mine"] == 10.0


def test_a_source_with_an_environment_keeps_the_rewards_that_it_gave(tmp_path: Path):
    file = write_lines(tmp_path / "a.jsonl", *({"prompt": f"{i}", "answer": i} for i in range(9)))
    game = f"game: {{prompts: {file}, environment: guess, environment_options: {{guesses: 1}}}}"
    down = "down: {task: countdown, task_options: {length: 3, end: ''}}"
    none = ("data.task=null", "data.task_options={}", "turns.environment=sources")
    plan = tiny_plan(*none, f"data.sources={{{game}, {down}}}", "turns.max_tokens=128")
    shown = dict(facts(plan))["environment"]
    assert shown.startswith("guess for game: at most 8 turns of 12 tokens, 128 tokens in all")
    with closing(build_source(plan)) as source:
        prompts = {p.source: p for p in source.prompts.take(0, 2)}
        scorer = source.scorer([*prompts.values()])
        given = {
            name: replace(response(prompt, [7]), reward=0.75) for name, prompt in prompts.items()
        }
        found = {name: scorer([each])(defaultdict(float)) for name, each in given.items()}
    assert found["game"] == [given["game"]]
    [scored] = found["down"]
    assert scored.reward != 0.75


def test_a_plan_shows_the_shares_of_its_sources(tmp_path: Path):
    assert ("prompts", "25% mine, 50% named, 25% down") in facts(plan_of(tmp_path))


def test_an_error_of_a_reward_names_the_function_of_the_source(tmp_path: Path):
    with closing(build_source(plan_of(tmp_path, "fails"))) as source:
        prompts = source.prompts.take(0, 4)
        (prompt,) = (p for p in prompts if p.source == "mine")
        wait = source.scorer(prompts)([response(prompt, [7])])
        with pytest.raises(RuntimeError, match=rf"fails\(prompt {prompt.id}, .*ValueError: no"):
            wait(defaultdict(float))


def test_source_metrics_equal_a_loop_over_samples():
    rewards = {10: [1.0, 0.5, 0.25], 11: [0.0, 0.0], 12: [2.0, 1.0]}
    samples = [
        replace(random_sample(group, place, 4 + group % 3 + place), reward=reward)
        for group, values in rewards.items()
        for place, reward in enumerate(values)
    ]
    names = {10: "a", 11: "b", 12: "a"}
    found = source_metrics(BatchIndex.of(samples), lambda group: names[group], 1.0)
    for name in "ab":
        own = [s for s in samples if names[s.prompt_id] == name]
        assert found.pop(f"source/{name}/reward") == pytest.approx(
            sum(s.reward for s in own) / len(own)
        )
        assert found.pop(f"source/{name}/solved") == sum(s.reward >= 1 for s in own) / len(own)
        assert found.pop(f"source/{name}/response_len") == pytest.approx(
            sum(len(s.response) for s in own) / len(own)
        )
        assert found.pop(f"source/{name}/groups") == len({s.prompt_id for s in own})
    assert not found
