"""DeepSpeed's JSON: what is taken of it, and what must agree with the options."""

import json
from dataclasses import replace

import pytest

from rloo import RLOOConfig
from rloo.config.compat.deepspeed_config import complete

# As Trainer's documents write it.
FILE = {
    "fp16": {"enabled": "auto"},
    "bf16": {"enabled": "auto"},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto"}},
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "none", "pin_memory": True},
        "offload_param": {"device": "cpu", "pin_memory": True},
        "overlap_comm": True,
        "sub_group_size": 1e9,
        "reduce_bucket_size": "auto",
        "stage3_max_live_parameters": 1e9,
        "stage3_gather_16bit_weights_on_model_save": True,
    },
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "steps_per_print": 2000,
    "train_batch_size": "auto",
    "wall_clock_breakdown": False,
}


def zero(stage=2, **more):
    return {"zero_optimization": {"stage": stage} | more}


def test_a_file_sets_the_stage_and_what_is_auto_follows_from_the_options(tmp_path):
    file = tmp_path / "zero.json"
    file.write_text(json.dumps(FILE), encoding="utf-8")
    config = RLOOConfig(deepspeed=str(file))
    assert config.parallel == "zero3" and config.deepspeed == FILE
    taken = complete(config)["zero_optimization"]
    assert taken == {
        "stage": 3,
        "offload_param": {"device": "cpu", "pin_memory": True},
        "overlap_comm": True,
        "sub_group_size": 1e9,
        "stage3_max_live_parameters": 1e9,
    }
    assert replace(config, seed=3) == RLOOConfig(deepspeed=str(file), seed=3)
    assert RLOOConfig(**config.to_dict()) == config


def test_what_says_the_same_as_the_options_is_taken():
    settings = {"gradient_clipping": 0.5, "bf16": {"enabled": False}, "fp16": {"enabled": False}}
    config = RLOOConfig(deepspeed=zero() | settings, max_grad_norm=0.5, bf16=False)
    assert config.parallel == "zero2"
    assert complete(RLOOConfig(parallel="zero1")) == zero(stage=1)


@pytest.mark.parametrize(
    ("settings", "options", "said"),
    [
        ({}, {}, r"zero_optimization.stage is None .* must be 1, 2 or 3"),
        (zero(stage=0), {}, r"zero_optimization.stage is 0 "),
        (zero(), {"parallel": "zero3"}, r"parallel is zero3 and zero_optimization.stage is 2"),
        (zero(), {"parallel": "replicate"}, r"parallel is replicate and zero_optim"),
        (zero() | {"gradient_clipping": 0.3}, {}, r"gradient_clipping is 0.3 .*\(max_grad_norm,"),
        (zero() | {"train_batch_size": 64}, {}, r"train_batch_size is 64 .*num_prompts"),
        (zero() | {"bf16": {"enabled": True}}, {"bf16": False}, r"bf16.enabled is True .* False"),
        (zero() | {"fp16": {"enabled": True}}, {}, r"fp16.enabled is True"),
        (zero() | {"optimizer": {"type": "Lamb"}}, {}, r"optimizer is Lamb .* optim is adamw"),
        (
            zero() | {"optimizer": {"type": "AdamW", "params": {"lr": 3e-5}}},
            {},
            r"optimizer is AdamW with lr 3e-05 ",
        ),
        (zero() | {"scheduler": {"type": "WarmupLR"}}, {}, r"scheduler is .*use lr_scheduler_type"),
        (zero() | {"optimizer": {"type": "AdamW", "params": ["a"]}}, {}, r"optimizer is AdamW in"),
        (zero(stage=True), {}, r"zero_optimization.stage is True .* must be 1, 2 or 3"),
        (zero(stage="2"), {}, r"zero_optimization.stage is '2' .* must be 1, 2 or 3"),
        (
            zero(offload_optimiser={"device": "cpu"}),
            {},
            r"offload_optimiser is .* mean offload_opt",
        ),
        (
            zero(offload_param={"device": "cpu"}),
            {},
            r"offload_param is .* stage is 2; stage 3 alone",
        ),
        (zero(3, offload_optimizer={"device": "cpu", "ratio": 0.3}), {}, r"optimizer.ratio is 0.3"),
        (zero(offload_optimizer={"device": "cpu", "pin_memry": True}), {}, r"mean pin_memory\?"),
        (zero(reduce_bucket_size="big"), {}, r"reduce_bucket_size is 'big' .* at least 1, or"),
        (zero(reduce_bucket_size=-5), {}, r"reduce_bucket_size is -5 "),
        (zero(overlap_comm=3), {}, r"overlap_comm is 3 .* true or false"),
        (zero() | {"flops_profiler": {"enabled": True}}, {}, r"flops_profiler is .*: leave it out"),
        (zero(zero_hpz_partition_size=8), {}, r"zero_hpz_partition_size is 8 "),
        (zero() | {"stepz_per_print": 3}, {}, r"stepz_per_print is 3 .* mean steps_per_print\?"),
        (zero(zero_quantized_weights=True), {}, r"zero_quantized_weights is True .* not taken"),
        (zero(offload_optimizer={"device": "nvme"}), {}, r"offload_optimizer.device is nvme"),
        (zero(), {"fp16": True, "bf16": False}, r"fp16 is True and parallel is zero2"),
        (zero(), {"state_dict_type": "sharded"}, r"state_dict_type is sharded and parallel is"),
        (zero(), {"offload": ["params"]}, r"offload is params and parallel is zero2"),
        ("no such file", {}, r"no such file: No such file or directory \(deepspeed\)"),
    ],
)
def test_what_contradicts_the_options_or_is_unknown_is_refused(settings, options, said):
    with pytest.raises(ValueError, match=said):
        RLOOConfig(deepspeed=settings, **options)


def test_what_is_off_or_says_what_is_done_anyway_is_taken():
    """As files have it that LLaMA-Factory, ms-swift and transformers publish."""
    adamw = {"lr": 1e-6, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": "auto"}
    config = RLOOConfig(
        learning_rate=1e-6,
        deepspeed={
            "optimizer": {"type": "AdamW", "params": adamw | {"torch_adam": True}},
            "scheduler": None,
            "prescale_gradients": False,
            "gradient_predivide_factor": 1.0,
            "activation_checkpointing": {
                "partition_activations": False,
                "cpu_checkpointing": False,
            },
            "flops_profiler": {"enabled": False, "profile_step": 1},
            "data_types": {"grad_accum_dtype": "fp32"},
            "zero_optimization": {
                "stage": 3,
                "round_robin_gradients": True,
                "zero_quantized_weights": False,
                "zero_hpz_partition_size": 1,
                "mics_shard_size": -1,
                "offload_optimizer": {"device": "none", "pin_memory": True, "ratio": 1.0},
                "offload_param": {"device": "cpu", "nvme_path": None, "buffer_count": 5},
                "sub_group_size": 1e9,
            },
        },
    )
    taken = complete(config)["zero_optimization"]
    # Of the rest, what would move numbers about is left out.
    assert taken == {
        "stage": 3,
        "offload_param": {"device": "cpu", "nvme_path": None, "buffer_count": 5},
        "sub_group_size": 1e9,
    }


@pytest.mark.parametrize(("text", "said"), [("{", "cannot be loaded"), ("[1]", "is no mapping")])
def test_a_file_that_is_no_mapping_is_refused(text, said, tmp_path):
    file = tmp_path / "zero.json"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=said):
        RLOOConfig(deepspeed=str(file))
