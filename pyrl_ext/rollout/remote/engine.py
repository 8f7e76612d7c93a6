"""The rollout engine of a rank with remote engines: all of their servers, over HTTP."""

from __future__ import annotations

import asyncio
import shlex
import threading
from collections import Counter
from collections.abc import Callable, Collection, Coroutine, Generator, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from pyrl_ext.parallel.buckets import KeptBuckets
from pyrl_ext.parallel.open_files import allow_open_files
from pyrl_ext.plan import Plan
from pyrl_ext.rollout.engine import (
    Capabilities,
    Engine,
    TurnFeed,
    agreed_digests,
    require_weights,
)
from pyrl_ext.rollout.remote.auth import Keys
from pyrl_ext.rollout.remote.client import Server, ServerFailed
from pyrl_ext.rollout.remote.commands import keys_folder
from pyrl_ext.rollout.remote.model import ServedModel
from pyrl_ext.rollout.remote.parts import Parts
from pyrl_ext.rollout.remote.protocol import RPC, Request
from pyrl_ext.rollout.remote.router import Router, ServerState
from pyrl_ext.rollout.remote.stream import Stream
from pyrl_ext.rollout.remote.tls import trust_of
from pyrl_ext.rollout.remote.weight_sync import Publisher, WeightSync, release
from pyrl_ext.rollout.versions import newest
from pyrl_ext.samples import Sample, Sampling, Turn, route_dtype


class ServersEngine(Engine):
    """Generates on servers that all ranks share; any number of streams may be open at once.

    A sample does not depend on the server that generated it, nor on those that failed before, up to
    the rounding of matrix products of different sizes (with the embedded engine; vLLM draws from
    seeds, which another server draws from anew). Samples come in the order in which they finish.

    Args:
        servers: all of them; those that do not answer join later
        model: that they serve
        publish: gives servers weights
        max_num_seqs: samples that a server runs at once
        min_servers: the run stops when fewer are left
        patience: time for the first servers to answer [s]
        group: of all ranks with such an engine; None: this process alone
        keep, thread_group, advice: as for `WeightSync`
    """

    def __init__(
        self,
        servers: Sequence[Server],
        model: ServedModel,
        publish: Publisher,
        *,
        max_num_seqs: int = 128,
        min_servers: int = 1,
        patience: float = 600.0,
        group: dist.ProcessGroup | None = None,
        keep: KeptBuckets | None = None,
        thread_group: dist.ProcessGroup | None = None,
        advice: str = "",
    ):
        self.rank, ranks = (0, 1) if group is None else (group.rank(), group.size())
        self.model = model
        self.group = group
        self.version: int | None = None
        self._streams: set[Stream] = set()
        self._closed = False
        # prompts; guarded, as are the streams
        self._ended = Counter[str]()
        self._asked = 0
        self._lock = threading.Lock()
        self.loop = publish.loop = asyncio.new_event_loop()
        limit = -(-2 * max_num_seqs // ranks)  # twice: the next waits there when one finishes
        allow_open_files(limit * len(servers))
        name = f"rank {self.rank}"
        self.router = Router(servers, limit, min_servers, model.check, name, publish.folder)
        self.sync = WeightSync(
            self.router, publish, self._counts, patience, group, keep, thread_group, advice
        )
        run = self.loop.run_forever
        self._thread = threading.Thread(target=run, name="servers", daemon=True)
        self._thread.start()

    @property
    def capabilities(self) -> Capabilities:
        """Routes if the model has routers."""
        return Capabilities(routes=bool(self.model.layer_ids), turns=True, concurrent=True)

    def run[T](self, coroutine: Coroutine[Any, Any, T]) -> T:
        """The result of a coroutine in the thread of the servers."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result()

    # weights -----------------------------------------------------------------------------------

    def load_weights(
        self,
        named: Iterable[tuple[str, Tensor]],
        version: int,
        only: Collection[str] | None = None,
    ) -> None:
        """Sends new weights to all servers: every rank the tensors that come on it.

        New requests wait until all ranks are done. A server that fails is taken out; one that is
        there again or new joins once it gets all tensors, not with ``only`` some. With ``keep``
        this returns earlier, and `samples_stale` waits for the rest.

        Raises: RuntimeError on every rank if one failed or too few servers are left.
        Communicates: three lines of every rank; every byte of the weights once to each server, or
            to the first one.
        """
        self.sync.load(named, version, only)
        self.version = version

    def verify_weights(self, check: Callable[[], None]) -> None:
        """Servers generate while digests are compared."""
        self.sync.verify_weights(check)

    def samples_stale(self) -> bool:
        """See `WeightSync.samples_stale`."""
        return self.sync.samples_stale(self.score_canaries)

    def _counts(self) -> Mapping[str, float]:
        """Prompts of this rank, by what became of them."""
        with self._lock:
            in_flight = sum(len(stream.prompts) for stream in self._streams)
            return {**self._ended, "in_flight": in_flight, "asked": self._asked}

    def metrics(self) -> dict[str, float]:
        """Numbers of all ranks' requests between the last two publishes, and of all prompts."""
        return self.sync.metrics

    def checksums(self, names: Sequence[str] | None = None) -> dict[str, int]:
        """Digests of the weights that all servers hold; 0 where two of them differ.

        Raises: RuntimeError when no server answers.
        """

        async def ask(state: ServerState) -> list[dict[str, int]]:
            body = {"method": "weight_digests", "args": [None if names is None else list(names)]}
            try:
                return (await state.server.control(RPC, body))["results"]
            except (ServerFailed, KeyError) as error:
                self.router.take_out(state, str(error))
                return []

        async def ask_all() -> list[list[dict[str, int]]]:
            return await asyncio.gather(*(ask(s) for s in self.router.states if s.used))

        self.sync.finished()
        digests = [worker for results in self.run(ask_all()) for worker in results]
        if not digests:
            raise RuntimeError(self.router.too_few())
        return agreed_digests(digests)

    def sleep(self) -> int:
        """0: servers hold no memory of this host."""
        return 0

    def close(self) -> None:
        """Closes all connections; the servers go on, and other runs may have them."""
        if self._thread.is_alive():
            with self._lock:
                self._closed = True
                for stream in self._streams:
                    stream.fail(RuntimeError("ServersEngine: closed, expected no open streams"))
            self.run(self.router.end_tasks())  # a publish would claim servers after the release
            if self.rank == 0:
                servers = [state.server for state in self.router.states]
                self.run(release(servers, self.sync.publish.run))
            self.run(self.router.close())
            self.sync.close()
            self.loop.call_soon_threadsafe(self.loop.stop)
            self._thread.join()

    # samples -----------------------------------------------------------------------------------

    def answer(self, feed: TurnFeed, sampling: Sampling) -> Generator[Sample, None, None]:
        """Samples every turn of ``feed``; each yields one sample, whose prompt is its context.

        Raises: RuntimeError when no weights were sent, or too few servers are left; Refused for a
            request that no server takes; ValueError for images and kept sets.
        """
        where = "ServersEngine.answer"
        require_weights(where, self.version, "no weights were sent yet")
        if sampling.sampling_mask:
            raise ValueError(f"{where}: kept sets, expected none: servers do not return them")
        is_open = True
        fate = "aborted"
        with self._lock:
            if self._closed:
                raise RuntimeError(f"{where}: the engine is closed, expected an open one")
            stream = Stream(self.loop, self.router)
            self._streams.add(stream)
        try:
            while stream.left or is_open:
                if is_open:
                    turns = feed.take(wait=not stream.left)
                    is_open = turns is not None
                    if turns:
                        asked = [(t, self._request(stream, t, sampling)) for t in turns]
                        with self._lock:
                            before = len(stream.prompts)
                            stream.send(asked)
                            self._asked += len(stream.prompts) - before
                        continue  # there may be none after them
                if stream.left:
                    stream.wait(feed.fileno() if is_open else None)
                for turn, parts in stream.taken():
                    sample = self._sample(stream, turn, parts)
                    if is_open:
                        stream.before[turn.prompt.id, turn.stream] = sample
                    yield sample
        except Exception:
            fate = "failed"
            raise
        finally:
            self._end(stream, fate)

    def _end(self, stream: Stream, fate: str) -> None:
        """Count the prompts of a stream that is over; ``fate`` is that of the unfinished ones."""
        given_up = {turn.prompt.id for turn in stream.left.values()}
        with self._lock:
            self._ended[fate] += len(given_up)
            self._ended["returned"] += len(stream.prompts) - len(given_up)
            self._streams.discard(stream)
        stream.close()

    def _request(self, stream: Stream, turn: Turn, sampling: Sampling) -> Request:
        prompt = turn.prompt
        key = (turn.prompt.id, turn.stream)
        if prompt.images:
            raise ValueError(f"ServersEngine(prompt {prompt.id}): images, expected text alone")
        before = stream.before.get(key)
        reused = 0
        if before is not None:
            rows = int(before.route_mask.sum())
            begins = prompt.tokens[: rows + 1] == tuple(before.tokens.tolist())
            if begins and newest(before) == self.version:
                reused = rows
                stream.reused[prompt.id, turn.index, turn.number] = before
            else:  # what servers computed with other weights they compute again
                del stream.before[key]
        return Request.of(
            sampling,
            f"{sampling.seed}-{prompt.id}-{turn.stream}-{turn.number}",
            prompt.tokens,
            max_tokens=turn.max_new_tokens,
            random_stream=(sampling.seed, *key),
            routes_from=reused,
        )

    def _sample(self, stream: Stream, turn: Turn, parts: Parts) -> Sample:
        start = len(turn.prompt.tokens)
        tokens = torch.tensor((*turn.prompt.tokens, *parts.token_ids))
        places = torch.arange(len(tokens))
        logprobs = torch.zeros(len(tokens))
        logprobs[start:] = torch.tensor(parts.logprobs)
        before = stream.reused.pop((turn.prompt.id, turn.index, turn.number), None)
        routes = self._routes(before, parts, len(tokens))
        spans = tuple((start + b, start + e, v) for b, e, v in parts.versions)
        # new weights may have come between the request and its first token
        stale = before is not None and newest(before) < spans[0][2]
        masked = parts.request.routes_from if stale else 0
        return Sample(
            prompt_id=turn.prompt.id,
            index=turn.index,
            tokens=tokens,
            prompt_len=start,
            loss_mask=places >= start,
            rollout_logprobs=logprobs,
            routes=routes,
            layer_ids=self.model.layer_ids,
            route_mask=(places >= masked) & (places < (0 if routes is None else len(tokens) - 1)),
            masked=masked,
            weight_version=spans[0][2],
            finish_reason=str(parts.finish_reason),
            turn=turn.number,
            version_spans=spans if len(spans) > 1 else (),
        ).check()

    def _routes(self, before: Sample | None, parts: Parts, size: int) -> Tensor | None:
        """[T, L, K] of the layers that have a router; the rows of the turn before are its."""
        if not self.model.layer_ids:
            return None
        assert parts.routes is not None  # `ServedModel.check`
        routes = torch.zeros(
            size,
            len(self.model.layer_ids),
            self.model.topk,
            dtype=route_dtype(self.model.num_experts),
        )
        reused = parts.request.routes_from
        if before is not None:
            assert before.routes is not None  # as of all samples of this model
            routes[:reused] = before.routes[:reused]
        rows = parts.routes[: parts.rows, list(self.model.layer_ids)].astype(np.int32)
        routes[reused : size - 1] = torch.from_numpy(rows).to(routes.dtype)
        return routes


def build_servers_engine(
    plan: Plan,
    device: torch.device,
    group: dist.ProcessGroup | None = None,
    thread_group: dist.ProcessGroup | None = None,
) -> ServersEngine:
    """The servers of the plan, as the engine of one of the ranks of ``group``; None: the only one.

    Args:
        thread_group: a second group of the same ranks, for publishes in a thread

    Raises: ValueError, OSError where the plan's keys or files of TLS cannot be read.
    """
    rollout = plan.rollout
    model = ServedModel.of(plan)
    keys = Keys.read(keys_folder(plan))
    tls = trust_of(plan)
    silence = rollout.request_timeout
    background = rollout.syncs_weights_in_background
    return ServersEngine(
        [Server(address, keys, silence=silence, tls=tls) for address in plan.addresses],
        model,
        Publisher(plan, device),
        max_num_seqs=plan.max_num_seqs,
        min_servers=rollout.min_servers,
        patience=rollout.publish_timeout,
        group=group,
        keep=KeptBuckets(rollout.bucket_bytes, device) if background else None,
        thread_group=thread_group,
        advice=how_to_start(plan),
    )


def how_to_start(plan: Plan) -> str:
    """How the servers of a plan are started, as a sentence."""
    command = ["pyrl", "serve", plan.source]
    if plan.rollout.servers:  # they may be named on the command line only
        command.append(f"rollout.servers=[{','.join(plan.rollout.servers)}]")
    return f"Start them with: {shlex.join(command)}"
