"""Servers whose routes are wrong, which the canary has to find."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from pyrl_ext.rollout.hf.engine import HFEngine
from pyrl_ext.rollout.remote.embedded import EmbeddedServer
from pyrl_ext.rollout.remote.embedded_worker import Job, Worker
from pyrl_ext.rollout.remote.protocol import Answer, Request


class StaleRoutes(Worker):
    """Rows of routes are those of the weights that first saw the context; keys and values are
    right."""

    def __init__(self, engine: HFEngine, max_tokens: int):
        super().__init__(engine, max_tokens)
        self.first_rows: dict[tuple[int, ...], np.ndarray] = {}

    def add(
        self, request: Request, loop: asyncio.AbstractEventLoop, is_trainers: bool = True
    ) -> Job:
        job = super().add(request, loop, is_trainers)
        finish = job.finish

        def with_first_rows(answer: Answer | Exception) -> None:
            if isinstance(answer, Answer) and answer.routes is not None:
                count = len(request.token_ids)
                rows = self.first_rows.setdefault(request.token_ids, answer.routes[:count])
                answer = replace(answer, routes=np.concatenate([rows, answer.routes[count:]]))
            finish(answer)

        job.finish = with_first_rows  # type: ignore[method-assign]
        return job


class NoSuchExpert(Worker):
    """Routes name an expert that the model has not."""

    def add(
        self, request: Request, loop: asyncio.AbstractEventLoop, is_trainers: bool = True
    ) -> Job:
        job = super().add(request, loop, is_trainers)
        finish = job.finish

        def with_another(answer: Answer | Exception) -> None:
            if isinstance(answer, Answer) and answer.routes is not None:
                answer = replace(answer, routes=np.full_like(answer.routes, 200))
            finish(answer)

        job.finish = with_another  # type: ignore[method-assign]
        return job


def server_of(kind: type[Worker]) -> Callable[[HFEngine, int], EmbeddedServer]:
    """A server with this worker."""

    def build(engine: HFEngine, max_tokens: int) -> EmbeddedServer:
        server = EmbeddedServer(engine, max_tokens)
        server.worker = kind(engine, max_tokens)
        return server

    return build
