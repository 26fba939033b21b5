"""The sections of a staged run's manifest: a model cut into stages, each of which a peer holds one of."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from gossamer.protocol import limits
from gossamer.protocol.run.sections import DEMO_LLAMA, ModelSection, RunSection, Section

BlockCount = Annotated[int, Field(ge=1, le=limits.LAYERS)]


class StagedRunSection(RunSection):
    """The name, length, seed and membership of a staged run."""

    @field_validator("access")
    @classmethod
    def _only_invited(cls, access: str) -> str:
        if access == "open":
            raise ValueError(
                "a staged run sends labels and hidden states, from which text can be read, so it cannot be open; use invite or allowlist"
            )
        return access


class StagedModelSection(ModelSection):
    """The model: an architecture of transformers that can be cut between its blocks."""

    config: dict[str, Any] = Field(
        default_factory=lambda: {**DEMO_LLAMA, "tie_word_embeddings": False}, description="fields of the architecture's transformers config"
    )

    @field_validator("config")
    @classmethod
    def _untied(cls, config: dict[str, Any]) -> dict[str, Any]:
        if config.get("tie_word_embeddings"):
            raise ValueError("the embedding and the head are in different stages and cannot be one tensor: set tie_word_embeddings = false")
        return config


class StagesSection(Section):
    """The stages into which the model is cut, and what passes between two of them."""

    count: int = Field(ge=2, le=limits.STAGES, description="number of stages; in a run without [stages] every peer holds the whole model")
    blocks: Annotated[tuple[BlockCount, ...], Field(strict=False)] = Field(
        default=(), max_length=limits.STAGES, description="transformer blocks of each stage; without it, stages are balanced by their cost"
    )
    micro_batch: int = Field(default=1, ge=1, le=1 << 16, description="sequences that pass through the stages together")
    activations: Literal["fp32", "bf16", "int8", "int4"] = Field(
        default="int8", description="number format of activations and gradients between two stages"
    )

    @model_validator(mode="after")
    def _blocks_fit_count(self) -> Self:
        if self.blocks and len(self.blocks) != self.count:
            raise ValueError(f"blocks has {len(self.blocks)} numbers for {self.count} stages; give one for each stage, or leave blocks out")
        return self
