"""The canary: a fixed context that every server scores after each publish, to prove it fresh.

Keys and values, or routes, of earlier weights in a server's cache change its samples without any
error. So each server is asked for the same few tokens twice under the salt of rollouts; the second
answer has to come from the cache, and its count of cached tokens says so. It is compared with an
answer that nothing cached is read for, and, by the trainer, with its own forward. Log-probs show
old keys and values; routed rows show old routes, which may lie beside right keys and values.
"""

from __future__ import annotations

import random
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch

from pyrl_ext.plan import Plan
from pyrl_ext.rollout.engine import ScoreCanaries
from pyrl_ext.rollout.remote.client import Server, ServerFailed
from pyrl_ext.rollout.remote.model import Model
from pyrl_ext.rollout.remote.protocol import Answer, Partial, ProtocolError, Request
from pyrl_ext.samples import Sample, route_dtype

# tokens: two blocks of 128, vLLM's largest; and for an engine without blocks
LONG = 264
SHORT = 40
NEW = 2  # tokens that are sampled
TOP = 8  # most likely tokens that are compared next to each sampled one
TAIL = 8  # tokens at the context's end that need not be cached
NAME = 2**62  # of the canary's random stream: no prompt has this id


class Seen(NamedTuple):
    """The answers of one server.

    Args:
        through: what came through the cache
        around: the same without it
    """

    through: Answer
    around: Answer


@dataclass(frozen=True, slots=True)
class Canary:
    """The context, and how far answers may differ.

    Args:
        tokens: of the context
        model: whose answers these are; without routers routes are not compared
        temperature: of rollouts
        cached: at least so many of its tokens come from the cache; 0: engines have none
        limit: largest difference of log-probs between two answers of a server [nat]
        trainer_limit: between a server and the trainer, the mean over tokens [nat]
        apart: share of a layer's experts that may differ
    """

    tokens: tuple[int, ...]
    model: Model
    temperature: float
    cached: int
    limit: float
    trainer_limit: float
    apart: float

    @classmethod
    def of(
        cls, model: Model, room: int, has_blocks: bool, temperature: float, exact: bool
    ) -> Canary:
        """
        Args:
            room: longest context and response together that the model takes
            has_blocks: the engines keep contexts in blocks, as vLLM does
            exact: trainer and engines compute in float32
        """
        length = min(LONG if has_blocks else SHORT, room - NEW)
        draw = random.Random(0)
        tokens = tuple(draw.randrange(model.vocab_size) for _ in range(length))
        limits = (1e-5, 1e-4, 5e-3) if exact else (0.1, 0.1, 0.3)
        return cls(tokens, model, temperature, length - TAIL, *limits)

    @property
    def layers(self) -> tuple[int, ...]:
        """0-based global ids of the layers that have a router."""
        return self.model.layer_ids

    async def ask(self, server: Server, version: int) -> Seen:
        """A server's answers.

        Raises: ServerFailed naming version, and the first layer or token that differs.
        """
        request = Request(
            f"canary-{version}",
            self.tokens,
            NEW,
            random_stream=(0, NAME, 0),
            salt=str(version),
            temperature=self.temperature,
            top=TOP,
        )
        first = around = await self._answer(server, request, version)
        if first.cached_tokens:  # of an earlier look, or of other weights
            fresh = replace(request, salt=f"canary {secrets.token_hex(8)}", reads_cache=False)
            around = await self._answer(server, fresh, version)
        looks = [first] if first.cached_tokens or not self.cached else []
        if (first.cached_tokens or 0) < self.cached:
            looks.append(await self._answer(server, request, version))
        where = f"{server.address}: canary of version {version}"
        through = looks[-1]
        if (cached := through.cached_tokens or 0) < self.cached:
            raise ServerFailed(
                f"{where}: {cached} of its {len(self.tokens)} tokens came from the cache, expected "
                f"at least {self.cached}; what the cache holds was not seen"
            )
        for look in looks:
            if why := self.differ(look, around):
                raise ServerFailed(f"{where}: through the cache {why}; it holds other weights'")
        return Seen(through, around)

    async def _answer(self, server: Server, request: Request, version: int) -> Answer:
        answer = await server.generate(request, Partial(request))
        if [v for _, _, v in answer.versions] != [version]:
            raise ServerFailed(f"{server.address}: canary {answer.versions}, expected {version}")
        try:
            self.model.check(request, answer)
        except ProtocolError as error:
            raise ServerFailed(f"{server.address}: canary with {error}") from error
        if self.layers and answer.routes is None:
            raise ServerFailed(f"{server.address}: canary without routes, expected them")
        return answer

    def differ(self, one: Answer, other: Answer) -> str | None:
        """How two answers differ; None: no more than rounding."""
        if self.layers and (why := self._routes_differ(one, other)):
            return why
        for token, (top, expected) in enumerate(zip(one.top, other.top, strict=True)):
            known = dict(expected)
            gaps = [abs(p - known[t]) for t, p in top if t in known]
            if not gaps or max(gaps) > self.limit:
                gap = max(gaps, default=float("inf"))
                return f"log-probs of token {token} differ by {gap:.3g}"
            if one.token_ids[token] != other.token_ids[token]:
                break  # what follows has another context
        return None

    def _routes_differ(self, one: Answer, other: Answer) -> str | None:
        first, second = (self._rows(each)[: len(self.tokens)] for each in (one, other))
        equal = (first[..., :, None] == second[..., None, :]).sum((0, 2, 3))  # experts of a layer
        total = first.shape[0] * first.shape[2]
        apart = {layer: 1 - int(equal[slot]) / total for slot, layer in enumerate(self.layers)}
        return self._apart(apart, total)

    def _apart(self, apart: Mapping[int, float], total: int) -> str | None:
        """The first layer whose experts differ; one may, where two scores are almost equal."""
        for layer, share in sorted(apart.items()):
            if share > max(self.apart, 1.5 / total):
                return f"{share:.1%} of the routes of layer {layer} differ"
        return None

    def groups(self, seen: Mapping[str, Seen]) -> list[tuple[list[str], Answer]]:
        """Servers with the same answer through the cache, and the answer."""
        found: list[tuple[list[str], Answer]] = []
        for address, (through, _) in seen.items():
            for addresses, answer in found:
                same = through.token_ids == answer.token_ids
                if same and self.differ(through, answer) is None:
                    addresses.append(address)
                    break
            else:
                found.append(([address], through))
        return found

    def verdict(self, gap: float, apart: Mapping[int, float]) -> str | None:
        """How an answer differs from the trainer's forward; None: no more than rounding.

        Args:
            gap: mean |difference| of log-probs [nat]
            apart: layer -> share of the experts that the trainer's router does not choose
        """
        if why := self._apart(apart, len(self.tokens) + NEW - 1):
            return f"{why} from the trainer's"
        if not gap <= self.trainer_limit:
            return f"log-probs differ from the trainer's by {gap:.3g}"
        return None

    def _rows(self, answer: Answer) -> np.ndarray:
        assert answer.routes is not None
        return answer.routes[:, list(self.layers)]

    def sample(self, answer: Answer, version: int, number: int) -> Sample:
        """An answer as a sample, whose prompt id is ``number``, for the trainer to score."""
        count = len(self.tokens) + len(answer.token_ids)
        start = len(self.tokens)
        logprobs = torch.zeros(count)
        routes = None
        logprobs[start:] = torch.tensor(answer.logprobs)
        routed = torch.zeros(count, dtype=torch.bool)
        if self.layers:
            rows = torch.from_numpy(self._rows(answer).astype(np.int64))
            routes = torch.zeros(count, *rows.shape[1:], dtype=route_dtype(self.model.num_experts))
            routes[: len(rows)], routed[: len(rows)] = rows.to(routes.dtype), True
        return Sample(
            prompt_id=number,
            index=0,
            tokens=torch.tensor((*self.tokens, *answer.token_ids)),
            prompt_len=start,
            loss_mask=torch.arange(count) >= start,
            rollout_logprobs=logprobs,
            routes=routes,
            layer_ids=self.layers,
            route_mask=routed,
            weight_version=version,
            finish_reason="length",
            reward=0.0,
        ).check()


def prove(
    canary: Canary, seen: Mapping[str, Seen], version: int, score: ScoreCanaries
) -> dict[str, str]:
    """Compares the servers' answers with the trainer's own forward; every rank has to call it.

    Args:
        seen: by the first rank, by address; empty on the others

    Returns: address -> how its answer differs, on the first rank.
    Communicates: as ``score`` does.
    """
    groups = canary.groups(seen)
    failed = dict[str, str]()
    answers = [canary.sample(answer, version, n) for n, (_, answer) in enumerate(groups)]
    for (addresses, _), (gap, apart) in zip(groups, score(answers), strict=False):
        if why := canary.verdict(gap, apart):
            failed |= {a: f"{a}: canary of version {version}: {why}" for a in addresses}
    return failed


def canary_of(plan: Plan) -> Canary | None:
    """The canary of this plan; None: its model takes images, and the canary has none."""
    if plan.modules:
        return None
    room = int(plan.hf.get("max_position_embeddings") or 2**20)
    canary = Canary.of(
        Model.of(plan),
        room,
        plan.rollout.engine == "vllm",
        plan.rollout.temperature,
        {plan.model.dtype, plan.rollout_dtype} == {"float32"},
    )
    if plan.rollout.engine == "vllm" or plan.sizes.state_mixer is None:
        return canary
    return replace(canary, cached=0)  # the embedded engine keeps no states of finished requests
