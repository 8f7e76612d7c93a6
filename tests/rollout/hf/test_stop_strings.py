"""Stop strings against the whole decoded text."""

from __future__ import annotations

import random
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from pyrl_ext.rollout.hf.sampling import StopStrings
from pyrl_ext.samples import Sampling
from tests.helpers.engines import (
    GLM,
    assert_matches_plain,
    engine_of,
    prompts_of,
    random_model,
)

pytestmark = pytest.mark.multiprocess

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


def test_complete_finds_the_token_that_decoding_whole_prefixes_finds(words: Any):
    """Over tokens of one byte, of several letters, of letters cut in two, and special ones."""
    draw = random.Random(0)
    pieces = [words(piece)["input_ids"] for piece in (*TEXT, *TEXT.split(), "<eos>", "\xff")]
    pieces += [[i] for i in range(len(words))]  # among them bytes that are no text
    found = 0
    spans = set()
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


def test_generate_ends_with_the_token_that_completes_a_stop_string(words: Any):
    """Everything up to there, log-probs and routes included, is as without stop strings."""
    config = {**GLM, "vocab_size": VOCAB}
    model = random_model(config, std=0.05)
    engine = engine_of(model, config, max_num_seqs=7, tokenizer=words)
    prompts = prompts_of([3, 9, 5, 1], VOCAB)
    stop = (" t", "\u00e4", "e", "<eos>")
    free = Sampling(24, samples_per_prompt=5, seed=1)
    with_stop = Sampling(24, samples_per_prompt=5, seed=1, stop=stop, stop_ids=(65, 66))
    before = engine.generate(prompts, free)
    after = engine.generate(prompts, with_stop)
    ends = []
    lengths = set()
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


def test_generate_refuses_stop_strings_without_a_tokenizer():
    with pytest.raises(ValueError, match=r"stop strings \['\.'\] without a tokenizer"):
        engine_of(random_model(GLM), GLM).generate(prompts_of([3], 128), Sampling(4, stop=(".",)))
