"""The sections of a fine-tuning run's manifest that a text run does not have: conversations, and an adapter in place of all weights."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, ValidationInfo, field_validator, model_validator

from gossamer.protocol import limits
from gossamer.protocol.run.sections import DataSection, Digest, Label, ModelSection, RunSection

ALL_LINEAR = "all-linear"  # peft's word for every linear layer but the head
MAX_RANK = 1 << 12  # of an adapter: above the width of most layers
MAX_TARGETS = 64  # names of layers


class FineTuningRunSection(RunSection):
    """The name, length, seed and membership of a fine-tuning run. Older releases would train all weights on every token."""

    protocol: int = Field(
        default=limits.FINE_TUNING_PROTOCOL,
        ge=limits.FINE_TUNING_PROTOCOL,
        le=limits.FINE_TUNING_PROTOCOL,
        description="version of the wire protocol",
    )


class FineTuningModelSection(ModelSection):
    """The model: with a LoRA adapter, frozen weights that each peer has in a folder, and the adapter's factors, which travel."""

    base: Digest | None = Field(default=None, description="SHA-256 of the frozen weights; a peer needs a folder with them (--model)")
    lora_rank: int = Field(default=0, ge=0, le=MAX_RANK, description="rank of the adapter's factors; 0: no adapter, all weights train")
    lora_alpha: int = Field(default=16, ge=1, le=1 << 20, description="the adapter's output is scaled by lora_alpha / lora_rank")
    lora_targets: Annotated[tuple[Label, ...], Field(strict=False)] = Field(
        default=(ALL_LINEAR,),
        min_length=1,
        max_length=MAX_TARGETS,
        description="layers with an adapter, by the end of their names, like q_proj; all-linear: every linear layer but the head",
    )

    @model_validator(mode="after")
    def _base_fits_rank(self) -> Self:
        if bool(self.lora_rank) is not bool(self.base):
            raise ValueError("lora_rank requires base, and base requires lora_rank: `peer init --from FOLDER --lora RANK` writes both")
        if self.lora_rank and (self.hub or self.weights):
            raise ValueError("with lora_rank, base is the digest of the weights: leave out hub and weights")
        return self

    @field_validator("lora_targets")
    @classmethod
    def _all_or_names(cls, targets: tuple[str, ...]) -> tuple[str, ...]:
        if ALL_LINEAR in targets and len(targets) > 1:
            raise ValueError(f"should be {ALL_LINEAR} alone, or names of layers")
        return targets


class FineTuningDataSection(DataSection):
    """The training text, or conversations of which only the answers train."""

    format: Literal["text", "chat", "pairs"] = Field(
        default="text",
        description="text: every token trains; chat: the assistant's messages of a list in `column`; pairs: the completion in `column`",
    )
    prompt_column: Label = Field(default="prompt", description="with pairs: column with the prompt, which does not train")
    template: Digest | None = Field(default=None, description="with chat: SHA-256 of the tokenizer's chat template; others are refused")

    @field_validator("format")
    @classmethod
    def _conversations_are_own(cls, format: str, info: ValidationInfo) -> str:
        if format != "text" and info.data.get("source", "text") != "text":
            raise ValueError('requires source = "text": conversations come from files that each peer names with --data')
        return format

    @property
    def has_prompts(self) -> bool:
        """Whether only some tokens train."""
        return self.format != "text"
