"""Routes of an engine that several ranks hold together: vLLM gives them to the first rank alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm import LLMEngine


def ask_first_rank_for_routes(engine: LLMEngine) -> None:
    """Let the scheduler of every other rank of the tensor parallel group ask for no routes.

    With `external_launcher` each of these ranks has a scheduler and a worker. All workers capture
    routes, since that takes collectives, but only the one of the first rank keeps and returns them
    (vllm 0.32, `AuxOutputWorkerConnector.__init__`: "only the executor output rank owns the
    auxiliary output data plane"). Every scheduler asserts that its worker returned some
    (`AuxOutputSchedulerConnector.take_output`), so the other ranks would fail at the first sampled
    token, while the first one waits for them in the next all-reduce. No argument of vLLM's differs
    between ranks there, and a scheduler without a connector schedules the same requests.

    Samples of the other ranks have no routes; `distribute.part_of` gives the samples of an engine
    to its first rank.
    """
    if not _returns_outputs(engine):
        core: Any = engine.engine_core
        core.engine_core.scheduler.aux_output_connector = None


def reports_routes(engine: LLMEngine) -> bool:
    """True if vLLM reports the routes of this engine's samples on this rank."""
    return engine.vllm_config.aux_output_config.enabled and _returns_outputs(engine)


def _returns_outputs(engine: LLMEngine) -> bool:
    """True if this process has the outputs of the first rank of the tensor parallel group."""
    from vllm.distributed import get_tp_group

    backend = engine.vllm_config.parallel_config.distributed_executor_backend
    return backend != "external_launcher" or get_tp_group().is_first_rank
