"""The shapes on which every system is measured: their models, their FLOPs, and how memory is read."""

from __future__ import annotations

import importlib
import resource
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

TFLOPS_FORMULA = (
    "6 x matmul parameters (without the embedding) x tokens + causal attention 6 x layers x sequence x hidden x "
    "tokens; recompute not counted. With adapters 4 x matmul parameters, and 6 x those of the adapters. Of experts "
    "those count that a token chooses; attention is as wide as its heads, and counts as causal where it has a window"
)
ADAPTED = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""The linear layers beside which adapters are trained: all but the head."""
LOSS_CHUNK = 2048
"""Tokens whose logits exist at once."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """The sizes of a Llama, whose head and embedding are not tied."""

    hidden: int
    """Elements of a hidden state."""
    ffn: int
    """Elements inside the feed-forward."""
    heads: int
    """Attention heads of queries."""
    kv_heads: int
    """Attention heads of keys and values."""
    layers: int
    """Decoder layers."""
    vocab: int
    """Tokens of the vocabulary."""

    @property
    def attention_width(self) -> int:
        """Elements of all heads of queries."""
        return self.hidden

    @property
    def attention_parameters(self) -> int:
        """Parameters of a layer's attention that are multiplied with every token."""
        kv_width = self.kv_heads * (self.attention_width // self.heads)
        return 2 * self.hidden * (self.attention_width + kv_width)

    @property
    def matmul_parameters(self) -> int:
        """Parameters that are multiplied with every token: neither embedding nor norms."""
        layer = self.attention_parameters + 3 * self.hidden * self.ffn
        return self.layers * layer + self.hidden * self.vocab

    @property
    def num_parameters(self) -> int:
        """All parameters."""
        return self.matmul_parameters + self.hidden * self.vocab + (2 * self.layers + 1) * self.hidden

    def adapter_parameters(self, rank: int) -> int:
        """Parameters of adapters of a rank beside all linear layers but the head."""
        kv_width = self.kv_heads * (self.hidden // self.heads)
        # Inputs and outputs: of queries and the output, of keys and values, and of the feed-forward.
        sides = 4 * self.hidden + 2 * (self.hidden + kv_width) + 3 * (self.hidden + self.ffn)
        return self.layers * rank * sides

    def model_flops(self, tokens: int, sequence_length: int, rank: int = 0) -> int:
        """Return the FLOPs of forward and backward over so many tokens, as `TFLOPS_FORMULA` counts.

        Args:
            tokens: tokens of all sequences.
            sequence_length: tokens of one.
            rank: of adapters; 0: the model itself is trained. Gradients of a base's weights are not computed.
        """
        attention = 6 * self.layers * sequence_length * self.attention_width
        if not rank:
            return tokens * (6 * self.matmul_parameters + attention)
        return tokens * (4 * self.matmul_parameters + 6 * self.adapter_parameters(rank) + attention)

    def settings(self, sequence_length: int) -> dict[str, Any]:
        """Return Hugging Face's config of the shape as `model.config` has it.

        Args:
            sequence_length: tokens of the longest sequence.
        """
        return {
            "model_type": "llama",
            "hidden_size": self.hidden,
            "intermediate_size": self.ffn,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "num_hidden_layers": self.layers,
            "vocab_size": self.vocab,
            "max_position_embeddings": max(sequence_length, 4096),
            "tie_word_embeddings": False,
            "use_cache": False,
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertsShape(Shape):
    """The sizes of a model whose feed-forwards are experts, `ffn` being the elements inside one of them."""

    model_type: str
    """Hugging Face's name of the model: `qwen3_moe` or `gpt_oss`."""
    head_size: int
    """Elements of a head."""
    experts: int
    """Experts of a layer."""
    chosen: int
    """Experts that a token chooses."""

    @property
    def attention_width(self) -> int:
        """Elements of all heads of queries."""
        return self.heads * self.head_size

    @property
    def matmul_parameters(self) -> int:
        """Parameters that are multiplied with a token: attention, the router, the experts that it chooses, the head."""
        layer = self.attention_parameters + self.hidden * (self.experts + 3 * self.chosen * self.ffn)
        return self.layers * layer + self.hidden * self.vocab

    @property
    def num_parameters(self) -> int:
        """All parameters."""
        idle = self.layers * 3 * self.hidden * self.ffn * (self.experts - self.chosen)
        norms = (2 * self.layers + 1) * self.hidden
        return self.matmul_parameters + idle + self.hidden * self.vocab + norms + self.layers * self._other_vectors

    @property
    def _other_vectors(self) -> int:
        """Parameters of a layer in vectors beside its two norms."""
        if self.model_type == "qwen3_moe":
            return 2 * self.head_size  # norms of queries and keys

        # Biases of queries, keys, values, the output, the router and the experts, and the sink of each head.
        kv_width = self.kv_heads * self.head_size
        biases = self.attention_width + 2 * kv_width + self.hidden + self.experts * (1 + 2 * self.ffn + self.hidden)
        return biases + self.heads

    def settings(self, sequence_length: int) -> dict[str, Any]:
        """Return Hugging Face's config of the shape as `model.config` has it."""
        # Both names of the size inside an expert: Qwen3 has one of its own for experts.
        inside = "moe_intermediate_size" if self.model_type == "qwen3_moe" else "intermediate_size"
        return {
            name: value for name, value in Shape.settings(self, sequence_length).items() if name != "intermediate_size"
        } | {
            "model_type": self.model_type,
            "head_dim": self.head_size,
            ("num_experts" if self.model_type == "qwen3_moe" else "num_local_experts"): self.experts,
            "num_experts_per_tok": self.chosen,
            inside: self.ffn,
        }


SHAPES = {
    "3b": Shape(hidden=2048, ffn=11008, heads=16, kv_heads=2, layers=36, vocab=151936),
    "3b24": Shape(hidden=2048, ffn=11008, heads=16, kv_heads=2, layers=24, vocab=151936),
    "7b": Shape(hidden=3584, ffn=18944, heads=28, kv_heads=4, layers=28, vocab=152064),
    "8b": Shape(hidden=4096, ffn=14336, heads=32, kv_heads=8, layers=32, vocab=128256),
    "15b": Shape(hidden=5120, ffn=13824, heads=40, kv_heads=8, layers=48, vocab=152064),
    "32b": Shape(hidden=5120, ffn=27648, heads=40, kv_heads=8, layers=64, vocab=152064),
    "68b": Shape(hidden=8192, ffn=28672, heads=64, kv_heads=8, layers=80, vocab=4096),
    "100b": Shape(hidden=8192, ffn=28672, heads=64, kv_heads=8, layers=117, vocab=32768),
    "30b-a3b": ExpertsShape(
        model_type="qwen3_moe",
        hidden=2048,
        ffn=768,
        heads=32,
        kv_heads=4,
        head_size=128,
        layers=48,
        vocab=151936,
        experts=128,
        chosen=8,
    ),
    "117b-a5b": ExpertsShape(
        model_type="gpt_oss",
        hidden=2880,
        ffn=2880,
        heads=64,
        kv_heads=8,
        head_size=64,
        layers=36,
        vocab=201088,
        experts=128,
        chosen=4,
    ),
    "1b": Shape(hidden=2048, ffn=8192, heads=32, kv_heads=8, layers=16, vocab=128256),
    "tiny": Shape(hidden=128, ffn=256, heads=4, kv_heads=2, layers=4, vocab=1024),
}
"""`7b`, `15b` and `32b` have the sizes of Qwen2.5-7B, Qwen2.5-14B and Qwen2.5-32B, `30b-a3b` and `117b-a5b` those of
Qwen3-30B-A3B and gpt-oss-120b. `68b` has the layers of Llama 3 70B and few tokens. `3b24` is 3b with 24 layers: what
DeepSpeed's NVMe mode is measured on. `tiny` is for smoke runs on a CPU."""


def model_config(shape: Shape, sequence_length: int) -> PretrainedConfig:
    """Hugging Face's config of a shape."""
    return AutoConfig.for_model(**shape.settings(sequence_length))


def adapted_config(rank: int) -> Any:  # noqa: ANN401 - PEFT's, which has no types
    """PEFT's config of adapters of a rank beside all linear layers."""
    # Asked for here alone: without adapters nothing needs it.
    return importlib.import_module("peft").LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=list(ADAPTED))


def trained_shape(name: str, rank: int) -> str:
    """Name of a shape in a row, which says what of it is trained, so that only equals are compared."""
    return f"{name} lora {rank}" if rank else name


class Head(nn.Module):
    """Head and cross-entropy as one module, so that a sharding peer gathers the weight once a pass."""

    def __init__(self, shape: Shape) -> None:
        """Draw the weight [vocab, hidden]."""
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape.vocab, shape.hidden))
        nn.init.normal_(self.weight, std=0.02)

    def forward(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """The mean loss of hidden states [batch, tokens, hidden] on targets [batch, tokens]. -100 does not count."""
        rows = hidden.flatten(0, 1).split(LOSS_CHUNK)
        wanted = targets.flatten().split(LOSS_CHUNK)
        sums = [checkpoint(self._chunk, *pair, use_reentrant=False) for pair in zip(rows, wanted, strict=True)]
        return torch.stack(sums).sum() / (targets != -100).sum()

    def _chunk(self, rows: Tensor, targets: Tensor) -> Tensor:
        """Return the summed loss of some rows. Their logits are computed again in the backward."""
        return F.cross_entropy((rows @ self.weight.t()).float(), targets, ignore_index=-100, reduction="sum")


class LanguageModel(nn.Module):
    """Hugging Face's decoder with gradient checkpointing, and a head that never holds all logits."""

    def __init__(self, shape: Shape, sequence_length: int) -> None:
        """Make random weights on the device that the caller's context names."""
        super().__init__()
        whole = AutoModelForCausalLM.from_config(model_config(shape, sequence_length), attn_implementation="sdpa")
        newer = hasattr(whole, "activation_checkpointing_enable")  # the same under another name; the older one warns
        enable = whole.activation_checkpointing_enable if newer else whole.gradient_checkpointing_enable
        enable({"use_reentrant": False})
        self.core = whole.model
        self.head = Head(shape)

    def forward(self, ids: Tensor) -> Tensor:
        """Return the mean loss of the next token over ids [batch, tokens]."""
        hidden = self.core(input_ids=ids, use_cache=False).last_hidden_state
        loss: Tensor = self.head(hidden, F.pad(ids[:, 1:], (0, 1), value=-100))
        return loss


def build(shape: Shape, sequence_length: int, dtype: torch.dtype, device: str = "cpu") -> LanguageModel:
    """Build a random model, far faster than by its own initialisation."""
    with torch.device("meta"):
        model = LanguageModel(shape, sequence_length)
    model.to(dtype)
    return materialize(model, shape, sequence_length, device, device)


def materialize(
    model: LanguageModel, shape: Shape, sequence_length: int, device: str, compute_device: str
) -> LanguageModel:
    """Give a model on the meta device memory and values, with its rotary tables where it computes."""
    model.to_empty(device=device)
    rotary = type(model.core.rotary_emb)  # its tables are no parameters, and to_empty loses them
    model.core.rotary_emb = rotary(model_config(shape, sequence_length)).to(compute_device)
    fill(parameter.to_local() if hasattr(parameter, "to_local") else parameter for parameter in model.parameters())
    return model.train()


@torch.no_grad()
def fill(parameters: Iterable[Tensor]) -> None:
    """Set vectors to one, and fill matrices with one random piece again and again, drawn by a fixed seed."""
    block = torch.randn(1 << 22, generator=torch.Generator().manual_seed(0)) * 0.02
    for parameter in parameters:
        if parameter.dim() == 1:
            parameter.fill_(1.0)
            continue
        for piece in parameter.view(-1).split(block.numel()):
            piece.copy_(block[: piece.numel()])


def peak_ram_bytes() -> int:
    """Return the highest resident set of this process so far, as the operating system counted it."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def peak_gpu_bytes() -> int | None:
    """Return the highest use of the GPU so far, context and libraries included; None without a GPU.

    The driver tells what is used now. What torch reserved above that at its peak comes on top. Others on the same GPU
    would be counted too.
    """
    if not torch.cuda.is_available():
        return None
    free_bytes, total_bytes = torch.cuda.mem_get_info()
    return total_bytes - free_bytes + torch.cuda.max_memory_reserved() - torch.cuda.memory_reserved()
