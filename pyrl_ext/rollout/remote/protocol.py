"""Requests and answers of an engine's server, in vLLM 0.32's JSON; what is wrong is refused."""

from __future__ import annotations

import base64
import hashlib
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

from pyrl_ext.samples import Sampling

GENERATE = "/inference/v1/generate"
ABORT = "/abort_requests"
PAUSE = "/pause"
RESUME = "/resume"
IS_PAUSED = "/is_paused"
INIT_TRANSFER = "/init_weight_transfer_engine"
SHUTDOWN_TRANSFER = "/shutdown_weight_transfer_engine"
START = "/start_weight_update"
UPDATE = "/update_weights"
FINISH = "/finish_weight_update"
WEIGHT_INFO = "/weight_info"
WEIGHT_CHECKER = "/weight_checker"
RESET = "/reset_prefix_cache"
RPC = "/collective_rpc"
HEALTH = "/health"
METRICS = "/metrics"

PAUSE_MODES = {"finish": "wait", "keep": "keep", "abort": "abort"}  # rollout.pause -> /pause?mode=
FINISH_REASONS = ("stop", "length", "abort")
MAX_BODY = 64 << 20  # of a request, and of a message of an answer [bytes]
MAX_TOKENS = 1 << 24  # of a context
Stream = tuple[int, int, int]
Span = tuple[int, int, int]


class ProtocolError(ValueError):
    """A message that does not follow the protocol; its server cannot be trusted."""


def _need(ok: bool, where: str, found: str, rule: str) -> None:
    if not ok:
        raise ProtocolError(f"{where}: {found}, expected {rule}")


@dataclass(frozen=True, slots=True)
class Request:
    """One response that is asked for.

    Args:
        request_id: names it in logs
        token_ids: the whole context
        max_tokens: of the response
        random_stream: (seed, prompt id, index); the embedded engine draws token t of the sequence
            from it and t alone
        salt: names the weights; nothing that was cached under another one is used
        routes_from: first token whose routes are wanted; the client has those before it
        temperature, top_p, top_k: as in `Sampling`; temperature 0: greedy
        stop_ids, stop: as in `Sampling`
        top: number of most likely tokens reported beside each sampled one
        stream: tokens are sent as they are sampled
        reads_cache: what is cached of the context is not computed again
    """

    request_id: str
    token_ids: tuple[int, ...]
    max_tokens: int
    random_stream: Stream = (0, 0, 0)
    salt: str = ""
    routes_from: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    top: int = 0
    stream: bool = True
    reads_cache: bool = True

    def __post_init__(self) -> None:
        where = f"request {self.request_id}"
        count = len(self.token_ids)
        _need(0 < len(self.request_id) <= 200, where, "its id", "1 to 200 characters")
        _need(0 < count < MAX_TOKENS, where, f"{count} tokens", f"1 to {MAX_TOKENS - 1}")
        _need(min(self.token_ids) >= 0, where, f"token {min(self.token_ids)}", "ids >= 0")
        _need(0 < self.max_tokens < MAX_TOKENS, where, f"max_tokens {self.max_tokens}", "some")
        good = 0 <= self.routes_from <= count + self.max_tokens
        _need(good, where, f"routes from token {self.routes_from}", "a token of it")
        good = math.isfinite(self.temperature) and self.temperature >= 0
        _need(good, where, f"temperature {self.temperature}", "a finite number >= 0")
        _need(0 < self.top_p <= 1, where, f"top_p {self.top_p}", "a number in (0, 1]")
        _need(self.top_k >= 0, where, f"top_k {self.top_k}", "0 (all) or a count")
        _need(0 <= self.top <= 100, where, f"top {self.top}", "0 to 100 tokens")
        _need(all(self.stop), where, "an empty stop string", "texts")
        _need(len(self.salt) <= 1000, where, "its salt", "at most 1,000 characters")
        good = all(-(2**63) <= part < 2**64 for part in self.random_stream)
        _need(good, where, f"random stream {self.random_stream}", "integers of 64 bits")

    @classmethod
    def of(cls, sampling: Sampling, request_id: str, token_ids: Sequence[int], **fields: Any):
        """The request that draws as ``sampling`` says, but for its length and random stream."""
        greedy = sampling.greedy
        return cls(
            request_id,
            tuple(token_ids),
            temperature=0.0 if greedy else sampling.temperature,
            top_p=1.0 if greedy else sampling.top_p,
            top_k=0 if greedy else sampling.top_k,
            stop_ids=tuple(sampling.stop_ids),
            stop=tuple(sampling.stop),
            **fields,
        )

    @property
    def seed(self) -> int:
        """The seed for an engine that knows no random streams; it differs by stream and length."""
        text = " ".join(map(str, (*self.random_stream, len(self.token_ids))))
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()) >> 1

    def to_json(self) -> dict[str, Any]:
        """The body of a POST to `GENERATE`."""
        sampling = {
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "seed": self.seed,
            "logprobs": self.top,
            "stop_token_ids": list(self.stop_ids),
            "stop": list(self.stop),
            "include_stop_str_in_output": True,
            "skip_special_tokens": False,  # they may be part of a stop string
            "detokenize": bool(self.stop),
            "ignore_eos": True,  # the config may name stop tokens that the plan does not have
            "routed_experts_prompt_start": self.routes_from,
            "skip_reading_prefix_cache": not self.reads_cache,
            "extra_args": {"random_stream": list(self.random_stream)},
        }
        body: dict[str, Any] = {
            "request_id": self.request_id,
            "token_ids": list(self.token_ids),
            "sampling_params": sampling,
            "stream": self.stream,
        }
        if self.stream:
            body["stream_options"] = {"include_usage": True}
        return body | ({"cache_salt": self.salt} if self.salt else {})

    @classmethod
    def from_json(cls, body: object) -> Request:
        """The request in a body. Raises: ProtocolError."""
        fields = _Fields("request", body)
        sampling = _Fields("request: sampling_params", fields.take("sampling_params", dict))
        extra = _Fields("request: extra_args", sampling.take("extra_args", dict, {}))
        stream = extra.ints("random_stream", [0, 0, 0])
        _need(len(stream) == 3, "request: random_stream", f"{len(stream)} numbers", "3")
        seed, prompt, index = stream
        return cls(
            request_id=fields.take("request_id", str),
            token_ids=fields.ints("token_ids"),
            max_tokens=sampling.take("max_tokens", int),
            random_stream=(seed, prompt, index),
            salt=fields.take("cache_salt", str, ""),
            routes_from=sampling.take("routed_experts_prompt_start", int, 0),
            temperature=float(sampling.take("temperature", (int, float), 1.0)),
            top_p=float(sampling.take("top_p", (int, float), 1.0)),
            top_k=max(sampling.take("top_k", int, 0), 0),  # vLLM: -1 and 0 are all tokens
            stop_ids=sampling.ints("stop_token_ids", []),
            stop=sampling.texts("stop"),
            top=sampling.take("logprobs", int, 0),
            stream=fields.take("stream", bool, False),
            reads_cache=not sampling.take("skip_reading_prefix_cache", bool, False),
        )


@dataclass(frozen=True, slots=True)
class Answer:
    """The tokens that a server generated for one request.

    Args:
        token_ids: [N] that were sampled
        logprobs: [N] of them, of the distribution each was drawn from
        finish_reason: stop, length, or abort: a part, which can be continued
        versions: (begin, end, version) of the weights over the N tokens, without gaps
        routes: [rows, layers, K] of the tokens from `Request.routes_from` on but for the last
            token, which never was an input; None: the server reports none
        cached_tokens: of the context, which were not computed again; None: not reported
        top: (token, log-prob) pairs beside each sampled token, if the request asks for them
    """

    request_id: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: str
    versions: tuple[Span, ...] = ()
    routes: np.ndarray | None = None
    cached_tokens: int | None = None
    top: tuple[tuple[tuple[int, float], ...], ...] = ()

    def to_json(self) -> dict[str, Any]:
        """The body of an answer that is not streamed, or the last message of one that is."""
        return self.message(0) | {"usage": self.usage()}

    def usage(self) -> dict[str, Any]:
        """Counts of tokens."""
        details = None if self.cached_tokens is None else {"cached_tokens": self.cached_tokens}
        return {"completion_tokens": len(self.token_ids), "prompt_tokens_details": details}

    def message(self, begin: int, last: bool = True) -> dict[str, Any]:
        """The tokens from ``begin`` on; what is known at the end only comes with the last."""
        tops = self.top[begin:] or ((),) * (len(self.token_ids) - begin)
        rows = zip(self.token_ids[begin:], self.logprobs[begin:], tops, strict=True)
        spans = [{"version": str(v), "start": b, "end": e} for b, e, v in self.versions]
        choice = {
            "index": 0,
            "token_ids": list(self.token_ids[begin:]),
            "logprobs": {
                "content": [
                    {
                        "token_id": token,
                        "logprob": logprob,
                        "top_logprobs": [{"token_id": t, "logprob": p} for t, p in top],
                    }
                    for token, logprob, top in rows
                ]
            },
            "finish_reason": self.finish_reason if last else None,
            "routed_experts": encode_routes(self.routes) if last else None,
            "weight_versions": spans if last else None,
        }
        return {"request_id": self.request_id, "choices": [choice]}

    @classmethod
    def from_json(cls, body: object, request: Request) -> Answer:
        """The checked answer in a body. Raises: ProtocolError."""
        part = Partial(request)
        part.add(body)
        return part.answer()


@dataclass
class Partial:
    """The part of an answer that came so far: its tokens are good, also when the server dies.

    Attributes:
        token_ids, logprobs: as in `Answer`
    """

    request: Request
    token_ids: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    _top: list[tuple[tuple[int, float], ...]] = field(default_factory=list[Any])
    _finish: str | None = None
    _versions: tuple[Span, ...] = ()
    _routes: np.ndarray | None = None
    _cached: int | None = None

    def add(self, body: object) -> None:
        """Takes one message of the stream, or the whole answer. Raises: ProtocolError."""
        fields = _Fields(f"answer to {self.request.request_id}", body)
        fields.no_error()
        usage = _Fields(fields.where, fields.take("usage", dict, {}))
        details = _Fields(fields.where, usage.take("prompt_tokens_details", dict, {}))
        self._cached = details.take("cached_tokens", int, self._cached)
        choices = fields.take("choices", list)
        _need(len(choices) <= 1, fields.where, f"{len(choices)} choices", "one")
        for each in choices:
            self._add(_Fields(fields.where, each))

    def _add(self, choice: _Fields) -> None:
        where = choice.where
        tokens = choice.ints("token_ids", [])
        _need(not (self._finish and tokens), where, "tokens after its end", "none")
        content = _Fields(where, choice.take("logprobs", dict, {})).take("content", list, [])
        found = f"{len(content)} log-probs of {len(tokens)} tokens"
        _need(len(content) == len(tokens), where, found, "one a token")
        for token, each in zip(tokens, map(lambda c: _Fields(where, c), content)):
            told = each.take("token_id", int)
            _need(told == token >= 0, where, f"a log-prob of token {told}", f"of token {token}")
            top = [_Fields(where, t) for t in each.take("top_logprobs", list, [])]
            self.logprobs.append(each.logprob(len(self.logprobs)))
            self._top.append(
                tuple((t.take("token_id", int), t.logprob(len(self._top))) for t in top)
            )
        self.token_ids += tokens
        count = len(self.token_ids)
        most = self.request.max_tokens
        _need(count <= most, where, f"{count} tokens", f"at most {most}")
        self._routes = decode_routes(choice.take("routed_experts", str, None), where, self._routes)
        if (spans := choice.take("weight_versions", list, None)) is not None:
            self._versions = tuple(_Fields(where, each).span() for each in spans)
        reason = choice.take("finish_reason", str, None)
        known = reason is None or reason in FINISH_REASONS
        _need(known, where, f"finish_reason {reason!r}", f"one of {FINISH_REASONS}")
        self._finish = reason or self._finish

    def answer(self) -> Answer:
        """The whole answer, whose parts agree. Raises: ProtocolError."""
        request = self.request
        count = len(self.token_ids)
        where = f"answer to {request.request_id}"
        finish = self._finish
        _need(finish is not None, where, f"an end after {count} tokens", "a finish_reason")
        _need(count > 0 or finish == "abort", where, "no token", "at least one")
        full = finish != "length" or count == request.max_tokens
        _need(full, where, f"length after {count} tokens", f"{request.max_tokens} of them")
        ends = [0, *(end for _, end, _ in self._versions)]
        good = ends == [*(begin for begin, _, _ in self._versions), count] if count else True
        _need(good, where, f"versions {self._versions}", f"spans that cover 0 to {count}")
        known = all(a[2] <= b[2] for a, b in pairwise(self._versions))
        _need(known, where, f"versions {self._versions}", "rising ones")
        rows = max(len(request.token_ids) + count - 1 - request.routes_from, 0)
        if self._routes is not None and (count or len(self._routes) > rows):
            found = len(self._routes)
            _need(found == rows, where, f"routes of {found} tokens", f"of {rows}")
        return Answer(
            request.request_id,
            tuple(self.token_ids),
            tuple(self.logprobs),
            str(finish),
            self._versions if count else (),
            self._routes,
            self._cached,
            tuple(self._top) if request.top else (),
        )


def encode_routes(routes: np.ndarray | None) -> str | None:
    """Rows as base64 of an .npy file."""
    if routes is None:
        return None
    file = io.BytesIO()
    np.save(file, routes, allow_pickle=False)
    return base64.b64encode(file.getvalue()).decode()


def decode_routes(text: str | None, where: str, before: np.ndarray | None) -> np.ndarray | None:
    """Rows of an answer, after those that came before. Raises: ProtocolError."""
    if text is None:
        return before
    try:
        routes = np.load(io.BytesIO(base64.b64decode(text, validate=True)), allow_pickle=False)
    except (ValueError, EOFError, OSError, SyntaxError, MemoryError) as error:
        raise ProtocolError(f"{where}: routed_experts, {error}, expected an .npy file") from None
    good = isinstance(routes, np.ndarray) and routes.ndim == 3
    good = good and routes.dtype in (np.uint8, np.uint16, np.int32)
    _need(good, where, "routed_experts of another kind", "integers [rows, layers, K]")
    if before is None:
        return routes
    _need(before.shape[1:] == routes.shape[1:], where, "routes of other layers", "the same")
    return np.concatenate([before, routes])


class _Fields:
    """The fields of a JSON object, each of the type that the protocol gives it."""

    def __init__(self, where: str, body: object):
        self.where = where
        _need(isinstance(body, dict), where, type(body).__name__, "an object")
        assert isinstance(body, dict)
        self.body: Mapping[str, Any] = body

    def take(self, name: str, kind: type | tuple[type, ...], *default: Any) -> Any:
        """A field; null and a missing one are the default, if there is one."""
        value = self.body.get(name)
        if value is None and default:
            return default[0]
        good = isinstance(value, kind) and (kind is bool or not isinstance(value, bool))
        _need(good, self.where, f"{name} {str(value)[:80]!r}", f"{kind}")
        return value

    def ints(self, name: str, *default: list[int]) -> tuple[int, ...]:
        values = self.take(name, list, *default)
        _need(set(map(type, values)) <= {int}, self.where, f"{name} with others", "integers")
        return tuple(values)

    def texts(self, name: str) -> tuple[str, ...]:
        values = self.take(name, list, [])
        _need(set(map(type, values)) <= {str}, self.where, f"{name} with others", "texts")
        return tuple(values)

    def logprob(self, place: int) -> float:
        """vLLM writes nan and -inf as -9999."""
        value = self.take("logprob", (int, float))
        good = -9000 < value <= 1e-5
        _need(good, self.where, f"token {place} has log-prob {value}", "a finite number <= 0")
        return min(float(value), 0.0)

    def span(self) -> Span:
        version, begin, end = (self.body.get(k) for k in ("version", "start", "end"))
        text = str(version)
        good = text.isascii() and text.isdigit() and len(text) < 20
        good = good and type(begin) is int and type(end) is int
        _need(good, self.where, f"tokens {begin} to {end} of version {text[:40]!r}", "a number")
        assert isinstance(begin, int) and isinstance(end, int)
        _need(0 <= begin < end, self.where, f"versions over {begin} to {end}", "tokens")
        return begin, end, int(text)

    def no_error(self) -> None:
        error = self.body.get("error")
        _need(error is None, self.where, f"an error, {str(error)[:300]}", "tokens")
