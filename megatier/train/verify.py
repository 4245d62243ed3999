"""The command `megatier verify`: it trains one tiny model under several placements and compares every bit."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoConfig

from megatier.config.schema import ModelConfig, NumericsConfig, TiersConfig, TrainConfig
from megatier.models.decoder import build_skeleton
from megatier.models.initialiser import Initialiser
from megatier.session.session import Session
from megatier.tier import Activations, Tier

STEPS = 5
SEQUENCES = 4
SEQUENCE_LENGTH = 32
MODEL: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 352,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "attention_dropout": 0.1,
}
PLACEMENTS: dict[str, tuple[tuple[str, ...], int, int, float, int]] = {
    "all on the gpu": (("gpu",), 64 << 20, 64 << 20, 0.0, 1),
    "all in ram": (("ram",), 4 << 20, 64 << 20, 0.0, 1),
    "in ram, streamed": (("ram",), 16 << 20, 64 << 20, 0.8, 1),
    "all on nvme": (("nvme",), 4 << 20, 16 << 20, 0.0, 1),
    "all on nvme, twice": (("nvme",), 4 << 20, 16 << 20, 0.0, 2),
    "gpu, ram and nvme": (("gpu", "ram", "nvme"), 4 << 20, 6 << 20, 0.0, 1),
}
"""For each name: tiers that may hold state, GPU budget and RAM budget in bytes, share that streams, generations."""
NVME_BYTES = 64 << 20
CLIP = 3.22
"""Some of the steps are above it, and some below, so that some speculative updates are confirmed and some are void."""


def verify(device: str, directory: Path, console: Console) -> bool:
    """Train under every placement, activation policy and clipping mode, and print a table of the outcomes.

    Args:
        device: auto, cuda or cpu.
        directory: on the drive to try; it holds the block files meanwhile.
        console: where the table goes.

    Returns:
        Whether all outcomes are equal, within each clipping mode.
    """
    torch.use_deterministic_algorithms(True)
    table = Table("state", "activations", "clip", "NVMe bytes", "digest", "")
    agree = True
    for clip in (CLIP, None):
        # With and without clipping the numbers differ, so the first run of each mode says what the others must give.
        expected = ""
        for name in PLACEMENTS:
            for activations in Activations:
                digest, moved = _run(device, directory, name, activations, clip)
                expected = expected or digest
                agree &= digest == expected
                verdict = "[green]equal[/]" if digest == expected else "[red]different[/]"
                mode = "global" if clip is not None else "off"
                table.add_row(name, activations, mode, f"{moved / 1e6:.1f} MB", digest, verdict)

    console.print(table)
    total = len(PLACEMENTS) * len(Activations) * 2
    outcome = "bit-identical" if agree else "NOT identical; please report this with `megatier doctor`"
    console.print(f"{total} runs of {STEPS} steps, compared within each clipping mode: {outcome}", soft_wrap=True)
    return agree


def _run(device: str, directory: Path, placement: str, activations: str, clip: float | None) -> tuple[str, int]:
    """Return a digest of losses, weights and moments after a few steps, and the bytes moved from and to NVMe."""
    state, gpu, ram, share, generations = PLACEMENTS[placement]
    model = build_skeleton(AutoConfig.for_model(**MODEL), "sdpa")
    tiers = TiersConfig(
        device=device,  # type: ignore[arg-type]
        gpu=gpu,
        ram=ram,
        nvme=(f"{directory}:{NVME_BYTES}",),
        state=state,
        streamed_share=share,
        generations=generations,
    )
    train = TrainConfig(steps=STEPS, batch=SEQUENCES, activations=activations, clip=clip, weight_decay=0.1)  # type: ignore[arg-type]
    digest = hashlib.sha256()

    # Without clipping and guard, updates run inside the backward.
    numerics = NumericsConfig(guard=clip is not None)

    with Session(model, ModelConfig(config=MODEL), tiers, train, numerics, SEQUENCE_LENGTH, seed=0) as session:
        session.load(Initialiser(model, seed=0))
        for step in range(1, STEPS + 1):
            generator = torch.Generator().manual_seed(step)
            tokens = torch.randint(0, 512, (SEQUENCES, SEQUENCE_LENGTH), generator=generator)
            result = session.engine.train_step(step, 1e-3, [{"input_ids": tokens, "labels": tokens}])
            digest.update(repr((result.loss, result.grad_norm)).encode())

        session.player.drain()
        for unit in session.units:
            for kind in session.schema.kinds:
                plane = session.read_plane(unit, kind, 0, unit.layout.num_elements)
                digest.update(plane.view(torch.uint8).numpy().tobytes())

        # A placement that was not what its name says would compare nothing.
        if state == ("gpu", "ram", "nvme"):
            assert all(session.placement.state_bytes.get(tier) for tier in Tier), "this placement is meant to be mixed"
        assert bool(session.placement.streamed) is bool(share and clip), "this placement is meant to stream"
        moved = session.store.moved_bytes

    return digest.hexdigest()[:8], moved["nvme_to_ram"] + moved["ram_to_nvme"]
