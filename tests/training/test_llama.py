"""Names and sizes of Llama-shaped models, both ways."""

from __future__ import annotations

import json

import pytest

from protocol.errors import UserError
from training.formats import huggingface_model
from training.transformer import ModelSpec, tensor_shapes

MODELS = (ModelSpec(), ModelSpec(tied=False, rope_base=500_000.0, norm_epsilon=1e-5, kv_heads=4, layers=12, vocabulary=1_000))
# The state of transformers' own LlamaForCausalLM for these sizes, by `benchmarks.interop`.
OF_TRANSFORMERS = {
    "model.embed_tokens.weight": (256, 64),
    "model.layers.0.self_attn.q_proj.weight": (64, 64),
    "model.layers.0.self_attn.k_proj.weight": (32, 64),
    "model.layers.0.self_attn.v_proj.weight": (32, 64),
    "model.layers.0.self_attn.o_proj.weight": (64, 64),
    "model.layers.0.mlp.gate_proj.weight": (192, 64),
    "model.layers.0.mlp.up_proj.weight": (192, 64),
    "model.layers.0.mlp.down_proj.weight": (64, 192),
    "model.layers.0.input_layernorm.weight": (64,),
    "model.layers.0.post_attention_layernorm.weight": (64,),
    "model.norm.weight": (64,),
    "lm_head.weight": (256, 64),
}


def test_names_and_shapes_are_those_of_transformers() -> None:
    model = ModelSpec(layers=1, tied=False)
    names = huggingface_model.llama_tensor_names(model)
    assert {names[name]: shape for name, shape in tensor_shapes(model)} == OF_TRANSFORMERS


@pytest.mark.parametrize("model", MODELS)
def test_each_tensor_has_a_name_of_its_own(model: ModelSpec) -> None:
    names = huggingface_model.llama_tensor_names(model)
    assert list(names) == [name for name, _ in tensor_shapes(model)] and len(set(names.values())) == len(names)


@pytest.mark.parametrize("model", MODELS)
def test_sizes_come_back(model: ModelSpec) -> None:
    assert huggingface_model.model_spec_from_config(json.loads(json.dumps(huggingface_model.llama_config(model, None)))) == model


def test_a_configuration_of_an_older_transformers_says_the_rotary_base_alone() -> None:
    config = huggingface_model.llama_config(MODELS[1], None)
    del config["rope_parameters"]
    assert huggingface_model.model_spec_from_config(config | {"rope_scaling": None}) == MODELS[1]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model_type", "mistral"),
        ("rope_scaling", {"rope_type": "linear", "factor": 2.0}),
        ("rope_parameters", {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0}),
        ("attention_bias", True),
        ("mlp_bias", True),
        ("hidden_act", "gelu"),
        ("head_dim", 32),
        ("hidden_size", "64"),
        ("num_key_value_heads", 0),
        ("rms_norm_eps", float("nan")),
        ("tie_word_embeddings", "yes"),
        ("quantization_config", {"bits": 4}),
    ],
)
def test_what_our_models_lack_is_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(UserError, match=field):
        huggingface_model.model_spec_from_config(huggingface_model.llama_config(ModelSpec(), None) | {field: value})
