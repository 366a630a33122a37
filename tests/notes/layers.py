"""A layer kind of the feature: a feed-forward network with squares instead of a gate."""

from __future__ import annotations

from collections.abc import Sequence

from training.transformer import BlockKind, LayerParameter, LayerPlace, LinearKind, ModelSpec, norm_weight

HIDDEN_MAX = 64


class Squares(BlockKind):
    name = "squares"
    description = "a feed-forward network whose activation is the square of what is positive"
    place = LayerPlace.FEED_FORWARD
    module, version = "notes", 1

    def sizes_problem(self, model: ModelSpec) -> str | None:
        return None if model.hidden <= HIDDEN_MAX else f"hidden {model.hidden} is more than {HIDDEN_MAX} squares"

    def parameters(self, model: ModelSpec, linear: LinearKind) -> Sequence[LayerParameter]:
        width, hidden = model.width, model.hidden
        return (
            norm_weight("squares_norm.weight", model, "post_attention_layernorm.weight", "ffn_norm.weight"),
            linear.matrix(model, "rise", hidden, width, transformers="mlp.up_proj", gguf="ffn_up"),
            LayerParameter("scale.weight", (hidden,), initial=0.5),  # of each square; export formats have no place for it
            linear.matrix(model, "fall", width, hidden, transformers="mlp.down_proj", gguf="ffn_down", is_residual=True),
        )


LAYERS = (Squares(),)
