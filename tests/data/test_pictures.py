"""The task over images: what its pictures show, its streams of prompts and its credit."""

import random
from typing import Any

import numpy as np
import pytest
import torch

from pyrl_ext.data.images import ImageReader
from pyrl_ext.data.pictures import COLOURS, Pictures, Scene, draw_scene, paint
from pyrl_ext.data.tokenizer import load_tokenizer
from pyrl_ext.plan.task_options import PictureOptions
from tests.helpers.configs import CONFIGS

VL = CONFIGS / "tiny_vl"
PAD = 104
START = 105
END = 106
USER = 4
ASSISTANT = 5
EOS = 1
ASKED = [("colour", 7), ("count", 4)]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load_tokenizer(VL)


def task(tokenizer: Any, seed: int = 0, **options: Any) -> Pictures:
    return Pictures(tokenizer, ImageReader(VL, ".", PAD), EOS, seed, options)


def scenes(ask: Any, answers: int, count: int = 300, **options: Any) -> list[Scene]:
    draw = random.Random(3)
    found = PictureOptions(ask=ask, answers=answers, **options)
    return [draw_scene(found, draw) for _ in range(count)]


def seen(scene: Scene, size: int = 16) -> list[tuple[str, int]]:
    """(colour, pixels) of the marks, read off the picture by walks over touching pixels."""
    picture = paint(scene, size, 0)
    colour = np.ptp(picture.astype(int), axis=-1) > 0
    colour |= picture[..., 0] > 200  # white
    found = []
    left = {(int(y), int(x)) for y, x in np.argwhere(colour)}
    while left:
        todo = [left.pop()]
        part = []
        while todo:
            y, x = todo.pop()
            part.append((y, x))
            near = {(y + 1, x), (y - 1, x), (y, x + 1), (y, x - 1)} & left
            near = {at for at in near if (picture[at] == picture[y, x]).all()}
            left -= near
            todo += near
        red, green, blue = (int(value) > 128 for value in picture[part[0]])
        names = {(1, 0, 0): "red", (0, 1, 0): "green", (0, 0, 1): "blue", (1, 1, 0): "yellow"}
        names |= {(0, 1, 1): "cyan", (1, 0, 1): "magenta", (1, 1, 1): "white"}
        found.append((names[red, green, blue], len(part)))
    return found


def test_a_picture_of_a_colour_shows_one_square_of_it():
    for scene in scenes("colour", 7):
        ((colour, pixels),) = seen(scene)
        assert colour[0] == scene.answer and pixels in (16, 25, 36, 49)
    assert {scene.answer for scene in scenes("colour", 3)} == {"r", "g", "b"}


@pytest.mark.parametrize(("size", "answers"), [(16, 4), (24, 9)])
def test_a_picture_to_count_shows_as_many_squares(size: int, answers: int):
    drawn = scenes("count", answers, size=size)
    # two squares of a colour may touch and be seen as one, never by more pixels than both have
    assert sum(len(seen(scene, size)) == int(scene.answer) for scene in drawn) > 0.8 * len(drawn)
    assert all(len(seen(scene, size)) <= int(scene.answer) == len(scene.squares) for scene in drawn)
    assert {int(scene.answer) for scene in drawn} == set(range(1, answers + 1))


@pytest.mark.parametrize(("ask", "answers"), ASKED)
def test_draw_scene_makes_every_answer_as_likely_and_moves_the_marks(ask: str, answers: int):
    drawn = scenes(ask, answers, count=4000)
    _, counts = np.unique([scene.answer for scene in drawn], return_counts=True)
    assert len(counts) == answers and counts.min() > 0.75 * 4000 / answers
    assert len({scene.squares[0][:2] for scene in drawn}) > 40
    assert len({scene.squares[0].colour for scene in drawn}) == len(COLOURS)


def test_paint_adds_noise_that_follows_from_the_scene():
    one, other = scenes("colour", 7, count=2)
    clean = paint(one, 16, 0).astype(int)
    noisy = paint(one, 16, 20).astype(int)
    assert np.array_equal(noisy, paint(one, 16, 20)) and clean.shape == (16, 16, 3)
    change = noisy - clean
    assert change.min() == -20 and change.max() == 20 and abs(change.mean()) < 1.5
    assert not np.array_equal(change, paint(other, 16, 20) - paint(other, 16, 0).astype(int))


@pytest.mark.parametrize(("ask", "answers"), ASKED)
def test_take_asks_about_the_picture_that_the_model_gets(ask: str, answers: int, tokenizer: Any):
    made = task(tokenizer, ask=ask, answers=answers, noise=0)
    for prompt in made.take(2, 3):
        question = tokenizer(f"{ask}?", add_special_tokens=False)["input_ids"]
        rows = [START, PAD, PAD, PAD, PAD, END]
        assert list(prompt.tokens) == [USER, *rows, *question, ASSISTANT]
        (placed,) = prompt.images
        image = placed.load()
        assert (image.row, image.rows, image.grid) == (2, 4, (1, 4, 4))
        # patches of 4 x 4 pixels, four of them a row of the language model
        patches = image.patches.view(2, 2, 2, 2, 3, 2, 4, 4)[:, :, :, :, :, 0]
        pixels = patches.permute(0, 2, 5, 1, 3, 6, 4).reshape(16, 16, 3).numpy()
        scene = made._scene(f"train/{prompt.id}", held_out=False)
        assert np.array_equal(pixels, paint(scene, 16, 0)) and scene.answer == prompt.answer


@pytest.mark.parametrize(("ask", "answers"), ASKED)
def test_reward_of_a_right_answer_is_one(ask: str, answers: int, tokenizer: Any):
    made = task(tokenizer, ask=ask, answers=answers)
    for prompt in made.take(1, 2):
        (right,) = tokenizer(prompt.answer, add_special_tokens=False)["input_ids"]
        assert made.reward(prompt, "", [right, EOS]) == 1
        assert made.reward(prompt, "", [right, 9]) == made.reward(prompt, "", [9, EOS]) == 0.5
        assert made.reward(prompt, "", [EOS]) == made.reward(prompt, "", [right]) == 0.5
        assert made.reward(prompt, "", [9, 9]) == 0


def patches_of(prompts: list[Any]) -> list[bytes]:
    return [prompt.images[0].load().patches.numpy().tobytes() for prompt in prompts]


def test_take_is_a_function_of_seed_and_place(tokenizer: Any):
    first = task(tokenizer).take(3, 4)
    assert [p.id for p in first] == [12, 13, 14, 15] and len(set(patches_of(first))) == 4
    again = task(tokenizer).take(1, 12)[:4]  # the same places, in steps of another size
    assert [p.id for p in again] == [p.id for p in first]
    assert patches_of(again) == patches_of(first)
    assert [p.answer for p in again] == [p.answer for p in first]
    assert patches_of(task(tokenizer, seed=1).take(3, 4)) != patches_of(first)


def test_held_out_pictures_are_distinct_and_never_taken(tokenizer: Any):
    made = task(tokenizer, ask="colour", held_out=2)
    held = made.held_out(40)
    assert [p.id for p in held] == list(range(-1, -41, -1)) and len(set(patches_of(held))) == 40
    assert patches_of(made.held_out(5)) == patches_of(held)[:5]
    out = [made._scene(f"held-out/{i}", held_out=True) for i in range(2000)]
    taken = [made._scene(f"train/{i}", held_out=False) for i in range(2000)]
    assert len(set(taken)) > 1500 and not set(out) & set(taken)


def test_pictures_refuse_what_cannot_be_asked(tokenizer: Any):
    with pytest.raises(ValueError, match=r"data\.task_options\.answers: 8, expected at most 7"):
        task(tokenizer, answers=8)
    with pytest.raises(ValueError, match="no held-out picture among 10000 draws with held_out 10"):
        task(tokenizer, held_out=10**12).held_out(1)
    with pytest.raises(
        ValueError, match=r"task pictures: chat template: .*expected messages it can"
    ):
        task(load_tokenizer(CONFIGS / "tiny"))


def test_scale_of_the_processor_keeps_the_picture(tokenizer: Any):
    """The model sees the drawn numbers: -1 for 0, 1 for 255."""
    made = task(tokenizer)
    (placed,) = made.take(0, 1)[0].images
    patches = placed.load().patches
    expected = patches.float() / 127.5 - 1
    torch.testing.assert_close(made.reader.scale(patches), expected, atol=1e-6, rtol=0)
