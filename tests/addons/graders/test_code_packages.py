"""Packages that programs and tests may import beside the standard library."""

import pytest

from rloo.addons.graders.code.code_reward import make_code
from rloo.addons.graders.code.isolation import ISOLATION_BACKENDS
from rloo.addons.graders.code.sandbox_pool import unavailable_reason
from rloo.rewards import load_reward
from support.sandboxes import require_a_wall


@pytest.fixture(
    scope="module",
    params=[ISOLATION_BACKENDS[0], pytest.param(ISOLATION_BACKENDS[1], marks=pytest.mark.slow)],
)
def reward(request):
    if (reason := unavailable_reason(request.param)) is not None:
        pytest.skip(f"the wall {request.param} does not hold here: {reason}")
    reward = make_code(wall=request.param, workers=1, packages=["numpy"], seconds=3)
    try:
        reward.check_columns(["tests"])
    except ValueError as error:
        pytest.skip(f"numpy cannot be loaded behind a wall here: {error}")
    yield reward
    reward.close()


MEAN = "import numpy as np\ndef mean(x): return np.mean(x, axis=0)"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "test"),
    [
        (MEAN, "assert mean([1, 2, 3]) == 2"),
        (MEAN, "import numpy as np\nassert np.allclose(mean([[1, 2], [3, 4]]), [2, 3])"),
        (MEAN, "assert np.array_equal(mean(np.array([[1, 2], [3, 4]])), [2, 3])"),
        (MEAN, "assert mean([[1, 2], [3, 4]]).tolist() == [2.0, 3.0]"),
        (MEAN, "import numpy\nassert isinstance(mean([[1, 2]]), numpy.ndarray)"),
        ("import numpy\ndef count(x): return numpy.int64(len(x))", "assert count('ab') == 2"),
    ],
)
def test_programs_and_tests_use_a_package_that_is_allowed(reward, program, test):
    wrong = program.replace("np.mean(x, axis=0)", "np.max(x, axis=0) + 1").replace("len(x)", "3")
    assert reward([program, wrong], tests=[[test]] * 2)[0] == 1.0
    if "isinstance" not in test:
        assert reward([wrong], tests=[[test]]) == [0.0]


def test_a_package_is_no_way_to_decide_about_a_value(reward):
    lies = "import numpy as np\nnp.allclose = lambda *a, **k: True\ndef f(x): return np.zeros(2)"
    for test in (
        "assert np.allclose(f(1), [1, 2])",
        "import numpy as np\nassert np.allclose(f(1), [1, 2])",
        "import numpy as np\nnp.testing.assert_allclose(f(1), [1, 2])",
    ):
        assert reward([lies], tests=[[test]]) == [0.0]
    own = "class A:\n    def __array__(self, *a, **k): return [1, 2]\ndef f(x): return A()"
    assert reward([own], tests=[["import numpy as np\nassert np.allclose(f(1), [1, 2])"]]) == [0.0]


def test_values_of_a_package_are_compared_as_pythons(reward):
    program = "import numpy as np\ndef f(x): return [np.float64(0.5), np.arange(x)]"
    assert reward([program], function=["f"], cases=[[[[2], [0.5, [0, 1]]]]]) == [1.0]
    assert reward([program], function=["f"], cases=[[[[2], [0.5, [0, 2]]]]]) == [0.0]


def test_tests_that_need_what_is_not_allowed_are_missing(reward):
    test = "import pandas_of_nowhere\nassert True"
    assert reward(["x = 1"], tests=[[test]]) == [None]


@pytest.mark.parametrize("packages", ["'numpy'", "[3]", "['a b']"])
def test_packages_are_a_list_of_names(packages):
    with pytest.raises(ValueError, match="it is a list of names to import"):
        load_reward(f"code(packages={packages})")


def test_a_package_that_is_not_there_is_told_before_the_first_sample():
    require_a_wall()
    with pytest.raises(ValueError, match="needs no_such_package, which is not installed"):
        load_reward("code(packages=['no_such_package'])").check_columns(["tests"])
