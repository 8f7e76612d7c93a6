"""Log-prob and entropy of verl's functions: against float64, values and gradients."""

import pytest
import torch

from tests.helpers.ranks import run_ranks

pytestmark = pytest.mark.multiprocess

ROWS = 6
VOCAB = 64
SCALE = 3.0


def exact(logits, labels, weights):
    """(log-probs, entropies, gradient) of all columns in float64."""
    whole = logits.double().requires_grad_()
    logp = whole.log_softmax(-1)
    entropy = -(logp.exp() * logp).sum(-1)
    chosen = logp.gather(-1, labels[..., None]).squeeze(-1)
    ((chosen + entropy) * weights).sum().backward()
    assert whole.grad is not None
    return chosen.detach(), entropy.detach(), whole.grad


def close(found, want, tolerance):
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), want, atol=tolerance, rtol=tolerance)


class Case:
    """Logits of a rank of two, and what is right for all columns.

    Args:
        tolerance: of our values.
        theirs: tolerance of verl's values, and of gradients.
    """

    def __init__(self, group, dtype, tolerance, theirs):
        torch.manual_seed(0)
        self.dtype = dtype
        self.tolerance = tolerance
        self.theirs = theirs
        self.logits = (SCALE * torch.randn(1, ROWS, VOCAB)).to(dtype)
        self.labels = torch.randint(VOCAB, (1, ROWS))
        self.weights = torch.rand(1, ROWS)
        self.half = slice(group.rank() * VOCAB // 2, (group.rank() + 1) * VOCAB // 2)
        self.logprob, self.entropy, self.grad = exact(self.logits, self.labels, self.weights)
        self.right = {"entropy": self.entropy, "chunks": self.entropy, "logprob": self.logprob}

    def shard(self):
        return self.logits[..., self.half].clone().requires_grad_()

    def unchanged(self, shard):
        return torch.equal(shard, self.logits[..., self.half])

    def close_to_theirs(self, found, want):
        torch.testing.assert_close(found.double(), want, atol=self.theirs, rtol=self.theirs)

    def of_functions(self, shard, order):
        """Results of verl's functions, or ours in their place, called one after the other."""
        from verl.utils.megatron import tensor_parallel as verls

        functions = {
            "logprob": lambda x: verls.vocab_parallel_log_probs_from_logits(x, self.labels),
            "entropy": verls.vocab_parallel_entropy,
            "chunks": lambda x: verls.vocab_parallel_entropy_with_chunking(x, 4),
        }
        return {name: functions[name](shard) for name in order}


def check_theirs(case):
    """megatron writes over fp32 logits, so theirs is right in one order alone (#1672)."""
    found = case.of_functions(case.shard() * 1, ["entropy", "chunks", "logprob"])
    for name, want in case.right.items():
        case.close_to_theirs(found[name], want)
    if case.dtype == torch.float32:
        mine = case.shard() * 1
        found = case.of_functions(mine, ["logprob", "entropy"])
        assert (found["entropy"].double() - case.entropy).abs().max() > 0.1
        assert not case.unchanged(mine)


def check_ours(case, order):
    leaf = case.shard()
    mine = leaf * 1
    found = case.of_functions(mine, order)
    assert case.unchanged(mine)
    for name, want in case.right.items():
        close(found[name], want, case.tolerance)
    ((found["logprob"] + found["entropy"]) * case.weights).sum().backward()
    assert leaf.grad is not None and leaf.grad.dtype == case.dtype
    case.close_to_theirs(leaf.grad, case.grad[..., case.half])


def check_engine(case, engine):
    """The engine's own function, with a temperature for each row; the last row is padding."""
    from verl.workers.engine.megatron.transformer_impl import MegatronEngineWithLMHead

    process = MegatronEngineWithLMHead._lm_head_logits_processor
    off = ("calculate_sum_pi_squared", "distillation_use_topk", "distillation_only")
    options = dict.fromkeys(off, False)
    options |= {"logits_processor_func": None, "batch": None, "data_format": "thd"}
    hot = torch.tensor([[0.5, 2.0, 1.0, 0.7, 1.3, 0.0]])
    scaled = case.logits.double() / hot[..., None].clamp(min=1e-8)
    logprob, entropy, _ = exact(scaled, case.labels, case.weights)
    for wanted in (True, False):
        mine = case.shard()
        found = process(engine, mine, case.labels, hot, calculate_entropy=wanted, **options)
        close(found["log_probs"][:, :-1], logprob[:, :-1], case.tolerance)
        assert ("entropy" in found) == wanted
        if wanted:
            close(found["entropy"][:, :-1], entropy[:, :-1], case.tolerance)
        assert case.unchanged(mine) and hot[0, -1] == 0
    options["calculate_sum_pi_squared"] = True  # theirs
    with torch.no_grad():
        found = process(engine, case.shard(), case.labels, hot, calculate_entropy=True, **options)
    square = scaled.softmax(-1).square().sum(-1)
    case.close_to_theirs(found["sum_pi_squared"][:, :-1], square[:, :-1])
    close(found["log_probs"][:, :-1].float(), logprob[:, :-1], case.theirs)


def on_rank(group, dtype, tolerance, theirs_tolerance):
    from pyrl_ext.integrations import uninstall, verl
    from tests.helpers.verl_cpu import megatron_groups, new_engine

    case = Case(group, dtype, tolerance, theirs_tolerance)
    with megatron_groups(tp=2):
        check_theirs(case)
        verl.install(["logprobs"])
        engine = new_engine(tp=2)
        for order in (["logprob", "entropy", "chunks"], ["entropy", "logprob", "chunks"]):
            check_ours(case, order)
        check_engine(case, engine)
        uninstall()


@pytest.mark.parametrize(
    ("dtype", "tolerance", "theirs"),
    [(torch.float32, 4e-6, 1e-3), (torch.bfloat16, 4e-6, 0.2)],
)
def test_logprobs_and_entropies_are_those_of_float64(dtype, tolerance, theirs):
    run_ranks(on_rank, 2, dtype, tolerance, theirs, preload=("tests.helpers.verl_cpu",))
