"""Published tensors of models with a tower, in the places where transformers puts them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForImageTextToText

from pyrl_ext.models.hf_folder import SafetensorsFolder
from pyrl_ext.ops.digest import digest
from pyrl_ext.rollout.hf.engine import HFEngine
from tests.helpers.vision import KIMI_VL, QWEN_VL, write_model

pytestmark = pytest.mark.multiprocess


@pytest.mark.parametrize("hf", [KIMI_VL, QWEN_VL], ids=["kimi", "qwen"])
def test_fill_puts_published_tensors_where_transformers_does(tmp_path: Path, hf: dict[str, Any]):
    write_model(tmp_path, hf)
    read = SafetensorsFolder(tmp_path, hf["text_config"]["hidden_size"])
    named = {name: read(name)[:].contiguous() for name in sorted(read.names)}
    engine = HFEngine(hf)
    engine.load_weights(named.items(), version=0)
    theirs: Any = AutoModelForImageTextToText.from_pretrained(tmp_path, dtype=torch.float32)
    ours = engine.model.state_dict()
    want = theirs.state_dict()
    assert ours.keys() == want.keys()
    assert not [name for name, tensor in want.items() if not torch.equal(ours[name], tensor)]
    assert engine.checksums() == {name: digest(tensor) for name, tensor in named.items()}

    wrong = {
        n: t[:-1] if "merger.norm.bias" in n or "wqkv.bias" in n else t for n, t in named.items()
    }
    with pytest.raises(ValueError, match=r"(norm|wqkv)\.bias: shape \[\d+\], expected \[\d+\]"):
        engine.load_weights(wrong.items(), version=1)
    named["model.visual.extra" if "qwen" in hf["model_type"] else "vision_tower.extra"] = (
        torch.ones(1)
    )
    with pytest.raises(ValueError, match="extra: unknown name"):
        engine.load_weights(named.items(), version=1)
