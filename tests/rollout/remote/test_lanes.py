"""A lane of the embedded server, one request at a time."""

from __future__ import annotations

import asyncio

from pyrl_ext.rollout.remote.lanes import Job
from pyrl_ext.rollout.remote.protocol import Answer
from pyrl_ext.samples import Prompt, Turn
from tests.helpers.publishing import REQUEST


def test_end_of_a_request_that_was_aborted_before_its_first_token():
    """As it waited, or was held while the server was paused."""
    loop = asyncio.new_event_loop()
    job = Job(REQUEST, Turn(Prompt(0, REQUEST.token_ids), 0, 0, 4), loop)
    job.end("abort", None)
    loop.close()
    assert isinstance(job.answer, Answer)
    assert job.answer.token_ids == job.answer.versions == ()
    assert job.answer.finish_reason == "abort"
