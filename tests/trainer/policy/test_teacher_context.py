"""Teachers that read another prompt: what they read of a row, against separate passes, and trainings
with the policy as its own teacher."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model

import verifiers as vf
from support.contexts import demonstration, more, nothing
from support.tiny_models import VOCABULARY, tiny_llama
from support.token_trees import tree_samples
from support.training import rows, run, small_config, small_policy, small_trainer, toy_env
from verifiers.errors import ConfigError, RunMismatch
from verifiers_trainer.algorithm.aggregation import step_weights
from verifiers_trainer.algorithm.old_logprobs import annotate
from verifiers_trainer.algorithm.packing import forward_arguments, pack
from verifiers_trainer.algorithm.teacher_view import teacher_views
from verifiers_trainer.distributed.batch_sharing import from_bytes, to_bytes
from verifiers_trainer.policy.builtin_models import build_tiny_tokenizer
from verifiers_trainer.policy.logprobs import install_logprob_forward, states_of
from verifiers_trainer.policy.reference import Reference
from verifiers_trainer.policy.teacher import SelfTeacher
from verifiers_trainer.settings.config import RLConfig

# --- what is read: arrays --------------------------------------------------------------------------


def with_prompts(samples, seed, num_teachers=1, share=0.7):
    """Most of the samples with a prompt of another length, some of one prompt, each with a teacher."""
    rng = np.random.default_rng(seed)
    common = rng.integers(4, VOCABULARY, 9, np.int32)
    given = []
    for sample in samples:
        new = rng.integers(4, VOCABULARY, rng.integers(1, 12), np.int32)
        prompt = [None, common, new][rng.choice(3, p=[1 - share, share / 2, share / 2])]
        teacher = int(rng.integers(num_teachers))
        given.append(replace(sample, teacher=teacher, teacher_prompt=prompt))
    return given


def read_alone(sample):
    """(ids that the teacher reads, how far its tokens are moved): the definition, sample by sample."""
    if sample.teacher_prompt is None:
        return sample.token_ids, 0
    ids = np.concatenate([sample.teacher_prompt, sample.token_ids[sample.num_prompt :]])
    return ids, len(ids) - sample.num_tokens


def log_distributions(model, ids):
    """[T, V] of the stock model: entry t of token t."""
    with torch.no_grad():
        logits = model(input_ids=torch.tensor(ids[None].astype(np.int64))).logits[0]
    return torch.cat([torch.zeros_like(logits[:1]), logits[:-1]]).log_softmax(-1)


def packed(samples, **layout):
    weights = step_weights(samples, "token_mean").weights
    return pack(samples, weights, max_tokens=layout.pop("max_tokens", 60), **layout)[0]


LAYOUTS = [
    {"packing": False},
    {},
    {"share_prompts": True},
    {"share_prompts": True, "max_tokens": 400},
]


@pytest.mark.parametrize("num_teachers", [1, 3])
@pytest.mark.parametrize("layout", LAYOUTS, ids=["alone", "packed", "tree", "one row"])
def test_every_divergence_is_that_of_separate_passes(layout, num_teachers):
    """Values and the policy's gradient, of several turns, of shared and own prompts, of several
    teachers in a row."""
    samples = [s for n in range(3) for s in tree_samples(2, seed=n, group=n)]
    samples = with_prompts(samples, seed=1, num_teachers=num_teachers)
    policy, teachers = tiny_llama(), [tiny_llama(seed=5 + n) for n in range(num_teachers)]
    expected, sampled = {}, {}
    for number, sample in enumerate(samples):
        ids, moved = read_alone(sample)
        at = np.flatnonzero(sample.loss_mask)
        log_t = log_distributions(teachers[sample.teacher], ids)[at + moved]
        log_pi = log_distributions(policy, sample.token_ids)[at]
        expected[number] = (log_pi.exp() * (log_pi - log_t)).sum(-1)
        sampled[number] = log_t.gather(1, torch.from_numpy(sample.token_ids[at]).long()[:, None])[
            :, 0
        ]
    for model in (policy, *teachers):
        install_logprob_forward(model)
    num_seen, num_moved = 0, 0
    batch = packed(samples, **layout)
    annotate(batch, "cpu", references=teachers)
    for row in from_bytes(to_bytes(batch)):  # as other processes get it
        tensors = row.to_tensors()
        states = [states_of(teachers[v.teacher], v, "cpu") for v in teacher_views(row)]
        out = policy(**forward_arguments(tensors, row), teachers=states)
        for number, index in enumerate(row.sample_indices.tolist()):
            its = (tensors["seq_ids"] == number) & tensors["loss_mask"]
            torch.testing.assert_close(
                out.reverse_kl[its].detach(), expected[index], rtol=1e-4, atol=1e-5
            )
            scores = torch.from_numpy(row.reference_logprobs)[its]
            torch.testing.assert_close(scores, sampled[index], rtol=1e-4, atol=1e-5)
            num_seen += 1
            num_moved += samples[index].teacher_prompt is not None
    assert num_seen == len(samples) > num_moved > 3
    # negative control: after the policy's own prompt the numbers are others
    plain = packed([replace(s, teacher_prompt=None) for s in samples], **layout)
    annotate(plain, "cpu", references=teachers)
    apart = max(
        np.abs(a.reference_logprobs - b.reference_logprobs).max()
        for a, b in zip(batch, plain, strict=True)
    )
    assert apart > 1e-2


def test_the_gradient_is_that_of_samples_alone_and_recomputed_chunks_do_not_change_it():
    samples = with_prompts([*tree_samples(3, seed=2), *tree_samples(2, seed=3, group=1)], 4, 2)
    policy, teachers = tiny_llama(), [tiny_llama(seed=5), tiny_llama(seed=6)]
    for model in (policy, *teachers):
        install_logprob_forward(model)

    def gradient(layout, **options):
        policy.zero_grad()
        for row in packed(samples, **layout):
            tensors = row.to_tensors()
            states = [
                states_of(teachers[v.teacher], v, "cpu", **options) for v in teacher_views(row)
            ]
            out = policy(**forward_arguments(tensors, row), teachers=states, num_chunks=3)
            ((0.3 * out.reverse_kl + 0.7 * out.forward_kl) * tensors["weight"]).sum().backward()
        return torch.cat([p.grad.flatten() for p in policy.parameters() if p.grad is not None])

    alone, shared = (
        gradient({"packing": False}),
        gradient({"share_prompts": True, "max_tokens": 400}),
    )
    torch.testing.assert_close(shared, alone, rtol=1e-4, atol=1e-6)
    # the likeliest tokens and the rest: exact with all but one, another number with two
    nearly = gradient({}, top_k=VOCABULARY - 1)
    torch.testing.assert_close(nearly, alone, rtol=1e-4, atol=1e-6)
    assert (gradient({}, top_k=2) - alone).norm() > 1e-3 * alone.norm()


def test_the_likeliest_tokens_and_their_tail_are_a_distribution():
    """Of the coarser distributions the divergence is smaller, and never negative."""
    samples = with_prompts(tree_samples(2, seed=2), 4)
    policy, teacher = tiny_llama(), tiny_llama(seed=5)
    for model in (policy, teacher):
        install_logprob_forward(model)
    (row,) = packed(samples, max_tokens=400)
    by_k = []
    for top_k in (1, 3, 9, None):
        states = [states_of(teacher, view, "cpu", top_k=top_k) for view in teacher_views(row)]
        out = policy(**forward_arguments(row.to_tensors(), row), teachers=states)
        by_k.append(out.reverse_kl[row.loss_mask].detach())
    assert (by_k[0] > -1e-6).all()
    assert all((fine - coarse > -1e-5).all() for coarse, fine in itertools.pairwise(by_k))
    assert (by_k[3] - by_k[1]).abs().max() > 1e-3


def peft_policy():
    torch.manual_seed(0)
    adapter = LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    return get_peft_model(tiny_llama(), adapter)


@pytest.mark.parametrize("make", [tiny_llama, peft_policy], ids=["whole", "adapter"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=["alone", "packed", "tree", "one row"])
@pytest.mark.parametrize("top_k", [None, 3])
def test_without_a_context_the_policy_teaches_itself_exactly_nothing(make, layout, top_k):
    policy = make()
    install_logprob_forward(policy)
    policy.train()
    teacher = SelfTeacher(policy)

    def norm(samples):
        policy.zero_grad()
        for row in packed(samples, **layout):
            tensors = row.to_tensors()
            states = [teacher.states(view, "cpu", top_k) for view in teacher_views(row)]
            out = policy(**forward_arguments(tensors, row), teachers=states)
            ((out.reverse_kl + out.forward_kl) * tensors["weight"]).sum().backward()
        return sum(float(p.grad.abs().sum()) for p in policy.parameters() if p.grad is not None)

    samples = tree_samples(2, seed=2)
    assert norm(samples) == 0.0
    assert norm(with_prompts(samples, 4, share=1.0)) > 1e-4  # negative control: with one


def test_the_reference_as_a_teacher_is_the_base_or_the_copy():
    """The adapter off, or the weights of then: head and layers, after the policy has changed."""
    samples = with_prompts(tree_samples(2, seed=2), 4)
    (row,) = packed(samples, max_tokens=400)
    (view,) = teacher_views(row)

    def divergence(policy, teacher):
        states = [teacher.states(view, "cpu", None)]
        out = policy(**forward_arguments(row.to_tensors(), row), teachers=states)
        return out.reverse_kl.detach()

    for policy, steps, then in (
        (peft_policy(), None, tiny_llama()),
        (tiny_llama(), 1, tiny_llama()),
    ):
        for model in (policy, then):
            install_logprob_forward(model)
        reference = Reference(policy, sync_steps=steps)
        with torch.no_grad():
            for parameter in policy.parameters():
                if parameter.requires_grad:
                    parameter += 0.02
        torch.testing.assert_close(
            divergence(policy, reference), divergence(policy, SelfTeacher(then))
        )
        own = divergence(policy, SelfTeacher(policy))
        assert (own - divergence(policy, reference)).abs().max() > 1e-4


# --- trainings -------------------------------------------------------------------------------------


def taught(path, **settings):
    return small_trainer(
        path, **{"loss": "gkd", "teacher": "self", "learning_rate": 1e-2} | settings
    )


@pytest.mark.parametrize("loss", ["gkd", "distill"])
@pytest.mark.parametrize("settings", [{}, {"use_lora": True}], ids=["whole", "adapter"])
def test_a_training_with_an_empty_context_changes_no_weight(tmp_path, loss, settings):
    trainer = taught(tmp_path / "none", loss=loss, teacher_context=nothing, max_steps=1, **settings)
    before = [p.detach().clone() for p in trainer.model.parameters()]
    log = run(trainer)
    assert log.steps[0]["grad_norm"] == 0.0
    assert log.steps[0]["kl_teacher"] == 0.0
    assert log.steps[0]["teacher/with_context"] == 0.0
    assert all(map(torch.equal, before, trainer.model.parameters()))
    # negative control
    (step,) = run(
        taught(tmp_path / "more", loss=loss, teacher_context=more, max_steps=1, **settings)
    ).steps
    assert step["grad_norm"] > 1e-6
    assert step["teacher/with_context"] == 1.0
    assert step["teacher/context_tokens"] > 2


def test_the_context_stands_before_the_prompt_or_ends_it(tmp_path):
    """What the teacher reads, as text."""
    tokenizer = build_tiny_tokenizer()
    texts = {}
    for context in (demonstration, more):
        trainer = taught(tmp_path / context.__name__, teacher_context=context, max_steps=1)
        run(trainer)
        samples = [s for group in trainer.batch.samples_G for part in group for s in part.samples]
        texts[context] = [
            (tokenizer.decode(s.teacher_prompt), tokenizer.decode(s.token_ids[: s.num_prompt]))
            for s in samples
        ]
        assert all(read != asked for read, asked in texts[context])
    read, asked = texts[demonstration][0]
    assert read.index("xyz") < read.index("123")
    assert read.endswith(asked[asked.index("user") :])
    read, asked = texts[more][1]
    assert "\n\n99<" in read.replace(
        "999", ""
    )  # its own number of nines, at the end of the message


def judged(state, **_):
    state["trajectory"][-1]["extras"]["verdict"] = "9 words"
    return 1.0


def test_a_judges_words_reach_the_teacher(tmp_path):
    """The rubric writes them to the turn, and the context reads them there."""

    def verdict(rollout):
        return str(rollout.turns[-1].extras["verdict"])

    trainer = taught(tmp_path, env=toy_env(reward=judged), teacher_context=verdict, max_steps=1)
    run(trainer)
    ((sample, *_), *_) = (part.samples for part in trainer.batch.samples_G[0])
    assert "\n\n9 words<" in build_tiny_tokenizer().decode(sample.teacher_prompt)


def hint_for_turn(row):
    return "The answers are digits."


class Asks(vf.MultiTurnEnv):
    def env_response(self, messages, state, **_):
        return "and now?"


def test_several_turns_are_read_after_one_context(tmp_path):
    env = Asks(dataset=rows(), rubric=vf.Rubric([lambda **_: 1.0]), max_turns=3)
    trainer = taught(tmp_path, env=env, teacher_context=hint_for_turn, max_steps=1, max_seq_len=128)
    (step,) = run(trainer).steps
    assert step["grad_norm"] > 0
    samples = [s for group in trainer.batch.samples_G for part in group for s in part.samples]
    assert any(len(sample.turns) == 3 for sample in samples)
    for sample in samples:
        assert len(sample.teacher_prompt) > sample.num_prompt


@pytest.mark.parametrize(
    "settings",
    [
        {"max_off_policy_steps": 0},
        {"loss": "distill", "updates_per_batch": 2, "max_steps": 4},
        {"sync_ref_model": True, "ref_model_sync_steps": 1},
    ],
    ids=["gkd", "amid a batch", "synced"],
)
def test_a_resumed_training_is_bit_for_bit_the_one_without_a_break(tmp_path, settings):
    settings = {
        "deterministic": True,
        "save_strategy": "steps",
        "save_steps": 1,
        "teacher_context": more,
        "max_steps": 3,
        **settings,
    }
    whole = taught(tmp_path / "whole", **settings)
    losses = run(whole).losses
    folder = sorted((tmp_path / "whole").glob("checkpoint-*"))[0]
    step = int(folder.name.removeprefix("checkpoint-"))
    first = folder.rename(tmp_path / folder.name)
    parts = taught(tmp_path / "whole", **settings)
    assert 0 < step < len(losses)
    assert run(parts, resume_from_checkpoint=str(first)).losses == losses[step:]
    for parameter, other in zip(whole.model.parameters(), parts.model.parameters(), strict=True):
        assert torch.equal(parameter, other)
    with pytest.raises(RunMismatch, match="teacher_context"):
        run(
            taught(tmp_path / "whole", **settings | {"teacher_context": demonstration}),
            resume_from_checkpoint=str(first),
        )


def test_each_task_has_its_teacher(tmp_path):
    folders = {}
    for number, task in enumerate(("math", "code")):
        model = small_policy(seed=5 + number)
        with torch.no_grad():
            model.model.norm.weight *= 12
        folders[task] = str(tmp_path / task)
        model.save_pretrained(folders[task])
        build_tiny_tokenizer().save_pretrained(folders[task])

    def env(*tasks):
        table = [{**row, "task": tasks[n % len(tasks)]} for n, row in enumerate(rows())]
        return vf.SingleTurnEnv(dataset=table, rubric=vf.Rubric([lambda **_: 1.0]))

    fixed = {"deterministic": True, "max_steps": 1, "shuffle_dataset": False}
    both = taught(tmp_path / "both", env=env("math", "code"), teacher=folders, **fixed)
    run(both)
    seen = {
        sample.teacher
        for group in both.batch.samples_G
        for part in group
        for sample in part.samples
    }
    assert seen == {0, 1}
    # with one teacher for both tasks the gradient is another, and with a table of equals the same
    same = {task: folders["math"] for task in folders}
    norms = [
        run(taught(tmp_path / f"run-{n}", env=env("math", "code"), teacher=teacher, **fixed)).steps[
            0
        ]["grad_norm"]
        for n, teacher in enumerate((folders, folders["math"], same))
    ]
    assert abs(norms[0] - norms[1]) > 1e-3 * norms[1]
    assert norms[2] == pytest.approx(norms[1], rel=1e-4)
    with pytest.raises(ConfigError, match="has the task 'art', and teacher has math, code"):
        run(taught(tmp_path / "art", env=env("math", "art"), teacher=folders, **fixed))


# --- refusals --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"loss": "gkd", "teacher": "self"}, "nothing to teach: set teacher_context"),
        ({"loss": "gkd", "teacher": {}}, "it must be a folder"),
        ({"teacher_context": "answer"}, "there is none: set teacher"),
        ({"loss": "gkd", "teacher": "x", "teacher_context": "anwser"}, "did you mean 'answer'"),
        ({"loss": "distill", "teacher": "x", "teacher_top_k": 4}, "teacher_top_k is of loss='gkd'"),
        ({"loss": "gkd", "teacher": {"a": "x", "b": "http://x/v1"}}, "give the teacher's folder"),
        (
            {
                "loss": "gkd",
                "teacher": "self",
                "teacher_context": "answer",
                "disable_dropout": False,
            },
            "leave disable_dropout out",
        ),
        (
            {
                **{"loss": "gkd", "teacher": "x", "teacher_context": "answer"},
                **{"max_prompt_len": 9, "prompt_overflow": "truncate_left"},
            },
            "set prompt_overflow='skip'",
        ),
        (
            {
                **{"loss": "gkd", "teacher": {"a": "self", "b": "x"}, "teacher_context": "answer"},
                "fsdp": "full_shard",
            },
            "give one teacher for all",
        ),
    ],
)
def test_settings_that_do_not_fit_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        RLConfig(**settings).resolve()


def number(row):
    return 4


def fails(row):
    return row["missing"]


async def asks_a_judge(row):
    return "well"


def long(row):
    return "9" * 5000


@pytest.mark.parametrize(
    ("context", "message"),
    [
        (number, "returned int: return messages, a text, or None"),
        (fails, r"KeyError: 'missing' \(at .*test_teacher_context.py:\d+ in fails\)"),
        (asks_a_judge, "is async, and it is called while a batch is built"),
        (long, "return a shorter context"),
        (lambda answer: "", "requires 'answer', which the trainer does not provide"),
    ],
)
def test_a_context_that_cannot_be_used_is_named(tmp_path, context, message):
    with pytest.raises(ConfigError, match=message):
        run(taught(tmp_path, teacher_context=context, max_steps=1))


def test_a_prompt_that_the_template_renders_otherwise_is_refused(tmp_path):
    trainer = taught(tmp_path, teacher_context=more, max_steps=1)
    reader = trainer.args.teacher_prompts
    rendered = reader._rendered
    reader._rendered = lambda *arguments: rendered(*arguments)[1:]
    with pytest.raises(ConfigError, match="renders to other tokens"):
        run(trainer)


def test_the_contexts_with_a_name():
    from verifiers.rollouts.rollout import Rollout
    from verifiers_trainer.algorithm.contexts import answer, sibling
    from verifiers_trainer.algorithm.group import Group

    assert answer({"answer": "4"}) == "The right answer is: 4"
    assert answer({"answer": ""}) == ""

    def rollout(reward, text):
        return Rollout(reward=reward, completion=[{"role": "assistant", "content": text}])

    group = Group(
        0, 0, (rollout(0.0, "a"), rollout(1.0, "b"), rollout(float("nan"), "c"), rollout(1.0, "d"))
    )
    texts = [sibling(group, each) for each in group.rollouts]
    assert texts[0] == texts[2] == "A good reply to this is: b"
    assert texts[1] == texts[3] == ""  # no better one


def test_the_settings_say_who_teaches(tmp_path):
    config = small_config(
        tmp_path, loss="gkd", teacher="self", teacher_context="answer", teacher_top_k=8
    )
    config.resolve()
    assert "teacher self after answer, top 8 and the rest" in config.objective()
    assert toy_env() is not None
