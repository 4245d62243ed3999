"""Records the surroundings of a forward, so that a backward can recompute it with the same result.

A context around the forward alone (a choice of kernels, autocast, a default dtype) is gone when the forward runs again,
and a loop may switch settings between forward and backward (`model.eval()`). So everything that may change a number is
recorded, and restored where it differs. What cannot be restored is refused. `unit_function` makes a `Replay` for each
slice.
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
"""The modules of torch whose modes only observe operators."""


class _Setting(NamedTuple):
    """A setting of the process that numbers depend on."""

    name: str
    get: Callable[[], Any]
    put: Callable[[Any], object] | None
    """None: it may derive from another setting, so setting it would not restore the old state."""


def _attribute(owner: Any, path: str) -> _Setting:  # noqa: ANN401 - torch's modules of settings
    name = path.rpartition(".")[2]
    return _Setting(path, partial(getattr, owner, name), partial(setattr, owner, name))


def _precision(backend: str, kind: str) -> _Setting:
    # torch's older getters raise an error once the newer setters were used.
    get = partial(torch._C._get_fp32_precision_getter, backend, kind)
    return _Setting(f"fp32_precision of {backend} {kind}", get, None)


def _reductions(kind: str) -> _Setting:
    # torch.backends reads only one of the two values, but writes both.
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
"""A forward may read it. megatier's own code never does (`defaults`), so no run depends on it."""
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
"""Settings that only affect GPU kernels."""
_THREADS = _Setting("the number of threads", torch.get_num_threads, torch.set_num_threads)
"""A setting of the thread, on which sums on the CPU depend. With CUDA the backward runs on another thread."""


def settings_now(device: torch.device) -> dict[str, str]:
    """Return the settings of the process that numbers on a device depend on, by name.

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
        """Record them. Call this just before the forward.

        Args:
            device: the device on which the module computes.
            module: the module whose forward it is.
        """
        self._device = device
        self._module = module
        self._training = _training(module)
        self._cpu_rng = torch.get_rng_state()
        self._cuda_rng: torch.Tensor | None = None
        self._settings: Sequence[_Setting] = (_DEFAULT_DTYPE, *_SETTINGS, _THREADS)
        if device.type == "cuda":
            # Before the settings are read, since the order of kernels is one of them.
            _settle_order(device)
            self._cuda_rng = torch.cuda.get_rng_state(device)
            self._settings = (_DEFAULT_DTYPE, *_SETTINGS, *_GPU_SETTINGS)
        self._values = [setting.get() for setting in self._settings]

        # Autocast of the CPU too, as in torch.utils.checkpoint, since a module may compute something there.
        self._autocast: dict[str, tuple[bool, torch.dtype]] = {}

        # One kind on a CPU.
        kinds = {"cpu", device.type}
        for kind in kinds:
            self._autocast[kind] = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
        self._modes, self._default = _modes()

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """Restore the surroundings inside. Afterwards the present ones are back, the random state included.

        Raises:
            StreamedModelError: something differs that cannot be restored.
        """
        with contextlib.ExitStack() as stack:
            self._restore_settings(stack)
            self._restore_modes(stack)
            self._restore_training(stack)
            # Forked before anything is set, so that the loop's own random numbers continue as if nothing had been
            # recomputed.
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
            # Refused only where it differs, so most runs never notice.
            if setting.put is None:
                raise _refused(f"{setting.name} was {value!r} in the forward and is {now!r} in the backward")
            stack.callback(setting.put, now)
            setting.put(value)

    def _restore_modes(self, stack: contextlib.ExitStack) -> None:
        modes, default = _modes()

        # A default device is restored by entering torch's context for it.
        if default != self._default:
            stack.enter_context(self._default)

        # A mode is user code that sees each operator, so we can neither enter nor leave it.
        for mode in (*modes, *self._modes):
            if not (_is_in(mode, modes) and _is_in(mode, self._modes)):
                raise _refused(f"the mode {type(mode).__name__} is around one of forward and backward alone")

    def _restore_training(self, stack: contextlib.ExitStack) -> None:
        # The common case first, since setting an attribute of each module costs host time in every layer.
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
    """Let torch choose its order of attention kernels, which it does once in a process at the first choice of a kernel.

    Until then another order is read. Nothing is computed, and the host does not wait for the device.
    """
    probe = torch.empty(1, 1, 1, 8, dtype=torch.float16, device=device)
    torch._fused_sdp_choice(probe, probe, probe)


def _training(module: nn.Module) -> list[bool]:
    """Return for each module in a module whether it is in training mode."""
    return [part.training for part in module.modules()]


def _modes() -> tuple[list[Any], torch.device]:
    """Return torch's active modes that may change what operators do, and the default device."""
    modes = (*_get_current_function_mode_stack(), *_get_current_dispatch_mode_stack())
    default = torch.device("cpu")
    active = []
    for mode in modes:
        if isinstance(mode, DeviceContext):
            default = mode.device
        elif type(mode).__module__ not in _COUNTING_MODES:
            active.append(mode)
    return active, default


def _is_in(mode: object, modes: list[Any]) -> bool:
    # By identity, since a mode may define equality as it likes.
    return any(mode is other for other in modes)


def _refused(why: str) -> StreamedModelError:
    return StreamedModelError(
        f"{why}. With activations other than keep, forwards of layers run again in the backward and would give other "
        "numbers there. Let both see the same, or open the model with activations='keep'."
    )
