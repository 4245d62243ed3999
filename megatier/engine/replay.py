"""Keeps what a forward finds around it, so that a backward can run it again with the same result.

A context around the forward alone (a choice of kernels, autocast, a default dtype) is gone when the forward runs again,
and a loop may switch things between forward and backward (`model.eval()`). So what may change a number is noted, and
restored where it differs. What cannot be restored is refused.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import torch
import torch.utils.deterministic
from torch import nn
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from megatier.errors import StreamedModelError

_COUNTING_MODES = ("torch.utils.flop_counter", "torch.utils._debug_mode", "torch.distributed.tensor.debug._comm_mode")
"""The modules of torch whose modes look at operators and change none."""


class _Setting(NamedTuple):
    """A setting of the process on which numbers depend."""

    name: str
    get: Callable[[], Any]
    put: Callable[[Any], object] | None
    """None: it may follow from another one, so putting it back would not leave things as they were."""


def _attribute(owner: Any, path: str) -> _Setting:  # noqa: ANN401 - torch's modules of settings
    name = path.rpartition(".")[2]
    return _Setting(path, partial(getattr, owner, name), partial(setattr, owner, name))


def _precision(backend: str, kind: str) -> _Setting:
    # torch's older getters refuse to answer once somebody has used the newer setters.
    get = partial(torch._C._get_fp32_precision_getter, backend, kind)
    return _Setting(f"fp32_precision of {backend} {kind}", get, None)


def _reductions(kind: str) -> _Setting:
    # Through torch.backends one of the two values is read alone, and the other one is written with it.
    get = getattr(torch._C, f"_get_cublas_allow_{kind}_reduced_precision_reduction")
    put = getattr(torch._C, f"_set_cublas_allow_{kind}_reduced_precision_reduction")
    return _Setting(
        f"reductions of {kind} products", get, lambda value: put(*value) if isinstance(value, tuple) else put(value)
    )


_cuda = torch.backends.cuda
KERNEL_ORDER = _Setting(
    "the order of attention's kernels", torch._C._get_sdp_priority_order, torch._C._set_sdp_priority_order
)
_DEFAULT_DTYPE = _Setting("the default dtype", torch.get_default_dtype, torch.set_default_dtype)
"""A forward may read it. What megatier itself makes never does (`defaults`), so no run depends on it."""
_SETTINGS = (
    _Setting("deterministic algorithms", torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
    _attribute(torch.utils.deterministic, "fill_uninitialized_memory"),
    _Setting("flash attention", _cuda.flash_sdp_enabled, _cuda.enable_flash_sdp),
    _Setting("attention by products", _cuda.math_sdp_enabled, _cuda.enable_math_sdp),
    KERNEL_ORDER,
    _Setting(
        "reductions of attention by products",
        _cuda.fp16_bf16_reduction_math_sdp_allowed,
        _cuda.allow_fp16_bf16_reduction_math_sdp,
    ),
    _precision("mkldnn", "matmul"),
    _precision("mkldnn", "conv"),
    _attribute(torch.backends.mkldnn, "mkldnn.enabled"),
    _attribute(torch.backends.mkldnn, "mkldnn.deterministic"),
    _attribute(torch.backends.opt_einsum, "opt_einsum.enabled"),
    _attribute(torch.backends.opt_einsum, "opt_einsum.strategy"),
)
"""Settings of all threads."""
_GPU_SETTINGS = (
    _Setting("efficient attention", _cuda.mem_efficient_sdp_enabled, _cuda.enable_mem_efficient_sdp),
    _Setting("cuDNN's attention", _cuda.cudnn_sdp_enabled, _cuda.enable_cudnn_sdp),
    _precision("cuda", "matmul"),
    _precision("cuda", "conv"),
    _reductions("fp16"),
    _reductions("bf16"),
    _attribute(_cuda.matmul, "matmul.allow_fp16_accumulation"),
    _Setting("the library of products", torch._C._get_blas_preferred_backend, torch._C._set_blas_preferred_backend),
    _attribute(torch.backends.cudnn, "cudnn.enabled"),
    _attribute(torch.backends.cudnn, "cudnn.benchmark"),
    _attribute(torch.backends.cudnn, "cudnn.deterministic"),
)
"""Those that no kernel of a CPU reads."""
_THREADS = _Setting("the number of threads", torch.get_num_threads, torch.set_num_threads)
"""The setting of a thread on which sums on the CPU depend. With CUDA the backward has a thread of its own."""


def settings_now(device: torch.device) -> dict[str, str]:
    """Return the settings of the process on which numbers of a device depend, by their names.

    Args:
        device: the device that computes.
    """
    settings: Sequence[_Setting] = _SETTINGS
    if device.type == "cuda":
        _settle_order(device)
        settings = (*_SETTINGS, *_GPU_SETTINGS)
    return {setting.name: str(setting.get()) for setting in settings}


class Replay:
    """The surroundings of a forward: random state, autocast, settings, modes, and which modules train."""

    def __init__(self, device: torch.device, module: nn.Module) -> None:
        """Note it. Call it just before the forward.

        Args:
            device: the device on which it computes.
            module: the module whose forward it is.
        """
        self._device = device
        self._module = module
        self._training = _training(module)
        self._cpu_rng = torch.get_rng_state()
        self._cuda_rng: torch.Tensor | None = None
        self._settings: Sequence[_Setting] = (_DEFAULT_DTYPE, *_SETTINGS, _THREADS)
        if device.type == "cuda":
            # Before the settings are read: the order of kernels is one of them.
            _settle_order(device)
            self._cuda_rng = torch.cuda.get_rng_state(device)
            self._settings = (_DEFAULT_DTYPE, *_SETTINGS, *_GPU_SETTINGS)
        self._values = [setting.get() for setting in self._settings]

        # Of the CPU too, as torch.utils.checkpoint does: a module may compute some of it there.
        self._autocast: dict[str, tuple[bool, torch.dtype]] = {}

        # On a CPU both are one.
        kinds = {"cpu", device.type}
        for kind in kinds:
            self._autocast[kind] = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
        self._modes, self._default = _modes()

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """Restore it inside. Everything is as it was afterwards, the present random state too.

        Raises:
            StreamedModelError: something is otherwise that cannot be restored.
        """
        with contextlib.ExitStack() as stack:
            self._restore_settings(stack)
            self._restore_modes(stack)
            self._restore_training(stack)
            # Forked before anything is set, so that the loop's own random numbers go on as if nothing had run again.
            stack.enter_context(torch.random.fork_rng([self._device] if self._cuda_rng is not None else []))
            torch.set_rng_state(self._cpu_rng)
            if self._cuda_rng is not None:
                torch.cuda.set_rng_state(self._cuda_rng, self._device)
            for kind, (enabled, dtype) in self._autocast.items():
                stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled))
            yield

    def _restore_settings(self, stack: contextlib.ExitStack) -> None:
        for setting, value in zip(self._settings, self._values, strict=True):
            now = setting.get()
            if now == value:
                continue
            # Refused only where it differs, so what cannot be put back does no harm to most runs.
            if setting.put is None:
                raise _refused(f"{setting.name} was {value!r} in the forward and is {now!r} in the backward")
            stack.callback(setting.put, now)
            setting.put(value)

    def _restore_modes(self, stack: contextlib.ExitStack) -> None:
        modes, default = _modes()

        # A context of torch for the default device is entered again, if the forward had another one.
        if default != self._default:
            stack.enter_context(self._default)

        # A mode is somebody's code that sees each operator, so it can be neither entered nor left for them.
        for mode in (*modes, *self._modes):
            if not (_is_in(mode, modes) and _is_in(mode, self._modes)):
                raise _refused(f"the mode {type(mode).__name__} is around one of forward and backward alone")

    def _restore_training(self, stack: contextlib.ExitStack) -> None:
        # The common case first: to assign an attribute of each module costs the host in every layer.
        if self._training == _training(self._module):
            return
        modules = list(self._module.modules())
        if len(modules) != len(self._training):
            raise _refused(f"{type(self._module).__name__} has other modules in it than in its forward")
        for module, trains in zip(modules, self._training, strict=True):
            stack.callback(setattr, module, "training", module.training)
            module.training = trains


@cache
def _settle_order(device: torch.device) -> None:
    """Let torch choose the order of attention's kernels, which it does once a process, at the first choice of a kernel.

    Until then one reads another order. Nothing is computed for it, and nobody waits for the device.
    """
    probe = torch.empty(1, 1, 1, 8, dtype=torch.float16, device=device)
    torch._fused_sdp_choice(probe, probe, probe)


def _training(module: nn.Module) -> list[bool]:
    """Return for each module of a module whether it trains."""
    return [part.training for part in module.modules()]


def _modes() -> tuple[list[Any], torch.device]:
    """Return the modes of torch that may change what operators do, and the default device."""
    modes = (*_get_current_function_mode_stack(), *_get_current_dispatch_mode_stack())
    default = torch.device("cpu")
    found = []
    for mode in modes:
        if isinstance(mode, DeviceContext):
            default = mode.device
        elif type(mode).__module__ not in _COUNTING_MODES:
            found.append(mode)
    return found, default


def _is_in(mode: object, modes: list[Any]) -> bool:
    # Modes may define equality as they like.
    return any(mode is other for other in modes)


def _refused(why: str) -> StreamedModelError:
    return StreamedModelError(
        f"{why}. With activations other than keep, forwards of layers run again in the backward and would give other "
        "numbers there. Let both see the same, or open the model with activations='keep'."
    )
