"""The files and the loss of an exported language model."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from gossamer.peer.machine.home import Home
from gossamer.peer.model.adapter import factors, merge_adapter, write_adapter
from gossamer.peer.model.card import MeasuredLoss
from gossamer.peer.model.evaluation import measured_loss, measured_size, open_corpus
from gossamer.peer.model.model import quiet_transformers
from gossamer.peer.model.start import base_folder, initial_model
from gossamer.peer.model.weights import Show, set_weights, writing
from gossamer.peer.text.tokenizer import BYTES, Tokenizer, load_tokenizer
from gossamer.protocol.errors import BadSettings, TransportError
from gossamer.protocol.run.manifest import Manifest

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel


def text_model(manifest: Manifest, home: Home, weights: Mapping[str, Tensor]) -> PreTrainedModel:
    """Build a run's model with these weights. Raises BadManifest, and BadSettings where the weights under an adapter are not here."""
    model = initial_model(manifest, base_folder(home))
    set_weights(model, weights)
    return model


def measure(model: PreTrainedModel, manifest: Manifest, home: Home, data: Path | None, num_tokens: int | None, show: Show) -> MeasuredLoss:
    """Measure the held-out loss of a model of the run on so many tokens, if there is text for it; 0 tokens: not at all.

    Raises BadSettings when `data` is given and unusable; without `data`, an export does not fail for lack of text.
    """
    if num_tokens == 0:
        return MeasuredLoss(None, reason="as asked")
    try:
        with closing(open_corpus(manifest, home, data)) as corpus:
            loss, measured = measured_loss(model, manifest, home, corpus, measured_size(manifest, corpus, num_tokens), show)
    except (BadSettings, TransportError) as error:
        if data is not None:
            raise
        return MeasuredLoss(None, reason=str(error))
    return MeasuredLoss(loss, measured)


def write_model(model: PreTrainedModel, manifest: Manifest, home: Home, merges: bool, folder: Path) -> None:
    """Write the files of AutoModelForCausalLM and AutoTokenizer; of an adapter those of peft, unless it `merges` into its base.

    Raises OSError when the disk refuses.
    """
    tokenizer = load_tokenizer(manifest.tokenizer, home.tokenizer)
    model.eval()
    if merges:
        merge_adapter(model)
    for config in (model.config, model.generation_config):
        set_token_ids(config, tokenizer)
    with quiet_transformers(), writing():
        if factors(model) is not None:
            write_adapter(model, folder)
        else:
            model.save_pretrained(folder)
        tokenizer.save(folder)


def set_token_ids(config: PreTrainedConfig | GenerationConfig, tokenizer: Tokenizer) -> None:
    """Set the special tokens of a model on bytes, to which an architecture's default ids do not apply."""
    if tokenizer.name == BYTES:
        config.bos_token_id = None
        config.eos_token_id = config.pad_token_id = tokenizer.document_end
