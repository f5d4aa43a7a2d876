"""The fp32 weights of a ZeRO checkpoint, as a state dictionary or as files.

    python zero_to_fp32.py <checkpoint_dir> <output_dir> [--safe_serialization] [--max_shard_size 5GB]

Works on checkpoints of this package and of stock DeepSpeed, stages 1 and 2, any number of ranks. Files are
mapped: what is resident at once is at most the shard that is being written.
"""

from __future__ import annotations

import argparse
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from deepspeed.runtime.checkpoint.atomic import TagFolder
from deepspeed.runtime.checkpoint.export import ExportSettings, parse_nbytes, write_weights_folder
from deepspeed.runtime.checkpoint.fp32_weights import LazyTensor, open_fp32_weights
from deepspeed.runtime.checkpoint.load import optimizer_files
from deepspeed.runtime.checkpoint.names import MODEL_STATES
from deepspeed.utils.logging import logger

__all__ = [
    "convert_zero_checkpoint_to_fp32_state_dict",
    "convert_zero_checkpoint_to_state_dict",
    "get_fp32_state_dict_from_zero_checkpoint",
    "get_model_state_file",
    "get_model_state_files",
    "get_optim_files",
    "load_state_dict_from_zero_checkpoint",
    "to_torch_tensor",
]

PathLike = str | os.PathLike[str]


def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: PathLike,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
    lazy_mode: bool = False,
) -> dict[str, Any]:
    """Return name -> weight: buffers, frozen parameters as they were saved, trainable ones in fp32.

    Args:
        checkpoint_dir: The checkpoint folder, the one that holds `latest`. tag: Name of the subfolder; by
        default what `latest` names. exclude_frozen_parameters: Leave out frozen parameters. lazy_mode: Return
        values that are read only when their ``contiguous()`` is called. Without it, most tensors are
            views of the mapped files: read when used, and copied when written to.

    Raises:
        ValueError: There is no tag and no `latest`.
        CheckpointError: A file is absent or damaged.

    Source: signature and names of DeepSpeed 0.19.8.
    """
    weights = open_fp32_weights(Path(checkpoint_dir), tag, exclude_frozen_parameters)
    return {name: tensor if lazy_mode else tensor.read() for name, tensor in weights.items()}


def to_torch_tensor(
    state_dict: Mapping[str, Any], return_empty_tensor: bool = False, dtype: torch.dtype | None = None
) -> dict[str, torch.Tensor]:
    """Return what ``lazy_mode`` gave as tensors.

    Args:
        state_dict: Name -> lazy or real tensor.
        return_empty_tensor: Return tensors of the right shape and type without reading.
        dtype: Convert to this type.
    """
    made: dict[str, torch.Tensor] = {}
    for name, value in state_dict.items():
        if return_empty_tensor:
            made[name] = torch.empty(value.shape, dtype=dtype or value.dtype)
        else:
            tensor = value.read() if isinstance(value, LazyTensor) else value
            made[name] = tensor if dtype is None else tensor.to(dtype)
    return made


def convert_zero_checkpoint_to_fp32_state_dict(
    checkpoint_dir: PathLike,
    output_dir: PathLike,
    max_shard_size: str | int | None = "5GB",
    safe_serialization: bool = False,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
) -> None:
    """Write the fp32 weights as Hugging Face lays them out.

    Args:
        checkpoint_dir: The checkpoint folder, the one that holds `latest`. output_dir: Folder for
        `pytorch_model.bin` or `model.safetensors`, or for numbered shards with an index. max_shard_size: Most
        bytes of a file, such as "5GB"; None for one file. safe_serialization: Write safetensors, with that
        library. tag: Name of the subfolder; by default what `latest` names. exclude_frozen_parameters: Leave
        out frozen parameters.

    Raises:
        ValueError: There is no tag and no `latest`, or the size is none.
        CheckpointError: A file is absent or damaged.

    Source: signature of DeepSpeed 0.19.8.
    """
    _convert(
        checkpoint_dir, output_dir, tag, exclude_frozen_parameters, (max_shard_size, safe_serialization, None)
    )


def convert_zero_checkpoint_to_state_dict(
    checkpoint_dir: PathLike,
    output_dir: PathLike,
    dtype: torch.dtype = torch.float32,
    max_shard_size: str | int | None = "5GB",
    safe_serialization: bool = False,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
) -> None:
    """Write the weights in another floating type, from their fp32 masters.

    Args and errors: see ``convert_zero_checkpoint_to_fp32_state_dict``. dtype: Type of floating tensors.
    """
    _convert(
        checkpoint_dir,
        output_dir,
        tag,
        exclude_frozen_parameters,
        (max_shard_size, safe_serialization, dtype),
    )


def load_state_dict_from_zero_checkpoint(
    model: torch.nn.Module, checkpoint_dir: PathLike, tag: str | None = None
) -> torch.nn.Module:
    """Load the fp32 weights into a model, tensor by tensor, on its device.

    Args:
        model: The model; not wrapped by an engine.
        checkpoint_dir: The checkpoint folder.
        tag: Name of the subfolder; by default what `latest` names.

    Returns:
        The same model.
    """
    model.load_state_dict(get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag), strict=False)
    return model


def get_optim_files(checkpoint_dir: PathLike) -> list[str]:
    """Return the optimizer files of a tag's folder, by rank.

    Raises:
        FileNotFoundError: There are none.
    """
    folder = Path(checkpoint_dir)
    files = list(optimizer_files(TagFolder.open(folder)).values()) if folder.is_dir() else []
    if not files:
        raise FileNotFoundError(
            f"{folder}: expected files *_optim_states.pt, got none. Pass <checkpoint_dir>/<tag>."
        )
    return [str(path) for path in files]


def get_model_state_file(checkpoint_dir: PathLike, zero_stage: int) -> str:
    """Return the model file of a tag's folder.

    Args:
        checkpoint_dir: <checkpoint_dir>/<tag>.
        zero_stage: 1 or 2; the file is the same.

    Raises:
        NotImplementedError: Stage 3.
        FileNotFoundError: There is none.
    """
    if int(zero_stage) > 2:
        raise NotImplementedError(
            f"zero_stage: expected at most 2, got {int(zero_stage)}. Convert stage 3 checkpoints with "
            "DeepSpeed."
        )
    path = TagFolder.open(Path(checkpoint_dir)).locate(MODEL_STATES)
    if not path.is_file():
        raise FileNotFoundError(f"{path}: expected a model file, got none. Pass <checkpoint_dir>/<tag>.")
    return str(path)


def get_model_state_files(checkpoint_dir: PathLike) -> list[str]:
    """Return the model files of a tag's folder: one."""
    return [get_model_state_file(checkpoint_dir, 2)]


def _convert(
    checkpoint_dir: PathLike,
    output_dir: PathLike,
    tag: str | None,
    exclude_frozen: bool,
    form: tuple[str | int | None, bool, torch.dtype | None],
) -> None:
    max_shard_size, safe, dtype = form
    max_nbytes = parse_nbytes(max_shard_size) if max_shard_size is not None else 1 << 62
    weights = open_fp32_weights(Path(checkpoint_dir), tag, exclude_frozen)
    files = write_weights_folder(weights, Path(output_dir), ExportSettings(max_nbytes, safe, dtype))
    logger.info("wrote %d tensors to %s", len(weights.tensors), ", ".join(str(path) for path in files))


def _main() -> None:
    parser = argparse.ArgumentParser(description="Write the fp32 weights of a checkpoint of ZeRO 1 or 2.")
    parser.add_argument("checkpoint_dir", help="checkpoint folder, the one that holds `latest`")
    parser.add_argument("output_dir", help="folder for the weights")
    parser.add_argument("--max_shard_size", default="5GB", help="most bytes of a file, such as 5GB or 200MB")
    parser.add_argument("--safe_serialization", action="store_true", help="write safetensors")
    parser.add_argument("-t", "--tag", default=None, help="subfolder; by default what `latest` names")
    parser.add_argument("--exclude_frozen_parameters", action="store_true", help="leave out frozen weights")
    parser.add_argument("-d", "--debug", action="store_true", help="log more")
    args = parser.parse_args()
    if args.debug:
        logger.setLevel(logging.DEBUG)
    convert_zero_checkpoint_to_fp32_state_dict(
        args.checkpoint_dir,
        args.output_dir,
        max_shard_size=args.max_shard_size,
        safe_serialization=args.safe_serialization,
        tag=args.tag,
        exclude_frozen_parameters=args.exclude_frozen_parameters,
    )


if __name__ == "__main__":
    _main()
