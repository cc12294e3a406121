"""A model is made ready: adapter by the fields, no dropout, trainable weights in fp32, weights that
fit or an error."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForCausalLM

import verifiers as vf
from support.chat_templates import STRIPPING
from support.tiny_models import tiny_gpt2
from support.training import run, small_config, small_policy, small_trainer, toy_env, weights_hash
from verifiers.checks.chat_template import check_increasing_context
from verifiers.errors import CheckpointError, ConfigError
from verifiers_trainer.engines.vllm.weights.export import exported
from verifiers_trainer.policy import adapters, preparation
from verifiers_trainer.policy.builtin_models import build_tiny_tokenizer
from verifiers_trainer.settings.config import RLConfig
from verifiers_trainer.trainer import RLTrainer


def look_up(word: str) -> str:
    """Look a word up.

    Args:
        word: what to look up
    """
    return word


def test_a_model_without_a_name_needs_its_tokenizer(tmp_path):
    model = small_policy()
    model.config._name_or_path = model.name_or_path = ""
    with pytest.raises(ConfigError, match="pass processing_class"):
        preparation.load(model, None, None)
    tokenizer = build_tiny_tokenizer()
    assert preparation.load(model, tokenizer, vf.RLConfig()) == (model, tokenizer)


def test_a_name_loads_model_and_tokenizer_with_the_keywords():
    settings = RLConfig(model_init_kwargs={"dtype": torch.bfloat16, "seed": 3})
    model, tokenizer = preparation.load("builtin:tiny", None, settings)
    assert model.dtype == torch.bfloat16
    assert tokenizer.chat_template


def test_an_environment_in_completion_mode_needs_no_chat_template():
    tokenizer = build_tiny_tokenizer()
    tokenizer.chat_template = None
    env = vf.SingleTurnEnv(
        dataset=[{"prompt": "a"}], rubric=toy_env().rubric, message_type="completion"
    )
    preparation.ensure_chat_template(tokenizer, env, RLConfig())
    assert tokenizer.chat_template is None


@pytest.mark.parametrize("adds_bos", [False, True])
def test_a_base_model_gets_a_plain_template_that_only_appends(adds_bos, caplog):
    tokenizer = build_tiny_tokenizer()
    tokenizer.chat_template, tokenizer.bos_token = None, "<|im_start|>"
    if adds_bos:  # as Llama's
        bos = ("<|im_start|>", tokenizer.bos_token_id)
        tokenizer._tokenizer.post_processor = TemplateProcessing(
            single=f"{bos[0]} $A", special_tokens=[bos]
        )
    preparation.ensure_chat_template(tokenizer, toy_env(), RLConfig())
    assert (
        "has no chat template, and the environment uses chat messages: a plain template is used"
        in caplog.text
    )
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"text": "hi", "type": "text"}]},
    ]
    first = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert first == "<|im_start|>" * adds_bos + "System:\nBe brief.\n\nUser:\nhi\n\nAssistant:\n"
    answered = [
        *messages,
        {"role": "assistant", "content": "yo"},
        {"role": "user", "content": "more"},
    ]
    second = tokenizer.apply_chat_template(answered, add_generation_prompt=True, tokenize=False)
    assert second == f"{first}yo{tokenizer.eos_token}\n\nUser:\nmore\n\nAssistant:\n"
    report = check_increasing_context(tokenizer)
    assert report.ok, report.first_difference


def test_a_server_renders_the_template_that_it_has(tmp_path):
    tokenizer = build_tiny_tokenizer()
    tokenizer.chat_template = None
    settings = small_config(tmp_path, inference="http://127.0.0.1:1/v1")
    with pytest.raises(
        ConfigError, match=r"no chat template.*start the server with the same template"
    ):
        preparation.ensure_chat_template(tokenizer, toy_env(), settings)
    settings.history = "exact"  # prompts are sent as token ids
    preparation.ensure_chat_template(tokenizer, toy_env(), settings)
    assert tokenizer.chat_template


# --- merged models --------------------------------------------------------------------------------

TIED = [
    {"target_modules": ["q_proj"]},
    {"target_modules": ["q_proj", "lm_head"]},
    {"target_modules": ["q_proj", "embed_tokens"]},
    {"target_modules": ["embed_tokens", "lm_head"]},
    {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
    {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]},
]


def tied_and_adapted(options):
    """(a model with a tied head and a trained adapter, its logits)"""
    model = small_policy()
    assert model.config.tie_word_embeddings
    model = get_peft_model(
        model, LoraConfig(r=4, lora_alpha=8, task_type="CAUSAL_LM", **options)
    ).eval()
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.2)
        return model, model(IDS).logits


IDS = torch.arange(1, 20).unsqueeze(0)


@pytest.mark.parametrize("options", TIED, ids=str)
@torch.no_grad()
def test_a_merged_model_of_a_tied_head_gives_the_trained_logits_when_loaded(tmp_path, options):
    model, trained = tied_and_adapted(options)
    preparation.save_merged(model, tmp_path)
    # the model in training is not changed
    torch.testing.assert_close(model(IDS).logits, trained, atol=0, rtol=0)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    torch.testing.assert_close(loaded(IDS).logits, trained, atol=1e-4, rtol=1e-4)
    assert loaded.config.tie_word_embeddings == (options == TIED[0])


@pytest.mark.parametrize("options", TIED, ids=str)
@torch.no_grad()
def test_the_exported_weights_of_a_tied_head_give_the_trained_logits_when_untied(options):
    model, trained = tied_and_adapted(options)
    server = small_policy(seed=1)
    server.lm_head.weight = torch.nn.Parameter(server.lm_head.weight.detach().clone())
    missing, unexpected = server.load_state_dict(exported(model), strict=False)
    assert (missing, unexpected) == ([], [])
    torch.testing.assert_close(server.eval()(IDS).logits, trained, atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_merging_into_a_shared_weight_changes_both_layers(tmp_path, monkeypatch):
    """Negative control: as version 0.2.0 merged."""
    monkeypatch.setattr(adapters, "_untie_adapted", lambda model: None)
    model, trained = tied_and_adapted(TIED[1])
    preparation.save_merged(model, tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert (loaded(IDS).logits - trained).abs().max() > 1


# --- does the template only append? ---------------------------------------------------------------


class Talk(vf.MultiTurnEnv):
    def env_response(self, messages, state):
        return [{"role": "user", "content": "Go on."}]


def talk(**options):
    return Talk(dataset=[{"question": "a"}], rubric=toy_env().rubric, **options)


STRICT = RLConfig(require_increasing_context=True)


def tokenizer_with(template):
    tokenizer = build_tiny_tokenizer()
    tokenizer.chat_template = template or tokenizer.chat_template
    return tokenizer


@pytest.mark.parametrize(
    "env",
    [
        talk(),
        talk(max_turns=3),
        vf.EnvGroup([toy_env(), vf.EnvGroup([talk(), talk(max_turns=2)])]),
        vf.ToolEnv(dataset=[{"question": "a"}], rubric=toy_env().rubric, tools=[look_up]),
    ],
    ids=["without a bound", "three turns", "groups", "tools"],
)
def test_a_template_that_strips_thinking_is_one_warning_for_several_turns_and_an_error_when_required(
    env, caplog
):
    tokenizer = tokenizer_with(STRIPPING)

    preparation.probe_template(tokenizer, env, RLConfig())

    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert "differs at token" in record.message
    assert "<think>" in record.message
    assert "use a chat template that keeps them" in record.message
    with pytest.raises(
        ConfigError, match=r"(?s)differs at token.*set require_increasing_context=False"
    ):
        preparation.probe_template(tokenizer, env, STRICT)


@pytest.mark.parametrize(
    ("template", "env"),
    [
        (STRIPPING, toy_env()),
        (STRIPPING, vf.EnvGroup([toy_env(), toy_env()])),
        (STRIPPING, talk(message_type="completion")),
        (None, talk()),
    ],
    ids=["one turn", "a group of one turn", "plain text", "a template that appends"],
)
def test_nothing_is_said_where_no_turn_can_be_rewritten(template, env, caplog):
    preparation.probe_template(tokenizer_with(template), env, STRICT)
    assert not caplog.records


def test_a_template_that_cannot_be_probed_is_a_warning_and_an_error_when_required(caplog):
    tokenizer = tokenizer_with("{{- raise_exception('a system message first, please') }}")
    preparation.probe_template(tokenizer, talk(), RLConfig())
    assert "could not check whether the chat template only appends" in caplog.text
    assert "a system message first" in caplog.text
    with pytest.raises(ConfigError, match="a system message first"):
        preparation.probe_template(tokenizer, talk(), STRICT)


def test_the_trainer_looks_before_anything_starts(tmp_path, caplog):
    def trainer(**settings):
        return RLTrainer(
            small_policy(), talk(), small_config(tmp_path, **settings), tokenizer_with(STRIPPING)
        )

    assert trainer().engine is None
    assert "does not only append" in caplog.text
    with pytest.raises(ConfigError, match="does not only append"):
        trainer(require_increasing_context=True)


# --- adapters, dropout, precision, weights --------------------------------------------------------


def test_the_lora_fields_make_the_adapter_and_the_seed_its_weights(tmp_path):
    def adapter(seed):
        config = small_config(
            tmp_path,
            use_lora=True,
            lora_rank=3,
            lora_alpha=7,
            lora_dropout=0.25,
            disable_dropout=False,
            lora_target_modules=["q_proj", "v_proj"],
            seed=seed,
        )
        return preparation.prepare(small_policy(), config, None)

    torch.manual_seed(1)
    first = adapter(0)
    torch.manual_seed(2)
    again, other_seed = adapter(0), adapter(5)
    lora = first.peft_config["default"]
    assert (lora.r, lora.lora_alpha, lora.lora_dropout) == (3, 7, 0.25)
    assert {n.split(".")[-4] for n, _ in first.named_parameters() if "lora_A" in n} == {
        "q_proj",
        "v_proj",
    }
    assert any(m.p == 0.25 for m in first.modules() if isinstance(m, torch.nn.Dropout))
    assert weights_hash(first) == weights_hash(again)
    assert weights_hash(first) != weights_hash(other_seed)


def test_without_targets_every_linear_layer_but_the_head_is_adapted(tmp_path):
    model = preparation.prepare(small_policy(), small_config(tmp_path, use_lora=True), None)
    adapted = {n.split(".")[-4] for n, _ in model.named_parameters() if "lora_A" in n}
    assert adapted == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


def test_dropout_is_switched_off_and_said(tmp_path, caplog):
    model = tiny_gpt2(torch.float32)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.1
    model.config.attn_pdrop = 0.1
    preparation.prepare(model, small_config(tmp_path), None)
    assert not any(module.p for module in model.modules() if isinstance(module, torch.nn.Dropout))
    assert model.config.attn_pdrop == 0

    preparation.prepare(
        small_policy(), small_config(tmp_path, use_lora=True, lora_dropout=0.2), None
    )
    assert "lora_dropout is switched off" in caplog.text
    caplog.clear()
    adapter = vf.lora_defaults(lora_dropout=0.2)
    preparation.prepare(small_policy(), small_config(tmp_path), adapter)
    assert "lora_dropout is switched off" in caplog.text, "of a peft_config too"
    caplog.clear()
    preparation.prepare(small_policy(), small_config(tmp_path), vf.lora_defaults())
    assert "lora_dropout" not in caplog.text


def test_trainable_weights_are_fp32_and_frozen_ones_stay_as_they_are(tmp_path):
    half = small_policy().to(torch.bfloat16)
    full = preparation.prepare(half, small_config(tmp_path), None)
    assert {p.dtype for p in full.parameters()} == {torch.float32}

    adapted = preparation.prepare(
        small_policy().to(torch.bfloat16), small_config(tmp_path, use_lora=True), None
    )
    kinds = {(p.requires_grad, p.dtype) for p in adapted.parameters()}
    assert kinds == {(True, torch.float32), (False, torch.bfloat16)}


@pytest.mark.parametrize("has_instructions", [True, False])
def test_on_a_cpu_bf16_is_for_the_frozen_weights_under_an_adapter(
    tmp_path, monkeypatch, has_instructions
):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": has_instructions})

    def frozen(**settings):
        prepared = preparation.prepare(small_policy(), small_config(tmp_path, **settings), None)
        assert {p.dtype for p in prepared.parameters() if p.requires_grad} == {torch.float32}
        return {p.dtype for p in prepared.parameters() if not p.requires_grad}

    assert frozen(use_lora=True, bf16=True) == {
        torch.bfloat16 if has_instructions else torch.float32
    }
    assert frozen(use_lora=True) == {torch.float32}
    assert frozen(bf16=True) == set()


def test_a_run_with_the_frozen_weights_in_bf16_agrees_with_its_sampler_and_learns(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": True})
    done = run(small_trainer(tmp_path, use_lora=True, bf16=True, max_steps=2, deterministic=True))
    assert 0 < done.steps[0]["sampler/log_ratio_abs"] < 0.1
    assert done.steps[1]["grad_norm"] > 0


def test_a_model_without_anything_to_train_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="is_trainable=True"):
        preparation.prepare(small_policy().requires_grad_(False), small_config(tmp_path), None)


def test_weights_are_loaded_in_place_and_must_fit(tmp_path):
    saved, model = small_policy(seed=1), small_policy(seed=2)
    preparation.save_weights(saved, tmp_path)
    parameters = list(model.parameters())
    preparation.load_weights(model, tmp_path)
    assert weights_hash(model) == weights_hash(saved)
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))

    tensors = load_file(tmp_path / "model.safetensors")
    tensors["odd"] = tensors.pop("model.norm.weight")
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(
        CheckpointError, match=r"missing \['model.norm.weight'\], unexpected \['odd'\]"
    ):
        preparation.load_weights(model, tmp_path)


def test_a_folder_without_weights_is_named(tmp_path):
    with pytest.raises(CheckpointError, match="no model weights"):
        preparation.load_weights(small_policy(), tmp_path)
    config = small_config(tmp_path, use_lora=True)
    with pytest.raises(CheckpointError, match="adapter_model"):
        preparation.load_weights(preparation.prepare(small_policy(), config, None), tmp_path)


def test_an_adapter_of_another_shape_is_refused(tmp_path):
    def adapter(**settings):
        return preparation.prepare(
            small_policy(), small_config(tmp_path, use_lora=True, **settings), None
        )

    preparation.save_weights(adapter(lora_target_modules=["q_proj"]), tmp_path)
    with pytest.raises(CheckpointError, match="do not fit this model: missing"):
        preparation.load_weights(adapter(), tmp_path)
    with pytest.raises(CheckpointError):
        preparation.load_weights(adapter(lora_rank=2, lora_target_modules=["q_proj"]), tmp_path)
