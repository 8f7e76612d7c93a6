"""The samples of a run without rollouts: records of conversations, or of tokens with a mask."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from pyrl_ext.data.chat import check_known, check_size, render, tokens_of_chat
from pyrl_ext.data.files import Broken, DataError, Records, cut, refuse
from pyrl_ext.data.images import ImageReader, UndecodedImage, images_of, place
from pyrl_ext.data.sampler import Epochs
from pyrl_ext.data.tokenizer import Tokenizer
from pyrl_ext.plan.records import Mistakes, check_fields
from pyrl_ext.samples import Image, Sample


@dataclass(frozen=True)
class SftEncoder:
    """Turns a record into a sample.

    A record holds `messages`, a list of {"role": ..., "content": ...} of which the assistant's
    turns are trained on and whose images come before the first of them, or `tokens` and
    `loss_mask`, two lists of equal length; other fields are ignored.

    Args:
        tokenizer: None: records hold tokens
        vocab_size: token ids are below
        max_tokens: longest sample [tokens]
        truncate: cut a longer one; False: refuse it
        reader: of the images in messages; None: the model takes none
    """

    tokenizer: Tokenizer | None
    vocab_size: int
    max_tokens: int
    truncate: bool = False
    reader: ImageReader | None = None

    def __call__(self, record: Any, decode: bool = True) -> Sample:
        """The sample of a record; ``finish_reason`` is "length" where it was cut.

        Args:
            decode: its images too; False: look at their sizes only, and leave them out.

        Raises: Broken; DataError for an image that cannot be decoded.
        """
        record = check_fields(record, rollouts=False)
        read = self._of_messages if "messages" in record else self._of_tokens
        tokens, mask, placed = read(record)
        length = len(tokens)
        if length < 2 or (length > self.max_tokens and not self.truncate):
            raise Broken(
                f"{length} tokens",
                f"2 to data.max_tokens {self.max_tokens}; data.truncate: true cuts longer ones",
            )
        kept = mask[: self.max_tokens]
        if not kept.any():
            where = f" in the first {self.max_tokens} of {length} tokens" if mask.any() else ""
            raise Broken(f"no token under the loss mask{where}", "at least one to train on")
        if kept[0]:
            raise Broken("loss_mask[0] is 1", "0; nothing predicts the first token")
        images = tuple(image.load() for image in placed) if decode else ()
        return _sample(tokens[: self.max_tokens], kept, length > self.max_tokens, images)

    def _of_messages(
        self, record: dict[str, Any]
    ) -> tuple[np.ndarray, np.ndarray, list[UndecodedImage]]:
        if self.tokenizer is None:
            raise Broken("messages, with model.tokenizer null", "a tokenizer, or `tokens`")
        messages = record["messages"]
        if isinstance(messages, list):  # Parquet fills absent fields with null
            messages = [
                {k: v for k, v in m.items() if v is not None} if isinstance(m, dict) else m
                for m in messages
            ]
        text = render(messages, self.tokenizer, generate=False)
        if not self.truncate:
            check_size(text, self.tokenizer, self.max_tokens, "data.max_tokens")
        self._check_kept(messages, text)
        tokens, mask = tokens_of_chat(messages, self.tokenizer)
        check_known(text, tokens, self.tokenizer)
        rows, placed = place(self.reader, tokens, images_of(messages))
        counts = np.ones(len(tokens), dtype=np.int64)
        if placed and self.reader is not None:
            counts[np.array(tokens) == self.reader.token] = [image.rows for image in placed]
        mask = np.repeat(np.array(mask, dtype=bool), counts)
        first = int(np.argmax(mask))  # of the answer
        if late := [n for n, image in enumerate(placed) if image.row >= first]:
            raise Broken(f"image {late[0]} after the first answer begins", "images before it")
        return np.array(rows, dtype=np.int64), mask, placed

    def _check_kept(self, messages: list[Any], text: str) -> None:
        """Refuse fields of messages that would be left out without a word. Raises: Broken."""
        assert self.tokenizer is not None
        for turn, message in enumerate(messages):
            if message.get("weight", 1) != 1:
                raise Broken(
                    f"messages[{turn}] with weight {message['weight']}",
                    "none: all turns of the assistant are trained on. Write `tokens` and "
                    "`loss_mask` to leave some out",
                )
        calls = [turn for turn, message in enumerate(messages) if message.get("tool_calls")]
        plain = [{k: v for k, v in m.items() if k != "tool_calls"} for m in messages]
        if calls and render(plain, self.tokenizer, generate=False) == text:
            raise Broken(
                f"messages[{calls[0]}] with tool_calls, which the chat template leaves out",
                "content with the call as text, or a template that writes tool_calls",
            )

    def _of_tokens(
        self, record: dict[str, Any]
    ) -> tuple[np.ndarray, np.ndarray, list[UndecodedImage]]:
        if "loss_mask" not in record:
            raise Broken("tokens without loss_mask", "a loss_mask of 1 for tokens to train on")
        tokens = _whole_numbers(record, "tokens", self.vocab_size)
        mask = _whole_numbers(record, "loss_mask", 2)
        if len(tokens) != len(mask):
            raise Broken(f"{len(tokens)} tokens and {len(mask)} of loss_mask", "equal numbers")
        if self.reader is not None and self.reader.token in tokens:
            raise Broken(f"token {self.reader.token}, an image's", "images in `messages`")
        return tokens, mask.astype(bool), []


def _whole_numbers(record: dict[str, Any], name: str, end: int) -> np.ndarray:
    """[T] int64, the list that the record holds as ``name``, of numbers from 0 to below ``end``."""
    values = record[name]
    kinds = (int, bool) if name == "loss_mask" else (int,)
    if not isinstance(values, list) or not all(type(value) in kinds for value in values):
        raise Broken(f"{name} {cut(values)}", "a list of whole numbers")
    for index, value in enumerate(values):
        if not 0 <= value < end:
            rule = f"0 to {end - 1}" + (", a token of the model" if name == "tokens" else "")
            raise Broken(f"{name}[{index}] is {value}", rule)
    return np.array(values, dtype=np.int64)


def _sample(
    tokens: np.ndarray, mask: np.ndarray, truncated: bool, images: tuple[Image, ...]
) -> Sample:
    size = len(tokens)
    return Sample(
        prompt_id=0,
        index=0,
        tokens=torch.from_numpy(tokens.copy()),
        prompt_len=int(np.argmax(mask)),
        loss_mask=torch.from_numpy(mask.copy()),
        rollout_logprobs=torch.zeros(size),
        routes=None,
        layer_ids=(),
        route_mask=torch.zeros(size, dtype=torch.bool),
        weight_version=0,
        finish_reason="length" if truncated else "stop",
        reward=0.0,
        images=images,
    )


@dataclass
class Findings:
    """Facts about a share of the records, from `SftSource.check`.

    Args:
        mistakes: of the records that cannot be used
        tokens: of the others, after cutting
        loss_tokens: number of them under the loss mask
        longest: tokens of the longest of them
        truncated: number of records that were cut
    """

    mistakes: Mistakes = field(default_factory=Mistakes)
    tokens: int = 0
    loss_tokens: int = 0
    longest: int = 0
    truncated: int = 0


class SftSource:
    """The samples of every step, and those held out.

    What a step takes is a function of its number (`Epochs`), whatever the ranks; each rank encodes
    its share only.

    Args:
        records: of the run's file
        encode: makes the sample of a record
        held_out: number of records at the end of the file that are not trained on
        seed, shuffle: as in `Epochs`

    Raises: ValueError when nothing is left to train on.
    """

    def __init__(
        self,
        records: Records,
        encode: SftEncoder,
        held_out: int = 0,
        seed: int = 0,
        shuffle: bool = True,
    ):
        self.records = records
        self.encode = encode
        self.size = len(records) - held_out
        if records and self.size < 1:
            raise ValueError(
                f"data.held_out: {held_out} of {len(records)} records in {records.path}, expected "
                "fewer; none would be left to train on"
            )
        self._epochs = Epochs(self.size, seed, shuffle)

    def check(self, rank: int = 0, ranks: int = 1) -> Findings:
        """Encode every ``ranks``-th record, starting with number ``rank``, and keep nothing."""
        share = Findings()
        for number in range(rank, len(self.records), ranks):
            try:
                sample = self.encode(self.records.read(number), decode=False)
            except Broken as broken:
                share.mistakes.add(number, self.records.where(number), str(broken))
                continue
            share.tokens += sample.tokens.numel()
            share.loss_tokens += int(sample.loss_mask.sum())
            share.longest = max(share.longest, sample.tokens.numel())
            share.truncated += sample.finish_reason == "length"
        return share

    def summary(self, shares: Sequence[Findings]) -> str:
        """A line about all records.

        Args:
            shares: of all ranks

        Raises: DataError when records cannot be used, or there are none.
        """
        mistakes = Mistakes()
        for share in shares:
            mistakes.merge(share.mistakes)
        refuse(self.records.path, mistakes, len(self.records))
        tokens = sum(share.tokens for share in shares)
        trained = sum(share.loss_tokens for share in shares)
        cut = sum(share.truncated for share in shares)
        longest = max(share.longest for share in shares)
        held_out = len(self.records) - self.size
        return (
            f"{self.records.path}: {self.size:,} records, {held_out:,} more held out; {tokens:,} "
            f"tokens, {trained:,} in the loss; {longest:,} in the longest record; {cut:,} were cut"
        )

    def take(self, step: int, n: int, rank: int = 0, ranks: int = 1) -> list[Sample]:
        """Every ``ranks``-th of a step's n samples, starting with number ``rank``.

        ``prompt_id`` is the place in the stream of all steps, step * n + i.
        """
        taken = list(enumerate(self._epochs.take(step * n, n), start=step * n))
        rising = sorted(taken[rank::ranks], key=lambda each: each[1])  # as `ParquetRows` asks
        samples = [self._sample(number, place) for place, number in rising]
        return sorted(samples, key=lambda sample: sample.prompt_id)

    def held_out(self, rank: int = 0, ranks: int = 1) -> list[Sample]:
        """Every ``ranks``-th of the held-out samples; ``prompt_id`` is -1, -2, ..."""
        numbers = range(self.size, len(self.records))
        return [self._sample(n, self.size - n - 1) for n in numbers[rank::ranks]]

    def _sample(self, number: int, place: int) -> Sample:
        try:
            sample = self.encode(self.records.read(number))
        except Broken as broken:  # it was right when the run began
            raise ValueError(
                f"{self.records.where(number)}: {broken}; the file changed during the run"
            ) from None
        except DataError as error:  # an image, of which only the header was read then
            raise DataError(f"{self.records.where(number)}: {error}") from None
        return replace(sample, prompt_id=place)
