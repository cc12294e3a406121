"""How weights move: the choice, what is exported, and the wire contracts of files, NCCL and shared
memory."""

import copy
import weakref
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from support.embedded import small_model
from support.fake_vllm import FakeVLLM, Workers
from support.tiny_models import tiny_llama
from verifiers.errors import ConfigError, WeightSyncError
from verifiers_trainer.engines.loop_thread import LoopThread
from verifiers_trainer.engines.vllm.control import Server, Serving
from verifiers_trainer.engines.vllm.features import features_of, parse_version
from verifiers_trainer.engines.vllm.probe import check_server
from verifiers_trainer.engines.vllm.weights.choice import Situation, choose, impossible
from verifiers_trainer.engines.vllm.weights.export import apart, exported, unservable_adapter
from verifiers_trainer.engines.vllm.weights.ipc import IpcSync, chunks
from verifiers_trainer.engines.vllm.weights.lora_dir import LoraDirSync
from verifiers_trainer.engines.vllm.weights.nccl import NcclSync, packed_chunks
from verifiers_trainer.engines.vllm.weights.opening import open_sync, require_whole
from verifiers_trainer.engines.vllm.weights.protocol import Deadline, label_of, run_and_version
from verifiers_trainer.policy.builtin_models import build_tiny_tokenizer
from verifiers_trainer.settings.config import RLConfig

# --- the choice -----------------------------------------------------------------------------------


def situation(version="0.33.0", **facts):
    defaults = {
        "has_adapter": False,
        "adapter_refused": None,
        "is_quantized": False,
        "on_cuda": True,
        "same_device": False,
        **facts,
    }
    return Situation(features=features_of(parse_version(version)), version=version, **defaults)


@pytest.mark.parametrize(
    ("facts", "method"),
    [
        ({"has_adapter": True}, "lora_dir"),
        ({"has_adapter": True, "version": "0.12.0"}, "lora_dir"),
        ({"has_adapter": True, "is_quantized": True}, "lora_dir"),
        ({"has_adapter": True, "adapter_refused": "it is a DoRA adapter"}, "nccl"),
        ({}, "nccl"),
        ({"same_device": True}, "ipc"),
        ({"version": "0.29.0"}, "reload"),
        ({"version": "0.29.0", "same_device": True}, "ipc"),
        ({"on_cuda": False}, "reload"),
    ],
)
def test_the_method_follows_from_the_situation(facts, method):
    choice = choose("auto", situation(**facts))
    assert choice.method == method
    assert choice.reason


@pytest.mark.parametrize(
    ("wanted", "facts", "said"),
    [
        ("nccl", {"same_device": True}, "same device.*use 'ipc'"),
        ("nccl", {"version": "0.29.0"}, "vLLM 0.29.0, and it needs 0.30"),
        ("nccl", {"on_cuda": False}, "not on a CUDA device"),
        ("ipc", {}, "not known to be on the same device"),
        (
            "reload",
            {"version": "0.20.0", "has_adapter": True},
            "it needs 0.27 or newer; use 'lora_dir'",
        ),
        ("lora_dir", {}, "no adapter is trained"),
        (
            "nccl",
            {"has_adapter": True, "is_quantized": True},
            "in four bits, so that the adapter alone can be sent; use 'lora_dir'",
        ),
        (
            "auto",
            {"has_adapter": True, "is_quantized": True, "adapter_refused": "it is a DoRA adapter"},
            "the server cannot load it: it is a DoRA adapter",
        ),
        (
            "lora_dir",
            {"has_adapter": True, "adapter_refused": "it trains biases"},
            "it trains biases",
        ),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_sent_and_names_what_can(
    wanted, facts, said
):
    with pytest.raises(ConfigError, match=said):
        choose(wanted, situation(**facts))


def test_a_server_that_can_take_no_weights_is_refused():
    with pytest.raises(ConfigError, match=r"vLLM 0\.20\.0.*it needs 0\.27 or newer"):
        choose("auto", situation(version="0.20.0"))
    assert impossible("lora_dir", situation(version="0.20.0", has_adapter=True)) is None


def test_labels_of_runs_and_versions_are_told_apart():
    assert run_and_version(label_of(2**40 - 1, 12)) == (2**40 - 1, 12)
    assert label_of(1, 5) != label_of(2, 5)


# --- what is exported -----------------------------------------------------------------------------


def adapted(model, **options):
    torch.manual_seed(1)
    config = LoraConfig(
        r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "down_proj"], **options
    )
    made = get_peft_model(model, config)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.3)
    return made


@pytest.mark.parametrize(
    "options", [{}, {"use_dora": True}, {"modules_to_save": ["lm_head"]}, {"use_rslora": True}]
)
def test_an_adapter_is_exported_merged_under_the_names_of_a_checkpoint_and_nothing_is_changed(
    options,
):
    model = adapted(tiny_llama(), **options)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    tensors = exported(model)
    plain = tiny_llama()
    missing, unexpected = plain.load_state_dict(tensors, strict=False)
    assert (missing, unexpected) == ([], [])
    ids = torch.arange(1, 20).unsqueeze(0)
    torch.testing.assert_close(plain(ids).logits, model.eval()(ids).logits, atol=1e-4, rtol=1e-4)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def test_a_tied_head_has_its_own_name_and_in_files_its_own_memory():
    model = small_model()
    assert model.config.tie_word_embeddings
    tensors = exported(model)
    assert torch.equal(tensors["lm_head.weight"], tensors["model.embed_tokens.weight"])
    assert len({tensor.data_ptr() for tensor in apart(tensors).values()}) == len(tensors)


def test_without_its_name_a_server_keeps_the_old_head(control):
    """Negative control, on a server that behaves as the real one was seen to."""
    base, workers = small_model(), Workers()
    with FakeVLLM(base, build_tiny_tokenizer(), workers=workers) as fake:
        model = moved(base)
        nameless = {
            name: tensor for name, tensor in exported(model).items() if name != "lm_head.weight"
        }
        for weights, is_same in ((nameless, False), (exported(model), True)):
            sync = NcclSync(9, "base-model", lambda weights=weights: weights, FEATURES, workers)
            sync.push(control(fake), 1, Deadline.after(20))
            assert same(fake, model) == is_same


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"use_dora": True}, "DoRA"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"bias": "all"}, "biases"),
    ],
)
def test_adapters_that_no_server_takes_are_known(options, said):
    assert said in unservable_adapter(adapted(tiny_llama(), **options))
    assert unservable_adapter(adapted(tiny_llama())) is None
    assert unservable_adapter(tiny_llama()) is None


@pytest.fixture
def one_of_two_ranks():
    """This process as rank 0 of two, whose exchanges do nothing: what it holds is what a real rank
    0 holds."""
    from torch.distributed import destroy_process_group, init_process_group
    from torch.testing._internal.distributed.fake_pg import FakeStore

    init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield init_device_mesh("cpu", (2,))
    destroy_process_group()


def test_half_of_a_model_that_two_processes_hold_is_never_sent(one_of_two_ranks, tmp_path):
    model = small_model()
    total = sum(parameter.numel() for parameter in model.parameters())
    servers = [SimpleNamespace(url="http://127.0.0.1:9", serving=Serving(-1, "base-model"))]
    config = RLConfig(output_dir=str(tmp_path), weight_sync="reload", use_lora=False)
    sync = open_sync(model, config, servers, 1, features_of(parse_version("0.33.0")), "0.33.0")
    require_whole(model)
    sync.prepare(1)

    fully_shard(model, mesh=one_of_two_ranks)
    with pytest.raises(ConfigError, match="sharded over processes by FSDP2"):
        sync.prepare(2)
    with pytest.raises(ConfigError, match="sharded over processes by FSDP2"):
        open_sync(model, config, servers, 1, features_of(parse_version("0.33.0")), "0.33.0")
    assert [path.name for path in sync.folder.iterdir() if not path.name.startswith(".tmp")] == [
        "weights-v1"
    ]
    # negative control
    held = [p.to_local() if isinstance(p, DTensor) else p for p in model.parameters()]
    assert sum(tensor.numel() for tensor in held) < 0.6 * total


def test_a_model_of_zero_3_is_refused():
    model = small_model()
    next(model.parameters()).ds_id = 0  # as ZeRO-3 marks them
    with pytest.raises(ConfigError, match="ZeRO-3"):
        require_whole(model)


# --- packed chunks --------------------------------------------------------------------------------


@given(st.lists(st.integers(1, 40), min_size=1, max_size=12), st.integers(1, 200))
@settings(max_examples=60, deadline=None)
def test_packed_chunks_hold_all_bytes_in_order_and_close_with_the_tensor_that_exceeds(sizes, limit):
    tensors = {f"t{n}": torch.arange(size, dtype=torch.float32) + n for n, size in enumerate(sizes)}
    made = list(packed_chunks(tensors, limit))
    assert torch.cat(made).numpy().tobytes() == b"".join(
        t.numpy().tobytes() for t in tensors.values()
    )
    assert all(len(chunk) > limit for chunk in made[:-1])
    last = 0
    for chunk in made:  # without its last tensor no chunk exceeds
        held, count = 0, last
        while held < len(chunk):
            held += 4 * sizes[count]
            count += 1
        assert held - 4 * sizes[count - 1] <= limit
        last = count


@given(st.lists(st.integers(1, 40), min_size=1, max_size=12), st.integers(1, 200))
@settings(max_examples=60, deadline=None)
def test_parts_for_shared_memory_close_before_the_tensor_that_would_exceed(sizes, limit):
    tensors = {f"t{n}": torch.zeros(size) for n, size in enumerate(sizes)}
    made = list(chunks(tensors, limit))
    assert [name for part in made for name in part] == list(tensors)
    assert all(
        len(part) == 1 or sum(4 * t.numel() for t in part.values()) <= limit for part in made
    )


# --- against a server -----------------------------------------------------------------------------


class Control:
    """Makes servers, and closes them."""

    def __init__(self):
        self.thread, self.made = LoopThread("test-control"), []
        self.thread.start()

    def __call__(self, fake):
        self.made.append(Server(fake.url, "EMPTY", self.thread))
        return self.made[-1]


@pytest.fixture
def control():
    made = Control()
    yield made
    for server in made.made:
        server.close()
    made.thread.stop()


def moved(model):
    """A copy with other weights."""
    copied = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in copied.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return copied


def same(server, model):
    loaded = server.model.state_dict()
    return all(torch.equal(loaded[name], tensor) for name, tensor in exported(model).items())


FEATURES = features_of(parse_version("0.33.0"))


def test_nccl_order_of_calls_bytes_and_version(control):
    base, workers = small_model(), Workers()
    with FakeVLLM(base, build_tiny_tokenizer(), workers=workers) as fake:
        server, model = control(fake), moved(base)
        sync = NcclSync(
            9, "base-model", lambda: exported(model), FEATURES, workers, buffer_bytes=20_000
        )
        assert sync.push(server, 1, Deadline.after(20)) == "base-model"
        assert fake.paths() == [
            "/get_world_size",
            "/init_weight_transfer_engine",
            "/pause",
            "/start_weight_update",
            "/update_weights",
            "/finish_weight_update",
            "/reset_prefix_cache",
            "/is_paused",
            "/resume",
        ]
        assert same(fake, model)
        assert fake.label == str(label_of(9, 1))
        model = moved(base)
        fake.calls.clear()
        sync.push(server, 2, Deadline.after(20))
        assert "/init_weight_transfer_engine" not in fake.paths()  # the group is still there
        assert same(fake, model)


def test_nccl_joins_anew_after_a_restart(control):
    base, workers = small_model(), Workers()
    with FakeVLLM(base, build_tiny_tokenizer(), workers=workers) as fake:
        server, model = control(fake), moved(base)
        sync = NcclSync(9, "base-model", lambda: exported(model), FEATURES, workers)
        sync.push(server, 1, Deadline.after(20))
        fake.restart()
        assert not sync.holds(server, Deadline.after(5))
        sync.push(server, 2, Deadline.after(20))
        assert workers.counts["joined"] == 2
        assert same(fake, model)


def test_workers_that_never_come_end_the_push_within_its_bound(control):
    base, workers = small_model(), Workers()
    workers.absent = True
    with FakeVLLM(base, build_tiny_tokenizer(), workers=workers) as fake:
        sync = NcclSync(9, "base-model", lambda: exported(base), FEATURES, workers)
        with pytest.raises(
            WeightSyncError, match="joining the group of the server's workers"
        ) as caught:
            sync.push(control(fake), 1, Deadline.after(1.0))
        assert caught.value.elapsed_s < 5


def test_shared_memory_is_handed_over_in_parts(control):
    base = small_model()
    alive, copies, freed = [], [], []

    def handle(tensor):
        alive.append(tensor.data_ptr())
        copies.append(weakref.ref(tensor))
        return tensor.cpu().numpy().tobytes()

    with FakeVLLM(base, build_tiny_tokenizer()) as fake:
        server, model = control(fake), moved(base)
        fake.on_call = lambda path, body: freed.append((path, [c() for c in copies].count(None)))
        sync = IpcSync(
            9, "base-model", lambda: exported(model), FEATURES, handle, chunk_bytes=20_000
        )
        sync.push(server, 1, Deadline.after(20))
        assert fake.paths().count("/update_weights") > 1
        assert fake.paths()[0] == "/init_weight_transfer_engine"
        assert same(fake, model)
        names = [
            name
            for path, body in fake.calls
            if path == "/update_weights"
            for name in body["update_info"]["names"]
        ]
        assert names == list(exported(model))
        assert ("/finish_weight_update", 0) in freed, "a worker may still read the first part"
        assert all(copy() is None for copy in copies)
        # copies
        assert not {pointer for pointer in alive} & {t.data_ptr() for t in exported(model).values()}


# --- the first completions ------------------------------------------------------------------------


def asked(fake, control, in_chat=True):
    """What a check of the server's completions says."""
    return check_server(control(fake), "base-model", build_tiny_tokenizer(), in_chat)


@pytest.mark.parametrize("in_chat", [True, False])
@pytest.mark.parametrize("step", [0.0, 0.125])
def test_rounding_is_no_reason_to_refuse_a_server_nor_to_accept_raw_log_probabilities(
    control, in_chat, step
):
    """Logits of a model in half precision are multiples of a step, and not the same in each call."""
    with FakeVLLM(small_model(), build_tiny_tokenizer()) as fake:
        fake.logit_step = step
        for _ in range(5):
            assert asked(fake, control, in_chat) is None
        fake.raw_logprobs = True
        for _ in range(5):
            with pytest.raises(ConfigError, match=r"raw log-probabilities.* nats apart"):
                asked(fake, control, in_chat)


@pytest.mark.parametrize("drops", [True, False])
def test_a_server_whose_gateway_drops_the_system_prompt_is_refused(control, drops):
    class Drops(FakeVLLM):
        async def _v1_chat_completions(self, body, request):
            remaining = [m for m in body["messages"] if m["role"] != "system" or not drops]
            return await super()._v1_chat_completions({**body, "messages": remaining}, request)

    with Drops(small_model(), build_tiny_tokenizer()) as fake:
        if drops:
            with pytest.raises(ConfigError, match=r"messages \(system, user\) as other tokens"):
                asked(fake, control)
        else:
            assert asked(fake, control) is None


def test_what_rounding_hides_is_said(control):
    flat = small_model()
    with torch.no_grad():
        flat.get_output_embeddings().weight.mul_(1e-4)
    with FakeVLLM(flat, build_tiny_tokenizer()) as fake:
        for fake.raw_logprobs in (True, False):
            assert "may be raw" in asked(fake, control)


# --- adapters -------------------------------------------------------------------------------------


def test_adapter_names_are_never_used_twice_and_old_ones_are_unloaded_with_their_files(
    control, tmp_path
):
    base = small_model()
    model = get_peft_model(copy.deepcopy(base), LoraConfig(r=4, target_modules=["q_proj"]))
    with FakeVLLM(base, build_tiny_tokenizer()) as fake:
        server = control(fake)
        sync = LoraDirSync(tmp_path, 9, model.save_pretrained, keep=1)
        names = []
        for version in (0, 1, 1, 2, 3):
            sync.prepare(version)
            names.append(sync.push(server, version, Deadline.after(20)))
            sync.retire([server], version)
        assert len(set(names)) == 5
        assert names == [
            "policy-9-v0",
            "policy-9-v1",
            "policy-9-v1.1",
            "policy-9-v2",
            "policy-9-v3",
        ]
        assert fake.unloaded == names[:3]
        assert sorted(path.name for path in tmp_path.iterdir()) == names[3:]
        sync.close([server])
        assert fake.adapters == {}
        assert list(tmp_path.iterdir()) == []


def test_what_a_server_lacks_for_adapters_is_said(control, tmp_path):
    base = small_model()
    model = get_peft_model(copy.deepcopy(base), LoraConfig(r=32, target_modules=["q_proj"]))
    sync = LoraDirSync(tmp_path, 9, model.save_pretrained, keep=1)
    sync.prepare(0)
    for options, said in (
        ({"lora": False}, "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"),
        ({}, "--max-lora-rank"),
    ):
        with FakeVLLM(base, build_tiny_tokenizer(), **options) as fake:
            with pytest.raises(WeightSyncError, match=said):
                sync.push(control(fake), 0, Deadline.after(20))
