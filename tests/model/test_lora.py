"""LoRA: what is trained, what it is compared with, what is saved, and what others load from it."""

import copy
import json
import warnings
from dataclasses import replace
from pathlib import Path

import peft
import pytest
import torch
from peft import PeftModel

from rloo import RLOOConfig, RLOOTrainer, cli, kernels
from rloo.engines.engine_registry import EngineInputs, build_engine
from rloo.model import lora
from rloo.model.lora import LoRAAdapter, add_adapter, lora_config
from rloo.trainer.checkpoint import verify_checkpoint
from rloo.types import Prompt, Sampling
from support.adapters import logits_of, make_adapted, make_lora, perturb, trained_weights, wrap
from support.markers import in_pairs
from support.models import make_model, make_samples
from support.policies import TEMPERATURE, gradients, make_policy, one_by_one, weights_of
from support.text import make_tokenizer
from support.training import (
    ROWS,
    count_words,
    equal,
    make_config,
    metrics_of,
)

KINDS = {
    "lora": {},
    "rslora": {"use_rslora": True},
    "dora": {"use_dora": True},
    "all-linear": {"target_modules": "all-linear"},
    "head": {"target_modules": ["q_proj", "lm_head"]},
    "embedding": {"target_modules": ["embed_tokens", "down_proj"]},
    "saved head": {"modules_to_save": ["lm_head"]},
    "patterns": {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"v_proj": 3}},
}


def everywhere(name: str) -> dict:
    """The options of an adapter on every layer, and on the experts, where there are any."""
    experts = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    mixture = name in ("gpt_oss", "qwen3_moe")
    return {
        "target_modules": ["q_proj", "o_proj"] if mixture else "all-linear",
        "target_parameters": experts if mixture else None,
        "lora_dropout": 0.0,
        "fan_in_fan_out": name == "gpt2",
    }


# -- what is computed -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "packing", "checkpointing"), in_pairs(KINDS, [True, False], [True, False])
)
def test_gradients_of_the_adapter_equal_plain_autograd(kind, packing, checkpointing):
    samples = make_samples()
    wrapped = make_adapted(**{**KINDS[kind], "lora_dropout": 0.0})
    expected, expected_gradients = one_by_one(wrapped.get_base_model().eval(), samples)
    policy = make_policy(wrapped, packing=packing, gradient_checkpointing=checkpointing)
    assert policy.packed == packing
    policy.model.zero_grad()
    logprobs = policy.logprobs(policy.batch(samples)).logprobs
    (logprobs * weights_of(len(logprobs))).sum().backward()
    assert (logprobs.detach() - expected).abs().max() < 1e-5
    computed = gradients(policy.model)
    assert computed.keys() == expected_gradients.keys()
    assert len(computed) == len(policy.parameters) > 6
    for name, gradient in computed.items():
        difference = (gradient - expected_gradients[name]).norm()
        assert difference <= 2e-5 * expected_gradients[name].norm(), name


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2", "gemma3", "gpt_oss", "qwen3_moe"])
def test_packed_equals_padded_on_every_architecture(name):
    results = []
    for packing in (True, False):
        policy = make_policy(make_adapted(name, **everywhere(name)), packing=packing)
        logprobs = policy.logprobs(policy.batch(make_samples())).logprobs
        (logprobs * weights_of(len(logprobs))).sum().backward()
        results.append((logprobs.detach(), gradients(policy.model)))
    (packed, packed_gradients), (padded, padded_gradients) = results
    assert (packed - padded).abs().max() < 1e-5
    for name, gradient in packed_gradients.items():
        expected = padded_gradients[name]
        assert (gradient - expected).norm() <= 2e-5 * expected.norm(), name


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_of_both_kinds_reaches_the_first_layers_adapter(reentrant):
    policy = make_policy(
        make_adapted(),
        gradient_checkpointing=True,
        gradient_checkpointing_kwargs={"use_reentrant": reentrant},
    )
    calls = []
    policy.model.base_model.layers[0].mlp.register_forward_pre_hook(lambda *_: calls.append(1))
    policy.logprobs(policy.batch(make_samples()))[0].sum().backward()
    assert len(calls) == 2
    assert all(p.grad is not None and p.grad.any() for p in policy.parameters)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "engine"), in_pairs(KINDS, ["native", "hf"]))
def test_engines_sample_with_the_adapter(kind, engine):
    policy = make_policy(make_adapted(**KINDS[kind]))
    sampler, note = build_engine(engine, EngineInputs(policy.model, 0, weights=policy.weights))
    sampler.load(policy.weights, policy.version)
    assert note is None and sampler.capabilities.name == engine
    prompts = [Prompt(number, [5, 6, 7 + number], "") for number in range(2)]
    sampling = Sampling(max_tokens=6, stop_token_ids=(), temperature=TEMPERATURE)
    for prompt, group in zip(prompts, sampler.sample(prompts, 3, sampling, 0), strict=True):
        for completion in group:
            ids = torch.tensor([[*prompt.token_ids, *completion.token_ids]])
            with torch.no_grad():
                adapted = policy.model(ids, use_cache=False).logits[0, 2:-1] / TEMPERATURE
                with policy.adapter.as_reference():
                    base = policy.model(ids, use_cache=False).logits[0, 2:-1] / TEMPERATURE
            given = torch.tensor(completion.policy_logprobs)
            chosen = ids[0, 3:, None]
            expected = adapted.log_softmax(-1).gather(-1, chosen)[:, 0]
            assert (given - expected).abs().max() < 1e-5
            assert (given - base.log_softmax(-1).gather(-1, chosen)[:, 0]).abs().max() > 1e-3


@pytest.mark.parametrize("kind", KINDS)
def test_weights_load_into_a_fresh_base_that_computes_the_same(kind):
    wrapped = make_adapted(**KINDS[kind])
    policy = make_policy(wrapped)
    before = {n: p.detach().clone() for n, p in policy.model.named_parameters()}
    expected = logits_of(policy.model)
    base = make_model("qwen3", seed=9)
    loaded = dict(policy.weights())
    assert list(loaded) == [name for name, _ in base.named_parameters()]
    base.load_state_dict(loaded)
    assert (logits_of(base) - expected).abs().max() < 1e-5
    assert (logits_of(make_model("qwen3")) - expected).abs().max() > 1e-2
    assert equal(before, dict(policy.model.named_parameters()))
    assert torch.equal(logits_of(policy.model), expected)


@pytest.mark.parametrize("name", ["gpt2", "gemma3", "gpt_oss", "qwen3_moe"])
def test_weights_have_the_base_s_names_on_other_architectures(name):
    base, wrapped = make_model(name), make_adapted(name, **everywhere(name))
    expected = logits_of(wrapped)
    loaded = dict(LoRAAdapter(wrapped).weights())
    # An adapted parameter of its own (gpt_oss's experts) moves to the end of its module.
    assert sorted(loaded) == sorted(name for name, _ in base.named_parameters())
    base.load_state_dict(loaded, strict=False)  # a tied head has no name of its own
    assert (logits_of(base) - expected).abs().max() < 1e-5


def test_weights_are_merged_one_at_a_time(monkeypatch):
    merged = []
    merge = lora.merged_layer
    counting = lambda layer: merged.append(layer) or merge(layer)  # noqa: E731
    monkeypatch.setattr(lora, "merged_layer", counting)
    weights = LoRAAdapter(make_adapted(target_modules=["q_proj"])).weights()
    counts = []
    for name, _ in weights:
        counts.append((name, len(merged)))
    assert [n for name, n in counts if name.endswith("q_proj.weight")] == [1, 2, 3]
    assert counts[0] == ("model.embed_tokens.weight", 0)


# -- the reference --------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("effect", [True, False])
def test_the_reference_is_the_policy_at_the_start_to_the_last_bit_and_stays(kind, effect):
    policy = make_policy(
        make_adapted(effect=effect, **KINDS[kind]), beta=0.1, learning_rate=0.1, bf16=False
    )
    assert policy.reference.model is None
    assert policy.adapter.has_effect == effect
    copies = [n for n, _ in policy.model.named_parameters() if ".ref" in n]
    assert bool(copies) == effect
    trained = {n for n, p in policy.model.named_parameters() if p.requires_grad}
    assert not trained & set(copies)
    batch = policy.batch(make_samples())
    start = policy.logprobs(batch)[0]
    assert torch.equal(policy.reference_logprobs(batch), start.detach())
    assert trained == {n for n, p in policy.model.named_parameters() if p.requires_grad}
    start.sum().backward()
    policy.stepper.step()
    assert torch.equal(policy.reference_logprobs(batch), start.detach())
    assert not torch.allclose(policy.logprobs(batch)[0], start, atol=1e-3)


def test_a_new_adapter_is_compared_with_the_base_and_the_base_is_not_copied():
    base = make_model("qwen3")
    expected = make_policy(make_model("qwen3"), beta=0.1)
    batch = expected.batch(make_samples())
    policy = make_policy(make_adapted(base=base, effect=False), beta=0.1)
    storages = {p.data_ptr() for p in policy.model.parameters()}
    perturb(policy.model)
    assert torch.equal(policy.reference_logprobs(batch), expected.reference_logprobs(batch))
    frozen = [p for p in policy.model.parameters() if not p.requires_grad]
    assert sum(p.numel() for p in frozen) == sum(p.numel() for p in expected.model.parameters())
    assert storages == {p.data_ptr() for p in policy.model.parameters()}


def test_the_reference_between_forward_and_backward_changes_no_gradient():
    results = []
    for interrupted in (False, True):
        policy = make_policy(make_adapted(), beta=0.1, gradient_checkpointing=True)
        batch = policy.batch(make_samples())
        logprobs = policy.logprobs(batch).logprobs
        if interrupted:
            policy.reference_logprobs(batch)
        logprobs.sum().backward()
        results.append(gradients(policy.model))
    assert results[0].keys() == results[1].keys()
    assert equal(*results)


def test_frozen_parts_of_an_adapter_stay_frozen():
    wrapped = make_adapted()
    frozen = [p for n, p in wrapped.named_parameters() if "lora_A" in n]
    for parameter in frozen:
        parameter.requires_grad_(False)
    policy = make_policy(wrapped, beta=0.1)
    batch = policy.batch(make_samples())
    before = [p.detach().clone() for p in frozen]
    logprobs = policy.logprobs(batch)[0]
    policy.reference_logprobs(batch)
    assert not any(p.requires_grad for p in frozen)
    logprobs.sum().backward()
    policy.stepper.step()
    assert all(torch.equal(a, b) for a, b in zip(before, frozen, strict=True))
    assert all(p.grad is None for p in frozen)


# -- precision ------------------------------------------------------------------------------------


@pytest.mark.parametrize("autocast", [True, False])
def test_a_frozen_base_of_16_bits_computes_as_in_float32_but_for_rounding(autocast):
    exact = make_policy(make_adapted("llama"))
    wrapped = wrap(make_model("llama").bfloat16(), make_lora())
    perturb(wrapped)
    policy = make_policy(wrapped, bf16=autocast, beta=0.1)
    assert {p.dtype for p in policy.parameters} == {torch.float32}
    samples = make_samples()
    policy.check_forward(samples)
    assert policy.packed
    results = []
    for each in (exact, policy):
        logprobs = each.logprobs(each.batch(samples)).logprobs
        (logprobs * weights_of(len(logprobs))).sum().backward()
        results.append((logprobs.detach(), gradients(each.model)))
    (expected, expected_gradients), (logprobs, computed) = results
    assert 1e-5 < (logprobs - expected).abs().max() < 0.05
    for name, gradient in computed.items():
        cosine = torch.cosine_similarity(
            gradient.flatten(), expected_gradients[name].flatten(), dim=0
        )
        assert cosine > 0.99, name


def test_a_trained_layer_of_16_bits_is_refused():
    wrapped = wrap(make_model("llama").bfloat16(), make_lora(modules_to_save=["lm_head"]))
    with pytest.raises(ValueError, match="trained parameters must be float32"):
        make_policy(wrapped)


def test_dropout_of_the_adapter_is_removed_and_said():
    policy = make_policy(make_adapted(lora_dropout=0.3))
    assert policy.notes == ["dropout (up to 0.3) is set to 0 for training"]
    batch = policy.batch(make_samples())
    assert torch.equal(policy.logprobs(batch)[0], policy.logprobs(batch)[0])


# -- training, saving, resuming -------------------------------------------------------------------


def make_trainer(config, **options) -> RLOOTrainer:
    defaults = {
        "model": None,
        "reward_funcs": count_words,
        "train_dataset": ROWS,
        "processing_class": make_tokenizer(),
    }
    return RLOOTrainer(args=config, **{**defaults, **options})


def adapted_trainer(config, folder: Path, lora=None, **options) -> RLOOTrainer:
    base = folder / "base"
    if not base.exists():
        make_model("qwen3").save_pretrained(base)
        make_tokenizer().save_pretrained(base)
    config = replace(config, model=str(base))
    return make_trainer(config, peft_config=lora or make_lora(), **options)


def base_weights(trainer: RLOOTrainer) -> dict[str, torch.Tensor]:
    return {
        n: p.detach().clone()
        for n, p in trainer.policy.model.named_parameters()
        if not p.requires_grad
    }


@pytest.mark.slow
def test_training_moves_the_adapter_alone_and_begins_with_no_kl(tmp_path):
    trainer = adapted_trainer(make_config(tmp_path, gradient_checkpointing=True), tmp_path)
    assert isinstance(trainer.model, PeftModel)
    assert trainer.policy.model is trainer.model.get_base_model()
    base, adapter = base_weights(trainer), trained_weights(trainer)
    trainer.train()
    assert equal(base, base_weights(trainer))
    assert all(not torch.equal(adapter[n], p) for n, p in trained_weights(trainer).items())
    rows = metrics_of(trainer.args)
    assert rows[0]["kl"] == 0
    assert all(row["kl"] != 0 for row in rows[1:])
    assert all(row["mismatch/max"] < 1e-5 for row in rows)
    assert all(row["clip_ratio/region_mean"] == 0 for row in rows)


@pytest.mark.slow
def test_reward_rises(tmp_path):
    config = make_config(tmp_path, max_steps=40, num_generations=8, beta=0.0, learning_rate=3e-2)
    lora = make_lora(r=8, target_modules=["o_proj", "down_proj", "lm_head"])
    trainer = adapted_trainer(config, tmp_path, lora)
    trainer.train()
    rewards = [row["reward"] for row in metrics_of(trainer.args)]
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 2


@pytest.mark.slow
def test_a_checkpoint_holds_the_adapter_alone_and_a_damaged_one_is_refused(tmp_path):
    config = make_config(tmp_path, max_steps=2, save_steps=2)
    adapted_trainer(config, tmp_path).train()
    path = Path(config.output_dir, "checkpoint-2")
    names = {file.name for file in path.iterdir()}
    assert {"adapter_model.safetensors", "adapter_config.json", "tokenizer.json"} <= names
    assert "model.safetensors" not in names and "ref" not in names
    assert verify_checkpoint(path) == 2
    file = path / "adapter_model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(ValueError, match=r"adapter_model\.safetensors is not what was written"):
        adapted_trainer(config, tmp_path).train(resume_from_checkpoint=str(path))


@pytest.mark.slow
def test_resuming_with_another_adapter_or_base_is_refused(tmp_path):
    config = make_config(tmp_path, max_steps=2, save_steps=2)
    adapted_trainer(config, tmp_path).train()

    def resume(**options):
        adapted_trainer(config, tmp_path, **options).train(resume_from_checkpoint=True)

    with pytest.raises(ValueError, match="lora_alpha 8, and the one given has 9"):
        resume(lora=make_lora(lora_alpha=9))
    with pytest.raises(ValueError, match="the checkpoint is of another model"):
        resume(lora=make_lora(r=2))
    with pytest.raises(ValueError, match="the checkpoint is of another model"):
        make_trainer(config, model=make_model("qwen3")).train(resume_from_checkpoint=True)
    make_model("qwen3", seed=5).save_pretrained(tmp_path / "base")
    with pytest.raises(ValueError, match="started from other weights"):
        resume()


@pytest.mark.slow
def test_a_new_adapter_s_random_numbers_do_not_matter_to_resuming(tmp_path):
    config = make_config(tmp_path, max_steps=2, save_steps=2)
    adapted_trainer(config, tmp_path).train()
    model = make_adapted(effect=False)
    perturbed = [p for n, p in model.named_parameters() if "lora_A" in n]
    with torch.no_grad():
        perturbed[0].add_(1.0)
    trainer = make_trainer(replace(config, max_steps=3), model=model)
    trainer.train(resume_from_checkpoint=True)
    assert trainer.state.global_step == 3


def test_what_is_saved_is_what_peft_loads(tmp_path):
    config = make_config(tmp_path)
    trainer = adapted_trainer(config, tmp_path)
    trainer.train()
    kernels.use(False)  # as in a model that was only loaded
    expected = logits_of(trainer.policy.model)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing`", FutureWarning)
        loaded = peft.AutoPeftModelForCausalLM.from_pretrained(config.output_dir)
    assert torch.equal(logits_of(loaded), expected)
    saved = json.loads(Path(config.output_dir, "adapter_config.json").read_text())
    assert saved["base_model_name_or_path"] == str(tmp_path / "base")
    assert (saved["r"], saved["lora_dropout"]) == (4, 0.05)


@pytest.mark.slow
def test_a_folder_with_an_adapter_is_a_model_that_training_goes_on_from(tmp_path):
    trainer = adapted_trainer(make_config(tmp_path), tmp_path)
    trainer.train()
    expected = logits_of(trainer.policy.model)
    config = make_config(tmp_path / "on", model=trainer.args.output_dir)
    again = make_trainer(config)
    assert torch.equal(logits_of(again.policy.model), expected)
    assert again.policy.adapter.has_effect
    base = base_weights(again)
    again.train()
    assert equal(base, base_weights(again))
    assert metrics_of(config)[0]["kl"] == 0
    names = {path.name for path in Path(config.output_dir).iterdir()}
    assert "adapter_model.safetensors" in names and "ref" not in names
    # The tokenizer is the base's where the adapter's folder has none.
    for file in Path(trainer.args.output_dir).glob("token*"):
        file.unlink()
    again = make_trainer(replace(config, model=trainer.args.output_dir), processing_class=None)
    assert again.processing_class("w1 w2").input_ids == [5, 6]


@pytest.mark.slow
def test_the_command_line_trains_and_evaluates_an_adapter(tmp_path, capsys):
    folder = str(tmp_path / "run")
    options = "num_prompts=2 num_generations=2 max_steps=1 max_completion_length=4 bf16=false"
    status = cli.main(
        [
            *("train", "--model", "countdown", "--dataset", "countdown", "--reward", "countdown"),
            *("--use_peft", "--lora_r", "2", "--lora_target_modules", "q_proj", "v_proj"),
            *options.split(),
            *("--output_dir", folder, "--num_threads", "1"),
        ]
    )
    assert status == 0, capsys.readouterr().err
    saved = json.loads(Path(folder, "adapter_config.json").read_text())
    assert saved["r"] == 2 and sorted(saved["target_modules"]) == ["q_proj", "v_proj"]
    status = cli.main(["eval", f"{folder}/config.yaml", "--model", folder, "--eval_size", "2"])
    assert status == 0, capsys.readouterr().err


@pytest.mark.slow
def test_a_full_model_is_not_saved_beside_an_adapter_of_an_earlier_run(tmp_path):
    trainer = adapted_trainer(make_config(tmp_path), tmp_path)
    trainer.train()
    config = make_config(tmp_path, overwrite_output_dir=True)
    make_trainer(config, model=make_model("qwen3")).train()
    assert not list(Path(config.output_dir).glob("adapter*"))


# -- options, and what is refused -----------------------------------------------------------------


def test_options_make_the_config_that_trl_makes_of_them():
    assert lora_config(RLOOConfig()) is None
    made = lora_config(RLOOConfig(use_peft=True))
    assert (made.r, made.lora_alpha, made.lora_dropout) == (16, 32, 0.05)
    assert (made.target_modules, made.modules_to_save) == (None, None)
    assert (made.bias, made.task_type, made.use_rslora, made.use_dora) == (
        "none",
        "CAUSAL_LM",
        False,
        False,
    )
    made = lora_config(
        RLOOConfig(
            use_peft=True,
            lora_rank=3,
            lora_target_modules="q_proj",
            lora_modules_to_save=["lm_head"],
            use_rslora=True,
            use_dora=True,
        )
    )
    assert (made.r, made.target_modules, made.modules_to_save) == (3, {"q_proj"}, ["lm_head"])
    assert made.use_rslora and made.use_dora
    for pattern in ("all-linear", r".*\.(q|v)_proj"):
        made = lora_config(RLOOConfig(use_peft=True, lora_target_modules=pattern))
        assert made.target_modules == pattern


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"lora_r": 8}, "lora_r is 8 but use_peft is false"),
        ({"use_dora": True}, "use_dora is True but use_peft is false"),
        ({"use_peft": True, "lora_r": 0}, "lora_r is 0; it must be at least 1"),
        ({"use_peft": True, "lora_dropout": 1}, "lora_dropout is 1.0; it must be at least 0"),
        ({"use_peft": True, "lora_task_type": "SEQ_CLS"}, "only causal language models"),
    ],
    ids=str,
)
def test_options_that_would_not_act_are_refused(options, text):
    with pytest.raises(ValueError, match=text):
        RLOOConfig(**options)


@pytest.mark.parametrize(
    ("config", "text"),
    [
        (make_lora(bias="all"), "bias is 'all'"),
        (make_lora(init_lora_weights="pissa"), "init_lora_weights is 'pissa'"),
        (make_lora(layer_replication=[(0, 2)]), "layer_replication is not part"),
        (make_lora(target_modules=["nothing"]), r"nothing.* \(lora_target_modules"),
        (peft.PrefixTuningConfig(task_type="CAUSAL_LM"), "peft_config is a PrefixTuningConfig"),
        ({"r": 4}, "peft_config is a dict"),
    ],
    ids=["bias", "pissa", "replication", "nothing", "prefix", "dict"],
)
def test_adapters_that_cannot_be_trained_right_are_refused(config, text):
    with pytest.raises(ValueError, match=text):
        add_adapter(make_model("qwen3"), config)


def test_the_config_given_is_not_changed():
    given = make_lora()
    before = copy.deepcopy(given.to_dict())
    add_adapter(make_model("qwen3"), given)
    assert given.to_dict() == before


def test_models_that_cannot_be_trained_right_are_refused(tmp_path):
    with pytest.raises(ValueError, match="has an adapter already"):
        make_trainer(make_config(tmp_path), model=make_adapted(), peft_config=make_lora())
    with pytest.raises(ValueError, match="both add an adapter"):
        make_trainer(
            make_config(tmp_path, use_peft=True), model=make_model("qwen3"), peft_config=make_lora()
        )
    wrapped = make_adapted()
    with pytest.raises(ValueError, match="no PeftModel is around the model"):
        make_policy(wrapped.get_base_model())
    wrapped.requires_grad_(False)
    with pytest.raises(ValueError, match="is_trainable=True"):
        make_policy(wrapped)
    wrapped = make_adapted()
    wrapped.get_base_model().model.norm.requires_grad_(True)
    with pytest.raises(ValueError, match=r"model\.norm\.weight is trained beside the adapter"):
        make_policy(wrapped)
    wrapped = make_adapted()
    wrapped.add_adapter("other", make_lora())
    with pytest.raises(ValueError, match="has the adapters default, other"):
        make_policy(wrapped)
    wrapped = make_adapted()
    wrapped.merge_adapter()
    with pytest.raises(ValueError, match="is merged or disabled"):
        make_policy(wrapped)


@pytest.mark.filterwarnings("ignore:.*tie_word_embeddings")
@pytest.mark.parametrize("options", [{"target_modules": ["wte"]}, {"modules_to_save": ["lm_head"]}])
def test_one_of_two_tied_embeddings_is_refused(options):
    options = {"target_modules": ["c_attn"], "fan_in_fan_out": True, **options}
    with pytest.raises(ValueError, match="its weight is also the other embedding's"):
        make_policy(make_adapted("gpt2", **options))


def test_a_missing_library_is_named_with_its_remedy(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "peft", None)
    with pytest.raises(ValueError, match=r"pip install 'peft>="):
        lora_config(RLOOConfig(use_peft=True))
