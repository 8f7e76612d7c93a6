"""The canary: a fixed context that every server scores after each publish, to prove it fresh.

Keys and values, or routes, of earlier weights in a server's cache change its samples without any
error. So each server with a cache scores the same few tokens under the salt of rollouts until the
answer comes from the cache, as its count of cached tokens shows, and once without the cache; the
answers have to agree. The trainer compares the answer with its own forward. Log-probs show old keys
and values; routed rows show old routes, even with right keys and values.
"""

from __future__ import annotations

import random
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch

from pyrl_ext.plan import Plan
from pyrl_ext.rollout.engine import ScoreCanaries
from pyrl_ext.rollout.remote.client import Server, ServerFailed
from pyrl_ext.rollout.remote.holder import salt_of
from pyrl_ext.rollout.remote.model import ServedModel
from pyrl_ext.rollout.remote.protocol import Answer, Partial, ProtocolError, Request
from pyrl_ext.samples import Sample, route_dtype

BLOCK = 128  # tokens of vLLM's largest block
# tokens: two blocks; and for an engine without a cache
LONG = 2 * BLOCK + 8
SHORT = 40
NEW = 2  # tokens that are sampled
TOP = 8  # most likely tokens that are compared for each sampled one
TRIES = 3  # to find the context in the cache, after the request that fills it
TAIL = 8  # tokens at the context's end that need not be cached
QUANTIZED_LIMIT = 0.5  # mean difference of log-probs to the trainer, of engines in 8 bits [nat]
STREAM_ID = 2**62  # of the canary's random stream: no prompt has this id


@dataclass(frozen=True, slots=True)
class Canary:
    """The context, and the largest differences of right answers.

    Args:
        tokens: of the context
        model: whose answers these are; without routers routes are not compared
        temperature: of rollouts
        cached: least number of its tokens that come from the cache; 0: engines have none
        limit: largest difference of log-probs between two answers of a server [nat]
        trainer_limit: between a server and the trainer, the mean over tokens [nat]
        route_limit: largest share of a layer's experts that may differ
        run: folder of the run
    """

    tokens: tuple[int, ...]
    model: ServedModel
    temperature: float
    cached: int
    limit: float
    trainer_limit: float
    route_limit: float
    run: str = ""

    @classmethod
    def of(
        cls,
        model: ServedModel,
        room: int,
        has_cache: bool,
        temperature: float,
        exact: bool,
        drafts: bool = False,
    ) -> Canary:
        """
        Args:
            room: longest context and response together that the model takes
            has_cache: engines keep contexts of finished requests in blocks, as vLLM does
            exact: trainer and engines compute in float32
            drafts: engines draft tokens; vLLM then computes a context's last whole block again
        """
        length = min(LONG if has_cache else SHORT, room - NEW)
        draw = random.Random(0)
        tokens = tuple(draw.randrange(model.vocab_size) for _ in range(length))
        limits = (1e-5, 1e-4, 5e-3) if exact else (0.1, 0.1, 0.3)
        cached = length - TAIL - (BLOCK if drafts else 0)
        return cls(tokens, model, temperature, cached if has_cache else 0, *limits)

    async def ask(self, server: Server, version: int) -> Answer:
        """A server's answer, through its cache if it has one.

        Raises: ServerFailed naming version, and the first layer or token that differs.
        """
        request = Request(
            f"canary-{version}",
            self.tokens,
            NEW,
            random_stream=(0, STREAM_ID, 0),
            salt=salt_of(self.run, version),
            temperature=self.temperature,
            top=TOP,
        )
        if not self.cached:
            return await self._answer(server, request, version)
        where = f"{server.address}: canary of version {version}"
        salt = f"canary {secrets.token_hex(8)}"
        answers = [await self._answer(server, request, version)]  # it may fill the cache
        fresh = await self._answer(server, replace(request, salt=salt, skips_cache=True), version)
        for _ in range(TRIES):  # other requests may have taken its place in the cache
            if (answers[-1].cached_tokens or 0) < self.cached:
                answers.append(await self._answer(server, request, version))
        for answer in answers:
            difference = self.difference(answer, fresh)
            if difference:
                raise ServerFailed(
                    f"{where}: through the cache {difference}; its prefix cache is stale"
                )
        cached = answers[-1].cached_tokens or 0
        if cached < self.cached:
            raise ServerFailed(
                f"{where}: {cached} of its {len(self.tokens)} tokens came from the cache, expected "
                f"at least {self.cached}; the content of the cache was not seen"
            )
        return answers[-1]

    async def _answer(self, server: Server, request: Request, version: int) -> Answer:
        answer = await server.generate(request, Partial(request))
        if [v for _, _, v in answer.versions] != [version]:
            raise ServerFailed(f"{server.address}: canary {answer.versions}, expected {version}")
        try:
            self.model.check(answer)
        except ProtocolError as error:
            raise ServerFailed(f"{server.address}: canary with {error}") from error
        return answer

    def difference(self, one: Answer, other: Answer) -> str | None:
        """The difference of two answers; None: no more than rounding."""
        if self.model.layer_ids:
            first = self._rows(one)[: len(self.tokens)]
            second = self._rows(other)[: len(self.tokens)]
            equal = (first[..., :, None] == second[..., None, :]).sum((0, 2, 3))
            total = first.shape[0] * first.shape[2]  # experts of a layer
            layers = zip(self.model.layer_ids, equal.tolist(), strict=True)
            wrong = self._wrong_layer({layer: 1 - same / total for layer, same in layers}, total)
            if wrong:
                return wrong
        for token, (top, expected) in enumerate(zip(one.top, other.top, strict=True)):
            logprobs = dict(expected)
            gaps = [abs(p - logprobs[t]) for t, p in top if t in logprobs]
            if not gaps or max(gaps) > self.limit:
                gap = max(gaps, default=float("inf"))
                return f"log-probs of token {token} differ by {gap:.3g}"
            if one.token_ids[token] != other.token_ids[token]:
                break  # later tokens have another context
        return None

    def _wrong_layer(self, shares: Mapping[int, float], total: int) -> str | None:
        """The first layer whose experts differ; one may, where two scores are almost equal."""
        for layer, share in sorted(shares.items()):
            if share > max(self.route_limit, 1.5 / total):
                return f"{share:.1%} of the routes of layer {layer} differ"
        return None

    def groups(self, seen: Mapping[str, Answer]) -> list[tuple[list[str], Answer]]:
        """Servers with the same answer, and the answer."""
        groups: list[tuple[list[str], Answer]] = []
        for address, answer in seen.items():
            for addresses, other in groups:
                same = answer.token_ids == other.token_ids
                if same and self.difference(answer, other) is None:
                    addresses.append(address)
                    break
            else:
                groups.append(([address], answer))
        return groups

    def verdict(self, gap: float, shares: Mapping[int, float]) -> str | None:
        """The difference of an answer to the trainer's forward; None: no more than rounding.

        Args:
            gap: mean |difference| of log-probs [nat]
            shares: layer -> share of the experts that the trainer's router does not choose
        """
        wrong = self._wrong_layer(shares, len(self.tokens) + NEW - 1)
        if wrong:
            return f"{wrong} from the trainer's"
        if not gap <= self.trainer_limit:
            return f"log-probs differ from the trainer's by {gap:.3g}"
        return None

    def _rows(self, answer: Answer) -> np.ndarray:
        assert answer.routes is not None  # `ServedModel.check`
        return answer.routes[:, list(self.model.layer_ids)]

    def sample(self, answer: Answer, version: int, number: int) -> Sample:
        """An answer as a sample, whose prompt id is ``number``, for the trainer to score."""
        start = len(self.tokens)
        count = start + len(answer.token_ids)
        logprobs = torch.zeros(count)
        logprobs[start:] = torch.tensor(answer.logprobs)
        routes = None
        routed = torch.zeros(count, dtype=torch.bool)
        if self.model.layer_ids:
            rows = torch.from_numpy(self._rows(answer).astype(np.int64))
            routes = torch.zeros(count, *rows.shape[1:], dtype=route_dtype(self.model.num_experts))
            routes[: len(rows)] = rows.to(routes.dtype)
            routed[: len(rows)] = True
        return Sample(
            prompt_id=number,
            index=0,
            tokens=torch.tensor((*self.tokens, *answer.token_ids)),
            prompt_len=start,
            loss_mask=torch.arange(count) >= start,
            rollout_logprobs=logprobs,
            routes=routes,
            layer_ids=self.model.layer_ids,
            route_mask=routed,
            weight_version=version,
            finish_reason="length",
            reward=0.0,
        ).check()


def prove(
    canary: Canary, seen: Mapping[str, Answer], version: int, score: ScoreCanaries
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
    for (addresses, _), (gap, shares) in zip(groups, score(answers), strict=False):
        reason = canary.verdict(gap, shares)
        if reason:
            failed |= {a: f"{a}: canary of version {version}: {reason}" for a in addresses}
    return failed


def canary_of(plan: Plan) -> Canary | None:
    """The canary of this plan; None: its model takes images, and the canary has none."""
    if plan.modules:
        return None
    canary = Canary.of(
        ServedModel.of(plan),
        int(plan.hf.get("max_position_embeddings") or 2**20),
        plan.rollout.engine == "vllm",
        plan.rollout.temperature,
        {plan.model.dtype, plan.rollout_dtype} == {"float32"},
        plan.draft_layers > 0,
    )
    if plan.rollout.quantization is not None:
        canary = replace(canary, trainer_limit=QUANTIZED_LIMIT)
    return replace(canary, run=plan.run)
