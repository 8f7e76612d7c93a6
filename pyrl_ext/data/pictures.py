"""The built-in task over images: pictures drawn from a seed, and a question that they answer.

A picture is a pure function of the seed and the prompt's number. It is written as a PNG file and
read as any image of a prompt is.
"""

from __future__ import annotations

import io
import random
from collections.abc import Mapping
from functools import partial
from hashlib import shake_256
from typing import Any, NamedTuple

import numpy as np
from PIL import Image as PIL

from pyrl_ext.data.chat import Tokenizer, check_known, render
from pyrl_ext.data.files import Broken
from pyrl_ext.data.images import ImageReader
from pyrl_ext.data.tasks import DRAWS, credit, draw_split
from pyrl_ext.plan.task_options import CELL, COLOURS, PICTURES, PictureOptions, read_options
from pyrl_ext.samples import Prompt

_PALETTE = {
    "red": (220, 40, 40),
    "green": (40, 200, 40),
    "blue": (50, 70, 230),
    "yellow": (220, 210, 40),
    "cyan": (40, 210, 210),
    "magenta": (210, 50, 210),
    "white": (240, 240, 240),
}
# 5 rows of 3
_DIGITS = (
    "111101101101111",
    "010110010010111",
    "111001111100111",
    "111001111001111",
    "101101111001001",
    "111100111001111",
    "111100111101111",
    "111001010010010",
    "111101111101111",
    "111101111001111",
)
_SCALE = 2  # pixels of a digit's dot


class Mark(NamedTuple):
    """A square or a digit in a picture.

    Args:
        top, left: its corner [pixels]
        shape: its rows, a 1 for each pixel that is painted
        colour: name of its colour
    """

    top: int
    left: int
    shape: tuple[str, ...]
    colour: str


class Scene(NamedTuple):
    """The content of a picture, before noise.

    Args:
        answer: to the question
        ground: grey level around the marks
        marks: in any order; they do not overlap
    """

    answer: str
    ground: int
    marks: tuple[Mark, ...]


def draw_scene(options: PictureOptions, draw: random.Random) -> Scene:
    """A scene at random; every answer is as likely."""
    ground = draw.randrange(70, 110)
    number = draw.randrange(options.answers)
    if options.ask == "colour":
        colour = COLOURS[number]
        mark = _square(draw, colour, options.size, (0, 0))
        return Scene(colour[0], ground, (mark,))
    if options.ask == "digit":
        shape = _digit(number)
        top = draw.randrange(options.size - len(shape) + 1)
        left = draw.randrange(options.size - len(shape[0]) + 1)
        return Scene(str(number), ground, (Mark(top, left, shape, draw.choice(COLOURS)),))
    side = options.size // CELL
    cells = draw.sample(
        [(y * CELL, x * CELL) for y in range(side) for x in range(side)], number + 1
    )
    marks = tuple(_square(draw, draw.choice(COLOURS), CELL, corner) for corner in sorted(cells))
    return Scene(str(len(marks)), ground, marks)


def _square(draw: random.Random, colour: str, within: int, corner: tuple[int, int]) -> Mark:
    """A square of half to all of a cell's size, somewhere in a square of ``within`` pixels."""
    size = draw.randrange(CELL // 2, CELL)
    top, left = (start + draw.randrange(within - size + 1) for start in corner)
    return Mark(top, left, ("1" * size,) * size, colour)


def _digit(number: int) -> tuple[str, ...]:
    rows = [_DIGITS[number][at : at + 3] for at in range(0, 15, 3)]
    return tuple("".join(dot * _SCALE for dot in row) for row in rows for _ in range(_SCALE))


def paint(scene: Scene, size: int, noise: int) -> np.ndarray:
    """[size, size, 3] uint8, the picture of a scene; its noise follows from the scene.

    Args:
        size: width and height [pixels]
        noise: largest change of a number
    """
    picture = np.full((size, size, 3), scene.ground, np.int16)
    for top, left, shape, colour in scene.marks:
        where = np.array([[dot == "1" for dot in row] for row in shape])
        picture[top : top + len(where), left : left + where.shape[1]][where] = _PALETTE[colour]
    at_random = np.frombuffer(shake_256(repr(scene).encode()).digest(picture.size), np.uint8)
    picture += (at_random.reshape(picture.shape) % (2 * noise + 1)).astype(np.int16) - noise
    return picture.clip(0, 255).astype(np.uint8)


class Pictures:
    """A stream of prompts about pictures with their reward.

    Args:
        tokenizer: with a chat template that takes images
        reader: of the images
        eos_id: token that ends a response; a right answer ends with it
        seed: of the stream
        options: as `data.task_options`, see `plan.task_options.PictureOptions`

    Raises:
        ValueError: unknown option, a value of a wrong type or outside its range, or a tokenizer
            that cannot write the prompts
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        reader: ImageReader,
        eos_id: int,
        seed: int = 0,
        options: Mapping[str, Any] | None = None,
    ):
        found = read_options(PICTURES, options or {})
        assert isinstance(found, PictureOptions)
        self.options = found
        self.tokenizer = tokenizer
        self.reader = reader
        self.eos_id = eos_id
        self.seed = seed
        try:
            self.take(0, 1)
        except Broken as broken:  # by the tokenizer
            raise ValueError(f"task {PICTURES}: {broken}") from None

    def take(self, step: int, n: int) -> list[Prompt]:
        """The n prompts of a training step: numbers step * n and on of the stream."""
        numbers = range(step * n, (step + 1) * n)
        return [self._prompt(i, self._scene(f"train/{i}", held_out=False)) for i in numbers]

    def held_out(self, n: int) -> list[Prompt]:
        """The first n prompts (ids -1, -2, ...) with distinct pictures that `take` never returns.

        Raises:
            ValueError: the task does not have that many
        """
        scenes: dict[Scene, None] = {}
        for number in range(50 * n + 1000):
            if len(scenes) == n:
                break
            scenes[self._scene(f"held-out/{number}", held_out=True)] = None
        if len(scenes) < n:
            raise ValueError(
                f"task {PICTURES}: {len(scenes)} held-out pictures, expected {n}; take larger "
                "pictures or fewer evaluation prompts"
            )
        return [self._prompt(-1 - i, scene) for i, scene in enumerate(scenes)]

    def reward(self, prompt: Prompt, text: str, tokens: list[int]) -> float:
        """`credit` of the answer and the end token, so a right answer that does not stop earns less
        than 1."""
        return credit([*self._encode(prompt.answer), self.eos_id], tokens)

    def _scene(self, name: str, held_out: bool) -> Scene:
        draw = partial(draw_scene, self.options, random.Random(f"{self.seed}/{name}"))
        scene = draw_split(draw, self.seed, self.options.held_out, held_out)
        if scene is not None:
            return scene
        kind = "held-out" if held_out else "training"
        raise ValueError(
            f"task {PICTURES}: no {kind} picture among {DRAWS} draws with held_out "
            f"{self.options.held_out}, expected some; take a smaller number"
        )

    def _prompt(self, number: int, scene: Scene) -> Prompt:
        file = io.BytesIO()
        PIL.fromarray(paint(scene, self.options.size, self.options.noise)).save(file, "PNG")
        parts = [
            {"type": "image", "image": file.getvalue()},
            {"type": "text", "text": f"{self.options.ask}?"},
        ]
        text = render([{"role": "user", "content": parts}], self.tokenizer, generate=True)
        tokens, images = self.reader.place(self._encode(text), [file.getvalue()])
        return Prompt(number, tuple(tokens), scene.answer, text, images=tuple(images))

    def _encode(self, text: str) -> list[int]:
        tokens = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        check_known(text, tokens, self.tokenizer)
        return tokens
