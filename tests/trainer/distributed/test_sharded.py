"""A model that is split over two processes trains as one process trains it, samples what it trains,
and comes back."""

import json
import os
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.utils import DistributedType
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from safetensors.torch import load_file
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from support import split
from support.embedded import small_model
from support.fake_vllm import FakeVLLM
from support.ranks import on_ranks, results
from support.training import small_policy, small_trainer
from support.training_child import child_context
from verifiers.errors import ConfigError
from verifiers_trainer.distributed import fsdp
from verifiers_trainer.policy.builtin_models import build_tiny_tokenizer

RUN = {"deterministic": True, "max_steps": 3, "max_off_policy_steps": 0, "max_grad_norm": 0.01}


@pytest.fixture(scope="module")
def children():
    return child_context()


@pytest.fixture
def on(children, tmp_path):
    """Train on some ranks, split where they are several, in a folder of that name."""

    def call(name="run", world=2, failpoint="", **settings):
        folder, options = tmp_path / name, {"world": world, "failpoint": failpoint}
        ended = on_ranks(children, folder, split.train, str(folder), **options, **settings)
        return ended if failpoint else results(ended)

    return call


UNEQUAL = [[1, 20, 3, 7], [2, 2, 30, 5]]
SELF = {"loss": "gkd", "teacher": "self", "teacher_context": "support.contexts:more"}
KINDS = {
    "full": {},
    "lora": {"use_lora": True},
    "full, reference": {"beta": 0.1},
    "full, reference that follows": {
        "beta": 0.1,
        "sync_ref_model": True,
        "ref_model_sync_steps": 1,
    },
    "lora, reference": {"use_lora": True, "beta": 0.1},
    "lora on the head": {"use_lora": True, "lora_target_modules": ["q_proj", "lm_head"]},
    "lora and a head of its own": {
        **{
            "use_lora": True,
            "lora_target_modules": ["q_proj"],
            "lora_modules_to_save": ["lm_head"],
            "beta": 0.1,
        }
    },
    "everything that follows": {
        **{
            "beta": 0.1,
            "sync_ref_model": True,
            "ref_model_sync_steps": 1,
            "loss": "ppo",
            "anchor": "recomputed",
        },
        **{"num_iterations": 2, "max_steps": 6, "max_off_policy_steps": 1},
    },
    "recomputed anchor": {
        "loss": "ppo",
        "anchor": "recomputed",
        "num_iterations": 2,
        "max_steps": 4,
    },
    "gradient checkpointing": {"gradient_checkpointing": True},
    "teaches itself": SELF,
    "teaches itself with an adapter": {**SELF, "use_lora": True},
    "teaches itself token by token": {
        **{**SELF, "loss": "distill", "updates_per_batch": 2, "max_steps": 4},
        **{"sync_ref_model": True, "ref_model_sync_steps": 1},
    },
}


@pytest.mark.parametrize(
    "kind",
    [kind if kind == "full" else pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS],
)
def test_two_ranks_that_share_the_model_are_as_one(on, kind):
    settings = RUN | KINDS[kind]
    first, second = on(**settings)
    (single,) = on("one", world=1, **settings)

    assert first["share"] < 0.6
    assert second["share"] < 0.6
    split.require_as_one(first, second, single, has_penalty="beta" in settings)


@pytest.mark.parametrize("chunk_tokens", [pytest.param(256, marks=pytest.mark.slow), 5])
def test_unequal_data_and_unequal_numbers_of_chunks_give_the_gradient_of_one_process(
    children, tmp_path, chunk_tokens
):
    def of(world):
        ended = on_ranks(
            children, tmp_path, split.gradient, str(tmp_path), UNEQUAL, chunk_tokens, world=world
        )
        return results(ended)

    first, second = of(2)
    (single,) = of(1)
    assert first["chunks"] != second["chunks"] or chunk_tokens == 256
    for rank_result in (first, second):
        np.testing.assert_allclose(
            rank_result["gradient"], single["gradient"], rtol=1e-4, atol=1e-6 * single["norm"]
        )
        assert rank_result["loss"] == pytest.approx(single["loss"], rel=1e-5)


@pytest.mark.slow
def test_a_model_that_only_rank_0_reads_from_its_files_is_the_same_on_both(on, tmp_path):
    small_policy(seed=3).save_pretrained(tmp_path / "model")
    first, second = on(model=str(tmp_path / "model"), **RUN)
    (single,) = on("one", world=1, model=str(tmp_path / "model"), **RUN)
    assert first["weights"] == second["weights"]
    np.testing.assert_allclose(first["values"], single["values"], rtol=1e-3, atol=2e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("use_lora", "route"), [(True, "/v1/load_lora_adapter"), (False, "/collective_rpc")]
)
def test_a_server_gets_whole_weights_after_every_step(on, tmp_path, use_lora, route):
    model = small_model()
    model.save_pretrained(tmp_path / "model")
    settings = {
        "use_lora": use_lora,
        "max_off_policy_steps": 0,
        "max_steps": 3,
        "learning_rate": 1e-2,
    }
    with FakeVLLM(model, build_tiny_tokenizer()) as server:
        first, _ = on(
            model=str(tmp_path / "model"), inference=server.url, zero_variance="keep", **settings
        )
    assert first["share"] < 0.6
    assert max(first["apart"]) < 1e-4
    assert first["canaries"] == list(range(len(first["losses"])))
    # at the beginning and after each of three steps
    assert [path for path, _ in server.calls].count(route) >= 4


def test_without_the_renewal_of_rank_0s_copy_the_sampler_falls_behind(on):
    first, _ = on(spoil="copy never renewed", learning_rate=1e-2, **RUN)
    assert max(first["apart"]) > 1e-4


@pytest.mark.slow
def test_clipped_by_the_norm_of_its_own_part_each_rank_would_take_another_step(on):
    first, _ = on(spoil="norm of the own part", **RUN)
    (single,) = on("one", world=1, **RUN)
    assert first["norms"][0] < 0.99 * single["norms"][0]
    assert not np.allclose(first["values"], single["values"], rtol=1e-3, atol=2e-6)


@pytest.mark.slow
def test_what_is_saved_is_the_whole_policy(on, tmp_path):
    first, _ = on(**RUN, learning_rate=1e-2)
    saved = load_file(tmp_path / "run/saved/model.safetensors")
    tied = {"lm_head.weight"}
    assert split.digest({name: saved[name] for name in saved.keys() - tied}) == first["weights"]


def test_modules_that_share_a_weight_share_one_on_another_device_though_an_adapter_is_on_one_of_them():
    def adapted():
        return get_peft_model(
            small_policy(), LoraConfig(r=2, target_modules=["lm_head"])
        ).base_model.model

    model = adapted()
    with fsdp.preserved_ties(model):
        model.to("meta").tie_weights()
    assert model.lm_head.base_layer.weight is model.model.embed_tokens.weight
    assert model.lm_head.base_layer.weight.is_meta
    assert "tie_weights" not in vars(model)

    # what transformers does, which accelerate calls
    with pytest.raises(KeyError, match="already exists"):
        adapted().to("meta").tie_weights()


def test_the_parts_of_an_adapter_are_found_in_layers_that_are_wrapped():
    model = get_peft_model(small_policy(), LoraConfig(r=2, target_modules=["q_proj"]))
    names = set(get_peft_model_state_dict(model, save_embedding_layers=False))
    layers = model.base_model.model.model.layers
    layers[0] = checkpoint_wrapper(layers[0])
    adapter_state = get_peft_model_state_dict(
        model, state_dict=fsdp.local_parameters(model), save_embedding_layers=False
    )
    assert {fsdp.plain(name) for name in adapter_state} == names
    assert len(names) == 2
    # by names that its modules do not have
    assert not get_peft_model_state_dict(model, save_embedding_layers=False)


# --- checkpoints ----------------------------------------------------------------------------------

SAVING = {
    "deterministic": True,
    "max_steps": 4,
    "save_strategy": "steps",
    "save_steps": 2,
    "max_off_policy_steps": 1,
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", ["full", "lora", "lora on the head", "full, reference that follows"]
)
@pytest.mark.parametrize(
    "failpoint", ["checkpoint.before_rename:2", "1/checkpoint.before_sending:2"]
)
def test_killed_while_it_saves_a_split_run_ends_with_the_same_weights(on, kind, failpoint):
    if kind != "full" and failpoint.startswith("1/"):
        pytest.skip("one kind is enough for rank 1")
    settings = SAVING | KINDS[kind]
    uninterrupted, _ = on("whole", **settings)
    ended = on("killed", failpoint=failpoint, **settings)
    assert -9 in [e.exit_code for e in ended]
    again, second_rank = on("killed", resume=True, **settings)
    assert again["weights"] == second_rank["weights"] == uninterrupted["weights"]
    assert again["losses"] == uninterrupted["losses"]


def test_a_checkpoint_is_plain_files_that_do_not_show_how_the_run_was_split(on, tmp_path):
    on(**SAVING)
    on("one", world=1, **SAVING)
    here, there = (tmp_path / name / "checkpoint-4" for name in ("run", "one"))
    assert {path.suffix for path in here.iterdir()} <= {".json", ".jsonl", ".safetensors", ".jinja"}
    assert {p.name for p in here.iterdir()} - {p.name for p in there.iterdir()} == {
        "rng_1.safetensors"
    }
    assert json.loads((here / "optimizer.json").read_text()) == json.loads(
        (there / "optimizer.json").read_text()
    )
    for name in ("model.safetensors", "optimizer.safetensors"):
        ours, theirs = load_file(here / name), load_file(there / name)
        assert {k: v.shape for k, v in ours.items()} == {k: v.shape for k, v in theirs.items()}


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2)])
@pytest.mark.parametrize("kind", ["full", "lora on the head"])
def test_another_number_of_ranks_goes_on_from_it(on, kind, before, after):
    settings = SAVING | KINDS[kind]
    (single,) = on("one", world=1, **settings)
    on("moved", world=before, **settings | {"max_steps": 2})
    moved = on("moved", world=after, resume=True, **settings)[0]
    np.testing.assert_allclose(moved["losses"], single["losses"], rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(moved["values"], single["values"], rtol=1e-3, atol=2e-6)


# --- what is not supported ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "version", "said"),
    [
        (DistributedType.FSDP, 1, "set fsdp_version: 2"),
        (
            DistributedType.MEGATRON_LM,
            2,
            "splits the model by MEGATRON_LM, which is not supported: use FSDP2",
        ),
    ],
)
def test_other_ways_of_splitting_are_refused_with_what_to_do(kind, version, said):
    with pytest.raises(ConfigError, match=said):
        fsdp.require_supported(kind, version)
    for supported in (DistributedType.FSDP, DistributedType.DEEPSPEED, DistributedType.MULTI_GPU):
        fsdp.require_supported(supported, 2)


def test_an_optimizer_cannot_be_given_for_parameters_that_will_be_replaced(monkeypatch, tmp_path):
    fsdp.require_launchable((object(), None))
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    fsdp.require_launchable((None, None))
    with pytest.raises(ConfigError, match="optimizers= is not supported under FSDP"):
        small_trainer(tmp_path, optimizers=(torch.optim.SGD([torch.zeros(1)]), None))


def test_on_a_cpu_too_where_accelerate_would_split_nothing_and_say_nothing(monkeypatch):
    fsdp.require_launchable((None, None))
    monkeypatch.setenv("ACCELERATE_USE_MEGATRON_LM", "true")
    with pytest.raises(ConfigError, match="which is not supported: use FSDP2"):
        fsdp.require_launchable((None, None))


def test_the_launchers_files_are_of_the_kinds_that_they_say():
    assert (
        load_config_from_file(str(split.ROOT / "configs/fsdp2.yaml")).distributed_type
        == DistributedType.FSDP
    )
    assert (
        load_config_from_file(str(split.ROOT / "configs/zero3.yaml")).distributed_type
        == DistributedType.DEEPSPEED
    )


# --- precision ------------------------------------------------------------------------------------


def test_gradients_are_summed_and_log_probabilities_returned_in_full_precision(monkeypatch):
    """accelerate's own policy would round both to the precision that layers compute in."""
    monkeypatch.setattr(os, "environ", dict(os.environ))
    split.as_launched()
    plugin = fsdp.FullyShardedDataParallelPlugin()
    state = SimpleNamespace(
        distributed_type=DistributedType.FSDP, fsdp_plugin=plugin, mixed_precision="bf16"
    )
    plugin.set_mixed_precision("bf16")
    assert (
        plugin.mixed_precision_policy.reduce_dtype
        == plugin.mixed_precision_policy.output_dtype
        == torch.bfloat16
    )
    assert fsdp.adopt(SimpleNamespace(state=state))
    policy = plugin.mixed_precision_policy
    assert (policy.param_dtype, policy.reduce_dtype, policy.output_dtype) == (
        torch.bfloat16,
        torch.float32,
        None,
    )
    assert not policy.cast_forward_inputs
