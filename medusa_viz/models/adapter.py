"""A LoRA adapter on the backbone, in peft's own format: attached for Medusa-2 training, merged for decoding.

It changes the linears of the layers alone. The LM head stays: heads share it, and where it is tied to the embedding a
merged adapter would change that too.
"""

from __future__ import annotations

import logging
import warnings
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


log = logging.getLogger(__name__)


class AdapterError(ValueError):
    """An adapter that cannot be used; the message is one sentence."""


def is_adapter(folder: str | Path) -> bool:
    """Whether a heads folder brings an adapter for the backbone."""
    return (Path(folder) / ADAPTER_CONFIG).is_file()


class Adapter:
    """An adapter being trained on a model, which is changed in place until `detach`."""

    def __init__(self, model: PreTrainedModel, rank: int, alpha: int, name: str, seed: int = 0) -> None:
        from peft import LoraConfig, get_peft_model  # two seconds of import that decoding without adapters need not pay

        config = LoraConfig(r=rank, lora_alpha=alpha, target_modules="all-linear", task_type="CAUSAL_LM")
        with torch.random.fork_rng(devices=[]):  # every process, and every run of a seed, starts from the same adapter
            torch.manual_seed(seed)
            with warnings.catch_warnings():  # of names that peft and transformers call each other by
                warnings.simplefilter("ignore")
                self._peft = get_peft_model(model, config)
        self._peft.peft_config["default"].base_model_name_or_path = name  # peft wrote the path of the model here

    def parameters(self) -> list[Tensor]:
        return [parameter for parameter in self._peft.parameters() if parameter.requires_grad]

    def state(self) -> dict[str, Tensor]:
        """The adapter's own tensors, under peft's names."""
        from peft import get_peft_model_state_dict

        return get_peft_model_state_dict(self._peft, save_embedding_layers=False)

    def load_state(self, state: dict[str, Tensor]) -> None:
        from peft import set_peft_model_state_dict

        set_peft_model_state_dict(self._peft, state)

    def start_from(self, folder: Path) -> None:
        """Take the weights that `save` wrote. Raises AdapterError."""
        self.load_state({name: tensor.float() for name, tensor in self.read(folder).items()})

    def read(self, folder: Path) -> dict[str, Tensor]:
        """The weights that `save` wrote. Raises AdapterError where they are of another shape; the model may be one
        without numbers."""
        try:
            saved, own = load_file(folder / ADAPTER_WEIGHTS), self.state()
        except (SafetensorError, OSError) as error:
            reason = str(error).splitlines()[0]
            raise AdapterError(f"The adapter in {folder} cannot be read ({reason:.120}).") from error
        odd = sorted(name for name in saved.keys() | own.keys()
                     if name not in saved or name not in own or saved[name].shape != own[name].shape)
        if odd:
            raise AdapterError(f"The adapter in {folder} does not fit this model and rank: {odd[0]} is missing or has "
                               "another shape; name the rank that it was trained with (--rank), or start without it.")
        return saved

    def save(self, folder: Path, dtype: torch.dtype = torch.float16) -> None:
        """Write weights (in `dtype`) and config. peft's own saving would look the base model up on the hub."""
        state = {name: tensor.detach().to("cpu", dtype).contiguous() for name, tensor in self.state().items()}
        save_file(state, folder / ADAPTER_WEIGHTS)
        self._peft.peft_config["default"].save_pretrained(folder)

    def detach(self) -> None:
        """Give the model back as it was before."""
        self._peft.unload()


def merge(model: PreTrainedModel, folder: str | Path) -> PreTrainedModel:
    """The model with a folder's adapter added into its weights. Raises AdapterError."""
    try:
        from peft import PeftModel

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return PeftModel.from_pretrained(model, str(folder)).merge_and_unload(safe_merge=True)
    except (ImportError, OSError, ValueError, KeyError, RuntimeError, TypeError, SafetensorError) as error:
        log.info("the adapter in %s: %s", folder, error)
        raise AdapterError(f"The adapter in {folder} is damaged or belongs to another backbone; train one for this "
                           "backbone, or name heads without an adapter.") from error
