"""The section `model.lora`: adapters that are trained in place of the model's own parameters. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any, Self

from megatier.config.section import Section, explained
from megatier.errors import ConfigError

if TYPE_CHECKING:
    from megatier.config.schema import ModelConfig

ADAPTER_FILE = "adapter_config.json"
"""The settings in a folder of adapters, as PEFT calls them."""
ALL_LINEAR = "all-linear"
"""The target that stands for every linear layer but the head."""
LORA_NAMES = ("targets", "target_parameters", "modules_to_save", "adapter")
"""Settings that are taken as they are written on the command line: YAML would see an alias in *.q_proj."""


@explained
@dataclass(frozen=True, kw_only=True, slots=True)
class LoraConfig(Section):
    """The adapters of a run. In Python, lists may be given as text too."""

    NAME = "model.lora"

    rank: int = 16
    """Rank of an adapter, at least 1: columns of its first matrix and rows of its second."""
    alpha: float | None = None
    """An adapter's output is scaled by alpha / rank, above 0. None: twice the rank, so that the scale is 2."""
    dropout: float = 0.0
    """Share of an adapter's inputs that are dropped in training, 0 to below 1."""
    targets: tuple[str, ...] = (ALL_LINEAR,)
    """Modules that get an adapter: ends of their names such as q_proj, or patterns of whole names with the wildcards of
    model.frozen, such as model.layers.[0-7]. all-linear: every linear layer but the head. Empty: none, if there are
    target_parameters."""
    target_parameters: tuple[str, ...] = ()
    """Single parameters that get an adapter, such as the stacked experts of a layer: ends of their names such as
    mlp.experts.down_proj, or patterns of whole names."""
    rslora: bool = False
    """Scale by alpha / sqrt(rank) instead (rsLoRA)."""
    dora: bool = False
    """Also train the length of each row of the adapted matrix (DoRA)."""
    modules_to_save: tuple[str, ...] = ()
    """Modules that are trained whole beside the adapters, by the ends of their names, such as lm_head."""
    adapter: str | None = None
    """Folder of an adapter in PEFT's format to go on with. It brings all other settings. None: begin a new adapter."""

    def __post_init__(self) -> None:
        """Check each value."""
        self.read()
        self.need_least(rank=1)
        is_scale = self.alpha is None or self.alpha > 0
        self.need("alpha", is_scale, "above 0, or null for twice the rank")
        self.need("dropout", 0 <= self.dropout < 1, "from 0 to below 1")

        is_some = bool(self.targets or self.target_parameters)
        self.need("targets", is_some, "at least one module, or beside target_parameters")

        # PEFT knows the word only by itself. In a list it would be the end of a name.
        is_alone = ALL_LINEAR not in self.targets or len(self.targets) == 1
        bound = f"{ALL_LINEAR} alone, or names and patterns without it"
        self.need("targets", is_alone, bound)

        self._check_parameters()
        self.need("adapter", self.adapter != "", "the folder of an adapter, or null for a new one")

        # The folder says with which settings its adapter was made, and others would make another one of it.
        changed = [item.name for item in fields(self) if getattr(self, item.name) != item.default]
        if self.adapter is not None and changed != ["adapter"]:
            raise ConfigError(f"model.lora.adapter brings its own settings: leave out model.lora.{changed[0]}.")

    def _check_parameters(self) -> None:
        """Refuse what PEFT refuses beside `target_parameters`, in its words, before there is a model."""
        if not self.target_parameters:
            return
        refused = {
            "dropout": (self.dropout, "lora_dropout != 0", "0"),
            "dora": (self.dora, "use_dora=True", "false"),
        }
        for key, (value, words, remedy) in refused.items():
            if value:
                raise ConfigError(
                    f"model.lora.{key} does not go with model.lora.target_parameters: PEFT's lora.ParamWrapper does "
                    f"not work with {words}. Set it to {remedy}, or leave model.lora.target_parameters out."
                )

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Self:
        """Return the section of settings by name, such as YAML gives them.

        Raises:
            ConfigError: a setting is not known, or its value is out of bounds. Names it.
        """
        # YAML's keys may be numbers. As text they are refused as unknown settings are, with a message that names them.
        return cls(**{str(key): value for key, value in given.items()})

    def to_dict(self) -> dict[str, Any]:
        """Return the settings as plain lists, numbers and text."""
        settings = asdict(self)
        for key, value in settings.items():
            # YAML has no tuples.
            if isinstance(value, tuple):
                settings[key] = list(value)
        return settings

    @property
    def scaled_alpha(self) -> float:
        """Alpha as PEFT takes it."""
        return 2.0 * self.rank if self.alpha is None else self.alpha


def read_lora(section: ModelConfig) -> None:
    """Read `model.lora` of a section that is being built, so that all settings of the adapters are noted.

    Raises:
        ConfigError: a value is out of bounds, or other settings do not go with adapters.
    """
    if section.lora is None:
        return
    # With all defaults written out, a stored run keeps its meaning if one of them changes.
    adapters = LoraConfig.of(section.lora)
    object.__setattr__(section, "lora", adapters.to_dict())
    base = "the folder or name of a model with model.lora, whose adapters belong to a base that stays as it is"
    section.need("path", section.path is not None, base)
    section.need("frozen", not section.frozen, "empty with model.lora, which freezes the base")
