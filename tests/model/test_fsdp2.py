"""What is said of divided weights where one process has all parts of them."""

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, Qwen3Config

from rloo import RLOOConfig
from rloo.distributed.sharded_tensor import (
    full_tensor,
    is_sharded,
    shard_like,
    to_local,
    whole_copy,
)
from rloo.distributed.world import GroupSizes, make_world
from rloo.model.memory_estimate import phase_peaks
from rloo.model.model_loading import load_model
from rloo.model.parallel.fsdp2 import check
from rloo.model.policy import Policy
from rloo.trainer import build
from rloo.trainer.build import make_engine
from support.adapters import make_lora, perturb, wrap
from support.models import make_model, make_samples, make_wide
from support.text import make_tokenizer
from support.vision_models import make_vision_model


@pytest.fixture
def make():
    """Makes policies of divided weights."""

    def policy(model=None, **options):
        config = RLOOConfig(
            parallel="fsdp2",
            use_cpu=True,
            gradient_checkpointing=False,
            **{"bf16": False} | options,
        )
        world = make_world(use_cpu=True, divides=True)
        model = make_model("qwen3") if model is None else model
        return Policy(model, make_tokenizer(), config, world=world, num_training_steps=3)

    return policy


def test_a_divided_parameter_is_the_same_numbers(make):
    before = {n: p.detach().clone() for n, p in make_model("qwen3").named_parameters()}
    policy = make()
    for name, parameter in policy.model.named_parameters():
        assert is_sharded(parameter) and torch.equal(full_tensor(parameter), before[name])
        again = shard_like(before[name], parameter)
        assert torch.equal(to_local(again), to_local(parameter))
    assert dict(policy.weights()).keys() == before.keys()


@pytest.mark.slow
def test_it_computes_and_learns_as_if_it_were_whole(make):
    """In autocast too, and with a forward without gradients between."""
    for bf16 in (False, True):
        policy = make(bf16=bf16, learning_rate=0.1)
        alone = Policy(
            make_model("qwen3"), make_tokenizer(), policy.config.with_values(parallel="replicate"),
            world=make_world(use_cpu=True), num_training_steps=3,
        )  # fmt: skip
        for one in (policy, alone):
            batch = one.batch(make_samples())
            one.score(batch)
            one.stepper.backward(one.logprobs(batch).logprobs.sum())
            one.score(batch)
            one.stepper.step()
        pairs = zip(policy.model.parameters(), alone.model.parameters(), strict=True)
        assert all(torch.equal(full_tensor(ours), theirs) for ours, theirs in pairs)


def test_inside_whole_the_model_computes_by_itself(make):
    policy = make()
    with policy.gathered_weights(), torch.no_grad():
        logits = policy.model(torch.tensor([[5, 6, 7]]), use_cache=False).logits
    assert torch.equal(logits, make_model("qwen3")(torch.tensor([[5, 6, 7]])).logits)
    assert all(map(is_sharded, policy.model.parameters()))


def test_an_exact_kl_is_that_of_whole_models(make):
    policy = make(beta=0.1, kl_estimator="exact", learning_rate=0.1)
    alone = Policy(
        make_model("qwen3"), make_tokenizer(), policy.config.with_values(parallel="replicate"),
        world=make_world(use_cpu=True), num_training_steps=3,
    )  # fmt: skip
    found = []
    for one in (policy, alone):
        batch = one.batch(make_samples())
        one.stepper.backward(one.logprobs(batch).logprobs.sum())
        one.stepper.step()
        scores = one.logprobs(batch, reference=True)
        one.stepper.backward(scores.kl.sum())
        one.stepper.step()
        found.append((scores.kl, *map(full_tensor, one.model.parameters())))
    assert found[0][0].min() > 1e-4
    assert all(torch.equal(*both) for both in zip(*found, strict=True))
    adapted = wrap(make_model("qwen3"), make_lora(target_modules=["q_proj", "lm_head"]))
    with pytest.raises(ValueError, match="an adapter changes the output head"):
        make(adapted, beta=0.1, kl_estimator="exact")


def test_a_whole_copy_is_another_one(make):
    policy = make()
    copied = whole_copy(policy.model.get_output_embeddings())
    nn.init.zeros_(copied.weight)
    assert not is_sharded(copied.weight)
    assert full_tensor(policy.model.get_output_embeddings().weight).any()


@pytest.mark.slow
@pytest.mark.parametrize("bf16", (False, True))
def test_a_base_of_few_bits_stays_whole_and_its_adapter_is_divided(make, tmp_path, bf16):
    make_wide("qwen3").save_pretrained(tmp_path)

    def adapted():
        config = RLOOConfig(model=str(tmp_path), use_cpu=True, load_in_4bit=True)
        model, _ = load_model(config, make_tokenizer(), device=torch.device("cpu"))
        torch.manual_seed(0)
        model = wrap(model, make_lora())
        perturb(model)
        return model

    options = {"load_in_4bit": True, "beta": 0.05, "learning_rate": 0.1, "bf16": bf16}
    policy = make(adapted(), **options)
    alone = Policy(
        adapted(), make_tokenizer(), policy.config.with_values(parallel="replicate"),
        world=make_world(use_cpu=True), num_training_steps=3,
    )  # fmt: skip
    few_bits = [p for p in policy.model.parameters() if not p.is_floating_point()]
    assert few_bits and not any(map(is_sharded, few_bits))
    assert all(map(is_sharded, policy.parameters))
    assert any("few bits stays whole" in note for note in policy.notes)
    for one in (policy, alone):
        batch = one.batch(make_samples())
        one.stepper.backward(one.logprobs(batch).logprobs.sum())
        one.stepper.step()
    assert torch.equal(*(one.reference_logprobs(batch) for one in (policy, alone)))
    merged, expected = ({n: full_tensor(w) for n, w in one.weights()} for one in (policy, alone))
    assert merged.keys() == expected.keys()
    assert all(torch.equal(merged[name], expected[name]) for name in merged)
    with pytest.raises(ValueError, match="parallel is zero3 and the base has few bits"):
        check(adapted().get_base_model(), "zero3")


def test_what_needs_whole_parameters_is_refused(make):
    for name in ("fp16", "activation_offloading"):
        with pytest.raises(ValueError, match=f"{name} is True and parallel is fsdp2"):
            RLOOConfig(parallel="fsdp2", **{name: True})
    for word in ("optimizer", "reference"):
        with pytest.raises(ValueError, match=f"offload has {word} and parallel is fsdp2"):
            RLOOConfig(parallel="fsdp2", offload=[word])
    with pytest.raises(ValueError, match="state_dict_type is sharded and parallel is replicate"):
        RLOOConfig(state_dict_type="sharded")
    with pytest.raises(ValueError, match="the optimizer must be one of torch's"):
        make(optim="adafactor")


def test_a_model_that_reads_images_is_refused(make):
    with pytest.raises(ValueError, match="reads images, which not every process has"):
        make(make_vision_model("llava"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "said"),
    (
        ({"num_processes": 3}, "dp_shard_size is 2 and num_processes is 3, which it must divide"),
        ({"parallel": "replicate"}, "dp_shard_size is 2 and parallel is replicate; only fsdp2"),
        ({"parallel": "zero3"}, "dp_shard_size is 2 and parallel is zero3; only fsdp2"),
        ({"dp_shard_size": 1}, "dp_shard_size is 1; it must be at least 2; null shards weights"),
    ),
)
def test_groups_of_shards_that_do_not_combine_are_refused(options, said):
    with pytest.raises(ValueError, match=said):
        RLOOConfig(
            **{"parallel": "fsdp2", "dp_shard_size": 2, "use_cpu": True, "bf16": False} | options
        )


def test_a_group_of_shards_needs_its_processes():
    with pytest.raises(ValueError, match="dp_shard_size is 2 and the number of processes is 1"):
        make_world(use_cpu=True, divides=True, groups=GroupSizes(dp_shard_size=2))


def test_an_engine_is_made_with_one_layer_after_the_other(make):
    """Beside its copy there is never all of the model; where that does not fit, it is said."""
    config = Qwen3Config(
        **make_model("qwen3").config.to_dict()
        | {
            "num_hidden_layers": 24,
            "layer_types": None,
            "hidden_size": 96,
            "intermediate_size": 384,
        }
    )
    policy = make(
        AutoModelForCausalLM.from_config(config).float(), num_threads=1, cpu_kwargs={"onednn": []}
    )
    weights = sum(p.numel() * p.itemsize for p in policy.model.parameters())
    largest = max(p.numel() * p.itemsize for p in policy.model.parameters())
    made = []
    (peak,) = phase_peaks(policy.device, lambda _: made.append(make_engine(policy, policy.config)))
    assert made[0].capabilities.copies_weights and policy.notes == []
    assert weights < peak < 1.4 * weights and largest < 0.4 * weights
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "available_bytes", lambda device: weights - 1)
        said = r"parallel is fsdp2 and an engine .* needs vLLM on devices of its own"
        with pytest.raises(ValueError, match=said):
            make_engine(policy, policy.config)
