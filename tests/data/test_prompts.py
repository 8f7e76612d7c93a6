"""Prompt files: read, checked and encoded; and the stream of prompts over one."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from tokenizers import Regex, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import PreTrainedTokenizerFast

from pyrl_ext.data.files import DataError, open_records
from pyrl_ext.data.prompts import PromptSource, load_prompts
from pyrl_ext.data.rewards import number_match
from pyrl_ext.data.tokenizer import load_tokenizer
from pyrl_ext.samples import Prompt
from tests.helpers.configs import CONFIGS
from tests.helpers.prompts import numbered_prompts, write_lines


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load_tokenizer(CONFIGS / "tiny")


def test_load_prompts_reads_the_arithmetic_files(tokenizer: Any):
    train = load_prompts(open_records(CONFIGS / "data/arithmetic.jsonl"), tokenizer, 64)
    held = load_prompts(open_records(CONFIGS / "data/arithmetic_eval.jsonl"), tokenizer, 64)
    assert (len(train), len(held)) == (64, 16)
    assert not {p.tokens for p in train} & {p.tokens for p in held}
    assert 5 < sum(p.text.startswith("<|user|>") for p in train) < 40
    for prompt in train + held:
        assert number_match(prompt, f"so it is {prompt.answer}", []) == 1.0
        found = re.search(r"(\d+) ([-+*]) (\d+) =", prompt.text)
        if found:
            a = int(found[1])
            b = int(found[3])
            assert int(prompt.answer) == {"+": a + b, "-": a - b, "*": a * b}[found[2]]


def test_load_prompts_takes_prompt_and_messages_records(tokenizer: Any, tmp_path: Path):
    messages = [{"role": "system", "content": "add"}, {"role": "user", "content": "1+2"}]
    path = write_lines(
        tmp_path / "a.jsonl",
        {"prompt": "1+1=", "answer": 2, "level": 3},
        b"",
        {"messages": messages},
    )
    first, second = load_prompts(open_records(path), tokenizer, 32)
    assert first == Prompt(0, tuple(tokenizer("1+1=")["input_ids"]), 2, "1+1=", {"level": 3})
    assert second.text == "<|system|>add<|user|>1+2<|assistant|>" and second.answer is None
    assert (second.id, second.tokens[0], second.tokens[-1], len(second.tokens)) == (1, 6, 5, 9)


def test_load_prompts_reads_the_same_from_parquet(tokenizer: Any, tmp_path: Path):
    records = [
        {"prompt": "1+1=", "messages": None, "answer": "2"},
        {"prompt": None, "messages": [{"role": "user", "content": "hi"}], "answer": None},
    ]
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), path)
    lines = [{k: v for k, v in r.items() if v is not None} for r in records]
    jsonl = write_lines(tmp_path / "a.jsonl", *lines)
    assert load_prompts(open_records(path), tokenizer, 32) == load_prompts(
        open_records(jsonl), tokenizer, 32
    )
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([*records, {"prompt": ""}]), path)
    with pytest.raises(DataError, match=r"a\.parquet: row 2: prompt '', expected a non-empty text"):
        load_prompts(open_records(path), tokenizer, 32)


BROKEN = [
    (b'{"prompt": "a"', "JSONDecodeError: Expecting ',' delimiter: line 1 column 15"),
    (b'{"prompt": "\xff"}', "UnicodeDecodeError: 'utf-8' codec can't decode byte 0xff"),
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
    (b'{"prompt": "a\\ud800"}', "UnicodeEncodeError: 'utf-8' codec can't encode"),
    (b'{"prompt": "a", "answer": {"x": ["\\udfff"]}}', "UnicodeEncodeError: 'utf-8' codec"),
    (b"[" * 100_000, "RecursionError: "),
    (b'{"prompt": "a", "answer": ' + b"1" * 5000 + b"}", "ValueError: Exceeds the limit (4300"),
    (b'{"prompt": "a", "prompt": "b"}', "field 'prompt' repeated, expected each field once"),
    (b'{"prompt": "a", "meta": {"k": 1, "k": 2}}', "field 'k' repeated, expected each field once"),
    ({"prompt": "ab" * 1_000_000}, "2,000,000 characters in 'abababab"),
    ({"messages": [{"role": "user", "content": "x" * 999_999}]}, "1,000,020 characters in '<|user"),
]


def test_load_prompts_lists_every_broken_record_with_its_line(tokenizer: Any, tmp_path: Path):
    good = {"prompt": "fine"}
    path = write_lines(tmp_path / "a.jsonl", good, *(record for record, _ in BROKEN), good)
    with pytest.raises(DataError) as caught:
        load_prompts(open_records(path), tokenizer, 32)
    lines = str(caught.value).splitlines()
    assert lines[0] == f"{path}: {len(BROKEN)} of {len(BROKEN) + 2} records cannot be used"
    for number, (line, (_, message)) in enumerate(zip(lines[1:], BROKEN, strict=True), 2):
        assert line.startswith(f"  {path}:{number}: {message}")


def test_load_prompts_names_the_record_that_a_tokenizer_cannot_encode(tmp_path: Path):
    bare = Tokenizer(WordLevel({"a": 0, "b": 1}, unk_token="<unk>"))  # its vocabulary has no <unk>
    whole: Any = bare
    whole.pre_tokenizer = Split(Regex(""), "isolated")
    PreTrainedTokenizerFast(tokenizer_object=bare, eos_token="b").save_pretrained(tmp_path)
    path = write_lines(tmp_path / "a.jsonl", {"prompt": "aa"}, {"prompt": "a\u00d7"})
    with pytest.raises(DataError) as caught:
        load_prompts(open_records(path), load_tokenizer(tmp_path), 32)
    problem = str(caught.value).splitlines()[1]
    assert problem.startswith(f"  {path}:2: the tokenizer raised Exception: WordLevel error: ")
    assert problem.endswith(" for 'a\u00d7', expected characters the tokenizer knows")


def test_load_prompts_cuts_long_lists_of_problems(tokenizer: Any, tmp_path: Path):
    path = write_lines(tmp_path / "a.jsonl", *[{"prompt": "a" * (40 + n)} for n in range(60)])
    with pytest.raises(DataError, match=r"60 of 60(?s:.*)and 10 more$"):
        load_prompts(open_records(path), tokenizer, 32)


def test_load_prompts_counts_records_that_share_a_mistake(tokenizer: Any, tmp_path: Path):
    records = [{"question": "a", "answer": "b"}] * 199
    path = write_lines(tmp_path / "a.jsonl", *records, {"prompt": "fine"})
    with pytest.raises(DataError) as caught:
        load_prompts(open_records(path), tokenizer, 32)
    assert str(caught.value).splitlines() == [
        f"{path}: 199 of 200 records cannot be used",
        "  199 of 200 records: fields question, answer, expected either `prompt` or `messages`. "
        "Set data.columns: {prompt: question}, or rename `question` to `prompt`; "
        f"first at {path}:1",
    ]


def test_load_prompts_refuses_messages_without_a_template(tmp_path: Path):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((CONFIGS / "tiny" / name).read_bytes())
    path = write_lines(tmp_path / "a.jsonl", {"messages": [{"role": "user", "content": "a"}]})
    with pytest.raises(DataError, match="the tokenizer has no chat template"):
        load_prompts(open_records(path), load_tokenizer(tmp_path), 32)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("none.jsonl", None, "no such file"),
        ("a.jsonl", b"", "no records"),
        ("a.jsonl", b"\n \n", "no records"),
        ("a.txt", b"a", "suffix '.txt', expected a .jsonl or .parquet file"),
        ("", None, "a folder, expected a .jsonl"),
        ("a.parquet", b"PAR", "expected a parquet file"),
    ],
)
def test_load_prompts_refuses_unusable_files(
    tokenizer: Any, tmp_path: Path, name: str, content: bytes | None, message: str
):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        load_prompts(open_records(tmp_path / name), tokenizer, 32)


def test_load_prompts_encodes_no_text_that_is_too_long_by_its_size(tmp_path: Path):
    class Counting:
        """The tiny tokenizer, counting the characters it encodes."""

        def __init__(self) -> None:
            self.inner = load_tokenizer(CONFIGS / "tiny")
            self.characters = 0

        def __getattr__(self, name: str) -> Any:
            return getattr(self.inner, name)

        def __call__(self, text: str, **options: Any) -> Any:
            self.characters += len(text)
            return self.inner(text, **options)

    counting: Any = Counting()
    assert max(map(len, counting.get_vocab())) == 15
    path = write_lines(tmp_path / "a.jsonl", {"prompt": "a" * 1025})
    message = "1,025 characters in 'a.*1 to max_prompt_tokens 32; no token has more than 15"
    with pytest.raises(DataError, match=message):
        load_prompts(open_records(path), counting, 32)
    assert counting.characters == 0


def test_load_prompts_lists_records_without_the_answer_that_the_reward_needs(
    tokenizer: Any, tmp_path: Path
):
    records = [{"prompt": "a", "answer": 3}, {"prompt": "b"}, {"prompt": "c", "answer": "many"}]
    path = write_lines(tmp_path / "a.jsonl", *records)
    assert len(load_prompts(open_records(path), tokenizer, 32)) == 3
    with pytest.raises(DataError) as caught:
        load_prompts(open_records(path), tokenizer, 32, vars(number_match)["answer_rule"])
    _, *lines = str(caught.value).splitlines()
    assert lines == [
        f"  {path}:2: no answer, expected a number as answer; data.reward compares with it",
        f"  {path}:3: answer 'many', expected a number as answer; data.reward compares with it",
    ]


@pytest.mark.parametrize("shuffle", [True, False])
def test_take_visits_every_prompt_once_an_epoch(shuffle: bool):
    source = PromptSource(numbered_prompts(10), numbered_prompts(2), seed=1, shuffle=shuffle)
    stream = [p for step in range(10) for p in source.take(step, 4)]
    assert [p.id for p in stream] == list(range(40))
    epochs = [[p.tokens for p in stream[i : i + 10]] for i in range(0, 40, 10)]
    assert all(sorted(e) == sorted(p.tokens for p in numbered_prompts(10)) for e in epochs)
    assert len({tuple(e) for e in epochs}) == (4 if shuffle else 1)


def test_take_can_hold_more_than_an_epoch():
    batch = PromptSource(numbered_prompts(3), numbered_prompts(1)).take(2, 8)
    assert [p.id for p in batch] == list(range(16, 24))
    assert {p.tokens for p in batch} == {p.tokens for p in numbered_prompts(3)}


def test_take_does_not_depend_on_earlier_steps():
    first = PromptSource(numbered_prompts(10), numbered_prompts(2), seed=1)
    expected = [first.take(step, 4) for step in range(6)][5]
    assert PromptSource(numbered_prompts(10), numbered_prompts(2), seed=1).take(5, 4) == expected
    assert PromptSource(numbered_prompts(10), numbered_prompts(2), seed=2).take(5, 4) != expected


def test_held_out_is_disjoint_and_repeated_prompts_stay_together():
    prompts = numbered_prompts(40) + numbered_prompts(40)
    source = PromptSource(prompts)
    held = source.held_out(100)
    assert len(held) == 5 and len({p.tokens for p in held}) == 5
    assert len(source.prompts) == 70
    assert not {p.tokens for p in held} & {p.tokens for p in source.prompts}
    assert {p.tokens for p in PromptSource(prompts[::-1]).held_out(9)} == {p.tokens for p in held}
    assert [p.id for p in source.held_out(3)] == [-1, -2, -3]


def test_prompt_source_trains_on_all_prompts_beside_an_evaluation_file():
    source = PromptSource(numbered_prompts(4), numbered_prompts(9)[7:])
    assert [p.tokens for p in source.held_out(5)] == [(107,), (108,)]
    assert len(source.prompts) == 4


def test_prompt_source_needs_a_prompt_to_train_on():
    with pytest.raises(
        ValueError, match="1 prompts, 1 of them different: 0 to train on and 1 held out"
    ):
        PromptSource(numbered_prompts(1))
