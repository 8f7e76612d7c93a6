"""A teacher on vLLM's servers: its log-probs of samples, over HTTP."""

from __future__ import annotations

import asyncio
import sys
from collections import deque
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import BaseModel, Field, ValidationError
from torch import Tensor

from pyrl_ext.parallel.collective_errors import agreeing
from pyrl_ext.parallel.open_files import allow_open_files
from pyrl_ext.parallel.topology import Topology
from pyrl_ext.parallel.waiting import Wait
from pyrl_ext.plan import Plan
from pyrl_ext.rollout.distribute import RolloutSamples
from pyrl_ext.rollout.remote.auth import read_key
from pyrl_ext.rollout.remote.client import Server, ServerFailed

MODELS = "/v1/models"
COMPLETIONS = "/v1/completions"
IN_FLIGHT = 64  # requests that a server has at a time, of all ranks
_MINUS_INF = -9999.0  # as vLLM writes it
_ABOVE_0 = 1e-3  # by rounding


class _Model(BaseModel):
    id: str
    max_model_len: int | None = None


class _Models(BaseModel):
    data: list[_Model]


class _Scored(BaseModel):
    logprob: float


class _Choice(BaseModel):
    prompt_logprobs: list[dict[int, _Scored] | None]


class _Completion(BaseModel):
    choices: list[_Choice] = Field(min_length=1)


@dataclass(frozen=True)
class TeacherServers:
    """The servers of a plan's teacher, each asked with the name under which it has the model."""

    plan: Plan
    key: str | None
    models: Mapping[str, str]
    """address -> name"""

    @classmethod
    def of(cls, plan: Plan, topo: Topology) -> TeacherServers | None:
        """Ask the servers for their models; None: the plan names none.

        Raises: on every rank, if a server of one does not answer, or has no model that scores the
            plan's samples; if the key cannot be read; `Stopped`.
        """
        if not plan.teacher.servers:
            return None
        with agreeing("RolloutStep.build", "models of teacher.servers", topo.world) as doing:
            key = None
            if plan.teacher.key is not None:
                key = read_key(Path(plan.resolve(plan.teacher.key)), "teacher.key")
            with Wait("the models of the teacher's servers").counted():
                models = asyncio.run(_models_of(plan, key))
            doing.append(models)
        return cls(plan, key, models)

    def logprobs(self, rollout: RolloutSamples, topo: Topology) -> list[Tensor]:
        """For each sample of this rank [T - 1] float32, of the tokens after its first one [nats].

        A server that fails gets no further request in this call.

        Raises: on every rank, if one has a wrong answer or no server left; `Stopped`.
        """
        samples = [sample.tokens.tolist() for sample in rollout.samples]
        limit = -(-IN_FLIGHT // len(np.unique(rollout.index.owners)))
        allow_open_files(limit * len(self.models))
        waiting = Wait("log-probs of the teacher's servers")
        with agreeing("teacher.servers", "samples", topo.world), waiting.counted():
            return asyncio.run(self._ask(samples, limit))

    async def _ask(self, samples: Sequence[list[int]], limit: int) -> list[Tensor]:
        found: dict[int, Tensor] = {}
        failed: dict[str, str] = {}
        waiting = deque(range(len(samples)))

        async def work(server: Server) -> None:
            """Ask one server for one sample after the other."""
            while waiting and server.address not in failed:
                number = waiting.popleft()
                try:
                    found[number] = await self._score(server, samples[number])
                except ServerFailed as error:
                    waiting.append(number)
                    if server.address not in failed:
                        failed[server.address] = str(error)
                        line = f"teacher.servers: {error}; it is not asked again in this step"
                        print(line, file=sys.stderr, flush=True)

        async with _opened(self.plan, self.key) as servers:
            while waiting:
                left = [server for server in servers if server.address not in failed]
                if not left:
                    reasons = "".join(f"\n  {reason}" for reason in failed.values())
                    raise RuntimeError(
                        f"teacher.servers: {len(waiting)} of {len(samples)} samples have no "
                        "log-probs, expected at least one server that answers. Start one again, or "
                        f"change teacher.servers, and resume. Failed servers:{reasons}"
                    )
                try:
                    async with asyncio.TaskGroup() as group:
                        for _ in range(min(limit, len(waiting))):
                            for server in left:
                                group.create_task(work(server))
                except BaseExceptionGroup as errors:
                    raise errors.exceptions[0] from None
        return [found[number] for number in range(len(samples))]

    async def _score(self, server: Server, tokens: list[int]) -> Tensor:
        body = {
            "model": self.models[server.address],
            "prompt": tokens,
            "max_tokens": 1,
            "temperature": 0,
            "prompt_logprobs": 0,  # of the tokens of the prompt alone
        }
        answer = await server.control(COMPLETIONS, body, self.plan.teacher.request_timeout)
        return logprobs_in(answer, tokens, f"teacher.servers: {server.address}{COMPLETIONS}")


def logprobs_in(answer: Mapping[str, Any], tokens: Sequence[int], where: str) -> Tensor:
    """[T - 1] float32, the log-probs of the tokens after the first one that a completion holds.

    Raises: RuntimeError that begins with ``where``, if it does not hold them.
    """
    try:
        entries = _Completion.model_validate(answer).choices[0].prompt_logprobs
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        rule = "expected choices[0].prompt_logprobs as of vLLM"
        raise RuntimeError(f"{where}: {key}: {first['msg']}, {rule}") from error
    if len(entries) != len(tokens):
        rule = f"expected {len(tokens)}, the sample"
        raise RuntimeError(f"{where}: log-probs of {len(entries)} tokens, {rule}")
    found: list[float] = []
    for place in range(1, len(tokens)):
        token = tokens[place]
        entry = entries[place] or {}
        if token not in entry:
            raise RuntimeError(
                f"{where}: token {place} of the sample has log-probs of ids {[*entry]}, expected "
                f"of {token}; the server scored other text"
            )
        value = entry[token].logprob
        if not _MINUS_INF < value <= _ABOVE_0:
            raise RuntimeError(
                f"{where}: token {place} of the sample has log-prob {value}, expected a finite "
                "number of at most 0. Start vLLM with --logprobs-mode raw_logprobs, its default"
            )
        found.append(value)
    return torch.tensor(found)


async def _models_of(plan: Plan, key: str | None) -> dict[str, str]:
    """Address -> name of the teacher there."""
    async with _opened(plan, key) as servers:
        names = await asyncio.gather(*(_ask_model(server, plan) for server in servers))
    return dict(zip(plan.teacher.servers, names, strict=True))


async def _ask_model(server: Server, plan: Plan) -> str:
    teacher = str(plan.teacher.model)
    where = f"teacher.servers: {server.address}{MODELS}"
    try:
        models = _Models.model_validate(await server.control(MODELS, method="GET")).data
    except ServerFailed as error:
        advice = f"a vLLM server should answer there. Start it with: vllm serve {teacher}"
        raise RuntimeError(f"teacher.servers: {error}; {advice}") from error
    except ValidationError as error:
        raise RuntimeError(f"{where}: no list of models, expected vLLM's server") from error
    called = [model for model in models if model.id in (teacher, plan.resolve(teacher))]
    model = next(iter(called or models), None)
    if model is None or (not called and len(models) > 1):
        names = ", ".join(model.id for model in models) or "no model"
        raise RuntimeError(
            f"{where}: {names}, expected {teacher}, the teacher.model, or one model alone. Start "
            f"it with --served-model-name {teacher}"
        )
    needed = plan.longest + 2  # a row predicts a token; one more is generated
    if model.max_model_len is not None and model.max_model_len < needed:
        raise RuntimeError(
            f"{where}: {model.id} takes {model.max_model_len:,} tokens, expected at least "
            f"{needed:,}, those of the longest sample and one more. Start it with --max-model-len "
            f"{needed}"
        )
    return model.id


@asynccontextmanager
async def _opened(plan: Plan, key: str | None) -> AsyncGenerator[list[Server]]:
    """Clients of the servers, closed in the end."""
    # each is asked in every step, and another one takes the samples of one that is not reached
    servers = [Server(address, bearer=key, patience=0.0) for address in plan.teacher.servers]
    try:
        yield servers
    finally:
        await asyncio.gather(*(server.close() for server in servers))
