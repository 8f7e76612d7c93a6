"""Prompt files, the tiny tokenizer, the stream of prompts, and reward functions."""

from __future__ import annotations

import json
import math
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch

from pyrl_ext.data.prompts import DataError, PromptSource, load_prompts
from pyrl_ext.data.rewards import exact_match, number_match, score
from pyrl_ext.data.tokenizer import load_tokenizer
from pyrl_ext.dist.named import load_function
from pyrl_ext.samples import Prompt, Sample

CONFIGS = Path(__file__).parents[2] / "configs"


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load_tokenizer(CONFIGS / "tiny")


def write(path: Path, *lines: Any) -> Path:
    raw = [line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines]
    path.write_bytes(b"\n".join(raw) + b"\n")
    return path


def test_tiny_tokenizer(tokenizer: Any):
    special = ["<pad>", "<eos>", "<bos>", "<unk>", "<|user|>", "<|assistant|>", "<|system|>"]
    assert tokenizer.convert_ids_to_tokens(range(7)) == special
    assert len(tokenizer) == 128
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id) == (0, 1, 3)
    text = "\n\t" + "".join(map(chr, range(32, 127))) + "  two  spaces "
    ids = tokenizer(text)["input_ids"]
    assert len(ids) == len(text) and tokenizer.decode(ids) == text
    assert sorted(set(ids)) == list(range(7, 104))
    assert tokenizer("\u00e9")["input_ids"] == [3]
    assert tokenizer.decode([*ids[:4], 1], skip_special_tokens=True) == text[:4]
    config = json.loads((CONFIGS / "tiny/config.json").read_text())
    for name in ("pad", "eos", "bos"):
        assert config[f"{name}_token_id"] == getattr(tokenizer, f"{name}_token_id")
    assert config["vocab_size"] == len(tokenizer)


def test_arithmetic_files(tokenizer: Any):
    train = load_prompts(CONFIGS / "data/arithmetic.jsonl", tokenizer, 64)
    held = load_prompts(CONFIGS / "data/arithmetic_eval.jsonl", tokenizer, 64)
    assert (len(train), len(held)) == (64, 16)
    assert not {p.tokens for p in train} & {p.tokens for p in held}
    assert 5 < sum(p.text.startswith("<|user|>") for p in train) < 40
    for prompt in train + held:
        assert number_match(prompt, f"so it is {prompt.answer}", []) == 1.0
        found = re.search(r"(\d+) ([-+*]) (\d+) =", prompt.text)
        if found:
            a, b = int(found[1]), int(found[3])
            assert int(prompt.answer) == {"+": a + b, "-": a - b, "*": a * b}[found[2]]


def test_prompt_and_messages_records(tokenizer: Any, tmp_path: Path):
    messages = [{"role": "system", "content": "add"}, {"role": "user", "content": "1+2"}]
    path = write(
        tmp_path / "a.jsonl",
        {"prompt": "1+1=", "answer": 2, "level": 3},
        b"",
        {"messages": messages},
    )
    first, second = load_prompts(path, tokenizer, 32)
    assert first == Prompt(0, tuple(tokenizer("1+1=")["input_ids"]), 2, "1+1=", {"level": 3})
    assert second.text == "<|system|>add<|user|>1+2<|assistant|>" and second.answer is None
    assert (second.id, second.tokens[0], second.tokens[-1], len(second.tokens)) == (1, 6, 5, 9)


def test_parquet_holds_the_same(tokenizer: Any, tmp_path: Path):
    records = [
        {"prompt": "1+1=", "messages": None, "answer": "2"},
        {"prompt": None, "messages": [{"role": "user", "content": "hi"}], "answer": None},
    ]
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), path)
    lines = [{k: v for k, v in r.items() if v is not None} for r in records]
    jsonl = write(tmp_path / "a.jsonl", *lines)
    assert load_prompts(path, tokenizer, 32) == load_prompts(jsonl, tokenizer, 32)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([*records, {"prompt": ""}]), path)
    with pytest.raises(DataError, match=r"a\.parquet: row 2: prompt '', expected a non-empty text"):
        load_prompts(path, tokenizer, 32)


BROKEN = [
    (b'{"prompt": "a"', "Expecting ',' delimiter at column 15, expected one JSON object a line"),
    (b'{"prompt": "\xff"}', "byte 0xff at column 13, expected UTF-8"),
    (["a"], "a list, expected a JSON object"),
    ({"answer": 3}, "fields answer, expected either `prompt` or `messages`"),
    ({"prompt": "a", "messages": []}, "fields prompt, messages, expected either"),
    ({"prompt": ""}, "prompt '', expected a non-empty text"),
    ({"prompt": 5}, "prompt 5, expected a non-empty text"),
    ({"prompt": "x" * 33}, "33 tokens in '" + "x" * 33 + "', expected 1 to max_prompt_tokens 32"),
    ({"prompt": "caf\u00e9"}, "character '\u00e9' (U+00E9) in 'caf\u00e9', expected characters"),
    ({"messages": []}, "messages [], expected a non-empty list"),
    ({"messages": ["hi"]}, "messages[0] 'hi', expected a non-empty list"),
    (
        {"messages": [{"role": "user", "content": ""}]},
        "messages[0] {'role': 'user', 'content': ''}",
    ),
    ({"messages": [{"role": "judge", "content": "a"}]}, "chat template: TemplateError: role judge"),
]


def test_every_broken_record_is_listed_with_its_line(tokenizer: Any, tmp_path: Path):
    good = {"prompt": "fine"}
    path = write(tmp_path / "a.jsonl", good, *(record for record, _ in BROKEN), good)
    with pytest.raises(DataError) as caught:
        load_prompts(path, tokenizer, 32)
    lines = str(caught.value).splitlines()
    assert lines[0] == f"{path}: {len(BROKEN)} of {len(BROKEN) + 2} records cannot be used"
    for number, (line, (_, message)) in enumerate(zip(lines[1:], BROKEN, strict=True), 2):
        assert line.startswith(f"  {path}:{number}: {message}")


def test_long_lists_of_problems_are_cut(tokenizer: Any, tmp_path: Path):
    path = write(tmp_path / "a.jsonl", *[{"prompt": ""}] * 60)
    with pytest.raises(DataError, match=r"60 of 60(?s:.*)and 10 more$"):
        load_prompts(path, tokenizer, 32)


def test_messages_without_a_template(tmp_path: Path):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((CONFIGS / "tiny" / name).read_bytes())
    path = write(tmp_path / "a.jsonl", {"messages": [{"role": "user", "content": "a"}]})
    with pytest.raises(DataError, match="the tokenizer has no chat template"):
        load_prompts(path, load_tokenizer(tmp_path), 32)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("none.jsonl", None, "no such file"),
        ("a.jsonl", b"", "no records"),
        ("a.jsonl", b"\n \n", "no records"),
        ("a.txt", b"a", "suffix '.txt', expected .jsonl or .parquet"),
        ("a.parquet", b"PAR", "expected a parquet file"),
    ],
)
def test_unusable_files(
    tokenizer: Any, tmp_path: Path, name: str, content: bytes | None, message: str
):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        load_prompts(tmp_path / name, tokenizer, 32)


def test_folder_instead_of_file(tokenizer: Any, tmp_path: Path):
    with pytest.raises(DataError, match=r"a folder, expected a \.jsonl"):
        load_prompts(tmp_path, tokenizer, 32)


def test_unusable_tokenizers(tmp_path: Path):
    with pytest.raises(DataError, match="no such folder"):
        load_tokenizer(tmp_path / "none")
    with pytest.raises(DataError, match="expected a folder that AutoTokenizer loads"):
        load_tokenizer(tmp_path)


def numbered(count: int) -> list[Prompt]:
    return [Prompt(i, (100 + i,)) for i in range(count)]


@pytest.mark.parametrize("shuffle", [True, False])
def test_epochs_visit_every_prompt_once(shuffle: bool):
    source = PromptSource(numbered(10), numbered(2), seed=1, shuffle=shuffle)
    stream = [p for step in range(10) for p in source.take(step, 4)]
    assert [p.id for p in stream] == list(range(40))
    epochs = [[p.tokens for p in stream[i : i + 10]] for i in range(0, 40, 10)]
    assert all(sorted(e) == sorted(p.tokens for p in numbered(10)) for e in epochs)
    assert len({tuple(e) for e in epochs}) == (4 if shuffle else 1)


def test_a_step_can_hold_more_than_an_epoch():
    batch = PromptSource(numbered(3), numbered(1)).take(2, 8)
    assert [p.id for p in batch] == list(range(16, 24))
    assert {p.tokens for p in batch} == {p.tokens for p in numbered(3)}


def test_steps_do_not_depend_on_earlier_ones():
    first = PromptSource(numbered(10), numbered(2), seed=1)
    expected = [first.take(step, 4) for step in range(6)][5]
    assert PromptSource(numbered(10), numbered(2), seed=1).take(5, 4) == expected
    assert PromptSource(numbered(10), numbered(2), seed=2).take(5, 4) != expected


def test_split_is_disjoint_and_repeated_prompts_stay_together():
    prompts = numbered(40) + numbered(40)
    source = PromptSource(prompts)
    held = source.held_out(100)
    assert len(held) == 5 and len({p.tokens for p in held}) == 5
    assert len(source.prompts) == 70
    assert not {p.tokens for p in held} & {p.tokens for p in source.prompts}
    assert {p.tokens for p in PromptSource(prompts[::-1]).held_out(9)} == {p.tokens for p in held}
    assert [p.id for p in source.held_out(3)] == [-1, -2, -3]


def test_evaluation_file_leaves_all_prompts_to_train_on():
    source = PromptSource(numbered(4), numbered(9)[7:])
    assert [p.tokens for p in source.held_out(5)] == [(107,), (108,)]
    assert len(source.prompts) == 4


def test_nothing_to_train_on():
    with pytest.raises(ValueError, match="0 prompts to train on and 1 held out"):
        PromptSource(numbered(1))


def test_load_function(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    assert load_function("data.reward", "pyrl_ext.data.rewards:number_match") is number_match
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "my_rewards_a.py").write_text(
        "limit = 3\ndef length(prompt, text, tokens): return 1\n"
    )
    (tmp_path / "my_rewards_b.py").write_text("import does_not_exist_anywhere\n")
    assert load_function("data.reward", "my_rewards_a:length")(Prompt(0, (1,)), "", []) == 1
    for spec, message in (
        ("my_rewards_a", "expected package.module:function"),
        ("my_rewards_a:", "expected package.module:function"),
        ("my_rewards_z:length", "no module 'my_rewards_z', expected one on the Python path"),
        ("my.rewards_z:length", "no module 'my', expected one on the Python path"),
        ("my_rewards_a:len", "no 'len' in my_rewards_a, expected one of: length, limit"),
        ("my_rewards_a:limit", "a int, expected a function"),
        ("my_rewards_b:f", "module my_rewards_b imports 'does_not_exist_anywhere'"),
    ):
        with pytest.raises(ValueError, match=message):
            load_function("data.reward", spec)
    sys.modules.pop("my_rewards_a", None)


@pytest.mark.parametrize(
    ("answer", "text", "reward"),
    [
        (12, "12", 1.0),
        ("12", "first 7, then 12.", 1.0),
        ("1,200", "it is 1200", 1.0),
        ("-3.5", "x = -3.50", 1.0),
        ("10", "9", 0.45),
        ("10", "100", 0.0),
        ("0", "0.5", 0.25),
        ("10", "ten", 0.0),
        ("10", "", 0.0),
    ],
)
def test_number_match(answer: Any, text: str, reward: float):
    assert number_match(Prompt(0, (1,), answer), text, []) == pytest.approx(reward)


def test_number_match_needs_a_number():
    with pytest.raises(ValueError, match="prompt 4: answer 'many', expected a number"):
        number_match(Prompt(4, (1,), "many"), "3", [])


def test_exact_match():
    assert exact_match(Prompt(0, (1,), "yes"), " yes\n", []) == 1.0
    assert exact_match(Prompt(0, (1,), 3), "4", []) == 0.0


def rolled(prompt: int, index: int, text: str, reason: str) -> Sample:
    tokens = torch.tensor([5, *map(ord, text), *([1] if reason == "stop" else [])])
    places = torch.arange(len(tokens))
    return Sample(
        prompt, index, tokens, 1, places >= 1, -(places >= 1).float(), None, (),
        torch.zeros(len(tokens), dtype=torch.bool), 0, reason,
    )  # fmt: skip


def decode(tokens: list[int]) -> str:
    return "".join(map(chr, tokens))


def test_score_gives_the_text_before_the_stop_token():
    seen = []

    def reward(prompt: Prompt, text: str, tokens: list[int]) -> float:
        seen.append((prompt.answer, text, tokens[-1]))
        return len(text)

    samples = [rolled(3, 0, "ab", "stop"), rolled(4, 1, "abc", "length")]
    prompts = [Prompt(4, (5,), "x"), Prompt(3, (5,), "y")]
    assert [s.reward for s in score(samples, prompts, reward, decode, (1,))] == [2.0, 3.0]
    assert seen == [("y", "ab", 1), ("x", "abc", ord("c"))]
    assert math.isnan(samples[0].reward)


@pytest.mark.parametrize("value", [math.nan, math.inf, "1.0", None, torch.tensor(1.0)])
def test_score_refuses_other_values(value: Any):
    def odd(prompt: Prompt, text: str, tokens: list[int]) -> Any:
        return value

    message = r"odd\(prompt 3, sample 2, completion 'ab'\): returned .*, expected a finite number"
    with pytest.raises(RuntimeError, match=message):
        score([rolled(3, 2, "ab", "stop")], [Prompt(3, (5,))], odd, decode, (1,))


@pytest.mark.parametrize("value", [True, 2, 0.5, np.float32(0.5), np.int64(3)])
def test_score_takes_any_number(value: Any):
    [scored] = score([rolled(3, 2, "a", "stop")], [Prompt(3, (5,))], lambda *_: value, decode, (1,))
    assert type(scored.reward) is float and scored.reward == value


def test_score_reports_what_a_reward_function_raises():
    def fragile(prompt: Prompt, text: str, tokens: list[int]) -> float:
        return {"a": 1.0}[text]

    message = (
        r"test_data:.*fragile\(prompt 3, sample 2, completion 'z+\.\.\.'\): raised KeyError: 'z"
    )
    with pytest.raises(RuntimeError, match=message) as caught:
        score([rolled(3, 2, "z" * 300, "length")], [Prompt(3, (5,))], fragile, decode, (1,))
    assert isinstance(caught.value.__cause__, KeyError)
    assert "z" * 201 not in str(caught.value).split("raised")[0]
