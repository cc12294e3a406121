"""The supervised warm-up teaches the form of an answer from training rows and stops
at its target."""

import pytest
import torch

import verifiers as vf
from support.training import small_policy
from verifiers.errors import ConfigError
from verifiers.parsers import XMLParser
from verifiers_trainer.pipeline.offline import read_groups
from verifiers_trainer.pipeline.warmup import answer_columns, warm_up
from verifiers_trainer.policy.builtin_models import build_tiny_tokenizer
from verifiers_trainer.settings.config import RLConfig


def env_of(rows, parser=None):
    parser = parser or XMLParser(["answer"])
    return vf.SingleTurnEnv(
        dataset=rows, parser=parser, rubric=vf.Rubric(funcs=[lambda **_: 0.0], parser=parser)
    )


ROWS = [{"question": letter, "answer": letter} for letter in "abcdef"]


def test_only_the_answer_and_its_end_are_learned():
    tokenizer = build_tiny_tokenizer()
    columns = answer_columns(env_of(ROWS))
    group, *_ = read_groups(columns, tokenizer, RLConfig(output_dir="x", loss="sft"))
    (turn,) = group.rollouts[0].turns
    assert tokenizer.decode(turn.completion_ids) == "<answer>a</answer><|im_end|>"
    assert tokenizer.decode(turn.prompt_ids).endswith("a<|im_end|>\n<|im_start|>assistant\n")


def test_the_loss_falls_and_the_target_ends_it():
    losses, probes = [], iter([0.1, 0.5, 0.9])
    steps = warm_up(
        small_policy(),
        build_tiny_tokenizer(),
        env_of(ROWS),
        reward=lambda: next(probes),
        target=0.8,
        max_steps=200,
        probe_every=5,
        rows_per_step=4,
        learning_rate=1e-2,
        on_step=lambda step, loss, reached: losses.append((step, loss, reached)),
    )
    assert steps == len(losses) == 15
    assert [reached for _, _, reached in losses if reached is not None] == [0.1, 0.5, 0.9]
    assert losses[-1][1] < 0.5 * losses[0][1]


@pytest.mark.parametrize("parser", [None, vf.Parser()], ids=["tags", "no tags"])
def test_a_function_of_the_row_says_what_is_right(parser):
    """With as without an ``XMLParser``: what is learned is what the function gives, not the row's
    answer."""
    model, tokenizer, asked = small_policy(), build_tiny_tokenizer(), []

    def answers(row):
        asked.append(row["answer"])
        return f"{row['answer'] * 2}!"

    def loss_of(text):
        """Of the stock model, on the answer's tokens and the end token."""
        prompt = tokenizer.apply_chat_template(
            [{"role": "user", "content": "c"}],
            add_generation_prompt=True,
            tokenize=True,
            return_dict=False,
        )
        answer = [*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
        with torch.no_grad():
            ids = torch.tensor([[*prompt, *answer]], device=model.device)
            logits = model(input_ids=ids).logits[0, len(prompt) - 1 : -1]
        return float(torch.nn.functional.cross_entropy(logits, ids[0, len(prompt) :]))

    options = {
        "reward": float,
        "target": 1.0,
        "max_steps": 60,
        "rows_per_step": 6,
        "learning_rate": 1e-2,
    }
    warm_up(model, tokenizer, env_of(ROWS, parser), answers=answers, **options)
    assert sorted(asked) == list("abcdef")
    assert loss_of("cc!") < 1.0 < 3.0 < loss_of("<answer>c</answer>")


def test_without_reaching_the_target_it_ends_at_the_bound_with_cleared_gradients():
    model = small_policy()
    assert (
        warm_up(
            model, build_tiny_tokenizer(), env_of(ROWS), reward=lambda: 0.0, target=1.0, max_steps=3
        )
        == 3
    )
    assert all(p.grad is None for p in model.parameters())


def test_one_seed_is_one_warm_up():
    def trained(seed):
        model = small_policy()
        warm_up(
            model,
            build_tiny_tokenizer(),
            env_of(ROWS),
            reward=float,
            target=1.0,
            max_steps=3,
            rows_per_step=2,
            seed=seed,
        )
        return torch.cat([p.flatten() for p in model.parameters()])

    assert torch.equal(trained(1), trained(1))
    assert not torch.equal(trained(1), trained(2))


@pytest.mark.parametrize(
    ("largest", "expected"), [(None, 1), (0, 3)], ids=["small model", "large model"]
)
def test_a_small_model_is_computed_by_one_thread_from_the_first_step(
    largest, expected, monkeypatch
):
    """The large model is the negative control: it has the threads of the process, which are what
    they were after it."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if largest is not None:
        monkeypatch.setattr("verifiers_trainer.engines.embedded.threads.SMALL_PARAMETERS", largest)
    before, used, model = torch.get_num_threads(), [], small_policy()
    model.register_forward_pre_hook(lambda *_: used.append(torch.get_num_threads()))
    torch.set_num_threads(3)
    try:
        warm_up(
            model,
            build_tiny_tokenizer(),
            env_of(ROWS),
            reward=float,
            target=1.0,
            max_steps=2,
            rows_per_step=2,
        )
        assert set(used) == {expected}
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


def test_what_it_needs_is_named():
    tokenizer = build_tiny_tokenizer()
    with pytest.raises(ConfigError, match=r"XMLParser, not Parser; or pass answers="):
        warm_up(small_policy(), tokenizer, env_of(ROWS, vf.Parser()), reward=float, target=1.0)
    only_eval = vf.SingleTurnEnv(eval_dataset=ROWS, parser=XMLParser(["answer"]))
    with pytest.raises(ConfigError, match="needs training rows"):
        warm_up(small_policy(), tokenizer, only_eval, reward=float, target=1.0)
