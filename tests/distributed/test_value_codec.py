"""How values are written: checkpoints, rows and messages that exist are read as they were."""

import json
from collections import namedtuple
from fractions import Fraction

import pytest
import torch

from rloo.distributed import value_codec
from rloo.distributed.pytree import flatten, unflatten
from rloo.distributed.value_codec import Codec, NotSerializable

Point = namedtuple("Point", "x y")


@pytest.mark.parametrize(
    "value, written",
    [
        ((1, [2.5, None]), {"tuple": [1, [2.5, None]]}),
        ({"a": {1: "b"}}, {"dict": [["a", {"dict": [[1, "b"]]}]]}),
        ({(1, 2): {3}}, {"dict": [[{"tuple": [1, 2]}, {"set": [3]}]]}),
        (Point(1, 2), {"named": ["Point", ["x", "y"], [1, 2]]}),
        (2**70, {"int": hex(2**70)}),
        (Fraction(1, 3), {"Fraction": [1, 3]}),
    ],
)
def test_every_kind_has_its_tag(value, written):
    assert value_codec.encode(value) == written
    assert value_codec.decode(json.loads(json.dumps(written))) == value


def test_a_state_is_written_as_checkpoints_have_it():
    state = {"a": torch.ones(2), "b": [1, (2, torch.zeros(1))], (1, "k"): {3: True}, "n": 2**70}
    tensors, written = flatten(state)
    assert sorted(tensors) == ["/a", "/b/1/1"]
    assert json.loads(json.dumps(written)) == {
        "dict": [
            ["a", {"tensor": "/a"}],
            ["b", [1, {"tuple": [2, {"tensor": "/b/1/1"}]}]],
            [[1, "k"], {"dict": [[3, True]]}],
            ["n", 2**70],
        ]
    }
    read = unflatten(json.loads(json.dumps(written)), tensors)
    assert read.pop("a").tolist() == [1, 1] and read["b"][1][1].tolist() == [0]
    assert read[1, "k"] == {3: True} and read["n"] == 2**70 and type(read["b"][1]) is tuple
    same = {"a/b": torch.ones(1), "a": {"b": torch.ones(1)}}
    with pytest.raises(ValueError, match="two tensors of the state have the name /a/b"):
        flatten(same)


def test_objects_of_texts_may_stay_objects():
    codec = Codec({"tuple": "__tuple__", "dict": "__pairs__"}, plain_objects=True)
    value = {"a": (1,), "b": {1: "x", (2, 3): {"y": ()}}}
    written = codec.encode(value)
    assert written == {
        "a": {"__tuple__": [1]},
        "b": {"__pairs__": [[1, "x"], [{"__tuple__": [2, 3]}, {"y": {"__tuple__": []}}]]},
    }
    assert codec.decode(json.loads(json.dumps(written))) == value
    with pytest.raises(NotSerializable, match="a set is no plain value"):
        codec.encode({1})
