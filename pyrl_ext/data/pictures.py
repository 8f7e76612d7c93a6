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

from pyrl_ext.data.chat import check_known, render
from pyrl_ext.data.files import Broken
from pyrl_ext.data.images import ImageReader, place
from pyrl_ext.data.tasks import DRAWS, credit, draw_split
from pyrl_ext.data.tokenizer import Tokenizer
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


class Square(NamedTuple):
    """A square in a picture.

    Args:
        top, left: its corner [pixels]
        size: of its sides [pixels]
        colour: name of its colour
    """

    top: int
    left: int
    size: int
    colour: str


class Scene(NamedTuple):
    """The content of a picture, before noise.

    Args:
        answer: to the question
        ground: grey level around the squares
        squares: in any order; they do not overlap
    """

    answer: str
    ground: int
    squares: tuple[Square, ...]


def draw_scene(options: PictureOptions, draw: random.Random) -> Scene:
    """A scene at random; every answer is as likely."""
    ground = draw.randrange(70, 110)
    number = draw.randrange(options.answers)
    if options.ask == "colour":
        colour = COLOURS[number]
        return Scene(colour[0], ground, (_square(draw, colour, options.size, (0, 0)),))
    side = options.size // CELL
    corners = [(y * CELL, x * CELL) for y in range(side) for x in range(side)]
    cells = sorted(draw.sample(corners, number + 1))
    squares = tuple(_square(draw, draw.choice(COLOURS), CELL, corner) for corner in cells)
    return Scene(str(len(squares)), ground, squares)


def _square(draw: random.Random, colour: str, within: int, corner: tuple[int, int]) -> Square:
    """A square of half to all of a cell's size, somewhere in a square of ``within`` pixels."""
    size = draw.randrange(CELL // 2, CELL)
    top, left = (start + draw.randrange(within - size + 1) for start in corner)
    return Square(top, left, size, colour)


def paint(scene: Scene, size: int, noise: int) -> np.ndarray:
    """[size, size, 3] uint8, the picture of a scene; its noise follows from the scene.

    Args:
        size: width and height [pixels]
        noise: largest change of a number
    """
    picture = np.full((size, size, 3), scene.ground, np.int16)
    for top, left, side, colour in scene.squares:
        picture[top : top + side, left : left + side] = _PALETTE[colour]
    at_random = np.frombuffer(shake_256(repr(scene).encode()).digest(picture.size), np.uint8)
    picture += (at_random.reshape(picture.shape) % (2 * noise + 1)).astype(np.int16) - noise
    return picture.clip(0, 255).astype(np.uint8)


class Pictures:
    """A stream of prompts about pictures with their reward.

    Args:
        tokenizer: with a chat template that takes images
        reader: of the images
        eos_id: token that ends a response; a right answer ends with it
        seed: of the stream, and of what is held out
        options: as `data.task_options`, see `plan.task_options.PictureOptions`
        stream: name of the stream; others of the same seed have other prompts

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
        stream: str = "train",
    ):
        read = read_options(PICTURES, options or {})
        assert isinstance(read, PictureOptions)
        self.options = read
        self.tokenizer = tokenizer
        self.reader = reader
        self.eos_id = eos_id
        self.seed = seed
        self.stream = stream
        try:
            self.take(0, 1)
        except Broken as broken:  # by the tokenizer
            raise ValueError(f"task {PICTURES}: {broken}") from None

    def take(self, step: int, n: int, first: int | None = None) -> list[Prompt]:
        """See `Prompts.take`."""
        start = step * n if first is None else first
        scenes = [self._scene(f"{self.stream}/{start + i}", held_out=False) for i in range(n)]
        return [self._prompt(start + i, scene) for i, scene in enumerate(scenes)]

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
        tokens, images = place(self.reader, self._encode(text), [file.getvalue()])
        return Prompt(number, tuple(tokens), scene.answer, text, images=tuple(images))

    def _encode(self, text: str) -> list[int]:
        tokens = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        check_known(text, tokens, self.tokenizer)
        return tokens
