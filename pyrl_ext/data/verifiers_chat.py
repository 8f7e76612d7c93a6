"""The harness in which the policy plays environments of the package verifiers: a chat with tools.

The harnesses of the package are programs with a Python environment each. This one runs in the
process of the environments. The package finds harnesses by the name of their module.
"""

from __future__ import annotations

import json
from contextlib import AsyncExitStack
from contextvars import ContextVar
from typing import Any

import httpx
import openai
import verifiers.v1 as vf
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.harnesses.utils.mcp import call_mcp, connect_mcp
from verifiers.v1.runtimes import ProgramResult

KEY: ContextVar[str] = ContextVar("key")
"""Key of the trajectory that runs, which its calls hand on to the endpoint."""


class Chat(vf.Harness[vf.HarnessConfig]):
    """Calls the policy and the tools that it asks for, until an answer asks for none."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_MCP = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    def __init__(self, config: vf.HarnessConfig):
        super().__init__(config)
        # one for all trajectories: certificates take 18 ms to load, and URLs are local
        limits = httpx.Limits(max_connections=None)
        self._http = httpx.AsyncClient(verify=False, trust_env=False, limits=limits, timeout=None)

    async def launch(
        self,
        ctx: Any,
        trace: Any,
        runtime: Any,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: vf.TaskData,
        tool_interception_url: str | None = None,
    ) -> ProgramResult:
        """See the package's `Harness.launch`. Raises: openai.APIError."""
        client = openai.AsyncOpenAI(
            base_url=endpoint,
            api_key=secret,
            http_client=self._http,
            default_headers={"X-API-Key": KEY.get()},
        )
        messages = self._messages(data)
        urls = {
            name: {"url": url, "timeout": self.config.tool_timeout}
            for name, url in mcp_urls.items()
        }
        async with AsyncExitStack() as stack:
            tools: Any
            tools, places, servers = await connect_mcp({"mcpServers": urls}, stack)
            while True:
                completion = await client.chat.completions.create(
                    model=ctx.model, messages=messages, tools=tools or openai.omit
                )
                message = completion.choices[0].message
                messages.append(message.model_dump(exclude_none=True))
                calls: list[Any] = message.tool_calls or []
                if not calls:
                    return ProgramResult(exit_code=0, stdout="", stderr="")
                for call in calls:
                    content = await _result(call.function, servers, places)
                    result = {"role": "tool", "tool_call_id": call.id, "content": content}
                    messages.append(result)

    def _messages(self, data: vf.TaskData) -> list[Any]:
        system, prompt = self.resolve_prompt(data)
        messages: list[Any] = []
        if system:
            messages.append({"role": "system", "content": system})
        if isinstance(prompt, str):
            messages.append({"role": "user", "content": prompt})
        else:
            messages += [message_to_wire(message) for message in prompt or ()]
        return messages


async def _result(call: Any, servers: Any, places: Any) -> Any:
    """Call a tool and return its result, or an error message if the call is invalid."""
    if call.name not in places:
        return f"no tool {call.name!r}, expected {' or '.join(places)}"
    try:
        arguments = json.loads(call.arguments or "{}")
    except ValueError as error:
        return f"the arguments are no JSON: {error}"
    if not isinstance(arguments, dict):
        return f"the arguments are a {type(arguments).__name__}, expected a JSON object"
    return await call_mcp(servers, places, call.name, arguments)


__all__ = ["Chat"]
