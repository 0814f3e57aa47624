"""A base of 4 or 8 bits under an adapter, and optimizers of 8 bits: bitsandbytes for real."""

import gc
import warnings
from dataclasses import replace
from pathlib import Path

import peft
import pytest
import torch
import transformers
from transformers import BitsAndBytesConfig

from rloo import RLOOConfig, RLOOTrainer, kernels
from rloo.engines.engine_registry import EngineInputs, build_engine
from rloo.model import quantization
from rloo.model.lora import load_adapter
from rloo.model.memory_estimate import optimizer_bytes, phase_peaks, weight_bytes
from rloo.model.model_loading import load_model
from rloo.trainer.build import make_engine
from rloo.types import Prompt, Sampling
from support.adapters import logits_of, make_lora, perturb, trained_weights, wrap
from support.markers import in_pairs
from support.models import make_model, make_samples, make_wide
from support.policies import TEMPERATURE, gradients, make_policy, weights_of
from support.text import make_tokenizer
from support.training import (
    ROWS,
    count_words,
    equal,
    make_config,
    metrics_of,
)

KINDS = {
    "nf4": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    "nested fp4": {"load_in_4bit": True, "bnb_4bit_use_double_quant": True},
    "int8": {"load_in_8bit": True},
}
OPTIONS = {
    "nf4": {"load_in_4bit": True},
    "nested fp4": {
        "load_in_4bit": True,
        "bnb_4bit_quant_type": "fp4",
        "use_bnb_nested_quant": True,
    },
    "int8": {"load_in_8bit": True},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("models")
    for name in ("qwen3", "llama"):
        make_wide(name).save_pretrained(path / name)
        make_tokenizer().save_pretrained(path / name)
    return path


def load_few_bits(folder: Path, kind: str = "nf4", name: str = "qwen3"):
    config = RLOOConfig(model=str(folder / name), use_cpu=True)
    given = BitsAndBytesConfig(**KINDS[kind])
    return load_model(
        config, make_tokenizer(), device=torch.device("cpu"), quantization_config=given
    )[0]


def make_pair(folder: Path, kind: str, **lora):
    """A PeftModel with a quantised base, and one with the same base unquantised, equal adapters."""
    few = load_few_bits(folder, kind)
    full = make_wide()
    with torch.no_grad():
        for name, layer in quantization.quantised_layers(few):
            full.get_submodule(name).weight.copy_(quantization.full_weight(layer))
    few, full = (wrap(model, make_lora(lora_dropout=0.0, **lora)) for model in (few, full))
    perturb(few)
    trained = {n: p for n, p in few.named_parameters() if p.requires_grad}
    assert not full.load_state_dict(trained, strict=False).unexpected_keys
    return few, full


# -- what is computed -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "checkpointing", "bf16"), in_pairs(KINDS, [False, True], [False, True])
)
def test_gradients_of_the_adapter_are_those_above_the_base_in_full(
    folder, kind, checkpointing, bf16
):
    results = []
    for model in make_pair(folder, kind, target_modules=["q_proj", "v_proj", "down_proj"]):
        policy = make_policy(model, gradient_checkpointing=checkpointing, bf16=bf16)
        assert policy.packed
        assert {p.dtype for p in policy.parameters} == {torch.float32}
        with torch.no_grad():
            own = policy.model(torch.arange(3, 33).reshape(2, 15), use_cache=False).logits
        logprobs = policy.logprobs(policy.batch(make_samples()))[0]
        (logprobs * weights_of(len(logprobs))).sum().backward()
        results.append((own, logprobs.detach(), gradients(policy.model)))
    (own, logprobs, found), (expected_logits, expected, expected_gradients) = results
    assert (own - expected_logits).abs().max() < 1e-5
    assert (logprobs - expected).abs().max() < 1e-5
    assert found.keys() == expected_gradients.keys() and len(found) == 18
    for name, gradient in found.items():
        assert (gradient - expected_gradients[name]).norm() <= 2e-5 * gradient.norm(), name


def test_a_base_of_few_bits_is_another_model_than_the_one_it_was_made_from(folder):
    model = load_few_bits(folder)
    exact = dict(make_wide().named_parameters())
    for name, layer in quantization.quantised_layers(model):
        weight = exact[f"{name}.weight"]
        error = (quantization.full_weight(layer) - weight).norm() / weight.norm()
        assert 0.08 < error < 0.11


def test_packed_rows_and_padded_ones_agree_with_activations_of_full_precision(folder):
    # bitsandbytes' own product of 8 bits rounds activations, by columns of the whole batch.
    results = []
    for packing in (True, False):
        policy = make_policy(make_pair(folder, "int8")[0], packing=packing)
        results.append(policy.score(policy.batch(make_samples())))
    assert (results[0] - results[1]).abs().max() < 1e-5


@pytest.mark.parametrize(("kind", "lora"), in_pairs(KINDS, [{}, {"use_dora": True}]), ids=str)
def test_weights_load_into_a_base_in_full_that_computes_the_same(folder, kind, lora):
    few, _ = make_pair(folder, kind, **lora)
    policy = make_policy(few)
    before = {n: p.detach().clone() for n, p in policy.model.named_parameters()}
    expected = logits_of(policy.model)
    loaded = dict(policy.weights())
    base = make_wide(seed=9)
    assert list(loaded) == [name for name, _ in base.named_parameters()]
    base.load_state_dict(loaded)
    assert (logits_of(base) - expected).abs().max() < 1e-5
    assert equal(before, dict(policy.model.named_parameters()))


@pytest.mark.parametrize(("kind", "engine"), in_pairs(KINDS, ["module", "copy", "hf"]))
def test_engines_sample_from_the_policy(folder, kind, engine):
    few, _ = make_pair(folder, kind)
    policy = make_policy(few, engine_kwargs={"copy_weights": True if engine == "copy" else None})
    if engine == "hf":
        sampler, _ = build_engine("hf", EngineInputs(policy.model, 0))
    else:
        sampler = make_engine(policy, policy.config)
        assert sampler.capabilities.name == "native"
        assert sampler.capabilities.copies_weights == (engine == "copy")
    told = [note for note in policy.notes if "a dequantised copy of the base" in note]
    assert len(told) == (engine == "module")
    sampler.load(policy.weights, policy.version)
    prompt = Prompt(0, [5, 6, 7], "")
    sampling = Sampling(max_tokens=6, stop_token_ids=(), temperature=TEMPERATURE)
    ((*group,),) = sampler.sample([prompt], 3, sampling, 0)
    for completion in group:
        ids = torch.tensor([[*prompt.token_ids, *completion.token_ids]])
        with torch.no_grad():
            logits = policy.model(ids, use_cache=False).logits[0, 2:-1] / TEMPERATURE
        expected = logits.log_softmax(-1).gather(-1, ids[0, 3:, None])[:, 0]
        given = torch.tensor(completion.policy_logprobs)
        assert (given - expected).abs().max() < 1e-5


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("effect", [True, False])
def test_the_reference_is_the_policy_at_the_start_to_the_last_bit(folder, kind, effect):
    lora = make_lora(init_lora_weights=not effect)
    policy = make_policy(wrap(load_few_bits(folder, kind), lora), beta=0.1, learning_rate=0.1)
    assert policy.adapter.has_effect == effect and policy.reference.model is None
    batch = policy.batch(make_samples())
    start = policy.logprobs(batch)[0]
    assert torch.equal(policy.reference_logprobs(batch), start.detach())
    start.sum().backward()
    policy.stepper.step()
    assert torch.equal(policy.reference_logprobs(batch), start.detach())
    assert not torch.allclose(policy.logprobs(batch)[0], start, atol=1e-3)


# -- training, saving, resuming -------------------------------------------------------------------


def make_trainer(config, folder: Path, name: str = "qwen3", model=None, **options) -> RLOOTrainer:
    if model is None:
        config = replace(config, model=str(folder / name), use_peft=True, lora_r=4)
    return RLOOTrainer(
        model=model,
        args=config,
        reward_funcs=count_words,
        train_dataset=ROWS,
        processing_class=make_tokenizer(),
        **options,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "name"),
    [("nf4", "qwen3"), ("nf4", "llama"), ("nested fp4", "qwen3"), ("int8", "qwen3")],
)
def test_training_moves_the_adapter_alone_and_begins_with_no_kl(tmp_path, folder, kind, name):
    config = make_config(tmp_path, gradient_checkpointing=True, **OPTIONS[kind])
    trainer = make_trainer(config, folder, name)
    layers = dict(quantization.quantised_layers(trainer.policy.model))
    assert len(layers) == 21
    base = {name: quantization.full_weight(layer).clone() for name, layer in layers.items()}
    adapter = trained_weights(trainer)
    trainer.train()
    for name, layer in layers.items():
        assert torch.equal(base[name], quantization.full_weight(layer))
    assert all(not torch.equal(adapter[n], p) for n, p in trained_weights(trainer).items())
    rows = metrics_of(config)
    assert rows[0]["kl"] == 0 and all(row["kl"] != 0 for row in rows[1:])
    assert all(row["mismatch/max"] < 1e-5 for row in rows)


@pytest.mark.slow
def test_the_saved_adapter_is_what_peft_loads_on_a_base_of_few_bits(tmp_path, folder):
    config = make_config(tmp_path, load_in_4bit=True)
    trainer = make_trainer(config, folder)
    trainer.train()
    kernels.use(False)  # as in a model that was only loaded
    expected = logits_of(trainer.policy.model)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing`", FutureWarning)
        loaded = peft.PeftModel.from_pretrained(load_few_bits(folder), config.output_dir)
    quantization.prepare(loaded.get_base_model(), RLOOConfig(), adapted=True)
    assert torch.equal(logits_of(loaded), expected)
    again = load_adapter(load_few_bits(folder), config.output_dir)
    assert make_policy(again).adapter.has_effect


def test_a_saved_base_of_few_bits_is_loaded_as_it_is(tmp_path, folder):
    base = load_few_bits(folder)
    expected = {
        n: quantization.full_weight(x).clone() for n, x in quantization.quantised_layers(base)
    }
    base.save_pretrained(tmp_path / "few")
    make_tokenizer().save_pretrained(tmp_path / "few")
    trainer = make_trainer(make_config(tmp_path, max_steps=1), tmp_path, "few")
    layers = dict(quantization.quantised_layers(trainer.policy.model))
    for name, weight in expected.items():
        (layer,) = [x for n, x in layers.items() if n.startswith(name)]
        assert torch.equal(quantization.full_weight(layer), weight)
    trainer.train()


@pytest.mark.slow
def test_models_given_loaded_and_options_in_other_places(tmp_path, folder):
    config = make_config(tmp_path, max_steps=1)
    trainer = make_trainer(config, folder, model=load_few_bits(folder), peft_config=make_lora())
    assert any("in 4 bits" in note for note in trainer.policy.notes)
    trainer.train()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*gradient_checkpointing", FutureWarning)
        ready = peft.prepare_model_for_kbit_training(load_few_bits(folder))
    config = make_config(tmp_path / "prepared", max_steps=1)
    make_trainer(config, folder, model=wrap(ready, make_lora())).train()
    assert metrics_of(config)[0]["kl"] == 0
    given = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    trainer = make_trainer(make_config(tmp_path / "a"), folder, quantization_config=given)
    assert any("in 4 bits" in note for note in trainer.policy.notes)
    for given in ({"load_in_8bit": True}, BitsAndBytesConfig(load_in_8bit=True)):
        kwargs = {"quantization_config": given}
        trainer = make_trainer(make_config(tmp_path / "b", model_init_kwargs=kwargs), folder)
        assert any("in 8 bits" in note for note in trainer.policy.notes)


def test_a_quantised_base_takes_less_memory_and_its_scales_count(folder):
    full, few, nested = (
        weight_bytes(m)
        for m in (make_wide(), load_few_bits(folder), load_few_bits(folder, "nested fp4"))
    )
    layers = 3 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128)
    # 4 bits a weight, a float32 scale for each 64, a code book of 16 numbers for each layer.
    assert few == full - 4 * layers + layers // 2 + 4 * layers // 64 + 21 * 64
    assert nested != few
    loaded = []
    (peak,) = phase_peaks(torch.device("cpu"), lambda _: loaded.append(load_few_bits(folder)))
    assert peak >= weight_bytes(loaded[0])


# -- what is refused ------------------------------------------------------------------------------


def test_a_quantised_base_needs_an_adapter(folder):
    with pytest.raises(ValueError, match="is quantised and cannot be trained; train an adapter"):
        make_policy(load_few_bits(folder))
    with pytest.raises(
        ValueError, match="load_in_4bit is true and the model has no quantised layer"
    ):
        make_policy(wrap(make_model("qwen3"), make_lora()), load_in_4bit=True)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"load_in_4bit": True, "load_in_8bit": True}, "both true"),
        ({"bnb_4bit_quant_type": "fp4"}, "bnb_4bit_quant_type is fp4 but load_in_4bit is false"),
        ({"use_bnb_nested_quant": True}, "use_bnb_nested_quant is True but"),
        (
            {"load_in_4bit": True, "model_init_kwargs": {"quantization_config": {}}},
            "model_init_kwargs and load_in_4bit each say",
        ),
        ({"model_init_kwargs": {"quantization_config": {"load_in_4bits": True}}}, "load_in_4bits"),
        ({"model_init_kwargs": {"quantization_config": {}}}, "neither load_in_4bit nor"),
        (
            {
                "model_init_kwargs": {
                    "quantization_config": {
                        "load_in_8bit": True,
                        "llm_int8_enable_fp32_cpu_offload": True,
                    }
                }
            },
            "sets llm_int8_enable_fp32_cpu_offload",
        ),
    ],
    ids=str,
)
def test_options_that_cannot_be_kept_are_refused(options, text):
    with pytest.raises(ValueError, match=text):
        quantization.quantization_of(RLOOConfig(**options))


def test_other_kinds_of_quantisation_are_refused():
    with pytest.raises(ValueError, match="quantization_config is a GPTQConfig"):
        quantization.quantization_of(RLOOConfig(), transformers.GPTQConfig(bits=4))


def test_weights_that_bitsandbytes_reads_wrong_are_refused(tmp_path):
    make_model("qwen3").save_pretrained(tmp_path / "qwen3")
    _, layer = next(quantization.quantised_layers(load_few_bits(tmp_path)))
    weight = make_model("qwen3").model.layers[0].self_attn.q_proj.weight
    wrong = (quantization.full_weight(layer) - weight).norm() > 0.15 * weight.norm()
    for kind in KINDS:
        model = wrap(load_few_bits(tmp_path, kind), make_lora())
        if wrong and kind != "int8":
            with pytest.raises(ValueError, match="has 32 columns, not a multiple of 64"):
                make_policy(model)
        else:
            make_policy(model)


def test_a_model_that_bitsandbytes_changed_is_refused(folder):
    model = wrap(load_few_bits(folder), make_lora())
    _, layer = next(quantization.quantised_layers(model))
    layer.weight.quant_state.packing_format_for_cpu = True
    with pytest.raises(ValueError, match="rounded the scales"):
        make_policy(model)


def test_a_missing_library_is_named_with_its_remedy(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "bitsandbytes", None)
    with pytest.raises(ValueError, match=r"pip install 'bitsandbytes>="):
        quantization.quantization_of(RLOOConfig(load_in_4bit=True))


# -- optimizers of 8 bits -------------------------------------------------------------------------


def test_states_are_of_8_bits_but_for_embeddings_and_small_ones():
    policy = make_policy(make_wide(), optim="adamw_8bit")
    foreseen = optimizer_bytes(policy)
    policy.logprobs(policy.batch(make_samples()))[0].sum().backward()
    policy.stepper.step()
    kinds = {
        n: policy.stepper.optimizer.state[p]["state1"].dtype
        for n, p in policy.model.named_parameters()
    }
    assert kinds["model.embed_tokens.weight"] == torch.float32
    assert kinds["model.norm.weight"] == torch.float32  # fewer than 4,096 numbers
    assert kinds["model.layers.0.mlp.up_proj.weight"] == torch.uint8
    assert kinds["lm_head.weight"] == torch.uint8
    assert foreseen == optimizer_bytes(policy)
    numbers = sum(p.numel() for p in policy.parameters)
    assert 2 * numbers < foreseen < 4 * numbers  # adamw of 32 bits: 8


@pytest.mark.parametrize("optim", ["paged_adamw_32bit", "adamw_8bit"])
def test_that_nothing_is_paged_on_a_cpu_is_noted(optim):
    notes = make_policy(make_model("qwen3"), optim=optim).notes
    assert any("nothing is paged" in note for note in notes) == ("paged" in optim)


def test_what_is_said_of_an_embedding_is_forgotten_with_it():
    policy = make_policy(make_wide(), optim="adamw_8bit")
    known = policy.stepper.optimizer.mng.pid2config
    assert id(policy.model.model.embed_tokens.weight) in known
    before = len(known)
    del policy
    gc.collect()
    assert len(known) < before


@pytest.mark.parametrize(
    ("optim", "given", "name"),
    [("adamw_8bit", "min_8bit_size=16", "min_8bit_size"), ("ademamix", "alpha=5,bet3=0.9", "bet3")],
)
def test_arguments_that_the_optimizer_does_not_read_are_refused(optim, given, name):
    with pytest.raises(ValueError, match=f"optim_args has {name}, which {optim} does not read"):
        make_policy(make_model("qwen3"), optim=optim, optim_args=given)


def test_arguments_of_an_optimizer_are_passed_on():
    policy = make_policy(make_model("qwen3"), optim="sgd", optim_args="momentum=0.5, nesterov=true")
    defaults = policy.stepper.optimizer.defaults
    assert defaults["momentum"] == 0.5 and defaults["nesterov"]
    policy = make_policy(make_model("qwen3"), optim="rmsprop_bnb", optim_args="alpha=0.9")
    policy.logprobs(policy.batch(make_samples()))[0].sum().backward()
    policy.stepper.step()
