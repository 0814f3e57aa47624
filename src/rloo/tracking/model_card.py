"""Writes the model card, README.md of a trained model, about its training and its results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rloo.config.presets import objective_line
from rloo.distributed.standard_streams import counted
from rloo.model.policy import Policy
from rloo.tracking.after_run import commands
from rloo.tracking.console import percent
from rloo.tracking.jsonl import EVALUATIONS, versions, write_text
from rloo.tracking.run_reader import read_rows

FILE = "README.md"
# Distinguishes this package's card from a file of the user or another library.
MARK = "<!-- written by rloo -->"
PAPER = """\
@inproceedings{ahmadian2024back,
  title     = {Back to Basics: Revisiting {REINFORCE}-Style Optimization for Learning from Human
               Feedback in {LLMs}},
  author    = {Ahmadian, Arash and Cremer, Chris and Gall{\\'e}, Matthias and Fadaee, Marzieh and
               Kreutzer, Julia and Pietquin, Olivier and {\\"U}st{\\"u}n, Ahmet and Hooker, Sara},
  booktitle = {Proceedings of the 62nd Annual Meeting of the Association for Computational
               Linguistics (Volume 1: Long Papers)},
  year      = {2024},
  eprint    = {2402.14740},
  archivePrefix = {arXiv}
}"""


def write_card(
    policy: Policy,
    rewards: Sequence[str],
    *,
    name: str | None = None,
    datasets: str | Sequence[str] | None = None,
    tags: str | Sequence[str] | None = None,
) -> None:
    """Write README.md in `output_dir`: metadata for the hub, then text. An existing README.md is
    replaced. `name` is by default the name of the hub repository or folder; `datasets` are by
    default the datasets of the options. The text names a local folder by the last part of its path.
    The metadata leaves out local folders, since it contains only hub ids. The results are those of
    the first and the last evaluation in the folder, if there are two."""
    from huggingface_hub import ModelCardData

    config, folder = policy.config, Path(policy.config.output_dir)
    datasets, tags = _as_list(datasets or config.dataset), _as_list(tags)
    adapter = policy.adapter is not None
    base_model = config.model or policy.model.name_or_path or type(policy.model).__name__
    title = name or (config.hub_model_id or folder.absolute().name).split("/")[-1]
    held_out = _shown(config.eval_dataset or next(iter(datasets), "prompts of its own"))
    evaluations = _evaluations(folder)
    data = ModelCardData(
        base_model=base_model if _is_hub_name(base_model) else None,
        datasets=[dataset for dataset in datasets if _is_hub_name(dataset)] or None,
        library_name="peft" if adapter else "transformers",
        pipeline_tag="text-generation",
        tags=["rloo", *tags],
        **_model_index(title, evaluations, held_out),
    )
    base = _shown(base_model)
    kind = f"A LoRA adapter for {base}, trained" if adapter else f"{base} fine-tuned"
    preset = f" (preset {config.preset})" if config.preset else ""
    where = f" on {', '.join(map(_shown, datasets))}" if datasets else ""
    facts = {
        "Objective": f"{objective_line(config)}{preset}",
        "Base model": base,
        "Completions per prompt": str(config.num_generations),
        "KL coefficient": f"{config.beta:g}",
        "Learning rate": f"{config.learning_rate:g} ({config.lr_scheduler_type})",
        "Sampling temperature": f"{config.temperature:g}",
        "Rewards": ", ".join(rewards),
        "Seed": str(config.seed),
    }
    paragraphs = (
        f"---\n{data.to_yaml().strip()}\n---\n{MARK}\n# {title}",
        f"{kind} with REINFORCE Leave-One-Out{where}.",
        *([_result_table(evaluations, held_out)] if evaluations else []),
        "\n".join(f"- {fact}: {value}" for fact, value in facts.items()),
        _usage(policy, base if _is_hub_name(base_model) else "BASE", title),
        "`rloo train config.yaml --output_dir again` repeats it, with the config.yaml beside this "
        "file.",
        f"Versions: {', '.join(f'{library} {number}' for library, number in versions().items())}.",
        f"The method:\n\n```bibtex\n{PAPER}\n```\n",
    )
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / FILE, "\n\n".join(paragraphs))


def _usage(policy: Policy, base: str, name: str) -> str:
    """The commands that use the model or adapter."""
    lines = [f"# {what}\n{line}" for what, line in commands(policy, ".", base, name=name).items()]
    return "In this folder:\n\n```bash\n" + "\n".join(lines) + "\n```"


def write_merged_card(folder: Path, adapter: str, base: str) -> None:
    """Write the card of a merged model: the card of `adapter`, if this package wrote it, changed to
    the card of a complete model."""
    from huggingface_hub import ModelCard, ModelCardData

    source, merged = Path(adapter, FILE), f"The adapter is merged into its base, {_shown(base)}."
    data = ModelCardData(base_model=base if _is_hub_name(base) else None, tags=["rloo"])
    text = f"{MARK}\n# {Path(adapter).absolute().name}\n\n{merged}\n"
    if source.exists() and not has_other_card(Path(adapter)):
        card = ModelCard.load(source)
        data, text = card.data, f"{card.text.strip()}\n\n{merged}\n"
    data.library_name, data.pipeline_tag = "transformers", "text-generation"
    write_text(folder / FILE, f"---\n{data.to_yaml().strip()}\n---\n{text}")


def _evaluations(folder: Path) -> list[dict[str, Any]]:
    """A run's first and last evaluation, on the first dataset; none without two."""
    # The best model is from an earlier step and evaluated again at the end.
    rows = sorted(read_rows(folder / EVALUATIONS), key=lambda row: row.get("name") == "best")
    rows = [row for row in rows if row.get("dataset") == rows[0].get("dataset")]
    return [rows[0], rows[-1]] if len(rows) > 1 else []


def _result_table(evaluations: Sequence[Mapping[str, Any]], held_out: str) -> str:
    first, last = evaluations
    names = [name for name in first if name.startswith("pass@") and f"{name}_interval" in first]
    rows = [
        (name.replace("_", ", "), *(percent(e[name], e[f"{name}_interval"]) for e in evaluations))
        for name in names
    ]
    rewards = [e["reward"] for e in evaluations if e.get("reward") is not None]
    if len(rewards) == len(evaluations):
        rows.append(("mean reward", *(f"{reward:.3f}" for reward in rewards)))
    lines = [f"| {' | '.join(row)} |" for row in rows]
    prompts = counted(first["num_prompts"], "held-out prompt")
    return (
        f"On {prompts} of {held_out}, with 95 % intervals:\n\n"
        f"| | step {first['step']} | step {last['step']} |\n|---|---|---|\n" + "\n".join(lines)
    )


def _model_index(
    title: str, evaluations: Sequence[Mapping[str, Any]], held_out: str
) -> dict[str, Any]:
    """The last results in the hub's metadata format."""
    from huggingface_hub import EvalResult

    results = [
        EvalResult(
            task_type="text-generation",
            dataset_type=held_out,
            dataset_name=held_out,
            metric_type=name,
            metric_name=name.replace("_", ", "),
            metric_value=round(last[name], 4),
        )
        for last in evaluations[-1:]
        for name in ("pass@1", "pass@1_greedy", "reward")
        if last.get(name) is not None
    ]
    return {"model_name": title, "eval_results": results} if results else {}


def has_other_card(folder: Path) -> bool:
    """Return whether the folder has a README.md that this package did not write."""
    path = folder / FILE
    return path.exists() and MARK not in path.read_text(encoding="utf-8")


def _as_list(names: str | Sequence[str] | None) -> list[str]:
    return [names] if isinstance(names, str) else list(names or [])


def _is_hub_name(name: str) -> bool:
    return name.count("/") == 1 and not name.startswith((".", "~")) and not Path(name).exists()


def _shown(name: str) -> str:
    return name if _is_hub_name(name) else Path(name).name
