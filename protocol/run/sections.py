"""The sections of a manifest: every key with default, meaning and legal values. The peer package looks up names of codecs and models."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, PlainValidator, ValidationInfo, field_validator, model_validator

from gossamer.protocol import limits
from gossamer.protocol.errors import BadSettings
from gossamer.protocol.identity import PeerId
from gossamer.protocol.run.layout import by_name, layout_digest, num_chars

DEMO_LLAMA: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 344,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 256,
    "max_position_embeddings": 128,
    "tie_word_embeddings": True,
}
MUON_RATE = 1e-2  # these two rates were best for the demo job; a large model needs lower ones
ADAMW_RATE = 1.5e-3
AUTO_STEPS = 10  # nominal interval for inner_steps = "auto", for values that all peers must compute alike
LEAST_SHARE = 1e-3  # smallest weight of a source: a mixture is distributed in whole windows of 1024
_CONFIG_DEPTH = 4  # transformers configs nest two levels; deeper nesting could exhaust the stack of a recursive reader
_LARGEST_INTEGER = (1 << 63) - 1
_COUNTS_LAYERS = re.compile(r"layer|depth|num_blocks")  # in a field's name: the model, or its config, repeats something so often
_SCALE = re.compile(r"theta")  # in the name of a field that is no size, and may be larger than any
ALL_LINEAR = "all-linear"  # peft's word for every linear layer but the head
MAX_RANK = 1 << 12  # of an adapter: above the width of most layers
MAX_TARGETS = 64  # names of layers


def _printable(least: int, most: int) -> AfterValidator:
    def check(text: str) -> str:
        if not least <= len(text) <= most or not text.isprintable():
            raise ValueError(f"should be {least} to {most} printable characters")
        return text

    return AfterValidator(check)


def _matching(pattern: str, meaning: str) -> AfterValidator:
    def check(text: str) -> str:
        if not re.fullmatch(pattern, text):
            raise ValueError(f"should be {meaning}")
        return text

    return AfterValidator(check)


def _peers(texts: tuple[str, ...]) -> tuple[str, ...]:
    for text in texts:
        try:
            PeerId.from_text(text)
        except BadSettings:
            raise ValueError(f"{text[:64]!r} is not a peer id; `peer id` prints one") from None
    if len(set(texts)) < len(texts):
        raise ValueError("should name each peer once")
    return texts


def _inner_steps(value: object) -> int | str:
    if value == "auto" or (isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= limits.STEPS):
        return value
    raise ValueError('should be "auto" or a positive whole number')


def _shapes(given: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    if num_chars(given) > limits.LAYOUT_CHARS:
        raise ValueError(f"should have at most {limits.LAYOUT_CHARS} characters; leave it out for a model of so many tensors")
    if sum(map(_product, given.values())) > limits.PARAMETERS:
        raise ValueError(f"the tensors have more than {limits.PARAMETERS / 1e9:.0f} billion values, which no run can train")
    return dict(sorted(given.items()))


def _product(sizes: Sequence[int]) -> int:
    """Multiply sizes, but stop at a product that is too large for any run."""
    product = 1
    for size in sizes:
        product = min(product * size, limits.PARAMETERS + 1)
    return product


Access = Literal["invite", "allowlist", "open"]
Label = Annotated[str, _printable(1, 200)]
Unit = Annotated[str, _printable(1, 32)]
Words = Annotated[str, _printable(0, 200)]
Name = Annotated[str, _matching(r"[a-z0-9][a-z0-9_-]{0,31}", "a name of up to 32 lower-case letters, digits, - and _")]
Architecture = Annotated[str, _matching(r"[A-Za-z0-9._-]{0,64}", "a transformers model type, like llama or gpt2")]  # empty for a hub model
CommitHash = Annotated[str, _matching(r"[0-9a-f]{40}", "a full commit hash (40 hex digits); branches and tags can move")]
Digest = Annotated[str, _matching(r"[0-9a-f]{64}", "a SHA-256 in 64 hex digits")]
InnerSteps = Annotated[int | str, PlainValidator(_inner_steps)]
Size = Annotated[int, Field(ge=1, le=limits.PARAMETERS)]
TensorShapes = Annotated[dict[Label, Annotated[tuple[Size, ...], Field(strict=False)]], Field(min_length=1), AfterValidator(_shapes)]
Peers = Annotated[tuple[str, ...], AfterValidator(_peers), Field(strict=False)]  # TOML and JSON have lists, not tuples


class Section(BaseModel):
    """One table of a manifest: immutable, without unknown keys, type conversions or infinities.

    Defaults are checked too, because other keys limit some of them, and whoever joins reads them as given.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False, validate_default=True)


class RunSection(Section):
    """The run's name, length, random seed and membership."""

    name: Label = Field(default="demo", description="display name of the run")
    protocol: int = Field(default=limits.PROTOCOL, ge=limits.PROTOCOL, le=limits.PROTOCOL, description="version of the wire protocol")
    seed: int = Field(default=0, ge=0, le=_LARGEST_INTEGER, description="seed of all random numbers of the run")
    total_steps: int = Field(default=5000, ge=1, le=limits.STEPS, description="global steps after which the peers average and stop")
    access: Access = Field(default="invite", description="who may join: holders of an invite, the members listed below, or any peer (open)")
    issuers: Peers = Field(default=(), max_length=limits.ISSUERS, description="peer ids that may issue invites; `peer host` adds its own")
    members: Peers = Field(default=(), max_length=limits.MEMBERS, description="peer ids that may join if access is allowlist")

    @field_validator("members")
    @classmethod
    def _members_fit_access(cls, members: tuple[str, ...], info: ValidationInfo) -> tuple[str, ...]:
        if members and info.data.get("access", "allowlist") != "allowlist":
            raise ValueError('requires access = "allowlist"')
        return members


class ProgramSection(Section):
    """The program that each member starts on its own. A peer shows these words; it never fetches or runs anything by them."""

    name: Label = Field(description="the program's name")
    unit: Unit = Field(default="examples", description="what a step is counted in; a partner's weight follows from it")
    source: Words = Field(default="", description="where members find the program, in words")
    revision: Words = Field(default="", description="the program's commit or version, in words")
    base: Digest | None = Field(default=None, description="SHA-256 of the frozen parameters; a peer with others does not join")


class ProgramModelSection(Section):
    """The tensors that the members of a program run exchange, in the order of their names."""

    layout: Digest = Field(description="SHA-256 of the tensors' names and shapes; a peer whose model differs does not join")
    weights: Digest | None = Field(default=None, description="SHA-256 of the initial weights; without it, they are those of the host")
    shapes: TensorShapes | None = Field(
        default=None, description="shape of each tensor, so that a peer can tell what differs; none in a model of many tensors"
    )

    @model_validator(mode="after")
    def _shapes_fit_layout(self) -> Self:
        if self.shapes is not None and layout_digest(by_name(self.shapes)) != self.layout:
            raise ValueError("layout is not the digest of shapes")
        return self


class ModelSection(Section):
    """The model: a transformers architecture with random initial weights, or a model from the Hugging Face hub.

    With a LoRA adapter, each peer has the frozen weights in a folder, and the adapter's factors train and travel.
    """

    architecture: Architecture = Field(default="llama", description="transformers model type; run.seed determines its initial weights")
    hub: Label | None = Field(default=None, description="a model on the Hugging Face hub, org/name, instead of architecture and config")
    revision: CommitHash | None = Field(default=None, description="full commit hash of the hub model")
    config: dict[str, Any] = Field(default_factory=lambda: dict(DEMO_LLAMA), description="fields of the architecture's transformers config")
    layout: Digest | None = Field(
        default=None, description="SHA-256 of the parameters' names, shapes and order; a peer whose model differs does not join"
    )
    weights: Digest | None = Field(default=None, description="SHA-256 of the initial weights, for a run that does not start from run.seed")
    base: Digest | None = Field(default=None, description="SHA-256 of the frozen weights; a peer needs a folder with them (--model)")
    lora_rank: int = Field(default=0, ge=0, le=MAX_RANK, description="rank of the adapter's factors; 0: no adapter, all weights train")
    lora_alpha: int = Field(default=16, ge=1, le=1 << 20, description="the adapter's output is scaled by lora_alpha / lora_rank")
    lora_targets: Annotated[tuple[Label, ...], Field(strict=False)] = Field(
        default=(ALL_LINEAR,),
        min_length=1,
        max_length=MAX_TARGETS,
        description="layers with an adapter, by the end of their names, like q_proj; all-linear: every linear layer but the head",
    )

    @property
    def has_adapter(self) -> bool:
        """Whether an adapter trains in place of all weights."""
        return self.lora_rank > 0

    @model_validator(mode="before")
    @classmethod
    def _one_source(cls, given: object) -> object:
        if not isinstance(given, dict):
            return given
        if given.get("hub") is None:
            if given.get("revision") is not None:
                raise ValueError("revision requires hub")
            if given.get("architecture", "llama") != "llama" and not given.get("config"):
                raise ValueError("an architecture other than llama requires config")
            return given
        if given.get("architecture") or given.get("config"):
            raise ValueError("set either architecture and config, or hub and revision")
        if given.get("revision") is None:
            raise ValueError("hub requires revision: the full commit hash (40 hex digits)")
        return {**given, "architecture": "", "config": {}}

    @field_validator("config")
    @classmethod
    def _plain_config(cls, config: dict[str, Any]) -> dict[str, Any]:
        _need_plain(config, "config", _CONFIG_DEPTH)
        return config

    @field_validator("lora_targets")
    @classmethod
    def _all_or_names(cls, targets: tuple[str, ...]) -> tuple[str, ...]:
        if ALL_LINEAR in targets and len(targets) > 1:
            raise ValueError(f"should be {ALL_LINEAR} alone, or names of layers")
        return targets

    @model_validator(mode="after")
    def _base_fits_rank(self) -> Self:
        if self.has_adapter is not bool(self.base):
            raise ValueError("lora_rank requires base, and base requires lora_rank: `peer init --from FOLDER --lora RANK` writes both")
        if self.has_adapter and (self.hub or self.weights):
            raise ValueError("with lora_rank, base is the digest of the weights: leave out hub and weights")
        return self


class TokenizerSection(Section):
    """The tokenizer."""

    name: Label = Field(default="bytes", description="bytes, or a transformers tokenizer: org/name on the hub, or a path")
    revision: CommitHash | None = Field(default=None, description="full commit hash of a tokenizer on the hub")
    digest: Digest | None = Field(default=None, description="SHA-256 of the tokenizer; a peer whose tokenizer differs does not join")


class DataSource(Section):
    """A source of training text."""

    source: Literal["builtin", "text", "huggingface", "mixture"] = Field(
        default="builtin",
        description="builtin: the source code of Python's standard library; text: each peer's --data; huggingface: a data set; or mixture",
    )
    name: Label | None = Field(default=None, description="data set on the Hugging Face hub, org/name, or the absolute path of a folder")
    config: Label | None = Field(default=None, description="the data set's configuration, if it has several")
    split: Label = Field(default="train", description="the data set's split")
    revision: CommitHash | None = Field(default=None, description="full commit hash of the data set")
    column: Label = Field(default="text", description="column with text or tokens, in a data set or in parquet and jsonl files")

    @model_validator(mode="after")
    def _name_fits_source(self) -> Self:
        if self.source == "huggingface" and (self.name is None or (self.revision is None and not self.name.startswith("/"))):
            raise ValueError('source = "huggingface" requires name and revision (full commit hash)')
        if self.source != "huggingface" and (self.name or self.config or self.revision):
            raise ValueError('name, config and revision require source = "huggingface"')
        return self


class MixedSource(DataSource):
    """One source of a mixture, with its weight."""

    weight: float = Field(gt=0, le=1e9, description="share of the training windows, relative to the sum of all weights")

    @field_validator("source")
    @classmethod
    def _no_mixture(cls, source: str) -> str:
        if source == "mixture":
            raise ValueError("a mixture cannot contain a mixture")
        return source


class DataSection(DataSource):
    """The training text, or conversations of which only the answers train."""

    mixture: Annotated[tuple[MixedSource, ...], Field(strict=False)] = Field(
        default=(), max_length=limits.SOURCES, description="sources of the mixture: tables with the keys above and `weight`"
    )
    mask_documents: bool = Field(default=False, description="restrict attention to one document; positions restart with each document")
    format: Literal["text", "chat", "pairs"] = Field(
        default="text",
        description="text: every token trains; chat: the assistant's messages of a list in `column`; pairs: the completion in `column`",
    )
    prompt_column: Label = Field(default="prompt", description="with pairs: column with the prompt, which does not train")
    template: Digest | None = Field(default=None, description="with chat: SHA-256 of the tokenizer's chat template; others are refused")

    @property
    def has_prompts(self) -> bool:
        """Whether only some tokens train."""
        return self.format != "text"

    @field_validator("format")
    @classmethod
    def _conversations_are_own(cls, format: str, info: ValidationInfo) -> str:
        if format != "text" and info.data.get("source", "text") != "text":
            raise ValueError('requires source = "text": conversations come from files that each peer names with --data')
        return format

    @field_validator("mixture")
    @classmethod
    def _fits_together(cls, mixture: tuple[MixedSource, ...]) -> tuple[MixedSource, ...]:
        total = math.fsum(entry.weight for entry in mixture)
        for entry in mixture:
            if entry.weight < LEAST_SHARE * total:
                raise ValueError(f"the weight {entry.weight:g} is less than a thousandth of the sum of all weights, {total:g}")
        if sum(entry.source == "text" for entry in mixture) > 1:
            raise ValueError("at most one source may be text, because each peer has one --data")
        return mixture

    @model_validator(mode="after")
    def _mixture_fits_source(self) -> Self:
        if (self.source == "mixture") is not bool(self.mixture):
            raise ValueError('source = "mixture" requires a list `mixture`, and the list requires that source')
        return self


class InnerSection(Section):
    """The inner optimizer, which trains between meetings."""

    optimizer: Name = Field(default="muon", description="inner optimizer: `muon` or `adamw`")
    learning_rate: float = Field(
        default_factory=lambda given: ADAMW_RATE if given.get("optimizer") == "adamw" else MUON_RATE,
        gt=0,
        le=100,
        description=f"peak learning rate; default {MUON_RATE:g}, with `adamw` {ADAMW_RATE:g}",
    )
    final_fraction: float = Field(default=0.1, ge=0, le=1, description="learning rate at the end of the run, as a fraction of the peak")
    warmup_steps: int = Field(default=50, ge=0, le=limits.STEPS, description="steps of linear warm-up at the start of the run")
    rewarm_steps: int = Field(default=20, ge=0, le=limits.STEPS, description="warm-up steps of a peer that joins later")
    momentum: float = Field(default=0.9, ge=0, lt=1, description="decay of Muon's momentum")
    beta1: float = Field(default=0.9, ge=0, lt=1, description="decay of AdamW's first moment")
    beta2: float = Field(default=0.99, ge=0, lt=1, description="decay of AdamW's second moment")
    weight_decay: float = Field(default=0.1, ge=0, le=100, description="AdamW's weight decay, on matrices only")
    clip_norm: float = Field(default=1.0, gt=0, le=1e6, description="gradients are clipped to this norm")
    precision: Literal["auto", "bf16", "fp32"] = Field(
        default="auto",
        description="number format of matrix products; weights are always fp32. auto: bf16 on a GPU that supports it, else fp32",
    )
    batch_size: int = Field(default=4, ge=1, le=1 << 20, description="sequences per inner step")
    sequence_length: int = Field(default=128, ge=2, le=1 << 24, description="tokens per sequence")

    @field_validator("sequence_length")
    @classmethod
    def _bounded_batch(cls, sequence_length: int, info: ValidationInfo) -> int:
        if sequence_length * info.data.get("batch_size", 1) > limits.BATCH_TOKENS:
            raise ValueError(f"a batch should have at most {limits.BATCH_TOKENS} tokens: batch_size times sequence_length")
        return sequence_length


class OuterSection(Section):
    """The outer optimizer, which averages the peers' weights."""

    method: Name = Field(default="noloco", description="outer method")
    alpha: float = Field(default=0.0, ge=0, lt=1, description="momentum of the outer step")
    beta: float = Field(default=1.0, gt=0, le=4, description="outer learning rate")
    gamma: float = Field(default=1.0, description="strength of the pull towards the partner's slow weights; below 2(1 - alpha^2)")
    inner_steps: InnerSteps = Field(
        default="auto",
        description="mean inner steps from one meeting of a fragment to the next that it initiates; auto: each peer adapts its interval",
    )
    no_partner: Literal["solo", "defer"] = Field(
        default="solo", description="without a partner: take the outer step alone (solo), or postpone it (defer)"
    )
    deadline_s: float = Field(default=30.0, ge=1, le=3600, description="seconds for finding a partner and for the meeting")
    max_clock_gap_steps: int = Field(
        default_factory=lambda given: max(200, 8 * (AUTO_STEPS if given["inner_steps"] == "auto" else given["inner_steps"])),
        ge=1,
        le=limits.STEPS,
        description="largest difference between the global steps of two partners; default 8 times inner_steps, at least 200",
    )

    @property
    def nominal_steps(self) -> int:
        """Return the interval in inner steps for values that all peers must compute alike: AUTO_STEPS for "auto"."""
        return AUTO_STEPS if isinstance(self.inner_steps, str) else self.inner_steps

    @field_validator("gamma")
    @classmethod
    def _bounded_disagreement(cls, gamma: float, info: ValidationInfo) -> float:
        alpha = info.data.get("alpha", 0.0)
        bound = 2 * (1 - alpha**2) if info.data.get("method") == "noloco" else math.inf  # only NoLoCo uses gamma
        if not 0 < gamma < bound:
            raise ValueError(f"gamma must satisfy 0 < gamma < 2(1 - alpha^2), which is {bound:.4g} for alpha {alpha:g}")
        return gamma


class FragmentsSection(Section):
    """The division of the model into fragments, which are averaged separately."""

    max_fragment_mb: float = Field(
        default=8.0,
        gt=0,
        le=1e6,
        description="largest megabytes that each side sends in a meeting; larger fragments are split, also along a tensor's rows",
    )
    blocks_per_fragment: int | None = Field(
        default=None, ge=1, le=limits.FRAGMENTS, description="transformer blocks in a fragment; default: as many as fit"
    )


class CodecSection(Section):
    """The encoding of weights on the wire."""

    name: Name = Field(default="modulo4", description="codec of large tensors; small tensors are sent in fp32")


def _need_plain(value: object, where: str, depth: int) -> None:
    """Raise ValueError unless `value` consists of types that TOML and JSON share, with sizes that a model can have."""
    match value:
        case bool():
            return
        case str() if _is_unicode(value):
            return
        case int():
            need_config_integer(value, where)
            return
        case float() if math.isfinite(value):
            return
        case list() if depth:
            for item in value:
                _need_plain(item, where, depth - 1)
        case dict() if depth:
            for key, item in value.items():
                _need_plain(key, where, 0)
                _need_plain(item, f"{where}.{key}", depth - 1)
        case list() | dict():
            raise ValueError(f"{where} nests too deeply; legal are {_CONFIG_DEPTH} levels")
        case _:
            raise ValueError(f"{where} holds {ascii(value)[:40]}; legal are finite numbers, text, booleans, lists and tables")


def need_config_integer(value: int, where: str) -> None:
    """Raise ValueError for an integer of a model's config that no model has; `where` ends in its name."""
    name = where.rpartition(".")[2]
    most = limits.LAYERS if _COUNTS_LAYERS.search(name) else _LARGEST_INTEGER if _SCALE.search(name) else limits.CONFIG_INTEGER
    if abs(value) > most:
        raise ValueError(f"{where} is {value if abs(value) <= _LARGEST_INTEGER else 'too large'}; at most {most} is legal")


def _is_unicode(text: str) -> bool:
    """Return whether text can be encoded as UTF-8: JSON may contain unpaired surrogates."""
    return not any("\ud800" <= char <= "\udfff" for char in text)
