"""Mutants: small faults that were put into the code on purpose, and the tests that must see them.

``make mutants`` applies each to a copy of the tree, one at a time, and runs the tests that guard
it; it fails if one of them passes. In every case the copy without a mutant must pass them all.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from tests.helpers.python_path import python_path

REPOSITORY = Path(__file__).parents[1]
COPIED = ("pyrl_ext", "tests", "configs", "benchmarks", "data", "docs", "pyproject.toml")
POLICY, CHECKPOINT = "pyrl_ext/trainer/policy.py", "pyrl_ext/megatron/checkpoint.py"
ROUTED, HOOK = "pyrl_ext/replay/routed_experts.py", "pyrl_ext/replay/router_hook.py"
LORA = "tests/trainer/test_lora.py"
MICROBATCH = "tests/pack/test_microbatch.py"
SHARED_MEANS = f"{MICROBATCH}::test_of_gives_means_over_sequences_whose_rows_two_ranks_share"
INDEX, STEP_TIME = "pyrl_ext/pack/index.py", "pyrl_ext/plan/forecast/step_time.py"


class Mutant(NamedTuple):
    """A fault.

    Args:
        name: what the code does wrong with it.
        file: of the repository.
        edits: (text that the file holds once, what replaces it).
        guards: node ids of the tests that must fail, every one.
    """

    name: str
    file: str
    edits: Sequence[tuple[str, str]]
    guards: Sequence[str]


MUTANTS = [
    Mutant(
        "a loss or a gradient norm that is not finite is accepted",
        POLICY,
        [
            ('if not math.isfinite(metrics["loss"]):', "if False:"),
            ("if not applied or not math.isfinite(norm):", "if False:"),
        ],
        [
            "tests/trainer/test_policy_losses.py::test_update_refuses_a_loss_that_is_not_finite",
            "tests/trainer/test_policy_losses.py::test_update_refuses_a_gradient_norm_that_is_not_finite",
        ],
    ),
    Mutant(
        "warm-up begins at a learning rate of 0",
        "pyrl_ext/megatron/optimizer.py",
        [("lr * (step + 1) / warmup_steps", "lr * step / warmup_steps")],
        [
            "tests/megatron/test_optimizer.py::test_warmed_up_rises_from_a_part_of_lr_to_all_of_it",
        ],
    ),
    Mutant(
        "the latest checkpoint is the last in alphabetical order",
        CHECKPOINT,
        [("if _number(p) >= 0), key=_number)", "if _number(p) >= 0), key=str)")],
        [
            "tests/megatron/test_checkpoint.py::test_latest_is_the_largest_number_written_to_its_end",
            "tests/megatron/test_checkpoint.py::test_prune_keeps_the_newest_whole_ones",
        ],
    ),
    Mutant(
        "a checkpoint that is being written counts",
        CHECKPOINT,
        [("_NAME.fullmatch(folder.name)", "_NAME.match(folder.name)")],
        [
            "tests/megatron/test_checkpoint.py::test_latest_is_the_largest_number_written_to_its_end",
            "tests/megatron/test_checkpoint.py::test_prune_keeps_the_newest_whole_ones",
        ],
    ),
    Mutant(
        "one checkpoint more is kept than asked for",
        CHECKPOINT,
        [("whole(folder)[:-keep]", "whole(folder)[: -keep - 1]")],
        ["tests/megatron/test_checkpoint.py::test_prune_keeps_the_newest_whole_ones"],
    ),
    Mutant(
        "the first batch after a resume is not checked",
        "pyrl_ext/train/loop.py",
        [("check = number == first or", "check = number == 0 or")],
        ["tests/test_train.py::test_train_checks_the_first_batch_after_a_resume"],
    ),
    Mutant(
        "prompt rows dilute the mismatch",
        "pyrl_ext/weights/check.py",
        [("0.0), mask.sum().double()", "0.0), torch.tensor(float(len(mask))).double()")],
        ["tests/weights/test_check.py::test_check_batch_averages_over_loss_tokens_alone"],
    ),
    Mutant(
        "the MTP loss is a sum over depths",
        POLICY,
        [("(self.plan.objective.mtp_coef / len(ahead))", "self.plan.objective.mtp_coef")],
        [
            "tests/trainer/test_policy_losses.py::test_accumulate_averages_the_mtp_loss_over_depths",
        ],
    ),
    Mutant(
        "a loss token too few is counted at each MTP depth",
        INDEX,
        [("s.loss_mask[1 + d :]", "s.loss_mask[2 + d :]")],
        ["tests/pack/test_index.py::test_of_counts_loss_tokens_as_a_loop"],
    ),
    Mutant(
        "the samples' routes of MTP layers are ignored",
        HOOK,
        [
            (
                "for hook in hooks if not hook.is_mtp or hook.layer_id in routed]",
                "for hook in hooks if not hook.is_mtp]",
            )
        ],
        [
            "tests/trainer/test_prefetch.py::test_microbatches_replay_mtp_layers_if_samples_have_their_routes",
        ],
    ),
    Mutant(
        "padding counts as agreement",
        HOOK,
        [
            (
                "@ routes.from_engine.double()",
                "@ (routes.from_engine | ~routes.is_token[:, None]).double()",
            )
        ],
        ["tests/replay/test_router_hook.py::test_use_leaves_padding_out_of_the_counts"],
    ),
    Mutant(
        "padding counts as routed by the engine",
        ROUTED,
        [("at, [0, 0, 1], pin", "at, [0, 1, 1], pin")],
        [
            "tests/replay/test_router_hook.py::test_use_leaves_padding_out_of_the_counts",
        ],
    ),
    Mutant(
        "routers choose the experts of padding",
        ROUTED,
        [("at, [0, 0, 1], pin", "at, [0, 0, 0], pin")],
        [
            "tests/replay/test_router_hook.py::test_use_leaves_padding_out_of_the_counts",
        ],
    ),
    Mutant(
        "a capacity of experts is overlooked where all experts are given",
        HOOK,
        [("        and config.moe_expert_capacity_factor is None\n", "")],
        ["tests/replay/test_router_hook.py::test_use_routes_as_megatron_does"],
    ),
    Mutant(
        "a rank without samples computes row 0",
        "pyrl_ext/pack/shard.py",
        [("for i in group.samples) or (-1,)", "for i in group.samples) or (0,)")],
        ["tests/pack/test_microbatch.py::test_of_no_samples_is_padding_alone"],
    ),
    Mutant(
        "the experts that vLLM keeps during a publish are left out of memory",
        "pyrl_ext/plan/forecast/memory.py",
        [("held += experts", "held += 0")],
        [
            "tests/plan/test_memory.py::test_stage_memory_of_a_publish_holds_the_experts_that_vllm_keeps"
        ],
    ),
    Mutant(
        "setting gradients to zero is left out of a step's time",
        STEP_TIME,
        [("moved = 8 * held", "moved = 4 * held")],
        ["tests/plan/test_step_time.py::test_step_time_counts_the_bytes_of_the_optimizer"],
    ),
    Mutant(
        "offloading is priced one way",
        STEP_TIME,
        [
            ('"offload trainer", 2 * offloaded', '"offload trainer", offloaded'),
            ('"offload activations", 2 * held', '"offload activations", held'),
        ],
        ["tests/plan/test_step_time.py::test_step_time_moves_offloaded_bytes_both_ways"],
    ),
    Mutant(
        "ranks that share a key/value head are refused",
        "pyrl_ext/plan/rules/_rule.py",
        [("groups % tp and tp % groups", "groups % tp")],
        ["tests/plan/test_rules.py::test_unfit_for_heads_accepts_divisors_and_multiples"],
    ),
    Mutant(
        "a warm-up of all updates is refused",
        "pyrl_ext/plan/rules/optimizer.py",
        [("plan.optimizer.warmup_steps > updates", "plan.optimizer.warmup_steps >= updates")],
        ["tests/plan/test_rules.py::test_compile_plan_refuses_a_warmup_beyond_the_last_update"],
    ),
    Mutant(
        "groups are consecutive samples, whatever their prompt",
        INDEX,
        [
            (
                '"groups": [s.prompt_id for s in samples],',
                '"groups": [i * len({s.prompt_id for s in samples}) // len(samples) '
                "for i in range(len(samples))],",
            )
        ],
        ["tests/pack/test_index.py::test_advantages_gets_rewards_and_groups_of_all_samples"],
    ),
    Mutant(
        "every step draws the same random numbers",
        "pyrl_ext/rollout/build.py",
        [("plan.seed * 1_000_003 + step", "plan.seed * 1_000_003")],
        [
            "tests/rollout/test_build.py::test_sampling_of_has_random_streams_of_its_own_in_every_step",
        ],
    ),
    Mutant(
        "the gradient of a mean over a sequence leaves the rows of other ranks out",
        "pyrl_ext/loss/inputs.py",
        [("return _all_reduced(grads[0], ctx.group), None", "return grads[0], None")],
        [SHARED_MEANS],
    ),
    Mutant(
        "a mean over a sequence takes the rows of all sequences",
        "pyrl_ext/pack/microbatch.py",
        [("torch.from_numpy(np.searchsorted(", "torch.from_numpy(0 * np.searchsorted(")],
        [SHARED_MEANS],
    ),
    Mutant(
        "columns of a microbatch are widened before their copy has arrived",
        "pyrl_ext/pack/microbatch.py",
        [("upload.arrive()", "pass")],
        [
            f"{MICROBATCH}::test_of_reads_no_copy_before_it_arrived",
            "tests/trainer/test_prefetch.py::test_microbatches_are_computed_after_their_copies_arrived",
        ],
    ),
    Mutant(
        "images go to the replicas of an encoder in turn, whatever their size",
        "pyrl_ext/pack/images.py",
        [("(load + int(sizes[image]), replica)", "(load + 1, replica)")],
        [
            "tests/pack/test_images.py::test_spread_gives_the_largest_image_to_the_replica_with_least"
        ],
    ),
    Mutant(
        "an encoder reads the patches of earlier microbatches too",
        "pyrl_ext/pack/encoder_work.py",
        [("else self.patches[first:last]", "else self.patches[:last]")],
        [
            "tests/pack/test_images.py::test_PatchStream_has_the_patches_of_a_replica_in_the_order_of_its_microbatches",
        ],
    ),
    Mutant(
        "gradients are sent to an encoder that is not trained",
        "pyrl_ext/trainer/edges.py",
        [("and plan.modules[grid.name].train\n", "and True\n")],
        [
            "tests/trainer/test_edges.py::test_build_edges_joins_last_stages_to_the_seats_of_the_first",
        ],
    ),
    Mutant(
        "the gradient of a factor that ranks hold whole is not summed over them",
        "pyrl_ext/megatron/lora.py",
        [("self.cut is None and size > 1", "False")],
        [f"{LORA}::test_Adapters_of_every_layout_equal_one_process"],
    ),
    Mutant(
        "a factor that experts share is reduced over the ranks of one expert",
        "pyrl_ext/megatron/lora.py",
        [('shared or getattr(like, "allreduce", True)', 'getattr(like, "allreduce", True)')],
        [f"{LORA}::test_Adapters_of_every_layout_equal_one_process"],
    ),
    Mutant(
        "the factors of one expert are reduced over ranks of other experts",
        "pyrl_ext/megatron/lora.py",
        [('shared or getattr(like, "allreduce", True)', "True")],
        [f"{LORA}::test_Adapters_of_every_layout_equal_one_process"],
    ),
    Mutant(
        "the gradient's norm counts cut factors on one rank only",
        "pyrl_ext/megatron/lora.py",
        [("if self.cut is not None:  # megatron", "if False:  # megatron")],
        [f"{LORA}::test_Adapters_of_every_layout_equal_one_process"],
    ),
    Mutant(
        "queries take what the A of values makes",
        "pyrl_ext/models/lora_live.py",
        [("enumerate(targeted(row, self.lora))", "enumerate(targeted(row, self.lora)[::-1])")],
        [f"{LORA}::test_Adapters_have_the_gradient_of_the_weights_they_are_merged_into"],
    ),
    Mutant(
        "no gradient begins at the embedding of a frozen base",
        "pyrl_ext/megatron/lora.py",
        [("output.requires_grad_() if torch.is_grad_enabled() else output", "output")],
        [f"{LORA}::test_recomputation_keeps_the_gradients_of_adapters"],
    ),
    Mutant(
        "tensor-parallel ranks cut all heads of a delta net at once, not those of each section",
        "pyrl_ext/models/weight.py",
        [
            (
                "return torch.cat([part[_part(len(part), size, rank)] for part in found])",
                "return torch.cat(found).chunk(size)[rank]",
            )
        ],
        ["tests/models/test_lora_table.py::test_shard_of_factors_goes_back_to_whole_factors"],
    ),
    Mutant(
        "context-parallel ranks take the weights of other heads than they compute",
        "pyrl_ext/megatron/head_exchange.py",
        [
            (
                "parts = [part.chunk(place.cp_size)[place.cp_rank]",
                "parts = [part.chunk(place.cp_size)[-1]",
            )
        ],
        [
            "tests/megatron/test_state_layers.py::test_layer_with_a_state_has_the_gradients_of_its_recurrence"
        ],
    ),
    Mutant(
        "a convolution reads rows of the sequence before",
        "pyrl_ext/ops/causal_conv1d/reference.py",
        [("torch.where(at >= s, F.pad", "torch.where(at >= 0, F.pad")],
        ["tests/ops/test_sequences.py::test_sequences_leak_nothing_into_others"],
    ),
    Mutant(
        "the second chunk of a sequence begins without a state",
        "pyrl_ext/ops/sequences.py",
        [("for n in range(1, int(turns))]", "for n in range(2, int(turns))]")],
        ["tests/ops/test_sequences.py::test_sequences_operators_are_exact"],
    ),
    Mutant(
        "a server without a cache of states is asked for one",
        "pyrl_ext/rollout/servers/publisher.py",
        [("return replace(canary, cached=0)", "return replace(canary)")],
        [
            "tests/rollout/servers/test_train.py::test_train_over_a_server_with_states_equals_the_engine_beside_the_trainer"
        ],
    ),
]


def copy_tree(folder: Path) -> None:
    """The parts of the repository that tests need, the native extension included."""
    for name in COPIED:
        source, ignore = REPOSITORY / name, shutil.ignore_patterns("__pycache__")
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=ignore)
        elif source.is_file():
            shutil.copy(source, folder / name)
    native = importlib.util.find_spec("pyrl_ext._C")
    if native is None or native.origin is None:
        sys.exit("mutants: no pyrl_ext._C, expected the native extension. Run make build")
    shutil.copy(native.origin, folder / "pyrl_ext")
    # an editable install would import the repository's package: empty modules replace its hooks
    for finder in sys.meta_path:
        if "editable" in (module := type(finder).__module__):
            (folder / f"{module}.py").touch()


def failed(tree: Path, guards: Sequence[str]) -> tuple[set[str], str]:
    """The ``guards`` that fail in ``tree``, parameters left out, and what pytest printed."""
    options = ["-q", "--tb=line", "-rf", "-p", "no:cacheprovider", "-p", "no:xdist"]
    run = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *guards],
        cwd=tree,
        env=os.environ | {"PYTHONPATH": python_path(tree), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
    )
    if run.returncode not in (0, 1):  # a test that is not there, an import that fails
        sys.exit(f"mutants: pytest ended with {run.returncode}:\n{run.stdout}{run.stderr}")
    return set(re.findall(r"^FAILED ([^\s\[]+)", run.stdout, re.MULTILINE)), run.stdout


def missed_by(tree: Path, mutant: Mutant) -> list[str]:
    """The guards that pass although ``mutant`` is in ``tree``, which is restored afterwards."""
    path = tree / mutant.file
    text = changed = path.read_text("utf-8")
    for old, new in mutant.edits:
        if changed.count(old) != 1:
            sys.exit(
                f"mutants: {mutant.file} has {old!r} {changed.count(old)} times, expected once. "
                "Write the mutant anew"
            )
        changed = changed.replace(old, new)
    try:
        path.write_text(changed, "utf-8")
        seen, _ = failed(tree, mutant.guards)
    finally:
        path.write_text(text, "utf-8")
    return [guard for guard in mutant.guards if guard not in seen]


def main() -> int:
    parser = argparse.ArgumentParser("tests.mutants", description=__doc__)
    parser.add_argument("-k", default="", help="only mutants whose name or file holds this")
    wanted = parser.parse_args().k
    chosen = [m for m in MUTANTS if wanted in m.name or wanted in m.file]
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder)
        copy_tree(tree)
        guards = sorted({guard for mutant in chosen for guard in mutant.guards})
        print(f"{len(guards)} tests without a mutant", flush=True)
        wrong, said = failed(tree, guards)
        if wrong:
            print(f"{said[-4000:]}\nmutants: these fail without a mutant: {sorted(wrong)}")
            return 1
        print("\n| mutant | file | caught by | s |\n| --- | --- | --- | ---: |", flush=True)
        caught = 0
        for mutant in chosen:
            begun = time.monotonic()
            missed = missed_by(tree, mutant)
            caught += not missed
            names = ", ".join(f"`{guard.split('::')[1]}`" for guard in missed or mutant.guards)
            verdict = f"MISSED by {names}" if missed else names
            seconds = time.monotonic() - begun
            print(f"| {mutant.name} | `{mutant.file}` | {verdict} | {seconds:.0f} |", flush=True)
    print(f"\n{caught} of {len(chosen)} mutants caught")
    return 0 if caught == len(chosen) else 1


if __name__ == "__main__":
    sys.exit(main())
