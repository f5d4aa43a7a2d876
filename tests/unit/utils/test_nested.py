"""Nested containers: cloned for saving, moved between devices."""

from collections import OrderedDict, namedtuple

import torch

from deepspeed.checkpoint.utils import clone_tensors_for_torch_save
from deepspeed.runtime.utils import clip_grad_norm_, move_to_device

Pair = namedtuple("Pair", ["first", "second"])


def test_a_clone_owns_its_elements_and_no_more():
    big = torch.arange(1000.0)
    cloned = clone_tensors_for_torch_save({"view": big[:2], "nested": [big[2:3], (big[1:],)], "number": 3})
    assert cloned["view"].untyped_storage().nbytes() == 8
    assert cloned["nested"][0].untyped_storage().nbytes() == 4
    assert torch.equal(cloned["nested"][1][0], big[1:])
    assert cloned["number"] == 3


def test_parameters_become_plain_tensors_apart_from_the_model():
    param = torch.nn.Parameter(torch.ones(2))
    cloned = clone_tensors_for_torch_save({"weight": param, "tied": param})
    assert type(cloned["weight"]) is torch.Tensor
    assert not cloned["weight"].requires_grad
    assert len({tensor.data_ptr() for tensor in (param, cloned["weight"], cloned["tied"])}) == 3


def test_containers_keep_their_type_and_a_state_dict_its_metadata():
    state = torch.nn.Linear(1, 1).state_dict()
    cloned = clone_tensors_for_torch_save(state)
    assert type(cloned) is OrderedDict
    assert cloned._metadata == state._metadata
    pair = clone_tensors_for_torch_save(Pair(torch.ones(1), [torch.ones(1)]))
    assert isinstance(pair, Pair)
    assert pair.second[0].item() == 1.0


def test_the_original_containers_are_not_touched():
    original = {"weight": torch.ones(1)}
    weight = original["weight"]
    clone_tensors_for_torch_save(original)["weight"].fill_(7)
    assert original["weight"] is weight
    assert weight.item() == 1.0


def test_move_to_device_moves_tensors_only():
    moved = move_to_device({"a": [torch.ones(1), "text"], "b": Pair(torch.ones(2), 3)}, "meta")
    assert moved["a"][0].device.type == moved["b"].first.device.type == "meta"
    assert (moved["a"][1], moved["b"].second) == ("text", 3)
    kept = move_to_device([torch.ones(1), torch.ones(2)], "meta", lambda tensor: tensor.numel() > 1)
    assert [tensor.device.type for tensor in kept] == ["cpu", "meta"]


def test_clip_grad_norm_returns_the_norm_before_clipping():
    param = torch.nn.Parameter(torch.zeros(2))
    param.grad = torch.tensor([3.0, 4.0])
    assert clip_grad_norm_([param], 1.0).item() == 5.0
    # torch divides by the norm plus 1e-6.
    assert torch.allclose(param.grad, torch.tensor([0.6, 0.8]), rtol=1e-6)
