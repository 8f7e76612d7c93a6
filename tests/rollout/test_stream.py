"""Samples as they finish: streams of the embedded engine that are left early, and stop strings."""

from __future__ import annotations

import random
from contextlib import closing
from itertools import islice
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from pyrl_ext.rollout.hf.engine import HFEngine
from pyrl_ext.rollout.hf.stop_strings import StopStrings
from pyrl_ext.samples import Sample, Sampling
from tests.rollout.test_hf import (
    GLM,
    assert_matches_plain,
    build,
    checkpoint,
    engine_of,
    prompts_of,
)

TEXT = (
    "der Ärger über 東京 is größer than the 🙂 thought </answer> answer </think> think Ü 京東 🙂🙃 "
)
VOCAB = 320


@pytest.fixture(scope="module")
def words() -> Any:
    """A byte-level tokenizer whose tokens are bytes, parts of words, and a special one."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=["<eos>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT * 20], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")


def first_end(tokenizer: Any, tokens: list[int], stop: tuple[str, ...]) -> int | None:
    """Number of tokens at which the text, decoded from the start, first holds a stop string."""
    for end in range(1, len(tokens) + 1):
        if any(text in tokenizer.decode(tokens[:end]) for text in stop):
            return end
    return None


def test_stop_strings_are_those_of_whole_prefixes(words: Any):
    """Over tokens of one byte, of several letters, of letters cut in two, and special ones."""
    draw = random.Random(0)
    pieces = [words(piece)["input_ids"] for piece in (*TEXT, *TEXT.split(), "<eos>", "\xff")]
    pieces += [[i] for i in range(len(words))]  # among them bytes that are no text
    found, spans = 0, set()
    for _ in range(300):
        tokens = [token for _ in range(12) for token in draw.choice(pieces)]
        text = words.decode(tokens)
        begin = draw.randrange(len(text))
        stop = tuple({text[begin : begin + draw.randint(1, 6)], "</think>", "京", "<eos>"} - {""})
        stop = tuple(s for s in stop if "\ufffd" not in s)
        watch = StopStrings(words, stop)
        ends = [
            end
            for end in range(1, len(tokens) + 1)
            if watch.complete([tokens[max(0, end - watch.window) : end]])[0]
        ]
        want = first_end(words, tokens, stop)
        assert (ends[0] if ends else None) == want, (stop, tokens)
        if want is not None:
            found += 1
            spans.add(len(words(stop[0])["input_ids"]))
    assert found > 150 and max(spans) > 2


def test_a_stop_string_ends_a_response_with_the_token_that_completes_it(words: Any):
    """Everything up to there, log-probs and routes included, is as without stop strings."""
    config = {**GLM, "vocab_size": VOCAB}
    model = build(config, std=0.05)
    engine = engine_of(model, config, max_running=7, tokenizer=words)
    prompts, stop = prompts_of([3, 9, 5, 1], VOCAB), (" t", "\u00e4", "e", "<eos>")
    free = Sampling(24, samples_per_prompt=5, seed=1)
    with_stop = Sampling(24, samples_per_prompt=5, seed=1, stop=stop, stop_ids=(65, 66))
    before, after = engine.generate(prompts, free), engine.generate(prompts, with_stop)
    ends, lengths = [], set()
    for whole, cut in zip(before, after, strict=True):
        at = [whole.response.index(i) + 1 for i in (65, 66) if i in whole.response]
        by_text = first_end(words, whole.response, stop)
        end = min([*at, 24 if by_text is None else by_text, 24])
        assert cut.response == whole.response[:end]
        stopped = by_text == end or end in at
        assert cut.finish_reason == ("stop" if stopped else "length")
        assert_matches_plain(model, cut.check(), with_stop)
        ends.append(stopped)
        lengths.add(end)
    assert 5 < sum(ends) < 20 and len(lengths) > 4


def test_stop_strings_need_a_tokenizer():
    with pytest.raises(ValueError, match=r"stop strings \['\.'\] without a tokenizer"):
        engine_of(build(GLM), GLM).generate(prompts_of([3], 128), Sampling(4, stop=(".",)))


def uneven(engine: HFEngine, **more: Any) -> tuple[Any, Sampling]:
    return prompts_of([3, 7, 2, 5], 128), Sampling(
        16, samples_per_prompt=3, stop_ids=tuple(range(20, 32)), seed=2, **more
    )


def key(sample: Sample) -> tuple[int, int]:
    return sample.prompt_id, sample.index


def test_samples_come_as_they_finish_and_in_the_same_order_every_time():
    engine = engine_of(build(GLM), GLM, max_running=6)
    prompts, sampling = uneven(engine)
    come = list(engine.stream(prompts, sampling))
    order = [key(s) for s in come]
    assert order != sorted(order) and len(set(order)) == 12
    assert [key(s) for s in engine.stream(prompts, sampling)] == order
    whole = engine.generate(prompts, sampling)
    assert [key(s) for s in whole] == [(p.id, i) for p in prompts for i in range(3)]
    by_key = {key(s): s for s in come}
    assert all(torch.equal(s.tokens, by_key[key(s)].tokens) for s in whole)


@pytest.mark.parametrize("error", [None, KeyboardInterrupt, ValueError])
@pytest.mark.parametrize("count", [1, 4])
def test_a_stream_that_is_left_runs_no_further(error: Any, count: int):
    """The forwards that the model runs are counted: none after the stream is closed."""
    engine = engine_of(build(GLM), GLM, max_running=6)
    prompts, sampling = uneven(engine)
    whole = engine.generate(prompts, sampling)
    forwards: list[int] = []
    engine.model.register_forward_hook(lambda *_: forwards.append(1))
    engine.generate(prompts, sampling)
    total = len(forwards)
    first = [key(s) for s in islice(engine.stream(prompts, sampling), count)]
    forwards.clear()

    def use() -> None:
        with closing(engine.stream(prompts, sampling)) as stream:
            for number, sample in enumerate(stream):
                assert key(sample) == first[number]
                if number + 1 == count:
                    if error is not None:
                        raise error
                    return

    if error is None:
        use()
    else:
        with pytest.raises(error):
            use()
    assert 0 < len(forwards) < total
    again = engine.generate(prompts, sampling)
    assert all(torch.equal(a.tokens, b.tokens) for a, b in zip(whole, again, strict=True))
    for a, b in zip(whole, again, strict=True):
        assert a.routes is not None and b.routes is not None
        assert torch.equal(a.routes, b.routes)


def test_a_stream_ends_when_its_weights_are_replaced():
    model = build(GLM)
    engine = engine_of(model, GLM, max_running=2)
    stream = engine.stream(*uneven(engine))
    next(stream)
    engine.load_weights(checkpoint(model).items(), version=4)
    with pytest.raises(RuntimeError, match="version 3 of the weights was replaced"):
        list(stream)


def test_two_streams_of_one_engine_do_not_mix():
    engine = engine_of(build(GLM), GLM, max_running=4)
    prompts, sampling = uneven(engine)
    alone = {key(s): s.response for s in engine.stream(prompts, sampling)}
    for pair in zip(engine.stream(prompts, sampling), engine.stream(prompts, sampling)):
        assert all(s.response == alone[key(s)] for s in pair)
