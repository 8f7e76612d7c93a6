"""The agents of a run: one endpoint, and the trajectories that call it."""

from __future__ import annotations

import threading
from collections.abc import Generator, Sequence

from pyrl_ext.data.prompt_dataset import PromptDataset
from pyrl_ext.plan import Plan
from pyrl_ext.rollout.agents.agent_feed import MODEL, AgentFeed, AgentsConfig
from pyrl_ext.rollout.agents.chat_format import ChatFormat
from pyrl_ext.rollout.agents.endpoint import Endpoint
from pyrl_ext.rollout.agents.protocol import Rules
from pyrl_ext.rollout.agents.trajectory import TrajectoryConfig
from pyrl_ext.rollout.engine import Engine
from pyrl_ext.rollout.prompt_groups import Counts, EngineEvent
from pyrl_ext.rollout.turns.turn_stats import Trajectories, recorded, trajectories_of
from pyrl_ext.samples import Prompt, Sampling


class Agents(Trajectories):
    """The agents of a run. The endpoint begins with the first rollout.

    Args:
        plan: names one
        source: runs it
    """

    def __init__(self, plan: Plan, source: PromptDataset):
        assert source.environments is not None  # the plan names an agent
        super().__init__(plan)
        rollout = plan.rollout
        rules = Rules(
            model=MODEL,
            temperature=rollout.temperature,
            top_p=rollout.top_p,
            stop=tuple(rollout.stop),
            max_new_tokens=rollout.max_new_tokens,
            vocabulary=plan.sizes.vocab_size,
        )
        trajectory = TrajectoryConfig(
            chat=ChatFormat.load(source.tokenizer, plan.turns.renderer),
            tokenizer=source.tokenizer,
            stop_ids=source.stop_ids,
            turns=plan.turns,
            max_new_tokens=rollout.max_new_tokens,
        )
        self.config = AgentsConfig(
            endpoint=Endpoint(rules),
            pool=source.environments,
            trajectory=trajectory,
            in_waves=rollout.engine == "hf" and not plan.remote_engines,
        )
        self._started = False
        self._starting = threading.Lock()  # rollouts of several steps may begin together

    def ask(
        self, engine: Engine, prompts: Sequence[Prompt], sampling: Sampling, counts: Counts
    ) -> Generator[EngineEvent]:
        if self.plan.rollout.engine == "recorded":
            yield from recorded(engine, prompts, sampling, counts)
        elif prompts:
            with self._starting:
                if not self._started:
                    self.config.endpoint.start()
                    self._started = True
            feed = AgentFeed(prompts, sampling.samples_per_prompt, self.config)
            yield from trajectories_of(feed, engine, sampling, counts)

    def close(self) -> None:
        self.config.endpoint.close()
