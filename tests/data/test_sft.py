"""Records of a run without rollouts: read, checked, cut, and taken step by step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from pyrl_ext.data import chat
from pyrl_ext.data.files import Broken, DataError, open_records
from pyrl_ext.data.prompts import load_prompts
from pyrl_ext.data.sft import SftEncoder, SftSource
from pyrl_ext.data.tokenizer import load_tokenizer
from pyrl_ext.samples import Sample
from tests.helpers.configs import CONFIGS
from tests.helpers.prompts import write_lines

CHAT = {"messages": [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "xyz"}]}


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load_tokenizer(CONFIGS / "tiny")


def tokens(*ids: int, trained: int = 1) -> dict[str, Any]:
    """A record of tokens whose last ``trained`` are trained on."""
    mask = [0] * (len(ids) - trained) + [1] * trained
    return {"tokens": list(ids), "loss_mask": mask}


def numbered(path: Path, count: int, **options: Any) -> SftSource:
    """Records 0, 1, ... of the tokens (10 + number, 5)."""
    records = open_records(write_lines(path, *(tokens(10 + i, 5) for i in range(count))))
    return SftSource(records, SftEncoder(None, 128, 8), **options)


def shown(sample: Sample) -> tuple[list[int], list[int], int]:
    """(tokens, loss mask, prompt tokens)."""
    return sample.tokens.tolist(), sample.loss_mask.int().tolist(), sample.prompt_len


def test_encoder_makes_whole_samples(tokenizer: Any):
    encode = SftEncoder(tokenizer, 128, 16)
    chat = encode(CHAT)
    given = encode({"tokens": [7, 8, 9, 4], "loss_mask": [False, True, 0, 1]})
    for sample in (chat, given):
        sample.check()
        assert (sample.finish_reason, sample.reward, sample.routes) == ("stop", 0.0, None)
        assert not sample.rollout_logprobs.any() and not sample.route_mask.any()
    assert shown(given) == ([7, 8, 9, 4], [0, 1, 0, 1], 1)
    ids = tokenizer("<|user|>ab<|assistant|>xyz<eos>", add_special_tokens=False)["input_ids"]
    assert shown(chat) == (ids, [0] * 4 + [1] * 4, 4)


BROKEN = [
    (["a"], "a list, expected a JSON object"),
    ({"prompt": "a"}, "fields prompt, expected either `messages`, or `tokens` and `loss_mask`"),
    ({**CHAT, "tokens": [1]}, "fields messages, tokens, expected either"),
    ({"messages": []}, "messages [], expected a non-empty list"),
    ({"messages": CHAT["messages"][:1]}, "messages without an assistant's turn, expected at least"),
    (
        {"messages": [*CHAT["messages"], {"role": "user", "content": "caf\u00e9"}]},
        "character '\u00e9' (U+00E9) in '<|user|>ab<|assistant|>xyz<eos>",
    ),
    (
        {"messages": [CHAT["messages"][0], {**CHAT["messages"][1], "weight": 0}]},
        "messages[1] with weight 0, expected none: all turns of the assistant are trained on",
    ),
    (
        {"messages": [CHAT["messages"][0], {**CHAT["messages"][1], "tool_calls": [{"id": "a"}]}]},
        "messages[1] with tool_calls, which the chat template leaves out, expected content with",
    ),
    ({"tokens": [1, 2]}, "tokens without loss_mask, expected a loss_mask of 1 for tokens to"),
    ({"tokens": [1, 2], "loss_mask": [1]}, "2 tokens and 1 of loss_mask, expected equal numbers"),
    (tokens(3, 128), "tokens[1] is 128, expected 0 to 127, a token of the model"),
    (tokens(3, -1), "tokens[1] is -1, expected 0 to 127, a token of the model"),
    ({"tokens": [3, 4], "loss_mask": [0, 2]}, "loss_mask[1] is 2, expected 0 to 1"),
    ({"tokens": [3, 4.5], "loss_mask": [0, 1]}, "tokens [3, 4.5], expected a list of whole"),
    ({"tokens": [[3], [4]], "loss_mask": [0, 1]}, "tokens [[3], [4]], expected a list of whole"),
    ({"tokens": [[3], 4], "loss_mask": [0, 1]}, "tokens [[3], 4], expected a list of whole"),
    ({"tokens": "34", "loss_mask": [0, 1]}, "tokens '34', expected a list of whole numbers"),
    ({"tokens": [True, False], "loss_mask": [0, 1]}, "tokens [True, False], expected a list"),
    ({"tokens": [], "loss_mask": []}, "0 tokens, expected 2 to data.max_tokens 8"),
    (tokens(3), "1 tokens, expected 2 to data.max_tokens 8"),
    (tokens(*range(9)), "9 tokens, expected 2 to data.max_tokens 8; data.truncate: true cuts"),
    (tokens(3, 4, trained=0), "no token under the loss mask, expected at least one to train on"),
    (tokens(3, 4, trained=2), "loss_mask[0] is 1, expected 0; nothing predicts the first token"),
    (b'{"tokens": [1', "JSONDecodeError: Expecting ',' delimiter: line 1 column 14"),
]


def test_check_lists_every_broken_record_with_its_line(tokenizer: Any, tmp_path: Path):
    path = write_lines(tmp_path / "a.jsonl", CHAT, *(record for record, _ in BROKEN), CHAT)
    source = SftSource(open_records(path), SftEncoder(tokenizer, 128, 8))
    found = source.check()
    assert (found.tokens, found.loss_tokens, found.longest, found.truncated) == (16, 8, 8, 0)
    assert found.mistakes.broken == len(BROKEN)
    problems = found.mistakes.lines("all")
    for line, (problem, (_, message)) in enumerate(zip(problems, BROKEN, strict=True), 2):
        assert problem.startswith(f"{path}:{line}: {message}")
    shares = [source.check(rank, 3) for rank in range(3)]
    with pytest.raises(DataError) as caught:
        source.summary(shares)
    head, *lines = str(caught.value).splitlines()
    assert head == f"{path}: {len(BROKEN)} of {len(BROKEN) + 2} records cannot be used"
    assert lines == [f"  {problem}" for problem in problems]


def test_check_ends_at_the_first_record_that_a_template_does_not_finish(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """It would take the time limit again for each of the other records."""
    monkeypatch.setattr(chat, "SECONDS", 0.2)
    tokenizer = load_tokenizer(CONFIGS / "tiny")
    loop = "{% for i in range(99999) %}{% endfor %}"
    tokenizer.chat_template = "{% for i in range(9999) %}" + loop + "{% endfor %}"
    records = open_records(write_lines(tmp_path / "a.jsonl", CHAT, CHAT))
    expected = r"^chat template: 0\.2 s were not enough"
    with pytest.raises(DataError, match=expected):
        SftSource(records, SftEncoder(tokenizer, 128, 8)).check()
    with pytest.raises(DataError, match=expected):
        load_prompts(records, tokenizer, 32)


def test_summary_counts_all_shares_and_shows_the_first_problems(tmp_path: Path):
    source = numbered(tmp_path / "a.jsonl", 10, held_out=3)
    shares = [source.check(rank, 4) for rank in range(4)]
    assert source.summary(shares) == (
        f"{tmp_path / 'a.jsonl'}: 7 records, 3 more held out; 20 tokens, 10 in the loss; "
        "2 in the longest record; 0 were cut"
    )
    path = write_lines(tmp_path / "b.jsonl", *[tokens(*range(10 + n)) for n in range(200)])
    source = SftSource(open_records(path), SftEncoder(None, 1000, 8))
    with pytest.raises(DataError, match=r"200 of 200 records(?s:.*)and 150 more$") as caught:
        source.summary([source.check(rank, 3) for rank in range(3)])
    places = [line.split(":")[1] for line in str(caught.value).splitlines()[1:-1]]
    assert places == [str(line) for line in range(1, 51)]
    (tmp_path / "c.jsonl").write_bytes(b"\n")
    source = SftSource(open_records(tmp_path / "c.jsonl"), SftEncoder(None, 128, 8), held_out=2)
    with pytest.raises(DataError, match=r"c\.jsonl: no records, expected at least one"):
        source.summary([source.check()])


def test_summary_says_on_one_line_what_many_records_have_in_common(tmp_path: Path):
    same = {"prompt": "a", "completion": "b"}
    path = write_lines(tmp_path / "a.jsonl", CHAT, *[same] * 200, {}, {}, tokens(3))
    source = SftSource(open_records(path), SftEncoder(None, 128, 8))
    with pytest.raises(DataError) as caught:
        source.summary([source.check(rank, 4) for rank in range(4)])
    rule = "expected either `messages`, or `tokens` and `loss_mask`"
    assert str(caught.value).splitlines() == [
        f"{path}: 204 of 204 records cannot be used",
        f"  {path}:1: messages, with model.tokenizer null, expected a tokenizer, or `tokens`",
        f"  200 of 204 records: fields prompt, completion, {rule}. Write `prompt` as a message of "
        f"the user, and the answer as one of the assistant; first at {path}:2",
        f"  {path}:202: fields nothing, {rule}",
        f"  {path}:203: fields nothing, {rule}",
        f"  {path}:204: 1 tokens, expected 2 to data.max_tokens 8; data.truncate: true cuts longer "
        "ones",
    ]


def test_encoder_names_a_missing_tokenizer():
    with pytest.raises(Broken, match=r"messages, with model\.tokenizer null, expected"):
        SftEncoder(None, 128, 8)(CHAT)


def test_encoder_cuts_long_records_only_when_told_to(tokenizer: Any, tmp_path: Path):
    long = {"tokens": [5, 6, 7, 8, 9], "loss_mask": [0, 0, 1, 0, 1]}
    lines = [tokens(1, 2), long, tokens(*range(1, 6)), CHAT]
    records = open_records(write_lines(tmp_path / "a.jsonl", *lines))
    found = SftSource(records, SftEncoder(tokenizer, 128, 4, truncate=True)).check()
    assert (found.tokens, found.longest, found.truncated, found.loss_tokens) == (6, 4, 1, 2)
    lost = "no token under the loss mask in the first 4 of {} tokens, expected at least one"
    assert [
        text.partition(": ")[2].partition(" to train")[0] for text in found.mistakes.lines("all")
    ] == [
        lost.format(5),
        lost.format(8),
    ]
    cut = SftSource(records, SftEncoder(tokenizer, 128, 4, truncate=True), shuffle=False).take(
        1, 1
    )[0]
    assert shown(cut) == ([5, 6, 7, 8], [0, 0, 1, 0], 2) and cut.finish_reason == "length"


def test_take_reads_the_same_from_parquet(tokenizer: Any, tmp_path: Path):
    system = {"messages": [{"role": "system", "content": "s"}, *CHAT["messages"]]}
    lines = [CHAT, tokens(3, 4, 5), system]
    rows = [{"messages": None, "tokens": None, "loss_mask": None} | each for each in lines]
    rows[0]["messages"] = [{**m, "name": None} for m in CHAT["messages"]]
    table = pyarrow.Table.from_pylist(rows)
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet", row_group_size=2)
    write_lines(tmp_path / "a.jsonl", *lines)
    sources = [
        SftSource(open_records(tmp_path / name), SftEncoder(tokenizer, 128, 16))
        for name in ("a.jsonl", "a.parquet")
    ]
    assert [s.check().mistakes.broken for s in sources] == [0, 0]
    first, second = ([shown(s) for s in source.take(3, 4)] for source in sources)
    assert first == second


def test_ParquetRows_holds_one_row_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    groups = 20
    each = 500
    rows = [tokens(*[3 + i % 97] * 200) for i in range(groups * each)]
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=each)
    read = []
    whole = pyarrow.parquet.ParquetFile.read_row_group
    count = lambda file, group: read.append(group) or whole(file, group)  # noqa: E731
    monkeypatch.setattr(pyarrow.parquet.ParquetFile, "read_row_group", count)
    before = pyarrow.total_allocated_bytes()
    source = SftSource(open_records(path), SftEncoder(None, 128, 200))
    assert not source.check(1, 3).mistakes.broken and read == list(range(groups))
    held = pyarrow.total_allocated_bytes() - before
    assert held < 4 * each * 200 * 16  # a token and its mask are int64, and are decoded in chunks
    read.clear()
    taken = source.take(2, 256, 1, 2)
    assert len(read) == len({*read}) and [s.prompt_id for s in taken] == list(range(513, 768, 2))


def test_ParquetRows_names_the_rows_of_a_damaged_row_group(tmp_path: Path):
    path = tmp_path / "a.parquet"
    table = pyarrow.Table.from_pylist([tokens(3, 4)] * 6)
    pyarrow.parquet.write_table(table, path, row_group_size=2)
    column = pyarrow.parquet.ParquetFile(path).metadata.row_group(1).column(0)
    with path.open("r+b") as file:
        file.seek(column.data_page_offset)
        file.write(b"\xff" * 20)
    found = SftSource(open_records(path), SftEncoder(None, 128, 8)).check()
    assert [text.partition(" group")[0] for text in found.mistakes.lines("all")] == [
        f"{path}: row {row}: row" for row in (2, 3)
    ]


def test_open_records_finds_lines_with_blanks_around_them(tmp_path: Path):
    lines = [b'  {"n": 0}', b"", b'{"n": 1}  \r', b" \t", b'\t{"n": 2}']
    records = open_records(write_lines(tmp_path / "a.jsonl", *lines))
    assert [records.read(n) for n in (2, 0, 1)] == [{"n": 2}, {"n": 0}, {"n": 1}]
    assert [records.where(n).rpartition(":")[2] for n in range(len(records))] == ["1", "3", "5"]


@pytest.mark.parametrize("shuffle", [True, False])
def test_take_visits_every_record_once_an_epoch(tmp_path: Path, shuffle: bool):
    source = numbered(tmp_path / "a.jsonl", 12, held_out=2, seed=1, shuffle=shuffle)
    stream = [s for step in range(10) for s in source.take(step, 4)]
    assert [s.prompt_id for s in stream] == list(range(40))
    firsts = [int(s.tokens[0]) for s in stream]
    epochs = [firsts[i : i + 10] for i in range(0, 40, 10)]
    assert all(sorted(epoch) == list(range(10, 20)) for epoch in epochs)
    assert len(set(map(tuple, epochs))) == (4 if shuffle else 1)
    held = source.held_out()
    assert [(int(s.tokens[0]), s.prompt_id) for s in held] == [(20, -1), (21, -2)]


def test_take_does_not_depend_on_earlier_steps_and_shares_add_up(tmp_path: Path):
    whole = numbered(tmp_path / "a.jsonl", 10, held_out=3, seed=1)
    expected = [[shown(s) for s in whole.take(step, 4)] for step in range(6)][5]
    resumed = numbered(tmp_path / "a.jsonl", 10, held_out=3, seed=1)
    for ranks in (1, 3, 8):
        shares = [resumed.take(5, 4, rank, ranks) for rank in range(ranks)]
        joined = sorted((s for share in shares for s in share), key=lambda s: s.prompt_id)
        assert [s.prompt_id for s in joined] == [20, 21, 22, 23]
        assert [shown(s) for s in joined] == expected
        held = [shown(s) for rank in range(ranks) for s in resumed.held_out(rank, ranks)]
        assert sorted(held) == sorted(map(shown, whole.held_out()))
    other = numbered(tmp_path / "a.jsonl", 10, held_out=3, seed=2)
    assert [shown(s) for s in other.take(5, 4)] != expected


def test_sft_source_needs_a_record_to_train_on(tmp_path: Path):
    with pytest.raises(ValueError, match=r"data\.held_out: 4 of 4 records in .*, expected fewer"):
        numbered(tmp_path / "a.jsonl", 4, held_out=4)


def test_take_names_a_record_that_changed_during_the_run(tmp_path: Path):
    source = numbered(tmp_path / "a.jsonl", 4)
    path = tmp_path / "a.jsonl"
    path.write_bytes(path.read_bytes().replace(b"1", b"x"))
    with pytest.raises(ValueError, match=r"a\.jsonl:\d: .*; the file changed during the run"):
        source.take(0, 4)
