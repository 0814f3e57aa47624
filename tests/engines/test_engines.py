import copy
import functools
import itertools
from collections import Counter

import pytest
import torch
from scipy import stats
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from rloo.engines.counter_rng import noise_key
from rloo.engines.hf_engine import HFEngine
from rloo.engines.native.native_engine import NativeEngine
from rloo.model import attention
from rloo.types import Completion, Prompt, Sampling
from support.engines import ENGINES, make_prompts
from support.models import CONFIGS, VOCAB_SIZE, WINDOW, make_model


@functools.cache
def make_sharp_model(name: str):
    """Weights large enough that every key a token sees, or must not see, shows in its logits."""
    model = make_model(name).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(6.0)
    return model


@functools.cache
def make_double_model():
    """For comparisons to the last token: rounding cannot tip a draw."""
    return copy.deepcopy(make_sharp_model("qwen3")).double()


def take_ids(groups: list[list[Completion]]) -> list[list[list[int]]]:
    return [[completion.token_ids for completion in group] for group in groups]


@torch.no_grad()
def score(model, prompt: Prompt, completion: Completion) -> torch.Tensor:
    """Log-probs (T, V) of each next token by one plain forward, without any cache."""
    ids = torch.tensor([[*prompt.token_ids, *completion.token_ids]])
    logits = model(input_ids=ids, use_cache=False).logits[0]
    return logits[len(prompt.token_ids) - 1 : -1].float().log_softmax(-1)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", CONFIGS)
def test_policy_logprobs_equal_a_plain_forward(name, engine):
    model = make_sharp_model(name)
    model.set_attn_implementation("eager")
    prompts = make_prompts()
    # Several times the sliding window.
    sampling = Sampling(max_tokens=4 * WINDOW, stop_token_ids=(2, 9))

    groups = ENGINES[engine](model, pad_token_id=0).sample(prompts, 3, sampling, noise=1)

    model.set_attn_implementation("eager")
    assert max(len(c.token_ids) for group in groups for c in group) > 3 * WINDOW
    for prompt, group in zip(prompts, groups, strict=True):
        for completion in group:
            logprobs = score(model, prompt, completion)
            expected = logprobs.gather(1, torch.tensor(completion.token_ids)[:, None])[:, 0]
            returned = torch.tensor(completion.policy_logprobs)
            torch.testing.assert_close(returned, expected, atol=1e-5, rtol=0)
            assert completion.behavior_logprobs == completion.policy_logprobs


@pytest.mark.parametrize("name", CONFIGS)
def test_both_engines_draw_the_same_tokens(name):
    model = make_sharp_model(name)
    prompts = make_prompts()
    sampling = Sampling(max_tokens=20, stop_token_ids=(2, 9))

    native = NativeEngine(model, pad_token_id=0).sample(prompts, 4, sampling, noise=3)
    reference = HFEngine(model, pad_token_id=0).sample(prompts, 4, sampling, noise=3)

    # float32: of 16 completions, one may part where noise falls within rounding of an edge.
    pairs = zip(itertools.chain(*native), itertools.chain(*reference), strict=True)
    assert sum(ours.token_ids != theirs.token_ids for ours, theirs in pairs) <= 1


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.6},
        {"top_k": 7},
        {"top_p": 0.8},
        {"min_p": 0.05},
        {"repetition_penalty": 1.5},
        {"greedy": True},
        {
            "temperature": 1.3,
            "top_k": 30,
            "top_p": 0.9,
            "min_p": 0.01,
            "repetition_penalty": 1.1,
        },
    ],
)
def test_both_engines_honour_every_setting_alike(options):
    model = make_double_model()
    prompts = make_prompts()
    sampling = Sampling(max_tokens=16, stop_token_ids=(5, 8), **options)

    native = NativeEngine(model, pad_token_id=0).sample(prompts, 4, sampling, noise=3)
    reference = HFEngine(model, pad_token_id=0).sample(prompts, 4, sampling, noise=3)

    assert take_ids(native) == take_ids(reference)
    for ours, theirs in zip(itertools.chain(*native), itertools.chain(*reference), strict=True):
        assert ours.finish == theirs.finish
        assert ours.policy_logprobs == pytest.approx(theirs.policy_logprobs, abs=1e-6)
        assert ours.behavior_logprobs == pytest.approx(theirs.behavior_logprobs, abs=1e-6)


def test_both_logprobs_are_those_of_their_distributions():
    model = make_double_model()
    prompts = make_prompts()
    sampling = Sampling(max_tokens=8, stop_token_ids=(), temperature=0.5, top_k=3)

    groups = NativeEngine(model, pad_token_id=0).sample(prompts, 2, sampling, noise=3)

    for prompt, group in zip(prompts, groups, strict=True):
        for completion in group:
            policy = (score(model, prompt, completion) / 0.5).log_softmax(-1)
            best, columns = policy.topk(3)
            kept = best.log_softmax(-1)
            for place, token in enumerate(completion.token_ids):
                assert token in columns[place]
                rank = columns[place].tolist().index(token)
                assert completion.policy_logprobs[place] == pytest.approx(
                    policy[place, token].item(), abs=1e-5
                )
                assert completion.behavior_logprobs[place] == pytest.approx(
                    kept[place, rank].item(), abs=1e-5
                )


@pytest.mark.parametrize("engine", ENGINES)
def test_drawn_tokens_follow_the_models_distribution(engine):
    torch.manual_seed(3)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=11,
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            initializer_range=0.5,
        )
    ).eval()
    prompt = Prompt(id=4, token_ids=[1, 5, 3], content="")
    sampling = Sampling(max_tokens=2, stop_token_ids=(), temperature=1.5)
    samples = 4000

    [group] = ENGINES[engine](model, pad_token_id=0).sample([prompt], samples, sampling, noise=8)

    pairs = [first * 11 + second for first, second in (c.token_ids for c in group)]
    with torch.no_grad():
        first = (model(torch.tensor([[1, 5, 3]])).logits[0, -1] / 1.5).softmax(-1)
        prefixes = torch.tensor([[1, 5, 3, token] for token in range(11)])
        second = (model(prefixes).logits[:, -1] / 1.5).softmax(-1)
    joint = (first[:, None] * second).double().flatten()
    joint /= joint.sum()
    observed = torch.tensor(pairs).bincount(minlength=121)
    # Cells expected to hold fewer than five draws are counted as one.
    rare = joint * samples < 5
    expected = torch.cat([joint[~rare], joint[rare].sum()[None]]) * samples
    counts = torch.cat([observed[~rare], observed[rare].sum()[None]])
    assert stats.chisquare(counts.tolist(), expected.tolist()).pvalue > 1e-3


@pytest.mark.parametrize("engine", ENGINES)
def test_a_completion_ends_with_a_stop_token_or_at_the_limit(engine):
    model = make_double_model()
    stops = tuple(range(40, 50))
    sampling = Sampling(max_tokens=12, stop_token_ids=stops)

    groups = ENGINES[engine](model, pad_token_id=0).sample(make_prompts(), 16, sampling, noise=2)

    completions = list(itertools.chain(*groups))
    assert {completion.finish for completion in completions} == {"stop", "length"}
    for completion in completions:
        assert not set(completion.token_ids[:-1]) & set(stops)
        if completion.finish == "stop":
            assert completion.token_ids[-1] in stops
        else:
            assert len(completion.token_ids) == 12
            assert completion.token_ids[-1] not in stops
        assert len(completion.policy_logprobs) == len(completion.token_ids)
        assert len(completion.behavior_logprobs) == len(completion.token_ids)


@pytest.mark.parametrize("engine", ENGINES)
def test_the_models_own_generation_settings_are_not_consulted(engine):
    model = make_double_model()
    sampling = Sampling(max_tokens=6, stop_token_ids=())
    plain = ENGINES[engine](model, pad_token_id=0).sample(make_prompts(), 2, sampling, noise=2)
    saved = model.generation_config
    settings = GenerationConfig(
        eos_token_id=plain[0][0].token_ids[0], max_new_tokens=2, repetition_penalty=5.0, num_beams=3
    )
    model.generation_config = settings

    try:
        groups = ENGINES[engine](model, pad_token_id=0).sample(make_prompts(), 2, sampling, noise=2)
        assert model.generation_config is settings
    finally:
        model.generation_config = saved

    assert take_ids(groups) == take_ids(plain)


@pytest.mark.parametrize("engine", ENGINES)
def test_greedy_equals_transformers_greedy(engine):
    model = make_double_model()
    prompts = make_prompts()
    sampling = Sampling(max_tokens=10, stop_token_ids=(), greedy=True)

    groups = ENGINES[engine](model, pad_token_id=0).sample(prompts, 1, sampling, noise=0)

    for prompt, [completion] in zip(prompts, groups, strict=True):
        ids = torch.tensor([prompt.token_ids])
        expected = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            generation_config=GenerationConfig(
                max_new_tokens=10, do_sample=False, eos_token_id=None, pad_token_id=0
            ),
        )
        assert list(completion.token_ids) == expected[0, len(prompt.token_ids) :].tolist()
        assert list(completion.behavior_logprobs) == [0.0] * 10


@pytest.mark.parametrize("engine", ENGINES)
def test_completions_do_not_depend_on_the_batch(engine):
    model = make_double_model()
    prompts = make_prompts()
    sampling = Sampling(max_tokens=16, stop_token_ids=(4, 5, 6), repetition_penalty=1.2)
    build = functools.partial(ENGINES[engine], model, pad_token_id=0)

    together = take_ids(build().sample(prompts, 5, sampling, noise=4))

    alone = [take_ids(build().sample([prompt], 5, sampling, noise=4))[0] for prompt in prompts]
    # A cache for one row: every wave is a single completion.
    one_by_one = take_ids(build(cache_bytes=1).sample(prompts, 5, sampling, noise=4))
    # Waves that cut through groups.
    row = 2 * 8 * 3 * 2 * 8 * (12 + 16) + 16 * VOCAB_SIZE + 16 * 16
    in_waves = take_ids(build(cache_bytes=3 * row).sample(prompts, 5, sampling, noise=4))
    fewer = take_ids(build().sample(prompts[::-1], 2, sampling, noise=4))
    assert alone == together
    assert one_by_one == together
    assert in_waves == together
    assert fewer[::-1] == [group[:2] for group in together]
    assert len({tuple(ids) for ids in itertools.chain(*together)}) == 20


def test_noise_of_another_step_gives_other_completions():
    engine = NativeEngine(make_double_model(), pad_token_id=0)
    sampling = Sampling(max_tokens=8, stop_token_ids=())

    runs = [
        take_ids(engine.sample(make_prompts(), 2, sampling, noise_key(0, purpose, step)))
        for purpose, step in [("train", 1), ("train", 1), ("train", 2), ("eval", 1)]
    ]

    assert runs[0] == runs[1]
    assert runs[0] != runs[2]
    assert runs[0] != runs[3]


@pytest.mark.parametrize("share", [0.0, 1 / 16, 2.0])
def test_taking_finished_rows_out_changes_nothing(share, monkeypatch):
    model = make_double_model()
    # Some prompts lose all their rows early; caches of 2 slots grow with rows taken out.
    sampling = Sampling(max_tokens=40, stop_token_ids=tuple(range(0, 97, 12)))
    expected = HFEngine(model, pad_token_id=0).sample(make_prompts(), 6, sampling, noise=11)
    monkeypatch.setattr("rloo.engines.native.native_engine._COMPACTION_SHARE", share)
    monkeypatch.setattr("rloo.engines.native.kv_cache._FIRST_SLOTS", 2)

    groups = NativeEngine(model, pad_token_id=0).sample(make_prompts(), 6, sampling, noise=11)

    assert take_ids(groups) == take_ids(expected)
    lengths = {len(ids) for ids in itertools.chain(*take_ids(groups))}
    assert len(lengths) > 5


def test_prefill_in_chunks_changes_nothing(monkeypatch):
    model = make_double_model()
    engine = NativeEngine(model, pad_token_id=0)
    sampling = Sampling(max_tokens=8, stop_token_ids=())
    expected = take_ids(engine.sample(make_prompts(), 2, sampling, noise=1))
    monkeypatch.setattr("rloo.engines.native.native_engine.PREFILL_TOKENS", 24)

    assert take_ids(engine.sample(make_prompts(), 2, sampling, noise=1)) == expected


@pytest.mark.parametrize("engine", ENGINES)
def test_the_module_is_given_back_as_it_was(engine):
    model = make_model("llama")
    # The second name is that of transformers before 5.23.
    getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
    model.train()
    model.model.layers[1].eval()
    attention.install(model)
    before = {name: module.training for name, module in model.named_modules()}
    settings, use_cache = model.generation_config, model.config.use_cache
    sampler = ENGINES[engine](model, pad_token_id=0)
    good = Sampling(max_tokens=3, stop_token_ids=())

    sampler.load(model.named_parameters, version=1)
    sampler.sample(make_prompts(), 2, good, noise=0)
    with pytest.raises(IndexError):
        sampler.sample([Prompt(0, [VOCAB_SIZE + 5], "")], 2, good, noise=0)

    assert {name: module.training for name, module in model.named_modules()} == before
    assert model.generation_config is settings
    assert model.config.use_cache == use_cache
    assert all(layer.gradient_checkpointing for layer in model.model.layers)
    assert model.config._attn_implementation == attention.IMPLEMENTATION
    assert torch.is_grad_enabled()


@pytest.mark.parametrize("engine", ENGINES)
def test_training_goes_on_after_sampling_under_the_same_autocast(engine):
    model = make_model("qwen3")
    sampler = ENGINES[engine](model, pad_token_id=0, precision=torch.bfloat16)

    with torch.autocast("cpu", dtype=torch.bfloat16):
        groups = sampler.sample(make_prompts(), 2, Sampling(4, ()), noise=0)
        model.train()
        loss = model(torch.tensor([groups[0][0].token_ids])).logits.float().sum()
        loss.backward()

    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize("name", ["qwen3", "gemma2", "gpt_oss"])
def test_low_precision_stays_close_to_a_plain_forward(name):
    model = make_model(name)
    prompts = make_prompts()

    engine = NativeEngine(model, pad_token_id=0, precision=torch.bfloat16)
    groups = engine.sample(prompts, 2, Sampling(3 * WINDOW, ()), noise=0)

    with torch.autocast("cpu", dtype=torch.bfloat16):
        for prompt, group in zip(prompts, groups, strict=True):
            for completion in group:
                logprobs = score(model, prompt, completion)
                expected = logprobs.gather(1, torch.tensor(completion.token_ids)[:, None])[:, 0]
                returned = torch.tensor(completion.policy_logprobs)
                torch.testing.assert_close(returned, expected, atol=2e-2, rtol=0)


@pytest.mark.parametrize("engine", ENGINES)
def test_no_prompts_give_no_completions(engine):
    sampler = ENGINES[engine](make_model("llama"), pad_token_id=0)

    assert sampler.sample([], 2, Sampling(3, ()), noise=0) == []


def test_waves_are_as_large_as_the_memory_allows():
    build = functools.partial(NativeEngine, make_model("qwen3"), pad_token_id=0)
    per_token = 2 * 3 * 2 * 8 * 4  # keys and values, 3 layers, 2 heads of 8 float32 numbers
    row = per_token * 30 + 16 * VOCAB_SIZE + 16 * 20

    for cache_bytes, rows in [(5 * row, 5), (5 * row - 1, 4), (0, 1), (1000 * row, 9)]:
        facts = build(cache_bytes=cache_bytes).capabilities
        assert facts.bytes_per_row(10, 20) == row
        assert facts.rows_at_once(9, 10, 20) == rows


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3", "gemma2", "gpt_oss"])
def test_in_bf16_the_native_engine_is_as_near_the_trainer_as_generate(name):
    model = make_sharp_model(name)
    sampling = Sampling(max_tokens=24, stop_token_ids=())
    means = {}
    for engine, build in ENGINES.items():
        attention.install(model)
        sampler = build(model, pad_token_id=0, precision=torch.bfloat16)
        groups = sampler.sample(make_prompts(), 8, sampling, noise=5)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            differences = [
                score(model, prompt, completion).gather(
                    1, torch.tensor(completion.token_ids)[:, None]
                )[:, 0]
                - torch.tensor(completion.policy_logprobs)
                for prompt, group in zip(make_prompts(), groups, strict=True)
                for completion in group
            ]
        means[engine] = torch.cat(differences).abs().mean().item()
    # `generate` calls the trainer's own kernel; ours rounds at other places.
    assert means["native"] < 2 * means["hf"] + 1e-4, means


@pytest.mark.parametrize("engine", ENGINES)
def test_autocast_casts_each_weight_once(engine):
    model = make_model("gemma3")
    weights = {parameter.data_ptr(): name for name, parameter in model.named_parameters()}
    casts = Counter()

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if function is torch.ops.aten._to_copy.default:
                casts[weights.get(args[0].data_ptr())] += 1
            return function(*args, **(kwargs or {}))

    sampler = ENGINES[engine](model, pad_token_id=0, precision=torch.bfloat16)
    with Watch():
        sampler.sample(make_prompts(), 2, Sampling(max_tokens=6, stop_token_ids=()), noise=0)

    counted = [casts[name] for name in weights.values() if "proj" in name or "embed" in name]
    assert max(counted) == 1
