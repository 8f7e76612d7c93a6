"""Samples and sampling that break their rules are refused."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest
import torch

from pyrl_ext.samples import Sample, Sampling, route_dtype


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_new_tokens", 0),
        ("temperature", 0.0),
        ("temperature", float("nan")),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_k", -1),
        ("samples_per_prompt", 0),
        ("stop", ("ab", "")),
    ],
)
def test_Sampling_refuses_values_out_of_range(field: str, value: Any):
    with pytest.raises(ValueError, match=re.escape(f"Sampling.{field}: {value}")):
        Sampling(**{"max_new_tokens": 4, field: value})


def test_route_dtype_is_the_narrowest_that_holds_every_expert():
    assert route_dtype(256) == torch.uint8
    assert route_dtype(257) == torch.uint16
    with pytest.raises(ValueError, match="65537 experts, expected 0 to 65536"):
        route_dtype(65537)


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def kept(counts: tuple[int, ...], ids: tuple[int, ...]) -> dict[str, torch.Tensor]:
    return {"kept_counts": int32(*counts), "kept_ids": int32(*ids)}


def versions(*spans: tuple[int, int, int]) -> dict[str, Any]:
    return {"version_spans": spans}


def sample() -> Sample:
    return Sample(
        prompt_id=7,
        index=2,
        tokens=torch.tensor([5, 6, 7, 1]),
        prompt_len=2,
        loss_mask=torch.tensor([False, False, True, True]),
        rollout_logprobs=torch.tensor([0.0, 0.0, -1.0, -2.0]),
        routes=torch.zeros(4, 2, 2, dtype=torch.uint8),
        layer_ids=(1, 3),
        route_mask=torch.tensor([True, True, True, False]),
        weight_version=0,
        finish_reason="stop",
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompt_len": 4}, "prompt_len 4 of 4 tokens"),
        ({"prompt_len": 0}, "prompt_len 0 of 4 tokens"),
        ({"tokens": torch.tensor([5.0, 6, 7, 1])}, r"tokens \[4\] torch\.float32"),
        ({"loss_mask": torch.ones(3, dtype=torch.bool)}, r"loss_mask \[3\]"),
        ({"loss_mask": torch.ones(4, dtype=torch.bool)}, "token 0 has loss_mask True"),
        ({"rollout_logprobs": torch.tensor([0, 0, -1, float("nan")])}, "token 3 has log-prob nan"),
        ({"rollout_logprobs": torch.tensor([0, 0, 0.5, -1.0])}, "token 2 has log-prob 0.5"),
        ({"rollout_logprobs": torch.tensor([0, -3.0, -1, -1.0])}, "token 1 has log-prob -3.0"),
        ({"routes": torch.zeros(4, 2, 2)}, r"routes torch\.float32"),
        ({"routes": torch.zeros(3, 2, 2, dtype=torch.uint8)}, r"routes \[3, 2, 2\]"),
        ({"routes": None}, "routes None"),
        ({"layer_ids": (3, 1)}, r"layer_ids \(3, 1\)"),
        ({"route_mask": torch.ones(4, dtype=torch.bool)}, "route_mask True at token 3"),
        ({"finish_reason": "eos"}, "finish_reason 'eos'"),
        ({"kept_ids": int32(7)}, "kept_counts or kept_ids alone"),
        ({"kept_counts": int32(-1, -1, 1, 1), "kept_ids": torch.tensor([7, 1])}, "kept_ids"),
        (kept((-1, 1, 1), (7, 1)), r"kept_counts \[3\]"),
        (kept((-1, -1, 1, 0), (7,)), "token 3 has kept_counts 0"),
        (kept((-1, -1, 1, -2), (7,)), "token 3 has kept_counts -2"),
        (kept((-1, 1, 1, 1), (6, 7, 1)), "token 1 has kept_counts 1, expected -1, a prompt"),
        (kept((-1, -1, 1, -1), (7,)), "token 3 has kept_counts -1, expected a set where"),
        (kept((-1, -1, 2, 1), (7, 9)), "2 kept_ids, expected 3"),
        (kept((-1, -1, 2, 2), (7, 9, -1, 1)), r"token 3 was drawn from \[-1, 1\]"),
        (kept((-1, -1, 2, 2), (9, 7, 0, 1)), r"token 2 was drawn from \[9, 7\], expected rising"),
        (kept((-1, -1, 2, 2), (7, 7, 0, 1)), r"token 2 was drawn from \[7, 7\], expected rising"),
        (kept((-1, -1, 2, 2), (7, 9, 2, 3)), "token 3 has token id 1, expected one of the kept"),
        (versions((2, 3, 0)), "token 3 has a version False, expected one where a token was"),
        (versions((1, 4, 0)), "token 1 has a version True"),
        (versions((2, 3, 0), (2, 4, 1)), "version 1 of tokens 2 to 3, expected .* from 3 on, of 4"),
        (versions((2, 3, 0), (3, 5, 1)), "version 1 of tokens 3 to 4, expected .* of 4"),
        (versions((2, 2, 0), (2, 4, 1)), "version 0 of tokens 2 to 1"),
        (versions((2, 3, 1), (3, 4, 0)), "version 1 of tokens 2 to 2, expected weight_version"),
        (versions((2, 3, 0), (3, 4, -1)), "version -1 of .*, expected .* none lower than before"),
        (versions((2, 3, 0), (3, 4, 1)) | {"spans": ((2, 3),)}, "token 3 has loss_mask True"),
    ],
)
def test_check_names_the_prompt_and_the_field(change: dict[str, Any], message: str):
    assert sample().check().response == [7, 1]
    sets = kept((-1, -1, 3, 2), (2, 7, 9, 0, 1))
    assert dataclasses.replace(sample(), **sets).check().response == [7, 1]
    both = versions((2, 3, 0), (3, 4, 5))
    assert dataclasses.replace(sample(), **both).check().versions.tolist() == [0, 0, 0, 5]
    assert sample().versions.tolist() == [0] * 4
    with pytest.raises(ValueError, match=rf"prompt 7, sample 2\): {message}"):
        dataclasses.replace(sample(), **change).check()
