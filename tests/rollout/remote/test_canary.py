"""The canary of a server with a cache: right answers pass, stale caches are found."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from pyrl_ext.plan import compile_plan
from pyrl_ext.rollout.remote.canary import LONG, Canary, canary_of
from pyrl_ext.rollout.remote.client import Server, ServerFailed
from pyrl_ext.rollout.remote.holder import salt_of
from pyrl_ext.rollout.remote.model import ServedModel
from pyrl_ext.rollout.remote.protocol import Answer, Request, decode_routes, encode_routes
from tests.helpers.configs import CONFIGS
from tests.helpers.http_engine import EXPERTS, LAYERS, VOCAB, HttpEngine, K, Messages

CANARY = Canary.of(ServedModel(VOCAB, LAYERS, (1, 2, 3), EXPERTS, K), 512, True, 1.0, True)


def old_keys(messages: Messages) -> None:
    for message in messages:
        for row in message["choices"][0]["logprobs"]["content"]:
            row["top_logprobs"][0]["logprob"] -= 1e-3


def old_routes(messages: Messages) -> None:
    choice = messages[-1]["choices"][0]
    routes = decode_routes(choice["routed_experts"], "test", None)
    routes[:, 2] = (routes[:, 2] + K) % EXPERTS
    choice["routed_experts"] = encode_routes(routes)


def nothing(messages: Messages) -> None:
    """The cache is fresh."""


def cache_of(spoil: Callable[[Messages], None], cached: int) -> Callable[..., Messages]:
    """A server whose second answer, and each later one, comes through the cache."""
    asked = list[Request]()

    def twist(request: Request, messages: Messages) -> Messages:
        for message in messages:
            for row in message["choices"][0]["logprobs"]["content"]:
                row["top_logprobs"] = [{"token_id": row["token_id"], "logprob": row["logprob"]}]
        through = bool(asked) and not request.skips_cache
        asked.append(request)
        if through:
            spoil(messages)
        count = cached if through else 0
        messages[-1]["usage"] = {"prompt_tokens_details": {"cached_tokens": count}}
        return messages

    return twist


async def ask(twist: Any) -> Answer:
    with HttpEngine() as engine:
        engine.twist = twist
        server = Server(engine.address)
        try:
            return await CANARY.ask(server, 1)
        finally:
            await server.close()


async def test_canary_returns_the_answer_through_the_cache():
    answer = await ask(cache_of(nothing, LONG - 8))
    assert answer.cached_tokens == LONG - 8


def test_canary_of_engines_that_draft_needs_a_block_less():
    """vLLM computes the last whole block again, for the hidden states that its drafts begin with
    (`test_server_that_drafts_equals_transformers`)."""
    mtp = ("model.mtp=true", "rollout.speculation=mtp")
    plain, drafting = (canary_of(compile_plan(CONFIGS / "glm47.yaml", more)) for more in ((), mtp))
    assert plain is not None and drafting is not None
    assert plain.cached - drafting.cached == 128 and drafting.cached == 128


async def test_canary_has_the_salt_of_its_runs_requests():
    plans = [compile_plan(CONFIGS / "tiny.yaml", [f"run=runs/{name}"]) for name in "ab"]
    salts: list[str] = []
    for plan in plans:
        canary = canary_of(plan)
        assert canary is not None
        with HttpEngine() as engine:
            server = Server(engine.address)
            engine.version = 7
            await replace(CANARY, run=canary.run, cached=0).ask(server, 7)
            await server.close()
        assert engine.asked[0].salt == salt_of(plan.run, 7)
        salts.append(engine.asked[0].salt)
    assert salts[0] != salts[1]


@pytest.mark.parametrize(
    ("spoil", "cached", "says"),
    [
        (old_keys, LONG - 8, "through the cache log-probs of token 0 differ by 0.001"),
        (old_routes, LONG - 8, "through the cache 100.0% of the routes of layer 2 differ"),
        (nothing, LONG - 9, "255 of its 264 tokens came from the cache, expected at least 256"),
    ],
)
async def test_canary_finds_a_stale_cache(
    spoil: Callable[[Messages], None], cached: int, says: str
):
    with pytest.raises(ServerFailed, match=says):
        await ask(cache_of(spoil, cached))
