"""Arguments of log-probs: what is wrong is named by its token."""

import pytest
import torch

from pyrl_ext.loss.arguments import check_targets, check_valid_vocab, logit_scale


def test_check_targets_names_an_entry_by_its_token():
    targets = torch.tensor([1, 9, 2, 7])
    order = torch.tensor([3, 0])
    assert check_targets("f", targets, 8, order).tolist() == [7, 1]
    with pytest.raises(ValueError, match=r"f: targets\[1\] is 9, expected one in \[0, 8\)"):
        check_targets("f", targets, 8)
    with pytest.raises(ValueError, match=r"f: temperature\[3\] is -1.0, expected one in the pos"):
        logit_scale("f", torch.tensor([1.0, 1, 1, -1]), targets, torch.float32, order)
    assert logit_scale("f", 2.0, targets, torch.float32, order).tolist() == [0.5, 0.5]
    assert check_valid_vocab("f", None, 4, 2) == 8
    with pytest.raises(ValueError, match=r"f: valid_vocab is 9, expected one in \[1, 8\], the col"):
        check_valid_vocab("f", 9, 4, 2)
