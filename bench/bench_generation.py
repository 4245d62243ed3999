"""Measures generation by a streamed model in GPU memory that training lends, and whole steps of TRL's GRPO with it.

A model with random weights in bf16, which are laid and not drawn. Its state in training takes 8 bytes a parameter, on
the GPU and in RAM. One process measures, one part after the other:

- `plain WAY`: texts of the whole model on the GPU, with nothing of training there, and by the same kernels.
- `sync`: lending memory, and loading all weights into it, beside the rate of the link alone.
- `lent WAY`: the same texts of a streamed model, in memory that is lent, with all that comes before and after, and the
  texts alone.
- `streaming`: `generate` with nothing held, for few tokens, since each of them moves the model. More are extrapolated.
- `grpo` (with `--grpo`): steps of `GRPOTrainer`, whose completions come by the way that was fastest.

The ways are transformers' continuous batching (`batch`), the same with CUDA graphs (`graphs`, if `--graphs` is given),
and `generate`.

python bench/bench_generation.py [--shape 7b] [--grpo] [--graphs]    writes bench/results/<machine>/generation.json
python bench/bench_generation.py --shape tiny --texts 3 --tokens 6 --prompt 8 --grpo --rows 2 --completion 4

A part that fails leaves its error in the place of its figures. What is known is written after each part.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
from bench_trl import word_of
from peers.shapes import SHAPES, fill, model_config, peak_gpu_bytes, peak_ram_bytes
from record import facts, folder_of, write_row

import megatier
from megatier.compute.attention_kernels import without_cudnn
from megatier.integrations.streamed import Streamed
from megatier.measure.link_traffic import CopyTraffic, alone

LINK_BYTES = 1 << 30
"""The most bytes that are copied at a time to measure the link."""
PAGE = 256
"""Tokens of a page of continuous batching's cache."""
PREFILL = 4096
"""The most tokens of prompts that continuous batching takes at once."""
WARM_TOKENS = 4
"""Tokens of each text that is not timed."""
REPEATS = 3
"""Times that memory is lent and weights are loaded."""
WAYS = ("batch", "generate", "graphs")
"""How texts are generated."""
SPECIAL = ("<pad>", "<eos>", "<unk>")
"""Tokens of GRPO's tokenizer before its words."""


def options_of(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the arguments."""
    has_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="7b", choices=SHAPES)
    parser.add_argument("--gpu", default="24GiB" if has_gpu else "2MiB", help="tiers.gpu (%(default)s)")
    parser.add_argument("--ram", default="88GiB" if has_gpu else "64MiB", help="tiers.ram (%(default)s)")
    parser.add_argument("--texts", type=int, default=64, help="texts that are generated at once (%(default)s)")
    parser.add_argument("--prompt", type=int, default=64, help="tokens of each prompt (%(default)s)")
    parser.add_argument("--tokens", type=int, default=256, help="new tokens of each text (%(default)s)")
    parser.add_argument("--few", type=int, default=4, help="tokens that are timed where weights stream (%(default)s)")
    parser.add_argument("--graphs", action="store_true", help="measure with CUDA graphs too")
    parser.add_argument("--grpo", action="store_true", help="measure steps of GRPO")
    parser.add_argument("--rows", type=int, default=8, help="prompts a step, and completions of each (%(default)s)")
    parser.add_argument("--completion", type=int, default=512, help="new tokens of each completion (%(default)s)")
    parser.add_argument("--steps", type=int, default=3, help="steps of GRPO, whose first is not timed (%(default)s)")
    parser.add_argument("--output", type=Path, help="the file of results")
    return parser.parse_args(words)


def make_model(shape: str) -> Any:  # noqa: ANN401 - of transformers
    """Return a model in RAM with laid weights in bf16."""
    from transformers import AutoModelForCausalLM

    config = model_config(SHAPES[shape], 4096)
    config.use_cache = True
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa")
    model.to_empty(device="cpu")
    model.model.rotary_emb = type(model.model.rotary_emb)(config)  # its tables are no parameters, and were lost
    fill(model.parameters())
    return model.eval()


# ---------------------------------------------------------------------- texts


def prompts_of(options: argparse.Namespace) -> list[list[int]]:
    """Return random prompts, the same ones for every part."""
    draw = torch.Generator().manual_seed(0)
    vocab = SHAPES[options.shape].vocab
    ids: list[list[int]] = torch.randint(len(SPECIAL), vocab, (options.texts, options.prompt), generator=draw).tolist()
    return ids


def batching(way: str, texts: int, length: int) -> dict[str, Any]:
    """Return settings of continuous batching with a cache for so many texts of that length at most."""
    pages = texts * (math.ceil(length / PAGE) + 1)
    return {"num_blocks": pages, "max_batch_tokens": PREFILL, "use_cuda_graph": way == "graphs"}


def generate(model: Any, way: str, options: argparse.Namespace, tokens: int) -> list[list[int]]:  # noqa: ANN401
    """Return the new tokens of all texts."""
    import transformers.generation
    from transformers import GenerationConfig

    prompts = prompts_of(options)
    # No token ends a text, so that all have the same length.
    config = GenerationConfig(max_new_tokens=tokens, do_sample=False, eos_token_id=-1, pad_token_id=0)
    if way == "generate":
        rows = model.generate(torch.tensor(prompts, device=model.device), generation_config=config)
        found: list[list[int]] = rows[:, options.prompt :].tolist()
        return found

    made: Any = transformers.generation  # older versions have no such config
    settings = made.ContinuousBatchingConfig(**batching(way, options.texts, options.prompt + options.tokens))
    texts = model.generate_batch(prompts, generation_config=config, continuous_batching_config=settings)
    found = [list(text.generated_tokens) for text in texts.values()]
    # Of an error in its thread transformers returns what there is.
    if [len(text) for text in found] != [tokens] * options.texts:
        raise RuntimeError(f"{len(found)} texts, of which some are short: see what transformers has logged")
    return found


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    """Run something; return its seconds, until the device has done it, and what it returned."""
    wait()
    began = time.perf_counter()
    result = work()
    wait()
    return time.perf_counter() - began, result


def wait() -> None:
    """Wait for the device."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def rates(options: argparse.Namespace, seconds: float) -> dict[str, float]:
    """Return what so many seconds for all texts mean."""
    return {"seconds": seconds, "tokens_per_s": options.texts * options.tokens / seconds}


def plain(model: Any, way: str, options: argparse.Namespace) -> dict[str, Any]:  # noqa: ANN401
    """Measure a model that lies on the device as a whole."""
    model.to("cuda" if torch.cuda.is_available() else "cpu")
    # With the kernels of a streamed model: cuDNN's attention would make a plan for the length of each token's text.
    with without_cudnn():
        generate(model, way, options, WARM_TOKENS)
        seconds, texts = timed(lambda: generate(model, way, options, options.tokens))
    return rates(options, seconds) | {"texts": texts}


def lent(streamed: Streamed, way: str, options: argparse.Namespace) -> dict[str, Any]:
    """Measure texts in memory that training lends: with all that comes before and after, and alone."""
    streamed.lends_memory = True
    try:
        generate(streamed.model, way, options, WARM_TOKENS)
        whole, texts = timed(lambda: generate(streamed.model, way, options, options.tokens))
        with streamed.lent_memory(), streamed.held_weights():
            alone_s, again = timed(lambda: generate(streamed.model, way, options, options.tokens))
    finally:
        streamed.lends_memory = False
    return rates(options, whole) | {"texts_alone": rates(options, alone_s), "texts": texts, "is_same": texts == again}


def streaming(streamed: Streamed, options: argparse.Namespace) -> dict[str, Any]:
    """Measure `generate` with no weights held, for few tokens."""
    from transformers import GenerationConfig

    streamed._held.refuse()
    prompts = torch.tensor(prompts_of(options), device=streamed.device)
    model: Any = streamed.model

    def text(tokens: int) -> float:
        config = GenerationConfig(max_new_tokens=tokens, do_sample=False, eos_token_id=-1, pad_token_id=0)
        return timed(lambda: model.generate(prompts, generation_config=config))[0]

    text(2)  # the first forwards learn the order of units
    first, more = text(2), text(2 + options.few)
    token = (more - first) / options.few
    found = {"seconds_of_a_token": token, "measured_tokens": options.few, "is_extrapolated": True}
    return rates(options, first + token * (options.tokens - 2)) | found


# ---------------------------------------------------------------------- weights


def sync(streamed: Streamed) -> dict[str, Any]:
    """Measure how long it takes to lend memory, to load all weights into it, and to take it back."""
    device = torch.device(streamed.device)
    has_gpu = device.type == "cuda"
    with CopyTraffic(device, LINK_BYTES if has_gpu else LINK_BYTES >> 6) as copies:
        link = alone(copies.to_gpu, 2.0 if has_gpu else 0.1)
    free()

    rows = []
    state_bytes = 0
    for _ in range(REPEATS):
        wait()
        times = [time.perf_counter()]
        with streamed.lent_memory():
            times.append(time.perf_counter())
            state_bytes = streamed._session.store.loan.num_bytes
            with streamed.held_weights():
                times.append(time.perf_counter())
                wait()
            wait()
            times.append(time.perf_counter())
        times.append(time.perf_counter())
        rows.append([later - earlier for earlier, later in pairwise(times)])

    num_bytes = streamed._resident.num_bytes
    lend, load, drop, back = (median(row[number] for row in rows[1:]) for number in range(4))
    beside, _ = timed(lambda: _load_beside(streamed))
    return {
        "link_bytes_per_s": link,
        "weight_bytes": num_bytes,
        "load_seconds": load,
        "load_over_link": load * link / num_bytes,
        "lend_seconds": lend,
        "drop_seconds": drop,
        "take_back_seconds": back,
        "state_bytes": state_bytes,
        "first_seconds": rows[0],
        "seconds_beside_training": beside,
    }


def _load_beside(streamed: Streamed) -> None:
    """Load all weights beside the memory of training, and let them go."""
    with streamed.held_weights():
        pass


# ---------------------------------------------------------------------- GRPO


def tokenizer_of(folder: Path, vocab: int) -> Any:  # noqa: ANN401 - of transformers
    """Return a tokenizer of words with as many tokens as the model."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import PreTrainedTokenizerFast

    words = [*SPECIAL, *map(word_of, range(vocab - len(SPECIAL)))]
    tokenizer = Tokenizer(WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Whitespace()
    made = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", padding_side="left"
    )
    made.save_pretrained(folder)
    return made


def reward(completions: list[str], **_: object) -> list[float]:
    """Return how many words of each completion have an even number."""
    return [float(sum(word[-1] in "02468" for word in text.split())) for text in completions]


def grpo(streamed: Streamed, options: argparse.Namespace, way: str) -> dict[str, Any]:
    """Measure steps of TRL's GRPO over the streamed model, which lends its memory to completions."""
    import datasets
    import trl
    from transformers import TrainerCallback

    from megatier.integrations.trl_trainer import StreamedTrl

    ends: list[float] = []
    generating: list[float] = []

    class Clock(TrainerCallback):
        """Notes the end of each step, once the device has done it."""

        def on_step_end(self, *_: Any, **__: Any) -> None:  # noqa: ANN401 - the trainer's
            wait()
            ends.append(time.perf_counter())

    methods = vars(streamed.model)
    method = "generate" if way == "generate" else "generate_batch"
    made = methods[method]

    def clocked(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        seconds, texts = timed(lambda: made(*args, **kwargs))
        generating.append(seconds)
        return texts

    vocab = SHAPES[options.shape].vocab
    words = [" ".join(word_of(token - len(SPECIAL)) for token in ids) for ids in prompts_of(options)]
    prompts = [words[number % len(words)] for number in range(options.steps * options.rows)]
    with tempfile.TemporaryDirectory() as folder:
        args = trl.GRPOConfig(
            output_dir=f"{folder}/run",
            per_device_train_batch_size=options.rows,
            gradient_accumulation_steps=options.rows,
            num_generations=options.rows,
            max_completion_length=options.completion,
            max_steps=options.steps,
            learning_rate=1e-6,
            bf16=False,  # the model computes in bf16 by itself
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            use_cpu=not torch.cuda.is_available(),
            dataloader_pin_memory=torch.cuda.is_available(),
            use_transformers_continuous_batching=way != "generate",
            transformers_continuous_batching_config=batching(way, options.rows**2, options.prompt + options.completion),
        )
        trainer: Any = type("StreamedGrpo", (StreamedTrl, trl.GRPOTrainer), {})(
            streamed,
            reward,
            args=args,
            train_dataset=datasets.Dataset.from_list([{"prompt": prompt} for prompt in prompts]),
            processing_class=tokenizer_of(Path(folder), vocab),
            callbacks=[Clock()],
        )
        methods[method] = clocked
        streamed.lends_memory = True
        try:
            began, _ = time.perf_counter(), trainer.train()
        finally:
            streamed.lends_memory = False
            methods[method] = made

    seconds = [later - earlier for earlier, later in pairwise([began, *ends])]
    used = slice(1, None) if options.steps > 1 else slice(None)
    log = [row for row in trainer.state.log_history if "loss" in row]
    tokens = [row["completions/mean_length"] * options.rows**2 for row in log]
    return {
        "way": way,
        "seconds": seconds,
        "generation_seconds": generating,
        "completion_tokens": tokens,
        "tokens_per_s": sum(tokens[used]) / sum(seconds[used]),
        "losses": [row["loss"] for row in log],
        "grad_norms": [row["grad_norm"] for row in log],
    }


# ---------------------------------------------------------------------- all of it


def free() -> None:
    """Give memory back that nobody uses any more."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


class Results:
    """What was found so far."""

    def __init__(self, options: argparse.Namespace) -> None:
        """Begin with the circumstances."""
        settings = {name: value for name, value in vars(options).items() if name != "output"}
        self.found: dict[str, Any] = {"settings": settings} | facts()
        self._path = options.output or folder_of(self.found["machine"]) / "generation.json"

    def part(self, name: str, work: Callable[[], dict[str, Any]]) -> None:
        """Measure a part, or note its error, and write down all that is known."""
        print(f"{name} ...", flush=True)
        try:
            seconds, part = timed(work)
            part |= {"seconds_of_all": seconds}
        except Exception as error:  # noqa: BLE001 - one part that fails must not lose the others
            part = {"error": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc().splitlines()[-24:]}
            print("\n".join(part["traceback"]), flush=True)
        self.found[name] = part | {"peak_gpu_bytes": peak_gpu_bytes(), "peak_ram_bytes": peak_ram_bytes()}
        self.write()
        print(name, {key: value for key, value in part.items() if key not in ("texts", "traceback")}, flush=True)
        free()

    def rate(self, *names: str) -> float:
        """Return the tokens/s of a part, or of a part of it; 0 if it failed."""
        part: Any = self.found
        for name in names:
            part = part.get(name, {})
        return float(part.get("tokens_per_s", 0))

    def compare(self) -> None:
        """Compare parts with each other."""
        for way in WAYS:
            there, ours = (self.found.get(f"{kind} {way}", {}).pop("texts", None) for kind in ("plain", "lent"))
            if there and ours:
                plain_rate = self.rate(f"plain {way}")
                self.found[f"ratios {way}"] = {
                    "equal_texts": sum(one == other for one, other in zip(there, ours, strict=True)) / len(ours),
                    "texts_alone_over_plain": self.rate(f"lent {way}", "texts_alone") / plain_rate,
                    "over_plain": self.rate(f"lent {way}") / plain_rate,
                }
        if slow := self.rate("streaming"):
            self.found["lent_over_streaming"] = {way: self.rate(f"lent {way}") / slow for way in WAYS}
        self.write()

    def write(self) -> None:
        """Write the file."""
        write_row(self.found, self._path)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Measure all parts."""
    results = Results(options)
    began = time.perf_counter()
    model = make_model(options.shape)
    results.found["num_parameters"] = sum(parameter.numel() for parameter in model.parameters())
    results.found["seconds_of_the_model"] = time.perf_counter() - began
    ways = WAYS if options.graphs else WAYS[:-1]
    for way in ways:
        results.part(f"plain {way}", partial(plain, model, way, options))
    model.to("cpu")
    free()

    began = time.perf_counter()
    limit = {} if torch.cuda.is_available() else {"gpu_limit": "256MiB"}  # RAM stands for the GPU's memory
    streamed = megatier.stream(
        model,
        tiers={"gpu": options.gpu, "ram": options.ram, **limit},
        moments="bf16",
        fused_loss=False,
        activations="recompute",
        accumulation_steps=options.rows,
        lr=1e-6,
    )
    with streamed:
        del model
        free()
        results.found["seconds_to_open"] = time.perf_counter() - began
        results.part("sync", partial(sync, streamed))
        for way in ways:
            results.part(f"lent {way}", partial(lent, streamed, way, options))
        results.part("streaming", partial(streaming, streamed, options))
        if options.grpo:
            fastest = max(ways, key=lambda way: results.rate(f"lent {way}"))
            results.part("grpo", partial(grpo, streamed, options, fastest))
    results.compare()
    return results.found


def main() -> None:
    """Measure, and print everything as one JSON."""
    print(json.dumps(measure(options_of()), indent=1, default=str))


if __name__ == "__main__":
    main()
