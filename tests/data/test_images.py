"""Images of records: read by the model's processor, within bounds, rejected at startup."""

import base64
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image as PIL
from transformers import AutoImageProcessor, AutoTokenizer

from pyrl_ext.data import images
from pyrl_ext.data.files import Broken, DataError, open_records
from pyrl_ext.data.images import ImageReader, place
from pyrl_ext.data.prompts import PromptSource, load_prompts
from pyrl_ext.data.sft import SftEncoder, SftSource
from tests.helpers.configs import CONFIGS

pytestmark = pytest.mark.multiprocess

VL = CONFIGS / "tiny_vl"
PAD = 104
START = 105
END = 106


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(str(VL))


def noise(width: int, height: int, seed: int = 0) -> PIL.Image:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return PIL.fromarray(pixels)


def saved(picture: PIL.Image, path: Path) -> Path:
    picture.save(path)
    return path


def as_bytes(picture: PIL.Image, kind: str = "PNG") -> bytes:
    file = io.BytesIO()
    picture.save(file, kind)
    return file.getvalue()


def asked(*parts: Any, answer: str = "3") -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(parts)}], "answer": answer}


def picture(given: Any) -> dict[str, Any]:
    return {"type": "image", "image": given}


def text(given: str) -> dict[str, str]:
    return {"type": "text", "text": given}


def written(path: Path, *records: Any) -> Path:
    path.write_text("".join(json.dumps(each) + "\n" for each in records))
    return path


def load(path: Path, tokenizer: Any, most: int = 64) -> list[Any]:
    return load_prompts(
        open_records(path), tokenizer, most, reader=ImageReader(VL, path.parent, PAD)
    )


def test_load_prompts_writes_a_placeholder_for_every_row_of_an_image(
    tokenizer: Any, tmp_path: Path
):
    saved(noise(16, 8), tmp_path / "a.png")
    saved(noise(24, 16, seed=1), tmp_path / "b.png")
    path = written(
        tmp_path / "x.jsonl", asked(text("x"), picture("a.png"), picture("b.png"), text("y"))
    )
    (prompt,) = load(path, tokenizer)
    x, y = tokenizer("xy", add_special_tokens=False)["input_ids"]
    expected = [4, x, START, PAD, PAD, END, START, *[PAD] * 6, END, y, 5]
    assert list(prompt.tokens) == expected
    assert [(each.row, each.rows) for each in prompt.images] == [(3, 2), (7, 6)]
    first, second = (each.load() for each in prompt.images)
    assert (first.grid, second.grid) == ((1, 2, 4), (1, 4, 6))
    assert first.patches.shape == (8, 96) and second.patches.dtype == torch.uint8


def test_scale_gives_the_numbers_of_the_models_processor(tmp_path: Path):
    path = saved(noise(37, 61), tmp_path / "odd.png")  # resized by the processor
    reader = ImageReader(VL, tmp_path, PAD)
    _, (placed,) = place(reader, [PAD], ["odd.png"])
    image = placed.load()
    processor: Any = AutoImageProcessor.from_pretrained(str(VL), backend="pil")
    expected = processor(PIL.open(path), return_tensors="pt")
    assert expected["image_grid_thw"].tolist() == [list(image.grid)]
    torch.testing.assert_close(
        reader.scale(image.patches), expected["pixel_values"], atol=1e-6, rtol=0
    )


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "BMP", "GIF"])
def test_place_reads_bytes_of_every_format(kind: str, tmp_path: Path):
    data = as_bytes(noise(16, 16), kind)
    url = f"data:image/x;base64,{base64.b64encode(data).decode()}"
    reader = ImageReader(VL, tmp_path, PAD)
    _, placed = place(reader, [PAD] * 3, [data, {"bytes": data, "path": None}, url])
    patches = [each.load().patches for each in placed]
    assert all(torch.equal(patches[0], each) for each in patches)
    assert [each.row for each in placed] == [0, 4, 8]


def test_prompts_that_differ_in_their_images_alone_are_held_out_apart(
    tokenizer: Any, tmp_path: Path
):
    for i in range(16):
        saved(noise(8, 8, seed=i), tmp_path / f"{i}.png")
    records = [asked(picture(f"{i}.png"), text("?")) for i in range(16)]
    source = PromptSource(load(written(tmp_path / "x.jsonl", *records), tokenizer))
    assert (len(source.prompts), len(source.held_out(99))) == (14, 2)


def bomb() -> bytes:
    """A valid file of few bytes and too many pixels."""
    return as_bytes(PIL.new("1", (2**13 + 1, 2**13)))


def corrupt() -> bytes:
    """A file with a header and an end, and other bytes between them."""
    data = bytearray(as_bytes(noise(64, 64)))
    data[2000:2100] = bytes(100)
    return bytes(data)


def animated() -> bytes:
    file = io.BytesIO()
    frames = [noise(8, 8, seed=i) for i in range(2)]
    frames[0].save(file, "GIF", save_all=True, append_images=frames[1:])
    return file.getvalue()


REFUSED: list[tuple[Callable[[], Any], str]] = [
    (lambda: "gone.png", "gone.png: no such file, expected an image file"),
    (lambda: ".", "no such file, expected an image file"),
    (lambda: "", "'', expected a path, bytes, or data:image"),
    (lambda: None, "None, expected a path, bytes"),
    (lambda: 7, "7, expected a path, bytes"),
    (lambda: "https://x.org/a.png", "nothing is fetched"),
    (lambda: "data:image/png;base64,???", "expected a path, bytes"),
    (lambda: b"", "expected an image (PNG, JPEG, WEBP, BMP, GIF)"),
    (lambda: b"not an image", "expected an image (PNG, JPEG, WEBP, BMP, GIF)"),
    (lambda: as_bytes(noise(8, 8), "TIFF"), "expected an image (PNG, JPEG, WEBP, BMP, GIF)"),
    (lambda: as_bytes(noise(2, 402)), "2 x 402 pixels"),
    (animated, "2 frames, expected an image of one"),
    (bomb, "8193 x 8192 pixels, expected at most 67,108,864 pixels"),
]


@pytest.mark.parametrize(("given", "message"), REFUSED, ids=[m[:20] for _, m in REFUSED])
def test_place_refuses(given: Callable[[], Any], message: str, tmp_path: Path):
    with pytest.raises(Broken) as raised:
        place(ImageReader(VL, tmp_path, PAD), [PAD], [given()])
    assert "image 0: " in str(raised.value) and message in str(raised.value)


@pytest.mark.parametrize("kind", images.FORMATS)
@pytest.mark.parametrize("as_file", [True, False])
def test_place_refuses_a_file_that_is_cut_off_behind_its_header(
    kind: str, as_file: bool, tmp_path: Path
):
    """One that has more behind its end is taken."""
    whole = as_bytes(noise(64, 64), kind)

    def rows_of(data: bytes) -> int:
        (tmp_path / "a").write_bytes(data)
        given = ["a" if as_file else data]
        return place(ImageReader(VL, tmp_path, PAD), [PAD], given)[1][0].rows

    for end in (len(whole) // 2, len(whole) - 200):
        with pytest.raises(Broken, match=r"image 0: .*, expected an image"):
            rows_of(whole[:end])
    for data in (whole, whole + bytes(3), whole + b"more"):
        assert rows_of(data) == 64


def test_place_refuses_a_file_that_is_too_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(images, "MAX_BYTES", 100)
    saved(noise(16, 16), tmp_path / "a.png")
    with pytest.raises(Broken, match=r"bytes, expected at most 100"):
        place(ImageReader(VL, tmp_path, PAD), [PAD], ["a.png"])


def test_load_names_the_file_that_is_corrupt_or_has_changed(tmp_path: Path):
    reader = ImageReader(VL, tmp_path, PAD)
    (tmp_path / "bad.png").write_bytes(corrupt())
    saved(noise(8, 8), tmp_path / "other.png")
    _, (broken, changed) = place(reader, [PAD, PAD], ["bad.png", "other.png"])
    with pytest.raises(DataError, match=r"image .*bad\.png: .*, expected an image that can be"):
        broken.load()
    saved(noise(16, 16), tmp_path / "other.png")
    with pytest.raises(DataError, match=r"other\.png: 4 rows now, expected 1, as when"):
        changed.load()


def test_load_names_the_record_of_a_picture_that_cannot_be_decoded(tokenizer: Any, tmp_path: Path):
    (tmp_path / "bad.png").write_bytes(corrupt())
    url = f"data:image/png;base64,{base64.b64encode(corrupt()).decode()}"
    records = asked(picture("bad.png")), asked(picture(url))
    of_file, of_bytes = load(written(tmp_path / "x.jsonl", *records), tokenizer, most=99)
    with pytest.raises(
        DataError, match=r"x\.jsonl:1: image .*bad\.png: .*expected an image that can"
    ):
        of_file.images[0].load()
    with pytest.raises(
        DataError, match=r"x\.jsonl:2: image of bytes: .*expected an image that can"
    ):
        of_bytes.images[0].load()


def test_load_prompts_names_the_record_and_the_image(tokenizer: Any, tmp_path: Path):
    good = saved(noise(8, 8), tmp_path / "a.png").name
    path = written(
        tmp_path / "x.jsonl",
        asked(picture(good)),
        asked(picture(good), picture("gone.png")),
        asked(picture(good), text("<|image_pad|>")),
        asked({"type": "video", "video": "x"}),
        asked(),
    )
    with pytest.raises(DataError) as raised:
        load(path, tokenizer)
    found = str(raised.value)
    assert "4 of 5 records cannot be used" in found
    assert "x.jsonl:2: image 1: " in found and "gone.png: no such file" in found
    assert "x.jsonl:3: 2 image placeholders (token 104) for 1 images" in found
    assert "x.jsonl:4: messages[0]" in found and "x.jsonl:5: messages[0]" in found
    written(path, asked(picture(good)))
    with pytest.raises(DataError, match="1 images in messages, expected text; the model has no"):
        load_prompts(open_records(path), tokenizer, 64)
    with pytest.raises(DataError, match=r"5 tokens in .*, expected 1 to max_prompt_tokens 4"):
        load(path, tokenizer, most=4)


def conversation(*turns: Any) -> dict[str, Any]:
    """The user's turns and the assistant's answers, in turn."""
    roles = ("user", "assistant") * len(turns)
    return {"messages": [{"role": r, "content": c} for r, c in zip(roles, turns)]}


def test_encoder_gives_images_a_row_each_and_trains_on_answers_alone(
    tokenizer: Any, tmp_path: Path
):
    saved(noise(16, 8), tmp_path / "a.png")
    saved(noise(24, 16, seed=1), tmp_path / "b.png")
    encode = SftEncoder(tokenizer, 128, 64, reader=ImageReader(VL, tmp_path, PAD))
    record = conversation([text("x"), picture("a.png"), picture("b.png")], "3", "y", "12")
    sample = encode(record).check()
    one, two, three, x, y = tokenizer("123xy", add_special_tokens=False)["input_ids"]
    user = 4
    answer = 5
    eos = tokenizer.eos_token_id
    images = [START, PAD, PAD, END, START, *[PAD] * 6, END]
    start = [user, x, *images, answer]
    assert sample.tokens.tolist() == [*start, three, eos, user, y, answer, one, two, eos]
    trained = sample.loss_mask.nonzero()[:, 0].tolist()
    assert trained == [len(start) + n for n in (0, 1, 5, 6, 7)]
    reader = ImageReader(VL, tmp_path, PAD)
    for image, name, row in zip(sample.images, ("a.png", "b.png"), (3, 7), strict=True):
        assert image.row == row
        assert torch.equal(image.patches, reader.patches(tmp_path / name)[1])
    assert encode(record, decode=False).images == ()
    assert torch.equal(encode(record, decode=False).tokens, sample.tokens)


def test_encoder_refuses_images_that_it_cannot_place(tokenizer: Any, tmp_path: Path):
    saved(noise(16, 8), tmp_path / "a.png")
    reader = ImageReader(VL, tmp_path, PAD)
    record = conversation([picture("a.png")], "3")
    with pytest.raises(Broken, match="1 images in messages, expected text; the model has no image"):
        SftEncoder(tokenizer, 128, 64)(record)
    encode = SftEncoder(tokenizer, 128, 64, reader=reader)
    late = conversation("x", "3", [picture("a.png")], "4")
    with pytest.raises(Broken, match="image 0 after the first answer begins, expected images bef"):
        encode(late)
    with pytest.raises(Broken, match="image 0 after the first answer begins"):
        encode(conversation("x", [picture("a.png")]))
    with pytest.raises(Broken, match=r"gone\.png: no such file"):
        encode(conversation([picture("gone.png")], "3"))
    with pytest.raises(Broken, match="token 104, an image's, expected images in `messages`"):
        encode({"tokens": [START, PAD, END, 9], "loss_mask": [0, 0, 0, 1]})


def test_sft_source_names_the_record_of_an_image_that_changed(tokenizer: Any, tmp_path: Path):
    file = saved(noise(16, 8), tmp_path / "a.png")
    path = written(tmp_path / "x.jsonl", conversation([picture("a.png")], "3"))
    source = SftSource(
        open_records(path), SftEncoder(tokenizer, 128, 64, reader=ImageReader(VL, tmp_path, PAD))
    )
    assert source.check().tokens == 8
    data = bytearray(file.read_bytes())
    data[100:140] = bytes(40)
    file.write_bytes(data)
    with pytest.raises(DataError, match=r"x\.jsonl:1: image .*a\.png: "):
        source.take(0, 1)


def test_image_reader_refuses_a_folder_without_a_processor(tmp_path: Path):
    with pytest.raises(DataError, match=r"expected a preprocessor_config\.json whose processor"):
        ImageReader(tmp_path, tmp_path, PAD)
