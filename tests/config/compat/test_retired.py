"""Options that have another form now: the old one means the same, and a warning says the new."""

from __future__ import annotations

import re
import warnings

import pytest
import yaml

from rloo.config.compat import retired
from rloo.config.compat.retired import by_entry, explain, resolved_form
from rloo.config.config import RLOOConfig
from rloo.config.kwargs_options import KWARGS, keys_of
from rloo.config.options import OPTIONS
from rloo.config.parsing import parse_command_line
from rloo.config.show import render_all, render_option

GYM = {"dataset": "gym:gcd"}
SERVERS = {"rollout_engine": "vllm"}
BESIDE = {"max_staleness": 1, "sampler_processes": 1}
TOOLS = {"tools": ["tools.py:add"]}
# old name -> (a value other than the default, how it is written now, what it needs)
FORMS = {
    "rollout_copy": (True, {"engine_kwargs": {"copy_weights": True}}, {}),
    "vllm_devices": (["1"], {"engine_kwargs": {"devices": ["1"]}}, SERVERS),
    "vllm_executable": (["sh", "v"], {"engine_kwargs": {"executable": ["sh", "v"]}}, {}),
    "vllm_merge_adapter": (True, {"engine_kwargs": {"merge_adapter": True}}, SERVERS),
    "vllm_request_timeout": (9.0, {"engine_kwargs": {"request_timeout": 9.0}}, SERVERS),
    "vllm_restarts": (5, {"engine_kwargs": {"restarts": 5}}, SERVERS),
    "vllm_serve_args": (["--x"], {"engine_kwargs": {"serve_args": ["--x"]}}, SERVERS),
    "vllm_tolerance": (0.5, {"engine_kwargs": {"tolerance": 0.5}}, SERVERS),
    "vllm_weight_transfer": ("files", {"engine_kwargs": {"weight_transfer": "files"}}, SERVERS),
    "vllm_weights_dir": ("there", {"engine_kwargs": {"weights_dir": "there"}}, SERVERS),
    "gym_config": (
        {"gcd": {"max_value": 9}}, {"dataset_kwargs": {"config": {"gcd": {"max_value": 9}}}}, GYM,
    ),
    "gym_curriculum": (True, {"dataset_kwargs": {"curriculum": True}}, GYM),
    "gym_levels": ([0, 2], {"dataset_kwargs": {"levels": [0, 2]}}, GYM),
    "gym_seed": (3, {"dataset_kwargs": {"seed": 3}}, GYM),
    "gym_size": (9, {"dataset_kwargs": {"size": 9}}, GYM),
    "kl_clip": (5.0, {"kl_kwargs": {"clip": 5.0}}, {}),
    "kl_target": (0.1, {"kl_kwargs": {"target": 0.1}}, {}),
    "kl_horizon": (
        50, {"kl_kwargs": {"target": 0.1, "horizon": 50}}, {"kl_kwargs": {"target": 0.1}},
    ),
    "advantage_clip_range": (
        [-1.0, 2.0], {"estimator_kwargs": {"advantage_clip_range": [-1.0, 2.0]}}, {},
    ),
    "running_decay": (
        0.5, {"estimator_kwargs": {"running_decay": 0.5}}, {"mean_level": "running"},
    ),
    "eval_max_completion_length": (7, {"eval_kwargs": {"max_completion_length": 7}}, {}),
    "eval_pass_k": ([2], {"eval_kwargs": {"pass_k": [2]}}, {}),
    "eval_temperature": (0.5, {"eval_kwargs": {"temperature": 0.5}}, {}),
    "eval_top_k": (5, {"eval_kwargs": {"top_k": 5}}, {}),
    "eval_top_p": (0.5, {"eval_kwargs": {"top_p": 0.5}}, {}),
    "pass_threshold": (0.5, {"eval_kwargs": {"pass_threshold": 0.5}}, {}),
    "ess_guard": (True, {"async_kwargs": {"ess_guard": True}}, BESIDE),
    "partial_rollouts": (
        True, {"async_kwargs": {"partial_rollouts": True}}, {**SERVERS, "max_staleness": 1},
    ),
    "remote_workers": ("both", {"async_kwargs": {"remote_workers": "both"}}, BESIDE),
    "reward_workers": (3, {"async_kwargs": {"reward_workers": 3}}, BESIDE),
    "cpu_kernels": (False, {"cpu_kwargs": {"kernels": False}}, {}),
    "onednn": (["packed"], {"cpu_kwargs": {"onednn": ["packed"]}}, {}),
    "episode_timeout": (7.0, {"tool_kwargs": {"timeout": 7.0}}, TOOLS),
    "max_tool_response_length": (70, {"tool_kwargs": {"max_response_length": 70}}, TOOLS),
    "offload_params": (True, {"offload": ["params"]}, {"parallel": "fsdp2"}),
    "offload_reference": (True, {"offload": ["reference"]}, {}),
    "gather_limit": (7, {}, {}),
}  # fmt: skip
each = pytest.mark.parametrize("name", FORMS)
# What a run's folder or checkpoint of the version before has of them.
EARLIER = {name: retired.value_of(RLOOConfig(), name) for name in retired.NAMES if "." not in name}


def read(**options):
    """The configuration, and the warnings about old names."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        config = RLOOConfig(**options)
    return config, [str(w.message) for w in caught if w.category is FutureWarning]


def test_every_old_name_has_a_form_here():
    assert FORMS.keys() == set(retired.RETIRED)
    assert not set(retired.NAMES) & {option.name for option in OPTIONS}


@each
def test_the_old_form_means_the_same_and_a_warning_says_what_to_write(name):
    value, now, needs = FORMS[name]
    config, notes = read(**needs, **{name: value})
    assert config == RLOOConfig(**{**needs, **now})
    (note,) = notes
    assert note.startswith(f"{name} is retired; ")
    written = re.search(r"; write (.*)$", note)
    assert (name == "gather_limit") == (written is None)
    if written:  # as it stands, it is YAML that means the same
        assert {**needs, **now} == merged(needs, yaml.safe_load(written[1]))


def merged(needs, form):
    (option,) = form
    both = isinstance(form[option], dict) and option in needs
    return {**needs, option: {**needs[option], **form[option]} if both else form[option]}


@each
def test_a_file_and_a_command_line_may_have_the_old_form(name, tmp_path):
    value, now, needs = FORMS[name]
    expected = RLOOConfig(**{**needs, **now})
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump({**needs, name: value}))
    with pytest.warns(FutureWarning, match=f"{name} is retired"):
        assert parse_command_line([str(path)]) == expected
    path.write_text(yaml.safe_dump(needs or {"seed": 42}))
    words = value if isinstance(value, list) else [value]
    if name == "vllm_serve_args":
        words = ['["--x"]']  # what begins with dashes is an option
    with pytest.warns(FutureWarning, match=f"{name} is retired"):
        line = [str(path), f"--{name}", *map(str, words)]
        if name == "gym_config":
            line = [str(path), "--gym_config", "{gcd: {max_value: 9}}"]
        assert parse_command_line(line) == expected


@each
def test_both_forms_with_different_values_are_refused_by_both_names(name):
    value, now, needs = FORMS[name]
    if not now or name == "kl_horizon":
        return
    ((option, form),) = now.items()
    other = [] if option == "offload" else {key: _other(one) for key, one in form.items()}
    with pytest.raises(ValueError, match=rf"{name} is .* and {option}.* is .* give only"):
        read(**needs, **{option: other, name: value})
    same, _ = read(**needs, **now, **{name: value})
    assert same == RLOOConfig(**{**needs, **now})


def _other(value):
    if isinstance(value, bool):
        return not value
    if isinstance(value, str):
        return "sample" if value == "both" else "auto"
    if isinstance(value, dict):
        return {"gcd": {}}
    if isinstance(value, list):
        return [-3.0, 3.0] if value == [-1.0, 2.0] else [*value, value[0]][1:] + ["0"][:0] + value
    return value * 2


@each
def test_scripts_may_read_and_assign_the_old_name(name):
    value, now, needs = FORMS[name]
    config, _ = read(**needs)
    with pytest.warns(FutureWarning, match=f"{name} is retired"):
        setattr(config, name, value)
    assert config.fixed() == RLOOConfig(**{**needs, **now})
    assert name == "gather_limit" or getattr(config, name) == value


@each
def test_rloo_config_explains_the_old_name(name):
    shown = " ".join(str(render_option(name)).split())
    assert shown.startswith(f"{name} is retired; ")
    place = retired.place_of(name)
    assert place.partition(".")[0] in shown and explain(name) in shown


def test_a_wrong_value_is_refused_by_the_name_that_was_given(tmp_path):
    with pytest.raises(ValueError, match="vllm_restarts is 'x'; it must be a whole number"):
        RLOOConfig(vllm_restarts="x")
    path = tmp_path / "run.yaml"
    path.write_text("seed: 1\nkl_horizon: much\n")
    with pytest.raises(ValueError, match=r"run.yaml, line 2: kl_horizon is 'much'"):
        parse_command_line([str(path)])
    with pytest.raises(ValueError, match="restarts is -1; it must be at least 0"):
        read(**SERVERS, vllm_restarts=-1)


def test_a_command_line_s_old_names_leave_the_file_s_other_entries(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("rollout_engine: vllm\nengine_kwargs: {restarts: 9, tolerance: 0.3}\n")
    with pytest.warns(FutureWarning, match="vllm_tolerance is retired"):
        config = parse_command_line([str(path), "--vllm_tolerance", "0.4"])
    assert config.engine_kwargs == {"restarts": 9, "tolerance": 0.4}
    # The default, which is one of the file's own here.
    assert parse_command_line([str(path), "--vllm_restarts", "3"]).engine_kwargs == {
        "tolerance": 0.3
    }
    path.write_text("offload: [optimizer, reference]\n")
    assert parse_command_line([str(path), "--offload_optimizer", "false"]).offload == ["reference"]
    both = r"vllm_restarts and engine_kwargs.restarts are both given"
    with pytest.warns(FutureWarning), pytest.raises(ValueError, match=both):
        parse_command_line(["--vllm_restarts", "4", "--engine_kwargs.restarts", "3"])


def test_names_that_other_systems_have_are_no_old_ones():
    config, notes = read(offload_optimizer=True, **{"algorithm.kl_ctrl.target_kl": 0.2})
    assert (config.offload, config.kl_options.target, notes) == (["optimizer"], 0.2, [])


def test_several_words_of_offload_go_together():
    config, _ = read(offload_optimizer=True, offload_reference=True)
    assert config.offload == ["optimizer", "reference"]
    assert config == RLOOConfig(offload=["reference", "optimizer"])


def test_resolved_options_of_the_version_before_are_these():
    """A run's config.yaml and a checkpoint name every option, most at their defaults."""
    now = RLOOConfig().to_dict()
    before = {name: value for name, value in now.items() if name not in (*KWARGS, "offload")}
    config, notes = read(**before, **EARLIER)
    assert (config, notes) == (RLOOConfig(), [])
    assert by_entry(resolved_form({**before, **EARLIER})) == by_entry(now)
    changed = by_entry(resolved_form({**before, **EARLIER, "vllm_restarts": 4}))
    assert changed == {**by_entry(now), "engine_kwargs.restarts": 4}


def test_a_null_of_the_version_before_wins_over_a_preset():
    config, _ = read(preset="areal", kl_clip=None)
    assert (config.kl_options.clip, RLOOConfig(preset="areal").kl_options.clip) == (None, 10.0)
    assert RLOOConfig(**config.to_dict()) == config


@pytest.mark.parametrize("option", KWARGS)
def test_the_keys_of_a_mapping_are_checked_and_listed(option):
    known = keys_of(option)
    name = next(iter(known))
    with pytest.raises(
        ValueError, match=rf"unknown key {name}x of {option}; did you mean {name}\?"
    ):
        RLOOConfig(**{option: {f"{name}x": 1}})
    with pytest.raises(ValueError, match=rf"{option}\.{name} is "):
        RLOOConfig(**{option: {name: ["a", ["b"]]}})
    shown = " ".join(render_all().split())
    for key, about in known.items():
        help = about.metadata["help"]
        assert f"{key} = " in shown and help in shown
        assert re.fullmatch(r"[A-Z4].{15,}\.", help) and ". " not in help and "%" not in help


def test_a_key_is_given_on_the_command_line_in_three_ways():
    expected = RLOOConfig(**SERVERS, engine_kwargs={"restarts": 5, "devices": ["0", "1"]})
    for words in (
        ["--engine_kwargs.restarts", "5", "--engine_kwargs.devices", "0", "1"],
        ["--engine_kwargs", "{restarts: 5, devices: ['0', '1']}"],
        ['engine_kwargs={"restarts": 5, "devices": ["0", "1"]}'],
    ):
        assert parse_command_line(["--rollout_engine", "vllm", *words]) == expected
    inner = parse_command_line(
        ["--dataset", "gym:gcd", "--dataset_kwargs.config.gcd.max_value", "9"]
    )
    assert inner.dataset_options.config == {"gcd.max_value": 9}
    with pytest.warns(FutureWarning, match=r"gym_config\.gcd\.max_value is retired; write dataset"):
        assert parse_command_line(["-d", "gym:gcd", "--gym_config.gcd.max_value", "9"]) == inner
