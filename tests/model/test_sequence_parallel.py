"""Slices of packed rows: what the ranks of a group compute is what one process computes."""

import pytest
import torch

from rloo import RLOOConfig
from rloo.distributed import World, make_world
from rloo.model.micro_batch import make_sample
from rloo.model.parallel.sequence_parallel import kv_repeats
from rloo.model.policy import Policy
from support.adapters import make_adapted, perturb
from support.models import CPU, make_linear_attention_model, make_model, make_samples
from support.text import make_tokenizer
from support.thread_group import ThreadGroup, in_threads
from support.vision_models import make_vision_model

# Grouped heads (4 of queries, 2 of keys), caps, windows, sinks, experts; and how exactly.
EXACT = 1e-12
KINDS = {
    "llama": (torch.float64, EXACT),
    "qwen3": (torch.float64, EXACT),
    "gemma2": (torch.float64, 1e-5),  # its norms compute in float32
    "gemma3": (torch.float64, 1e-5),
    "gpt_oss": (torch.float32, 1e-4),  # torch multiplies experts in at most float32
    "qwen3_moe": (torch.float32, 1e-4),
}
# One completion of one token: all its log-probs come from the first slice.
TINY = [make_sample((0, 0), 6, 1)]


def make_policy(model, group=None, **options) -> Policy:
    size = group.size if group else 1
    config = RLOOConfig(
        use_cpu=True,
        **{
            "sp_size": size, "bf16": False, "gradient_checkpointing": False, "beta": 0.1,
            "router_aux_loss_coef": 0.0,
        } | options,
    )  # fmt: skip
    rank = group.rank if group else 0
    world = World(CPU, rank, size, sequence_group=group)
    return Policy(model, make_tokenizer(), config, world=world, num_training_steps=1)


def computed(policy: Policy, samples) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Log-probs, entropies and log-probs of the reference, and the gradients of a loss of them."""
    batch = policy.batch(samples)
    found = policy.logprobs(batch, reference=True)
    weight = torch.linspace(-1, 2, len(found.logprobs), dtype=found.logprobs.dtype)
    # By sequence: tokens of all slices have a part in the gradient of each.
    loss = (weight * found.logprobs).sum().exp() + 0.3 * (weight * found.entropy).sum()
    loss.backward()
    scores = [found.logprobs.detach(), found.entropy.detach(), found.reference]
    none = [torch.zeros_like(p) if p.grad is None else p.grad for p in policy.parameters]
    return [*scores, policy.score(batch, 0.7)], none


def require_equal_ranks(make, size: int, samples, most: float = EXACT, **options) -> None:
    """Assert that `size` ranks have the log-probs of one process, and the sum of their gradients
    is its gradient."""
    scores, gradients = computed(make_policy(make(), **options), samples)
    assert sum(gradient.abs().sum() for gradient in gradients) > 0
    models = [make() for _ in range(size)]  # not in threads, which share the random generator

    def work(group: ThreadGroup) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        return computed(make_policy(models[group.rank], group, **options), samples)

    ranks = in_threads(size, work)
    for theirs, _ in ranks:
        for one, other in zip(scores, theirs, strict=True):
            torch.testing.assert_close(other, one, rtol=most, atol=most)
    summed = [sum(parts) for parts in zip(*(grads for _, grads in ranks), strict=True)]
    for one, other in zip(gradients, summed, strict=True):
        torch.testing.assert_close(other, one, rtol=most, atol=most * float(one.abs().max()))


@pytest.mark.parametrize("size", (2, 4))
@pytest.mark.parametrize("name", KINDS)
def test_ranks_compute_what_one_process_computes(name, size):
    dtype, most = KINDS[name]
    require_equal_ranks(lambda: make_model(name).to(dtype), size, make_samples(2, 3), most)


@pytest.mark.parametrize("size", (2, 4))
@pytest.mark.parametrize("reentrant", (False, True))
def test_activations_are_computed_again_in_step(size, reentrant):
    again = {"gradient_checkpointing": True}
    again["gradient_checkpointing_kwargs"] = {"use_reentrant": reentrant}
    require_equal_ranks(lambda: make_model("qwen3").double(), size, make_samples(2, 3), **again)


@pytest.mark.parametrize("size", (2, 4))
def test_an_adapter_and_its_base_are_computed_in_slices(size):
    def make():
        model = make_adapted().double()
        perturb(model)
        return model

    require_equal_ranks(make, size, make_samples(2, 3))


@pytest.mark.parametrize("samples", (TINY, [make_sample((0, 0), 2, 1)], make_samples(1, 1)))
def test_a_slice_may_have_no_log_probs_and_no_tokens(samples):
    def make():
        return make_model("llama").double()

    require_equal_ranks(make, 4, samples)


def test_16_bits_are_rounded_alike():
    require_equal_ranks(lambda: make_model("qwen3"), 2, make_samples(2, 3), 2e-2, bf16=True)


@pytest.mark.parametrize(
    ("heads", "of_keys", "size", "repeats"),
    ((8, 8, 4, 1), (8, 4, 4, 1), (8, 2, 4, 2), (8, 1, 8, 8), (12, 3, 2, 2), (12, 2, 3, 3)),
)
def test_keys_are_repeated_as_often_as_ranks_need(heads, of_keys, size, repeats):
    assert kv_repeats(heads, of_keys, size) == repeats


@pytest.mark.parametrize(
    ("make", "size", "options", "said"),
    (
        (lambda: make_model("qwen3"), 3, {}, "the model has 4 attention heads"),
        (lambda: make_model("gpt2"), 3, {}, "the model has 4 attention heads"),
        (lambda: make_model("qwen3_moe"), 2, {"router_aux_loss_coef": 0.1}, "balancing loss"),
        (lambda: make_vision_model("qwen2_vl"), 2, {}, "reads images"),
        (make_linear_attention_model, 2, {}, "layers of type linear_attention"),
    ),
)
def test_models_that_do_not_combine_are_refused_by_name(make, size, options, said):
    models = [make() for _ in range(size)]
    with pytest.raises(ValueError, match=said) as raised:
        in_threads(size, lambda group: make_policy(models[group.rank], group, **options))
    assert f"sp_size is {size}" in str(raised.value)


def test_positions_that_depend_on_the_length_are_refused():
    model = make_model("llama")
    model.config.rope_parameters = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    with pytest.raises(ValueError, match="positions of type dynamic"):
        in_threads(2, lambda group: make_policy(model, group))


def test_the_size_of_a_group_has_the_name_that_accelerate_has():
    config = RLOOConfig(sp_size=2, state_dict_type="sharded", parallel="fsdp2")
    assert config.parallel_kwargs == {"sp_size": 2, "state_dict_type": "sharded"}
    assert (config.sp_size, RLOOConfig().sp_size) == (2, 1)


def test_a_group_needs_its_processes():
    with pytest.raises(ValueError, match="sp_size is 2 and the number of processes is 1"):
        make_world(use_cpu=True, sp_size=2)


class _MixesTokens(torch.nn.Module):
    """Adds to each token's state that of the token before."""

    def forward(self, states):
        return states + torch.nn.functional.pad(states, (0, 0, 1, -1))


def test_a_model_that_mixes_tokens_outside_of_attention_is_refused():
    def make():
        model = make_model("llama")
        model.model.norm = torch.nn.Sequential(model.model.norm, _MixesTokens())
        return model

    models = [make(), make()]
    with pytest.raises(ValueError, match="LlamaForCausalLM relates tokens to each other outside"):
        in_threads(2, lambda group: make_policy(models[group.rank], group))


@pytest.mark.parametrize(
    ("options", "said"),
    (
        ({"num_processes": 3}, "num_processes is 3, which it must divide"),
        ({"parallel": "zero3"}, "parallel is zero3"),
        ({"parallel": "zero1"}, "parallel is zero1"),
        ({"packing": False}, "packing is False"),
        ({"sp_size": 0}, "sp_size is 0"),
    ),
)
def test_options_that_do_not_combine_are_refused(options, said):
    with pytest.raises(ValueError, match=said):
        RLOOConfig(**{"sp_size": 2, "use_cpu": True, "bf16": False} | options)
