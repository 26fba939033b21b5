"""Fine-tuning from the command line: `peer init`, `host`, `join`, `eval` and `export` with an adapter on conversations, no script."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from gossamer.peer.machine.config import PeerConfig
from gossamer.peer.machine.events import EvalDone, MeetingDone, read_events
from gossamer.peer.machine.home import Home
from gossamer.peer.trainer.pins import pins
from gossamer.protocol.errors import ExitCode, OperatorError
from gossamer.protocol.run.manifest import Manifest, SignedManifest
from tests.cli.shell import Shell, Start
from tests.peer.fine_tuned import END, base_model, conversations, pairs, tuned_manifest

RUN_S = 150.0  # of two peers, on a busy machine
pytestmark = pytest.mark.usefixtures("tries_here")

LOCAL = ("--listen", "127.0.0.1", "--devices", "cpu", "--threads", "1")
Row = tuple[str, dict[str, dict[str, object]], tuple[str, ...], str, str]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two bases with the same tokenizer, and conversations of two peers."""
    folder = tmp_path_factory.mktemp("made")
    base_model(folder / "base")
    base_model(folder / "other", seed=6)
    for number in (1, 2):
        conversations(folder / f"{number}.jsonl", 300, number)
    pairs(folder / "pairs.jsonl", 50, 1)
    (folder / "asks.jsonl").write_text('{"messages": [{"role": "user", "content": "why?"}]}\n')
    (folder / "text.txt").write_text("plain text")
    return folder


def written(path: Path, manifest: Manifest) -> Path:
    path.write_text(manifest.to_toml())
    return path


def test_init_writes_a_run_that_pins_base_adapter_tokenizer_and_template(shell: Shell, made: Path, tmp_path: Path) -> None:
    result = shell("init", tmp_path / "run.toml", "--from", made / "base", "--lora", "4", "--format", "chat", "--steps", "200")
    assert result.code == 0 and "--data FILES" in result.err, result.err
    manifest = Manifest.from_toml((tmp_path / "run.toml").read_text())
    assert manifest.model.base and manifest.model.layout and manifest.data.template and manifest.tokenizer.digest
    assert (manifest.run.total_steps, manifest.model.lora_rank, manifest.model.lora_alpha, manifest.model.weights) == (200, 4, 8, None)
    assert (manifest.data.format, manifest.data.column, manifest.data.mask_documents) == ("chat", "messages", True)
    assert (manifest.inner.optimizer, manifest.inner.sequence_length, manifest.inner.warmup_steps) == ("adamw", 64, 2)


def test_init_may_fine_tune_all_weights_on_completions(shell: Shell, made: Path, tmp_path: Path) -> None:
    assert shell("init", tmp_path / "run.toml", "--from", made / "base", "--format", "pairs").code == 0
    manifest = Manifest.from_toml((tmp_path / "run.toml").read_text())
    assert manifest.model.weights and not manifest.model.base and manifest.data.column == "completion"
    assert shell("init", tmp_path / "plain.toml", "--from", made / "base").code == 0
    assert not Manifest.from_toml((tmp_path / "plain.toml").read_text()).is_fine_tuning, "an ordinary text run"


def test_a_chat_needs_a_template(shell: Shell, made: Path, tmp_path: Path) -> None:
    base = base_model(tmp_path / "base", template=None)
    result = shell("init", tmp_path / "run.toml", "--from", base, "--lora", "4", "--format", "chat")
    assert result.code == ExitCode.BAD_INPUT and "no chat template" in result.complaint[0] and '"pairs"' in result.complaint[1]
    assert not (tmp_path / "run.toml").exists()


INIT = [
    (("--lora", "4"), "fine-tune a model that exists", "--from FOLDER"),
    (("--from", "base", "--lora", "33"), "lora_rank is 33, and the layer", "to 32 or less"),
    (("--from", "base", "--lora", "5000"), "model.lora_rank is 5000", "manifest"),
    (("--from", "base", "--format", "talk"), "'talk' is not one of", "--help"),
]


@pytest.mark.parametrize(("arguments", "error", "hint"), INIT, ids=[" ".join(arguments) for arguments, *_ in INIT])
def test_init_refuses_before_it_writes(arguments: tuple[str, ...], error: str, hint: str, shell: Shell, made: Path, tmp_path: Path) -> None:
    result = shell("init", tmp_path / "run.toml", *(made / "base" if word == "base" else word for word in arguments))
    assert (result.code, result.out) == (ExitCode.BAD_INPUT, "") and not (tmp_path / "run.toml").exists()
    assert error in result.complaint[0] and hint in result.complaint[1], result.err


HOST: list[Row] = [
    ("no base", {}, ("--data", "1.jsonl"), "fine-tunes a model that each peer has", "--model FOLDER"),
    ("another base", {}, ("--model", "other", "--data", "1.jsonl"), "their digest is", "the run's host"),
    ("no data", {}, ("--model", "base"), "its own conversations", "--data"),
    ("no table", {}, ("--model", "base", "--data", "text.txt"), "neither parquet nor jsonl", "take this file out"),
    ("no answers", {}, ("--model", "base", "--data", "asks.jsonl"), "no token of an answer", "the assistant answers"),
    ("a column", {"data": {"column": "talk"}}, ("--model", "base", "--data", "1.jsonl"), "no messages in a column 'talk'", "messages"),
    ("other data", {}, ("--model", "base", "--data", "pairs.jsonl"), "no messages in a column 'messages'", "column"),
    ("a rank", {"model": {"lora_rank": 40, "layout": None}}, ("--model", "base", "--data", "1.jsonl"), "lora_rank is 40", "32 or less"),
    ("a layer", {"model": {"lora_targets": ["qry"], "layout": None}}, ("--model", "base", "--data", "1.jsonl"), "qry", "q_proj"),
    ("a template", {"data": {"template": "ab" * 32}}, ("--model", "base", "--data", "1.jsonl"), "chat template", "the run's host"),
]


@pytest.mark.parametrize(("keys", "arguments", "error", "hint"), [row[1:] for row in HOST], ids=[row[0] for row in HOST])
def test_a_run_that_cannot_train_here_is_refused_before_it_is_hosted(
    keys: dict[str, dict[str, object]], arguments: tuple[str, ...], error: str, hint: str, made: Path
) -> None:
    given = dict(zip(arguments[::2], arguments[1::2], strict=True))
    folder, data = (made / given[option] if option in given else None for option in ("--model", "--data"))
    with pytest.raises(OperatorError, match=re.escape(error)) as caught:
        pins(tuned_manifest(made / "base", **keys), folder, PeerConfig(home=made / "home", data=data, devices="cpu"))
    assert hint in caught.value.hint


@pytest.mark.parametrize("row", [HOST[0], HOST[4]], ids=lambda row: row[0])  # without options, and with both
def test_host_refuses_before_it_signs_or_invites(row: Row, shell: Shell, made: Path, tmp_path: Path) -> None:
    _, _, arguments, error, hint = row
    file = written(tmp_path / "run.toml", tuned_manifest(made / "base", run={"access": "invite"}))
    result = shell("host", file, *LOCAL, *(made / word if (made / word).exists() else word for word in arguments))
    assert (result.code, result.out) == (ExitCode.BAD_INPUT, "") and not Home(shell.home).manifest.exists()
    assert error in result.complaint[0] and hint in result.complaint[1], result.err


def test_a_fine_tuning_run_is_not_simulated_but_estimated(shell: Shell, made: Path, tmp_path: Path) -> None:
    file = written(tmp_path / "run.toml", tuned_manifest(made / "base"))
    result = shell("simulate", file, "--data", made / "1.jsonl", "--peers", "2", "--steps", "2")
    assert result.code == ExitCode.BAD_INPUT and "trains no fine-tuning run" in result.complaint[0]
    assert shell("simulate", "--network", file, "--step-seconds", "1").code == 0


def test_merge_is_for_adapters(shell: Shell, host: object, tmp_path: Path) -> None:
    result = shell("export", tmp_path / "out", "--merge")
    assert result.code == ExitCode.BAD_INPUT and result.complaint[1]


def ended(process: subprocess.Popen[str], code: int = 0) -> str:
    out, err = process.communicate(timeout=RUN_S)
    assert process.returncode == code, err
    return out + err


def printed(shell: Shell, *arguments: str | Path) -> str:
    """Run a command in this process, which has imported torch already; return what it prints."""
    result = shell(*arguments)
    assert result.code == 0, result.err
    return result.out + result.err


@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("default:`is_gradient_checkpointing`:FutureWarning")  # of peft
def test_two_peers_fine_tune_a_model_that_both_have_and_export_it(
    start: Start, made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = written(tmp_path / "run.toml", tuned_manifest(made / "base", run={"access": "invite", "total_steps": 150}))
    one, two, invite = tmp_path / "one", tmp_path / "two", tmp_path / "invite"
    data = ("--data", made / "1.jsonl")
    host = start("host", file, "--model", made / "base", *data, "--home", one, *LOCAL, "--wait-for-peers", "1", "--write-invite", invite)
    given = ("join", "--invite-file", invite, "--data", made / "2.jsonl", "--home", two, *LOCAL)

    lonely = ended(start(*given), ExitCode.BAD_INPUT)
    assert "fine-tunes a model that each peer has" in lonely and "hint: pass --model FOLDER" in lonely
    refused = ended(start(*given, "--model", made / "other"), ExitCode.BAD_INPUT)
    assert re.search(r"their digest is [0-9a-f]{64}, the manifest's [0-9a-f]{64}", refused) and "hint: give --model" in refused

    member = start(*given, "--model", made / "base")
    ended(member)
    ended(host)
    manifest = SignedManifest.from_bytes(Home(two).manifest.read_bytes()).manifest()
    assert isinstance(manifest, Manifest) and manifest.model.has_adapter
    events = [list(read_events(Home(home).events)) for home in (one, two)]
    assert all(any(isinstance(event, MeetingDone) and event.outcome == "completed" for event in each) for each in events)
    assert any(isinstance(event, EvalDone) for event in events[0])

    shells, held_out = (Shell(one, capsys), Shell(two, capsys)), ("--data", made / "1.jsonl")
    # the base is where it was: no --model
    losses = [float(json.loads(printed(shell, "eval", "--json", *held_out).splitlines()[0])["loss"]) for shell in shells]
    assert losses[0] == pytest.approx(losses[1], abs=1e-6), "one result"
    exported = printed(shells[1], "export", tmp_path / "adapter", *held_out)
    assert f"held-out loss: {losses[1]:.4f}" in exported
    printed(shells[1], "export", tmp_path / "merged", "--merge", "--tokens", "0")

    base, tokenizer = AutoModelForCausalLM.from_pretrained(made / "base"), AutoTokenizer.from_pretrained(tmp_path / "adapter")
    chat = [{"role": "user", "content": "fade"}, {"role": "assistant", "content": "adef"}]
    written_chat = tokenizer.apply_chat_template(chat, return_dict=True, return_assistant_tokens_mask=True, return_tensors="pt")
    tokens, answer = written_chat["input_ids"], written_chat["assistant_masks"][0].bool()
    assert tokenizer.decode(tokens[0, answer]) == f"adef{END}"

    def loss(model: torch.nn.Module) -> float:
        with torch.no_grad():
            logits = model.eval()(tokens).logits[0, :-1]
        return float(torch.nn.functional.cross_entropy(logits[answer[1:]], tokens[0, 1:][answer[1:]]))

    whole = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    asked = tokens[:, : int(answer.nonzero()[0])]
    answered = whole.generate(asked, max_new_tokens=8, do_sample=False, eos_token_id=tokenizer.eos_token_id)[0, asked.shape[1] :]
    said = shells[1]("generate", "fade", "--temperature", "0", "--tokens", "8").out
    assert said.strip() == tokenizer.decode(answered, skip_special_tokens=True).strip() != ""

    before, merged = loss(base), loss(whole)
    assert merged < 0.75 * before, "what both have learned"
    assert loss(PeftModel.from_pretrained(base, tmp_path / "adapter")) == pytest.approx(merged, abs=1e-4)
