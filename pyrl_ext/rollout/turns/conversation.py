"""One trajectory: an environment and what the policy answers it, turn after turn, as token ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from pyrl_ext.data.chat import check_known, check_size
from pyrl_ext.data.environment import Context, Observation, StepResult
from pyrl_ext.data.files import Broken
from pyrl_ext.data.tokenizer import Tokenizer
from pyrl_ext.data.workers import CallFailed, Pool
from pyrl_ext.parallel.user_code import describe, shown
from pyrl_ext.plan.schema.turns import NamedEnvironment, Turns
from pyrl_ext.rollout.turns.trajectory import samples_of
from pyrl_ext.samples import Prompt, Sample, Turn

_SHOWN = 200  # characters of an observation in a message


@dataclass(frozen=True)
class ConversationConfig:
    """Settings of all conversations of a run.

    Args:
        pool: worker processes of the environments
        environments: source of prompts -> its environment; a trajectory of another source is one
            response, which a reward function scores
        tokenizer: of the model
        vocabulary: number of token ids that the model knows
        stop_ids: tokens that end a turn
        turns: section of the plan
        max_new_tokens: response budget of a turn
        in_waves: a turn begins when every trajectory has its turn before: what the engine runs
            together does not depend on the time that environments take
        noted: kind of failure -> the first of it, which was printed
    """

    pool: Pool
    environments: Mapping[str, NamedEnvironment]
    tokenizer: Tokenizer
    vocabulary: int
    stop_ids: tuple[int, ...]
    turns: Turns
    max_new_tokens: int
    in_waves: bool = False
    noted: dict[str, str] = field(default_factory=dict[str, str])


class Conversation:
    """A trajectory as it grows. It does nothing by itself: results and turns are handed to it.

    Attributes:
        turns: what the engine sampled, a sample a turn
        environment: that answers; None: nothing does
        owner: of the environment, in the pool
        forks: turns whose context did not begin with the turn before
        changed: rows whose routes two turns report differently
        seconds: in calls of the environment
        samples: of the trajectory, once it is done
        dropped: why there are none
    """

    def __init__(self, prompt: Prompt, index: int, config: ConversationConfig):
        self.prompt = prompt
        self.index = index
        self.config = config
        self.turns: list[Sample] = []
        self.forks = 0
        self.changed = 0
        self.seconds = 0.0
        self.samples: list[Sample] | None = None
        self.dropped: CallFailed | None = None
        self.environment = config.environments.get(prompt.source)
        self.owner = config.pool.owner()
        self._context = list(prompt.tokens)
        self._reward = 0.0

    @property
    def number_of_turns(self) -> int:
        """Number of turns that the engine sampled."""
        return len(self.turns)

    def answered(self, sample: Sample) -> tuple[list[int], str]:
        """Take what the engine sampled; the arguments of the environment's ``step``."""
        self.turns.append(sample)
        self._context = sample.tokens.tolist()
        tokens = sample.response
        last = tokens[-1] in self.config.stop_ids
        return tokens, self.config.tokenizer.decode(tokens[:-1] if last else tokens)

    def started(self, value: Observation | None) -> Turn:
        """The first turn, after what ``start`` returned. Raises: CallFailed."""
        if isinstance(value, Context):
            tokens = self._known(value.tokens)
            if self.prompt.images and tokens[: len(self._context)] != self._context:
                rule = "one that begins with the prompt, since its images have places there"
                raise CallFailed("fork", f"returned a new context, expected {rule}")
            self._context = tokens
        elif value is not None:
            self._append(value)
        if not self._context or not self._room:
            raise CallFailed(
                "room",
                f"{len(self._context)} tokens before the first turn, expected 1 to "
                f"{self.config.turns.max_tokens - 1}, less than turns.max_tokens",
            )
        return self._turn()

    def stepped(self, result: StepResult) -> Turn | None:
        """The next turn, after what ``step`` returned; None: the trajectory is done.

        Raises: CallFailed.
        """
        self._reward += result.reward
        if result.done:
            last = self.turns[-1].finish_reason
            return self._end(last if self.environment is None else "stop")
        if len(self.turns) == self.config.turns.max_turns:
            rule = "expected done within turns.max_turns"
            raise CallFailed("turns", f"not done after {len(self.turns)} turns, {rule}")
        self._observe(result.observation)
        return self._turn() if self._room else self._end("length")

    def _observe(self, observation: Observation | None) -> None:
        context = self._context
        if not isinstance(observation, Context):
            self._append(observation)
            return
        tokens = self._known(observation.tokens)
        if tokens[: len(context)] == context:
            self._append(tokens[len(context) :])
            return
        if not tokens:
            raise CallFailed("empty", "returned an empty context, expected at least one token")
        if self.config.turns.form == "concatenated" or self.prompt.images:
            raise CallFailed(
                "fork",
                f"returned a context that differs within the first {len(context)} tokens, expected "
                "one that continues what is there (turns.form concatenated, or images). Use "
                "turns.form stepwise to train such turns separately",
            )
        self.forks += 1
        self._context = tokens

    def _append(self, observation: str | Sequence[int] | None) -> None:
        """Add a text, or ids, to the context.

        Raises:
            CallFailed: empty, too long, or with tokens that the model does not know
        """
        if observation is None:
            raise CallFailed("result", "returned the observation None, expected text or token ids")
        if isinstance(observation, str):
            tokens = self._encoded(observation)
        else:
            tokens = self._known(observation)
        if not tokens:
            text = f"returned the observation {shown(observation, _SHOWN)}"
            rule = "at least one token while the trajectory is not done"
            raise CallFailed("empty", f"{text}, expected {rule}")
        most = self.config.turns.max_observation_tokens
        if len(tokens) > most:
            text = f"returned an observation of {len(tokens)} tokens, expected at most "
            raise CallFailed("observation", f"{text}turns.max_observation_tokens {most}")
        self._context += tokens

    def _known(self, tokens: Sequence[int]) -> list[int]:
        for token in tokens:
            if not 0 <= token < self.config.vocabulary:
                rule = f"0 to {self.config.vocabulary - 1}, the model's"
                raise CallFailed("tokens", f"returned the token id {token}, expected {rule}")
        return list(tokens)

    def _encoded(self, text: str) -> list[int]:
        tokenizer = self.config.tokenizer
        most = self.config.turns.max_observation_tokens
        reason = "observation"
        try:
            check_size(text, tokenizer, most, "turns.max_observation_tokens")
            reason = "tokens"
            tokens = list(tokenizer(text, add_special_tokens=False)["input_ids"])
            check_known(text, tokens, tokenizer)
        except Broken as broken:
            raise CallFailed(reason, f"returned an observation: {broken}") from None
        except Exception as error:  # lone surrogates
            observation = f"returned the observation {shown(text, _SHOWN)}: {describe(error)}"
            rule = "text that the tokenizer encodes"
            raise CallFailed("tokens", f"{observation}, expected {rule}") from error
        return tokens

    @property
    def _room(self) -> int:
        """Tokens that may still be sampled."""
        return max(0, self.config.turns.max_tokens - len(self._context))

    def _turn(self) -> Turn:
        prompt = replace(self.prompt, tokens=tuple(self._context))
        budget = min(self.config.max_new_tokens, self._room)
        return Turn(prompt, self.index, len(self.turns), budget)

    def _end(self, finish_reason: str) -> None:
        turns = self.config.turns
        samples, self.changed = samples_of(self.turns, turns.merges, turns.routes)
        self.samples = [
            replace(sample, reward=self._reward, finish_reason=finish_reason) for sample in samples
        ]
