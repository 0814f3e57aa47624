"""Shards of a layer's matrices: what the ranks of a group compute is what one process computes."""

import pytest
import torch
import transformers

from rloo import RLOOConfig
from rloo.distributed import World
from rloo.distributed.sharded_tensor import first_elements, full_tensor, shape_of, tp_shard
from rloo.model.optimizers import make_optimizers
from rloo.model.policy import Policy
from support.adapters import make_adapted
from support.models import (
    COMMON,
    CPU,
    disturb,
    make_linear_attention_model,
    make_model,
    make_samples,
)
from support.text import make_tokenizer
from support.thread_group import computed, in_threads
from support.vision_models import make_vision_model

EXACT = 1e-12
# Norms of heads, biases of heads, caps and windows; and how exactly.
KINDS = {
    "llama": (2, EXACT), "qwen3": (2, EXACT), "qwen3_8": (4, EXACT), "qwen2": (2, EXACT),
    "gemma2": (2, 1e-5), "gemma3": (2, 1e-5),  # their norms compute in float32
}  # fmt: skip


def make(name: str, **changed):
    if name != "qwen2":
        model = make_model(name)
    else:
        torch.manual_seed(0)
        model = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**COMMON | changed))
    disturb(model)
    return model.double()


def make_policy(model, group=None, **options) -> Policy:
    size = group.size if group else 1
    config = RLOOConfig(
        use_cpu=True,
        **{"tp_size": size, "bf16": False, "gradient_checkpointing": False, "beta": 0.1} | options,
    )
    world = World(CPU, group.rank if group else 0, size, tensor_group=group)
    return Policy(model, make_tokenizer(), config, world=world, num_training_steps=1)


def sharded(model, size: int, work, **options) -> list:
    """The results of `work(policy)` in each rank of a group."""
    models = [make(model) if isinstance(model, str) else model() for _ in range(size)]
    return in_threads(size, lambda group: work(make_policy(models[group.rank], group, **options)))


def require_equal_ranks(name: str, **options) -> None:
    """Assert that ranks have the log-probs of one process, and its gradients or shards of them."""
    size, most = KINDS[name]
    samples = make_samples(2, 3)
    scores, gradients = computed(make_policy(make(name), **options), samples)

    def work(policy: Policy):
        found, own = computed(policy, samples)
        return found, own, [tp_shard(p) for p in policy.parameters]

    found = sharded(name, size, work, **options)
    assert any(shard is not None for shard in found[0][2])
    for theirs, own, shards in found:
        for one, other in zip(scores, theirs, strict=True):
            torch.testing.assert_close(other, one, rtol=most, atol=most)
        for whole, part, shard in zip(gradients, own, shards, strict=True):
            one = whole if shard is None else shard.of(whole)
            torch.testing.assert_close(part, one, rtol=most, atol=most * float(whole.abs().max()))


@pytest.mark.parametrize("name", KINDS)
def test_ranks_compute_what_one_process_computes(name):
    require_equal_ranks(name)


@pytest.mark.parametrize("reentrant", (False, True))
def test_activations_are_computed_again_in_step(reentrant):
    again = {"gradient_checkpointing": True}
    again["gradient_checkpointing_kwargs"] = {"use_reentrant": reentrant}
    require_equal_ranks("qwen3", **again)


def test_a_rank_has_a_part_of_each_layer_and_all_of_the_rest():
    def work(policy: Policy):
        named = policy.model.named_parameters()
        with policy.gathered_weights(), torch.no_grad():
            gathered = [p.detach().clone() for p in policy.model.parameters()]
            gathered.append(policy.model(torch.tensor([[5, 6, 7]]), use_cache=False).logits)
        facts = {n: (p.numel(), shape_of(p), first_elements(p, 100).clone()) for n, p in named}
        return facts, gathered, [full_tensor(p) for p in policy.model.parameters()]

    alone = make("qwen3")
    whole = dict(alone.named_parameters())
    logits = alone(torch.tensor([[5, 6, 7]]), use_cache=False).logits
    ranks = sharded("qwen3", 2, work)
    for facts, gathered, again in ranks:
        torch.testing.assert_close(gathered.pop(), logits, rtol=EXACT, atol=EXACT)
        for (name, p), one, other in zip(whole.items(), gathered, again, strict=True):
            assert torch.equal(one, p) and torch.equal(other, p)
            divided = "_proj" in name
            assert facts[name][:2] == (p.numel() // (1 + divided), p.shape)
    for name, p in whole.items():
        parts = [facts[name][2] for facts, _, _ in ranks]
        found = torch.cat(parts) if "_proj" in name else parts[0]
        assert torch.equal(found.sort().values, p.detach().flatten()[:100].sort().values)


@pytest.mark.parametrize(
    ("model", "size", "said"),
    (
        ("qwen3", 4, "Qwen3ForCausalLM has 2 key value heads, which 4 processes cannot share"),
        ("qwen3", 3, "Qwen3ForCausalLM has 4 attention heads, which 3 processes cannot share"),
        ("gpt2", 2, "GPT2LMHeadModel has no plan of tensor parallelism in transformers"),
        ("qwen3_moe", 2, "Qwen3MoeForCausalLM has layers of the style"),
        ("gpt_oss", 2, "GptOssForCausalLM has layers of the style"),
        (lambda: make_vision_model("qwen2_vl"), 2, "reads images"),
        (make_linear_attention_model, 2, "tensor parallelism|style|heads"),
        (make_adapted, 2, "the model has an adapter"),
    ),
)
def test_models_that_do_not_combine_are_refused_by_name(model, size, said):
    with pytest.raises(ValueError, match=said) as raised:
        sharded(model, size, lambda policy: None, router_aux_loss_coef=0.0)
    assert f"tp_size is {size}" in str(raised.value)


class _Squares(torch.nn.Linear):
    """The square of a sum is not the sum of the squares of its terms."""

    def forward(self, states):
        return super().forward(states).square()


def test_a_model_that_does_not_compute_as_its_plan_says_is_refused():
    def make_odd():
        return make("qwen2", intermediate_size=51)

    with pytest.raises(ValueError, match="gate_proj has a width of 51, which 2 processes cannot"):
        sharded(make_odd, 2, lambda policy: None)

    def make_wrong():
        model = make("qwen3")
        model.model.layers[0].mlp.down_proj = _Squares(48, 32, bias=False).double()
        return model

    torch.manual_seed(0)
    with pytest.raises(ValueError, match="log-probs of Qwen3ForCausalLM differ by"):
        sharded(make_wrong, 2, lambda policy: None)


@pytest.mark.parametrize(
    ("options", "said"),
    (
        ({"num_processes": 3}, "tp_size is 2 and num_processes is 3, which it must divide"),
        ({"parallel": "fsdp2"}, "parallel is fsdp2 and tp_size is 2, under which weights are"),
        ({"parallel": "zero1"}, "parallel is zero1 and tp_size is 2"),
        ({"sp_size": 2}, "sp_size is 2 and tp_size is 2"),
        ({"use_peft": True}, "use_peft is True and tp_size is 2"),
        ({"torch_compile": True}, "torch_compile is True and tp_size is 2"),
        ({"tp_size": 0}, "tp_size is 0"),
    ),
)
def test_options_that_do_not_combine_are_refused(options, said):
    with pytest.raises(ValueError, match=said):
        RLOOConfig(**{"tp_size": 2, "use_cpu": True, "bf16": False} | options)


@pytest.mark.parametrize(
    ("optim", "said"),
    ((None, "of your own is given and tp_size is 2"), ("adafactor", "adafactor and tp_size is 2")),
)
def test_optimizers_of_others_are_refused(optim, said):
    def work(policy: Policy):
        given = None if optim else torch.optim.SGD(policy.parameters)
        config = policy.config.with_values(optim=optim or "sgd")
        with pytest.raises(ValueError, match=said):
            make_optimizers((given, None), policy.model, config, 1)

    sharded("qwen3", 2, work)
