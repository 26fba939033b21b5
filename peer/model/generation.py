"""Text that the model in a home's newest checkpoint writes: a look at what a run has learned, without an export."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch

from gossamer.peer.machine.held_manifest import need_manifest
from gossamer.peer.machine.home import Home
from gossamer.peer.model.accelerator import choose_device
from gossamer.peer.model.model import placed, quiet_transformers
from gossamer.peer.model.text_export import text_model
from gossamer.peer.model.weights import Show, fast_weights, load_trained
from gossamer.peer.text.tokenizer import byte_tokenizer, load_tokenizer
from gossamer.protocol.errors import BadSettings
from gossamer.protocol.run.manifest import need_text

NO_CONTROL: Final = dict.fromkeys({*range(32), *range(127, 160)} - {9, 10})  # a terminal would obey what a model writes by chance


def write_on(home: Home, prompt: str, num_tokens: int, temperature: float, seed: int, say: Callable[[str], None], show: Show) -> None:
    """Continue a prompt, or answer it in a run on chats, and `say` the text piece by piece as it is written.

    It ends with the document, after `num_tokens`, or where the sequences of the run end. With temperature 0 each token is the likeliest.
    Raises BadSettings and BadManifest.
    """
    from transformers import TextStreamer

    manifest = need_text(need_manifest(home).manifest(), "its program has the model")
    if manifest.num_stages > 1:
        hint = "`peer export --with HOME` puts the stages together, in a form that transformers loads"
        raise BadSettings("this peer holds one stage of the model, which writes no text of its own", hint=hint)
    trained = load_trained(home, show)
    tokenizer, (device, _) = load_tokenizer(manifest.tokenizer, home.tokenizer), choose_device("auto")
    pretrained = tokenizer.pretrained or byte_tokenizer()
    start = [tokenizer.document_end]  # what a document of the training text follows
    if manifest.data.format == "chat":
        prompt = pretrained.apply_chat_template([{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True)
        start = []
    tokens = torch.tensor([[*start, *tokenizer.encode_all([prompt])[0].tolist()]], device=device)
    num_most = manifest.inner.sequence_length
    if (room := num_most - tokens.numel()) < 1:
        raise BadSettings(f"the prompt has {tokens.numel()} tokens, and a sequence of the run {num_most}", hint="shorten the prompt")

    class Pieces(TextStreamer):  # type: ignore[misc]
        def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
            say(text.translate(NO_CONTROL))

    model = placed(text_model(manifest, home, fast_weights(trained.checkpoint)), device).eval()
    model.generation_config.eos_token_id = model.generation_config.pad_token_id = tokenizer.document_end
    sampling = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature > 0.0 else {"do_sample": False}
    torch.manual_seed(seed)
    with quiet_transformers(), torch.no_grad():
        streamer = Pieces(pretrained, skip_prompt=True, skip_special_tokens=True)
        model.generate(tokens, max_new_tokens=min(num_tokens, room), streamer=streamer, **sampling)
