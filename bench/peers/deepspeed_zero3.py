"""Measures DeepSpeed ZeRO-3 with offload on megatier's shapes, in one process with one GPU and without a launcher.

It computes in bf16 with fp32 masters, recomputes by gradient checkpointing, clips exactly at 1.0, and updates with
DeepSpeed's CPU AdamW. Parameters and optimizer lie in pinned RAM, or on NVMe below --path. The settings are those that
DeepSpeed recommends, as far as they run: see `zero_config`. Figures are printed and written as one JSON row.

python bench/peers/deepspeed_zero3.py --shape 3b --batch 16 --seq 1024
python bench/peers/deepspeed_zero3.py --shape 3b24 --optimizer nvme --path DIR            optimizer on NVMe
python bench/peers/deepspeed_zero3.py --shape 3b24 --optimizer nvme --parameters nvme --path DIR
python bench/peers/deepspeed_zero3.py --shape 15b --also-groups 4        16,384 tokens a step, then 65,536
python bench/peers/deepspeed_zero3.py --shape tiny --batch 2 --seq 64 --device cpu        a smoke run without a GPU

Needs `pip install deepspeed` (measured with 0.19.8), a C++ compiler and ninja, for NVMe also libaio's headers.
"""

from __future__ import annotations

import argparse
import importlib
import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from functools import cache, partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))
from peers.measure import BETAS, CLIP, EPSILON, RATE, WEIGHT_DECAY, Step, measure, parser_of, prepare
from peers.shapes import SHAPES, LanguageModel

SUB_GROUP = 100_000_000
"""Parameters that the optimizer works on at once."""


def zero_config(options: argparse.Namespace, directory: Path) -> dict[str, Any]:
    """Make DeepSpeed's config.

    On NVMe its pipelining needs 12 optimizer buffers: it dies with 4, the default, and with 8. Parameters can be read
    from NVMe only if none is prefetched and none is kept (DeepSpeed issue 3062).
    """
    shape = SHAPES[options.shape]
    is_streamed = options.parameters == "nvme"
    parameters = {"device": options.parameters, "pin_memory": True}
    optimizer = {"device": options.optimizer, "pin_memory": True}

    if is_streamed:
        largest = shape.hidden * max(shape.vocab, shape.ffn)
        # A buffer takes the largest parameter, in whole 512s of elements.
        buffers = {"buffer_count": 16, "buffer_size": -(-largest // 512) * 512, "max_in_cpu": SUB_GROUP}
        parameters |= {"nvme_path": str(directory)} | buffers

    if options.optimizer == "nvme":
        optimizer |= {"nvme_path": str(directory), "buffer_count": 12, "pipeline_read": True, "pipeline_write": True}

    return {
        "train_micro_batch_size_per_gpu": options.batch // options.groups,
        "gradient_accumulation_steps": options.groups,
        "bf16": {"enabled": True},
        "gradient_clipping": CLIP,
        "steps_per_print": 10**9,
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": RATE, "betas": list(BETAS), "eps": EPSILON, "weight_decay": WEIGHT_DECAY},
        },
        "zero_optimization": {
            "stage": 3,
            "overlap_comm": True,
            "contiguous_gradients": True,
            "reduce_bucket_size": 200_000_000,
            "sub_group_size": SUB_GROUP,
            "stage3_prefetch_bucket_size": 0 if is_streamed else 200_000_000,
            "stage3_param_persistence_threshold": 100_000,
            "stage3_max_live_parameters": 0 if is_streamed else 1_000_000_000,
            "stage3_max_reuse_distance": 0 if is_streamed else 1_000_000_000,
            "offload_param": parameters,
            "offload_optimizer": optimizer,
        },
        "aio": {
            "block_size": 1 << 20,
            "queue_depth": 32,
            "intra_op_parallelism": 4,
            "single_submit": False,
            "overlap_events": True,
        },
    }


def build(options: argparse.Namespace, config: dict[str, Any], deepspeed: ModuleType) -> Any:  # noqa: ANN401 - no types
    """Build DeepSpeed's engine around the model."""
    torch.manual_seed(0)
    with deepspeed.zero.Init(config_dict_or_path=config, dtype=torch.bfloat16):
        model = LanguageModel(SHAPES[options.shape], options.seq).train()
    engine, *_ = deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=config)
    return engine


def step_of(engine: Any) -> Step:  # noqa: ANN401 - DeepSpeed has no types
    """Return the step that an engine makes."""

    def step(groups: Sequence[Tensor]) -> Tensor:
        total = torch.zeros((), device=engine.device)
        for ids in groups:
            loss = engine(ids.to(engine.device))
            engine.backward(loss)
            engine.step()  # updates on the last group
            total += loss.detach() / len(groups)
        return total

    return step


def load_deepspeed(device: str) -> ModuleType:
    """Import DeepSpeed for a device, which it reads from the environment when it is imported.

    Raises:
        SystemExit: DeepSpeed is not installed.
    """
    os.environ["DS_ACCELERATOR"] = device
    try:
        return importlib.import_module("deepspeed")
    except ModuleNotFoundError as error:
        raise SystemExit(
            f"DeepSpeed cannot be imported ({error}). Install it beside torch: pip install deepspeed ninja. At its "
            "first run it compiles kernels: that takes a C++ compiler, nvcc for a GPU, and libaio's headers for NVMe."
        ) from error


def parse() -> argparse.Namespace:
    """Read the options.

    Raises:
        SystemExit: NVMe is asked for without a path.
    """
    parser = parser_of(__doc__ or "")
    parser.add_argument("--optimizer", choices=("cpu", "nvme"), default="cpu", help="home of masters and moments")
    parser.add_argument("--parameters", choices=("cpu", "nvme"), default="cpu", help="home of the bf16 weights")
    parser.add_argument("--path", type=Path, help="a directory on a real drive, for NVMe")
    parser.add_argument("--also-groups", type=int, help="then also steps of so many groups, each as large as before")
    options = parser.parse_args()
    if "nvme" in (options.optimizer, options.parameters) and options.path is None:
        parser.error("nvme needs --path, a directory on a real drive")
    return options


def main() -> None:
    """Measure, print, write."""
    options = parse()
    prepare(options)
    deepspeed = load_deepspeed(options.device)
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29517")
    deepspeed.init_distributed(dist_backend="nccl" if options.device == "cuda" else "gloo", verbose=False)
    on_nvme = "nvme" in (options.optimizer, options.parameters)

    # DeepSpeed leaves its swap files behind, so it gets a directory of its own, which is removed.
    directory = Path(tempfile.mkdtemp(prefix="zero3_", dir=options.path if on_nvme else None))
    config = zero_config(options, directory)

    system = "deepspeed_zero3_nvme" if on_nvme else "deepspeed_zero3"
    homes = {"optimizer": options.optimizer, "parameters": options.parameters}
    engine = cache(partial(build, options, config, deepspeed))

    try:
        measure(system, options, lambda: step_of(engine()), homes=homes)

        # A model of this size takes minutes to build, and its steps may be of another size.
        if options.also_groups:
            options.batch = options.batch // options.groups * options.also_groups
            options.groups = options.also_groups
            engine().set_train_batch_size(options.batch)
            measure(system, options, lambda: step_of(engine()), homes=homes)
    finally:
        shutil.rmtree(directory, ignore_errors=True)

    sys.stdout.flush()
    os._exit(0)  # its I/O threads and pinned pools take minutes to end by themselves


if __name__ == "__main__":
    main()
