"""A generated dataset: `squares:LIMIT`."""

from rloo.data.dataset_spec import DatasetSpec


def limit_of(name):
    """The number after the colon in `name`."""
    number = name.partition(":")[2]
    if not number.isdecimal() or int(number) < 2:
        raise ValueError(f"dataset {name}: write squares:LIMIT, a number above 1 (dataset)")
    return int(number)


def load(name, split, options):
    """Rows with the columns `prompt` and `answer`. The training split has the even numbers."""
    first = 0 if split == "train" else 1
    numbers = range(first, limit_of(name), 2)
    return [{"prompt": f"{n} * {n} = ", "answer": str(n * n)} for n in numbers]


SQUARES = DatasetSpec(load, check=lambda name, options: limit_of(name) and None)
