"""Requests and answers of an engine's server, in vLLM 0.32's JSON; what is wrong is refused."""

from __future__ import annotations

import base64
import hashlib
import io
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import (
    AfterValidator,
    AliasPath,
    BaseModel,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
)
from pydantic.dataclasses import dataclass as checked_dataclass

from pyrl_ext.parallel.ports import HEALTH as HEALTH
from pyrl_ext.samples import Sampling

GENERATE = "/inference/v1/generate"
PAUSE = "/pause"
RESUME = "/resume"
START = "/start_weight_update"
UPDATE = "/update_weights"
FINISH = "/finish_weight_update"
WEIGHT_INFO = "/weight_info"
RESET = "/reset_prefix_cache"
RPC = "/collective_rpc"
METRICS = "/metrics"

PAUSE_MODES = {"finish": "wait", "keep": "keep", "abort": "abort"}  # rollout.pause -> /pause?mode=
MAX_BODY = 64 << 20  # of a request, and of a message of an answer [bytes]
MAX_TOKENS = 1 << 24  # of a context
MIN_TEMPERATURE = 1e-6

Token = Annotated[int, Field(ge=0)]
Count = Annotated[int, Field(ge=0)]
Text = Annotated[str, Field(min_length=1)]
Int64 = Annotated[int, Field(ge=-(2**63), lt=2**64)]
Span = tuple[int, int, int]
Top = tuple[tuple[int, float], ...]


class ProtocolError(ValueError):
    """A message that does not follow the protocol; its server cannot be trusted."""


def _require(ok: bool, where: str, fault: str, rule: str) -> None:
    if not ok:
        raise ProtocolError(f"{where}: {fault}, expected {rule}")


def parse[T](kind: TypeAdapter[T], where: str, text: bytes) -> T:
    """The message in a JSON text. Raises: ProtocolError naming the first wrong field."""
    try:
        return kind.validate_json(text)
    except ValidationError as error:
        raise ProtocolError(f"{where}: {first_fault(error)}") from None


def first_fault(error: ValidationError) -> str:
    """The first wrong field of a message, and the rule that it breaks."""
    wrong = error.errors(include_url=False)[0]
    name = ".".join(map(str, wrong["loc"])) or "the message"
    rule = wrong["msg"].removeprefix("Input should be ").removeprefix("Value error, ")
    return f"{name} is {str(wrong['input'])[:200]!r}, expected {rule}"


def _no_overflow(temperature: float) -> float:
    """Refuse a temperature that logits divided by would overflow for."""
    if 0 < temperature < MIN_TEMPERATURE:
        raise ValueError(f"0, or at least {MIN_TEMPERATURE:g}")
    return temperature


def _sampling(*path: str) -> Any:
    """The place of a field in a request's JSON."""
    return Field(validation_alias=AliasPath("sampling_params", *path))


@checked_dataclass(frozen=True, config=ConfigDict(strict=True, populate_by_name=True))
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
        top: number of most likely tokens reported for each sampled one
        skips_cache: cached keys and values of the context are computed again
    """

    request_id: Annotated[str, Field(min_length=1, max_length=200)]
    token_ids: Annotated[tuple[Token, ...], Field(min_length=1, max_length=MAX_TOKENS)]
    max_tokens: Annotated[int, Field(gt=0, lt=MAX_TOKENS), _sampling("max_tokens")]
    random_stream: Annotated[
        tuple[Int64, Int64, Int64], _sampling("extra_args", "random_stream")
    ] = (0, 0, 0)
    salt: Annotated[str, Field(max_length=1000, validation_alias="cache_salt")] = ""
    routes_from: Annotated[Count, _sampling("routed_experts_prompt_start")] = 0
    temperature: Annotated[
        float,
        Field(ge=0, allow_inf_nan=False),
        AfterValidator(_no_overflow),
        _sampling("temperature"),
    ] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1), _sampling("top_p")] = 1.0
    top_k: Annotated[Count, _sampling("top_k")] = 0
    stop_ids: Annotated[tuple[Token, ...], _sampling("stop_token_ids")] = ()
    stop: Annotated[tuple[Text, ...], _sampling("stop")] = ()
    top: Annotated[int, Field(ge=0, le=100), _sampling("logprobs")] = 0
    skips_cache: Annotated[bool, _sampling("skip_reading_prefix_cache")] = False

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
            "skip_reading_prefix_cache": self.skips_cache,
            "extra_args": {"random_stream": list(self.random_stream)},
        }
        body: dict[str, Any] = {
            "request_id": self.request_id,
            "token_ids": list(self.token_ids),
            "sampling_params": sampling,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        return body | ({"cache_salt": self.salt} if self.salt else {})

    @classmethod
    def from_json(cls, text: bytes) -> Request:
        """The request in a body. Raises: ProtocolError."""
        return parse(_REQUEST, "request", text)


_REQUEST = TypeAdapter(Request)


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
        top: (token, log-prob) pairs for each sampled token, if the request asks for them
    """

    request_id: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: str
    versions: tuple[Span, ...] = ()
    routes: np.ndarray | None = None
    cached_tokens: int | None = None
    top: tuple[Top, ...] = ()

    def message(self, begin: int, last: bool = True) -> dict[str, Any]:
        """The tokens from ``begin`` on; what is known at the end only comes with the last."""
        tops = self.top[begin:] or ((),) * (len(self.token_ids) - begin)
        rows = zip(self.token_ids[begin:], self.logprobs[begin:], tops, strict=True)
        content = [
            {
                "token_id": token,
                "logprob": logprob,
                "top_logprobs": [{"token_id": t, "logprob": p} for t, p in top],
            }
            for token, logprob, top in rows
        ]
        choice: dict[str, Any] = {
            "index": 0,
            "token_ids": list(self.token_ids[begin:]),
            "logprobs": {"content": content},
        }
        body: dict[str, Any] = {"request_id": self.request_id, "choices": [choice]}
        if last:
            choice["finish_reason"] = self.finish_reason
            choice["routed_experts"] = encode_routes(self.routes)
            choice["weight_versions"] = [
                {"version": str(v), "start": b, "end": e} for b, e, v in self.versions
            ]
            body["usage"] = {"prompt_tokens_details": {"cached_tokens": self.cached_tokens}}
        return body


# messages of an answer ---------------------------------------------------------------------------


class _Message(BaseModel):
    """Fields of vLLM's messages; others are not read, and null is as good as a missing one."""

    model_config = ConfigDict(strict=True)


class _TokenLogprob(_Message):
    token_id: int
    logprob: Annotated[float, Field(gt=-9000, le=1e-5)]  # vLLM writes nan and -inf as -9999
    top_logprobs: list[_TokenLogprob] | None = None


class _Version(_Message):
    version: Annotated[str, Field(pattern=r"^[0-9]{1,19}$")]
    start: Token
    end: int


class _Choice(_Message):
    token_ids: list[Token] | None = None
    content: Annotated[
        list[_TokenLogprob] | None, Field(validation_alias=AliasPath("logprobs", "content"))
    ] = None
    finish_reason: Literal["stop", "length", "abort"] | None = None
    routed_experts: str | None = None
    weight_versions: list[_Version] | None = None


_CACHED = AliasPath("usage", "prompt_tokens_details", "cached_tokens")


class _Event(_Message):
    choices: Annotated[list[_Choice], Field(max_length=1)] = []
    cached: Annotated[int | None, Field(validation_alias=_CACHED)] = None
    error: Any = None


_EVENT = TypeAdapter(_Event)


@dataclass
class Partial:
    """The part of an answer that came so far: its tokens are good, also when the server dies.

    Attributes:
        token_ids, logprobs: as in `Answer`
    """

    request: Request
    token_ids: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    _top: list[Top] = field(default_factory=list[Top])
    _finish: str | None = None
    _versions: tuple[Span, ...] = ()
    _routes: np.ndarray | None = None
    _cached: int | None = None

    def add(self, text: bytes) -> None:
        """Takes one message of the stream. Raises: ProtocolError."""
        where = f"answer to {self.request.request_id}"
        event = parse(_EVENT, where, text)
        _require(event.error is None, where, f"an error, {str(event.error)[:300]}", "tokens")
        if event.cached is not None:
            self._cached = event.cached
        for choice in event.choices:
            self._add(choice, where)

    def _add(self, choice: _Choice, where: str) -> None:
        tokens = choice.token_ids or []
        content = choice.content or []
        _require(not (self._finish and tokens), where, "tokens after its end", "none")
        fault = f"log-probs of tokens {[row.token_id for row in content][:8]}"
        _require([row.token_id for row in content] == tokens, where, fault, f"of {tokens[:8]}")
        for row in content:
            self.logprobs.append(min(row.logprob, 0.0))
            top = row.top_logprobs or []
            self._top.append(tuple((other.token_id, min(other.logprob, 0.0)) for other in top))
        self.token_ids += tokens
        count = len(self.token_ids)
        most = self.request.max_tokens
        _require(count <= most, where, f"{count} tokens", f"at most {most}")
        if choice.routed_experts is not None:
            self._routes = decode_routes(choice.routed_experts, where, self._routes)
        if choice.weight_versions is not None:
            spans = ((span.start, span.end, int(span.version)) for span in choice.weight_versions)
            self._versions = tuple(spans)
        self._finish = choice.finish_reason or self._finish

    def answer(self) -> Answer:
        """The whole answer, whose parts agree. Raises: ProtocolError."""
        request = self.request
        count = len(self.token_ids)
        where = f"answer to {request.request_id}"
        finish = self._finish
        _require(finish is not None, where, f"an end after {count} tokens", "a finish_reason")
        _require(count > 0 or finish == "abort", where, "no token", "at least one")
        full = finish != "length" or count == request.max_tokens
        _require(full, where, f"length after {count} tokens", f"{request.max_tokens} of them")
        versions = self._versions if count else ()
        begins = [begin for begin, _, _ in versions]
        ends = [end for _, end, _ in versions]
        good = [0, *ends] == [*begins, count] and all(b < e for b, e, _ in versions)
        _require(good or not count, where, f"versions {versions}", f"spans that cover 0 to {count}")
        rising = all(a[2] <= b[2] for a, b in pairwise(versions))
        _require(rising, where, f"versions {versions}", "rising ones")
        rows = max(len(request.token_ids) + count - 1 - request.routes_from, 0)
        if self._routes is not None and (count or len(self._routes) > rows):
            length = len(self._routes)
            _require(length == rows, where, f"routes of {length} tokens", f"of {rows}")
        return Answer(
            request.request_id,
            tuple(self.token_ids),
            tuple(self.logprobs),
            str(finish),
            versions,
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


def decode_routes(text: str, where: str, before: np.ndarray | None) -> np.ndarray:
    """Rows of an answer, after those that came before. Raises: ProtocolError."""
    try:
        routes = np.load(io.BytesIO(base64.b64decode(text, validate=True)), allow_pickle=False)
    except (ValueError, EOFError, OSError, SyntaxError, MemoryError) as error:
        raise ProtocolError(f"{where}: routed_experts, {error}, expected an .npy file") from None
    good = isinstance(routes, np.ndarray) and routes.ndim == 3
    good = good and routes.dtype in (np.uint8, np.uint16, np.int32)
    good = good and (before is None or before.shape[1:] == routes.shape[1:])
    _require(good, where, "routed_experts of another kind", "integers [rows, layers, K]")
    return routes if before is None else np.concatenate([before, routes])
