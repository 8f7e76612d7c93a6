"""A response in parts: what an abort or a server's death left of it, and what came afterwards."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import numpy as np

from pyrl_ext.rollout.remote.protocol import Answer, Partial, Request, Span


@dataclass
class Parts:
    """The response to a request, from one or several servers.

    Args:
        request: for all of it

    Attributes:
        token_ids, logprobs: [N] of the sampled tokens
        versions: (begin, end, version) over the N tokens
        routes: [rows, layers, K] of the tokens from ``request.routes_from`` on; a row is that of
            the server that read its token first
        finish_reason: None: something is missing
    """

    request: Request
    token_ids: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    versions: list[Span] = field(default_factory=list[Span])
    routes: np.ndarray | None = None
    finish_reason: str | None = None
    _asked: int = 0

    def rest(self, salt: str) -> Request:
        """The request for what is missing; its random stream continues at the next token.

        A server looks for stop strings in its own tokens alone, so the last tokens of the parts
        before are sampled again: each has at least one byte.
        """
        request = self.request
        window = max((len(text.encode()) for text in request.stop), default=1) - 1
        if self.token_ids and window:
            self.cut(max(len(self.token_ids) - window, 0))
        rows = 0 if self.routes is None else len(self.routes)
        self._asked += 1
        if self._asked == 1:
            return replace(request, salt=salt)
        return replace(
            request,
            request_id=f"{request.request_id}-{self._asked}",
            token_ids=(*request.token_ids, *self.token_ids),
            max_tokens=request.max_tokens - len(self.token_ids),
            routes_from=request.routes_from + rows,
            salt=salt,
        )

    def add(self, answer: Answer) -> None:
        """Take what a server answered to the rest."""
        self._take(answer.token_ids, answer.logprobs, answer.versions)
        if answer.routes is not None and answer.token_ids:  # else of unknown weights
            parts = [answer.routes] if self.routes is None else [self.routes, answer.routes]
            self.routes = np.concatenate(parts)
        if answer.finish_reason != "abort":
            self.finish_reason = answer.finish_reason
        elif len(self.token_ids) == self.request.max_tokens:
            self.cut(len(self.token_ids) - 1)  # how it ends is known with the last token only

    def keep(self, part: Partial, version: int) -> None:
        """Take the tokens of a server that died, but for the last, which may have been the end.

        Their routes are those of the next server, which reads them.

        Args:
            version: of the weights that generated them all
        """
        count = max(len(part.token_ids) - 1, 0)
        spans = [(0, count, version)] if count else []
        self._take(part.token_ids[:count], part.logprobs[:count], spans)

    def cut(self, count: int) -> None:
        """Keep the first ``count`` tokens."""
        del self.token_ids[count:], self.logprobs[count:]
        self.versions = [(b, min(e, count), v) for b, e, v in self.versions if b < count]
        if self.routes is not None:
            rows = len(self.request.token_ids) + count - self.request.routes_from
            self.routes = self.routes[: max(rows, 0)] if count else None  # of unknown weights

    @property
    def rows(self) -> int:
        """Number of rows of routes that the whole response has: its last token is no input."""
        request = self.request
        return len(request.token_ids) + len(self.token_ids) - 1 - request.routes_from

    def _take(
        self, tokens: Iterable[int], logprobs: Iterable[float], versions: Iterable[Span]
    ) -> None:
        before = len(self.token_ids)
        self.token_ids += tokens
        self.logprobs += logprobs
        for begin, end, version in versions:
            if self.versions and self.versions[-1][2] == version:
                begin = self.versions.pop()[0] - before
            self.versions.append((begin + before, end + before, version))
