"""Presets: RLOO as in each system and paper, and related methods, as values of our options.

A preset sets only options of the objective: no learning rate, batch or sampling option. Explicit
options override the preset. Each entry follows the source that it names. Tests in `tests/peers/`
compare TRL, verl, ms-swift, AReaL, grpo, dr_grpo and reinforce_pp with the systems' functions;
other tests compare openrlhf and nemo_rl with their formulas.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

from rloo.config.estimator_config import ARGUMENTS
from rloo.config.fields import suggest
from rloo.config.kwargs_options import keys_of
from rloo.config.options import TrainingOptions


@dataclass(frozen=True, slots=True)
class LossForm:
    """Properties of the loss that only some systems have. Only presets set them."""

    # All completions are computed and count in the mean, also without a score or with advantage 0.
    # The optimizer then also steps if the gradient is 0.
    all_completions: bool = False
    # Allows a kl_estimator that does not have the KL's gradient at its kl_placement.
    any_kl: bool = False


class Bias(NamedTuple):
    """Scale and cosine of the expected gradient, compared with the exact one, in the example that
    `tests/algorithm/test_unbiased.py` enumerates: 3 completions, beta 0.3."""

    scale: float
    cosine: float

    def __str__(self) -> str:
        scale, cosine = ("1" if value == 1 else f"{value:.4f}" for value in self)
        return f"scale {scale}, cosine {cosine}"


UNBIASED = Bias(1.0, 1.0)
_EXAMPLE = (
    "the expected gradient compared with the exact one (enumerated; 3 completions, beta 0.3):"
)


@dataclass(frozen=True, slots=True)
class Preset:
    """A preset: the `options` that it sets, and the `arguments` of its estimator. `left_out`: the
    bias with `estimator_kwargs.leave1out` true."""

    formula: str
    source: str
    options: Mapping[str, Any]
    arguments: Mapping[str, Any] = field(default_factory=dict)
    loss_form: LossForm = LossForm()
    bias: Bias = UNBIASED
    warning: str | None = None
    left_out: Bias | None = None

    def notice(self) -> str | None:
        """The warning with the bias."""
        if self.warning is None:
            return None
        other = self.left_out and f", and with estimator_kwargs.leave1out true {self.left_out}"
        return f"{self.warning}; {_EXAMPLE} {self.bias}{other or ''}"


# The objective of the paper. All other presets are differences from it.
BASE: dict[str, Any] = {
    "reward_bias": 0.0, "reward_scaling": 1.0, "reward_clip_range": None,
    "estimator": "composed", "estimator_kwargs": None,
    "beta": 0.05, "kl_placement": "reward", "kl_estimator": "k1", "use_bias_correction_kl": False,
    "kl_kwargs": None,
    "mean_level": "group", "mean_leave1out": True, "std_level": "none", "advantage_epsilon": 1e-4,
    "normalize_advantages": False,
    "importance_sampling_level": "sequence", "epsilon": 0.2, "epsilon_high": None, "delta": None,
    "loss_aggregation": "sequence", "rollout_importance_sampling_mode": None,
    "rollout_importance_sampling_threshold": 2.0,
}  # fmt: skip
_TOKEN = {"importance_sampling_level": "token"}
_TOKEN_MEAN = {**_TOKEN, "loss_aggregation": "token_mean"}
_KL_TO_GO = {"kl_placement": "reward_to_go", "kl_kwargs": {"clip": 10.0}}
_KL_APART = {"kl_in_baseline": False}
_K3_IN_LOSS = {"kl_placement": "loss", "kl_estimator": "k3"}
_OVER_TOKENS = {"normalize_over": "tokens"}
_VERL = {**_TOKEN_MEAN, "beta": 0.001, "delta": 3.0}
_WHITENED = {"normalize_advantages": True, "advantage_epsilon": 1e-8}
_AS_VERL_WHITENS = {**_OVER_TOKENS, "epsilon_in_variance": True}
_LEFT_IN = "preset {} has the paper's baseline, which includes the completion itself and is biased"

PRESETS: dict[str, Preset] = {
    "paper": Preset(
        "A_i = R_i - mean of the other R_j, R = r - beta * KL of the whole completion; "
        "loss = -mean_i A_i * log pi(y_i)",
        "Ahmadian et al. 2024, arXiv 2402.14740, equations 5 to 9",
        {},
    ),
    "trl": Preset(
        "the paper's; completions without a reward still count in the mean, those masked as "
        "truncated pay no KL, and without any signal the optimizer steps on a gradient of 0",
        "TRL 1.16, trainer/rloo_trainer.py",
        {},
        {"kl_of_truncated": False},
        LossForm(all_completions=True),
    ),
    "areal": Preset(
        "r = clip(10 * (r - 0.5)), leave-one-out over completions, then whitened over all tokens; "
        "token ratios against the recomputed policy; the loss of each token times "
        "p(recomputed policy) / p(rollout policy); mean over all tokens",
        "AReaL 1.0.4, examples/math/gsm8k_rloo.yaml",
        {
            **_TOKEN_MEAN, **_KL_TO_GO, "beta": 0.0,
            "reward_bias": -0.5, "reward_scaling": 10.0, "reward_clip_range": (-20.0, 20.0),
            "normalize_advantages": True, "advantage_epsilon": 1e-5, "epsilon": 0.4,
            "rollout_importance_sampling_mode": "token_mask",
            "rollout_importance_sampling_threshold": 5.0,
        },
        {**_KL_APART, **_OVER_TOKENS},
        LossForm(any_kl=True),
        bias=Bias(0.7807, 0.9281),
    ),
    "areal_docs": Preset(
        "A_it = G_it - mean of all other G_js of the group's tokens, G the reward less the KL to "
        "come; token ratios; mean over all tokens",
        "AReaL 1.0.4, its RLOO page (actor.adv_norm.mean_leave1out)",
        {
            **_TOKEN_MEAN, **_KL_TO_GO, "beta": 0.1,
            "reward_clip_range": (-20.0, 20.0), "advantage_epsilon": 1e-5,
        },
        {"mean_over": "tokens"},
        LossForm(any_kl=True),
        bias=Bias(0.4725, 0.9839),
        warning="preset areal_docs is the recipe of AReaL's RLOO page: its adv_norm.mean_leave1out "
        "leaves out one token, not one completion, so that the rest of a completion stays in its "
        "own baseline: that is not REINFORCE Leave-One-Out, and biased (preset areal, or paper)",
    ),
    "areal_page": Preset(
        "A_i = r_i - mean of the other r_j, no KL; token ratios, clipped; each completion's mean "
        "over its tokens, then the mean over completions",
        "AReaL's RLOO page of 28 September 2025, the objective as it is printed",
        {**_TOKEN, "loss_aggregation": "sequence_token_mean", "beta": 0.0},
        bias=Bias(0.5661, 0.9704),
    ),
    "ms_swift": Preset(
        "A_i as in the paper; token ratios; each completion's mean over its tokens, then the mean "
        "over completions",
        "ms-swift 4.6, --rlhf_type grpo --advantage_estimator rloo on its Hugging Face backend",
        {**_TOKEN, "loss_aggregation": "sequence_token_mean", "beta": 0.04},
        bias=Bias(0.5661, 0.9704),
    ),
    "verl": Preset(
        "A_i as in the paper; token ratios with dual clipping at 3; mean over all tokens",
        "verl 0.9.1, algorithm.adv_estimator=rloo, use_kl_in_reward=True",
        _VERL,
        bias=Bias(0.5540, 0.9985),
    ),
    "openrlhf": Preset(
        "A_it = clip(r_i - mean of the other r_j, -10, 10) - beta * KL to come; token ratios; mean "
        "over all tokens",
        "OpenRLHF 0.11, --algo.advantage.estimator rloo",
        {**_TOKEN_MEAN, **_KL_TO_GO, "beta": 0.01},
        {**_KL_APART, "advantage_clip_range": [-10.0, 10.0]},
        bias=Bias(0.5585, 0.9974),
    ),
    "nemo_rl": Preset(
        "A_i = (r_i - mean of the others) / deviation of the others; k3 KL in the loss; token "
        "ratios; mean over all tokens",
        "NeMo-RL 0.6, grpo.use_leave_one_out_baseline=true",
        {
            **_TOKEN_MEAN, **_K3_IN_LOSS, "beta": 0.01, "kl_kwargs": {"clip": 10.0},
            "std_level": "group", "advantage_epsilon": 1e-6,
        },
        {"std_leave1out": True},
        bias=Bias(1.1832, 0.8143),
    ),
    "reinforce_pp": Preset(
        "A_it = r_i - beta * KL to come, whitened over all tokens of the rollout; no baseline; "
        "token ratios; mean over all tokens",
        "REINFORCE++ (Hu 2025, arXiv 2501.03262) as verl 0.9.1's reinforce_plus_plus",
        {**_VERL, **_WHITENED, "kl_placement": "reward_to_go", "mean_level": "none"},
        _AS_VERL_WHITENS,
        bias=Bias(0.8045, 0.9264),
    ),
    "reinforce_pp_baseline": Preset(
        "R_i - mean of the group, its own included, whitened over all tokens of the rollout; token "
        "ratios; mean over all tokens",
        "REINFORCE++ with baseline as verl 0.9.1's reinforce_plus_plus_baseline",
        {**_VERL, **_WHITENED, "mean_leave1out": False},
        _AS_VERL_WHITENS,
        bias=Bias(0.6839, 0.9796),
    ),
    "grpo": Preset(
        "A_i = (r_i - mean of the group) / deviation of the group; k3 KL in the loss; token "
        "ratios; each completion's mean over its tokens, then the mean over completions",
        "Shao et al. 2024, arXiv 2402.03300, equations 3 and 4",
        {
            **_TOKEN, **_K3_IN_LOSS, "loss_aggregation": "sequence_token_mean", "beta": 0.04,
            "mean_leave1out": False, "std_level": "group",
        },
        bias=Bias(0.6319, 0.8666),
    ),
    "dr_grpo": Preset(
        "A_i = r_i - mean of the group; token ratios; summed over tokens and divided by the "
        "longest length allowed",
        "Liu et al. 2025, arXiv 2503.20783",
        {
            **_TOKEN, **_K3_IN_LOSS, "loss_aggregation": "constant", "beta": 0.0,
            "mean_leave1out": False,
        },
        bias=Bias(0.3092, 0.9288),
    ),
    "opo": Preset(
        "A_i = r_i - mean of the group's r_j, its own included, weighted by their lengths; no KL",
        "Hao et al. 2025, arXiv 2505.23585",
        {"estimator": "length_weighted", "beta": 0.0},
        {"leave1out": False},
        bias=Bias(0.6596, 0.9981),
        warning=_LEFT_IN.format("opo"),
        left_out=UNBIASED,
    ),
    "optimal_token_baseline": Preset(
        "A_it = G_it - sum of W_jt G_jt / sum of W_jt over the group's completions with a token t, "
        "its own included; G the reward less the KL to come, W_jt = sum of 1 - 2 p + sum of p(v)^2 "
        "up to t; token ratios with dual clipping at 3; mean over all tokens",
        "arXiv 2602.07078 as verl 0.9.1's optimal_token_baseline",
        {**_VERL, "estimator": "optimal_token"},
        {"leave1out": False},
        bias=Bias(0.3376, 0.9953),
        warning=_LEFT_IN.format("optimal_token_baseline"),
        left_out=Bias(0.5522, 0.9988),
    ),
}  # fmt: skip


def preset_options(name: str | None) -> dict[str, Any]:
    """All options of the objective in the preset `name`; empty for None. Raises ValueError for an
    unknown name, with the most similar known name."""
    if name is None:
        return {}
    if name not in PRESETS:
        raise ValueError(
            f"preset is {name!r}; it must be one of {', '.join(PRESETS)}{suggest(name, PRESETS)}"
        )
    arguments = {"estimator_kwargs": dict(PRESETS[name].arguments) or None}
    return {**BASE, **PRESETS[name].options, **arguments}


def over_preset(values: Mapping[str, Any]) -> dict[str, Any]:
    """`values`, merged over the options of their preset. `kl_kwargs` and `estimator_kwargs` are
    merged by key. The preset's `estimator_kwargs` are dropped if `values` name another estimator
    than the preset's. Raises ValueError for an unknown preset.
    """
    preset = preset_options(values.get("preset"))
    given = values.get("estimator_kwargs")
    usual = preset.get("estimator", "composed")
    if values.get("estimator", usual) == usual:
        given = {**(preset.get("estimator_kwargs") or {}), **(given or {})} or None
    kl = {**(preset.get("kl_kwargs") or {}), **(values.get("kl_kwargs") or {})} or None
    return {**preset, **values, "estimator_kwargs": given, "kl_kwargs": kl}


def loss_form(name: str | None) -> LossForm:
    """The loss form of the preset `name`; the default form for None."""
    return LossForm() if name is None else PRESETS[name].loss_form


def parts_of(options: Mapping[str, Any], form: LossForm) -> dict[str, Any]:
    """The parts of an objective by name: the `options` of BASE, with the entries of mappings as
    separate parts, and `all_completions` of the loss form."""
    parts = dict(options)
    defaults = ARGUMENTS if parts["estimator"] == "composed" else {}
    arguments = defaults | (parts.pop("estimator_kwargs") or {})
    parts |= {f"estimator_kwargs.{name}": value for name, value in arguments.items()}
    kl = {key.name: key.default for key in keys_of("kl_kwargs").values()}
    kl |= parts.pop("kl_kwargs") or {}
    parts |= {f"kl_kwargs.{name}": value for name, value in kl.items()}
    return parts | {"all_completions": form.all_completions}


def preset_parts(name: str) -> dict[str, Any]:
    """The parts of the objective under the preset `name`."""
    return parts_of(preset_options(name), loss_form(name))


def differences(ours: Mapping[str, Any], usual: Mapping[str, Any]) -> str:
    """The parts of `ours` that differ from `usual`, each with its value, as text."""
    return ", ".join(f"{name} {value}" for name, value in ours.items() if value != usual.get(name))


# Options that change the objective but belong to no preset.
_OTHERS = (
    "missing_eos_penalty", "normalize_rewards", "mask_truncated_completions", "entropy_coef",
    "loss_constant",
)  # fmt: skip


def objective_line(config: TrainingOptions) -> str:
    """The formula of the preset (by default the paper's gradient, with beta), followed by every
    option of the objective that differs from the preset."""
    preset = config.preset or "paper"
    ours = parts_of({name: getattr(config, name) for name in BASE}, loss_form(config.preset))
    usual = preset_parts(preset) | {"beta": 0.0}
    for option in fields(TrainingOptions):
        if option.name in _OTHERS:
            ours[option.name], usual[option.name] = getattr(config, option.name), option.default
    formula = PRESETS[preset].formula
    if preset == "paper":
        advantage = _advantage(config)
        formula = f"gradient = mean over completions of {advantage} * grad log p(completion_i)"
        if config.estimator == "composed" and config.kl_placement == "reward":
            del ours["beta"]  # the formula has it
    unlike = differences(ours, usual)
    return f"{formula}; with {unlike}" if unlike else formula


def _advantage(config: TrainingOptions) -> str:
    if config.estimator != "composed":
        return "A_i"
    if not config.beta or config.kl_placement != "reward":
        return "(r_i - mean of the other r_j)"
    kl = f"{config.beta:g} KL"
    return f"(r_i - {kl}_i - mean of the other (r_j - {kl}_j))"


def describe_preset(name: str) -> list[str]:
    """The lines that describe the preset `name`: its formula, source and bias, its differences from
    the paper, and, for each other preset, how that preset differs from `name`."""
    preset, ours = PRESETS[name], preset_parts(name)
    lines = [f"preset {name}: {preset.formula}", f"source: {preset.source}"]
    lines.append(f"{_EXAMPLE} {preset.bias}")
    lines += [f"warning: {preset.notice()}"] if preset.warning else []
    unlike = differences(ours, preset_parts("paper"))
    lines.append(f"unlike the paper's form: {unlike or 'nothing'}")
    for other in PRESETS:
        if other != name:
            unlike = differences(preset_parts(other), ours)
            lines.append(f"{other} differs in: {unlike or 'nothing'}")
    return lines


def kl_fault(config: TrainingOptions) -> str | None:
    """The fault in the gradient of the KL at its kl_placement; None if the gradient is correct."""
    in_loss, is_k1 = config.kl_placement == "loss", config.kl_estimator == "k1"
    corrected = in_loss and config.use_bias_correction_kl
    exact = config.kl_estimator == "exact"
    if config.beta == 0 or corrected or exact or in_loss != is_k1:
        return None
    return "zero gradient" if in_loss else "wrong gradient"


def remarks(config: TrainingOptions) -> list[str]:
    """Notes for the user: a biased or wrong gradient, and options without effect."""
    found = []
    arguments = config.estimator_kwargs or {}
    over_tokens = arguments.get("mean_over") == "tokens"
    preset = PRESETS.get(config.preset or "")
    notice = preset.notice() if preset else None
    if preset and notice and arguments.items() >= preset.arguments.items():
        found.append(notice)
    elif arguments.get("leave1out") is False:
        found.append(
            "each completion is in its own baseline, which is biased (estimator_kwargs.leave1out)"
        )
    elif config.estimator == "composed" and over_tokens:
        found.append(
            "the baseline is a mean over tokens (mean_over): mean_leave1out leaves out one token, "
            "not one completion, which is biased"
        )
    if config.estimator in ("shrinkage", "regression") and config.dynamic_sample:
        found.append(
            "dynamic_sample replaces groups of equal rewards, which have advantages under the "
            f"estimator {config.estimator}: without them the gradient is biased (dynamic_sample, "
            "estimator)"
        )
    if kl_fault(config):
        found.append(
            f"{config.kl_estimator} as KL in the {config.kl_placement} has a {kl_fault(config)}: "
            f"it is used because preset {config.preset} allows any (kl_estimator)"
        )
    # TRL accepts these options silently, so scripts for TRL may set them.
    waiting = {"ref_model_mixup_alpha": 0.6, "ref_model_sync_steps": 512}
    for name, default in waiting.items():
        value = getattr(config, name)
        if value != default and not config.sync_ref_model:
            found.append(f"{name} is {value} and has no effect: sync_ref_model is false")
    return found
