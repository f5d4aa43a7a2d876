"""Whatever the graph does with a parameter, and other ranks do: every contribution is reduced exactly once.

The reference is plain torch in one process: the mean over ranks of each rank's own gradients.
"""

import functools
import itertools

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from tests.distributed.harness import run_distributed
from tests.distributed.training import Setup, rank_and_world, start, state_of

pytestmark = pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")

SGD = {"type": "SGD", "params": {"lr": 0.5}}
PLACES = [(0, False), (1, False), (2, False), (1, True), (2, True)]
SETUPS = [Setup(*place, bucket_numel=numel, optimizer=SGD) for place in PLACES for numel in (1, 50, 1 << 20)]
STEPS = 3
# fp32 throughout; ranks sum in another order than the reference, and weights feed back for three steps.
ROUNDING = 1e-5
# A hang must fail long before the run's own limit.
LIMIT_S = 60.0


class Blocks(torch.nn.Module):
    """Two blocks, a tied head, and what the cases below need."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        # First in model order, so last among the buckets: the others may be launched during backward.
        self.unused = torch.nn.Linear(6, 5)
        self.table = torch.nn.Embedding(11, 6)
        self.first = torch.nn.Linear(6, 6)
        self.second = torch.nn.Linear(6, 6)
        self.head = torch.nn.Linear(6, 11, bias=False)
        self.head.weight = self.table.weight  # tied
        self.frozen = torch.nn.Linear(6, 6)
        self.frozen.requires_grad_(False)
        self.empty = torch.nn.Linear(6, 0)

    def forward(self, tokens, body):
        hidden = body(self, self.frozen(self.table(tokens)), rank_and_world()[0])
        hidden = hidden + self.empty(hidden).sum()
        return self.head(hidden).square().mean()


def _plain(model, hidden, rank):
    return model.second(torch.tanh(model.first(hidden)))


def _applied_twice(model, hidden, rank):
    return model.first(torch.tanh(model.second(torch.tanh(model.first(hidden)))))


def _reentrant(model, hidden, rank):
    for _ in range(2):  # the same block under two checkpoints: its hooks fire in two passes of their own
        hidden = checkpoint(lambda x: torch.tanh(model.first(x)), hidden, use_reentrant=True)
    return checkpoint(model.second, hidden, use_reentrant=True)


def _non_reentrant(model, hidden, rank):
    for _ in range(2):
        hidden = checkpoint(lambda x: torch.tanh(model.first(x)), hidden, use_reentrant=False)
    return checkpoint(model.second, hidden, use_reentrant=False)


def _mixed_checkpointing(model, hidden, rank):
    hidden = checkpoint(lambda x: torch.tanh(model.first(x)), hidden, use_reentrant=True)
    return model.first(checkpoint(model.second, hidden, use_reentrant=True))


def _branch_by_rank(model, hidden, rank):
    if rank == 0:
        return model.first(hidden)
    return model.second(torch.tanh(model.second(hidden)))


def _branch_with_checkpoint_by_rank(model, hidden, rank):
    return _reentrant(model, hidden, rank) if rank == 0 else _plain(model, hidden, rank)


def _order_by_rank(model, hidden, rank):
    first, second = (model.first, model.second) if rank % 2 else (model.second, model.first)
    return second(torch.tanh(first(hidden)))


BODIES = {
    "plain": _plain,
    "module applied twice": _applied_twice,
    "re-entrant checkpoint of a shared block": _reentrant,
    "non-re-entrant checkpoint of a shared block": _non_reentrant,
    "block both in a checkpoint and outside": _mixed_checkpointing,
    "each rank another branch": _branch_by_rank,
    "checkpoint on rank 0 only": _branch_with_checkpoint_by_rank,
    "each rank another arrival order": _order_by_rank,
}


def _tokens(step, part, rank):
    return torch.randint(0, 11, (4,), generator=torch.Generator().manual_seed(100 * step + 10 * part + rank))


def _reference(world, body, accumulation):
    """Weights after training in one process, each rank's graph in turn; and the last norm."""
    model = Blocks()
    trainable = [param for param in model.parameters() if param.requires_grad]
    optimizer = torch.optim.SGD(trainable, lr=0.5)
    for step in range(STEPS):
        optimizer.zero_grad()
        for part in range(accumulation):
            for rank in range(world):
                tokens = _tokens(step, part, rank)
                hidden = BODIES[body](model, model.frozen(model.table(tokens)), rank)
                (model.head(hidden).square().mean() / (world * accumulation)).backward()
        norm = torch.nn.utils.get_total_norm([param.grad for param in trainable if param.grad is not None])
        optimizer.step()
    return {name: param.detach() for name, param in model.named_parameters()}, norm.item()


def _train(bodies, accumulation, caller, collective_between):
    """For each body, and each setup, the state after training and the last step's norm."""
    rank, world = rank_and_world()
    results = []
    for body, setup in itertools.product(bodies, SETUPS):
        engine = start(Blocks(), setup.but(accumulation=accumulation))
        for step in range(STEPS):
            for part in range(accumulation):
                loss = engine(_tokens(step, part, rank), BODIES[body])
                loss.backward() if caller == "plain" else engine.backward(loss)
                if collective_between and world > 1:
                    dist.all_reduce(loss.detach())  # what a training loop logs
                engine.step()
        results.append((body, setup, state_of(engine), engine.get_global_grad_norm()))
        engine.destroy()
    return results


@functools.cache
def _trained(world, bodies, accumulation, caller="engine", collective_between=False):
    """All cases of a world in one process group: what each rank saw."""
    return run_distributed(world, _train, bodies, accumulation, caller, collective_between, timeout_s=LIMIT_S)


def _check(body, ranks, accumulation):
    expected, expected_norm = _reference(len(ranks), body, accumulation)
    for results in ranks:
        for _, setup, state, norm in (result for result in results if result[0] == body):
            for name, tensor in expected.items():
                torch.testing.assert_close(
                    state[f"{name}.param"],
                    tensor,
                    rtol=ROUNDING,
                    atol=ROUNDING,
                    msg=lambda text, name=name, setup=setup: f"{name} in {setup}: {text}",
                )
            assert norm == pytest.approx(expected_norm, rel=ROUNDING), setup


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("body", BODIES)
def test_every_contribution_is_reduced_once_at_every_stage_and_bucket_size(body, world):
    _check(body, _trained(world, tuple(BODIES), 1), 1)


@pytest.mark.parametrize("body", BODIES)
def test_every_contribution_is_reduced_once_under_accumulation(body):
    _check(body, _trained(2, tuple(BODIES), 3), 3)


@pytest.mark.parametrize("caller", ["engine", "plain"])
@pytest.mark.parametrize("body", ["each rank another branch", "checkpoint on rank 0 only"])
def test_the_callers_own_collective_after_backward_meets_no_gradient_of_another_rank(body, caller):
    _check(body, _trained(2, (body,), 2, caller, True), 2)


def _unusual_backwards(place):
    torch.manual_seed(0)
    layer = torch.nn.Linear(4, 3, bias=False)
    inputs = torch.arange(8.0).view(2, 4) + 1
    expected = layer.weight.detach().clone()
    plain = torch.nn.Linear(4, 3, bias=False)
    plain.load_state_dict(layer.state_dict())
    engine = start(layer, Setup(*place, optimizer={"type": "SGD", "params": {"lr": 1.0}}))
    # A graph that is used twice, and one that could be differentiated again.
    loss = engine(inputs).sum()
    engine.backward(loss, retain_graph=True)
    engine.backward(loss)
    engine(inputs).square().sum().backward(create_graph=True)
    engine.step()
    loss = plain(inputs).sum()
    loss.backward(retain_graph=True)
    loss.backward()
    plain(inputs).square().sum().backward()
    torch.testing.assert_close(layer.weight, expected - plain.weight.grad, rtol=1e-6, atol=1e-6)
    # A penalty on the gradient with respect to the input: a second derivative.
    inputs.requires_grad_()
    plain.weight.grad = None
    plain.weight.data.copy_(layer.weight)
    before = layer.weight.detach().clone()
    (slope,) = torch.autograd.grad(engine(inputs).square().sum(), inputs, create_graph=True)
    engine.backward(slope.square().sum())
    engine.step()
    (slope,) = torch.autograd.grad(plain(inputs).square().sum(), inputs, create_graph=True)
    slope.square().sum().backward()
    torch.testing.assert_close(layer.weight, before - plain.weight.grad, rtol=1e-5, atol=1e-5)
    engine.destroy()


@pytest.mark.filterwarnings("ignore:Using backward")  # torch warns of the cycle that create_graph makes
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("place", PLACES)
def test_retained_graphs_second_derivatives_and_graphs_of_gradients_work(place, world):
    run_distributed(world, _unusual_backwards, place)


def _train_sparse(place):
    """A sparse embedding gradient, alone and beside a dense contribution to the same table."""
    torch.manual_seed(0)

    class Sparse(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.table = torch.nn.Embedding(7, 3, sparse=True)

        def forward(self, tokens, dense):
            looked_up = self.table(tokens).sum()
            return looked_up + self.table.weight.sum() if dense else looked_up

    for dense in (False, True):
        engine = start(
            Sparse(), Setup(*place, accumulation=2, optimizer={"type": "SGD", "params": {"lr": 1.0}})
        )
        before = engine.module.table.weight.detach().clone()
        for _ in range(2):
            engine.backward(engine(torch.tensor([1, 1, 4]), dense))
            engine.step()
        counts = torch.tensor([0.0, 2, 0, 0, 1, 0, 0]) + float(dense)
        # Exact but for the subtraction's rounding.
        torch.testing.assert_close(
            before - engine.module.table.weight, counts.view(-1, 1).expand(7, 3), rtol=1e-6, atol=0
        )
        engine.destroy()


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("place", PLACES)
def test_sparse_gradients_count_as_dense_ones(place, world):
    run_distributed(world, _train_sparse, place)
