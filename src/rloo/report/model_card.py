"""The model card, README.md beside a trained model: how it was trained, without results."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rloo.config.presets import objective_line
from rloo.model.policy import Policy
from rloo.report.monitor import versions
from rloo.report.records import write_text

FILE = "README.md"
# Distinguishes our card from a file written by the user or another library.
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
    """Write README.md in `output_dir`, replacing any other: metadata for the hub, then text. `name`
    is by default the hub repository's or the folder's, `datasets` the options'. Local folders stand
    in the text with their last part, and not in the metadata, where names are hub ids."""
    from huggingface_hub import ModelCardData

    config, folder = policy.config, Path(policy.config.output_dir)
    datasets, tags = _as_list(datasets or config.dataset), _as_list(tags)
    adapter = policy.adapter is not None
    base_model = config.model or policy.model.name_or_path or type(policy.model).__name__
    data = ModelCardData(
        base_model=base_model if _is_hub_name(base_model) else None,
        datasets=[dataset for dataset in datasets if _is_hub_name(dataset)] or None,
        library_name="peft" if adapter else "transformers",
        pipeline_tag="text-generation",
        tags=["rloo", *tags],
    )
    base = _shown(base_model)
    kind = f"A LoRA adapter for {base}, trained" if adapter else f"{base} fine-tuned"
    preset = f" (preset {config.preset})" if config.preset else ""
    where = f" on {', '.join(map(_shown, datasets))}" if datasets else ""
    facts = {
        "Objective": f"{objective_line(config)}{preset}",
        "Completions per prompt": str(config.num_generations),
        "KL coefficient": f"{config.beta:g}",
        "Learning rate": f"{config.learning_rate:g} ({config.lr_scheduler_type})",
        "Sampling temperature": f"{config.temperature:g}",
        "Rewards": ", ".join(rewards),
        "Seed": str(config.seed),
    }
    title = name or (config.hub_model_id or folder.absolute().name).split("/")[-1]
    paragraphs = (
        f"---\n{data.to_yaml().strip()}\n---\n{MARK}\n# {title}",
        f"{kind} with REINFORCE Leave-One-Out{where}.",
        "\n".join(f"- {fact}: {value}" for fact, value in facts.items()),
        f"Versions: {', '.join(f'{library} {number}' for library, number in versions().items())}.",
        f"The method:\n\n```bibtex\n{PAPER}\n```\n",
    )
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / FILE, "\n\n".join(paragraphs))


def has_other_card(folder: Path) -> bool:
    """Whether the folder has a README.md that this program did not write."""
    path = folder / FILE
    return path.exists() and MARK not in path.read_text(encoding="utf-8")


def _as_list(names: str | Sequence[str] | None) -> list[str]:
    return [names] if isinstance(names, str) else list(names or [])


def _is_hub_name(name: str) -> bool:
    return name.count("/") == 1 and not name.startswith((".", "~")) and not Path(name).exists()


def _shown(name: str) -> str:
    return name if _is_hub_name(name) else Path(name).name
