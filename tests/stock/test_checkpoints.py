"""Files written under the patch are stock's, and a job goes on from either's, with the patch or without."""

import pytest

from tests.stock import harness

pytestmark = harness.MARKS


@pytest.fixture(scope="module", params=[1, 2])
def ranks(request, tmp_path_factory):
    """What each rank found, by case."""
    folder = tmp_path_factory.mktemp("checkpoints")
    return harness.results(harness.JOBS / "checkpoints.py", str(folder), world=request.param)


@pytest.fixture(scope="module")
def cases(ranks):
    return [(name, found) for rank in ranks for name, found in rank.items() if name != "children"]


@pytest.mark.parametrize(
    "claim",
    [
        "patched resumes its own",  # bit for bit as without an interruption
        "stock continues ours",  # to the bits of the patch with stock's op
        "patched continues stock's",  # with stock's op, to the bits of stock without an interruption
        "converted",  # by stock's conversion to fp32
        "in host buffers",  # also after a load
    ],
)
def test_a_checkpoint_may_go_from_one_to_the_other(cases, claim):
    assert [name for name, found in cases if not found[claim]] == []


def test_files_have_stocks_names_keys_dtypes_and_shapes(cases):
    forms = [found["form"] for _, found in cases if found["form"]]
    assert len(forms) == 4
    for stock, ours in forms:
        assert ours == stock
        assert any(name.endswith("optim_states.pt") for name in ours)


def test_workers_forked_after_a_load_duplicate_nothing(ranks):
    """Bytes a parameter by which a step makes the tree grow; 1.3 measured, for what does not grow with it."""
    for found in (rank["children"] for rank in ranks if "children" in rank):
        assert found["ours"] < 4 < 12 < found["stock"]
